#include "troupe_modes.hpp"

#include "in_flight.hpp"
#include "must.hpp"
#include "rank_threads.hpp"
#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <chrono>
#include <future>
#include <utility>

namespace bench {

namespace {

using namespace std::chrono_literals;
using buffers = std::vector<troupe::any_gpu_ref>;

constexpr auto deadline = 60s;

class troupe_contestant : public summing_contestant {
public:
  troupe_contestant(troupe::world world, buffers all)
      : world_(std::move(world)), all_(std::move(all)) {}

  std::size_t ranks() const override { return world_.size(); }

  void write(std::size_t rank, std::size_t first, std::span<const float> numbers) override {
    must(world_.device_of(rank)
             .upload(part(rank, first, numbers.size()), std::as_bytes(numbers))
             .wait());
  }

  void read(std::size_t rank, std::size_t first, std::span<float> numbers) override {
    must(world_.device_of(rank)
             .download(part(rank, first, numbers.size()), std::as_writable_bytes(numbers))
             .wait());
  }

  void clear(std::size_t count) override {
    for (std::size_t rank = 0; rank < ranks(); ++rank)
      must(world_.device_of(rank)
               .fill(part(rank, 0, count), std::vector<std::byte>(sizeof(float)))
               .wait());
  }

protected:
  const troupe::world& world() const { return world_; }

  buffers first(std::size_t count) const {
    buffers result;
    for (std::size_t rank = 0; rank < ranks(); ++rank)
      result.push_back(part(rank, 0, count));
    return result;
  }

private:
  troupe::any_gpu_ref part(std::size_t rank, std::size_t first, std::size_t count) const {
    return must(all_[rank].slice(first, count));
  }

  troupe::world world_;
  buffers all_;
};

class facade_contestant final : public troupe_contestant {
public:
  using troupe_contestant::troupe_contestant;

  std::string name() const override { return "troupe, facade"; }

  timing sum(std::size_t count, std::size_t operations, std::size_t window) override {
    const auto data = first(count);
    timing result;
    const auto begin = clock::now();
    if (window == 1) {
      result.each.reserve(operations);
      for (std::size_t k = 0; k < operations; ++k) {
        const auto start = clock::now();
        must(issue(data).wait());
        result.each.push_back(microseconds(clock::now() - start));
      }
    } else {
      keep_in_flight(operations, window, [&](std::size_t) { return issue(data); });
    }
    result.per_operation = microseconds(clock::now() - begin) / static_cast<double>(operations);
    return result;
  }

private:
  troupe::pending<troupe::collective_done> issue(const buffers& data) const {
    return world().all_reduce(data, troupe::reduce_op::sum, {.deadline = deadline});
  }
};

class rank_contestant final : public troupe_contestant {
public:
  using troupe_contestant::troupe_contestant;

  std::string name() const override { return "troupe, rank-local"; }

  timing sum(std::size_t count, std::size_t operations, std::size_t window) override {
    const auto data = first(count);
    const auto issue = [this, &data](std::size_t rank) {
      return [r = world().rank(rank), x = data[rank]] {
        return r.all_reduce(x, troupe::reduce_op::sum, {.deadline = deadline});
      };
    };
    if (window == 1)
      return in_steps(ranks(), operations, [&](std::size_t rank) {
        return [call = issue(rank)] { must(call().wait()); };
      });
    return in_one_step(ranks(), operations, [&](std::size_t rank) {
      return [call = issue(rank), operations, window] {
        keep_in_flight(operations, window, [&](std::size_t) { return call(); });
      };
    });
  }
};

/// Sends the requests of one run, one more for each answer, and then ends.
class requester : public caf::event_based_actor {
public:
  requester(caf::actor_config& cfg, caf::actor world, buffers data, std::size_t operations,
            std::size_t window, std::shared_ptr<std::promise<timing>> result)
      : event_based_actor(cfg), world_(std::move(world)), data_(std::move(data)),
        operations_(operations), window_(window), result_(std::move(result)) {}

  caf::behavior make_behavior() override {
    if (window_ == 1)
      timing_.each.reserve(operations_);
    begin_ = clock::now();
    while (sent_ < window_ && sent_ < operations_)
      send_one();
    return {}; // the actor lives as long as an answer is outstanding
  }

private:
  void send_one() {
    ++sent_;
    start_ = clock::now();
    troupe::request(this, world_, troupe::all_reduce{.send = data_}, deadline)
        .then([this](const troupe::collective_done&) { on_answer(); },
              [](const caf::error& why) { fail(troupe::describe(why)); });
  }

  void on_answer() {
    const auto now = clock::now();
    if (window_ == 1)
      timing_.each.push_back(microseconds(now - start_));
    if (++answered_ == operations_) {
      timing_.per_operation = microseconds(now - begin_) / static_cast<double>(operations_);
      result_->set_value(std::move(timing_));
    } else if (sent_ < operations_) {
      send_one();
    }
  }

  caf::actor world_;
  const buffers data_;
  const std::size_t operations_;
  const std::size_t window_;
  std::shared_ptr<std::promise<timing>> result_;
  std::size_t sent_ = 0;
  std::size_t answered_ = 0;
  clock::time_point begin_;
  clock::time_point start_;
  timing timing_;
};

class message_contestant final : public troupe_contestant {
public:
  message_contestant(caf::actor_system& sys, troupe::world world, buffers all)
      : troupe_contestant(std::move(world), std::move(all)), system_(sys) {}

  std::string name() const override { return "troupe, message"; }

  timing sum(std::size_t count, std::size_t operations, std::size_t window) override {
    auto result = std::make_shared<std::promise<timing>>();
    auto answer = result->get_future();
    system_.spawn<requester>(world().actor(), first(count), operations, window, result);
    return answer.get();
  }

private:
  caf::actor_system& system_;
};

} // namespace

troupe_contestants make_troupe(caf::actor_system& sys, const troupe::world& world,
                               std::size_t bytes) {
  auto all = must(world.allocate(troupe::dtype::float32, bytes / sizeof(float)));
  return {std::make_unique<facade_contestant>(world, all),
          std::make_unique<message_contestant>(sys, world, all),
          std::make_unique<rank_contestant>(world, all)};
}

} // namespace bench
