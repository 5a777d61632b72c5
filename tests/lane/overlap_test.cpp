/// Launches that overlap, on a device with fewer queues than streams.
#include "lane/lane.hpp"
#include "operation/use_of.hpp"
#include "support/core_fixture.hpp"
#include "support/eventually.hpp"
#include "support/forwarding_backend.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace troupe {

namespace {

using detail::issue_outcome;
using testing::answer_of;
using testing::borrow;
using testing::core_system;
using testing::eventually;
using testing::fault;
using testing::fault_plan;
using testing::gate;
using testing::is_ok;
using testing::no_work;
using testing::probe;
using testing::verb;

/// A device with as many queues as CUDA has. It puts each further stream into one queue with the
/// stream of uploads.
class queueing_device final : public testing::forwarding_device {
public:
  using forwarding_device::forwarding_device;

  caf::expected<stream_view> create_stream() noexcept override {
    if (queues_.size() == most_queues)
      return queues_[upload];
    auto made = inner_->create_stream();
    if (made)
      queues_.push_back(*made);
    return made;
  }
  caf::error destroy_stream(stream_view x) noexcept override {
    // Each queue once, as the first of its streams.
    return std::erase_if(queues_, [&](auto& y) { return y.native == x.native; }) != 0
               ? inner_->destroy_stream(x)
               : caf::error{};
  }

private:
  static constexpr std::size_t most_queues = 8;
  static constexpr auto upload = static_cast<std::size_t>(detail::stream_kind::upload);

  std::vector<stream_view> queues_;
};

class queueing_backend final : public testing::forwarding_backend {
public:
  queueing_backend() : forwarding_backend(make_host_backend({.devices = 1})) {}

  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override {
    return open_as<queueing_device>(ordinal);
  }
};

/// Starts work in a stream of collectives that writes `to` and calls `f`.
std::shared_ptr<probe> start_collective(const core_system& system, const any_gpu_ref& to,
                                        std::function<void()> f) {
  auto op = std::make_shared<probe>(
      std::vector{system.lane()},
      [f = std::move(f)](detail::part& p, detail::lane& on) -> caf::expected<issue_outcome> {
        auto error = on.device().launch_host(
            on.stream(p), [](void* x) { (*static_cast<const std::function<void()>*>(x))(); },
            const_cast<std::function<void()>*>(&f));
        if (error)
          return error;
        return issue_outcome::enqueued;
      });
  op->parts()[0].stream = detail::stream_kind::collective;
  op->add_use(detail::use_of(to, false, true));
  system.runtime()->start(op);
  return op;
}

// Work behind which the launch waits may need the upload, on another device.
TEST(Overlap, ALaunchThatWaitsHoldsUpNoUploadInPieces) {
  const auto plan = std::make_shared<fault_plan>();
  core_system system{{.lanes = {.staging_bytes = 4096},
                      .plan = plan,
                      .backend = std::make_shared<queueing_backend>()}};
  const auto device = system.device();
  const auto target = testing::allocate_bytes(device, 100'000);
  const auto memory = testing::allocate_bytes(device, 8);
  plan->add({.kind = fault::hang, .on = verb::copy});
  std::vector<std::uint8_t> content(100'000, 7);
  const auto upload = device.upload(target, borrow(content), {});
  ASSERT_TRUE(plan->wait_injected(fault::hang, 1, testing::patience));
  gate work;
  const auto other = device.launch(work.in_stream(), {}, {}, {}); // the compute stream is not free
  const auto first = start_collective(system, memory, work.passer());
  const auto behind = device.launch(no_work(), {memory}, {}, {.overlap = true});
  // The upload counts as queued until its last piece.
  ASSERT_TRUE(eventually([&] { return system.lane()->queued() == 1; }));
  plan->release();
  EXPECT_TRUE(is_ok(answer_of(upload)));
  EXPECT_FALSE(behind->completed());
  work.open();
  EXPECT_TRUE(is_ok(answer_of(other)));
  EXPECT_TRUE(is_ok(answer_of(first)));
  EXPECT_TRUE(is_ok(answer_of(behind)));
}

} // namespace

} // namespace troupe
