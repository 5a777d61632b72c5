#include "worker/parent/device_slabs.hpp"

#include "foundation/log.hpp"
#include "foundation/start_thread.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace troupe::detail {

namespace {

/// How long an allocation that found no memory waits for workers that still have some mapped. Their
/// streams may wait for the device that allocates.
constexpr std::chrono::milliseconds unmap_patience{50};

constexpr std::size_t rounded_up(std::size_t size_bytes, std::size_t unit) noexcept {
  return (size_bytes + unit - 1) / unit * unit;
}

} // namespace

std::size_t next_slab_bytes(std::size_t needed, std::size_t slabs, std::size_t device_bytes,
                            std::size_t unit) noexcept {
  // A small program takes little. 256 slabs hold 340 GiB.
  const auto least = (std::size_t{64} << 20) << (2 * std::min<std::size_t>(slabs / 64, 3));
  const auto of_device = device_bytes / 16 / unit * unit;
  return std::max({rounded_up(needed, unit), std::min(rounded_up(least, unit), of_device), unit});
}

device_slabs::device_slabs(int ordinal, std::shared_ptr<shared_slabs> shared,
                           std::chrono::milliseconds keep)
    : ordinal_(ordinal), shared_(std::move(shared)), keep_(keep) {}

device_slabs::~device_slabs() {
  {
    const std::lock_guard lock{mutex_};
    ends_ = true;
  }
  changed_.notify_all();
  if (keeper_.joinable())
    keeper_.join();
  for (auto& x : take_all().slabs)
    shared_->remove(x);
}

void device_slabs::begin(std::shared_ptr<worker_link> worker) {
  removed former;
  {
    const std::lock_guard turn{giving_back_};
    const std::lock_guard lock{mutex_};
    if (worker_ == worker)
      return;
    former = take_all();
    worker_ = worker;
    unit_ = worker_->slab_granularity();
    forget_spare();
  }
  for (auto& x : former.slabs)
    shared_->remove(x);
  serve_demands_of(worker);
}

std::vector<memory_slab> device_slabs::all() const {
  const std::lock_guard lock{mutex_};
  return all_locked();
}

std::vector<memory_slab> device_slabs::all_locked() const {
  std::vector<memory_slab> result;
  for (const auto& x : slabs_.all())
    result.push_back(slab_of(x));
  if (arriving_)
    result.push_back(*arriving_);
  return result;
}

std::shared_ptr<worker_link> device_slabs::worker() const {
  const std::lock_guard lock{mutex_};
  return worker_;
}

caf::error device_slabs::move_to(std::shared_ptr<worker_link> worker) {
  if (worker->slab_granularity() != unit_)
    return make_error({.code = errc::not_supported,
                       .detail = "the new worker has slabs of another kind",
                       .device = ordinal_});
  {
    const std::lock_guard turn{giving_back_}; // else the former worker would be asked
    if (this->worker() == worker)
      return {};
    const auto slabs = all();
    if (auto error = map(slabs, *worker); error)
      return error;
    for (auto& x : slabs)
      shared_->give_to(x, *worker);
    const std::lock_guard lock{mutex_};
    worker_ = worker;
    forget_spare();
  }
  serve_demands_of(worker);
  return {};
}

/// Needs `mutex_`. The worker is no spare any more.
void device_slabs::forget_spare() {
  if (spare_.lock() == worker_)
    spare_.reset();
}

caf::error device_slabs::map(const std::vector<memory_slab>& slabs, worker_link& in) const {
  for (auto& x : slabs) // side by side
    shared_->begin_to_map(x, in);
  for (auto& x : slabs)
    if (auto error = shared_->map(x, in); error)
      return error;
  return {};
}

caf::error device_slabs::prepare(const std::shared_ptr<worker_link>& spare) {
  {
    const std::lock_guard lock{mutex_};
    if (spare == worker_)
      return {};    // it has taken over already, with all slabs
    spare_ = spare; // first: slabs that appear meanwhile are mapped, too
  }
  auto error = map(all(), *spare);
  const std::lock_guard lock{mutex_};
  return spare == worker_ ? caf::error{} : error;
}

device_slabs::removed device_slabs::take_all() {
  removed result{all_locked(), worker_};
  arriving_.reset();
  slabs_ = {};
  taken_.clear();
  result.lent.swap(lent_);
  return result;
}

caf::expected<void*> device_slabs::allocate(std::size_t size_bytes) {
  while (true) { // others may take what was made
    {
      const std::lock_guard lock{mutex_};
      if (const auto there = slabs_.take(size_bytes)) {
        taken_.insert(*there);
        return there->first;
      }
    }
    if (auto error = grow(size_bytes))
      return error;
  }
}

bool device_slabs::deallocate(void* memory) {
  {
    const std::lock_guard lock{mutex_};
    const auto found = taken_.find(memory);
    if (found == taken_.end())
      return false;
    const auto range = found->second;
    taken_.erase(found);
    if (!slabs_.give_back(range))
      return true;
  }
  note_empty();
  return true;
}

caf::error device_slabs::is_gone() const {
  return lost_worker(ordinal_, "its worker changed while memory was allocated");
}

caf::error device_slabs::grow(std::size_t size_bytes) {
  const auto no_room = [&](const std::string& why) {
    return make_error({.code = errc::out_of_memory,
                       .detail = std::to_string(size_bytes) + " bytes asked for, but " + why,
                       .device = ordinal_});
  };
  const std::size_t device_bytes = device_bytes_;
  if (size_bytes > device_bytes)
    return no_room("the device has " + std::to_string(device_bytes));
  const std::lock_guard one_at_a_time{growing_};
  const std::size_t unit = unit_;
  if (unit == 0)
    return is_gone();
  const auto number = [this] {
    const std::lock_guard lock{mutex_};
    return slabs_.slabs();
  };
  if (number() == slab_space::most_slabs) {
    if (auto error = give_back_unused())
      return error;
    if (number() == slab_space::most_slabs)
      return no_room("the device has " + std::to_string(number()) + " slabs, and none has room");
  }
  const auto exact = rounded_up(size_bytes, unit);
  const auto preferred = next_slab_bytes(size_bytes, number(), device_bytes, unit);
  auto error = make(preferred, unit);
  if (code_of(error) == errc::out_of_memory && preferred > exact)
    error = make(exact, unit);
  if (code_of(error) != errc::out_of_memory)
    return error;
  if (auto failed = give_back_unused())
    return failed;
  return make(exact, unit);
}

caf::error device_slabs::give_back_unused() {
  trim_programs();
  const std::lock_guard lock{giving_back_}; // what the keeper gives back is free then, too
  auto error = unmap(take_empty(clock::time_point::max()));
  static_cast<void>(shared_->wait_for_unmappings(unmap_patience)); // else there is less memory
  return error;
}

/// A slab is in use only when all workers have mapped it that may need it: until then it is
/// `arriving_`. Meanwhile another worker may get the device, with all slabs or with none.
caf::error device_slabs::make(std::size_t slab_bytes, std::size_t unit) {
  const auto by = worker();
  const auto made = shared_->make(ordinal_, slab_bytes, unit, *by);
  if (!made)
    return made.error();
  const auto& what = (*made)->what();
  std::shared_ptr<worker_link> spare;
  {
    const std::lock_guard turn{giving_back_}; // `move_to` has seen all slabs, or sees this one
    const std::lock_guard lock{mutex_};
    if (worker_ != by)
      return is_gone();
    shared_->add(*made);
    arriving_ = what;
    spare = spare_.lock();
  }
  if (spare)
    (*made)->begin_to_map(*spare);
  auto error = map_in_peers(**made);
  {
    const std::lock_guard lock{mutex_};
    if (!arriving_)
      return is_gone(); // `begin` has dropped it
    arriving_.reset();
    // Empty at first: other memory may be free meanwhile.
    if (!error && slabs_.add({static_cast<std::byte*>(what.address), what.size_bytes}))
      return {};
  }
  if (!error)
    error = make_error(errc::internal, "there are too many slabs");
  else
    shared_->addresses().leave_window(what.address); // a peer may use it for something else
  if (auto failed = unmap({{what}, worker()}))
    log(log_level::warning, "device memory was not given back", failed);
  return error;
}

std::vector<std::shared_ptr<worker_link>> device_slabs::peers() {
  const std::lock_guard lock{mutex_};
  std::erase_if(peers_, [](auto& x) {
    const auto there = x.lock();
    return !there || there->lost() || there->is_former();
  });
  std::vector<std::shared_ptr<worker_link>> result;
  for (auto& x : peers_)
    if (auto there = x.lock())
      result.push_back(std::move(there));
  return result;
}

caf::error device_slabs::map_in_peers(shared_slab& what) {
  const auto all = peers();
  for (auto& x : all) // side by side
    what.begin_to_map(*x);
  for (auto& x : all)
    if (auto error = what.map(*x); error && !x->lost())
      return error;
  return {};
}

caf::error device_slabs::admit(const std::shared_ptr<worker_link>& peer) {
  {
    const std::lock_guard lock{mutex_};
    if (std::ranges::none_of(peers_, [&](auto& x) { return x.lock() == peer; }))
      peers_.push_back(peer); // first: slabs that appear meanwhile are mapped, too
  }
  auto error = map(all(), *peer);
  if (error) { // what appears later need not be mapped there
    const std::lock_guard lock{mutex_};
    std::erase_if(peers_, [&](auto& x) { return x.lock() == peer; });
  }
  return error;
}

bool device_slabs::admits(const worker_link& peer) const {
  const std::lock_guard lock{mutex_};
  return std::ranges::any_of(peers_, [&](auto& x) { return x.lock().get() == &peer; });
}

caf::error device_slabs::clear() {
  {
    const std::lock_guard lock{mutex_};
    for (auto& [memory, range] : taken_)
      static_cast<void>(slabs_.give_back(range));
    taken_.clear();
  }
  const std::lock_guard turn{giving_back_};
  return unmap(take_empty(clock::time_point::max()));
}

std::size_t device_slabs::free_bytes() const {
  const std::lock_guard lock{mutex_};
  return slabs_.free_bytes();
}

// -- empty slabs

device_slabs::removed device_slabs::take_empty(clock::time_point when) {
  const std::lock_guard lock{mutex_};
  removed result{{}, worker_};
  while (const auto x = slabs_.take_empty(when))
    result.slabs.push_back(slab_of(*x));
  return result;
}

caf::error device_slabs::unmap(const removed& what) const {
  caf::error first;
  for (const auto& x : what.slabs) {
    if (auto done = what.worker->request(control::unmap_slab, arguments_of(x)); !done && !first)
      first = done.error();
    shared_->remove(x); // closes the descriptor
  }
  return first;
}

void device_slabs::note_empty() {
  if (!wake_keeper())
    return;
  if (auto failed = give_back_unused())
    log(log_level::warning, "device memory was not given back", failed);
}

caf::error device_slabs::wake_keeper() {
  if (keep_ == cuda_backend_options::forever)
    return {};
  const std::lock_guard lock{mutex_};
  if (!keeper_.joinable())
    return start_thread(keeper_, [this] { keep_house(); }, "to give memory back");
  changed_.notify_all();
  return {};
}

void device_slabs::keep_house() {
  for (std::unique_lock lock{mutex_}; !ends_;) {
    const auto since = slabs_.first_empty();
    if (!since) {
      changed_.wait(lock);
      continue;
    }
    if (clock::now() < *since + keep_) {
      changed_.wait_until(lock, *since + keep_);
      continue;
    }
    lock.unlock();
    {
      const std::lock_guard turn{giving_back_};
      if (auto error = unmap(take_empty(clock::now() - keep_));
          error && code_of(error) != errc::worker_lost)
        log(log_level::warning, "device memory was not given back", error);
    }
    lock.lock();
  }
}

} // namespace troupe::detail
