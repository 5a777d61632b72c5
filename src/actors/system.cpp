#include "actors/system.hpp"

#include "actors/answer_spinner.hpp"
#include "actors/rank_programs.hpp"
#include "device/make_runtime.hpp"
#include "foundation/log.hpp"
#include "foundation/option_check.hpp"
#include "foundation/system_call.hpp"
#include "worker/protocol/worker_parent.hpp"
#include <troupe/request.hpp>

#include <caf/all.hpp>

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <sstream>
#include <string_view>
#include <system_error>

namespace troupe::detail {

log_level level_without_cuda(const caf::error& why) {
  // The reason from a worker comes as text only.
  const auto text = describe(why);
  for (auto* nothing :
       {"built without CUDA", "cudaErrorNoDevice", "there is no driver", "the machine has no GPU"})
    if (text.find(nothing) != std::string::npos)
      return log_level::info;
  return log_level::warning;
}

struct system_lease::held {
  held(std::shared_ptr<system_lease> of, std::pair<std::string, lease_holder> by)
      : lease(std::move(of)) {
    std::lock_guard lock{lease->mutex_};
    place = lease->holders_.insert(std::move(by));
  }
  ~held() {
    std::lock_guard lock{lease->mutex_};
    lease->holders_.erase(place);
  }
  held(const held&) = delete;
  held& operator=(const held&) = delete;

  const std::shared_ptr<system_lease> lease;
  decltype(holders_)::iterator place;
};

system_lease::~system_lease() { caf::anon_send_exit(root, caf::exit_reason::user_shutdown); }

std::shared_ptr<system_lease> system_lease::held_by(std::string what, lease_holder how) {
  auto result = std::make_shared<held>(shared_from_this(), std::pair{std::move(what), how});
  return {std::move(result), this};
}

std::vector<std::string> system_lease::holders() const {
  std::vector<std::string> result;
  std::lock_guard lock{mutex_};
  for (auto i = holders_.begin(); i != holders_.end();) {
    // If a handle exists, only it is named: the actor of a world or topology ends with the handle.
    auto& [what, how] = *i;
    result.push_back(what + (how == lease_holder::handle
                                 ? ": a handle of it is still held"
                                 : ": `shutdown` was not sent to its actor"));
    i = std::find_if(i, holders_.end(), [&](auto& x) { return x.first != what; });
  }
  return result;
}

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
  failure_ = {};
}

std::string system_core::reason() {
  std::lock_guard lock{mutex_};
  return reason_;
}

namespace {

constexpr std::int64_t most_hosts = 1024;
constexpr std::int64_t most_join_s = 365 * 24 * 3600;
constexpr std::int64_t most_link_ms = 24 * 3600 * 1000;

caf::error check_name(std::string_view option, const std::string& value,
                      std::initializer_list<std::string_view> known) {
  if (std::find(known.begin(), known.end(), value) != known.end())
    return {};
  std::string text;
  for (auto x : known)
    text += (text.empty() ? "" : x == *(known.end() - 1) ? " or " : ", ") + std::string{x};
  return make_error(errc::invalid_argument, std::string{option} + " is " + text + ", not " + value);
}

} // namespace

caf::error system_core::check_names() const {
  if (auto error = check_name("troupe.backend", config_.backend_name_, {"auto", "cuda", "host"}))
    return error;
  if (!config_.placement_name_.empty())
    if (auto error =
            check_name("troupe.placement", config_.placement_name_, {"in_process", "worker"}))
      return error;
  return check_name("troupe.completion", config_.completion_,
                    {"event_poll", "host_func", "synchronize"});
}

caf::error system_core::check_numbers() const {
  struct number {
    const char* name;
    std::int64_t value;
    std::int64_t least;
    std::int64_t most;
  };
  constexpr auto endless = std::numeric_limits<std::int64_t>::max();
  for (auto& x : {
           number{"troupe.devices", config_.host_devices_, 1, most_virtual_devices},
           number{"troupe.keep-freed", config_.keep_freed_ms_, -1, longest_keep.count()},
           number{"troupe.in-flight", config_.in_flight_, 1, most_in_flight},
           number{"troupe.queue", config_.queue_, 1, endless},
           number{"troupe.spin", config_.spin_us_, 0, longest_spin.count()},
           number{"troupe.client-spin", config_.client_spin_us_, 0, longest_spin.count()},
           number{"troupe.hosts.port", config_.hosts_port_, 0, UINT16_MAX},
           number{"troupe.hosts.count", config_.hosts_count_, 1, most_hosts},
           number{"troupe.hosts.join-limit", config_.hosts_join_s_, 1, most_join_s},
           number{"troupe.hosts.link-limit", config_.hosts_link_ms_, 1, most_link_ms},
       }) {
    if (x.value == config::not_given)
      continue;
    auto error = x.most == endless ? check_at_least(x.name, x.value, x.least)
                                   : check_option(x.name, x.value, x.least, x.most);
    if (error)
      return error;
  }
  return {};
}

/// Refuses options that have no effect on the chosen backend.
caf::error system_core::check_effects() const {
  if (config_.host_devices_ != config::not_given && config_.backend_name_ == "cuda")
    return make_error(errc::invalid_argument,
                      "troupe.devices=" + std::to_string(config_.host_devices_) +
                          " has no effect with troupe.backend=cuda: it is for virtual devices");
  if (config_.keep_freed_ms_ != config::not_given && config_.backend_name_ == "host" &&
      wanted_placement() != placement::worker_process)
    return make_error(
        errc::invalid_argument,
        "troupe.keep-freed=" + std::to_string(config_.keep_freed_ms_) +
            " has no effect with troupe.backend=host: it is for GPUs, and for devices "
            "in workers");
  if (!config_.hosts.listen_address.empty())
    return wanted_placement() == placement::worker_process
               ? caf::error{}
               : make_error(errc::invalid_argument,
                            "troupe.hosts.listen=" + config_.hosts.listen_address +
                                " needs troupe.placement=worker");
  for (auto [name, value] :
       {std::pair{"port", config_.hosts_port_}, std::pair{"count", config_.hosts_count_},
        std::pair{"join-limit", config_.hosts_join_s_},
        std::pair{"link-limit", config_.hosts_link_ms_}})
    if (value != config::not_given)
      return make_error(errc::invalid_argument, "troupe.hosts." + std::string{name} + '=' +
                                                    std::to_string(value) +
                                                    " has no effect without troupe.hosts.listen");
  if (!config_.hosts_names_.empty())
    return make_error(errc::invalid_argument, "troupe.hosts.names=" + config_.hosts_names_ +
                                                  " has no effect without troupe.hosts.listen");
  return {};
}

/// Checks the members of `config`.
caf::error system_core::check_settings() const {
  for (const auto& error : {check_options(config_.lanes), check_options(config_.host),
                            check_options(config_.cuda), check_options(config_.flight_record)})
    if (error)
      return error;
  return check_positive("config::device_deadline", config_.device_deadline);
}

placement system_core::wanted_placement() const {
  if (config_.placement_name_.empty())
    return config_.placement;
  return config_.placement_name_ == "worker" ? placement::worker_process : placement::in_process;
}

/// Returns the program's settings, with the options that override them.
remote_hosts system_core::wanted_hosts() const {
  auto result = config_.hosts;
  if (config_.hosts_port_ != config::not_given)
    result.port = static_cast<std::uint16_t>(config_.hosts_port_);
  if (config_.hosts_count_ != config::not_given)
    result.count = static_cast<int>(config_.hosts_count_);
  if (config_.hosts_join_s_ != config::not_given)
    result.join_limit = std::chrono::seconds{config_.hosts_join_s_};
  if (config_.hosts_link_ms_ != config::not_given)
    result.link_limit = std::chrono::milliseconds{config_.hosts_link_ms_};
  if (!config_.hosts_names_.empty()) {
    result.names.clear();
    std::istringstream names{config_.hosts_names_};
    for (std::string name; std::getline(names, name, ',');)
      result.names.push_back(std::move(name));
  }
  return result;
}

host_backend_options system_core::wanted_host() const {
  auto result = config_.host;
  if (config_.host_devices_ != config::not_given)
    result.devices = static_cast<int>(config_.host_devices_);
  return result;
}

cuda_backend_options system_core::wanted_cuda() const {
  auto result = config_.cuda;
  if (config_.keep_freed_ms_ == -1)
    result.keep_freed = cuda_backend_options::forever;
  else if (config_.keep_freed_ms_ != config::not_given)
    result.keep_freed = std::chrono::milliseconds{config_.keep_freed_ms_};
  return result;
}

lane_options system_core::wanted_lanes() const {
  auto result = config_.lanes;
  if (config_.spin_us_ != config::not_given)
    result.spin = std::chrono::microseconds{config_.spin_us_};
  if (config_.client_spin_us_ != config::not_given)
    result.client_spin = std::chrono::microseconds{config_.client_spin_us_};
  if (config_.completion_ == "host_func")
    result.completion = completion_strategy::host_func;
  else if (config_.completion_ == "synchronize")
    result.completion = completion_strategy::synchronize;
  if (config_.in_flight_ != config::not_given)
    result.in_flight_limit = static_cast<std::size_t>(config_.in_flight_);
  if (config_.queue_ != config::not_given)
    result.queue_limit = static_cast<std::size_t>(config_.queue_);
  return result;
}

caf::error system_core::choose_backend(caf::error& without_cuda) {
  if (auto error = refuse_in_unmet_worker())
    return error;
  auto& wanted = config_.backend_name_;
  const auto hosts = wanted_hosts();
  const bool alone = hosts.listen_address.empty();
  auto make = [&](const char* name) -> caf::expected<std::shared_ptr<backend>> {
    if (wanted_placement() == placement::worker_process)
      return make_worker_backend({.backend = name,
                                  .host = wanted_host(),
                                  .cuda = wanted_cuda(),
                                  .workers = config_.workers,
                                  .spin = wanted_lanes().spin,
                                  .hosts = hosts});
    if (std::string_view{name} == "host")
      return make_host_backend(wanted_host());
    auto cuda = make_cuda_backend(wanted_cuda());
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
    if (wanted == "cuda" || !alone) // with other hosts, "auto" means GPUs
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

caf::error system_core::prepare(caf::error& without_cuda) {
  for (auto check : {&system_core::check_names, &system_core::check_numbers,
                     &system_core::check_effects, &system_core::check_settings})
    if (auto error = (this->*check)())
      return error;
  return backend_ ? caf::error{} : choose_backend(without_cuda);
}

caf::expected<std::shared_ptr<runtime>> system_core::runtime() {
  std::unique_lock lock{mutex_};
  if (failure_)
    return failure_;
  if (runtime_)
    return runtime_;
  caf::error without_cuda;
  if (failure_ = prepare(without_cuda); failure_)
    return failure_;
  try {
    runtime_ = make_runtime(backend_, wanted_lanes(), config_.flight_record);
  } catch (const std::system_error& e) { // the next call may get a thread
    return system_failure("pthread_create", e.code().value(), "no thread for the devices");
  }
  auto result = runtime_;
  lock.unlock(); // a log sink may ask for the devices
  if (without_cuda)
    log(level_without_cuda(without_cuda),
        "using virtual devices, since CUDA is unavailable: " + describe(without_cuda));
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
    watch_shutdown((*owner)->deadlines(), result, shutdown_patience_);
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
      .add(placement_name_, "placement", "where devices are driven: in_process or worker")
      .add(workers.program, "worker", "the workers' program")
      .add(host_devices_, "devices", "number of virtual devices of the host backend")
      .add(keep_freed_ms_, "keep-freed",
           "how long GPUs keep freed memory, in milliseconds; -1: until memory runs out")
      .add(completion_, "completion", "event_poll, host_func or synchronize")
      .add(in_flight_, "in-flight", "operations that a device may have in its streams")
      .add(queue_, "queue", "operations that may wait for a device")
      .add(spin_us_, "spin", "how long a lane spins after its last work, in microseconds")
      .add(client_spin_us_, "client-spin", "how long a client that waits spins, in microseconds")
      .add(flight_record.path, "flight-record",
           "file for the last operations when something fails");
  opt_group{custom_options_, "troupe.hosts"}
      .add(hosts.listen_address, "listen", "address at which other hosts join")
      .add(hosts_port_, "port", "port at which other hosts join")
      .add(hosts.identity.certificate, "certificate", "file of this program's certificate")
      .add(hosts.identity.key, "key", "file of this program's private key")
      .add(hosts.identity.authority, "authority",
           "file of the authority that signs all hosts' certificates")
      .add(hosts.identity.revoked, "revoked", "file of the certificates that it has revoked")
      .add(hosts_count_, "count", "hosts to wait for")
      .add(hosts_names_, "names", "names of the hosts, in the order of their devices")
      .add(hosts_join_s_, "join-limit", "how long to wait for hosts, in seconds")
      .add(hosts_link_ms_, "link-limit", "how long a connection may be silent, in milliseconds");
}

config::~config() = default;

bool config::help_printed() const noexcept { return detail::has_printed_help(*this); }

void config::use_backend(std::shared_ptr<backend> backend) {
  core_->use_backend(std::move(backend));
}

} // namespace troupe
