/// A backend with the faults of a plan, as `with_faults` makes it.
#include "backend/faults/fault_injector.hpp"
#include "backend/faults/faulty_device.hpp"
#include "foundation/error_text.hpp"
#include <troupe/backend.hpp>
#include <troupe/error.hpp>
#include <troupe/testing/fault_plan.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace troupe {

namespace detail {

namespace {

using testing::any_device;
using testing::fault;
using testing::verb;

/// Returns an id for ranks that are all here, by which the calls of such a communicator find each
/// other. The backend has no part in it: NCCL keeps a thread and a socket for each of its ids.
communicator_id own_id() noexcept {
  static std::atomic<std::uint64_t> last{0};
  const auto number = ++last;
  communicator_id result;
  std::memcpy(result.bytes.data(), &number, sizeof number);
  return result;
}

/// One rank of a communicator with the faults of `injector`. Gates are on the streams of `devices`.
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

  caf::error enqueue(std::span<const collective_call> calls, stream_view stream,
                     step_position where) noexcept override {
    return call(verb::collective, stream, [&] { return inner_->enqueue(calls, stream, where); });
  }

  caf::error asynchronous_error() noexcept override {
    return call(verb::asynchronous_error, {}, [this] { return inner_->asynchronous_error(); });
  }

  void on_loss(std::function<void()> f) noexcept override { inner_->on_loss(std::move(f)); }

  void on_closed() noexcept override { inner_->on_closed(); }

  void compare_calls() noexcept override { inner_->compare_calls(); }

  caf::error hand_over(std::span<const std::byte> what) noexcept override {
    return inner_->hand_over(what);
  }

  std::shared_ptr<const device_life> life() const noexcept override { return inner_->life(); }

  const backend_communicator& inner() const noexcept { return *inner_; }
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
      if (auto err = suffer(*injector_, *what, v, who, device_now(), stream))
        return err;
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
    if (auto err = fail_or_wait(injector_->next(verb::link, who)))
      return err;
    return inner_->link(from, to);
  }

  void call_off(const communicator_id& id) noexcept override { inner_->call_off(id); }

  caf::expected<communicator_id> make_communicator_id() noexcept override {
    return inner_->make_communicator_id();
  }

  caf::error check_build(int size, std::span<const local_rank> ranks) noexcept override {
    return inner_->check_build(size, ranks);
  }

  caf::expected<communicator_ranks> build(const communicator_id& id, int size,
                                          std::span<const local_rank> ranks) noexcept override {
    return build_with(id, ranks, [&] { return inner_->build(id, size, ranks); });
  }

  bool shares_adopted_memory() const noexcept override { return inner_->shares_adopted_memory(); }
  std::shared_ptr<const void> keep_for_peers(int ordinal, const void* memory,
                                             std::size_t size_bytes) noexcept override {
    return inner_->keep_for_peers(ordinal, memory, size_bytes);
  }
  std::shared_ptr<const shared_word> take_word(int ordinal, std::uint64_t value) noexcept override {
    return inner_->take_word(ordinal, value);
  }
  std::atomic<std::uint64_t>* find_word(std::uint32_t number) noexcept override {
    return inner_->find_word(number);
  }
  caf::error admit_memory(int ordinal, void* memory, std::size_t size_bytes) noexcept override {
    return inner_->admit_memory(ordinal, memory, size_bytes);
  }
  std::size_t slab_granularity() const noexcept override { return inner_->slab_granularity(); }
  caf::expected<int> make_slab(const memory_slab& what) noexcept override {
    return inner_->make_slab(what);
  }
  caf::error map_slab(const memory_slab& what, int descriptor, int by) noexcept override {
    return inner_->map_slab(what, descriptor, by);
  }
  caf::error unmap_slab(const memory_slab& what) noexcept override {
    return inner_->unmap_slab(what);
  }

  bool can_be_direct(std::span<const int> ordinals) const noexcept override {
    return inner_->can_be_direct(ordinals);
  }

  caf::expected<communicator_ranks>
  build_direct(std::span<const local_rank> ranks) noexcept override {
    return build_with(own_id(), ranks, [&] { return inner_->build_direct(ranks); });
  }

  caf::error abort(communicator_ranks ranks) noexcept override {
    return end(verb::abort, std::move(ranks));
  }

  caf::error destroy(communicator_ranks ranks) noexcept override {
    return end(verb::destroy, std::move(ranks));
  }

  caf::error provide_spare(int ordinal) noexcept override { return inner_->provide_spare(ordinal); }
  caf::error prepare_move(int ordinal) noexcept override { return inner_->prepare_move(ordinal); }

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
  /// Builds by `f`, and wraps the ranks.
  template <class F>
  caf::expected<communicator_ranks> build_with(const communicator_id& id,
                                               std::span<const local_rank> ranks, F f) noexcept {
    std::vector<int> ordinals;
    for (const auto& x : ranks)
      ordinals.push_back(x.device);
    const caller who{any_device, -1, &id};
    if (const auto what = injector_->next(verb::build, who, ordinals))
      if (auto err = suffer(*injector_, *what, verb::build, who, {}, {}))
        return err;
    auto built = f();
    if (!built)
      return std::move(built.error());
    communicator_ranks result;
    for (std::size_t i = 0; i < ranks.size(); ++i)
      result.push_back(std::make_unique<faulty_communicator>(std::move((*built)[i]), injector_,
                                                             devices_, id, ranks[i]));
    return result;
  }

  caf::error fail_or_wait(const std::optional<strike>& what) noexcept {
    if (!what)
      return {};
    return fails(what->kind) ? what->error : hold(*injector_, *what, {}, {});
  }

  template <class F>
  caf::expected<std::unique_ptr<backend_device>>
  open_by(F open, std::shared_ptr<open_devices> devices, int ordinal) noexcept {
    if (auto err = fail_or_wait(injector_->next(verb::open, caller{ordinal})))
      return err;
    auto device = open();
    if (!device)
      return std::move(device.error());
    return make_faulty_device(std::move(*device), injector_, std::move(devices), ordinal);
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
    auto injected = fail_or_wait(injector_->next(v, who, ordinals));
    // After a sticky fault, blocked work never becomes idle: abort, do not destroy.
    const auto must_abort = v == verb::abort || injector_->poisoned();
    if (must_abort)
      injector_->open_gates_of(id);
    keep_first(injected,
               must_abort ? inner_->abort(std::move(inner)) : inner_->destroy(std::move(inner)));
    return injected;
  }

  std::shared_ptr<backend> inner_;
  std::shared_ptr<fault_injector> injector_;
  std::shared_ptr<open_devices> devices_ = std::make_shared<open_devices>();
};

} // namespace

} // namespace detail

namespace testing {

std::shared_ptr<backend> with_faults(std::shared_ptr<backend> inner,
                                     const std::shared_ptr<fault_plan>& plan) {
  return std::make_shared<detail::faulty_backend>(std::move(inner), plan->injector_);
}

} // namespace testing

} // namespace troupe
