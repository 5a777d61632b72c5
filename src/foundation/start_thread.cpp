#include "foundation/start_thread.hpp"

#include "foundation/never_destroyed.hpp"

namespace troupe::detail {

int create_detached(void* (*run)(void*), void* of) noexcept {
  pthread_attr_t how;
  if (const int code = ::pthread_attr_init(&how))
    return code;
  int code = ::pthread_attr_setdetachstate(&how, PTHREAD_CREATE_DETACHED);
  pthread_t unused{};
  if (code == 0)
    code = ::pthread_create(&unused, &how, run, of);
  static_cast<void>(::pthread_attr_destroy(&how)); // cannot fail for one that was initialized
  return code;
}

void leave_thread(std::thread x) {
  if (x.get_id() == std::this_thread::get_id()) { // it cannot end meanwhile
    x.detach();
    return;
  }
  const auto left = std::make_shared<std::thread>(std::move(x));
  if (try_detached_thread([left] { left->join(); }) != 0)
    keep_forever(left);
}

} // namespace troupe::detail
