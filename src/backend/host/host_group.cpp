#include "host_group.hpp"

#include "core/reduction.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace troupe::detail {

namespace {

/// Up to here one rank computes the result for all: that costs less than two more meetings.
constexpr auto one_worker_bytes = std::size_t{16} << 10;

const std::byte* at(const void* memory, std::size_t offset) noexcept {
  return static_cast<const std::byte*>(memory) + offset;
}

std::byte* at(void* memory, std::size_t offset) noexcept {
  return static_cast<std::byte*>(memory) + offset;
}

std::string describe(const all_reduce_part& x) {
  std::string result{to_string(x.op)};
  result += " of ";
  result += std::to_string(x.count);
  result += ' ';
  result += to_string(x.type);
  return result;
}

} // namespace

host_group::host_group(int size) : parts_(static_cast<std::size_t>(size)) {}

caf::error host_group::announce() noexcept {
  std::lock_guard guard{mutex_};
  if (ended_)
    return why_;
  ++announced_;
  return {};
}

void host_group::retract() noexcept {
  lock guard{mutex_};
  if (--announced_ == 0)
    changed_.notify_all();
}

void host_group::all_reduce(int rank, std::uint64_t sequence,
                            const all_reduce_part& part) noexcept {
  lock guard{mutex_};
  ++inside_;
  take_part(guard, rank, sequence, part);
  if (ended_)
    changed_.wait(guard, [this] { return working_ == 0; });
  --inside_;
  if (--announced_ == 0 || ended_)
    changed_.notify_all();
}

caf::error host_group::error() const noexcept {
  if (!ended_.load(std::memory_order_acquire))
    return {};
  std::lock_guard guard{mutex_};
  return why_;
}

void host_group::end(caf::error why) noexcept {
  std::lock_guard guard{mutex_};
  end_locked(std::move(why));
}

void host_group::wait_quiet() noexcept {
  lock guard{mutex_};
  changed_.wait(guard, [this] { return inside_ == 0; });
}

void host_group::wait_idle() noexcept {
  lock guard{mutex_};
  changed_.wait(guard, [this] { return announced_ == 0; });
}

void host_group::take_part(lock& guard, int rank, std::uint64_t sequence,
                           const all_reduce_part& part) noexcept {
  changed_.wait(guard, [&] { return ended_ || round_ == sequence; });
  if (ended_)
    return;
  parts_[static_cast<std::size_t>(rank)] = part;
  const auto one_worker = part.count * size_of(part.type) <= one_worker_bytes;
  const auto begin = [&] {
    if (auto mismatch = compare_parts())
      end_locked(std::move(mismatch));
    else if (one_worker && work(guard, [&] { reduce_elements({0, part.count}, parts_); }))
      ++round_;
  };
  if (!meet(guard, begin) || one_worker)
    return;
  const auto self = std::span<const all_reduce_part>{&part, 1};
  if (work(guard, [&] { reduce_elements(slice_of(rank), self); }) && meet(guard, [] {}) &&
      work(guard, [&] { gather(rank); }))
    meet(guard, [this] { ++round_; });
}

template <class F> bool host_group::meet(lock& guard, F last) noexcept {
  const auto phase = phase_;
  if (++arrived_ == size()) {
    last();
    if (ended_)
      return false;
    arrived_ = 0;
    ++phase_;
    guard.unlock(); // so that those who wake find it free
    changed_.notify_all();
    guard.lock();
    return !ended_;
  }
  changed_.wait(guard, [&] { return ended_ || phase_ != phase; });
  return !ended_;
}

template <class F> bool host_group::work(lock& guard, F f) noexcept {
  ++working_;
  guard.unlock();
  f();
  guard.lock();
  if (--working_ == 0 && ended_)
    changed_.notify_all();
  return !ended_;
}

void host_group::end_locked(caf::error why) noexcept {
  if (ended_)
    return;
  why_ = std::move(why);
  ended_.store(true, std::memory_order_release);
  changed_.notify_all();
}

caf::error host_group::compare_parts() const {
  const auto& first = parts_.front();
  for (const auto& x : parts_) {
    if (x.count != first.count || x.type != first.type || x.op != first.op) {
      failure f;
      f.code = errc::collective_mismatch;
      f.verb = "all_reduce";
      f.rank = static_cast<std::int32_t>(&x - parts_.data());
      f.detail = "rank 0 called " + describe(first) + ", this one " + describe(x);
      return make_error(std::move(f));
    }
  }
  return {};
}

host_group::range host_group::slice_of(int rank) const noexcept {
  constexpr std::size_t line = 64; // elements, so that no two ranks write into one cache line
  const auto& part = parts_.front();
  const auto ranks = parts_.size();
  const auto length = (part.count + ranks * line - 1) / (ranks * line) * line;
  const auto begin = std::min(part.count, static_cast<std::size_t>(rank) * length);
  return {begin, std::min(part.count, begin + length)};
}

void host_group::reduce_elements(range elements, std::span<const all_reduce_part> targets) const {
  const auto& first = parts_.front();
  const auto offset = elements.begin * size_of(first.type);
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  inputs.reserve(parts_.size());
  outputs.reserve(targets.size());
  for (const auto& x : parts_)
    inputs.push_back(at(x.send, offset));
  for (const auto& x : targets)
    outputs.push_back(at(x.recv, offset));
  reduce(first.type, first.op, inputs, outputs, elements.end - elements.begin);
}

void host_group::gather(int rank) const noexcept {
  const auto element_bytes = size_of(parts_.front().type);
  for (int peer = 0; peer < size(); ++peer) {
    const auto slice = slice_of(peer);
    if (peer == rank || slice.begin == slice.end)
      continue;
    const auto offset = slice.begin * element_bytes;
    std::memcpy(at(parts_[static_cast<std::size_t>(rank)].recv, offset),
                at(parts_[static_cast<std::size_t>(peer)].recv, offset),
                (slice.end - slice.begin) * element_bytes);
  }
}

} // namespace troupe::detail
