#include "foundation/log.hpp"

#include "foundation/log_writer.hpp"
#include "foundation/never_destroyed.hpp"
#include "foundation/peer_text.hpp"
#include "foundation/system_call.hpp"
#include "foundation/write_file.hpp"
#include <troupe/detail/user_call.hpp>

#include <spdlog/spdlog.h>

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include <pthread.h>
#include <unistd.h>

namespace troupe {

namespace {

using detail::log_entry;
using detail::log_writer;
using detail::never_destroyed;

/// spdlog's default logger. spdlog destroys its registry with the static objects, while threads may
/// still log: the logger that is the default at that time is kept.
class default_logger {
public:
  /// Returns null after `spdlog::shutdown`, or if the program has set no default logger.
  std::shared_ptr<spdlog::logger> get() {
    std::lock_guard lock{mutex_};
    return registry_ends_ ? last_ : spdlog::default_logger();
  }

  void end_of_registry() {
    std::lock_guard lock{mutex_};
    last_ = spdlog::default_logger();
    registry_ends_ = true;
  }

private:
  std::mutex mutex_;
  bool registry_ends_ = false;
  std::shared_ptr<spdlog::logger> last_;
};

spdlog::level::level_enum level_of(log_level x) noexcept {
  switch (x) {
  case log_level::debug:
    break;
  case log_level::info:
    return spdlog::level::info;
  case log_level::warning:
    return spdlog::level::warn;
  case log_level::error:
    return spdlog::level::err;
  }
  return spdlog::level::debug;
}

/// The largest line for spdlog and stderr. @units bytes
constexpr std::size_t most_line = 16 << 10;

/// Returns one printable line, of whatever program or peer a part of it is.
std::string text_of(const log_entry& x) {
  auto text = "troupe: " + x.text;
  if (x.why) {
    text += ": ";
    text += to_string(*x.why);
  }
  return detail::peer_text(text, most_line);
}

void write_to_spdlog(const log_entry& x) {
  const auto logger = never_destroyed<default_logger>().get();
  if (!logger)
    return;
  // Not formatted by fmt: the templates of fmt 9 make g++ 13 warn of array bounds.
  const auto text = text_of(x);
  logger->log(x.when, {}, level_of(x.level), spdlog::string_view_t{text});
}

void write_to_stderr(const log_entry& x, const std::exception_ptr& why) noexcept {
  try {
    const auto text = text_of(x) +
                      " (the log's sink threw: " + detail::peer_text(detail::exception_text(why)) +
                      ")\n";
    const detail::no_file_size_signal guard;
    // There is no other place to report it.
    static_cast<void>(detail::write_all(STDERR_FILENO, text));
  } catch (...) { // no memory
  }
}

void deliver(const log_sink* to, const log_entry& x) noexcept {
  try {
    if (to != nullptr)
      return (*to)({x.level, x.text, x.why ? &*x.why : nullptr});
    const detail::no_file_size_signal guard; // a full file loses the line, not the process
    write_to_spdlog(x);
  } catch (...) {
    write_to_stderr(x, std::current_exception());
  }
}

// -- the writer of the process

log_writer* make_writer() noexcept;

std::atomic<log_writer*>& current() noexcept {
  static auto& x = *new std::atomic<log_writer*>{make_writer()};
  return x;
}

log_writer& writer() noexcept { return *current().load(); }

/// In the child process only the calling thread goes on: it gets a writer that needs no thread.
void go_on_in_child() noexcept {
  auto& old = writer();
  current() = old.copy_for_child();
  old.unlock();
}

log_writer* make_writer() noexcept {
  // Without the handlers, for lack of memory, the lines of child processes are lost.
  static_cast<void>(::pthread_atfork([] { writer().lock(); }, [] { writer().unlock(); },
                                     [] { go_on_in_child(); }));
  return new log_writer{deliver};
}

/// Is destroyed before spdlog's registry, since its constructor creates that registry.
struct registry_watch {
  registry_watch() { static_cast<void>(never_destroyed<default_logger>().get()); }
  ~registry_watch() {
    writer().end();
    never_destroyed<default_logger>().end_of_registry();
  }
};

const registry_watch watch_of_registry;

/// Returns whether lines of this level go anywhere.
bool is_wanted(log_level level) {
  if (writer().has_sink())
    return true;
  const auto logger = never_destroyed<default_logger>().get();
  return logger && (logger->should_log(level_of(level)) || logger->should_backtrace());
}

} // namespace

void set_log_sink(log_sink sink) {
  writer().replace_sink(sink ? std::make_shared<const log_sink>(std::move(sink)) : nullptr);
}

} // namespace troupe

namespace troupe::detail {

namespace {

/// Makes and adds a line.
template <class Make> void add_line(log_level level, log_kind kind, Make why) noexcept {
  bool is_admitted = false;
  try {
    if (!is_wanted(level) || !writer().admit(kind))
      return;
    is_admitted = true;
    log_entry x;
    x.level = level;
    why(x);
    writer().add(std::move(x));
  } catch (...) { // no memory
    if (is_admitted)
      writer().add_nothing();
  }
}

} // namespace

bool drain_log(std::chrono::nanoseconds limit) noexcept { return writer().drain(limit); }

void set_log_window(std::chrono::nanoseconds x) noexcept { writer().set_window(x); }

void flush_log() noexcept {
  try {
    if (auto logger = never_destroyed<default_logger>().get())
      logger->flush();
  } catch (...) { // its buffered lines are lost
  }
}

void log(log_level level, std::string_view text, log_kind kind) noexcept {
  add_line(level, kind, [=](log_entry& x) { x.text = text; });
}

void log(log_level level, std::string_view what, const caf::error& why, log_kind kind) noexcept {
  add_line(level, kind, [&](log_entry& x) {
    x.text = what;
    x.why = failure_of(why);
    if (!x.why)
      x.why.emplace().detail = describe(why);
  });
}

} // namespace troupe::detail
