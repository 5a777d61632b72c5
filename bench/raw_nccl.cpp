#include "raw_nccl.hpp"

#include "nccl_call.hpp"
#include "rank_threads.hpp"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

namespace bench {

namespace {

struct rank {
  std::size_t index = 0;
  std::size_t ranks = 0;
  int device = 0;
  ncclComm_t communicator = nullptr;
  cudaStream_t stream = nullptr;
  float* send = nullptr;
  float* recv = nullptr;
  float* number = nullptr; ///< that a barrier sums

  void select() const { check(cudaSetDevice(device), "cudaSetDevice"); }
  void synchronize() const { check(cudaStreamSynchronize(stream), "cudaStreamSynchronize"); }

  /// Issues this rank's part of an operation with blocks of `count` elements.
  void issue(const verb& what, std::size_t count) const;

private:
  void issue_messages(const verb& what, std::size_t count) const;
};

void rank::issue(const verb& what, std::size_t count) const {
  constexpr int root = 0;
  switch (what.kind) {
  case verb_kind::all_reduce:
    return check(ncclAllReduce(send, send, count, ncclFloat32, ncclSum, communicator, stream),
                 "ncclAllReduce");
  case verb_kind::reduce:
    return check(ncclReduce(send, recv, count, ncclFloat32, ncclSum, root, communicator, stream),
                 "ncclReduce");
  case verb_kind::broadcast:
    return check(ncclBroadcast(send, recv, count, ncclFloat32, root, communicator, stream),
                 "ncclBroadcast");
  case verb_kind::all_gather:
    return check(ncclAllGather(send, recv, count, ncclFloat32, communicator, stream),
                 "ncclAllGather");
  case verb_kind::reduce_scatter:
    return check(ncclReduceScatter(send, recv, count, ncclFloat32, ncclSum, communicator, stream),
                 "ncclReduceScatter");
  case verb_kind::barrier: // NCCL has none
    return check(ncclAllReduce(number, number, 1, ncclFloat32, ncclSum, communicator, stream),
                 "ncclAllReduce");
  case verb_kind::all_to_all:
  case verb_kind::gather:
  case verb_kind::scatter:
  case verb_kind::send_recv:
  case verb_kind::exchange:
    return issue_messages(what, count);
  }
}

/// Issues the messages to and from all ranks as one operation. Before 2.28, NCCL has no calls for
/// these verbs.
void rank::issue_messages(const verb& what, std::size_t count) const {
  check(ncclGroupStart(), "ncclGroupStart");
  for (std::size_t other = 0; other < ranks; ++other) {
    const auto peer = static_cast<int>(other);
    if (what.moves(index, other, ranks))
      check(ncclSend(send + what.send.block_of(other) * count, count, ncclFloat32, peer,
                     communicator, stream),
            "ncclSend");
    if (what.moves(other, index, ranks))
      check(ncclRecv(recv + what.recv.block_of(other) * count, count, ncclFloat32, peer,
                     communicator, stream),
            "ncclRecv");
  }
  check(ncclGroupEnd(), "ncclGroupEnd");
}

class raw_ranks {
public:
  raw_ranks(const std::vector<int>& devices, const footprint& memory) : ranks_(devices.size()) {
    std::vector<ncclComm_t> communicators(devices.size());
    check(ncclCommInitAll(communicators.data(), static_cast<int>(devices.size()), devices.data()),
          "ncclCommInitAll");
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      auto& r = ranks_[i];
      r.index = i;
      r.ranks = ranks_.size();
      r.device = devices[i];
      r.communicator = communicators[i];
      r.select();
      check(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking), "cudaStreamCreate");
      for (auto [buffer, size_bytes] : {std::pair{&r.send, memory.send_bytes},
                                        {&r.recv, memory.recv_bytes},
                                        {&r.number, sizeof(float)}})
        check(cudaMalloc(buffer, std::max(size_bytes, sizeof(float))), "cudaMalloc");
      check(cudaMemset(r.number, 0, sizeof(float)), "cudaMemset");
    }
  }

  ~raw_ranks() {
    check(ncclGroupStart(), "ncclGroupStart");
    for (auto& r : ranks_)
      check(ncclCommDestroy(r.communicator), "ncclCommDestroy");
    check(ncclGroupEnd(), "ncclGroupEnd");
    for (auto& r : ranks_) {
      r.select();
      for (auto* buffer : {r.send, r.recv, r.number})
        check(cudaFree(buffer), "cudaFree");
      check(cudaStreamDestroy(r.stream), "cudaStreamDestroy");
    }
  }

  raw_ranks(const raw_ranks&) = delete;
  raw_ranks& operator=(const raw_ranks&) = delete;

  const std::vector<rank>& all() const { return ranks_; }

private:
  std::vector<rank> ranks_;
};

class raw_contestant : public verb_contestant {
public:
  raw_contestant(const verb& what, const contestant_label& label,
                 std::shared_ptr<const std::vector<rank>> ranks)
      : verb_contestant(what, label), ranks_(std::move(ranks)) {}

  std::size_t ranks() const final { return all().size(); }

  void write(std::size_t i, direction where, std::size_t first,
             std::span<const float> numbers) final {
    auto& r = all()[i];
    r.select();
    check(cudaMemcpyAsync(memory_of(r, where) + first, numbers.data(), numbers.size_bytes(),
                          cudaMemcpyHostToDevice, r.stream),
          "cudaMemcpyAsync");
    r.synchronize();
  }

  /// Reads without stream order: `drive` has to wait for its operations.
  void read(std::size_t i, direction where, std::size_t first, std::span<float> numbers) final {
    auto& r = all()[i];
    r.select();
    check(cudaMemcpy(numbers.data(), memory_of(r, where) + first, numbers.size_bytes(),
                     cudaMemcpyDeviceToHost),
          "cudaMemcpy");
  }

protected:
  const std::vector<rank>& all() const { return *ranks_; }

private:
  static float* memory_of(const rank& r, direction where) {
    return where == direction::send ? r.send : r.recv;
  }

  std::shared_ptr<const std::vector<rank>> ranks_;
};

class threads_contestant final : public raw_contestant {
public:
  using raw_contestant::raw_contestant;

  timing drive(std::size_t count, std::size_t operations, std::size_t window) override {
    if (window == 1)
      return in_steps(ranks(), operations, [&](std::size_t i) {
        auto& r = all()[i];
        r.select();
        return [this, &r, count, done = std::make_unique<cuda_event>()] {
          r.issue(what(), count);
          done->record(r.stream);
          done->spin();
        };
      });
    return in_one_step(ranks(), operations, [&](std::size_t i) {
      auto& r = all()[i];
      r.select();
      return
          [this, &r, count, operations, window, events = std::make_unique<cuda_event[]>(window)] {
            for (std::size_t k = 0; k < operations; ++k) {
              r.issue(what(), count);
              events[k % window].record(r.stream);
              if (k + 1 >= window)
                events[(k + 1) % window].spin(); // the oldest
            }
            events[(operations - 1) % window].spin();
          };
    });
  }
};

class grouped_contestant final : public raw_contestant {
public:
  using raw_contestant::raw_contestant;

  timing drive(std::size_t count, std::size_t operations, std::size_t window) override {
    if (window != 1)
      fail("one thread with a group does one operation after the other");
    timing result;
    result.each.reserve(operations);
    const auto begin = clock::now();
    for (std::size_t k = 0; k < operations; ++k) {
      const auto start = clock::now();
      check(ncclGroupStart(), "ncclGroupStart");
      for (auto& r : all())
        r.issue(what(), count);
      check(ncclGroupEnd(), "ncclGroupEnd");
      for (auto& r : all())
        r.synchronize();
      result.each.push_back(microseconds(clock::now() - start));
    }
    result.per_operation = microseconds(clock::now() - begin) / static_cast<double>(operations);
    return result;
  }
};

} // namespace

contestant_maker raw_maker(const std::vector<int>& devices, const footprint& memory) {
  const auto owner = std::make_shared<const raw_ranks>(devices, memory);
  const std::shared_ptr<const std::vector<rank>> ranks{owner, &owner->all()};
  return [ranks](const verb& what, const contestant_label& label) -> std::unique_ptr<contestant> {
    if (label.mode == "threads")
      return std::make_unique<threads_contestant>(what, label, ranks);
    if (label.mode == "grouped")
      return std::make_unique<grouped_contestant>(what, label, ranks);
    fail("NCCL by hand has no mode " + std::string{label.mode});
  };
}

} // namespace bench
