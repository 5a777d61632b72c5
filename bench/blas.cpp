// Compares matrix products as requests with cuBLASLt by hand, in one run: large ones, and small
// ones one at a time and 64 in flight. Also takes options of the library and of CAF, such as
// --troupe.placement=worker.

#include "machine.hpp"
#include "must.hpp"
#include "rank_threads.hpp"
#include "raw_products.hpp"
#include "report.hpp"
#include "settings.hpp"
#include "statistics.hpp"
#include "watchdog.hpp"
#include <troupe/blas.hpp>
#include <troupe/troupe.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

namespace {

using bench::must;
using bench::product_kind;
using troupe::dtype;

struct settings : bench::common_settings {
  settings() { time_limit_s = 300; }

  std::size_t rounds = 20;
  std::size_t large = 8192;
  std::size_t small = 128;
};

/// Products of n x n matrices that are full of ones.
class products {
public:
  products(const troupe::device& on, std::size_t n, product_kind kind, std::size_t most_in_flight)
      : on_(on), n_(n) {
    const auto type = kind == product_kind::float8 ? dtype::float8_e4m3 : dtype::bfloat16;
    const auto one = kind == product_kind::float8 ? troupe::scalar{troupe::float8_e4m3{1.0f}}
                                                  : troupe::scalar{troupe::bfloat16{1.0f}};
    a_ = matrix_of(type);
    b_ = matrix_of(type);
    b_.op = troupe::blas::transpose::transposed;
    for (auto* x : {&a_, &b_})
      on_.fill(x->memory, one);
    for (std::size_t i = 0; i < most_in_flight; ++i)
      d_.push_back(matrix_of(dtype::bfloat16));
    run(1, 1);
    verify();
  }

  void run(std::size_t count, std::size_t window) {
    std::vector<troupe::pending<void>> open(window);
    for (std::size_t i = 0; i < count + window; ++i) {
      auto& place = open[i % window];
      if (i >= window)
        must(place.wait());
      if (i < count)
        place = troupe::blas::matmul(on_, a_, b_, d_[i % window]);
    }
  }

private:
  troupe::blas::matrix matrix_of(dtype type) {
    return {must(on_.allocate(type, n_ * n_).wait()), n_, n_};
  }

  void verify() {
    const auto got =
        must(on_.download(must(troupe::gpu_ref<troupe::bfloat16>::from(d_[0].memory))));
    if (std::ranges::any_of(
            got, [&](auto x) { return static_cast<float>(x) != static_cast<float>(n_); }))
      bench::fail("a product is wrong");
  }

  const troupe::device on_;
  const std::size_t n_;
  troupe::blas::matrix a_, b_;
  std::vector<troupe::blas::matrix> d_;
};

/// One kind of products, and its times.
struct cell {
  std::string name;
  std::size_t n = 0;
  product_kind kind = product_kind::bfloat16;
  std::size_t window = 1;
  std::size_t count = 1;                                           ///< in a round
  double most = 1;                                                 ///< the bar: of the time by hand
  std::vector<double> by_requests = {}, by_hand = {}, ratios = {}; ///< us per product
};

template <class Products> double time_of(Products& of, const cell& x) {
  const auto begin = bench::clock::now();
  of.run(x.count, x.window);
  return bench::microseconds(bench::clock::now() - begin) / static_cast<double>(x.count);
}

void measure(cell& x, const troupe::device& on, bool compares, std::size_t rounds) {
  products requests{on, x.n, x.kind, x.window};
  std::unique_ptr<bench::raw_products> raw;
#if TROUPE_HAS_CUDA
  if (compares)
    raw = bench::make_raw_products(on.ordinal(), x.n, x.kind, x.window);
#else
  static_cast<void>(compares);
#endif
  requests.run(x.count, x.window);
  for (std::size_t i = 0; i < rounds; ++i) {
    const auto before = raw ? time_of(*raw, x) : 0;
    x.by_requests.push_back(time_of(requests, x));
    if (!raw)
      continue;
    const auto after = time_of(*raw, x);
    x.by_hand.push_back((before + after) / 2);
    x.ratios.push_back(x.by_requests.back() / x.by_hand.back());
  }
}

void print(const cell& x) {
  const auto us = bench::median(x.by_requests);
  const auto operations = 2.0 * static_cast<double>(x.n * x.n * x.n);
  std::printf("%-36s %12.2f %12.2f %8.3f %10.1f\n", x.name.c_str(), us, bench::median(x.by_hand),
              bench::median(x.ratios), operations / us / 1e6);
}

} // namespace

int main(int argc, char** argv) {
  troupe::blas::replay_kernels();
  if (auto status = troupe::worker_main(argc, argv))
    return *status;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  settings s;
  CLI::App app{"Matrix products as requests and by hand"};
  s.add_to(app);
  const auto size = CLI::Range(16, 1 << 15);
  app.add_option("--rounds", s.rounds)->check(CLI::Range(1, 10'000))->capture_default_str();
  app.add_option("--large", s.large, "rows of large matrices")->check(size)->capture_default_str();
  app.add_option("--small", s.small, "rows of small matrices")->check(size)->capture_default_str();
  CLI11_PARSE(app, argc, argv);

  bench::watchdog guard{std::chrono::seconds{s.time_limit_s}};
  troupe::config cfg;
  auto options = app.remaining();
  options.push_back("--troupe.backend=" + s.backend);
  if (auto error = cfg.parse(options))
    bench::fail(troupe::describe(error));
  if (cfg.help_printed())
    return 0;
  caf::actor_system sys{cfg};
  guard.enter("opening a device");
  const auto on = must(troupe::device::open(sys, 0));
  auto machine = bench::describe_machine({on});
  std::printf("%s\n", bench::summary(machine).c_str());
  const bool compares = must(troupe::list_devices(sys)).backend == "cuda";
  const bool in_worker = must(on.stats().wait()).worker_pid != 0;

  const auto large = std::to_string(s.large);
  const auto small = std::to_string(s.small);
  const std::size_t many = compares ? 2000 : 20;
  std::vector<cell> cells{
      {large + " bfloat16, 4 in flight", s.large, product_kind::bfloat16, 4, 20, 1 / 0.99},
      {large + " float8, 4 in flight", s.large, product_kind::float8, 4, 20, 1 / 0.99},
      {small + " bfloat16, one at a time", s.small, product_kind::bfloat16, 1, many,
       in_worker ? 1.3 : 1.25},
      {small + " bfloat16, 64 in flight", s.small, product_kind::bfloat16, 64, many,
       in_worker ? 1.3 : 1.1}};
  std::printf("\n%-36s %12s %12s %8s %10s\n", "us for each product", "requests", "by hand", "ratio",
              "TFLOP/s");
  nlohmann::ordered_json json{{"machine", machine}};
  std::vector<bench::bar> bars;
  for (auto& x : cells) {
    guard.enter(x.name);
    measure(x, on, compares, s.rounds);
    print(x);
    json["us"][x.name] = {{"requests", x.by_requests}, {"by_hand", x.by_hand}};
    if (compares)
      bars.push_back({x.name + ", to by hand", x.most, true, bench::median(x.ratios)});
  }
  bench::print_bars(bars);
  json["bars"] = bench::to_json(bars);
  bench::write_json(s.json_file, json);
  guard.enter("shutting down");
  return s.pass(bars) ? 0 : 1;
}
