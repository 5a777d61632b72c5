#include "worker/parent/process_pool.hpp"

#include "foundation/fair_limit.hpp"
#include "foundation/file_descriptor.hpp"
#include "foundation/log.hpp"
#include "foundation/option_check.hpp"
#include "foundation/slab_space.hpp"
#include "foundation/start_thread.hpp"
#include "worker/protocol/worker_parent.hpp"
#include <troupe/detail/completion.hpp>

#include <algorithm>
#include <bit>
#include <condition_variable>
#include <csignal>
#include <new>
#include <utility>

namespace troupe::detail {

namespace {

using clock = std::chrono::steady_clock;

/// How long a worker may take to end after the stop command before it is killed.
constexpr std::chrono::seconds stop_limit{2};
/// How long the ranks of communicators in a worker may take to end before the worker is stopped.
constexpr std::chrono::seconds ranks_limit{10};
/// How long to wait for the end of a killed worker.
constexpr std::chrono::seconds kill_limit{2};
/// How often a wait looks whether it is to stop.
constexpr std::chrono::milliseconds stop_tick{20};
/// How long a message may take to be sent to a worker without a call limit.
constexpr std::chrono::seconds send_limit{10};
/// Upper limit for a plausible granularity of slabs.
constexpr std::uint64_t most_slab_unit = std::uint64_t{1} << 30;
/// Upper limit for a plausible size of the memory of a rank for direct collectives.
constexpr std::uint64_t most_direct_bytes = std::uint64_t{1} << 30;

std::string text_of(const worker_end& end, const worker_settings& settings) {
  switch (end.cause) {
  case end_cause::died:
  case end_cause::let_go:
    return "ended";
  case end_cause::hung_up:
    return "hung up";
  case end_cause::stuck:
    return "showed no sign of life, and was killed";
  case end_cause::busy:
    return "was in the call \"" + call_name(end.call) + "\" for more than " +
           std::to_string(
               std::chrono::ceil<std::chrono::milliseconds>(settings.call_limit).count()) +
           " ms, and was killed";
  case end_cause::killed:
    break;
  }
  return "was killed by this process";
}

caf::error lost_by(int device, const worker_process& process, const worker_end& end,
                   const worker_settings& settings) {
  auto detail =
      "its worker, process " + std::to_string(process.id()) + ", " + text_of(end, settings);
  failure why{.code = errc::worker_lost, .detail = std::move(detail), .device = device};
  if (end.report) {
    why.detail += ": " + end.report->text;
    if (end.report->code == static_cast<std::int32_t>(errc::device_fault))
      why.cause = errc::device_fault;
    why.native_code = end.report->native_code;
  }
  return make_error(std::move(why));
}

caf::error unwanted(int device) {
  return make_error({.code = errc::unavailable,
                     .detail = "the device was closed while a worker of it started",
                     .device = device});
}

} // namespace

struct process_pool::life {
  void ended(int device, const worker_end& how, const worker_settings& settings) {
    std::unique_lock lock{mutex};
    const auto why = process ? lost_by(device, *process, how, settings)
                             : lost_worker(device, "its worker ended right after its start");
    const auto to = link.lock();
    if (!to)
      end = why;
    lock.unlock();
    if (to)
      to->lose(why);
  }
  void reaped() {
    std::unique_lock lock{mutex};
    const auto to = link.lock();
    lock.unlock();
    if (to)
      to->reaped();
    is_over();
  }
  /// Keeps `count` until the process is gone, or is not waited for any more.
  void ends(std::shared_ptr<void> count) {
    const std::lock_guard lock{mutex};
    if (!over)
      ending = std::move(count);
  }
  void is_over() {
    std::shared_ptr<void> gone; // goes without the lock
    const std::lock_guard lock{mutex};
    over = true;
    gone.swap(ending);
  }

  /// Passes messages of the worker on until there are no more.
  void receive(int device, const std::weak_ptr<worker_link>& to) {
    const auto error =
        receive_all(process->socket(), [&](std::span<const std::byte> message, auto descriptor) {
          if (auto x = to.lock())
            x->received(message, descriptor ? std::move(*descriptor) : file_descriptor{});
        });
    if (auto x = to.lock(); x && error)
      x->give_up(lost_worker(device, error));
  }

  std::optional<worker_process> process; ///< set before `link`
  std::mutex mutex;                      ///< guards the members below
  std::weak_ptr<worker_link> link;
  std::optional<caf::error> end; ///< set if the worker ended before it had a link
  std::shared_ptr<void> ending;  ///< null: the process is there, or `over`
  bool over = false;
};

namespace {

/// Sends messages one at a time. The limit covers the wait for other senders and for room in the
/// socket. A thread that kills the worker does not wait for senders.
class socket_sender final : public control_sender {
public:
  /// `limit`: maximum time to send a message; 0: `send_limit`
  socket_sender(worker_process& to, std::chrono::nanoseconds limit)
      : to_(to), limit_(limit.count() != 0 ? limit : send_limit) {}

  caf::error send(std::span<const std::byte> message,
                  std::optional<int> descriptor) noexcept override {
    fair_limit limit{limit_};
    {
      std::unique_lock lock{mutex_};
      if (!limit.wait(free_, lock, [this] { return !sending_; }))
        return make_error(errc::deadline_exceeded, "its worker reads no messages");
      sending_ = true;
    }
    auto& socket = to_.socket();
    caf::error error;
    do
      error = socket.send(message, descriptors_of(descriptor), limit.next());
    while (code_of(error) == errc::deadline_exceeded && !limit.over());
    if (error && socket.is_at_end())
      error = make_error(errc::worker_lost, "its worker has ended");
    std::lock_guard lock{mutex_};
    sending_ = false;
    free_.notify_one();
    return error;
  }

  std::int64_t pid() const noexcept override { return to_.id(); }

  void kill() noexcept override {
    if (auto error = to_.kill())
      log(log_level::error, "a worker was abandoned", error);
  }
  bool has_ended() const noexcept override { return to_.has_ended(); }

private:
  worker_process& to_;
  const std::chrono::nanoseconds limit_;
  std::mutex mutex_;
  std::condition_variable free_;
  bool sending_ = false;
};

} // namespace

caf::expected<std::shared_ptr<process_pool>> process_pool::create(worker_backend_options options,
                                                                  bool lends) {
  if (auto error = check_positive("worker_settings::start_limit", options.workers.start_limit))
    return error;
  for (auto [name, limit] :
       {std::pair{"worker_settings::stuck_limit", options.workers.stuck_limit},
        std::pair{"worker_settings::call_limit", options.workers.call_limit},
        std::pair{"worker_settings::build_limit", options.workers.build_limit}})
    if (auto error = check_not_negative(name, limit))
      return error;
  if (options.workers.keep_memory > kept_memory::after_fault)
    return make_error(errc::invalid_argument, "worker_settings::keep_memory is no known value");
  if (options.host.listen_address.empty())
    options.host.listen_address = "127.0.0.1";
  if (auto error = refuse_in_unmet_worker())
    return error;
  auto command = worker_program(options.workers);
  if (!command)
    return command.error();
  std::shared_ptr<process_pool> result{
      new process_pool{std::move(options), std::move(*command), lends}};
  auto first = result->start(0);
  if (!first)
    return first.error();
  for (int i = 0; i < first->devices; ++i)
    result->slots_.push_back(std::make_unique<worker_slot<running>>());
  if (first->devices == 0) {
    const auto why = make_error(errc::unavailable, "the workers have no device");
    result->end(*first, why);
    return why;
  }
  if (first->link->slab_granularity() != 0)
    raise_descriptor_limit(slab_space::most_slabs * result->slots_.size());
  if (first->link->slab_granularity() != 0 && first->link->direct_bytes() != 0)
    result->reaches_ = std::move(first->reaches);
  result->slots_.front()->begin_with(std::move(*first));
  return result;
}

bool process_pool::reaches(int from, int to) const noexcept {
  const auto i = static_cast<std::size_t>(from);
  return i < reaches_.size() && to >= 0 && to < 64 && (reaches_[i] >> to & 1) != 0;
}

process_pool::~process_pool() {
  for (int i = 0; i < device_count(); ++i)
    release(i);
}

worker_options process_pool::process_options() const {
  worker_options result;
  result.program = command_.program;
  result.name = command_.name;
  result.arguments = command_.arguments;
  result.arguments.insert(result.arguments.end(), options_.workers.arguments.begin(),
                          options_.workers.arguments.end());
  result.area_bytes = sizeof(link_area);
  result.hello_limit = options_.workers.start_limit;
  result.stuck_limit = options_.workers.stuck_limit;
  result.call_limit = options_.workers.call_limit;
  return result;
}

caf::expected<process_pool::running> process_pool::start(int ordinal, const std::stop_token& stop) {
  const auto begin = clock::now();
  auto how = process_options();
  how.stop = stop;
  auto of = std::make_shared<life>();
  worker_listener listener;
  listener.ended = [ordinal, weak = std::weak_ptr{of},
                    settings = options_.workers](const worker_end& end) {
    if (auto self = weak.lock())
      self->ended(ordinal, end, settings);
  };
  listener.reaped = [ordinal, weak = std::weak_ptr{of}](const worker_exit& exit) {
    if (exit.signal != 0 && exit.signal != SIGKILL) // an own error; the end was told before
      log(log_level::warning,
          "the worker of device " + std::to_string(ordinal) + " was ended by " + to_string(exit));
    if (auto self = weak.lock())
      self->reaped();
  };
  auto process = worker_process::start(std::move(how), std::move(listener));
  if (!process)
    return process.error();
  running result;
  result.of = of;
  std::optional<caf::error> ended;
  {
    std::lock_guard lock{of->mutex};
    of->process.emplace(std::move(*process));
    auto* area = new (of->process->area().data()) link_area;
    result.link = std::make_shared<worker_link>(
        ordinal, *area, of,
        std::make_unique<socket_sender>(*of->process, options_.workers.call_limit));
    result.link->set_request_limit(options_.workers.call_limit);
    of->link = result.link;
    result.link->set_listener([ordinal, pool = weak_from_this()](std::span<const std::byte> what) {
      if (auto self = pool.lock())
        self->told(ordinal, what);
    });
    ended = of->end;
  }
  result.link->on_loss([count = ends_, weak = std::weak_ptr{of}](const caf::error&) {
    count->begin();
    std::shared_ptr<void> until_over{nullptr, [count](void*) { count->end(); }};
    if (const auto self = weak.lock())
      self->ends(std::move(until_over));
  });
  const auto receive = [ordinal, of, to = std::weak_ptr{result.link}] { of->receive(ordinal, to); };
  if (auto why = start_thread(result.receiver, receive, "for a worker")) {
    end(result, why);
    return why;
  }
  if (ended)
    result.link->lose(*ended);
  std::stop_callback on_stop{stop,
                             [link = result.link, ordinal] { link->give_up(unwanted(ordinal)); }};
  const auto left = options_.workers.start_limit - (clock::now() - begin);
  if (auto why = set_up(result, left)) {
    end(result, why);
    return why;
  }
  const auto& memory = of->process->memory();
  segments().add(memory.bytes(), memory.descriptor(), of);
  return result;
}

caf::error process_pool::set_up(running& x, std::chrono::nanoseconds limit) {
  worker_setup what{options_.backend, x.link->device(), -1, options_.host, options_.cuda, lends_};
  if (options_.spin)
    what.spin_ns = std::chrono::nanoseconds{*options_.spin}.count();
  wire_writer message;
  message.put(what);
  const auto answer =
      x.link->request(control::set_up, message.bytes(), std::nullopt,
                      std::max<std::chrono::nanoseconds>(limit, std::chrono::milliseconds{1}));
  if (!answer)
    return answer.error();
  wire_reader reader{answer->bytes};
  auto about = reader.get<worker_description>();
  const auto unit = about.slab_granularity;
  if (!reader.ok() || about.devices < 0 || about.devices > most_worker_devices ||
      about.spin_ns < 0 ||
      (unit != 0 &&
       (!std::has_single_bit(unit) || unit > most_slab_unit || unit < slab_space::alignment)) ||
      about.direct_bytes > most_direct_bytes)
    return make_error(errc::internal, "a worker's description of its device is malformed");
  x.devices = about.devices;
  x.reaches = std::move(about.reaches);
  x.link->set_spin(std::chrono::nanoseconds{about.spin_ns});
  x.link->set_slab_granularity(unit);
  x.link->set_direct_bytes(about.direct_bytes);
  return {};
}

/// Ends the worker. Every holder of the link finds it lost.
void process_pool::end(running& x, const caf::error& why) noexcept {
  if (!x.link)
    return;
  x.link->give_up(why);
  x.link->wait_until_told();
  // Until the process is gone, it may write the words that other devices wait for.
  if (x.of->process->wait_exit(clock::now() + kill_limit))
    x.link->reaped();
  x.of->is_over();
  static_cast<void>(segments().remove(x.of->process->memory().bytes().data())); // may be missing
  x.of->process->socket().interrupt();
  if (x.receiver.joinable())
    x.receiver.join();
  x = {};
}

void process_pool::end_in_order(running& x, const caf::error& why) noexcept {
  if (x.link && !x.link->lost() && !x.link->tell(command::stop))
    static_cast<void>(x.of->process->wait_exit(clock::now() + stop_limit)); // else killed below
  end(x, why);
}

void process_pool::end_all(std::vector<running> lost) noexcept {
  for (auto& x : lost)
    end(x, x.link->loss());
}

void process_pool::end_soon(std::vector<running> lost) noexcept {
  if (lost.empty())
    return;
  const auto all = std::make_shared<std::vector<running>>(std::move(lost));
  const auto end = [self = shared_from_this(), all] { self->end_all(std::move(*all)); };
  if (start_detached_thread(end, "to end workers"))
    end(); // no thread is available: end them on this one
}

void process_pool::end_former(running former) noexcept {
  const auto all = std::make_shared<running>(std::move(former));
  const auto end = [self = shared_from_this(), all] {
    static_cast<void>(all->link->ranks().wait_for_none(ranks_limit)); // else they end with it
    self->end_in_order(*all, make_error(errc::unavailable, "the device has moved to its spare"));
  };
  if (start_detached_thread(end, "to end a worker"))
    end(); // no thread is available: end it on this one
}

caf::error process_pool::move_to_spare(int ordinal, const worker_link& spare) noexcept {
  auto former = slot_of(ordinal).move_to_spare(spare);
  if (!former)
    return lost_worker(ordinal, "its worker or its spare was lost before it could move");
  former->link->set_former();
  end_former(std::move(*former));
  return {};
}

caf::expected<std::shared_ptr<worker_link>>
process_pool::provide(int ordinal, const std::stop_token& stop) noexcept {
  return slot_of(ordinal).provide(
      [&](const std::stop_token& stopped) { return start(ordinal, stopped); },
      [this](std::vector<running> lost) { end_soon(std::move(lost)); }, stop);
}

caf::error process_pool::provide_spare(int ordinal, const std::stop_token& stop) noexcept {
  auto error = slot_of(ordinal).provide_spare(
      [&](const std::stop_token& stopped) { return start_warm(ordinal, stopped); },
      [this](std::vector<running> lost) { end_all(std::move(lost)); }, stop);
  if (!error)
    wait_for_ends(stop);
  return error;
}

/// Waits until no lost process is ending: the driver answers late until then. What a spare is
/// needed for, such as memory for another communicator, would hold up workers that compute.
void process_pool::wait_for_ends(const std::stop_token& stop) noexcept {
  const auto until = clock::now() + kill_limit;
  while (!stop.stop_requested() && clock::now() < until && !ends_->wait_for_none(stop_tick)) {
  }
}

caf::expected<process_pool::running>
process_pool::start_warm(int ordinal, const std::stop_token& stop) noexcept {
  auto result = start(ordinal, stop);
  if (!result)
    return result;
  std::stop_callback on_stop{stop,
                             [link = result->link, ordinal] { link->give_up(unwanted(ordinal)); }};
  if (auto error =
          result->link->run(command::warm, no_arguments{}, {}, options_.workers.start_limit)) {
    end(*result, error);
    return error;
  }
  if (auto error = prepared(ordinal).prepare_in(*result->link)) {
    end(*result, error);
    return error;
  }
  if (const auto worker = current(ordinal))
    if (auto error = segments().prepare(*worker, *result->link))
      log(log_level::warning, "host memory is not mapped in a spare in advance", error);
  return result;
}

void process_pool::release(int ordinal) noexcept {
  slot_of(ordinal).release([this](running now, running spare, std::vector<running> lost) {
    end(spare, make_error(errc::unavailable, "the device's spare is not needed any more"));
    end_all(std::move(lost));
    end_in_order(now, make_error(errc::unavailable, "the device's worker was stopped"));
  });
}

} // namespace troupe::detail
