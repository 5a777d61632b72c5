#include "backend/host/host_slabs.hpp"

#include "foundation/log.hpp"
#include "foundation/memory_file.hpp"
#include "foundation/system_call.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace troupe::detail {

namespace {

caf::error fail(errc code, const memory_slab& what, std::string detail) {
  return make_error({.code = code, .detail = std::move(detail), .device = what.ordinal});
}

/// Writes content that cannot be mistaken for zeros to the start.
void poison(const memory_slab& what) noexcept {
  constexpr auto start = std::size_t{64} << 10; // the rest is not touched
  std::memset(what.address, 0xA5, std::min(start, what.size_bytes));
}

} // namespace

std::size_t host_slabs::granularity() noexcept {
  return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

host_slabs::~host_slabs() {
  for (const auto& [address, x] : mapped_)
    if (::munmap(address, x.size_bytes) != 0)
      log(log_level::error, "slab", system_failure("munmap", errno, "cannot unmap it"));
}

caf::error host_slabs::check(const memory_slab& what) {
  const auto unit = granularity();
  if (what.address != nullptr && what.size_bytes != 0 && what.size_bytes % unit == 0 &&
      reinterpret_cast<std::uintptr_t>(what.address) % unit == 0)
    return {};
  return fail(errc::invalid_argument, what,
              "the address and the size of a slab are multiples of " + std::to_string(unit));
}

caf::expected<file_descriptor> host_slabs::make(const memory_slab& what, std::size_t limit) {
  if (auto err = check(what))
    return err;
  const auto used = std::min(bytes_on(what.ordinal), limit);
  if (what.size_bytes > limit - used)
    return fail(errc::out_of_memory, what,
                std::to_string(what.size_bytes) + " bytes asked for, " +
                    std::to_string(limit - used) + " of " + std::to_string(limit) + " free");
  auto file = make_memory_file(what.size_bytes);
  if (!file)
    return as_out_of_memory(file.error());
  if (auto err = map_file(what, file->get()))
    return err;
  poison(what);
  return std::move(*file);
}

caf::error host_slabs::map(const memory_slab& what, int descriptor) {
  if (auto err = check(what))
    return err;
  struct stat found{};
  if (::fstat(descriptor, &found) != 0)
    return fail(errc::invalid_argument, what, "no file: " + system_text(errno));
  if (found.st_size != static_cast<off_t>(what.size_bytes)) // beyond its end every access faults
    return fail(errc::invalid_argument, what,
                "a file of " + std::to_string(found.st_size) + " bytes is not a slab of " +
                    std::to_string(what.size_bytes));
  return map_file(what, descriptor);
}

caf::error host_slabs::map_file(const memory_slab& what, int descriptor) {
  void* const place = ::mmap(what.address, what.size_bytes, PROT_READ | PROT_WRITE,
                             MAP_SHARED | MAP_FIXED_NOREPLACE, descriptor, 0);
  if (place == MAP_FAILED && errno != EEXIST)
    return as_out_of_memory(system_failure("mmap", errno, "cannot map a slab"));
  if (place != what.address) { // older systems choose another address
    if (place != MAP_FAILED && ::munmap(place, what.size_bytes) != 0)
      return system_failure("munmap", errno, "cannot unmap a slab");
    return fail(errc::unavailable, what, "the address of a slab is in use");
  }
  const std::lock_guard lock{mutex_};
  mapped_.emplace(what.address, what);
  return {};
}

caf::error host_slabs::unmap(const memory_slab& what) {
  {
    const std::lock_guard lock{mutex_};
    const auto found = mapped_.find(what.address);
    if (found == mapped_.end() || found->second.size_bytes != what.size_bytes)
      return fail(errc::invalid_argument, what, "there is no such slab");
    mapped_.erase(found);
  }
  if (::munmap(what.address, what.size_bytes) != 0)
    return system_failure("munmap", errno, "cannot unmap a slab");
  return {};
}

std::size_t host_slabs::bytes_on(int ordinal) const {
  std::size_t result = 0;
  const std::lock_guard lock{mutex_};
  for (const auto& [address, x] : mapped_)
    if (x.ordinal == ordinal)
      result += x.size_bytes;
  return result;
}

} // namespace troupe::detail
