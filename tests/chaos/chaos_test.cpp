/// Random operations of several clients on overlapping worlds, under seeded fault plans. Checked
/// for every request of every seed: one result, in time (INV-1); no work on freed memory (INV-2,
/// INV-4); one cause for all requests that end with a communicator (INV-7); no success with wrong
/// content (INV-9, INV-12). At the end of each seed no thread and no memory is left.
///
/// A failure names its seed. TROUPE_CHAOS_SEED=n runs only that seed and prints its log.
/// TROUPE_CHAOS_SEEDS=n overrides the number of seeds in each case.

#include "chaos/content_model.hpp"
#include "chaos/random_collective.hpp"
#include "foundation/log.hpp"
#include "support/answer_time.hpp"
#include "support/collective_forms.hpp"
#include "support/eventually.hpp"
#include "support/expect.hpp"
#include "support/from_environment.hpp"
#include "support/guarded_backend.hpp"
#include "support/world_fixture.hpp"
#include <troupe/testing/fault_plan.hpp>
#include <troupe/troupe.hpp>
#include <troupe/worker.hpp>

#include <caf/all.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

using clock = std::chrono::steady_clock;
using request_function = std::function<void()>;

constexpr int devices = 4;
constexpr std::size_t shared_rows = 3; ///< rows of buffers for whole operations
constexpr std::size_t rows = 5;        ///< the others are for rank-local calls

enum class trouble : std::uint8_t {
  none,
  haste,
  not_issued,
  communicator_error,
  hang,
  slow,
  reset,
  no_memory,
  killed_actor,
  ended_world,
  ended_device,
  mixed,
  device_fault,
  stuck_lane
};

constexpr std::array trouble_names{"none",
                                   "short deadlines",
                                   "rank not issued",
                                   "communicator error",
                                   "hangs",
                                   "slow",
                                   "resets",
                                   "out of memory",
                                   "killed actors",
                                   "ended worlds",
                                   "an ended device",
                                   "all of these",
                                   "a sticky fault",
                                   "a stuck lane"};

bool ends_process(trouble x) { return x >= trouble::device_fault; }

std::size_t thread_count() {
  std::filesystem::directory_iterator tasks{"/proc/self/task"};
  return static_cast<std::size_t>(std::distance(begin(tasks), end(tasks)));
}

/// Computes a[i] = a[i] op b[i].
void combine_all(dtype type, reduce_op op, std::size_t count, std::byte* a, const std::byte* b) {
  const auto size = size_of(type);
  for (std::size_t i = 0; i < count; ++i) {
    std::uint64_t p = 0;
    std::uint64_t q = 0;
    std::memcpy(&p, a + i * size, size);
    std::memcpy(&q, b + i * size, size);
    p = combine(type, op, p, q);
    std::memcpy(a + i * size, &p, size);
  }
}

/// The arguments of `combine_all` as a registered launch.
struct combining {
  static constexpr const char* name = "Chaos.combine";

  dtype type;
  reduce_op op;
  std::chrono::milliseconds busy;
};

/// Workers run the same program, so the launch is registered there too.
[[maybe_unused]] const bool registered = [] {
  must(register_launch(
      combining::name, [](launch_context& context, auto reads, auto writes, auto arguments) {
        combining what{};
        std::memcpy(&what, arguments.data(), sizeof what);
        std::this_thread::sleep_for(what.busy);
        return context.run_on_host([what, count = writes[0].count(),
                                    a = static_cast<std::byte*>(must(writes[0].access())),
                                    b = static_cast<const std::byte*>(must(reads[1].access()))] {
          combine_all(what.type, what.op, count, a, b);
        });
      }));
  return true;
}();

/// The record of one request.
struct request_record {
  std::size_t index = 0;
  std::string text;
  int world = -1;
  bool by_message = false;
  std::function<std::uint64_t()> number;
  request_function cancel;
  std::vector<content_model::effect> effects;

  // For a rank-local call.
  int rank = -1;
  std::optional<rank_pieces> of; ///< the calls of all ranks
  std::optional<content_model::place> sends;
  std::optional<content_model::version> receives;
  std::size_t received = 0; ///< elements

  // For a download.
  std::optional<content_model::place> read;
  std::shared_ptr<std::vector<std::byte>> memory; ///< not accessed after the result
  std::vector<std::byte> got;

  // For a rank's call over host memory.
  std::vector<std::byte> sent;
  std::optional<content> want;

  // Protected by answers_mutex_.
  int answers = 0;
  clock::duration late{};
  caf::error error;
  collective_done done;

  /// Returns the operation that a rank's call belonged to; 0: unknown.
  std::uint64_t operation() const {
    if (number)
      return number();
    return error ? 0 : done.operation;
  }

  fate how() const {
    if (!error)
      return fate::ran;
    auto code = code_of(error);
    return code == errc::deadline_exceeded || code == errc::cancelled ? fate::perhaps
                                                                      : fate::failed;
  }
};

using record_ptr = std::shared_ptr<request_record>;

constexpr std::byte used_up{0x5c};

/// An actor that makes one request as a client, and detects when its receiver has admitted it.
template <class Reply, class Request, class Probe> class requester : public detail::actor_base<> {
public:
  using reply_function = std::function<void(caf::expected<Reply>)>;

  requester(caf::actor_config& cfg, caf::actor to, Request what, std::chrono::nanoseconds deadline,
            Probe probe, reply_function reply, request_function admitted)
      : actor_base(cfg), to_(std::move(to)), what_(std::move(what)), deadline_(deadline),
        probe_(std::move(probe)), reply_(std::move(reply)), admitted_(std::move(admitted)) {}

  caf::behavior make_behavior() override {
    auto failed = [this](const caf::error& why) { replied(why); };
    auto request = troupe::request(this, to_, what_, deadline_);
    if constexpr (std::is_void_v<Reply>)
      std::move(request).then([this] { replied(caf::expected<void>{}); }, failed);
    else
      std::move(request).then([this](const Reply& x) { replied(x); }, failed);
    auto known = [this](const caf::error&) { knows(); };
    auto probing = detail::request(this, to_, caf::infinite, probe_);
    if constexpr (std::is_same_v<Probe, get_status>)
      std::move(probing).then([this](const world_status&) { knows(); }, known);
    else
      std::move(probing).then([this] { knows(); }, known);
    return with_exit([this](caf::exit_msg& x) { quit(x.reason); }, [](const device_changed&) {});
  }

private:
  void replied(caf::expected<Reply> x) {
    reply_(std::move(x));
    if (++over_ == 2)
      quit();
  }
  void knows() {
    admitted_();
    if (++over_ == 2)
      quit();
  }

  const caf::actor to_;
  const Request what_;
  const std::chrono::nanoseconds deadline_;
  const Probe probe_;
  const reply_function reply_;
  const request_function admitted_;
  int over_ = 0;
};

/// Results over all seeds of a case: lateness and error codes.
struct tally {
  std::map<std::string, int> answers;
  std::map<trouble, std::uint64_t> faults; ///< injected by the fault plans
  clock::duration latest{};
  clock::duration latest_message{};
  clock::duration latest_mesh{}; ///< of calls over host memory, completed on other threads
};

/// One seed.
class chaos_run {
public:
  chaos_run(std::uint64_t seed, trouble what, tally& all)
      : seed_(seed), trouble_(what), tally_(all), random_(seed * 0x9e3779b97f4a7c15U) {}

  /// Runs the seed. Returns the errors found.
  std::vector<std::string> run() {
    set_log_sink([this](const log_line& x) { hear(x); }); // starts the log's thread
    auto threads_before = thread_count();
    plan_ = std::make_shared<fault_plan>(seed_);
    {
      const host_backend_options host{devices, std::size_t{1} << 24};
      config cfg; // keeps the devices alive
      cfg.use_backend(with_faults(
          books_.guard(in_workers() ? must(make_worker_backend({.backend = "host", .host = host}))
                                    : make_host_backend(host)),
          plan_));
      cfg.device_deadline = base_deadline();
      if (pick(random_, 0, 1) == 0)
        cfg.lanes.staging_bytes = 4096;
      caf::actor_system sys{cfg};
      sys_ = &sys;
      open();
      play();
      settle();
      evaluate();
      close();
    }
    set_log_sink({});
    check_left_over(threads_before);
    check_answers();
    tally_.faults[trouble_] += plan_->injected();
    return complaints_;
  }

  std::string log() const {
    std::lock_guard lock{log_mutex_};
    std::ostringstream out;
    for (auto& line : log_)
      out << "  " << line << '\n';
    return out.str();
  }

private:
  struct slot {
    any_gpu_ref ref;
    std::size_t buffer = 0;
  };
  struct world_entry {
    world over;
    std::vector<int> devices; ///< by rank
  };

  // -- helpers

  void note(std::string text) {
    auto ms = std::chrono::duration<double, std::milli>(clock::now() - begin_).count();
    std::lock_guard lock{log_mutex_};
    log_.push_back(std::to_string(ms) + " ms: " + std::move(text));
  }
  /// Records a log line. The log reports the end of each communicator once.
  void hear(const log_line& x) {
    if (x.level < log_level::info)
      return;
    note("log: " + std::string{x.text} + (x.why != nullptr ? ": " + to_string(*x.why) : ""));
    if (x.why == nullptr || x.text != "a communicator ended")
      return;
    std::lock_guard lock{log_mutex_};
    ends_.insert(to_string(*x.why));
  }
  std::set<std::string> communicator_ends() {
    if (!detail::drain_log(patience))
      complain("the log is not drained");
    std::lock_guard lock{log_mutex_};
    return ends_;
  }
  void complain(std::string text) {
    note("WRONG: " + text);
    complaints_.push_back(std::move(text));
  }

  bool has(trouble x) const { return trouble_ == x || trouble_ == trouble::mixed; }
  bool calm() const { return trouble_ == trouble::none || trouble_ == trouble::slow; }

  std::chrono::nanoseconds base_deadline() const { return calm() ? 20s : 400ms; }
  std::chrono::nanoseconds deadline(std::mt19937_64& random) const {
    if (calm() || !chance(random, trouble_ == trouble::haste ? 0.5 : 0.15))
      return base_deadline();
    return std::chrono::microseconds{pick(random, 50, 20'000)};
  }

  /// Returns row, device and the number of the buffer there. Call with order_ held.
  std::string text_of(const piece& x) const {
    auto& s = slots_[x.row][static_cast<std::size_t>(x.device)];
    return std::to_string(x.row) + "." + std::to_string(x.device) + "#" + std::to_string(s.buffer) +
           "[" + std::to_string(x.first) + "+" + std::to_string(x.count) + "]";
  }

  // -- elements

  std::vector<std::byte> bytes_of_content(const content& x) const {
    auto size = size_of(type_);
    std::vector<std::byte> result(x.size() * size);
    for (std::size_t i = 0; i < x.size(); ++i)
      std::memcpy(result.data() + i * size, &*x[i], size);
    return result;
  }
  content content_of(std::span<const std::byte> bytes) const {
    auto size = size_of(type_);
    content result;
    for (std::size_t i = 0; i < bytes.size(); i += size) {
      std::uint64_t x = 0;
      std::memcpy(&x, bytes.data() + i, size);
      result.emplace_back(x);
    }
    return result;
  }
  content random_content(std::mt19937_64& random, std::size_t count) const {
    content result;
    for (std::size_t i = 0; i < count; ++i)
      result.emplace_back(random_element(random));
    return result;
  }
  /// Returns any integer, or one of some thousand floating-point numbers.
  std::uint64_t random_element(std::mt19937_64& random) const {
    if (!is_floating_point(type_))
      return combine(type_, reduce_op::sum, random(), 0);
    auto sixteenths = static_cast<long double>(pick(random, 0, 4000)) - 2000;
    return encode_nearest(type_, sixteenths / 16);
  }
  /// Returns an operation that is exact in every type.
  reduce_op addition() const { return is_floating_point(type_) ? reduce_op::max : reduce_op::sum; }

  // -- setup

  world_limits limits() {
    world_limits x;
    x.deadline = base_deadline();
    x.stall_limit = calm() || trouble_ == trouble::haste
                        ? std::chrono::nanoseconds{20s}
                        : std::chrono::milliseconds{pick(random_, 8, 30)};
    x.restarts = 1 << 30;
    x.restart_backoff = 0ms;
    x.quiet_limit = trouble_ == trouble::stuck_lane ? 40ms : 10s;
    x.standby = pick(random_, 0, 1) == 0 ? standby_policy::none : standby_policy::communicators;
    return x;
  }

  void open() {
    type_ = real_dtypes[pick(random_, 0, std::size(real_dtypes) - 1)];
    count_ = 12 * pick(random_, 1, 40);
    auto order = all_devices(*sys_);
    std::shuffle(order.begin(), order.end(), random_);
    add_world(must(world::open(*sys_, {.devices = order, .name = "all", .limits = limits()})));
    std::shuffle(order.begin(), order.end(), random_);
    order.resize(pick(random_, 2, 3));
    add_world(must(world::open(*sys_, {.devices = order, .name = "some", .limits = limits()})));
    std::vector<std::int32_t> colors;
    for (int i = 0; i < devices; ++i)
      colors.push_back(static_cast<std::int32_t>(pick(random_, 0, 4) % 3) - (i > 1 ? 1 : 0));
    for (auto& group : must(worlds_[0].over.split("part", colors)))
      add_world(group);
    open_rows();
    if (pick(random_, 0, 1) == 0)
      mesh_ = must(mesh_comm::open(worlds_[0].over, {.groups = {}, .chunk_bytes = 512}));
    note("trouble: " + std::string{trouble_names[static_cast<std::size_t>(trouble_)]} + ", " +
         std::to_string(count_) + " " + std::string{to_string(type_)} + ", " +
         std::to_string(worlds_.size()) + " worlds");
    add_faults();
  }

  void add_world(world x) {
    world_entry entry{std::move(x), {}};
    std::string text = "world " + std::to_string(worlds_.size()) + " on devices";
    for (std::size_t rank = 0; rank < entry.over.size(); ++rank) {
      entry.devices.push_back(entry.over.device_of(rank).ordinal());
      text += " " + std::to_string(entry.devices.back());
    }
    auto standby = entry.over.status().standby_ready;
    note(text + (standby ? ", standby" : ""));
    if (entry.over.size() >= 2)
      last_of_several_ = worlds_.size();
    worlds_.push_back(std::move(entry));
  }

  device device_of(int ordinal) {
    auto& all = worlds_[0];
    auto rank = std::find(all.devices.begin(), all.devices.end(), ordinal) - all.devices.begin();
    return all.over.device_of(static_cast<std::size_t>(rank));
  }

  void open_rows() {
    for (auto& row : slots_)
      for (auto& ref : must(worlds_[0].over.allocate(type_, count_, true, {.deadline = 20s})))
        row[static_cast<std::size_t>(ref.device())] = {
            ref, model_.add(content(count_, std::uint64_t{0}))};
    note("buffers of world 0");
  }

  void add_fault(fault kind, verb on, double probability, std::chrono::nanoseconds delay = {},
                 std::optional<errc> error = {}) {
    plan_->add({.kind = kind,
                .on = on,
                .times = forever,
                .probability = trouble_ == trouble::mixed ? probability / 4 : probability,
                .delay = delay,
                .error = error});
  }

  void add_faults() {
    if (has(trouble::not_issued))
      add_fault(fault::not_issued, verb::collective, 0.04);
    if (has(trouble::communicator_error)) {
      add_fault(fault::fail, verb::collective, 0.03);
      add_fault(fault::fail, verb::asynchronous_error, 0.02);
      add_fault(fault::fail, verb::build, 0.1);
      add_fault(fault::fail, verb::connect, 0.05);
    }
    if (has(trouble::hang)) {
      add_fault(fault::hang, verb::collective, 0.03);
      add_fault(fault::hang, verb::copy, 0.02);
      add_fault(fault::hang, verb::launch_host, 0.05);
      add_fault(fault::hang, verb::fill, 0.02);
    }
    if (has(trouble::slow)) {
      add_fault(fault::slow, verb::collective, 0.05, 3ms);
      add_fault(fault::slow, verb::copy, 0.05, 2ms);
      add_fault(fault::slow, verb::launch_host, 0.1, 2ms);
      add_fault(fault::slow, verb::build, 0.2, 5ms);
      add_fault(fault::slow, verb::connect, 0.1, 2ms);
    }
    if (has(trouble::no_memory)) {
      add_fault(fault::out_of_memory, verb::allocate, 0.3);
      add_fault(fault::out_of_memory, verb::allocate_pinned, 0.2);
      add_fault(fault::fail, verb::collective, 0.03, {}, errc::out_of_memory);
      add_fault(fault::fail, verb::collective, 0.02, {}, errc::cuda_error);
      add_fault(fault::fail, verb::copy, 0.03);
      add_fault(fault::fail, verb::fill, 0.03);
      add_fault(fault::fail, verb::launch_host, 0.03);
      add_fault(fault::out_of_memory, verb::build, 0.1);
    }
    if (trouble_ == trouble::device_fault) {
      constexpr verb verbs[] = {verb::collective, verb::copy, verb::launch_host, verb::query,
                                verb::record};
      plan_->add({.kind = fault::poison,
                  .on = verbs[pick(random_, 0, std::size(verbs) - 1)],
                  .device = static_cast<int>(pick(random_, 0, devices - 1)),
                  .first = pick(random_, 1, 12)});
    }
    if (trouble_ == trouble::stuck_lane)
      plan_->add({.kind = fault::block,
                  .on = verb::collective,
                  .device = static_cast<int>(pick(random_, 0, devices - 1)),
                  .first = pick(random_, 1, 6)});
  }

  // -- requests

  record_ptr new_record(std::string text, int world_index = -1) {
    auto r = std::make_shared<request_record>();
    r->text = std::move(text);
    r->world = world_index;
    std::lock_guard lock{answers_mutex_};
    r->index = records_.size();
    records_.push_back(r);
    ++open_;
    return r;
  }

  void answered(request_record& r, clock::duration late, const caf::error& why,
                const collective_done& done = {}) {
    if (r.memory) { // the request does not use it any more
      r.got = *r.memory;
      std::fill(r.memory->begin(), r.memory->end(), used_up);
    }
    std::lock_guard lock{answers_mutex_};
    if (r.answers++ == 0) {
      r.late = late;
      r.error = why;
      r.done = done;
      --open_;
      all_answered_.notify_all();
    }
  }

  static const collective_done& done_of(const caf::expected<collective_done>& x) { return *x; }
  template <class T> static collective_done done_of(const caf::expected<T>&) { return {}; }

  template <class T> void track(const record_ptr& r, std::chrono::nanoseconds limit, pending<T> x) {
    r->number = [x] { return x.number(); };
    r->cancel = [x] { x.cancel(); };
    when_answered(x, limit, [this, r](const caf::expected<T>& answer, clock::duration late) {
      answered(*r, late, error_of(answer), answer ? done_of(answer) : collective_done{});
    });
  }

  /// Sends a request as a message. Returns when it is admitted or will never be.
  template <class Reply, class Probe, class Request>
  void send(const record_ptr& r, const caf::actor& to, Request what,
            std::chrono::nanoseconds limit) {
    r->by_message = true;
    const auto deadline = clock::now() + limit;
    auto admitted = std::make_shared<flag>();
    sys_->spawn<requester<Reply, Request, Probe>>(
        to, std::move(what), limit, Probe{},
        [this, r, deadline](caf::expected<Reply> x) {
          const auto late = clock::now() - deadline;
          if constexpr (std::is_same_v<Reply, host_buffer>)
            if (x)
              r->memory =
                  std::make_shared<std::vector<std::byte>>(x->bytes().begin(), x->bytes().end());
          if constexpr (std::is_same_v<Reply, collective_done>)
            answered(*r, late, error_of(x), x ? *x : collective_done{});
          else
            answered(*r, late, error_of(x));
        },
        [admitted] { admitted->set(); });
    if (!admitted->wait())
      complain("a message was not taken from its mailbox: " + r->text);
  }

  slot& at(const piece& x) { return slots_[x.row][static_cast<std::size_t>(x.device)]; }
  any_gpu_ref ref(const piece& x) { return must(at(x).ref.slice(x.first, x.count)); }
  content_model::place place(const piece& x) {
    return {model_.latest(at(x).buffer), x.first, x.count};
  }
  content_model::version write(content_model::effect by, std::size_t output, const piece& x) {
    return model_.write(by, output, at(x).buffer, x.first, x.count);
  }

  piece whole(std::size_t row, int d) const { return {row, d, 0, count_}; }
  piece some(std::mt19937_64& random, std::size_t row, int d) const {
    if (chance(random, 0.5))
      return whole(row, d);
    auto first = pick(random, 0, count_ - 1);
    return {row, d, first, pick(random, 1, count_ - first)};
  }

  // -- clients

  void play() {
    std::vector<std::thread> threads;
    for (std::uint64_t i = 0; i < 3; ++i)
      threads.emplace_back([this, i] { client(i); });
    auto world_index = pick(random_, 0, 1) == 0 ? std::size_t{1} : last_of_several_;
    auto calls = random_();
    for (std::size_t rank = 0; rank < worlds_[world_index].devices.size(); ++rank)
      threads.emplace_back(
          [this, world_index, rank, calls] { rank_client(world_index, rank, calls); });
    if (!mesh_.empty())
      threads.emplace_back([this] { mesh_client(); });
    for (auto& t : threads)
      t.join();
  }

  void client(std::uint64_t number) {
    std::mt19937_64 random{seed_ * 1000 + number};
    for (int i = 0; i < 20; ++i) {
      renew_some(random);
      auto choice = pick(random, 0, 99);
      if (choice < 50)
        whole_collective(random);
      else if (choice < 56)
        message_group(random);
      else if (choice < 63)
        upload(random);
      else if (choice < 68)
        fill(random);
      else if (choice < 73)
        copy(random);
      else if (choice < 83)
        launch(random);
      else if (choice < 90)
        download(random);
      else
        make_trouble(random);
      if (trouble_ == trouble::haste || trouble_ == trouble::mixed)
        cancel_one(random);
      if (chance(random, 0.3))
        wait_for_one(random);
      if (has(trouble::hang) && chance(random, 0.25))
        plan_->release();
    }
  }

  record_ptr any_record(std::mt19937_64& random) {
    std::lock_guard lock{answers_mutex_};
    return records_.empty() ? nullptr : records_[pick(random, 0, records_.size() - 1)];
  }

  void cancel_one(std::mt19937_64& random) {
    if (!chance(random, 0.2))
      return;
    request_function cancel;
    {
      std::lock_guard order{order_}; // `cancel` is set while order_ is held
      auto r = any_record(random);
      if (!r || !r->cancel)
        return;
      cancel = r->cancel;
      note("cancel #" + std::to_string(r->index));
    }
    cancel();
  }

  void wait_for_one(std::mt19937_64& random) {
    auto r = any_record(random);
    if (!r)
      return;
    std::unique_lock lock{answers_mutex_};
    all_answered_.wait_for(lock, 5ms, [&] { return r->answers != 0; });
  }

  /// Replaces lost buffers, sometimes at once.
  void renew_some(std::mt19937_64& random) {
    auto row = pick(random, 0, shared_rows - 1);
    for (int d = 0; d < devices; ++d)
      renew({row, d});
  }

  void renew(const piece& x) {
    record_ptr r;
    {
      std::lock_guard lock{order_};
      if (!at(x).ref.stale())
        return;
      r = new_record("allocate in place of " + text_of(x));
      note("#" + std::to_string(r->index) + " " + r->text);
    }
    auto limit = base_deadline();
    auto request = device_of(x.device).allocate(type_, count_, true, {.deadline = limit});
    {
      std::lock_guard lock{order_};
      track(r, limit, request);
    }
    auto ref = request.wait();
    if (!ref)
      return;
    std::lock_guard lock{order_};
    at(x) = {std::move(*ref), model_.add(content(count_, std::uint64_t{0}))};
  }

  /// A collective of a world over parts of two rows, its effect in the model, and its text.
  struct planned {
    collective what;
    content_model::effect effect = 0;
    std::string text;
  };

  std::string text_of(const rank_pieces& x) const {
    auto text = std::string{to_string(x.shape.kind)};
    for (auto* side : {&x.send, &x.recv}) {
      text += side == &x.send ? " from" : " to";
      for (auto& p : *side)
        text += p ? " " + text_of(*p) : " -";
    }
    return text;
  }

  /// Call with order_ held.
  planned plan_collective(const rank_pieces& x) {
    planned result;
    result.what = request_of(x, [this](const piece& p) { return ref(p); });
    std::vector<content_model::place> reads;
    for (auto r : x.senders())
      reads.push_back(place(*x.send[r]));
    result.effect = model_.begin(reads, semantics_of(x));
    for (std::size_t r = 0; r < x.recv.size(); ++r)
      if (x.recv[r])
        write(result.effect, x.shape.kind == collective_kind::send ? 0 : r, *x.recv[r]);
    result.text = text_of(x);
    return result;
  }

  std::pair<std::size_t, std::size_t> two_rows(std::mt19937_64& random) const {
    auto from = pick(random, 0, shared_rows - 1);
    return {from, (from + pick(random, 1, shared_rows - 1)) % shared_rows};
  }

  void whole_collective(std::mt19937_64& random) {
    auto index = pick(random, 0, worlds_.size() - 1);
    auto& w = worlds_[index];
    auto [from, to] = two_rows(random);
    auto pieces = choose_collective(random, w.devices, type_, count_, from, to);
    auto limit = deadline(random);
    std::lock_guard lock{order_};
    auto x = plan_collective(pieces);
    auto r = new_record(x.text + " in world " + std::to_string(index), static_cast<int>(index));
    r->effects = {x.effect};
    note("#" + std::to_string(r->index) + " " + r->text);
    if (chance(random, 0.35)) {
      with_message(x.what, {}, [&](auto message) {
        send<collective_done, get_status>(r, w.over.actor(), std::move(message), limit);
      });
    } else {
      track(r, limit, w.over.run(x.what, {.deadline = limit}));
    }
  }

  /// Sends a ring of messages, or messages together with a barrier.
  void message_group(std::mt19937_64& random) {
    auto index = pick(random, 0, worlds_.size() - 1);
    auto& w = worlds_[index];
    auto n = w.devices.size();
    auto [from, to] = two_rows(random);
    auto limit = deadline(random);
    auto shift = pick(random, 0, n - 1);
    group all;
    all.options.deadline = limit;
    std::lock_guard lock{order_};
    auto r =
        new_record("group of messages in world " + std::to_string(index), static_cast<int>(index));
    for (std::size_t q = 0; q < n; ++q) {
      auto receiver = (q + shift) % n;
      auto x = plan_collective(whole_message(w.devices, type_, q, whole(from, w.devices[q]),
                                             receiver, whole(to, w.devices[receiver])));
      r->text += "; " + x.text;
      r->effects.push_back(x.effect);
      all.calls.push_back(std::move(x.what));
    }
    note("#" + std::to_string(r->index) + " " + r->text);
    if (chance(random, 0.3))
      send<collective_done, get_status>(r, w.over.actor(), std::move(all), limit);
    else
      track(r, limit, w.over.run(all));
  }

  std::optional<caf::actor> actor_of(std::mt19937_64& random, int d) {
    if (!chance(random, 0.35))
      return std::nullopt;
    auto actor = device_of(d).actor();
    return actor ? std::optional{*actor} : std::nullopt;
  }

  piece any_piece(std::mt19937_64& random) const {
    return some(random, pick(random, 0, shared_rows - 1),
                static_cast<int>(pick(random, 0, devices - 1)));
  }

  record_ptr write_record(const char* verb, const piece& x, content value) {
    auto r = new_record(std::string{verb} + " " + text_of(x) + " with " +
                        std::to_string(*value[0]) + ", ...");
    auto effect = model_.begin({}, [value = std::move(value)](const std::vector<content>&) {
      return std::vector<content>{value};
    });
    r->effects = {effect};
    write(effect, 0, x);
    note("#" + std::to_string(r->index) + " " + r->text);
    return r;
  }

  void upload(std::mt19937_64& random) {
    auto x = any_piece(random);
    auto value = random_content(random, x.count);
    auto limit = deadline(random);
    auto actor = actor_of(random, x.device);
    std::lock_guard lock{order_};
    auto target = ref(x);
    auto bytes = bytes_of_content(value);
    auto r = write_record("upload", x, std::move(value));
    if (actor) {
      host_buffer source{bytes.size()};
      std::copy(bytes.begin(), bytes.end(), source.writable().begin());
      return send<void, watch_generation>(r, *actor, troupe::upload{target, source, {}}, limit);
    }
    r->memory = std::make_shared<std::vector<std::byte>>(std::move(bytes));
    track(r, limit,
          device_of(x.device).upload(target, std::span<const std::byte>{*r->memory},
                                     {.deadline = limit}));
  }

  void fill(std::mt19937_64& random) {
    auto x = any_piece(random);
    auto element = random_element(random);
    auto limit = deadline(random);
    auto actor = actor_of(random, x.device);
    std::lock_guard lock{order_};
    auto target = ref(x);
    const auto one = must(scalar::from_bytes(target.type(), bytes_of_content({element})));
    auto r = write_record("fill", x, content(x.count, element));
    if (actor)
      return send<void, watch_generation>(r, *actor, troupe::fill{target, one, {}}, limit);
    track(r, limit, device_of(x.device).fill(target, one, {.deadline = limit}));
  }

  void copy(std::mt19937_64& random) {
    auto source = any_piece(random);
    auto target = source;
    target.row = (source.row + pick(random, 1, shared_rows - 1)) % shared_rows;
    target.first = pick(random, 0, count_ - source.count);
    auto limit = deadline(random);
    auto actor = actor_of(random, source.device);
    std::lock_guard lock{order_};
    auto r = new_record("copy " + text_of(source) + " to " + text_of(target));
    auto effect =
        model_.begin({place(source)}, [](const std::vector<content>& inputs) { return inputs; });
    r->effects = {effect};
    auto to = ref(target);
    auto from = ref(source);
    write(effect, 0, target);
    note("#" + std::to_string(r->index) + " " + r->text);
    if (actor)
      send<void, watch_generation>(r, *actor, troupe::copy{to, from, {}}, limit);
    else
      track(r, limit, device_of(source.device).copy(to, from, {.deadline = limit}));
  }

  /// Launches y = y + x for each element; for floating-point numbers y = max(y, x).
  void launch(std::mt19937_64& random) {
    auto x = any_piece(random);
    auto y = x;
    y.row = (x.row + pick(random, 1, shared_rows - 1)) % shared_rows;
    auto limit = deadline(random);
    auto actor = actor_of(random, x.device);
    std::lock_guard lock{order_};
    auto r = new_record("launch " + text_of(y) + " += " + text_of(x));
    auto effect = model_.begin({place(y), place(x)}, [this](const std::vector<content>& in) {
      auto sum = in[0];
      for (std::size_t i = 0; i < sum.size(); ++i)
        sum[i] = sum[i] && in[1][i] ? std::optional{combine(type_, addition(), *sum[i], *in[1][i])}
                                    : std::nullopt;
      return std::vector<content>{sum};
    });
    r->effects = {effect};
    auto to = ref(y);
    auto from = ref(x);
    write(effect, 0, y);
    note("#" + std::to_string(r->index) + " " + r->text);
    // Some launches block their lane for a while, so that later operations start apart.
    auto busy = std::chrono::milliseconds{chance(random, 0.4) ? 2 : 0};
    auto work = [this, to, from, busy](launch_context& context) -> caf::error {
      std::this_thread::sleep_for(busy);
      auto target = to.access();
      auto source = from.access();
      if (!target || !source)
        return target ? source.error() : target.error();
      books_.touched(context.device(), *target, to.size_bytes(), "a launch");
      books_.touched(context.device(), *source, from.size_bytes(), "a launch");
      // After a fault it may still run when the seed is over.
      return context.run_on_host(
          [type = type_, op = addition(), count = to.count(), a = static_cast<std::byte*>(*target),
           b = static_cast<const std::byte*>(*source)] { combine_all(type, op, count, a, b); });
    };
    if (in_workers()) {
      const auto arguments = to_bytes(combining{type_, addition(), busy});
      return track(r, limit,
                   device_of(x.device).launch(combining::name, arguments, {to, from}, {to},
                                              {.deadline = limit}));
    }
    if (actor)
      send<void, watch_generation>(r, *actor, launch_callable{work, {to, from}, {to}, {}}, limit);
    else
      track(r, limit, device_of(x.device).launch(work, {to, from}, {to}, {.deadline = limit}));
  }

  void download(std::mt19937_64& random) {
    auto x = any_piece(random);
    auto limit = deadline(random);
    auto actor = actor_of(random, x.device);
    std::lock_guard lock{order_};
    auto r = new_record("download " + text_of(x));
    r->read = place(x);
    auto source = ref(x);
    note("#" + std::to_string(r->index) + " " + r->text);
    if (actor)
      return send<host_buffer, watch_generation>(r, *actor, troupe::download{source, {}}, limit);
    r->memory = std::make_shared<std::vector<std::byte>>(source.size_bytes());
    track(r, limit,
          device_of(x.device).download(source, std::span{*r->memory}, {.deadline = limit}));
  }

  void make_trouble(std::mt19937_64& random) {
    std::vector<request_function> all;
    auto d = static_cast<int>(pick(random, 0, devices - 1));
    if (has(trouble::reset))
      all.push_back([this, d] {
        std::lock_guard lock{order_};
        auto r = new_record("reset device " + std::to_string(d));
        note("#" + std::to_string(r->index) + " " + r->text);
        auto limit = base_deadline();
        track(r, limit, device_of(d).reset({.deadline = limit}));
      });
    if (has(trouble::killed_actor)) {
      all.push_back([this, d] {
        note("kill the actor of device " + std::to_string(d));
        if (auto actor = device_of(d).actor())
          caf::anon_send_exit(*actor, caf::exit_reason::kill);
      });
    }
    if (trouble_ == trouble::ended_device && ended_device_ < 0)
      all.push_back([this, d] {
        std::lock_guard lock{order_};
        if (ended_device_ >= 0)
          return;
        note("end device " + std::to_string(d));
        ended_device_ = d;
        device_of(d).shutdown();
      });
    if (has(trouble::ended_world))
      all.push_back([this, i = pick(random, 1, worlds_.size() - 1), how = pick(random, 0, 2)] {
        constexpr std::array how_names{"kill", "exit", "shutdown"};
        note(std::string{how_names[how]} + " world " + std::to_string(i));
        auto& actor = worlds_[i].over.actor();
        if (how == 2)
          detail::anon_send(actor, shutdown{});
        else
          caf::anon_send_exit(actor,
                              how == 0 ? caf::exit_reason::kill : caf::exit_reason::user_shutdown);
        ended_worlds_[i] = true;
      });
    if (!all.empty())
      all[pick(random, 0, all.size() - 1)]();
  }

  // -- rank-local calls

  /// Makes one rank's calls: the same for every rank, from the seed `calls`, on its own buffers.
  void rank_client(std::size_t world_index, std::size_t rank, std::uint64_t calls) {
    std::mt19937_64 same{calls};
    std::mt19937_64 own{calls + rank + 1};
    auto& w = worlds_[world_index];
    auto d = w.devices[rank];
    for (int i = 0; i < 8; ++i) {
      auto from = shared_rows + pick(same, 0, 1);
      auto to = from == shared_rows ? shared_rows + 1 : shared_rows;
      auto pieces = choose_collective(same, w.devices, type_, count_, from, to);
      renew({shared_rows, d});
      renew({shared_rows + 1, d});
      auto limit = deadline(own);
      rank_call(w, world_index, rank, pieces, chance(own, 0.3), limit);
      if (chance(own, 0.3))
        wait_for_one(own);
    }
  }

  void rank_call(const world_entry& w, std::size_t world_index, std::size_t rank,
                 const rank_pieces& x, bool by_message, std::chrono::nanoseconds limit) {
    auto self = static_cast<int>(rank);
    bool message = x.shape.kind == collective_kind::send;
    if (message && x.sender == x.shape.root) // to itself: one thread makes both calls
      return;
    if (message && self != x.sender && self != x.shape.root)
      return;
    std::lock_guard lock{order_};
    auto r = new_record("rank " + std::to_string(rank) + " of world " +
                            std::to_string(world_index) + ": " + text_of(x),
                        static_cast<int>(world_index));
    r->rank = self;
    r->of = x;
    if (auto& p = x.send[rank]; p)
      r->sends = place(*p);
    if (auto& p = x.recv[rank]; p) {
      auto unknown = model_.begin({}, {});
      r->receives = write(unknown, 0, *p);
      r->received = p->count;
    }
    auto call =
        call_of_rank(request_of(x, [this](const piece& p) { return ref(p); }), rank, x.send.size());
    note("#" + std::to_string(r->index) + " " + r->text);
    if (by_message)
      send<collective_done, get_status>(r, w.over.actor(), rank_local{self, call, {}}, limit);
    else
      track(r, limit, w.over.rank(rank).run(call, {.deadline = limit}));
  }

  // -- calls over host memory

  /// Runs in world 0, in which no other client makes rank-local calls.
  void mesh_client() {
    std::mt19937_64 random{seed_ * 1000 + 999};
    for (int i = 0; i < 6; ++i) {
      mesh_collective(random);
      if (chance(random, 0.5))
        wait_for_one(random);
    }
  }

  void mesh_collective(std::mt19937_64& random) {
    constexpr collective_kind kinds[] = {collective_kind::all_reduce, collective_kind::broadcast,
                                         collective_kind::all_gather,
                                         collective_kind::reduce_scatter};
    constexpr reduce_op ops[] = {reduce_op::min, reduce_op::max, reduce_op::sum, reduce_op::prod};
    auto n = mesh_.size();
    collective_shape x;
    x.kind = kinds[pick(random, 0, std::size(kinds) - 1)];
    x.type = type_;
    x.op = ops[pick(random, 0, is_floating_point(type_) ? 1 : 3)];
    x.root = static_cast<int>(pick(random, 0, n - 1));
    auto count = pick(random, 1, 300) * (x.kind == collective_kind::reduce_scatter ? n : 1);
    std::vector<content> sends;
    for (std::size_t r = 0; r < n; ++r)
      sends.push_back(random_content(random, count));
    auto results = received(x, sends);
    std::vector<record_ptr> all;
    for (std::size_t r = 0; r < n; ++r)
      all.push_back(mesh_call(x, r, sends[r], results[r], deadline(random)));
    mesh_rounds_.push_back(std::move(all));
  }

  record_ptr mesh_call(const collective_shape& x, std::size_t rank, const content& send,
                       const content& want, std::chrono::nanoseconds limit) {
    std::lock_guard lock{order_};
    auto r = new_record("rank " + std::to_string(rank) + " over host memory: " +
                            std::string{to_string(x.kind)} + " of " + std::to_string(send.size()),
                        0);
    note("#" + std::to_string(r->index) + " " + r->text);
    r->want = want;
    r->sent = bytes_of_content(send);
    r->memory = std::make_shared<std::vector<std::byte>>(
        x.kind == collective_kind::broadcast ? r->sent : bytes_of_content(want));
    if (x.kind != collective_kind::broadcast)
      poison(*r->memory);
    auto& comm = mesh_[rank];
    std::span<const std::byte> from{r->sent};
    std::span to{*r->memory};
    mesh_options options{.deadline = limit};
    switch (x.kind) {
    case collective_kind::broadcast:
      track(r, limit, comm.broadcast(to, type_, x.root, options));
      break;
    case collective_kind::all_gather:
      track(r, limit, comm.all_gather(from, to, type_, options));
      break;
    case collective_kind::reduce_scatter:
      track(r, limit, comm.reduce_scatter(from, to, type_, x.op, options));
      break;
    default:
      track(r, limit, comm.all_reduce(from, to, type_, x.op, options));
      break;
    }
    return r;
  }

  // -- shutdown and checks

  void settle() {
    plan_->disarm();
    plan_->release();
    std::unique_lock lock{answers_mutex_};
    if (!all_answered_.wait_for(lock, patience, [this] { return open_ == 0; }))
      for (auto& r : records_)
        if (r->answers == 0)
          unanswered_.push_back("no answer: #" + std::to_string(r->index) + " " + r->text);
  }

  void evaluate() {
    for (auto& x : unanswered_)
      complain(x);
    for (auto& r : records_)
      note("#" + std::to_string(r->index) +
           (r->number ? ", operation " + std::to_string(r->number()) : "") + ": " +
           (r->error ? describe(r->error) : "done"));
    decide_fates();
    check_codes();
    check_downloads();
    check_mesh_rounds();
    check_causes();
    if (!unanswered_.empty())
      return;
    if (ends_process(trouble_) && process_ended())
      check_process_end();
    else {
      check_worlds();
      check_contents();
    }
  }

  void decide_fates() {
    std::map<std::pair<int, std::uint64_t>, std::vector<record_ptr>> joint;
    for (auto& r : records_) {
      for (auto e : r->effects)
        model_.decide(e, r->how());
      if (r->rank >= 0)
        joint[{r->world, r->operation()}].push_back(r);
    }
    for (auto& [which, calls] : joint) {
      bool known = which.second != 0;
      if (known && is_complete(calls))
        decide_joint(calls);
      else if (!known || joint.count({which.first, 0}) != 0)
        for (auto& r : calls)
          blur(*r, known ? r->how() : fate::perhaps);
    }
  }

  static bool is_complete(const std::vector<record_ptr>& calls) {
    auto& all = *calls[0]->of;
    return calls.size() == (all.shape.kind == collective_kind::send ? 2 : all.send.size());
  }

  /// The operation of a failed message is unknown. Its output may have any content.
  void blur(const request_record& r, fate how) {
    if (!r.receives)
      return;
    auto effect = model_.begin({}, [n = r.received](const std::vector<content>&) {
      return std::vector<content>{content(n)};
    });
    model_.written_by(*r.receives, effect, 0);
    model_.decide(effect, how);
  }

  /// Decides a complete operation of rank-local calls. Each call has the result of its own part.
  void decide_joint(std::vector<record_ptr> calls) {
    std::sort(calls.begin(), calls.end(), [](auto& a, auto& b) { return a->rank < b->rank; });
    auto& all = *calls[0]->of;
    bool message = all.shape.kind == collective_kind::send;
    std::vector<content_model::place> reads;
    for (auto& r : calls)
      if (r->sends)
        reads.push_back(*r->sends);
    for (auto& r : calls) {
      if (!r->receives)
        continue;
      auto effect = model_.begin(reads, semantics_of(all));
      model_.written_by(*r->receives, effect, message ? 0 : static_cast<std::size_t>(r->rank));
      model_.decide(effect, r->how());
    }
  }

  bool misaligned() const {
    return std::any_of(records_.begin(), records_.end(),
                       [](auto& r) { return r->rank >= 0 && r->error; });
  }

  void check_codes() {
    for (auto& r : records_) {
      if (!r->error)
        continue;
      auto code = code_of(r->error);
      auto what = "#" + std::to_string(r->index) + " " + r->text + ": " + describe(r->error);
      if (calm())
        complain("no reason to fail: " + what);
      else if (!code && !has(trouble::killed_actor) && !has(trouble::ended_world))
        complain("an error of another library: " + what);
      else if (trouble_ == trouble::haste && code != errc::cancelled &&
               code != errc::deadline_exceeded && code != errc::collective_mismatch &&
               code != errc::indeterminate && code != errc::skipped)
        complain("neither late nor cancelled: " + what);
      constexpr errc never[] = {errc::invalid_argument,   errc::shape_mismatch,
                                errc::out_of_range,       errc::would_block,
                                errc::not_supported,      errc::internal,
                                errc::buffer_acquired,    errc::overloaded,
                                errc::membership_changed, errc::communicator_dead};
      if (std::find(std::begin(never), std::end(never), code) != std::end(never))
        complain("this cannot be: " + what);
      if (code == errc::collective_mismatch && (r->rank < 0 || !misaligned()))
        complain("no mismatch was made: " + what);
    }
  }

  // INV-9, INV-12
  void check_downloads() {
    for (auto& r : records_) {
      if (r->memory && std::any_of(r->memory->begin(), r->memory->end(),
                                   [](std::byte x) { return x != used_up; }))
        complain("memory was written after the answer: #" + std::to_string(r->index) + " " +
                 r->text);
      if (r->answers == 0 || r->error)
        continue;
      if (r->want && content_of(r->got) != *r->want)
        complain("a wrong content: #" + std::to_string(r->index) + " " + r->text);
      if (!r->read)
        continue;
      if (auto text = model_.difference(*r->read, content_of(r->got)); !text.empty())
        complain("a wrong content: #" + std::to_string(r->index) + " " + r->text + ": " + text);
    }
  }

  /// Checks that each call over host memory succeeded on all ranks or on none.
  void check_mesh_rounds() {
    for (auto& all : mesh_rounds_) {
      auto done = std::count_if(all.begin(), all.end(),
                                [](auto& r) { return r->answers != 0 && !r->error; });
      if (done != 0 && static_cast<std::size_t>(done) != all.size())
        complain(std::to_string(done) + " of " + std::to_string(all.size()) + " ranks are done: #" +
                 std::to_string(all[0]->index) + " " + all[0]->text);
    }
  }

  // INV-7: all requests that end with a communicator, a device or the process have the same cause.
  void check_causes() {
    std::map<std::string, std::set<std::string>> causes;
    const auto ends = communicator_ends();
    for (auto& r : records_) {
      auto why = failure_of(r->error);
      if (!why)
        continue;
      auto text = to_string(*why);
      switch (why->code) {
      case errc::stalled:
      case errc::nccl_error:
      case errc::rank_not_issued:
        if (!ends.contains(text))
          complain("not the cause of any end of a communicator: #" + std::to_string(r->index) +
                   " " + r->text + ": " + text);
        break;
      case errc::device_reset:
        causes["generation " + std::to_string(why->generation) + " of device " +
               std::to_string(why->device)]
            .insert(text);
        break;
      case errc::device_fault:
      case errc::lane_stuck:
        causes["the process"].insert(text);
        break;
      default:
        break;
      }
    }
    for (auto& [what, texts] : causes)
      if (texts.size() != 1)
        complain(std::to_string(texts.size()) + " causes for the end of " + what + ": " +
                 std::accumulate(texts.begin(), texts.end(), std::string{},
                                 [](const auto& a, const auto& b) { return a + " | " + b; }));
  }

  /// A worker whose lane seems stuck is killed alone. On a busy machine this may be any worker.
  bool may_lose_worker() const { return in_workers() && trouble_ == trouble::stuck_lane; }

  bool process_ended() {
    auto a_world_failed = [this] {
      return std::any_of(worlds_.begin(), worlds_.end(),
                         [](auto& w) { return w.over.status().phase == world_phase::failed; });
    };
    if (a_world_failed())
      return true;
    bool a_device_failed = false; // worlds fail after their devices
    for (int i = 0; i < devices; ++i)
      a_device_failed |= device_of(i).phase() == device_phase::failed;
    return a_device_failed && eventually(a_world_failed);
  }

  /// Checks that every request is refused and every handle is stale.
  void check_process_end() {
    for (auto& row : slots_)
      for (auto& x : row)
        if (!x.ref.stale())
          complain("a handle is not stale after the end");
    for (auto& w : worlds_) {
      auto why = error_of(answer_of(w.over.barrier()));
      if (!why)
        complain("a barrier after the end");
      world_feed feed{*sys_, w.over.actor()};
      feed.until(world_phase::failed);
    }
  }

  /// Checks that all worlds still running work again after pending work has ended.
  void check_worlds() {
    for (std::size_t i = 0; i < worlds_.size(); ++i) {
      auto& w = worlds_[i];
      if (has_ended(i)) {
        auto why = error_of(answer_of(w.over.barrier()));
        if (code_of(why) != errc::unavailable)
          complain("world " + std::to_string(i) + " ended, but: " + describe(why));
        continue;
      }
      ::testing::AssertionResult result = ::testing::AssertionFailure();
      for (stopwatch watch; !result && watch.elapsed() < patience;)
        result = try_world(w.over);
      if (!result)
        complain("world " + std::to_string(i) + " does not work: " + result.message());
    }
  }

  bool has_ended(std::size_t i) const {
    auto& on = worlds_[i].devices;
    return ended_worlds_[i] || std::find(on.begin(), on.end(), ended_device_) != on.end();
  }

  ::testing::AssertionResult try_world(const world& over) {
    try {
      return works(over);
    } catch (const std::exception& why) { // a device is being reset
      return ::testing::AssertionFailure() << why.what();
    }
  }

  void check_contents() {
    for (std::size_t row = 0; row < rows; ++row)
      for (int d = 0; d < devices; ++d) {
        auto x = whole(row, d);
        if (at(x).ref.stale()) {
          if (!has(trouble::reset) && d != ended_device_ && !may_lose_worker())
            complain("a handle is stale: " + text_of(x));
          continue;
        }
        auto got = get(device_of(d), ref(x));
        if (got) {
          if (auto text = model_.difference(place(x), content_of(*got)); !text.empty())
            complain("a wrong content at the end: " + text_of(x) + ": " + text);
        } else if (code_of(got.error()) == errc::skipped) {
          if (std::none_of(records_.begin(), records_.end(), [](auto& r) { return r->error; }))
            complain("skipped, though all went well: " + text_of(x) + ": " + describe(got.error()));
        } else if (code_of(got.error()) != errc::indeterminate) {
          complain("no content at the end: " + text_of(x) + ": " + describe(got.error()));
        } else if (!model_.doubtful(model_.latest(at(x).buffer))) {
          complain("indeterminate for no reason: " + text_of(x) + ": " + describe(got.error()));
        }
      }
  }

  void close() {
    for (auto& r : records_) {
      r->number = nullptr;
      r->cancel = nullptr;
    }
    mesh_.clear();
    for (auto& row : slots_)
      for (auto& x : row)
        x.ref = {};
    if (!ends_process(trouble_) && !books_.wait_none(backend_books::allocation, patience))
      complain(std::to_string(books_.number(backend_books::allocation)) +
               " allocations are left over");
    worlds_.clear();
  }

  void check_left_over(std::size_t threads_before) {
    for (auto& x : books_.complaints())
      complain(x);
    if (ends_process(trouble_))
      return; // the process keeps objects that it cannot free
    constexpr std::array names{"allocations", "pinned blocks", "streams",
                               "events",      "communicators", "devices"};
    for (std::size_t i = 0; i < backend_books::item_count; ++i)
      if (auto n = books_.number(static_cast<backend_books::item>(i)); n != 0)
        complain(std::to_string(n) + " " + names[i] + " are left over");
    stopwatch watch;
    const auto allowed = threads_before + (in_workers() ? 1 : 0); // the fault plan's thread
    while (thread_count() > allowed && watch.elapsed() < patience)
      std::this_thread::yield();
    if (auto now = thread_count(); now > allowed)
      complain(std::to_string(now - allowed) + " threads are left over");
  }

  // INV-1
  void check_answers() {
    std::lock_guard lock{answers_mutex_};
    for (auto& r : records_) {
      if (r->answers > 1)
        complain(std::to_string(r->answers) + " answers: #" + std::to_string(r->index) + " " +
                 r->text);
      if (r->answers == 0)
        continue;
      ++tally_.answers[!r->error           ? "done"
                       : code_of(r->error) ? std::string{to_string(*code_of(r->error))}
                                           : "an error of another library"];
      auto& latest = r->want         ? tally_.latest_mesh
                     : r->by_message ? tally_.latest_message
                                     : tally_.latest;
      latest = std::max(latest, r->late);
    }
  }

  const std::uint64_t seed_;
  const trouble trouble_;
  tally& tally_;
  std::mt19937_64 random_;
  const clock::time_point begin_ = clock::now();
  backend_books books_;
  std::shared_ptr<fault_plan> plan_;
  caf::actor_system* sys_ = nullptr;
  dtype type_ = dtype::uint32;
  std::size_t count_ = 0;
  std::vector<world_entry> worlds_;
  std::array<std::atomic<bool>, 16> ended_worlds_{};
  std::vector<mesh_comm> mesh_; ///< by rank; empty if not used
  std::vector<std::vector<record_ptr>> mesh_rounds_;
  std::size_t last_of_several_ = 0;
  std::atomic<int> ended_device_{-1};

  /// Serializes admission: the model has the same order.
  std::mutex order_;
  content_model model_;
  std::array<std::array<slot, devices>, rows> slots_;

  std::mutex answers_mutex_;
  std::condition_variable all_answered_;
  std::size_t open_ = 0;
  std::vector<record_ptr> records_;

  std::vector<std::string> unanswered_;
  std::vector<std::string> complaints_;
  mutable std::mutex log_mutex_;
  std::vector<std::string> log_;
  std::set<std::string> ends_; ///< reasons for the end of communicators
};

// -- the cases

bool one_seed() { return std::getenv("TROUPE_CHAOS_SEED") != nullptr; }

trouble trouble_of(std::uint64_t seed) { return static_cast<trouble>(seed % trouble_names.size()); }

void run_seed(std::uint64_t seed, tally& all) {
  chaos_run run{seed, trouble_of(seed), all};
  auto wrong = run.run();
  if (wrong.empty() && !one_seed())
    return;
  std::printf("seed %llu\n%s", static_cast<unsigned long long>(seed), run.log().c_str());
  for (auto& x : wrong)
    ADD_FAILURE() << "seed " << seed << ": " << x;
}

/// In workers each seed starts four processes, so each kind of trouble runs once.
std::uint64_t seeds_per_case() { return in_workers() ? trouble_names.size() : 100; }

class Chaos : public ::testing::TestWithParam<std::uint64_t> {};

INSTANTIATE_TEST_SUITE_P(Seeds, Chaos, ::testing::Range<std::uint64_t>(0, 10));

TEST_P(Chaos, AnswersEverythingOnceInTimeAndRight) {
  flag warm; // starts the one thread that stays
  detail::callback_executor().post([&] { warm.set(); });
  ASSERT_TRUE(warm.wait());
  tally all;
  if (one_seed()) {
    auto seed = number_from_environment("TROUPE_CHAOS_SEED", 0);
    if (seed / seeds_per_case() % 10 != GetParam())
      GTEST_SKIP() << "another case has the seed";
    run_seed(seed, all);
  } else {
    auto seeds = number_from_environment("TROUPE_CHAOS_SEEDS", seeds_per_case());
    for (std::uint64_t i = 0; i < seeds && !HasFailure(); ++i)
      run_seed(GetParam() * seeds + i, all);
  }
  for (auto& [what, number] : all.answers)
    std::printf("%6d %s\n", number, what.c_str());
  if (!one_seed())
    for (auto& [what, number] : all.faults)
      std::printf("%6d faults: %s\n", static_cast<int>(number),
                  trouble_names[static_cast<std::size_t>(what)]);
  auto ms = [](clock::duration x) { return std::chrono::duration<double, std::milli>(x).count(); };
  std::printf("latest answer %.2f ms after its deadline, over host memory %.2f ms, to an actor "
              "%.2f ms\n",
              ms(all.latest), ms(all.latest_mesh), ms(all.latest_message));
  for (const auto latest : {all.latest, all.latest_mesh, all.latest_message})
    EXPECT_LT(latest, at_once);
}

} // namespace

} // namespace troupe::testing
