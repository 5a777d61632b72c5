/// Requests that are answered in batches, on replicas that may be lost.
#pragma once

#include <troupe/batch_queue.hpp>
#include <troupe/detail/completion.hpp>
#include <troupe/device.hpp>
#include <troupe/dtype.hpp>
#include <troupe/error.hpp>
#include <troupe/gpu_ref.hpp>
#include <troupe/pending.hpp>
#include <troupe/task.hpp>
#include <troupe/timer.hpp>
#include <troupe/when.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <utility>
#include <vector>

namespace troupe {

namespace detail {

/// A request of a `batch_server`, and the place of its result.
template <class Request, class Result> class batched_request final : public completion {
public:
  explicit batched_request(Request x) : what(std::move(x)) {}
  ~batched_request() override {
    if (has_result_)
      std::destroy_at(result());
  }

  void cancel() noexcept override { answer(make_error(errc::cancelled, "by the requester")); }

  void succeed(Result x) {
    std::construct_at(result(), std::move(x));
    has_result_ = true;
    answer({});
  }
  /// Valid only after success.
  Result* result() noexcept { return std::addressof(result_); }

  Request what; ///< moved from while its batch runs

private:
  union {
    Result result_;
  };
  bool has_result_ = false;
};

/// @errors errc::deadline_exceeded
caf::error late_request(std::chrono::nanoseconds limit);

/// @errors errc::shape_mismatch
caf::error wrong_number_of_results(std::size_t results, std::size_t requests);

/// Returns whether `why`, or the error that it follows from, is the loss of a device.
bool tells_of_loss(const caf::error& why);

/// Logs that the replica on a device serves no more.
void log_end_of_replica(int device, const caf::error& why) noexcept;

} // namespace detail

/// The work that a `batch_server` has done so far.
struct batch_counts {
  std::size_t answers = 0;  ///< results and errors, each for one request
  std::size_t batches = 0;  ///< that were run, with any outcome
  std::size_t repeated = 0; ///< requests of batches that were run and then given back
  std::size_t losses = 0;   ///< how often a device was lost with its model
};

/// Answers requests in batches (dynamic batching), on replicas of a model: one on each device. Each
/// request is answered exactly once.
///
/// - A task for each replica loads the model, then runs one batch after another.
/// - If its device is lost, the batch goes back to the front of the queue, and any replica runs it
///   again. So requests must have no side effects. When the device is back, the task loads the
///   model again.
/// - When the first deadline of a batch is over, what its run awaits is cancelled. The batch goes
///   back, and the requests that are late are refused. So a device that hangs does not keep the
///   other requests of its batch.
/// - If a run fails for another reason, all requests of the batch get its error.
/// - A replica whose model cannot be loaded ends, with a line in the log, unless the reason is the
///   loss of its device. When the last one has ended, all requests are refused.
///
///     troupe::task<model> load(const troupe::device& on);
///     troupe::task<std::vector<output>> run(const troupe::device& on, const model& with,
///                                           const std::vector<input>& batch);
///
///     troupe::batch_server<input, output, model> server{replicas, {.most = 32}, load, run};
///     troupe::pending<output> y = server.ask(x, 100ms);
///
/// `load` and `run` run on the callback thread, as all continuations: they must not block. As all
/// owners of devices, the server has to end before the actor system.
/// @thread any, several at once
template <class Request, class Result, class Model> class batch_server {
public:
  using load_function = std::function<task<Model>(const device&)>;
  /// Returns a result for each request, in their order. The arguments live until the task is over.
  /// The task has to end when what it awaits was cancelled.
  using run_function = std::function<task<std::vector<Result>>(const device&, const Model&,
                                                               const std::vector<Request>&)>;

  /// Starts the tasks. `load` and `run`, and what they have captured, are kept until the last task
  /// is over.
  batch_server(std::vector<device> replicas, batch_limits limits, load_function load,
               run_function run)
      : core_(std::make_shared<core>(std::move(replicas), limits, std::move(load), std::move(run))),
        tasks_(core::start_tasks(core_)) {}
  batch_server(const batch_server&) = delete;
  batch_server& operator=(const batch_server&) = delete;

  /// Closes the server and cancels the batches that run: each request without an answer gets
  /// errc::unavailable. Does not wait for that.
  ~batch_server() {
    core::post([x = core_] { x->abandon(); });
  }

  /// Requests a result. If the request is cancelled before its batch runs, it does not run.
  /// @param deadline from now on; 0: none
  /// @errors errc::deadline_exceeded; errc::cancelled; errc::unavailable: the server is closed, has
  ///         no replica left, or `load` or `run` threw; errc::shape_mismatch: `run` returned
  ///         another number of results; errors of `run`
  pending<Result> ask(Request what, std::chrono::nanoseconds deadline = {}) {
    auto request = std::make_shared<detail::batched_request<Request, Result>>(std::move(what));
    core::post([x = core_, request, deadline] { x->add(request, deadline); });
    return {request, std::shared_ptr<Result>{request, request->result()}};
  }

  /// Refuses the requests that wait, and all later ones (errc::unavailable). Batches that run are
  /// answered. Completes when the tasks are over. Can be called again.
  pending<void> close() {
    core::post([x = core_] { x->close(make_error(errc::unavailable, "the server is closed")); });
    return when_all(tasks_);
  }

  batch_counts counts() const noexcept { return core_->counts(); }

private:
  class core;

  const std::shared_ptr<core> core_;
  const std::vector<pending<void>> tasks_;
};

/// The part that lives until the last task is over.
/// @thread the callback thread, except `counts`
template <class Request, class Result, class Model>
class batch_server<Request, Result, Model>::core {
public:
  using open_request = detail::batched_request<Request, Result>;
  using request = std::shared_ptr<open_request>;

  core(std::vector<device> replicas, batch_limits limits, load_function load, run_function run)
      : replicas_(std::move(replicas)), load_(std::move(load)), run_(std::move(run)),
        waiting_(limits), running_(replicas_.size()), serving_(replicas_.size()) {}

  static void post(std::function<void()> f) { detail::callback_executor().post(std::move(f)); }

  static std::vector<pending<void>> start_tasks(const std::shared_ptr<core>& self) {
    if (self->replicas_.empty())
      self->close(make_error(errc::unavailable, "the server has no replicas"));
    std::vector<pending<void>> result{start(refuse_late(self))};
    for (std::size_t i = 0; i < self->replicas_.size(); ++i)
      result.push_back(start(serve(self, i)));
    return result;
  }

  void add(const request& x, std::chrono::nanoseconds deadline) {
    const auto limit = deadline == deadline.zero() ? detail::as_good_as_never : deadline;
    if (!waiting_.push(x, limit))
      fail(*x, why_closed_);
  }

  void close(caf::error why) {
    if (why_closed_)
      return;
    why_closed_ = std::move(why);
    loads_.request_stop();
    refuse(waiting_.close()); // ends the tasks that wait for a batch
  }

  void abandon() {
    close(make_error(errc::unavailable, "the server has ended"));
    for (auto& x : running_)
      refuse(x);
    runs_.request_stop();
  }

  batch_counts counts() const noexcept { return {answers_, batches_, repeated_, losses_}; }

private:
  using queue = batch_queue<request>;
  using batch = typename queue::batch;
  using clock = typename queue::clock;

  /// The task that refuses late requests.
  static task<> refuse_late(std::shared_ptr<core> self) {
    while (auto late = co_await self->waiting_.take_late())
      self->refuse(*late);
  }

  /// The task of a replica.
  static task<> serve(std::shared_ptr<core> self, std::size_t at) {
    const auto ended = co_await serve_until_error(self, at);
    for (auto& x : self->running_[at]) // if there was no memory
      self->fail(*x.what, ended.error());
    self->running_[at].clear();
    if (!self->why_closed_)
      detail::log_end_of_replica(self->replicas_[at].ordinal(), ended.error());
    if (--self->serving_ == 0)
      self->close(make_error(errc::unavailable,
                             "the server has no replica left: " + describe(ended.error())));
  }

  static task<> serve_until_error(std::shared_ptr<core> self, std::size_t at) {
    const auto& on = self->replicas_[at];
    const auto stop = self->loads_.get_token();
    while (true) {
      // The handle of this byte says whether the device was lost.
      const auto byte = co_await on.allocate(dtype::uint8, 1).cancel_on(stop);
      if (!byte && detail::tells_of_loss(byte.error()))
        continue; // the next allocation waits until the device is back
      if (!byte)
        co_await end_with(byte.error());
      std::optional<Model> model;
      const auto loaded = co_await start(load(self, on, model), stop);
      if (!loaded && !is_lost(*byte, loaded.error()))
        co_await end_with(loaded.error());
      for (bool lost = !loaded; !lost;) {
        self->running_[at] = co_await value_of(self->waiting_.take());
        lost = co_await value_of(run_batch(self, at, *model, *byte));
      }
      ++self->losses_;
    }
  }

  static task<> load(std::shared_ptr<core> self, const device& on, std::optional<Model>& to) {
    to.emplace(co_await value_of(self->load_(on)));
  }

  /// Returns whether the device was lost. The error may come before the handle is stale.
  static bool is_lost(const any_gpu_ref& byte, const caf::error& why) {
    return byte.stale() || detail::tells_of_loss(why);
  }

  /// Runs a batch, at most until its first deadline. Answers it or gives it back. Returns whether
  /// the device was lost.
  static task<bool> run_batch(std::shared_ptr<core> self, std::size_t at, const Model& model,
                              const any_gpu_ref& byte) {
    auto& mine = self->running_[at];
    std::erase_if(mine, [](const auto& x) { return x.what->completed(); }); // cancelled
    if (mine.empty())
      co_return byte.stale();
    std::vector<Request> requests;
    for (auto& x : mine)
      requests.push_back(std::move(x.what->what));
    std::vector<Result> results;
    const auto run = start(results_of(self, at, model, requests, results), self->runs_.get_token());
    const auto due = std::ranges::min_element(mine, {}, &queue::entry::due)->due;
    const auto timer = after(due - clock::now()).cancel_on(self->runs_.get_token());
    timer.then([run](const caf::expected<void>& over) {
      if (over)
        run.cancel();
    });
    const auto done = co_await run;
    const bool late = timer.ready() && !timer.error();
    timer.cancel();
    ++self->batches_;
    for (std::size_t k = 0; k < requests.size(); ++k)
      mine[k].what->what = std::move(requests[k]);
    const auto why = done ? caf::error{} : done.error();
    const bool lost = is_lost(byte, why);
    self->finish(std::exchange(mine, {}), results, why, late || lost);
    co_return lost;
  }

  static task<> results_of(std::shared_ptr<core> self, std::size_t at, const Model& model,
                           const std::vector<Request>& requests, std::vector<Result>& to) {
    to = co_await value_of(self->run_(self->replicas_[at], model, requests));
    if (to.size() != requests.size())
      co_await end_with(detail::wrong_number_of_results(to.size(), requests.size()));
  }

  void finish(batch x, std::vector<Result>& results, const caf::error& why, bool may_repeat) {
    if (why && may_repeat) {
      const auto count = x.size();
      if (waiting_.give_back(std::move(x)))
        repeated_ += count;
      else
        refuse(x);
      return;
    }
    for (std::size_t k = 0; k < x.size(); ++k)
      if (why)
        fail(*x[k].what, why);
      else if (count(*x[k].what))
        x[k].what->succeed(std::move(results[k]));
  }

  /// Answers requests that are late, or that the closed server does not run.
  void refuse(const batch& all) {
    const auto now = clock::now();
    for (auto& x : all)
      fail(*x.what, x.due <= now ? detail::late_request(x.due - x.arrived) : why_closed_);
  }

  void fail(open_request& x, const caf::error& why) {
    if (count(x))
      x.answer(why);
  }

  /// Counts the answer that comes now. Returns false if there is one already.
  bool count(const open_request& x) noexcept {
    const bool open = !x.completed();
    answers_ += open ? 1 : 0;
    return open;
  }

  const std::vector<device> replicas_;
  const load_function load_;
  const run_function run_;
  queue waiting_;
  std::vector<batch> running_; ///< of each replica
  std::size_t serving_;        ///< tasks of replicas that are not over
  caf::error why_closed_;      ///< none: the server is open
  std::stop_source loads_;     ///< stopped when the server is closed
  std::stop_source runs_;      ///< stopped when the server ends
  std::atomic<std::size_t> answers_{0}, batches_{0}, repeated_{0}, losses_{0};
};

} // namespace troupe
