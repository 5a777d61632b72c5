// The agent of a host: runs workers for a parent on another host.

#include "foundation/log.hpp"
#include "foundation/option_check.hpp"
#include "foundation/peer_text.hpp"
#include "foundation/system_call.hpp"
#include "net/socket.hpp"
#include "net/tls_identity.hpp"
#include "remote/agent_worker.hpp"
#include "worker/parent/process_pool.hpp"
#include <troupe/detail/completion.hpp>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace troupe {

namespace detail {

namespace {

/// The limit of the pause between failed attempts, as a multiple of the first pause.
constexpr int longest_pause = 4;

/// One connection with the parent, and the workers that live as long as it does.
class host_agent {
public:
  host_agent(const host_agent_options& options, host_hello hello)
      : options_(options), hello_(hello) {}
  ~host_agent() { end(); }

  /// Runs until the connection is over, and returns the reason.
  caf::error serve(const std::shared_ptr<tls_context>& context);
  /// Returns whether the pool was opened.
  bool has_joined() const noexcept { return serves_; }
  /// Ends its workers.
  void end() noexcept;

private:
  caf::error connect(const std::shared_ptr<tls_context>& context);
  caf::error open_pool(const host_welcome& what);
  /// Blocks until the connection is over, and returns the reason.
  caf::error wait_end();

  // used by the connection's thread
  caf::error received(const frame_head& head, std::span<const std::byte> body);
  caf::error take_welcome(std::span<const std::byte> body);
  caf::error take_start(std::uint64_t channel, std::span<const std::byte> body);
  caf::error take_release(std::uint64_t request, std::span<const std::byte> body);
  void take_give_up(std::uint64_t channel);

  // used by a device's thread
  void start(std::uint64_t channel, const start_args& what, const std::stop_token& stop);
  caf::expected<std::shared_ptr<worker_link>> provide(const start_args& what,
                                                      const std::stop_token& stop);
  void release(std::uint64_t request, int device);

  bool is_device(int x) const noexcept { return x >= 0 && x < pool_->device_count(); }
  void answer(host_frame kind, std::uint64_t to, const caf::error& error) noexcept;

  const host_agent_options& options_;
  const host_hello hello_;
  std::string own_address_;
  std::shared_ptr<frame_link> link_;
  std::atomic<bool> serves_{false}; ///< the pool is open

  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<host_welcome> welcome_;
  std::optional<caf::error> over_;
  std::map<std::uint64_t, std::stop_source> starting_; ///< by channel
  std::map<std::uint64_t, std::shared_ptr<agent_worker>> workers_;

  std::shared_ptr<process_pool> pool_;
  std::vector<std::unique_ptr<serial_thread>> devices_; ///< start and release their workers
};

// -- life of the connection

caf::error host_agent::connect(const std::shared_ptr<tls_context>& context) {
  auto socket = connect_to_name(options_.parent, from_now(options_.connect_limit));
  if (!socket)
    return socket.error();
  auto here = own_end(*socket);
  if (!here)
    return here.error();
  own_address_ = host_text(*here);
  auto stream =
      tls_stream::create(context, std::move(*socket), options_.parent, options_.parent_name);
  if (!stream)
    return stream.error();
  frame_link::options how;
  how.most_bytes = most_frame_bytes;
  how.admission_limit =
      std::min<std::chrono::nanoseconds>(options_.connect_limit, as_good_as_never);
  frame_link::listener listener{std::bind_front(&host_agent::received, this),
                                [this](const caf::error& why) {
                                  std::lock_guard lock{mutex_};
                                  over_ = why;
                                  changed_.notify_all();
                                }};
  if (auto error = frame_link::start(link_, std::move(*stream), how, std::move(listener)))
    return error;
  return link_->send(number(host_frame::hello), 0, {bytes_of(hello_)});
}

caf::error host_agent::open_pool(const host_welcome& what) {
  worker_backend_options how;
  how.backend = what.backend;
  how.host.devices = options_.devices != 0 ? options_.devices : what.devices;
  how.host.bytes_per_device = what.bytes_per_device;
  how.host.listen_address =
      options_.listen_address.empty() ? own_address_ : options_.listen_address;
  how.cuda.keep_freed = std::chrono::milliseconds{what.keep_freed_ms};
  how.workers = options_.workers;
  if (what.spin_ns >= 0)
    how.spin = std::chrono::duration_cast<std::chrono::microseconds>(
        std::chrono::nanoseconds{what.spin_ns});
  auto pool = process_pool::create(std::move(how), false);
  if (!pool)
    return pool.error();
  pool_ = std::move(*pool);
  pool_->set_listener([to = link_](int device, std::span<const std::byte> told) {
    const std::int32_t of = device;
    // If the connection is over, everything here ends.
    static_cast<void>(
        to->send(number(host_frame::told), 0, {bytes_of(of), told}, frame_link::patience::room));
  });
  try {
    for (int i = 0; i < pool_->device_count(); ++i)
      devices_.push_back(std::make_unique<serial_thread>());
  } catch (const std::system_error& e) {
    return system_failure("pthread_create", e.code().value(), "no thread for a device");
  }
  return {};
}

caf::error host_agent::serve(const std::shared_ptr<tls_context>& context) {
  if (auto error = connect(context))
    return error;
  {
    std::unique_lock lock{mutex_};
    changed_.wait(lock, [this] { return over_ || welcome_; });
    if (over_)
      return *over_;
  }
  if (auto error = open_pool(*welcome_)) {
    link_->send_last(number(host_frame::refused), packed(std::string_view{describe(error)}).bytes(),
                     error);
    static_cast<void>(wait_end());
    return error;
  }
  serves_ = true;
  const std::int32_t devices = pool_->device_count();
  if (auto error = link_->send(number(host_frame::ready), 0, {bytes_of(devices)}))
    return error;
  log(log_level::info, "joined " + options_.parent + "; devices: " + std::to_string(devices),
      log_kind::members);
  return wait_end();
}

caf::error host_agent::wait_end() {
  std::unique_lock lock{mutex_};
  changed_.wait(lock, [this] { return over_.has_value(); });
  return *over_;
}

/// Ends the workers first, since the devices' threads may be inside calls to them.
void host_agent::end() noexcept {
  if (link_)
    link_->stop();
  const auto why = make_error(errc::unavailable, "the connection with the parent is over");
  std::map<std::uint64_t, std::stop_source> starting;
  std::map<std::uint64_t, std::shared_ptr<agent_worker>> workers;
  {
    std::lock_guard lock{mutex_};
    starting = starting_;
    workers.swap(workers_);
  }
  for (auto& [channel, x] : starting)
    x.request_stop();
  for (auto& [channel, x] : workers)
    x->link()->give_up(why);
  devices_.clear();
  {
    std::lock_guard lock{mutex_};
    workers.merge(workers_); // workers that were being started
  }
  if (pool_)
    for (int i = 0; i < pool_->device_count(); ++i)
      for (auto& link : {pool_->current(i), pool_->spare(i)})
        if (link)
          link->give_up(why);
  workers.clear();
  pool_.reset();
}

// -- received frames

caf::error host_agent::received(const frame_head& head, std::span<const std::byte> body) {
  const auto kind = static_cast<host_frame>(head.kind);
  if (kind == host_frame::welcome)
    return take_welcome(body);
  if (kind == host_frame::refused)
    return make_error(errc::unavailable, options_.parent + " refuses this host: " +
                                             peer_text(wire_reader{body}.get<std::string>()));
  if (!serves_)
    return make_error(errc::unavailable, "the parent sent an unexpected message");
  switch (kind) {
  case host_frame::start:
    return take_start(head.channel, body);
  case host_frame::release:
    return take_release(head.channel, body);
  case host_frame::give_up:
    take_give_up(head.channel);
    return {};
  default: {
    std::lock_guard lock{mutex_}; // so that it is not destroyed meanwhile, nor on this thread
    auto i = workers_.find(head.channel);
    return i != workers_.end() ? i->second->received(kind, body) : caf::error{};
  }
  }
}

caf::error host_agent::take_welcome(std::span<const std::byte> body) {
  wire_reader reader{body};
  auto what = reader.get<host_welcome>();
  if (!reader.ok() || (what.backend != "cuda" && what.backend != "host") || what.devices < 0 ||
      what.silence_limit_ns <= 0)
    return make_error(errc::unavailable, "the parent's welcome is malformed");
  std::lock_guard lock{mutex_};
  if (welcome_)
    return make_error(errc::unavailable, "the parent sent an unexpected message");
  link_->admit(std::chrono::nanoseconds{what.silence_limit_ns});
  welcome_ = std::move(what);
  changed_.notify_all();
  return {};
}

caf::error host_agent::take_start(std::uint64_t channel, std::span<const std::byte> body) {
  wire_reader reader{body};
  const auto what = reader.get<start_args>();
  if (!reader.ok() || !is_device(what.device))
    return make_error(errc::unavailable,
                      "the parent requests a worker for a device that does not exist");
  std::stop_source stop;
  {
    std::lock_guard lock{mutex_};
    if (workers_.contains(channel) || !starting_.emplace(channel, stop).second)
      return make_error(errc::unavailable, "the parent requests two workers on one channel");
  }
  devices_[static_cast<std::size_t>(what.device)]->post(
      [this, channel, what, stop] { start(channel, what, stop.get_token()); });
  return {};
}

caf::error host_agent::take_release(std::uint64_t request, std::span<const std::byte> body) {
  wire_reader reader{body};
  const auto device = reader.get<std::int32_t>();
  if (!reader.ok() || !is_device(device))
    return make_error(errc::unavailable,
                      "the parent releases a worker of a device that does not exist");
  devices_[static_cast<std::size_t>(device)]->post(
      [this, request, device] { release(request, device); });
  return {};
}

void host_agent::take_give_up(std::uint64_t channel) {
  std::stop_source starting{std::nostopstate};
  {
    std::lock_guard lock{mutex_};
    if (auto i = starting_.find(channel); i != starting_.end())
      starting = i->second;
  }
  starting.request_stop(); // without effect if it has started by now
  std::shared_ptr<agent_worker> gone;
  {
    std::lock_guard lock{mutex_};
    auto i = workers_.find(channel);
    if (i == workers_.end())
      return;
    gone = std::move(i->second);
    workers_.erase(i);
  }
  gone->link()->give_up(make_error(errc::unavailable, "the parent released the worker"));
  auto& thread = *devices_[static_cast<std::size_t>(gone->device())];
  thread.post([gone = std::move(gone)]() mutable { gone.reset(); }); // it blocks
}

// -- workers

void host_agent::answer(host_frame kind, std::uint64_t to, const caf::error& error) noexcept {
  // If the connection is over, everything here ends.
  static_cast<void>(link_->send(number(kind), to, {packed(error).bytes()}));
}

caf::expected<std::shared_ptr<worker_link>> host_agent::provide(const start_args& what,
                                                                const std::stop_token& stop) {
  auto now = pool_->provide(what.device, stop); // the former spare may be the device's worker now
  if (what.spare == 0 || !now)
    return now;
  if (auto error = pool_->provide_spare(what.device, stop))
    return error;
  auto spare = pool_->spare(what.device);
  if (!spare)
    return make_error(errc::unavailable, "the spare ended right after its start");
  return spare;
}

void host_agent::start(std::uint64_t channel, const start_args& what, const std::stop_token& stop) {
  auto link = provide(what, stop);
  std::shared_ptr<agent_worker> worker;
  try {
    if (link)
      worker = std::make_shared<agent_worker>(channel, what.device, *link, link_);
  } catch (const std::system_error& e) {
    const auto why = system_failure("pthread_create", e.code().value(), "no thread for a worker");
    (*link)->give_up(why);
    link = why;
  }
  caf::error error;
  bool unwanted = false;
  {
    std::lock_guard lock{mutex_};
    starting_.erase(channel);
    if (!link)
      error = link.error();
    else if (std::ranges::any_of(workers_,
                                 [&](const auto& x) { return x.second->link() == *link; }))
      error = make_error(errc::unavailable, "the device has a worker already");
    else if ((unwanted = stop.stop_requested()))
      error = make_error(errc::unavailable, "the parent released the worker");
    else
      workers_.emplace(channel, worker);
  }
  if (unwanted)
    (*link)->give_up(error);
  answer(host_frame::started, channel, error);
  if (!error)
    worker->begin(); // now, since the parent must hear of the start before a loss
}

void host_agent::release(std::uint64_t request, int device) {
  std::vector<std::shared_ptr<agent_worker>> gone;
  {
    std::lock_guard lock{mutex_};
    std::erase_if(workers_, [&](auto& x) {
      return x.second->device() == device && (gone.push_back(std::move(x.second)), true);
    });
  }
  gone.clear(); // no thread writes to them any more
  pool_->release(device);
  answer(host_frame::released, request, {});
}

/// `wanted`: the name of this host; empty: the first of the `names` in its certificate.
caf::expected<host_hello> hello_of(const std::string& wanted,
                                   const std::vector<std::string>& names) {
  if (names.empty())
    return make_error(errc::invalid_argument, "the certificate of this host has no name");
  auto result = make_host_hello(wanted.empty() ? names.front() : wanted);
  if (result && !wanted.empty() && std::ranges::find(names, wanted) == names.end())
    return make_error(errc::invalid_argument, "the certificate of this host is not for " + wanted +
                                                  ": its first name is " + names.front());
  return result;
}

} // namespace

} // namespace detail

caf::error run_host_agent(host_agent_options options) {
  if (auto error = detail::check_name(options.parent))
    return error;
  if (options.parent_name.empty())
    options.parent_name = detail::host_in(options.parent);
  if (!options.listen_address.empty())
    if (auto address = detail::address_from_string(options.listen_address); !address)
      return address.error();
  if (auto error = detail::check_option("host_agent_options::devices", options.devices, 0,
                                        detail::most_virtual_devices))
    return error;
  for (auto [name, limit] : {std::pair{"host_agent_options::connect_limit", options.connect_limit},
                             std::pair{"host_agent_options::retry_pause", options.retry_pause}})
    if (auto error = detail::check_positive(name, limit))
      return error;
  auto identity = detail::tls_identity::create(options.identity, detail::tls_context::side::agent);
  if (!identity)
    return identity.error();
  if (auto hello = detail::hello_of(options.name, (*identity)->current()->names()); !hello)
    return hello.error();
  const auto first_pause =
      std::min<std::chrono::nanoseconds>(options.retry_pause, detail::as_good_as_never);
  std::chrono::nanoseconds pause = first_pause;
  for (std::string told;;) {
    const auto context = (*identity)->current();
    const auto hello = detail::hello_of(options.name, context->names());
    detail::host_agent agent{options, hello ? *hello : detail::host_hello{}};
    const auto why = hello ? agent.serve(context) : hello.error();
    if (auto text = describe(why); text != told) { // the same reason is logged once
      detail::log(log_level::warning, "could not join " + options.parent + "; trying again", why,
                  detail::log_kind::members);
      told = std::move(text);
    }
    if (agent.has_joined())
      pause = first_pause;
    agent.end();
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, detail::longest_pause * first_pause);
  }
}

} // namespace troupe
