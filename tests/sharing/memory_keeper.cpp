#include "sharing/memory_keeper.hpp"

#include "support/launches.hpp"
#include "support/world_fixture.hpp"

#include <caf/all.hpp>

#include <limits>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

constexpr const char* program_name = "memory keeper";

class keeper {
public:
  explicit keeper(device d) : device_(std::move(d)) {}

  keeper_outcome obey(const keeper_order& x) {
    keeper_outcome result;
    auto error = act(x, result);
    if (error)
      result.code = code_of(error).value_or(errc::internal);
    return result;
  }

private:
  using verb = keeper_order::verb;

  caf::error act(const keeper_order& x, keeper_outcome& result) {
    auto& ref = x.mine ? mine_ : claimed_;
    switch (x.what) {
    case verb::offer: {
      if (!mine_) {
        auto memory = device_.allocate<float>(kept_elements);
        if (!memory)
          return memory.error();
        mine_ = *memory;
      }
      auto token = device_.offer(mine_, std::chrono::nanoseconds{x.grace_ns});
      if (!token)
        return token.error();
      result.token = *token;
      return {};
    }
    case verb::claim: {
      auto memory = device_.claim<float>(x.token, x.mode);
      if (!memory)
        return memory.error();
      claimed_ = *memory;
      return {};
    }
    case verb::fill:
      return error_of(device_.fill(ref, x.value).wait());
    case verb::sum: {
      auto value = value_of(device_, ref);
      if (!value)
        return value.error();
      result.value = *value;
      return {};
    }
    case verb::fail:
      return fail_to_write(device_, ref);
    case verb::drop:
      ref = {};
      return {};
    case verb::reset:
      return error_of(device_.reset().wait());
    case verb::shut_down:
      device_.shutdown();
      return {};
    }
    return make_error(errc::internal, "no such order");
  }

  device device_;
  gpu_ref<float> mine_;
  gpu_ref<float> claimed_;
};

[[maybe_unused]] const bool registered = [] {
  must(register_program(program_name, [](const program_place& place) {
    return place.system.spawn<caf::detached>([place](caf::event_based_actor*) -> caf::behavior {
      auto state = std::make_shared<keeper>(place.rank.where());
      return {[place, state](const program_message& x) {
        auto result = state->obey(must(from_bytes<keeper_order>(x.bytes)));
        if (auto lost = place.report(to_bytes(result)))
          ADD_FAILURE() << describe(lost);
      }};
    });
  }));
  return true;
}();

} // namespace

world_program memory_keeper() { return {program_name, {}}; }

caf::expected<float> value_of(const device& d, const gpu_ref<float>& ref) {
  auto got = d.download(ref);
  if (!got)
    return got.error();
  if (*got != std::vector<float>(ref.count(), got->front()))
    return std::numeric_limits<float>::quiet_NaN();
  return got->front();
}

caf::error fail_to_write(const device& d, const any_gpu_ref& target) {
  return error_of(launch_failure(d, "it shall fail", {target}).wait());
}

} // namespace troupe::testing
