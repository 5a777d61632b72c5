// The heat equation on a plate, whose rows are split over all devices. In each step the devices
// exchange the rows at their borders while they compute the rows between them. The result is
// compared with a serial run, place by place. Also takes options of the library and of CAF.

#include "heat.hpp"

#include <troupe/troupe.hpp>
#if TROUPE_HAS_CUDA
#include <troupe/cuda_error.hpp>
#endif

#include <caf/all.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <fstream>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr const char* heat_rows = "heat.rows"; // the launch
using field = std::vector<float>;              // temperatures, row by row

struct settings {
  std::size_t rows = 512; ///< without the first and the last one, which keep their temperatures
  std::size_t columns = 512;
  std::size_t steps = 500;
  std::string picture;
};

/// Returns a cold plate with hot discs at random places.
field make_plate(const settings& s) {
  field plate((s.rows + 2) * s.columns, 20.0f);
  std::mt19937 random{1};
  std::uniform_real_distribution<float> place{0, 1}, degrees{100, 1000};
  const auto height = static_cast<float>(s.rows), width = static_cast<float>(s.columns);
  for (int disc = 0; disc < 12; ++disc) {
    const auto y = place(random) * height, x = place(random) * width;
    const auto radius = 0.12f * place(random) * std::min(height, width);
    const auto temperature = degrees(random);
    for (std::size_t i = 0; i < plate.size(); ++i) {
      const auto dy = static_cast<float>(i / s.columns) - y;
      const auto dx = static_cast<float>(i % s.columns) - x;
      if (dy * dy + dx * dx < radius * radius)
        plate[i] = temperature;
    }
  }
  return plate;
}

field run_serially(field now, const settings& s) {
  auto next = now;
  for (std::size_t step = 0; step < s.steps; ++step) {
    heat_on_host(now.data(), next.data() + s.columns, s.rows, s.columns);
    std::swap(now, next);
  }
  return now;
}

// [launch]
/// The launch: computes the rows of `next` from the same rows of `now`, which has one row more
/// above them and one below. Runs in the process of the device.
caf::error enqueue_heat(troupe::launch_context& context, const std::size_t& columns,
                        std::span<const float> now, std::span<float> next) {
  const auto rows = next.size() / columns;
#if TROUPE_HAS_CUDA
  if (context.cuda_stream() != nullptr)
    return troupe::error_of(
        launch_heat(now.data(), next.data(), rows, columns, context.cuda_stream()));
#endif
  return context.run_on_host([from = now.data(), to = next.data(), rows, width = columns] {
    heat_on_host(from, to, rows, width);
  });
}
// [launch]

// [part]
/// The rows of one rank: 1 to `rows`. Row 0 belongs to the rank above, and the last one to the rank
/// below.
struct part {
  troupe::world_rank rank;
  std::size_t columns;
  std::size_t first; ///< row of the plate that is row 0 here
  std::size_t rows;
  std::array<troupe::gpu_ref<float>, 2> fields; ///< for even and for odd steps

  troupe::gpu_ref<float> rows_at(std::size_t step, std::size_t row, std::size_t count) const {
    return *fields[step % 2].slice(row * columns, count * columns);
  }

  troupe::pending<void> compute(std::size_t step, std::size_t row, std::size_t count) const {
    return rank.where().launch(heat_rows, troupe::to_bytes(columns),
                               {rows_at(step, row - 1, count + 2)},
                               {rows_at(step + 1, row, count)});
  }
};
// [part]

// [step]
/// Begins one time step of one rank, and does not wait for it. The rows at the borders come first,
/// because the neighbors need them. While these travel, the device computes the others. The library
/// orders all requests by the rows that they read and write, also those of different steps.
troupe::pending<void> begin_step(const part& p, std::size_t step) {
  p.compute(step, 1, 1);
  p.compute(step, p.rows, 1);
  const auto above = p.rank.index() - 1;
  const auto below = p.rank.index() + 1;
  std::vector<troupe::message_end> sends, recvs;
  if (above >= 0) {
    sends.push_back({above, p.rows_at(step + 1, 1, 1)});
    recvs.push_back({above, p.rows_at(step + 1, 0, 1)});
  }
  if (below < static_cast<int>(p.rank.size())) {
    sends.push_back({below, p.rows_at(step + 1, p.rows, 1)});
    recvs.push_back({below, p.rows_at(step + 1, p.rows + 1, 1)});
  }
  p.rank.exchange(sends, recvs);
  return p.compute(step, 2, p.rows - 2);
}
// [step]

/// Splits the plate, and uploads both fields of each rank: no step writes the plate's first and
/// last row.
caf::expected<std::vector<part>> split(const troupe::world& world, const field& plate,
                                       const settings& s) {
  if (s.rows < 3 * world.size())
    return troupe::make_error(troupe::errc::invalid_argument, "too few rows: each device needs 3");
  std::vector<part> parts;
  for (std::size_t r = 0; r < world.size(); ++r) {
    const auto first = s.rows * r / world.size();
    part p{world.rank(r), s.columns, first, s.rows * (r + 1) / world.size() - first, {}};
    const auto begin = plate.data() + first * s.columns;
    for (auto& x : p.fields) {
      auto memory = p.rank.where().allocate<float>((p.rows + 2) * s.columns);
      if (!memory)
        return memory.error();
      x = *memory;
      p.rank.where().upload(x, field(begin, begin + x.count()));
    }
    parts.push_back(p);
  }
  return parts;
}

/// Computes all steps on the devices. Only the last answers count: what a request that fails would
/// have written cannot be read, so the requests after it fail, too.
caf::expected<field> run_on_devices(const troupe::world& world, field plate, const settings& s) {
  const auto parts = split(world, plate, s);
  if (!parts)
    return parts.error();
  const auto begin = std::chrono::steady_clock::now();
  // [run]
  std::vector<troupe::pending<void>> last(parts->size());
  for (std::size_t step = 0; step < s.steps; ++step) {
    for (std::size_t r = 0; r < parts->size(); ++r)
      last[r] = begin_step((*parts)[r], step);
    if (step % 100 == 99 || step + 1 == s.steps) // so that no request waits for too many others
      if (auto done = troupe::when_all(last).wait(); !done)
        return done.error();
  }
  // [run]
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
  const auto places = static_cast<double>(s.steps * s.rows * s.columns);
  std::printf("%zu steps in %.3f s: %.3g places/s\n", s.steps, time.count(), places / time.count());
  for (auto& p : *parts) {
    const auto own = std::span{plate}.subspan((p.first + 1) * s.columns, p.rows * s.columns);
    if (auto done = p.rank.where().download(p.rows_at(s.steps, 1, p.rows), own).wait(); !done)
      return done.error();
  }
  return plate;
}

/// Writes a picture in the format PPM, from blue (cold) to red and yellow (hot).
caf::error draw(const field& plate, const settings& s) {
  std::ofstream file{s.picture, std::ios::binary};
  file << "P6\n" << s.columns << ' ' << s.rows + 2 << "\n255\n";
  const auto hottest = *std::max_element(plate.begin(), plate.end());
  for (const auto temperature : plate) {
    const auto x = temperature / hottest;
    for (const auto color : {3 * x, 2 * x - 0.8f, 0.5f - x})
      file.put(static_cast<char>(255 * std::clamp(color, 0.0f, 1.0f)));
  }
  file.close();
  return file ? caf::error{}
              : troupe::make_error(troupe::errc::unavailable, "cannot write " + s.picture);
}

caf::error run(const troupe::world& world, const settings& s) {
  std::printf("%zu x %zu places on %zu devices\n", s.rows, s.columns, world.size());
  const auto plate = make_plate(s);
  const auto result = run_on_devices(world, plate, s);
  if (!result)
    return result.error();
  const auto expected = run_serially(plate, s);
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < expected.size(); ++i)
    wrong += (*result)[i] != expected[i];
  std::printf("compared with a serial run: %zu of %zu places are wrong\n", wrong, expected.size());
  if (wrong == 0)
    return s.picture.empty() ? caf::error{} : draw(*result, s);
  return troupe::make_error(troupe::errc::internal, "the result is wrong");
}

/// Returns the exit code of the program.
int report(const caf::error& why) {
  if (why)
    std::fprintf(stderr, "%s\n", troupe::describe(why).c_str());
  return why ? 1 : 0;
}

} // namespace

int main(int argc, char** argv) {
  if (auto error = troupe::register_launch(heat_rows, troupe::typed_launch(enqueue_heat)))
    return report(error);
  if (auto status = troupe::worker_main(argc, argv)) // with --troupe.placement=worker
    return *status;

  settings s;
  CLI::App app{"The heat equation on a plate that is split over all devices"};
  app.option_defaults()->always_capture_default();
  const CLI::Range size{3, 32'768};
  app.add_option("--rows", s.rows, "of the plate")->check(size);
  app.add_option("--columns", s.columns, "of the plate")->check(size);
  app.add_option("--steps", s.steps, "of time")->check(CLI::PositiveNumber);
  app.add_option("--picture", s.picture, "file for a picture of the result (PPM)");
  app.allow_extras();
  CLI11_PARSE(app, argc, argv);

  troupe::config cfg;
  if (auto error = cfg.parse(app.remaining()))
    return report(error);
  if (cfg.help_printed())
    return 0;
  caf::actor_system sys{cfg};
  const auto world = troupe::world::open(sys, {.devices = troupe::all_devices(sys)});
  if (!world)
    return report(world.error());
  return report(run(*world, s));
}
