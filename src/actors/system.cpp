#include "actors/system.hpp"

#include "actors/answer_spinner.hpp"
#include "actors/rank_programs.hpp"
#include "actors/spawn.hpp"
#include "core/log.hpp"
#include <troupe/request.hpp>

#include <caf/all.hpp>

#include <algorithm>
#include <climits>
#include <sstream>
#include <utility>

namespace troupe::detail {

log_level level_without_cuda(const caf::error& why) {
  // A worker's reason comes as its text.
  const auto text = describe(why);
  for (auto* nothing :
       {"built without CUDA", "cudaErrorNoDevice", "there is no driver", "the machine has no GPU"})
    if (text.find(nothing) != std::string::npos)
      return log_level::info;
  return log_level::warning;
}

system_lease::~system_lease() { caf::anon_send_exit(root, caf::exit_reason::user_shutdown); }

system_core::~system_core() {
  if (runtime_)
    runtime_->close();
}

caf::expected<system_core*> system_core::of(caf::actor_system& sys) {
  auto* cfg = dynamic_cast<const config*>(&sys.config());
  if (cfg == nullptr)
    return make_error(errc::invalid_argument,
                      "the actor system's configuration is no troupe::config");
  return &cfg->core();
}

void system_core::use_backend(std::shared_ptr<backend> backend) {
  std::lock_guard lock{mutex_};
  backend_ = std::move(backend);
}

std::string system_core::reason() {
  std::lock_guard lock{mutex_};
  return reason_;
}

caf::expected<placement> system_core::wanted_placement() const {
  auto& name = config_.placement_name_;
  if (name.empty())
    return config_.placement;
  if (name == "in_process")
    return placement::in_process;
  if (name == "worker")
    return placement::worker_process;
  return make_error(errc::invalid_argument,
                    "troupe.placement is in_process or worker, not " + name);
}

/// What the options say beside what the program has set.
caf::expected<remote_hosts> system_core::wanted_hosts() const {
  auto result = config_.hosts;
  if (config_.hosts_port_ > UINT16_MAX)
    return make_error(errc::invalid_argument,
                      "troupe.hosts.port is no port: " + std::to_string(config_.hosts_port_));
  if (config_.hosts_port_ != 0)
    result.port = static_cast<std::uint16_t>(config_.hosts_port_);
  if (config_.hosts_count_ != 0)
    result.count = static_cast<int>(std::min<std::size_t>(config_.hosts_count_, INT_MAX));
  if (config_.hosts_join_s_ != 0)
    result.join_limit = std::chrono::seconds{config_.hosts_join_s_};
  if (config_.hosts_link_ms_ != 0)
    result.link_limit = std::chrono::milliseconds{config_.hosts_link_ms_};
  if (!config_.hosts_names_.empty()) {
    result.names.clear();
    std::istringstream names{config_.hosts_names_};
    for (std::string name; std::getline(names, name, ',');)
      result.names.push_back(std::move(name));
  }
  return result;
}

std::optional<std::chrono::microseconds> system_core::wanted_spin() const {
  if (config_.spin_us_ >= 0)
    return std::chrono::microseconds{config_.spin_us_};
  return config_.lanes.spin;
}

caf::error system_core::choose_backend(caf::error& without_cuda) {
  auto& wanted = config_.backend_name_;
  if (wanted != "auto" && wanted != "cuda" && wanted != "host")
    return make_error(errc::invalid_argument,
                      "troupe.backend is auto, cuda or host, not " + wanted);
  auto where = wanted_placement();
  if (!where)
    return where.error();
  auto hosts = wanted_hosts();
  if (!hosts)
    return hosts.error();
  const bool alone = hosts->listen_address.empty();
  if (!alone && *where != placement::worker_process)
    return make_error(errc::invalid_argument,
                      "other hosts join only where devices live in workers (troupe.placement)");
  auto host = config_.host;
  if (config_.host_devices_ != 0)
    host.devices = static_cast<int>(config_.host_devices_);
  auto make = [&](const char* name) -> caf::expected<std::shared_ptr<backend>> {
    if (*where == placement::worker_process)
      return make_worker_backend({.backend = name,
                                  .host = host,
                                  .workers = config_.workers,
                                  .spin = wanted_spin(),
                                  .hosts = *hosts});
    if (std::string_view{name} == "host")
      return make_host_backend(host);
    auto cuda = make_cuda_backend();
    if (cuda && (*cuda)->device_count() == 0)
      return make_error(errc::unavailable, "the machine has no GPU");
    return cuda;
  };
  if (wanted != "host") {
    auto cuda = make("cuda");
    if (cuda) {
      backend_ = std::move(*cuda);
      return {};
    }
    if (wanted == "cuda" || !alone) // nobody lends virtual devices
      return cuda.error();
    reason_ = describe(cuda.error());
    without_cuda = cuda.error();
  }
  auto made = make("host");
  if (!made)
    return made.error();
  backend_ = std::move(*made);
  return {};
}

caf::expected<std::shared_ptr<runtime>> system_core::runtime() {
  std::unique_lock lock{mutex_};
  if (runtime_)
    return runtime_;
  auto options = config_.lanes;
  options.spin = wanted_spin();
  if (config_.client_spin_us_ >= 0)
    options.client_spin = std::chrono::microseconds{config_.client_spin_us_};
  if (config_.completion_ == "host_func")
    options.completion = completion_strategy::host_func;
  else if (config_.completion_ == "synchronize")
    options.completion = completion_strategy::synchronize;
  else if (config_.completion_ != "event_poll")
    return make_error(errc::invalid_argument,
                      "troupe.completion is event_poll, host_func or synchronize, not " +
                          config_.completion_);
  if (config_.in_flight_ != 0)
    options.in_flight_limit = config_.in_flight_;
  if (config_.queue_ != 0)
    options.queue_limit = config_.queue_;
  caf::error without_cuda;
  if (!backend_)
    if (auto error = choose_backend(without_cuda); error)
      return error;
  runtime_ = std::make_shared<detail::runtime>(backend_, options, config_.flight_record);
  auto result = runtime_;
  lock.unlock(); // a sink may ask for the devices
  if (without_cuda)
    log(level_without_cuda(without_cuda),
        "virtual devices compute in place of CUDA's: " + describe(without_cuda));
  return result;
}

std::shared_ptr<program_board> system_core::programs() {
  std::lock_guard lock{mutex_};
  if (!programs_) {
    programs_ = std::make_shared<program_board>();
    listen(*runtime_, programs_);
  }
  return programs_;
}

answer_spinner& system_core::spinner(caf::actor_system& sys) {
  std::call_once(spinner_made_, [&] { spinner_ = std::make_shared<answer_spinner>(sys); });
  return *spinner_;
}

namespace {
thread_local bool is_pool_worker = false;
}

answer_spinner* find_spinner(caf::actor_system& sys) {
  if (!is_pool_worker)
    return nullptr;
  auto core = system_core::of(sys);
  return core ? &(*core)->spinner(sys) : nullptr;
}

caf::expected<std::shared_ptr<system_lease>> system_core::lease(caf::actor_system& sys) {
  auto owner = runtime();
  if (!owner)
    return owner.error();
  std::lock_guard lock{mutex_};
  auto result = lease_.lock();
  if (!result) {
    result = std::make_shared<system_lease>(sys, spawn_devices(sys, *owner));
    lease_ = result;
  }
  return result;
}

} // namespace troupe::detail

namespace troupe {

namespace {

struct pool_thread_hook : detail::thread_start_hook<void (*)(bool)> {
  pool_thread_hook()
      : thread_start_hook{[](bool is_of_pool) {
          detail::is_pool_worker = is_of_pool;
          if (is_of_pool)
            detail::forbid_blocking("a worker of CAF's pool");
        }} {}
};

std::size_t pool_threads() {
  return std::clamp<std::size_t>(std::thread::hardware_concurrency() / 4, 2, 4);
}

} // namespace

config::config() : core_(std::make_unique<detail::system_core>(*this)) {
  detail::register_types(*this);
  caf_option("scheduler.policy", std::string{"sharing"});
  caf_option("scheduler.max-threads", pool_threads());
  add_thread_hook<pool_thread_hook>();
  opt_group{custom_options_, "troupe"}
      .add(backend_name_, "backend", "auto, cuda or host")
      .add(placement_name_, "placement", "where devices live: in_process or worker")
      .add(workers.program, "worker", "the workers' program")
      .add(host_devices_, "devices", "number of virtual devices of the host backend")
      .add(completion_, "completion", "event_poll, host_func or synchronize")
      .add(in_flight_, "in-flight", "operations that a device may have in its streams")
      .add(queue_, "queue", "operations that may wait for a device")
      .add(spin_us_, "spin", "how long a lane spins after its last work, in microseconds")
      .add(client_spin_us_, "client-spin", "how long a client that waits spins, in microseconds")
      .add(flight_record.path, "flight-record",
           "file for the last operations when something fails");
  opt_group{custom_options_, "troupe.hosts"}
      .add(hosts.listen_address, "listen", "address at which other hosts join")
      .add(hosts_port_, "port", "the port there")
      .add(hosts.identity.certificate, "certificate", "file of this program's certificate")
      .add(hosts.identity.key, "key", "file of its key")
      .add(hosts.identity.authority, "authority", "file of the fleet's authority")
      .add(hosts_count_, "count", "hosts to wait for")
      .add(hosts_names_, "names", "their names, in the order of their devices")
      .add(hosts_join_s_, "join-limit", "how long they are waited for, in seconds")
      .add(hosts_link_ms_, "link-limit", "how long a connection may be silent, in milliseconds");
}

config::~config() = default;

bool config::help_printed() const noexcept { return detail::has_printed_help(*this); }

void config::use_backend(std::shared_ptr<backend> backend) {
  core_->use_backend(std::move(backend));
}

} // namespace troupe
