#include "raw_copies.hpp"

#include "cuda_call.hpp"
#include "rank_threads.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

namespace bench {

namespace {

void select(int device) { check(cudaSetDevice(device), "cudaSetDevice"); }

class device_stream {
public:
  explicit device_stream(int device) : device_(device) {
    select(device);
    check(cudaStreamCreateWithFlags(&native_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~device_stream() {
    select(device_);
    check(cudaStreamDestroy(native_), "cudaStreamDestroy");
  }
  device_stream(const device_stream&) = delete;
  device_stream& operator=(const device_stream&) = delete;

  int device() const { return device_; }
  cudaStream_t get() const { return native_; }
  void synchronize() const { check(cudaStreamSynchronize(native_), "cudaStreamSynchronize"); }

private:
  const int device_;
  cudaStream_t native_ = nullptr;
};

} // namespace

std::shared_ptr<void> plain_memory(int device, std::size_t size_bytes) {
  select(device);
  void* memory = nullptr;
  check(cudaMalloc(&memory, size_bytes), "cudaMalloc");
  return {memory, [device](void* x) {
            select(device);
            check(cudaFree(x), "cudaFree");
          }};
}

class memory_pool {
public:
  memory_pool(int device, const std::vector<int>& devices) : stream_(device) {
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location = {cudaMemLocationTypeDevice, device};
    check(cudaMemPoolCreate(&native_, &properties), "cudaMemPoolCreate");
    auto threshold = std::numeric_limits<std::uint64_t>::max();
    check(cudaMemPoolSetAttribute(native_, cudaMemPoolAttrReleaseThreshold, &threshold),
          "cudaMemPoolSetAttribute");
    for (const int other : devices)
      if (other != device && can_access(other, device))
        admit(other);
  }
  ~memory_pool() { check(cudaMemPoolDestroy(native_), "cudaMemPoolDestroy"); }
  memory_pool(const memory_pool&) = delete;
  memory_pool& operator=(const memory_pool&) = delete;

  void* allocate(std::size_t size_bytes) {
    select(stream_.device());
    void* memory = nullptr;
    check(cudaMallocFromPoolAsync(&memory, size_bytes, native_, stream_.get()),
          "cudaMallocFromPoolAsync");
    stream_.synchronize();
    return memory;
  }
  void free(void* memory) {
    select(stream_.device());
    check(cudaFreeAsync(memory, stream_.get()), "cudaFreeAsync");
    stream_.synchronize();
  }

  static bool can_access(int from, int to) {
    int can = 0;
    check(cudaDeviceCanAccessPeer(&can, from, to), "cudaDeviceCanAccessPeer");
    return can != 0;
  }

private:
  void admit(int other) {
    cudaMemAccessDesc access{};
    access.location = {cudaMemLocationTypeDevice, other};
    access.flags = cudaMemAccessFlagsProtReadWrite;
    check(cudaMemPoolSetAccess(native_, &access, 1), "cudaMemPoolSetAccess");
  }

  const device_stream stream_;
  cudaMemPool_t native_ = nullptr;
};

std::shared_ptr<memory_pool> make_pool(int device, const std::vector<int>& devices) {
  return std::make_shared<memory_pool>(device, devices);
}

std::shared_ptr<void> pool_memory(const std::shared_ptr<memory_pool>& pool,
                                  std::size_t size_bytes) {
  return {pool->allocate(size_bytes), [pool](void* x) { pool->free(x); }};
}

void enable_access(const std::vector<int>& devices) {
  for (const int from : devices)
    for (const int to : devices) {
      if (from == to || !memory_pool::can_access(from, to))
        continue;
      select(from);
      const auto code = cudaDeviceEnablePeerAccess(to, 0);
      if (code == cudaErrorPeerAccessAlreadyEnabled)
        (void)cudaGetLastError();
      else
        check(code, "cudaDeviceEnablePeerAccess");
    }
}

namespace {

enum class stream_for : std::uint8_t { source_device, target_device, each_route };
enum class wait_by : std::uint8_t { event_query, synchronize };

class raw_copies final : public copying_contestant {
public:
  raw_copies(std::string name, std::vector<route_memory> memory, stream_for streams, wait_by wait)
      : name_(std::move(name)), memory_(std::move(memory)), wait_(wait) {
    for (auto& x : memory_) {
      uploads_.push_back(std::make_unique<device_stream>(x.way.from));
      const int device = streams == stream_for::target_device ? x.way.to : x.way.from;
      auto i = std::find_if(streams_.begin(), streams_.end(),
                            [=](auto& s) { return s->device() == device; });
      if (streams == stream_for::each_route)
        i = streams_.end();
      stream_of_.push_back(static_cast<std::size_t>(i - streams_.begin()));
      if (i == streams_.end())
        streams_.push_back(std::make_unique<device_stream>(device));
    }
  }

  std::string name() const override { return name_; }
  std::size_t routes() const override { return memory_.size(); }

  void write(std::size_t i, std::size_t offset, std::span<const std::byte> bytes) override {
    select(memory_[i].way.from);
    const auto& stream = *uploads_[i];
    check(cudaMemcpyAsync(at(memory_[i].source, offset), bytes.data(), bytes.size(),
                          cudaMemcpyHostToDevice, stream.get()),
          "cudaMemcpyAsync");
    stream.synchronize();
  }

  /// Reads without stream order: `run` has to wait for its operations.
  void read(std::size_t i, std::size_t offset, std::span<std::byte> bytes) override {
    select(memory_[i].way.to);
    check(cudaMemcpy(bytes.data(), at(memory_[i].target, offset), bytes.size(),
                     cudaMemcpyDeviceToHost),
          "cudaMemcpy");
  }

  timing run(std::size_t size_bytes, std::size_t operations, std::size_t window) override {
    return window == 1 ? one_by_one(size_bytes, operations)
                       : in_flight(size_bytes, operations, window);
  }

private:
  static void* at(const std::shared_ptr<void>& memory, std::size_t offset) {
    return static_cast<std::byte*>(memory.get()) + offset;
  }

  void issue(std::size_t size_bytes, std::size_t offset) const {
    for (std::size_t i = 0; i < memory_.size(); ++i) {
      auto& x = memory_[i];
      check(cudaMemcpyPeerAsync(at(x.target, offset), x.way.to, at(x.source, offset), x.way.from,
                                size_bytes, streams_[stream_of_[i]]->get()),
            "cudaMemcpyPeerAsync");
    }
  }

  /// Makes `n` events for each stream.
  std::vector<std::unique_ptr<cuda_event[]>> make_events(std::size_t n) const {
    std::vector<std::unique_ptr<cuda_event[]>> result;
    for (auto& x : streams_) {
      select(x->device());
      result.push_back(std::make_unique<cuda_event[]>(n));
    }
    select(memory_.front().way.from);
    return result;
  }

  timing one_by_one(std::size_t size_bytes, std::size_t operations) const {
    const auto events = make_events(1);
    timing result;
    result.each.reserve(operations);
    const auto begin = clock::now();
    for (std::size_t k = 0; k < operations; ++k) {
      const auto start = clock::now();
      issue(size_bytes, 0);
      if (wait_ == wait_by::synchronize) {
        for (auto& x : streams_)
          x->synchronize();
      } else {
        for (std::size_t s = 0; s < streams_.size(); ++s)
          events[s][0].record(streams_[s]->get());
        for (auto& x : events)
          x[0].spin();
      }
      result.each.push_back(microseconds(clock::now() - start));
    }
    result.per_operation = microseconds(clock::now() - begin) / static_cast<double>(operations);
    return result;
  }

  timing in_flight(std::size_t size_bytes, std::size_t operations, std::size_t window) const {
    const auto events = make_events(window);
    const auto begin = clock::now();
    for (std::size_t k = 0; k < operations; ++k) {
      issue(size_bytes, k % window * size_bytes);
      for (std::size_t s = 0; s < streams_.size(); ++s)
        events[s][k % window].record(streams_[s]->get());
      if (k + 1 >= window)
        for (auto& x : events)
          x[(k + 1) % window].spin(); // the oldest
    }
    for (auto& x : events)
      x[(operations - 1) % window].spin();
    timing result;
    result.per_operation = microseconds(clock::now() - begin) / static_cast<double>(operations);
    return result;
  }

  const std::string name_;
  const std::vector<route_memory> memory_;
  const wait_by wait_;
  std::vector<std::unique_ptr<device_stream>> uploads_; // by route
  std::vector<std::unique_ptr<device_stream>> streams_;
  std::vector<std::size_t> stream_of_; // by route
};

} // namespace

std::vector<std::unique_ptr<copying_contestant>>
make_raw_copies(const std::vector<route_memory>& memory) {
  std::vector<std::unique_ptr<copying_contestant>> result;
  const auto add = [&](const char* name, stream_for streams, wait_by wait) {
    result.push_back(std::make_unique<raw_copies>(name, memory, streams, wait));
  };
  add("raw, event query", stream_for::source_device, wait_by::event_query);
  add("raw, synchronize", stream_for::source_device, wait_by::synchronize);
  add("raw, target's stream", stream_for::target_device, wait_by::event_query);
  if (memory.size() > 2)
    add("raw, a stream per pair", stream_for::each_route, wait_by::event_query);
  return result;
}

} // namespace bench
