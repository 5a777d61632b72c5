#include "worker/child/kept_buffers.hpp"

#include <troupe/error.hpp>

namespace troupe::detail {

namespace {

caf::error has_ended() {
  return make_error(errc::unavailable, "the world or the worker has ended");
}

} // namespace

caf::expected<any_kept_buffer> kept_buffers::keep(const std::string& name, dtype type,
                                                  std::size_t count) {
  if (auto refused = check_may_block())
    return refused;
  if (auto error = check_kept(name, type, count))
    return error;
  std::lock_guard one_at_a_time{asking_};
  if (auto there = find(name)) {
    if (there->type() == type && there->count() == count)
      return any_kept_buffer{std::move(*there), true};
    return make_error(errc::shape_mismatch,
                      "the buffer \"" + name + "\" has another type or count");
  }
  auto reply = ask(name, type, count);
  if (!reply)
    return reply.error();
  auto memory = claim(reply->memory);
  if (!memory)
    return memory.error();
  std::lock_guard lock{mutex_};
  if (ended_)
    return has_ended();
  all_[name] = *memory;
  return any_kept_buffer{std::move(*memory), reply->what == program_note::kind::kept};
}

std::optional<any_gpu_ref> kept_buffers::find(const std::string& name) {
  std::lock_guard lock{mutex_};
  const auto i = all_.find(name);
  return i == all_.end() || i->second.stale() ? std::nullopt : std::optional{i->second};
}

caf::expected<program_note> kept_buffers::ask(const std::string& name, dtype type,
                                              std::size_t count) {
  program_note request;
  request.what = program_note::kind::keep;
  request.name = name;
  request.memory.type = type;
  request.memory.count = count;
  {
    std::lock_guard lock{mutex_};
    if (ended_)
      return has_ended();
    request.number = ++last_number_;
    reply_.reset();
  }
  if (auto error = options_.ask(std::move(request)))
    return make_error(errc::unavailable, "the parent was not asked (" + describe(error) + ")");
  std::unique_lock lock{mutex_};
  changed_.wait(lock, [this] { return reply_ || ended_; });
  if (!reply_)
    return has_ended();
  auto reply = std::move(*std::exchange(reply_, std::nullopt));
  if (reply.what == program_note::kind::not_kept)
    return reply.why;
  return reply;
}

caf::expected<any_gpu_ref> kept_buffers::claim(const gpu_token& token) {
  const auto how = options_.claim(token);
  how->on_answer([weak = weak_from_this()] {
    if (auto self = weak.lock()) {
      std::lock_guard lock{self->mutex_};
      self->changed_.notify_all();
    }
  });
  bool ended = false;
  {
    std::unique_lock lock{mutex_};
    changed_.wait(lock, [&] { return how->completed() || ended_; });
    ended = ended_;
  }
  if (ended) {
    how->cancel();
    return has_ended();
  }
  if (how->error())
    return how->error();
  return std::move(how->value);
}

void kept_buffers::answered(program_note reply) {
  std::lock_guard lock{mutex_};
  if (reply.number != last_number_)
    return; // to a request of an earlier process
  reply_ = std::move(reply);
  changed_.notify_all();
}

void kept_buffers::end() {
  std::map<std::string, any_gpu_ref> all; // destroyed without the lock
  std::lock_guard lock{mutex_};
  ended_ = true;
  all.swap(all_);
  changed_.notify_all();
}

} // namespace troupe::detail
