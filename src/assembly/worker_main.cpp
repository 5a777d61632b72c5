#include "assembly/worker_main.hpp"

#include "foundation/log.hpp"
#include "foundation/option_check.hpp"
#include "foundation/other_processes.hpp"
#include "foundation/start_thread.hpp"
#include "foundation/system_call.hpp"
#include "remote/host_pool.hpp"
#include "worker/child/program_host.hpp"
#include "worker/child/worker_service.hpp"
#include "worker/parent/process_pool.hpp"
#include "worker/parent/worker_backend.hpp"
#include "worker/parent/worker_command.hpp"
#include "worker/protocol/worker_parent.hpp"
#include <troupe/worker.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <unistd.h>

namespace troupe {

namespace detail {

namespace {

constexpr int failed_status = 84;

std::function<std::shared_ptr<backend>(std::shared_ptr<backend>)>& backend_wrapper() {
  static std::function<std::shared_ptr<backend>(std::shared_ptr<backend>)> result;
  return result;
}

/// Returns the time to spin. The worker and its parent's lane spin at the same time.
std::chrono::nanoseconds spin_by_cores(int devices) noexcept {
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  return std::chrono::microseconds{cores >= 4 * devices + 2 ? 200 : 0};
}

/// Selects CUDA's older memory handles for NCCL, unless the environment says otherwise.
/// NCCL's default maps piece by piece, by CUDA's virtual memory management, the memory that each
/// connection to another process's GPU writes to. With 4 GPUs that takes 1.7 s of 1.8 s for a
/// communicator. The older handles take 0.15 s, and a mapping also keeps the memory when its owner
/// ends.
/// @source NCCL user guide, "NCCL_CUMEM_ENABLE"
void choose_mappings_of_nccl() {
  if (::setenv("NCCL_CUMEM_ENABLE", "0", 0) != 0)
    log(log_level::warning, "a worker's NCCL connects slowly", system_failure("setenv", errno, {}));
}

/// Returns `worker_description::reaches`.
std::vector<std::uint64_t> reached_on(const backend& executes) {
  std::vector<std::uint64_t> result;
  for (int from = 0; from < std::min(executes.device_count(), 64); ++from) {
    auto& reached = result.emplace_back(0);
    for (int to = 0; to < std::min(executes.device_count(), 64); ++to)
      if (const std::array pair{from, to}; executes.can_be_direct(pair))
        reached |= std::uint64_t{1} << to;
  }
  return result;
}

/// A worker process, as it serves its parent.
class worker {
public:
  explicit worker(worker_parent parent) : parent_(std::move(parent)) {}

  int run() {
    if (auto error = set_up())
      return refuse(error);
    if (!service_) // no device
      return 0;
    std::thread receiver;
    const auto receive = [this] {
      if (auto error = receive_all(parent_.socket(), [this](auto message, auto descriptor) {
            service_->received(message, std::move(descriptor));
          }))
        end_with(error);
    };
    if (auto error = start_thread(receiver, receive, "for the parent's messages"))
      return refuse(error);
    service_->run();
    ending_.store(true);
    parent_.socket().interrupt();
    receiver.join();
    programs_.reset();
    return 0;
  }

private:
  /// Reads the configuration from the parent's first message.
  caf::error set_up() {
    std::vector<std::byte> buffer(control_bytes);
    auto got = parent_.socket().receive(buffer);
    if (!got)
      return got.error();
    if (got->what != received::kind::message)
      return make_error(errc::unavailable, "the parent hung up");
    wire_reader reader{std::span{buffer}.first(got->size_bytes)};
    const auto head = reader.get<control_head>();
    const auto what = reader.get<worker_setup>();
    if (!reader.ok() || head.kind != control::set_up)
      return make_error(errc::internal, "the parent's first message could not be read");
    worker_description about;
    auto error = be(what, about);
    wire_writer description;
    description.put(about);
    static_cast<void>(send(answer_to(head, error, description.bytes()).bytes()));
    return error;
  }

  caf::error be(const worker_setup& what, worker_description& about) {
    std::shared_ptr<backend> executes;
    if (what.host.devices < 0 || what.host.devices > most_worker_devices)
      return make_error(errc::invalid_argument,
                        std::to_string(what.host.devices) + " virtual devices");
    if (what.backend == "host") {
      executes = make_host_backend(what.host);
    } else if (what.backend != "cuda") {
      return make_error(errc::invalid_argument,
                        "workers execute with cuda or host, not " + what.backend);
    } else {
      auto cuda = make_cuda_backend(what.cuda);
      if (!cuda)
        return cuda.error();
      executes = std::move(*cuda);
    }
    if (const auto& wrap = backend_wrapper())
      executes = wrap(std::move(executes));
    about.devices = executes->device_count();
    if (about.devices == 0)
      return {};
    about.slab_granularity = executes->slab_granularity();
    about.direct_bytes = executes->direct_bytes();
    about.reaches = reached_on(*executes);
    about.spin_ns = what.spin_ns >= 0 ? what.spin_ns : spin_by_cores(about.devices).count();
    auto* area = std::launder(reinterpret_cast<link_area*>(parent_.area().data()));
    if (parent_.area().size() < sizeof(link_area))
      return make_error(errc::internal, "the parent shares too little memory");
    service_options options;
    options.device = what.device;
    options.progress = &parent_.progress();
    options.spin = std::chrono::nanoseconds{about.spin_ns};
    options.send = [this](std::span<const std::byte> x, std::optional<int> descriptor) {
      return send(x, descriptor);
    };
    options.on_fault = [this](const caf::error& why) { end_with(why); };
    program_options programs;
    programs.guest.device = what.device;
    programs.guest.executes = executes;
    programs.guest.on_fault = options.on_fault;
    programs.guest.on_gone = [this](communicator_key key) { service_->gone(key); };
    programs.guest.words = area->unfinished;
    programs.spin = options.spin;
    programs.guest.tell = [this](std::span<const std::byte> x) { return tell(x); };
    if (what.lends && about.slab_granularity != 0)
      programs.guest.memory = std::make_shared<guest_memory>(guest_memory::options{
          what.device, what.cuda.keep_freed,
          [this](control kind, std::uint64_t number, const lent_range& range) {
            wire_writer message;
            message(control_head{number, kind}, range);
            return tell_parent(message);
          }});
    service_.emplace(std::move(executes), *area, std::move(options));
    programs.guest.with = service_->device_lock();
    programs_.emplace(std::move(programs));
    service_->set_programs(*programs_);
    return service_->open();
  }

  caf::error tell(std::span<const std::byte> what) {
    wire_writer message;
    message.put(control_head{0, control::told});
    message.put_bytes(what);
    if (message.bytes().size() > control_bytes)
      return make_error(errc::invalid_argument,
                        std::to_string(what.size()) + " bytes are too many for a worker's message");
    return tell_parent(message);
  }

  caf::error tell_parent(const wire_writer& message) {
    before_telling_another_process();
    std::lock_guard lock{sending_};
    return parent_.socket().send(message.bytes());
  }

  caf::error send(std::span<const std::byte> message, std::optional<int> descriptor = {}) {
    before_telling_another_process();
    std::lock_guard lock{sending_};
    auto error = parent_.socket().send(message, descriptors_of(descriptor));
    if (error && !ending_)
      log(log_level::warning, "a reply did not reach the parent", error);
    return error;
  }

  int refuse(const caf::error& why) {
    const auto native = failure_of(why).value_or(failure{}).native_code;
    parent_.report_failure(static_cast<std::int32_t>(code_of(why).value_or(errc::internal)),
                           describe(why), static_cast<std::int32_t>(native));
    return failed_status;
  }

  /// Ends the process without destructors: CUDA's may not return, and its state is useless.
  [[noreturn]] void end_with(const caf::error& why) {
    const int status = refuse(why);
    static_cast<void>(drain_log(std::chrono::milliseconds{100})); // lost if the sink is slow
    ::_exit(status);
  }

  worker_parent parent_;
  std::mutex sending_;
  std::atomic<bool> ending_{false};       ///< the parent waits for nothing any more
  std::optional<worker_service> service_; ///< outlives the members below
  std::optional<program_host> programs_;
};

} // namespace

void wrap_backend_of_worker(std::function<std::shared_ptr<backend>(std::shared_ptr<backend>)> f) {
  backend_wrapper() = std::move(f);
}

} // namespace detail

std::optional<int> worker_main(int argc, char** argv) {
  detail::set_own_worker();
  const detail::worker_parent::arguments arguments{argv, static_cast<std::size_t>(argc)};
  if (!detail::worker_parent::is_worker(arguments))
    return std::nullopt;
  detail::choose_mappings_of_nccl(); // while there is only one thread
  auto parent = detail::worker_parent::attach(arguments);
  if (!parent) {
    detail::log(log_level::error, "a worker could not connect to its parent", parent.error());
    detail::set_over_as_worker();
    return detail::failed_status;
  }
  const auto status = detail::worker{std::move(*parent)}.run();
  detail::set_over_as_worker();
  return status;
}

caf::expected<std::shared_ptr<backend>> make_worker_backend(worker_backend_options options) {
  if (options.backend != "cuda" && options.backend != "host")
    return make_error(errc::invalid_argument,
                      "workers execute with cuda or host, not " + options.backend);
  if (auto error = detail::check_options(options.host))
    return error;
  if (auto error = detail::check_options(options.cuda))
    return error;
  if (options.spin)
    if (auto error = detail::check_option("worker_backend_options::spin", options.spin->count(), 0,
                                          detail::longest_spin.count(), "us"))
      return error;
  auto name = options.backend;
  const auto limits = options.workers;
  std::shared_ptr<detail::worker_pool> pool;
  if (options.hosts.listen_address.empty()) {
    auto local = detail::process_pool::create(std::move(options));
    if (!local)
      return local.error();
    pool = std::move(*local);
  } else {
    auto all = detail::make_host_pool(std::move(options));
    if (!all)
      return all.error();
    pool = std::move(*all);
  }
  return std::shared_ptr<backend>{
      std::make_shared<detail::worker_backend>(std::move(pool), std::move(name), limits)};
}

} // namespace troupe
