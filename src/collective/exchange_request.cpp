#include "collective/exchange_request.hpp"

#include "admission/admission.hpp"
#include "admission/deadline_watch.hpp"
#include "collective/rank_request.hpp"
#include "operation/admission_lock.hpp"
#include "operation/room.hpp"
#include "runtime/runtime.hpp"
#include <troupe/collective_kind.hpp>

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>

namespace troupe::detail {

exchange_request::exchange_request(std::shared_ptr<runtime> owner,
                                   std::vector<std::shared_ptr<rank_request>> requests)
    : operation_of("exchange", 0), owner_(std::move(owner)), requests_(std::move(requests)),
      left_(requests_.size()) {}

void exchange_request::start(room_policy room) {
  auto self = std::static_pointer_cast<exchange_request>(shared_from_this());
  std::map<std::pair<std::int32_t, collective_kind>, std::size_t> lines;
  std::vector<admission::submission> all;
  all.reserve(requests_.size());
  for (auto& x : requests_) {
    x->on_answer([self, request = x.get()] { self->on_answer_of(*request); });
    all.push_back(x->begin_together(lines[{x->peer(), x->what()}]++));
  }
  const auto how = choose_room(room);
  auto why = find_room(
      how, requests_.front()->deadline,
      [&] { return owner_->admissions().place_together(all, how.bound); },
      [&] {
        admission_lock lock;
        auto result = room_maker::others;
        for (auto& x : requests_)
          result = std::max(result, x->who_makes_room(lock, how.bound));
        return result;
      });
  if (why) {
    {
      admission_lock lock;
      for (auto& x : requests_)
        x->note_refused(lock, why);
    }
    answer(why);
    for (auto& x : requests_)
      x->end_refused(why);
    return;
  }
  for (auto& x : requests_)
    x->watch();
  auto& deadlines = owner_->deadlines();
  on_answer([owner = owner_, weak = std::weak_ptr{self}] {
    if (auto x = weak.lock())
      owner->deadlines().remove(*x);
  });
  deadlines.add(*this);
  if (completed())
    deadlines.remove(*this);
}

void exchange_request::on_answer_of(const rank_request& x) noexcept {
  if (!x.error()) {
    if (left_.fetch_sub(1) == 1) {
      value = requests_.back()->value;
      answer({});
    }
    return;
  }
  if (!answer(x.error()))
    return;
  // The completing thread may hold the admission lock: end the others on the deadline watch's
  // thread.
  auto self = std::static_pointer_cast<exchange_request>(shared_from_this());
  const auto how = early_end::expired; // the ranges that they would have written are skipped
  owner_->deadlines().call_at(clock::now(),
                              [self, how, why = x.error()] { self->end_all(how, why); });
}

void exchange_request::end_all(early_end how, const caf::error& why) noexcept {
  for (auto& x : requests_)
    x->end_beside(how, why);
}

void exchange_request::end_early(early_end how) noexcept {
  auto why = make_error(early_failure(how));
  answer(why);
  end_all(how, why);
}

} // namespace troupe::detail
