// The order with streams of other code, without GPUs: virtual devices say that they are CUDA's, and
// queues of the host backend are the streams.

#include "interop/acquired.hpp"
#include "support/eventually.hpp"
#include "support/forwarding_backend.hpp"
#include "support/log_lines.hpp"
#include "support/world_fixture.hpp"
#include <troupe/detail/device_allocator.hpp>
#include <troupe/detail/tensor_exchange.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

class cuda_like_device : public forwarding_device {
public:
  using forwarding_device::forwarding_device;
  bool runs_cuda() const noexcept override { return true; }
};

class cuda_like_backend : public forwarding_backend {
public:
  using forwarding_backend::forwarding_backend;
  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override {
    return open_as<cuda_like_device>(ordinal);
  }
};

/// A stream of the test.
class foreign_queue {
public:
  explicit foreign_queue(backend_device& device)
      : device_(device), stream_(must(device.create_stream())) {}
  ~foreign_queue() {
    held_.set();
    synchronize();
    EXPECT_TRUE(is_ok(device_.destroy_stream(stream_)));
  }
  foreign_queue(const foreign_queue&) = delete;

  std::optional<CUstream_st*> native() const { return static_cast<CUstream_st*>(stream_.native); }

  void run(std::function<void()> f) {
    work_.push_back(std::move(f));
    must(device_.launch_host(
        stream_, [](void* x) { (*static_cast<std::function<void()>*>(x))(); }, &work_.back()));
  }
  /// Blocks the stream until `open`.
  void hold() {
    run([this] { EXPECT_TRUE(held_.wait()); });
  }
  void open() { held_.set(); }
  void synchronize() {
    auto event = must(device_.create_event());
    must(device_.record(event, stream_));
    must(device_.synchronize(event));
    must(device_.destroy_event(event));
  }

private:
  backend_device& device_;
  stream_view stream_;
  flag held_;
  std::deque<std::function<void()>> work_;
};

constexpr std::size_t size = 10'000;

/// Returns a tensor of bytes on device 0. Both arguments must live as long as it.
detail::foreign_tensor bytes_tensor(std::span<std::byte> data,
                                    std::span<const std::int64_t> shape) {
  return {.data = data.data(),
          .device_type = 2,
          .device_id = 0,
          .dimensions = static_cast<std::int32_t>(shape.size()),
          .type_code = 1,
          .type_bits = 8,
          .type_lanes = 1,
          .shape = shape.data()};
}

class UserStreams : public ::testing::Test {
protected:
  void SetUp() override {
    TROUPE_IN_PROCESS_ONLY("streams of this process");
    TROUPE_HOST_ONLY("on GPUs there are real streams");
    sys_ = std::make_unique<test_system>(system_options{
        .devices = 1, .wrap = [](std::shared_ptr<backend> inner) -> std::shared_ptr<backend> {
          return std::make_shared<cuda_like_backend>(std::move(inner));
        }});
    gpu_ = std::make_unique<device>(sys_->open());
    backend_ = make_host_backend({.devices = 1});
    other_ = must(backend_->open(0));
    must(other_->bind());
    stream_ = std::make_unique<foreign_queue>(*other_);
  }

  any_gpu_ref allocated(std::uint64_t seed) {
    auto ref = must(answer_of(gpu_->allocate(dtype::uint8, size)));
    put(*gpu_, ref, random_bytes(size, seed));
    return ref;
  }
  detail::lent_tensor lend(const any_gpu_ref& ref, access_mode mode = access_mode::read_write) {
    return must(detail::lend_tensor(*gpu_, ref, mode, stream_->native(), {}));
  }

  std::unique_ptr<test_system> sys_;
  std::unique_ptr<device> gpu_;
  std::shared_ptr<backend> backend_;
  std::unique_ptr<backend_device> other_;
  std::unique_ptr<foreign_queue> stream_;
};

TEST_F(UserStreams, ComeAfterWhatWasRequestedBefore) {
  auto ref = allocated(1);
  const auto want = random_bytes(size, 2);
  gate held;
  held.hold_stream(*gpu_, {}, {ref});
  auto upload = gpu_->upload(ref, std::span<const std::byte>{want});
  auto lent = std::async(std::launch::async, [&] { return lend(ref); });
  ASSERT_TRUE(eventually([&] { return is_acquired(*gpu_, ref); }));
  EXPECT_FALSE(upload.ready());
  EXPECT_EQ(lent.wait_for(0s), std::future_status::timeout); // a failure has to be its error
  held.open();
  auto tensor = lent.get();
  EXPECT_EQ(tensor.device_type, 2);
  EXPECT_EQ(tensor.device_id, 0);
  std::vector<std::byte> seen(size);
  stream_->run([&] { std::memcpy(seen.data(), tensor.data, size); });
  stream_->synchronize();
  EXPECT_EQ(seen, want);
}

TEST_F(UserStreams, GetNoMemoryThatAFailedRequestWasWriting) {
  auto ref = allocated(1);
  gate held;
  held.hold_lane(*gpu_);
  auto fails = gpu_->launch(
      [](launch_context&) { return make_error(errc::invalid_argument, "it fails"); }, {}, {ref});
  auto lent = std::async(std::launch::async, [&] {
    return detail::lend_tensor(*gpu_, ref, access_mode::read_write, stream_->native(), {});
  });
  ASSERT_TRUE(eventually([&] { return is_acquired(*gpu_, ref); }));
  held.open();
  EXPECT_TRUE(has_code(answer_of(fails), errc::launch_failed));
  EXPECT_TRUE(has_code(error_of(lent.get()), errc::launch_failed));
  EXPECT_TRUE(eventually([&] { return !is_acquired(*gpu_, ref); }));
}

TEST_F(UserStreams, AreWaitedForByLaterRequests) {
  for (auto mode : {access_mode::read_write, access_mode::write}) {
    auto ref = allocated(1);
    const auto want = random_bytes(size, 2);
    foreign_queue user{*other_};
    auto tensor = must(detail::lend_tensor(*gpu_, ref, mode, user.native(), {}));
    user.hold();
    user.run([&, to = tensor.data] { std::memcpy(to, want.data(), size); });
    EXPECT_TRUE(has_code(get(*gpu_, ref), errc::buffer_acquired));
    tensor.hold.reset();
    std::vector<std::byte> got(size);
    auto download = gpu_->download(ref, std::span{got});
    auto other = allocated(3); // other work goes on: a copy and a kernel
    must(answer_of(gpu_->fill(must(other.slice(0, 100)), std::uint8_t{9})));
    EXPECT_FALSE(download.ready());
    user.open();
    must(answer_of(download));
    EXPECT_EQ(got, want);
  }
}

TEST_F(UserStreams, ThatReadKeepWritersBack) {
  auto ref = allocated(1);
  auto tensor = lend(ref, access_mode::read);
  std::vector<std::byte> seen(size);
  stream_->hold();
  stream_->run([&, from = tensor.data] { std::memcpy(seen.data(), from, size); });
  EXPECT_TRUE(holds(*gpu_, ref, random_bytes(size, 1))); // readers go on
  tensor.hold.reset();
  auto fill = gpu_->fill(ref, std::uint8_t{9});
  must(answer_of(gpu_->stats()));
  EXPECT_FALSE(fill.ready());
  stream_->open();
  must(answer_of(fill));
  stream_->synchronize();
  EXPECT_EQ(seen, random_bytes(size, 1));
}

// The release is still queued when the reset drops it.
TEST_F(UserStreams, KeepTheMemoryThroughAReset) {
  auto ref = allocated(1);
  auto tensor = lend(ref);
  std::vector<std::byte> seen(size);
  stream_->hold();
  stream_->run([&, from = tensor.data] { std::memcpy(seen.data(), from, size); });
  gate held;
  held.hold_lane(*gpu_);
  tensor.hold.reset();
  auto reset = gpu_->reset();
  held.open();
  EXPECT_FALSE(must(reset.wait_for(50ms)));
  stream_->open();
  must(answer_of(reset));
  stream_->synchronize();
  EXPECT_EQ(seen, random_bytes(size, 1));
}

TEST_F(UserStreams, OfAProducerAreWaitedFor) {
  for (bool read_only : {false, true}) {
    SCOPED_TRACE(read_only);
    std::vector<std::byte> theirs(size);
    const auto want = random_bytes(size, 4);
    const std::int64_t shape[] = {100, 100};
    std::atomic<int> freed{0};
    foreign_queue user{*other_};
    user.hold();
    user.run([&] { std::ranges::copy(want, theirs.begin()); });
    auto tensor = bytes_tensor(theirs, shape);
    tensor.read_only = read_only;
    auto ref = must(detail::adopt_tensor(*gpu_, tensor, user.native(), [&] { ++freed; }));
    std::vector<std::byte> got(size);
    auto download = gpu_->download(ref, std::span{got});
    ref = {};
    must(answer_of(gpu_->stats()));
    EXPECT_FALSE(download.ready());
    EXPECT_EQ(freed, 0);
    user.open();
    must(answer_of(download));
    EXPECT_EQ(got, want);
    EXPECT_TRUE(eventually([&] { return freed == 1; }));
  }
}

TEST_F(UserStreams, SurviveADeleterThatThrows) {
  std::vector<std::byte> theirs(4);
  const std::int64_t shape[] = {4};
  const auto tensor = bytes_tensor(theirs, shape);
  log_lines log;
  auto ref = must(detail::adopt_tensor(*gpu_, tensor, stream_->native(),
                                       [] { throw std::runtime_error("not today"); }));
  ref = {};
  EXPECT_TRUE(log.say("not today"));
}

TEST_F(UserStreams, KeepMemoryThatIsDeallocated) {
  auto allocator = must(detail::device_allocator::make(*gpu_));
  const auto before = must(answer_of(gpu_->stats())).free_bytes;
  auto* memory = must(allocator->allocate(size, 256));
  const auto used = must(answer_of(gpu_->stats())).free_bytes;
  const auto want = random_bytes(size, 5);
  std::memcpy(memory, want.data(), size);
  std::vector<std::byte> seen(size);
  stream_->hold();
  stream_->run([&] { std::memcpy(seen.data(), memory, size); });
  allocator->deallocate(memory, stream_->native());
  must(answer_of(gpu_->stats()));
  EXPECT_EQ(must(answer_of(gpu_->stats())).free_bytes, used);
  for (std::uint64_t i = 0; i < 8; ++i)
    allocated(6 + i); // other memory
  stream_->open();
  stream_->synchronize();
  EXPECT_EQ(seen, want);
  EXPECT_TRUE(is_ok(answer_of(gpu_->reset())));
  EXPECT_EQ(must(answer_of(gpu_->stats())).free_bytes, before);
}

TEST_F(UserStreams, OfEachThreadAreRefused) {
  auto* per_thread = reinterpret_cast<CUstream_st*>(std::uintptr_t{2});
  auto ref = allocated(1);
  EXPECT_TRUE(has_code(detail::lend_tensor(*gpu_, ref, access_mode::read, per_thread, {}).error(),
                       errc::not_supported));
  std::byte theirs[4];
  const std::int64_t shape[] = {4};
  const auto tensor = bytes_tensor(theirs, shape);
  EXPECT_TRUE(has_code(detail::adopt_tensor(*gpu_, tensor, per_thread, [] { FAIL(); }),
                       errc::not_supported));
}

TEST_F(UserStreams, AreForgottenWhenTheDeviceEnds) {
  auto ref = allocated(1);
  auto tensor = lend(ref);
  auto allocator = must(detail::device_allocator::make(*gpu_));
  auto* memory = must(allocator->allocate(size, 256));
  EXPECT_TRUE(has_code(answer_of(gpu_->reset()), errc::buffer_acquired));
  gpu_->shutdown();
  allocator->deallocate(memory, stream_->native());
  tensor.hold.reset();
  EXPECT_TRUE(ref.stale());
}

} // namespace

} // namespace troupe::testing
