#include "foundation/wire.hpp"

#include <algorithm>

namespace troupe::detail {

void put(wire_writer& to, const caf::error& x) {
  to.put(static_cast<bool>(x));
  if (!x)
    return;
  auto f = failure_of(x).value_or(failure{});
  if (!failure_of(x))
    f.detail = describe(x);
  to.put(f.code);
  to.put(f.detail);
  to.put(f.verb);
  to.put(f.api);
  to.put(f.native_name);
  to.put(f.native_code);
  to.put(f.device);
  to.put(f.rank);
  to.put(f.operation);
  to.put(f.epoch);
  to.put(f.generation);
  to.put_all(std::span<const part_state>{f.parts});
}

caf::error get_error(wire_reader& from) {
  if (!from.get<bool>())
    return {};
  failure f;
  f.code = from.get<errc>();
  f.detail = from.get_string();
  f.verb = from.get_string();
  f.api = from.get_string();
  f.native_name = from.get_string();
  f.native_code = from.get<std::int32_t>();
  f.device = from.get<std::int32_t>();
  f.rank = from.get<std::int32_t>();
  f.operation = from.get<std::uint64_t>();
  f.epoch = from.get<std::uint64_t>();
  f.generation = from.get<std::uint64_t>();
  f.parts = from.get_all<part_state>();
  const bool parts_are = std::all_of(f.parts.begin(), f.parts.end(),
                                     [](auto x) { return x <= part_state::uninvolved; });
  if (!from.ok() || f.code < errc::invalid_argument || f.code > errc::internal || !parts_are)
    return make_error(errc::internal, "a worker's error could not be read");
  return make_error(std::move(f));
}

} // namespace troupe::detail
