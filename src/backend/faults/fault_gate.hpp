/// The gates of a fault plan, which block streams and threads until they are opened.
#pragma once

#include <troupe/backend.hpp>
#include <troupe/testing/fault_plan.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

namespace troupe::detail {

/// Words in pinned memory of a remote device, for gates on its streams. The streams wait for these
/// words, because they cannot call functions of this process.
class gate_words {
public:
  /// A stream that waits for `value` in `word` is blocked until `give_back`.
  struct place {
    std::atomic<std::uint64_t>* word = nullptr;
    std::uint64_t value = 0;
  };

  explicit gate_words(backend_device& of) : of_(of) {}

  ~gate_words();
  gate_words(const gate_words&) = delete;
  gate_words& operator=(const gate_words&) = delete;

  /// @errors as `allocate_pinned`
  caf::expected<place> take() noexcept;
  /// Releases the stream that waits for the word. A word only grows, so it can be reused at once.
  void give_back(const place& x) noexcept;

private:
  static constexpr std::size_t page_words = 512;

  backend_device& of_;
  std::mutex mutex_;
  std::vector<void*> pages_;
  std::vector<std::atomic<std::uint64_t>*> free_;
};

/// An open device, for gates on its streams.
struct open_device {
  backend_device* device = nullptr;
  gate_words* words = nullptr; ///< null: the device is not remote
};

/// The open devices, on whose streams communicators enqueue gates.
struct open_devices {
  std::mutex mutex;
  std::map<int, open_device> by_ordinal;
};

/// Blocks a stream or a thread until it is opened.
struct gate {
  fault_injector* injector = nullptr;
  std::uint64_t number = 0;
  testing::fault kind = testing::fault::hang;
  std::chrono::nanoseconds delay{};
  std::optional<communicator_id> communicator;
  const backend_device* device = nullptr; ///< the device of the blocked stream
  bool open = false;
  // -- for a remote device only
  gate_words* words = nullptr;
  gate_words::place word;
  void* stream = nullptr;
  /// Of `slow`: the time to open, set as the stream's first gate.
  std::optional<std::chrono::steady_clock::time_point> due;
};

} // namespace troupe::detail
