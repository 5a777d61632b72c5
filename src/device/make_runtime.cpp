#include "device/make_runtime.hpp"

#include "flight/flight_recorder.hpp"
#include "sharing/memory_exchange.hpp"

#include <utility>

namespace troupe::detail {

std::shared_ptr<runtime> make_runtime(std::shared_ptr<troupe::backend> backend,
                                      const lane_options& options, flight_record_options record) {
  auto result = std::make_shared<runtime>(std::move(backend), options);
  auto memory = std::make_shared<memory_exchange>(*result);
  auto recorder = std::make_shared<flight_recorder>(*result, std::move(record));
  result->add_parts(memory, recorder, {memory.get(), recorder.get()});
  return result;
}

} // namespace troupe::detail
