#include "backend/faults/fault_injector.hpp"

#include "foundation/log.hpp"
#include "foundation/start_thread.hpp"

#include <algorithm>
#include <initializer_list>
#include <new>
#include <numeric>
#include <string>
#include <utility>

namespace troupe::detail {

namespace {

using std::chrono::nanoseconds;
using testing::any_device;
using testing::fault;
using testing::fault_rule;
using testing::verb;

using steady_time = std::chrono::steady_clock::time_point;

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
    return errc::nccl_error;
  default:
    return errc::cuda_error;
  }
}

bool can_strike(fault x, verb on) noexcept {
  return x != fault::corrupt || on == verb::copy || on == verb::copy_peer;
}

/// Waits at a gate; runs as a host function in a stream.
void pass_gate(void* x) {
  auto* g = static_cast<gate*>(x);
  g->injector->pass(g);
}

} // namespace

// -- gate_words

gate_words::~gate_words() {
  for (auto* page : pages_)
    if (auto err = of_.deallocate_pinned(page))
      log(log_level::warning, "cannot free the host memory of a fault plan", err);
}

caf::expected<gate_words::place> gate_words::take() noexcept {
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

void gate_words::give_back(const place& x) noexcept {
  x.word->store(x.value, std::memory_order_release);
  std::lock_guard lock{mutex_};
  free_.push_back(x.word);
}

// -- fault_injector

fault_injector::fault_injector(std::uint64_t seed, const std::vector<fault_rule>& rules)
    : seed_(seed) {
  for (const auto& x : rules)
    add(x);
}

fault_injector::~fault_injector() {
  {
    std::lock_guard lock{mutex_};
    stopped_ = true;
    changed_.notify_all();
  }
  if (timer_.joinable())
    timer_.join();
}

std::size_t fault_injector::add(const fault_rule& rule) {
  std::lock_guard lock{mutex_};
  rules_.push_back({rule, {}, 0});
  has_rules_[index_of(rule.on)] = true;
  return rules_.size() - 1;
}

void fault_injector::disarm() noexcept {
  std::lock_guard lock{mutex_};
  disarmed_ = rules_.size();
  for (auto& x : has_rules_)
    x = false;
}

void fault_injector::poison() noexcept {
  if (poisoned_.exchange(true))
    return;
  open_gates([](const gate&) { return true; });
  signal_all();
}

std::uint64_t fault_injector::injected() const noexcept {
  std::lock_guard lock{mutex_};
  return std::accumulate(injected_.begin(), injected_.end(), std::uint64_t{0});
}

std::uint64_t fault_injector::injected(fault kind) const noexcept {
  std::lock_guard lock{mutex_};
  return injected_[index_of(kind)];
}

std::uint64_t fault_injector::injected_by(std::size_t rule) const noexcept {
  std::lock_guard lock{mutex_};
  return rule < rules_.size() ? rules_[rule].injected : 0;
}

bool fault_injector::wait_injected(fault kind, std::uint64_t count,
                                   nanoseconds limit) const noexcept {
  std::unique_lock lock{mutex_};
  return changed_.wait_for(lock, limit, [&] { return injected_[index_of(kind)] >= count; });
}

void fault_injector::set_device(gate* x, const backend_device* device) noexcept {
  std::lock_guard lock{mutex_};
  x->device = device;
}

void fault_injector::remove(gate* x) noexcept {
  std::lock_guard lock{mutex_};
  gates_.remove_if([x](const gate& y) { return &y == x; });
}

caf::error fault_injector::place_remote(gate* x, const open_device& on,
                                        stream_view stream) noexcept {
  auto word = on.words->take();
  std::uint64_t number = 0;
  {
    std::lock_guard lock{mutex_};
    auto error = word ? caf::error{} : word.error();
    if (!error && !x->open && x->kind == fault::slow)
      error = keep_time();
    if (error || x->open) {
      if (word)
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

void fault_injector::pass(gate* x) noexcept {
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

void fault_injector::set_signal(const void* key, std::function<void()> signal) {
  std::lock_guard lock{signal_mutex_};
  signals_[key] = std::move(signal);
}

void fault_injector::remove_signal(const void* key) noexcept {
  std::lock_guard lock{signal_mutex_};
  signals_.erase(key);
}

caf::error fault_injector::sticky_error(std::string_view call, const caller& who) {
  auto f = failure_of_call(errc::device_fault, call, who);
  f.native_name = "cudaErrorIllegalAddress";
  f.native_code = 700;
  f.detail = "a sticky fault, injected by a fault plan";
  return make_error(std::move(f));
}

std::optional<strike> fault_injector::select(verb v, const caller& who,
                                             std::span<const int> devices) noexcept {
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

caf::error fault_injector::keep_time() {
  changed_.notify_all();
  return timer_.joinable()
             ? caf::error{}
             : start_thread(timer_, [this] { open_in_time(); }, "to end an injected fault");
}

void fault_injector::open_in_time() noexcept {
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

gate* fault_injector::make_gate(const fault_rule& rule, const caller& who) {
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

failure fault_injector::failure_of_call(errc code, std::string_view call, const caller& who) {
  return {.code = code,
          .verb = std::string{call},
          .api = std::string{call},
          .device = who.device,
          .rank = who.rank};
}

caf::error fault_injector::error_of(const fault_rule& rule, std::size_t number, std::uint64_t call,
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

void fault_injector::signal_all() noexcept {
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

caf::error suffer(fault_injector& injector, const strike& what, verb v, const caller& who,
                  const open_device& on, stream_view stream) noexcept {
  if (fails(what.kind))
    return what.error;
  if (auto err = hold(injector, what, on, stream))
    return err;
  return injector.poisoned() ? fault_injector::sticky_error(testing::to_string(v), who)
                             : caf::error{};
}

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

} // namespace troupe::detail
