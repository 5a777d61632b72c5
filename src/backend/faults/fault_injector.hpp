/// The rules of a fault plan, the faults that they inject, and the gates that these leave behind.
#pragma once

#include <troupe/backend.hpp>
#include <troupe/error.hpp>
#include <troupe/testing/fault_plan.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <thread>
#include <vector>

namespace troupe::detail {

class fault_injector;

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

constexpr std::size_t index_of(testing::verb x) noexcept { return static_cast<std::size_t>(x); }
constexpr std::size_t index_of(testing::fault x) noexcept { return static_cast<std::size_t>(x); }

inline constexpr std::size_t verb_count = index_of(testing::verb::copy_peer) + 1;
inline constexpr std::size_t fault_count = index_of(testing::fault::corrupt) + 1;

/// Returns whether a call that gets the fault returns an error instead of waiting.
inline bool fails(testing::fault x) noexcept {
  return x == testing::fault::fail || x == testing::fault::out_of_memory ||
         x == testing::fault::poison;
}

/// The origin of a call.
struct caller {
  int device = testing::any_device;
  int rank = -1;
  const communicator_id* communicator = nullptr;
  int peer = testing::any_device; ///< the other device
};

/// A fault that hits one call: an error, a gate where the call waits, or a lost byte.
struct strike {
  testing::fault kind = testing::fault::fail;
  caf::error error;
  gate* place = nullptr; ///< passed or removed exactly once
  double where = 0;      ///< of `corrupt`: position of the byte, as a fraction in [0, 1)
};

/// @thread any
class fault_injector {
public:
  fault_injector(std::uint64_t seed, const std::vector<testing::fault_rule>& rules);
  ~fault_injector();

  std::size_t add(const testing::fault_rule& rule);
  void disarm() noexcept;

  bool poisoned() const noexcept { return poisoned_; }
  /// Returns whether a fault can hit calls of `v`.
  bool concerns(testing::verb v) const noexcept { return poisoned_ || has_rules_[index_of(v)]; }

  void poison() noexcept;

  /// Returns the fault that hits this call, if there is one.
  std::optional<strike> next(testing::verb v, const caller& who) noexcept {
    return next(v, who, std::array{who.device});
  }

  /// Same for a call that concerns several devices.
  std::optional<strike> next(testing::verb v, const caller& who,
                             std::span<const int> devices) noexcept {
    if (poisoned_)
      return strike{testing::fault::poison, sticky_error(testing::to_string(v), who), nullptr};
    if (!has_rules_[index_of(v)])
      return std::nullopt;
    auto result = select(v, who, devices);
    if (result && result->kind == testing::fault::poison)
      poison();
    return result;
  }

  std::uint64_t injected() const noexcept;
  std::uint64_t injected(testing::fault kind) const noexcept;
  std::uint64_t injected_by(std::size_t rule) const noexcept;
  bool wait_injected(testing::fault kind, std::uint64_t count,
                     std::chrono::nanoseconds limit) const noexcept;

  void set_device(gate* x, const backend_device* device) noexcept;
  void remove(gate* x) noexcept;

  /// Blocks a stream of a remote device at `x`, unless the gate is already open.
  caf::error place_remote(gate* x, const open_device& on, stream_view stream) noexcept;

  /// Blocks until `x` is open or, for `fault::slow`, until its delay is over. Removes `x`.
  void pass(gate* x) noexcept;

  template <class Predicate> void open_gates(Predicate which) noexcept {
    std::lock_guard lock{mutex_};
    open_those(which);
    changed_.notify_all();
  }

  void open_gates_of(const communicator_id& id) noexcept {
    open_gates([&](const gate& x) { return x.communicator && x.communicator->bytes == id.bytes; });
  }

  /// Stores the completion signal of the device `key`.
  void set_signal(const void* key, std::function<void()> signal);
  void remove_signal(const void* key) noexcept;

  /// Returns the error that every call gets after a sticky fault.
  static caf::error sticky_error(std::string_view call, const caller& who);

private:
  struct counters {
    std::uint64_t calls = 0;
    std::uint64_t strikes = 0;
  };

  struct counted_rule {
    testing::fault_rule rule;
    std::map<int, counters> by_device;
    std::uint64_t injected = 0;
  };

  std::optional<strike> select(testing::verb v, const caller& who,
                               std::span<const int> devices) noexcept;

  /// Opens the selected gates. A remote gate is erased here, since no thread returns from it.
  template <class Predicate> void open_those(Predicate which) noexcept {
    for (auto i = gates_.begin(); i != gates_.end();) {
      if (!which(*i)) {
        ++i;
        continue;
      }
      i->open = true;
      if (!i->words) {
        ++i;
        continue;
      }
      i->words->give_back(i->word);
      i = gates_.erase(i);
    }
  }

  /// Starts or wakes the thread that opens slow gates of remote devices.
  caf::error keep_time();
  void open_in_time() noexcept;
  gate* make_gate(const testing::fault_rule& rule, const caller& who);
  static failure failure_of_call(errc code, std::string_view call, const caller& who);
  static caf::error error_of(const testing::fault_rule& rule, std::size_t number,
                             std::uint64_t call, const caller& who);
  void signal_all() noexcept;

  const std::uint64_t seed_;
  std::array<std::atomic<bool>, verb_count> has_rules_{};
  std::atomic<bool> poisoned_{false};
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_; ///< a fault was injected, or a gate opened
  std::vector<counted_rule> rules_;
  std::size_t disarmed_ = 0; // the rules before this index are off
  std::array<std::uint64_t, fault_count> injected_{};
  std::list<gate> gates_;
  std::uint64_t last_gate_ = 0;
  bool stopped_ = false;
  std::thread timer_;
  std::recursive_mutex signal_mutex_;
  std::map<const void*, std::function<void()>> signals_;
};

/// Applies the fault `what` to a call. Without an error, the caller goes on with the call.
caf::error suffer(fault_injector& injector, const strike& what, testing::verb v, const caller& who,
                  const open_device& on, stream_view stream) noexcept;

/// Waits at the gate of `what`. Blocks `stream` on the device `on`; without both, or for
/// `fault::block`, blocks the calling thread.
caf::error hold(fault_injector& injector, const strike& what, const open_device& on,
                stream_view stream) noexcept;

} // namespace troupe::detail
