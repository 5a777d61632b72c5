/// The admission lock, which orders all operations of the process (INV-6).
#pragma once

#include <mutex>

namespace troupe::detail {

/// Returns the admission lock. Every later admission sees what was decided under it.
std::mutex& order_mutex() noexcept;

} // namespace troupe::detail
