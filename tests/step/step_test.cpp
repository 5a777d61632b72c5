/// Recorded steps: what they run, over which buffers, and in which world.
#include "step/step_fixture.hpp"
#include "step/step_launches.hpp"
#include "support/folder.hpp"
#include "support/forwarding_backend.hpp"

#include <atomic>
#include <fstream>
#include <functional>
#include <iterator>
#include <string_view>
#include <thread>

namespace troupe::testing {

namespace {

/// Records y = f(x) on all ranks.
recording& map(recording& to, affine f, const buffer_name& x, const buffer_name& y) {
  return to.launch(affine_launch, to_bytes(f), {x}, {y});
}

TEST_F(Step, RunsItsRequestsInOrder) {
  recording r;
  r.fill("x", element{2});
  r.on(1).fill("x", element{5}).copy({"z", 0, 3}, {"x", 3, 3});
  map(r, {3, 1}, "x", "y");
  r.all_reduce("y");
  r.copy({"z", 6}, {"y", 6});
  auto x = filled(0), y = filled(0), z = filled(0);
  const auto step = must(w_.record(r, {{"x", x}, {"y", y}, {"z", z}}));
  EXPECT_EQ(step.size(), 6u);
  auto done = step.run();
  EXPECT_EQ(must(answer_of(done)).operation, done.number());
  EXPECT_NE(done.number(), 0u);
  EXPECT_TRUE(must(done.result()).ranks.empty());
  const auto sum = static_cast<element>(7 * (w_.size() - 1) + 16);
  EXPECT_EQ(content(y), same(sum));
  auto want = same(0);
  for (std::size_t rank = 0; rank < w_.size(); ++rank) {
    std::fill(want[rank].begin() + count / 2, want[rank].end(), sum);
    if (rank == 1)
      std::fill_n(want[rank].begin(), 3, element{5});
  }
  EXPECT_EQ(content(z), want);
}

/// Two sets of buffers with the same content: one for a step, one for single requests.
class StepOfCollectives : public Step {
protected:
  struct buffers {
    refs one, another, many, more;
  };

  buffers make(const std::vector<rows>& content) {
    buffers result{allocate(), allocate(), allocate(all()), allocate(all())};
    std::size_t i = 0;
    for (auto* x : {&result.one, &result.another, &result.many, &result.more})
      must(answer_of(w_.upload(*x, content[i++])));
    return result;
  }
  std::size_t all() const { return count * w_.size(); }

  /// Expects that a step leaves what single requests leave.
  void expect_same(const std::function<void(recording&)>& record,
                   const std::function<pending<collective_done>(const buffers&)>& request) {
    const std::vector<rows> inputs{random_rows(), random_rows(), random_rows(all()),
                                   random_rows(all())};
    const auto a = make(inputs), b = make(inputs);
    recording r;
    record(r);
    const auto step = must(
        w_.record(r, {{"one", a.one}, {"another", a.another}, {"many", a.many}, {"more", a.more}}));
    EXPECT_TRUE(is_ok(answer_of(step.run())));
    EXPECT_TRUE(is_ok(answer_of(request(b))));
    EXPECT_EQ(content(a.one), content(b.one));
    EXPECT_EQ(content(a.another), content(b.another));
    EXPECT_EQ(content(a.many), content(b.many));
    EXPECT_EQ(content(a.more), content(b.more));
  }
};

TEST_F(StepOfCollectives, ReducesAsSingleRequestsDo) {
  const int root = last();
  expect_same([](auto& r) { r.all_reduce("one", reduce_op::max); },
              [&](auto& b) { return w_.all_reduce(b.one, reduce_op::max); });
  expect_same([](auto& r) { r.all_reduce("one", "another"); },
              [&](auto& b) { return w_.all_reduce(b.one, b.another); });
  expect_same([=](auto& r) { r.reduce("one", root); },
              [&](auto& b) { return w_.reduce(b.one, root); });
  expect_same([=](auto& r) { r.reduce("one", "another", root, reduce_op::min); },
              [&](auto& b) { return w_.reduce(b.one, b.another[root], root, reduce_op::min); });
  expect_same([](auto& r) { r.reduce_scatter("many"); },
              [&](auto& b) { return w_.reduce_scatter(b.many); });
  expect_same([](auto& r) { r.reduce_scatter("many", "one"); },
              [&](auto& b) { return w_.reduce_scatter(b.many, b.one); });
  const std::vector<double> factors{2, 3, 5};
  expect_same(
      [&](auto& r) {
        r.run({.send = "one",
               .op = reduce_op::premul_sum,
               .factors = {factors.begin(), factors.begin() + last() + 1}});
      },
      [&](auto& b) {
        return w_.run(
            troupe::all_reduce{.send = any(b.one),
                               .op = reduce_op::premul_sum,
                               .factors = {factors.begin(), factors.begin() + last() + 1}});
      });
}

TEST_F(StepOfCollectives, MovesAsSingleRequestsDo) {
  const int root = last();
  expect_same([=](auto& r) { r.broadcast("one", root); },
              [&](auto& b) { return w_.broadcast(b.one, root); });
  expect_same([=](auto& r) { r.broadcast("one", "another", root); },
              [&](auto& b) { return w_.broadcast(b.one[root], b.another, root); });
  expect_same([](auto& r) { r.all_gather("many"); },
              [&](auto& b) { return w_.all_gather(b.many); });
  expect_same([](auto& r) { r.all_gather("one", "many"); },
              [&](auto& b) { return w_.all_gather(b.one, b.many); });
  expect_same([](auto& r) { r.all_to_all("many", "more"); },
              [&](auto& b) { return w_.all_to_all(b.many, b.more); });
  const std::vector counts(w_.size(), std::vector<std::uint64_t>(w_.size(), count));
  expect_same([&](auto& r) { r.all_to_all_v("many", "more", counts); },
              [&](auto& b) { return w_.all_to_all_v(b.many, b.more, counts); });
  expect_same([=](auto& r) { r.gather("one", "many", root); },
              [&](auto& b) { return w_.gather(b.one, b.many[root], root); });
  expect_same([=](auto& r) { r.scatter("many", "one", root); },
              [&](auto& b) { return w_.scatter(b.many[root], b.one, root); });
  expect_same([=](auto& r) { r.send_recv(0, {"one", 0, 5}, root, {"another", 5, 5}); },
              [&](auto& b) {
                return w_.send_recv(0, must(b.one[0].slice(0, 5)), root,
                                    must(b.another[root].slice(5, 5)));
              });
  expect_same([](auto& r) { r.barrier(); }, [&](auto&) { return w_.barrier(); });
}

TEST_F(StepOfCollectives, HasGroups) {
  const int root = last();
  recording calls;
  calls.send_recv(0, "one", root, "another").send_recv(root, "one", 0, "another");
  expect_same([&](auto& r) { r.group(calls); },
              [&](auto& b) {
                return w_.run(group{{troupe::send_recv{0, root, b.one[0], b.another[root], {}},
                                     troupe::send_recv{root, 0, b.one[root], b.another[0], {}}}});
              });
  recording r;
  r.barrier().group({});
  EXPECT_TRUE(is_ok(answer_of(must(w_.record(r, {})).run()))) << "a group without calls";
}

TEST_F(Step, WithoutRequestsIsDoneAtOnce) {
  const auto step = must(w_.record({}, {}));
  EXPECT_TRUE(is_ok(step.run().result()));
  EXPECT_TRUE(has_code(step.run({.deadline = -1s}).result(), errc::deadline_exceeded));
}

constexpr const char* on_gpus = "as its requests: the devices record no graphs";

TEST_F(Step, SaysHowItRuns) {
  const auto step = must(w_.record({}, {}));
  EXPECT_EQ(step.runs_as(), on_cuda() ? on_gpus : "as its requests: the devices are virtual");
}

/// To the program, GPUs in workers are devices without streams of CUDA, of the backend "cuda".
class named_cuda final : public forwarding_backend {
public:
  explicit named_cuda(std::shared_ptr<backend> inner) : forwarding_backend(std::move(inner)) {}
  std::string_view name() const noexcept override { return "cuda"; }
};

class StepOnGpusInWorkers : public Step {
protected:
  StepOnGpusInWorkers()
      : Step({.devices = 2, .wrap = [](std::shared_ptr<backend> inner) {
                return std::make_shared<named_cuda>(without_graphs(std::move(inner)));
              }}) {}
};

TEST_F(StepOnGpusInWorkers, SaysHowItRuns) {
  EXPECT_EQ(must(w_.record({}, {})).runs_as(), on_gpus);
}

/// Each run makes x = sum over all ranks r of 3 * x + r, with a device that is late at random.
TEST_F(Step, IsReplayedAThousandTimes) {
  constexpr std::size_t runs = 1000;
  recording r;
  for (int rank = 0; rank <= last(); ++rank)
    r.on(rank).launch(affine_launch, to_bytes(affine{3, static_cast<element>(rank)}), {"x"}, {"y"});
  r.on(1).launch(delay_launch, to_bytes(std::uint32_t{300}), {}, {});
  r.all_reduce("y").copy("x", "y");
  auto x = filled(1), y = allocate();
  const auto step = must(w_.record(r, {{"x", x}, {"y", y}}));
  std::vector<pending<step_done>> done;
  std::vector<pending<void>> seen;
  rows got(runs, row(count));
  for (std::size_t i = 0; i < runs; ++i) {
    done.push_back(step.run());
    const auto rank = i % w_.size();
    seen.push_back(w_.device_of(rank).download(x[rank], got[i]));
  }
  element want = 1;
  const auto ranks = static_cast<element>(w_.size());
  for (std::size_t i = 0; i < runs; ++i) {
    want = ranks * 3 * want + ranks * (ranks - 1) / 2;
    ASSERT_TRUE(is_ok(answer_of(done[i]))) << "run " << i;
    ASSERT_TRUE(is_ok(answer_of(seen[i]))) << "run " << i;
    ASSERT_EQ(got[i], row(count, want)) << "run " << i;
  }
}

/// Another thread writes to the buffer between the step's requests, and other threads run the step.
TEST_F(Step, LetsNoRequestOfAnotherThreadInBetween) {
  constexpr int runs = 300;
  recording r;
  map(r, {3, 1}, "x", "y");
  map(r, {1, 5}, "y", "z");
  r.copy("x", "z");
  auto x = filled(1), y = filled(0), z = filled(0);
  const auto step = must(w_.record(r, {{"x", x}, {"y", y}, {"z", z}}));
  std::atomic<bool> over{false};
  std::thread writer{[&] {
    while (!over) {
      must(answer_of(w_.fill(y, 1'000'000)));
      must(answer_of(w_.fill(z, 1'000'000)));
    }
  }};
  std::vector<std::thread> runners;
  for (int i = 0; i < 2; ++i)
    runners.emplace_back([&] {
      std::vector<pending<step_done>> done;
      for (int k = 0; k < runs; ++k)
        done.push_back(step.run());
      for (auto& one : done)
        EXPECT_TRUE(is_ok(answer_of(one)));
    });
  for (auto& one : runners)
    one.join();
  over = true;
  writer.join();
  element want = 1;
  for (int k = 0; k < 2 * runs; ++k)
    want = 3 * want + 1 + 5;
  EXPECT_EQ(content(x), same(want));
}

TEST_F(Step, RunsOverOtherBuffersAfterRebind) {
  recording r;
  r.fill({"x", 2, 3}, element{4}).all_reduce("x");
  auto a = filled(1), b = filled(2);
  const auto step = must(w_.record(r, {{"x", a}}));
  EXPECT_TRUE(is_ok(step.rebind("x", b)));
  EXPECT_TRUE(is_ok(answer_of(step.run())));
  EXPECT_EQ(content(a), same(1));
  const auto n = static_cast<element>(w_.size());
  auto want = same(2 * n);
  for (auto& x : want)
    std::fill_n(x.begin() + 2, 3, 4 * n);
  EXPECT_EQ(content(b), want);
  EXPECT_TRUE(is_ok(step.rebind("x", any(a)))) << "handles without a static type";
  EXPECT_TRUE(is_ok(answer_of(step.run())));
  EXPECT_EQ(content(b), want);
}

TEST_F(Step, KeepsItsBuffersIfRebindIsRefused) {
  recording r;
  r.all_reduce({"x", 1, 1}).copy("y", "x");
  auto x = filled(1), y = filled(0);
  const auto step = must(w_.record(r, {{"x", x}, {"y", y}}));
  EXPECT_TRUE(has_code(step.rebind("z", x), errc::invalid_argument));
  EXPECT_TRUE(has_code(step.rebind("x", refs{}), errc::invalid_argument));
  EXPECT_TRUE(has_code(step.rebind("x", allocate(count + 1)), errc::shape_mismatch));
  EXPECT_TRUE(has_code(step.rebind("x", must(w_.allocate<float>(count))), errc::shape_mismatch));
  EXPECT_TRUE(has_code(step.rebind("x", y), errc::invalid_argument)) << "the copy overlaps";
  auto other_order = x;
  std::swap(other_order[0], other_order[1]);
  EXPECT_TRUE(has_code(step.rebind("x", other_order), errc::invalid_argument));
  EXPECT_TRUE(is_ok(answer_of(step.run())));
  EXPECT_EQ(content(y)[0][1], w_.size());
  EXPECT_EQ(content(y)[0][0], 1u);
}

TEST_F(Step, OverStaleBuffersIsRefusedUntilRebind) {
  recording r;
  r.fill("y", element{5}).all_reduce("x");
  auto x = filled(1), y = filled(0);
  const auto step = must(w_.record(r, {{"x", x}, {"y", y}}));
  EXPECT_TRUE(is_ok(answer_of(w_.device_of(0).reset())));
  const auto refused = answer_of(step.run());
  EXPECT_TRUE(has_code(refused, errc::stale_ref));
  EXPECT_NE(text_of(refused.error()).find("request 1 of the step (fill)"), std::string::npos)
      << text_of(refused.error());
  EXPECT_TRUE(is_ok(step.rebind("y", filled(0))));
  const auto again = answer_of(step.run());
  EXPECT_TRUE(has_code(again, errc::stale_ref));
  EXPECT_NE(text_of(again.error()).find("request 2 of the step (all_reduce)"), std::string::npos)
      << text_of(again.error());
  auto fresh = filled(3);
  EXPECT_TRUE(is_ok(step.rebind("x", fresh)));
  EXPECT_TRUE(is_ok(answer_of(step.run())));
  EXPECT_EQ(content(fresh), same(3 * static_cast<element>(w_.size())));
}

TEST_F(Step, RunsInItsWorldOnly) {
  auto other = system_.open_world();
  recording r;
  r.fill("x", element{5});
  auto x = filled(1);
  const auto step = must(w_.record(r, {{"x", x}}));
  EXPECT_TRUE(has_code(answer_of(other.run(step)), errc::invalid_argument));
  EXPECT_EQ(content(x), same(1));
  EXPECT_TRUE(is_ok(answer_of(w_.run(step))));
  EXPECT_EQ(content(x), same(5));
}

TEST_F(Step, KeepsItsWorldAlive) {
  recording r;
  r.all_reduce("x");
  auto x = filled(1);
  auto step = must(w_.record(r, {{"x", x}}));
  w_ = {};
  EXPECT_TRUE(is_ok(answer_of(step.run())));
}

TEST_F(Step, ThatIsEmptyRefusesEverything) {
  const troupe::step none;
  EXPECT_TRUE(has_code(answer_of(none.run()), errc::invalid_argument));
  EXPECT_TRUE(has_code(answer_of(w_.run(none)), errc::invalid_argument));
  EXPECT_TRUE(has_code(none.rebind("x", refs{}), errc::invalid_argument));
  EXPECT_EQ(none.size(), 0u);
  EXPECT_EQ(none.runs_as(), "");
  EXPECT_TRUE(has_code(world{}.record({}, {}), errc::invalid_argument));
  EXPECT_TRUE(has_code(answer_of(world{}.run(must(w_.record({}, {})))), errc::invalid_argument));
}

TEST_F(Step, IsCheckedWhenItIsRecorded) {
  auto x = filled(1), y = filled(1);
  const auto refused = [&](auto record, std::vector<named_buffers> buffers) {
    recording r;
    r.fill("x", element{1});
    record(r);
    const auto result = w_.record(r, std::move(buffers));
    return result ? caf::error{} : result.error();
  };
  const auto wrong = [&](auto record) { return refused(record, {{"x", x}, {"y", y}}); };
  using enum errc;
  EXPECT_TRUE(is_ok(wrong([](auto&) {})));
  EXPECT_TRUE(has_code(wrong([](auto& r) { r.fill("z", element{1}); }), invalid_argument));
  EXPECT_TRUE(has_code(wrong([](auto& r) { r.fill("x", 1.0f); }), shape_mismatch));
  EXPECT_TRUE(has_code(wrong([](auto& r) { r.fill({"x", 5, count}, element{1}); }), out_of_range));
  EXPECT_TRUE(has_code(wrong([](auto& r) { r.fill({"x", count + 1}, element{1}); }), out_of_range));
  EXPECT_TRUE(has_code(wrong([](auto& r) { r.copy("x", {"y", 1}); }), shape_mismatch));
  EXPECT_TRUE(has_code(wrong([](auto& r) { r.copy("x", "x"); }), invalid_argument));
  EXPECT_TRUE(has_code(wrong([](auto& r) { r.all_gather("x", "y"); }), shape_mismatch));
  EXPECT_TRUE(has_code(wrong([](auto& r) { r.broadcast("x", 17); }), invalid_argument));
  EXPECT_TRUE(has_code(wrong([](auto& r) { r.send_recv(0, "x", -1, "y"); }), invalid_argument));
  EXPECT_TRUE(has_code(wrong([](auto& r) { r.on(17).fill("x", element{1}); }), invalid_argument));
  EXPECT_TRUE(has_code(wrong([](auto& r) { r.on(-1).fill("x", element{1}); }), invalid_argument));
  EXPECT_TRUE(
      has_code(wrong([](auto& r) { r.run({.kind = collective_kind::recv}); }), invalid_argument));
  EXPECT_TRUE(has_code(wrong([](auto& r) {
                         recording calls;
                         calls.barrier().fill("x", element{1});
                         r.group(calls);
                       }),
                       invalid_argument));
  const auto nothing = [](auto&) {};
  EXPECT_TRUE(has_code(refused(nothing, {{"x", x}, {"x", y}}), invalid_argument)) << "twice";
  EXPECT_TRUE(has_code(refused(nothing, {{"x", refs(x.begin(), x.end() - 1)}}), invalid_argument));
  EXPECT_TRUE(has_code(refused(nothing, {{"x", refs(x.rbegin(), x.rend())}}), invalid_argument))
      << "handles of other devices";
  EXPECT_TRUE(has_code(refused(nothing, {{"x", refs(w_.size())}}), stale_ref)) << "no memory";
  const auto text =
      text_of(wrong([](auto& r) { r.fill("x", element{1}).reduce_scatter("x", "z"); }));
  EXPECT_NE(text.find("request 3 of the step (reduce_scatter): no buffers are named \"z\""),
            std::string::npos)
      << text;
}

TEST_F(Step, NeedsItsLaunchesToBeRegistered) {
  auto x = filled(1), y = filled(1);
  recording r;
  r.fill("y", element{5}).on(1).launch("nobody's", {}, {}, {"x"});
  const auto step = w_.record(r, {{"x", x}, {"y", y}});
  if (!in_workers()) {
    EXPECT_TRUE(has_code(step, errc::invalid_argument));
    return;
  }
  // Only the worker knows its launches.
  const auto why = error_of(answer_of(must(step).run()));
  EXPECT_TRUE(has_code(why, errc::invalid_argument));
  EXPECT_NE(text_of(why).find("request 2 of the step (launch)"), std::string::npos) << text_of(why);
}

TEST_F(Step, TakesTheOptionsOfRequests) {
  auto x = filled(1), y = filled(1);
  recording r;
  r.fill("y", element{5}).all_reduce("x");
  const auto step = must(w_.record(r, {{"x", x}, {"y", y}}));
  const auto now = w_.status().membership;
  EXPECT_TRUE(has_code(answer_of(step.run({.max_retries = 1})), errc::not_supported));
  EXPECT_EQ(content(y), same(1));
  const auto refused = step.run({.membership = now + 1});
  const auto why = error_of(answer_of(refused));
  EXPECT_TRUE(has_code(why, errc::membership_changed));
  EXPECT_EQ(status_of(why)->membership, now);
  EXPECT_TRUE(has_code(w_.download(y), errc::skipped));
  EXPECT_TRUE(is_ok(answer_of(
      step.run({.deadline = patience, .membership = now, .retry_of = refused.number()}))));
  EXPECT_EQ(content(y), same(5));
  EXPECT_TRUE(has_code(answer_of(step.run({.deadline = -1s})), errc::deadline_exceeded));
}

TEST_F(Step, IsNamedInTheFlightRecord) {
  auto x = filled(1);
  recording r;
  r.fill("x", element{5}).all_reduce("x");
  const auto done = must(w_.record(r, {{"x", x}})).run();
  EXPECT_TRUE(is_ok(answer_of(done)));
  const folder files;
  const auto path = files.file("flight.json");
  EXPECT_TRUE(is_ok(answer_of(write_flight_record(system_, path))));
  std::ifstream file{path};
  const std::string text{std::istreambuf_iterator<char>{file}, {}};
  const auto name = "\"step\":" + std::to_string(done.number()) + ',';
  std::size_t found = 0;
  for (auto at = text.find(name); at != std::string::npos; at = text.find(name, at + 1))
    ++found;
  EXPECT_EQ(found, 2 * w_.size()) << name;
}

} // namespace

} // namespace troupe::testing
