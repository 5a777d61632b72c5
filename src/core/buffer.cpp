#include "core/buffer.hpp"

#include "core/device_state.hpp"
#include "core/operation.hpp"
#include "core/symmetric_memory.hpp"

#include <algorithm>
#include <utility>

namespace troupe::detail {

namespace {

/// What of `all` lies in [begin, end).
std::vector<wound> cut(const std::vector<wound>& all, std::size_t begin, std::size_t end) {
  std::vector<wound> result;
  for (auto& x : all)
    if (auto b = std::max(begin, x.begin), e = std::min(end, x.end); b < e)
      result.push_back({b, e, x.cause});
  return result;
}

} // namespace

caf::error indeterminate(const caf::error& cause) {
  auto why = failure_of(cause).value_or(failure{});
  why.detail = "a failed operation was writing this buffer (" + describe(cause) + ")";
  why.code = errc::indeterminate;
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
    if (x.begin < end && begin < x.end)
      return indeterminate(x.cause);
  return {};
}

caf::error buffer::check_readable(std::size_t begin, std::size_t end) const {
  if (auto error = check_determinate(begin, end); error)
    return error;
  // The requester may know already that a writer failed, though its work is not over.
  if (!operation::any_failing())
    return {};
  for (auto i = accesses.next_in(0, begin, end); i < accesses.size();
       i = accesses.next_in(i + 1, begin, end))
    if (auto& a = accesses[i]; a.writes)
      if (auto by = a.by.lock();
          by && by->failed() && !by->withdrawn() && !a.at->dropped() && !by->told(*a.at))
        return indeterminate(by->cause());
  return {};
}

void buffer::mark_indeterminate(const wound& x) {
  std::lock_guard lock{wounds_mutex_};
  // Add only what has no wound yet.
  std::vector<std::pair<std::size_t, std::size_t>> gaps{{x.begin, x.end}};
  for (auto& old : wounds_) {
    std::vector<std::pair<std::size_t, std::size_t>> rest;
    for (auto [begin, end] : gaps) {
      if (auto left_end = std::min(end, old.begin); begin < left_end)
        rest.emplace_back(begin, left_end);
      if (auto right_begin = std::max(begin, old.end); right_begin < end)
        rest.emplace_back(right_begin, end);
    }
    gaps = std::move(rest);
  }
  for (auto [begin, end] : gaps)
    if (begin < end)
      wounds_.push_back({begin, end, x.cause});
  wounded_.store(!wounds_.empty(), std::memory_order_release);
}

std::vector<buffer::wound> buffer::heal(std::size_t begin, std::size_t end) {
  if (whole())
    return {};
  std::lock_guard lock{wounds_mutex_};
  auto healed = cut(wounds_, begin, end);
  std::vector<wound> rest;
  for (auto& x : wounds_) {
    if (auto left_end = std::min(begin, x.end); x.begin < left_end)
      rest.push_back({x.begin, left_end, x.cause});
    if (auto right_begin = std::max(end, x.begin); right_begin < x.end)
      rest.push_back({right_begin, x.end, x.cause});
  }
  wounds_ = std::move(rest);
  wounded_.store(!wounds_.empty(), std::memory_order_release);
  return healed;
}

} // namespace troupe::detail
