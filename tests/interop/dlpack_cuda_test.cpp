// DLPack tensors on GPUs: the order with the streams of consumers and producers, and lifetimes.

#include "interop/cuda_fixture.hpp"
#include "support/eventually.hpp"
#include <troupe/dlpack.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <random>
#include <thread>
#include <utility>

namespace troupe::testing {

namespace {

using words = std::vector<std::uint32_t>;

constexpr std::size_t count = std::size_t{1} << 22;

words random_words(std::size_t n, std::uint64_t seed) {
  std::mt19937_64 random{seed};
  words result(n);
  for (auto& x : result)
    x = static_cast<std::uint32_t>(random());
  return result;
}

/// a * x + y, element by element.
words affine_of(words x, const words& y, std::uint32_t a) {
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] = a * x[i] + y[i];
  return x;
}

std::uint32_t* words_of(const DLTensor& x) {
  return reinterpret_cast<std::uint32_t*>(static_cast<std::byte*>(x.data) + x.byte_offset);
}

/// A tensor in memory of cudaMalloc, as another library would make it.
struct cuda_producer {
  cuda_producer(int device, std::size_t n) : shape(static_cast<std::int64_t>(n)) {
    must_cuda(cudaSetDevice(device));
    void* memory = nullptr;
    must_cuda(cudaMalloc(&memory, n * sizeof(std::uint32_t)));
    auto& x = tensor.dl_tensor;
    x.data = memory;
    x.device = {kDLCUDA, device};
    x.ndim = 1;
    x.dtype = {1, 32, 1};
    x.shape = &shape;
    tensor.version = {1, 0};
    tensor.manager_ctx = this;
    tensor.deleter = [](dlpack_versioned_tensor* self) {
      EXPECT_EQ(cudaFree(self->dl_tensor.data), cudaSuccess);
      ++static_cast<cuda_producer*>(self->manager_ctx)->deleted;
    };
  }
  cuda_producer(const cuda_producer&) = delete;

  std::uint32_t* data() const { return words_of(tensor.dl_tensor); }

  std::int64_t shape;
  std::atomic<int> deleted{0};
  dlpack_versioned_tensor tensor{};
};

class DlpackOnCuda : public CudaInterop {};

TEST_F(DlpackOnCuda, TheConsumersStreamComesAfterWhatWasRequested) {
  const own_stream consumer{0};
  const auto x0 = random_words(count, 1);
  const auto y0 = random_words(count, 2);
  auto x = must(gpu_->allocate<std::uint32_t>(count));
  auto y = must(gpu_->allocate<std::uint32_t>(count));
  pinned_words seen{count};
  gpu_->upload(x, x0);
  gpu_->upload(y, y0);
  auto want = x0;
  for (std::uint32_t round = 0; round < 8; ++round) {
    const std::uint32_t a = 2 * round + 3;
    gpu_->launch(affine(x, y, a), {x, y}, {x}); // in flight at the export
    want = affine_of(std::move(want), y0, a);
    auto tensor = must(to_dlpack(*gpu_, x, {.stream = consumer}));
    EXPECT_EQ(tensor->dl_tensor.device.device_type, kDLCUDA);
    EXPECT_EQ(tensor->dl_tensor.device.device_id, 0);
    auto* memory = words_of(tensor->dl_tensor);
    must_cuda(
        cudaMemcpyAsync(seen.data(), memory, seen.size_bytes(), cudaMemcpyDeviceToHost, consumer));
    // The consumer's own work, which is in flight when it drops the tensor.
    for (int k = 0; k < 4; ++k)
      must_cuda(
          static_cast<cudaError_t>(launch_affine(memory, must(y.access()), a, count, consumer)));
    tensor.reset();
    auto after = gpu_->download(x); // waits for the consumer's stream
    consumer.synchronize();
    EXPECT_EQ(seen.content(), want);
    for (int k = 0; k < 4; ++k)
      want = affine_of(std::move(want), y0, a);
    EXPECT_EQ(must(std::move(after)), want);
  }
}

TEST_F(DlpackOnCuda, RequestsWaitForTheConsumersStream) {
  auto x = must(gpu_->allocate<std::uint32_t>(count));
  const auto next = random_words(count, 3);
  const pinned_words source{next};
  own_stream consumer{0}; // after the pinned memory: freeing that waits for the stream
  gpu_->fill(x, 1u);
  auto tensor = must(to_dlpack(*gpu_, x, {.stream = consumer}));
  consumer.hold();
  must_cuda(cudaMemcpyAsync(words_of(tensor->dl_tensor), source.data(), source.size_bytes(),
                            cudaMemcpyHostToDevice, consumer));
  EXPECT_TRUE(has_code(gpu_->fill(x, 2u).wait(), errc::buffer_acquired));
  tensor.reset();
  words got(count);
  auto download = gpu_->download(x, got); // admitted, and behind the consumer
  must(gpu_->stats().wait());
  EXPECT_FALSE(download.ready());
  consumer.open();
  must(download.wait());
  EXPECT_EQ(got, next);
}

TEST_F(DlpackOnCuda, OtherWorkDoesNotWaitForTheConsumersStream) {
  auto x = must(gpu_->allocate<std::uint32_t>(count));
  auto y = must(gpu_->allocate<std::uint32_t>(count));
  own_stream consumer{0};
  gpu_->fill(x, 1u);
  auto tensor = must(to_dlpack(*gpu_, x, {.stream = consumer}));
  consumer.hold();
  must_cuda(
      cudaMemsetAsync(words_of(tensor->dl_tensor), 2, count * sizeof(std::uint32_t), consumer));
  tensor.reset();
  words got(count);
  auto behind = gpu_->download(x, got);
  must(gpu_->fill(y, 7u).wait()); // a kernel
  EXPECT_FALSE(behind.ready());
  consumer.open();
  must(behind.wait());
  EXPECT_EQ(got, words(count, 0x02020202));
  EXPECT_EQ(must(gpu_->download(y)), words(count, 7));
}

TEST_F(DlpackOnCuda, AnExportWithoutAStreamWaits) {
  const auto x0 = random_words(count, 1);
  const auto y0 = random_words(count, 2);
  auto x = must(gpu_->allocate<std::uint32_t>(count));
  auto y = must(gpu_->allocate<std::uint32_t>(count));
  gpu_->upload(x, x0);
  gpu_->upload(y, y0);
  auto work = gpu_->launch(affine(x, y, 5), {x, y}, {x});
  auto tensor = must(to_dlpack(*gpu_, x));
  EXPECT_TRUE(work.ready());
  // A stream that is ordered with nothing sees the result.
  const own_stream any{0};
  pinned_words seen{count};
  must_cuda(cudaMemcpyAsync(seen.data(), words_of(tensor->dl_tensor), seen.size_bytes(),
                            cudaMemcpyDeviceToHost, any));
  any.synchronize();
  EXPECT_EQ(seen.content(), affine_of(x0, y0, 5));
  tensor.reset();
  must(gpu_->fill(x, 9u).wait());
  EXPECT_EQ(must(gpu_->download(x)), words(count, 9));
}

TEST_F(DlpackOnCuda, ASliceIsExportedWhereItLies) {
  const auto x0 = random_words(count, 4);
  auto x = must(gpu_->allocate<std::uint32_t>(count));
  gpu_->upload(x, x0);
  auto part = must(x.slice(1000, 5000));
  auto tensor = must(to_dlpack(*gpu_, part));
  x = {};
  part = {};
  EXPECT_TRUE(has_code(gpu_->reset().wait(), errc::buffer_acquired));
  words got(5000);
  must_cuda(cudaMemcpy(got.data(), words_of(tensor->dl_tensor), 5000 * sizeof(std::uint32_t),
                       cudaMemcpyDeviceToHost));
  EXPECT_TRUE(std::equal(got.begin(), got.end(), x0.begin() + 1000));
  tensor.reset();
  must(gpu_->reset().wait());
}

TEST_F(DlpackOnCuda, RequestsWaitForTheProducersStream) {
  cuda_producer made{0, count};
  const auto first = random_words(count, 5);
  const pinned_words source{first};
  own_stream stream{0};
  must_cuda(cudaMemset(made.data(), 0xee, count * sizeof(std::uint32_t)));
  stream.hold();
  must_cuda(cudaMemcpyAsync(made.data(), source.data(), source.size_bytes(), cudaMemcpyHostToDevice,
                            stream));
  auto ref = must(from_dlpack<std::uint32_t>(*gpu_, &made.tensor, {.stream = stream}));
  words got(count);
  auto download = gpu_->download(ref, got);
  must(gpu_->stats().wait());
  EXPECT_FALSE(download.ready());
  stream.open();
  must(download.wait());
  EXPECT_EQ(got, first);
  // In place, and seen by the producer.
  must(gpu_->launch(affine(ref, ref, 6), {ref}, {ref}).wait());
  must_cuda(cudaMemcpy(got.data(), made.data(), source.size_bytes(), cudaMemcpyDeviceToHost));
  EXPECT_EQ(got, affine_of(first, first, 6));
  EXPECT_EQ(made.deleted, 0);
  ref = {};
  EXPECT_TRUE(eventually([&] { return made.deleted == 1; }));
  settle(*gpu_);
  EXPECT_EQ(made.deleted, 1);
}

TEST_F(DlpackOnCuda, AReadOnlyTensorIsOrderedWithItsProducer) {
  cuda_producer made{0, count};
  const auto first = random_words(count, 6);
  const pinned_words source{first};
  own_stream stream{0};
  made.tensor.flags = dlpack_read_only;
  stream.hold();
  must_cuda(cudaMemcpyAsync(made.data(), source.data(), source.size_bytes(), cudaMemcpyHostToDevice,
                            stream));
  auto ref = must(from_dlpack<std::uint32_t>(*gpu_, &made.tensor, {.stream = stream}));
  words got(count);
  auto download = gpu_->download(ref, got);
  EXPECT_TRUE(has_code(gpu_->fill(ref, 1u).wait(), errc::buffer_acquired));
  stream.open();
  must(download.wait());
  EXPECT_EQ(got, first);
  ref = {};
  EXPECT_TRUE(eventually([&] { return made.deleted == 1; }));
}

TEST_F(DlpackOnCuda, RefusesWhatItCannotOrder) {
  cuda_producer made{0, 100};
  auto x = must(gpu_->allocate<std::uint32_t>(100));
  EXPECT_TRUE(has_code(to_dlpack(*gpu_, x, {.stream = cudaStreamPerThread}), errc::not_supported));
  EXPECT_TRUE(has_code(from_dlpack(*gpu_, &made.tensor, {.stream = cudaStreamPerThread}),
                       errc::not_supported));
  made.tensor.dl_tensor.device.device_type = kDLCPU;
  EXPECT_TRUE(has_code(from_dlpack(*gpu_, &made.tensor), errc::invalid_argument));
  made.tensor.dl_tensor.device = {kDLCUDA, 1};
  EXPECT_TRUE(has_code(from_dlpack(*gpu_, &made.tensor), errc::invalid_argument));
  EXPECT_EQ(made.deleted, 0);
  made.tensor.dl_tensor.device = {kDLCUDA, 0};
  // The legacy default stream has two names.
  for (auto* stream : {static_cast<cudaStream_t>(nullptr), cudaStreamLegacy}) {
    must(gpu_->fill(x, 7u).wait());
    auto tensor = must(to_dlpack(*gpu_, x, {.stream = stream}));
    must_cuda(cudaMemsetAsync(tensor->dl_tensor.data, 1, 400, stream));
    tensor.reset();
    EXPECT_EQ(must(gpu_->download(x)), words(100, 0x01010101));
  }
  auto ref = must(from_dlpack(*gpu_, &made.tensor));
  ref = {};
  EXPECT_TRUE(eventually([&] { return made.deleted == 1; }));
}

// -- lifetimes

TEST_F(DlpackOnCuda, TheSystemEndsBeforeAnImportedTensor) {
  cuda_producer made{0, count};
  auto ref = must(from_dlpack<std::uint32_t>(*gpu_, &made.tensor));
  gpu_->fill(ref, 3u);
  TearDown();
  EXPECT_TRUE(ref.stale());
  EXPECT_EQ(made.deleted, 0);
  ref = {};
  EXPECT_TRUE(eventually([&] { return made.deleted == 1; }));
}

TEST_F(DlpackOnCuda, TheSystemWaitsForAnExportedTensor) {
  const own_stream stream{0};
  const auto x0 = random_words(count, 8);
  auto x = must(gpu_->allocate<std::uint32_t>(count));
  gpu_->upload(x, x0);
  auto tensor = must(to_dlpack(*gpu_, x, {.stream = stream}));
  x = {};
  std::atomic<bool> released = false;
  std::thread consumer{[&] {
    words got(count);
    must_cuda(cudaMemcpyAsync(got.data(), words_of(tensor->dl_tensor),
                              count * sizeof(std::uint32_t), cudaMemcpyDeviceToHost, stream));
    stream.synchronize();
    EXPECT_EQ(got, x0);
    released = true;
    tensor.reset();
  }};
  TearDown();
  EXPECT_TRUE(released);
  consumer.join();
}

TEST_F(DlpackOnCuda, ADeviceEndsBeforeAnImportedTensor) {
  for (bool shuts_down : {false, true}) {
    SCOPED_TRACE(shuts_down);
    cuda_producer made{0, count};
    auto ref = must(from_dlpack<std::uint32_t>(*gpu_, &made.tensor));
    if (shuts_down)
      gpu_->shutdown();
    else
      must(gpu_->reset().wait());
    EXPECT_TRUE(ref.stale());
    EXPECT_EQ(made.deleted, 0);
    ref = {};
    EXPECT_TRUE(eventually([&] { return made.deleted == 1; }));
  }
}

// -- two devices

TEST_F(DlpackOnCuda, TensorsOfTwoDevicesAreReducedInPlace) {
  TROUPE_NEEDS_GPUS(2);
  auto w = must(world::open(*sys_, {.devices = {0, 1}}));
  std::vector<std::unique_ptr<cuda_producer>> made;
  std::vector<std::unique_ptr<own_stream>> streams;
  std::vector<std::unique_ptr<pinned_words>> sources;
  std::vector<gpu_ref<std::uint32_t>> refs;
  words want(count);
  for (int rank = 0; rank < 2; ++rank) {
    made.push_back(std::make_unique<cuda_producer>(rank, count));
    streams.push_back(std::make_unique<own_stream>(rank));
    const auto input = random_words(count, 10 + static_cast<std::uint64_t>(rank));
    for (std::size_t i = 0; i < count; ++i)
      want[i] += input[i];
    sources.push_back(std::make_unique<pinned_words>(input));
    must_cuda(cudaMemcpyAsync(made.back()->data(), sources.back()->data(),
                              sources.back()->size_bytes(), cudaMemcpyHostToDevice,
                              *streams.back()));
    const auto d = w.device_of(static_cast<std::size_t>(rank));
    refs.push_back(
        must(from_dlpack<std::uint32_t>(d, &made.back()->tensor, {.stream = *streams.back()})));
  }
  EXPECT_TRUE(has_code(from_dlpack(w.device_of(0), &made[1]->tensor), errc::invalid_argument));
  must(w.all_reduce(refs).wait());
  for (auto& x : made) {
    words got(count);
    must_cuda(
        cudaMemcpy(got.data(), x->data(), count * sizeof(std::uint32_t), cudaMemcpyDeviceToHost));
    EXPECT_EQ(got, want);
  }
  // An export of each device names it.
  for (std::size_t rank = 0; rank < 2; ++rank) {
    auto tensor = must(to_dlpack(w.device_of(rank), refs[rank], {.stream = *streams[rank]}));
    EXPECT_EQ(tensor->dl_tensor.device.device_id, static_cast<int>(rank));
    EXPECT_TRUE(has_code(to_dlpack(w.device_of(1 - rank), refs[rank]), errc::invalid_argument));
  }
  refs.clear();
  for (auto& x : made)
    EXPECT_TRUE(eventually([&] { return x->deleted == 1; }));
}

} // namespace

} // namespace troupe::testing
