#include "mesh/mesh_channel.hpp"

#include "foundation/collective_rules.hpp"
#include "foundation/start_thread.hpp"
#include "operation/operation.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace troupe::detail {

namespace {

/// Returns at least 1 ns, because 0 means the default deadline.
std::chrono::nanoseconds time_left(clock::time_point deadline) {
  using std::chrono::nanoseconds;
  return deadline == clock::time_point::max()
             ? nanoseconds::max()
             : std::max(nanoseconds{deadline - clock::now()}, nanoseconds{1});
}

caf::error await(operation& op) {
  op.wait();
  return op.error();
}

host_buffer slice_of(const host_buffer& all, std::size_t offset, std::size_t size) {
  auto part = all.slice(offset, size);
  return part ? std::move(*part) : host_buffer{};
}

} // namespace

// -- mesh_request

failure mesh_request::describe(errc code, std::string detail) const {
  return {.code = code, .detail = std::move(detail), .verb = std::string{to_string(spec.what)}};
}

void mesh_request::cancel() noexcept {
  if (auto channel = on_.lock(); channel && !completed())
    channel->stop(*this, make_error(describe(errc::cancelled, "cancelled by its requester")));
}

// -- mesh_channel

mesh_channel::mesh_channel(const std::shared_ptr<world_core>& world, int rank,
                           std::shared_ptr<mesh_calls> calls, mesh_buffering buffering)
    : world_(counted_apart(world)), rank_(rank), calls_(std::move(calls)), buffering_(buffering),
      device_(world_->owner(), world_->lanes()[static_cast<std::size_t>(rank)],
              world_->limits().deadline) {}

mesh_channel::~mesh_channel() { close(); }

void mesh_channel::post(const std::shared_ptr<mesh_request>& x) {
  x->on_ = weak_from_this();
  if (x->deadline != clock::time_point::max())
    x->timer_ = world_->owner()->deadlines().call_at(x->deadline, [late = std::weak_ptr{x}] {
      auto call = late.lock();
      auto channel = call ? call->on_.lock() : nullptr;
      if (channel)
        channel->expire(*call);
    });
  caf::error error;
  {
    std::lock_guard lock{mutex_};
    queue_.push_back(x);
    if (!in_.joinable())
      error = start_thread(in_, [this] { run_in(); }, "for a mesh_comm");
    if (!error && !out_.joinable())
      error = start_thread(out_, [this] { run_out(); }, "for a mesh_comm");
    condition_.notify_all();
  }
  if (error) // it stays queued: once threads can start, the other ranks get the error, too
    stop(*x, error);
}

/// Before its turn the call stays in the queue, so that all ranks hear of the failure at its turn.
void mesh_channel::stop(mesh_request& x, const caf::error& why) {
  std::shared_ptr<joint_call> joint;
  {
    std::lock_guard lock{mutex_};
    joint = x.joint_;
    if (!joint && !x.stopped_)
      x.stopped_ = why;
  }
  if (joint)
    joint->fail(why);
  else
    x.answer(why);
}

/// Lets the device work that the call waits for expire first: its error says more.
void mesh_channel::expire(mesh_request& x) {
  work_of_all late;
  std::shared_ptr<joint_call> joint;
  {
    std::lock_guard lock{mutex_};
    joint = x.joint_;
    for (auto& c : ring_)
      if (running_.get() == &x && c.work && !c.work->completed() &&
          (!late || c.work->number() < late->number()))
        late = c.work;
  }
  if (late) {
    late->expire();
    if (late->completed() && late->error()) // answered: the error does not change any more
      return stop(x, late->error());
  }
  auto detail =
      std::string{joint ? "not done before its deadline" : "it did not begin before its deadline"};
  if (auto missing = joint ? joint->missing_ranks() : std::string{}; !missing.empty())
    detail += "; not called by " + missing;
  stop(x, make_error(x.describe(errc::deadline_exceeded, std::move(detail))));
}

void mesh_channel::close() {
  auto why = make_error(errc::unavailable, "its mesh_comm was destroyed");
  std::thread in;
  std::thread out;
  std::vector<std::shared_ptr<mesh_request>> all;
  {
    std::lock_guard lock{mutex_};
    closed_ = true;
    all.assign(queue_.begin(), queue_.end());
    if (running_)
      all.push_back(running_);
    all.insert(all.end(), finished_.begin(), finished_.end());
    in.swap(in_);
    out.swap(out_);
    condition_.notify_all();
  }
  for (auto& x : all)
    stop(*x, why);
  if (in.joinable())
    in.join();
  if (out.joinable())
    out.join();
}

// -- the first thread

void mesh_channel::run_in() {
  std::unique_lock lock{mutex_};
  while (true) {
    condition_.wait(lock, [this] { return closed_ || !queue_.empty(); });
    if (queue_.empty())
      break;
    running_ = std::move(queue_.front());
    queue_.pop_front();
    run_error_ = {};
    auto x = running_;
    lock.unlock();
    take_turn(x);
    carry_out(x);
    lock.lock();
    running_.reset();
    finished_.push_back(std::move(x));
    std::erase_if(finished_, [](auto& call) { return call->completed(); });
  }
  condition_.notify_all();
}

void mesh_channel::take_turn(const std::shared_ptr<mesh_request>& x) {
  auto joint = calls_->take(x->spec, rank_);
  joint->on_failure([weak = weak_from_this(), call = std::weak_ptr{x}, of = std::weak_ptr{joint}] {
    auto channel = weak.lock();
    auto failed = call.lock();
    auto all = of.lock();
    if (channel && failed && all)
      channel->abandon(*failed, all->error());
  });
  caf::error stopped;
  {
    std::lock_guard lock{mutex_};
    x->joint_ = joint;
    stopped = x->stopped_;
  }
  if (stopped)
    joint->fail(stopped);
}

/// Runs the call. Its answer comes when all ranks have done their parts, or at the first failure.
void mesh_channel::carry_out(const std::shared_ptr<mesh_request>& x) {
  auto& joint = *x->joint_;
  auto how = layout_of(joint.spec());
  auto error = joint.error();
  if (!error)
    error = move_chunks(x, how);
  if (error) {
    joint.fail(calls_->losses().cause_of(error));
    {
      std::lock_guard lock{mutex_};
      ring_.clear();
    }
    slots_.clear();
  }
  joint.finish([x, owner = world_->owner()](const caf::error& why) {
    if (x->timer_ != 0)
      owner->deadlines().cancel_call(x->timer_);
    x->answer(why);
  });
}

caf::error mesh_channel::move_chunks(const std::shared_ptr<mesh_request>& x, const layout& how) {
  if (auto error = prepare(*x); error)
    return error;
  {
    std::lock_guard lock{mutex_};
    ring_.assign(slots_.size(), {});
    run_layout_ = &how;
  }
  for (std::size_t k = 0; k < how.chunks && wait_for_room(); ++k) {
    auto& c = ring_[k % ring_.size()];
    {
      std::lock_guard lock{mutex_};
      const auto first = k * how.step;
      c = {.number = k, .first = first, .size = std::min(how.step, how.count - first)};
    }
    auto error = begin(x, how, c);
    if (!error && how.chunks == 1) // not worth another thread
      error = end(*x, how, c);
    if (error)
      x->joint_->fail(calls_->losses().cause_of(error));
    if (error || how.chunks == 1)
      break;
    std::lock_guard lock{mutex_};
    handed_.push_back(&c);
    condition_.notify_all();
  }
  {
    std::unique_lock lock{mutex_};
    condition_.wait(lock, [this] { return handed_.empty(); });
  }
  return x->joint_->error();
}

caf::error mesh_channel::prepare(mesh_request& x) {
  if (x.spec.what == collective_kind::barrier) {
    slots_.resize(std::max<std::size_t>(slots_.size(), 1));
    return {};
  }
  auto options = options_of(x);
  slots_.resize(buffering_.chunks);
  auto pinned = [&](host_buffer& b, const host_side& side) -> caf::error {
    if (side.memory.empty() || side.direct() || b.size_bytes() != 0)
      return {};
    auto op = device_.allocate_pinned(buffering_.chunk_bytes, options);
    if (auto error = await(*op); error)
      return error;
    b = op->value;
    return {};
  };
  for (auto& s : slots_) {
    if (!s.memory || s.memory.stale()) {
      auto op = device_.allocate(buffering_.chunk_bytes, dtype::uint8, false, options);
      if (auto error = await(*op); error)
        return error;
      s.memory = op->value;
    }
    if (auto error = pinned(s.in, x.send); error)
      return error;
    if (auto error = pinned(s.out, x.recv); error)
      return error;
  }
  return {};
}

/// Copies in, and adds this rank's side to the chunk.
caf::error mesh_channel::begin(const std::shared_ptr<mesh_request>& call, const layout& how,
                               chunk& c) {
  auto& x = *call;
  auto& s = slot_of(c);
  auto& spec = x.spec;
  auto options = options_of(x);
  auto bytes = c.size * how.element;
  auto mine = static_cast<std::size_t>(rank_);
  auto here = [&](std::size_t block, std::size_t blocks) {
    return part_of(c, how, spec.type, block, blocks);
  };
  auto at = [&](std::size_t block) { return (block * how.count + c.first) * how.element; };
  auto up = [&](const any_gpu_ref& target, host_buffer from) {
    c.moves.push_back(
        device_.upload(target, std::make_shared<host_range>(std::move(from)), options));
  };
  // For gather and scatter, this rank's block is placed so that the collective works in place.
  const auto& rules = rules_of(spec.what);
  bool gathers = rules.recv.per_rank;
  bool scatters = rules.send.per_rank;
  // A barrier has no buffers; the slot's memory may belong to another collective.
  auto whole = spec.what == collective_kind::barrier ? any_gpu_ref{} : here(0, how.blocks());
  if (!x.send.memory.empty() && c.size != 0) {
    auto target = gathers ? here(mine, 1) : whole;
    if (x.send.direct()) {
      for (std::size_t b = 0; b < how.blocks_in; ++b)
        up(scatters ? here(b, 1) : target, slice_of(x.send.owner, at(b), bytes));
    } else {
      if (!begin_copy())
        return x.joint_->error();
      for (std::size_t b = 0; b < how.blocks_in; ++b)
        std::memcpy(s.in.writable().data() + b * bytes, x.send.memory.data() + at(b), bytes);
      end_copy(x);
      up(target, slice_of(s.in, 0, target.size_bytes()));
    }
  }
  std::vector<download> downloads;
  if (!x.recv.memory.empty() && c.size != 0) {
    auto source = scatters ? here(mine, 1) : whole;
    if (x.recv.direct())
      for (std::size_t b = 0; b < how.blocks_out; ++b)
        downloads.push_back({gathers ? here(b, 1) : source, slice_of(x.recv.owner, at(b), bytes)});
    else
      downloads.push_back({source, slice_of(s.out, 0, source.size_bytes())});
  }
  chunk_side side;
  const bool root = spec.peer == rank_;
  if (rules.send.held(root) && !rules.send.optional)
    side.send = whole;
  if (rules.recv.held(root) && !rules.recv.optional)
    side.recv = whole;
  side.deadline = x.deadline;
  side.membership = x.membership;
  side.on_begin = [weak = weak_from_this(), call, number = c.number,
                   downloads = std::move(downloads)](const work_of_all& work) {
    if (auto channel = weak.lock())
      channel->on_begin(*call, number, work, downloads);
  };
  auto sides = x.joint_->meet(c.number, rank_, std::move(side));
  return sides.empty() ? caf::error{} : begin_for_all(spec, sides);
}

/// Requests the work for all ranks, because this rank came last.
caf::error mesh_channel::begin_for_all(const mesh_spec& spec,
                                       const std::vector<chunk_side>& sides) {
  std::vector<any_gpu_ref> send;
  std::vector<any_gpu_ref> recv;
  auto deadline = clock::time_point::max();
  std::uint64_t membership = 0;
  for (auto& x : sides) {
    if (x.send)
      send.push_back(x.send);
    if (x.recv)
      recv.push_back(x.recv);
    deadline = std::min(deadline, x.deadline);
    if (membership != 0 && x.membership != 0 && membership != x.membership)
      return make_error(errc::membership_changed, "the ranks' calls name membership " +
                                                      std::to_string(membership) + " and " +
                                                      std::to_string(x.membership));
    membership = std::max(membership, x.membership);
  }
  bool receives = spec.what == collective_kind::recv;
  collective_view all{receives ? collective_kind::send : spec.what, send, recv, spec.op, {}};
  all.rank = receives ? spec.peer : rank_;
  all.peer = receives ? rank_ : spec.peer;
  auto work = world_->run(all, {.deadline = time_left(deadline), .membership = membership});
  if (work->completed() && work->error())
    return work->error();
  for (auto& x : sides)
    x.on_begin(work);
  return {};
}

/// Adds the work to the chunk. @thread the last rank's
void mesh_channel::on_begin(mesh_request& x, std::size_t number, const work_of_all& work,
                            const std::vector<download>& downloads) {
  {
    std::lock_guard lock{mutex_};
    if (running_.get() == &x && !run_error_) {
      auto options = options_of(x);
      auto& c = ring_[number % ring_.size()];
      for (auto& d : downloads)
        c.moves.push_back(
            device_.download(d.source, std::make_shared<host_range>(d.target), options));
      c.work = work;
      condition_.notify_all();
      return;
    }
  }
  work->cancel(); // the call failed before it had this work
}

/// Waits for the chunk, and copies out.
caf::error mesh_channel::end(mesh_request& x, const layout& how, chunk& c) {
  work_of_all work;
  std::vector<std::shared_ptr<operation_of<nothing>>> moves;
  {
    std::unique_lock lock{mutex_};
    condition_.wait(lock, [&] { return c.work || run_error_; });
    if (run_error_)
      return run_error_;
    work = c.work;
    moves = c.moves;
  }
  if (auto error = await(*work); error)
    return error;
  for (auto& op : moves)
    if (auto error = await(*op); error)
      return error;
  {
    std::lock_guard lock{mutex_};
    c.work.reset();
    c.moves.clear();
  }
  if (x.recv.memory.empty() || x.recv.direct())
    return {};
  auto bytes = c.size * how.element;
  auto& from = slot_of(c).out;
  if (!begin_copy())
    return x.joint_->error();
  for (std::size_t b = 0; b < how.blocks_out && bytes != 0; ++b)
    std::memcpy(x.recv.memory.data() + (b * how.count + c.first) * how.element,
                from.bytes().data() + b * bytes, bytes);
  end_copy(x);
  return {};
}

// -- the second thread

void mesh_channel::run_out() {
  std::unique_lock lock{mutex_};
  while (true) {
    condition_.wait(
        lock, [this] { return !handed_.empty() || (closed_ && !running_ && queue_.empty()); });
    if (handed_.empty())
      return;
    auto& c = *handed_.front();
    auto& x = *running_;
    auto& how = *run_layout_;
    lock.unlock();
    if (auto error = end(x, how, c); error) // returns at once if the call has failed
      x.joint_->fail(calls_->losses().cause_of(error));
    lock.lock();
    handed_.pop_front();
    condition_.notify_all();
  }
}

// -- the running call

/// Handles the failure of the call: nothing more begins. The answer waits only for copying threads.
void mesh_channel::abandon(mesh_request& x, const caf::error& why) {
  std::vector<work_of_all> work;
  bool is_quiet = false;
  {
    std::lock_guard lock{mutex_};
    if (running_.get() != &x || run_error_)
      return;
    run_error_ = why;
    is_quiet = copying_ == 0;
    for (auto& c : ring_)
      if (c.work)
        work.push_back(c.work);
    condition_.notify_all();
  }
  if (is_quiet)
    x.answer(why);
  for (auto& op : work)
    op->cancel();
}

/// Allows access to the caller's memory until `end_copy`. Returns false if the call has failed.
bool mesh_channel::begin_copy() {
  std::lock_guard lock{mutex_};
  if (run_error_)
    return false;
  ++copying_;
  return true;
}

void mesh_channel::end_copy(mesh_request& x) {
  caf::error why;
  {
    std::lock_guard lock{mutex_};
    if (--copying_ == 0)
      why = run_error_;
  }
  if (why)
    x.answer(why);
}

bool mesh_channel::wait_for_room() {
  std::unique_lock lock{mutex_};
  condition_.wait(lock, [this] { return run_error_ || handed_.size() < ring_.size(); });
  return !run_error_;
}

// -- details

mesh_channel::layout mesh_channel::layout_of(const mesh_spec& x) const {
  layout result;
  result.element = size_of(x.type);
  result.count = x.what == collective_kind::barrier ? 0 : x.count;
  result.blocks_in = rules_of(x.what).send.blocks(calls_->ranks());
  result.blocks_out = rules_of(x.what).recv.blocks(calls_->ranks());
  result.step = std::max<std::size_t>(buffering_.chunk_bytes / result.element / result.blocks(), 1);
  result.chunks = std::max<std::size_t>((result.count + result.step - 1) / result.step, 1);
  return result;
}

/// Returns `blocks` blocks of the chunk's slot, from `block` on.
any_gpu_ref mesh_channel::part_of(const chunk& c, const layout& how, dtype type, std::size_t block,
                                  std::size_t blocks) {
  auto& memory = slot_of(c).memory;
  if (!memory)
    return {};
  return {memory.memory(), type, memory.offset() + block * c.size * how.element, blocks * c.size};
}

request_options mesh_channel::options_of(const mesh_request& x) const {
  return {.deadline = time_left(x.deadline), .membership = x.membership};
}

} // namespace troupe::detail
