// Launches of libraries. Workers run the same program, so the library is registered there too.

#include "support/world_fixture.hpp"
#include <troupe/bytes.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <thread>

namespace troupe::testing {

namespace {

constexpr const char* library_name = "troupe.testing.library";
constexpr const char* add = "troupe.testing.library.add";
constexpr const char* refused = "troupe.testing.library.refused";
constexpr const char* prepared = "troupe.testing.library.prepared";
constexpr const char* prepared_for_any = "troupe.testing.library.prepared_for_any";
constexpr const char* room = "troupe.testing.library.room";
constexpr const char* judged = "troupe.testing.library.judged";
constexpr const char* beside = "troupe.testing.library.beside";
constexpr const char* counted = "troupe.testing.library.counted";
constexpr const char* hasty = "troupe.testing.library.hasty";
constexpr const char* refused_and_judged = "troupe.testing.library.refused_and_judged";

/// A device for which a library fails at every other attempt.
constexpr int unlucky_device = 9;

using launch_list = std::span<const launch_memory>;
using argument_bytes = std::span<const std::byte>;

/// What the library keeps for a device.
struct test_state final : library_state {
  test_state() { ++count; }
  ~test_state() override { --count; }
  test_state(const test_state&) = delete;
  test_state& operator=(const test_state&) = delete;

  void trim() noexcept override { ++trims; }

  static inline std::atomic<std::int64_t> count{0}; ///< of those that exist in this process
  std::int64_t life = 0; ///< counts the states of the device in this process
  std::int64_t trims = 0;
  std::map<std::size_t, std::int64_t> preparations; ///< by number of elements
};

caf::expected<std::unique_ptr<library_state>> make_state(launch_context& context) {
  static std::array<std::atomic<std::int64_t>, 64> lives{};
  auto result = std::make_unique<test_state>();
  result->life = ++lives.at(static_cast<std::size_t>(context.device()));
  return result;
}

/// Is called behind `make_state`.
caf::expected<std::unique_ptr<library_state>> make_at_second_attempt(launch_context& context) {
  static std::atomic<int> attempts{0};
  if (context.device() == unlucky_device && ++attempts % 2 == 1)
    return make_error(errc::not_supported, "on purpose");
  return std::unique_ptr<library_state>{};
}

test_state& state_of(const launch_context& context) {
  return dynamic_cast<test_state&>(*context.library(library_name));
}

std::int64_t* numbers(const launch_memory& x) { return static_cast<std::int64_t*>(x.address); }

/// Adds the argument to each element.
caf::error enqueue_add(launch_context& context, launch_list, launch_list writes,
                       argument_bytes arguments) {
  const auto by = from_bytes<std::int64_t>(arguments);
  if (!by)
    return by.error();
  return context.run_on_host([to = writes[0], n = *by] {
    for (std::size_t i = 0; i < to.count; ++i)
      numbers(to)[i] += n;
  });
}

caf::error check_add(launch_list reads, launch_list writes, argument_bytes arguments) {
  if (reads.size() != 1 || writes.size() != 1 || writes[0].type != dtype::int64)
    return make_error(errc::shape_mismatch, "one buffer of int64 is needed");
  return from_bytes<std::int64_t>(arguments) ? caf::error{}
                                             : make_error(errc::invalid_argument, "no number");
}

caf::error never(launch_context&, launch_list, launch_list, argument_bytes) {
  return make_error(errc::internal, "this is not to be called");
}

/// Writes how often it was prepared for this number of elements, and the life of the state.
caf::error enqueue_prepared(launch_context& context, launch_list, launch_list writes,
                            argument_bytes) {
  auto& state = state_of(context);
  return context.run_on_host(
      [to = writes[0], life = state.life, times = state.preparations[writes[0].count]] {
        numbers(to)[0] = times;
        numbers(to)[1] = life;
      });
}

caf::error prepare(launch_context& context, launch_list, launch_list writes, argument_bytes) {
  ++state_of(context).preparations[writes[0].count];
  return {};
}

/// Writes the address of a workspace of so many bytes, or the code of the error and the number of
/// trims.
caf::error enqueue_room(launch_context& context, launch_list, launch_list writes,
                        argument_bytes arguments) {
  const auto size = from_bytes<std::uint64_t>(arguments);
  if (!size)
    return size.error();
  const auto memory = context.workspace(*size);
  const auto code = memory ? std::int64_t{0} : static_cast<std::int64_t>(*code_of(memory.error()));
  return context.run_on_host([to = writes[0], code, trims = state_of(context).trims,
                              at = memory ? *memory : nullptr, size = *size] {
    if (at != nullptr)
      std::memset(at, 0x5a, size);
    numbers(to)[0] = reinterpret_cast<std::int64_t>(at);
    numbers(to)[1] = code;
    numbers(to)[2] = trims;
  });
}

/// Writes how many states exist in the device's process.
caf::error enqueue_counted(launch_context& context, launch_list, launch_list writes,
                           argument_bytes) {
  return context.run_on_host(
      [to = writes[0], n = test_state::count.load()] { numbers(to)[0] = n; });
}

/// Gives the argument as its verdict.
caf::error enqueue_judged(launch_context& context, launch_list, launch_list writes,
                          argument_bytes arguments) {
  const auto verdict = from_bytes<std::int32_t>(arguments);
  if (!verdict)
    return verdict.error();
  return context.run_on_host([to = writes[0], word = context.verdict(), x = *verdict] {
    numbers(to)[0] = 1;
    std::atomic_ref{*word}.store(x);
  });
}

/// Succeeds when so many of its kind run at the same time. The verdict tells how many were seen
/// too late.
caf::error enqueue_beside(launch_context& context, launch_list, launch_list writes,
                          argument_bytes arguments) {
  static std::atomic<std::int64_t> running{0};
  const auto others = from_bytes<std::int64_t>(arguments);
  if (!others)
    return others.error();
  return context.run_on_host([to = writes[0], word = context.verdict(), n = *others] {
    ++running;
    const auto late = std::chrono::steady_clock::now() + patience;
    while (running < n && std::chrono::steady_clock::now() < late)
      std::this_thread::yield();
    numbers(to)[0] = running;
    if (running < n)
      std::atomic_ref{*word}.store(1);
  });
}

caf::error judge(std::int32_t verdict) {
  return make_error(errc::invalid_argument, "the verdict is " + std::to_string(verdict));
}

caf::error refuse(launch_context&, launch_list, launch_list, argument_bytes) {
  return make_error(errc::not_supported, "not such numbers");
}

caf::error prepare_on_host(launch_context& context, launch_list, launch_list, argument_bytes) {
  return context.run_on_host([] {});
}

[[maybe_unused]] const bool registered = [] {
  must(register_library(library_name, make_state));
  must(register_library("troupe.testing.library.unlucky", make_at_second_attempt));
  must(register_launch(counted, {.enqueue = enqueue_counted}));
  must(register_launch(add, {.verb = "add", .enqueue = enqueue_add, .check = check_add}));
  must(register_launch(refused, {.verb = "refused", .enqueue = never, .prepare = refuse}));
  must(register_launch(refused_and_judged, {.enqueue = never, .prepare = refuse, .judge = judge}));
  must(register_launch(hasty, {.enqueue = never, .prepare = prepare_on_host}));
  must(register_launch(prepared, {.enqueue = enqueue_prepared, .prepare = prepare}));
  must(register_launch(prepared_for_any, {.enqueue = enqueue_prepared,
                                          .prepare = prepare,
                                          .clear_ignored = [](std::span<std::byte> arguments) {
                                            std::ranges::fill(arguments, std::byte{0});
                                          }}));
  must(register_launch(room, {.enqueue = enqueue_room}));
  must(register_launch(judged, {.verb = "judged", .enqueue = enqueue_judged, .judge = judge}));
  must(register_launch(beside, {.enqueue = enqueue_beside, .judge = judge}));
  return true;
}();

/// Only on the host backend: the functions run on the host.
class LibraryLaunch : public ::testing::Test {
protected:
  void SetUp() override {
    if (on_cuda())
      GTEST_SKIP() << "the launches are functions of the host";
  }

  gpu_ref<std::int64_t> memory_of(const std::vector<std::int64_t>& content) {
    auto result = must(device_.allocate<std::int64_t>(content.size()));
    must(answer_of(device_.upload(result, content)));
    return result;
  }

  template <class T>
  pending<void> start(const char* name, T argument, const any_gpu_ref& on,
                      request_options options = {}) {
    return device_.launch(name, to_bytes(argument), {on}, {on}, options);
  }

  std::vector<std::int64_t> room_of(const any_gpu_ref& told, std::uint64_t bytes) {
    must(answer_of(device_.launch(room, to_bytes(bytes), {}, {told})));
    return must(device_.download(must(gpu_ref<std::int64_t>::from(told))));
  }

  std::shared_ptr<fault_plan> plan_ = std::make_shared<fault_plan>();
  test_system system_{{.faults = plan_, .bytes_per_device = std::size_t{64} << 20}};
  device device_ = system_.open();
};

TEST_F(LibraryLaunch, GetsMemoryAndArguments) {
  const auto x = memory_of({1, 2, 3});
  ASSERT_TRUE(is_ok(answer_of(start(add, std::int64_t{40}, x))));
  EXPECT_TRUE(holds(device_, x, std::vector<std::int64_t>{41, 42, 43}));
  const auto part = must(x.slice(1, 1));
  ASSERT_TRUE(is_ok(answer_of(start(add, std::int64_t{-2}, part))));
  EXPECT_TRUE(holds(device_, x, std::vector<std::int64_t>{41, 40, 43}));
}

TEST_F(LibraryLaunch, TravelsAsAMessage) {
  const auto x = memory_of({1, 2, 3});
  const auto actor = must(device_.actor());
  const auto sent = ask<void>(system_, actor, launch{add, to_bytes(std::int64_t{5}), {x}, {x}});
  ASSERT_TRUE(is_ok(sent));
  EXPECT_TRUE(holds(device_, x, std::vector<std::int64_t>{6, 7, 8}));
}

TEST_F(LibraryLaunch, IsRefusedByItsCheckAtOnce) {
  const auto x = memory_of({1, 2, 3});
  const auto floats = must(device_.allocate<float>(4, true));
  const auto wrong = start(add, std::int64_t{1}, floats);
  EXPECT_TRUE(wrong.ready());
  const auto why = error_of(answer_of(wrong));
  EXPECT_TRUE(has_code(why, errc::shape_mismatch));
  EXPECT_NE(describe(why).find("add"), std::string::npos) << describe(why);
  EXPECT_TRUE(has_code(answer_of(start(add, std::int8_t{1}, x)), errc::invalid_argument));
  EXPECT_TRUE(holds(device_, floats, std::vector<float>(4)));
  EXPECT_TRUE(holds(device_, x, std::vector<std::int64_t>{1, 2, 3}));
}

TEST_F(LibraryLaunch, ThatCannotBePreparedDoesNotRun) {
  const auto x = memory_of({1, 2, 3});
  const auto why = error_of(answer_of(start(refused, std::int64_t{1}, x)));
  EXPECT_TRUE(has_code(why, errc::not_supported));
  const auto text = describe(why);
  EXPECT_NE(text.find("refused #"), std::string::npos) << text;
  EXPECT_NE(text.find("not such numbers"), std::string::npos) << text;
  EXPECT_TRUE(has_code(device_.download(x), errc::skipped));
  accept_bytes(device_, x);
  EXPECT_TRUE(holds(device_, x, std::vector<std::int64_t>{1, 2, 3}));
}

TEST_F(LibraryLaunch, RunsNothingOnTheHostBeforeItRuns) {
  const auto x = memory_of({1});
  const auto why = error_of(answer_of(start(hasty, std::int64_t{1}, x)));
  EXPECT_TRUE(has_code(why, errc::not_supported)) << describe(why);
  EXPECT_NE(describe(why).find("runs nothing on the host"), std::string::npos) << describe(why);
  accept_bytes(device_, x);
  EXPECT_TRUE(holds(device_, x, std::vector<std::int64_t>{1}));
}

TEST_F(LibraryLaunch, IsPreparedOnceForItsShapeInAWorker) {
  for (const std::size_t size : {2, 5}) {
    const auto x = memory_of(std::vector<std::int64_t>(size));
    for (std::int64_t i = 1; i <= 3; ++i) {
      ASSERT_TRUE(is_ok(answer_of(start(prepared, std::int64_t{0}, x))));
      const auto got = must(device_.download(x));
      EXPECT_EQ(got[0], in_workers() ? 1 : i);
    }
  }
}

TEST_F(LibraryLaunch, IsPreparedOnceForAllArgumentsThatDoNotMatterInAWorker) {
  for (const auto* name : {prepared, prepared_for_any}) {
    SCOPED_TRACE(name);
    const auto x = memory_of(std::vector<std::int64_t>(name == prepared ? 3 : 4));
    for (std::int64_t i = 1; i <= 3; ++i) {
      ASSERT_TRUE(is_ok(answer_of(start(name, i, x))));
      EXPECT_EQ(must(device_.download(x))[0], in_workers() && name == prepared_for_any ? 1 : i);
    }
  }
}

TEST_F(LibraryLaunch, KeepsItsStateUntilAReset) {
  const auto life = [&] {
    const auto x = memory_of({0, 0});
    must(answer_of(start(prepared, std::int64_t{0}, x)));
    return must(device_.download(x))[1];
  };
  const auto first = life();
  EXPECT_EQ(life(), first);
  must(answer_of(device_.reset()));
  EXPECT_EQ(life(), first + 1);
}

TEST_F(LibraryLaunch, HasAWorkspaceThatGrows) {
  const auto told = memory_of({0, 0, 0});
  const auto small = room_of(told, 1000);
  EXPECT_NE(small[0], 0);
  EXPECT_EQ(small[0] % 256, 0);
  EXPECT_EQ(room_of(told, 500)[0], small[0]);
  const auto large = room_of(told, std::size_t{8} << 20);
  EXPECT_NE(large[0], 0);
  EXPECT_EQ(room_of(told, std::size_t{8} << 20)[0], large[0]);
  EXPECT_TRUE(works(device_));
}

TEST_F(LibraryLaunch, GivesUpPlansBeforeItIsOutOfMemory) {
  const auto told = memory_of({0, 0, 0});
  const auto before = room_of(told, 0);
  EXPECT_EQ(before[1], 0);
  const auto full = room_of(told, std::size_t{1} << 40);
  EXPECT_EQ(full[1], static_cast<std::int64_t>(errc::out_of_memory));
  EXPECT_EQ(full[2], before[2] + 1);
  const auto after = room_of(told, 1000);
  EXPECT_NE(after[0], 0);
  EXPECT_EQ(after[1], 0);
}

TEST_F(LibraryLaunch, FailsByItsVerdict) {
  const auto x = memory_of({0});
  EXPECT_TRUE(is_ok(answer_of(start(judged, std::int32_t{0}, x))));
  const auto y = memory_of({0});
  auto failing = start(judged, std::int32_t{-7}, x);
  auto behind = device_.copy(y, x);
  const auto why = error_of(answer_of(failing));
  EXPECT_TRUE(has_code(why, errc::invalid_argument));
  EXPECT_NE(describe(why).find("the verdict is -7"), std::string::npos) << describe(why);
  EXPECT_TRUE(has_code(answer_of(behind), errc::invalid_argument)); // it read what was wrong
  EXPECT_TRUE(has_code(device_.download(x), errc::indeterminate));
  for (int i = 0; i < 3000; ++i) // more than there are words at first
    EXPECT_TRUE(is_ok(answer_of(device_.launch(judged, to_bytes(std::int32_t{0}), {}, {x}))));
}

TEST_F(LibraryLaunch, ThatGetsNoWordForItsVerdictDoesNotRun) {
  const auto x = memory_of({3});
  plan_->add({.on = verb::allocate_pinned, .error = errc::out_of_memory});
  EXPECT_TRUE(has_code(answer_of(start(judged, std::int32_t{0}, x)), errc::out_of_memory));
  EXPECT_TRUE(has_code(device_.download(x), errc::skipped));
  accept_bytes(device_, x);
  EXPECT_TRUE(holds(device_, x, std::vector<std::int64_t>{3}));
  EXPECT_TRUE(is_ok(answer_of(start(judged, std::int32_t{0}, x))));
}

TEST_F(LibraryLaunch, GivesItsWordBackIfItDoesNotRun) {
  const auto x = memory_of({3});
  plan_->add({.on = verb::allocate_pinned,
              .first = 2, // the first one makes room for about 1,000 words
              .times = forever,
              .error = errc::out_of_memory});
  std::vector<pending<void>> all; // they keep what a launch keeps
  for (int i = 0; i < 3000; ++i) {
    all.push_back(device_.launch(refused_and_judged, {}, {}, {x}));
    ASSERT_TRUE(has_code(answer_of(all.back()), errc::not_supported)) << i;
  }
}

TEST_F(LibraryLaunch, OverlapsWhereItMay) {
  std::vector<gpu_ref<std::int64_t>> memory;
  std::vector<pending<void>> all;
  for (int i = 0; i < 4; ++i)
    memory.push_back(memory_of({0}));
  for (auto& x : memory)
    all.push_back(start(beside, std::int64_t{4}, x, {.overlap = true}));
  for (auto& x : all)
    EXPECT_TRUE(is_ok(answer_of(x, 2 * patience)));
}

TEST_F(LibraryLaunch, KeepsItsOrderWhereItOverlaps) {
  std::vector<gpu_ref<std::int64_t>> memory;
  for (int i = 0; i < 6; ++i)
    memory.push_back(memory_of({i, 0}));
  const auto sum = memory_of({0, 0});
  for (int round = 0; round < 50; ++round) {
    for (auto& x : memory)
      start(add, std::int64_t{1}, x, {.overlap = true});
    device_.copy(sum, memory[static_cast<std::size_t>(round) % memory.size()]);
    start(add, std::int64_t{1000}, sum, {.overlap = true});
    const auto want = round % 6 + round + 1 + 1000;
    ASSERT_TRUE(holds(device_, sum, std::vector<std::int64_t>{want, round + 1 + 1000}));
  }
  for (std::int64_t i = 0; i < 6; ++i)
    EXPECT_TRUE(
        holds(device_, memory[static_cast<std::size_t>(i)], std::vector<std::int64_t>{i + 50, 50}));
}

TEST_F(LibraryLaunch, OverlapsAfterAReset) {
  const auto old = memory_of({0});
  ASSERT_TRUE(is_ok(answer_of(start(add, std::int64_t{1}, old, {.overlap = true}))));
  must(answer_of(device_.reset()));
  EXPECT_TRUE(
      has_code(answer_of(start(add, std::int64_t{1}, old, {.overlap = true})), errc::stale_ref));
  const auto x = memory_of({1});
  for (int i = 0; i < 20; ++i)
    start(add, std::int64_t{1}, x, {.overlap = true});
  EXPECT_TRUE(holds(device_, x, std::vector<std::int64_t>{21}));
}

TEST(Libraries, AreMadeAgainAfterOneHasFailed) {
  TROUPE_HOST_ONLY("the launch is a function of the host");
  test_system system{{.devices = unlucky_device + 1, .lanes = {.open_backoff = 1ms}}};
  const auto device = system.open(unlucky_device);
  const auto x = must(device.allocate<std::int64_t>(1));
  ASSERT_TRUE(is_ok(answer_of(device.launch(counted, {}, {}, {x}))));
  EXPECT_TRUE(holds(device, x, std::vector<std::int64_t>{1}));
}

TEST(Libraries, AreRefused) {
  EXPECT_TRUE(has_code(register_library(library_name, make_state), errc::invalid_argument));
  EXPECT_TRUE(has_code(register_library("", make_state), errc::invalid_argument));
  EXPECT_TRUE(has_code(register_library("troupe.testing.none", {}), errc::invalid_argument));
  EXPECT_TRUE(has_code(register_launch(add, library_launch{.enqueue = enqueue_add}),
                       errc::invalid_argument));
  EXPECT_TRUE(
      has_code(register_launch("troupe.testing.none", library_launch{}), errc::invalid_argument));
}

} // namespace

} // namespace troupe::testing
