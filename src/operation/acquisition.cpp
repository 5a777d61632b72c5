#include "operation/acquisition.hpp"

#include "operation/device_state.hpp"

namespace troupe::detail {

int& granted(locked, buffer& memory, access_mode mode) noexcept {
  return writes(mode) ? memory.granted_for_writing : memory.granted_for_reading;
}

void take(locked, buffer& memory, access_mode mode) noexcept {
  if (writes(mode))
    memory.acquired_for_writing = true;
  else
    ++memory.acquired_for_reading;
  memory.home().change_acquired(1);
}

void give_back(locked, buffer& memory, access_mode mode) noexcept {
  if (writes(mode))
    memory.acquired_for_writing = false;
  else
    --memory.acquired_for_reading;
  memory.home().change_acquired(-1);
}

} // namespace troupe::detail
