#include "operation/buffer.hpp"

#include "operation/device_state.hpp"
#include "operation/operation.hpp"

#include <iterator>
#include <utility>

namespace troupe::detail {

caf::error indeterminate(const caf::error& cause) {
  auto why = failure_of(cause).value_or(failure{});
  if (why.code == errc::indeterminate) // it says why already
    return cause;
  why.detail = "a failed operation was writing this buffer (" + describe(cause) + ")";
  why.cause = cause_of(cause).value_or(errc::internal);
  why.code = errc::indeterminate;
  return make_error(std::move(why));
}

caf::error skipped(const caf::error& cause) {
  auto why = failure_of(cause).value_or(failure{});
  if (why.code == errc::skipped) // a chain of requests: the first cause is enough
    return cause;
  why.detail =
      "a request that would have written this buffer did not run (" + describe(cause) + ")";
  why.cause = cause_of(cause).value_or(errc::internal);
  why.code = errc::skipped;
  return make_error(std::move(why));
}

namespace {

/// Returns the elements of `all`, which are disjoint and in order, that overlap [begin, end).
template <class Ranges> auto overlapping(Ranges& all, std::size_t begin, std::size_t end) noexcept {
  const auto first = std::ranges::upper_bound(all, begin, {}, &unreadable_range::end);
  return std::ranges::subrange{
      first, std::ranges::lower_bound(first, all.end(), end, {}, &unreadable_range::begin)};
}

void insert_moved(std::vector<unreadable_range>& into,
                  std::vector<unreadable_range>::iterator before,
                  std::vector<unreadable_range>& what) {
  into.insert(before, std::make_move_iterator(what.begin()), std::make_move_iterator(what.end()));
}

} // namespace

std::vector<unreadable_range> cut_out(std::vector<unreadable_range>& all, std::size_t begin,
                                      std::size_t end, const skipped_reads* which) {
  if (begin >= end)
    return {};
  const auto there = overlapping(all, begin, end);
  if (there.empty())
    return {};
  std::vector<unreadable_range> cut;
  std::vector<unreadable_range> rest;
  for (auto& x : there) {
    if (which != nullptr && !which->includes(x.skipped_by)) {
      rest.push_back(std::move(x));
      continue;
    }
    const auto from = std::max(begin, x.begin);
    const auto to = std::min(end, x.end);
    if (x.begin < from)
      rest.push_back({x.begin, from, x.cause, x.skipped_by});
    if (to < x.end)
      rest.push_back({to, x.end, x.cause, x.skipped_by});
    cut.push_back({from, to, std::move(x.cause), x.skipped_by});
  }
  insert_moved(all, all.erase(there.begin(), there.end()), rest);
  return cut;
}

buffer::buffer(std::shared_ptr<device_state> home, std::uint64_t id, std::uint64_t generation,
               void* address, std::size_t size_bytes, std::function<void(void*)> deleter,
               bool has_no_peers)
    : has_no_peers_(has_no_peers), generation_(generation), home_(std::move(home)), id_(id),
      address_(address), size_bytes_(size_bytes), deleter_(std::move(deleter)) {}

buffer::buffer(std::shared_ptr<device_state> home, std::uint64_t id, std::uint64_t generation,
               borrowed_memory memory)
    : read_only_(memory.read_only), has_no_peers_(memory.has_no_peers),
      unfinished_(memory.unfinished), generation_(generation), incarnation_(home->incarnation()),
      home_(std::move(home)), id_(id), address_(memory.address), size_bytes_(memory.size_bytes),
      give_back_(std::move(memory.give_back)) {}

buffer::~buffer() {
  home_->change_acquired(-(acquired_for_reading + (acquired_for_writing ? 1 : 0)));
  home_->forget_buffer(id_);
  if (give_back_)
    home_->release({address_, generation_,
                    [give_back = std::move(give_back_),
                     unreadable = std::move(unreadable_)](void*) { give_back(unreadable); }});
  else if (address_ != nullptr)
    home_->release({address_, generation_, std::move(deleter_)});
}

bool buffer::stale() const noexcept {
  return home_->live_generation() != generation_ ||
         (is_borrowed() && home_->live_incarnation() != incarnation_);
}

caf::error buffer::check_determinate(std::size_t begin, std::size_t end) const {
  if (whole())
    return {};
  std::lock_guard lock{unreadable_mutex_};
  for (auto& x : overlapping(unreadable_, begin, end))
    if (x.half_written())
      return x.error();
  return {};
}

caf::error buffer::check_readable(locked order, std::size_t begin, std::size_t end,
                                  const skipped_reads& accepted) const {
  if (!whole()) {
    std::lock_guard lock{unreadable_mutex_};
    for (auto& x : overlapping(unreadable_, begin, end))
      if (!accepted.includes(x.skipped_by))
        return x.error();
  }
  // The requester may already know that a writer failed although its work is not over.
  if (!operation::any_failing())
    return {};
  for (auto i = accesses.next_in(0, begin, end); i < accesses.size();
       i = accesses.next_in(i + 1, begin, end)) {
    auto& a = accesses[i];
    auto by = a.writes ? a.by.lock() : nullptr;
    if (!by || !by->failed() || by->settled() || is_delivered(*a.at))
      continue;
    if (!by->never_issued(*a.at))
      return indeterminate(by->cause());
    for (auto& x :
         by->unreadable_behind(order, *this, *a.at, std::max(begin, a.begin), std::min(end, a.end)))
      if (!accepted.includes(x.skipped_by))
        return x.error();
    if (!by->cancelled() && by->marks_skipped() && !accepted.includes(by->request_number()))
      return skipped(by->cause());
  }
  return {};
}

void buffer::mark(const unreadable_range& x) {
  if (x.begin >= x.end)
    return;
  std::lock_guard lock{unreadable_mutex_};
  std::vector<unreadable_range> now; // the ranges that make up [x.begin, x.end)
  auto at = x.begin;
  for (auto& old : cut_out(unreadable_, x.begin, x.end)) {
    if (at < old.begin)
      now.push_back({at, old.begin, x.cause, x.skipped_by});
    at = old.end;
    if (x.half_written() && !old.half_written())
      old = {old.begin, old.end, x.cause, x.skipped_by};
    else if (!old.half_written() && old.skipped_by != x.skipped_by)
      old.skipped_by = unreadable_range::several;
    now.push_back(std::move(old));
  }
  if (at < x.end)
    now.push_back({at, x.end, x.cause, x.skipped_by});
  insert_moved(unreadable_,
               std::ranges::lower_bound(unreadable_, x.begin, {}, &unreadable_range::begin), now);
  note_marks();
}

void buffer::note_marks() noexcept {
  const bool any = !unreadable_.empty();
  has_unreadable_.store(any, std::memory_order_release);
  if (unfinished_ != nullptr && any)
    unfinished_->fetch_or(marked);
  else if (unfinished_ != nullptr)
    unfinished_->fetch_and(~marked);
}

std::vector<unreadable_range> buffer::mark_overwritten(std::size_t begin, std::size_t end,
                                                       const skipped_reads* which) {
  if (whole())
    return {};
  std::lock_guard lock{unreadable_mutex_};
  auto overwritten = cut_out(unreadable_, begin, end, which);
  note_marks();
  return overwritten;
}

void buffer::take(locked, access_mode mode) noexcept {
  if (writes(mode)) {
    acquired_for_writing = true;
    begin_write();
  } else {
    ++acquired_for_reading;
  }
  home_->change_acquired(1);
}

void buffer::give_back(locked, access_mode mode) noexcept {
  if (writes(mode)) {
    acquired_for_writing = false;
    end_write();
  } else {
    --acquired_for_reading;
  }
  home_->change_acquired(-1);
}

} // namespace troupe::detail
