// Named buffers of programs: the next process of a device finds them again.

#include "support/eventually.hpp"
#include "support/folder.hpp"
#include "support/forwarding_backend.hpp"
#include "support/random.hpp"
#include "worker/program_fixture.hpp"
#include <troupe/device.hpp>
#include <troupe/spawn_program.hpp>

#include <caf/all.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

namespace troupe::testing {

namespace {

constexpr std::size_t elements = 1000;

/// An order to the program, for the buffer of a name.
struct kept_order {
  enum class verb : std::uint8_t {
    keep,     ///< of `count` floats
    ints,     ///< the same of std::int32_t
    many,     ///< as many names as there may be
    fill,     ///< with `value`
    part,     ///< fills the first half
    look,     ///< its value, if all elements are equal
    fail,     ///< a launch that fails while it writes
    write,    ///< a launch that writes until the file can be opened; reported when it has begun
    read,     ///< the same, but it reads
    sum,      ///< a collective, of which the result is not waited for
    same_sum, ///< the same, waited for
    drop      ///< all handles
  };
  verb what = verb::keep;
  std::array<char, 300> name{};
  std::array<char, 200> file{};
  std::uint64_t count = elements;
  float value = 0;
};

struct kept_outcome {
  errc code{};
  bool found = false;
  float value = 0;
  std::uint64_t buffer = 0;
};

std::string text_of(const auto& from) { return {from.data()}; }

class name_user {
public:
  explicit name_user(program_place place) : place_(std::move(place)) {}

  /// Returns none if it reports by itself.
  std::optional<kept_outcome> obey(const kept_order& x) {
    kept_outcome result;
    const bool reports = x.what == verb::write || x.what == verb::read;
    if (auto error = act(x, result))
      result.code = code_of(error).value_or(errc::internal);
    else if (reports)
      return std::nullopt;
    return result;
  }

private:
  using verb = kept_order::verb;

  caf::error act(const kept_order& x, kept_outcome& result) {
    const auto d = place_.rank.where();
    const auto name = text_of(x.name);
    auto& ref = refs_[name];
    switch (x.what) {
    case verb::keep:
      return keep(name, x.count, ref, result);
    case verb::ints:
      return error_of(place_.keep<std::int32_t>(name, x.count));
    case verb::many:
      for (std::size_t i = 0; i < most_kept_names; ++i)
        if (auto got = place_.keep<float>("many " + std::to_string(i), 1); !got)
          return got.error();
      return {};
    case verb::fill:
      return error_of(d.fill(ref, x.value).wait());
    case verb::part:
      return error_of(d.fill(must(ref.slice(0, ref.count() / 2)), x.value).wait());
    case verb::look:
      return look(ref, result);
    case verb::fail:
      return error_of(launch_failure(d, "it shall fail", {ref}).wait());
    case verb::write:
      held_.push_back(hold(text_of(x.file), {}, {ref}));
      return {};
    case verb::read:
      held_.push_back(hold(text_of(x.file), {ref}, {}));
      return {};
    case verb::sum:
      sums_.push_back(place_.rank.all_reduce(ref));
      return error_of(d.stats().wait()); // so the call has its place in the order of the buffer
    case verb::same_sum:
      return error_of(place_.rank.all_reduce(ref).wait());
    case verb::drop:
      refs_.clear();
      return {};
    }
    return make_error(errc::internal, "no such order");
  }

  caf::error keep(const std::string& name, std::size_t count, gpu_ref<float>& ref,
                  kept_outcome& result) {
    auto got = place_.keep<float>(name, count);
    if (!got)
      return got.error();
    ref = got->ref;
    result.found = got->found;
    result.buffer = ref.any().token().buffer;
    return {};
  }

  caf::error look(const gpu_ref<float>& ref, kept_outcome& result) const {
    auto got = place_.rank.where().download(ref);
    if (!got)
      return got.error();
    result.value = got->front();
    return *got == std::vector<float>(ref.count(), got->front())
               ? caf::error{}
               : make_error(errc::internal, "the elements differ");
  }

  pending<void> hold(const std::string& file, std::vector<any_gpu_ref> reads,
                     std::vector<any_gpu_ref> writes) const {
    return place_.rank.where().launch(
        [place = place_, file](launch_context& context) {
          return context.run_on_host([place, file] {
            static_cast<void>(place.report(to_bytes(kept_outcome{})));
            ::close(::open(file.c_str(), O_RDONLY)); // a FIFO: blocks until the test opens it
          });
        },
        std::move(reads), std::move(writes));
  }

  program_place place_;
  std::map<std::string, gpu_ref<float>> refs_;
  std::vector<pending<void>> held_;
  std::vector<pending<collective_done>> sums_;
};

// -- a program that goes on where it was

constexpr std::size_t weights_count = std::size_t{1} << 17;

float weight(std::size_t i) { return static_cast<float>(1 + i % 5); }

/// The state that a process found at its start, and each step after that.
struct progress {
  std::uint64_t step = 0;
  bool starts = false;
  std::uint32_t found = 0;
  std::uint32_t indeterminate = 0; ///< number of its buffers
};

/// Sums weights: the result of step s is s times the weights, in buffer s % 2.
class trainer {
public:
  explicit trainer(const program_place& place)
      : place_(place), d_(place.rank.where()), sums_{must(place.keep<float>("even", weights_count)),
                                                     must(place.keep<float>("odd", weights_count))},
        counter_(must(place.keep<std::uint64_t>("steps", 1))) {}

  /// Finds the last complete step.
  progress begin() {
    progress result{.starts = true};
    for (bool x : {sums_[0].found, sums_[1].found, counter_.found})
      result.found += x ? 1 : 0;
    if (result.found == 0) {
      must(d_.upload(sums_[0].ref, std::vector<float>(weights_count, 0)).wait());
      must(d_.upload(counter_.ref, std::vector<std::uint64_t>{0}).wait());
      return result;
    }
    const auto counted = readable(counter_.ref, result);
    std::optional<std::uint64_t> last;
    for (std::size_t i = 0; i < 2; ++i)
      if (auto there = step_in(i, result))
        last = std::max(last.value_or(0), *there);
    if (!last)
      throw std::runtime_error("no step is complete");
    // If the sum of the next step was complete, but not counted, it counts.
    if (counted && *last != counted->front() && *last != counted->front() + 1)
      throw std::runtime_error("step " + std::to_string(*last) + " is there, but " +
                               std::to_string(counted->front()) + " were counted");
    result.step = *last;
    if (!counted)
      must(d_.upload(counter_.ref, std::vector{*last}).wait());
    return result;
  }

  void step(std::uint64_t number) {
    auto sum = must(d_.download(sums_[(number + 1) % 2].ref));
    for (std::size_t i = 0; i < sum.size(); ++i)
      sum[i] += weight(i);
    must(d_.upload(sums_[number % 2].ref, std::move(sum)).wait());
    must(d_.upload(counter_.ref, std::vector<std::uint64_t>{number}).wait());
  }

private:
  template <class T>
  std::optional<std::vector<T>> readable(const gpu_ref<T>& ref, progress& result) const {
    auto got = d_.download(ref);
    if (got)
      return std::move(*got);
    if (code_of(got.error()) != errc::indeterminate)
      throw std::runtime_error(describe(got.error()));
    ++result.indeterminate;
    return std::nullopt;
  }

  /// Returns the step whose result the buffer has; none if it is indeterminate.
  std::optional<std::uint64_t> step_in(std::size_t index, progress& result) const {
    const auto there = readable(sums_[index].ref, result);
    if (!there)
      return std::nullopt;
    const auto number = there->front() / weight(0);
    for (std::size_t i = 0; i < there->size(); ++i)
      if ((*there)[i] != number * weight(i))
        throw std::runtime_error("element " + std::to_string(i) + " is of another step");
    const auto step = static_cast<std::uint64_t>(number);
    if (step % 2 != index)
      throw std::runtime_error("the buffer has a step of the other one");
    return step;
  }

  const program_place place_;
  const device d_;
  std::array<kept_buffer<float>, 2> sums_;
  kept_buffer<std::uint64_t> counter_;
};

bool is_told_to_end(caf::blocking_actor* self) {
  bool result = false;
  self->receive([&](const program_message&) { result = true; },
                caf::after(std::chrono::seconds{0}) >> [] {});
  return result;
}

[[maybe_unused]] const bool registered = [] {
  must(register_program("user of names", [](const program_place& place) {
    return place.system.spawn<caf::detached>([place](caf::event_based_actor*) -> caf::behavior {
      auto state = std::make_shared<name_user>(place);
      return {[place, state](const program_message& x) {
        const auto result = state->obey(must(from_bytes<kept_order>(x.bytes)));
        if (!result)
          return;
        if (auto lost = place.report(to_bytes(*result)))
          ADD_FAILURE() << describe(lost);
      }};
    });
  }));
  must(register_program("trainer", [](const program_place& place) {
    return spawn_program(place, [place](caf::blocking_actor* self) {
      trainer all{place};
      auto now = all.begin();
      must(place.report(to_bytes(now)));
      for (auto step = now.step + 1; !is_told_to_end(self); ++step) {
        all.step(step);
        must(place.report(to_bytes(progress{.step = step})));
      }
    });
  }));
  return true;
}();

/// Devices whose lost work is over only when the test says so, too.
class backend_with_lost_work final : public forwarding_backend {
public:
  using flag = std::shared_ptr<std::atomic<bool>>;

  backend_with_lost_work(std::shared_ptr<backend> inner, flag is_over)
      : forwarding_backend(std::move(inner)), is_over_(std::move(is_over)) {}
  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override {
    class guest final : public forwarding_device {
    public:
      guest(std::unique_ptr<backend_device> inner, flag is_over)
          : forwarding_device(std::move(inner)), is_over_(std::move(is_over)) {}
      std::function<bool()> lost_work() const noexcept override {
        return [inner = inner_->lost_work(), is_over = is_over_] { return *is_over && inner(); };
      }

    private:
      flag is_over_;
    };
    return open_as<guest>(ordinal, is_over_);
  }

private:
  flag is_over_;
};

class KeptBuffers : public ProgramsTest {
protected:
  using verb = kept_order::verb;

  void begin(int devices = 1, world_limits limits = {},
             kept_memory keeps = kept_memory::after_end) {
    const auto make_backend = [=, this](std::shared_ptr<backend>) {
      return std::make_shared<backend_with_lost_work>(make_workers(devices, keeps), work_is_over_);
    };
    start({.devices = devices, .wrap = make_backend}, {"user of names", {}}, limits);
    ASSERT_TRUE(until([this] { return view_.phase == world_phase::ready; }));
  }
  void SetUp() override { make_fifo(file()); }
  void TearDown() override {
    if (const int end = ::open(file().c_str(), O_WRONLY | O_NONBLOCK); end >= 0)
      ::close(end); // a launch waits for it
    ProgramsTest::TearDown();
  }

  std::string file() const { return folder_.file("go on"); }

  void order(verb what, const std::string& name, float value = 0, std::uint64_t count = elements,
             int rank = 0) {
    kept_order x{.what = what, .count = count, .value = value};
    std::memcpy(x.name.data(), name.data(), name.size());
    std::memcpy(x.file.data(), file().data(), file().size());
    detail::send(*self_, actor_, program_message{rank, to_bytes(x)});
  }
  kept_outcome tell(verb what, const std::string& name, float value = 0,
                    std::uint64_t count = elements, int rank = 0) {
    const auto before = reports_.size();
    order(what, name, value, count, rank);
    EXPECT_TRUE(until([&] { return reports_.size() > before; }));
    return reports_.size() > before ? must(from_bytes<kept_outcome>(reports_.back().bytes))
                                    : kept_outcome{errc::internal, false, 0, 0};
  }
  /// For EXPECT_TRUE: the buffer is readable, and has this value.
  ::testing::AssertionResult has(const std::string& name, float value) {
    const auto there = tell(verb::look, name);
    if (there.code == errc{} && there.value == value)
      return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure()
           << name << ": " << to_string(there.code) << ", " << there.value;
  }
  errc keep(const std::string& name) { return tell(verb::keep, name).code; }
  bool finds(const std::string& name) {
    const auto there = tell(verb::keep, name);
    EXPECT_EQ(there.code, errc{}) << name;
    return there.found;
  }
  void make(const std::string& name, float value) {
    EXPECT_FALSE(finds(name));
    EXPECT_EQ(tell(verb::fill, name, value).code, errc{});
  }
  void kill_and_wait(int ordinal = 0) {
    const auto d = must(device::open(*system_, ordinal));
    const auto before = d.incarnation();
    EXPECT_TRUE(has_code(kill_worker(d), errc::worker_lost));
    EXPECT_TRUE(eventually([&] { return d.incarnation() > before; }));
  }

  void end_world() {
    caf::anon_send_exit(actor_, caf::exit_reason::user_shutdown);
    (*self_)->wait_for(actor_);
  }
  void survive_losses() {
    make("weights", 3);
    for (int i = 0; i < 5; ++i) {
      kill_and_wait();
      EXPECT_TRUE(finds("weights"));
      EXPECT_TRUE(has("weights", static_cast<float>(3 + i)));
      EXPECT_EQ(tell(verb::fill, "weights", static_cast<float>(4 + i)).code, errc{});
    }
  }

  folder folder_;
  const std::shared_ptr<std::atomic<bool>> work_is_over_ =
      std::make_shared<std::atomic<bool>>(true);
};

TEST_F(KeptBuffers, AreThereAfterEachOfManyLosses) {
  begin();
  survive_losses();
}

TEST_F(KeptBuffers, AreThereAfterEachOfManyLossesWithSpares) {
  begin(1, {.standby = standby_policy::full});
  survive_losses();
}

TEST_F(KeptBuffers, AreTheSameInOneProcess) {
  begin();
  const auto first = tell(verb::keep, "weights");
  const auto second = tell(verb::keep, "weights");
  EXPECT_EQ(second.code, errc{});
  EXPECT_TRUE(second.found);
  EXPECT_EQ(second.buffer, first.buffer);
  EXPECT_NE(tell(verb::keep, "other").buffer, first.buffer);
}

TEST_F(KeptBuffers, OfDifferentRanksAreDifferent) {
  TROUPE_NEEDS_DEVICES(2);
  begin(2);
  make("weights", 3);
  EXPECT_FALSE(tell(verb::keep, "weights", 0, elements, 1).found);
  EXPECT_TRUE(has("weights", 3));
}

/// The process may end before it writes to new memory.
TEST_F(KeptBuffers, AreIndeterminateUntilTheyAreWritten) {
  begin();
  EXPECT_FALSE(finds("weights"));
  EXPECT_EQ(tell(verb::look, "weights").code, errc::indeterminate);
  kill_and_wait();
  EXPECT_TRUE(finds("weights"));
  EXPECT_EQ(tell(verb::look, "weights").code, errc::indeterminate);
  EXPECT_EQ(tell(verb::part, "weights", 3).code, errc{});
  kill_and_wait();
  EXPECT_TRUE(finds("weights"));
  EXPECT_EQ(tell(verb::look, "weights").code, errc::indeterminate);
  EXPECT_EQ(tell(verb::fill, "weights", 3).code, errc{});
  kill_and_wait();
  EXPECT_TRUE(finds("weights"));
  EXPECT_TRUE(has("weights", 3));
}

TEST_F(KeptBuffers, WhatALaunchWasWritingIsIndeterminateAlone) {
  begin();
  make("written", 2);
  make("idle", 3);
  EXPECT_EQ(tell(verb::write, "written").code, errc{});
  kill_and_wait();
  for (const auto* name : {"written", "idle"})
    EXPECT_TRUE(finds(name));
  EXPECT_EQ(tell(verb::look, "written").code, errc::indeterminate);
  EXPECT_TRUE(has("idle", 3));
  EXPECT_EQ(tell(verb::part, "written", 4).code, errc{});
  EXPECT_EQ(tell(verb::look, "written").code, errc::indeterminate);
  EXPECT_EQ(tell(verb::fill, "written", 4).code, errc{});
  EXPECT_TRUE(has("written", 4));
  kill_and_wait(); // its marks are gone, also in the parent
  EXPECT_TRUE(finds("written"));
  EXPECT_TRUE(has("written", 4));
}

TEST_F(KeptBuffers, WhatALaunchWasReadingIsThere) {
  begin();
  make("read", 2);
  EXPECT_EQ(tell(verb::read, "read").code, errc{});
  kill_and_wait();
  EXPECT_TRUE(finds("read"));
  EXPECT_TRUE(has("read", 2));
}

TEST_F(KeptBuffers, WhatACollectiveWasWritingIsIndeterminateAlone) {
  TROUPE_NEEDS_DEVICES(2);
  begin(2);
  make("sum", 2);
  make("idle", 3);
  EXPECT_EQ(tell(verb::sum, "sum").code, errc{}); // rank 1 does not take part
  kill_and_wait();
  EXPECT_TRUE(finds("sum"));
  EXPECT_TRUE(finds("idle"));
  EXPECT_EQ(tell(verb::look, "sum").code, errc::indeterminate);
  EXPECT_TRUE(has("idle", 3));
  EXPECT_EQ(tell(verb::fill, "sum", 5).code, errc{});
  EXPECT_TRUE(has("sum", 5));
}

TEST_F(KeptBuffers, WhatACollectiveHasWrittenIsThere) {
  begin();
  make("sum", 2);
  EXPECT_EQ(tell(verb::same_sum, "sum").code, errc{});
  EXPECT_TRUE(has("sum", 2)); // behind the collective on the lane
  kill_and_wait();
  EXPECT_TRUE(finds("sum"));
  EXPECT_TRUE(has("sum", 2));
}

TEST_F(KeptBuffers, WhatFailedBeforeTheLossIsIndeterminate) {
  begin();
  make("failed", 2);
  EXPECT_EQ(tell(verb::fail, "failed").code, errc::launch_failed);
  make("behind it", 3); // so the launch is over, and the lane has set its marks
  kill_and_wait();
  EXPECT_TRUE(finds("failed"));
  EXPECT_EQ(tell(verb::look, "failed").code, errc::indeterminate);
  EXPECT_EQ(tell(verb::fill, "failed", 4).code, errc{});
  kill_and_wait();
  EXPECT_TRUE(finds("failed"));
  EXPECT_TRUE(has("failed", 4));
}

TEST_F(KeptBuffers, WhatWasOverwrittenAfterAFailureIsThere) {
  begin();
  make("failed", 2);
  EXPECT_EQ(tell(verb::fail, "failed").code, errc::launch_failed);
  EXPECT_EQ(tell(verb::look, "failed").code, errc::indeterminate);
  EXPECT_EQ(tell(verb::fill, "failed", 4).code, errc{});
  kill_and_wait();
  EXPECT_TRUE(finds("failed"));
  EXPECT_TRUE(has("failed", 4));
}

TEST_F(KeptBuffers, AreNewWhereMemoryIsNotKept) {
  begin(1, {}, kept_memory::none);
  make("weights", 3);
  kill_and_wait();
  make("weights", 3);
}

/// Until then it may write there.
TEST_F(KeptBuffers, AreThereWhenTheWorkOfTheLostProcessIsOver) {
  begin();
  make("weights", 3);
  *work_is_over_ = false;
  kill_and_wait();
  order(verb::keep, "weights");
  bool reported = false;
  (*self_)->receive([&](const program_report&) { reported = true; }, caf::after(200ms) >> [] {});
  EXPECT_FALSE(reported);
  *work_is_over_ = true;
  ASSERT_TRUE(until_more_reports(1));
  const auto there = must(from_bytes<kept_outcome>(reports_.back().bytes));
  EXPECT_EQ(there.code, errc{});
  EXPECT_TRUE(there.found);
  EXPECT_TRUE(has("weights", 3));
}

TEST_F(KeptBuffers, HaveOneShape) {
  begin();
  make("weights", 3);
  for (int i = 0; i < 2; ++i) { // the process refuses, then the parent
    EXPECT_EQ(tell(verb::keep, "weights", 0, elements + 1).code, errc::shape_mismatch);
    EXPECT_EQ(tell(verb::ints, "weights").code, errc::shape_mismatch);
    kill_and_wait();
  }
  EXPECT_TRUE(finds("weights"));
  EXPECT_TRUE(has("weights", 3));
}

TEST_F(KeptBuffers, AreRefused) {
  begin();
  EXPECT_EQ(keep(""), errc::invalid_argument);
  EXPECT_EQ(keep(std::string(most_kept_name_bytes + 1, 'x')), errc::invalid_argument);
  EXPECT_EQ(tell(verb::keep, "none", 0, 0).code, errc::invalid_argument);
  EXPECT_EQ(tell(verb::keep, "huge", 0, SIZE_MAX / 2).code, errc::out_of_memory);
  EXPECT_EQ(tell(verb::keep, "large", 0, std::uint64_t{1} << 48).code, errc::out_of_memory);
  EXPECT_EQ(keep(std::string(most_kept_name_bytes, 'x')), errc{});
}

TEST_F(KeptBuffers, HaveAtMostSoManyNames) {
  begin();
  EXPECT_EQ(tell(verb::many, "").code, errc{});
  EXPECT_EQ(keep("one more"), errc::overloaded);
  EXPECT_EQ(tell(verb::keep, "many 7", 0, 1).code, errc{});
  kill_and_wait(); // most of the claims have no word
  EXPECT_EQ(tell(verb::many, "").code, errc{});
  EXPECT_EQ(keep("one more"), errc::overloaded);
}

TEST_F(KeptBuffers, EndWithTheWorld) {
  begin();
  make("weights", 3);
  end_world();
  view_ = {};
  open_world();
  ASSERT_TRUE(until([this] { return view_.phase == world_phase::ready; }));
  make("weights", 4);
  kill_and_wait(); // the lost process's memory goes, too
  EXPECT_TRUE(finds("weights"));
}

TEST_F(KeptBuffers, GoBackToTheDevice) {
  TROUPE_HOST_ONLY("devices of a known size");
  begin();
  const auto d = system_->open(0);
  const auto free_bytes = [&] { return must(answer_of(d.stats())).free_bytes; };
  const auto before = free_bytes();
  const std::size_t size = std::size_t{100} << 20;
  EXPECT_EQ(tell(verb::keep, "weights", 0, size / sizeof(float)).code, errc{});
  EXPECT_LE(free_bytes(), before - size);
  end_world();
  EXPECT_TRUE(eventually([&] { return free_bytes() >= before; }));
}

// -- a program that goes on where it was

/// Kills the process at random moments.
class KeptProgress : public ProgramsTest {
protected:
  void go_on_after_losses(standby_policy standby) {
    std::mt19937_64 random{standby == standby_policy::none ? 17u : 18u};
    start(in_worker_processes(1), {"trainer", {}}, {.standby = standby});
    std::uint64_t done = 0;
    int starts = 0;
    for (int kills = 0; kills < 50; ++kills) {
      const auto steps = pick(random, 1, 4);
      for (std::uint64_t i = 0; i < steps;) {
        ASSERT_TRUE(until_more_reports(1));
        const auto now = must(from_bytes<progress>(reports_.back().bytes));
        if (now.starts) {
          EXPECT_EQ(now.found, starts++ == 0 ? 0u : 3u);
          EXPECT_LE(now.indeterminate, 1u) << "one write at a time";
          EXPECT_GE(now.step, done);
        } else {
          ++i;
        }
        done = now.step;
      }
      std::this_thread::sleep_for(std::chrono::microseconds{pick(random, 0, 2000)}); // any moment
      EXPECT_TRUE(has_code(kill(0), errc::worker_lost));
    }
    EXPECT_GE(done, 50u);
    detail::send(*self_, actor_, program_message{0, {}});
    EXPECT_TRUE(until([this] { return !ended_.empty(); }));
  }
};

TEST_F(KeptProgress, GoesOnAfterLosses) { go_on_after_losses(standby_policy::none); }

TEST_F(KeptProgress, GoesOnAfterLossesWithSpares) { go_on_after_losses(standby_policy::full); }

} // namespace

} // namespace troupe::testing
