#include "collective/rank_matching.hpp"

#include "collective/collective_operation.hpp"

namespace troupe::detail {

caf::error joint_entry::why_ended(locked lock) const {
  if (!op)
    return refusal->why;
  return op->failed() ? op->cause() : op->on_check(lock);
}

std::uint64_t joint_entry::first_membership() const noexcept {
  return op ? op->first_membership() : refusal->membership;
}

std::size_t call_queue::index_of(std::uint64_t number) const noexcept {
  if (open_.size() == end_ - first_) // one number for each entry
    return number - first_;
  auto after = std::ranges::upper_bound(open_, number, {}, &joint_entry::number);
  return static_cast<std::size_t>(after - open_.begin()) - 1;
}

const joint_entry* call_queue::next_of(std::size_t caller, std::size_t before) const {
  auto number = next_[caller] + before;
  return number < end_ ? &open_[index_of(number)] : nullptr;
}

/// Begins one more operation, in which the ranks that are left out have no part.
void call_queue::begin_next() {
  ++end_;
  open_.back().calls += left_out_.size();
  for (std::size_t x = 0; !left_out_.empty() && x < next_.size(); ++x)
    next_[x] += left_out_.contains(x);
}

void call_queue::count_next_of(std::size_t caller) {
  ++open_[index_of(next_[caller])].calls;
  ++next_[caller];
  forget_complete();
}

void call_queue::take(std::size_t caller, const std::shared_ptr<collective_operation>& op) {
  if (next_[caller] == end_) {
    open_.push_back({.op = op, .refusal = {}, .refused_by = 0, .number = end_, .calls = 0});
    begin_next();
  }
  count_next_of(caller);
}

/// Refused calls in a row share one entry, so any number of them takes the memory of one.
void call_queue::refuse(std::size_t caller, refused_call x) {
  auto* last = open_.empty() ? nullptr : &open_.back();
  if (last == nullptr || !last->refusal || last->refused_by != caller ||
      last->refusal->membership != x.membership)
    open_.push_back({.op = {},
                     .refusal = std::make_shared<const refused_call>(std::move(x)),
                     .refused_by = caller,
                     .number = end_,
                     .calls = 0});
  begin_next();
  count_next_of(caller);
}

void call_queue::leave_out(rank_set callers) {
  for (std::size_t x = 0; x < next_.size(); ++x) {
    if (!callers.contains(x) || left_out_.contains(x))
      continue;
    for (std::size_t i = 0; i < open_.size(); ++i)
      if (auto from = std::max(open_[i].number, next_[x]); from < end_of(i))
        open_[i].calls += end_of(i) - from;
    next_[x] = end_;
  }
  left_out_ = callers;
  forget_complete();
}

void call_queue::forget_complete() {
  while (!open_.empty() && open_.front().calls == (end_of(0) - first_) * next_.size()) {
    first_ = end_of(0);
    open_.pop_front();
  }
}

void call_queue::take_of_all() noexcept {
  for (auto& x : next_)
    ++x;
  ++first_;
  ++end_;
}

void call_queue::give_away(std::vector<std::shared_ptr<collective_operation>>& to) {
  for (auto& x : open_)
    if (x.op)
      to.push_back(std::move(x.op));
  open_.clear();
  first_ = end_;
  std::ranges::fill(next_, end_);
}

std::vector<std::shared_ptr<collective_operation>> rank_matching::give_away(locked) {
  std::vector<std::shared_ptr<collective_operation>> result;
  collectives_.give_away(result);
  for (auto& [pair, line] : messages_)
    line.give_away(result);
  return result;
}

bool rank_matching::handed_in(std::size_t rank, rank_set absent) noexcept {
  // If two ranks come at once, at least one of them sees the other.
  const auto calls = calls_[rank].fetch_add(1) + 1;
  for (std::size_t i = 0; i < calls_.size(); ++i)
    if (calls_[i].load() < calls && !absent.contains(i))
      return false;
  return true;
}

room_maker rank_matching::maker_of(std::size_t rank) const noexcept {
  auto caller = call_sides_[rank].caller.load(std::memory_order_relaxed);
  return caller == 0                 ? room_maker::unknown
         : caller == thread_number() ? room_maker::caller
                                     : room_maker::others;
}

void rank_matching::refused(std::size_t rank) noexcept { calls_[rank].fetch_sub(1); }

void rank_matching::passed_over(locked, const rank_end& of) noexcept {
  if (!of.is_message())
    calls_[of.rank].fetch_add(1);
}

std::shared_ptr<collective_operation> rank_matching::count_refused(locked lock, const rank_end& of,
                                                                   const caf::error& why,
                                                                   std::uint64_t membership) {
  auto& line = line_of(lock, of);
  const auto caller = caller_of(of);
  auto* next = line.next_of(caller);
  if (next == nullptr) {
    line.refuse(caller, {why, membership});
    return nullptr;
  }
  auto op = next->op;
  line.take(caller, op);
  return op;
}

room_maker rank_matching::maker_of_missing(locked lock, const rank_end& of) {
  auto& line = line_of(lock, of);
  auto result = room_maker::others;
  for (std::size_t x = 0; x < line.callers(); ++x)
    if (line.lacks(x)) {
      auto rank = !of.is_message() ? x : x == 0 ? of.ends().first : of.ends().second;
      result = std::max(result, maker_of(rank));
    }
  return result;
}

void rank_matching::leave_out(locked, rank_set absent) {
  const auto before = collectives_.left_out();
  collectives_.leave_out(absent);
  for (auto& [pair, line] : messages_) {
    rank_set ends;
    if (absent.contains(pair.first))
      ends = ends.with(0);
    if (absent.contains(pair.second))
      ends = ends.with(1);
    line.leave_out(ends);
  }
  for (std::size_t i = 0; i < calls_.size(); ++i) // a returning rank counts as up to date
    if (before.contains(i) && !absent.contains(i))
      calls_[i].store(collectives_.made(i));
}

call_queue& rank_matching::line_of(locked, const rank_end& of) {
  return of.is_message() ? messages_.try_emplace(of.ends(), 2).first->second : collectives_;
}

std::size_t rank_matching::caller_of(const rank_end& of) noexcept {
  if (!of.is_message())
    return of.rank;
  return of.what == collective_kind::send ? 0 : 1;
}

} // namespace troupe::detail
