#include "topology/peer_operations.hpp"

#include "lane/lane.hpp"
#include "operation/use_of.hpp"

#include <string>
#include <utility>

namespace troupe::detail {

// -- connect_peers

connect_peers_operation::connect_peers_operation(std::vector<int> peers,
                                                 std::function<void(const peer_findings&)> on_found)
    : operation_of("connect_peers", 1), peers_(std::move(peers)), on_found_(std::move(on_found)) {
  parts()[0].stream = stream_kind::none;
}

caf::expected<issue_outcome> connect_peers_operation::issue(part&, lane& on) {
  auto ends_process = [](const caf::error& why) { return code_of(why) == errc::device_fault; };
  value.generation = on.state().generation();
  value.incarnation = on.state().incarnation();
  value.peers.clear();
  for (auto peer : peers_) {
    auto& x = value.peers.emplace_back();
    auto can = on.device().can_access_peer(peer);
    x.can_access = can && *can;
    if (!can)
      x.enabled = can.error();
    else if (x.can_access)
      x.enabled = on.device().enable_peer(peer);
    if (x.can_access && !x.enabled)
      x.enabled = on.provide_peer_stream(peer);
    if (ends_process(x.enabled))
      return x.enabled;
    x.admitted = on.device().admit_peer(peer);
    if (ends_process(x.admitted))
      return x.admitted;
  }
  return issue_outcome::finished;
}

// -- peer_copy

caf::error as_link_failure(const caf::error& why, int source_device, int target_device) {
  auto x = failure_of(why);
  bool of_the_request = x && (x->code == errc::out_of_memory || x->code == errc::invalid_argument ||
                              x->code == errc::stale_ref);
  if (!x || of_the_request || severity_of(x->code) != severity::operation)
    return why;
  x->code = errc::link_failed;
  x->detail = "from device " + std::to_string(source_device) + " to device " +
              std::to_string(target_device) + (x->detail.empty() ? "" : ": ") + x->detail;
  return make_error(std::move(*x));
}

peer_copy_operation::peer_copy_operation(const any_gpu_ref& target, const any_gpu_ref& source,
                                         int by, std::size_t times)
    : operation_of("copy", 1), target_(address_of(target)), source_(address_of(source)),
      size_(source.size_bytes()), target_device_(target.device()), source_device_(source.device()),
      times_(times),
      lender_((by == target_device_ ? source : target).memory()->home().shared_from_this()) {
  parts()[0].stream = stream_kind::peer;
  parts()[0].peer = lender_->ordinal();
  parts()[0].is_small_copy = times == 1 && size_ <= lane::small_copy_bytes;
  expect_uses(2);
  add_use(use_of(source, true, false));
  add_use(use_of(target, false, true));
  of_elements(source.count(), source.type());
}

void peer_copy_operation::on_submit(locked) {
  lender_->lend();
  lent_ = true;
}

caf::expected<issue_outcome> peer_copy_operation::issue(part& p, lane& on) {
  issued_at_ = clock::now();
  if (size_ == 0)
    return issue_outcome::finished;
  const peer_copy what{target_, target_device_, source_, source_device_, size_};
  for (std::size_t i = 0; i < times_; ++i)
    if (auto error = on.copy_over_link(p, what))
      return on_failed_work(p, error);
  return issue_outcome::enqueued;
}

caf::error peer_copy_operation::on_failed_work(part&, caf::error why) noexcept {
  auto result = as_link_failure(why, source_device_, target_device_);
  if (code_of(result) == errc::link_failed)
    on_link_failed(result);
  return result;
}

void peer_copy_operation::on_part_done(part&) noexcept { done_at_ = clock::now(); }

void peer_copy_operation::on_part_over(part&) noexcept {
  if (lent_)
    lender_->end_loan();
}

} // namespace troupe::detail
