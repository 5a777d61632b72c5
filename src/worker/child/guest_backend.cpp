#include "worker/child/guest_backend.hpp"

#include "foundation/error_text.hpp"
#include "worker/child/guest_device.hpp"

#include <utility>

namespace troupe::detail {

void guest_ends::add(communicator_key key, std::function<void()> on_allowed) {
  std::lock_guard lock{mutex_};
  auto& x = ranks_[key];
  x.on_allowed = std::move(on_allowed);
  if (all_allowed_)
    allow(x);
}

void guest_ends::remove(communicator_key key) {
  std::lock_guard lock{mutex_};
  ranks_.erase(key);
  changed_.notify_all();
}

void guest_ends::set_closed(communicator_key key) {
  std::lock_guard lock{mutex_};
  if (auto i = ranks_.find(key); i != ranks_.end())
    i->second.closed = true;
  changed_.notify_all();
}

void guest_ends::allow(communicator_key key) {
  std::lock_guard lock{mutex_};
  if (auto i = ranks_.find(key); i != ranks_.end())
    allow(i->second);
  changed_.notify_all();
}

/// The rank may be gone as soon as its end was allowed once.
void guest_ends::allow(state& x) {
  if (!std::exchange(x.allowed, true))
    x.on_allowed();
}

void guest_ends::allow_all() {
  std::lock_guard lock{mutex_};
  all_allowed_ = true;
  for (auto& [key, x] : ranks_)
    allow(x);
  changed_.notify_all();
}

void guest_ends::wait(communicator_key key, bool state::* what) {
  std::unique_lock lock{mutex_};
  changed_.wait(lock, [&] {
    const auto i = ranks_.find(key);
    return i == ranks_.end() || i->second.*what;
  });
}

namespace {

class guest_communicator final : public backend_communicator {
public:
  guest_communicator(communicator_key key, std::unique_ptr<backend_communicator> inner,
                     std::shared_ptr<shared_device> with, std::shared_ptr<guest_ends> ends)
      : key_(key), inner_(std::move(inner)), with_(std::move(with)), ends_(std::move(ends)) {
    inner_->compare_calls();
    // Not sooner: a kernel that is told to end takes those of its peers along, and the calls of a
    // rank that is not closed would succeed.
    ends_->add(key_, [inner = inner_.get()] { inner->on_closed(); });
  }

  communicator_key key() const noexcept { return key_; }
  std::unique_ptr<backend_communicator> take_inner() noexcept { return std::move(inner_); }

  caf::error connect(stream_view stream, connect_scope what) noexcept override {
    std::lock_guard lock{with_->driving};
    return inner_->connect(stream, what);
  }
  caf::error enqueue(std::span<const collective_call> calls, stream_view stream,
                     step_position where) noexcept override {
    std::lock_guard lock{with_->driving};
    return inner_->enqueue(calls, stream, where);
  }
  caf::error replay(graph_view graph, stream_view stream, backend_device& device,
                    std::uint32_t* reached) noexcept override {
    std::lock_guard lock{with_->driving};
    return inner_->replay(graph, stream, device, reached);
  }
  caf::error mark_end(event_view event, stream_view stream,
                      backend_device& device) noexcept override {
    std::lock_guard lock{with_->driving};
    return inner_->mark_end(event, stream, device);
  }
  void on_closed() noexcept override { ends_->set_closed(key_); }
  caf::error asynchronous_error() noexcept override { return inner_->asynchronous_error(); }

private:
  const communicator_key key_;
  std::unique_ptr<backend_communicator> inner_;
  const std::shared_ptr<shared_device> with_;
  const std::shared_ptr<guest_ends> ends_;
};

caf::error not_here() {
  return make_error(errc::not_supported, "the parent of this worker builds its communicators");
}

} // namespace

communicator_ranks guest_backend::adopt(communicator_key key, communicator_ranks rank) const {
  communicator_ranks result;
  for (auto& x : rank)
    result.push_back(std::make_unique<guest_communicator>(key, std::move(x), options_.with, ends_));
  return result;
}

caf::expected<std::unique_ptr<backend_device>> guest_backend::open(int ordinal) noexcept {
  if (ordinal == options_.device) {
    auto device = options_.executes->open_beside(ordinal);
    if (!device || !options_.memory)
      return device;
    return std::unique_ptr<backend_device>{
        std::make_unique<guest_device>(std::move(*device), options_.memory)};
  }
  return make_error({.code = errc::unavailable,
                     .detail = "this worker has device " + std::to_string(options_.device),
                     .device = ordinal});
}

caf::expected<peer_link> guest_backend::link(int from, int to) noexcept {
  return options_.executes->link(from, to);
}

caf::expected<communicator_id> guest_backend::make_communicator_id() noexcept { return not_here(); }

caf::expected<communicator_ranks> guest_backend::build(const communicator_id&, int,
                                                       std::span<const local_rank>) noexcept {
  return not_here();
}

caf::error guest_backend::end(end_function how, communicator_ranks ranks) noexcept {
  caf::error result;
  for (auto& x : ranks) {
    auto& guest = static_cast<guest_communicator&>(*x);
    ends_->wait_allowed(guest.key());
    communicator_ranks one;
    one.push_back(guest.take_inner());
    keep_first(result, (*options_.executes.*how)(std::move(one)));
    ends_->remove(guest.key());
    options_.on_gone(guest.key());
  }
  return result;
}

caf::error guest_backend::tell(int, std::span<const std::byte> what) noexcept {
  return options_.tell(what);
}

void guest_backend::set_listener(std::function<void(int, std::span<const std::byte>)> f) noexcept {
  std::lock_guard lock{listener_mutex_};
  listener_ = std::move(f);
}

void guest_backend::received(std::span<const std::byte> what) const {
  std::function<void(int, std::span<const std::byte>)> to;
  {
    std::lock_guard lock{listener_mutex_};
    to = listener_;
  }
  if (to)
    to(options_.device, what);
}

void guest_backend::abandon(const caf::error& why) noexcept { options_.on_fault(why); }

} // namespace troupe::detail
