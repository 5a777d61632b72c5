#include "core/log.hpp"

#include "core/file_descriptor.hpp"
#include "core/system_call.hpp"
#include <troupe/detail/user_call.hpp>
#include <troupe/log.hpp>

#include <spdlog/spdlog.h>

#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include <unistd.h>

namespace troupe {

namespace {

struct sink_holder {
  std::mutex mutex;
  std::shared_ptr<const log_sink> sink;
};

sink_holder& holder() {
  static auto* instance = new sink_holder; // threads may log at exit
  return *instance;
}

std::string text_of(const log_line& line) {
  std::string text{"troupe: "};
  text += line.text;
  if (line.why) {
    text += ": ";
    text += to_string(*line.why);
  }
  return text;
}

void write_to_spdlog(const log_line& line) {
  // Made under a guard that everything here can see, also where spdlog itself is not instrumented.
  static const bool there = spdlog::default_logger_raw() != nullptr;
  if (!there)
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
  // Not put together by fmt: the templates of fmt 9 make g++ 13 warn of array bounds.
  const auto text = text_of(line);
  spdlog::default_logger_raw()->log(level, spdlog::string_view_t{text});
}

} // namespace

void set_log_sink(log_sink sink) {
  auto& h = holder();
  std::lock_guard lock{h.mutex};
  h.sink = sink ? std::make_shared<const log_sink>(std::move(sink)) : nullptr;
}

} // namespace troupe

namespace troupe::detail {

namespace {

void write(const log_line& line) noexcept {
  std::shared_ptr<const log_sink> sink;
  auto& h = holder();
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
    const auto text = text_of(line) +
                      " (the log's sink threw: " + exception_text(std::current_exception()) + ")\n";
    const no_file_size_signal guard;
    static_cast<void>(write_all(STDERR_FILENO, text)); // there is no other place to tell of it
  }
}

} // namespace

void flush_log() noexcept {
  try {
    if (auto* logger = spdlog::default_logger_raw(); logger != nullptr)
      logger->flush();
  } catch (...) { // what it holds is lost
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
