#include "device/operations.hpp"

#include "foundation/log.hpp"
#include "foundation/spin.hpp"
#include "lane/lane.hpp"
#include "operation/admission_lock.hpp"
#include "operation/buffer.hpp"
#include "operation/device_state.hpp"
#include "operation/launch_call.hpp"
#include "operation/library_states.hpp"
#include "operation/use_of.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <utility>

namespace troupe::detail {

namespace {

std::byte* address_of(const any_gpu_ref& ref) { return ref.memory()->address() + ref.offset(); }

caf::expected<issue_outcome> enqueued_unless(caf::error error) {
  if (error)
    return error;
  return issue_outcome::enqueued;
}

} // namespace

// -- allocate

allocate_operation::allocate_operation(std::size_t count, dtype type, bool zeroed)
    : operation_of("allocate", 1), count_(count), type_(type), zeroed_(zeroed) {
  parts()[0].stream = stream_kind::memory; // waits for no kernel
  of_elements(count, type);
}

caf::expected<issue_outcome> allocate_operation::issue(part& p, lane& on) {
  auto size = count_ * size_of(type_);
  auto stream = on.stream(p);
  // An empty buffer still has an address of its own.
  auto memory = on.device().allocate(std::max<std::size_t>(size, 1), stream);
  if (!memory)
    return memory.error();
  value = any_gpu_ref{on.state().make_buffer(*memory, size), type_, 0, count_};
  if (zeroed_ && size != 0) {
    std::byte zero{};
    return enqueued_unless(on.device().fill(*memory, {&zero, 1}, size, stream));
  }
  return issue_outcome::enqueued;
}

// -- upload and download

transfer_operation::transfer_operation(transfer::direction way, any_gpu_ref device,
                                       std::shared_ptr<host_range> host)
    : operation_of(way == transfer::direction::upload ? "upload" : "download", 1), way_(way),
      host_(std::move(host)), transfer_(way, host_, address_of(device)) {
  bool upload = way == transfer::direction::upload;
  parts()[0].stream = upload ? stream_kind::upload : stream_kind::download;
  add_use(use_of(device, !upload, upload));
  of_elements(device.count(), device.type());
}

caf::expected<issue_outcome> transfer_operation::issue(part& p, lane& on) {
  if (host_->size() == 0)
    return issue_outcome::finished;
  return proceed(p, on);
}

caf::expected<issue_outcome> transfer_operation::proceed(part& p, lane& on) {
  auto outcome = transfer_.proceed(on);
  if (outcome && *outcome == issue_outcome::continues && way_ == transfer::direction::download &&
      transfer_.all_enqueued() && !p.recorded.load(std::memory_order_relaxed)) {
    // When the stream passes this event, the device memory is read. The rest is in host memory.
    if (auto event = on.mark(p.stream)) {
      p.event = *event;
      lane::set_recorded(p);
    }
  }
  return outcome;
}

void transfer_operation::on_part_done(part& p) noexcept { transfer_.finish(*p.on); }

void transfer_operation::before_answer(const caf::error& error) noexcept {
  if (error)
    host_->revoke();
}

void transfer_operation::on_settled() noexcept {
  if (!failed())
    host_->let_go();
}

// -- fill, copy

fill_operation::fill_operation(any_gpu_ref target, std::vector<std::byte> pattern)
    : operation_of("fill", 1), target_(address_of(target)), count_(target.count()),
      pattern_(std::move(pattern)) {
  add_use(use_of(target, false, true));
  of_elements(target.count(), target.type());
}

caf::expected<issue_outcome> fill_operation::issue(part& p, lane& on) {
  if (count_ == 0)
    return issue_outcome::finished;
  return enqueued_unless(on.device().fill(target_, pattern_, count_, on.stream(p)));
}

accept_operation::accept_operation(const any_gpu_ref& ref) : operation_of("accept", 1) {
  auto all = use_of(ref, true, true);
  all.accepted = skipped_reads::all();
  add_use(std::move(all));
}

/// Enqueues only its event, so that later work still comes after earlier work.
caf::expected<issue_outcome> accept_operation::issue(part&, lane&) {
  return issue_outcome::enqueued;
}

copy_operation::copy_operation(const any_gpu_ref& target, const any_gpu_ref& source)
    : operation_of("copy", 1), target_(address_of(target)), source_(address_of(source)),
      size_(source.size_bytes()) {
  add_use(use_of(source, true, false));
  add_use(use_of(target, false, true));
  of_elements(source.count(), source.type());
}

caf::expected<issue_outcome> copy_operation::issue(part& p, lane& on) {
  if (size_ == 0)
    return issue_outcome::finished;
  return enqueued_unless(
      on.device().copy(target_, source_, size_, copy_direction::device_to_device, on.stream(p)));
}

// -- launch

namespace {

class lane_context final : public device_context {
public:
  using host_functions = launch_operation::host_functions;

  /// @param kept null until a function is to run on the host
  lane_context(lane& on, const part& p, std::shared_ptr<host_functions>& kept,
               std::int32_t* verdict)
      : device_context(on.device(), on.state().ordinal(), on.stream(p), on.libraries(), verdict),
        of_(*p.of), generation_(on.state().generation()), kept_(kept) {}

  caf::error run_on_host(std::function<void()> f) override {
    if (of_.position() == 0) // a step enqueues it, and keeps nothing for the function
      return make_error(errc::not_supported,
                        "a launch that is registered with repetition::replays has a function of "
                        "the host");
    if (!kept_)
      kept_ = make_kept();
    auto& call = kept_->calls.emplace_back(std::move(f), *kept_);
    return on().launch_host(
        stream(),
        [](void* x) { launch_operation::call(*static_cast<launch_operation::host_call*>(x)); },
        &call);
  }

private:
  std::shared_ptr<host_functions> make_kept() const {
    auto result = std::make_shared<host_functions>();
    result->of = of_.weak_from_this();
    result->device = device();
    result->generation = generation_;
    for (auto& x : of_.uses())
      result->used.push_back(x.memory.get());
    return result;
  }

  operation& of_;
  const std::uint64_t generation_;
  std::shared_ptr<host_functions>& kept_;
};

} // namespace

launch_operation::launch_operation(launch_function function, const std::vector<any_gpu_ref>& reads,
                                   const std::vector<any_gpu_ref>& writes)
    : operation_of("launch", 1), function_(std::move(function)) {
  for (auto& x : reads)
    add_use(use_of(x, true, false));
  for (auto& x : writes)
    add_use(use_of(x, false, true));
}

caf::expected<issue_outcome> launch_operation::issue(part& p, lane& on) {
  lane_context context{on, p, host_functions_, nullptr};
  caf::error error;
  {
    callable_scope scope{*this};
    error = call_launch_on(on.device(), verb(), number(), [&] { return function_(context); });
  }
  if (!error)
    return issue_outcome::enqueued;
  if (code_of(error) == errc::device_fault)
    return error;
  return in_full(*this, error, on.state().ordinal(), on.state().generation());
}

void launch_operation::call(host_call& x) noexcept {
  auto& all = *x.among;
  if (all.failed.load(std::memory_order_relaxed))
    return; // it would use what the failed call left
  const host_function_scope scope{all.used};
  auto error = call_launch([&] { return x.function(), caf::error{}; });
  if (!error)
    return;
  all.failed.store(true, std::memory_order_relaxed);
  // Fail at once, so that work behind the call in the streams has failed before it is done.
  if (auto of = std::static_pointer_cast<operation>(all.of.lock()))
    of->fail(in_full(*of, error, all.device, all.generation));
}

caf::error launch_operation::in_full(const operation& x, const caf::error& error, int device,
                                     std::uint64_t generation) {
  auto told = *failure_of(error);
  auto why = x.describe(errc::launch_failed, std::move(told.detail));
  why.api = std::move(told.api);
  why.native_name = std::move(told.native_name);
  why.native_code = told.native_code;
  why.device = device;
  why.generation = generation;
  return make_error(std::move(why));
}

void launch_operation::on_settled() noexcept {
  // They may hold the buffers that refer to this operation.
  function_ = nullptr;
  host_functions_.reset();
}

// -- registered launches

std::vector<launch_memory> memory_of(const std::vector<any_gpu_ref>& refs) {
  std::vector<launch_memory> result;
  result.reserve(refs.size());
  for (auto& x : refs)
    result.push_back({address_of(x), x.count(), x.type()});
  return result;
}

registered_launch_operation::registered_launch_operation(
    std::shared_ptr<const library_launch> library, std::string name,
    std::vector<std::byte> arguments, const std::vector<any_gpu_ref>& reads,
    const std::vector<any_gpu_ref>& writes, std::vector<launch_memory> read,
    std::vector<launch_memory> written)
    : operation_of(library ? library->verb : "launch", 1), library_(std::move(library)),
      name_(std::move(name)), arguments_(std::move(arguments)), reads_(std::move(read)),
      writes_(std::move(written)) {
  for (auto& x : reads)
    add_use(use_of(x, true, false));
  for (auto& x : writes)
    add_use(use_of(x, false, true));
}

registered_call registered_launch_operation::as_call() const noexcept {
  return {name_, reads_, writes_, arguments_, verdict_.get()};
}

caf::error registered_launch_operation::enqueue(part& p, lane& on) {
  lane_context context{on, p, host_functions_, verdict_.get()};
  return call_library_on(on.device(), verb(), number(),
                         [&] { return library_->enqueue(context, reads_, writes_, arguments_); });
}

/// Also takes a word for the verdict: a launch that gets none must not count as begun.
caf::error registered_launch_operation::prepare(part& p, lane& on) {
  if (!library_ || !(library_->prepare || library_->judge))
    return {};
  if (library_->judge) {
    auto word = on.take_word();
    if (!word)
      return word.error();
    verdict_ = std::move(*word);
  }
  if (!on.is_remote()) {
    making_context context{on.device(), on.state().ordinal(), on.stream(p), on.libraries()};
    return call_library_on(on.device(), verb(), number(), [&] {
      return library_->prepare ? library_->prepare(context, reads_, writes_, arguments_)
                               : caf::error{};
    });
  }
  auto what = as_call();
  auto arguments = arguments_;
  what.arguments = arguments;
  if (library_->clear_ignored)
    if (auto error = call_library([&] {
          library_->clear_ignored(arguments);
          return caf::error{};
        }))
      return error;
  return on.device().prepare_registered(what, on.stream(p));
}

caf::expected<issue_outcome> registered_launch_operation::issue(part& p, lane& on) {
  return enqueued_unless(on.is_remote() ? on.device().launch_registered(as_call(), on.stream(p))
                                        : enqueue(p, on));
}

std::int32_t registered_launch_operation::verdict() const noexcept {
  return verdict_ ? std::atomic_ref{*verdict_}.load(std::memory_order_acquire) : 0;
}

void registered_launch_operation::on_part_done(part& p) noexcept {
  const auto told = verdict();
  verdict_.reset();
  if (told == 0 || failed())
    return;
  auto why = call_library([&] { return library_->judge(told); });
  if (!why)
    return;
  auto x = describe(*code_of(why), failure_of(why)->detail);
  x.device = p.on->state().ordinal();
  x.generation = p.on->state().generation();
  fail(make_error(std::move(x)));
}

std::shared_ptr<void> registered_launch_operation::used_by_streams() const noexcept {
  if (!host_functions_)
    return verdict_;
  if (!verdict_)
    return host_functions_;
  return std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(host_functions_,
                                                                                   verdict_);
}

void registered_launch_operation::on_settled() noexcept {
  host_functions_.reset();
  verdict_.reset(); // of a launch that was prepared, and did not run
}

// -- stats, pinned memory

stats_operation::stats_operation() : operation_of("stats", 1) {
  parts()[0].stream = stream_kind::none;
}

caf::expected<issue_outcome> stats_operation::issue(part&, lane& on) {
  auto memory = on.device().memory();
  if (!memory)
    return memory.error();
  auto& properties = on.properties();
  value.device = on.state().ordinal();
  value.phase = on.state().phase();
  value.generation = on.state().generation();
  value.name = properties.name;
  value.pci_id = properties.pci_id;
  value.capability_major = properties.capability_major;
  value.capability_minor = properties.capability_minor;
  value.worker_pid = properties.worker_pid;
  value.incarnation = on.state().incarnation();
  value.free_bytes = memory->free_bytes;
  value.total_bytes = memory->total_bytes;
  value.in_flight = on.in_flight();
  value.queued = on.queued() - 1; // without this one
  return issue_outcome::finished;
}

pinned_operation::pinned_operation(std::size_t size_bytes)
    : operation_of("allocate_pinned", 1), size_(size_bytes) {
  parts()[0].stream = stream_kind::none;
}

caf::expected<issue_outcome> pinned_operation::issue(part&, lane& on) {
  auto memory = on.device().allocate_pinned(std::max<std::size_t>(size_, 1));
  if (!memory)
    return memory.error();
  // The lane frees it. After the lane has ended, the thread that drops the last handle does.
  auto free = on.device().pinned_deleter();
  if (!free)
    free = [device = on.shared_device()](void* x) { return device->deallocate_pinned(x); };
  auto release = [home = on.shared_state(), free = std::move(free)](std::byte* address) {
    home->release({address, 0, [free](void* x) {
                     if (auto error = free(x))
                       log(log_level::warning, "pinned memory was not freed", error);
                   }});
  };
  value = host_buffer{std::shared_ptr<std::byte>{static_cast<std::byte*>(*memory), release}, size_,
                      true};
  return issue_outcome::finished;
}

// -- acquire

acquire_operation::acquire_operation(const any_gpu_ref& ref, access_mode mode, stream_view user)
    : operation_of("acquire", 1), memory_(ref.memory()), mode_(mode), user_(user) {
  parts()[0].stream = stream_kind::none;
  add_use(use_of(ref, reads(mode), writes(mode)));
}

caf::error acquire_operation::on_admit(locked lock, queue_bound) {
  memory_->take(lock, mode_);
  if (writes(mode_)) {
    memory_->granted_begin = uses().front().begin;
    memory_->granted_end = uses().front().end;
  }
  return {};
}

caf::expected<issue_outcome> acquire_operation::issue(part& p, lane& on) {
  if (auto error = on.wait_for_predecessors(p, user_); error)
    return error;
  return issue_outcome::finished;
}

void acquire_operation::on_leave(locked lock) noexcept { memory_->give_back(lock, mode_); }

void acquire_operation::on_success() noexcept { ++memory_->granted(admission_lock{}, mode_); }

void acquire_operation::on_settled() noexcept {
  if (is_removed()) // `on_leave` has given it back
    return;
  while (!completed()) // another thread is about to answer
    pause();
  if (!error())
    return;
  admission_lock lock;
  if (!failed())
    --memory_->granted(lock, mode_); // the requester does not know of it
  memory_->give_back(lock, mode_);
}

// -- release

release_operation::release_operation(const any_gpu_ref& ref, access_mode mode, user_event event)
    : operation_of("release", 1), ref_(ref), mode_(mode), event_(std::move(event)) {
  auto& p = parts()[0];
  p.stream = stream_kind::user;
  p.event = event_.event;
  p.shares_event = true;
}

caf::error release_operation::on_admit(locked lock, queue_bound) {
  auto& memory = *ref_.memory();
  if (memory.granted(lock, mode_) == 0) {
    auto why = describe(errc::invalid_argument, "the buffer is not acquired in this mode");
    why.device = ref_.device();
    why.parts.clear();
    return make_error(std::move(why));
  }
  --memory.granted(lock, mode_);
  if (writes(mode_)) // until `on_settled`: its use is noted only after the hold ends
    memory.begin_write();
  memory.give_back(lock, mode_);
  // Independent of the range of the handle. For writing: the granted range and no more, because it
  // is valid from now on. For reading: all of the buffer, because all of it may have been read.
  if (writes(mode_))
    add_use({ref_.memory(), memory.granted_begin, memory.granted_end, false, true, 0});
  else
    add_use({ref_.memory(), 0, memory.size_bytes(), false, false, 0});
  return {};
}

/// Only answers: the buffer is given back, and later work must still wait for the user's stream.
void release_operation::end_early(early_end how) noexcept {
  answer(make_error(early_failure(how)));
}

void release_operation::on_settled() noexcept {
  if (writes(mode_))
    ref_.memory()->end_write();
}

caf::expected<issue_outcome> release_operation::issue(part&, lane&) {
  return issue_outcome::enqueued; // the user has done it
}

} // namespace troupe::detail
