// Wrong collectives and messages, for every verb and every form of request. A wrong request is
// refused at once with an error that names the defect. Nothing is launched, and the next correct
// request of that verb succeeds. A refused call of a rank does not count: the other ranks' calls
// match its next call.

#include "actors/system.hpp"
#include "device/operations.hpp"
#include "lane/lane.hpp"
#include "support/collective_round.hpp"

#include <caf/all.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace troupe {

namespace {

using namespace std::chrono_literals;
using testing::answer_of;
using testing::ask;
using testing::call_verb;
using testing::has_code;
using testing::is_ok;
using testing::launch_failure;
using testing::must;
using testing::round_of;

constexpr std::size_t length = 16;
constexpr std::size_t spare_length = 512; ///< elements of buffers from which slices are taken

constexpr collective_kind verbs[] = {
    collective_kind::all_reduce,   collective_kind::reduce,         collective_kind::broadcast,
    collective_kind::all_gather,   collective_kind::reduce_scatter, collective_kind::all_to_all,
    collective_kind::all_to_all_v, collective_kind::gather,         collective_kind::scatter,
    collective_kind::send,         collective_kind::barrier};

/// A correct request of a verb, with its memory. It can be made repeatedly. The last rank is the
/// root and receives the message.
class subject {
public:
  subject(const world& over, collective_kind kind) : over_(over), kind_(kind) {
    const auto last = over.size() - 1;
    if (kind == collective_kind::barrier)
      return;
    if (kind != collective_kind::send) {
      round_.emplace(over, testing::collective_spec{.what = kind,
                                                    .type = dtype::int32,
                                                    .count = length,
                                                    .root = static_cast<int>(last),
                                                    .seed = 5});
      return;
    }
    sent_ = testing::random_bytes(length * size_of(dtype::int32), 5);
    from_ = must(answer_of(over.device_of(0).allocate(dtype::int32, length)));
    to_ = must(answer_of(over.device_of(last).allocate(dtype::int32, length)));
    testing::put(over.device_of(0), from_, sent_);
  }

  collective_kind kind() const { return kind_; }
  std::size_t last() const { return over_.size() - 1; }

  collective request() const {
    if (round_)
      return round_->request();
    if (kind_ == collective_kind::barrier)
      return barrier{};
    return send_recv{0, static_cast<int>(last()), from_, to_, {}};
  }
  collective request_of(std::size_t rank) const {
    return testing::call_of_rank(request(), rank, over_.size());
  }
  /// Returns the ranks that take part.
  std::vector<std::size_t> callers() const {
    if (kind_ == collective_kind::send)
      return {0, last()};
    std::vector<std::size_t> all(over_.size());
    std::iota(all.begin(), all.end(), std::size_t{0});
    return all;
  }

  /// Accepts the bytes of all buffers, so that skipped requests leave no marks.
  void accept() const {
    if (round_)
      round_->accept();
    if (kind_ == collective_kind::send)
      testing::accept_bytes(over_.device_of(0), from_);
  }

  std::vector<pending<void>> accept(std::size_t rank) const {
    if (round_)
      return round_->accept(rank);
    if (kind_ == collective_kind::send && rank == 0)
      return {over_.device_of(0).accept(from_)};
    return {};
  }

  void poison() const {
    accept();
    if (round_)
      round_->poison();
    if (kind_ == collective_kind::send)
      testing::put(over_.device_of(last()), to_, std::vector<std::byte>(to_.size_bytes()));
  }
  void expect_right() const {
    if (round_)
      round_->expect_right();
    if (kind_ == collective_kind::send) {
      EXPECT_TRUE(testing::holds(over_.device_of(last()), to_, sent_));
    }
  }

private:
  const world& over_;
  collective_kind kind_;
  std::optional<round_of> round_;
  std::vector<std::byte> sent_;
  any_gpu_ref from_;
  any_gpu_ref to_;
};

/// A buffer that a request names, and its rank.
struct slot {
  any_gpu_ref* ref;
  std::size_t rank;
  bool is_read;
};

/// `alone`: the rank of a rank's own request.
std::vector<slot> slots_of(collective& x, std::size_t ranks, std::optional<std::size_t> alone) {
  std::vector<slot> result;
  for (auto* refs : {&x.send, &x.recv})
    for (std::size_t i = 0; i < refs->size(); ++i) {
      auto only = x.kind == collective_kind::send && refs == &x.send ? x.rank : x.peer;
      auto rank = refs->size() == ranks ? i : static_cast<std::size_t>(only);
      result.push_back({&(*refs)[i], alone.value_or(rank), refs == &x.send});
    }
  return result;
}

/// Expected rank in an error: no rank, or any rank.
constexpr int no_named_rank = -1;
constexpr int any_rank = -2;

struct bad_request {
  std::string what;
  collective call;
  request_options options;
  errc code;
  int rank;
};

class BadCollectives : public ::testing::Test {
protected:
  void SetUp() override {
    TROUPE_NEEDS_DEVICES(2);
    system.emplace(testing::system_options{.devices = 3, .faults = plan});
    auto order = system->ordinals();
    std::reverse(order.begin(), order.end()); // so that no rank equals its device
    std::vector<device> devices;
    for (auto d : order)
      devices.push_back(system->open(d));
    auto on_each = [&](auto make) {
      std::vector<any_gpu_ref> refs;
      for (auto& d : devices)
        refs.push_back(make(d, must(answer_of(d.allocate(dtype::int32, spare_length, true)))));
      return refs;
    };
    stale = on_each([](const device& d, any_gpu_ref x) {
      must(answer_of(d.reset()));
      return x;
    });
    spare = on_each([](const device&, any_gpu_ref x) { return x; });
    broken = on_each([](const device& d, any_gpu_ref x) {
      EXPECT_TRUE(has_code(answer_of(launch_failure(d, "on purpose", {x})), errc::launch_failed));
      return x;
    });
    acquired = on_each([this](const device& d, any_gpu_ref x) {
      acquire(d.ordinal(), x);
      return x;
    });
    world_config config{.devices = order};
    config.limits.deadline = testing::at_once; // limit for calls that wait for a lost one
    w.emplace(system->open_world(config));
  }

  /// Acquires `ref`, as a program with its own stream does.
  void acquire(int ordinal, const any_gpu_ref& ref) {
    auto owner = must(must(detail::system_core::of(system->get()))->runtime());
    auto lane = must(owner->lane_of(ordinal));
    auto op = std::make_shared<detail::acquire_operation>(
        ref, access_mode::read_write, lane->stream(detail::stream_kind::compute));
    op->parts()[0].on = lane.get();
    op->deadline = detail::clock::now() + testing::patience;
    owner->start(op);
    std::shared_ptr<detail::nothing> value{op, &op->value};
    must(answer_of(pending<detail::nothing>{op, value}));
  }

  std::size_t size() const { return w->size(); }

  /// Returns every kind of wrong request for `of`. `alone`: the rank of a rank's own request.
  std::vector<bad_request> bad_requests(const subject& of, std::optional<std::size_t> alone) const;
  void add_bad_buffers(std::vector<bad_request>& to, const collective& right,
                       std::optional<std::size_t> alone) const;
  void add_bad_numbers(std::vector<bad_request>& to, const collective& right,
                       std::optional<std::size_t> alone) const;
  void add_bad_shapes(std::vector<bad_request>& to, const collective& right,
                      std::optional<std::size_t> alone) const;
  void add_bad_factors(std::vector<bad_request>& to, const collective& right,
                       std::optional<std::size_t> alone) const;

  void expect_refusal(const caf::expected<collective_done>& got, const bad_request& x) const {
    ASSERT_TRUE(has_code(got, x.code));
    auto why = *failure_of(got.error());
    EXPECT_FALSE(why.verb.empty());
    if (x.rank != any_rank) {
      EXPECT_EQ(why.rank, x.rank) << describe(got.error());
    }
    if (x.rank >= 0) {
      EXPECT_EQ(why.device, w->device_of(static_cast<std::size_t>(x.rank)).ordinal());
    }
    if (x.code == errc::membership_changed) {
      ASSERT_TRUE(status_of(got.error()));
      EXPECT_EQ(status_of(got.error())->membership, w->status().membership);
    }
  }
  void expect_refused_at_once(const pending<collective_done>& called, const bad_request& x) const {
    EXPECT_TRUE(called.ready());
    expect_refusal(answer_of(called), x);
  }
  void expect_refused(const bad_request& x);

  std::shared_ptr<testing::fault_plan> plan = std::make_shared<testing::fault_plan>();
  testing::launch_spy spy{plan};
  std::optional<testing::test_system> system;
  std::optional<world> w;
  // One for each rank.
  std::vector<any_gpu_ref> spare;
  std::vector<any_gpu_ref> stale;
  std::vector<any_gpu_ref> broken; ///< indeterminate
  std::vector<any_gpu_ref> acquired;
};

// -- wrong requests

template <class F>
void add(std::vector<bad_request>& to, const collective& right, std::string what, errc code,
         int rank, F spoil) {
  to.push_back({std::move(what), right, {}, code, rank});
  spoil(to.back().call);
}

std::vector<bad_request> BadCollectives::bad_requests(const subject& of,
                                                      std::optional<std::size_t> alone) const {
  const auto right = alone ? of.request_of(*alone) : of.request();
  const auto named = alone ? static_cast<int>(*alone) : no_named_rank;
  std::vector<bad_request> all;
  add_bad_buffers(all, right, alone);
  add_bad_numbers(all, right, alone);
  add_bad_shapes(all, right, alone);
  add_bad_factors(all, right, alone);
  const auto n = static_cast<std::int32_t>(size());
  for (auto no_rank : {n, -1, std::numeric_limits<std::int32_t>::min()}) {
    if (has_root(right.kind) || right.kind == collective_kind::send ||
        right.kind == collective_kind::recv)
      add(all, right, "root or peer " + std::to_string(no_rank), errc::invalid_argument, named,
          [&](collective& x) { x.peer = no_rank; });
    if (right.kind == collective_kind::send && !alone)
      add(all, right, "sender " + std::to_string(no_rank), errc::invalid_argument, no_named_rank,
          [&](collective& x) { x.rank = no_rank; });
  }
  add(all, right, "a kind that does not exist", errc::invalid_argument, any_rank,
      [](collective& x) { x.kind = static_cast<collective_kind>(99); });
  if (!alone && right.kind == collective_kind::send)
    add(all, right, "one end of a message", errc::invalid_argument, no_named_rank,
        [](collective& x) { x.kind = collective_kind::recv; });
  all.push_back({"another membership", right, {}, errc::membership_changed, no_named_rank});
  all.back().options.membership = 77;
  all.push_back({"a deadline in the past", right, {}, errc::deadline_exceeded, named});
  all.back().options.deadline = -1ns;
  return all;
}

/// Spoils one buffer at a time.
void BadCollectives::add_bad_buffers(std::vector<bad_request>& to, const collective& right,
                                     std::optional<std::size_t> alone) const {
  auto copy = right;
  const auto slots = slots_of(copy, size(), alone);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const auto on = slots[i].rank;
    const auto rank = static_cast<int>(on);
    const auto at = std::string{slots[i].is_read ? " to send" : " to receive into"} + " at rank " +
                    std::to_string(on);
    auto with = [&](const std::string& what, errc code, int named, auto change) {
      add(to, right, what + at, code, named, [&](collective& x) {
        auto& ref = *slots_of(x, size(), alone)[i].ref;
        ref = change(ref);
      });
    };
    auto part_of = [](const any_gpu_ref& whole) {
      return [&whole](const any_gpu_ref& right_one) {
        return must(whole.slice(0, right_one.count()));
      };
    };
    with("no memory", errc::stale_ref, rank, [](auto&) { return any_gpu_ref{}; });
    with("memory of an earlier life", errc::stale_ref, rank, part_of(stale[on]));
    with("memory of another device", errc::invalid_argument, rank,
         part_of(spare[(on + 1) % size()]));
    with("a user's buffer", errc::buffer_acquired, rank, part_of(acquired[on]));
    if (slots[i].is_read) // its error names only the device
      with("a half-written buffer", errc::indeterminate, no_named_rank, part_of(broken[on]));
    if (slots.size() < 2)
      continue; // no other buffer to differ from
    // If two ranks differ, the error names the later one.
    auto same_rank = [on](const slot& x) { return x.rank == on; };
    const bool in_itself = std::count_if(slots.begin(), slots.end(), same_rank) == 2;
    const auto differs = in_itself ? rank : any_rank;
    with("another type", errc::shape_mismatch, differs,
         [](auto& x) { return must(x.reinterpret(dtype::uint32)); });
    with("one element less", errc::shape_mismatch, differs,
         [](auto& x) { return must(x.slice(0, x.count() - 1)); });
  }
}

void BadCollectives::add_bad_numbers(std::vector<bad_request>& to, const collective& right,
                                     std::optional<std::size_t> alone) const {
  const auto on = alone.value_or(0);
  const auto named = alone ? static_cast<int>(*alone) : no_named_rank;
  for (auto refs : {&collective::send, &collective::recv}) {
    const std::string side = refs == &collective::send ? " to send" : " to receive into";
    add(to, right, "a buffer too many" + side, errc::invalid_argument, named,
        [&](collective& x) { (x.*refs).push_back(must(spare[on].slice(0, length))); });
    const bool optional =
        alone && ((right.kind == collective_kind::all_reduce ||
                   right.kind == collective_kind::reduce_scatter)
                      ? refs == &collective::recv
                      : right.kind == collective_kind::all_gather && refs == &collective::send);
    if (!(right.*refs).empty() && !optional) // a missing buffer means in place
      add(to, right, "a buffer too few" + side, errc::invalid_argument, named,
          [&](collective& x) { (x.*refs).pop_back(); });
  }
  if (right.kind != collective_kind::all_to_all_v) {
    add(to, right, "counts that the kind does not take", errc::invalid_argument, named,
        [&](collective& x) { x.counts.assign(size(), std::vector<std::uint64_t>(size(), 1)); });
    return;
  }
  const auto row = std::vector<std::uint64_t>(size(), 1);
  add(to, right, "a row of counts too many", errc::invalid_argument, named,
      [&](collective& x) { x.counts.push_back(row); });
  add(to, right, "a row of counts too few", errc::invalid_argument, named,
      [](collective& x) { x.counts.pop_back(); });
  add(to, right, "a count too many", errc::invalid_argument, named,
      [](collective& x) { x.counts[1].push_back(1); });
  add(to, right, "a count too few", errc::invalid_argument, named,
      [](collective& x) { x.counts[1].pop_back(); });
  const auto sender = static_cast<int>(on);
  add(to, right, "counts that are not the buffers'", errc::shape_mismatch, sender,
      [](collective& x) { ++x.counts[0][0]; });
  add(to, right, "counts beyond all memory", errc::shape_mismatch, sender,
      [](collective& x) { x.counts[0].back() = std::numeric_limits<std::uint64_t>::max(); });
}

/// Buffers that are valid alone but not together.
void BadCollectives::add_bad_shapes(std::vector<bad_request>& to, const collective& right,
                                    std::optional<std::size_t> alone) const {
  auto copy = right;
  const auto slots = slots_of(copy, size(), alone);
  for (std::size_t i = 0; i < slots.size(); ++i)
    for (std::size_t k = i + 1; k < slots.size(); ++k)
      if (slots[i].rank == slots[k].rank)
        add(to, right, "buffers that overlap at rank " + std::to_string(slots[i].rank),
            errc::invalid_argument, static_cast<int>(slots[i].rank), [&](collective& x) {
              auto all = slots_of(x, size(), alone);
              auto& whole = spare[all[i].rank];
              const std::size_t begin = all[k].ref->count() > 1 ? 1 : 0; // so that they overlap
              *all[i].ref = must(whole.slice(begin, all[i].ref->count()));
              *all[k].ref = must(whole.slice(0, all[k].ref->count()));
            });
  const auto first = static_cast<int>(alone.value_or(0));
  const auto uneven = length * size() + 1;
  auto replace = [&](std::vector<any_gpu_ref>& refs, std::size_t begin) {
    for (std::size_t i = 0; i < refs.size(); ++i)
      refs[i] = must(spare[alone.value_or(i)].slice(begin, uneven));
  };
  const char* what = "elements that are no equal parts";
  if (right.kind == collective_kind::all_to_all) {
    add(to, right, what, errc::shape_mismatch, first, [&](collective& x) {
      replace(x.send, 0);
      replace(x.recv, uneven);
    });
    add(to, right, "all_to_all in place", errc::invalid_argument, first,
        [](collective& x) { x.recv = x.send; });
  }
  if (right.kind == collective_kind::all_gather)
    add(to, right, what, errc::shape_mismatch, first, [&](collective& x) {
      x.send.clear();
      replace(x.recv, 0);
    });
  if (right.kind == collective_kind::reduce_scatter)
    add(to, right, what, errc::shape_mismatch, first, [&](collective& x) {
      x.recv.clear();
      replace(x.send, 0);
    });
}

void BadCollectives::add_bad_factors(std::vector<bad_request>& to, const collective& right,
                                     std::optional<std::size_t> alone) const {
  const auto named = alone ? static_cast<int>(*alone) : no_named_rank;
  const std::vector<double> factors(alone ? 1 : size(), 2.0);
  if (!reduces(right.kind)) {
    add(to, right, "factors that the kind does not take", errc::invalid_argument, named,
        [&](collective& x) {
          x.op = reduce_op::premul_sum;
          x.factors = factors;
        });
    return;
  }
  add(to, right, "factors for a sum", errc::invalid_argument, named,
      [&](collective& x) { x.factors = factors; });
  add(to, right, "an operation that does not exist", errc::invalid_argument, named,
      [](collective& x) { x.op = static_cast<reduce_op>(99); });
  auto with = [&](const std::string& what, int rank, std::vector<double> wrong) {
    add(to, right, what, errc::invalid_argument, rank, [&](collective& x) {
      x.op = reduce_op::premul_sum;
      x.factors = std::move(wrong);
    });
  };
  with("no factor", static_cast<int>(alone.value_or(0)), {});
  with("a factor too many", named, std::vector<double>(factors.size() + 1, 2.0));
  if (!alone)
    with("a factor too few", no_named_rank, std::vector<double>(factors.size() - 1, 2.0));
  const auto last = static_cast<int>(alone.value_or(size() - 1));
  for (double x : {0.5, 2147483648.0, -2147483649.0, std::numeric_limits<double>::infinity(),
                   std::numeric_limits<double>::quiet_NaN()}) {
    auto wrong = factors;
    wrong.back() = x;
    with("a factor that is no int32: " + std::to_string(x), last, wrong);
  }
}

// -- whole requests

void BadCollectives::expect_refused(const bad_request& x) {
  SCOPED_TRACE(x.what);
  testing::stopwatch watch;
  const auto before = spy.launched();
  expect_refused_at_once(w->run(x.call, x.options), x);
  // If the in-place form of a verb omits buffers, the other form requires them.
  expect_refused_at_once(call_verb(*w, x.call, x.options), x);
  group beside{{barrier{}, x.call}, x.options};
  expect_refused_at_once(w->run(beside), x);
  expect_refusal(ask<collective_done>(*system, w->actor(), beside), x);
  if (testing::has_message(x.call))
    testing::with_message(x.call, x.options, [&](auto message) {
      expect_refusal(ask<collective_done>(*system, w->actor(), message), x);
    });
  EXPECT_EQ(spy.launched(), before);
  EXPECT_LT(watch.elapsed(), testing::at_once);
}

// INV-1, INV-10, INV-12
TEST_F(BadCollectives, AreRefusedAndLoseNothing) {
  for (auto kind : verbs) {
    SCOPED_TRACE(to_string(kind));
    const subject of{*w, kind};
    bool by_message = false;
    for (auto& x : bad_requests(of, std::nullopt)) {
      expect_refused(x);
      of.poison();
      if (by_message)
        testing::with_message(of.request(), {}, [&](auto message) {
          EXPECT_TRUE(is_ok(ask<collective_done>(*system, w->actor(), message))) << x.what;
        });
      else
        EXPECT_TRUE(is_ok(answer_of(call_verb(*w, of.request())))) << x.what;
      of.expect_right();
      by_message = !by_message;
      ASSERT_FALSE(HasFailure()) << x.what;
    }
  }
}

TEST_F(BadCollectives, MessagesOfARankToItselfThatOverlap) {
  for (std::size_t first : {0, 1}) {
    collective x =
        send_recv{1, 1, must(spare[1].slice(0, length)), must(spare[1].slice(first, length)), {}};
    expect_refused({"overlap", x, {}, errc::invalid_argument, 1});
  }
}

TEST_F(BadCollectives, GroupsOfTooManyOrOfWhatConflicts) {
  group too_many;
  too_many.calls.assign(1025, barrier{});
  group conflict;
  conflict.calls.assign(2, all_reduce{spare, {}, reduce_op::sum, {}, {}});
  for (auto& [x, rank] : {std::pair{too_many, no_named_rank}, {conflict, 0}}) {
    const bad_request bad{"", {}, {}, errc::invalid_argument, rank};
    expect_refused_at_once(w->run(x), bad);
    expect_refusal(ask<collective_done>(*system, w->actor(), x), bad);
  }
  too_many.calls.pop_back();
  EXPECT_TRUE(is_ok(answer_of(w->run(too_many))));
  EXPECT_TRUE(testing::works(*w));
}

// -- calls of one rank

using answers = std::vector<pending<collective_done>>;

class BadRankCalls : public BadCollectives {
protected:
  answers call_others(const subject& of, std::size_t rank) const {
    answers all;
    for (auto other : of.callers())
      if (other != rank)
        all.push_back(call_verb(w->rank(other), of.request_of(other)));
    return all;
  }

  /// Makes the wrong call in all forms, before and after the other ranks' calls. Then the rank's
  /// correct call forms one operation with them.
  void expect_not_counted(const subject& of, std::size_t rank, const bad_request& x) {
    SCOPED_TRACE(x.what + ", asked by rank " + std::to_string(rank));
    of.poison();
    testing::stopwatch watch;
    const auto before = spy.launched();
    const rank_local message{static_cast<int>(rank), x.call, x.options};
    expect_refusal(answer_of(w->rank(rank).run(x.call, x.options)), x);
    auto others = call_others(of, rank);
    expect_refused_at_once(w->rank(rank).run(x.call, x.options), x);
    expect_refusal(ask<collective_done>(*system, w->actor(), message), x);
    expect_refused_at_once(call_verb(w->rank(rank), x.call, x.options), x);
    for (auto& other : others)
      EXPECT_FALSE(other.ready());
    EXPECT_EQ(spy.launched(), before);
    auto accepted = of.accept(rank);
    others.push_back(call_verb(w->rank(rank), of.request_of(rank)));
    for (auto& a : others)
      EXPECT_TRUE(is_ok(answer_of(a)));
    EXPECT_LT(watch.elapsed(), testing::at_once);
    for (auto& done : accepted)
      EXPECT_TRUE(is_ok(answer_of(done)));
    of.accept(); // also the other ranks' buffers that it named
    of.expect_right();
  }

  /// Makes the call in both forms. It ends the calls of all ranks, those made before it and those
  /// made later. Then the correct calls of all ranks form one operation.
  void expect_end_for_all(const subject& of, std::size_t rank, const bad_request& x) {
    SCOPED_TRACE(x.what + ", asked by rank " + std::to_string(rank));
    of.poison();
    testing::stopwatch watch;
    const auto before = spy.launched();
    auto expect_ended = [&](const answers& all) {
      for (auto& other : all) {
        auto got = answer_of(other);
        ASSERT_TRUE(has_code(got, x.code));
        if (x.rank >= 0) {
          EXPECT_EQ(failure_of(got.error())->rank, x.rank);
        }
      }
    };
    auto others = call_others(of, rank);
    expect_refusal(answer_of(w->rank(rank).run(x.call, x.options)), x);
    expect_ended(others);
    const rank_local message{static_cast<int>(rank), x.call, x.options};
    expect_refusal(ask<collective_done>(*system, w->actor(), message), x);
    expect_refusal(answer_of(w->rank(rank).run(x.call, x.options)), x);
    expect_ended(call_others(of, rank));
    expect_ended(call_others(of, rank));
    EXPECT_EQ(spy.launched(), before);
    EXPECT_LT(watch.elapsed(), testing::at_once);
    of.accept();
    auto all = call_others(of, rank);
    all.push_back(call_verb(w->rank(rank), of.request_of(rank)));
    for (auto& a : all)
      EXPECT_TRUE(is_ok(answer_of(a)));
    of.expect_right();
  }
};

/// Returns true if the call itself is wrong, independent of the state of the world.
bool is_wrong_by_itself(const bad_request& x) {
  switch (x.code) {
  case errc::invalid_argument:
  case errc::shape_mismatch:
  case errc::not_supported:
  case errc::membership_changed: // the call names another membership
    return true;
  case errc::stale_ref:
    return x.what.starts_with("no memory");
  default:
    return false;
  }
}

TEST_F(BadRankCalls, AreRefusedAndDoNotCountOrEndForAll) {
  for (auto kind : verbs) {
    SCOPED_TRACE(to_string(kind));
    const subject of{*w, kind};
    for (auto rank : of.callers())
      for (auto& x : bad_requests(of, rank)) {
        if (is_wrong_by_itself(x))
          expect_not_counted(of, rank, x);
        else
          expect_end_for_all(of, rank, x);
        ASSERT_FALSE(HasFailure()) << x.what;
      }
  }
}

TEST_F(BadRankCalls, OfRanksThatDoNotExist) {
  for (auto kind : verbs)
    for (auto rank : {static_cast<std::int32_t>(size()), -1}) {
      const subject of{*w, kind};
      expect_refusal(
          ask<collective_done>(*system, w->actor(), rank_local{rank, of.request_of(0), {}}),
          {"", {}, {}, errc::invalid_argument, no_named_rank});
    }
  EXPECT_TRUE(testing::works(*w));
}

TEST_F(BadRankCalls, ExchangesAreRefusedAsAWhole) {
  const auto last = static_cast<std::int32_t>(size() - 1);
  const auto first = must(spare[0].slice(0, length));
  const auto second = must(spare[0].slice(length, length));
  const auto longer = must(spare[0].slice(2 * length, length + 1));
  const message_end right{last, first};
  const auto stands_for = [](std::string what, errc code, int rank) {
    return bad_request{std::move(what), {}, {}, code, rank};
  };
  std::vector<std::pair<bad_request, exchange>> all{
      {stands_for("too much", errc::invalid_argument, no_named_rank),
       {0, std::vector<message_end>(1025, right), {}, {}}},
      {stands_for("of no rank", errc::invalid_argument, no_named_rank),
       {last + 1, {right}, {}, {}}},
      {stands_for("of no rank", errc::invalid_argument, no_named_rank), {-1, {right}, {}, {}}},
      {stands_for("to no rank", errc::invalid_argument, 0),
       {0, {right, {last + 1, second}}, {}, {}}},
      {stands_for("from no rank", errc::invalid_argument, 0), {0, {right}, {{-1, second}}, {}}},
      {stands_for("no buffer", errc::invalid_argument, 0), {0, {right, {last, {}}}, {}, {}}},
      {stands_for("another rank's", errc::invalid_argument, 0),
       {0, {right}, {{last, spare[static_cast<std::size_t>(last)]}}, {}}},
      {stands_for("one buffer for both", errc::invalid_argument, 0),
       {0, {right}, {{last, first}}, {}}},
      {stands_for("one end of its own", errc::invalid_argument, 0),
       {0, {right, {0, second}}, {}, {}}},
      {stands_for("its own of two sizes", errc::shape_mismatch, 0),
       {0, {right, {0, second}}, {{0, longer}}, {}}},
      {stands_for("another membership", errc::membership_changed, any_rank),
       {0, {right}, {{last, second}}, {.deadline = {}, .membership = 77}}},
  };
  for (auto& [bad, x] : all) {
    SCOPED_TRACE(bad.what);
    const auto before = spy.launched();
    if (x.rank >= 0 && x.rank <= last)
      expect_refused_at_once(
          w->rank(static_cast<std::size_t>(x.rank)).exchange(x.sends, x.recvs, x.options), bad);
    expect_refusal(ask<collective_done>(*system, w->actor(), x), bad);
    EXPECT_EQ(spy.launched(), before);
  }
  // None of them counts as a call.
  testing::accept_bytes(w->device_of(0), spare[0]);
  testing::accept_bytes(w->device_of(size() - 1), spare[size() - 1]);
  const auto& there = spare[static_cast<std::size_t>(last)];
  auto others =
      w->rank(static_cast<std::size_t>(last))
          .exchange({{0, must(there.slice(0, length))}}, {{0, must(there.slice(length, length))}});
  EXPECT_TRUE(is_ok(answer_of(w->rank(0).exchange({right}, {{last, second}}))));
  EXPECT_TRUE(is_ok(answer_of(others)));
  EXPECT_TRUE(testing::works(*w));
}

/// A call that is valid alone but does not match the other ranks' calls.
struct odd_call {
  std::string what;
  collective call;
};

std::vector<odd_call> odd_calls(const collective& right, std::size_t ranks,
                                const any_gpu_ref& spare) {
  std::vector<odd_call> all;
  auto odd = [&](std::string what, auto change) {
    auto x = right;
    change(x);
    all.push_back({std::move(what), std::move(x)});
  };
  auto each_buffer = [](collective& x, auto change) {
    for (auto* refs : {&x.send, &x.recv})
      for (auto& ref : *refs)
        ref = change(ref);
  };
  const bool message = right.kind == collective_kind::send || right.kind == collective_kind::recv;
  if (right.kind != collective_kind::barrier) {
    odd("another type", [&](collective& x) {
      each_buffer(x, [](auto& ref) { return must(ref.reinterpret(dtype::uint32)); });
    });
    if (!message)
      odd("another kind", [](collective& x) { x = barrier{}; });
  } else {
    odd("another kind",
        [&](collective& x) { x = all_reduce{{spare}, {}, reduce_op::sum, {}, {}}; });
  }
  if (right.kind == collective_kind::all_to_all_v)
    odd("other counts", [&](collective& x) {
      x.send = {must(spare.slice(0, x.send[0].count() + 1))};
      ++x.counts[0][1]; // in the call that is made first
    });
  else if (right.kind != collective_kind::barrier)
    odd("another count", [&](collective& x) {
      each_buffer(x, [](auto& ref) { return must(ref.slice(0, ref.count() / 2)); });
    });
  if (reduces(right.kind))
    odd("another operation", [](collective& x) { x.op = reduce_op::max; });
  if (has_root(right.kind))
    odd("another root", [&](collective& x) { // the caller itself
      x.peer = 0;
      const bool many = x.kind == collective_kind::gather || x.kind == collective_kind::scatter;
      auto& missing = x.send.empty() ? x.send : x.recv;
      missing.push_back(must(spare.slice(0, many ? ranks * length : length)));
    });
  return all;
}

TEST_F(BadRankCalls, ThatDoNotGoTogetherEndForAllAndAreDoneWith) {
  for (auto kind : verbs) {
    SCOPED_TRACE(to_string(kind));
    const subject of{*w, kind};
    for (auto& x : odd_calls(of.request_of(0), size(), spare[0])) {
      SCOPED_TRACE(x.what);
      const auto callers = of.callers();
      answers all;
      all.reserve(callers.size());
      all.push_back(call_verb(w->rank(callers[1]), of.request_of(callers[1])));
      all.push_back(call_verb(w->rank(0), x.call));
      for (std::size_t i = 2; i < callers.size(); ++i) // after the mismatch
        all.push_back(call_verb(w->rank(callers[i]), of.request_of(callers[i])));
      for (auto& a : all) {
        auto got = answer_of(a);
        ASSERT_TRUE(has_code(got, errc::collective_mismatch));
        EXPECT_EQ(failure_of(got.error())->rank, 0);
        EXPECT_EQ(failure_of(got.error())->device, w->device_of(0).ordinal());
      }
      of.poison();
      all = call_others(of, 0);
      all.push_back(call_verb(w->rank(0), of.request_of(0)));
      for (auto& a : all)
        EXPECT_TRUE(is_ok(answer_of(a)));
      of.expect_right();
    }
  }
}

} // namespace

} // namespace troupe
