#include "core/buffer.hpp"

#include "core/device_state.hpp"
#include "core/operation.hpp"
#include "core/symmetric_memory.hpp"

#include <algorithm>
#include <utility>

namespace troupe::detail {

caf::error indeterminate(const caf::error& cause) {
  auto why = failure_of(cause).value_or(failure{});
  why.detail = "a failed operation was writing this buffer (" + describe(cause) + ")";
  why.code = errc::indeterminate;
  return make_error(std::move(why));
}

caf::error skipped(const caf::error& cause) {
  auto why = failure_of(cause).value_or(failure{});
  if (why.code == errc::skipped) // a chain of requests: the first cause is enough
    return cause;
  why.detail =
      "a request that would have written this buffer did not run (" + describe(cause) + ")";
  why.code = errc::skipped;
  return make_error(std::move(why));
}

buffer::buffer(std::shared_ptr<device_state> home, std::uint64_t id, std::uint64_t generation,
               void* address, std::size_t size_bytes, std::function<void(void*)> deleter,
               std::shared_ptr<symmetric_memory> symmetric)
    : generation_(generation), home_(std::move(home)), id_(id), address_(address),
      size_bytes_(size_bytes), deleter_(std::move(deleter)), symmetric_(std::move(symmetric)) {}

buffer::buffer(std::shared_ptr<device_state> home, std::uint64_t id, std::uint64_t generation,
               borrowed_memory memory)
    : read_only_(memory.read_only), generation_(generation), home_(std::move(home)), id_(id),
      address_(memory.address), size_bytes_(memory.size_bytes),
      give_back_(std::move(memory.give_back)) {}

buffer::~buffer() {
  home_->change_acquired(-(acquired_for_reading + (acquired_for_writing ? 1 : 0)));
  home_->forget_buffer(id_);
  if (symmetric_)
    symmetric_->drop();
  else if (give_back_)
    home_->release({address_, generation_,
                    [give_back = std::move(give_back_), wounds = std::move(wounds_)](void*) {
                      give_back(wounds);
                    }});
  else if (address_ != nullptr)
    home_->release({address_, generation_, std::move(deleter_)});
}

bool buffer::stale() const noexcept { return home_->live_generation() != generation_; }

caf::error buffer::check_determinate(std::size_t begin, std::size_t end) const {
  if (whole())
    return {};
  std::lock_guard lock{wounds_mutex_};
  for (auto& x : wounds_)
    if (x.half_written() && x.begin < end && begin < x.end)
      return x.error();
  return {};
}

caf::error buffer::check_readable(std::size_t begin, std::size_t end,
                                  const skipped_reads& accepted) const {
  if (!whole()) {
    std::lock_guard lock{wounds_mutex_};
    for (auto& x : wounds_)
      if (x.begin < end && begin < x.end && !accepted.includes(x.skipped_by))
        return x.error();
  }
  // The requester may know already that a writer failed, though its work is not over.
  if (!operation::any_failing())
    return {};
  for (auto i = accesses.next_in(0, begin, end); i < accesses.size();
       i = accesses.next_in(i + 1, begin, end)) {
    auto& a = accesses[i];
    auto by = a.writes ? a.by.lock() : nullptr;
    if (!by || !by->failed() || by->cancelled() || by->told(*a.at))
      continue;
    if (!by->never_issued(*a.at))
      return indeterminate(by->cause());
    if (by->marks_skipped() && !accepted.includes(by->number()))
      return skipped(by->cause());
  }
  return {};
}

void buffer::mark(const wound& x) {
  std::lock_guard lock{wounds_mutex_};
  std::vector<wound> result;
  std::vector<std::pair<std::size_t, std::size_t>> gaps{{x.begin, x.end}};
  for (auto& old : wounds_) {
    auto begin = std::max(old.begin, x.begin);
    auto end = std::min(old.end, x.end);
    if (begin >= end) {
      result.push_back(std::move(old));
      continue;
    }
    if (old.begin < begin)
      result.push_back({old.begin, begin, old.cause, old.skipped_by});
    if (end < old.end)
      result.push_back({end, old.end, old.cause, old.skipped_by});
    if (x.half_written() && !old.half_written())
      result.push_back({begin, end, x.cause, x.skipped_by});
    else
      result.push_back(
          {begin, end, old.cause,
           old.half_written() || old.skipped_by == x.skipped_by ? old.skipped_by : wound::several});
    std::vector<std::pair<std::size_t, std::size_t>> rest;
    for (auto [from, to] : gaps) {
      if (auto left_end = std::min(to, begin); from < left_end)
        rest.emplace_back(from, left_end);
      if (auto right_begin = std::max(from, end); right_begin < to)
        rest.emplace_back(right_begin, to);
    }
    gaps = std::move(rest);
  }
  for (auto [begin, end] : gaps)
    if (begin < end)
      result.push_back({begin, end, x.cause, x.skipped_by});
  wounds_ = std::move(result);
  wounded_.store(!wounds_.empty(), std::memory_order_release);
}

template <class Which>
std::vector<wound> buffer::heal_if(std::size_t begin, std::size_t end, const Which& which) {
  if (whole())
    return {};
  std::lock_guard lock{wounds_mutex_};
  std::vector<wound> healed;
  std::vector<wound> rest;
  for (auto& x : wounds_) {
    auto from = std::max(begin, x.begin);
    auto to = std::min(end, x.end);
    if (from >= to || !which(x)) {
      rest.push_back(std::move(x));
      continue;
    }
    if (x.begin < from)
      rest.push_back({x.begin, from, x.cause, x.skipped_by});
    if (to < x.end)
      rest.push_back({to, x.end, x.cause, x.skipped_by});
    healed.push_back({from, to, std::move(x.cause), x.skipped_by});
  }
  wounds_ = std::move(rest);
  wounded_.store(!wounds_.empty(), std::memory_order_release);
  return healed;
}

std::vector<wound> buffer::heal(std::size_t begin, std::size_t end) {
  return heal_if(begin, end, [](const wound&) { return true; });
}

std::vector<wound> buffer::heal(std::size_t begin, std::size_t end, const skipped_reads& which) {
  return heal_if(begin, end, [&](const wound& x) { return which.includes(x.skipped_by); });
}

} // namespace troupe::detail
