#include "worker/worker_backend.hpp"

#include "core/log.hpp"
#include "worker/remote_device.hpp"

#include <condition_variable>
#include <utility>

namespace troupe::detail {

namespace {

using reply = caf::expected<std::vector<std::byte>>;

template <class T> std::span<const std::byte> bytes_of(const T& x) {
  return std::as_bytes(std::span{&x, 1});
}

/// What several workers answer to one question.
class replies {
public:
  explicit replies(std::size_t number) : all_(number) {}

  void set(std::size_t i, reply x) {
    std::lock_guard lock{mutex_};
    ++there_;
    if (!x && !first_error_)
      first_error_ = x.error();
    all_[i] = std::move(x);
    condition_.notify_all();
  }
  /// Waits for all of them, or for the first error, which it returns.
  caf::error wait_for_success() {
    std::unique_lock lock{mutex_};
    condition_.wait(lock, [this] { return first_error_ || there_ == all_.size(); });
    return first_error_;
  }
  void wait_for_all() {
    std::unique_lock lock{mutex_};
    condition_.wait(lock, [this] { return there_ == all_.size(); });
  }
  const reply& operator[](std::size_t i) const { return *all_[i]; }

private:
  std::mutex mutex_;
  std::condition_variable condition_;
  std::size_t there_ = 0;
  caf::error first_error_;
  std::vector<std::optional<reply>> all_;
};

void abort_one(worker_link& link, communicator_key key) {
  link.request(control::abort, bytes_of(key), std::nullopt, [](const reply& x) {
    if (!x && code_of(x.error()) != errc::worker_lost)
      log(log_level::warning, "the end of a rank in a worker gave an error", x.error());
  });
}

/// A communicator that is being built in several workers.
struct assembly {
  explicit assembly(std::size_t ranks) : answers(ranks) {}

  replies answers;
  std::mutex mutex;
  bool given_up = false;
  std::vector<std::pair<std::shared_ptr<worker_link>, communicator_key>> built;
};

} // namespace

worker_backend::worker_backend(std::shared_ptr<worker_pool> pool, std::string name)
    : pool_(std::move(pool)), name_(std::move(name)) {}

caf::error worker_backend::check(int ordinal) const {
  if (ordinal >= 0 && ordinal < device_count())
    return {};
  failure f;
  f.code = errc::invalid_argument;
  f.device = ordinal;
  f.detail = "no such device; there are " + std::to_string(device_count());
  return make_error(std::move(f));
}

caf::expected<std::unique_ptr<backend_device>> worker_backend::open(int ordinal) noexcept {
  if (auto error = check(ordinal))
    return error;
  return std::unique_ptr<backend_device>{std::make_unique<remote_device>(pool_, ordinal)};
}

caf::expected<peer_link> worker_backend::link(int from, int to) noexcept {
  for (auto ordinal : {from, to})
    if (auto error = check(ordinal))
      return error;
  auto worker = pool_->provide(from);
  if (!worker)
    return worker.error();
  const std::int32_t pair[] = {from, to};
  auto answer = (*worker)->request(control::peer_link, std::as_bytes(std::span{pair}));
  if (!answer)
    return answer.error();
  wire_reader reader{*answer};
  auto result = reader.get<peer_link>();
  if (!reader.ok())
    return make_error(errc::internal, "a worker's reply could not be read");
  return result;
}

caf::expected<communicator_id> worker_backend::make_communicator_id() noexcept {
  return communicator_id{};
}

caf::expected<communicator_ranks>
worker_backend::build(const communicator_id&, int size,
                      std::span<const local_rank> ranks) noexcept {
  if (size <= 0 || ranks.empty())
    return make_error(errc::invalid_argument, "a communicator of no ranks");
  std::vector<std::shared_ptr<worker_link>> links;
  for (auto& x : ranks) {
    if (auto error = check(x.device))
      return error;
    auto link = x.spare ? pool_->spare(x.device) : pool_->current(x.device);
    if (!link) {
      failure f;
      f.code = errc::worker_lost;
      f.device = x.device;
      f.rank = x.rank;
      f.detail = x.spare ? "the device has no spare" : "the device has no worker";
      return make_error(std::move(f));
    }
    links.push_back(std::move(link));
  }
  std::lock_guard one_at_a_time{building_};
  auto made = links.front()->request(control::make_communicator_id, std::span<const std::byte>{});
  if (!made)
    return made.error();
  build_args what;
  wire_reader reader{*made};
  what.id = reader.get<communicator_id>();
  if (!reader.ok())
    return make_error(errc::internal, "a worker's reply could not be read");
  what.size = size;
  auto all = std::make_shared<assembly>(ranks.size());
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    what.rank = ranks[i].rank;
    what.device = ranks[i].device;
    links[i]->request(control::build, bytes_of(what), std::nullopt,
                      [all, i, link = links[i]](reply x) {
                        if (x) {
                          const auto key = wire_reader{*x}.get<communicator_key>();
                          std::unique_lock lock{all->mutex};
                          if (all->given_up) {
                            lock.unlock();
                            abort_one(*link, key);
                          } else {
                            all->built.emplace_back(link, key);
                          }
                        }
                        all->answers.set(i, std::move(x));
                      });
  }
  if (auto why = all->answers.wait_for_success()) {
    std::lock_guard lock{all->mutex};
    all->given_up = true; // the others may wait for the one that failed: those that come, end
    for (auto& [link, key] : all->built)
      abort_one(*link, key);
    return why;
  }
  communicator_ranks result;
  for (std::size_t i = 0; i < ranks.size(); ++i)
    result.push_back(std::make_unique<remote_communicator>(
        links[i], wire_reader{*all->answers[i]}.get<communicator_key>()));
  return result;
}

caf::error worker_backend::provide_spare(int ordinal) noexcept {
  if (auto error = check(ordinal))
    return error;
  return pool_->provide_spare(ordinal);
}

bool worker_backend::is_current(const backend_communicator& rank, int ordinal) const noexcept {
  auto& link = static_cast<const remote_communicator&>(rank).link();
  return &link == pool_->current(ordinal).get() && !link.lost();
}

caf::error worker_backend::end(control how, const communicator_ranks& ranks) noexcept {
  auto answers = std::make_shared<replies>(ranks.size());
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    auto& rank = static_cast<remote_communicator&>(*ranks[i]);
    const auto key = rank.key();
    rank.link().request(how, bytes_of(key), std::nullopt,
                        [answers, i](reply x) { answers->set(i, std::move(x)); });
  }
  answers->wait_for_all();
  caf::error result;
  for (std::size_t i = 0; i < ranks.size(); ++i)
    if (auto& x = (*answers)[i]; !x && !result && code_of(x.error()) != errc::worker_lost)
      result = x.error(); // what was in a worker that is lost, went with it
  return result;
}

caf::error worker_backend::abort(communicator_ranks ranks) noexcept {
  return end(control::abort, ranks);
}

caf::error worker_backend::destroy(communicator_ranks ranks) noexcept {
  return end(control::destroy, ranks);
}

} // namespace troupe::detail
