#include "core/rank_matching.hpp"

#include "core/prefetch.hpp"

#include <algorithm>
#include <utility>

namespace troupe::detail {

std::shared_ptr<collective_operation> call_line::next_of(std::size_t caller,
                                                         std::size_t before) const {
  auto i = ahead(caller) + before;
  return i < open_.size() ? open_[i].op : nullptr;
}

void call_line::take(std::size_t caller, const std::shared_ptr<collective_operation>& op) {
  auto i = ahead(caller);
  if (i == open_.size()) {
    open_.push_back({op, left_out_.size()});
    for (std::size_t x = 0; !left_out_.empty() && x < next_.size(); ++x)
      next_[x] += left_out_.contains(x);
  }
  ++next_[caller];
  ++open_[i].calls;
  forget_complete();
}

void call_line::leave_out(rank_set callers) {
  for (std::size_t x = 0; x < next_.size(); ++x) {
    if (!callers.contains(x) || left_out_.contains(x))
      continue;
    for (auto i = ahead(x); i < open_.size(); ++i)
      ++open_[i].calls;
    next_[x] = first_ + open_.size();
  }
  left_out_ = callers;
  forget_complete();
}

void call_line::forget_complete() {
  while (!open_.empty() && open_.front().calls == next_.size()) {
    open_.pop_front();
    ++first_;
  }
}

void call_line::take_of_all() noexcept {
  for (auto& x : next_)
    ++x;
  ++first_;
}

void call_line::give_away(std::vector<std::shared_ptr<collective_operation>>& to) {
  for (auto& x : open_)
    to.push_back(std::move(x.op));
}

std::vector<std::shared_ptr<collective_operation>> rank_matching::give_away() {
  std::vector<std::shared_ptr<collective_operation>> result;
  collectives_.give_away(result);
  for (auto& [pair, line] : messages_)
    line.give_away(result);
  return result;
}

bool rank_matching::handed_in(std::size_t rank, rank_set absent,
                              std::span<const std::byte> lines) noexcept {
  auto& own = desks_[rank];
  own.lines.store(lines.data(), std::memory_order_relaxed);
  // Of two that come at once, one at least sees the other.
  auto calls = own.calls.fetch_add(1) + 1;
  for (std::size_t i = 0; i < desks_.size(); ++i)
    if (desks_[i].calls.load() < calls && !absent.contains(i))
      return false;
  for (auto& x : desks_)
    if (&x != &own)
      prefetch_lines_to_change(x.lines.load(std::memory_order_relaxed), lines.size());
  return true;
}

room_maker rank_matching::maker_of(std::size_t rank) const noexcept {
  auto caller = call_sides_[rank].caller.load(std::memory_order_relaxed);
  return caller == std::thread::id{}            ? room_maker::unknown
         : caller == std::this_thread::get_id() ? room_maker::caller
                                                : room_maker::others;
}

void rank_matching::refused(std::size_t rank) noexcept { desks_[rank].calls.fetch_sub(1); }

void rank_matching::passed_over(const rank_call& call) noexcept {
  if (!call.is_message())
    desks_[call.rank].calls.fetch_add(1);
}

void rank_matching::leave_out(rank_set absent) {
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
  for (std::size_t i = 0; i < desks_.size(); ++i) // who is back has handed in as many as are made
    if (before.contains(i) && !absent.contains(i))
      desks_[i].calls.store(collectives_.made(i));
}

call_line& rank_matching::line_of(const rank_call& call) {
  if (!call.is_message())
    return collectives_;
  auto peer = static_cast<std::size_t>(call.call.peer);
  auto pair = call.call.what == collective_kind::send ? std::pair{call.rank, peer}
                                                      : std::pair{peer, call.rank};
  return messages_.try_emplace(pair, 2).first->second;
}

std::size_t rank_matching::caller_of(const rank_call& call) noexcept {
  if (!call.is_message())
    return call.rank;
  return call.call.what == collective_kind::send ? 0 : 1;
}

} // namespace troupe::detail
