#include "worker/protocol/shared_memory.hpp"

#include "foundation/log.hpp"
#include "foundation/system_call.hpp"

#include <cerrno>
#include <limits>
#include <string>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

namespace troupe::detail {

namespace {

constexpr int size_seals = F_SEAL_SHRINK | F_SEAL_GROW;

std::string text_of(std::size_t size_bytes) {
  return std::to_string(size_bytes) + " bytes of shared memory";
}

caf::error check_size(std::size_t size_bytes) {
  if (size_bytes == 0 || size_bytes > static_cast<std::size_t>(std::numeric_limits<off_t>::max()))
    return make_error(errc::invalid_argument,
                      "cannot create shared memory of " + std::to_string(size_bytes) + " bytes");
  return {};
}

} // namespace

caf::expected<shared_memory> shared_memory::create(std::size_t size_bytes) {
  if (auto e = check_size(size_bytes))
    return e;
  file_descriptor file{::memfd_create("troupe", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
  if (!file)
    return system_failure("memfd_create", errno, "no " + text_of(size_bytes));
  if (::fchmod(file.get(), S_IRUSR | S_IWUSR) != 0)
    return system_failure("fchmod", errno, "cannot restrict the access to shared memory");
  {
    const no_file_size_signal guard;
    if (::ftruncate(file.get(), static_cast<off_t>(size_bytes)) != 0)
      return system_failure("ftruncate", errno, "no " + text_of(size_bytes));
  }
  if (::fcntl(file.get(), F_ADD_SEALS, size_seals | F_SEAL_SEAL) != 0)
    return system_failure("fcntl(F_ADD_SEALS)", errno, "cannot seal the size of shared memory");
  return map(std::move(file), size_bytes);
}

caf::expected<shared_memory> shared_memory::attach(file_descriptor from, std::size_t size_bytes) {
  if (auto e = check_size(size_bytes))
    return e;
  const int seals = ::fcntl(from.get(), F_GET_SEALS);
  if (seals < 0)
    return make_error(errc::invalid_argument,
                      "the passed descriptor is not shared memory: " + system_text(errno));
  if ((seals & size_seals) != size_seals)
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
