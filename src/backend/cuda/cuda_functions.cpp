#include "backend/cuda/cuda_functions.hpp"

#include <mutex>
#include <new>
#include <utility>

namespace troupe::detail {

namespace {

/// Loads a library by its soname or, failing that, from the folder where the build found it.
caf::expected<void*> load_by_soname(const std::string& soname, const std::string& build_folder) {
  const std::string names[] = {soname, build_folder + '/' + soname};
  return load_library(names);
}

/// Returns errc::unavailable for a function that the library does not have.
caf::error missing_function(const std::string& library, const char* name) {
  return make_error(errc::unavailable, library + " has no function " + name);
}

bool has_driver() noexcept {
  return dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL) != nullptr; // stays loaded, like the others
}

/// @thread one at a time
caf::error load_all_of_cudart() {
  const auto soname = "libcudart.so." + std::to_string(CUDART_VERSION / 1000);
  const auto library = load_by_soname(soname, TROUPE_CUDART_DIR);
  if (!library) {
    auto x = failure_of(library.error());
    if (!x || has_driver())
      return library.error();
    x->detail += "; and there is no driver";
    return make_error(std::move(*x));
  }
// A header may rename the function by a macro: the text is taken after macro expansion.
#define TROUPE_TEXT_OF(name) #name
#define TROUPE_TEXT(name) TROUPE_TEXT_OF(name)
#define TROUPE_LOAD(name, ...)                                                                     \
  if (!name.load(*library, TROUPE_TEXT(name)))                                                     \
    return missing_function(soname, TROUPE_TEXT(name));
  TROUPE_CUDART_FUNCTIONS(TROUPE_LOAD)
  TROUPE_OVERLOADED_CUDART_FUNCTIONS(TROUPE_LOAD)
  return {};
}

/// @thread one at a time
caf::error load_all_of_nccl() {
  const std::string soname = "libnccl.so." + std::to_string(NCCL_MAJOR);
  const auto library = load_by_soname(soname, TROUPE_NCCL_DIR);
  if (!library)
    return library.error();
  // An older NCCL may lack functions. An error about its version says more than a missing function.
  TROUPE_LOAD(ncclGetVersion)
  int version = 0;
  if (const auto code = ncclGetVersion(&version); code != ncclSuccess)
    return make_error(errc::unavailable, "ncclGetVersion gave " + std::to_string(code));
  if (version < oldest_nccl)
    return make_error(errc::unavailable,
                      "NCCL " + nccl_version_text(version) + " was loaded; needed is " +
                          nccl_version_text(oldest_nccl) + " or newer (built with " +
                          nccl_version_text(NCCL_VERSION_CODE) + ")");
  TROUPE_NCCL_FUNCTIONS(TROUPE_LOAD)
#undef TROUPE_LOAD
#undef TROUPE_TEXT
#undef TROUPE_TEXT_OF
  return {};
}

/// Calls `load` until it succeeds once.
class loaded_once {
public:
  template <class Load> caf::error operator()(Load load) noexcept {
    try {
      const std::lock_guard lock{mutex_};
      if (done_)
        return {};
      auto err = load();
      done_ = !err;
      return err;
    } catch (const std::bad_alloc&) {
      return make_error(errc::out_of_memory, "host memory");
    }
  }

private:
  std::mutex mutex_;
  bool done_ = false;
};

constinit loaded_once cudart_loaded;
constinit loaded_once nccl_loaded;

} // namespace

caf::expected<void*> load_library(std::span<const std::string> names) {
  std::string reasons;
  for (const auto& name : names) {
    // With RTLD_LOCAL its symbols hide no symbols of others. A library that needs this soname still
    // gets this library.
    if (void* const library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE))
      return library;
    const char* const why = dlerror();
    reasons += reasons.empty() ? ": " : "; ";
    reasons += why != nullptr ? why : name.c_str();
  }
  return make_error(errc::unavailable, names.front() + " cannot be loaded" + reasons);
}

std::string nccl_version_text(int version) {
  const int unit = version < 10000 ? 1000 : 10000; // as in the macro NCCL_VERSION
  return std::to_string(version / unit) + '.' + std::to_string(version % unit / 100) + '.' +
         std::to_string(version % 100);
}

caf::error load_cudart() noexcept { return cudart_loaded(load_all_of_cudart); }

caf::error load_nccl() noexcept { return nccl_loaded(load_all_of_nccl); }

} // namespace troupe::detail
