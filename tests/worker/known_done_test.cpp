// Work of a lost worker that was done, though not all of its events tell that.

#include "support/eventually.hpp"
#include "support/forwarding_backend.hpp"
#include "support/worker_losses.hpp"
#include <troupe/bytes.hpp>
#include <troupe/launch.hpp>
#include <troupe/worker.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

using elements = std::vector<std::uint32_t>;
using buffer_of_elements = gpu_ref<std::uint32_t>;

constexpr std::size_t count = 1000;
constexpr const char* judged = "troupe.testing.known_done.judged";

/// Writes 1 to all elements, and gives the argument as its verdict.
caf::error enqueue_judged(launch_context& context, std::span<const launch_memory>,
                          std::span<const launch_memory> writes,
                          std::span<const std::byte> arguments) {
  const auto verdict = from_bytes<std::int32_t>(arguments);
  if (!verdict)
    return verdict.error();
  return context.run_on_host([to = writes[0], word = context.verdict(), x = *verdict] {
    std::fill_n(static_cast<std::uint32_t*>(to.address), to.count, 1u);
    std::atomic_ref{*word}.store(x);
  });
}

/// Workers run the same binary.
[[maybe_unused]] const bool registered = [] {
  must(register_launch(
      judged, library_launch{.enqueue = enqueue_judged, .judge = [](std::int32_t x) {
                               return make_error(errc::invalid_argument, std::to_string(x));
                             }}));
  return true;
}();
constexpr request_options again{.max_retries = 3};

/// How long a lane does not see that work is done.
enum class hiding : std::uint8_t { none, until_loss, for_good };

/// Hides from a lane that work is done.
class screen {
public:
  /// Hides for good what is recorded from now on in the first stream in which anything is, and what
  /// is recorded in others as `others` says.
  void begin(hiding others) {
    std::lock_guard lock{mutex_};
    first_.reset();
    others_ = others;
    is_on_ = true;
  }
  /// After the loss, goes on hiding what is hidden until then, until `x` holds.
  void hide_until(std::function<bool()> x) {
    std::lock_guard lock{mutex_};
    until_ = std::move(x);
  }
  /// Hides nothing new.
  void end() {
    std::lock_guard lock{mutex_};
    is_on_ = false;
  }
  void reveal() {
    std::lock_guard lock{mutex_};
    hidden_.clear();
    is_on_ = false;
  }
  /// Returns how many events that are hidden in this way were done when a lane looked last.
  std::size_t done(hiding how) const {
    std::lock_guard lock{mutex_};
    const auto i = done_.find(how);
    return i == done_.end() ? 0 : i->second;
  }

  void on_record(event_view x, stream_view on) {
    std::lock_guard lock{mutex_};
    hidden_.erase(x.native);
    if (!is_on_)
      return;
    if (!first_)
      first_ = on.native;
    if (const auto how = on.native == *first_ ? hiding::for_good : others_; how != hiding::none)
      hidden_.emplace(x.native, how);
  }
  void on_destroy(event_view x) {
    std::lock_guard lock{mutex_};
    hidden_.erase(x.native);
  }
  caf::expected<bool> on_query(backend_device& of, event_view x) {
    std::lock_guard lock{mutex_};
    const auto i = hidden_.find(x.native);
    const auto loss = of.loss();
    if (i == hidden_.end() || (loss && i->second == hiding::until_loss && (!until_ || until_())))
      return of.query(x);
    done_.clear();
    for (auto& [native, how] : hidden_)
      if (const auto done = of.query(event_view{native}); done && *done)
        ++done_[how];
    if (loss)
      return loss;
    return false;
  }

private:
  mutable std::mutex mutex_;
  bool is_on_ = false;
  std::optional<void*> first_;
  hiding others_ = hiding::none;
  std::function<bool()> until_;
  std::map<void*, hiding> hidden_;
  std::map<hiding, std::size_t> done_;
};

class screened_device : public forwarding_device {
public:
  screened_device(std::unique_ptr<backend_device> inner, std::shared_ptr<screen> before)
      : forwarding_device(std::move(inner)), before_(std::move(before)) {}
  caf::error record(event_view x, stream_view on) noexcept override {
    before_->on_record(x, on);
    return inner_->record(x, on);
  }
  caf::error destroy_event(event_view x) noexcept override {
    before_->on_destroy(x);
    return inner_->destroy_event(x);
  }
  caf::expected<bool> query(event_view x) noexcept override {
    return before_->on_query(*inner_, x);
  }

private:
  std::shared_ptr<screen> before_;
};

class screened_backend : public forwarding_backend {
public:
  screened_backend(std::shared_ptr<backend> inner, std::shared_ptr<screen> before)
      : forwarding_backend(std::move(inner)), before_(std::move(before)) {}
  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override {
    return open_as<screened_device>(ordinal, before_);
  }

private:
  std::shared_ptr<screen> before_;
};

/// Runs tasks where they are posted: on the thread that completes a request.
class at_once : public executor {
public:
  void post(std::function<void()> task) override { task(); }
};

class KnownDone : public ::testing::Test {
protected:
  void SetUp() override {
    system_ = std::make_unique<test_system>(
        system_options{.devices = 1, .wrap = [this](std::shared_ptr<backend>) {
                         return std::make_shared<screened_backend>(make_workers(1), screen_);
                       }});
    device_ = system_->open(0);
  }

  buffer_of_elements filled(std::uint32_t content) const {
    auto result = must(device_.allocate<std::uint32_t>(count));
    must(answer_of(device_.fill(result, content)));
    return result;
  }
  ::testing::AssertionResult has(const buffer_of_elements& x, std::uint32_t content) const {
    return holds(device_, x, elements(count, content));
  }
  /// Hides ends of requests until the process is killed.
  void hide(hiding others) {
    process_ = must(answer_of(device_.stats())).worker_pid;
    screen_->begin(others);
  }
  void kill() const {
    screen_->end();
    ASSERT_EQ(::kill(static_cast<pid_t>(process_), SIGKILL), 0);
  }

  std::shared_ptr<screen> screen_ = std::make_shared<screen>();
  std::unique_ptr<test_system> system_;
  device device_;
  std::int64_t process_ = 0;
};

/// The lane finds that all three are done when the loss has failed one of them.
TEST_F(KnownDone, FailsNoRequestBeforeALaterOneThatSucceeds) {
  const auto memory = filled(0);
  const auto beside = filled(0);
  at_once here;
  hide(hiding::none);
  auto first = device_.fill(memory, 1u, again);
  auto between = device_.fill(beside, 2u);
  auto last = device_.fill(memory, 3u, again);
  EXPECT_TRUE(eventually([&] { return screen_->done(hiding::for_good) == 3; }));
  between.then(here, [&](const auto&) {
    screen_->reveal();
    EXPECT_TRUE(eventually([&] { return first.ready() || last.ready(); }));
  });
  kill();
  EXPECT_TRUE(has_code(answer_of(between).error(), errc::worker_lost));
  EXPECT_TRUE(is_ok(answer_of(first)));
  EXPECT_TRUE(is_ok(answer_of(last)));
  EXPECT_TRUE(has(memory, 3));
}

/// The later request overwrites what the earlier one has read: that could not be made again.
TEST_F(KnownDone, EndsWhatALaterRequestHasWaitedFor) {
  const auto input = filled(1);
  const auto output = filled(0);
  const auto beside = filled(0);
  hide(hiding::none);
  auto filling = device_.fill(beside, 5u, again); // before the copy in its stream
  auto copying = device_.copy(output, input, again);
  must(answer_of(device_.upload(input, host_buffer{elements(count, 2)}, again)));
  kill();
  EXPECT_TRUE(eventually([&] { return device_.incarnation() == 2; }));
  EXPECT_TRUE(is_ok(answer_of(filling)));
  EXPECT_TRUE(is_ok(answer_of(copying)));
  EXPECT_TRUE(has(beside, 5));
  EXPECT_TRUE(has(output, 1));
  EXPECT_TRUE(has(input, 2));
}

/// The same if the end of the later request is found after the loss.
TEST_F(KnownDone, KeepsTheResultsOfWhatALaterRequestHasWaitedFor) {
  const auto input = filled(1);
  const auto output = filled(0);
  const auto beside = filled(0);
  hide(hiding::until_loss);
  auto before = device_.upload(beside, host_buffer{elements(count, 5)});
  auto uploading = device_.upload(input, host_buffer{elements(count, 2)});
  auto copying = device_.copy(output, input);
  EXPECT_TRUE(eventually([&] { return screen_->done(hiding::until_loss) == 1; }));
  kill();
  for (const auto& x : {before, uploading, copying}) {
    const auto how = answer_of(x); // the lane may find it before the loss is told
    EXPECT_TRUE(how || has_code(how.error(), errc::worker_lost));
  }
  // At first they may count as failed: the lane has yet to find that they were done.
  EXPECT_TRUE(eventually([&] { return has(beside, 5) == true; }));
  EXPECT_TRUE(eventually([&] { return has(input, 2) == true; }));
  EXPECT_TRUE(eventually([&] { return has(output, 2) == true; }));
}

/// The verdict of the work comes before the loss, and the lane sees it after the loss.
TEST_F(KnownDone, KeepsNoResultThatHasAVerdict) {
  TROUPE_HOST_ONLY("the launch computes on the host");
  const auto wrong = filled(0);
  const auto right = filled(0);
  const auto beside = filled(0);
  hide(hiding::until_loss);
  auto before = device_.upload(beside, host_buffer{elements(count, 5)}); // in the first stream
  const auto failing = device_.launch(judged, to_bytes(std::int32_t{7}), {}, {wrong});
  auto last = device_.launch(judged, to_bytes(std::int32_t{0}), {}, {right});
  EXPECT_TRUE(eventually([&] { return screen_->done(hiding::until_loss) == 2; }));
  screen_->hide_until([=] { return failing.ready(); });
  kill();
  EXPECT_TRUE(has_code(answer_of(failing), errc::worker_lost));
  EXPECT_TRUE(eventually([&] { return has(right, 1) == true; }));
  EXPECT_TRUE(has_code(device_.download(wrong), errc::indeterminate));
}

} // namespace

} // namespace troupe::testing
