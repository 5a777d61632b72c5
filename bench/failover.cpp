// Measures how fast a world recovers when a worker process is killed, or a kernel in it faults, and
// how long it pauses when a device is handed over to its spare, under load.
// The times are from the request that ends the worker to the first answer with the error, to the
// first right sum of the remaining ranks, and until the next kill could come. The standbys are
// ready, are being built, or do not exist. Where they are ready, large sums right before and right
// after each end are timed too, and the longest sum from there until the next end is asked for,
// while the next standbys are built. For comparison, the run also measures a worker's start and a
// communicator alone. Every sum, and memory that nothing writes, is checked by value. Also takes
// options of the library and of CAF.

#include "clock_watch.hpp"
#include "machine.hpp"
#include "must.hpp"
#include "rank_threads.hpp"
#include "report.hpp"
#include "statistics.hpp"
#include "watchdog.hpp"
#include <troupe/troupe.hpp>

#if TROUPE_HAS_CUDA
#include "settings.hpp"
#include "support/faulty_kernels.hpp"
#endif

#include <caf/all.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using bench::must;
using namespace std::chrono_literals;

struct settings : bench::common_settings {
  settings() {
    backend = "cuda";
    time_limit_s = 300;
  }

  std::size_t kills = 20;
  std::size_t elements = 1024;
  std::size_t large_mib = 64;
  std::size_t kept_mib = 1;
  std::size_t seconds = 0;
  std::uint32_t seed = 1;
  std::string how = "kill";
  std::string standby = "full";
  std::string on_loss = "automatic";
  std::string when = "ready";

  troupe::standby_policy standby_wanted() const {
    using enum troupe::standby_policy;
    for (auto x : {spares, communicators, full})
      if (standby == to_string(x))
        return x;
    return none;
  }
  troupe::loss_policy on_loss_wanted() const {
    using enum troupe::loss_policy;
    for (auto x : {failover, shrink, rebuild})
      if (on_loss == to_string(x))
        return x;
    return automatic;
  }
  bool shrinks() const { return on_loss == "shrink"; }
  bool waits_for_standbys() const { return when == "ready" && standby != "none"; }
  bool hands_over() const { return how == "hand_over"; }
  bool sums_large() const { return waits_for_standbys() && !shrinks(); }
};

/// Registers the launches that end a worker, and returns their names.
std::vector<std::string> register_ends() {
  std::vector<std::string> names{"kill"};
  must(troupe::register_launch(names.back(), [](troupe::launch_context&, auto, auto, auto) {
    std::raise(SIGKILL);
    return caf::error{};
  }));
#if TROUPE_HAS_CUDA
  using troupe::testing::kernel_fault;
  for (auto [name, fault] :
       {std::pair{"illegal_address", kernel_fault::illegal_address},
        std::pair{"trap", kernel_fault::trap}, std::pair{"assertion", kernel_fault::assertion}}) {
    names.emplace_back(name);
    must(troupe::register_launch(
        name, [fault = fault](troupe::launch_context& context, auto, auto, auto) {
          return troupe::testing::launch_faulty(fault, context.cuda_stream()) == 0
                     ? caf::error{}
                     : troupe::make_error(troupe::errc::cuda_error, "the kernel was not launched");
        }));
  }
#endif
  return names;
}

double milliseconds(bench::clock::duration x) { return bench::microseconds(x) / 1e3; }

/// Measurements before the world exists: a worker's start, a fully connected communicator of all
/// ranks, and the used memory of the first device.
struct beforehand {
  double start_ms = 0;
  double build_ms = 0;
  double used_mib = 0;
};

beforehand measure_by_hand(const settings& s, const std::vector<int>& devices,
                           const troupe::host_backend_options& host) {
  constexpr int times = 3;
  std::vector<double> starts;
  std::vector<double> builds;
  auto execute = must(troupe::make_worker_backend({.backend = s.backend, .host = host}));
  std::vector<troupe::local_rank> ranks;
  for (std::size_t i = 0; i < devices.size(); ++i)
    ranks.push_back({static_cast<int>(i), devices[i]});
  for (int i = 0; i < times; ++i) {
    std::vector<std::unique_ptr<troupe::backend_device>> opened;
    const auto begin = bench::clock::now();
    for (auto x : devices)
      opened.push_back(must(execute->open(x)));
    std::vector<std::thread> threads;
    for (auto& x : opened)
      threads.emplace_back([&x] { must(x->bind()); });
    for (auto& x : threads)
      x.join();
    if (i > 0) // the first device's worker already existed before
      starts.push_back(milliseconds(bench::clock::now() - begin));
    const auto id = must(execute->make_communicator_id());
    const auto from = bench::clock::now();
    auto built = must(execute->build(id, static_cast<int>(ranks.size()), ranks));
    builds.push_back(milliseconds(bench::clock::now() - from));
    must(execute->destroy(std::move(built)));
  }
  return {bench::median(starts), bench::median(builds), 0};
}

/// Returns the memory that all processes use on the first device. @units MiB
double used_memory(caf::actor_system& sys, const std::vector<int>& devices) {
  const auto now = must(must(troupe::device::open(sys, devices.front())).stats().wait());
  return static_cast<double>(now.total_bytes - now.free_bytes) / (1 << 20);
}

/// A client that sums without a pause, and recovers as soon as it can.
class client {
public:
  /// `patience`: how long it waits for memory of a device that may be gone
  client(const troupe::world& over, const settings& s, std::chrono::nanoseconds patience)
      : world_(over), elements_(s.elements), large_elements_((s.large_mib << 20) / sizeof(float)),
        kept_elements_((s.kept_mib << 20) / sizeof(float)), patience_(patience),
        sums_large_(s.sums_large()), large_(over.size()), kept_(over.size()) {
    sets_.fill(refs(over.size()));
    provide_memory(over.status());
    if (sums_large_)
      for (std::size_t i = 0; i < over.size(); ++i) {
        large_[i] = must(over.device_of(i).allocate<float>(large_elements_));
        must(over.device_of(i).fill(large_[i], 0.0f).wait());
      }
  }

  void run() {
    check_kept();
    static_cast<void>(sum()); // the first one allocates
    if (sums_large_)
      large_before_ms_ = large_sums();
    last_ = bench::clock::now();
    while (!stop_) {
      const bool right = sum();
      if (!right && grows_back())
        continue;
      if (!right) {
        first_error_ = first_error_.value_or(bench::clock::now());
        // Where memory is kept, the lost worker may still be writing to this set. A request for the
        // next one may have got to it, too, before its loss was noticed.
        set_ = (set_ + 1) % sets_.size();
        provide_memory(world_.status());
      } else if (first_error_ || returns() > losses_.size()) { // no request need fail
        note_loss();
        last_ = bench::clock::now();
      } else {
        // The launch of a kernel that fails an assertion takes the worker some 5 ms.
        if (!ending_ && answered_ - last_ > longest_) {
          longest_ = answered_ - last_;
          longest_from_ = last_;
          longest_after_ = last_ - back_at_;
        }
        last_ = answered_;
      }
    }
  }
  void stop() { stop_ = true; }
  /// Says that a worker's end, or a handover, is asked for next.
  void expect_end() { ending_ = true; }

  // Valid when `run` has returned.

  /// Returns how long large sums took after each loss, to before. Empty: there were none.
  std::vector<double> large_after() const {
    std::vector<double> result;
    for (auto x : large_after_ms_)
      result.push_back(x / large_before_ms_);
    return result;
  }
  /// Returns the longest time from one right sum to the next while no end was asked for.
  bench::clock::duration longest() const { return longest_; }
  bench::clock::time_point longest_from() const { return longest_from_; }
  /// Returns how long after a loss that sum began.
  bench::clock::duration longest_after() const { return longest_after_; }
  /// Returns the size of a rank's buffers. @units MiB
  double buffers_mib() const {
    const auto all =
        sets_.size() * elements_ + (sums_large_ ? large_elements_ : 0) + kept_elements_;
    return static_cast<double>(all * sizeof(float)) / (1 << 20);
  }

  struct loss {
    bench::clock::time_point told;  ///< first answer with an error; as `right` if there was none
    bench::clock::time_point right; ///< answer of the first right sum
    bench::clock::time_point read;  ///< the host has the values of that sum
    bool had_error = false;         ///< a request failed
    bench::clock::duration pause{}; ///< from the last right sum before
  };
  /// Waits for the end of loss number `n`, counted from 1.
  loss wait_loss(std::size_t n) {
    std::unique_lock lock{mutex_};
    condition_.wait(lock, [&] { return losses_.size() >= n; });
    return losses_[n - 1];
  }
  std::uint64_t sums() const { return sums_; }

private:
  using refs = std::vector<troupe::gpu_ref<float>>;

  /// Sums over the ranks that are present.
  bool sum() {
    auto& data = sets_[set_];
    const auto view = world_.status();
    float want = 0;
    for (auto& x : view.members) {
      const auto i = static_cast<std::size_t>(x.rank);
      want += static_cast<float>(i + 1);
      if (!data[i] || !world_.device_of(i).fill(data[i], static_cast<float>(i + 1)).wait())
        return false;
    }
    const auto now = world_.status(); // a fill may have waited for a device that has come back
    if (now.members.size() != view.members.size())
      return false;
    const troupe::request_options options{.membership = now.membership, .allow_shrunk = true};
    if (!world_.all_reduce(data, troupe::reduce_op::sum, options).wait())
      return false;
    answered_ = bench::clock::now();
    for (auto& rank : view.members) {
      const auto i = static_cast<std::size_t>(rank.rank);
      auto got = world_.device_of(i).download(data[i]);
      if (!got)
        return false;
      for (auto x : *got)
        if (x != want)
          bench::fail("a wrong sum on rank " + std::to_string(i));
    }
    ++sums_;
    return true;
  }
  /// Sums large buffers, all of which hold 0, one after the other. Returns the time. @units ms
  double large_sums() {
    constexpr int times = 100;
    const auto begin = bench::clock::now();
    for (int i = 0; i < times; ++i)
      must(world_.all_reduce(large_, troupe::reduce_op::sum).wait());
    return milliseconds(bench::clock::now() - begin);
  }
  void provide_memory(const troupe::world_status& view) {
    for (auto& x : view.members) {
      const auto i = static_cast<std::size_t>(x.rank);
      const auto device = world_.device_of(i);
      for (auto& all : sets_)
        if (!all[i] || all[i].stale())
          if (auto fresh = device.allocate<float>(elements_, false, {.deadline = patience_}))
            all[i] = std::move(*fresh);
    }
  }
  /// Checks memory that nothing writes. Allocates it again on a device that was lost.
  void check_kept() {
    for (auto& x : world_.status().members) {
      const auto i = static_cast<std::size_t>(x.rank);
      const auto device = world_.device_of(i);
      if (!kept_[i] || kept_[i].stale()) {
        auto fresh = device.allocate<float>(kept_elements_, false, {.deadline = patience_});
        if (fresh && device.fill(*fresh, static_cast<float>(100 + i)).wait())
          kept_[i] = std::move(*fresh);
        continue;
      }
      const std::vector<float> want(std::min(piece_elements, kept_elements_),
                                    static_cast<float>(100 + i));
      if (pinned_.size_bytes() == 0)
        pinned_ = must(device.allocate_pinned(want.size() * sizeof(float)));
      for (std::size_t from = 0; from < kept_elements_; from += want.size()) {
        const auto count = std::min(want.size(), kept_elements_ - from);
        const auto piece = must(pinned_.slice(0, count * sizeof(float)));
        must(device.download(must(kept_[i].slice(from, count)), piece).wait());
        if (std::memcmp(piece.bytes().data(), want.data(), piece.size_bytes()) != 0)
          bench::fail("memory that nothing wrote has changed on rank " + std::to_string(i));
      }
    }
  }
  /// Returns how often a device came back after a loss.
  std::size_t returns() const {
    std::size_t result = 0;
    for (std::size_t i = 0; i < world_.size(); ++i)
      result += world_.device_of(i).incarnation() - 1;
    return result;
  }
  /// Returns whether a rank is back, whose device needs memory.
  bool grows_back() {
    const auto view = world_.status();
    if (view.members.size() <= members_ || view.phase != troupe::world_phase::ready)
      return false;
    provide_memory(view);
    members_ = view.members.size();
    return true;
  }
  void note_loss() {
    const auto read_at = bench::clock::now();
    members_ = world_.status().members.size();
    back_at_ = answered_;
    const auto pause = back_at_ - last_;
    if (sums_large_)
      large_after_ms_.push_back(large_sums());
    check_kept();
    ending_ = false; // before the loss is told: then the next end may be asked for
    std::lock_guard lock{mutex_};
    losses_.push_back(
        {first_error_.value_or(answered_), back_at_, read_at, first_error_.has_value(), pause});
    first_error_.reset();
    condition_.notify_all();
  }

  static constexpr std::size_t piece_elements = std::size_t{16} << 20;

  const troupe::world& world_;
  const std::size_t elements_;
  const std::size_t large_elements_;
  const std::size_t kept_elements_;
  const std::chrono::nanoseconds patience_;
  const bool sums_large_;
  std::array<refs, 4> sets_; ///< of buffers, one for each rank
  std::size_t set_ = 0;      ///< the one in use
  refs large_;
  double large_before_ms_ = 0;
  std::vector<double> large_after_ms_;
  refs kept_;                                              ///< nothing writes it
  troupe::host_buffer pinned_;                             ///< for a piece of it
  bench::clock::time_point back_at_ = bench::clock::now(); ///< of the last right sum after a loss
  bench::clock::duration longest_{};
  bench::clock::time_point longest_from_;
  bench::clock::duration longest_after_{};
  std::size_t members_ = world_.size(); ///< at the last sum
  bench::clock::time_point last_;       ///< answer of the last right sum
  std::atomic<bool> stop_ = false;
  std::atomic<bool> ending_ = false; ///< from the request for an end to the first right sum
  std::atomic<std::uint64_t> sums_ = 0;
  bench::clock::time_point answered_;
  std::optional<bench::clock::time_point> first_error_; ///< since the last right sum
  std::mutex mutex_;
  std::condition_variable condition_;
  std::vector<loss> losses_; ///< the client's thread alone adds to it
};

/// Fails if the world never has a standby, so that a wait for one would not end.
void check_standbys(const settings& s, const troupe::world& world) {
  if (s.waits_for_standbys() && s.standby == "spares" &&
      must(world.barrier().wait()).way == troupe::collective_way::nccl)
    bench::fail("with --standby spares and collectives by NCCL, no communicator is ready before a "
                "kill: measure that with --when building, or choose --standby full");
}

/// Prints how long threads that only look at the clock missed it, also in the longest pauses.
void print_missed(const bench::clock_watch& watch, const client& load, const client::loss& loss) {
  const auto sum_from = load.longest_from();
  std::printf(
      "threads that only look at the clock missed it for at most %.2f ms on end; for %.2f in "
      "the longest pause at an end, for %.2f in the longest sum without a loss\n",
      milliseconds(watch.missed()), milliseconds(watch.missed(loss.right - loss.pause, loss.right)),
      milliseconds(watch.missed(sum_from, sum_from + load.longest())));
}

void run(const settings& s, caf::actor_system& sys, const troupe::world& world,
         const beforehand& before, bench::watchdog& guard, std::vector<bench::bar>& bars) {
  auto machine = bench::describe_machine(world);
  machine["how"] = s.how;
  machine["standby"] = s.standby;
  machine["on_loss"] = s.on_loss;
  machine["when"] = s.when;
  std::printf(
      "ends of workers under load (%s; standby %s, on loss %s, when %s), %zu ranks, backend "
      "%s\n%s\n\n",
      s.how.c_str(), s.standby.c_str(), s.on_loss.c_str(), s.when.c_str(), world.size(),
      s.backend.c_str(), bench::summary(machine).c_str());
  caf::scoped_actor self{sys};
  troupe::tell(self, world.actor(), troupe::subscribe{});
  const bool waits_for_standbys = s.waits_for_standbys();
  // A message may be older than the last kill. So it only triggers a look at the status.
  const auto wait_ready = [&] {
    for (auto now = world.status();; now = world.status()) {
      if (now.phase == troupe::world_phase::failed)
        bench::fail("the world failed: " + troupe::describe(now.reason));
      if (now.phase == troupe::world_phase::ready && now.members.size() == world.size() &&
          (!waits_for_standbys || now.standby_ready))
        return;
      self->receive([](const troupe::world_status&) {},
                    caf::after(std::chrono::milliseconds(10)) >> [] {});
    }
  };
  const bool shrinks = world.status().members.size() > 1 && s.shrinks();
  const bench::clock_watch watch;
  client load{world, s, shrinks ? 5ms : 30s};
  std::thread thread{[&] { load.run(); }};
  std::mt19937 random{s.seed};
  std::vector<std::size_t> lost; // ranks
  std::vector<double> told;
  std::vector<double> right;
  std::vector<double> after;
  std::vector<double> read;
  std::vector<double> pauses;
  client::loss worst; // the one with the longest pause
  std::vector<double> ready;
  double used_mib = 0;
  auto since = bench::clock::now();
  const auto begun = since;
  const auto goes_on = [&] {
    return s.seconds == 0 || bench::clock::now() - begun < std::chrono::seconds{s.seconds};
  };
  for (std::size_t i = 1; i <= s.kills && (i == 1 || goes_on()); ++i) {
    guard.enter("waiting for the standbys, kill " + std::to_string(i));
    wait_ready();
    if (i == 1) {
      used_mib =
          used_memory(sys, {world.device_of(0).ordinal()}) - before.used_mib - load.buffers_mib();
      std::printf("memory of the first device for the world and what it has ready, beyond its "
                  "buffers: %.0f MiB\n\n",
                  used_mib);
      machine["memory_mib"] = used_mib;
    }
    ready.push_back(milliseconds(bench::clock::now() - since));
    for (const auto from = load.sums(); load.sums() < from + 10;)
      std::this_thread::yield();
    const auto longest = s.when == "building" ? 500'000 : 20'000;
    std::this_thread::sleep_for(std::chrono::microseconds{random() % longest});
    lost.push_back(random() % world.size());
    const auto device = world.device_of(lost.back());
    guard.enter("a kill");
    load.expect_end();
    const auto begin = bench::clock::now();
    if (s.hands_over())
      must(device.hand_over().wait());
    else
      device.launch(s.how, {}, {}, {}); // not awaited
    const auto x = load.wait_loss(i);
    if (s.hands_over() && x.had_error)
      bench::fail("a request failed because of a handover");
    pauses.push_back(milliseconds(x.pause));
    if (x.pause > worst.pause)
      worst = x;
    since = bench::clock::now();
    told.push_back(milliseconds(x.told - begin));
    right.push_back(milliseconds(x.right - begin));
    after.push_back(milliseconds(x.right - x.told));
    read.push_back(milliseconds(x.read - x.right));
  }
  load.stop();
  thread.join();
  guard.enter("the report");
  std::printf("%-48s %9s %9s %9s\n", "ms", "median", "p99", "max");
  nlohmann::ordered_json rows;
  const auto row = [&](const char* what, const std::vector<double>& times) {
    std::printf("%-48s %9.2f %9.2f %9.2f\n", what, bench::median(times),
                bench::quantile(times, 0.99), bench::quantile(times, 1));
    rows.push_back({{"what", what}, {"median_ms", bench::median(times)}, {"each_ms", times}});
  };
  row("from the kill to the first answer that tells", told);
  row("from the kill to the first right sum", right);
  row("from the answer that tells to the first right sum", after);
  row("from the first right sum until the host has read it", read);
  row("from the last right sum before to the first after", pauses);
  row(waits_for_standbys ? "from there until the next standbys are ready"
                         : "from there until all ranks are there again",
      ready);
  const auto large_after = load.large_after();
  if (!large_after.empty())
    std::printf(
        "100 sums of %zu MiB right after, to before: time %.3f in the median, %.3f at most; "
        "longest sum without a loss: %.2f ms, %.0f ms after one\n",
        s.large_mib, bench::median(large_after), bench::quantile(large_after, 1),
        milliseconds(load.longest()), milliseconds(load.longest_after()));
  if (watch.looks()) {
    machine["missed_ms"] = milliseconds(watch.missed());
    print_missed(watch, load, worst);
  }
  std::printf("%zu kills, %llu right sums\n\n", lost.size(),
              static_cast<unsigned long long>(load.sums()));
  if (s.hands_over()) {
    bars = {{"longest pause of a handover, ms", 5, true, bench::quantile(pauses, 1)}};
  } else if (waits_for_standbys) {
    // CUDA reports a fault after an unknown time.
    const auto& times = s.how == "kill" ? right : after;
    bars = {{s.how == "kill" ? "from the kill to the first right sum, median, ms"
                             : "from the answer that tells to the first right sum, median, ms",
             1, true, bench::median(times)},
            {"the same, p99, ms", 5, true, bench::quantile(times, 0.99)},
            {"memory beyond the buffers, MiB", 900, true, used_mib}};
    if (!large_after.empty()) {
      bars.push_back({"large sums right after, bandwidth to before, median", 0.95, false,
                      1 / bench::median(large_after)});
      bars.push_back(
          {"longest sum while standbys are built, ms", 5, true, milliseconds(load.longest())});
      machine["large_after"] = large_after;
    }
  } else {
    // A shrunk world needs no start. A world with a spare needs none either, unless the spare is
    // still starting, as it does while the standbys are built.
    const bool starts = !shrinks && (s.when == "building" || s.on_loss != "failover");
    const auto needed = before.build_ms + (starts ? before.start_ms : 0);
    std::printf("by hand: a worker's start %.1f ms, a communicator %.1f ms\n\n", before.start_ms,
                before.build_ms);
    bars = {{"from the kill to the first right sum, to by hand", 1.3, true,
             bench::median(right) / needed}};
    machine["by_hand_start_ms"] = before.start_ms;
    machine["by_hand_build_ms"] = before.build_ms;
  }
  bench::print_bars(bars);
  bench::write_json(
      s.json_file,
      {{"machine", machine}, {"lost_ranks", lost}, {"rows", rows}, {"bars", bench::to_json(bars)}});
}

} // namespace

int main(int argc, char** argv) {
  const auto ends = register_ends();
  if (auto status = troupe::worker_main(argc, argv))
    return *status;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  settings s;
  CLI::App app{"How fast a world goes on when a worker process is killed"};
  s.add_to(app);
  s.add_devices_to(app);
  app.add_option("--kills", s.kills)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--seconds", s.seconds, "no further kill after so long; 0: no limit")
      ->capture_default_str();
  app.add_option("--seed", s.seed, "of which rank is next, and when")->capture_default_str();
  auto ways = ends;
  ways.emplace_back("hand_over");
  app.add_option("--how", s.how, "what ends the workers")
      ->check(CLI::IsMember(ways))
      ->capture_default_str();
  app.add_option("--standby", s.standby, "what the world has ready")
      ->check(CLI::IsMember({"none", "spares", "communicators", "full"}))
      ->capture_default_str();
  app.add_option("--on-loss", s.on_loss, "how it goes on")
      ->check(CLI::IsMember({"automatic", "failover", "shrink", "rebuild"}))
      ->capture_default_str();
  app.add_option("--when", s.when,
                 "kills come when the standbys are ready, or while they are built")
      ->check(CLI::IsMember({"ready", "building"}))
      ->capture_default_str();
  app.add_option("--elements", s.elements)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--large-mib", s.large_mib, "of each large sum")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--kept-mib", s.kept_mib, "of each rank's memory that nothing writes")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);

  // With lazy loading, the first launch of a kernel would wait for the work on the device.
  if (::setenv("CUDA_MODULE_LOADING", "EAGER", 1) != 0)
    bench::fail("no room in the environment");
  bench::watchdog guard{std::chrono::seconds{s.time_limit_s}};
  auto options = app.remaining();
  options.push_back("--troupe.backend=" + s.backend);
  troupe::config cfg;
  must(cfg.parse(options));
  if (cfg.help_printed())
    return 0;
  cfg.placement = troupe::placement::worker_process;
  cfg.workers.keep_memory = troupe::kept_memory::after_fault;
  std::vector<bench::bar> bars;
  {
    caf::actor_system sys{cfg};
    guard.enter("opening the world");
    troupe::world_config config;
    config.devices = s.devices.empty() ? must(troupe::list_devices(sys)).ordinals : s.devices;
    config.limits.standby = s.standby_wanted();
    config.limits.on_loss = s.on_loss_wanted();
    config.limits.restarts = 1 << 20;
    config.limits.restart_window = 1ms; // otherwise so many losses would delay the builds
    beforehand before;
    if (s.when == "building" || s.standby == "none") {
      guard.enter("starts and communicators by hand");
      auto host = cfg.host;
      host.devices = 1 + *std::max_element(config.devices.begin(), config.devices.end());
      before = measure_by_hand(s, config.devices, host);
      guard.enter("opening the world");
    }
    before.used_mib = used_memory(sys, config.devices);
    const auto world = must(troupe::world::open(sys, std::move(config)));
    check_standbys(s, world);
    run(s, sys, world, before, guard, bars);
    guard.enter("shutting down");
  }
  return s.pass(bars) ? 0 : 1;
}
