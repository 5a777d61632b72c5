#include "core/mesh_calls.hpp"

#include <algorithm>
#include <numeric>

namespace troupe::detail {

namespace {

bool reduces(collective_kind x) noexcept {
  return x == collective_kind::all_reduce || x == collective_kind::reduce_scatter;
}

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

caf::error rank_ended(int rank) {
  failure why;
  why.code = errc::unavailable;
  why.rank = rank;
  why.detail = "the mesh_comm of rank " + std::to_string(rank) + " is gone";
  return make_error(std::move(why));
}

} // namespace

// -- joint_call

std::string joint_call::difference(const mesh_spec& other, int rank) const {
  auto mine = text_of(first_);
  auto theirs = text_of(other);
  if (mine == theirs)
    return {};
  return "rank " + std::to_string(rank) + " called " + theirs + " where rank " +
         std::to_string(rank_) + " called " + mine;
}

caf::error joint_call::error() const {
  std::lock_guard lock{mutex_};
  return error_;
}

void joint_call::fail(const caf::error& why) {
  std::vector<std::function<void()>> listeners;
  {
    std::lock_guard lock{mutex_};
    if (error_)
      return;
    error_ = why;
    listeners.swap(listeners_);
  }
  for (auto& f : listeners)
    f();
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

bool joint_call::is_void() const {
  std::lock_guard lock{mutex_};
  return void_;
}

void joint_call::make_void(const caf::error& why) {
  {
    std::lock_guard lock{mutex_};
    void_ = true;
  }
  fail(why);
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

/// A rank that is gone and has not made this call.
std::optional<int> mesh_calls::missing(const line& in, std::uint64_t number) const {
  for (std::size_t i = 0; i < in.callers.size(); ++i)
    if (closed_[static_cast<std::size_t>(in.callers[i])] && in.next[i] <= number)
      return in.callers[i];
  return std::nullopt;
}

std::shared_ptr<joint_call> mesh_calls::take(const mesh_spec& what, int rank) {
  std::shared_ptr<joint_call> result;
  caf::error why;
  bool first = false;
  {
    std::lock_guard lock{mutex_};
    auto& in = line_of(what, rank);
    auto caller = static_cast<std::size_t>(std::find(in.callers.begin(), in.callers.end(), rank) -
                                           in.callers.begin());
    auto number = in.next[caller]++;
    first = number - in.first == in.open.size();
    if (first)
      in.open.push_back(std::make_shared<joint_call>(what, rank));
    result = in.open[number - in.first];
    if (lost_)
      why = lost_;
    else if (auto gone = missing(in, number))
      why = rank_ended(*gone);
    else if (auto text = result->difference(what, rank); !text.empty())
      why = make_error(errc::collective_mismatch, std::move(text));
    auto all_made = *std::min_element(in.next.begin(), in.next.end());
    for (; in.first < all_made; ++in.first)
      in.open.pop_front();
  }
  if (why && first)
    result->make_void(why);
  else if (why)
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

void mesh_calls::lose_step(const caf::error& why) {
  std::lock_guard lock{mutex_};
  if (!lost_)
    lost_ = why;
}

} // namespace troupe::detail
