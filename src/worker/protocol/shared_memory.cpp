#include "worker/protocol/shared_memory.hpp"

#include "foundation/log.hpp"
#include "foundation/memory_file.hpp"
#include "foundation/system_call.hpp"

#include <cerrno>
#include <string>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

namespace troupe::detail {

namespace {

std::string text_of(std::size_t size_bytes) {
  return std::to_string(size_bytes) + " bytes of shared memory";
}

} // namespace

caf::expected<shared_memory> shared_memory::create(std::size_t size_bytes) {
  auto file = make_memory_file(size_bytes);
  if (!file)
    return file.error();
  return map(std::move(*file), size_bytes);
}

caf::expected<shared_memory> shared_memory::attach(file_descriptor from, std::size_t size_bytes) {
  if (auto e = check_memory_file_size(size_bytes))
    return e;
  const int seals = ::fcntl(from.get(), F_GET_SEALS);
  if (seals < 0)
    return make_error(errc::invalid_argument,
                      "the passed descriptor is not shared memory: " + system_text(errno));
  if ((seals & memory_file_seals) != memory_file_seals)
    return make_error(errc::invalid_argument, "the size of the shared memory could change");
  struct stat found{};
  if (::fstat(from.get(), &found) != 0)
    return system_failure("fstat", errno, "cannot read the size of shared memory");
  if (found.st_size != static_cast<off_t>(size_bytes))
    return make_error(errc::invalid_argument,
                      "the shared memory has " + std::to_string(found.st_size) +
                          " bytes instead of " + std::to_string(size_bytes));
  return map(std::move(from), size_bytes);
}

caf::expected<shared_memory> shared_memory::map(file_descriptor from, std::size_t size_bytes) {
  void* place = ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, from.get(), 0);
  if (place == MAP_FAILED)
    return system_failure("mmap", errno, "cannot map " + text_of(size_bytes));
  return shared_memory{std::move(from), {static_cast<std::byte*>(place), size_bytes}};
}

shared_memory::~shared_memory() {
  if (!bytes_.empty() && ::munmap(bytes_.data(), bytes_.size()) != 0)
    log(log_level::error, "shared memory", system_failure("munmap", errno, "cannot unmap it"));
}

} // namespace troupe::detail
