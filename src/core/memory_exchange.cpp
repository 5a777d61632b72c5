#include "core/memory_exchange.hpp"

#include "core/device_state.hpp"
#include "core/log.hpp"
#include "core/order.hpp"
#include "core/process_note.hpp"
#include "core/runtime.hpp"

#include <algorithm>
#include <iterator>
#include <random>
#include <string>

namespace troupe::detail {

namespace {

/// What a process may have borrowed of another one: nobody needs more, and what nobody gives back
/// is not without bounds.
constexpr std::size_t most_loans = 1u << 16;

/// So many are told one by one.
constexpr std::size_t most_wounds = 8;

/// Numbers of a process that is gone are none of the next one's.
std::uint64_t random_number() {
  std::random_device source;
  return (std::uint64_t{source()} << 32) ^ source();
}

caf::error claim_error(errc code, int device, std::string detail) {
  failure why;
  why.code = code;
  why.verb = "claim";
  why.device = device;
  why.detail = std::move(detail);
  return make_error(std::move(why));
}

bool is_plausible(const gpu_token& x) noexcept {
  if (static_cast<std::size_t>(x.type) >= std::size(all_dtypes))
    return false;
  return x.count <= SIZE_MAX / size_of(x.type);
}

std::vector<wound> few(std::vector<wound> wounds) {
  if (wounds.size() <= most_wounds)
    return wounds;
  auto all = wounds.front();
  for (auto& x : wounds) {
    all.begin = std::min(all.begin, x.begin);
    all.end = std::max(all.end, x.end);
  }
  return {all};
}

} // namespace

memory_exchange::memory_exchange(runtime& owner) : owner_(owner), last_number_(random_number()) {}

/// `f`, if the runtime is still there.
template <class F> auto memory_exchange::later(F f) {
  return [owner = owner_.weak_from_this(), f = std::move(f)](auto&&... xs) {
    if (auto self = owner.lock())
      f(self->memory(), std::forward<decltype(xs)>(xs)...);
  };
}

// -- at home

caf::expected<gpu_token> memory_exchange::offer(const any_gpu_ref& ref,
                                                std::chrono::nanoseconds grace) {
  if (ref.stale())
    return make_error(errc::stale_ref, "there is no memory to offer");
  if (ref.memory()->home().node() != owner_.node())
    return make_error(errc::invalid_argument, "the memory is of another actor system");
  if (grace <= std::chrono::nanoseconds{0})
    return make_error(errc::invalid_argument, "an offer needs a time that it lasts");
  const auto* memory = ref.memory().get();
  std::lock_guard lock{mutex_};
  const auto number = ++last_number_;
  const auto timer = owner_.keeper().call_at(
      from_now(grace),
      later([memory, number](memory_exchange& self) { self.end_offer(memory, number); }));
  if (timer == 0)
    return make_error(errc::unavailable, "the actor system ended");
  offers_.emplace(memory, offered{ref, number, timer});
  return ref.token();
}

void memory_exchange::end_offer(const buffer* memory, std::uint64_t number) {
  any_gpu_ref last; // perhaps; goes without the lock
  std::lock_guard lock{mutex_};
  auto [first, end] = offers_.equal_range(memory);
  auto i = std::find_if(first, end, [number](auto& x) { return x.second.number == number; });
  if (i == end)
    return;
  last = std::move(i->second.what);
  offers_.erase(i);
}

/// Somebody has claimed it: one offer less keeps it.
void memory_exchange::take_offer(const buffer& memory) {
  offered taken;
  {
    std::lock_guard lock{mutex_};
    auto i = offers_.find(&memory);
    if (i == offers_.end())
      return;
    taken = std::move(i->second);
    offers_.erase(i);
  }
  owner_.keeper().cancel_call(taken.timer);
}

void memory_exchange::lend(int to, const memory_note& note) {
  auto what = any_gpu_ref::resolve(note.token);
  if (!what)
    return refuse(to, note.number, what.error());
  auto& home = what->memory()->home();
  if (home.node() != owner_.node())
    return refuse(to, note.number,
                  claim_error(errc::stale_ref, to, "the token is of another actor system"));
  if (home.ordinal() != to)
    return refuse(to, note.number,
                  claim_error(errc::invalid_argument, to,
                              "the memory lies on device " + std::to_string(home.ordinal())));
  auto on = owner_.lane_of(to);
  if (!on)
    return refuse(to, note.number, on.error());
  auto how = std::make_shared<lend_operation>(*what, note.mode);
  how->parts()[0].on = on->get();
  const loan which{to, note.number};
  {
    std::lock_guard lock{mutex_};
    if (lent_.size() >= most_loans || !lent_.emplace(which, lent{*what, note.mode, how, {}}).second)
      return refuse(to, note.number,
                    claim_error(errc::overloaded, to, "too much of its memory is claimed"));
  }
  // Whoever answers must not block.
  how->on_answer(later([which](memory_exchange& self) {
    self.owner_.workers().run(
        self.later([which](memory_exchange& again) { again.lend_over(which); }));
  }));
  owner_.start(how);
}

void memory_exchange::lend_over(loan which) {
  memory_note reply;
  reply.number = which.second;
  lent gone; // goes without the lock
  std::shared_ptr<buffer> memory;
  {
    std::lock_guard lock{mutex_};
    auto i = lent_.find(which);
    if (i == lent_.end())
      return; // it is not wanted any more
    auto& x = i->second;
    if (auto why = x.how->error()) {
      reply.what = memory_note::kind::refused;
      reply.why = why;
      gone = std::move(x);
      lent_.erase(i);
    } else {
      reply.what = memory_note::kind::lent;
      memory = x.what.memory();
      reply.address = reinterpret_cast<std::uintptr_t>(memory->address()) + x.what.offset();
      x.lease = std::move(x.how->value);
      x.how.reset();
    }
  }
  if (memory)
    take_offer(*memory);
  if (auto error = owner_.tell(which.first, to_note(reply))) {
    log(log_level::warning, "memory that another process claimed did not reach it", error);
    take_back(which, {});
  }
}

void memory_exchange::take_back(loan which, const std::vector<wound>& wounds) {
  lent x;
  {
    std::lock_guard lock{mutex_};
    auto i = lent_.find(which);
    if (i == lent_.end())
      return;
    x = std::move(i->second);
    lent_.erase(i);
  }
  if (!x.lease)
    return x.how->cancel();
  if (x.mode == access_mode::read)
    return;
  for (auto w : wounds) {
    w.end = std::min(w.end, x.what.size_bytes());
    if (w.begin < w.end)
      x.what.memory()->mark_indeterminate(
          {x.what.offset() + w.begin, x.what.offset() + w.end, w.cause});
  }
}

// -- elsewhere

memory_exchange::answer memory_exchange::claim(const std::shared_ptr<device_state>& on,
                                               const gpu_token& token, access_mode mode,
                                               clock::time_point deadline) {
  auto result = std::make_shared<operation_of<any_gpu_ref>>("claim", 0);
  result->deadline = deadline;
  const auto device = on->ordinal();
  auto refused = [&](errc code, std::string why) {
    result->answer(claim_error(code, device, std::move(why)));
    return result;
  };
  if (token.node == owner_.node())
    return resolve(std::move(result), *on, token);
  if (!is_plausible(token))
    return refused(errc::stale_ref, "the token names nothing that can be");
  if (deadline <= clock::now())
    return refused(errc::deadline_exceeded, "its deadline was over before it began");
  memory_note note;
  note.token = token;
  note.mode = mode;
  {
    std::lock_guard lock{mutex_};
    if (on->live_generation() == 0)
      return refused(errc::unavailable, "the device is " + std::string{to_string(on->phase())});
    note.number = ++last_number_;
    claims_.emplace(note.number, claimed{result, on, on->live_generation(), token, mode});
  }
  owner_.keeper().add(*result);
  if (auto error = owner_.tell(device, to_note(note))) {
    take_claim(note.number);
    result->answer(code_of(error) == errc::not_supported
                       ? claim_error(errc::stale_ref, device, "the token is of another process")
                       : std::move(error));
    return result;
  }
  // If it is not the other process that answers, that may forget it.
  result->on_answer(later([device, number = note.number](memory_exchange& self) {
    if (!self.take_claim(number))
      return;
    memory_note back;
    back.what = memory_note::kind::given_back;
    back.number = number;
    self.tell_soon(device, std::move(back));
  }));
  return result;
}

/// The memory is of this process: its operations are in one order with all others.
memory_exchange::answer memory_exchange::resolve(answer to, const device_state& on,
                                                 const gpu_token& token) {
  auto ref = any_gpu_ref::resolve(token);
  if (!ref) {
    to->answer(ref.error());
  } else if (&ref->memory()->home() != &on) {
    to->answer(claim_error(errc::invalid_argument, on.ordinal(),
                           "the memory lies on device " + std::to_string(ref->device())));
  } else {
    take_offer(*ref->memory());
    to->value = std::move(*ref);
    to->answer({});
  }
  return to;
}

std::optional<memory_exchange::claimed> memory_exchange::take_claim(std::uint64_t number) {
  std::optional<claimed> result;
  {
    std::lock_guard lock{mutex_};
    auto i = claims_.find(number);
    if (i == claims_.end())
      return result;
    result = std::move(i->second);
    claims_.erase(i);
  }
  owner_.keeper().remove(*result->to);
  return result;
}

/// The other process has answered a claim.
void memory_exchange::borrow(const memory_note& note) {
  auto found = take_claim(note.number);
  if (!found)
    return; // it was given up
  auto& x = *found;
  const auto device = x.on->ordinal();
  if (note.what == memory_note::kind::refused) {
    x.to->answer(note.why ? note.why
                          : claim_error(errc::internal, device, "it was refused without a reason"));
    return;
  }
  borrowed_memory what;
  what.address = reinterpret_cast<void*>(static_cast<std::uintptr_t>(note.address));
  what.size_bytes = x.token.count * size_of(x.token.type);
  what.read_only = x.mode == access_mode::read;
  what.give_back =
      later([device, number = note.number](memory_exchange& self, std::vector<wound> wounds) {
        {
          std::lock_guard lock{self.mutex_};
          self.borrowed_.erase(number);
        }
        memory_note back;
        back.what = memory_note::kind::given_back;
        back.number = number;
        back.wounds = few(std::move(wounds));
        self.tell_soon(device, std::move(back));
      });
  any_gpu_ref ref;
  {
    std::lock_guard lock{order_mutex()};
    if (x.on->live_generation() == x.generation)
      ref = any_gpu_ref{x.on->make_buffer(std::move(what)), x.token.type, 0, x.token.count};
  }
  if (!ref) { // the process that lent it is gone, or about to be told so
    what.give_back({});
    x.to->answer(claim_error(errc::stale_ref, device, "the device began another life"));
    return;
  }
  {
    std::lock_guard lock{mutex_};
    borrowed_.emplace(note.number, ref.memory());
  }
  x.to->value = std::move(ref);
  if (!x.to->answer({}))
    x.to->value = {}; // nobody waits for it any more
}

void memory_exchange::revoke(std::uint64_t number) {
  std::shared_ptr<buffer> memory; // perhaps the last one, which goes without the lock
  std::lock_guard lock{mutex_};
  if (auto i = borrowed_.find(number); i != borrowed_.end())
    memory = i->second.lock();
  if (memory)
    memory->revoke();
}

// -- both

void memory_exchange::refuse(int to, std::uint64_t number, caf::error why) {
  memory_note note;
  note.what = memory_note::kind::refused;
  note.number = number;
  note.why = std::move(why);
  tell_soon(to, std::move(note));
}

/// Not on this thread, which may be a lane.
void memory_exchange::tell_soon(int ordinal, memory_note note) {
  owner_.workers().run(later([ordinal, note = std::move(note)](memory_exchange& self) {
    // Who is gone has given back what it had.
    if (auto error = self.owner_.tell(ordinal, to_note(note));
        error && code_of(error) != errc::worker_lost)
      log(log_level::warning, "another process was not told about its memory", error);
  }));
}

void memory_exchange::received(int ordinal, std::span<const std::byte> note) {
  auto x = memory_note_of(note);
  if (!x)
    return log(log_level::warning, "what the process of device " + std::to_string(ordinal) +
                                       " said of memory makes no sense");
  switch (x->what) {
  case memory_note::kind::claim:
    return lend(ordinal, *x);
  case memory_note::kind::lent:
  case memory_note::kind::refused:
    return borrow(*x);
  case memory_note::kind::given_back:
    return take_back({ordinal, x->number}, x->wounds);
  case memory_note::kind::ended:
    return revoke(x->number);
  }
}

void memory_exchange::drop_stale(const caf::error& why) {
  std::vector<answer> claims;
  std::vector<std::pair<loan, lent>> loans;
  std::vector<offered> offers;
  {
    std::lock_guard lock{mutex_};
    for (auto i = claims_.begin(); i != claims_.end();) {
      auto now = i++;
      if (now->second.on->live_generation() != now->second.generation)
        claims.push_back(now->second.to);
    }
    for (auto i = lent_.begin(); i != lent_.end();) {
      auto now = i++;
      if (now->second.what.stale())
        loans.emplace_back(now->first, std::move(now->second)), lent_.erase(now);
    }
    for (auto i = offers_.begin(); i != offers_.end();) {
      auto now = i++;
      if (now->second.what.stale())
        offers.push_back(std::move(now->second)), offers_.erase(now);
    }
  }
  for (auto& x : claims)
    x->answer(why); // which gives it up
  for (auto& [which, x] : loans) {
    memory_note note;
    note.what = memory_note::kind::ended;
    note.number = which.second;
    note.why = why;
    tell_soon(which.first, std::move(note));
  }
  for (auto& x : offers)
    owner_.keeper().cancel_call(x.timer);
}

} // namespace troupe::detail
