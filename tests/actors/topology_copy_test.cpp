// Copies of a topology: their paths, their results, and their failures.

#include "support/eventually.hpp"
#include "support/forwarding_backend.hpp"
#include "support/guarded_backend.hpp"
#include "support/topology_fixture.hpp"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <tuple>

namespace troupe::testing {
namespace {

constexpr std::size_t count = 5000;

using bytes = std::vector<std::byte>;

any_gpu_ref allocate(test_system& system, int device, std::size_t number, dtype type) {
  return must(answer_of(system.open(device).allocate(type, number)));
}

/// Memory of bytes and its content.
struct content {
  any_gpu_ref ref;
  bytes data;
};

content filled(test_system& system, int device, std::uint64_t seed, std::size_t size = count) {
  content result{allocate(system, device, size, dtype::uint8), random_bytes(size, seed)};
  put(system.open(device), result.ref, result.data);
  return result;
}

::testing::AssertionResult has(test_system& system, const any_gpu_ref& x, const bytes& want) {
  return holds(system.open(x.device()), x, want);
}

/// For EXPECT_TRUE: a copy between the devices is correct in both directions.
::testing::AssertionResult copies(test_system& system, const topology& t, int from, int to,
                                  std::size_t size = count) {
  for (auto [a, b] : {std::pair{from, to}, std::pair{to, from}}) {
    auto source = filled(system, a, 1, size);
    auto target = filled(system, b, 2, size);
    if (auto done = answer_of(t.copy(target.ref, source.ref)); !done)
      return ::testing::AssertionFailure() << describe(done.error());
    if (auto right = has(system, target.ref, source.data); !right)
      return right << " from device " << a << " to device " << b;
  }
  return ::testing::AssertionSuccess();
}

bytes slice(const bytes& x, std::size_t first, std::size_t number) {
  auto begin = x.begin() + static_cast<std::ptrdiff_t>(first);
  return {begin, begin + static_cast<std::ptrdiff_t>(number)};
}

/// A small staging buffer, so that copies through the host use many chunks.
lane_options small_chunks() { return {.staging_bytes = 16'384}; }

// -- results

class CopyOfType : public ::testing::TestWithParam<std::tuple<dtype, bool>> {};

INSTANTIATE_TEST_SUITE_P(All, CopyOfType,
                         ::testing::Combine(::testing::ValuesIn(all_dtypes), ::testing::Bool()),
                         [](const auto& x) {
                           return std::string{to_string(std::get<0>(x.param))} +
                                  (std::get<1>(x.param) ? "_links" : "_host");
                         });

TEST_P(CopyOfType, WholeAndInParts) {
  TROUPE_NEEDS_DEVICES(2);
  auto [type, use_links] = GetParam();
  auto config = quick_config();
  config.use_links = use_links;
  test_system system{{.lanes = small_chunks()}};
  auto t = open_topology(system, config);
  auto size = size_of(type);
  for (auto [from, to] : {std::pair{0, 0}, {0, 1}, {1, 0}, {1, 1}}) {
    SCOPED_TRACE(std::to_string(from) + " to " + std::to_string(to));
    auto source = allocate(system, from, count, type);
    auto target = allocate(system, to, count, type);
    auto data = random_bytes(count * size, 1);
    auto before = random_bytes(count * size, 2);
    put(system.open(from), source, data);
    put(system.open(to), target, before);
    ASSERT_TRUE(is_ok(answer_of(t.copy(must(target.slice(7, 100)), must(source.slice(900, 100))))));
    auto want = before;
    std::copy_n(data.begin() + static_cast<std::ptrdiff_t>(900 * size), 100 * size,
                want.begin() + static_cast<std::ptrdiff_t>(7 * size));
    EXPECT_TRUE(has(system, target, want));
    ASSERT_TRUE(is_ok(answer_of(t.copy(target, source))));
    EXPECT_TRUE(has(system, target, data));
    EXPECT_TRUE(has(system, source, data));
  }
}

TEST(TopologyCopy, OfNothing) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system;
  for (bool use_links : {true, false}) {
    auto config = quick_config();
    config.use_links = use_links;
    auto t = open_topology(system, config);
    for (int to : {0, 1})
      EXPECT_TRUE(is_ok(answer_of(t.copy(allocate(system, to, 0, dtype::float32),
                                         allocate(system, 0, 0, dtype::float32)))));
    const auto before = t.stats();
    const auto source = allocate(system, 0, 8, dtype::float32);
    for (const auto& x : {t.copy(std::vector<copy_pair>{}), t.replicate(source, {}),
                          t.distribute(allocate(system, 0, 0, dtype::float32), {})}) {
      EXPECT_TRUE(x.ready());
      EXPECT_TRUE(is_ok(answer_of(x)));
    }
    EXPECT_EQ(t.stats(), before);
    EXPECT_TRUE(has_code(answer_of(t.distribute(source, {})), errc::shape_mismatch));
    EXPECT_TRUE(has_code(answer_of(t.copy(std::vector<copy_pair>{}, {.deadline = -1ns})),
                         errc::deadline_exceeded));
    detail::anon_send(t.actor(), shutdown{});
    EXPECT_TRUE(eventually(
        [&] { return has_code(answer_of(t.copy(std::vector<copy_pair>{})), errc::unavailable); }));
  }
}

TEST(TopologyCopy, WithinABuffer) {
  TROUPE_NEEDS_DEVICES(1);
  test_system system{{.devices = 1}};
  auto t = open_topology(system);
  auto x = filled(system, 0, 1);
  EXPECT_TRUE(is_ok(answer_of(t.copy(must(x.ref.slice(0, 100)), must(x.ref.slice(100, 100))))));
  EXPECT_TRUE(has(system, must(x.ref.slice(0, 100)), slice(x.data, 100, 100)));
  EXPECT_EQ(t.stats().local_bytes, 100u);
}

struct way {
  const char* name;
  pairs no_access;
  int staged; ///< of the two copies between 0 and 1
};

void PrintTo(const way& x, std::ostream* out) { *out << x.name; }

class CopyWay : public ::testing::TestWithParam<way> {};

INSTANTIATE_TEST_SUITE_P(Ways, CopyWay,
                         ::testing::Values(way{"both", {}, 0}, way{"only_the_source", {{1, 0}}, 0},
                                           way{"only_the_target", {{0, 1}}, 0},
                                           way{"none", {{0, 1}, {1, 0}}, 2}),
                         [](const auto& x) { return std::string{x.param.name}; });

// The device that has access copies. If none has access, the copy goes through the host.
TEST_P(CopyWay, IsTakenAndCounted) {
  TROUPE_HOST_ONLY("a peer matrix of the test's own");
  auto& want = GetParam();
  for (bool verify : {false, true}) {
    backend_books books;
    {
      test_system system{{.wrap = [&](auto inner) { return books.guard(std::move(inner)); },
                          .lanes = small_chunks(),
                          .links = links_without(want.no_access)}};
      auto t = open_topology(system, quick_config(verify));
      topology_stats expected;
      for (std::size_t size : {1u, 4096u, 1'000'003u}) {
        EXPECT_TRUE(copies(system, t, 0, 1, size));
        auto staged = static_cast<std::uint64_t>(want.staged);
        expected.staged_copies += staged;
        expected.staged_bytes += staged * size;
        expected.direct_copies += 2 - staged;
        expected.direct_bytes += (2 - staged) * size;
        EXPECT_EQ(t.stats(), expected);
      }
    }
    EXPECT_EQ(books.complaints(), std::vector<std::string>{});
    EXPECT_TRUE(books.wait_none(backend_books::pinned, patience));
  }
}

TEST(TopologyCopy, NotOverALinkThatCorrupts) {
  TROUPE_HOST_ONLY("faults");
  auto plan = std::make_shared<fault_plan>();
  plan->add(
      {.kind = fault::corrupt, .on = verb::copy_peer, .device = 0, .times = forever, .peer = 1});
  test_system system{{.faults = plan, .lanes = small_chunks()}};
  auto t = open_topology(system, quick_config(true));
  EXPECT_EQ(with_access(t.graph(), peer_access::failed), (pairs{{0, 1}}));
  EXPECT_TRUE(copies(system, t, 0, 1));
  auto stats = t.stats();
  EXPECT_EQ(stats.staged_copies, 1u);
  EXPECT_EQ(stats.direct_copies, 1u); // the opposite link has no known failure
  EXPECT_EQ(stats.links_failed, 1u);
}

TEST(TopologyCopy, BothDirectionsThroughTheHostAtOnce) {
  TROUPE_NEEDS_DEVICES(2);
  auto config = quick_config();
  config.use_links = false;
  test_system system{{.lanes = small_chunks()}};
  auto t = open_topology(system, config);
  constexpr std::size_t size = 300'000;
  std::vector<content> here;
  std::vector<content> there;
  std::vector<pending<void>> all;
  for (std::uint64_t i = 0; i < 4; ++i) {
    here.push_back(filled(system, 0, 2 * i, size));
    there.push_back(filled(system, 1, 2 * i + 1, size));
  }
  for (std::size_t i = 0; i < 4; i += 2) {
    all.push_back(t.copy(there[i].ref, here[i].ref));
    all.push_back(t.copy(here[i + 1].ref, there[i + 1].ref));
  }
  for (auto& x : all)
    EXPECT_TRUE(is_ok(answer_of(x)));
  for (std::size_t i = 0; i < 4; i += 2) {
    EXPECT_TRUE(has(system, there[i].ref, here[i].data));
    EXPECT_TRUE(has(system, here[i + 1].ref, there[i + 1].data));
  }
}

// -- batches

/// Returns consecutive slices of `size` bytes.
std::vector<any_gpu_ref> slices(const any_gpu_ref& x, std::size_t size) {
  std::vector<any_gpu_ref> result;
  for (std::size_t i = 0; i + size <= x.count(); i += size)
    result.push_back(must(x.slice(i, size)));
  return result;
}

class CopiesAtOnce : public ::testing::TestWithParam<bool> {
protected:
  topology open(test_system& system) {
    auto config = quick_config();
    config.use_links = GetParam();
    return open_topology(system, config);
  }
};

INSTANTIATE_TEST_SUITE_P(Ways, CopiesAtOnce, ::testing::Bool(),
                         [](const auto& x) { return std::string{x.param ? "links" : "host"}; });

// Copies in every direction, more than a launch queue should hold, in reverse order.
TEST_P(CopiesAtOnce, ABatchIsOneRequest) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system{{.devices = 3, .lanes = small_chunks()}};
  auto t = open(system);
  constexpr std::size_t size = 10;
  std::vector<copy_pair> batch;
  std::vector<std::pair<content, content>> done; // target and source
  std::size_t local = 0;
  for (auto from : system.ordinals())
    for (auto to : system.ordinals()) {
      done.emplace_back(filled(system, to, 1), filled(system, from, 2 + done.size()));
      auto targets = slices(done.back().first.ref, size);
      auto sources = slices(done.back().second.ref, size);
      for (std::size_t i = 0; i < targets.size(); ++i)
        batch.push_back({targets[i], sources[targets.size() - 1 - i]});
      local += from == to ? targets.size() : 0;
    }
  ASSERT_TRUE(is_ok(answer_of(t.copy(batch))));
  for (auto& [target, source] : done) {
    bytes want;
    for (std::size_t i = count; i >= size; i -= size)
      for (auto x : slice(source.data, i - size, size))
        want.push_back(x);
    EXPECT_TRUE(has(system, target.ref, want));
  }
  auto stats = t.stats();
  EXPECT_EQ(stats.local_copies, local);
  EXPECT_EQ(stats.local_bytes, local * size);
  auto between = batch.size() - local;
  if (!GetParam() || !on_cuda()) { // the access between GPUs is not known
    EXPECT_EQ(GetParam() ? stats.direct_copies : stats.staged_copies, between);
    EXPECT_EQ(GetParam() ? stats.direct_bytes : stats.staged_bytes, between * size);
  }
  EXPECT_EQ(stats.direct_copies + stats.staged_copies, between);
}

// Admission of a request blocks all others. Its pieces must not slow each other down.
TEST(TopologyCopy, ManyPiecesGetTheirPlaceAtOnce) {
  TROUPE_NEEDS_DEVICES(2);
  constexpr std::size_t pieces = 40'000;
  test_system system;
  auto t = open_topology(system);
  auto source = filled(system, 0, 1, 2 * pieces);
  auto target = filled(system, 1, 2, 2 * pieces);
  auto want = target.data;
  std::vector<copy_pair> batch;
  for (std::size_t i = 0; i < 2 * pieces; i += 2) { // with gaps
    batch.push_back({must(target.ref.slice(i, 1)), must(source.ref.slice(i, 1))});
    want[i] = source.data[i];
  }
  stopwatch watch;
  auto x = t.copy(std::move(batch));
  EXPECT_LT(watch.elapsed(), at_once);
  EXPECT_TRUE(is_ok(answer_of(x)));
  EXPECT_TRUE(has(system, target.ref, want));
}

// The time under the order lock grows linearly with the pieces, not quadratically.
TEST(TopologyCopy, ManyPiecesGetTheirPlaceBehindAsManyOthers) {
  TROUPE_NEEDS_DEVICES(2);
  constexpr std::size_t pieces = 20'000;
  test_system system;
  auto t = open_topology(system);
  auto target = filled(system, 1, 2, 3 * pieces);
  auto want = target.data;
  std::vector<content> sources;
  for (std::uint64_t i = 0; i < 3; ++i)
    sources.push_back(filled(system, 0, 10 + i, 3 * pieces));
  gate lane;
  auto held = lane.hold_lane(system.open(0));
  ASSERT_TRUE(lane.wait_reached());
  std::vector<pending<void>> all;
  std::vector<std::chrono::nanoseconds> took;
  for (std::size_t i = 0; i < 3; ++i) { // each shares one byte of every piece with the one before
    auto& source = sources[i];
    std::vector<copy_pair> batch;
    for (std::size_t j = 0; j + 4 < 3 * pieces; j += 3) { // with gaps
      batch.push_back({must(target.ref.slice(i + j, 2)), must(source.ref.slice(j, 2))});
      std::copy_n(source.data.begin() + static_cast<std::ptrdiff_t>(j), 2,
                  want.begin() + static_cast<std::ptrdiff_t>(i + j));
    }
    stopwatch watch;
    all.push_back(t.copy(std::move(batch)));
    took.push_back(watch.elapsed());
  }
  lane.open();
  EXPECT_TRUE(is_ok(answer_of(held)));
  for (auto& x : all)
    EXPECT_TRUE(is_ok(answer_of(x)));
  EXPECT_TRUE(has(system, target.ref, want));
  for (auto i : {1u, 2u})
    EXPECT_LT(took[i], 20 * took[0] + at_once / 20) << took[0].count();
}

TEST_P(CopiesAtOnce, Replicate) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system{{.devices = 4, .lanes = small_chunks()}};
  auto t = open(system);
  auto source = filled(system, 0, 1);
  std::vector<content> targets;
  std::vector<any_gpu_ref> refs;
  for (auto to : system.ordinals()) {
    targets.push_back(filled(system, to, 2));
    refs.push_back(targets.back().ref);
  }
  ASSERT_TRUE(is_ok(answer_of(t.replicate(source.ref, refs))));
  for (auto& x : refs)
    EXPECT_TRUE(has(system, x, source.data));
  EXPECT_TRUE(has(system, source.ref, source.data));
}

TEST_P(CopiesAtOnce, Distribute) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system{{.devices = 4, .lanes = small_chunks()}};
  auto t = open(system);
  auto source = filled(system, 1, 1, 1000 * static_cast<std::size_t>(system.devices()) + 7);
  std::vector<any_gpu_ref> refs;
  for (auto to : system.ordinals())
    refs.push_back(filled(system, to, 2, 1000).ref);
  refs.push_back(filled(system, 0, 3, 0).ref);
  refs.push_back(filled(system, 0, 3, 7).ref);
  ASSERT_TRUE(is_ok(answer_of(t.distribute(source.ref, refs))));
  std::size_t first = 0;
  for (auto& x : refs) {
    EXPECT_TRUE(has(system, x, slice(source.data, first, x.count())));
    first += x.count();
  }
}

TEST(TopologyCopy, AsMessages) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system;
  auto t = open_topology(system);
  auto& actor = t.actor();
  auto ask_for = [&](auto what) {
    caf::scoped_actor self{system.get()};
    caf::error result;
    detail::request(self, actor, patience, std::move(what))
        .receive([] {}, [&](caf::error& why) { result = std::move(why); });
    return result;
  };
  auto a = filled(system, 0, 1);
  auto b = filled(system, 1, 2);
  auto c = filled(system, 1, 3);
  EXPECT_TRUE(is_ok(ask_for(copy{b.ref, a.ref, {}})));
  EXPECT_TRUE(has(system, b.ref, a.data));
  auto d = filled(system, 0, 4);
  EXPECT_TRUE(is_ok(ask_for(copy_batch{{{a.ref, c.ref}, {b.ref, d.ref}}, {}})));
  EXPECT_TRUE(has(system, a.ref, c.data));
  EXPECT_TRUE(has(system, b.ref, d.data));
  EXPECT_TRUE(is_ok(ask_for(replicate{a.ref, {b.ref, d.ref}, {}})));
  EXPECT_TRUE(has(system, b.ref, c.data));
  auto half = count / 2;
  EXPECT_TRUE(is_ok(
      ask_for(distribute{d.ref, {must(b.ref.slice(half, half)), must(b.ref.slice(0, half))}, {}})));
  EXPECT_TRUE(has(system, must(b.ref.slice(half, half)), slice(c.data, 0, half)));
  EXPECT_EQ(must(ask<topology_stats>(system, actor, get_stats{})), t.stats());
  EXPECT_EQ(t.stats().local_copies, 1u);
  EXPECT_TRUE(has_code(ask_for(copy{must(b.ref.slice(0, 1)), a.ref, {}}), errc::shape_mismatch));
  EXPECT_TRUE(is_ok(ask_for(copy_batch{})));
}

// -- independent work

// A copy that hangs blocks neither kernels nor copies to another device.
TEST(TopologyCopy, LinksWorkBesideEachOther) {
  TROUPE_HOST_ONLY("faults");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.devices = 3, .faults = plan}};
  auto t = open_topology(system);
  auto source = filled(system, 0, 1);
  auto one = filled(system, 1, 2);
  auto two = filled(system, 2, 3);
  auto other = filled(system, 0, 4);
  plan->add({.kind = fault::hang, .on = verb::copy_peer, .device = 0, .peer = 1});
  auto standing = t.copy(one.ref, source.ref);
  ASSERT_TRUE(plan->wait_injected(fault::hang, 1, patience));
  EXPECT_TRUE(is_ok(answer_of(t.copy(two.ref, source.ref))));
  EXPECT_TRUE(has(system, two.ref, source.data));
  EXPECT_TRUE(is_ok(answer_of(t.copy(other.ref, two.ref))));
  EXPECT_TRUE(is_ok(answer_of(system.open(0).fill(other.ref, std::uint8_t{7}))));
  EXPECT_FALSE(standing.ready());
  plan->release();
  EXPECT_TRUE(is_ok(answer_of(standing)));
  EXPECT_TRUE(has(system, one.ref, source.data));
}

// INV-9: copies run in the order of the requests, without waits in between.
TEST(TopologyCopy, KeepTheirOrder) {
  TROUPE_NEEDS_DEVICES(2);
  for (bool use_links : {true, false}) {
    auto config = quick_config();
    config.use_links = use_links;
    test_system system{{.devices = 3, .lanes = small_chunks()}};
    auto t = open_topology(system, config);
    auto number = system.devices();
    std::vector<any_gpu_ref> ring;
    for (auto d : system.ordinals())
      ring.push_back(filled(system, d, 1).ref);
    std::vector<pending<void>> all;
    for (int round = 0; round < 20; ++round) {
      all.push_back(system.open(0).fill(ring[0], static_cast<std::uint8_t>(round)));
      for (int i = 1; i < number; ++i)
        all.push_back(
            t.copy(ring[static_cast<std::size_t>(i)], ring[static_cast<std::size_t>(i) - 1]));
      all.push_back(system.open(0).fill(ring[0], std::uint8_t{99}));
      all.push_back(t.copy(ring[0], ring.back()));
    }
    for (auto& x : all)
      ASSERT_TRUE(is_ok(answer_of(x)));
    for (auto& x : ring)
      EXPECT_TRUE(has(system, x, bytes(count, std::byte{19})));
  }
}

// INV-4
TEST(TopologyCopy, HandlesMayBeDroppedMeanwhile) {
  TROUPE_HOST_ONLY("books of the host backend");
  for (bool use_links : {true, false}) {
    auto config = quick_config();
    config.use_links = use_links;
    backend_books books;
    {
      test_system system{{.wrap = [&](auto inner) { return books.guard(std::move(inner)); },
                          .lanes = small_chunks()}};
      auto t = open_topology(system, config);
      for (std::uint64_t i = 0; i < 50; ++i) {
        auto source = filled(system, 0, i);
        auto last = filled(system, 0, i + 1);
        {
          auto between = filled(system, 1, i + 2);
          t.copy(between.ref, std::exchange(source.ref, {}));
          t.copy(last.ref, between.ref);
        }
        ASSERT_TRUE(has(system, last.ref, source.data));
      }
    }
    EXPECT_EQ(books.complaints(), std::vector<std::string>{});
    EXPECT_TRUE(books.wait_none(backend_books::allocation, patience));
  }
}

// -- wrong input

class BadCopies : public ::testing::Test {
protected:
  using requests = std::vector<std::pair<const char*, std::function<caf::error()>>>;

  caf::error asked(pending<void> x) { return error_of(answer_of(x)); }
  caf::error copied(const any_gpu_ref& target, const any_gpu_ref& source) {
    return asked(t_->copy(target, source));
  }
  any_gpu_ref part(const any_gpu_ref& x, std::size_t first, std::size_t number) {
    return must(x.slice(first, number));
  }

  /// Expects that each request is refused, changes nothing, and leaves the topology usable.
  void expect_refused(const requests& all, errc code) {
    for (auto& [what, request] : all) {
      SCOPED_TRACE(what);
      stopwatch watch;
      auto why = request();
      EXPECT_TRUE(has_code(why, code));
      EXPECT_LT(watch.elapsed(), at_once);
      EXPECT_TRUE(failure_of(why) && !failure_of(why)->verb.empty());
    }
    for (auto* x : {&here_, &there_})
      if (!x->ref.stale()) {
        if (code == errc::stale_ref)
          accept_bytes(*system_, x->ref);
        EXPECT_TRUE(has(*system_, x->ref, x->data));
      }
    EXPECT_TRUE(copies(*system_, *t_, 0, 1));
  }

  void SetUp() override {
    TROUPE_NEEDS_DEVICES(2);
    system_.emplace();
    t_.emplace(open_topology(*system_));
    here_ = filled(*system_, 0, 1);
    there_ = filled(*system_, 1, 2);
  }

  std::optional<test_system> system_;
  std::optional<topology> t_;
  content here_;
  content there_;
};

TEST_F(BadCopies, ShapesThatDiffer) {
  auto& here = here_.ref;
  auto& there = there_.ref;
  auto words = must(here.reinterpret(dtype::uint32));
  auto numbers = allocate(*system_, 1, count / 4, dtype::float32);
  expect_refused(
      {
          {"more", [&] { return copied(part(there, 0, 10), here); }},
          {"less", [&] { return copied(there, part(here, 0, 10)); }},
          {"none", [&] { return copied(there, part(here, 0, 0)); }},
          {"another type of as many bytes", [&] { return copied(numbers, words); }},
          {"on one device", [&] { return copied(part(here, 0, 10), part(here, 20, 11)); }},
          {"one of a batch",
           [&] {
             return asked(t_->copy(
                 {{part(there, 0, 5), part(here, 0, 5)}, {part(there, 5, 5), part(here, 5, 6)}}));
           }},
          {"one replica", [&] { return asked(t_->replicate(here, {there, part(there, 0, 9)})); }},
          {"too few in parts", [&] { return asked(t_->distribute(here, {part(there, 0, 9)})); }},
          {"too many in parts",
           [&] { return asked(t_->distribute(part(here, 0, 9), {part(there, 0, 10)})); }},
          {"parts of another type", [&] { return asked(t_->distribute(words, {numbers})); }},
      },
      errc::shape_mismatch);
}

TEST_F(BadCopies, WhatOverlaps) {
  auto& here = here_.ref;
  auto& there = there_.ref;
  expect_refused(
      {
          {"itself", [&] { return copied(here, here); }},
          {"one byte", [&] { return copied(part(here, 0, 10), part(here, 9, 10)); }},
          {"two targets",
           [&] {
             return asked(t_->copy({{part(there, 0, 10), part(here, 0, 10)},
                                    {part(there, 9, 10), part(here, 20, 10)}}));
           }},
          {"a target and the source of another one",
           [&] {
             return asked(t_->copy({{part(there, 0, 10), part(here, 0, 10)},
                                    {part(here, 9, 5), part(there, 100, 5)}}));
           }},
          {"a target within one far before it",
           [&] {
             return asked(t_->copy({{part(there, 0, 100), part(here, 0, 100)},
                                    {part(there, 10, 1), part(here, 200, 1)},
                                    {part(there, 50, 1), part(here, 201, 1)}}));
           }},
          {"the same replica twice", [&] { return asked(t_->replicate(here, {there, there})); }},
          {"a replica in the source", [&] { return asked(t_->replicate(here, {here})); }},
          {"parts over each other",
           [&] {
             return asked(
                 t_->distribute(part(here, 0, 20), {part(there, 0, 10), part(there, 5, 10)}));
           }},
      },
      errc::invalid_argument);
  // A source may be read several times.
  EXPECT_TRUE(is_ok(asked(t_->copy({{part(there, 0, 10), part(here, 0, 10)},
                                    {part(there, 10, 10), part(here, 5, 10)},
                                    {part(there, 20, 10), part(here, 0, 10)}}))));
}

TEST_F(BadCopies, UnknownDevices) {
  auto config = quick_config();
  config.devices = {0};
  auto small = open_topology(*system_, config);
  auto& here = here_.ref;
  auto& there = there_.ref;
  expect_refused(
      {
          {"not in the topology", [&] { return asked(small.copy(there, here)); }},
          {"batch", [&] { return asked(small.copy({{here, there}})); }},
      },
      errc::invalid_argument);
}

TEST_F(BadCopies, MemoryOfAnotherSystem) {
  TROUPE_HOST_ONLY("a GPU is one system's");
  test_system other;
  auto foreign = filled(other, 0, 3);
  auto& here = here_.ref;
  auto& there = there_.ref;
  expect_refused(
      {
          {"source", [&] { return copied(there, foreign.ref); }},
          {"target", [&] { return copied(foreign.ref, here); }},
          {"replica", [&] { return asked(t_->replicate(here, {there, foreign.ref})); }},
          {"part", [&] { return asked(t_->distribute(here, {foreign.ref})); }},
      },
      errc::invalid_argument);
}

TEST_F(BadCopies, HandlesWithoutMemory) {
  auto& here = here_.ref;
  auto& there = there_.ref;
  expect_refused(
      {
          {"target", [&] { return copied({}, here); }},
          {"source", [&] { return copied(there, {}); }},
          {"batch", [&] { return asked(t_->copy({{there, here}, {}})); }},
          {"replicate", [&] { return asked(t_->replicate({}, {there})); }},
          {"replica", [&] { return asked(t_->replicate(here, {there, {}})); }},
          {"distribute", [&] { return asked(t_->distribute({}, {there})); }},
          {"part", [&] { return asked(t_->distribute(here, {there, {}})); }},
      },
      errc::stale_ref);
}

TEST_F(BadCopies, HandlesOfAnEarlierLife) {
  for (int end : {0, 1}) {
    must(answer_of(system_->open(end).reset()));
    auto& here = here_.ref;
    auto& there = there_.ref;
    auto fresh = filled(*system_, 0, 5);
    expect_refused(
        {
            {"there", [&] { return copied(there, here); }},
            {"back", [&] { return copied(here, there); }},
            {"batch",
             [&] {
               return asked(t_->copy({{part(there, 0, 10), part(here, 0, 10)},
                                      {part(there, 10, 10), part(fresh.ref, 0, 10)}}));
             }},
            {"replicate", [&] { return asked(t_->replicate(here, {there})); }},
            {"distribute", [&] { return asked(t_->distribute(here, {there})); }},
        },
        errc::stale_ref);
    EXPECT_TRUE(has(*system_, fresh.ref, fresh.data));
    here_ = filled(*system_, 0, 1);
    there_ = filled(*system_, 1, 2);
  }
}

TEST_F(BadCopies, AnIndeterminateSource) {
  auto& here = here_.ref;
  auto& there = there_.ref;
  auto launched = launch_failure(system_->open(0), "on purpose", {part(here, 10, 10)});
  EXPECT_TRUE(has_code(answer_of(launched), errc::launch_failed));
  for (auto& why : {copied(there, here), asked(t_->replicate(here, {there})),
                    asked(t_->distribute(here, {there})),
                    asked(t_->copy({{part(there, 0, 1), part(here, 19, 1)}}))})
    EXPECT_TRUE(has_code(why, errc::indeterminate));
  EXPECT_TRUE(has_code(there.access(), errc::skipped)); // its source was indeterminate
  accept_bytes(*system_, there);
  EXPECT_TRUE(has(*system_, there, there_.data));
  // Determinate ranges can be copied. A range that is wholly overwritten becomes determinate.
  EXPECT_TRUE(is_ok(copied(part(there, 0, 10), part(here, 0, 10))));
  EXPECT_TRUE(is_ok(copied(part(here, 10, 10), part(there, 10, 10))));
  EXPECT_TRUE(is_ok(copied(there, here)));
}

TEST_F(BadCopies, ADeviceThatHasEnded) {
  auto& here = here_.ref;
  auto& there = there_.ref;
  auto spare = filled(*system_, 0, 3);
  system_->open(1).shutdown();
  for (auto& why : {copied(there, here), copied(here, there), asked(t_->replicate(here, {there})),
                    asked(t_->distribute(here, {there})), asked(t_->copy({{there, here}}))})
    EXPECT_TRUE(has_code(why, errc::unavailable));
  EXPECT_TRUE(has_code(here.access(), errc::skipped));
  accept_bytes(*system_, here);
  EXPECT_TRUE(is_ok(copied(spare.ref, here)));
  EXPECT_TRUE(has(*system_, spare.ref, here_.data));
}

// -- deadlines and cancellation

TEST(TopologyCopy, ADeadlineThatIsOver) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system;
  auto t = open_topology(system);
  auto a = filled(system, 0, 1);
  auto b = filled(system, 1, 2);
  for (auto& x :
       {t.copy(b.ref, a.ref, {.deadline = 1ns}), t.replicate(a.ref, {b.ref}, {.deadline = 1ns})})
    EXPECT_TRUE(has_code(answer_of(x), errc::deadline_exceeded));
  EXPECT_TRUE(has_code(b.ref.access(), errc::skipped));
  accept_bytes(system, b.ref);
  EXPECT_TRUE(has(system, b.ref, b.data));
}

/// With and without links.
class CopyInTheMiddle : public ::testing::TestWithParam<std::tuple<bool, int>> {
protected:
  void SetUp() override {
    TROUPE_HOST_ONLY("faults");
    system_.emplace(system_options{.devices = 3, .faults = plan_, .lanes = small_chunks()});
    auto config = quick_config();
    config.use_links = links();
    t_.emplace(open_topology(*system_, config));
    here_ = filled(*system_, 0, 1);
    there_ = filled(*system_, 1, 2);
  }

  bool links() const { return std::get<0>(GetParam()); }
  int end() const { return std::get<1>(GetParam()); }

  /// Starts a copy from 0 to 1 that hangs on device `end`, or on the only device that has work.
  pending<void> standing_copy(request_options options = {}) {
    plan_->add(rule(fault::hang));
    auto x = t_->copy(there_.ref, here_.ref, options);
    EXPECT_TRUE(plan_->wait_injected(fault::hang, ++standing_, patience));
    return x;
  }
  fault_rule rule(fault kind, std::uint64_t first = 1) const {
    if (links())
      return {.kind = kind, .on = verb::copy_peer, .device = 0, .first = first};
    return {.kind = kind, .on = verb::copy, .device = end(), .first = first};
  }

  std::shared_ptr<fault_plan> plan_ = std::make_shared<fault_plan>();
  std::optional<test_system> system_;
  std::optional<topology> t_;
  content here_;
  content there_;
  std::uint64_t standing_ = 0;
};

INSTANTIATE_TEST_SUITE_P(Ends, CopyInTheMiddle,
                         ::testing::Combine(::testing::Bool(), ::testing::Values(0, 1)),
                         [](const auto& x) {
                           return std::string{std::get<0>(x.param) ? "links" : "host"} +
                                  std::to_string(std::get<1>(x.param));
                         });

// INV-1
TEST_P(CopyInTheMiddle, KeepsItsDeadline) {
  auto limit = 100ms;
  auto standing = standing_copy({.deadline = limit});
  auto behind = t_->copy(here_.ref, there_.ref, {.deadline = limit});
  EXPECT_TRUE(has_code(answer_of(standing), errc::deadline_exceeded));
  EXPECT_TRUE(has_code(answer_of(behind), errc::deadline_exceeded));
  plan_->release();
  // The copy was completed early but ran on: its target is valid, as if it had no deadline.
  EXPECT_TRUE(has(*system_, there_.ref, here_.data));
  EXPECT_TRUE(copies(*system_, *t_, 0, 1));
}

TEST_P(CopyInTheMiddle, CanBeTakenBack) {
  gate closed;
  auto held = closed.hold_lane(system_->open(end()));
  ASSERT_TRUE(closed.wait_reached());
  gate other;
  auto held_too = other.hold_lane(system_->open(1 - end()));
  ASSERT_TRUE(other.wait_reached());
  auto x = t_->copy(there_.ref, here_.ref);
  x.cancel();
  EXPECT_TRUE(has_code(answer_of(x), errc::cancelled));
  closed.open();
  other.open();
  must(answer_of(held));
  must(answer_of(held_too));
  EXPECT_TRUE(has(*system_, there_.ref, there_.data)); // nothing was copied
  auto standing = standing_copy();
  standing.cancel();
  EXPECT_TRUE(has_code(answer_of(standing), errc::cancelled));
  plan_->release();
  EXPECT_TRUE(has(*system_, there_.ref, here_.data));
  EXPECT_TRUE(copies(*system_, *t_, 0, 1));
}

// INV-4, INV-8
TEST_P(CopyInTheMiddle, AResetOfEitherEndAnswersIt) {
  for (int reset_end : {0, 1}) {
    SCOPED_TRACE(reset_end);
    auto standing = standing_copy();
    auto behind = t_->copy(here_.ref, there_.ref);
    auto reset = system_->open(reset_end).reset();
    stopwatch watch;
    for (auto& x : {standing, behind}) {
      auto why = error_of(answer_of(x));
      EXPECT_TRUE(has_code(why, errc::device_reset));
      EXPECT_EQ(failure_of(why)->device, reset_end);
    }
    EXPECT_LT(watch.elapsed(), at_once);
    // Its memory is in use, unless the other end has not yet produced data.
    if (links() || end() == 1 || reset_end == 0) {
      EXPECT_FALSE(reset.ready());
    }
    plan_->release();
    must(answer_of(reset));
    if (reset_end == 0) {
      EXPECT_TRUE(has_code(get(system_->open(1), there_.ref), errc::indeterminate));
    }
    here_ = filled(*system_, 0, 1);
    there_ = filled(*system_, 1, 2);
    EXPECT_TRUE(copies(*system_, *t_, 0, 1, 100'000));
    EXPECT_TRUE(copies(*system_, *t_, 1, 2));
  }
}

TEST_P(CopyInTheMiddle, AShutdownOfEitherEndAnswersIt) {
  auto standing = standing_copy();
  system_->open(end()).shutdown();
  EXPECT_TRUE(has_code(answer_of(standing), errc::unavailable));
  plan_->release();
  EXPECT_TRUE(copies(*system_, *t_, 1 - end(), 2));
}

TEST_P(CopyInTheMiddle, AFaultAnswersIt) {
  auto standing = standing_copy();
  auto behind = t_->replicate(here_.ref, {there_.ref});
  plan_->poison();
  EXPECT_TRUE(has_code(answer_of(standing), errc::device_fault));
  EXPECT_TRUE(has_code(answer_of(behind), errc::device_fault));
  EXPECT_FALSE(static_cast<bool>(answer_of(t_->copy(there_.ref, here_.ref))));
}

// -- failures

// Any call may fail, at issue or when its event is queried.
TEST_P(CopyInTheMiddle, AFailureIsNoSuccess) {
  constexpr std::size_t size = 40'000; // ten chunks
  for (std::uint64_t call : {1, 2, 5, 10}) {
    SCOPED_TRACE(call);
    auto source = filled(*system_, 0, call, size);
    auto target = filled(*system_, 1, call + 100, size);
    std::vector<copy_pair> all;
    for (std::size_t i = 0; i < 10; ++i)
      all.push_back(
          {must(target.ref.slice(i * 4000, 4000)), must(source.ref.slice(i * 4000, 4000))});
    auto number = plan_->add(rule(fault::fail, call));
    auto x = t_->copy(all);
    auto why = error_of(answer_of(x));
    ASSERT_EQ(plan_->injected_by(number), 1u);
    EXPECT_TRUE(has_code(why, links() ? errc::link_failed : errc::cuda_error));
    EXPECT_EQ(failure_of(why)->operation, x.number());
    EXPECT_TRUE(has_code(get(system_->open(1), target.ref), errc::indeterminate));
    EXPECT_TRUE(has(*system_, source.ref, source.data));
    ASSERT_TRUE(is_ok(answer_of(t_->copy(target.ref, source.ref))));
    EXPECT_TRUE(has(*system_, target.ref, source.data));
    if (links())
      must(answer_of(t_->verify_links())); // restores the link
  }
}

TEST_P(CopyInTheMiddle, NoPinnedMemoryIsNoSuccess) {
  if (links())
    GTEST_SKIP() << "needs none";
  plan_->add({.kind = fault::out_of_memory, .on = verb::allocate_pinned, .device = 2});
  auto source = filled(*system_, 0, 1);
  auto far = allocate(*system_, 2, count, dtype::uint8);
  must(answer_of(t_->copy(far, source.ref)));
  auto why = error_of(answer_of(t_->copy(there_.ref, far)));
  EXPECT_TRUE(has_code(why, errc::out_of_memory));
  EXPECT_TRUE(has_code(get(system_->open(1), there_.ref), errc::indeterminate));
  EXPECT_TRUE(is_ok(answer_of(t_->copy(there_.ref, far))));
  EXPECT_TRUE(has(*system_, there_.ref, source.data));
}

struct link_failure {
  const char* name;
  verb at;
};

void PrintTo(const link_failure& x, std::ostream* out) { *out << x.name; }

class FailingLink : public ::testing::TestWithParam<link_failure> {};

INSTANTIATE_TEST_SUITE_P(Places, FailingLink,
                         ::testing::Values(link_failure{"issue", verb::copy_peer},
                                           link_failure{"completion", verb::query}),
                         [](const auto& x) { return std::string{x.param.name}; });

TEST_P(FailingLink, IsTakenOut) {
  TROUPE_HOST_ONLY("faults");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.devices = 3, .faults = plan}};
  auto t = open_topology(system);
  graph_feed feed{system, t.actor()};
  auto source = filled(system, 0, 1);
  auto target = filled(system, 1, 2);
  auto other = filled(system, 2, 3);
  plan->add({.kind = fault::fail, .on = GetParam().at, .device = 0});
  auto x = t.copy(target.ref, source.ref);
  auto why = error_of(answer_of(x));
  ASSERT_TRUE(has_code(why, errc::link_failed));
  EXPECT_EQ(failure_of(why)->operation, x.number());
  EXPECT_EQ(failure_of(why)->device, 0);
  EXPECT_TRUE(has_code(get(system.open(1), target.ref), errc::indeterminate));
  auto graph =
      feed.until([](const p2p_graph& g) { return g.link(0, 1)->access == peer_access::failed; });
  EXPECT_EQ(with_access(graph, peer_access::failed), (pairs{{0, 1}}));
  EXPECT_TRUE(has_code(graph.link(0, 1)->reason, errc::link_failed));
  EXPECT_EQ(t.stats().links_failed, 1u);
  // The other links continue as before. Copies of this link go through the host.
  EXPECT_TRUE(is_ok(answer_of(t.replicate(source.ref, {target.ref, other.ref}))));
  EXPECT_TRUE(has(system, target.ref, source.data));
  EXPECT_TRUE(has(system, other.ref, source.data));
  auto stats = t.stats();
  EXPECT_EQ(stats.staged_copies, 1u);
  EXPECT_EQ(stats.direct_copies, 1u);
  // After a successful check the link is used again.
  must(answer_of(t.verify_links()));
  EXPECT_TRUE(is_ok(answer_of(t.copy(target.ref, source.ref))));
  EXPECT_EQ(t.stats().direct_copies, 2u);
}

TEST(TopologyCopy, ALinkThatFailsDuringItsCheckStaysOut) {
  TROUPE_HOST_ONLY("faults");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.faults = plan}};
  auto t = open_topology(system);
  auto source = filled(system, 0, 1);
  auto target = filled(system, 1, 2);
  plan->add({.kind = fault::hang, .on = verb::copy_peer, .device = 0, .peer = 1});
  auto checked = t.verify_links();
  ASSERT_TRUE(plan->wait_injected(fault::hang, 1, patience));
  plan->add({.kind = fault::fail, .on = verb::copy_peer, .device = 0, .peer = 1});
  auto x = t.copy(target.ref, source.ref);
  EXPECT_TRUE(plan->wait_injected(fault::fail, 1, patience));
  EXPECT_TRUE(has_code(answer_of(x), errc::link_failed));
  plan->release();
  EXPECT_EQ(with_access(must(answer_of(checked)), peer_access::failed), (pairs{{0, 1}}));
  // This is a new check.
  EXPECT_EQ(with_access(must(answer_of(t.verify_links())), peer_access::failed), pairs{});
}

// Out of memory does not count as a failure of the link.
TEST(TopologyCopy, ALinkStaysWhereMemoryRunsOut) {
  TROUPE_HOST_ONLY("faults");
  for (bool many : {false, true}) {
    auto plan = std::make_shared<fault_plan>();
    test_system system{{.faults = plan}};
    auto t = open_topology(system);
    auto source = filled(system, 0, 1);
    auto target = filled(system, 1, 2);
    plan->add({.kind = fault::out_of_memory, .on = verb::copy_peer, .device = 0});
    auto x = many ? t.copy({{target.ref, source.ref}}) : t.copy(target.ref, source.ref);
    EXPECT_TRUE(has_code(answer_of(x), errc::out_of_memory));
    EXPECT_TRUE(has_code(get(system.open(1), target.ref), errc::indeterminate));
    EXPECT_EQ(with_access(t.graph(), peer_access::failed), pairs{});
    EXPECT_TRUE(copies(system, t, 0, 1));
    EXPECT_EQ(t.stats().staged_copies, 0u);
  }
}

/// Copies from device 0, whose lane is blocked, to device 1.
struct copies_at_a_gate {
  explicit copies_at_a_gate(test_system& system)
      : source(filled(system, 0, 1)), held(closed.hold_lane(system.open(0))) {
    for (std::uint64_t i = 0; i < 5; ++i)
      targets.push_back(filled(system, 1, i));
  }

  std::vector<pending<void>> ask(topology& t) const {
    std::vector<pending<void>> result;
    for (auto& x : targets)
      result.push_back(t.copy(x.ref, source.ref));
    return result;
  }

  gate closed;
  content source;
  std::vector<content> targets;
  pending<void> held;
};

// Copies behind one whose link fails must not use that link.
TEST(TopologyCopy, NoCopyGoesOverALinkThatIsOut) {
  TROUPE_HOST_ONLY("faults");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.faults = plan}};
  auto t = open_topology(system);
  copies_at_a_gate x{system};
  ASSERT_TRUE(x.closed.wait_reached());
  auto rule =
      plan->add({.kind = fault::fail, .on = verb::copy_peer, .device = 0, .times = forever});
  auto all = x.ask(t);
  x.closed.open();
  for (auto& one : all)
    EXPECT_TRUE(has_code(answer_of(one), errc::link_failed));
  EXPECT_EQ(plan->injected_by(rule), 1u);
  EXPECT_EQ(t.stats().links_failed, 1u);
  EXPECT_EQ(t.stats().direct_copies, 0u);
}

/// A device whose links can be cut.
class cut_device final : public forwarding_device {
public:
  struct state {
    std::atomic<bool> cut{false};
    std::atomic<int> alone{0}; ///< single copies since the cut
    std::atomic<int> together{0};
  };

  cut_device(std::unique_ptr<backend_device> inner, std::shared_ptr<state> x)
      : forwarding_device(std::move(inner)), state_(std::move(x)) {}

  caf::error copy_peer(void* to, int to_device, const void* from, int from_device,
                       std::size_t size_bytes, stream_view on) noexcept override {
    if (!state_->cut)
      return inner_->copy_peer(to, to_device, from, from_device, size_bytes, on);
    ++state_->alone;
    return make_error(errc::cuda_error, "the link is cut");
  }
  caf::error copy_peers(std::span<const peer_copy> copies, stream_view on) noexcept override {
    if (!state_->cut)
      return inner_->copy_peers(copies, on);
    ++state_->together;
    return make_error(errc::cuda_error, "the link is cut");
  }

private:
  const std::shared_ptr<state> state_;
};

class cut_backend final : public forwarding_backend {
public:
  cut_backend(std::shared_ptr<backend> inner, std::shared_ptr<cut_device::state> x)
      : forwarding_backend(std::move(inner)), state_(std::move(x)) {}
  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override {
    return open_as<cut_device>(ordinal, state_);
  }

private:
  const std::shared_ptr<cut_device::state> state_;
};

// The same for a copy that was queued for the same call.
TEST(TopologyCopy, OneCopyAloneFindsThatTheLinkOfAllIsOut) {
  TROUPE_HOST_ONLY("faults");
  auto state = std::make_shared<cut_device::state>();
  test_system system{{.wrap = [&](std::shared_ptr<backend> x) {
    return std::make_shared<cut_backend>(std::move(x), state);
  }}};
  auto t = open_topology(system);
  copies_at_a_gate x{system};
  ASSERT_TRUE(x.closed.wait_reached());
  auto all = x.ask(t);
  state->cut = true;
  x.closed.open();
  for (auto& one : all)
    EXPECT_TRUE(has_code(answer_of(one), errc::link_failed));
  EXPECT_EQ(state->together, 1);
  EXPECT_EQ(state->alone, 1);
  EXPECT_EQ(t.stats().links_failed, 1u);
  EXPECT_EQ(t.stats().direct_copies, 0u);
  for (auto& target : x.targets)
    EXPECT_TRUE(has_code(get(system.open(1), target.ref), errc::indeterminate));
}

// -- generations of devices

class CopyAfterReset : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Ends, CopyAfterReset, ::testing::Values(0, 1));

TEST_P(CopyAfterReset, WaitsUntilAccessIsThereAgain) {
  TROUPE_HOST_ONLY("faults");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.devices = 3, .faults = plan}};
  auto t = open_topology(system);
  auto end = GetParam();
  auto other = 1 - end;
  plan->add({.kind = fault::block, .on = verb::enable_peer, .device = end, .peer = other});
  must(answer_of(system.open(end).reset()));
  ASSERT_TRUE(plan->wait_injected(fault::block, 1, patience));
  // That lane is blocked, so memory of the new generation must be adopted from the user.
  std::vector<std::byte> memory(count, std::byte{1});
  auto adopted = must(system.open(end).adopt(memory.data(), count, dtype::uint8, [](void*) {}));
  auto there = filled(system, other, 2);
  auto source = end == 0 ? adopted : there.ref;
  auto target = end == 0 ? there.ref : adopted;
  auto late = t.copy(target, source, {.deadline = 20ms});
  EXPECT_TRUE(has_code(answer_of(late), errc::deadline_exceeded));
  auto waits = t.copy(target, source);
  auto waits_too = t.copy({{target, source}});
  // A request behind the copies waits too. The lane of the third device is free.
  auto behind = system.open(other).fill(there.ref, std::uint8_t{3});
  EXPECT_TRUE(copies(system, t, other, 2));
  EXPECT_FALSE(waits.ready());
  EXPECT_FALSE(waits_too.ready());
  EXPECT_FALSE(behind.ready());
  plan->release();
  for (auto& x : {waits, waits_too, behind})
    EXPECT_TRUE(is_ok(answer_of(x)));
  EXPECT_TRUE(has(system, target, end == 0 ? bytes(count, std::byte{3}) : there.data));
  EXPECT_EQ(t.stats().staged_copies, 0u);
  EXPECT_EQ(t.stats().direct_copies, 4u);
}

// Copies over a link wait while the link is being checked. Other copies do not.
TEST(TopologyCopy, WaitsForTheCheckOfALink) {
  TROUPE_HOST_ONLY("faults");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.devices = 3, .faults = plan}};
  auto t = open_topology(system, quick_config(true));
  plan->add({.kind = fault::hang, .on = verb::copy_peer, .device = 0, .peer = 1});
  must(answer_of(system.open(0).reset()));
  ASSERT_TRUE(plan->wait_injected(fault::hang, 1, patience));
  auto here = filled(system, 0, 1);
  auto there = filled(system, 1, 2);
  auto third = filled(system, 2, 3);
  auto late = t.copy(there.ref, here.ref, {.deadline = 50ms});
  auto waits = t.copy(there.ref, here.ref);
  auto waits_too =
      t.replicate(here.ref, {must(third.ref.slice(0, count)), must(there.ref.slice(0, count))});
  auto behind = system.open(1).fill(there.ref, std::uint8_t{5});
  EXPECT_TRUE(
      is_ok(answer_of(t.copy(allocate(system, 2, count, dtype::uint8), filled(system, 1, 4).ref))));
  EXPECT_TRUE(has_code(answer_of(late), errc::deadline_exceeded));
  EXPECT_FALSE(waits.ready());
  EXPECT_FALSE(waits_too.ready());
  EXPECT_FALSE(behind.ready());
  EXPECT_FALSE(t.graph().settled);
  auto taken_back = t.copy(third.ref, here.ref);
  taken_back.cancel();
  EXPECT_TRUE(has_code(answer_of(taken_back), errc::cancelled));
  plan->release();
  for (auto& x : {waits, waits_too, behind})
    EXPECT_TRUE(is_ok(answer_of(x)));
  EXPECT_TRUE(has(system, third.ref, here.data));
  EXPECT_TRUE(has(system, there.ref, bytes(count, std::byte{5})));
  EXPECT_EQ(t.stats().staged_copies, 0u);
}

// If the check finds an error, the copies that waited go through the host.
TEST(TopologyCopy, WhatWaitedGoesTheWayThatIsLeft) {
  TROUPE_HOST_ONLY("faults");
  auto plan = std::make_shared<fault_plan>();
  for (auto way : {pairs{{0, 1}}, pairs{}}) {
    test_system system{{.faults = plan, .lanes = small_chunks(), .links = links_without(way)}};
    auto t = open_topology(system, quick_config(true));
    auto checker = way.empty() ? 0 : 1; // the first device to check its link
    plan->add({.kind = fault::hang, .on = verb::copy_peer, .device = checker});
    must(answer_of(system.open(0).reset()));
    ASSERT_TRUE(plan->wait_injected(fault::hang, way.empty() ? 2 : 1, patience));
    auto here = filled(system, 0, 1, 50'000);
    auto there = filled(system, 1, 2, 50'000);
    auto waits = t.copy(there.ref, here.ref);
    if (way.empty())
      plan->add({.kind = fault::corrupt, .on = verb::copy_peer, .device = 0});
    plan->release();
    EXPECT_TRUE(is_ok(answer_of(waits)));
    EXPECT_TRUE(has(system, there.ref, here.data));
    EXPECT_EQ(t.stats().staged_copies, way.empty() ? 1u : 0u);
    EXPECT_EQ(t.stats().direct_copies, way.empty() ? 0u : 1u);
  }
}

// Resets while a copy waits for access.
TEST(TopologyCopy, AResetWhileItWaits) {
  TROUPE_HOST_ONLY("faults");
  for (int end : {0, 1}) {
    auto plan = std::make_shared<fault_plan>();
    test_system system{{.faults = plan}};
    auto t = open_topology(system, quick_config(true));
    plan->add({.kind = fault::hang, .on = verb::copy_peer, .device = 0, .peer = 1});
    must(answer_of(system.open(0).reset()));
    ASSERT_TRUE(plan->wait_injected(fault::hang, 1, patience));
    auto here = filled(system, 0, 1);
    auto there = filled(system, 1, 2);
    auto waits = t.copy(there.ref, here.ref);
    auto reset = system.open(end).reset();
    EXPECT_TRUE(has_code(answer_of(waits), errc::device_reset));
    plan->release();
    must(answer_of(reset));
    if (end == 0) { // nothing was copied
      EXPECT_TRUE(has_code(there.ref.access(), errc::skipped));
      accept_bytes(system, there.ref);
      EXPECT_TRUE(has(system, there.ref, there.data));
    }
    EXPECT_TRUE(copies(system, t, 0, 1));
  }
}

TEST(TopologyCopy, TheEndOfTheTopologyAnswersWhatWaits) {
  TROUPE_HOST_ONLY("faults");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.faults = plan}};
  std::optional<topology> t{open_topology(system, quick_config(true))};
  auto actor = t->actor();
  plan->add({.kind = fault::hang, .on = verb::copy_peer, .device = 0, .peer = 1});
  must(answer_of(system.open(0).reset()));
  ASSERT_TRUE(plan->wait_injected(fault::hang, 1, patience));
  auto here = filled(system, 0, 1);
  auto there = filled(system, 1, 2);
  auto waits = t->copy(there.ref, here.ref);
  caf::anon_send_exit(actor, caf::exit_reason::user_shutdown);
  EXPECT_TRUE(has_code(answer_of(waits), errc::unavailable));
  EXPECT_TRUE(has_code(answer_of(t->copy(there.ref, here.ref)), errc::unavailable));
  plan->release();
  EXPECT_TRUE(has_code(there.ref.access(), errc::skipped));
  accept_bytes(system, there.ref);
  EXPECT_TRUE(has(system, there.ref, there.data));
  EXPECT_TRUE(copies(system, open_topology(system), 0, 1));
}

// INV-8: an operation that cannot start on the device being reset must not block a copy that the
// reset waits for.
TEST(TopologyCopy, AResetWaitsForNoSumThatWaitsForIt) {
  TROUPE_HOST_ONLY("faults");
  for (bool many : {false, true})
    for (bool into : {false, true}) {
      SCOPED_TRACE(std::string{many ? "a batch" : "a copy"} + (into ? " into it" : " of it"));
      auto plan = std::make_shared<fault_plan>();
      test_system system{{.faults = plan}};
      auto t = open_topology(system);
      auto world = system.open_world();
      auto data = must(world.allocate<float>(count));
      auto here = allocate(system, 0, count, dtype::float32);
      auto there = allocate(system, 1, count, dtype::float32);
      gate closed;
      auto held = closed.hold_lane(system.open(1));
      ASSERT_TRUE(closed.wait_reached());
      launch_spy spy{plan};
      auto sum = world.all_reduce(data);
      while (spy.launched() == 0) // on device 0
        std::this_thread::yield();
      copy_pair what{there, data[0]};
      if (into)
        what = {data[1], here};
      auto copied = many ? t.copy({what}) : t.copy(what.target, what.source);
      auto reset = system.open(1).reset();
      EXPECT_TRUE(has_code(answer_of(sum), errc::device_reset));
      EXPECT_TRUE(has_code(answer_of(copied), errc::device_reset));
      closed.open();
      EXPECT_TRUE(is_ok(answer_of(reset)));
      EXPECT_TRUE(copies(system, t, 0, 1));
    }
}

// INV-8: a copy that has not reached its lane blocks no reset.
TEST(TopologyCopy, AResetWaitsForNoCopyThatIsHeldBack) {
  TROUPE_NEEDS_DEVICES(3);
  test_system system{{.devices = 3}};
  auto t = open_topology(system);
  auto world = system.open_world({.devices = {0, 2}});
  auto data = must(world.allocate<float>(count));
  auto there = allocate(system, 1, count, dtype::float32);
  auto half = world.rank(0).all_reduce(data[0]);
  std::vector<pending<void>> all;
  all.push_back(t.copy(there, data[0]));
  all.push_back(t.copy({{there, data[0]}}));
  auto reset = system.open(1).reset();
  for (auto& x : all)
    EXPECT_TRUE(has_code(answer_of(x), errc::device_reset));
  EXPECT_TRUE(is_ok(answer_of(reset)));
  EXPECT_FALSE(half.ready());
  EXPECT_TRUE(is_ok(answer_of(world.rank(1).all_reduce(data[1]))));
  EXPECT_TRUE(is_ok(answer_of(half)));
  EXPECT_TRUE(copies(system, t, 0, 1));
}

// INV-4: memory that one device's stream still writes is not freed with the other device.
TEST(TopologyCopy, TheSystemEndsAfterAFaultInTheMiddle) {
  TROUPE_HOST_ONLY("faults");
  constexpr std::size_t size = std::size_t{64} << 20; // takes longer than the end of the system
  for (bool use_links : {true, false})
    for (int from : {0, 1}) {
      auto plan = std::make_shared<fault_plan>();
      test_system system{{.faults = plan, .lanes = {.staging_bytes = size}}};
      auto config = quick_config();
      config.use_links = use_links;
      auto t = open_topology(system, config);
      auto to = 1 - from;
      auto source = allocate(system, from, size, dtype::uint8);
      auto target = allocate(system, to, size, dtype::uint8);
      must(answer_of(system.open(from).fill(source, std::uint8_t{1})));
      plan->add({.kind = fault::hang,
                 .on = use_links ? verb::copy_peer : verb::copy,
                 .device = use_links ? from : to});
      auto x = t.copy(target, source);
      ASSERT_TRUE(plan->wait_injected(fault::hang, 1, patience));
      plan->poison();
      EXPECT_TRUE(has_code(answer_of(x), errc::device_fault));
    }
}

// -- copies that are dropped when one device ends, and the order on the other device

enum class life_end : std::uint8_t { reset, shutdown };

/// Ends device 0. Returns the pending reset, if there is one.
std::optional<pending<std::uint64_t>> end_device_0(test_system& system, life_end how) {
  if (how == life_end::reset)
    return system.open(0).reset();
  system.open(0).shutdown();
  return std::nullopt;
}

/// For EXPECT_TRUE: `x` must wait. Gives the lane of `other`'s device many chances to issue it.
/// `by_upload`: for use while the download stream is blocked.
::testing::AssertionResult stays_behind(test_system& system, const pending<void>& x,
                                        const content& other, bool by_upload = false) {
  for (int i = 0; i < 100; ++i)
    if (by_upload)
      put(system.open(other.ref.device()), other.ref, other.data);
    else if (auto right = has(system, other.ref, other.data); !right)
      return right;
  if (x.ready())
    return ::testing::AssertionFailure() << "it overtook what was before";
  return ::testing::AssertionSuccess();
}

class DroppedCopy
    : public ::testing::TestWithParam<std::tuple<life_end, bool /* writes */, bool /* many */>> {};

std::string name_of(life_end x) { return x == life_end::reset ? "reset" : "shutdown"; }

INSTANTIATE_TEST_SUITE_P(All, DroppedCopy,
                         ::testing::Combine(::testing::Values(life_end::reset, life_end::shutdown),
                                            ::testing::Bool(), ::testing::Bool()),
                         [](const auto& x) {
                           return name_of(std::get<0>(x.param)) +
                                  (std::get<1>(x.param) ? "_behind_a_writer" : "_behind_a_reader") +
                                  (std::get<2>(x.param) ? "_batch" : "");
                         });

// INV-9: a request behind a copy that is never issued also stays behind the work before that copy.
TEST_P(DroppedCopy, LeavesTheOrderOfTheOtherEnd) {
  TROUPE_HOST_ONLY("holds a stream");
  auto [end, writes, many] = GetParam();
  enum class moment : std::uint8_t { before_the_end, answered, gone };
  for (auto asked : {moment::before_the_end, moment::answered, moment::gone})
    for (bool reads : {false, true}) { // the request behind the copy
      if (reads && (!writes || asked == moment::before_the_end))
        continue; // not affected, or fails with the copy
      SCOPED_TRACE((reads ? "a reader " : "a writer ") + std::to_string(static_cast<int>(asked)));
      test_system system;
      auto t = open_topology(system);
      auto source = filled(system, 0, 1);
      auto target = filled(system, 1, 2);
      auto other = filled(system, 1, 3);
      gate lane;
      auto held = lane.hold_lane(system.open(0));
      ASSERT_TRUE(lane.wait_reached());
      auto spare = filled(system, 1, 5);
      const bytes pattern(count, std::byte{7});
      gate stream;
      auto stands = stream.hold_stream(system.open(1));
      ASSERT_TRUE(stream.wait_reached());
      auto before = writes ? system.open(1).fill(target.ref, std::uint8_t{7})
                           : t.copy(spare.ref, target.ref); // on the blocked stream
      auto dropped = many ? t.copy({{target.ref, source.ref}}) : t.copy(target.ref, source.ref);
      auto late = random_bytes(count, 4);
      bytes seen(count);
      std::optional<pending<void>> behind;
      std::optional<pending<void>> accepted;
      auto ask = [&](moment now) {
        if (now != asked)
          return;
        if (reads) // the copy left a mark
          accepted = system.open(1).accept(target.ref);
        behind = reads ? system.open(1).download(target.ref, std::span{seen})
                       : system.open(1).upload(target.ref, std::span<const std::byte>{late});
      };
      ask(moment::before_the_end);
      auto ended = end_device_0(system, end);
      EXPECT_FALSE(is_ok(answer_of(dropped)));
      ask(moment::answered);
      lane.open();
      static_cast<void>(answer_of(held));
      EXPECT_TRUE(!ended || is_ok(answer_of(*ended)));
      ask(moment::gone);
      EXPECT_TRUE(stays_behind(system, *behind, other, reads));
      EXPECT_FALSE(before.ready());
      stream.open();
      EXPECT_TRUE(is_ok(answer_of(before)));
      EXPECT_TRUE(is_ok(answer_of(*behind)));
      EXPECT_TRUE(!accepted || is_ok(answer_of(*accepted)));
      EXPECT_TRUE(!reads || seen == pattern);
      EXPECT_TRUE(has(system, spare.ref, writes ? spare.data : target.data));
      EXPECT_TRUE(has(system, target.ref, reads ? pattern : late));
    }
}

class DroppedBehind : public ::testing::TestWithParam<std::tuple<life_end, bool /* reads */>> {};

INSTANTIATE_TEST_SUITE_P(All, DroppedBehind,
                         ::testing::Combine(::testing::Values(life_end::reset, life_end::shutdown),
                                            ::testing::Bool()),
                         [](const auto& x) {
                           return name_of(std::get<0>(x.param)) +
                                  (std::get<1>(x.param) ? "_behind_a_reader" : "_behind_a_writer");
                         });

// The same when the earlier work is in the stream that the dropped copies would have used.
TEST_P(DroppedBehind, WorkOfItsOwnStream) {
  TROUPE_HOST_ONLY("a peer matrix of the test's own");
  auto [end, reads] = GetParam();
  for (int number : {1, 2}) {
    SCOPED_TRACE(number);
    auto plan = std::make_shared<fault_plan>();
    // Device 0 copies in both directions.
    test_system system{{.faults = plan, .links = links_without({{1, 0}})}};
    auto t = open_topology(system);
    auto here = filled(system, 0, 1);
    auto there = filled(system, 1, 2);
    auto other = filled(system, 1, 3);
    auto copy = [&] { return reads ? t.copy(here.ref, there.ref) : t.copy(there.ref, here.ref); };
    plan->add({.kind = fault::hang, .on = verb::copy_peer, .device = 0});
    auto before = copy();
    ASSERT_TRUE(plan->wait_injected(fault::hang, 1, patience));
    gate lane;
    auto held = lane.hold_lane(system.open(0));
    ASSERT_TRUE(lane.wait_reached());
    std::vector<pending<void>> dropped;
    for (int i = 0; i < number; ++i)
      dropped.push_back(copy());
    auto late = random_bytes(count, 4);
    auto behind = system.open(1).upload(there.ref, std::span<const std::byte>{late});
    static_cast<void>(end_device_0(system, end));
    EXPECT_FALSE(is_ok(answer_of(dropped.back())));
    lane.open();
    static_cast<void>(answer_of(held));
    EXPECT_TRUE(stays_behind(system, behind, other));
    plan->release();
    EXPECT_FALSE(is_ok(answer_of(before)));
    EXPECT_TRUE(is_ok(answer_of(behind)));
    EXPECT_TRUE(has(system, there.ref, late));
  }
}

// Dropped copies behind each other, on one lane and on several, over one path and over many.
TEST(TopologyCopy, ManyThatAreDroppedLeaveTheOrder) {
  TROUPE_HOST_ONLY("a peer matrix of the test's own");
  constexpr std::size_t number = 2000;
  enum class shape : std::uint8_t { back_and_forth, two_lanes, two_buffers };
  for (auto kind : {shape::back_and_forth, shape::two_lanes, shape::two_buffers}) {
    SCOPED_TRACE(static_cast<int>(kind));
    auto matrix = links_without({{1, 0}, {1, 2}}); // devices 0 and 2 copy in both directions
    test_system system{{.devices = 3, .links = matrix}};
    auto t = open_topology(system);
    auto first = filled(system, 0, 1);
    auto second = filled(system, 2, 2);
    auto target = filled(system, 1, 3);
    auto beside = filled(system, 1, 4);
    auto other = filled(system, 1, 5);
    auto start = [&] {
      std::vector<pending<void>> all;
      for (std::size_t i = 0; i < number; ++i) {
        auto& from = i % 2 == 0 || kind == shape::back_and_forth ? first : second;
        if (kind == shape::two_buffers)
          all.push_back(t.copy({{target.ref, from.ref}, {beside.ref, from.ref}}));
        else if (kind == shape::back_and_forth && i % 2 == 1)
          all.push_back(t.copy(from.ref, target.ref));
        else
          all.push_back(t.copy(target.ref, from.ref));
      }
      return all;
    };
    stopwatch ran;
    for (auto& x : start())
      ASSERT_TRUE(is_ok(answer_of(x)));
    auto control = ran.elapsed();

    gate stream;
    auto before = stream.hold_stream(system.open(1), {target.ref}, {});
    ASSERT_TRUE(stream.wait_reached());
    gate lanes;
    std::vector<pending<void>> held;
    for (int device : {0, 2})
      held.push_back(lanes.hold_lane(system.open(device)));
    ASSERT_TRUE(lanes.wait_reached());
    stopwatch dropping;
    auto dropped = start();
    auto late = random_bytes(count, 6);
    auto behind = system.open(1).upload(target.ref, std::span<const std::byte>{late});
    std::vector<pending<std::uint64_t>> resets;
    for (int device : {0, 2})
      resets.push_back(system.open(device).reset());
    for (auto& x : dropped)
      ASSERT_TRUE(has_code(answer_of(x), errc::device_reset));
    lanes.open();
    for (auto& x : resets)
      EXPECT_TRUE(is_ok(answer_of(x))); // they wait for no work on device 1
    EXPECT_TRUE(stays_behind(system, behind, other));
    stream.open();
    EXPECT_TRUE(is_ok(answer_of(before)));
    EXPECT_TRUE(is_ok(answer_of(behind)));
    EXPECT_LT(dropping.elapsed(), 10 * control + at_once / 10);
    EXPECT_TRUE(has(system, target.ref, late));
    EXPECT_TRUE(has(system, other.ref, other.data));
  }
}

// INV-8: a reset waits for users of its memory. It does not wait for work elsewhere that a dropped
// copy would have stayed behind.
TEST(TopologyCopy, AResetWaitsForNothingBehindACopyThatIsDropped) {
  TROUPE_HOST_ONLY("holds a stream");
  test_system system{{.devices = 3}};
  auto t = open_topology(system);
  auto here = filled(system, 0, 1);
  auto there = filled(system, 1, 2);
  auto source = filled(system, 2, 3);
  gate stream;
  auto before = stream.hold_stream(system.open(1), {there.ref}, {});
  ASSERT_TRUE(stream.wait_reached());
  gate lane;
  auto held = lane.hold_lane(system.open(2));
  ASSERT_TRUE(lane.wait_reached());
  auto dropped = t.copy(there.ref, source.ref); // behind `before`
  auto into = t.copy(source.ref, here.ref);     // on the lane of device 0, and behind `dropped`
  auto reset = system.open(2).reset();
  EXPECT_TRUE(has_code(answer_of(dropped), errc::device_reset));
  EXPECT_TRUE(has_code(answer_of(into), errc::device_reset));
  lane.open();
  EXPECT_TRUE(is_ok(answer_of(reset)));
  EXPECT_FALSE(before.ready());
  stream.open();
  EXPECT_TRUE(is_ok(answer_of(before)));
}

TEST(TopologyCopy, ResetsAllTheTime) {
  TROUPE_NEEDS_DEVICES(2);
  for (bool use_links : {true, false}) {
    auto config = quick_config();
    config.use_links = use_links;
    test_system system{{.devices = 3, .lanes = small_chunks()}};
    auto t = open_topology(system, config);
    for (int i = 0; i < (on_cuda() ? 10 : 60); ++i) {
      auto from = i % system.devices();
      auto to = (i + 1) % system.devices();
      auto source = filled(system, from, 1, 100'000);
      auto target = filled(system, to, 2, 100'000);
      auto x = t.copy(target.ref, source.ref);
      auto back = t.copy(source.ref, target.ref);
      must(answer_of(system.open(i % 2 == 0 ? from : to).reset()));
      for (auto& done : {x, back}) {
        auto why = error_of(answer_of(done));
        EXPECT_TRUE(!why || code_of(why) == errc::device_reset || code_of(why) == errc::stale_ref)
            << describe(why);
      }
      // INV-12: the memory has its previous content, or a copy's data, or is unreadable.
      auto& left = i % 2 == 0 ? target : source;
      bool written = is_ok(answer_of(i % 2 == 0 ? x : back));
      auto content = get(system.open(left.ref.device()), left.ref);
      if (content)
        EXPECT_TRUE(*content == (written ? source.data : left.data)) << "round " << i;
      else
        EXPECT_TRUE(!written &&
                    (has_code(content, errc::indeterminate) || has_code(content, errc::skipped)));
      ASSERT_TRUE(copies(system, t, from, to));
    }
  }
}

} // namespace
} // namespace troupe::testing
