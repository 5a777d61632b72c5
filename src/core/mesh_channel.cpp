#include "core/mesh_channel.hpp"

#include "core/collective_operations.hpp"
#include "core/operations.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace troupe::detail {

// -- mesh_request

failure mesh_request::describe(errc code, std::string detail) const {
  failure why;
  why.code = code;
  why.verb = to_string(spec.what);
  why.detail = std::move(detail);
  return why;
}

void mesh_request::cancel() noexcept {
  if (auto channel = on_.lock(); channel && !answered())
    channel->stop(*this, make_error(describe(errc::cancelled, "taken back by its requester")));
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
    x->timer_ = world_->owner()->keeper().call_at(x->deadline, [late = std::weak_ptr{x}] {
      auto call = late.lock();
      auto channel = call ? call->on_.lock() : nullptr;
      if (channel)
        channel->stop_queued(*call, make_error(call->describe(errc::deadline_exceeded,
                                                              "its turn did not come before its "
                                                              "deadline")));
    });
  std::lock_guard lock{mutex_};
  queue_.push_back(x);
  if (!in_.joinable()) {
    in_ = std::thread{[this] { run_in(); }};
    out_ = std::thread{[this] { run_out(); }};
  }
  condition_.notify_all();
}

void mesh_channel::stop(mesh_request& x, const caf::error& why) {
  if (!stop_queued(x, why))
    fail_run(x, why);
}

/// Its place is kept: when its turn comes, it is known to all that it fails.
bool mesh_channel::stop_queued(mesh_request& x, const caf::error& why) {
  {
    std::lock_guard lock{mutex_};
    if (running_.get() == &x)
      return false;
    if (!x.stopped_)
      x.stopped_ = why;
  }
  x.answer(why);
  return true;
}

void mesh_channel::close() {
  auto why = make_error(errc::unavailable, "its mesh_comm is gone");
  std::thread in;
  std::thread out;
  std::vector<std::shared_ptr<mesh_request>> all;
  {
    std::lock_guard lock{mutex_};
    closed_ = true;
    all.assign(queue_.begin(), queue_.end());
    if (running_)
      all.push_back(running_);
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
    run_error_ = running_->stopped_;
    lock.unlock();
    auto joint = calls_->take(running_->spec, rank_);
    joint->on_failure(
        [weak = weak_from_this(), call = std::weak_ptr{running_}, of = std::weak_ptr{joint}] {
          auto channel = weak.lock();
          auto x = call.lock();
          auto failed = of.lock();
          if (channel && x && failed)
            channel->stop(*x, failed->error());
        });
    carry_out(*running_, *joint);
    lock.lock();
    running_.reset();
  }
  closed_ = true;
  condition_.notify_all();
}

void mesh_channel::carry_out(mesh_request& x, joint_call& joint) {
  auto how = layout_of(joint.spec());
  counted_ = 0;
  caf::error error;
  if (error = failure_of_run(); !error) // before its turn
    error = joint.error();
  if (!error)
    error = move_chunks(x, how);
  if (error)
    joint.fail(error);
  error = joint.error(); // what another rank's failure spoilt, too
  if (x.timer_ != 0)
    world_->owner()->keeper().cancel_call(x.timer_);
  x.answer(error);
  if (!error)
    return;
  fail_run(x, error); // nothing more is begun
  if (!joint.is_void())
    keep_step(x, how);
  ring_.clear();
  slots_.clear();
}

caf::error mesh_channel::move_chunks(mesh_request& x, const layout& how) {
  if (auto error = prepare(x); error)
    return error;
  {
    std::lock_guard lock{mutex_};
    ring_.assign(slots_.size(), {});
    finished_ = 0;
    run_layout_ = &how;
  }
  for (std::size_t k = 0; k < how.chunks && wait_for_room(k); ++k) {
    auto& c = ring_[k % ring_.size()];
    {
      std::lock_guard lock{mutex_};
      c = {};
      c.first = k * how.step;
      c.size = std::min(how.step, how.count - std::min(how.count, c.first));
      c.slot = k % ring_.size();
    }
    if (auto error = begin(x, how, c); error) {
      fail_run(x, error);
      break;
    }
    if (how.chunks == 1) { // not worth another thread
      if (auto error = end(x, how, c); error)
        fail_run(x, error);
      break;
    }
    std::lock_guard lock{mutex_};
    handed_.push_back(&c);
    condition_.notify_all();
  }
  wait_until_out_rests();
  return failure_of_run();
}

caf::error mesh_channel::prepare(mesh_request& x) {
  if (x.spec.what == collective_kind::barrier) {
    slots_.resize(std::max<std::size_t>(slots_.size(), 1));
    return {};
  }
  auto options = options_of(x);
  slots_.resize(buffering_.chunks);
  auto stale = [](const slot& s) { return !s.memory || s.memory.stale(); };
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
    if (stale(s)) {
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

/// Copies in, and asks for all that the chunk needs.
caf::error mesh_channel::begin(mesh_request& x, const layout& how, chunk& c) {
  auto& s = slots_[c.slot];
  auto& spec = x.spec;
  auto options = options_of(x);
  auto bytes = c.size * how.element;
  auto mine = static_cast<std::size_t>(rank_);
  auto here = [&](std::size_t block, std::size_t blocks) {
    return part_of(c, how, spec.type, block, blocks);
  };
  auto at = [&](std::size_t block) { return (block * how.count + c.first) * how.element; };
  std::vector<std::shared_ptr<operation_of<nothing>>> moves;
  auto up = [&](const any_gpu_ref& target, host_buffer from) {
    moves.push_back(device_.upload(target, std::make_shared<host_range>(std::move(from)), options));
  };
  auto down = [&](const any_gpu_ref& source, host_buffer to) {
    moves.push_back(device_.download(source, std::make_shared<host_range>(std::move(to)), options));
  };
  // One block of many lies where the collective wants it, so that it works in place.
  bool gathers = spec.what == collective_kind::all_gather;
  bool scatters = spec.what == collective_kind::reduce_scatter;
  auto whole = here(0, how.blocks());
  if (!x.send.memory.empty() && c.size != 0) {
    auto target = gathers ? here(mine, 1) : whole;
    if (x.send.direct()) {
      for (std::size_t b = 0; b < how.blocks_in; ++b)
        up(scatters ? here(b, 1) : target, direct_part(x.send, at(b), bytes));
    } else {
      for (std::size_t b = 0; b < how.blocks_in; ++b)
        std::memcpy(s.in.writable().data() + b * bytes, x.send.memory.data() + at(b), bytes);
      up(target, direct_part({s.in.writable(), s.in}, 0, target.size_bytes()));
    }
  }
  any_gpu_ref send = spec.what == collective_kind::recv || gathers ? any_gpu_ref{} : whole;
  any_gpu_ref recv = spec.what == collective_kind::send || scatters ? any_gpu_ref{} : whole;
  if (spec.what == collective_kind::all_reduce)
    recv = {};
  if (spec.what == collective_kind::broadcast && spec.peer != rank_)
    send = {};
  auto asked = ask(spec, send, recv, options);
  if (!asked)
    return asked.error();
  auto& work = *asked;
  if (!x.recv.memory.empty() && c.size != 0) {
    auto source = scatters ? here(mine, 1) : whole;
    if (x.recv.direct())
      for (std::size_t b = 0; b < how.blocks_out; ++b)
        down(gathers ? here(b, 1) : source, direct_part(x.recv, at(b), bytes));
    else
      down(source, direct_part({s.out.writable(), s.out}, 0, source.size_bytes()));
  }
  {
    std::lock_guard lock{mutex_};
    c.work = work;
    c.moves = std::move(moves);
  }
  // What failed while this was asked for did not know of it.
  if (auto error = failure_of_run(); error) {
    work->cancel();
    return error;
  }
  return work->answered() ? work->error() : caf::error{};
}

/// Waits for the chunk, and copies out.
caf::error mesh_channel::end(mesh_request& x, const layout& how, chunk& c) {
  auto error = await(*c.work);
  for (auto& op : c.moves)
    if (auto other = await(*op); other && !error)
      error = std::move(other);
  if (error)
    return error;
  {
    std::lock_guard lock{mutex_};
    ++counted_;
    c.work.reset();
    c.moves.clear();
  }
  if (x.recv.memory.empty() || x.recv.direct())
    return {};
  auto bytes = c.size * how.element;
  auto& from = slots_[c.slot].out;
  for (std::size_t b = 0; b < how.blocks_out && bytes != 0; ++b)
    std::memcpy(x.recv.memory.data() + (b * how.count + c.first) * how.element,
                from.bytes().data() + b * bytes, bytes);
  return {};
}

caf::error mesh_channel::await(operation& op) const {
  op.wait();
  return op.error();
}

void mesh_channel::keep_step(mesh_request& x, const layout& how) {
  std::vector<std::shared_ptr<rank_request>> asked;
  {
    std::lock_guard lock{mutex_};
    for (auto& c : ring_)
      if (c.work)
        asked.push_back(c.work);
  }
  for (auto& op : asked) {
    op->cancel();
    op->wait();
    counted_ += op->counts() ? 1 : 0;
  }
  any_gpu_ref scratch;
  mesh_spec other{.what = collective_kind::barrier};
  if (x.spec.is_message() && counted_ < how.chunks) {
    // Of any memory and length: it has failed already, for both.
    auto op = device_.allocate(1, dtype::uint8, false, {});
    if (auto error = await(*op); error)
      return calls_->lose_step(error);
    scratch = op->value;
    other = {.what = x.spec.what, .count = 1, .peer = x.spec.peer};
  }
  for (; counted_ < how.chunks; ++counted_) {
    bool receives = other.what == collective_kind::recv;
    auto op =
        ask(other, receives ? any_gpu_ref{} : scratch, receives ? scratch : any_gpu_ref{}, {});
    if (!op)
      return calls_->lose_step(op.error());
    (*op)->cancel();
    (*op)->wait();
    if (!(*op)->counts())
      return calls_->lose_step((*op)->error());
  }
}

// -- the second thread

void mesh_channel::run_out() {
  std::unique_lock lock{mutex_};
  while (true) {
    condition_.wait(lock, [this] { return !handed_.empty() || (closed_ && !running_); });
    if (handed_.empty())
      return;
    auto& c = *handed_.front();
    bool failed = static_cast<bool>(run_error_);
    out_busy_ = true;
    auto& x = *running_;
    auto& how = *run_layout_;
    lock.unlock();
    auto error = failed ? caf::error{} : end(x, how, c);
    if (error)
      fail_run(x, error);
    lock.lock();
    handed_.pop_front();
    out_busy_ = false;
    ++finished_;
    condition_.notify_all();
  }
}

// -- the call that runs

void mesh_channel::fail_run(const mesh_request& x, const caf::error& why) {
  std::vector<std::shared_ptr<rank_request>> work;
  {
    std::lock_guard lock{mutex_};
    if (running_.get() != &x || run_error_)
      return;
    run_error_ = why;
    for (auto& c : ring_)
      if (c.work)
        work.push_back(c.work);
    condition_.notify_all();
  }
  for (auto& op : work)
    op->cancel();
}

caf::error mesh_channel::failure_of_run() {
  std::lock_guard lock{mutex_};
  return run_error_;
}

bool mesh_channel::wait_for_room(std::size_t handed) {
  std::unique_lock lock{mutex_};
  condition_.wait(lock, [&] { return run_error_ || handed < finished_ + ring_.size(); });
  return !run_error_;
}

void mesh_channel::wait_until_out_rests() {
  std::unique_lock lock{mutex_};
  condition_.wait(lock, [&] { return handed_.empty() && !out_busy_; });
}

// -- details

mesh_channel::layout mesh_channel::layout_of(const mesh_spec& x) const {
  layout result;
  result.element = size_of(x.type);
  result.count = x.what == collective_kind::barrier ? 0 : x.count;
  if (x.what == collective_kind::all_gather)
    result.blocks_out = calls_->ranks();
  if (x.what == collective_kind::reduce_scatter)
    result.blocks_in = calls_->ranks();
  result.step = std::max<std::size_t>(buffering_.chunk_bytes / result.element / result.blocks(), 1);
  result.chunks = std::max<std::size_t>((result.count + result.step - 1) / result.step, 1);
  return result;
}

/// `blocks` blocks of the chunk's slot, from `block` on.
any_gpu_ref mesh_channel::part_of(const chunk& c, const layout& how, dtype type, std::size_t block,
                                  std::size_t blocks) const {
  auto& memory = slots_[c.slot].memory;
  if (!memory)
    return {};
  return {memory.memory(), type, memory.offset() + block * c.size * how.element, blocks * c.size};
}

caf::expected<std::shared_ptr<rank_request>>
mesh_channel::ask(const mesh_spec& spec, const any_gpu_ref& send, const any_gpu_ref& recv,
                  const request_options& options) const {
  return world_->ask(rank_, {spec.what, send, recv, spec.op, spec.peer}, options, world_);
}

/// What is left of its time.
request_options mesh_channel::options_of(const mesh_request& x) const {
  using std::chrono::nanoseconds;
  auto left = x.deadline == clock::time_point::max() ? nanoseconds::max()
                                                     : nanoseconds{x.deadline - clock::now()};
  return {.deadline = std::max(left, nanoseconds{1}), .membership = x.membership};
}

host_buffer mesh_channel::direct_part(const host_side& side, std::size_t offset,
                                      std::size_t size) const {
  auto part = side.owner.slice(offset, size);
  return part ? std::move(*part) : host_buffer{};
}

} // namespace troupe::detail
