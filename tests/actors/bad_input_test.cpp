// Wrong input: the error names it at once, nothing is launched, no content is lost, and the world
// stays usable.

#include "operation/skipping.hpp"
#include "support/eventually.hpp"
#include "support/world_fixture.hpp"
#include <troupe/detail/caf_compat.hpp>

#include <atomic>
#include <limits>
#include <set>

namespace troupe::testing {
namespace {

constexpr std::size_t count = 64;

/// A world whose backend calls are counted, buffers with known content, and requests in two forms.
class BadInput : public ::testing::Test {
protected:
  void SetUp() override { TROUPE_NEEDS_DEVICES(2); }

  void open(system_options options = {}, world_config config = {}) {
    if (!options.faults)
      options.faults = plan;
    system.emplace(options);
    under_test.emplace(system->open_world(std::move(config)));
    devices = devices_of(*under_test);
    send = buffers(1);
    recv = buffers(2);
  }

  std::vector<any_gpu_ref> buffers(std::uint64_t seed) {
    auto result = must(under_test->allocate(dtype::float32, count));
    for (std::size_t i = 0; i < result.size(); ++i) {
      kept.emplace_back(result[i], random_bytes(result[i].size_bytes(), 100 * seed + i));
      put(devices[i], result[i], kept.back().second);
    }
    return result;
  }

  /// Expects that both forms of an all-reduce fail with `code` at once, with nothing launched and
  /// no state changed.
  void expect_refused(const all_reduce& what, errc code) {
    nothing_launched([&] {
      stopwatch watch;
      auto called = what.recv.empty()
                        ? under_test->all_reduce(what.send, what.op, what.options)
                        : under_test->all_reduce(what.send, what.recv, what.op, what.options);
      EXPECT_TRUE(called.ready());
      EXPECT_TRUE(has_code(answer_of(called), code));
      expect_kept(code);
      EXPECT_TRUE(has_code(ask<collective_done>(*system, under_test->actor(), what), code));
      EXPECT_LT(watch.elapsed(), at_once);
    });
    accept_kept();
    expect_unharmed();
  }

  /// The same for a request to a device. `Answer` is the type of its result.
  template <class Answer, class Message>
  void expect_refused(const pending<Answer>& called, const Message& message, errc code) {
    stopwatch watch;
    EXPECT_TRUE(has_code(answer_of(called), code));
    expect_kept(code);
    using as_message = std::conditional_t<std::is_same_v<Message, download>, host_buffer, Answer>;
    EXPECT_TRUE(has_code(ask<as_message>(*system, must(devices[0].actor()), message), code));
    EXPECT_LT(watch.elapsed(), at_once);
    accept_kept();
    expect_unharmed();
  }

  /// A request that is refused at once because it is wrong by itself leaves no mark.
  void expect_kept(errc code) {
    if (code == errc::stale_ref || !detail::fails_validation(make_error(code, "")))
      accept_kept();
    for (auto& [ref, content] : kept)
      EXPECT_TRUE(is_ok(ref.access()));
  }

  /// Accepts the bytes of the kept buffers, so that skipped requests leave no marks.
  void accept_kept() {
    for (auto& [ref, content] : kept)
      accept_bytes(devices[static_cast<std::size_t>(ref.device())], ref);
  }

  template <class F> void nothing_launched(F f) {
    auto before = spy.launched();
    f();
    EXPECT_EQ(spy.launched(), before);
  }

  void expect_unharmed() {
    for (auto& [ref, content] : kept)
      EXPECT_TRUE(holds(devices[static_cast<std::size_t>(ref.device())], ref, content));
    EXPECT_TRUE(works(*under_test));
  }

  std::shared_ptr<fault_plan> plan = std::make_shared<fault_plan>();
  launch_spy spy{plan};
  std::optional<test_system> system;
  std::optional<world> under_test;
  std::vector<device> devices;
  std::vector<any_gpu_ref> send;
  std::vector<any_gpu_ref> recv;
  std::vector<std::pair<any_gpu_ref, std::vector<std::byte>>> kept;
};

TEST_F(BadInput, TooFewRefs) {
  open();
  send.pop_back();
  expect_refused(all_reduce{send}, errc::invalid_argument);
}

TEST_F(BadInput, TooManyRefs) {
  open();
  send.push_back(send.front());
  expect_refused(all_reduce{send}, errc::invalid_argument);
}

TEST_F(BadInput, NoRefs) {
  open();
  expect_refused(all_reduce{}, errc::invalid_argument);
}

TEST_F(BadInput, TooFewRefsToReceive) {
  open();
  recv.pop_back();
  expect_refused(all_reduce{send, recv}, errc::invalid_argument);
  // The receive buffers may be omitted only in the in-place forms of the facade.
  for (const auto& answer :
       {answer_of(under_test->all_reduce(send, std::vector<any_gpu_ref>{})),
        answer_of(under_test->reduce_scatter(send, std::vector<any_gpu_ref>{})),
        answer_of(under_test->all_gather(std::vector<any_gpu_ref>{}, recv))})
    EXPECT_TRUE(has_code(answer, errc::invalid_argument));
  expect_unharmed();
}

TEST_F(BadInput, RefsInTheWrongOrderOfDevices) {
  open();
  std::swap(send.front(), send.back());
  expect_refused(all_reduce{send}, errc::invalid_argument);
  std::swap(send.front(), send.back());
  std::swap(recv.front(), recv.back());
  expect_refused(all_reduce{send, recv}, errc::invalid_argument);
}

TEST_F(BadInput, RefOfADeviceOutsideTheWorld) {
  world_config config;
  config.devices = {0};
  open({}, config);
  auto outside = must(system->open(1).allocate<float>(count));
  expect_refused(all_reduce{{outside}}, errc::invalid_argument);
}

TEST_F(BadInput, RefOfAnotherActorSystem) {
  TROUPE_HOST_ONLY("two backends with the same devices");
  open();
  test_system other;
  auto foreign = must(other.open(0).allocate<float>(count));
  EXPECT_TRUE(has_code(world::open({devices[0], other.open(1)}), errc::invalid_argument));
  EXPECT_TRUE(has_code(spawn_nccl_world({devices[0], other.open(1)}), errc::invalid_argument));
  auto refs = send;
  refs[0] = foreign;
  expect_refused(all_reduce{refs}, errc::invalid_argument);
  expect_refused(devices[0].fill(foreign, 0.0f), fill{foreign, 0.0f}, errc::invalid_argument);
}

// Both systems have a device 0, so the ordinal does not identify the device.
TEST_F(BadInput, RefOfAnotherActorSystemIsNamedInEveryVerb) {
  TROUPE_HOST_ONLY("two backends with the same devices");
  open();
  std::optional<test_system> other{std::in_place};
  const any_gpu_ref foreign = must(other->open(0).allocate<float>(count));
  const auto named = [](const caf::error& why) {
    return has_code(why, errc::invalid_argument) &&
           describe(why).find("the handle belongs to another actor system") != std::string::npos;
  };
  auto& d = devices[0];
  const auto& own = recv[0];
  const auto topology = must(troupe::topology::open(*system));
  for (bool alive : {true, false}) {
    if (!alive)
      other.reset();
    std::vector<std::pair<const char*, caf::error>> all{
        {"upload", error_of(answer_of(d.upload(foreign, host_buffer{foreign.size_bytes()})))},
        {"download", error_of(answer_of(d.download(foreign, host_buffer{foreign.size_bytes()})))},
        {"fill", error_of(answer_of(d.fill(foreign, 0.0f)))},
        {"copy from", error_of(answer_of(d.copy(own, foreign)))},
        {"copy to", error_of(answer_of(d.copy(foreign, own)))},
        {"accept", error_of(answer_of(d.accept(foreign)))},
        {"launch", error_of(answer_of(launch_nothing(d, {foreign}, {})))},
        {"acquire", error_of(answer_of(d.acquire(foreign, access_mode::read, nullptr)))},
        {"release", error_of(answer_of(d.release(foreign, access_mode::read, nullptr)))},
        {"offer", error_of(d.offer(foreign))},
        {"all_reduce", error_of(answer_of(under_test->all_reduce(std::vector{foreign, send[1]})))},
        {"broadcast", error_of(answer_of(under_test->broadcast(foreign, recv, 0)))},
        {"send_recv", error_of(answer_of(under_test->send_recv(0, foreign, 1, recv[1])))},
        {"call of a rank", error_of(answer_of(under_test->rank(0).all_reduce(foreign)))},
        {"exchange", error_of(answer_of(under_test->rank(0).exchange({{1, foreign}}, {})))},
        {"copy in a topology", error_of(answer_of(topology.copy(recv[1], foreign)))},
        {"copies", error_of(answer_of(topology.copy(std::vector<copy_pair>{{foreign, own}})))},
        {"replicate", error_of(answer_of(topology.replicate(own, {foreign})))},
        {"distribute", error_of(answer_of(topology.distribute(own, {foreign})))},
    };
    for (auto& [verb, why] : all)
      EXPECT_TRUE(named(why)) << verb << ": " << describe(why);
  }
  expect_unharmed();
}

TEST_F(BadInput, RankOutOfRange) {
  open();
  const auto size = under_test->size();
  const auto last = std::numeric_limits<std::size_t>::max();
  const std::size_t as_rank_zero = std::size_t{1} << 32; // becomes rank 0 if cut to 32 bits
  const auto text = " is out of range: the world has " + std::to_string(size) + " ranks";
  const auto told = [&](const caf::error& why) {
    return has_code(why, errc::invalid_argument) && describe(why).find(text) != std::string::npos;
  };
  for (const auto& d : {under_test->device_of(size), under_test->device_of(last),
                        under_test->device_of(as_rank_zero), under_test->rank(size).where(),
                        under_test->rank(as_rank_zero).where()}) {
    EXPECT_EQ(d.ordinal(), -1);
    EXPECT_EQ(d.generation(), 0U);
    EXPECT_EQ(d.phase(), device_phase::failed);
    const auto& ref = send[0];
    caf::scoped_actor self{system->get()};
    caf::error requested;
    request(&*self, d, stats{}, patience)
        .receive([](const device_stats&) {}, [&](const caf::error& why) { requested = why; });
    std::vector<std::pair<const char*, caf::error>> all{
        {"actor", error_of(d.actor())},
        {"allocate", error_of(answer_of(d.allocate(dtype::int32, 1)))},
        {"allocate_pinned", error_of(d.allocate_pinned(1))},
        {"upload", error_of(answer_of(d.upload(ref, host_buffer{ref.size_bytes()})))},
        {"download", error_of(answer_of(d.download(ref, host_buffer{ref.size_bytes()})))},
        {"fill", error_of(answer_of(d.fill(ref, 0.0f)))},
        {"copy", error_of(answer_of(d.copy(ref, recv[0])))},
        {"accept", error_of(answer_of(d.accept(ref)))},
        {"launch",
         error_of(answer_of(d.launch([](launch_context&) { return caf::error{}; }, {}, {})))},
        {"launch by name", error_of(answer_of(d.launch("BadInput.None", {}, {}, {})))},
        {"adopt", error_of(d.adopt(this, 1, dtype::uint8, [](void*) {}))},
        {"acquire", error_of(answer_of(d.acquire(ref, access_mode::read, nullptr)))},
        {"release", error_of(answer_of(d.release(ref, access_mode::read, nullptr)))},
        {"offer", error_of(d.offer(ref))},
        {"claim", error_of(answer_of(d.claim(ref.token())))},
        {"stats", error_of(answer_of(d.stats()))},
        {"reset", error_of(answer_of(d.reset()))},
        {"request", requested},
        {"world", error_of(world::open({devices[0], d}))},
        {"topology", error_of(troupe::topology::open({d}))},
    };
    for (auto& [what, why] : all)
      EXPECT_TRUE(told(why)) << what << ": " << describe(why);
    d.shutdown();
  }
  for (const auto rank : {size, as_rank_zero, last}) {
    const auto r = under_test->rank(rank);
    EXPECT_TRUE(told(error_of(answer_of(r.all_reduce(send[0])))));
    EXPECT_TRUE(told(error_of(answer_of(r.barrier()))));
    EXPECT_TRUE(told(error_of(answer_of(r.exchange({{0, send[0]}}, {})))));
    EXPECT_TRUE(told(error_of(answer_of(r.exchange({}, {})))));
  }
  for (int rank : {-1, static_cast<int>(size)}) {
    EXPECT_TRUE(told(error_of(
        ask<collective_done>(*system, under_test->actor(), rank_local{rank, barrier{}, {}}))));
    EXPECT_TRUE(told(error_of(answer_of(under_test->rank(0).send(send[0], rank)))));
    EXPECT_TRUE(told(error_of(answer_of(under_test->send_recv(rank, send[0], 1, recv[1])))));
  }
  EXPECT_TRUE(told(error_of(answer_of(under_test->reduce(send, recv[0], 7)))));
  accept_kept(); // messages leave marks
  expect_unharmed();
}

TEST_F(BadInput, MessageThatAnActorDoesNotUnderstand) {
  open();
  const auto device = must(devices[0].actor());
  const auto expect_not_taken = [&](const caf::error& why, const std::string& text) {
    EXPECT_EQ(code_of(why), errc::invalid_argument);
    EXPECT_NE(describe(why).find(text), std::string::npos) << describe(why);
  };
  for (auto& actor : {under_test->actor(), device})
    expect_not_taken(error_of(ask<void>(*system, actor, std::string{"no request"})), " takes no ");
  expect_not_taken(error_of(ask<void>(*system, under_test->actor(), fill{send[0], 0.0f})),
                   "a world takes no troupe::fill ");
  expect_not_taken(error_of(ask<collective_done>(*system, device, all_reduce{send})),
                   "a device takes no troupe::all_reduce ");
  caf::scoped_actor self{system->get()};
  request(self, device, barrier{}, patience)
      .receive([](const collective_done&) { FAIL() << "a device did a barrier"; },
               [&](const caf::error& why) { expect_not_taken(why, "takes no troupe::barrier "); });
  expect_unharmed();
}

TEST_F(BadInput, LimitsOutOfRange) {
  open();
  const auto refused = [&](const char* text, auto change) {
    world_config config;
    config.devices = system->ordinals();
    change(config.limits);
    const auto spawned = spawn_nccl_world(*system, config);
    EXPECT_TRUE(has_code(spawned, errc::invalid_argument)) << text;
    EXPECT_NE(describe(error_of(spawned)).find(text), std::string::npos)
        << describe(error_of(spawned));
    const auto split = under_test->split("part", std::vector<std::int32_t>(under_test->size(), 0),
                                         {}, config.limits);
    EXPECT_TRUE(has_code(split, errc::invalid_argument)) << text;
  };
  refused("world_limits::deadline=0 s", [](auto& x) { x.deadline = 0s; });
  refused("world_limits::deadline=-1 ns", [](auto& x) { x.deadline = -1ns; });
  refused("world_limits::build_deadline=0 s", [](auto& x) { x.build_deadline = 0s; });
  refused("world_limits::connect_limit=-3 s", [](auto& x) { x.connect_limit = -3s; });
  refused("world_limits::stall_limit=-5 ms", [](auto& x) { x.stall_limit = -5ms; });
  refused("world_limits::quiet_limit=0 ms", [](auto& x) { x.quiet_limit = 0ms; });
  refused("world_limits::restart_window=-1 s", [](auto& x) { x.restart_window = -1s; });
  refused("world_limits::restart_backoff=-1 ms", [](auto& x) { x.restart_backoff = -1ms; });
  const auto refused_topology = [&](const char* text, auto change) {
    topology_config config;
    change(config.limits);
    const auto spawned = spawn_p2p_topology(*system, config);
    EXPECT_TRUE(has_code(spawned, errc::invalid_argument)) << text;
    EXPECT_NE(describe(error_of(spawned)).find(text), std::string::npos)
        << describe(error_of(spawned));
  };
  refused_topology("topology_limits::deadline=0 s", [](auto& x) { x.deadline = 0s; });
  refused_topology("topology_limits::open_deadline=-1 s", [](auto& x) { x.open_deadline = -1s; });
  refused_topology("topology_limits::pattern_bytes=0", [](auto& x) { x.pattern_bytes = 0; });
  refused_topology("topology_limits::measured_bytes=0", [](auto& x) { x.measured_bytes = 0; });
  for (auto& [text, config] :
       {std::pair{"mesh_config::chunks=0", mesh_config{.chunks = 0}},
        std::pair{"mesh_config::chunks=1025", mesh_config{.chunks = 1025}},
        std::pair{"mesh_config::chunk_bytes=7", mesh_config{.chunk_bytes = 7}}}) {
    const auto mesh = mesh_comm::open(*under_test, config);
    EXPECT_TRUE(has_code(mesh, errc::invalid_argument)) << text;
    EXPECT_NE(describe(error_of(mesh)).find(text), std::string::npos) << describe(error_of(mesh));
  }
  expect_unharmed();
}

TEST_F(BadInput, ListsOfDevices) {
  open();
  const auto text_of = [](const auto& x) { return describe(error_of(x)); };
  EXPECT_EQ(text_of(world::open(*system, {.devices = {}})),
            "invalid_argument: world_config::devices is empty");
  EXPECT_EQ(text_of(world::open(*system, {.devices = {1, 0, 1}})),
            "invalid_argument: device 1 is listed twice");
  EXPECT_EQ(text_of(troupe::topology::open(*system, {.devices = {0, 0}})),
            "invalid_argument: device 0 is listed twice");
  EXPECT_EQ(text_of(world::open(std::vector<device>{})),
            "invalid_argument: the list of devices of a world is empty");
  const auto none = std::to_string(system->no_device());
  EXPECT_EQ(text_of(device::open(*system, system->no_device())),
            "invalid_argument: device " + none + " is out of range: there are " + none +
                " devices");
  expect_unharmed();
}

TEST_F(BadInput, RefOfAnotherDevice) {
  open();
  expect_refused(devices[0].fill(send[1], 0.0f), fill{send[1], 0.0f}, errc::invalid_argument);
  expect_refused(devices[0].copy(recv[0], send[1]), copy{recv[0], send[1]}, errc::invalid_argument);
  expect_refused(devices[0].upload(send[1], host_buffer{send[1].size_bytes()}),
                 upload{send[1], host_buffer{send[1].size_bytes()}}, errc::invalid_argument);
  expect_refused(devices[0].download(send[1], host_buffer{send[1].size_bytes()}), download{send[1]},
                 errc::invalid_argument);
  must(register_launch("BadInput.RefOfAnotherDevice",
                       [](launch_context&, auto, auto, auto) { return caf::error{}; }));
  expect_refused(devices[0].launch([](launch_context&) { return caf::error{}; }, {send[1]}, {}),
                 launch{"BadInput.RefOfAnotherDevice", {}, {send[1]}, {}}, errc::invalid_argument);
}

TEST_F(BadInput, OldMembership) {
  open();
  const auto [before, epoch] =
      std::pair{under_test->status().membership, under_test->status().epoch};
  world_feed statuses{*system, under_test->actor()};
  must(answer_of(devices[1].reset()));
  const auto now = statuses.until(world_phase::ready, epoch + 1);
  // The memory of the device no longer exists.
  std::erase_if(kept, [](const auto& x) { return x.first.stale(); });
  send = must(under_test->allocate(dtype::float32, count));
  all_reduce old{send, {}, reduce_op::sum, {.membership = before}};
  expect_refused(old, errc::membership_changed);
  const auto refused = answer_of(under_test->all_reduce(old.send, old.op, old.options));
  const auto view = status_of(error_of(refused));
  ASSERT_TRUE(view);
  EXPECT_EQ(view->membership, before + 1);
  EXPECT_EQ(view->members, now.members);
  EXPECT_EQ(view->members[1].generation, 2u);
  const auto told = ask<collective_done>(*system, under_test->actor(), old);
  ASSERT_TRUE(status_of(error_of(told)));
  EXPECT_EQ(status_of(error_of(told))->membership, before + 1);
}

TEST_F(BadInput, AMembershipThatNeverWas) {
  open();
  expect_refused(all_reduce{send, {}, reduce_op::sum, {.membership = 77}},
                 errc::membership_changed);
}

// A request for an old membership fails for that reason, although its handles are stale too.
TEST_F(BadInput, OldMembershipWithStaleRefs) {
  open();
  const auto before = under_test->status();
  world_feed statuses{*system, under_test->actor()};
  must(answer_of(devices[0].reset()));
  statuses.until(world_phase::ready, before.epoch + 1);
  std::erase_if(kept, [](const auto& x) { return x.first.stale(); });
  expect_refused(all_reduce{send, {}, reduce_op::sum, {.membership = before.membership}},
                 errc::membership_changed);
}

TEST_F(BadInput, CountsThatDiffer) {
  open();
  auto refs = send;
  refs[1] = must(send[1].slice(0, count - 1));
  expect_refused(all_reduce{refs}, errc::shape_mismatch);
  refs = recv;
  for (auto& x : refs)
    x = must(x.slice(0, count - 1));
  expect_refused(all_reduce{send, refs}, errc::shape_mismatch);
}

TEST_F(BadInput, TypesThatDiffer) {
  open();
  auto refs = send;
  refs[1] = must(send[1].reinterpret(dtype::int32));
  expect_refused(all_reduce{refs}, errc::shape_mismatch);
  refs = recv;
  for (auto& x : refs)
    x = must(x.reinterpret(dtype::uint32));
  expect_refused(all_reduce{send, refs}, errc::shape_mismatch);
}

TEST_F(BadInput, SizesThatDiffer) {
  open();
  expect_refused(devices[0].upload(send[0], host_buffer{send[0].size_bytes() - 1}),
                 upload{send[0], host_buffer{send[0].size_bytes() - 1}}, errc::shape_mismatch);
  expect_refused(devices[0].copy(must(recv[0].slice(1, 3)), must(send[0].slice(0, 2))),
                 copy{must(recv[0].slice(1, 3)), must(send[0].slice(0, 2))}, errc::shape_mismatch);
  expect_refused(devices[0].fill(any_gpu_ref{send[0]}, 1.0), fill{send[0], 1.0},
                 errc::shape_mismatch);
  expect_refused(devices[0].fill(any_gpu_ref{send[0]}, std::int32_t{1}),
                 fill{send[0], std::int32_t{1}}, errc::shape_mismatch);
  expect_refused(devices[0].fill(send[0], scalar{}), fill{send[0], {}}, errc::shape_mismatch);
}

TEST_F(BadInput, StaleRef) {
  open();
  world_feed statuses{*system, under_test->actor()};
  const auto before = under_test->status().epoch;
  must(answer_of(devices[0].reset()));
  statuses.until(world_phase::ready, before + 1);
  EXPECT_TRUE(send[0].stale());
  EXPECT_FALSE(send[1].stale());
  EXPECT_TRUE(has_code(send[0].access(), errc::stale_ref));
  std::erase_if(kept, [](const auto& x) { return x.first.stale(); });
  expect_refused(all_reduce{send}, errc::stale_ref);
  expect_refused(devices[0].fill(send[0], 0.0f), fill{send[0], 0.0f}, errc::stale_ref);
  expect_refused(devices[0].copy(recv[0], send[0]), copy{recv[0], send[0]}, errc::stale_ref);
  expect_refused(devices[0].upload(send[0], host_buffer{send[0].size_bytes()}),
                 upload{send[0], host_buffer{send[0].size_bytes()}}, errc::stale_ref);
  expect_refused(devices[0].download(send[0], host_buffer{send[0].size_bytes()}), download{send[0]},
                 errc::stale_ref);
  must(register_launch("BadInput.StaleRef",
                       [](launch_context&, auto, auto, auto) { return caf::error{}; }));
  flag called;
  expect_refused(in_workers() ? launch_nothing(devices[0], {}, {send[0]})
                              : devices[0].launch(
                                    [&](launch_context&) {
                                      called.set();
                                      return caf::error{};
                                    },
                                    {}, {send[0]}),
                 launch{"BadInput.StaleRef", {}, {}, {send[0]}}, errc::stale_ref);
  EXPECT_FALSE(called.is_set());
}

TEST_F(BadInput, RefWithoutMemory) {
  open();
  auto refs = send;
  refs[1] = {};
  expect_refused(all_reduce{refs}, errc::stale_ref);
  expect_refused(devices[0].fill(any_gpu_ref{}, same_bytes(any_gpu_ref{})),
                 fill{any_gpu_ref{}, 1.0f}, errc::stale_ref);
  expect_refused(devices[0].download(any_gpu_ref{}, host_buffer{}), download{}, errc::stale_ref);
  expect_refused(devices[0].upload(any_gpu_ref{}, host_buffer{}), upload{}, errc::stale_ref);
  expect_refused(devices[0].copy(any_gpu_ref{}, any_gpu_ref{}), copy{}, errc::stale_ref);
}

TEST_F(BadInput, IndeterminateRefRead) {
  open();
  // This launch writes the buffer and fails.
  auto broken = answer_of(launch_failure(devices[0], "on purpose", {send[0]}));
  ASSERT_TRUE(has_code(broken, errc::launch_failed));
  std::erase_if(kept, [&](const auto& x) { return x.first == send[0]; });
  expect_refused(all_reduce{send}, errc::indeterminate);
  expect_refused(devices[0].copy(recv[0], send[0]), copy{recv[0], send[0]}, errc::indeterminate);
  expect_refused(devices[0].download(send[0], host_buffer{send[0].size_bytes()}), download{send[0]},
                 errc::indeterminate);
  EXPECT_TRUE(has_code(send[0].access(), errc::indeterminate));
  // Overwriting the buffer makes it determinate again.
  kept.emplace_back(send[0], random_bytes(send[0].size_bytes(), 5));
  put(devices[0], send[0], kept.back().second);
  expect_unharmed();
}

TEST_F(BadInput, OverlappingBuffers) {
  open();
  std::vector<any_gpu_ref> left;
  std::vector<any_gpu_ref> right;
  for (auto& x : send) {
    left.push_back(must(x.slice(0, count - 1)));
    right.push_back(must(x.slice(1, count - 1)));
  }
  expect_refused(all_reduce{left, right}, errc::invalid_argument);
  expect_refused(devices[0].copy(left[0], right[0]), copy{left[0], right[0]},
                 errc::invalid_argument);
  expect_refused(devices[0].copy(send[0], send[0]), copy{send[0], send[0]}, errc::invalid_argument);
}

// The request succeeds, and nothing is launched.
TEST_F(BadInput, CountZero) {
  open();
  std::vector<any_gpu_ref> none;
  for (auto& x : send)
    none.push_back(must(x.slice(count, 0)));
  auto empty = must(under_test->allocate(dtype::float64, 0));
  must(register_launch("BadInput.CountZero",
                       [](launch_context&, auto, auto, auto) { return caf::error{}; }));
  const auto actor = must(devices[0].actor());
  nothing_launched([&] {
    for (const auto& refs : {none, empty}) {
      EXPECT_TRUE(is_ok(answer_of(under_test->all_reduce(refs))));
      EXPECT_TRUE(is_ok(answer_of(under_test->all_reduce(refs, refs))));
      EXPECT_TRUE(is_ok(ask<collective_done>(*system, under_test->actor(), all_reduce{refs})));
      EXPECT_TRUE(is_ok(answer_of(devices[0].fill(refs[0], same_bytes(refs[0])))));
      EXPECT_TRUE(is_ok(answer_of(devices[0].copy(refs[0], refs[0]))));
      EXPECT_TRUE(is_ok(answer_of(devices[0].upload(refs[0], std::span<const std::byte>{}))));
      EXPECT_TRUE(is_ok(answer_of(devices[0].upload(refs[0], host_buffer{}))));
      EXPECT_TRUE(is_ok(answer_of(devices[0].download(refs[0], std::span<std::byte>{}))));
      EXPECT_TRUE(is_ok(answer_of(devices[0].download(refs[0], host_buffer{}))));
      EXPECT_TRUE(is_ok(ask<void>(*system, actor, upload{refs[0], {}})));
      EXPECT_TRUE(is_ok(ask<void>(*system, actor, copy{refs[0], refs[0]})));
      auto received = ask<host_buffer>(*system, actor, download{refs[0]});
      ASSERT_TRUE(is_ok(received));
      EXPECT_EQ(received->size_bytes(), 0u);
      auto pinned = must(devices[0].allocate_pinned(0));
      EXPECT_TRUE(is_ok(answer_of(devices[0].upload(refs[0], pinned))));
      EXPECT_TRUE(is_ok(answer_of(devices[0].download(refs[0], pinned))));
    }
    EXPECT_TRUE(is_ok(answer_of(devices[0].allocate(dtype::int8, 0, true))));
  });
  expect_unharmed();
}

TEST_F(BadInput, SizesOverTheBuffer) {
  open();
  EXPECT_TRUE(has_code(send[0].slice(0, count + 1), errc::out_of_range));
  EXPECT_TRUE(has_code(send[0].slice(count + 1, 0), errc::out_of_range));
  EXPECT_TRUE(
      has_code(send[0].slice(1, std::numeric_limits<std::size_t>::max()), errc::out_of_range));
  EXPECT_TRUE(has_code(must(send[0].slice(8, 8)).slice(0, 9), errc::out_of_range));
  const host_buffer large{send[0].size_bytes() + 1};
  expect_refused(devices[0].upload(send[0], large), upload{send[0], large}, errc::out_of_range);
  EXPECT_TRUE(has_code(answer_of(devices[0].download(send[0], large)), errc::out_of_range));
  std::vector<std::byte> bytes(large.size_bytes());
  EXPECT_TRUE(has_code(answer_of(devices[0].upload(send[0], std::span<const std::byte>{bytes})),
                       errc::out_of_range));
  EXPECT_TRUE(
      has_code(answer_of(devices[0].download(send[0], std::span{bytes})), errc::out_of_range));
  expect_unharmed();
}

TEST_F(BadInput, MoreMemoryThanThereIs) {
  open();
  const auto free = answer_of(devices[0].stats())->total_bytes;
  for (std::uint64_t elements :
       {free + 1, std::uint64_t{1} << 60, std::numeric_limits<std::uint64_t>::max()}) {
    expect_refused(devices[0].allocate(dtype::float64, elements),
                   allocate{elements, dtype::float64}, errc::out_of_memory);
    EXPECT_TRUE(has_code(under_test->allocate(dtype::float64, elements), errc::out_of_memory));
  }
  EXPECT_EQ(devices[0].phase(), device_phase::ready);
  EXPECT_EQ(devices[0].generation(), 1u);
  expect_unharmed();
}

TEST_F(BadInput, OrdinalThatDoesNotExist) {
  open();
  for (const int ordinal : {-1, system->no_device(), 1 << 30}) {
    EXPECT_TRUE(has_code(device::open(*system, ordinal), errc::invalid_argument));
    world_config config;
    config.devices = {0, ordinal};
    EXPECT_TRUE(has_code(system->try_open_world(config), errc::invalid_argument));
    EXPECT_TRUE(has_code(spawn_nccl_world(*system, config), errc::invalid_argument));
  }
  expect_unharmed();
}

TEST_F(BadInput, OrdinalTwice) {
  open();
  world_config config;
  config.devices = {0, 1, 0};
  EXPECT_TRUE(has_code(system->try_open_world(config), errc::invalid_argument));
  EXPECT_TRUE(has_code(spawn_nccl_world(*system, config), errc::invalid_argument));
  EXPECT_TRUE(has_code(world::open(std::vector{devices[0], devices[0]}), errc::invalid_argument));
  EXPECT_TRUE(
      has_code(spawn_nccl_world(std::vector{devices[0], devices[0]}), errc::invalid_argument));
  expect_unharmed();
}

TEST_F(BadInput, WorldOfNoDevice) {
  open();
  EXPECT_TRUE(has_code(world::open(*system, world_config{}), errc::invalid_argument));
  EXPECT_TRUE(has_code(spawn_nccl_world(*system, world_config{}), errc::invalid_argument));
  EXPECT_TRUE(has_code(world::open(std::vector<device>{}), errc::invalid_argument));
  EXPECT_TRUE(has_code(spawn_nccl_world(std::vector<device>{}), errc::invalid_argument));
  expect_unharmed();
}

TEST(BadConfiguration, AnActorSystemOfSomebodyElse) {
  detail::known_types known; // CAF 1.x requires that its own types are known too
  static_cast<void>(known);
  caf::actor_system_config config;
  caf::actor_system system{config};
  EXPECT_TRUE(has_code(list_devices(system), errc::invalid_argument));
  EXPECT_TRUE(all_devices(system).empty());
  EXPECT_TRUE(has_code(device::open(system, 0), errc::invalid_argument));
  EXPECT_TRUE(has_code(world::open(system, world_config{{0}}), errc::invalid_argument));
  EXPECT_TRUE(has_code(spawn_nccl_world(system, world_config{{0}}), errc::invalid_argument));
}

TEST_F(BadInput, DeadlineInThePast) {
  open();
  for (const auto past : {-1ns, std::chrono::nanoseconds::min()}) {
    const request_options late{.deadline = past};
    expect_refused(all_reduce{send, {}, reduce_op::sum, late}, errc::deadline_exceeded);
    expect_refused(devices[0].fill(send[0], same_bytes(send[0]), late), fill{send[0], 0.0f, late},
                   errc::deadline_exceeded);
    expect_refused(devices[0].allocate(dtype::int8, 1, false, late),
                   allocate{1, dtype::int8, false, late}, errc::deadline_exceeded);
    expect_refused(devices[0].stats(late), stats{late}, errc::deadline_exceeded);
    expect_refused(devices[0].reset(late), reset{late}, errc::deadline_exceeded);
    expect_refused(devices[0].hand_over(late), hand_over{late}, errc::deadline_exceeded);
  }
  EXPECT_EQ(devices[0].generation(), 1u);
}

// The largest duration means: no deadline.
TEST_F(BadInput, DeadlineBeyondTheClock) {
  open();
  const request_options endless{.deadline = std::chrono::nanoseconds::max()};
  EXPECT_TRUE(is_ok(answer_of(devices[0].fill(send[0], 1.0f, endless))));
  EXPECT_TRUE(is_ok(answer_of(under_test->all_reduce(send, reduce_op::sum, endless))));
  caf::scoped_actor self{system->get()};
  caf::error got;
  request(&*self, *under_test, all_reduce{send}, endless.deadline)
      .receive([](const collective_done&) {}, [&](const caf::error& why) { got = why; });
  EXPECT_TRUE(is_ok(got));
  EXPECT_TRUE(must(under_test->barrier().wait_for(endless.deadline)));
  EXPECT_TRUE(device::open(system->get(), 0, endless.deadline));
  world_limits limits;
  limits.deadline = limits.build_deadline = limits.stall_limit = limits.connect_limit =
      limits.restart_window = endless.deadline;
  limits.quiet_limit = std::chrono::milliseconds::max();
  plan->add({fault::fail, verb::build, any_device, 1, 2}); // causes two restarts within the window
  auto other = system->open_world({.name = "endless", .limits = limits});
  EXPECT_TRUE(is_ok(answer_of(other.barrier())));
  EXPECT_EQ(other.status().epoch, 3U);
  kept.clear();
  expect_unharmed();
}

// Such a value may come from another process.
TEST_F(BadInput, TypeThatDoesNotExist) {
  open();
  const auto none = static_cast<dtype>(200);
  EXPECT_TRUE(has_code(answer_of(devices[0].allocate(none, 1)), errc::invalid_argument));
  EXPECT_TRUE(has_code(devices[0].adopt(this, 1, none, [](void*) {}), errc::invalid_argument));
  EXPECT_TRUE(has_code(send[0].reinterpret(none), errc::invalid_argument));
  EXPECT_TRUE(has_code(under_test->allocate(none, 1), errc::invalid_argument));
  auto mesh = must(mesh_comm::open(*under_test));
  std::vector<std::byte> bytes(4);
  EXPECT_TRUE(
      has_code(answer_of(mesh[0].all_reduce(std::span{bytes}, none)), errc::invalid_argument));
  expect_unharmed();
}

TEST_F(BadInput, ShutDownWorld) {
  open();
  world_feed statuses{*system, under_test->actor()};
  detail::anon_send(under_test->actor(), shutdown{});
  const auto end = statuses.until(world_phase::shut_down);
  EXPECT_TRUE(has_code(end.reason, errc::unavailable));
  stopwatch watch;
  EXPECT_TRUE(has_code(answer_of(under_test->all_reduce(send)), errc::unavailable));
  // A world that was shut down no longer has an actor.
  EXPECT_EQ(error_of(ask<collective_done>(*system, under_test->actor(), all_reduce{send})),
            caf::sec::request_receiver_down);
  EXPECT_LT(watch.elapsed(), at_once);
  for (auto& ref : send) // the in-place sum did not run
    EXPECT_TRUE(has_code(ref.access(), errc::skipped));
  accept_kept();
  for (auto& [ref, content] : kept)
    EXPECT_TRUE(holds(devices[static_cast<std::size_t>(ref.device())], ref, content));
  // The world's devices stay available for another world.
  auto another = system->open_world();
  EXPECT_TRUE(works(another));
}

TEST_F(BadInput, FailedWorld) {
  open();
  world_feed statuses{*system, under_test->actor()};
  devices[1].shutdown();
  const auto end = statuses.until(world_phase::failed);
  EXPECT_TRUE(has_code(end.reason, errc::unavailable));
  stopwatch watch;
  EXPECT_TRUE(has_code(answer_of(under_test->all_reduce(send)), errc::unavailable));
  EXPECT_TRUE(has_code(ask<collective_done>(*system, under_test->actor(), all_reduce{send}),
                       errc::unavailable));
  EXPECT_TRUE(has_code(answer_of(devices[1].stats()), errc::unavailable));
  EXPECT_TRUE(
      has_code(ask<device_stats>(*system, system->device_actor(1), stats{}), errc::unavailable));
  EXPECT_LT(watch.elapsed(), at_once);
  // The other device and its memory are not affected.
  for (auto& [ref, content] : kept)
    if (ref.device() == 0) {
      accept_bytes(devices[0], ref);
      EXPECT_TRUE(holds(devices[0], ref, content));
    }
  EXPECT_TRUE(works(devices[0]));
  world_config config;
  config.devices = {0};
  auto rest = system->open_world(config);
  EXPECT_TRUE(works(rest));
}

TEST_F(BadInput, MoreQueuedThanTheBound) {
  system_options options;
  options.lanes.in_flight_limit = 2;
  options.lanes.queue_limit = 8;
  open(options);
  gate held;
  auto first = held.hold_stream(devices[0]);
  ASSERT_TRUE(held.wait_reached());
  ASSERT_TRUE(is_ok(answer_of(devices[0].stats()))); // the lane has issued the launch
  std::vector<pending<void>> accepted;
  std::optional<pending<void>> refused;
  const auto one = same_bytes(recv[0], 1);
  const request_options refuse{.room = room_policy::refuse};
  // The streams have room for one, the queue for eight. The lane needs time to take the first one.
  ASSERT_TRUE(eventually([&] {
    auto x = devices[0].fill(recv[0], one, refuse);
    if (x.ready())
      refused = x;
    else
      accepted.push_back(x);
    return accepted.size() >= 9;
  }));
  EXPECT_TRUE(!refused || has_code(answer_of(*refused), errc::overloaded));
  EXPECT_TRUE(has_code(answer_of(devices[0].fill(recv[0], one, refuse)), errc::overloaded));
  caf::scoped_actor self{system->get()};
  EXPECT_TRUE(has_code(
      detail::ask<void>(self, must(devices[0].actor()), patience, fill{recv[0], one, refuse}),
      errc::overloaded));
  EXPECT_TRUE(
      has_code(answer_of(under_test->all_reduce(send, reduce_op::sum, refuse)), errc::overloaded));
  held.open();
  EXPECT_TRUE(is_ok(answer_of(first)));
  for (auto& x : accepted)
    EXPECT_TRUE(is_ok(answer_of(x)));
  std::erase_if(kept, [&](const auto& x) { return x.first == recv[0]; });
  EXPECT_TRUE(has_code(recv[0].access(), errc::skipped));
  EXPECT_TRUE(has_code(send[0].access(), errc::skipped));
  accept_bytes(devices[0], recv[0]);
  accept_kept();
  EXPECT_TRUE(
      holds(devices[0], recv[0], std::vector<std::byte>(recv[0].size_bytes(), std::byte{1})));
  expect_unharmed();
}

TEST_F(BadInput, MoreRequestsThanMayWaitForAWorld) {
  TROUPE_HOST_ONLY("the build is held by a fault plan");
  plan->add({fault::block, verb::build});
  system.emplace(system_options{.faults = plan});
  world_config config;
  config.limits.waiting_limit = 3;
  auto actor = system->spawn_world(config);
  ASSERT_TRUE(plan->wait_injected(fault::block, 1, patience));
  std::vector<any_gpu_ref> refs;
  for (auto i : system->ordinals())
    refs.push_back(must(system->open(i).allocate<float>(count, true)));
  caf::scoped_actor self{system->get()};
  int answers = 0;
  auto ask_again = [&] { return detail::request(self, actor, patience, all_reduce{refs}); };
  auto a = ask_again();
  auto b = ask_again();
  auto c = ask_again();
  const all_reduce refused{.send = refs, .options = {.room = room_policy::refuse}, .factors = {}};
  EXPECT_TRUE(has_code(ask<collective_done>(*system, actor, refused), errc::overloaded));
  plan->release();
  for (auto* x : {&a, &b, &c})
    std::move(*x).receive([&](const collective_done&) { ++answers; },
                          [](const caf::error& why) { ADD_FAILURE() << describe(why); });
  EXPECT_EQ(answers, 3);
  caf::anon_send_exit(actor, caf::exit_reason::user_shutdown);
}

TEST_F(BadInput, ExceptionFromALaunch) {
  open();
  auto thrown = answer_of(launch_exception(devices[0], "not even now"));
  ASSERT_TRUE(has_code(thrown, errc::launch_failed));
  EXPECT_NE(describe(error_of(thrown)).find("not even now"), std::string::npos);
  EXPECT_EQ(failure_of(error_of(thrown))->device, 0);
  EXPECT_EQ(devices[0].phase(), device_phase::ready);
  expect_unharmed();
}

// INV-11
TEST_F(BadInput, ExceptionFromAFunctionOnTheHost) {
  TROUPE_IN_PROCESS_ONLY("callables");
  open();
  const auto memory = must(devices[0].allocate<float>(count, true));
  const auto behind = must(devices[0].allocate<float>(count, true));
  std::atomic<int> later{0};
  gate stream;
  const auto held = stream.hold_stream(devices[0]); // the reader is admitted meanwhile
  const auto launched = devices[0].launch(
      [&](launch_context& context) {
        must(context.run_on_host([] { throw std::runtime_error("in the middle of it"); }));
        return context.run_on_host([&] { ++later; });
      },
      {}, {memory});
  const auto reads = devices[0].copy(behind, memory);
  auto refs = send;
  refs[0] = memory;
  const auto sums = under_test->all_reduce(refs, recv);
  stream.open();
  EXPECT_TRUE(is_ok(answer_of(held)));
  auto thrown = answer_of(launched);
  ASSERT_TRUE(has_code(thrown, errc::launch_failed));
  const auto why = *failure_of(error_of(thrown));
  EXPECT_EQ(why.detail, "the callable threw: in the middle of it");
  EXPECT_EQ(why.verb, "launch");
  EXPECT_EQ(why.device, 0);
  EXPECT_EQ(later, 0);
  EXPECT_TRUE(has_code(answer_of(reads), errc::launch_failed));
  EXPECT_TRUE(has_code(answer_of(sums), errc::launch_failed));
  for (auto& [ref, content] : kept) // the sum left them indeterminate
    put(devices[static_cast<std::size_t>(ref.device())], ref, content);
  EXPECT_TRUE(has_code(answer_of(devices[0].copy(behind, memory)), errc::indeterminate));
  thrown = answer_of(devices[0].launch(
      [](launch_context& context) { return context.run_on_host([] { throw 7; }); }, {}, {}));
  EXPECT_TRUE(has_code(thrown, errc::launch_failed));
  EXPECT_EQ(devices[0].phase(), device_phase::ready);
  expect_unharmed();
}

// INV-11: a registered launch is completed when its worker has enqueued it. The worker ends, so
// that no request uses an incomplete result of the function.
TEST_F(BadInput, ExceptionFromAFunctionOnTheHostOfARegisteredLaunch) {
  open();
  auto thrown = answer_of(launch_host_exception(devices[0], "half-way"));
  ASSERT_TRUE(has_code(thrown, in_workers() ? errc::worker_lost : errc::launch_failed));
  EXPECT_NE(describe(error_of(thrown)).find("half-way"), std::string::npos)
      << describe(error_of(thrown));
}

// INV-11
TEST_F(BadInput, CodeOfALaunchStandsOnce) {
  TROUPE_IN_PROCESS_ONLY("callables");
  open();
  auto told = answer_of(devices[0].launch(
      [](launch_context&) {
        return make_error(failure{.code = errc::launch_failed, .detail = "mine", .api = "its_api"});
      },
      {}, {}));
  ASSERT_TRUE(has_code(told, errc::launch_failed));
  EXPECT_EQ(failure_of(error_of(told))->detail, "mine");
  EXPECT_EQ(failure_of(error_of(told))->api, "its_api");
}

// INV-11
TEST_F(BadInput, ExceptionFromALaunchCallable) {
  TROUPE_IN_PROCESS_ONLY("callables");
  open();
  auto thrown = answer_of(devices[0].launch(
      [](launch_context&) -> caf::error { throw std::runtime_error("nothing goes right today"); },
      {}, {}));
  ASSERT_TRUE(has_code(thrown, errc::launch_failed));
  EXPECT_NE(describe(error_of(thrown)).find("nothing goes right today"), std::string::npos);
  EXPECT_EQ(failure_of(error_of(thrown))->device, 0);
  thrown = answer_of(devices[0].launch([](launch_context&) -> caf::error { throw 7; }, {}, {}));
  EXPECT_TRUE(has_code(thrown, errc::launch_failed));
  must(register_launch("BadInput.Throws", [](launch_context&, auto, auto, auto) -> caf::error {
    throw std::runtime_error("nor tomorrow");
  }));
  const auto actor = must(devices[0].actor());
  auto told = ask<void>(*system, actor, launch{"BadInput.Throws", {}, {}, {}});
  ASSERT_TRUE(has_code(told, errc::launch_failed));
  EXPECT_NE(describe(error_of(told)).find("nor tomorrow"), std::string::npos);
  launch_callable callable;
  callable.function = [](launch_context&) -> caf::error { throw std::runtime_error("never"); };
  EXPECT_TRUE(has_code(ask<void>(*system, actor, callable), errc::launch_failed));
  EXPECT_EQ(devices[0].phase(), device_phase::ready);
  expect_unharmed();
}

TEST_F(BadInput, LaunchThatNobodyRegistered) {
  open();
  const auto actor = must(devices[0].actor());
  EXPECT_TRUE(has_code(ask<void>(*system, actor, launch{"BadInput.Unregistered", {}, {}, {}}),
                       errc::invalid_argument));
  EXPECT_TRUE(has_code(ask<void>(*system, actor, launch_callable{}), errc::invalid_argument));
  EXPECT_TRUE(has_code(answer_of(devices[0].launch({}, {}, {})), errc::invalid_argument));
  EXPECT_TRUE(
      has_code(register_launch("", [](launch_context&, auto, auto, auto) { return caf::error{}; }),
               errc::invalid_argument));
  EXPECT_TRUE(
      has_code(register_launch("BadInput.Empty", registered_launch{}), errc::invalid_argument));
  expect_unharmed();
}

TEST_F(BadInput, BlockingWaitWhereBlockingIsForbidden) {
  open();
  caf::error in_callback;
  caf::error in_lane;
  flag called;
  answer_of(devices[0].stats());
  devices[0].stats().then([&](const caf::expected<device_stats>&) {
    in_callback = error_of(under_test->all_reduce(send).wait());
    called.set();
  });
  ASSERT_TRUE(called.wait());
  EXPECT_TRUE(has_code(in_callback, errc::would_block));
  if (!in_workers()) { // workers run no function of this process
    EXPECT_TRUE(is_ok(answer_of(devices[0].launch(
        [&](launch_context&) {
          in_lane = error_of(devices[0].stats().wait());
          return caf::error{};
        },
        {}, {}))));
    EXPECT_TRUE(has_code(in_lane, errc::would_block));
  }
  // The all-reduce in the callback ran: only blocking waits are refused.
  std::erase_if(kept, [&](const auto& x) {
    return std::find(send.begin(), send.end(), x.first) != send.end();
  });
  expect_unharmed();
}

} // namespace
} // namespace troupe::testing
