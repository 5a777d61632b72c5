/// Random programs of several senders on the same devices: threads, actors and blocking actors.
/// They make requests of all kinds without waiting, and check only their last results. Queues are
/// small and deadlines short, with cancellations, faults and resets. If the last results of a
/// sender are successful, they have the values of a serial model of its whole program (INV-12,
/// INV-14, INV-15).
///
/// TROUPE_PROGRAM_SEEDS: number of seeds in each case; TROUPE_PROGRAM_FIRST_SEED: the first seed.

#include "support/affine_kernel.hpp"
#include "support/eventually.hpp"
#include "support/from_environment.hpp"
#include "support/random.hpp"
#include "support/world_fixture.hpp"
#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <future>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

constexpr std::size_t count = 64; ///< elements of a buffer
constexpr std::size_t rows = 4;   ///< each row has one buffer on each device
constexpr std::size_t most_steps = 40;

using elements = std::vector<std::uint32_t>;
using bytes = std::vector<std::uint8_t>;

constexpr const char* affine_launch = "ProgramOrder.affine";

/// Launch of x = a * x + y in the process of the device.
[[maybe_unused]] const bool registered = [] {
  must(register_launch(
      affine_launch,
      [](launch_context& context, auto reads, auto writes, auto arguments) -> caf::error {
        std::uint32_t a = 0;
        std::memcpy(&a, arguments.data(), sizeof a);
        auto x = writes[0].access();
        auto y = reads[1].access();
        if (!x || !y)
          return x ? y.error() : x.error();
        auto* to = static_cast<std::uint32_t*>(*x);
        auto* from = static_cast<const std::uint32_t*>(*y);
        const auto n = writes[0].count();
#ifdef TROUPE_HAS_CUDA
        if (context.cuda_stream() != nullptr) {
          auto code = launch_affine(to, from, a, n, context.cuda_stream());
          return code == 0 ? caf::error{} : make_error(errc::cuda_error, std::to_string(code));
        }
#endif
        return context.run_on_host([=] {
          for (std::size_t i = 0; i < n; ++i)
            to[i] = a * to[i] + from[i];
        });
      }));
  return true;
}();

/// Conditions under which a sender's requests may fail.
struct weather {
  const char* name;
  bool hasty = false;    ///< short deadlines
  bool refuses = false;  ///< `room_policy::refuse`
  bool faults = false;   ///< backend calls fail
  bool resets = false;   ///< devices are reset
  bool cancels = true;   ///< requests are cancelled
  std::size_t queue = 8; ///< `lane_options::queue_limit`

  /// Returns true if only cancellations are allowed: all other requests must succeed.
  bool calm() const { return !hasty && !refuses && !faults && !resets; }
};

void PrintTo(const weather& x, std::ostream* to) { *to << x.name; }

enum class verb_kind : std::uint8_t {
  fill,
  upload,
  affine,
  copy,
  peer_copy,
  sum_in_place,
  sum,
  broadcast,
  rank_sum,
  group_sum,
  exchange,
};

struct step {
  verb_kind what = verb_kind::fill;
  std::size_t to = 0; ///< row
  std::size_t from = 0;
  std::size_t device = 0;
  std::size_t other = 0; ///< device
  std::size_t first = 0; ///< element
  std::size_t number = count;
  std::uint32_t value = 0;
  request_options options = {};
  bool is_cancelled = false;
};

/// The content of every row on every device if all steps of a program run in order.
class serial_model {
public:
  explicit serial_model(std::size_t devices)
      : devices_(devices), content_(rows * devices, elements(count, 0)) {}

  elements& at(std::size_t row, std::size_t device) { return content_[row * devices_ + device]; }

  void apply(const step& x) {
    auto& to = at(x.to, x.device);
    switch (x.what) {
    case verb_kind::fill:
      std::fill_n(to.begin() + static_cast<std::ptrdiff_t>(x.first), x.number, x.value);
      break;
    case verb_kind::upload:
      for (std::size_t i = 0; i < x.number; ++i)
        to[x.first + i] = x.value + static_cast<std::uint32_t>(i);
      break;
    case verb_kind::affine:
      for (std::size_t i = 0; i < x.number; ++i)
        to[x.first + i] = x.value * to[x.first + i] + at(x.from, x.device)[x.first + i];
      break;
    case verb_kind::copy:
    case verb_kind::peer_copy: {
      auto& from = at(x.from, x.what == verb_kind::copy ? x.device : x.other);
      std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(x.first), x.number,
                  to.begin() + static_cast<std::ptrdiff_t>(x.first));
      break;
    }
    case verb_kind::sum_in_place:
    case verb_kind::rank_sum:
      sum(x.to, x.to);
      break;
    case verb_kind::sum:
      sum(x.from, x.to);
      break;
    case verb_kind::broadcast: {
      const auto from = at(x.from, x.device);
      for (std::size_t d = 0; d < devices_; ++d)
        at(x.to, d) = from;
      break;
    }
    case verb_kind::group_sum:
      sum(x.to, x.to);
      sum(x.from, x.from);
      break;
    case verb_kind::exchange:
      for (std::size_t d = 0; d < devices_; ++d)
        at(x.to, (d + 1) % devices_) = at(x.from, d);
      break;
    }
  }

private:
  void sum(std::size_t from, std::size_t to) {
    elements all(count, 0);
    for (std::size_t d = 0; d < devices_; ++d)
      for (std::size_t i = 0; i < count; ++i)
        all[i] += at(from, d)[i];
    for (std::size_t d = 0; d < devices_; ++d)
      at(to, d) = all;
  }

  std::size_t devices_;
  std::vector<elements> content_;
};

/// A request made by a function call.
struct asked {
  std::size_t of = 0; ///< index of the step
  std::function<void()> cancel;
  std::function<caf::error()> answer;
};

/// The last result for a buffer.
struct last_look {
  std::size_t row = 0;
  std::size_t device = 0;
  caf::error why;
  elements got;
};

elements elements_in(const host_buffer& x) {
  auto all = x.as<std::uint32_t>();
  return {all.begin(), all.end()};
}

/// One sender: its world, its buffers and its program.
class sender {
public:
  sender(world w, topology links, std::uint64_t seed, const weather& sky)
      : world_(std::move(w)), links_(std::move(links)), random_(seed), sky_(sky) {
    for (std::size_t row = 0; row < rows; ++row)
      refs_.push_back(must(world_.allocate(dtype::uint32, count, true)));
    const auto n = pick(random_, most_steps / 2, most_steps);
    for (std::size_t i = 0; i < n; ++i)
      steps_.push_back(random_step());
  }

  virtual ~sender() = default;

  /// Makes all requests and waits for the last ones.
  virtual void run() = 0;

  /// Compares the last results with the model. Returns how many were successful.
  std::size_t check() {
    std::vector<bool> never(steps_.size(), false);
    for (auto& x : asked_) {
      auto why = x.answer();
      if (code_of(why) == errc::cancelled && steps_[x.of].is_cancelled) {
        if (failure_of(why)->detail.find("does not run") != std::string::npos ||
            failure_of(why)->detail.find("not called by") != std::string::npos)
          never[x.of] = true;
      } else if (sky_.calm() && code_of(why) != errc::cancelled) {
        EXPECT_TRUE(is_ok(why)) << "step " << x.of << " of kind "
                                << static_cast<int>(steps_[x.of].what);
      }
    }
    serial_model model{devices()};
    for (std::size_t i = 0; i < steps_.size(); ++i)
      if (!never[i])
        model.apply(steps_[i]);
    std::size_t good = 0;
    for (auto& x : looks_) {
      if (x.why) {
        EXPECT_FALSE(sky_.calm()) << describe(x.why);
        continue;
      }
      ++good;
      EXPECT_EQ(x.got, model.at(x.row, x.device)) << "row " << x.row << ", device " << x.device;
    }
    return good;
  }

  /// Expects that every mark ends when its range is overwritten wholly or accepted.
  void recover() {
    for (auto& look : looks_) {
      auto& ref = refs_[look.row][look.device];
      if (ref.stale())
        continue;
      const auto device = world_.device_of(look.device);
      if (code_of(look.why) == errc::skipped) {
        auto accepted = answer_of(device.accept(ref));
        if (ref.stale())
          continue;
        if (accepted) {
          EXPECT_TRUE(is_ok(ref.access()));
        } else { // an earlier write failed, possibly only now
          EXPECT_FALSE(ref.access()) << describe(accepted.error());
        }
      }
      auto filled = answer_of(device.fill(ref, static_cast<std::uint32_t>(look.row)));
      if (ref.stale())
        continue;
      EXPECT_TRUE(is_ok(filled));
      EXPECT_TRUE(is_ok(ref.access()));
    }
  }

  std::size_t devices() const { return world_.size(); }
  std::size_t looks() const { return looks_.size(); }
  std::string text() const {
    std::string result;
    for (auto& x : steps_)
      result += std::to_string(static_cast<int>(x.what)) + ":" + std::to_string(x.to) + "<" +
                std::to_string(x.from) + "@" + std::to_string(x.device) + "," +
                std::to_string(x.other) + (x.is_cancelled ? "c" : "") + " ";
    return result;
  }

protected:
  any_gpu_ref part(std::size_t row, std::size_t device, const step& x) const {
    return must(refs_[row][device].slice(x.first, x.number));
  }

  host_buffer content_of(const step& x) const {
    elements content(x.number);
    for (std::size_t i = 0; i < x.number; ++i)
      content[i] = x.value + static_cast<std::uint32_t>(i);
    return host_buffer{std::move(content)};
  }

  rank_local rank_sum_of(const step& x, std::size_t rank) const {
    collective call = all_reduce{{refs_[x.to][rank]}, {}, reduce_op::sum, {}, {}};
    return {static_cast<std::int32_t>(rank), std::move(call), x.options};
  }

  exchange exchange_of(const step& x, std::size_t rank) const {
    const auto n = devices();
    return {static_cast<std::int32_t>(rank),
            {{static_cast<std::int32_t>((rank + 1) % n), refs_[x.from][rank]}},
            {{static_cast<std::int32_t>((rank + n - 1) % n), refs_[x.to][rank]}},
            x.options};
  }

  group group_of(const step& x) const {
    return {{all_reduce{refs_[x.to], {}, reduce_op::sum, {}, {}},
             all_reduce{refs_[x.from], {}, reduce_op::sum, {}, {}}},
            x.options};
  }

  world world_;
  topology links_;
  std::mt19937_64 random_;
  const weather sky_;
  std::vector<std::vector<any_gpu_ref>> refs_; // by row and rank
  std::vector<step> steps_;
  std::vector<asked> asked_;
  std::vector<last_look> looks_;

private:
  step random_step() {
    step x;
    x.what = static_cast<verb_kind>(pick(random_, 0, 10));
    // The messages of an exchange have a position for each rank. With small queues several senders
    // could wait for each other in a cycle.
    if (x.what == verb_kind::exchange && sky_.queue < 256)
      x.what = verb_kind::rank_sum;
    x.to = pick(random_, 0, rows - 1);
    x.from = (x.to + pick(random_, 1, rows - 1)) % rows;
    x.device = pick(random_, 0, devices() - 1);
    x.other = (x.device + pick(random_, 1, std::max<std::size_t>(devices() - 1, 1))) % devices();
    if (x.what == verb_kind::peer_copy && devices() == 1)
      x.what = verb_kind::copy;
    if (chance(random_, 0.4)) {
      x.number = count / 2;
      x.first = chance(random_, 0.5) ? count / 2 : 0;
    }
    x.value = static_cast<std::uint32_t>(random_());
    x.options.deadline = patience;
    if (sky_.hasty && chance(random_, 0.15))
      x.options.deadline = std::chrono::microseconds{pick(random_, 1, 300)};
    if (sky_.refuses && chance(random_, 0.5))
      x.options.room = room_policy::refuse;
    x.is_cancelled = sky_.cancels && x.what != verb_kind::exchange && chance(random_, 0.1);
    return x;
  }
};

/// A thread that calls the facades.
class calling_thread : public sender {
public:
  using sender::sender;

  void run() override {
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      make(i);
      for (auto& x : asked_)
        if (steps_[x.of].is_cancelled && chance(random_, 0.3))
          x.cancel();
    }
    std::vector<std::pair<pending<void>, std::unique_ptr<elements>>> last;
    for (std::size_t row = 0; row < rows; ++row)
      for (std::size_t d = 0; d < devices(); ++d) {
        auto got = std::make_unique<elements>(count);
        auto done = world_.device_of(d).download(
            refs_[row][d], std::as_writable_bytes(std::span{*got}), {.deadline = patience});
        looks_.push_back({row, d, {}, {}});
        last.emplace_back(std::move(done), std::move(got));
      }
    for (std::size_t i = 0; i < last.size(); ++i) {
      looks_[i].why = error_of(answer_of(last[i].first, 2 * patience));
      looks_[i].got = *last[i].second;
    }
  }

private:
  template <class T> void note(std::size_t i, pending<T> x) {
    asked_.push_back(
        {i, [x] { x.cancel(); }, [x] { return error_of(answer_of(x, 2 * patience)); }});
  }

  void make(std::size_t i) {
    const auto& x = steps_[i];
    const auto device = world_.device_of(x.device);
    switch (x.what) {
    case verb_kind::fill:
      return note(i, device.fill(part(x.to, x.device, x), x.value, x.options));
    case verb_kind::upload:
      return note(i, device.upload(part(x.to, x.device, x), content_of(x), x.options));
    case verb_kind::affine: {
      auto to = part(x.to, x.device, x);
      auto from = part(x.from, x.device, x);
      return note(i, device.launch(affine_launch, to_bytes(x.value), {to, from}, {to}, x.options));
    }
    case verb_kind::copy:
      return note(i, device.copy(part(x.to, x.device, x), part(x.from, x.device, x), x.options));
    case verb_kind::peer_copy:
      return note(i, links_.copy(part(x.to, x.device, x), part(x.from, x.other, x), x.options));
    case verb_kind::sum_in_place:
      return note(i, world_.all_reduce(refs_[x.to], reduce_op::sum, x.options));
    case verb_kind::sum:
      return note(i, world_.all_reduce(refs_[x.from], refs_[x.to], reduce_op::sum, x.options));
    case verb_kind::broadcast:
      return note(i, world_.broadcast(refs_[x.from][x.device], refs_[x.to],
                                      static_cast<int>(x.device), x.options));
    case verb_kind::group_sum:
      return note(i, world_.run(group_of(x)));
    case verb_kind::rank_sum:
      for (std::size_t rank = 0; rank < devices(); ++rank)
        note(i, world_.rank(rank).all_reduce(refs_[x.to][rank], reduce_op::sum, x.options));
      return;
    case verb_kind::exchange:
      for (std::size_t rank = 0; rank < devices(); ++rank) {
        auto all = exchange_of(x, rank);
        note(i, world_.rank(rank).exchange(all.sends, all.recvs, x.options));
      }
      return;
    }
  }
};

/// An actor that sends messages, in CAF's pool or blocking: to facades, or to the plain addresses
/// of devices, world and topology.
class messages : public sender {
public:
  messages(world w, topology links, std::uint64_t seed, const weather& sky, caf::actor_system& sys,
           bool blocks)
      : sender(std::move(w), std::move(links), seed, sky), system_(sys), blocks_(blocks),
        bare_(chance(random_, 0.5)) {
    for (auto& x : steps_)
      x.is_cancelled = false;
    for (std::size_t d = 0; d < devices(); ++d)
      addresses_.push_back(must(world_.device_of(d).actor()));
    for (std::size_t row = 0; row < rows; ++row)
      for (std::size_t d = 0; d < devices(); ++d)
        looks_.push_back({row, d, {}, {}});
  }

  void run() override {
    if (blocks_)
      return run_blocking();
    std::promise<void> done;
    auto over = done.get_future();
    system_.spawn([this, &done](caf::event_based_actor* self) { run_in(self, done); });
    over.get();
  }

private:
  /// Calls `ask(receiver, message)` for each request.
  template <class Ask> void send_all(Ask ask) {
    auto to_device = [&](std::size_t d, auto what) {
      if (bare_)
        ask(addresses_[d], std::move(what));
      else
        ask(world_.device_of(d), std::move(what));
    };
    auto to_world = [&](auto what) {
      if (bare_)
        ask(world_.actor(), std::move(what));
      else
        ask(world_, std::move(what));
    };
    for (auto& x : steps_)
      switch (x.what) {
      case verb_kind::fill:
        to_device(x.device, fill{part(x.to, x.device, x), x.value, x.options});
        break;
      case verb_kind::upload:
        to_device(x.device, upload{part(x.to, x.device, x), content_of(x), x.options});
        break;
      case verb_kind::affine: {
        auto to = part(x.to, x.device, x);
        to_device(x.device, launch{affine_launch,
                                   to_bytes(x.value),
                                   {to, part(x.from, x.device, x)},
                                   {to},
                                   x.options});
        break;
      }
      case verb_kind::copy:
        to_device(x.device, copy{part(x.to, x.device, x), part(x.from, x.device, x), x.options});
        break;
      case verb_kind::peer_copy: {
        copy what{part(x.to, x.device, x), part(x.from, x.other, x), x.options};
        if (bare_)
          ask(links_.actor(), std::move(what));
        else
          ask(links_, std::move(what));
        break;
      }
      case verb_kind::sum_in_place:
        to_world(all_reduce{refs_[x.to], {}, reduce_op::sum, x.options, {}});
        break;
      case verb_kind::sum:
        to_world(all_reduce{refs_[x.from], refs_[x.to], reduce_op::sum, x.options, {}});
        break;
      case verb_kind::broadcast:
        to_world(broadcast{refs_[x.from][x.device], refs_[x.to],
                           static_cast<std::int32_t>(x.device), x.options});
        break;
      case verb_kind::group_sum:
        to_world(group_of(x));
        break;
      case verb_kind::rank_sum:
        for (std::size_t rank = 0; rank < devices(); ++rank)
          if (bare_)
            ask(world_.actor(), rank_sum_of(x, rank));
          else
            ask(world_.rank(rank),
                all_reduce{{refs_[x.to][rank]}, {}, reduce_op::sum, x.options, {}});
        break;
      case verb_kind::exchange:
        for (std::size_t rank = 0; rank < devices(); ++rank)
          if (bare_)
            ask(world_.actor(), exchange_of(x, rank));
          else
            ask(world_.rank(rank), exchange_of(x, rank));
        break;
      }
  }

  template <class Receiver, class Message>
  static auto ask_for(auto* self, const Receiver& to, Message what) {
    const auto deadline = what.options.deadline;
    return request(self, to, std::move(what), deadline);
  }

  /// Fails the test if no request may fail.
  void note(const caf::error& why) const { EXPECT_FALSE(sky_.calm()) << describe(why); }

  void run_in(caf::event_based_actor* self, std::promise<void>& done) {
    send_all([&](const auto& to, auto what) {
      constexpr bool of_device = detail::one_of<decltype(what), detail::device_request>;
      auto asked = ask_for(self, to, std::move(what));
      auto on_error = [this](const caf::error& why) { note(why); };
      if constexpr (of_device)
        std::move(asked).then([] {}, on_error);
      else
        std::move(asked).then([](const collective_done&) {}, on_error);
    });
    auto open = std::make_shared<std::size_t>(looks_.size());
    for (auto& x : looks_) {
      auto over = [open, &done] {
        if (--*open == 0)
          done.set_value();
      };
      request(self, addresses_[x.device], download{refs_[x.row][x.device], {}}, patience)
          .then(
              [&x, over](const host_buffer& got) {
                x.got = elements_in(got);
                over();
              },
              [&x, over](const caf::error& why) {
                x.why = why;
                over();
              });
    }
  }

  void run_blocking() {
    caf::scoped_actor self{system_};
    send_all([&](const auto& to, auto what) {
      static_cast<void>(ask_for(&*self, to, std::move(what)));
    });
    for (auto& x : looks_)
      request(self, addresses_[x.device], download{refs_[x.row][x.device], {}}, patience)
          .receive([&x](const host_buffer& got) { x.got = elements_in(got); },
                   [&x](const caf::error& why) { x.why = why; });
  }

  caf::actor_system& system_;
  const bool blocks_;
  const bool bare_;
  std::vector<caf::actor> addresses_;
};

class ProgramOrder : public ::testing::TestWithParam<weather> {};

constexpr std::array skies{
    weather{.name = "Calm", .queue = 4096},
    weather{.name = "SmallQueues", .queue = 4},
    weather{.name = "Haste", .hasty = true, .queue = 4},
    weather{.name = "Refusals", .refuses = true, .queue = 3},
    weather{.name = "Faults", .faults = true},
    weather{.name = "Resets", .resets = true},
    weather{.name = "All", .hasty = true, .refuses = true, .faults = true, .resets = true},
};

TEST_P(ProgramOrder, GivesTheLastAnswerTheWholeProgramOrAnError) {
  const auto sky = GetParam();
  if (on_cuda())
    TROUPE_NEEDS_GPUS(2);
  const auto seeds = number_from_environment("TROUPE_PROGRAM_SEEDS", on_cuda() ? 15 : 150);
  const auto first = number_from_environment("TROUPE_PROGRAM_FIRST_SEED", 1);
  auto plan = std::make_shared<fault_plan>(first);
  system_options options{.devices = on_cuda() ? 2 : 3, .faults = plan};
  options.lanes.queue_limit = sky.queue;
  options.lanes.in_flight_limit = 3;
  test_system system{options};
  world_config config;
  config.limits.restarts = 1'000'000;
  config.limits.restart_backoff = 1ms;
  config.limits.waiting_limit = 16;
  std::vector<world> worlds;
  for (auto* name : {"a", "b", "c"}) {
    config.name = name;
    worlds.push_back(system.open_world(config));
  }
  auto links = must(topology::open(system.get()));
  std::size_t good = 0;
  std::size_t looks = 0;
  for (auto seed = first; seed < first + seeds && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    for (auto& w : worlds)
      ASSERT_TRUE(eventually([&] { return w.status().phase == world_phase::ready; }));
    for (auto i : system.ordinals())
      ASSERT_TRUE(eventually([&] { return system.open(i).phase() == device_phase::ready; }));
    std::mt19937_64 random{seed};
    std::vector<std::unique_ptr<sender>> all;
    all.push_back(std::make_unique<calling_thread>(worlds[0], links, random(), sky));
    all.push_back(std::make_unique<messages>(worlds[1], links, random(), sky, system.get(), false));
    all.push_back(std::make_unique<messages>(worlds[2], links, random(), sky, system.get(), true));
    if (sky.faults)
      for (auto [on, first_call] :
           {std::pair{verb::collective, 3}, std::pair{verb::fill, 2}, std::pair{verb::copy, 2}})
        if (chance(random, 0.5))
          plan->add({.kind = fault::fail,
                     .on = on,
                     .device = static_cast<int>(pick(random, 0, system.ordinals().size() - 1)),
                     .first = static_cast<std::uint64_t>(first_call) + pick(random, 0, 5)});
    std::vector<std::thread> threads;
    for (auto& x : all)
      threads.emplace_back([&x] { x->run(); });
    if (sky.resets && chance(random, 0.5))
      static_cast<void>(answer_of(
          system.open(static_cast<int>(pick(random, 0, system.ordinals().size() - 1))).reset()));
    for (auto& x : threads)
      x.join();
    plan->disarm();
    for (auto& x : all) {
      good += x->check();
      looks += x->looks();
      if (HasFailure())
        ADD_FAILURE() << x->text();
      x->recover();
    }
  }
  RecordProperty("good", std::to_string(good));
  RecordProperty("looks", std::to_string(looks));
  std::cout << sky.name << ": " << good << " of " << looks << " last answers were good\n";
  EXPECT_GT(good, sky.calm() ? looks - 1 : looks / 50);
}

INSTANTIATE_TEST_SUITE_P(Skies, ProgramOrder, ::testing::ValuesIn(skies),
                         [](const auto& x) { return std::string{x.param.name}; });

} // namespace

} // namespace troupe::testing
