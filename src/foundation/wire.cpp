#include "foundation/wire.hpp"

#include "foundation/peer_text.hpp"

#include <algorithm>

namespace troupe::detail {

void wire_fields(auto& wire, message_of<failure> auto& x) {
  wire(x.code, x.detail, x.verb, x.api, x.native_name, x.native_code, x.device, x.rank, x.operation,
       x.epoch, x.generation, x.parts, x.cause);
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
  constexpr std::size_t most_parts = 4096; // one per rank
  const auto is_code = [](errc y) { return y >= errc::invalid_argument && y <= errc::internal; };
  const bool is_valid = f.parts.size() <= most_parts && is_code(f.code) && is_code(f.cause) &&
                        std::all_of(f.parts.begin(), f.parts.end(),
                                    [](auto y) { return y <= part_state::uninvolved; });
  f.detail = peer_text(f.detail);
  for (auto* name : {&f.verb, &f.api, &f.native_name})
    *name = peer_text(*name, most_peer_name);
  x = ok_ && is_valid ? make_error(std::move(f))
                      : make_error(errc::internal, "a worker's error could not be read");
}

} // namespace troupe::detail
