#include "actors/system.hpp"
#include "flight/flight_recorder.hpp" // for recorder()
#include <troupe/flight_record.hpp>

namespace troupe {

pending<void> write_flight_record(caf::actor_system& sys, const std::string& path,
                                  request_options options) {
  auto core = detail::system_core::of(sys);
  if (!core)
    return pending<void>{core.error()};
  auto owner = (*core)->runtime();
  if (!owner)
    return pending<void>{owner.error()};
  auto limit =
      options.deadline.count() != 0 ? options.deadline : (*core)->settings().device_deadline;
  return {(*owner)->recorder().write(path, detail::from_now(limit)), nullptr};
}

} // namespace troupe
