#include "sharing/memory_exchange.hpp"

#include "foundation/error_text.hpp"
#include "foundation/log.hpp"
#include "operation/admission_lock.hpp"
#include "operation/device_state.hpp"
#include "operation/use_of.hpp"

#include <algorithm>
#include <string>

namespace troupe::detail {

namespace {

/// Limit of the claims that a process has open, and of the jobs that wait for it. No program needs
/// more, and it bounds what is never given back.
constexpr std::size_t most_loans = 1u << 16;

caf::error claim_error(errc code, int device, std::string detail) {
  return refusal("claim", device, code, std::move(detail));
}

bool is_plausible(const gpu_token& x) noexcept {
  return is_dtype(x.type) && x.count <= SIZE_MAX / size_of(x.type);
}

} // namespace

/// Numbers start at the random node, so they never match those of a process that is gone.
memory_exchange::memory_exchange(runtime& owner) : owner_(owner), last_number_(owner.node()) {}

/// Returns a function that calls `f` if the runtime still exists.
template <class F> auto memory_exchange::later(F f) {
  return [owner = owner_.weak_from_this(), f = std::move(f)](auto&&... xs) {
    if (auto self = owner.lock())
      f(self->memory(), std::forward<decltype(xs)>(xs)...);
  };
}

// -- memory of this process

caf::expected<gpu_token> memory_exchange::offer(const any_gpu_ref& ref,
                                                std::chrono::nanoseconds grace) {
  if (ref.stale())
    return make_error(errc::stale_ref, "the memory to offer was freed");
  if (ref.memory()->home().node() != owner_.node())
    return make_error(errc::invalid_argument, foreign_handle);
  if (grace <= std::chrono::nanoseconds{0})
    return make_error(errc::invalid_argument, "an offer with a grace time of " +
                                                  std::to_string(grace.count()) +
                                                  " ns: it must be positive");
  const auto* memory = ref.memory().get();
  std::lock_guard lock{mutex_};
  const auto number = ++last_number_;
  const auto timer = owner_.deadlines().call_at(
      from_now(grace),
      later([memory, number](memory_exchange& self) { self.end_offer(memory, number); }));
  if (timer == 0)
    return make_error(errc::unavailable, "the actor system ended");
  offers_.emplace(memory, offered{ref, number, timer});
  return ref.token();
}

void memory_exchange::end_offer(const buffer* memory, std::uint64_t number) {
  decltype(offers_)::node_type last; // perhaps of the last handle; destroyed without the lock
  std::lock_guard lock{mutex_};
  auto [first, end] = offers_.equal_range(memory);
  auto i = std::find_if(first, end, [number](auto& x) { return x.second.number == number; });
  if (i != end)
    last = offers_.extract(i);
}

/// Removes one offer of memory that was claimed.
void memory_exchange::take_offer(const any_gpu_ref& what) {
  decltype(offers_)::node_type taken;
  {
    std::lock_guard lock{mutex_};
    auto [first, end] = offers_.equal_range(what.memory().get());
    auto i = std::find_if(first, end, [&](auto& x) { return x.second.what == what; });
    if (i == end)
      i = first; // an offer of another part of the memory
    if (i == end)
      return;
    taken = offers_.extract(i);
  }
  owner_.deadlines().cancel_call(taken.mapped().timer);
}

void memory_exchange::lend(int to, const memory_note& note,
                           std::optional<std::uint64_t> of_process) {
  auto what = any_gpu_ref::resolve(note.token);
  if (!what)
    return refuse(to, note.number, what.error());
  auto& home = what->memory()->home();
  if (home.node() != owner_.node())
    return refuse(to, note.number,
                  claim_error(errc::stale_ref, to, "the token belongs to another actor system"));
  if (home.ordinal() != to)
    return refuse(to, note.number,
                  claim_error(errc::invalid_argument, to,
                              "the memory lies on device " + std::to_string(home.ordinal())));
  auto on = owner_.lane_of(to);
  if (!on)
    return refuse(to, note.number, on.error());
  const auto incarnation = home.live_incarnation();
  if (incarnation == 0)
    return refuse(to, note.number, claim_error(errc::unavailable, to, device_is(home.phase())));
  if (of_process && *of_process != incarnation)
    return; // that process is gone
  if (postpone(to, note, *what->memory(), incarnation))
    return;
  auto how = std::make_shared<lend_operation>("claim", *what, note.mode);
  how->parts()[0].on = on->get();
  bool is_new = false;
  {
    std::lock_guard lock{mutex_};
    auto& all = lent_[to];
    is_new = all.size() < most_loans && all.emplace(note.number, lent{how, {}, incarnation}).second;
  }
  if (!is_new)
    return refuse(to, note.number,
                  claim_error(errc::overloaded, to,
                              "its memory has " + std::to_string(most_loans) +
                                  " open claims, which is the limit"));
  // The thread that answers must not block.
  how->on_answer(
      later([which = loan{to, note.number}, weak = std::weak_ptr{how}](memory_exchange& self) {
        self.do_soon(which.first, [which, op = weak.lock()](memory_exchange& again) {
          if (op)
            again.lend_over(which, *op);
        });
      }));
  owner_.start(how);
}

/// Without it, the claims of a lost process's successor would be refused (errc::buffer_acquired).
bool memory_exchange::postpone(int to, const memory_note& note, const buffer& memory,
                               std::uint64_t incarnation) {
  std::lock_guard lock{mutex_};
  auto& x = lost_[to];
  const bool is_there = x.ending != 0 || std::ranges::any_of(x.all, [&](const lent& y) {
                          return y.how->ref().memory().get() == &memory;
                        });
  if (!is_there || x.waiting.size() >= most_loans)
    return false;
  x.waiting.push_back({note, incarnation});
  return true;
}

bool memory_exchange::forget_postponed(loan which) {
  std::lock_guard lock{mutex_};
  return std::erase_if(lost_[which.first].waiting,
                       [&](const postponed& x) { return x.claim.number == which.second; }) != 0;
}

void memory_exchange::lend_over(loan which, const lend_operation& how) {
  if (auto why = how.error()) {
    if (take_lent(which))
      refuse(which.first, which.second, std::move(why));
    return;
  }
  auto& what = how.ref();
  auto lease = std::make_unique<memory_lease>(what.memory(), how.mode());
  auto word =
      how.mode() == access_mode::read
          ? nullptr
          : owner_.backend().take_word(which.first, how.unreadable().empty() ? 0 : buffer::marked);
  memory_note reply{.what = memory_note::kind::lent, .number = which.second};
  reply.word = word ? word->number : 0;
  {
    std::lock_guard lock{mutex_};
    auto& all = lent_[which.first];
    auto i = all.find(which.second);
    if (i == all.end() || what.memory()->home().live_incarnation() != i->second.incarnation)
      return; // the claim was taken back, or its process is lost
    i->second.lease = std::move(lease);
    i->second.word = std::move(word); // of that process: no other one had the device meanwhile
  }
  take_offer(what);
  reply.address = reinterpret_cast<std::uintptr_t>(what.memory()->address()) + what.offset();
  for (auto& x : how.unreadable())
    reply.unreadable.push_back(
        {x.begin - what.offset(), x.end - what.offset(), x.cause, x.skipped_by});
  if (auto error = owner_.tell(which.first, to_note(reply))) {
    log(log_level::warning, "cannot send claimed memory to another process", error,
        log_kind::notes);
    take_back(which, reply.unreadable);
  }
}

std::optional<memory_exchange::lent> memory_exchange::take_lent(loan which) {
  std::lock_guard lock{mutex_};
  auto taken = lent_[which.first].extract(which.second);
  return taken ? std::optional{std::move(taken.mapped())} : std::nullopt;
}

void memory_exchange::take_back(loan which, const std::vector<unreadable_range>& unreadable) {
  if (forget_postponed(which))
    return;
  auto x = take_lent(which);
  if (!x)
    return;
  if (!x->lease)
    return x->how->cancel(); // if it is over already, `lend_over` finds no entry
  if (x->how->mode() == access_mode::read)
    return;
  // The borrower's marks replace the ones here.
  auto& what = x->how->ref();
  auto& memory = *what.memory();
  const auto begin = what.offset();
  const auto size = what.size_bytes();
  memory.mark_overwritten(begin, begin + size);
  for (auto w : unreadable) {
    w.end = std::min(w.end, size);
    if (w.begin < w.end)
      memory.mark({begin + w.begin, begin + w.end, w.cause, w.skipped_by});
  }
}

// -- memory of the other process

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
  if (mode > access_mode::read_write)
    return refused(errc::invalid_argument,
                   "unknown access mode " + std::to_string(static_cast<int>(mode)));
  if (token.node == owner_.node())
    return resolve(std::move(result), *on, token);
  if (!is_plausible(token))
    return refused(errc::stale_ref, "the token is malformed");
  if (deadline <= clock::now())
    return refused(errc::deadline_exceeded, "its deadline was over before it began");
  memory_note note{.token = token, .mode = mode};
  bool is_there = false;
  {
    std::lock_guard lock{mutex_};
    const auto incarnation = on->live_incarnation();
    is_there = incarnation != 0 && !closed_;
    note.number = ++last_number_;
    if (is_there)
      claims_.emplace(note.number, claimed{result, on, incarnation, token, mode});
  }
  if (!is_there)
    return refused(errc::unavailable, device_is(on->phase()));
  owner_.deadlines().add(*result);
  // If the answer does not come from the other process, that process may drop the claim.
  result->on_answer(later([device, number = note.number](memory_exchange& self) {
    if (self.take_claim(number))
      self.give_back(device, number, {});
  }));
  do_soon(device, [device, note](memory_exchange& self) {
    // A claim that ended is given back already. If sent now, it would be lent for ever.
    if (!self.is_claimed(note.number))
      return;
    auto error = self.owner_.tell(device, to_note(note));
    if (!error)
      return;
    if (code_of(error) == errc::not_supported)
      error = claim_error(errc::stale_ref, device, "the token belongs to another process");
    if (auto x = self.take_claim(note.number))
      x->to->answer(std::move(error));
  });
  return result;
}

/// The memory belongs to this process, so its operations are in one order with all others.
memory_exchange::answer memory_exchange::resolve(answer to, const device_state& on,
                                                 const gpu_token& token) {
  auto ref = any_gpu_ref::resolve(token);
  if (!ref) {
    to->answer(ref.error());
  } else if (&ref->memory()->home() != &on) {
    to->answer(claim_error(errc::invalid_argument, on.ordinal(),
                           "the memory lies on device " + std::to_string(ref->device())));
  } else {
    take_offer(*ref);
    to->value = std::move(*ref);
    to->answer({});
  }
  return to;
}

bool memory_exchange::is_claimed(std::uint64_t number) {
  std::lock_guard lock{mutex_};
  return claims_.contains(number);
}

std::optional<memory_exchange::claimed> memory_exchange::take_claim(std::uint64_t number) {
  decltype(claims_)::node_type taken;
  {
    std::lock_guard lock{mutex_};
    taken = claims_.extract(number);
  }
  if (!taken)
    return std::nullopt;
  owner_.deadlines().remove(*taken.mapped().to);
  return std::move(taken.mapped());
}

/// Handles the other process's reply to a claim.
void memory_exchange::borrow(const memory_note& note) {
  auto found = take_claim(note.number);
  if (!found)
    return; // the claim has ended
  auto& x = *found;
  const auto device = x.on->ordinal();
  if (note.what == memory_note::kind::refused) {
    auto why = failure_of(note.why).value_or(failure{});
    why.device = device; // its ordinal in this process
    x.to->answer(make_error(std::move(why)));
    return;
  }
  borrowed_memory what;
  what.address = reinterpret_cast<void*>(static_cast<std::uintptr_t>(note.address));
  what.size_bytes = x.token.count * size_of(x.token.type);
  what.read_only = x.mode == access_mode::read;
  what.unfinished = note.word != 0 ? owner_.backend().find_word(note.word) : nullptr;
  if (note.word != 0 && what.unfinished == nullptr) {
    give_back(device, note.number, note.unreadable);
    x.to->answer(
        claim_error(errc::internal, device, "the other process named a word of no memory"));
    return;
  }
  auto kept = owner_.backend().keep_for_peers(device, what.address, what.size_bytes);
  what.has_no_peers = kept == nullptr;
  what.give_back = later([device, number = note.number, kept = std::move(kept)](
                             memory_exchange& self, std::vector<unreadable_range> unreadable) {
    self.give_back(device, number, std::move(unreadable));
  });
  any_gpu_ref ref;
  {
    admission_lock lock;
    if (x.on->live_incarnation() == x.incarnation)
      ref = any_gpu_ref{x.on->make_buffer(what), x.token.type, 0, x.token.count};
  }
  if (!ref) { // the lender is gone, or gets the memory back
    give_back(device, note.number, note.unreadable);
    x.to->answer(claim_error(errc::stale_ref, device, "the device was reset or lost"));
    return;
  }
  for (auto& w : note.unreadable)
    if (w.begin < w.end && w.end <= what.size_bytes)
      ref.memory()->mark(w);
  x.to->value = std::move(ref);
  if (!x.to->answer({}))
    x.to->value = {}; // the claim has ended meanwhile
}

void memory_exchange::give_back(int device, std::uint64_t number,
                                std::vector<unreadable_range> unreadable) {
  tell_soon(device, {.what = memory_note::kind::given_back,
                     .number = number,
                     .unreadable = std::move(unreadable)});
}

// -- common to both

void memory_exchange::refuse(int to, std::uint64_t number, caf::error why) {
  tell_soon(to, {.what = memory_note::kind::refused, .number = number, .why = std::move(why)});
}

void memory_exchange::tell_soon(int ordinal, memory_note note) {
  do_soon(ordinal, [ordinal, note = std::move(note)](memory_exchange& self) {
    // A process that is gone holds no memory any more.
    if (auto error = self.owner_.tell(ordinal, to_note(note));
        error && code_of(error) != errc::worker_lost)
      log(log_level::warning, "cannot send another process a notice about its memory", error,
          log_kind::notes);
  });
}

/// Runs `what` on a background thread: this thread may be a lane, which must not block.
void memory_exchange::do_soon(int ordinal, job what) {
  {
    std::lock_guard lock{mutex_};
    if (closed_)
      return;
    auto& x = posts_[ordinal];
    x.jobs.push_back(std::move(what));
    if (std::exchange(x.busy, true))
      return;
  }
  owner_.workers().run(later([ordinal](memory_exchange& self) { self.work_off(ordinal); }));
}

void memory_exchange::work_off(int ordinal) {
  for (;;) {
    job next;
    {
      std::lock_guard lock{mutex_};
      auto& x = posts_[ordinal];
      if (x.jobs.empty()) {
        x.busy = false;
        return;
      }
      next = std::move(x.jobs.front());
      x.jobs.pop_front();
    }
    next(*this);
  }
}

void memory_exchange::on_memory_note(int ordinal, std::span<const std::byte> note) {
  auto x = memory_note_of(note);
  if (!x)
    return log(log_level::warning,
               "the process of device " + std::to_string(ordinal) +
                   " sent a malformed notice about memory",
               log_kind::notes);
  switch (x->what) {
  case memory_note::kind::claim:
    if (!is_crowded(ordinal)) // else it claims faster than it reads replies
      lend(ordinal, *x);
    break;
  case memory_note::kind::lent:
  case memory_note::kind::refused:
    borrow(*x);
    break;
  case memory_note::kind::given_back:
    take_back({ordinal, x->number}, x->unreadable);
    break;
  }
}

bool memory_exchange::is_crowded(int ordinal) {
  std::lock_guard lock{mutex_};
  return posts_[ordinal].jobs.size() >= most_loans;
}

/// Returns whether the memory or the process that has it is gone.
bool memory_exchange::has_ended(const lent& x) noexcept {
  return x.how->ref().stale() || x.how->ref().memory()->home().live_incarnation() != x.incarnation;
}

void memory_exchange::on_lost_work_over(int ordinal) {
  std::vector<lent> over;
  {
    std::lock_guard lock{mutex_};
    over.swap(lost_[ordinal].all);
    ++lost_[ordinal].ending;
  }
  for (auto& x : over) {
    auto& what = x.how->ref();
    if (!x.lease || x.how->mode() == access_mode::read || what.stale())
      continue;
    const auto begin = what.offset();
    const auto end = begin + what.size_bytes();
    if (x.word && x.word->value->load() == 0) // complete, as `buffer::begin_write` says
      what.memory()->mark_overwritten(begin, end);
    else
      what.memory()->mark({begin, end, x.loss});
  }
  over.clear(); // ends the leases, without the lock
  std::vector<postponed> waiting;
  {
    std::lock_guard lock{mutex_};
    auto& x = lost_[ordinal];
    if (--x.ending == 0)
      waiting.swap(x.waiting);
  }
  for (auto& x : waiting)
    do_soon(ordinal, [ordinal, x = std::move(x)](memory_exchange& self) {
      self.lend(ordinal, x.claim, x.incarnation);
    });
}

void memory_exchange::on_devices_closed(const caf::error& why) {
  std::vector<answer> claims;
  std::vector<lent> loans; // destroyed without the lock
  std::vector<offered> offers;
  {
    std::lock_guard lock{mutex_};
    for (auto& [number, x] : claims_)
      if (x.on->live_incarnation() != x.incarnation)
        claims.push_back(x.to);
    for (auto& [ordinal, all] : lent_)
      for (auto i = all.begin(); i != all.end();)
        if (auto now = i++; has_ended(now->second)) {
          // Reads of a lost process make no difference.
          const auto& how = *now->second.how;
          const bool is_over = how.ref().stale() || how.mode() == access_mode::read;
          auto& to = is_over ? loans : lost_[ordinal].all;
          now->second.loss = how.ref().memory()->home().reason();
          to.push_back(std::move(now->second));
          all.erase(now);
        }
    for (auto i = offers_.begin(); i != offers_.end();)
      if (auto now = i++; now->second.what.stale()) {
        offers.push_back(std::move(now->second));
        offers_.erase(now);
      }
  }
  for (auto& x : claims)
    x->answer(why); // its listener removes the claim
  for (auto& x : offers)
    owner_.deadlines().cancel_call(x.timer);
}

void memory_exchange::on_close() noexcept {
  std::map<int, std::deque<job>> dropped; // destroyed without the lock
  std::lock_guard lock{mutex_};
  closed_ = true;
  for (auto& [ordinal, x] : posts_)
    dropped[ordinal].swap(x.jobs);
}

} // namespace troupe::detail
