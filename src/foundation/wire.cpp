#include "foundation/wire.hpp"

#include <algorithm>

namespace troupe::detail {

void wire_fields(auto& wire, message_of<failure> auto& x) {
  wire(x.code, x.detail, x.verb, x.api, x.native_name, x.native_code, x.device, x.rank, x.operation,
       x.epoch, x.generation, x.parts);
}

void wire_writer::put(const caf::error& x) {
  put(static_cast<bool>(x));
  if (!x)
    return;
  auto f = failure_of(x);
  if (!f)
    f.emplace().detail = describe(x);
  put(*f);
}

void wire_reader::read(caf::error& x) {
  x = {};
  if (!get<bool>())
    return;
  auto f = get<failure>();
  const bool is_valid = f.code >= errc::invalid_argument && f.code <= errc::internal &&
                        std::all_of(f.parts.begin(), f.parts.end(),
                                    [](auto y) { return y <= part_state::uninvolved; });
  x = ok_ && is_valid ? make_error(std::move(f))
                      : make_error(errc::internal, "a worker's error could not be read");
}

} // namespace troupe::detail
