// Programs whose actors drive a world's ranks in the worker processes of its devices.

#include "actors/program_note.hpp"
#include "foundation/file_descriptor.hpp"
#include "foundation/process_note.hpp"
#include "support/eventually.hpp"
#include "support/folder.hpp"
#include "support/forwarding_backend.hpp"
#include "support/load.hpp"
#include "support/log_lines.hpp"
#include "support/random.hpp"
#include "worker/program_fixture.hpp"
#include <troupe/launch.hpp>
#include <troupe/spawn_program.hpp>
#include <troupe/world.hpp>

#include <caf/all.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace troupe::testing {

namespace {

constexpr std::size_t elements = 64;

/// Returns the sum in which each member of rank r adds r + 1.
float sum_of(const std::vector<world_member>& members) {
  float result = 0;
  for (auto& x : members)
    result += static_cast<float>(x.rank + 1);
  return result;
}

/// Returns the sum that a rank gets, or its error.
caf::expected<float> add_up_once(const program_place& place, const gpu_ref<float>& ref,
                                 const request_options& options, world_status& view) {
  auto d = place.rank.where();
  if (auto filled = d.fill(ref, static_cast<float>(place.rank.index() + 1)).wait(); !filled)
    return filled.error();
  auto done = place.rank.all_reduce(ref, reduce_op::sum, options).wait();
  if (!done)
    return done.error();
  view.membership = done->membership;
  auto got = d.download(ref);
  if (!got)
    return got.error();
  if (*got != std::vector<float>(elements, got->front()))
    return make_error(errc::internal, "not all elements are the same");
  return got->front();
}

/// Returns true if the actor got the message to end.
bool is_over(caf::blocking_actor* self) {
  bool over = false;
  self->receive([&](const program_message&) { over = true; },
                caf::after(std::chrono::seconds(0)) >> [] {});
  return over;
}

/// Reports each message, until it gets an empty one.
caf::actor spawn_echo(const program_place& place) {
  return place.system.spawn([place](caf::blocking_actor* self) {
    for (bool more = true; more;)
      self->receive([&](const program_message& x) {
        more = !x.bytes.empty();
        if (more && place.report(x.bytes))
          more = false;
      });
  });
}

/// The last one is found by the kernels of direct collectives alone.
int different_calls() { return on_cuda() ? 5 : 4; }

/// Makes a call of one of two ranks that does not match that of the other one.
pending<collective_done> call_differently(const program_place& place, int which,
                                          const gpu_ref<float>& small, const gpu_ref<float>& large,
                                          const request_options& options) {
  const auto& rank = place.rank;
  const bool first = rank.index() == 0;
  switch (which) {
  case 0: // two sizes
    return rank.all_reduce(first ? small : large, reduce_op::sum, options);
  case 1: // two operations
    return rank.all_reduce(large, first ? reduce_op::sum : reduce_op::max, options);
  case 2:
    return first ? rank.barrier(options) : rank.all_reduce(small, options);
  case 3: // a message of another size; a smaller one is over when the receiver's device has it
    return first ? rank.send(large, 1, options) : rank.recv(small, 0, options);
  default:
    return first ? rank.send(large, 1, options) : rank.all_reduce(large, options);
  }
}

/// Makes such a call, and then one that matches, with the next membership.
caf::error make_different_calls(const program_place& place, int which) {
  auto d = place.rank.where();
  const std::size_t large_count = (std::size_t{1} << 20) + 5;
  auto small = d.allocate<float>(elements);
  auto large = d.allocate<float>(large_count);
  if (!small || !large)
    return make_error(errc::internal, "no memory");
  for (auto& x : {*small, *large})
    if (auto filled = d.fill(x, 1.0F).wait(); !filled)
      return filled.error();
  auto view = place.rank.status();
  const auto before = view.membership;
  const auto done = call_differently(place, which, *small, *large, {.membership = before}).wait();
  if (code_of(error_of(done)) != errc::collective_mismatch)
    return make_error(errc::internal, "call " + std::to_string(which) + " was answered with " +
                                          (done ? "success" : describe(done.error())));
  for (caf::expected<float> sum = done.error(); !sum;) {
    view = place.rank.status();
    if (view.membership != before)
      sum = add_up_once(place, *small, {.membership = view.membership}, view);
    if (sum && *sum != sum_of(view.members))
      return make_error(errc::internal, "a wrong sum");
    if (!sum && code_of(sum.error()) == errc::unavailable)
      return sum.error();
  }
  return {};
}

const bool programs_registered = [] {
  // Makes as many sums as its arguments say, and checks each.
  auto error = register_program("so many sums", [](const program_place& place) {
    return place.system.spawn([place](caf::blocking_actor* self) {
      auto ref = place.rank.where().allocate<float>(elements);
      if (!ref)
        return self->fail_state(ref.error());
      auto view = place.rank.status();
      for (auto left = must(from_bytes<std::uint32_t>(place.arguments)); left > 0; --left) {
        auto sum = add_up_once(place, *ref, {}, view);
        if (!sum)
          return self->fail_state(sum.error());
        if (*sum != sum_of(view.members))
          return self->fail_state(make_error(errc::internal, "a wrong sum"));
      }
      if (auto lost = place.report(to_bytes<std::int32_t>(place.rank.index())))
        self->fail_state(lost);
    });
  });
  // Sums until it gets a message. Repeats a sum with the next view if a rank was lost.
  if (!error)
    error = register_program("sums for ever", [](const program_place& place) {
      return place.system.spawn([place](caf::blocking_actor* self) {
        auto ref = place.rank.where().allocate<float>(elements);
        if (!ref)
          return self->fail_state(ref.error());
        std::uint64_t right = 0;
        while (!is_over(self)) {
          auto view = place.rank.status();
          const request_options options{.membership = view.membership, .allow_shrunk = true};
          auto sum = add_up_once(place, *ref, options, view);
          if (!sum) {
            auto code = code_of(sum.error());
            if (code == errc::unavailable)
              return; // the world has ended
            if (code != errc::membership_changed && !is_loss(sum.error()))
              return self->fail_state(sum.error());
            continue;
          }
          if (*sum != sum_of(view.members))
            return self->fail_state(
                make_error(errc::internal, "the sum " + std::to_string(*sum) + " of " +
                                               std::to_string(view.members.size())));
          if (++right % 8 == 0)
            static_cast<void>(place.report(to_bytes(right)));
        }
      });
    });
  // Sends its requests as messages without waiting, and checks only the downloads.
  if (!error)
    error = register_program("messages in order", [](const program_place& place) {
      return place.system.spawn([place](caf::blocking_actor* self) {
        constexpr int rounds = 100;
        constexpr int in_flight = 10;
        auto d = place.rank.where();
        auto ref = d.allocate<float>(elements);
        if (!ref)
          return self->fail_state(ref.error());
        const auto mine = static_cast<float>(place.rank.index() + 1);
        caf::error why;
        for (int i = 0; i < rounds && !why; ++i) {
          std::vector<decltype(request(self, d, download{}, patience))> looks;
          for (int k = 0; k < in_flight; ++k) {
            const auto value = mine * static_cast<float>(i + k);
            static_cast<void>(request(self, d, fill{*ref, value}, patience));
            static_cast<void>(request(self, place.rank,
                                      all_reduce{{*ref}, {}, reduce_op::sum, {}, {}}, patience));
            looks.push_back(request(self, d, download{*ref, {}}, patience));
          }
          const auto sum = sum_of(place.rank.status().members);
          for (int k = 0; k < in_flight; ++k)
            std::move(looks[static_cast<std::size_t>(k)])
                .receive(
                    [&](const host_buffer& got) {
                      auto all = got.as<float>();
                      if (std::vector<float>{all.begin(), all.end()} !=
                          std::vector<float>(elements, sum * static_cast<float>(i + k)))
                        why = make_error(errc::internal, "a wrong sum");
                    },
                    [&](const caf::error& x) { why = x; });
        }
        if (why)
          self->fail_state(why);
      });
    });
  // Rank 0 often sets a deadline so short that its call is not done. The sum identifies the ranks'
  // calls, and all must be of the same call. Runs until it gets a message.
  if (!error)
    error = register_program("in haste", [](const program_place& place) {
      return place.system.spawn([place](caf::blocking_actor* self) {
        auto d = place.rank.where();
        auto ref = d.allocate<std::int32_t>(elements);
        if (!ref)
          return self->fail_state(ref.error());
        std::mt19937_64 random{7};
        std::uint64_t membership = 0;
        std::int32_t call = 0; // of this membership
        std::uint64_t right = 0;
        const auto ranks = static_cast<std::int32_t>(place.rank.size());
        while (!is_over(self)) {
          if (auto now = place.rank.status().membership; std::exchange(membership, now) != now)
            call = 0;
          const auto value = static_cast<std::int32_t>(membership % 1000) * 100'000 + call;
          if (auto filled = d.fill(*ref, value).wait(); !filled)
            return self->fail_state(filled.error());
          request_options options{.membership = membership};
          if (place.rank.index() == 0 && chance(random, 0.1))
            options.deadline = std::chrono::microseconds{pick(random, 0, 100)} - 1us;
          auto done = place.rank.all_reduce(*ref, reduce_op::sum, options).wait();
          ++call;
          if (code_of(error_of(done)) == errc::unavailable)
            return; // the world has ended
          auto got = done ? d.download(*ref) : done.error();
          if (!got)
            continue;
          if (*got != std::vector<std::int32_t>(elements, ranks * value))
            return self->fail_state(
                make_error(errc::internal, "the sum " + std::to_string(got->front()) + " and not " +
                                               std::to_string(ranks * value)));
          if (++right % 8 == 0)
            static_cast<void>(place.report(to_bytes(membership)));
        }
      });
    });
  // Reports which way a sum goes.
  if (!error)
    error = register_program("tells its way", [](const program_place& place) {
      return place.system.spawn([place](caf::blocking_actor* self) {
        auto ref = place.rank.where().allocate<float>(elements);
        if (!ref)
          return self->fail_state(ref.error());
        auto filled = place.rank.where().fill(*ref, 1.0F).wait();
        auto done = place.rank.all_reduce(*ref).wait();
        if (!filled || !done)
          return self->fail_state(filled ? done.error() : filled.error());
        if (auto lost = place.report(to_bytes(done->way)))
          self->fail_state(lost);
      });
    });
  // Makes calls that do not match those of the other rank, each followed by one that does.
  if (!error)
    error = register_program("different calls", [](const program_place& place) {
      return place.system.spawn([place](caf::blocking_actor* self) {
        for (int i = 0; i < 3 * different_calls(); ++i)
          if (auto why = make_different_calls(place, i % different_calls()))
            return self->fail_state(why);
      });
    });
  // Makes calls that name no membership and ignores their results. One call is refused at once. At
  // the end each readable sum must be correct, and the last one must not be readable.
  if (!error)
    error = register_program("looks at the end", [](const program_place& place) {
      return place.system.spawn([place](caf::blocking_actor* self) {
        constexpr std::int32_t steps = 8;
        auto d = place.rank.where();
        std::vector<gpu_ref<std::int32_t>> refs;
        for (std::int32_t i = 0; i < steps; ++i) {
          auto ref = d.allocate<std::int32_t>(1);
          if (!ref)
            return self->fail_state(ref.error());
          refs.push_back(*ref);
          d.fill(*ref, i);
          request_options options;
          if (place.rank.index() == 0 && i == 2)
            options.deadline = -1ns;
          place.rank.all_reduce(*ref, reduce_op::sum, options);
        }
        for (std::int32_t i = 0; i < steps; ++i)
          if (auto got = d.download(refs[static_cast<std::size_t>(i)]);
              got && got->front() != i * static_cast<std::int32_t>(place.rank.size()))
            return self->fail_state(make_error(errc::internal, "step " + std::to_string(i) +
                                                                   " has the sum " +
                                                                   std::to_string(got->front())));
        if (d.download(refs.back()))
          self->fail_state(make_error(errc::internal, "its last answer does not say it"));
      });
    });
  // Receives broadcasts of rank 0 until it gets a message. Reports once that rank 0 is missing.
  if (!error)
    error = register_program("hears rank 0", [](const program_place& place) {
      return place.system.spawn([place](caf::blocking_actor* self) {
        auto ref = place.rank.where().allocate<float>(elements);
        if (!ref)
          return self->fail_state(ref.error());
        bool told = false;
        while (!is_over(self)) {
          const request_options options{.membership = place.rank.status().membership,
                                        .allow_shrunk = true};
          auto done = place.rank.broadcast(*ref, 0, options).wait();
          if (done || code_of(done.error()) == errc::membership_changed || is_loss(done.error()))
            continue;
          auto why = failure_of(done.error());
          if (!why || why->code != errc::unavailable || why->rank != 0)
            return self->fail_state(done.error());
          if (!std::exchange(told, true))
            static_cast<void>(place.report(to_bytes(place.rank.index())));
        }
      });
    });
  if (!error)
    error = register_program("reports, then makes a file", [](const program_place& place) {
      return place.system.spawn([place](caf::blocking_actor* self) {
        for (std::uint8_t i : {1, 2})
          if (auto lost = place.report({i}))
            return self->fail_state(lost);
        const std::string name{place.arguments.begin(), place.arguments.end()};
        std::ofstream{name + std::to_string(place.rank.index())};
        self->receive([](const program_message&) {});
      });
    });
  // Reports as much as allowed, after an attempt with more. Ends with a long text after a message.
  if (!error)
    error = register_program("says much", [](const program_place& place) {
      return place.system.spawn([place](caf::blocking_actor* self) {
        auto refused = place.report(std::vector<std::uint8_t>(most_program_bytes + 1));
        if (code_of(refused) != errc::invalid_argument)
          return self->fail_state(make_error(errc::internal, "a report of any length was taken"));
        if (auto lost = place.report(std::vector<std::uint8_t>(most_program_bytes, 7)))
          return self->fail_state(lost);
        std::size_t got = 0;
        self->receive([&](const program_message& x) { got = x.bytes.size(); });
        self->fail_state(
            make_error(errc::unavailable, std::to_string(got) + std::string(200'000, '!')));
      });
    });
  // Sends more to each rank and to itself than is buffered before the recv.
  if (!error)
    error = register_program("all to all", [](const program_place& place) {
      return place.system.spawn([place](caf::blocking_actor* self) {
        constexpr std::size_t count = 1 << 22;
        constexpr int rounds = 3;
        auto d = place.rank.where();
        auto out = d.allocate<float>(count);
        if (!out)
          return self->fail_state(out.error());
        if (auto filled = d.fill(*out, static_cast<float>(place.rank.index() + 1)).wait(); !filled)
          return self->fail_state(filled.error());
        std::vector<message_end> sends;
        std::vector<message_end> recvs;
        std::vector<gpu_ref<float>> in;
        for (std::int32_t peer = 0; peer < static_cast<std::int32_t>(place.rank.size()); ++peer) {
          auto ref = d.allocate<float>(count);
          if (!ref)
            return self->fail_state(ref.error());
          in.push_back(*ref);
          sends.push_back({peer, *out});
          recvs.push_back({peer, in.back()});
        }
        for (int i = 0; i < rounds; ++i) {
          for (auto& ref : in)
            if (auto filled = d.fill(ref, 0.0f).wait(); !filled)
              return self->fail_state(filled.error());
          if (auto done = place.rank.exchange(sends, recvs).wait(); !done)
            return self->fail_state(done.error());
          for (std::size_t peer = 0; peer < in.size(); ++peer) {
            auto got = d.download(in[peer]);
            if (!got)
              return self->fail_state(got.error());
            if (*got != std::vector<float>(count, static_cast<float>(peer + 1)))
              return self->fail_state(
                  make_error(errc::internal, "not what rank " + std::to_string(peer) + " sent"));
          }
        }
        if (auto nothing = place.rank.exchange({}, {}).wait(); !nothing)
          return self->fail_state(nothing.error());
        for (std::size_t peer = 0; peer <= place.rank.size(); ++peer) {
          const auto there = place.rank.whole().device_of(peer);
          const bool own = peer == static_cast<std::size_t>(place.rank.index());
          const auto filled = there.fill(in[0], 0.0f).wait();
          if ((there.ordinal() >= 0) != own || static_cast<bool>(filled) != own)
            return self->fail_state(
                make_error(errc::internal, "the device of rank " + std::to_string(peer)));
        }
        const auto step = place.rank.whole().record({}, {});
        if (step || code_of(step.error()) != errc::not_supported)
          return self->fail_state(make_error(errc::internal, "a program has recorded a step"));
        const auto split = place.rank.whole().split("a", std::vector<std::int32_t>(in.size()));
        if (split || code_of(split.error()) != errc::not_supported)
          return self->fail_state(make_error(errc::internal, "a program has split its world"));
        const auto alone = place.rank.exchange({{place.rank.index(), *out}}, {}).wait();
        if (alone || code_of(alone.error()) != errc::invalid_argument)
          self->fail_state(make_error(errc::internal, "half a message was taken"));
      });
    });
  if (!error)
    error = register_program("echo", spawn_echo);
  // As "echo", but starts when the pipe that its arguments name is opened for writing.
  if (!error)
    error = register_program("begins late", [](const program_place& place) {
      const std::string path{place.arguments.begin(), place.arguments.end()};
      const detail::file_descriptor pipe{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
      return pipe ? spawn_echo(place) : caf::actor{};
    });
  if (!error)
    error = register_program(
        "throws", [](const program_place&) -> caf::actor { throw std::runtime_error("no luck"); });
  if (!error)
    error = register_program("throws in a blocking actor", [](const program_place& place) {
      return spawn_program<caf::detached>(place, [](caf::blocking_actor* self) {
        self->receive([](const program_message&) { throw std::runtime_error("out of luck"); });
      });
    });
  if (!error)
    error = register_program("throws in a handler", [](const program_place& place) {
      return spawn_program(place, [](caf::event_based_actor*) -> caf::behavior {
        return {[](const program_message&) { throw std::runtime_error("out of luck"); }};
      });
    });
  return !error;
}();

class Programs : public ProgramsTest {
protected:
  void SetUp() override { ASSERT_TRUE(programs_registered); }
};

/// Returns the reports of a rank.
std::vector<std::vector<std::uint8_t>> bytes_of(const std::vector<program_report>& all, int rank) {
  std::vector<std::vector<std::uint8_t>> result;
  for (auto& x : all)
    if (x.rank == rank)
      result.push_back(x.bytes);
  return result;
}

TEST_F(Programs, SumBesideTheirDevices) {
  TROUPE_NEEDS_DEVICES(2);
  start(2, {"so many sums", to_bytes(std::uint32_t{200})});
  ASSERT_TRUE(until([this] { return ended_.size() == 2; }));
  EXPECT_TRUE(nobody_failed());
  ASSERT_EQ(reports_.size(), 2u);
  for (auto& x : reports_)
    EXPECT_EQ(must(from_bytes<std::int32_t>(x.bytes)), x.rank);
  EXPECT_NE(reports_[0].rank, reports_[1].rank);
}

TEST_F(Programs, ReportToTheFirstSubscriberWhatCameBeforeIt) {
  TROUPE_NEEDS_DEVICES(2);
  system_.emplace(in_worker_processes(2));
  self_.emplace(system_->get());
  const folder made;
  const auto name = made.file("rank");
  const auto world = must(world::open(
      *system_, {.devices = system_->ordinals(),
                 .program = {"reports, then makes a file", {name.begin(), name.end()}}}));
  for (std::size_t i = 0; i < world.size(); ++i) {
    ASSERT_TRUE(eventually([&] { return std::filesystem::exists(name + std::to_string(i)); }));
    // The answer comes behind the reports.
    must(answer_of(must(device::open(*system_, system_->ordinals()[i])).stats()));
  }
  detail::send(*self_, world.actor(), subscribe{});
  ASSERT_TRUE(until_more_reports(2 * world.size()));
  for (int rank : {0, 1})
    EXPECT_EQ(bytes_of(reports_, rank), (std::vector<std::vector<std::uint8_t>>{{1}, {2}}));
  EXPECT_TRUE(ended_.empty());
  EXPECT_EQ(view_.phase, world_phase::ready);
  // A second subscriber gets nothing that is old.
  caf::scoped_actor second{system_->get()};
  detail::send(second, world.actor(), subscribe{});
  detail::send(*self_, world.actor(), program_message{});
  ASSERT_TRUE(until([this] { return ended_.size() == 2; }));
  std::size_t ended = 0;
  while (ended < 2)
    second->receive([](const world_status&) {}, [&](const program_ended&) { ++ended; },
                    [](const program_report&) { FAIL(); });
}

TEST_F(Programs, KeepTheOrderOfTheirMessages) {
  TROUPE_NEEDS_DEVICES(2);
  start(2, {"messages in order", {}});
  ASSERT_TRUE(until([this] { return ended_.size() == 2; }));
  EXPECT_TRUE(nobody_failed());
}

// If a rank's call is not done, the other ranks' calls do not match its next call instead.
TEST_F(Programs, StayInStepWhenACallIsNotDone) {
  TROUPE_NEEDS_DEVICES(2);
  start(3, {"in haste", {}});
  std::set<std::uint64_t> memberships;
  ASSERT_TRUE(until([&] {
    for (auto& x : reports_)
      memberships.insert(must(from_bytes<std::uint64_t>(x.bytes)));
    return memberships.size() >= 10;
  }));
  EXPECT_TRUE(nobody_failed());
}

TEST_F(Programs, ThatLookAtTheEndAloneAreToldThatACallWasNotDone) {
  TROUPE_NEEDS_DEVICES(2);
  for (int i = 0; i < 5; ++i) {
    start(2, {"looks at the end", {}});
    ASSERT_TRUE(until([this] { return ended_.size() == 2; }));
    EXPECT_TRUE(nobody_failed());
    TearDown();
    ended_.clear();
    system_.reset();
  }
}

// All of them send first.
TEST_F(Programs, ExchangeMessages) {
  TROUPE_NEEDS_DEVICES(2);
  start(3, {"all to all", {}});
  ASSERT_TRUE(until([this] { return ended_.size() == system_->ordinals().size(); }));
  EXPECT_TRUE(nobody_failed());
}

TEST_F(Programs, DoDirectCollectivesByDefault) {
  TROUPE_NEEDS_DEVICES(2);
  collectives_ = collectives_policy::automatic;
  start(2, {"tells its way", {}});
  ASSERT_TRUE(until_more_reports(2));
  for (auto& x : reports_)
    EXPECT_EQ(must(from_bytes<collective_way>(x.bytes)), collective_way::direct);
}

TEST_F(Programs, WhoseCallsDoNotMatchAreTold) {
  TROUPE_NEEDS_DEVICES(2);
  if (on_cuda() && collectives_of_run() == collectives_policy::nccl)
    GTEST_SKIP() << "NCCL does not compare calls";
  start(2, {"different calls", {}});
  ASSERT_TRUE(until([this] { return ended_.size() == 2; }));
  EXPECT_TRUE(nobody_failed());
}

TEST_F(Programs, LeaveTheParentNoCollectives) {
  TROUPE_NEEDS_DEVICES(2);
  start(2, {"sums for ever", {}});
  ASSERT_TRUE(until_more_reports(2));
  for (auto error :
       {error_of(ask<collective_done>(*system_, actor_, barrier{})),
        error_of(ask<collective_done>(*system_, actor_, rank_local{0, barrier{}, {}})),
        error_of(ask<collective_done>(*system_, actor_, exchange{0, {{1, {}}}, {}, {}}))})
    EXPECT_EQ(code_of(error), errc::not_supported) << describe(error);
  // The parent can use its devices too.
  EXPECT_TRUE(works(must(device::open(*system_, 0))));
}

TEST_F(Programs, GetMessages) {
  TROUPE_NEEDS_DEVICES(2);
  world_limits limits; // one rank may have started a sum that the others do not call
  limits.stall_limit = 500ms;
  start(2, {"sums for ever", {}}, limits);
  ASSERT_TRUE(until_more_reports(2));
  detail::send(*self_, actor_, program_message{-1, {1}});
  ASSERT_TRUE(until([this] { return ended_.size() == 2; }));
  EXPECT_TRUE(nobody_failed());
  caf::scoped_actor asker{system_->get()};
  auto refused = detail::ask<void>(asker, actor_, patience, program_message{7, {1}});
  EXPECT_EQ(code_of(error_of(refused)), errc::invalid_argument);
}

TEST_F(Programs, GetWhatWasSentBeforeTheyBegan) {
  TROUPE_NEEDS_DEVICES(2);
  const auto ways = std::make_shared<doors>();
  using all = std::vector<std::vector<std::uint8_t>>;
  world_limits limits;
  limits.waiting_limit = 3;
  caf::error too_many;
  {
    const closed_door held{ways->builds};
    start(in_worker_processes(2, ways), {"echo", {}}, limits);
    caf::scoped_actor asker{system_->get()};
    auto send = [&](const program_message& x) {
      return error_of(detail::ask<void>(asker, actor_, patience, x));
    };
    EXPECT_FALSE(send({-1, {1}}));
    EXPECT_FALSE(send({1, {2}}));
    EXPECT_FALSE(send({-1, {3}}));
    EXPECT_EQ(code_of(send({-1, {4}})), errc::overloaded); // no rank gets it
    EXPECT_FALSE(send({0, {5}}));
  }
  ASSERT_TRUE(until_more_reports(6));
  EXPECT_EQ(bytes_of(reports_, 0), (all{{1}, {3}, {5}}));
  EXPECT_EQ(bytes_of(reports_, 1), (all{{1}, {2}, {3}}));
  reports_.clear();
  {
    const closed_door held{ways->devices};
    EXPECT_EQ(code_of(kill(0)), errc::worker_lost);
    detail::send(*self_, actor_, program_message{-1, {6}});
    ASSERT_TRUE(until_more_reports(1));
    EXPECT_EQ(reports_.front().rank, 1);
  }
  ASSERT_TRUE(until_more_reports(1));
  EXPECT_EQ(bytes_of(reports_, 0), (all{{6}}));
  detail::send(*self_, actor_, program_message{-1, {}});
  ASSERT_TRUE(until([this] { return ended_.size() == 2; }));
  EXPECT_TRUE(nobody_failed());
}

// Neither the parent nor the programs' processes wait for them.
TEST_F(Programs, MayTakeTheirTimeToBegin) {
  TROUPE_NEEDS_DEVICES(2);
  const auto path = ::testing::TempDir() + "troupe-begins-late-" + std::to_string(::getpid());
  ASSERT_EQ(::mkfifo(path.c_str(), S_IRUSR | S_IWUSR), 0);
  start(2, {"begins late", {path.begin(), path.end()}});
  ASSERT_TRUE(until([this] { return view_.phase == world_phase::ready; }));
  auto d = must(device::open(*system_, 0));
  EXPECT_TRUE(d.allocate_pinned(1 << 20, {.deadline = patience})); // its process maps it
  EXPECT_TRUE(works(d));
  constexpr std::uint8_t many = 100;
  constexpr std::size_t size = 50'000; // a few of them would fill the connection
  caf::scoped_actor asker{system_->get()};
  for (std::uint8_t i = 0; i < many; ++i) {
    const program_message x{0, std::vector<std::uint8_t>(size, i)};
    EXPECT_FALSE(error_of(detail::ask<void>(asker, actor_, patience, x)));
  }
  EXPECT_TRUE(reports_.empty());
  const detail::file_descriptor pipe{::open(path.c_str(), O_RDWR | O_CLOEXEC)};
  ASSERT_TRUE(pipe);
  ASSERT_TRUE(until_more_reports(many));
  for (std::uint8_t i = 0; i < many; ++i)
    EXPECT_EQ(reports_[i].bytes, std::vector<std::uint8_t>(size, i));
  detail::send(*self_, actor_, program_message{-1, {}});
  ASSERT_TRUE(until([this] { return ended_.size() == 2; }));
  EXPECT_TRUE(nobody_failed());
  EXPECT_EQ(::unlink(path.c_str()), 0);
}

TEST_F(Programs, AreToldWhichRankIsGone) {
  TROUPE_NEEDS_DEVICES(2);
  world_limits limits;
  limits.standby = standby_policy::communicators;
  limits.on_loss = loss_policy::shrink;
  const auto ways = std::make_shared<doors>();
  start(in_worker_processes(3, ways), {"hears rank 0", {}}, limits);
  const auto n = system_->ordinals().size();
  auto is_full = [&] { return view_.phase == world_phase::ready && view_.members.size() == n; };
  ASSERT_TRUE(until([&] { return is_full() && view_.standby_ready; }));
  {
    const closed_door held{ways->devices};
    EXPECT_EQ(code_of(kill(0)), errc::worker_lost);
    ASSERT_TRUE(until_more_reports(n - 1));
  }
  ASSERT_TRUE(until([&] { return is_full() && view_.members[0].incarnation == 2; }));
  for (std::size_t i = 1; i < n; ++i)
    EXPECT_EQ(view_.members[i].incarnation, 1u) << "rank " << i;
  EXPECT_TRUE(nobody_failed());
}

TEST_F(Programs, RefuseWhatIsTooLong) {
  start(1, {"says much", std::vector<std::uint8_t>(most_program_bytes - 100)});
  ASSERT_TRUE(until_more_reports(1));
  EXPECT_EQ(reports_.front().bytes, std::vector<std::uint8_t>(most_program_bytes, 7));
  caf::scoped_actor asker{system_->get()};
  const program_message much{0, std::vector<std::uint8_t>(most_program_bytes)};
  auto more = much;
  more.bytes.push_back(0);
  EXPECT_EQ(code_of(error_of(detail::ask<void>(asker, actor_, patience, more))),
            errc::invalid_argument);
  EXPECT_FALSE(error_of(detail::ask<void>(asker, actor_, patience, much)));
  ASSERT_TRUE(until([this] { return ended_.size() == 1; }));
  auto why = failure_of(ended_.front().why);
  ASSERT_TRUE(why) << describe(ended_.front().why);
  EXPECT_EQ(why->code, errc::unavailable);
  EXPECT_TRUE(why->detail.starts_with(std::to_string(most_program_bytes) + "!")) << why->detail;

  world_config config;
  config.devices = system_->ordinals();
  config.program = {"says much", more.bytes};
  EXPECT_EQ(code_of(spawn_nccl_world(*system_, config).error()), errc::invalid_argument);
}

struct program_case {
  standby_policy standby;
  loss_policy on_loss;
};

class ProgramsGoOn : public Programs, public ::testing::WithParamInterface<program_case> {};

INSTANTIATE_TEST_SUITE_P(
    With, ProgramsGoOn,
    ::testing::Values(program_case{standby_policy::full, loss_policy::failover},
                      program_case{standby_policy::communicators, loss_policy::shrink},
                      program_case{standby_policy::none, loss_policy::rebuild}),
    [](auto& x) { return std::string{to_string(x.param.on_loss)}; });

TEST_P(ProgramsGoOn, AfterKills) {
  TROUPE_NEEDS_DEVICES(2);
  constexpr int kills = 5;
  world_limits limits;
  limits.standby = GetParam().standby;
  limits.on_loss = GetParam().on_loss;
  start(3, {"sums for ever", {}}, limits);
  const auto n = system_->ordinals().size();
  auto is_full = [&] { return view_.phase == world_phase::ready && view_.members.size() == n; };
  std::vector<std::uint64_t> incarnations(n, 1); // of the ranks' devices: each kill adds one
  for (int i = 0; i < kills; ++i) {
    ASSERT_TRUE(until([&] {
      return is_full() && (GetParam().standby == standby_policy::none || view_.standby_ready);
    }));
    ASSERT_TRUE(until_more_reports(6)) << "after " << i << " kills";
    for (auto& x : view_.members)
      EXPECT_EQ(x.incarnation, incarnations[static_cast<std::size_t>(x.rank)])
          << "rank " << x.rank << " after " << i << " kills";
    const auto epoch = view_.epoch;
    const auto victim = static_cast<std::size_t>(i) % n;
    EXPECT_EQ(code_of(kill(static_cast<int>(victim))), errc::worker_lost);
    ++incarnations[victim];
    ASSERT_TRUE(until([&] { return view_.phase == world_phase::ready && view_.epoch > epoch; }));
  }
  ASSERT_TRUE(until(is_full));
  ASSERT_TRUE(until_more_reports(6));
  for (auto& x : view_.members)
    EXPECT_EQ(x.incarnation, incarnations[static_cast<std::size_t>(x.rank)]) << "rank " << x.rank;
  EXPECT_TRUE(nobody_failed());
}

TEST_F(Programs, ThatAreNotThereAreTold) {
  start(1, {"unregistered", {}});
  ASSERT_TRUE(until([&] { return ended_.size() == 1; }));
  EXPECT_EQ(code_of(ended_.front().why), errc::invalid_argument) << describe(ended_.front().why);
}

/// Sends a message to a program and returns its error.
caf::error answer_to(test_system& system, const caf::actor& world, std::int32_t rank) {
  return error_of(ask<void>(system, world, program_message{rank, {1}}));
}

void expect_text(const caf::error& why, const std::vector<std::string>& wanted) {
  EXPECT_EQ(code_of(why), errc::unavailable);
  for (const auto& x : wanted)
    EXPECT_NE(describe(why).find(x), std::string::npos) << x << " is not in: " << describe(why);
}

TEST_F(Programs, ThatHaveEndedSayWhyToThoseThatAsk) {
  log_lines lines;
  start(1, {"unregistered", {}});
  ASSERT_TRUE(until([&] { return ended_.size() == 1; }));
  for (const std::int32_t rank : {0, -1})
    expect_text(answer_to(*system_, actor_, rank),
                {"\"unregistered\" of rank 0 has ended", "no program is registered"});
  EXPECT_TRUE(lines.say("no program is registered in the worker as \"unregistered\""));
}

TEST_F(Programs, WhoseFactoriesThrowSayWhyToThoseThatAsk) {
  start(1, {"throws", {}});
  ASSERT_TRUE(until([&] { return ended_.size() == 1; }));
  expect_text(answer_to(*system_, actor_, 0),
              {"\"throws\" of rank 0 has ended", "the program's factory threw: no luck"});
}

TEST_F(Programs, TellWhatTheirActorsHaveThrown) {
  for (const auto* name : {"throws in a blocking actor", "throws in a handler"}) {
    start(1, {name, {}});
    ASSERT_TRUE(until([this] { return view_.phase == world_phase::ready; }));
    must(ask<void>(*system_, actor_, program_message{0, {1}}));
    ASSERT_TRUE(until([&] { return ended_.size() == 1; }));
    expect_text(ended_.front().why, {"the program's actor threw: out of luck"});
    expect_text(answer_to(*system_, actor_, 0), {name, "out of luck"});
    ended_.clear();
    TearDown();
    view_ = {};
  }
}

TEST_F(Programs, AreAskedAgainWhenTheyAreBegunAnew) {
  start(1, {"echo", {}});
  ASSERT_TRUE(until([this] { return view_.phase == world_phase::ready; }));
  must(ask<void>(*system_, actor_, program_message{0, {}})); // ends the program
  ASSERT_TRUE(until([&] { return ended_.size() == 1; }));
  expect_text(answer_to(*system_, actor_, 0), {"\"echo\" of rank 0 has ended", "it was done"});
  EXPECT_EQ(code_of(kill(0)), errc::worker_lost);
  ASSERT_TRUE(until(
      [this] { return view_.phase == world_phase::ready && view_.members[0].incarnation == 2; }));
  must(ask<void>(*system_, actor_, program_message{0, {7}}));
  EXPECT_TRUE(until_more_reports(1));
}

TEST_F(Programs, WhoseFactoriesThrowAreTold) {
  start(1, {"throws", {}});
  ASSERT_TRUE(until([&] { return ended_.size() == 1; }));
  EXPECT_EQ(code_of(ended_.front().why), errc::unavailable) << describe(ended_.front().why);
}

/// Sends notes as if they came from the process of a device.
class ventriloquist final : public forwarding_backend {
public:
  using forwarding_backend::forwarding_backend;
  void set_listener(
      std::function<void(int ordinal, std::span<const std::byte> what)> f) noexcept override {
    to_ = f;
    forwarding_backend::set_listener(std::move(f));
  }
  void say(int ordinal, std::span<const std::byte> what) const {
    to_(ordinal, detail::make_note(detail::note_kind::program, what));
  }

private:
  std::function<void(int, std::span<const std::byte>)> to_;
};

TEST_F(Programs, WhoseProcessSaysNonsenseLoseItAlone) {
  TROUPE_NEEDS_DEVICES(2);
  std::shared_ptr<ventriloquist> voice;
  start({.devices = 2,
         .wrap =
             [&](std::shared_ptr<backend>) {
               voice = std::make_shared<ventriloquist>(make_workers(2));
               return voice;
             }},
        {"echo", {}});
  ASSERT_TRUE(until([this] { return view_.phase == world_phase::ready; }));
  const other_memory kept{must(device::open(*system_, 1))};
  std::vector<std::byte> long_text(161, std::byte{0xff});
  detail::program_note of_another;
  of_another.what = detail::program_note::kind::ready;
  of_another.world = 1;
  of_another.rank = 1; // a rank of the other device
  const auto about_another = to_bytes(of_another);
  std::uint64_t incarnation = view_.members[0].incarnation;
  for (const auto& nonsense : {std::span<const std::byte>{long_text}, {about_another}}) {
    voice->say(0, nonsense);
    ++incarnation;
    ASSERT_TRUE(until([&] {
      return view_.phase == world_phase::ready && view_.members[0].incarnation == incarnation;
    }));
  }
  EXPECT_TRUE(kept.is_there());
  detail::send(*self_, actor_, program_message{-1, {}});
  ASSERT_TRUE(until([this] { return ended_.size() == 2; }));
}

TEST(ProgramsInProcess, AreNotSupported) {
  if (in_workers())
    GTEST_SKIP() << "about devices of this process";
  test_system system{{.devices = 1}};
  world_config config;
  config.devices = system.ordinals();
  config.program.name = "so many sums";
  EXPECT_EQ(code_of(error_of(spawn_nccl_world(system, config))), errc::not_supported);
}

} // namespace

} // namespace troupe::testing
