#include "support/world_fixture.hpp"

#include "actors/messages.hpp"
#include "actors/system.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string_view>

namespace troupe::testing {

bool on_cuda() {
  static const bool result = [] {
    const char* wanted = std::getenv("TROUPE_TEST_BACKEND");
    if (wanted == nullptr)
      return gpus_present() > 0 || gpus_required() > 0;
    if (std::string_view{wanted} != "host" && std::string_view{wanted} != "cuda")
      throw std::runtime_error("TROUPE_TEST_BACKEND is host or cuda");
    return std::string_view{wanted} == "cuda";
  }();
  return result;
}

bool in_workers() {
  static const bool result = [] {
    const char* wanted = std::getenv("TROUPE_TEST_PLACEMENT");
    if (wanted != nullptr && std::string_view{wanted} != "worker" &&
        std::string_view{wanted} != "in_process")
      throw std::runtime_error("TROUPE_TEST_PLACEMENT is in_process or worker");
    return wanted != nullptr && std::string_view{wanted} == "worker";
  }();
  return result;
}

collectives_policy collectives_of_run() {
  static const auto result = [] {
    const char* wanted = std::getenv("TROUPE_TEST_COLLECTIVES");
    for (auto x : {collectives_policy::direct, collectives_policy::automatic})
      if (wanted != nullptr && wanted == to_string(x))
        return x;
    if (wanted != nullptr && wanted != to_string(collectives_policy::nccl))
      throw std::runtime_error("TROUPE_TEST_COLLECTIVES is nccl, direct or automatic");
    return collectives_policy::nccl;
  }();
  return result;
}

namespace {

std::shared_ptr<backend> make_backend(const system_options& options) {
  const host_backend_options host{options.devices, options.bytes_per_device, options.links};
  if (in_workers())
    return must(make_worker_backend({.backend = on_cuda() ? "cuda" : "host", .host = host}));
  return on_cuda() ? must(make_cuda_backend()) : make_host_backend(host);
}

/// Sets the policy of this run, unless the test has set one. `automatic` then goes both ways.
void set_collectives(world_config& x) {
  constexpr std::uint64_t small = 256;
  if (x.collectives != collectives_policy::automatic || x.ways)
    return;
  x.collectives = collectives_of_run();
  auto& ways = x.ways.emplace();
  for (auto kind : all_collective_kinds)
    ways.direct_up_to[static_cast<std::size_t>(kind)] =
        is_message(kind) || has_root(kind) ? 0 : small;
}

void configure(config& to, const system_options& options) {
  auto executes = make_backend(options);
  if (options.wrap)
    executes = options.wrap(std::move(executes));
  to.use_backend(options.faults ? with_faults(std::move(executes), options.faults) : executes);
  to.lanes = options.lanes;
  to.device_deadline = options.device_deadline;
  to.flight_record = options.flight_record;
}

config& configured(config& to, const system_options& options) {
  configure(to, options);
  return to;
}

} // namespace

test_system::test_system(system_options options) : system_(configured(config_, options)) {
  all_ = static_cast<int>(all_devices(system_).size());
  ordinals_.resize(static_cast<std::size_t>(std::min(options.devices, all_)));
  std::iota(ordinals_.begin(), ordinals_.end(), 0);
}

caf::expected<world> test_system::try_open_world(world_config config) {
  if (config.devices.empty())
    config.devices = ordinals_;
  set_collectives(config);
  return world::open(system_, std::move(config));
}

caf::actor test_system::spawn_world(world_config config) {
  if (config.devices.empty())
    config.devices = ordinals_;
  set_collectives(config);
  return must(spawn_nccl_world(system_, std::move(config)));
}

caf::actor test_system::root() {
  auto* core = must(detail::system_core::of(system_));
  auto lease = must(core->lease(system_));
  lease_ = lease;
  return lease->root;
}

caf::actor test_system::device_actor(int ordinal) {
  return must(ask<caf::actor>(system_, root(), detail::get_device_actor{ordinal}));
}

void flag::set() {
  std::lock_guard lock{mutex_};
  set_ = true;
  condition_.notify_all();
}

bool flag::is_set() const {
  std::lock_guard lock{mutex_};
  return set_;
}

bool flag::wait(std::chrono::nanoseconds limit) const {
  std::unique_lock lock{mutex_};
  return condition_.wait_for(lock, limit, [this] { return set_; });
}

launch_spy::launch_spy(std::shared_ptr<fault_plan> plan) : plan_(std::move(plan)) {
  for (auto on : {verb::collective, verb::fill, verb::copy, verb::launch_host})
    rules_.push_back(plan_->add({fault::slow, on, any_device, 1, forever, 1, 1ns}));
}

std::uint64_t launch_spy::launched() const {
  std::uint64_t result = 0;
  for (auto rule : rules_)
    result += plan_->injected_by(rule);
  return result;
}

std::vector<std::byte> random_bytes(std::size_t size, std::uint64_t seed) {
  std::mt19937_64 random{seed};
  std::vector<std::byte> result(size);
  for (std::size_t i = 0; i < size; i += sizeof(std::uint64_t)) {
    const std::uint64_t x = random();
    std::memcpy(result.data() + i, &x, std::min(sizeof x, size - i));
  }
  return result;
}

void put(const device& to, const any_gpu_ref& target, std::span<const std::byte> bytes) {
  if (auto done = answer_of(to.upload(target, bytes)); !done)
    throw std::runtime_error(describe(done.error()));
}

caf::expected<std::vector<std::byte>> get(const device& from, const any_gpu_ref& source) {
  std::vector<std::byte> result(source.size_bytes());
  poison(result);
  if (auto done = answer_of(from.download(source, std::span{result})); !done)
    return done.error();
  return result;
}

::testing::AssertionResult holds(const device& from, const any_gpu_ref& source,
                                 std::span<const std::byte> want) {
  auto got = get(from, source);
  if (!got)
    return ::testing::AssertionFailure() << describe(got.error());
  if (std::ranges::equal(want, *got))
    return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << to_string(check_equal(dtype::uint8, want, *got));
}

std::vector<device> devices_of(const world& over) {
  std::vector<device> result;
  for (std::size_t i = 0; i < over.size(); ++i)
    result.push_back(over.device_of(i));
  return result;
}

collective_data prepare(const world& over, const input_spec& spec, std::size_t count) {
  collective_data result{spec, {}, must(over.allocate(spec.type, count))};
  result.spec.ranks = static_cast<int>(over.size());
  result.inputs = random_inputs(result.spec, count);
  for (std::size_t i = 0; i < over.size(); ++i)
    put(over.device_of(i), result.send[i], result.inputs[i]);
  return result;
}

::testing::AssertionResult reduced(const world& over, const collective_data& data,
                                   const std::vector<any_gpu_ref>& recv) {
  for (std::size_t i = 0; i < over.size(); ++i) {
    auto output = get(over.device_of(i), recv[i]);
    if (!output)
      return ::testing::AssertionFailure() << "rank " << i << ": " << describe(output.error());
    auto result = check(data.spec.type, data.spec.op, data.inputs, *output, data.spec.kind);
    if (!result)
      return ::testing::AssertionFailure() << "rank " << i << ": " << to_string(result);
  }
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult works(const world& over, std::uint64_t seed) {
  auto data = prepare(over, {dtype::float32, reduce_op::sum, seed}, 1001);
  auto done = answer_of(over.all_reduce(data.send));
  if (!done)
    return ::testing::AssertionFailure() << describe(done.error());
  return reduced(over, data, data.send);
}

::testing::AssertionResult works(const device& with, std::uint64_t seed) {
  auto content = random_bytes(1001, seed);
  auto ref = answer_of(with.allocate(dtype::uint8, content.size()));
  if (!ref)
    return ::testing::AssertionFailure() << describe(ref.error());
  if (auto done = answer_of(with.upload(*ref, std::span<const std::byte>{content})); !done)
    return ::testing::AssertionFailure() << describe(done.error());
  return holds(with, *ref, content);
}

::testing::AssertionResult moves(const device& with, std::size_t size_bytes) {
  const auto content = random_bytes(size_bytes, 7);
  const auto ref = must(answer_of(with.allocate(dtype::uint8, size_bytes)));
  const auto copy = must(answer_of(with.allocate(dtype::uint8, size_bytes)));
  put(with, ref, content);
  if (auto done = answer_of(with.copy(copy, ref)); !done)
    return ::testing::AssertionFailure() << describe(done.error());
  return holds(with, copy, content);
}

} // namespace troupe::testing
