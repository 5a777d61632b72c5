/// Random chains of uploads, fills, copies, user kernels and all-reduces over several devices and
/// clients, never waited for in between: every element must be what a sequential model says (INV-6,
/// INV-9).

#include "support/affine_kernel.hpp"
#include "support/expect.hpp"
#include "support/gpus.hpp"
#include "support/world_fixture.hpp"
#include <troupe/troupe.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace troupe::testing {

namespace {

using elements = std::vector<std::uint32_t>;

std::size_t number_from_environment(const char* name, std::size_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

/// One chain: buffers on every device, their contents as a model, and what waits for its answer.
class chain {
public:
  chain(std::vector<world>& worlds, std::uint64_t seed) : worlds_(worlds), random_(seed) {
    count_ = pick(1, 3000);
    for (std::size_t row = 0; row < rows; ++row) {
      auto refs = must(worlds_[0].allocate<std::uint32_t>(count_, true));
      refs_.push_back(std::move(refs));
      model_.emplace_back(worlds_[0].size(), elements(count_, 0));
    }
  }

  /// Starts one random operation and says what it does to the model. Clients come one at a time:
  /// the order of admission is the model's order.
  void step() {
    std::lock_guard lock{mutex_};
    switch (pick(0, 6)) {
    case 0:
      return upload();
    case 1:
      return fill();
    case 2:
      return copy();
    case 3:
      return kernel();
    case 4:
      return download();
    default:
      return all_reduce();
    }
  }

  void check() {
    for (auto& answer : answers_)
      EXPECT_TRUE(is_ok(answer()));
    for (auto& x : reads_)
      EXPECT_EQ(*x.got, x.want) << "a download in the middle of the chain";
    for (std::size_t row = 0; row < rows; ++row)
      for (std::size_t d = 0; d < worlds_[0].size(); ++d)
        EXPECT_EQ(must(device_of(d).download(refs_[row][d])), model_[row][d])
            << "row " << row << ", device " << d;
  }

private:
  static constexpr std::size_t rows = 4;

  struct read {
    std::unique_ptr<elements> got;
    elements want;
  };
  struct range {
    std::size_t first;
    std::size_t count;
  };

  std::size_t pick(std::size_t low, std::size_t high) {
    return std::uniform_int_distribution<std::size_t>{low, high}(random_);
  }
  device device_of(std::size_t d) { return worlds_[0].device_of(d); }
  std::size_t pick_device() { return pick(0, worlds_[0].size() - 1); }
  range pick_range() {
    if (pick(0, 1) == 0)
      return {0, count_};
    auto first = pick(0, count_ - 1);
    return {first, pick(1, count_ - first)};
  }
  elements random_elements(std::size_t count) {
    elements result(count);
    for (auto& x : result)
      x = static_cast<std::uint32_t>(random_());
    return result;
  }
  gpu_ref<std::uint32_t> part(std::size_t row, std::size_t d, range r) {
    return must(refs_[row][d].slice(r.first, r.count));
  }
  template <class T> void expect_success(pending<T> answer) {
    answers_.push_back([answer = std::move(answer)] {
      auto result = answer.wait();
      return result ? caf::error{} : result.error();
    });
  }

  void upload() {
    auto row = pick(0, rows - 1);
    auto d = pick_device();
    auto r = pick_range();
    auto& data = uploads_.emplace_back(random_elements(r.count));
    expect_success(device_of(d).upload(part(row, d, r), data));
    std::copy(data.begin(), data.end(),
              model_[row][d].begin() + static_cast<std::ptrdiff_t>(r.first));
  }

  void fill() {
    auto row = pick(0, rows - 1);
    auto d = pick_device();
    auto r = pick_range();
    auto value = static_cast<std::uint32_t>(random_());
    expect_success(device_of(d).fill(part(row, d, r), value));
    std::fill_n(model_[row][d].begin() + static_cast<std::ptrdiff_t>(r.first), r.count, value);
  }

  void copy() {
    auto from = pick(0, rows - 1);
    auto to = (from + pick(1, rows - 1)) % rows;
    auto d = pick_device();
    auto r = pick_range();
    auto at = pick(0, count_ - r.count);
    expect_success(device_of(d).copy(part(to, d, {at, r.count}), part(from, d, r)));
    std::copy_n(model_[from][d].begin() + static_cast<std::ptrdiff_t>(r.first), r.count,
                model_[to][d].begin() + static_cast<std::ptrdiff_t>(at));
  }

  void kernel() {
    auto x_row = pick(0, rows - 1);
    auto y_row = (x_row + pick(1, rows - 1)) % rows;
    auto d = pick_device();
    auto r = pick_range();
    auto a = static_cast<std::uint32_t>(random_());
    auto x = part(x_row, d, r);
    auto y = part(y_row, d, r);
    auto work = [x, y, a](launch_context& context) -> caf::error {
      auto to = x.access();
      auto from = y.access();
      if (!to || !from)
        return to ? from.error() : to.error();
      auto count = x.count();
#ifdef TROUPE_HAS_CUDA
      if (context.cuda_stream() != nullptr) {
        auto code = launch_affine(*to, *from, a, count, context.cuda_stream());
        return code == 0 ? caf::error{} : make_error(errc::cuda_error, std::to_string(code));
      }
#endif
      return context.run_on_host([to = *to, from = *from, a, count] {
        for (std::size_t i = 0; i < count; ++i)
          to[i] = a * to[i] + from[i];
      });
    };
    expect_success(device_of(d).launch(work, {x, y}, {x}));
    for (std::size_t i = r.first; i < r.first + r.count; ++i)
      model_[x_row][d][i] = a * model_[x_row][d][i] + model_[y_row][d][i];
  }

  void download() {
    auto row = pick(0, rows - 1);
    auto d = pick_device();
    auto r = pick_range();
    auto& x = reads_.emplace_back();
    x.got = std::make_unique<elements>(r.count, 0xdeadbeef);
    auto begin = model_[row][d].begin() + static_cast<std::ptrdiff_t>(r.first);
    x.want.assign(begin, begin + static_cast<std::ptrdiff_t>(r.count));
    expect_success(device_of(d).download(part(row, d, r), std::span{*x.got}));
  }

  void all_reduce() {
    // Any world: the second one has the same devices in another order.
    auto& w = worlds_[pick(0, worlds_.size() - 1)];
    auto from = pick(0, rows - 1);
    auto to = pick(0, 1) == 0 ? from : (from + pick(1, rows - 1)) % rows;
    constexpr reduce_op ops[] = {reduce_op::sum, reduce_op::prod, reduce_op::min, reduce_op::max};
    auto op = ops[pick(0, 3)];
    std::vector<gpu_ref<std::uint32_t>> send;
    std::vector<gpu_ref<std::uint32_t>> recv;
    for (std::size_t rank = 0; rank < w.size(); ++rank) {
      auto d = static_cast<std::size_t>(w.status().members[rank].device);
      send.push_back(refs_[from][d]);
      recv.push_back(refs_[to][d]);
    }
    expect_success(from == to ? w.all_reduce(send, op) : w.all_reduce(send, recv, op));
    elements result = model_[from][0];
    for (std::size_t d = 1; d < w.size(); ++d)
      for (std::size_t i = 0; i < count_; ++i)
        result[i] = combine(op, result[i], model_[from][d][i]);
    for (std::size_t d = 0; d < w.size(); ++d)
      model_[to][d] = result;
  }

  static std::uint32_t combine(reduce_op op, std::uint32_t a, std::uint32_t b) {
    switch (op) {
    case reduce_op::prod:
      return a * b;
    case reduce_op::min:
      return std::min(a, b);
    case reduce_op::max:
      return std::max(a, b);
    default:
      return a + b;
    }
  }

  std::vector<world>& worlds_;
  std::mutex mutex_;
  std::mt19937_64 random_;
  std::size_t count_ = 0;
  std::vector<std::vector<gpu_ref<std::uint32_t>>> refs_;
  std::vector<std::vector<elements>> model_; // row, device
  std::deque<elements> uploads_;             // alive until the end
  std::deque<read> reads_;
  std::vector<std::function<caf::error()>> answers_;
};

TEST(Chains, AreRightWithoutWaitingForTheHost) {
  auto cuda = on_cuda();
  if (cuda) {
    TROUPE_NEEDS_GPUS(2);
  }
  auto seeds = number_from_environment("TROUPE_CHAIN_SEEDS", cuda ? 200 : 1000);
  auto first = number_from_environment("TROUPE_CHAIN_FIRST_SEED", 1);
  config cfg;
  cfg.use_backend(cuda ? must(make_cuda_backend()) : make_host_backend({.devices = 4}));
  caf::actor_system sys{cfg};
  auto devices = all_devices(sys);
  std::vector<world> worlds;
  worlds.push_back(must(world::open(sys, {.devices = devices})));
  std::vector<int> reversed{devices.rbegin(), devices.rend()};
  worlds.push_back(must(world::open(sys, {.devices = reversed, .name = "reversed"})));
  for (auto seed = first; seed < first + seeds && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    chain x{worlds, seed};
    auto client = [&x] {
      for (int i = 0; i < 25; ++i)
        x.step();
    };
    std::thread other{client};
    client();
    other.join();
    x.check();
  }
}

} // namespace

} // namespace troupe::testing
