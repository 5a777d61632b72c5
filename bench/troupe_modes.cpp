#include "troupe_modes.hpp"

#include "in_flight.hpp"
#include "must.hpp"
#include "rank_threads.hpp"
#include "troupe_calls.hpp"
#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <algorithm>
#include <chrono>
#include <future>
#include <string>
#include <utility>
#include <variant>

namespace bench {

namespace {

using namespace std::chrono_literals;

constexpr auto deadline = 60s;

/// The state that the contestants of a world share.
struct troupe_ranks {
  caf::actor_system& system;
  troupe::world world;
  buffers send;
  buffers recv;
};

class troupe_contestant : public verb_contestant {
public:
  troupe_contestant(const verb& what, const contestant_label& label,
                    std::shared_ptr<const troupe_ranks> all)
      : verb_contestant(what, label), all_(std::move(all)) {}

  std::size_t ranks() const final { return world().size(); }

  void write(std::size_t rank, direction where, std::size_t first,
             std::span<const float> numbers) final {
    must(world()
             .device_of(rank)
             .upload(part(rank, where, first, numbers.size()), std::as_bytes(numbers))
             .wait());
  }

  void read(std::size_t rank, direction where, std::size_t first, std::span<float> numbers) final {
    must(world()
             .device_of(rank)
             .download(part(rank, where, first, numbers.size()), std::as_writable_bytes(numbers))
             .wait());
  }

protected:
  caf::actor_system& system() const { return all_->system; }
  const troupe::world& world() const { return all_->world; }

  /// Returns what an operation with blocks of `count` elements uses of the ranks' buffers; empty
  /// handles where that is nothing.
  buffers parts(direction where, std::size_t count) const {
    const auto& rule = where == direction::send ? what().send : what().recv;
    buffers result(ranks());
    if (where == direction::send || !what().in_place())
      for (std::size_t rank = 0; rank < ranks(); ++rank)
        if (rule.held(rank))
          result[rank] = part(rank, where, 0, rule.blocks(ranks()) * count);
    return result;
  }

  world_message message(std::size_t count) const {
    return message_for(what(), parts(direction::send, count), parts(direction::recv, count));
  }

private:
  troupe::any_gpu_ref part(std::size_t rank, direction where, std::size_t first,
                           std::size_t count) const {
    const auto& whole = where == direction::send ? all_->send : all_->recv;
    return must(whole[rank].slice(first, count));
  }

  std::shared_ptr<const troupe_ranks> all_;
};

class facade_contestant final : public troupe_contestant {
public:
  using troupe_contestant::troupe_contestant;

  timing drive(std::size_t count, std::size_t operations, std::size_t window) override {
    const auto call = world_call(world(), message(count), {.deadline = deadline});
    timing result;
    const auto begin = clock::now();
    if (window == 1) {
      result.each.reserve(operations);
      for (std::size_t k = 0; k < operations; ++k) {
        const auto start = clock::now();
        must(call().wait());
        result.each.push_back(microseconds(clock::now() - start));
      }
    } else {
      keep_in_flight(operations, window, [&](std::size_t) { return call(); });
    }
    result.per_operation = microseconds(clock::now() - begin) / static_cast<double>(operations);
    return result;
  }
};

class rank_contestant final : public troupe_contestant {
public:
  using troupe_contestant::troupe_contestant;

  timing drive(std::size_t count, std::size_t operations, std::size_t window) override {
    const auto send = parts(direction::send, count);
    const auto recv = parts(direction::recv, count);
    const auto call_of = [&](std::size_t rank) {
      return rank_call(world().rank(rank), what(), send[rank], recv[rank], {.deadline = deadline});
    };
    if (window == 1)
      return in_steps(ranks(), operations, [&](std::size_t rank) {
        return [call = call_of(rank)] {
          if (call)
            must(call().wait());
        };
      });
    return in_one_step(ranks(), operations, [&](std::size_t rank) {
      return [call = call_of(rank), operations, window] {
        if (call)
          keep_in_flight(operations, window, [&](std::size_t) { return call(); });
      };
    });
  }
};

/// Sends the requests of one run, one more for each answer, and then ends.
class requester : public caf::event_based_actor {
public:
  requester(caf::actor_config& cfg, caf::actor world, world_message what, std::size_t operations,
            std::size_t window, std::shared_ptr<std::promise<timing>> result)
      : event_based_actor(cfg), world_(std::move(world)), what_(std::move(what)),
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
    std::visit(
        [this](const auto& what) {
          troupe::request(this, world_, what, deadline)
              .then([this](const troupe::collective_done&) { on_answer(); },
                    [](const caf::error& why) { fail(troupe::describe(why)); });
        },
        what_);
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
  const world_message what_;
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
  using troupe_contestant::troupe_contestant;

  timing drive(std::size_t count, std::size_t operations, std::size_t window) override {
    auto result = std::make_shared<std::promise<timing>>();
    auto answer = result->get_future();
    system().spawn<requester>(world().actor(), message(count), operations, window, result);
    return answer.get();
  }
};

/// Allocates `size_bytes` on each rank, or one element.
buffers allocate(const troupe::world& world, std::size_t size_bytes) {
  const auto count = std::max<std::size_t>(1, size_bytes / sizeof(float));
  return must(world.allocate(troupe::dtype::float32, count));
}

} // namespace

contestant_maker troupe_maker(caf::actor_system& sys, const troupe::world& world,
                              const footprint& memory) {
  auto all = std::make_shared<const troupe_ranks>(troupe_ranks{
      sys, world, allocate(world, memory.send_bytes), allocate(world, memory.recv_bytes)});
  return [all](const verb& what, const contestant_label& label) -> std::unique_ptr<contestant> {
    if (label.mode == "facade")
      return std::make_unique<facade_contestant>(what, label, all);
    if (label.mode == "message")
      return std::make_unique<message_contestant>(what, label, all);
    if (label.mode == "rank_local")
      return std::make_unique<rank_contestant>(what, label, all);
    fail("troupe has no mode " + std::string{label.mode});
  };
}

} // namespace bench
