#include "compute/blas/lt_functions.hpp"

#include <mutex>
#include <string>

#include <dlfcn.h>

namespace troupe::blas {

namespace {

caf::error cannot_load(const std::string& name) {
  const char* const why = dlerror();
  return make_error(errc::unavailable,
                    name + " cannot be loaded: " + (why != nullptr ? why : "no reason given"));
}

void* open(const std::string& name) noexcept {
  return dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
}

template <class F> bool find(void* library, const char* name, F& to) noexcept {
  to = reinterpret_cast<F>(dlsym(library, name));
  return to != nullptr;
}

caf::expected<lt_functions> load() {
  const auto soname = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
  void* library = open(soname);
  if (library == nullptr)
    library = open(std::string{TROUPE_CUBLASLT_DIR} + '/' + soname);
  if (library == nullptr)
    return cannot_load(soname);
  lt_functions result;
#define TROUPE_LT_LOAD(name)                                                                       \
  if (!find(library, #name, result.name))                                                          \
    return make_error(errc::unavailable, soname + " has no function " #name);
  TROUPE_LT_FUNCTIONS(TROUPE_LT_LOAD)
#undef TROUPE_LT_LOAD
  result.write_words = detail::launch_write_words;
  result.capture = detail::capture_kernel;
  return result;
}

} // namespace

caf::expected<const lt_functions*> load_lt() {
  static std::mutex mutex;
  static lt_functions loaded;
  const std::lock_guard lock{mutex};
  if (loaded.cublasLtCreate == nullptr) {
    auto all = load();
    if (!all)
      return all.error();
    loaded = *all;
  }
  return &loaded;
}

} // namespace troupe::blas
