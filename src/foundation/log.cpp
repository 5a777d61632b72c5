#include "foundation/log.hpp"

#include "foundation/never_destroyed.hpp"
#include "foundation/peer_text.hpp"
#include "foundation/system_call.hpp"
#include "foundation/write_file.hpp"
#include <troupe/detail/user_call.hpp>

#include <spdlog/spdlog.h>

#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include <unistd.h>

namespace troupe {

namespace {

using detail::never_destroyed;

struct sink_holder {
  std::mutex mutex;
  std::shared_ptr<const log_sink> sink;
};

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

/// Is destroyed before spdlog's registry, since its constructor creates that registry.
struct registry_watch {
  registry_watch() { static_cast<void>(never_destroyed<default_logger>().get()); }
  ~registry_watch() { never_destroyed<default_logger>().end_of_registry(); }
};

const registry_watch watch_of_registry;

/// The largest line for spdlog and stderr. @units bytes
constexpr std::size_t most_line = 16 << 10;

/// Returns one printable line, of whatever program or peer a part of it is.
std::string text_of(const log_line& line) {
  std::string text{"troupe: "};
  text += line.text;
  if (line.why) {
    text += ": ";
    text += to_string(*line.why);
  }
  return detail::peer_text(text, most_line);
}

void write_to_spdlog(const log_line& line) {
  const auto logger = never_destroyed<default_logger>().get();
  if (!logger)
    return;
  auto level = spdlog::level::debug;
  switch (line.level) {
  case log_level::debug:
    break;
  case log_level::info:
    level = spdlog::level::info;
    break;
  case log_level::warning:
    level = spdlog::level::warn;
    break;
  case log_level::error:
    level = spdlog::level::err;
    break;
  }
  // Not formatted by fmt: the templates of fmt 9 make g++ 13 warn of array bounds.
  const auto text = text_of(line);
  logger->log(level, spdlog::string_view_t{text});
}

} // namespace

void set_log_sink(log_sink sink) {
  auto& h = never_destroyed<sink_holder>();
  std::lock_guard lock{h.mutex};
  h.sink = sink ? std::make_shared<const log_sink>(std::move(sink)) : nullptr;
}

} // namespace troupe

namespace troupe::detail {

namespace {

void write(const log_line& line) noexcept {
  std::shared_ptr<const log_sink> sink;
  auto& h = never_destroyed<sink_holder>();
  try {
    {
      std::lock_guard lock{h.mutex};
      sink = h.sink;
    }
    if (sink)
      (*sink)(line);
    else {
      const no_file_size_signal guard; // a full file loses the line, not the process
      write_to_spdlog(line);
    }
  } catch (...) {
    const auto text = text_of(line) + " (the log's sink threw: " +
                      peer_text(exception_text(std::current_exception())) + ")\n";
    const no_file_size_signal guard;
    static_cast<void>(write_all(STDERR_FILENO, text)); // there is no other place to report it
  }
}

} // namespace

void flush_log() noexcept {
  try {
    if (auto logger = never_destroyed<default_logger>().get())
      logger->flush();
  } catch (...) { // its buffered lines are lost
  }
}

void log(log_level level, std::string_view text) noexcept { write({level, text, nullptr}); }

void log(log_level level, std::string_view what, const caf::error& why) noexcept {
  auto x = failure_of(why);
  if (!x) {
    x.emplace();
    x->detail = describe(why);
  }
  write({level, what, &*x});
}

} // namespace troupe::detail
