#include "foundation/memory_file.hpp"

#include "foundation/system_call.hpp"

#include <cerrno>
#include <limits>
#include <string>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

namespace troupe::detail {

const int memory_file_seals = F_SEAL_SHRINK | F_SEAL_GROW;

caf::error check_memory_file_size(std::size_t size_bytes) {
  if (size_bytes == 0 || size_bytes > static_cast<std::size_t>(std::numeric_limits<off_t>::max()))
    return make_error(errc::invalid_argument,
                      "cannot create shared memory of " + std::to_string(size_bytes) + " bytes");
  return {};
}

caf::expected<file_descriptor> make_memory_file(std::size_t size_bytes) {
  if (auto e = check_memory_file_size(size_bytes))
    return e;
  const auto what = "no " + std::to_string(size_bytes) + " bytes of shared memory";
  file_descriptor file{::memfd_create("troupe", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
  if (!file)
    return system_failure("memfd_create", errno, what);
  if (::fchmod(file.get(), S_IRUSR | S_IWUSR) != 0)
    return system_failure("fchmod", errno, "cannot restrict the access to shared memory");
  {
    const no_file_size_signal guard;
    if (::ftruncate(file.get(), static_cast<off_t>(size_bytes)) != 0)
      return system_failure("ftruncate", errno, what);
  }
  if (::fcntl(file.get(), F_ADD_SEALS, memory_file_seals | F_SEAL_SEAL) != 0)
    return system_failure("fcntl(F_ADD_SEALS)", errno, "cannot seal the size of shared memory");
  return file;
}

} // namespace troupe::detail
