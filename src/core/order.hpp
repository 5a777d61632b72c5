/// The lock of the order of all operations of the process (INV-6).
#pragma once

#include <mutex>

namespace troupe::detail {

/// What is decided under it is seen by every later admission.
std::mutex& order_mutex() noexcept;

} // namespace troupe::detail
