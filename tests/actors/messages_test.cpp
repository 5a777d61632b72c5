/// Every message has a serialized form, and comes back from it as it was (INV-13).

#include "support/world_fixture.hpp"
#include <troupe/detail/caf_compat.hpp>
#include <troupe/troupe.hpp>

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace troupe::testing {

namespace {

template <class T> T there_and_back(caf::actor_system& sys, const T& x) {
  T y{};
  must(detail::from_bytes(sys, must(detail::to_bytes(sys, x)), y));
  return y;
}

/// Messages hold handles, times and vectors: their rendered form tells all of it.
template <class T> std::string render(const T& x) { return caf::deep_to_string(x); }

template <class T> void expect_same(caf::actor_system& sys, const T& x) {
  EXPECT_EQ(render(there_and_back(sys, x)), render(x));
}

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
  return x;
}

class Messages : public ::testing::Test {
protected:
  test_system sys_{{.devices = 1}};
  device gpu_ = sys_.open();
  any_gpu_ref ref_ = must(gpu_.allocate(dtype::float16, 100).wait());
  request_options options_{.deadline = 1234567ns, .membership = 9};
};

TEST_F(Messages, EnumerationsComeBack) {
  for (auto x : all_dtypes)
    EXPECT_EQ(there_and_back(sys_.get(), x), x);
  for (auto x : all_reduce_ops)
    EXPECT_EQ(there_and_back(sys_.get(), x), x);
  EXPECT_EQ(there_and_back(sys_.get(), errc::lane_stuck), errc::lane_stuck);
  EXPECT_EQ(there_and_back(sys_.get(), part_state::started), part_state::started);
  EXPECT_EQ(there_and_back(sys_.get(), device_phase::resetting), device_phase::resetting);
  EXPECT_EQ(there_and_back(sys_.get(), world_phase::failed), world_phase::failed);
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

TEST_F(Messages, RequestsToADeviceComeBack) {
  auto& sys = sys_.get();
  expect_same(sys, allocate{77, dtype::bfloat16, true, options_});
  auto up = there_and_back(
      sys, upload{ref_, host_buffer{std::vector<std::uint8_t>{1, 2, 255}}, options_});
  EXPECT_EQ(up.target, ref_);
  EXPECT_EQ(up.source.size_bytes(), 3u);
  EXPECT_EQ(up.source.as<std::uint8_t>()[2], 255);
  EXPECT_EQ(up.options.deadline, options_.deadline);
  EXPECT_EQ(up.options.membership, options_.membership);
  auto down = there_and_back(sys, download{ref_, options_});
  EXPECT_EQ(down.source, ref_);
  auto filled = there_and_back(sys, fill{ref_, {0x00, 0x3c}, options_});
  EXPECT_EQ(filled.target, ref_);
  EXPECT_EQ(filled.element, (std::vector<std::uint8_t>{0x00, 0x3c}));
  auto part = must(ref_.slice(10, 20));
  auto copied = there_and_back(sys, copy{ref_, part, options_});
  EXPECT_EQ(copied.target, ref_);
  EXPECT_EQ(copied.source, part);
  auto launched =
      there_and_back(sys, troupe::launch{"name", {4, 5}, {part}, {ref_, part}, options_});
  EXPECT_EQ(launched.name, "name");
  EXPECT_EQ(launched.arguments, (std::vector<std::uint8_t>{4, 5}));
  EXPECT_EQ(launched.reads, std::vector<any_gpu_ref>{part});
  EXPECT_EQ(launched.writes, (std::vector<any_gpu_ref>{ref_, part}));
  expect_same(sys, troupe::stats{options_});
  expect_same(sys, troupe::reset{options_});
  expect_same(sys, watch_generation{});
  expect_same(sys, record_flight{"a file", options_});
  expect_same(sys, troupe::shutdown{});
}

TEST_F(Messages, RequestsToAWorldComeBack) {
  auto& sys = sys_.get();
  auto x = there_and_back(sys, all_reduce{{ref_}, {ref_, ref_}, reduce_op::avg, options_});
  EXPECT_EQ(x.send, std::vector<any_gpu_ref>{ref_});
  EXPECT_EQ(x.recv, (std::vector<any_gpu_ref>{ref_, ref_}));
  EXPECT_EQ(x.op, reduce_op::avg);
  EXPECT_EQ(x.options.deadline, options_.deadline);
  std::vector<any_gpu_ref> one{ref_};
  std::vector<any_gpu_ref> two{ref_, ref_};
  expect_same(sys, all_reduce{one, two, reduce_op::premul_sum, options_, {0.5, -3.0}});
  expect_same(sys, reduce{two, ref_, 1, reduce_op::max, options_, {2.0}});
  expect_same(sys, broadcast{ref_, two, 1, options_});
  expect_same(sys, all_gather{one, two, options_});
  expect_same(sys, reduce_scatter{one, two, reduce_op::prod, options_, {1.5}});
  expect_same(sys, all_to_all{one, two, options_});
  expect_same(sys, all_to_all_v{one, two, {{1, 2}, {3, 4}}, options_});
  expect_same(sys, gather{two, ref_, 1, options_});
  expect_same(sys, scatter{ref_, two, 1, options_});
  expect_same(sys, send_recv{1, 2, ref_, ref_, options_});
  expect_same(sys, barrier{options_});
  const collective any_call{
      collective_kind::all_to_all_v, one, two, reduce_op::min, {0.25}, 3, 4, {{1}, {2, 3}}};
  expect_same(sys, any_call);
  expect_same(sys, group{{any_call, barrier{}}, options_});
  expect_same(sys, rank_local{2, any_call, options_});
  expect_same(sys, allocate_all{7, dtype::float16, {true, true}, options_});
  expect_same(sys, get_status{});
  expect_same(sys, subscribe{});
  auto parted = there_and_back(sys, split{"tensor", {0, 1, -1}, {3, 2, 1}, options_});
  EXPECT_EQ(parted.name, "tensor");
  EXPECT_EQ(parted.colors, (std::vector<std::int32_t>{0, 1, -1}));
  EXPECT_EQ(parted.keys, (std::vector<std::int32_t>{3, 2, 1}));
  EXPECT_EQ(parted.options.membership, options_.membership);
  auto actor = must(gpu_.actor());
  auto groups = there_and_back(sys, world_split{{{7, "tensor/7", {2, 0}, actor}}}).groups;
  ASSERT_EQ(groups.size(), 1u);
  EXPECT_EQ(groups[0].color, 7);
  EXPECT_EQ(groups[0].name, "tensor/7");
  EXPECT_EQ(groups[0].ranks, (std::vector<std::int32_t>{2, 0}));
  EXPECT_EQ(groups[0].actor, actor);
}

TEST_F(Messages, AnswersComeBack) {
  auto& sys = sys_.get();
  expect_same(sys, collective_done{5, 6, 7, true});
  expect_same(sys, world_buffers{{ref_, ref_}});
  expect_same(sys, world_member{1, 2, 3});
  auto changed =
      there_and_back(sys, device_changed{2, device_phase::failed, 8, make_error(some_failure())});
  EXPECT_EQ(changed.device, 2);
  EXPECT_EQ(changed.phase, device_phase::failed);
  EXPECT_EQ(changed.generation, 8u);
  EXPECT_EQ(describe(changed.reason), to_string(some_failure()));
  world_status status{"w",
                      world_phase::building,
                      3,
                      2,
                      {{0, 1, 5}, {1, 0, 6}},
                      make_error(some_failure()),
                      true,
                      4,
                      make_error(some_failure())};
  auto told = there_and_back(sys, status);
  EXPECT_EQ(told.name, "w");
  EXPECT_EQ(told.phase, world_phase::building);
  EXPECT_EQ(told.epoch, 3u);
  EXPECT_EQ(told.membership, 2u);
  EXPECT_EQ(told.members, status.members);
  EXPECT_EQ(describe(told.reason), describe(status.reason));
  EXPECT_TRUE(told.standby_ready);
  EXPECT_EQ(told.windows, 4u);
  EXPECT_EQ(describe(told.windows_reason), describe(status.windows_reason));
  expect_same(sys, must(gpu_.stats().wait()));
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
  ref_ = {};
  must(gpu_.stats().wait()); // the lane has let go of the allocation, too
  expect_stale(right, "gone");
  ref_ = must(gpu_.allocate(dtype::float16, 100).wait());
  auto old = ref_.token();
  must(gpu_.reset().wait());
  expect_stale(old, "an earlier life");
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
