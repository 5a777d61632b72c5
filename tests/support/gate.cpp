#include "support/gate.hpp"

#include "foundation/file_descriptor.hpp"
#include "support/world_fixture.hpp"
#include "worker/protocol/futex.hpp"
#include "worker/protocol/shared_memory.hpp"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

namespace troupe::testing {

/// Lies in shared memory, so that workers see it too.
class gate::state {
public:
  state() : memory_(must(detail::shared_memory::create(sizeof(words)))) {
    new (memory_.bytes().data()) words;
  }
  /// Attaches to the gate of another process.
  explicit state(const std::string& path) : memory_(attach(path)) {}

  /// Returns the path at which other processes find the memory.
  std::string path() const {
    return "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(memory_.descriptor());
  }

  /// Marks the gate as reached and blocks until it is open.
  void pass() const {
    set(at().reached);
    while (!wait(at().opened)) {
    }
  }
  bool wait_reached() const { return wait(at().reached); }
  void open() const { set(at().opened); }

private:
  using word = std::atomic<std::uint32_t>;
  struct words {
    word reached{0};
    word opened{0};
  };

  static detail::shared_memory attach(const std::string& path) {
    detail::file_descriptor file{::open(path.c_str(), O_RDWR | O_CLOEXEC)};
    if (!file)
      throw std::runtime_error(path + ": " + std::strerror(errno));
    return must(detail::shared_memory::attach(std::move(file), sizeof(words)));
  }

  static void set(word& x) {
    x.store(1);
    detail::futex_wake_all(x);
  }
  static bool wait(const word& x) {
    const auto until = std::chrono::steady_clock::now() + patience;
    while (x.load() == 0 && std::chrono::steady_clock::now() < until)
      detail::futex_wait(x, 0, 1s);
    return x.load() != 0;
  }

  words& at() const { return *std::launder(reinterpret_cast<words*>(memory_.bytes().data())); }

  detail::shared_memory memory_;
};

namespace {

constexpr const char* lane_launch = "troupe.testing.hold_lane";

caf::error hold_stream_of(launch_context& context, std::shared_ptr<gate::state> at) {
  return context.run_on_host([at = std::move(at)] { at->pass(); });
}

std::shared_ptr<gate::state> state_at(std::span<const std::byte> path) {
  return std::make_shared<gate::state>(
      std::string{reinterpret_cast<const char*>(path.data()), path.size()});
}

std::vector<std::uint8_t> bytes_of_text(const std::string& x) { return {x.begin(), x.end()}; }

/// Workers run the same program, so the launches are registered there too.
[[maybe_unused]] const bool registered = [] {
  must(register_launch(gate::launch_name, [](launch_context& context, auto, auto, auto path) {
    return hold_stream_of(context, state_at(path));
  }));
  must(register_launch(lane_launch, [](launch_context&, auto, auto, auto path) {
    state_at(path)->pass();
    return caf::error{};
  }));
  return true;
}();

} // namespace

gate::gate() : gate(in_workers()) {}

gate::gate(bool for_workers) : state_(std::make_shared<state>()), for_workers_(for_workers) {}

pending<void> gate::hold_stream(const device& on, std::vector<any_gpu_ref> reads,
                                std::vector<any_gpu_ref> writes, request_options options) const {
  if (for_workers_)
    return on.launch(launch_name, arguments(), std::move(reads), std::move(writes), options);
  return on.launch([at = state_](launch_context& context) { return hold_stream_of(context, at); },
                   std::move(reads), std::move(writes), options);
}

pending<void> gate::hold_lane(const device& on, std::vector<any_gpu_ref> reads,
                              std::vector<any_gpu_ref> writes, request_options options) const {
  if (for_workers_)
    return on.launch(lane_launch, arguments(), std::move(reads), std::move(writes), options);
  return on.launch(
      [at = state_](launch_context&) {
        at->pass();
        return caf::error{};
      },
      std::move(reads), std::move(writes), options);
}

std::vector<std::uint8_t> gate::arguments() const { return bytes_of_text(state_->path()); }

bool gate::wait_reached() const { return state_->wait_reached(); }

void gate::open() const { state_->open(); }

} // namespace troupe::testing
