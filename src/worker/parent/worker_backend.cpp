#include "worker/parent/worker_backend.hpp"

#include "foundation/error_text.hpp"
#include "foundation/fair_limit.hpp"
#include "foundation/log.hpp"
#include "foundation/start_thread.hpp"
#include "worker/parent/remote_device.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <string_view>
#include <thread>
#include <utility>

namespace troupe::detail {

namespace {

/// As `direct::most_ranks` of the CUDA backend in the workers.
constexpr std::size_t most_direct_ranks = 8;
constexpr const char* no_worker = "the device has no worker";

/// Returns a value from a worker's reply.
template <class T> caf::expected<T> value_of(std::span<const std::byte> from) {
  auto result = read_message<T>(from);
  if (!result)
    return make_error(errc::internal, "a worker's reply could not be read");
  return std::move(*result);
}

/// Replies of several workers to one request.
class replies {
public:
  explicit replies(std::size_t number) : all_(number) {}

  void set(std::size_t i, worker_reply x) {
    std::lock_guard lock{mutex_};
    ++there_;
    if (!x && (!first_error_ || (is_of_a_peer(first_error_) && !is_of_a_peer(x.error()))))
      first_error_ = x.error();
    all_[i] = std::move(x);
    condition_.notify_all();
  }
  /// Waits for all replies, for the first error, or until `limit` is over.
  void wait_for_success(fair_limit& limit) {
    wait(limit, [this] { return first_error_ || there_ == all_.size(); });
  }
  /// Waits for all replies, or until `limit` is over.
  void wait_for_all(fair_limit& limit) {
    wait(limit, [this] { return there_ == all_.size(); });
  }
  /// Waits for an error with a cause, if the first one may follow from another rank's
  /// (`nccl_error`).
  void wait_for_cause(std::chrono::nanoseconds limit) {
    std::unique_lock lock{mutex_};
    condition_.wait_for(lock, limit, [this] {
      return !first_error_ || !is_of_a_peer(first_error_) || there_ == all_.size();
    });
  }
  std::vector<std::size_t> missing() {
    std::lock_guard lock{mutex_};
    std::vector<std::size_t> result;
    for (std::size_t i = 0; i < all_.size(); ++i)
      if (!all_[i])
        result.push_back(i);
    return result;
  }
  /// Returns the first error with a cause, or else the first error.
  caf::error first_error() {
    std::lock_guard lock{mutex_};
    return first_error_;
  }
  /// Valid when all are there.
  const worker_reply& operator[](std::size_t i) const { return *all_[i]; }

private:
  static bool is_of_a_peer(const caf::error& why) { return code_of(why) == errc::nccl_error; }

  template <class F> void wait(fair_limit& limit, F f) {
    std::unique_lock lock{mutex_};
    static_cast<void>(limit.wait(condition_, lock, f));
  }

  std::mutex mutex_;
  std::condition_variable condition_;
  std::size_t there_ = 0;
  caf::error first_error_;
  std::vector<std::optional<worker_reply>> all_;
};

/// Sends `what` to each of `links`, with the bytes that `body_of` returns for its index.
template <class F>
std::shared_ptr<replies> ask(control what, std::span<const std::shared_ptr<worker_link>> links,
                             F body_of) {
  auto result = std::make_shared<replies>(links.size());
  for (std::size_t i = 0; i < links.size(); ++i) {
    const auto body = body_of(i);
    links[i]->request(what, bytes_of(body), std::nullopt,
                      [result, i](worker_reply x) { result->set(i, std::move(x)); });
  }
  return result;
}

/// How long after a rank's error another rank may still report its cause.
constexpr std::chrono::milliseconds cause_patience{100};

constexpr const char* to_end_its_rank = "to end its rank";

/// Returns true for a rank that has not ended. One in a lost worker has ended with it.
bool is_failure(const worker_reply& x) { return !x && code_of(x.error()) != errc::worker_lost; }

/// Kills the worker if it cannot abort the rank: its operations would hold up the device for good.
void abort_one(const std::shared_ptr<worker_link>& link, communicator_key key) {
  link->request(control::abort, bytes_of(key), std::nullopt,
                [weak = std::weak_ptr{link}](const worker_reply& x) {
                  if (auto to = weak.lock(); to && is_failure(x))
                    to->give_up_failed(to_end_its_rank, x.error());
                });
}

/// Returns an id that a worker makes.
caf::expected<communicator_id> id_from(worker_link& by, control what,
                                       std::chrono::nanoseconds limit) {
  const auto made = by.request(what, std::span<const std::byte>{}, std::nullopt, limit);
  if (!made)
    return made.error();
  return value_of<communicator_id>(made->bytes);
}

/// A communicator that is being built in several workers.
struct assembly {
  explicit assembly(std::size_t ranks) : answers(ranks) {}

  replies answers;
  std::shared_ptr<const void>
      uses; ///< by ranks, also by those that join after the build was cancelled
  std::mutex mutex;
  bool given_up = false;
  std::vector<std::pair<std::shared_ptr<worker_link>, communicator_key>> built;

  /// Takes the worker's reply to the request to build the rank at `i`.
  void take(std::size_t i, const std::shared_ptr<worker_link>& link, worker_reply x) {
    auto key =
        x ? value_of<communicator_key>(x->bytes) : caf::expected<communicator_key>{x.error()};
    if (key) {
      std::unique_lock lock{mutex};
      if (given_up) {
        lock.unlock();
        abort_one(link, *key);
      } else {
        built.emplace_back(link, *key);
      }
    }
    answers.set(i, key ? std::move(x) : worker_reply{key.error()});
  }
  /// Cancels the build: aborts ranks that are built, now or later.
  void end() {
    std::lock_guard lock{mutex};
    given_up = true;
    for (auto& [link, key] : built)
      abort_one(link, key);
    built.clear();
  }
};

/// Cancels the build in all workers. The ranks meet in one of them.
void call_off_in_workers(const communicator_id& id,
                         std::span<const std::shared_ptr<worker_link>> links) {
  for (auto& x : links)
    x->request(control::call_off, bytes_of(id), std::nullopt, [](const worker_reply&) {});
}

/// Kills workers that have not built their ranks. Returns why the first one is lost.
caf::error give_up_late(std::span<const std::shared_ptr<worker_link>> links,
                        const std::vector<std::size_t>& late, std::chrono::nanoseconds limit) {
  for (auto i : late)
    links[i]->give_up_late("to build its rank", limit);
  return links[late.front()]->loss();
}

/// Kills workers that still build after the limit: a build that waits for a failed rank may not
/// notice the cancellation. Holds workers weakly, so that they can end meanwhile.
void end_those_that_hang(const std::shared_ptr<assembly>& all,
                         const std::vector<std::weak_ptr<worker_link>>& links, fair_limit left,
                         std::chrono::nanoseconds limit) {
  all->answers.wait_for_all(left);
  for (auto i : all->answers.missing())
    if (auto link = links[i].lock())
      link->give_up_late("to build its rank", limit);
}

/// Lets each of `links` build a rank, with the bytes that `body_of` returns for its index. Returns
/// the numbers of the ranks in their workers.
/// @param id   of what is built
/// @param uses is kept until all have replied
template <class F>
caf::expected<std::vector<communicator_key>>
build_ranks(control what, std::span<const std::shared_ptr<worker_link>> links, F body_of,
            const communicator_id& id, std::shared_ptr<const void> uses, fair_limit& left,
            std::chrono::nanoseconds limit) {
  auto all = std::make_shared<assembly>(links.size());
  all->uses = std::move(uses);
  for (std::size_t i = 0; i < links.size(); ++i) {
    wire_writer body;
    body.put(body_of(i));
    links[i]->request(what, body.bytes(), std::nullopt, [all, i, link = links[i]](worker_reply x) {
      all->take(i, link, std::move(x));
    });
  }
  all->answers.wait_for_success(left);
  all->answers.wait_for_cause(cause_patience);
  if (auto why = all->answers.first_error()) {
    all->end();
    call_off_in_workers(id, links); // they may wait for the failed rank
    if (limit.count() != 0 && !all->answers.missing().empty()) {
      const std::vector<std::weak_ptr<worker_link>> weak{links.begin(), links.end()};
      const auto end = [all, weak, left, limit] { end_those_that_hang(all, weak, left, limit); };
      if (start_detached_thread(end, "to end workers"))
        end(); // then this thread has to wait
    }
    return why;
  }
  if (const auto late = all->answers.missing(); !late.empty()) {
    all->end();
    return give_up_late(links, late, limit);
  }
  std::vector<communicator_key> result;
  for (std::size_t i = 0; i < links.size(); ++i)
    result.push_back(wire_reader{all->answers[i]->bytes}.get<communicator_key>());
  return result;
}

/// Ranks in workers that end.
class rank_ends {
public:
  rank_ends(const communicator_ranks& ranks, std::chrono::nanoseconds limit) : limit_(limit) {
    for (const auto& x : ranks) {
      auto& rank = static_cast<remote_communicator&>(*x);
      links_.push_back(rank.shared_link());
      keys_.push_back(rank.key());
      any_handed_over_ |= rank.is_handed_over();
    }
  }

  bool any_handed_over() const noexcept { return any_handed_over_; }

  /// Kills workers that fail.
  void ask_or_kill(control what, std::string_view purpose) {
    const auto answers = ask_all(what, purpose);
    for (std::size_t i = 0; i < links_.size(); ++i)
      if (is_failure((*answers)[i]))
        links_[i]->give_up_failed(purpose, (*answers)[i].error());
  }

  /// Leaves the ranks whose workers could not begin to destroy them, for an abort.
  /// @errors the first one of a rank that has ended nevertheless
  caf::error destroy() {
    const auto answers = ask_all(control::destroy, to_end_its_rank);
    caf::error result;
    rank_ends left;
    for (std::size_t i = 0; i < links_.size(); ++i) {
      const auto& x = (*answers)[i];
      if (is_failure(x) && code_of(x.error()) == errc::unavailable) {
        left.links_.push_back(links_[i]);
        left.keys_.push_back(keys_[i]);
      } else if (is_failure(x)) {
        keep_first(result, x.error());
      }
    }
    links_ = std::move(left.links_);
    keys_ = std::move(left.keys_);
    return result;
  }

  /// Where programs have the ranks, the work of a lost worker may use memory of the others'
  /// programs until its process is gone.
  static void hold_for_lost(const communicator_ranks& ranks) {
    for (const auto& x : ranks) {
      const auto& lost = static_cast<remote_communicator&>(*x).shared_link();
      if (!lost->lost() || lost->is_reaped() || lost->slab_granularity() == 0)
        continue; // without slabs, it has mapped none of others
      for (const auto& y : ranks) {
        const auto& other = static_cast<remote_communicator&>(*y).shared_link();
        if (other == lost)
          continue;
        other->program_ranks().begin();
        lost->when_reaped([lost, other] { other->program_ranks().end(); }); // keeps both until then
      }
    }
  }

  /// The memory of the ranks is unmapped only when the processes of lost ones are gone: until then
  /// that would hold up the work of the other workers.
  static void keep_memory_for_lost(const communicator_ranks& ranks) {
    for (const auto& x : ranks) {
      const auto& rank = static_cast<const remote_communicator&>(*x);
      if (const auto& lost = rank.shared_link(); lost->lost())
        lost->when_reaped([memory = rank.memory()] {});
    }
  }

private:
  rank_ends() = default;

  /// Waits for the replies. Kills workers that are late.
  std::shared_ptr<replies> ask_all(control what, std::string_view purpose) {
    const auto answers = ask(what, links_, [&](std::size_t i) { return keys_[i]; });
    fair_limit left{limit_};
    answers->wait_for_all(left);
    for (auto i : answers->missing())
      links_[i]->give_up_late(purpose, limit_);
    fair_limit none{{}};
    answers->wait_for_all(none); // `give_up_late` completes them
    return answers;
  }

  std::chrono::nanoseconds limit_{};
  std::vector<std::shared_ptr<worker_link>> links_;
  std::vector<communicator_key> keys_;
  bool any_handed_over_ = false;
};

} // namespace

worker_backend::worker_backend(std::shared_ptr<worker_pool> pool, std::string name,
                               const worker_settings& limits)
    : pool_(std::move(pool)), name_(std::move(name)), call_limit_(limits.call_limit),
      build_limit_(limits.build_limit), keep_memory_(limits.keep_memory) {}

caf::error worker_backend::check(int ordinal) const {
  if (ordinal >= 0 && ordinal < device_count())
    return {};
  return make_error({.code = errc::invalid_argument,
                     .detail = device_out_of_range(ordinal, device_count()),
                     .device = ordinal});
}

caf::expected<std::unique_ptr<backend_device>> worker_backend::open(int ordinal) noexcept {
  if (auto error = check(ordinal))
    return error;
  return std::unique_ptr<backend_device>{
      std::make_unique<remote_device>(pool_, ordinal, keep_memory_)};
}

caf::expected<peer_link> worker_backend::link(int from, int to) noexcept {
  for (auto ordinal : {from, to})
    if (auto error = check(ordinal))
      return error;
  const auto first = pool_->place_of(from);
  const auto second = pool_->place_of(to);
  if (first.host != second.host)
    return peer_link{}; // only the network connects them
  auto worker = pool_->provide(from);
  if (!worker)
    return worker.error();
  const std::array<std::int32_t, 2> pair{first.device, second.device};
  auto answer = (*worker)->request(control::peer_link, pair);
  if (!answer)
    return answer.error();
  return value_of<peer_link>(answer->bytes);
}

/// Returns a number for this process. `build` has a worker create the id by which the ranks meet.
caf::expected<communicator_id> worker_backend::make_communicator_id() noexcept {
  static std::atomic<std::uint64_t> last{0};
  const auto number = ++last;
  communicator_id result;
  std::memcpy(result.bytes.data(), &number, sizeof number);
  return result;
}

caf::expected<std::vector<std::shared_ptr<worker_link>>>
worker_backend::links_of(std::span<const local_rank> ranks) const {
  std::vector<std::shared_ptr<worker_link>> result;
  for (auto& x : ranks) {
    if (auto error = check(x.device))
      return error;
    auto link = x.spare ? pool_->spare(x.device) : pool_->current(x.device);
    if (!link)
      return lost_worker(x.device, x.spare ? "the device has no spare" : no_worker, x.rank);
    result.push_back(std::move(link));
  }
  return result;
}

caf::expected<communicator_ranks>
worker_backend::build(const communicator_id&, int size,
                      std::span<const local_rank> ranks) noexcept {
  if (size <= 0 || ranks.empty())
    return make_error(errc::invalid_argument, "a communicator needs at least one rank");
  const auto links = links_of(ranks);
  if (!links)
    return links.error();
  std::lock_guard one_at_a_time{building_};
  fair_limit left{build_limit_};
  const auto id = id_from(*links->front(), control::make_communicator_id, build_limit_);
  if (!id)
    return id.error();
  const auto arguments = [&](std::size_t i) {
    return build_args{*id, size, ranks[i].rank, pool_->place_of(ranks[i].device).device};
  };
  const auto check_all = [&] {
    auto result = ask(control::check_build, *links, arguments);
    result->wait_for_success(left);
    return result;
  };
  auto checks = check_all();
  if (code_of(checks->first_error()) == errc::out_of_memory) {
    for (const auto& x : ranks)
      if (const auto memory = pool_->memory_of(x.device))
        if (auto error = memory->give_back_unused(); error && code_of(error) != errc::worker_lost)
          return error;
    checks = check_all();
  }
  if (auto why = checks->first_error())
    return why;
  if (const auto late = checks->missing(); !late.empty())
    return give_up_late(*links, late, build_limit_);
  const auto keys =
      build_ranks(control::build, *links, arguments, *id, nullptr, left, build_limit_);
  if (!keys)
    return keys.error();
  communicator_ranks result;
  for (std::size_t i = 0; i < ranks.size(); ++i)
    result.push_back(std::make_unique<remote_communicator>((*links)[i], (*keys)[i]));
  return result;
}

std::shared_ptr<const void> worker_backend::keep_for_peers(int ordinal, const void* memory,
                                                           std::size_t size_bytes) noexcept {
  const auto of = pool_->memory_of(ordinal);
  const auto worker = pool_->current(ordinal);
  return of && worker ? of->keep_lent(*worker, memory, size_bytes) : nullptr;
}

std::shared_ptr<const shared_word> worker_backend::take_word(int ordinal,
                                                             std::uint64_t value) noexcept {
  const auto worker = pool_->current(ordinal);
  return worker ? worker->take_word(value) : nullptr;
}

// -- direct communicators

bool worker_backend::can_be_direct(std::span<const int> ordinals) const noexcept {
  return ordinals.size() <= most_direct_ranks && std::ranges::all_of(ordinals, [&](int from) {
           return std::ranges::all_of(ordinals, [&](int to) { return pool_->reaches(from, to); });
         });
}

caf::expected<std::shared_ptr<shared_slab>> worker_backend::make_direct_memory(int ordinal,
                                                                               worker_link& in) {
  const auto unit = in.slab_granularity();
  const auto size = (in.direct_bytes() + unit - 1) / unit * unit;
  const auto device = pool_->place_of(ordinal).device;
  auto result = pool_->slabs()->make(device, size, unit, in);
  if (!result && code_of(result.error()) == errc::out_of_memory)
    if (const auto memory = pool_->memory_of(ordinal)) {
      if (auto error = memory->give_back_unused())
        return error;
      result = pool_->slabs()->make(device, size, unit, in);
    }
  if (result)
    (*result)->note_mapped(in);
  return result;
}

/// The workers need not wait for each other, so that builds of other communicators may be under
/// way.
caf::expected<communicator_ranks>
worker_backend::build_direct(std::span<const local_rank> ranks) noexcept {
  if (ranks.empty())
    return make_error(errc::invalid_argument, "a communicator needs at least one rank");
  const auto links = links_of(ranks);
  if (!links)
    return links.error();
  for (const auto& x : ranks)
    for (const auto& y : ranks)
      if (!pool_->reaches(x.device, y.device))
        return make_error(
            {.code = errc::not_supported,
             .detail = "it does no direct collectives with device " + std::to_string(y.device),
             .device = x.device,
             .rank = x.rank});
  for (std::size_t i = 0; i < ranks.size(); ++i)
    if (const auto& x = *(*links)[i]; x.slab_granularity() == 0 || x.direct_bytes() == 0 ||
                                      x.direct_bytes() != links->front()->direct_bytes())
      return make_error({.code = errc::not_supported,
                         .detail = "its worker does no direct collectives",
                         .device = ranks[i].device,
                         .rank = ranks[i].rank});
  fair_limit left{build_limit_};
  const auto id = id_from(*links->front(), control::make_direct_id, build_limit_);
  if (!id)
    return id.error();
  join_args what{.id = *id};
  const auto memory = std::make_shared<std::vector<std::shared_ptr<shared_slab>>>();
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    auto slab = make_direct_memory(ranks[i].device, *(*links)[i]);
    if (!slab)
      return slab.error();
    what.members.push_back({(*slab)->what().ordinal, (*slab)->what().address});
    memory->push_back(std::move(*slab));
  }
  for (auto& slab : *memory) // side by side
    for (auto& link : *links)
      slab->begin_to_map(*link);
  for (auto& slab : *memory)
    for (auto& link : *links)
      if (auto error = slab->map(*link))
        return error;
  const auto keys = build_ranks(
      control::join_direct, *links,
      [&](std::size_t i) -> const join_args& {
        what.rank = ranks[i].rank;
        return what;
      },
      *id, memory, left, build_limit_);
  if (!keys)
    return keys.error();
  communicator_ranks result;
  for (std::size_t i = 0; i < ranks.size(); ++i)
    result.push_back(
        std::make_unique<remote_direct_rank>((*links)[i], (*keys)[i], memory, pool_->shared()));
  return result;
}

// -- spares

caf::error worker_backend::admit_spare(int ordinal, const std::shared_ptr<worker_link>& spare) {
  const auto worker = pool_->current(ordinal);
  for (int i = 0; worker && i < device_count(); ++i)
    if (const auto memory = pool_->memory_of(i); i != ordinal && memory && memory->admits(*worker))
      if (auto error = memory->admit(spare))
        return error;
  return {};
}

caf::error worker_backend::provide_spare(int ordinal) noexcept {
  if (auto error = check(ordinal))
    return error;
  if (auto error = pool_->provide_spare(ordinal))
    return error;
  const auto memory = pool_->memory_of(ordinal);
  const auto spare = pool_->spare(ordinal);
  if (memory && spare &&
      keep_memory_ != kept_memory::none) // a spare without it maps it when it is needed
    if (auto error = memory->prepare(spare); error && code_of(error) != errc::worker_lost)
      log(log_level::warning, "a spare could not map the memory of its device", error);
  return spare ? admit_spare(ordinal, spare) : caf::error{};
}

caf::error worker_backend::prepare_move(int ordinal) noexcept {
  if (auto error = check(ordinal))
    return error;
  const auto memory = pool_->memory_of(ordinal);
  if (!memory || !memory->are_possible())
    return make_error({.code = errc::not_supported,
                       .detail = "the device's memory is in its worker alone: this process holds "
                                 "only memory of its host's devices, if the driver can share it",
                       .device = ordinal});
  if (auto error = pool_->provide_spare(ordinal))
    return error;
  const auto spare = pool_->spare(ordinal);
  if (!spare)
    return lost_worker(ordinal, "the device has no spare");
  if (auto error = memory->prepare(spare))
    return error;
  return admit_spare(ordinal, spare);
}

caf::error worker_backend::tell(int ordinal, std::span<const std::byte> what) noexcept {
  if (auto error = check(ordinal))
    return error;
  auto link = pool_->current(ordinal);
  return link ? link->send(control::tell, what) : lost_worker(ordinal, no_worker);
}

bool worker_backend::is_current(const backend_communicator& rank, int ordinal) const noexcept {
  auto& link = static_cast<const remote_communicator&>(rank).link();
  return &link == pool_->current(ordinal).get() && !link.lost();
}

bool worker_backend::give_up(int ordinal, const caf::error& why) noexcept {
  if (check(ordinal))
    return false;
  auto link = pool_->current(ordinal);
  if (!link)
    return false;
  link->give_up(lost_worker(ordinal, why));
  return true;
}

caf::error worker_backend::end(control how, const communicator_ranks& ranks) noexcept {
  rank_ends all{ranks, call_limit_};
  // The abort of one rank may let another's work end with wrong results (see `guest_ends`). Their
  // owner in this process has closed the ranks that are not handed over.
  const bool are_of_programs = all.any_handed_over();
  if (are_of_programs)
    all.ask_or_kill(control::close, "to close its rank");
  caf::error result;
  if (how == control::destroy)
    result = all.destroy();
  all.ask_or_kill(control::abort, to_end_its_rank);
  if (are_of_programs)
    rank_ends::hold_for_lost(ranks);
  rank_ends::keep_memory_for_lost(ranks);
  return result;
}

} // namespace troupe::detail

namespace troupe {

std::vector<device_place> device_places(const backend& of) {
  std::vector<device_place> result;
  const auto* workers = dynamic_cast<const detail::worker_backend*>(&of);
  for (int i = 0; i < of.device_count(); ++i)
    result.push_back(workers != nullptr ? workers->place_of(i) : device_place{{}, i});
  return result;
}

} // namespace troupe
