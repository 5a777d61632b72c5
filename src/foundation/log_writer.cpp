#include "foundation/log_writer.hpp"

#include "foundation/blocked_signals.hpp"
#include "foundation/option_check.hpp"
#include "foundation/start_thread.hpp"

#include <algorithm>
#include <exception>
#include <utility>

namespace troupe::detail {

namespace {

/// Set on a thread while it calls the sink.
thread_local bool in_sink = false;

/// Returns what lines of a kind are about.
const char* subject_of(std::size_t kind) noexcept {
  switch (static_cast<log_kind>(kind)) {
  case log_kind::any:
    break;
  case log_kind::strangers:
    return "strangers";
  case log_kind::certificates:
    return "certificates";
  case log_kind::members:
    return "members";
  case log_kind::notes:
    return "notes of other processes";
  }
  return "other things";
}

std::string left_out(std::size_t number, const std::string& of_what, const std::string& why) {
  return std::to_string(number) + (number == 1 ? " line " : " lines ") + of_what +
         (number == 1 ? " was" : " were") + " left out: " + why;
}

} // namespace

std::size_t log_entry::size_bytes() const noexcept {
  auto result = sizeof(log_entry) + text.size();
  if (why)
    result += why->detail.size() + why->verb.size() + why->api.size() + why->native_name.size() +
              why->parts.size() * sizeof(why->parts.front());
  return result;
}

bool is_in_log_sink() noexcept { return in_sink; }

// -- adding

bool log_writer::admit(log_kind kind) noexcept {
  guard lock{mutex_};
  auto& limit = limits_[static_cast<std::size_t>(kind)];
  if (kind == log_kind::any || limit.admit(clock::now(), window_))
    return true;
  start_thread_once();
  work_.notify_one(); // it reports the number when the window is over
  return false;
}

void log_writer::add(log_entry&& x) noexcept {
  guard lock{mutex_};
  const auto size = x.size_bytes();
  // A large line that is alone is not left out.
  const bool has_room =
      queue_.empty() || (queue_.size() < most_lines && bytes_ + size <= most_bytes);
  if (!has_room) {
    ++left_out_;
  } else {
    if (left_out_ != 0)
      push_counts(false);
    try {
      push(std::move(x));
    } catch (const std::exception&) { // no memory
      ++left_out_;
    }
  }
  set_off(lock);
}

void log_writer::add_nothing() noexcept {
  guard lock{mutex_};
  ++left_out_;
  set_off(lock);
}

void log_writer::push(log_entry&& x) {
  const auto size = x.size_bytes();
  queue_.push_back(std::move(x));
  bytes_ += size;
  ++added_;
}

void log_writer::push_counts(bool all) noexcept {
  const auto add_text = [this](std::string text) {
    log_entry x;
    x.level = log_level::warning;
    x.text = std::move(text);
    push(std::move(x));
  };
  const auto now = clock::now();
  try {
    if (left_out_ != 0)
      add_text(left_out(std::exchange(left_out_, 0), "of the log", "its sink is slow"));
    for (std::size_t i = 0; i < limits_.size(); ++i)
      if (auto& x = limits_[i]; all ? x.has_left_out() : x.due() <= now)
        add_text(left_out(x.take_left_out(), std::string{"about "} + subject_of(i),
                          "at most " + std::to_string(log_limit::most_lines) + " are logged in " +
                              text_of(window_)));
  } catch (const std::exception&) { // no memory: the numbers are lost
  }
}

log_writer::clock::time_point log_writer::next_due() const noexcept {
  return std::ranges::min_element(limits_, {}, &log_limit::due)->due();
}

// -- writing

void log_writer::start_thread_once() noexcept {
  if (has_thread_ || is_child_)
    return;
  // Signals are for the program's threads, except those that tell of an error of the thread itself.
  const blocked_signals blocked{SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT, SIGPIPE};
  try {
    has_thread_ = !start_detached_thread([this] { run(); }, "for the log");
  } catch (const std::exception&) { // no memory
  }
}

void log_writer::set_off(guard& lock) noexcept {
  start_thread_once();
  if (has_thread_)
    work_.notify_one();
  else if (!in_sink) // else it is called again when it returns
    write_all(lock);
  if (ends_)
    wait_at_end(lock);
}

void log_writer::run() noexcept {
  guard lock{mutex_};
  for (;;) {
    work_.wait(lock, [this] { return !is_writing_; });
    write_all(lock);
    if (const auto due = next_due(); due == clock::time_point::max())
      work_.wait(lock);
    else
      work_.wait_until(lock, due);
  }
}

void log_writer::write_all(guard& lock) noexcept {
  if (is_writing_)
    return;
  is_writing_ = true;
  for (;;) {
    if (queue_.empty())
      push_counts(false);
    if (queue_.empty())
      break;
    auto entry = std::move(queue_.front());
    queue_.pop_front();
    bytes_ -= entry.size_bytes();
    auto sink = sink_;
    in_call_ = sink.get();
    lock.unlock();
    in_sink = true;
    deliver_(sink.get(), entry);
    in_sink = false;
    sink.reset(); // before a thread that replaces it goes on
    lock.lock();
    in_call_ = nullptr;
    ++written_;
    progress_.notify_all();
  }
  is_writing_ = false;
  work_.notify_one(); // the thread, if it has started meanwhile
}

bool log_writer::wait_written(guard& lock, std::uint64_t number, clock::time_point until) noexcept {
  const auto is_written = [&] { return written_ >= number; };
  if (in_sink)
    return is_written();
  if (has_thread_)
    work_.notify_one();
  else
    write_all(lock);
  return progress_.wait_until(lock, until, is_written);
}

bool log_writer::drain(std::chrono::nanoseconds limit) noexcept {
  guard lock{mutex_};
  return wait_written(lock, added_, clock::now() + limit);
}

void log_writer::replace_sink(std::shared_ptr<const log_sink> x) {
  constexpr std::chrono::seconds limit{1};
  guard lock{mutex_};
  if (x)
    start_thread_once();
  push_counts(true);
  wait_written(lock, added_, clock::now() + limit);
  sink_.swap(x);
  has_sink_ = sink_ != nullptr;
  limits_ = {}; // the new sink has got no line yet
  if (x && !in_sink)
    progress_.wait(lock, [&] { return in_call_ != x.get(); });
  lock.unlock();
  x.reset(); // the caller may need a lock that its destructor needs
}

void log_writer::set_window(std::chrono::nanoseconds x) noexcept {
  guard lock{mutex_};
  window_ = x;
}

// -- the end of the process

void log_writer::end() noexcept {
  guard lock{mutex_};
  ends_ = true;
  push_counts(true);
  wait_at_end(lock);
}

void log_writer::wait_at_end(guard& lock) noexcept {
  const auto begin = clock::now();
  wait_written(lock, added_, begin + left_to_wait_);
  left_to_wait_ -= std::min<std::chrono::nanoseconds>(clock::now() - begin, left_to_wait_);
}

log_writer* log_writer::copy_for_child() const {
  auto* result = new log_writer{deliver_};
  result->sink_ = sink_;
  result->has_sink_ = sink_ != nullptr;
  result->is_child_ = true;
  result->window_ = window_;
  return result;
}

} // namespace troupe::detail
