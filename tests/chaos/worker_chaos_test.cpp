/// Worker processes are killed, stopped, reset and given faults at random, while several clients
/// load a world and its sub-worlds. Checked for every request: one result, in time (INV-1), with a
/// cause that occurred; no success with wrong content (INV-12). At the end no process, shared
/// memory, descriptor or thread is left, and no resource has grown.
///
/// TROUPE_CHAOS_SEED=n selects the seed, TROUPE_CHAOS_EVENTS=n the number of events for each
/// policy.

#include "support/answer_time.hpp"
#include "support/eventually.hpp"
#include "support/expect.hpp"
#include "support/from_environment.hpp"
#include "support/load.hpp"
#include "support/random.hpp"
#include "support/reference.hpp"
#include "support/world_fixture.hpp"
#include <troupe/testing/fault_plan.hpp>
#include <troupe/troupe.hpp>
#include <troupe/worker.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <unistd.h>

namespace troupe::testing {

namespace {

using clock = std::chrono::steady_clock;

constexpr int devices = 8;
constexpr std::size_t most = 1024; ///< elements of a rank's part
constexpr std::size_t buffer_bytes = most * devices * 8;
constexpr std::chrono::nanoseconds usual_deadline = 5s;
constexpr std::chrono::milliseconds stuck_limit{500};

// -- policies, one line each

struct policy {
  const char* name;
  world_limits limits;
  int spares = 0; ///< number of spares while all devices work
};

world_limits limits_with(standby_policy standby, loss_policy on_loss) {
  world_limits x;
  x.deadline = usual_deadline;
  x.stall_limit = 300ms;
  x.quiet_limit = 5s; // no lane blocks for ever
  x.restarts = 1 << 30;
  x.restart_backoff = 0ms;
  x.standby = standby;
  x.on_loss = on_loss;
  return x;
}

const std::array policies{
    policy{"rebuild", limits_with(standby_policy::none, loss_policy::rebuild)},
    policy{"same", limits_with(standby_policy::communicators, loss_policy::rebuild)},
    policy{"failover", limits_with(standby_policy::full, loss_policy::failover), devices},
    policy{"shrink", limits_with(standby_policy::communicators, loss_policy::shrink)},
};

// -- resources of this process

bool is_child(pid_t id) {
  std::ifstream file{"/proc/" + std::to_string(id) + "/stat"};
  std::string line;
  std::getline(file, line);
  const auto name_end = line.rfind(')');
  if (name_end == std::string::npos)
    return false;
  std::istringstream rest{line.substr(name_end + 1)};
  char state = 0;
  pid_t parent = 0;
  rest >> state >> parent;
  return parent == ::getpid();
}

/// Returns the child processes, including zombies.
std::set<pid_t> children() {
  std::set<pid_t> result;
  for (const auto& x : std::filesystem::directory_iterator{"/proc"}) {
    const auto name = x.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos)
      continue;
    if (const auto id = static_cast<pid_t>(std::stol(name)); is_child(id))
      result.insert(id);
  }
  return result;
}

std::vector<std::string> descriptors() {
  std::vector<std::string> result;
  for (const auto& x : std::filesystem::directory_iterator{"/proc/self/fd"}) {
    std::error_code code;
    const auto target = std::filesystem::read_symlink(x.path(), code);
    if (!code) // the iterator's own descriptor is closed again
      result.push_back(target.string());
  }
  return result;
}

std::size_t memory_descriptors() {
  const auto all = descriptors();
  return static_cast<std::size_t>(std::count_if(
      all.begin(), all.end(), [](auto& x) { return x.find("memfd:") != std::string::npos; }));
}

std::set<std::string> named_memory() {
  std::set<std::string> result;
  for (const auto& x : std::filesystem::directory_iterator{"/dev/shm"})
    result.insert(x.path().filename().string());
  return result;
}

/// Resources that must not grow.
struct footprint {
  std::size_t resident = 0;
  std::size_t threads = 0;
  std::map<std::string, std::size_t> descriptors; ///< by kind
};

footprint footprint_now() {
  footprint result{resident_memory(), threads_of_this_process(), {}};
  for (auto& x : descriptors())
    ++result.descriptors[x.substr(0, x.find_first_of("0123456789"))];
  return result;
}

std::string text_of(const std::map<std::string, std::size_t>& counts) {
  std::string result;
  for (auto& [what, n] : counts)
    result += (result.empty() ? "" : ", ") + std::to_string(n) + " " + what;
  return result;
}

bool more_of_a_kind(const std::map<std::string, std::size_t>& now,
                    const std::map<std::string, std::size_t>& before) {
  return std::any_of(now.begin(), now.end(), [&](auto& x) {
    const auto i = before.find(x.first);
    return x.second > (i != before.end() ? i->second : 0);
  });
}

// -- the worker of each device

[[maybe_unused]] const bool registered = [] {
  must(register_launch("troupe.testing.process",
                       [](launch_context& context, auto, auto writes, auto) {
                         return context.run_on_host([to = must(writes.front().access())] {
                           const std::int64_t id = ::getpid();
                           std::memcpy(to, &id, sizeof id);
                         });
                       }));
  return true;
}();

enum class event : std::uint8_t {
  killed,
  stuck,
  stopped_shortly,
  killed_spare,
  not_issued,
  hang,
  communicator_error,
  no_memory,
  reset,
};

constexpr std::array event_names{
    "a worker killed",  "a worker stuck",    "a worker stopped shortly",
    "a spare killed",   "a rank not issued", "a hang",
    "an error of NCCL", "out of memory",     "a reset"};
constexpr std::array event_weights{26, 4, 10, 10, 12, 10, 12, 8, 8};
static_assert(event_names.size() == event_weights.size());

class chaos {
public:
  chaos(const policy& what, std::uint64_t seed, int events)
      : policy_(what), seed_(seed), events_(events), random_(seed) {}

  void run() {
    set_log_sink([this](const log_line& x) { hear(x); }); // starts the log's thread
    const auto before = footprint_now();
    const auto memory_before = memory_descriptors();
    const auto named_before = named_memory();
    {
      config cfg;
      cfg.use_backend(
          with_faults(must(make_worker_backend({.backend = "host",
                                                .host = {.devices = devices},
                                                .workers = {.stuck_limit = stuck_limit}})),
                      plan_));
      cfg.device_deadline = usual_deadline;
      caf::actor_system sys{cfg};
      sys_ = &sys;
      open();
      play();
      plan_->disarm();
      settle();
      close();
    }
    set_log_sink({});
    check_answers();
    check_left_over(before, memory_before, named_before);
    if (::testing::Test::HasFailure())
      for (auto& line : log_)
        std::printf("  %s\n", line.c_str());
    report();
  }

private:
  struct member {
    world over;
    std::atomic<std::uint64_t> right = 0; ///< collectives with correct content
  };

  // -- helpers

  void note(std::string text) {
    std::lock_guard lock{mutex_};
    const auto ms = std::chrono::duration<double, std::milli>(clock::now() - begin_).count();
    log_.push_back(std::to_string(ms) + " ms: " + std::move(text));
  }
  void hear(const log_line& x) {
    if (x.level >= log_level::info)
      note("log: " + std::string{x.text} + (x.why != nullptr ? ": " + to_string(*x.why) : ""));
  }
  void complain(std::string text) {
    note("WRONG: " + text);
    std::lock_guard lock{mutex_};
    complaints_.insert(std::move(text));
  }

  // -- setup

  void open() {
    world_config all{.devices = all_devices(*sys_), .name = "all", .limits = policy_.limits};
    add(must(world::open(*sys_, std::move(all))));
    for (auto& x : must(worlds_[0]->over.split("half", {0, 0, 0, 0, 1, 1, 1, 1})))
      add(x);
    for (int d = 0; d < devices; ++d)
      tells_.push_back(must(answer_of(device_of(d).allocate(dtype::int64, 1))));
  }

  void add(world x) { worlds_.push_back(std::make_unique<member>(std::move(x))); }

  device device_of(int ordinal) const {
    return worlds_[0]->over.device_of(static_cast<std::size_t>(ordinal));
  }

  // -- requests

  /// Counts the request and its result. The caller may wait for the result too.
  template <class T> pending<T> track(std::chrono::nanoseconds limit, pending<T> x) {
    auto answers = std::make_shared<std::atomic<int>>(0);
    {
      std::lock_guard lock{mutex_};
      ++asked_;
      ++open_;
    }
    when_answered(x, limit, [this, answers](const caf::expected<T>& answer, clock::duration late) {
      if (++*answers != 1)
        return complain("a request has two answers");
      judge(error_of(answer));
      std::lock_guard lock{mutex_};
      latest_ = std::max(latest_, late);
      --open_;
      all_answered_.notify_all();
    });
    return x;
  }

  /// Checks that the error has a cause that occurred.
  void judge(const caf::error& why) {
    const auto code = code_of(why);
    {
      std::lock_guard lock{mutex_};
      ++answers_[!why ? "right" : code ? std::string{to_string(*code)} : "another library's"];
    }
    if (!why)
      return;
    const auto f = failure_of(why);
    if (!code || !f)
      return complain("an error of another library: " + to_string(why));
    const auto text = describe(why);
    switch (*code) {
    case errc::worker_lost:
      judge_loss(*f, text);
      break;
    case errc::nccl_error:
      if (text.find("injected") == std::string::npos)
        complain("an error without a cause: " + text);
      break;
    case errc::stalled:
      if (!happened(event::not_issued) && !happened(event::hang) &&
          !happened(event::stopped_shortly) && !happened(event::stuck))
        complain("nothing stands still: " + text);
      break;
    case errc::out_of_memory:
    case errc::rank_not_issued:
      if (!happened(event::no_memory))
        complain("there was memory: " + text);
      break;
    case errc::device_reset:
      if (!happened(event::reset))
        complain("no reset was requested: " + text);
      break;
    case errc::membership_changed: // possible while some ranks are missing
      if (policy_.limits.on_loss != loss_policy::shrink)
        complain("the members are all there: " + text);
      break;
    case errc::skipped:
      if (cause_of(why) != errc::worker_lost)
        complain("the request before it ran: " + text);
      break;
    case errc::stale_ref:
    case errc::indeterminate:
    case errc::deadline_exceeded:
      break;
    default:
      complain("this cannot be: " + text);
    }
  }

  /// Checks that a lost worker received the signal that explains its loss.
  void judge_loss(const failure& f, const std::string& text) {
    static const std::string mark = "process ";
    const auto at = text.find(mark);
    if (at == std::string::npos)
      return; // it ended before its process id was known
    const auto id = static_cast<pid_t>(std::stol(text.substr(at + mark.size())));
    const bool silent = text.find("no sign of life") != std::string::npos;
    std::lock_guard lock{mutex_};
    const auto i = struck_.find(id);
    if (i == struck_.end())
      complaints_.insert("that worker was not struck: " + text);
    else if (silent && !i->second.stopped)
      complaints_.insert("that worker was not stopped: " + text);
    else if (!silent && !i->second.killed)
      complaints_.insert("that worker was not killed: " + text);
    else if (auto& device = i->second.device; device != -1 && f.device != device)
      complaints_.insert("that worker had another device: " + text);
    else
      device = f.device;
  }

  bool happened(event x) const { return counts_[static_cast<std::size_t>(x)] != 0; }

  // -- clients

  void play() {
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < worlds_.size() + 1; ++i)
      threads.emplace_back([this, i] { client(*worlds_[i % worlds_.size()], seed_ * 100 + i); });
    clients_ = threads.size();
    std::optional<footprint> early;
    try {
      for (int i = 0; i < events_ && complaints() == 0; ++i) {
        strike();
        if (!chance(random_, 0.3))
          go_on();
        if (i == events_ / 4)
          early = at_rest();
      }
      go_on();
      const auto late = at_rest();
      if (early)
        compare(*early, late);
    } catch (const std::exception& why) {
      complain(why.what());
    }
    {
      std::lock_guard lock{mutex_};
      stop_ = true;
      paused_ = false;
      changed_.notify_all();
    }
    for (auto& x : threads)
      x.join();
  }

  std::size_t complaints() {
    std::lock_guard lock{mutex_};
    return complaints_.size();
  }

  /// Blocks while the clients are paused. Returns false when the test stops.
  bool may_go_on() {
    std::unique_lock lock{mutex_};
    ++idle_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return !paused_ || stop_; });
    --idle_;
    return !stop_;
  }

  /// The buffers of a client, by rank.
  struct buffers {
    std::vector<any_gpu_ref> send;
    std::vector<any_gpu_ref> recv;
  };

  void client(member& on, std::uint64_t seed) {
    std::mt19937_64 random{seed};
    buffers mine;
    mine.send.resize(on.over.size());
    mine.recv.resize(on.over.size());
    try {
      while (may_go_on())
        if (renew(on.over, mine, random))
          on.right += compute(on.over, mine, random);
    } catch (const std::exception& why) {
      complain(std::string{"a client: "} + why.what());
    }
  }

  std::chrono::nanoseconds some_deadline(std::mt19937_64& random) {
    return chance(random, 0.1)
               ? std::chrono::nanoseconds{std::chrono::microseconds{pick(random, 500, 20'000)}}
               : usual_deadline;
  }

  /// Replaces lost buffers, and sometimes others.
  bool renew(const world& over, buffers& mine, std::mt19937_64& random) {
    std::vector<std::pair<any_gpu_ref*, pending<any_gpu_ref>>> asked;
    for (auto* side : {&mine.send, &mine.recv})
      for (std::size_t r = 0; r < over.size(); ++r)
        if (auto& x = (*side)[r]; !x.memory() || x.stale() || chance(random, 0.01)) {
          const auto limit = some_deadline(random);
          asked.emplace_back(&x,
                             track(limit, over.device_of(r).allocate(dtype::uint8, buffer_bytes,
                                                                     false, {.deadline = limit})));
        }
    bool all = true;
    for (auto& [to, answer] : asked) {
      auto fresh = answer.wait();
      *to = fresh ? *fresh : any_gpu_ref{};
      all = all && fresh;
    }
    return all;
  }

  static any_gpu_ref part(const any_gpu_ref& x, dtype type, std::size_t count) {
    return must(must(x.reinterpret(type)).slice(0, count));
  }

  collective_spec some_collective(const world& over, std::mt19937_64& random) {
    constexpr std::array kinds{collective_kind::all_reduce,     collective_kind::all_reduce,
                               collective_kind::all_gather,     collective_kind::broadcast,
                               collective_kind::reduce_scatter, collective_kind::all_to_all,
                               collective_kind::reduce};
    constexpr std::array types{dtype::int32, dtype::uint64, dtype::float32};
    collective_spec x{kinds[pick(random, 0, kinds.size() - 1)],
                      types[pick(random, 0, types.size() - 1)]};
    x.count = pick(random, 1, most);
    x.ranks = static_cast<int>(over.size());
    x.op = chance(random, 0.5) ? reduce_op::sum : reduce_op::max;
    x.root = static_cast<int>(pick(random, 0, over.size() - 1));
    x.seed = random();
    x.kind = input_kind::exact;
    return completed(x);
  }

  pending<void> upload(const device& to, const any_gpu_ref& target,
                       std::span<const std::byte> bytes) {
    const auto* first = reinterpret_cast<const std::uint8_t*>(bytes.data());
    return track(usual_deadline,
                 to.upload(target,
                           host_buffer{std::vector<std::uint8_t>(first, first + bytes.size())},
                           {.deadline = usual_deadline}));
  }

  /// Runs one collective, with its transfers. Returns true if the content is known and correct.
  bool compute(const world& over, const buffers& mine, std::mt19937_64& random) {
    const auto spec = some_collective(over, random);
    const auto sends = random_sends(spec);
    const auto size = size_of(spec.type);
    collective what{.kind = spec.what, .op = spec.op};
    const bool rooted_send = spec.what == collective_kind::broadcast;
    const bool rooted_recv = spec.what == collective_kind::reduce;
    if (rooted_send || rooted_recv)
      what.peer = spec.root;
    std::vector<std::vector<std::byte>> before(over.size());
    for (std::size_t r = 0; r < over.size(); ++r) {
      const auto rank = static_cast<int>(r);
      if (const auto n = send_count(spec, rank); n > 0 && (!rooted_send || rank == spec.root)) {
        what.send.push_back(part(mine.send[r], spec.type, n));
        upload(over.device_of(r), what.send.back(), std::span{sends[r]}.first(n * size));
      }
      if (const auto n = recv_count(spec, rank); n > 0 && (!rooted_recv || rank == spec.root)) {
        before[r].resize(n * size);
        poison(before[r]);
        what.recv.push_back(part(mine.recv[r], spec.type, n));
        upload(over.device_of(r), what.recv.back(), before[r]);
      }
    }
    const auto limit = some_deadline(random);
    const bool may_shrink = spec.what == collective_kind::all_reduce && chance(random, 0.8);
    const auto done =
        track(limit, over.run(what, {.deadline = limit, .allow_shrunk = may_shrink})).wait();
    if (!done)
      return false;
    if (!done->ranks.empty())
      return check_shrunk(over, spec, sends, what.recv, done->ranks);
    bool all = true;
    auto ref = what.recv.begin();
    for (std::size_t r = 0; r < over.size(); ++r) {
      if (before[r].empty())
        continue;
      auto after = std::make_shared<std::vector<std::byte>>(before[r].size());
      if (track(usual_deadline,
                over.device_of(r).download(*ref++, std::span{*after}, {.deadline = usual_deadline}))
              .wait()) {
        const auto result = check_collective(spec, static_cast<int>(r), sends, before[r], *after);
        if (!result)
          complain("a wrong content: " + std::string{to_string(spec.what)} + ", rank " +
                   std::to_string(r) + ": " + to_string(result));
      } else {
        all = false;
      }
    }
    return all;
  }

  /// For an all-reduce: checks that the ranks that took part have the result of their inputs.
  bool check_shrunk(const world& over, const collective_spec& spec,
                    const std::vector<std::vector<std::byte>>& sends,
                    const std::vector<any_gpu_ref>& recv, const std::vector<std::int32_t>& ranks) {
    std::vector<std::vector<std::byte>> inputs;
    for (auto r : ranks)
      inputs.push_back(sends[static_cast<std::size_t>(r)]);
    bool all = true;
    for (auto r : ranks) {
      const auto& from = recv[static_cast<std::size_t>(r)];
      std::vector<std::byte> output(from.size_bytes());
      if (track(usual_deadline,
                over.device_of(static_cast<std::size_t>(r))
                    .download(from, std::span{output}, {.deadline = usual_deadline}))
              .wait()) {
        if (const auto result = check(spec.type, spec.op, inputs, output, spec.kind); !result)
          complain("a wrong content of fewer ranks: rank " + std::to_string(r) + ": " +
                   to_string(result));
      } else {
        all = false;
      }
    }
    ++shrunk_;
    return all;
  }

  // -- events

  /// Returns the workers of the devices that report their process id in time.
  std::map<int, pid_t> workers() {
    constexpr std::chrono::milliseconds limit{300};
    std::map<int, pid_t> result;
    std::vector<std::optional<pending<void>>> told;
    std::array<std::int64_t, devices> ids{};
    for (int d = 0; d < devices; ++d) {
      const auto i = static_cast<std::size_t>(d);
      auto& ref = tells_[i];
      if (!ref.memory() || ref.stale())
        if (auto fresh =
                track(limit, device_of(d).allocate(dtype::int64, 1, false, {.deadline = limit}))
                    .wait())
          ref = *fresh;
      told.emplace_back();
      if (!ref.memory())
        continue;
      static_cast<void>(
          device_of(d).launch("troupe.testing.process", {}, {}, {ref}, {.deadline = limit}));
      told.back() = device_of(d).download(ref, std::as_writable_bytes(std::span{&ids[i], 1}),
                                          {.deadline = limit});
    }
    for (int d = 0; d < devices; ++d)
      if (auto& x = told[static_cast<std::size_t>(d)]; x && x->wait())
        result[d] = static_cast<pid_t>(ids[static_cast<std::size_t>(d)]);
    return result;
  }

  event some_event() {
    std::discrete_distribution<std::size_t> of(event_weights.begin(), event_weights.end());
    return static_cast<event>(of(random_));
  }

  void strike() {
    auto what = some_event();
    const auto d = static_cast<int>(pick(random_, 0, devices - 1));
    std::optional<pid_t> target;
    if (what <= event::killed_spare) {
      const auto busy = workers();
      if (what == event::killed_spare) {
        auto spares = children();
        for (auto& [on, id] : busy)
          spares.erase(id);
        if (busy.size() == devices && !spares.empty())
          target = *std::next(spares.begin(),
                              static_cast<std::ptrdiff_t>(pick(random_, 0, spares.size() - 1)));
        else
          what = event::killed;
      }
      if (const auto i = busy.find(d); !target && i != busy.end())
        target = i->second;
      if (!target)
        return; // it is already lost
    }
    ++counts_[static_cast<std::size_t>(what)];
    note("event: " + std::string{event_names[static_cast<std::size_t>(what)]} +
         (target ? ", process " + std::to_string(*target) : "") + ", device " + std::to_string(d));
    switch (what) {
    case event::killed:
    case event::killed_spare:
      signal(*target, SIGKILL);
      break;
    case event::stuck:
      signal(*target, SIGSTOP);
      break;
    case event::stopped_shortly:
      signal(*target, SIGSTOP);
      std::this_thread::sleep_for(std::chrono::milliseconds{pick(random_, 5, 150)});
      signal(*target, SIGCONT);
      break;
    case event::not_issued:
      plan_->add({.kind = fault::not_issued, .on = verb::collective, .device = d});
      break;
    case event::hang:
      plan_->add({.kind = fault::hang, .on = verb::collective, .device = d});
      break;
    case event::communicator_error:
      plan_->add({.kind = fault::fail,
                  .on = chance(random_, 0.5) ? verb::collective : verb::asynchronous_error,
                  .device = d});
      break;
    case event::no_memory:
      if (chance(random_, 0.5))
        plan_->add({.kind = fault::out_of_memory, .on = verb::allocate, .device = d});
      else
        plan_->add({.kind = fault::fail,
                    .on = verb::collective,
                    .device = d,
                    .error = errc::out_of_memory});
      break;
    case event::reset:
      track(usual_deadline, device_of(d).reset({.deadline = usual_deadline}));
      break;
    }
  }

  void signal(pid_t to, int number) {
    {
      std::lock_guard lock{mutex_};
      auto& x = struck_[to];
      if (x.device != -1) // the old process has ended: its id was reused
        x = {};
      x.killed = x.killed || number == SIGKILL;
      x.stopped = x.stopped || number == SIGSTOP;
    }
    if (is_child(to) && ::kill(to, number) != 0 && errno != ESRCH)
      complain("a signal cannot be sent: " + std::string{std::strerror(errno)});
  }

  /// Waits until every world completes another collective.
  void go_on() {
    for (auto& x : worlds_) {
      const auto from = x->right.load();
      if (!eventually([&] { return x->right != from || complaints() != 0; }))
        throw std::runtime_error("world " + x->over.status().name + " does not go on");
    }
  }

  // -- shutdown and checks

  /// Returns the footprint while all clients are paused and all worlds are complete.
  footprint at_rest() {
    {
      std::unique_lock lock{mutex_};
      paused_ = true;
      if (!changed_.wait_for(lock, 2 * patience, [this] { return idle_ == clients_; }))
        throw std::runtime_error("a client waits for an answer");
    }
    for (auto& x : worlds_) {
      world_feed feed{*sys_, x->over.actor()};
      feed.until([](const world_status& s) {
        return s.phase == world_phase::ready && s.standby_ready; // collectives are direct
      });
    }
    const auto want = static_cast<std::size_t>(devices + policy_.spares);
    if (!eventually([&] { return children().size() == want; }))
      throw std::runtime_error(std::to_string(children().size()) + " workers, not " +
                               std::to_string(want));
    auto result = footprint_now();
    // Short-lived threads clean up after ended workers.
    eventually(
        [&] {
          const auto now = footprint_now();
          const bool same = now.threads == result.threads && now.descriptors == result.descriptors;
          result = now;
          std::this_thread::sleep_for(50ms);
          return same;
        },
        at_once);
    std::lock_guard lock{mutex_};
    paused_ = false;
    changed_.notify_all();
    return result;
  }

  void compare(const footprint& early, const footprint& late) {
    note("resident memory " + std::to_string(early.resident >> 10) + " KiB, then " +
         std::to_string(late.resident >> 10) + "; threads " + std::to_string(early.threads) +
         ", then " + std::to_string(late.threads) + "; descriptors " + text_of(early.descriptors) +
         ", then " + text_of(late.descriptors));
    std::printf("%s\n", log_.back().c_str());
    if (late.threads > early.threads + devices) // each may have got a staging thread
      complain("more threads than before");
    auto allowed_descriptors = early.descriptors;
    // A hanging stream has memory of the plan that a device sees. Staging grows up to its limit.
    allowed_descriptors["/memfd:troupe (deleted)"] += 2 * devices;
    if (more_of_a_kind(late.descriptors, allowed_descriptors))
      complain("more descriptors than before");
    // A hundred or more communicators must leave no memory.
    constexpr std::size_t allowed = (std::size_t{16} << 20) + kept_by_sanitizer;
    if (late.resident > early.resident + allowed)
      complain("more memory than before");
  }

  void settle() {
    std::unique_lock lock{mutex_};
    if (!all_answered_.wait_for(lock, patience, [this] { return open_ == 0; }))
      complaints_.insert(std::to_string(open_) + " requests have no answer");
    lock.unlock();
    for (auto& x : worlds_)
      if (!eventually([&] {
            try {
              return static_cast<bool>(works(x->over));
            } catch (const std::exception&) { // a device that is not back yet
              return false;
            }
          }))
        complain("world " + x->over.status().name + " does not work any more");
  }

  void close() {
    tells_.clear();
    worlds_.clear();
  }

  // INV-1
  void check_answers() {
    std::lock_guard lock{mutex_};
    for (auto& x : complaints_)
      ADD_FAILURE() << x;
    EXPECT_LT(latest_, at_once);
    std::uint64_t all = 0;
    for (auto& [what, n] : answers_)
      all += n;
    EXPECT_EQ(all, asked_);
    EXPECT_GT(answers_["right"], all / 2);
  }

  void check_left_over(const footprint& before, std::size_t memory_before,
                       const std::set<std::string>& named_before) {
    EXPECT_TRUE(eventually([] { return children().empty(); }, at_once)) << "a process is left";
    EXPECT_TRUE(eventually([&] { return memory_descriptors() <= memory_before; }, at_once))
        << memory_descriptors() << " pieces of shared memory are left, before there were "
        << memory_before;
    EXPECT_TRUE(eventually(
        [&] { return !more_of_a_kind(footprint_now().descriptors, before.descriptors); }, at_once))
        << "descriptors are left";
    EXPECT_TRUE(eventually([&] { return footprint_now().threads <= before.threads; }, at_once))
        << "threads are left";
    for (auto& x : named_memory()) // other processes may have objects there
      if (x.find("troupe") != std::string::npos) {
        EXPECT_TRUE(named_before.contains(x)) << x << " is left in /dev/shm";
      }
  }

  void report() {
    for (std::size_t i = 0; i < event_names.size(); ++i)
      std::printf("%6llu %s\n", static_cast<unsigned long long>(counts_[i].load()), event_names[i]);
    for (auto& [what, n] : answers_)
      std::printf("%6llu answers: %s\n", static_cast<unsigned long long>(n), what.c_str());
    const auto ms = [](clock::duration x) {
      return std::chrono::duration<double, std::milli>(x).count();
    };
    std::printf("%6llu collectives of fewer ranks\n",
                static_cast<unsigned long long>(shrunk_.load()));
    std::printf("latest answer %.2f ms after its deadline\n", ms(latest_));
  }

  /// Signals sent to a process.
  struct blow {
    bool killed = false;
    bool stopped = false;
    int device = -1; ///< device lost with it, if known
  };

  const policy policy_;
  const std::uint64_t seed_;
  const int events_;
  std::mt19937_64 random_;
  const clock::time_point begin_ = clock::now();
  std::shared_ptr<fault_plan> plan_ = std::make_shared<fault_plan>(seed_);
  caf::actor_system* sys_ = nullptr;
  std::vector<std::unique_ptr<member>> worlds_;
  std::vector<any_gpu_ref> tells_; ///< by device
  std::array<std::atomic<std::uint64_t>, event_names.size()> counts_{};

  std::mutex mutex_;
  std::condition_variable changed_; ///< signals `paused_`, `stop_` and `idle_`
  bool paused_ = false;
  bool stop_ = false;
  std::size_t clients_ = 0;
  std::size_t idle_ = 0;
  std::condition_variable all_answered_;
  std::uint64_t asked_ = 0;
  std::uint64_t open_ = 0;
  std::atomic<std::uint64_t> shrunk_ = 0; ///< number of collectives
  clock::duration latest_{};
  std::map<std::string, std::uint64_t> answers_;
  std::map<pid_t, blow> struck_;
  std::set<std::string> complaints_;
  std::vector<std::string> log_;
};

class WorkerChaos : public ::testing::TestWithParam<policy> {};

INSTANTIATE_TEST_SUITE_P(Policies, WorkerChaos, ::testing::ValuesIn(policies),
                         [](const auto& x) { return std::string{x.param.name}; });

TEST_P(WorkerChaos, AnswersEverythingOnceInTimeAndRight) {
  flag warm; // starts the one thread that stays
  detail::callback_executor().post([&] { warm.set(); });
  ASSERT_TRUE(warm.wait());
  chaos{GetParam(), number_from_environment("TROUPE_CHAOS_SEED", 1),
        static_cast<int>(number_from_environment("TROUPE_CHAOS_EVENTS", 120))}
      .run();
}

} // namespace

} // namespace troupe::testing
