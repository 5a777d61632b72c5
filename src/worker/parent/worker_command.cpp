#include "worker/parent/worker_command.hpp"

#include "foundation/file_descriptor.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <sstream>
#include <system_error>
#include <utility>

#include <elf.h>
#include <link.h>

namespace troupe::detail {

namespace {

std::atomic<bool> own_worker{false};

/// The kernel's path of the running program, valid even without its file.
constexpr const char* running_program = "/proc/self/exe";

/// Returns an address that is mapped from the main program's file.
std::uintptr_t address_of_program() noexcept {
  std::uintptr_t result = 0;
  ::dl_iterate_phdr(
      [](dl_phdr_info* x, std::size_t, void* into) {
        for (std::size_t i = 0; i < x->dlpi_phnum; ++i)
          if (x->dlpi_phdr[i].p_type == PT_LOAD) {
            *static_cast<std::uintptr_t*>(into) = x->dlpi_addr + x->dlpi_phdr[i].p_vaddr;
            break;
          }
        return 1; // the first is the main program
      },
      &result);
  return result;
}

/// Returns the path of the main program's file, or an empty string if it is unknown.
/// @source Linux, proc_pid_maps(5)
std::string path_of_program() {
  const auto maps = read_file("/proc/self/maps");
  const auto address = address_of_program();
  if (!maps || address == 0)
    return {};
  std::istringstream lines{*maps};
  for (std::string line; std::getline(lines, line);) {
    std::istringstream fields{line};
    std::uintptr_t first = 0;
    std::uintptr_t last = 0;
    char dash = 0;
    if (!(fields >> std::hex >> first >> dash >> last) || address < first || address >= last)
      continue;
    const auto path = line.find('/');
    return path == std::string::npos ? std::string{} : line.substr(path);
  }
  return {};
}

/// Reads the arguments, which are separated by zero bytes.
std::vector<std::string> arguments_of_process() {
  std::vector<std::string> result;
  if (const auto text = read_file("/proc/self/cmdline")) {
    std::istringstream in{*text};
    for (std::string x; std::getline(in, x, '\0');)
      result.push_back(std::move(x));
  }
  return result;
}

bool is_same_file(const std::string& a, const std::string& b) noexcept {
  std::error_code code;
  return std::filesystem::equivalent(a, b, code);
}

/// Returns the command for a program that was started through the dynamic loader: then this process
/// executes the loader.
worker_command by_loader(const std::string& loader, const std::string& program) {
  const auto all = arguments_of_process();
  for (std::size_t i = 1; i < all.size(); ++i)
    if (is_same_file(all[i], program)) {
      worker_command result{running_program, loader, {all.begin() + 1, all.begin() + i}};
      result.arguments.push_back(program);
      return result;
    }
  return {program, program, {}}; // another kind of loader, which takes no arguments
}

} // namespace

void set_own_worker() noexcept { own_worker.store(true); }

caf::expected<worker_command> worker_program(const worker_settings& settings) {
  std::error_code code;
  const auto executed = std::filesystem::read_symlink(running_program, code).string();
  const auto mapped = code ? std::string{} : path_of_program();
  const bool is_loaded = !mapped.empty() && mapped != executed;
  const auto& self = is_loaded ? mapped : executed;
  const auto itself = [&](const std::string& name) {
    return is_loaded ? by_loader(executed, self) : worker_command{running_program, name, {}};
  };
  if (!settings.program.empty()) {
    const auto& named = settings.program;
    if (!code && is_same_file(named, is_loaded ? self : running_program))
      return itself(named);
    const auto path = std::filesystem::absolute(named, code);
    const auto text = code ? named : path.string();
    return worker_command{text, text, {}};
  }
  if (code)
    return make_error(errc::unavailable, "this program's own path is unknown: " + code.message() +
                                             "; is /proc mounted?");
  if (own_worker.load())
    return itself(self);
  const auto beside = (std::filesystem::path{self}.parent_path() / "troupe-worker").string();
  return worker_command{beside, beside, {}};
}

} // namespace troupe::detail
