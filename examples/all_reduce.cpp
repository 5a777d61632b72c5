// All-reduces of growing size over the devices of this machine; every element of every rank is
// checked. Also takes options of the library and of CAF, such as --troupe.devices=4.

#include "exact_input.hpp"
#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

using namespace std::chrono_literals;

namespace {

struct settings {
  std::vector<int> devices;
  std::size_t min_bytes = 1024;
  std::size_t max_bytes = 0;
  std::size_t iterations = 20;
  troupe::reduce_op op = troupe::reduce_op::sum;
};

/// Prints one line of the table. Returns the number of wrong elements.
template <class T>
caf::expected<std::size_t> measure(const troupe::world& world, const settings& s,
                                   std::size_t count) {
  const auto n = world.size();
  auto send = world.allocate<T>(count);
  if (!send)
    return send.error();
  auto recv = world.allocate<T>(count);
  if (!recv)
    return recv.error();
  const auto period = exact_period(n);
  std::vector<T> numbers(count);
  world.fill(*recv, element_from<T>(100)); // a wrong value, to be overwritten
  for (std::size_t r = 0; r < n; ++r) {
    for (std::size_t i = 0; i < count; ++i)
      numbers[i] =
          i < period ? element_from<T>(exact_input<T>(s.op, i, r, n)) : numbers[i - period];
    if (auto done = world.device_of(r).upload((*send)[r], numbers).wait(); !done)
      return done.error();
  }

  std::vector<double> seconds;
  for (std::size_t k = 0; k <= s.iterations; ++k) { // the first one warms up
    const auto start = std::chrono::steady_clock::now();
    if (auto done = world.all_reduce(*send, *recv, s.op, {.deadline = 20s}).wait(); !done)
      return done.error();
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    if (k != 0)
      seconds.push_back(time.count());
  }
  std::sort(seconds.begin(), seconds.end());
  const auto median = seconds[seconds.size() / 2];

  auto& right = numbers;
  for (std::size_t i = 0; i < count; ++i)
    right[i] = i < period ? exact_result<T>(s.op, i, n) : right[i - period];
  std::size_t wrong = 0;
  for (std::size_t r = 0; r < n; ++r) {
    auto result = world.device_of(r).download((*recv)[r]);
    if (!result)
      return result.error();
    for (std::size_t i = 0; i < count; ++i)
      wrong += same_bits((*result)[i], right[i]) ? 0 : 1;
  }

  const auto bytes = static_cast<double>(count * sizeof(T));
  const auto algbw = bytes / median / 1e9;
  const auto busbw = algbw * 2 * static_cast<double>(n - 1) / static_cast<double>(n);
  std::printf("%12.0f %12.1f %12.2f %12.2f %8zu\n", bytes, median * 1e6, algbw, busbw, wrong);
  return wrong;
}

template <class T>
caf::expected<std::size_t> measure_all(const troupe::world& world, const settings& s) {
  std::printf("%12s %12s %12s %12s %8s\n", "bytes", "median us", "algbw GB/s", "busbw GB/s",
              "wrong");
  std::size_t wrong = 0;
  for (auto bytes = std::max(s.min_bytes, sizeof(T)); bytes <= s.max_bytes; bytes *= 4) {
    auto more = measure<T>(world, s, bytes / sizeof(T));
    if (!more)
      return more;
    wrong += *more;
  }
  return wrong;
}

/// Measures with the type of `Ts` that `type` names.
template <class... Ts>
caf::expected<std::size_t> measure_as(troupe::dtype type, const troupe::world& world,
                                      const settings& s) {
  caf::expected<std::size_t> result{0};
  ((type == troupe::dtype_v<Ts> ? void(result = measure_all<Ts>(world, s)) : void()), ...);
  return result;
}

int report(const caf::error& why) {
  std::fprintf(stderr, "%s\n", troupe::describe(why).c_str());
  return 1;
}

} // namespace

int main(int argc, char** argv) {
  settings s;
  std::string backend = "auto", type = "float32", op = "sum";
  CLI::App app{"All-reduces over the devices of this machine, with every element checked"};
  app.add_option("--backend", backend, "auto, cuda or host (virtual devices)")
      ->capture_default_str();
  app.add_option("--devices", s.devices, "ordinals, such as 0,1,2; all by default")->delimiter(',');
  app.add_option("--min", s.min_bytes, "smallest size, in bytes per rank")->capture_default_str();
  app.add_option("--max", s.max_bytes, "largest size; by default 256 MiB on GPUs, 4 MiB without");
  app.add_option("--type", type, "element type, such as int32 or bfloat16")->capture_default_str();
  app.add_option("--op", op, "sum, prod, min, max or avg")->capture_default_str();
  app.add_option("--iterations", s.iterations, "of each size")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  app.allow_extras();
  CLI11_PARSE(app, argc, argv);
  const auto dtype = troupe::dtype_from_string(type);
  const auto reduce_op = troupe::reduce_op_from_string(op);
  if (!dtype || !reduce_op)
    return report(
        troupe::make_error(troupe::errc::invalid_argument, "no such element type or operation"));
  s.op = *reduce_op;

  troupe::config cfg;
  auto more = app.remaining();
  more.push_back("--troupe.backend=" + backend);
  if (auto error = cfg.parse(more))
    return report(error);
  if (cfg.help_printed())
    return 0;
  caf::actor_system sys{cfg};
  auto list = troupe::list_devices(sys);
  if (!list)
    return report(list.error());
  if (s.devices.empty())
    s.devices = list->ordinals;
  if (s.max_bytes == 0)
    s.max_bytes = (list->backend == "cuda" ? std::size_t{256} : std::size_t{4}) << 20;
  const auto why = backend != "auto"      ? "asked for"
                   : list->reason.empty() ? "GPUs found"
                                          : list->reason;
  std::printf("backend %s (%s), %zu of %zu devices; %s of %s\n", list->backend.c_str(), why.c_str(),
              s.devices.size(), list->ordinals.size(), op.c_str(), type.c_str());
  auto world = troupe::world::open(sys, {.devices = s.devices});
  if (!world)
    return report(world.error());
  auto wrong = measure_as<std::int8_t, std::uint8_t, std::int32_t, std::uint32_t, std::int64_t,
                          std::uint64_t, troupe::float16, troupe::bfloat16, float, double,
                          troupe::float8_e4m3, troupe::float8_e5m2>(*dtype, *world, s);
  if (!wrong)
    return report(wrong.error());
  std::printf(*wrong == 0 ? "every element right\n" : "WRONG ELEMENTS: %zu\n", *wrong);
  return *wrong == 0 ? 0 : 1;
}
