#include "graphviz.hpp"

#include <troupe/error.hpp>

#include <array>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <system_error>

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

namespace {

using troupe::errc;

caf::error system_error(const std::string& what, int code) {
  return troupe::make_error(errc::internal, what + ": " + std::generic_category().message(code));
}

struct close_file {
  void operator()(std::FILE* x) const { (void)std::fclose(x); } // nothing is left to write
};
using unique_file = std::unique_ptr<std::FILE, close_file>;

/// Writes `text` to a temporary file and rewinds it. Unlike a pipe, such an input needs no writer.
caf::error write_input(const unique_file& file, const std::string& text) {
  if (!file)
    return system_error("a temporary file", errno);
  if (std::fwrite(text.data(), 1, text.size(), file.get()) != text.size() ||
      std::fflush(file.get()) != 0 || lseek(fileno(file.get()), 0, SEEK_SET) != 0)
    return system_error("writing a temporary file", errno);
  return {};
}

/// File actions that set the standard input of a new process.
class input_from {
public:
  explicit input_from(int file) {
    code_ = posix_spawn_file_actions_init(&actions_);
    made_ = code_ == 0;
    if (made_)
      code_ = posix_spawn_file_actions_adddup2(&actions_, file, STDIN_FILENO);
  }
  ~input_from() {
    if (made_)
      (void)posix_spawn_file_actions_destroy(&actions_);
  }
  input_from(const input_from&) = delete;
  input_from& operator=(const input_from&) = delete;

  int code() const { return code_; }
  const posix_spawn_file_actions_t* get() const { return &actions_; }

private:
  posix_spawn_file_actions_t actions_{};
  int code_ = 0;
  bool made_ = false;
};

caf::error wait_for(pid_t process) {
  int status = 0;
  pid_t ended = -1;
  do {
    ended = waitpid(process, &status, 0);
  } while (ended < 0 && errno == EINTR);
  if (ended != process)
    return system_error("waiting for dot", errno);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
    return {};
  return troupe::make_error(errc::invalid_argument,
                            WIFEXITED(status)
                                ? "dot ended with status " + std::to_string(WEXITSTATUS(status))
                                : "dot was ended by a signal");
}

} // namespace

caf::error render_svg(const std::string& text, const std::string& file) {
  const unique_file input{std::tmpfile()};
  if (auto error = write_input(input, text))
    return error;
  const input_from actions{fileno(input.get())};
  if (actions.code() != 0)
    return system_error("preparing to start dot", actions.code());
  std::array<std::string, 3> words{"dot", "-Tsvg", "-o" + file};
  std::array<char*, 4> arguments{words[0].data(), words[1].data(), words[2].data(), nullptr};
  pid_t process = 0;
  const int code = posix_spawnp(&process, "dot", actions.get(), nullptr, arguments.data(), environ);
  if (code == ENOENT)
    return troupe::make_error(errc::unavailable,
                              "graphviz's program dot, which makes the SVG, is not installed");
  if (code != 0)
    return system_error("starting dot", code);
  return wait_for(process);
}
