#include "foundation/log.hpp"
#include "foundation/start_thread.hpp"
#include <troupe/testing/fault_plan.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <new>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>

namespace troupe {

namespace detail {

namespace {

using std::chrono::nanoseconds;
using testing::any_device;
using testing::fault;
using testing::fault_rule;
using testing::verb;

constexpr std::array<std::string_view, 29> verb_names{"open",
                                                      "bind",
                                                      "open_memory",
                                                      "close_memory",
                                                      "allocate",
                                                      "deallocate",
                                                      "allocate_pinned",
                                                      "create_stream",
                                                      "create_event",
                                                      "record",
                                                      "wait",
                                                      "query",
                                                      "synchronize",
                                                      "copy",
                                                      "fill",
                                                      "launch_host",
                                                      "enable_peer",
                                                      "build",
                                                      "connect",
                                                      "collective",
                                                      "asynchronous_error",
                                                      "abort",
                                                      "destroy",
                                                      "allocate_symmetric",
                                                      "register_window",
                                                      "deregister_window",
                                                      "link",
                                                      "admit_peer",
                                                      "copy_peer"};

constexpr std::array<std::string_view, 8> fault_names{
    "fail", "out_of_memory", "not_issued", "hang", "slow", "block", "poison", "corrupt"};

static_assert(static_cast<std::size_t>(verb::copy_peer) + 1 == verb_names.size());
static_assert(static_cast<std::size_t>(fault::corrupt) + 1 == fault_names.size());

constexpr std::size_t index_of(verb x) noexcept { return static_cast<std::size_t>(x); }
constexpr std::size_t index_of(fault x) noexcept { return static_cast<std::size_t>(x); }

/// Returns a number in [0, 1) that depends only on `from`. Each value goes through the finalizer of
/// SplitMix64.
double uniform(std::initializer_list<std::uint64_t> from) noexcept {
  std::uint64_t x = 0;
  for (const auto y : from) {
    x += y + 0x9e3779b97f4a7c15U;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
    x ^= x >> 31;
  }
  return static_cast<double>(x >> 11) * 0x1p-53;
}

errc usual_error(verb x) noexcept {
  switch (x) {
  case verb::open:
    return errc::unavailable;
  case verb::bind:
    return errc::device_failed;
  case verb::build:
  case verb::connect:
  case verb::collective:
  case verb::asynchronous_error:
  case verb::abort:
  case verb::destroy:
  case verb::register_window:
  case verb::deregister_window:
    return errc::nccl_error;
  default:
    return errc::cuda_error;
  }
}

bool can_strike(fault x, verb on) noexcept {
  return x != fault::corrupt || on == verb::copy || on == verb::copy_peer;
}

bool fails(fault x) noexcept {
  return x == fault::fail || x == fault::out_of_memory || x == fault::poison;
}

/// The origin of a call.
struct caller {
  int device = any_device;
  int rank = -1;
  const communicator_id* communicator = nullptr;
  int peer = any_device; ///< the other device
};

using steady_time = std::chrono::steady_clock::time_point;

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

  ~gate_words() {
    for (auto* page : pages_)
      if (auto err = of_.deallocate_pinned(page))
        log(log_level::warning, "cannot free the host memory of a fault plan", err);
  }

  gate_words(const gate_words&) = delete;
  gate_words& operator=(const gate_words&) = delete;

  /// @errors as `allocate_pinned`
  caf::expected<place> take() noexcept {
    std::lock_guard lock{mutex_};
    if (free_.empty()) {
      auto page = of_.allocate_pinned(page_words * sizeof(std::uint64_t));
      if (!page)
        return page.error();
      pages_.push_back(*page);
      auto* first = static_cast<std::atomic<std::uint64_t>*>(*page);
      for (std::size_t i = 0; i < page_words; ++i)
        free_.push_back(new (first + i) std::atomic<std::uint64_t>{0});
    }
    auto* word = free_.back();
    free_.pop_back();
    return place{word, word->load(std::memory_order_relaxed) + 1};
  }

  /// Releases the stream that waits for the word. A word only grows, so it can be reused at once.
  void give_back(const place& x) noexcept {
    x.word->store(x.value, std::memory_order_release);
    std::lock_guard lock{mutex_};
    free_.push_back(x.word);
  }

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

/// Blocks a stream or a thread until it is opened.
struct gate {
  fault_injector* injector = nullptr;
  std::uint64_t number = 0;
  fault kind = fault::hang;
  nanoseconds delay{};
  std::optional<communicator_id> communicator;
  const backend_device* device = nullptr; ///< the device of the blocked stream
  bool open = false;
  // -- for a remote device only
  gate_words* words = nullptr;
  gate_words::place word;
  void* stream = nullptr;
  std::optional<steady_time> due; ///< of `slow`: the time to open, set as the stream's first gate
};

/// A fault that hits one call: an error, a gate where the call waits, or a lost byte.
struct strike {
  fault kind = fault::fail;
  caf::error error;
  gate* place = nullptr; ///< passed or removed exactly once
  double where = 0;      ///< of `corrupt`: position of the byte, as a fraction in [0, 1)
};

} // namespace

/// @thread any
class fault_injector {
public:
  fault_injector(std::uint64_t seed, const std::vector<fault_rule>& rules) : seed_(seed) {
    for (const auto& x : rules)
      add(x);
  }

  ~fault_injector() {
    {
      std::lock_guard lock{mutex_};
      stopped_ = true;
      changed_.notify_all();
    }
    if (timer_.joinable())
      timer_.join();
  }

  std::size_t add(const fault_rule& rule) {
    std::lock_guard lock{mutex_};
    rules_.push_back({rule, {}, 0});
    has_rules_[index_of(rule.on)] = true;
    return rules_.size() - 1;
  }

  void disarm() noexcept {
    std::lock_guard lock{mutex_};
    disarmed_ = rules_.size();
    for (auto& x : has_rules_)
      x = false;
  }

  bool poisoned() const noexcept { return poisoned_; }
  /// Returns whether a fault can hit calls of `v`.
  bool concerns(verb v) const noexcept { return poisoned_ || has_rules_[index_of(v)]; }

  void poison() noexcept {
    if (poisoned_.exchange(true))
      return;
    open_gates([](const gate&) { return true; });
    signal_all();
  }

  /// Returns the fault that hits this call, if there is one.
  std::optional<strike> next(verb v, const caller& who) noexcept {
    return next(v, who, std::array{who.device});
  }

  /// Same for a call that concerns several devices.
  std::optional<strike> next(verb v, const caller& who, std::span<const int> devices) noexcept {
    if (poisoned_)
      return strike{fault::poison, sticky_error(testing::to_string(v), who), nullptr};
    if (!has_rules_[index_of(v)])
      return std::nullopt;
    auto result = select(v, who, devices);
    if (result && result->kind == fault::poison)
      poison();
    return result;
  }

  std::uint64_t injected() const noexcept {
    std::lock_guard lock{mutex_};
    return std::accumulate(injected_.begin(), injected_.end(), std::uint64_t{0});
  }

  std::uint64_t injected(fault kind) const noexcept {
    std::lock_guard lock{mutex_};
    return injected_[index_of(kind)];
  }

  std::uint64_t injected_by(std::size_t rule) const noexcept {
    std::lock_guard lock{mutex_};
    return rule < rules_.size() ? rules_[rule].injected : 0;
  }

  bool wait_injected(fault kind, std::uint64_t count, nanoseconds limit) const noexcept {
    std::unique_lock lock{mutex_};
    return changed_.wait_for(lock, limit, [&] { return injected_[index_of(kind)] >= count; });
  }

  void set_device(gate* x, const backend_device* device) noexcept {
    std::lock_guard lock{mutex_};
    x->device = device;
  }

  void remove(gate* x) noexcept {
    std::lock_guard lock{mutex_};
    gates_.remove_if([x](const gate& y) { return &y == x; });
  }

  /// Blocks a stream of a remote device at `x`, unless the gate is already open.
  caf::error place_remote(gate* x, const open_device& on, stream_view stream) noexcept {
    auto word = on.words->take();
    std::uint64_t number = 0;
    {
      std::lock_guard lock{mutex_};
      if (!word || x->open) {
        if (word)
          on.words->give_back(*word);
        gates_.remove_if([x](const gate& y) { return &y == x; });
        return word ? caf::error{} : word.error();
      }
      if (x->kind == fault::slow)
        if (auto error = keep_time()) {
          on.words->give_back(*word);
          gates_.remove_if([x](const gate& y) { return &y == x; });
          return error;
        }
      number = x->number;
      x->device = on.device;
      x->words = on.words;
      x->word = *word;
      x->stream = stream.native;
    }
    auto err = on.device->wait_word(stream, word->word, word->value);
    if (err)
      open_gates([number](const gate& y) { return y.number == number; });
    return err;
  }

  /// Blocks until `x` is open or, for `fault::slow`, until its delay is over. Removes `x`.
  void pass(gate* x) noexcept {
    {
      std::unique_lock lock{mutex_};
      const auto open = [x] { return x->open; };
      if (x->kind == fault::slow)
        changed_.wait_for(lock, x->delay, open);
      else
        changed_.wait(lock, open);
    }
    remove(x);
  }

  template <class Predicate> void open_gates(Predicate which) noexcept {
    std::lock_guard lock{mutex_};
    open_those(which);
    changed_.notify_all();
  }

  void open_gates_of(const communicator_id& id) noexcept {
    open_gates([&](const gate& x) { return x.communicator && x.communicator->bytes == id.bytes; });
  }

  /// Stores the completion signal of the device `key`.
  void set_signal(const void* key, std::function<void()> signal) {
    std::lock_guard lock{signal_mutex_};
    signals_[key] = std::move(signal);
  }

  void remove_signal(const void* key) noexcept {
    std::lock_guard lock{signal_mutex_};
    signals_.erase(key);
  }

  /// Returns the error that every call gets after a sticky fault.
  static caf::error sticky_error(std::string_view call, const caller& who) {
    auto f = failure_of_call(errc::device_fault, call, who);
    f.native_name = "cudaErrorIllegalAddress";
    f.native_code = 700;
    f.detail = "a sticky fault, injected by a fault plan";
    return make_error(std::move(f));
  }

private:
  struct counters {
    std::uint64_t calls = 0;
    std::uint64_t strikes = 0;
  };

  struct counted_rule {
    fault_rule rule;
    std::map<int, counters> by_device;
    std::uint64_t injected = 0;
  };

  std::optional<strike> select(verb v, const caller& who, std::span<const int> devices) noexcept {
    std::lock_guard lock{mutex_};
    std::optional<strike> result;
    for (auto i = disarmed_; i < rules_.size(); ++i) {
      auto& x = rules_[i];
      const auto& rule = x.rule;
      if (rule.on != v || !can_strike(rule.kind, v))
        continue;
      if (rule.peer != any_device && rule.peer != who.peer)
        continue;
      if (rule.device != any_device &&
          std::find(devices.begin(), devices.end(), rule.device) == devices.end())
        continue;
      const auto key = rule.device != any_device ? rule.device : who.device;
      auto& count = x.by_device[key];
      ++count.calls;
      if (result || count.calls < rule.first || count.strikes >= rule.times)
        continue;
      if (uniform({seed_, i, static_cast<std::uint64_t>(key), count.calls}) >= rule.probability)
        continue;
      ++count.strikes;
      ++x.injected;
      ++injected_[index_of(rule.kind)];
      if (fails(rule.kind))
        result = strike{rule.kind, error_of(rule, i, count.calls, who), nullptr};
      else if (rule.kind == fault::corrupt)
        result = strike{rule.kind, {}, nullptr, uniform({~seed_, i, count.calls})};
      else
        result = strike{rule.kind, {}, make_gate(rule, who)}; // made before a waiter can see it
    }
    if (result)
      changed_.notify_all();
    return result;
  }

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
  caf::error keep_time() {
    changed_.notify_all();
    return timer_.joinable()
               ? caf::error{}
               : start_thread(timer_, [this] { open_in_time(); }, "to end an injected fault");
  }

  void open_in_time() noexcept {
    std::unique_lock lock{mutex_};
    while (!stopped_) {
      const auto now = std::chrono::steady_clock::now();
      open_those([now](const gate& x) { return x.due && *x.due <= now; });
      auto next = steady_time::max();
      for (auto i = gates_.begin(); i != gates_.end(); ++i) {
        if (!i->words || i->kind != fault::slow)
          continue;
        const auto before = [i](const gate& x) {
          return x.device == i->device && x.stream == i->stream;
        };
        if (!i->due && std::none_of(gates_.begin(), i, before))
          i->due = now + i->delay;
        if (i->due)
          next = std::min(next, *i->due);
      }
      if (next == steady_time::max())
        changed_.wait(lock);
      else
        changed_.wait_until(lock, next);
    }
  }

  gate* make_gate(const fault_rule& rule, const caller& who) {
    auto& result = gates_.emplace_back();
    result.injector = this;
    result.number = ++last_gate_;
    result.kind =
        rule.kind == fault::not_issued && rule.on != verb::collective ? fault::hang : rule.kind;
    result.delay = rule.delay;
    if (who.communicator)
      result.communicator = *who.communicator;
    result.open = poisoned_;
    return &result;
  }

  static failure failure_of_call(errc code, std::string_view call, const caller& who) {
    failure result;
    result.code = code;
    result.verb = call;
    result.api = call;
    result.device = who.device;
    result.rank = who.rank;
    return result;
  }

  static caf::error error_of(const fault_rule& rule, std::size_t number, std::uint64_t call,
                             const caller& who) {
    if (rule.kind == fault::poison)
      return sticky_error(testing::to_string(rule.on), who);
    const auto code = rule.kind == fault::out_of_memory ? errc::out_of_memory
                                                        : rule.error.value_or(usual_error(rule.on));
    auto f = failure_of_call(code, testing::to_string(rule.on), who);
    f.native_name = "injected";
    f.detail = "injected by rule " + std::to_string(number) + " of a fault plan at call " +
               std::to_string(call);
    return make_error(std::move(f));
  }

  void signal_all() noexcept {
    // A signal may drop the last owner of its device, whose destructor calls `remove_signal` on
    // this thread.
    std::lock_guard lock{signal_mutex_};
    for (auto i = signals_.begin(); i != signals_.end();) {
      const auto key = i->first;
      const auto signal = i->second;
      if (signal)
        signal();
      i = signals_.upper_bound(key);
    }
  }

  const std::uint64_t seed_;
  std::array<std::atomic<bool>, verb_names.size()> has_rules_{};
  std::atomic<bool> poisoned_{false};
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_; ///< a fault was injected, or a gate opened
  std::vector<counted_rule> rules_;
  std::size_t disarmed_ = 0; // the rules before this index are off
  std::array<std::uint64_t, fault_names.size()> injected_{};
  std::list<gate> gates_;
  std::uint64_t last_gate_ = 0;
  bool stopped_ = false;
  std::thread timer_;
  std::recursive_mutex signal_mutex_;
  std::map<const void*, std::function<void()>> signals_;
};

namespace {

/// The open devices, on whose streams communicators enqueue gates.
struct open_devices {
  std::mutex mutex;
  std::map<int, open_device> by_ordinal;
};

/// Waits at a gate; runs as a host function in a stream.
void pass_gate(void* x) {
  auto* g = static_cast<gate*>(x);
  g->injector->pass(g);
}

/// Waits at the gate of `what`. Blocks `stream` on the device `on`; without both, or for
/// `fault::block`, blocks the calling thread.
caf::error hold(fault_injector& injector, const strike& what, const open_device& on,
                stream_view stream) noexcept {
  if (what.kind == fault::block || !on.device || !stream.native) {
    injector.pass(what.place);
    return {};
  }
  if (on.words)
    return injector.place_remote(what.place, on, stream);
  injector.set_device(what.place, on.device);
  auto err = on.device->launch_host(stream, pass_gate, what.place);
  if (err)
    injector.remove(what.place);
  return err;
}

class faulty_device final : public backend_device {
public:
  faulty_device(std::unique_ptr<backend_device> inner, std::shared_ptr<fault_injector> injector,
                std::shared_ptr<open_devices> devices, int ordinal)
      : injector_(std::move(injector)), devices_(std::move(devices)), ordinal_(ordinal),
        inner_(std::move(inner)) {
    if (inner_->is_remote())
      words_.emplace(*inner_);
    std::lock_guard lock{devices_->mutex};
    devices_->by_ordinal[ordinal_] = here();
  }

  ~faulty_device() override {
    injector_->remove_signal(this);
    {
      std::lock_guard lock{devices_->mutex};
      devices_->by_ordinal.erase(ordinal_);
    }
    open_gates();
  }

  caf::error bind() noexcept override {
    if (inner_->is_remote() && inner_->loss())
      open_gates(); // their streams are gone
    return call(verb::bind, [this] { return inner_->bind(); });
  }

  caf::expected<device_properties> properties() noexcept override {
    if (injector_->poisoned())
      return fault_injector::sticky_error("properties", {ordinal_});
    return inner_->properties();
  }

  caf::expected<memory_info> memory() noexcept override {
    if (injector_->poisoned())
      return fault_injector::sticky_error("memory", {ordinal_});
    return inner_->memory();
  }

  caf::error open_memory() noexcept override {
    return call(verb::open_memory, [this] { return inner_->open_memory(); });
  }

  caf::error close_memory() noexcept override {
    return call(verb::close_memory, [this] { return inner_->close_memory(); });
  }

  caf::expected<void*> allocate(std::size_t size_bytes, stream_view stream) noexcept override {
    return call(verb::allocate, [&] { return inner_->allocate(size_bytes, stream); });
  }

  caf::error deallocate(void* memory, stream_view stream) noexcept override {
    return call(verb::deallocate, [&] { return inner_->deallocate(memory, stream); }, stream);
  }

  caf::expected<void*> allocate_symmetric(std::size_t size_bytes) noexcept override {
    return call(verb::allocate_symmetric, [&] { return inner_->allocate_symmetric(size_bytes); });
  }

  caf::expected<void*> allocate_pinned(std::size_t size_bytes) noexcept override {
    return call(verb::allocate_pinned, [&] { return inner_->allocate_pinned(size_bytes); });
  }

  /// Injects no fault: host memory can be freed whatever the state of the devices.
  caf::error deallocate_pinned(void* memory) noexcept override {
    return inner_->deallocate_pinned(memory);
  }

  std::function<caf::error(void*)> pinned_deleter() noexcept override {
    return inner_->pinned_deleter();
  }

  caf::expected<stream_view> create_stream() noexcept override {
    return call(verb::create_stream, [this] { return inner_->create_stream(); });
  }

  caf::error destroy_stream(stream_view stream) noexcept override {
    if (injector_->poisoned())
      return fault_injector::sticky_error("destroy_stream", {ordinal_});
    return inner_->destroy_stream(stream);
  }

  caf::expected<event_view> create_event() noexcept override {
    return call(verb::create_event, [this] { return inner_->create_event(); });
  }

  caf::error destroy_event(event_view event) noexcept override {
    if (injector_->poisoned())
      return fault_injector::sticky_error("destroy_event", {ordinal_});
    return inner_->destroy_event(event);
  }

  caf::error record(event_view event, stream_view stream) noexcept override {
    return call(verb::record, [&] { return inner_->record(event, stream); }, stream);
  }

  caf::error wait(stream_view stream, event_view event) noexcept override {
    return call(verb::wait, [&] { return inner_->wait(stream, event); }, stream);
  }

  caf::expected<bool> query(event_view event) noexcept override {
    return call(verb::query, [&] { return inner_->query(event); });
  }

  caf::error synchronize(event_view event) noexcept override {
    return call(verb::synchronize, [&] {
      auto err = inner_->synchronize(event);
      return injector_->poisoned() ? fault_injector::sticky_error("synchronize", {ordinal_}) : err;
    });
  }

  caf::error copy(void* target, const void* source, std::size_t size_bytes,
                  copy_direction direction, stream_view stream) noexcept override {
    return call_copy(
        verb::copy, {ordinal_}, size_bytes,
        [&](std::size_t begin, std::size_t size) {
          return inner_->copy(static_cast<std::byte*>(target) + begin,
                              static_cast<const std::byte*>(source) + begin, size, direction,
                              stream);
        },
        stream);
  }

  caf::error fill(void* target, std::span<const std::byte> pattern, std::size_t count,
                  stream_view stream) noexcept override {
    return call(verb::fill, [&] { return inner_->fill(target, pattern, count, stream); }, stream);
  }

  caf::error launch_host(stream_view stream, void (*function)(void*),
                         void* argument) noexcept override {
    return call(
        verb::launch_host, [&] { return inner_->launch_host(stream, function, argument); }, stream);
  }

  caf::error clear_last_error(std::string_view found, std::string_view call,
                              std::uint64_t number) noexcept override {
    return inner_->clear_last_error(found, call, number);
  }

  caf::expected<bool> can_access_peer(int peer) noexcept override {
    if (injector_->poisoned())
      return fault_injector::sticky_error("can_access_peer", {ordinal_});
    return inner_->can_access_peer(peer);
  }

  caf::error enable_peer(int peer) noexcept override {
    return call(verb::enable_peer, peer, [&] { return inner_->enable_peer(peer); });
  }

  caf::error admit_peer(int peer) noexcept override {
    return call(verb::admit_peer, peer, [&] { return inner_->admit_peer(peer); });
  }

  caf::error copy_peer(void* target, int target_device, const void* source, int source_device,
                       std::size_t size_bytes, stream_view stream) noexcept override {
    const auto peer = target_device == ordinal_ ? source_device : target_device;
    return call_copy(
        verb::copy_peer, {ordinal_, -1, nullptr, peer}, size_bytes,
        [&](std::size_t begin, std::size_t size) {
          return inner_->copy_peer(static_cast<std::byte*>(target) + begin, target_device,
                                   static_cast<const std::byte*>(source) + begin, source_device,
                                   size, stream);
        },
        stream);
  }

  /// False while rules concern copies, since a rule applies to each copy alone.
  bool prefers_copy_peers() const noexcept override {
    return inner_->prefers_copy_peers() && !injector_->concerns(verb::copy_peer);
  }

  caf::error copy_peers(std::span<const peer_copy> copies, stream_view stream) noexcept override {
    if (injector_->concerns(verb::copy_peer))
      return make_error(errc::not_supported, "the fault plan injects into single copies");
    return inner_->copy_peers(copies, stream);
  }

  caf::error register_pinned(void* memory, std::size_t size_bytes) noexcept override {
    return inner_->register_pinned(memory, size_bytes);
  }

  caf::error unregister_pinned(void* memory) noexcept override {
    return inner_->unregister_pinned(memory);
  }

  caf::error wait_word(stream_view stream, const std::atomic<std::uint64_t>* word,
                       std::uint64_t value) noexcept override {
    if (injector_->poisoned())
      return fault_injector::sticky_error("wait_word", {ordinal_});
    return call(verb::wait, [&] { return inner_->wait_word(stream, word, value); }, stream);
  }

  event_word word_of(event_view event) const noexcept override { return inner_->word_of(event); }

  void interrupt() noexcept override { inner_->interrupt(); }
  bool is_remote() const noexcept override { return inner_->is_remote(); }

  caf::error launch_registered(const std::string& name, std::span<const launch_memory> reads,
                               std::span<const launch_memory> writes,
                               std::span<const std::byte> arguments,
                               stream_view stream) noexcept override {
    return call(
        verb::launch_host,
        [&] { return inner_->launch_registered(name, reads, writes, arguments, stream); }, stream);
  }

  void set_loss_signal(std::function<void(const caf::error&)> signal) noexcept override {
    inner_->set_loss_signal(std::move(signal));
  }

  caf::error loss() const noexcept override { return inner_->loss(); }

  bool runs_cuda() const noexcept override { return inner_->runs_cuda(); }

  bool signals_completion() const noexcept override { return inner_->signals_completion(); }

  void set_completion_signal(std::function<void()> signal) noexcept override {
    injector_->set_signal(this, signal);
    inner_->set_completion_signal(std::move(signal));
  }

private:
  open_device here() noexcept { return {inner_.get(), words_ ? &*words_ : nullptr}; }

  void open_gates() noexcept {
    injector_->open_gates([this](const gate& x) { return x.device == inner_.get(); });
  }

  /// Applies the fault `what` to a call. Without an error, the caller goes on with the call.
  caf::error suffer(const strike& what, verb v, const caller& who, stream_view stream) noexcept {
    if (fails(what.kind))
      return what.error;
    if (auto err = hold(*injector_, what, here(), stream))
      return err;
    if (injector_->poisoned())
      return fault_injector::sticky_error(testing::to_string(v), who);
    return {};
  }

  /// Calls `f` unless a fault makes the call fail. With a `stream`, a gate blocks the stream, not
  /// the thread.
  template <class F> std::invoke_result_t<F> call(verb v, F f, stream_view stream = {}) noexcept {
    const caller who{ordinal_};
    if (auto what = injector_->next(v, who))
      if (auto err = suffer(*what, v, who, stream))
        return err;
    return f();
  }

  /// Same for a call that names another device.
  template <class F> caf::error call(verb v, int peer, F f) noexcept {
    const caller who{ordinal_, -1, nullptr, peer};
    if (auto what = injector_->next(v, who))
      if (auto err = suffer(*what, v, who, {}))
        return err;
    return f();
  }

  /// Same for a copy. `piece(begin, size)` copies part of it; `fault::corrupt` leaves out one byte.
  template <class F>
  caf::error call_copy(verb v, const caller& who, std::size_t size_bytes, F piece,
                       stream_view stream) noexcept {
    auto what = injector_->next(v, who);
    if (!what)
      return piece(0, size_bytes);
    if (what->kind != fault::corrupt) {
      if (auto err = suffer(*what, v, who, stream))
        return err;
      return piece(0, size_bytes);
    }
    if (size_bytes == 0)
      return {};
    const auto lost = static_cast<std::size_t>(what->where * static_cast<double>(size_bytes));
    if (auto err = piece(0, lost))
      return err;
    return piece(lost + 1, size_bytes - lost - 1);
  }

  std::shared_ptr<fault_injector> injector_;
  std::shared_ptr<open_devices> devices_;
  int ordinal_;
  std::unique_ptr<backend_device> inner_; // its streams may still reach gates
  std::optional<gate_words> words_; // destroyed first, since it frees its memory through the device
};

class faulty_communicator final : public backend_communicator {
public:
  faulty_communicator(std::unique_ptr<backend_communicator> inner,
                      std::shared_ptr<fault_injector> injector,
                      std::shared_ptr<open_devices> devices, const communicator_id& id,
                      const local_rank& rank)
      : injector_(std::move(injector)), devices_(std::move(devices)), id_(id), rank_(rank),
        inner_(std::move(inner)) {}

  caf::error connect(stream_view stream, connect_scope what) noexcept override {
    return call(verb::connect, stream, [&] { return inner_->connect(stream, what); });
  }

  caf::error enqueue(std::span<const collective_call> calls, stream_view stream) noexcept override {
    return call(verb::collective, stream, [&] { return inner_->enqueue(calls, stream); });
  }

  /// A gate blocks the calling thread, which waits here for the other ranks anyway.
  caf::error register_window(void* memory, std::size_t size_bytes,
                             stream_view stream) noexcept override {
    return call(verb::register_window, {},
                [&] { return inner_->register_window(memory, size_bytes, stream); });
  }

  caf::error deregister_window(void* memory) noexcept override {
    return call(verb::deregister_window, {}, [&] { return inner_->deregister_window(memory); });
  }

  void on_loss(std::function<void()> f) noexcept override { inner_->on_loss(std::move(f)); }
  caf::error hand_over(std::span<const std::byte> what) noexcept override {
    return inner_->hand_over(what);
  }

  std::shared_ptr<const device_life> life() const noexcept override { return inner_->life(); }

  const backend_communicator& inner() const noexcept { return *inner_; }

  caf::error asynchronous_error() noexcept override {
    return call(verb::asynchronous_error, {}, [this] { return inner_->asynchronous_error(); });
  }

  const communicator_id& id() const noexcept { return id_; }
  int device() const noexcept { return rank_.device; }
  std::unique_ptr<backend_communicator> release() noexcept { return std::move(inner_); }

private:
  open_device device_now() noexcept {
    std::lock_guard lock{devices_->mutex};
    const auto i = devices_->by_ordinal.find(rank_.device);
    return i != devices_->by_ordinal.end() ? i->second : open_device{};
  }

  template <class F> caf::error call(verb v, stream_view stream, F f) noexcept {
    const caller who{rank_.device, rank_.rank, &id_};
    if (auto what = injector_->next(v, who)) {
      if (fails(what->kind))
        return std::move(what->error);
      if (auto err = hold(*injector_, *what, device_now(), stream))
        return err;
      if (injector_->poisoned())
        return fault_injector::sticky_error(testing::to_string(v), who);
      if (what->kind == fault::not_issued && v == verb::collective)
        return {};
    }
    return f();
  }

  std::shared_ptr<fault_injector> injector_;
  std::shared_ptr<open_devices> devices_;
  communicator_id id_;
  local_rank rank_;
  std::unique_ptr<backend_communicator> inner_;
};

class faulty_backend final : public backend {
public:
  faulty_backend(std::shared_ptr<backend> inner, std::shared_ptr<fault_injector> injector)
      : inner_(std::move(inner)), injector_(std::move(injector)) {}

  std::string_view name() const noexcept override { return inner_->name(); }

  int device_count() const noexcept override { return inner_->device_count(); }

  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override {
    return open_by([&] { return inner_->open(ordinal); }, devices_, ordinal);
  }

  caf::expected<std::unique_ptr<backend_device>> open_beside(int ordinal) noexcept override {
    return open_by([&] { return inner_->open_beside(ordinal); }, std::make_shared<open_devices>(),
                   ordinal);
  }

  bool allows_reset() const noexcept override { return inner_->allows_reset(); }

  caf::expected<peer_link> link(int from, int to) noexcept override {
    const caller who{from, -1, nullptr, to};
    if (const auto what = injector_->next(verb::link, who)) {
      if (fails(what->kind))
        return what->error;
      if (auto err = hold(*injector_, *what, {}, {}))
        return err;
    }
    return inner_->link(from, to);
  }

  void call_off(const communicator_id& id) noexcept override { inner_->call_off(id); }

  caf::expected<communicator_id> make_communicator_id() noexcept override {
    return inner_->make_communicator_id();
  }

  caf::expected<communicator_ranks> build(const communicator_id& id, int size,
                                          std::span<const local_rank> ranks) noexcept override {
    std::vector<int> ordinals;
    for (const auto& x : ranks)
      ordinals.push_back(x.device);
    const caller who{any_device, -1, &id};
    if (const auto what = injector_->next(verb::build, who, ordinals)) {
      if (fails(what->kind))
        return what->error;
      if (auto err = hold(*injector_, *what, {}, {}))
        return err;
      if (injector_->poisoned())
        return fault_injector::sticky_error("build", who);
    }
    auto built = inner_->build(id, size, ranks);
    if (!built)
      return std::move(built.error());
    communicator_ranks result;
    for (std::size_t i = 0; i < ranks.size(); ++i)
      result.push_back(std::make_unique<faulty_communicator>(std::move((*built)[i]), injector_,
                                                             devices_, id, ranks[i]));
    return result;
  }

  caf::error abort(communicator_ranks ranks) noexcept override {
    return end(verb::abort, std::move(ranks));
  }

  caf::error destroy(communicator_ranks ranks) noexcept override {
    return end(verb::destroy, std::move(ranks));
  }

  caf::error provide_spare(int ordinal) noexcept override { return inner_->provide_spare(ordinal); }

  bool is_current(const backend_communicator& rank, int ordinal) const noexcept override {
    return inner_->is_current(static_cast<const faulty_communicator&>(rank).inner(), ordinal);
  }

  bool give_up(int ordinal, const caf::error& why) noexcept override {
    return inner_->give_up(ordinal, why);
  }

  void abandon(const caf::error& why) noexcept override { inner_->abandon(why); }
  caf::error tell(int ordinal, std::span<const std::byte> what) noexcept override {
    return inner_->tell(ordinal, what);
  }
  void set_listener(
      std::function<void(int ordinal, std::span<const std::byte> what)> f) noexcept override {
    inner_->set_listener(std::move(f));
  }

private:
  template <class F>
  caf::expected<std::unique_ptr<backend_device>>
  open_by(F open, std::shared_ptr<open_devices> devices, int ordinal) noexcept {
    if (const auto what = injector_->next(verb::open, caller{ordinal})) {
      if (fails(what->kind))
        return what->error;
      if (auto err = hold(*injector_, *what, {}, {}))
        return err;
    }
    auto device = open();
    if (!device)
      return std::move(device.error());
    return std::unique_ptr<backend_device>{std::make_unique<faulty_device>(
        std::move(*device), injector_, std::move(devices), ordinal)};
  }

  /// Ends the communicator even if a fault hits the call: after a sticky fault no other call would.
  caf::error end(verb v, communicator_ranks ranks) noexcept {
    if (ranks.empty())
      return {};
    const auto id = static_cast<const faulty_communicator&>(*ranks.front()).id();
    std::vector<int> ordinals;
    communicator_ranks inner;
    for (const auto& x : ranks) {
      auto& rank = static_cast<faulty_communicator&>(*x);
      ordinals.push_back(rank.device());
      inner.push_back(rank.release());
    }
    const caller who{any_device, -1, &id};
    caf::error injected;
    if (auto what = injector_->next(v, who, ordinals)) {
      if (fails(what->kind))
        injected = std::move(what->error);
      else
        injected = hold(*injector_, *what, {}, {});
    }
    // After a sticky fault, blocked work never becomes idle: abort, do not destroy.
    const auto must_abort = v == verb::abort || injector_->poisoned();
    if (must_abort)
      injector_->open_gates_of(id);
    auto err = must_abort ? inner_->abort(std::move(inner)) : inner_->destroy(std::move(inner));
    return injected ? injected : err;
  }

  std::shared_ptr<backend> inner_;
  std::shared_ptr<fault_injector> injector_;
  std::shared_ptr<open_devices> devices_ = std::make_shared<open_devices>();
};

} // namespace

} // namespace detail

namespace testing {

std::string_view to_string(verb x) noexcept {
  const auto i = detail::index_of(x);
  return i < detail::verb_names.size() ? detail::verb_names[i] : "?";
}

std::string_view to_string(fault x) noexcept {
  const auto i = detail::index_of(x);
  return i < detail::fault_names.size() ? detail::fault_names[i] : "?";
}

fault_plan::fault_plan(std::uint64_t seed, const std::vector<fault_rule>& rules)
    : injector_(std::make_shared<detail::fault_injector>(seed, rules)) {}

fault_plan::~fault_plan() = default;

std::size_t fault_plan::add(const fault_rule& rule) { return injector_->add(rule); }

void fault_plan::disarm() noexcept { injector_->disarm(); }

void fault_plan::release() noexcept {
  injector_->open_gates([](const detail::gate& x) { return x.kind != fault::not_issued; });
}

void fault_plan::poison() noexcept { injector_->poison(); }

bool fault_plan::poisoned() const noexcept { return injector_->poisoned(); }

std::uint64_t fault_plan::injected() const noexcept { return injector_->injected(); }

std::uint64_t fault_plan::injected(fault kind) const noexcept { return injector_->injected(kind); }

std::uint64_t fault_plan::injected_by(std::size_t rule) const noexcept {
  return injector_->injected_by(rule);
}

bool fault_plan::wait_injected(fault kind, std::uint64_t count,
                               std::chrono::nanoseconds limit) const noexcept {
  return injector_->wait_injected(kind, count, limit);
}

std::shared_ptr<backend> with_faults(std::shared_ptr<backend> inner,
                                     const std::shared_ptr<fault_plan>& plan) {
  return std::make_shared<detail::faulty_backend>(std::move(inner), plan->injector_);
}

} // namespace testing

} // namespace troupe
