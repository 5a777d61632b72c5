#include "mesh/mesh_calls.hpp"

#include <algorithm>
#include <numeric>

namespace troupe::detail {

namespace {

std::string text_of(const mesh_spec& x) {
  auto result = std::string{x.is_message() ? "a message" : to_string(x.what)};
  if (x.what == collective_kind::barrier)
    return result;
  result += " of " + std::to_string(x.count) + " elements of " + std::string{to_string(x.type)};
  if (reduces(x.what))
    result += " with " + std::string{to_string(x.op)};
  if (x.what == collective_kind::broadcast)
    result += " with root " + std::to_string(x.peer);
  return result;
}

std::size_t place_in(const std::vector<int>& callers, int rank) noexcept {
  return static_cast<std::size_t>(std::ranges::find(callers, rank) - callers.begin());
}

caf::error rank_ended(int rank) {
  return make_error({.code = errc::unavailable,
                     .detail = "the mesh_comm of rank " + std::to_string(rank) + " has ended",
                     .rank = rank});
}

} // namespace

// -- joint_call

joint_call::joint_call(const mesh_spec& first, int rank, std::vector<int> callers)
    : first_(first), rank_(rank), callers_(std::move(callers)), entered_(callers_.size(), false) {}

std::string joint_call::difference(const mesh_spec& other, int rank) const {
  auto mine = text_of(first_);
  auto theirs = text_of(other);
  if (mine == theirs)
    return {};
  return "rank " + std::to_string(rank) + " called " + theirs + " where rank " +
         std::to_string(rank_) + " called " + mine;
}

void joint_call::enter(int rank) {
  std::lock_guard lock{mutex_};
  entered_[place_in(callers_, rank)] = true;
}

std::string joint_call::missing_ranks() const {
  std::lock_guard lock{mutex_};
  std::string result;
  for (std::size_t i = 0; i < callers_.size(); ++i)
    if (!entered_[i])
      result += (result.empty() ? "rank " : ", ") + std::to_string(callers_[i]);
  return result;
}

caf::error joint_call::error() const {
  std::lock_guard lock{mutex_};
  return error_;
}

void joint_call::fail(const caf::error& why) {
  std::vector<std::function<void()>> listeners;
  std::map<std::size_t, meeting> meetings; // memory is freed without the lock
  std::vector<end_listener> finished;
  {
    std::lock_guard lock{mutex_};
    if (error_ || done_)
      return;
    error_ = why;
    listeners.swap(listeners_);
    meetings.swap(meetings_);
    finished.swap(finished_);
  }
  for (auto& f : listeners)
    f();
  for (auto& f : finished)
    f(why);
}

void joint_call::on_failure(std::function<void()> act) {
  {
    std::lock_guard lock{mutex_};
    if (!error_) {
      listeners_.push_back(std::move(act));
      return;
    }
  }
  act();
}

std::vector<chunk_side> joint_call::meet(std::size_t chunk, int rank, chunk_side side) {
  std::lock_guard lock{mutex_};
  if (error_)
    return {};
  auto& here = meetings_[chunk];
  here.sides.resize(callers_.size());
  here.sides[place_in(callers_, rank)] = std::move(side);
  if (++here.there < callers_.size())
    return {};
  auto result = std::move(here.sides);
  meetings_.erase(chunk);
  return result;
}

void joint_call::finish(end_listener told) {
  std::vector<end_listener> all;
  caf::error why;
  {
    std::lock_guard lock{mutex_};
    finished_.push_back(std::move(told));
    why = error_;
    if (!why && finished_.size() < callers_.size())
      return;
    done_ = !why;
    all.swap(finished_);
    listeners_.clear();
  }
  for (auto& f : all)
    f(why);
}

// -- mesh_calls

mesh_calls::line& mesh_calls::line_of(const mesh_spec& what, int rank) {
  std::pair key{-1, -1};
  if (what.what == collective_kind::send)
    key = {rank, what.peer};
  else if (what.what == collective_kind::recv)
    key = {what.peer, rank};
  auto [i, fresh] = lines_.try_emplace(key);
  if (fresh) {
    if (what.is_message()) {
      i->second.callers = {key.first, key.second};
    } else {
      i->second.callers.resize(ranks_);
      std::iota(i->second.callers.begin(), i->second.callers.end(), 0);
    }
    i->second.next.assign(i->second.callers.size(), 0);
  }
  return i->second;
}

/// Returns a rank that is gone and has not made this call.
std::optional<int> mesh_calls::missing(const line& in, std::uint64_t number) const {
  for (std::size_t i = 0; i < in.callers.size(); ++i)
    if (closed_[static_cast<std::size_t>(in.callers[i])] && in.next[i] <= number)
      return in.callers[i];
  return std::nullopt;
}

std::shared_ptr<joint_call> mesh_calls::take(const mesh_spec& what, int rank) {
  std::shared_ptr<joint_call> result;
  caf::error why;
  {
    std::lock_guard lock{mutex_};
    auto& in = line_of(what, rank);
    auto number = in.next[place_in(in.callers, rank)]++;
    if (number - in.first == in.open.size())
      in.open.push_back(std::make_shared<joint_call>(what, rank, in.callers));
    result = in.open[number - in.first];
    if (auto gone = missing(in, number))
      why = rank_ended(*gone);
    else if (auto text = result->difference(what, rank); !text.empty())
      why = make_error(errc::collective_mismatch, std::move(text));
    auto all_made = std::ranges::min(in.next);
    for (; in.first < all_made; ++in.first)
      in.open.pop_front();
  }
  result->enter(rank);
  if (why)
    result->fail(why);
  return result;
}

void mesh_calls::close(int rank) {
  std::vector<std::shared_ptr<joint_call>> waiting;
  {
    std::lock_guard lock{mutex_};
    closed_[static_cast<std::size_t>(rank)] = true;
    for (auto& [key, in] : lines_)
      for (std::size_t i = 0; i < in.callers.size(); ++i)
        if (in.callers[i] == rank)
          for (auto k = in.next[i]; k < in.first + in.open.size(); ++k)
            waiting.push_back(in.open[k - in.first]);
  }
  for (auto& x : waiting)
    x->fail(rank_ended(rank));
}

} // namespace troupe::detail
