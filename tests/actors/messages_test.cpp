/// Every message has a serialized form and is unchanged after deserialization (INV-13).

#include "support/world_fixture.hpp"
#include <troupe/detail/caf_compat.hpp>
#include <troupe/troupe.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

template <class T> T there_and_back(caf::actor_system& sys, const T& x) {
  T y{};
  must(detail::from_bytes(sys, must(detail::to_bytes(sys, x)), y));
  return y;
}

// -- the fields of a type, with or without an inspect function

struct anything {
  template <class T> operator T() const;
};

/// Returns the number of fields of an aggregate.
template <class T, class... Fields> constexpr std::size_t field_count() {
  if constexpr (requires { T{std::declval<Fields>()..., anything{}}; })
    return field_count<T, Fields..., anything>();
  else
    return sizeof...(Fields);
}

template <class T> auto fields_of(const T& x) {
  constexpr auto n = field_count<T>();
  static_assert(n <= 13, "add a line here");
  if constexpr (n == 0) {
    return std::tie();
  } else if constexpr (n == 1) {
    auto& [a] = x;
    return std::tie(a);
  } else if constexpr (n == 2) {
    auto& [a, b] = x;
    return std::tie(a, b);
  } else if constexpr (n == 3) {
    auto& [a, b, c] = x;
    return std::tie(a, b, c);
  } else if constexpr (n == 4) {
    auto& [a, b, c, d] = x;
    return std::tie(a, b, c, d);
  } else if constexpr (n == 5) {
    auto& [a, b, c, d, e] = x;
    return std::tie(a, b, c, d, e);
  } else if constexpr (n == 6) {
    auto& [a, b, c, d, e, f] = x;
    return std::tie(a, b, c, d, e, f);
  } else if constexpr (n == 7) {
    auto& [a, b, c, d, e, f, g] = x;
    return std::tie(a, b, c, d, e, f, g);
  } else if constexpr (n == 8) {
    auto& [a, b, c, d, e, f, g, h] = x;
    return std::tie(a, b, c, d, e, f, g, h);
  } else if constexpr (n == 9) {
    auto& [a, b, c, d, e, f, g, h, i] = x;
    return std::tie(a, b, c, d, e, f, g, h, i);
  } else if constexpr (n == 10) {
    auto& [a, b, c, d, e, f, g, h, i, j] = x;
    return std::tie(a, b, c, d, e, f, g, h, i, j);
  } else if constexpr (n == 11) {
    auto& [a, b, c, d, e, f, g, h, i, j, k] = x;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k);
  } else if constexpr (n == 12) {
    auto& [a, b, c, d, e, f, g, h, i, j, k, l] = x;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k, l);
  } else {
    auto& [a, b, c, d, e, f, g, h, i, j, k, l, m] = x;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m);
  }
}

template <class T> constexpr bool is_vector = false;
template <class T> constexpr bool is_vector<std::vector<T>> = true;

/// Applies `f` to each pair of fields.
template <class T, class F> bool all_fields(const T& x, const T& y, F f) {
  [[maybe_unused]] auto a = fields_of(x);
  [[maybe_unused]] auto b = fields_of(y);
  return [&]<std::size_t... I>(std::index_sequence<I...>) {
    return (f(std::get<I>(a), std::get<I>(b)) && ...);
  }(std::make_index_sequence<field_count<T>()>{});
}

template <class T> bool same(const T& x, const T& y) {
  if constexpr (is_vector<T>)
    return std::equal(x.begin(), x.end(), y.begin(), y.end(),
                      [](const auto& a, const auto& b) { return same(a, b); });
  else if constexpr (std::is_same_v<T, host_buffer>)
    return std::ranges::equal(x.bytes(), y.bytes());
  else if constexpr (std::is_same_v<T, caf::error>)
    return x == y && describe(x) == describe(y);
  else if constexpr (requires { x == y; })
    return x == y;
  else
    return all_fields(x, y, [](const auto& a, const auto& b) { return same(a, b); });
}

/// Returns true if every field differs from its default value.
template <class T> bool is_filled_in(const T& x) {
  if constexpr (std::is_aggregate_v<T>)
    return all_fields(x, T{}, [](const auto& field, const auto& none) {
      return is_filled_in(field) && !same(field, none);
    });
  else
    return !same(x, T{});
}

template <class T> struct type {};

failure some_failure() {
  failure x;
  x.code = errc::stalled;
  x.detail = "not done";
  x.verb = "all_reduce";
  x.api = "ncclAllReduce";
  x.native_name = "ncclSystemError";
  x.native_code = 2;
  x.device = 3;
  x.rank = 1;
  x.operation = 17;
  x.epoch = 4;
  x.generation = 2;
  x.parts = {part_state::done, part_state::not_issued, part_state::started, part_state::issued};
  x.cause = errc::worker_lost;
  return x;
}

class Messages : public ::testing::Test {
protected:
  // One sample of each type, with all fields filled in.
  errc sample(type<errc>) const { return errc::lane_stuck; }
  part_state sample(type<part_state>) const { return part_state::started; }
  dtype sample(type<dtype>) const { return dtype::float8_e5m2; }
  reduce_op sample(type<reduce_op>) const { return reduce_op::premul_sum; }
  device_phase sample(type<device_phase>) const { return device_phase::resetting; }
  world_phase sample(type<world_phase>) const { return world_phase::failed; }
  collective_kind sample(type<collective_kind>) const { return collective_kind::barrier; }
  failure sample(type<failure>) const { return some_failure(); }
  gpu_token sample(type<gpu_token>) const { return {1, 2, 3, 4, dtype::float16, 5, 6}; }
  any_gpu_ref sample(type<any_gpu_ref>) const { return part_; }
  host_buffer sample(type<host_buffer>) const {
    return host_buffer{std::vector<std::uint8_t>{1, 2, 255}};
  }
  request_options sample(type<request_options>) const { return options_; }
  collective_done sample(type<collective_done>) const {
    return {5, 6, 7, {0, 2}, collective_way::direct};
  }
  collective sample(type<collective>) const {
    return {collective_kind::all_to_all_v, one_, two_, reduce_op::min, {0.25}, 3, 4, {{1}, {2, 3}}};
  }
  all_reduce sample(type<all_reduce>) const {
    return {one_, two_, reduce_op::premul_sum, options_, {0.5, -3.0}};
  }
  reduce sample(type<reduce>) const { return {two_, ref_, 1, reduce_op::max, options_, {2.0}}; }
  broadcast sample(type<broadcast>) const { return {ref_, two_, 1, options_}; }
  all_gather sample(type<all_gather>) const { return {one_, two_, options_}; }
  reduce_scatter sample(type<reduce_scatter>) const {
    return {one_, two_, reduce_op::prod, options_, {1.5}};
  }
  all_to_all sample(type<all_to_all>) const { return {one_, two_, options_}; }
  all_to_all_v sample(type<all_to_all_v>) const { return {one_, two_, {{1, 2}, {3, 4}}, options_}; }
  gather sample(type<gather>) const { return {two_, ref_, 1, options_}; }
  scatter sample(type<scatter>) const { return {ref_, two_, 1, options_}; }
  send_recv sample(type<send_recv>) const { return {1, 2, ref_, part_, options_}; }
  barrier sample(type<barrier>) const { return {options_}; }
  group sample(type<group>) const { return {{sample(type<collective>{}), barrier{}}, options_}; }
  rank_local sample(type<rank_local>) const { return {2, sample(type<collective>{}), options_}; }
  message_end sample(type<message_end>) const { return {1, part_}; }
  exchange sample(type<exchange>) const {
    return {2, {{1, part_}}, {{0, ref_}, {2, part_}}, options_};
  }
  device_changed sample(type<device_changed>) const {
    return {2, device_phase::failed, 8, make_error(some_failure()), 9};
  }
  device_stats sample(type<device_stats>) const {
    return {1, device_phase::ready, 2, "name", "0000:01:00.0", 9, 1, 3, 4, 5, 6, 7, 8};
  }
  world_member sample(type<world_member>) const { return {1, 2, 3, 4}; }
  world_status sample(type<world_status>) const {
    return {"w", world_phase::failed,          3,
            2,   {{0, 1, 5, 7}, {1, 0, 6, 8}}, make_error(some_failure()),
            true};
  }
  allocate sample(type<allocate>) const { return {77, dtype::bfloat16, true, options_}; }
  upload sample(type<upload>) const { return {part_, sample(type<host_buffer>{}), options_}; }
  download sample(type<download>) const { return {ref_, options_}; }
  fill sample(type<fill>) const { return {ref_, float16{1.0f}, options_}; }
  copy sample(type<copy>) const { return {ref_, part_, options_}; }
  launch sample(type<launch>) const { return {"name", {4, 5}, one_, two_, options_}; }
  stats sample(type<stats>) const { return {options_}; }
  watch_generation sample(type<watch_generation>) const { return {}; }
  reset sample(type<reset>) const { return {options_}; }
  hand_over sample(type<hand_over>) const { return {options_}; }
  shutdown sample(type<shutdown>) const { return {}; }
  get_status sample(type<get_status>) const { return {}; }
  subscribe sample(type<subscribe>) const { return {}; }
  record_flight sample(type<record_flight>) const { return {"a file", options_}; }
  split sample(type<split>) const { return {"tensor", {0, 1, -1}, {3, 2, 1}, options_}; }
  sub_world sample(type<sub_world>) const { return {7, "tensor/7", {2, 0}, actor_}; }
  world_split sample(type<world_split>) const { return {{sample(type<sub_world>{})}}; }
  allocation_options sample(type<allocation_options>) const { return {true}; }
  allocate_all sample(type<allocate_all>) const { return {7, dtype::float16, {true}, options_}; }
  world_buffers sample(type<world_buffers>) const { return {two_}; }
  link_kind sample(type<link_kind>) const { return link_kind::nvlink; }
  peer_access sample(type<peer_access>) const { return peer_access::failed; }
  link_check sample(type<link_check>) const { return link_check::wrong; }
  p2p_device sample(type<p2p_device>) const { return {3, device_phase::resetting, 7, 1}; }
  p2p_link sample(type<p2p_link>) const {
    return {3,
            4,
            link_kind::nvlink,
            18,
            2,
            true,
            true,
            peer_access::failed,
            link_check::wrong,
            make_error(some_failure()),
            396.25,
            780.5,
            6.875};
  }
  p2p_graph sample(type<p2p_graph>) const {
    return {"t", 12, true, {sample(type<p2p_device>{})}, {sample(type<p2p_link>{})}};
  }
  get_graph sample(type<get_graph>) const { return {}; }
  verify_links sample(type<verify_links>) const { return {{3, 1}, options_}; }
  measure_links sample(type<measure_links>) const { return {{0, 2}, options_}; }
  copy_pair sample(type<copy_pair>) const { return {ref_, part_}; }
  copy_batch sample(type<copy_batch>) const { return {{{ref_, part_}, {part_, ref_}}, options_}; }
  replicate sample(type<replicate>) const { return {part_, two_, options_}; }
  distribute sample(type<distribute>) const { return {part_, two_, options_}; }
  program_message sample(type<program_message>) const { return {1, {2, 3}}; }
  program_report sample(type<program_report>) const { return {1, {2, 3}}; }
  access_mode sample(type<access_mode>) const { return access_mode::read_write; }
  offer sample(type<offer>) const { return {part_, 3ms}; }
  claim sample(type<claim>) const {
    return {sample(type<gpu_token>{}), access_mode::write, options_};
  }
  accept sample(type<accept>) const { return {part_, options_}; }
  room_policy sample(type<room_policy>) const { return room_policy::refuse; }
  program_ended sample(type<program_ended>) const { return {1, make_error(some_failure())}; }
  step_done sample(type<step_done>) const { return {5, {0, 2}}; }
  get_stats sample(type<get_stats>) const { return {}; }
  topology_stats sample(type<topology_stats>) const { return {1, 2, 3, 4, 5, 6, 7}; }

  /// Serializes the sample alone, and in a message as CAF's network does.
  template <class T> void expect_comes_back() {
    SCOPED_TRACE(caf::type_name<T>::value);
    const auto x = sample(type<T>{});
    EXPECT_TRUE(is_filled_in(x));
    EXPECT_TRUE(same(there_and_back(sys_.get(), x), x));
    if constexpr (std::is_same_v<T, errc>)
      return; // CAF sends it as an error
    const auto message = there_and_back(sys_.get(), caf::make_message(x));
    ASSERT_TRUE(message.template match_elements<T>());
    EXPECT_TRUE(same(message.template get_as<T>(0), x));
  }

  static constexpr auto type_count = caf::id_block::troupe::end - caf::id_block::troupe::begin;
  template <caf::type_id_t... I>
  void expect_all_come_back(std::integer_sequence<caf::type_id_t, I...>) {
    (expect_comes_back<typename caf::type_by_id<caf::id_block::troupe::begin + I>::type>(), ...);
  }

  test_system sys_{{.devices = 1}};
  device gpu_ = sys_.open();
  any_gpu_ref ref_ = must(gpu_.allocate(dtype::float16, 100).wait());
  any_gpu_ref part_ = must(ref_.slice(10, 20));
  std::vector<any_gpu_ref> one_{part_};
  std::vector<any_gpu_ref> two_{ref_, part_};
  caf::actor actor_ = must(gpu_.actor());
  request_options options_{.deadline = 1234567ns,
                           .membership = 9,
                           .allow_shrunk = true,
                           .room = room_policy::refuse,
                           .retry_of = 17,
                           .max_retries = 3,
                           .overlap = true};
};

TEST_F(Messages, EnumerationsComeBack) {
  for (auto x : all_dtypes)
    EXPECT_EQ(there_and_back(sys_.get(), x), x);
  for (auto x : all_reduce_ops)
    EXPECT_EQ(there_and_back(sys_.get(), x), x);
  for (auto x : all_collective_kinds)
    EXPECT_EQ(there_and_back(sys_.get(), x), x);
}

TEST_F(Messages, AnErrorComesBackWithItsFields) {
  auto x = some_failure();
  auto y = there_and_back(sys_.get(), x);
  EXPECT_EQ(to_string(y), to_string(x));
  EXPECT_EQ(y.parts, x.parts);
  auto error = there_and_back(sys_.get(), make_error(x));
  EXPECT_TRUE(has_code(error, errc::stalled));
  ASSERT_TRUE(failure_of(error));
  EXPECT_EQ(to_string(*failure_of(error)), to_string(x));
}

// If a type is added to the block without a sample, this does not compile.
TEST_F(Messages, AllTypesComeBackInAllTheirFields) {
  expect_all_come_back(std::make_integer_sequence<caf::type_id_t, type_count>{});
}

TEST_F(Messages, AHandleIsResolvedAtHome) {
  auto part = must(must(ref_.slice(3, 50)).reinterpret(dtype::uint8));
  auto back = there_and_back(sys_.get(), part);
  EXPECT_EQ(back, part);
  EXPECT_FALSE(back.stale());
  EXPECT_EQ(must(any_gpu_ref::resolve(there_and_back(sys_.get(), part.token()))), part);
}

TEST_F(Messages, ATokenThatIsNotOursIsStale) {
  auto right = ref_.token();
  auto expect_stale = [](const gpu_token& token, const char* what) {
    EXPECT_TRUE(has_code(any_gpu_ref::resolve(token), errc::stale_ref)) << what;
  };
  for (auto& [what, change] : std::vector<std::pair<const char*, std::function<void(gpu_token&)>>>{
           {"another node", [](gpu_token& x) { ++x.node; }},
           {"another device", [](gpu_token& x) { x.device = 1'000'000; }},
           {"no such buffer", [](gpu_token& x) { x.buffer += 1000; }},
           {"another generation", [](gpu_token& x) { ++x.generation; }},
           {"no such type", [](gpu_token& x) { x.type = static_cast<dtype>(200); }},
           {"not aligned", [](gpu_token& x) { x.offset = 1; }},
           {"beyond the end", [](gpu_token& x) { x.count = 101; }},
           {"far beyond the end", [](gpu_token& x) { x.count = ~std::uint64_t{0}; }},
           {"offset beyond the end", [](gpu_token& x) { x.offset = 1 << 20; }},
           {"an offset that wraps", [](gpu_token& x) { x.offset = ~std::uint64_t{0} - 1; }},
       }) {
    auto forged = right;
    change(forged);
    expect_stale(forged, what);
  }
  one_.clear();
  two_.clear();
  ref_ = part_ = {};
  must(gpu_.stats().wait()); // the lane has released the allocation too
  expect_stale(right, "gone");
  ref_ = must(gpu_.allocate(dtype::float16, 100).wait());
  auto old = ref_.token();
  must(gpu_.reset().wait());
  expect_stale(old, "reset or lost after the allocation");
}

TEST_F(Messages, TruncatedBytesAreAnError) {
  auto bytes = must(detail::to_bytes(sys_.get(), all_reduce{{ref_}, {}, reduce_op::sum, options_}));
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    std::vector<std::byte> cut{bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size)};
    all_reduce x;
    EXPECT_TRUE(static_cast<bool>(detail::from_bytes(sys_.get(), cut, x)))
        << size << " of " << bytes.size();
  }
}

} // namespace

} // namespace troupe::testing
