/// Random chains of uploads, downloads, fills, copies within and between devices, user kernels, and
/// all collectives of worlds and single ranks. Several clients run them on several devices, without
/// waiting in between. Every element must have the value of a sequential model (INV-6, INV-9).
/// TROUPE_CHAIN_SEEDS: number of seeds; TROUPE_CHAIN_FIRST_SEED: the first seed.

#include "chaos/content_model.hpp"
#include "chaos/random_collective.hpp"
#include "support/affine_kernel.hpp"
#include "support/collective_forms.hpp"
#include "support/expect.hpp"
#include "support/from_environment.hpp"
#include "support/gpus.hpp"
#include "support/world_fixture.hpp"
#include <troupe/troupe.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace troupe::testing {

namespace {

using elements = std::vector<std::uint32_t>;

content content_of(const elements& x) { return {x.begin(), x.end()}; }

struct world_entry {
  world over;
  std::vector<int> devices; ///< by rank
};

/// One chain: buffers on every device, a model of their contents, and pending requests.
class chain {
public:
  chain(const std::vector<world_entry>& worlds, const std::vector<topology>& topologies,
        std::uint64_t seed)
      : worlds_(worlds), topologies_(topologies), random_(seed) {
    count_ = pick(random_, device_count(), 1000);
    for (auto& row : slots_)
      for (auto& ref : must(all().over.allocate<std::uint32_t>(count_, true)))
        row[static_cast<std::size_t>(ref.device())] = {
            ref, model_.add(content(count_, std::uint64_t{0}))};
  }

  /// Starts one random operation, or makes one rank's call of one. Only one client runs it at a
  /// time, so the order of admission is the order of the model.
  void step() {
    std::lock_guard lock{mutex_};
    auto choice = pick(random_, 0, 12);
    if (choice < 5)
      return open_ ? call_one_rank() : collective_of_all();
    // A copy from a rank that has called to a rank that has not would wait for itself.
    if (choice < 8)
      return open_ ? call_one_rank() : copy_between();
    switch (choice) {
    case 8:
      return upload();
    case 9:
      return fill();
    case 10:
      return copy();
    case 11:
      return kernel();
    default:
      return download();
    }
  }

  void check() {
    while (open_)
      call_one_rank();
    for (auto& answer : answers_)
      EXPECT_TRUE(is_ok(answer()));
    for (auto& x : reads_)
      EXPECT_EQ(model_.difference(x.place, content_of(*x.got)), "") << "a download in between";
    for (std::size_t row = 0; row < rows; ++row)
      for (int d : all().devices) {
        auto got = must(device_of(d).download(slot_of({row, d}).ref));
        EXPECT_EQ(model_.difference(place({row, d, 0, count_}), content_of(got)), "")
            << "row " << row << ", device " << d;
      }
  }

private:
  static constexpr std::size_t rows = 4;
  static constexpr std::size_t most_devices = 16;

  struct slot {
    gpu_ref<std::uint32_t> ref;
    std::size_t buffer = 0;
  };
  struct read {
    std::unique_ptr<elements> got;
    content_model::place place;
  };
  /// An operation of rank-local calls, of which some are still missing.
  struct open_operation {
    const world_entry* in = nullptr;
    rank_pieces pieces;
    std::vector<std::size_t> to_call;
    std::map<std::size_t, content_model::place> reads; ///< by rank
    std::map<std::size_t, content_model::version> writes;
  };

  const world_entry& all() const { return worlds_[0]; }
  std::size_t device_count() const { return all().devices.size(); }
  device device_of(int ordinal) const {
    auto& devices = all().devices;
    auto rank = std::find(devices.begin(), devices.end(), ordinal) - devices.begin();
    return all().over.device_of(static_cast<std::size_t>(rank));
  }

  slot& slot_of(const piece& x) { return slots_[x.row][static_cast<std::size_t>(x.device)]; }
  gpu_ref<std::uint32_t> part(const piece& x) {
    return must(slot_of(x).ref.slice(x.first, x.count));
  }
  content_model::place place(const piece& x) {
    return {model_.latest(slot_of(x).buffer), x.first, x.count};
  }
  content_model::version write(content_model::effect by, std::size_t output, const piece& x) {
    return model_.write(by, output, slot_of(x).buffer, x.first, x.count);
  }
  /// Records an operation of one device: `target` becomes `run` of the pieces in `reads`.
  void writes(const piece& target, const std::vector<piece>& reads, content_model::function run) {
    std::vector<content_model::place> places;
    for (auto& x : reads)
      places.push_back(place(x));
    write(begin(std::move(places), std::move(run)), 0, target);
  }
  content_model::effect begin(std::vector<content_model::place> reads,
                              content_model::function run) {
    auto effect = model_.begin(std::move(reads), std::move(run));
    model_.decide(effect, fate::ran);
    return effect;
  }

  piece any_piece() {
    piece x{pick(random_, 0, rows - 1), all().devices[pick(random_, 0, device_count() - 1)], 0,
            count_};
    if (chance(random_, 0.5)) {
      x.first = pick(random_, 0, count_ - 1);
      x.count = pick(random_, 1, count_ - x.first);
    }
    return x;
  }
  std::size_t another_row(std::size_t row) { return (row + pick(random_, 1, rows - 1)) % rows; }
  template <class T> void expect_success(pending<T> answer) {
    answers_.push_back([answer = std::move(answer)] {
      auto result = answer.wait();
      return result ? caf::error{} : result.error();
    });
  }

  void upload() {
    auto x = any_piece();
    auto& data = uploads_.emplace_back(x.count);
    for (auto& element : data)
      element = static_cast<std::uint32_t>(random_());
    expect_success(device_of(x.device).upload(part(x), data));
    writes(x, {}, [value = content_of(data)](const auto&) { return std::vector<content>{value}; });
  }

  void fill() {
    auto x = any_piece();
    auto value = static_cast<std::uint32_t>(random_());
    expect_success(device_of(x.device).fill(part(x), value));
    writes(x, {},
           [n = x.count, value](const auto&) { return std::vector<content>{content(n, value)}; });
  }

  void copy() {
    auto from = any_piece();
    auto to = from;
    to.row = another_row(from.row);
    to.first = pick(random_, 0, count_ - from.count);
    expect_success(device_of(from.device).copy(part(to), part(from)));
    writes(to, {from}, [](const std::vector<content>& in) { return in; });
  }

  piece within(const piece& x, std::size_t row, int device) {
    return {row, device, pick(random_, 0, count_ - x.count), x.count};
  }
  int any_device() { return all().devices[pick(random_, 0, device_count() - 1)]; }

  /// Copies from one row to another: one copy, or several as one request.
  void copy_between() {
    auto& links = topologies_[pick(random_, 0, topologies_.size() - 1)];
    auto from = any_piece();
    auto row = another_row(from.row);
    auto form = pick(random_, 0, 3);
    if (form == 0) {
      auto to = within(from, row, any_device());
      expect_success(links.copy(part(to).any(), part(from).any()));
      return writes(to, {from}, [](const std::vector<content>& in) { return in; });
    }
    std::vector<piece> sources;
    std::vector<piece> targets;
    auto devices = all().devices;
    std::shuffle(devices.begin(), devices.end(), random_);
    devices.resize(pick(random_, 1, devices.size()));
    for (std::size_t i = 0; i < devices.size(); ++i) {
      auto source = from;
      if (form == 2) { // a part of it
        source.first += i * from.count / devices.size();
        source.count = (i + 1) * from.count / devices.size() - i * from.count / devices.size();
      } else if (form == 3) {
        source.device = any_device();
      }
      sources.push_back(source);
      targets.push_back(within(source, row, devices[i]));
    }
    std::vector<any_gpu_ref> into;
    std::vector<copy_pair> copies;
    for (std::size_t i = 0; i < targets.size(); ++i) {
      into.push_back(part(targets[i]).any());
      copies.push_back({into.back(), part(sources[i]).any()});
    }
    expect_success(form == 1   ? links.replicate(part(from).any(), into)
                   : form == 2 ? links.distribute(part(from).any(), into)
                               : links.copy(std::move(copies)));
    std::vector<content_model::place> places;
    for (auto& x : sources)
      places.push_back(place(x));
    auto effect = begin(std::move(places), [](const std::vector<content>& in) { return in; });
    for (std::size_t i = 0; i < targets.size(); ++i)
      write(effect, i, targets[i]);
  }

  /// Launches x[i] = a * x[i] + y[i].
  void kernel() {
    auto to = any_piece();
    auto from = to;
    from.row = another_row(to.row);
    auto a = static_cast<std::uint32_t>(random_());
    auto x = part(to);
    auto y = part(from);
    auto work = [x, y, a](launch_context& context) -> caf::error {
      auto target = x.access();
      auto source = y.access();
      if (!target || !source)
        return target ? source.error() : target.error();
      auto count = x.count();
#ifdef TROUPE_HAS_CUDA
      if (context.cuda_stream() != nullptr) {
        auto code = launch_affine(*target, *source, a, count, context.cuda_stream());
        return code == 0 ? caf::error{} : make_error(errc::cuda_error, std::to_string(code));
      }
#endif
      return context.run_on_host([target = *target, source = *source, a, count] {
        for (std::size_t i = 0; i < count; ++i)
          target[i] = a * target[i] + source[i];
      });
    };
    expect_success(device_of(to.device).launch(work, {x, y}, {x}));
    writes(to, {to, from}, [a](const std::vector<content>& in) {
      auto result = in[0];
      for (std::size_t i = 0; i < result.size(); ++i)
        result[i] = static_cast<std::uint32_t>(a * *in[0][i] + *in[1][i]);
      return std::vector<content>{result};
    });
  }

  void download() {
    auto x = any_piece();
    auto& into = reads_.emplace_back();
    into.got = std::make_unique<elements>(x.count, 0xdeadbeef);
    into.place = place(x);
    expect_success(device_of(x.device).download(part(x), std::span{*into.got}));
  }

  collective request_of(const rank_pieces& x) {
    return testing::request_of(x, [this](const piece& p) { return part(p).any(); });
  }

  /// Starts a collective of any world: as a whole, or by rank-local calls with others between.
  void collective_of_all() {
    auto& w = worlds_[pick(random_, 0, worlds_.size() - 1)];
    auto from = pick(random_, 0, rows - 1);
    auto x = choose_collective(random_, w.devices, dtype::uint32, count_, from, another_row(from));
    if (chance(random_, 0.4) && x.sender != x.shape.root) { // a message to itself takes two calls
      begin_calls(w, x);
      return;
    }
    expect_success(call_verb(w.over, request_of(x)));
    std::vector<content_model::place> reads;
    for (auto r : x.senders())
      reads.push_back(place(*x.send[r]));
    auto effect = begin(std::move(reads), semantics_of(x));
    for (std::size_t r = 0; r < x.recv.size(); ++r)
      if (x.recv[r])
        write(effect, output_of(x, r), *x.recv[r]);
  }

  static std::size_t output_of(const rank_pieces& x, std::size_t rank) {
    return x.shape.kind == collective_kind::send ? 0 : rank;
  }

  void begin_calls(const world_entry& w, const rank_pieces& x) {
    open_ = open_operation{&w, x, {}, {}, {}};
    for (std::size_t r = 0; r < w.devices.size(); ++r)
      if (x.shape.kind != collective_kind::send || x.send[r] || x.recv[r])
        open_->to_call.push_back(r);
    std::shuffle(open_->to_call.begin(), open_->to_call.end(), random_);
    call_one_rank();
  }

  /// Makes the call of one rank. It has its position from now on, not from the last rank's call.
  void call_one_rank() {
    auto& x = open_->pieces;
    auto rank = open_->to_call.back();
    auto call = call_of_rank(request_of(x), rank, open_->in->devices.size());
    expect_success(call_verb(open_->in->over.rank(rank), call));
    if (x.send[rank])
      open_->reads[rank] = place(*x.send[rank]);
    if (x.recv[rank])
      open_->writes[rank] = write(model_.begin({}, {}), 0, *x.recv[rank]);
    open_->to_call.pop_back();
    if (!open_->to_call.empty())
      return;
    std::vector<content_model::place> reads;
    for (auto& [r, where] : open_->reads)
      reads.push_back(where);
    auto effect = begin(std::move(reads), semantics_of(x));
    for (auto& [r, version] : open_->writes)
      model_.written_by(version, effect, output_of(x, r));
    open_.reset();
  }

  const std::vector<world_entry>& worlds_;
  const std::vector<topology>& topologies_;
  std::mutex mutex_;
  std::mt19937_64 random_;
  std::size_t count_ = 0;
  std::array<std::array<slot, most_devices>, rows> slots_;
  content_model model_;
  /// Only one, and no other collective beside it: their ranks might wait for each other.
  std::optional<open_operation> open_;
  std::deque<elements> uploads_; // alive until the end
  std::deque<read> reads_;
  std::vector<std::function<caf::error()>> answers_;
};

world_entry entry_of(const world& w) {
  world_entry result{w, {}};
  for (auto& x : devices_of(w))
    result.devices.push_back(x.ordinal());
  return result;
}

/// Loads the kernel. CUDA may wait for all work of the device at a kernel's first launch.
void load_kernel(const world& w) {
#ifdef TROUPE_HAS_CUDA
  for (std::size_t i = 0; i < w.size(); ++i)
    must(answer_of(w.device_of(i).launch(
        [](launch_context& context) {
          auto code = context.cuda_stream() != nullptr
                          ? launch_affine(nullptr, nullptr, 0, 0, context.cuda_stream())
                          : 0;
          return code == 0 ? caf::error{} : make_error(errc::cuda_error, std::to_string(code));
        },
        {}, {})));
#else
  static_cast<void>(w);
#endif
}

TEST(Chains, AreRightWithoutWaitingForTheHost) {
  auto cuda = on_cuda();
  if (cuda) {
    TROUPE_NEEDS_GPUS(2);
  }
  auto seeds = number_from_environment("TROUPE_CHAIN_SEEDS", cuda ? 200 : 1000);
  auto first = number_from_environment("TROUPE_CHAIN_FIRST_SEED", 1);
  config cfg;
  // Pairs with access in both directions, in one, and in none.
  std::vector<host_link> links{{.from = 0, .to = 3, .access = false},
                               {.from = 3, .to = 0, .access = false},
                               {.from = 1, .to = 2, .access = false}};
  cfg.use_backend(cuda ? must(make_cuda_backend())
                       : make_host_backend({.devices = 4, .links = links}));
  cfg.lanes.staging_bytes = 4096; // copies through the host use many pieces
  caf::actor_system sys{cfg};
  auto devices = all_devices(sys);
  std::vector<world_entry> worlds{entry_of(must(world::open(sys, {.devices = devices})))};
  load_kernel(worlds[0].over);
  std::vector<int> reversed{devices.rbegin(), devices.rend()};
  worlds.push_back(entry_of(must(world::open(sys, {.devices = reversed, .name = "reversed"}))));
  // Halves, and all ranks but the first in another order.
  std::vector<std::int32_t> halves;
  std::vector<std::int32_t> tail;
  for (std::size_t i = 0; i < devices.size(); ++i) {
    halves.push_back(i < devices.size() / 2 ? 0 : 1);
    tail.push_back(i == 0 ? -1 : 0);
  }
  auto falling = std::vector<std::int32_t>(devices.begin(), devices.end());
  std::reverse(falling.begin(), falling.end());
  for (auto& group : must(worlds[0].over.split("half", halves)))
    worlds.push_back(entry_of(group));
  for (auto& group : must(worlds[0].over.split("tail", tail, falling)))
    worlds.push_back(entry_of(group));
  std::vector<topology> topologies{
      must(topology::open(sys)),
      must(topology::open(sys, {.name = "through the host", .use_links = false})),
  };
  for (auto seed = first; seed < first + seeds && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    chain x{worlds, topologies, seed};
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
