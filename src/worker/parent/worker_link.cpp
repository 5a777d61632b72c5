#include "worker/parent/worker_link.hpp"

#include "foundation/fair_limit.hpp"
#include "foundation/spin.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace troupe::detail {

namespace {

using clock = std::chrono::steady_clock;

/// A sleeper looks again after this time: the process that should wake it may have ended.
constexpr std::chrono::milliseconds doze{20};

/// More than any record. CUDA compares the sign of the difference (CU_STREAM_WAIT_VALUE_GEQ).
constexpr std::uint64_t all_done = INT64_MAX;

caf::error too_large(std::size_t size) {
  return make_error(errc::out_of_range,
                    "a command of " + std::to_string(size) + " bytes is too large for a worker");
}

} // namespace

caf::error lost_worker(int device, const caf::error& cause) {
  const auto told = failure_of(cause);
  auto result = told.value_or(failure{});
  result.detail = !told ? describe(cause)
                        : std::string{to_string(told->code)} +
                              (told->detail.empty() ? "" : ": " + told->detail);
  if (told && told->code != errc::worker_lost)
    result.cause = told->code;
  result.code = errc::worker_lost;
  result.device = device;
  return make_error(std::move(result));
}

caf::error lost_worker(int device, std::string detail, int rank) {
  return make_error(
      {.code = errc::worker_lost, .detail = std::move(detail), .device = device, .rank = rank});
}

worker_link::worker_link(int device, link_area& area, std::shared_ptr<void> keep,
                         std::unique_ptr<control_sender> control)
    : device_(device), area_(area), keep_(std::move(keep)), control_(std::move(control)),
      ring_(area.words, area.commands), records_(link_area::event_count),
      done_at_loss_(link_area::event_count) {
  free_events_.reserve(link_area::event_count);
  for (auto i = link_area::event_count; i > 0; --i)
    free_events_.push_back(i - 1);
  free_words_.resize(link_area::word_count);
  std::iota(free_words_.rbegin(), free_words_.rend(), 1u);
}

// -- the lane

caf::error worker_link::write(command what, bool wants_reply, std::span<const std::byte> first,
                              std::span<const std::byte> more,
                              std::chrono::nanoseconds limit) noexcept {
  const auto size = first.size() + more.size();
  if (size > ring_.limit())
    return too_large(size);
  if (is_collected(what))
    return add_collected(what, first, more);
  const command_head head{static_cast<std::uint32_t>(size), static_cast<std::uint16_t>(what),
                          static_cast<std::uint16_t>(wants_reply), ++last_command_};
  if (!lost() && ring_.try_write(head, first, more)) {
    ring_.ring();
    return {};
  }
  for (fair_limit left{limit}; !lost();) {
    ring_.wait_for_room(doze);
    if (ring_.try_write(head, first, more)) {
      ring_.ring();
      return {};
    }
    if (ring_.broken())
      give_up_nonsense("it consumed commands that were never written");
    else if (left.over())
      give_up_late("to take commands", limit);
  }
  return loss();
}

caf::error worker_link::add_collected(command what, std::span<const std::byte> first,
                                      std::span<const std::byte> more) {
  if (!is_recordable(what))
    return make_error(
        {.code = errc::not_supported,
         .detail = "\"" + std::string{to_string(what)} + "\" cannot be part of a graph",
         .device = device_});
  collected_->put(what);
  collected_->put_bytes(first, more);
  return {};
}

caf::expected<wire_writer> worker_link::collect(const std::function<caf::error()>& f) noexcept {
  wire_writer all;
  collected_ = &all;
  auto error = f();
  collected_ = nullptr;
  if (error)
    return error;
  return all;
}

bool worker_link::try_tell_bytes(command what, std::span<const std::byte> body) noexcept {
  if (body.size() > ring_.limit() || lost())
    return false;
  const command_head head{static_cast<std::uint32_t>(body.size()), static_cast<std::uint16_t>(what),
                          0, ++last_command_};
  if (!ring_.try_write(head, body, {}))
    return false;
  ring_.ring();
  return true;
}

bool worker_link::wait_for_reply(command what, std::chrono::nanoseconds limit) noexcept {
  auto there = [this] { // numbers count up: one that is too large ends the wait, too
    return area_.replied.load(std::memory_order_acquire) >= last_command_ || lost();
  };
  if (spin_.count() != 0)
    for (const auto until = clock::now() + spin_; clock::now() < until;)
      for (int i = 0; i < 16; ++i) {
        if (there())
          return !lost();
        pause();
      }
  for (fair_limit left{limit}; !there();) {
    area_.to_asker.sleep(doze, there);
    if (left.over() && !there())
      give_up_late("to answer \"" + std::string{to_string(what)} + "\"", limit);
  }
  return !lost();
}

caf::expected<wire_reader> worker_link::ask_bytes(command what, std::span<const std::byte> first,
                                                  std::span<const std::byte> more,
                                                  std::chrono::nanoseconds limit) noexcept {
  if (limit.count() == 0)
    limit = command_limit();
  if (auto error = write(what, true, first, more, limit))
    return error;
  if (is_collected(what))
    return wire_reader{{}};
  if (!wait_for_reply(what, limit))
    return loss();
  const std::size_t size = area_.reply_size.load(std::memory_order_relaxed);
  if (size > area_.reply.size() || area_.replied.load(std::memory_order_relaxed) != last_command_) {
    give_up_nonsense("a reply to no command of this process");
    return loss();
  }
  reply_.assign(area_.reply.begin(), area_.reply.begin() + static_cast<std::ptrdiff_t>(size));
  wire_reader reader{reply_};
  if (auto error = reader.get<caf::error>())
    return heard(error);
  if (!reader.ok())
    return make_error(errc::internal, "a worker's reply could not be read");
  return reader;
}

std::optional<std::uint64_t> worker_link::take_event() noexcept {
  if (free_events_.empty())
    return std::nullopt;
  const auto result = free_events_.back();
  free_events_.pop_back();
  return result;
}

void worker_link::give_back_event(std::uint64_t event) noexcept { free_events_.push_back(event); }

// -- any thread

std::shared_ptr<const shared_word> worker_link::take_word(std::uint64_t value) {
  if (slab_granularity_ == 0)
    return nullptr;
  shared_word x;
  {
    const std::lock_guard lock{mutex_};
    if (free_words_.empty())
      return nullptr;
    x.number = free_words_.back();
    free_words_.pop_back();
  }
  x.value = &area_.unfinished[x.number - 1];
  x.value->store(value);
  return {new shared_word{x}, [self = shared_from_this()](const shared_word* word) {
            self->give_back_word(word->number);
            delete word;
          }};
}

void worker_link::give_back_word(std::uint32_t number) noexcept {
  const std::lock_guard lock{mutex_};
  free_words_.push_back(number);
}

worker_reply worker_link::request(control what, std::span<const std::byte> body,
                                  std::optional<int> descriptor,
                                  std::chrono::nanoseconds limit) noexcept {
  struct state {
    std::mutex mutex;
    std::condition_variable condition;
    std::optional<worker_reply> result;
  };
  auto shared = std::make_shared<state>();
  request(what, body, descriptor, [shared](worker_reply result) {
    std::lock_guard lock{shared->mutex};
    shared->result.emplace(std::move(result));
    shared->condition.notify_one();
  });
  auto there = [&] { return shared->result.has_value(); };
  std::unique_lock lock{shared->mutex};
  if (limit.count() != 0 && !fair_limit{limit}.wait(shared->condition, lock, there)) {
    lock.unlock();
    give_up_late("to answer \"" + std::string{to_string(what)} + "\"", limit);
    lock.lock();
  }
  shared->condition.wait(lock, there); // a loss sets the result, too
  return std::move(*shared->result);
}

void worker_link::request(control what, std::span<const std::byte> body,
                          std::optional<int> descriptor, reply_handler then) noexcept {
  control_head head;
  head.kind = what;
  {
    std::unique_lock lock{mutex_};
    if (lost_) {
      auto why = why_;
      lock.unlock();
      return then(why);
    }
    head.number = ++last_request_;
    open_.emplace(head.number, open_request{what, std::move(then)});
  }
  std::vector<std::byte> message(sizeof head + body.size());
  std::memcpy(message.data(), &head, sizeof head);
  if (!body.empty())
    std::memcpy(message.data() + sizeof head, body.data(), body.size());
  const auto error = control_->send(message, descriptor);
  if (!error)
    return;
  if (code_of(error) == errc::deadline_exceeded)
    return give_up(lost_worker(device_, error));
  if (code_of(error) == errc::worker_lost)
    return; // the supervisor of the process notices it as well, and knows why
  if (auto handler = take_handler(head))
    handler(lost() ? loss() : error);
}

caf::error worker_link::send(control what, std::span<const std::byte> body) noexcept {
  if (body.size() > control_bytes - sizeof(control_head))
    return make_error(errc::invalid_argument,
                      std::to_string(body.size()) + " bytes are too many for a worker's message");
  if (lost())
    return loss();
  request(what, body, std::nullopt, [self = weak_from_this()](const worker_reply& reply) {
    auto link = self.lock();
    if (!reply && link && !link->lost())
      link->give_up(lost_worker(link->device(), reply.error()));
  });
  return {};
}

void worker_link::received(std::span<const std::byte> message,
                           file_descriptor descriptor) noexcept {
  wire_reader reader{message};
  const auto head = reader.get<control_head>();
  if (reader.ok() && head.kind == control::told && head.number == 0) {
    const auto what = reader.get_bytes();
    if (!reader.ok() || !reader.at_end())
      return give_up_nonsense("a program's message that could not be read");
    if (listener_ && !lost() && !is_former_.load())
      listener_(what);
    return;
  }
  if (reader.ok() && (head.kind == control::lend || head.kind == control::take_back))
    return demanded(head, reader);
  const auto handler = reader.ok() ? take_handler(head) : nullptr;
  if (!handler) {
    if (!reader.ok() || !lost())
      give_up_nonsense("a message that answers no request");
    return;
  }
  if (lost()) // `lose` did not find the handler
    return handler(loss());
  if (auto error = reader.get<caf::error>())
    return handler(heard(error));
  const auto body = reader.get_bytes();
  if (!reader.ok() || !reader.at_end()) {
    give_up_nonsense("a reply that could not be read");
    return handler(loss());
  }
  worker_answer answer{{body.begin(), body.end()}, {}};
  if (descriptor)
    answer.descriptor = std::make_shared<const file_descriptor>(std::move(descriptor));
  handler(std::move(answer));
}

void worker_link::demanded(const control_head& head, wire_reader& body) noexcept {
  const worker_demand what{head.kind, head.number, body.get<lent_range>()};
  if (!body.ok() || !body.at_end())
    return give_up_nonsense("a request for memory that could not be read");
  demand_handler to;
  {
    std::unique_lock lock{mutex_};
    if (lost_)
      return;
    if (std::exchange(demands_, true)) {
      lock.unlock();
      return give_up_nonsense("a request for memory before the last one was answered");
    }
    to = demand_handler_;
    if (!to)
      waiting_ = what;
  }
  if (to)
    to(shared_from_this(), what);
}

void worker_link::set_demand_handler(demand_handler f) {
  std::optional<worker_demand> waiting;
  {
    const std::lock_guard lock{mutex_};
    demand_handler_ = f;
    waiting = std::exchange(waiting_, std::nullopt);
  }
  if (waiting)
    f(shared_from_this(), *waiting);
}

void worker_link::answer(const worker_demand& of,
                         const caf::expected<lent_range>& result) noexcept {
  {
    const std::lock_guard lock{mutex_};
    demands_ = false; // first: the next request may come at once
  }
  wire_writer body;
  body(of.number, result ? caf::error{} : result.error(), result ? *result : lent_range{});
  static_cast<void>(send(control::demand_reply, body.bytes())); // a loss ends the wait, too
}

worker_link::reply_handler worker_link::take_handler(const control_head& of) noexcept {
  std::lock_guard lock{mutex_};
  auto i = open_.find(of.number);
  if (i == open_.end() || i->second.kind != of.kind)
    return nullptr;
  return std::move(open_.extract(i).mapped().then);
}

caf::error worker_link::heard(const caf::error& error) noexcept {
  if (severity_of(error) != severity::process)
    return error;
  lose(error);
  return loss();
}

caf::error worker_link::loss() const {
  if (!lost())
    return {};
  std::lock_guard lock{mutex_};
  return why_;
}

std::uint64_t worker_link::on_loss(std::function<void(const caf::error&)> f) {
  {
    std::lock_guard lock{mutex_};
    if (!lost_) {
      on_loss_.emplace(++last_listener_, std::move(f));
      return last_listener_;
    }
  }
  f(loss());
  return 0;
}

void worker_link::forget(std::uint64_t listener) noexcept {
  std::function<void(const caf::error&)> gone; // destroyed without the lock
  std::lock_guard lock{mutex_};
  if (auto i = on_loss_.find(listener); i != on_loss_.end()) {
    gone = std::move(i->second);
    on_loss_.erase(i);
  }
}

void worker_link::give_up(const caf::error& why) noexcept { lose(why, true); }

void worker_link::give_up_late(std::string_view what, std::chrono::nanoseconds limit) noexcept {
  const auto ms = std::chrono::ceil<std::chrono::milliseconds>(limit).count();
  give_up(lost_worker(device_, "its worker took more than " + std::to_string(ms) + " ms " +
                                   std::string{what} + ", and was killed"));
}

void worker_link::give_up_failed(std::string_view what, const caf::error& why) noexcept {
  give_up(lost_worker(device_, "its worker failed " + std::string{what} + " (" + describe(why) +
                                   "), and was killed"));
}

void worker_link::give_up_nonsense(std::string_view what) noexcept {
  give_up(lost_worker(device_, "its worker wrote malformed data (" + std::string{what} +
                                   "), and was killed"));
}

void worker_link::lose(const caf::error& cause, bool kills) noexcept {
  // Whatever the reason is that an agent gives, the device alone is lost: lanes take other errors
  // of their devices for faults of this process.
  const auto why = code_of(cause) == errc::worker_lost ? cause : lost_worker(device_, cause);
  std::map<std::uint64_t, open_request> open;
  std::map<std::uint64_t, std::function<void(const caf::error&)>> listeners;
  {
    std::unique_lock lock{mutex_};
    if (lost_) {
      lock.unlock();
      if (kills)
        control_->kill();
      return;
    }
    why_ = why;
    for (std::size_t i = 0; i < done_at_loss_.size(); ++i)
      done_at_loss_[i] = area_.done[i].load(std::memory_order_acquire);
    lost_.store(true, std::memory_order_release);
    open.swap(open_);
    listeners.swap(on_loss_);
    telling_ = std::this_thread::get_id();
  }
  if (kills)
    control_->kill();
  area_.to_asker.ring();
  area_.words.to_writer.ring();
  for (auto& [number, f] :
       listeners) // first, so that lost work fails with this cause and not with a consequence
    f(why);
  gone();
  for (auto& [number, x] : open)
    x.then(why);
  std::lock_guard lock{mutex_};
  telling_ = {};
  told_.notify_all();
}

void worker_link::gone() noexcept {
  for (auto& x : area_.done)
    x.store(all_done, std::memory_order_release);
}

void worker_link::reaped() noexcept {
  gone();
  std::vector<std::function<void()>> all;
  {
    const std::lock_guard lock{mutex_};
    is_reaped_.store(true, std::memory_order_release);
    all.swap(when_reaped_);
  }
  for (auto& f : all)
    f();
}

void worker_link::when_reaped(std::function<void()> f) {
  {
    const std::lock_guard lock{mutex_};
    if (!is_reaped()) {
      when_reaped_.push_back(std::move(f));
      return;
    }
  }
  f();
}

void worker_link::wait_until_told() noexcept {
  std::unique_lock lock{mutex_};
  told_.wait(lock, [this] {
    return telling_ == std::thread::id{} || telling_ == std::this_thread::get_id();
  });
}

} // namespace troupe::detail
