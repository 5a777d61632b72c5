#include "remote/host_pool.hpp"

#include "foundation/fair_limit.hpp"
#include "foundation/log.hpp"
#include "foundation/option_check.hpp"
#include "remote/host_gate.hpp"
#include "worker/parent/process_pool.hpp"
#include "worker/parent/worker_slot.hpp"
#include <troupe/detail/completion.hpp>
#include <troupe/detail/user_call.hpp>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

namespace troupe::detail {

namespace {

using clock = std::chrono::steady_clock;

/// A host that is lost sooner than this, or has started no worker, has failed.
constexpr std::chrono::seconds long_life{10};
/// The pause after the second failure in a row. Each next pause is four times as long, up to
/// `remote_hosts::rejoin_limit`. So a host that fails again and again uses up no world's restarts.
constexpr std::chrono::milliseconds first_pause{100};

/// A host, connected or not.
struct member {
  std::string name;
  int devices = 0;                   ///< set when it joins first
  int first = 0;                     ///< ordinal of its first device
  std::shared_ptr<host_session> now; ///< null: not connected
  clock::time_point joined_at{};
  bool has_served = false;       ///< it has started a worker since it joined
  int failures = 0;              ///< in a row
  clock::time_point used_from{}; ///< until then no worker is started there
};

class host_pool final : public worker_pool, public std::enable_shared_from_this<host_pool> {
public:
  host_pool(worker_backend_options options, std::shared_ptr<process_pool> local)
      : worker_pool(local ? local->shared() : std::make_shared<shared_segments>(),
                    options.cuda.keep_freed),
        options_(std::move(options)), local_(std::move(local)),
        local_devices_(local_ ? local_->device_count() : 0) {}
  ~host_pool() override;
  /// Listens, and blocks until all hosts have joined.
  caf::error open();

  int device_count() const noexcept override {
    return local_devices_ + static_cast<int>(slots_.size());
  }
  caf::expected<std::shared_ptr<worker_link>>
  provide(int ordinal, const std::stop_token& stop = {}) noexcept override;
  std::shared_ptr<worker_link> current(int ordinal) const noexcept override;
  caf::error provide_spare(int ordinal, const std::stop_token& stop = {}) noexcept override;
  std::shared_ptr<worker_link> spare(int ordinal) const noexcept override;
  bool reaches(int from, int to) const noexcept override {
    return local_ && is_local(from) && is_local(to) && local_->reaches(from, to);
  }
  /// @errors also errc::not_supported: the device is on another host
  caf::error move_to_spare(int ordinal, const worker_link& spare) noexcept override {
    return is_local(ordinal) ? local_->move_to_spare(ordinal, spare)
                             : worker_pool::move_to_spare(ordinal, spare);
  }
  void release(int ordinal) noexcept override;
  device_place place_of(int ordinal) const override;

private:
  struct running {
    std::shared_ptr<worker_link> link;
    std::shared_ptr<worker_relay> relay;
  };
  struct slot {
    member* host = nullptr;
    int device = 0;
    worker_slot<running> workers;
  };

  caf::expected<host_welcome> greet(host_session& who, const std::string& name);
  host_session::limits limits() const;
  caf::error join(host_session& who, int devices);
  void leave(host_session& who, const caf::error& why);
  void hear(host_session& who, int device, std::span<const std::byte> what);
  caf::error wait_for_all();
  std::string missing_hosts() const;
  /// Returns null if the host is not connected.
  std::shared_ptr<host_session> session_of(const member& host);
  /// Returns null if the host does not connect in time, or `stop` is requested.
  std::shared_ptr<host_session> wait_for(const member& host, const std::stop_token& stop);
  /// Notes that the host is lost. Returns how it goes on, for the log. Needs `mutex_`.
  std::string note_loss(member& host) const;

  bool is_local(int ordinal) const noexcept { return ordinal < local_devices_; }
  slot& slot_of(int ordinal) const noexcept {
    return *slots_[static_cast<std::size_t>(ordinal - local_devices_)];
  }
  caf::expected<running> start(slot& here, int ordinal, bool spare, const std::stop_token& stop);
  caf::expected<running> start_at(host_session& host, const slot& here, int ordinal, bool spare,
                                  const std::stop_token& stop);
  void end(const running& x, const caf::error& why) noexcept;
  void end_all(const std::vector<running>& lost) noexcept;

  const worker_backend_options options_;
  const std::shared_ptr<process_pool> local_;
  const int local_devices_;
  std::vector<std::unique_ptr<slot>> slots_; ///< filled once all hosts have joined

  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::map<std::string, member> members_;
  std::map<std::string, host_session*> greeted_; ///< by name: agents that have not joined yet
  bool complete_ = false;                        ///< no other host may join
  bool closing_ = false;

  std::unique_ptr<host_gate> gate_; ///< calls the functions above
};

caf::error check(remote_hosts& x) {
  if (!x.names.empty()) {
    auto sorted = x.names;
    std::ranges::sort(sorted);
    if (const auto twice = std::ranges::adjacent_find(sorted); twice != sorted.end())
      return make_error(errc::invalid_argument, "a host is listed twice: " + *twice);
    for (auto& name : x.names)
      if (auto hello = make_host_hello(name); !hello)
        return hello.error();
    if (x.count != 0 && x.count != static_cast<int>(x.names.size()))
      return make_error(errc::invalid_argument,
                        "remote_hosts::count=" + std::to_string(x.count) + " and " +
                            std::to_string(x.names.size()) +
                            " names: omit the count, or give as many names");
    x.count = static_cast<int>(x.names.size());
  }
  if (x.count <= 0)
    return make_error(errc::invalid_argument, "remote_hosts::count=" + std::to_string(x.count) +
                                                  ": set troupe.hosts.count or troupe.hosts.names");
  for (auto [name, limit] : {std::pair{"remote_hosts::join_limit", x.join_limit},
                             std::pair{"remote_hosts::link_limit", x.link_limit},
                             std::pair{"remote_hosts::rejoin_limit", x.rejoin_limit}})
    if (auto error = check_positive(name, limit))
      return error;
  return {};
}

caf::error host_pool::open() {
  auto& hosts = options_.hosts;
  if (local_)
    local_->set_listener([weak = weak_from_this()](int ordinal, std::span<const std::byte> what) {
      if (auto self = weak.lock())
        self->told(ordinal, what);
    });
  auto gate = host_gate::start(hosts, limits(),
                               {.greet = std::bind_front(&host_pool::greet, this),
                                .joined = std::bind_front(&host_pool::join, this),
                                .told = std::bind_front(&host_pool::hear, this),
                                .ended = std::bind_front(&host_pool::leave, this)});
  if (!gate)
    return gate.error();
  {
    std::lock_guard lock{mutex_};
    gate_ = std::move(*gate);
  }
  log(log_level::info,
      "hosts can join at " + hosts.listen_address + ", port " + std::to_string(gate_->port()));
  if (hosts.on_listening)
    if (auto error = call_user(errc::unavailable, "remote_hosts::on_listening",
                               [&] { hosts.on_listening(gate_->port()); }))
      return error;
  return wait_for_all();
}

host_pool::~host_pool() {
  for (int i = local_devices_; i < device_count(); ++i)
    release(i);
  {
    std::lock_guard lock{mutex_};
    closing_ = true;
  }
  gate_.reset();
}

// -- members

/// A host that keeps to the same limits answers before these are over.
host_session::limits host_pool::limits() const {
  const auto longer = [&](std::chrono::nanoseconds x) {
    constexpr std::chrono::nanoseconds most = as_good_as_never;
    return std::min(x, most) + 2 * std::min(options_.hosts.link_limit, most); // there and back
  };
  const auto& workers = options_.workers;
  return {.join = longer(workers.start_limit),
          .start = longer(workers.start_limit),
          .release = longer(std::max(workers.start_limit, workers.call_limit)),
          .request =
              workers.call_limit.count() == 0 ? workers.call_limit : longer(workers.call_limit)};
}

caf::expected<host_welcome> host_pool::greet(host_session& who, const std::string& name) {
  auto& hosts = options_.hosts;
  std::lock_guard lock{mutex_};
  auto known = members_.find(name);
  if (known != members_.end() && known->second.now != nullptr)
    return make_error(errc::unavailable, "a host named " + name + " has already joined");
  if (!hosts.names.empty() && std::ranges::find(hosts.names, name) == hosts.names.end())
    return make_error(errc::unavailable, "no host named " + name + " is expected");
  if (known == members_.end() &&
      (complete_ || members_.size() >= static_cast<std::size_t>(hosts.count)))
    return make_error(errc::unavailable,
                      "all expected hosts have joined, and " + name + " is not one of them");
  constexpr std::size_t more_than_expected = 8;
  if (!greeted_.contains(name) &&
      greeted_.size() >= static_cast<std::size_t>(hosts.count) + more_than_expected)
    return make_error(errc::unavailable,
                      "too many hosts are joining: " + std::to_string(greeted_.size()) + ", of " +
                          std::to_string(hosts.count) + " that are expected");
  host_welcome result;
  result.backend = options_.backend;
  result.devices = options_.host.devices;
  result.bytes_per_device = options_.host.bytes_per_device;
  if (options_.spin)
    result.spin_ns = std::chrono::nanoseconds{*options_.spin}.count();
  result.silence_limit_ns = hosts.link_limit.count();
  result.keep_freed_ms = options_.cuda.keep_freed.count();
  // One at a time for each name: an agent that has started anew need not wait for the old one.
  if (auto before = std::exchange(greeted_[name], &who); before != nullptr)
    before->end(make_error(errc::unavailable, "another agent named " + name + " is joining"));
  return result;
}

caf::error host_pool::join(host_session& who, int devices) {
  {
    std::lock_guard lock{mutex_};
    if (auto i = greeted_.find(who.name()); i != greeted_.end() && i->second == &who)
      greeted_.erase(i);
    auto known = members_.find(who.name());
    if (known == members_.end()) { // else it joins again, or its name is in use
      if (complete_ || members_.size() >= static_cast<std::size_t>(options_.hosts.count))
        return make_error(errc::unavailable, "all expected hosts have joined");
      known = members_.emplace(who.name(), member{who.name(), devices}).first;
    }
    auto& x = known->second;
    if (x.now != nullptr)
      return make_error(errc::unavailable, "a host named " + x.name + " has already joined");
    if (!complete_)
      x.devices = devices;
    else if (devices < x.devices)
      return make_error(errc::unavailable, "the host " + x.name + " had " +
                                               std::to_string(x.devices) + " devices, and has " +
                                               std::to_string(devices) + " now");
    x.now = who.shared_from_this();
    x.joined_at = clock::now();
    x.has_served = false;
  }
  changed_.notify_all();
  log(log_level::info,
      "the host " + who.name() + " has joined; its devices: " + std::to_string(devices),
      log_kind::members);
  return {};
}

std::string host_pool::note_loss(member& host) const {
  const auto now = clock::now();
  host.now = nullptr; // not the last owner: the gate keeps it until its thread has ended
  host.failures = host.has_served && now - host.joined_at >= long_life ? 0 : host.failures + 1;
  if (host.failures < 2)
    return {};
  std::chrono::nanoseconds pause = first_pause;
  for (int i = 2; i < host.failures && pause < options_.hosts.rejoin_limit; ++i)
    pause *= 4;
  pause = std::min(pause, options_.hosts.rejoin_limit);
  host.used_from = now + pause;
  return "; the host has failed " + std::to_string(host.failures) +
         " times in a row, and is used again after " + text_of(pause);
}

void host_pool::leave(host_session& who, const caf::error& why) {
  std::string how_it_goes_on;
  {
    std::lock_guard lock{mutex_};
    std::erase_if(greeted_, [&](auto& x) { return x.second == &who; });
    for (auto& [name, x] : members_)
      if (x.now.get() == &who)
        how_it_goes_on = note_loss(x);
    if (closing_)
      return;
  }
  log(log_level::warning, "a connection with a host is over" + how_it_goes_on, why,
      who.kind_of_line());
}

void host_pool::hear(host_session& who, int device, std::span<const std::byte> what) {
  int first = 0;
  {
    std::lock_guard lock{mutex_};
    auto x = members_.find(who.name());
    if (!complete_ || x == members_.end() || x->second.now.get() != &who || device < 0 ||
        device >= x->second.devices)
      return;
    first = x->second.first;
  }
  told(first + device, what);
}

/// Returns the text for hosts that did not join: their names, or how many joined. Needs `mutex_`.
std::string host_pool::missing_hosts() const {
  const auto& hosts = options_.hosts;
  const auto limit = " within " + text_of(hosts.join_limit);
  std::string names;
  std::size_t number = 0;
  for (auto& name : hosts.names)
    if (auto x = members_.find(name); x == members_.end() || x->second.now == nullptr)
      names += (number++ == 0 ? "" : ", ") + name;
  if (!hosts.names.empty())
    return (number == 1 ? "host " : "hosts ") + names + " did not join" + limit;
  for (auto& [name, x] : members_)
    if (x.now != nullptr)
      names += (number++ == 0 ? ": " : ", ") + name;
  return std::to_string(number) + " of " + std::to_string(hosts.count) + " hosts joined" + limit +
         names;
}

caf::error host_pool::wait_for_all() {
  auto& hosts = options_.hosts;
  std::unique_lock lock{mutex_};
  auto all_there = [&] {
    return std::ranges::count_if(members_, [](auto& x) { return x.second.now != nullptr; }) ==
           hosts.count;
  };
  for (fair_limit limit{hosts.join_limit}; !changed_.wait_until(lock, limit.next(), all_there);) {
    if (hosts.stop.stop_requested())
      return make_error(errc::cancelled, "the wait for hosts was ended by remote_hosts::stop");
    if (limit.over() && !all_there())
      return make_error(errc::unavailable, missing_hosts());
  }
  complete_ = true;
  auto order = hosts.names;
  if (order.empty())
    for (auto& [name, x] : members_)
      order.push_back(name);
  for (auto& name : order) {
    auto& x = members_.at(name);
    x.first = device_count();
    for (int i = 0; i < x.devices; ++i) {
      auto& here = *slots_.emplace_back(std::make_unique<slot>());
      here.host = &x;
      here.device = i;
    }
  }
  return {};
}

std::shared_ptr<host_session> host_pool::session_of(const member& host) {
  std::lock_guard lock{mutex_};
  return host.now;
}

std::shared_ptr<host_session> host_pool::wait_for(const member& host, const std::stop_token& stop) {
  fair_limit limit{options_.hosts.rejoin_limit};
  std::unique_lock lock{mutex_};
  const auto usable = [&] { return host.now != nullptr && clock::now() >= host.used_from; };
  while (!changed_.wait_until(lock, stop, limit.next(), usable)) {
    const bool over = limit.over();
    if (stop.stop_requested() || (over && host.now == nullptr)) // else its pause will be over
      return nullptr;
  }
  return host.now; // if it ends meanwhile, its calls fail
}

device_place host_pool::place_of(int ordinal) const {
  if (is_local(ordinal))
    return {{}, ordinal};
  const auto& here = slot_of(ordinal);
  return {here.host->name, here.device};
}

// -- workers

void host_pool::end(const running& x, const caf::error& why) noexcept {
  if (!x.relay)
    return;
  x.relay->end(why); // first: streams that wait for its words see that they are over
  static_cast<void>(segments().remove(x.relay->memory().bytes().data())); // may not be registered
}

void host_pool::end_all(const std::vector<running>& lost) noexcept {
  for (auto& x : lost)
    end(x, x.link->loss());
}

/// A host that is lost meanwhile is waited for and tried again, as one that was not there.
caf::expected<host_pool::running> host_pool::start(slot& here, int ordinal, bool spare,
                                                   const std::stop_token& stop) {
  const auto until = clock::now() + std::min<std::chrono::nanoseconds>(options_.hosts.rejoin_limit,
                                                                       as_good_as_never);
  while (true) {
    const auto session = wait_for(*here.host, stop);
    if (!session)
      return make_error(errc::unavailable, "the host " + here.host->name + " has not joined");
    auto result = start_at(*session, here, ordinal, spare, stop);
    if (result || !session->is_over() || stop.stop_requested() || clock::now() >= until)
      return result;
  }
}

caf::expected<host_pool::running> host_pool::start_at(host_session& host, const slot& here,
                                                      int ordinal, bool spare,
                                                      const std::stop_token& stop) {
  auto relay = host.start_worker(here.device, ordinal, spare, stop);
  // No other thread has the link yet. A host that cannot even do this is found here.
  auto error = relay ? (*relay)->link()->run(command::bind) : relay.error();
  if (error)
    return make_error(errc::unavailable,
                      "the host " + here.host->name + " starts no worker: " + describe(error));
  {
    std::lock_guard lock{mutex_};
    here.host->has_served = true;
  }
  const auto& memory = (*relay)->memory();
  segments().add(memory.bytes(), memory.descriptor(), *relay);
  return running{(*relay)->link(), *relay};
}

caf::expected<std::shared_ptr<worker_link>>
host_pool::provide(int ordinal, const std::stop_token& stop) noexcept {
  if (is_local(ordinal))
    return local_->provide(ordinal, stop);
  auto& here = slot_of(ordinal);
  return here.workers.provide(
      [&](const std::stop_token& stopped) { return start(here, ordinal, false, stopped); },
      [this](const std::vector<running>& lost) { end_all(lost); }, stop);
}

std::shared_ptr<worker_link> host_pool::current(int ordinal) const noexcept {
  return is_local(ordinal) ? local_->current(ordinal) : slot_of(ordinal).workers.current();
}

caf::error host_pool::provide_spare(int ordinal, const std::stop_token& stop) noexcept {
  if (is_local(ordinal))
    return local_->provide_spare(ordinal, stop);
  auto& here = slot_of(ordinal);
  return here.workers.provide_spare(
      [&](const std::stop_token& stopped) { return start(here, ordinal, true, stopped); },
      [this](const std::vector<running>& lost) { end_all(lost); }, stop);
}

std::shared_ptr<worker_link> host_pool::spare(int ordinal) const noexcept {
  return is_local(ordinal) ? local_->spare(ordinal) : slot_of(ordinal).workers.spare();
}

void host_pool::release(int ordinal) noexcept {
  if (is_local(ordinal))
    return local_->release(ordinal);
  auto& here = slot_of(ordinal);
  here.workers.release(
      [&](const running& now, const running& spare, const std::vector<running>& lost) {
        end_all(lost);
        if (now.relay || spare.relay)
          if (auto session = session_of(*here.host)) // else it has no workers left
            session->release(here.device);
        end(spare, make_error(errc::unavailable, "the device's spare is not needed any more"));
        end(now, make_error(errc::unavailable, "the device's worker was stopped"));
      });
}

} // namespace

caf::expected<std::shared_ptr<worker_pool>> make_host_pool(worker_backend_options options) {
  if (auto error = check(options.hosts))
    return error;
  // Ranks of this host must be reachable from other hosts.
  if (options.host.listen_address.empty())
    options.host.listen_address = options.hosts.listen_address;
  std::shared_ptr<process_pool> local;
  if (options.hosts.with_local) {
    auto made = process_pool::create(options);
    if (!made)
      return made.error();
    local = std::move(*made);
  }
  auto result = std::make_shared<host_pool>(std::move(options), std::move(local));
  if (auto error = result->open())
    return error;
  return std::shared_ptr<worker_pool>{std::move(result)};
}

} // namespace troupe::detail
