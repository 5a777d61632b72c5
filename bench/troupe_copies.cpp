#include "troupe_copies.hpp"

#include "in_flight.hpp"
#include "must.hpp"
#include "rank_threads.hpp"
#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

namespace bench {

namespace {

using namespace std::chrono_literals;

constexpr auto deadline = 60s;
constexpr auto type = troupe::dtype::uint64;

const troupe::device& device_of(const std::vector<troupe::device>& devices, int ordinal) {
  const auto i =
      std::find_if(devices.begin(), devices.end(), [=](auto& x) { return x.ordinal() == ordinal; });
  if (i == devices.end())
    fail("there is no device " + std::to_string(ordinal) + " in the benchmark");
  return *i;
}

std::size_t words(std::size_t size_bytes) { return size_bytes / sizeof(std::uint64_t); }

troupe::any_gpu_ref part(const troupe::any_gpu_ref& x, std::size_t offset, std::size_t size_bytes) {
  return must(x.slice(words(offset), words(size_bytes)));
}

class troupe_copies final : public copying_contestant {
public:
  troupe_copies(std::string name, troupe::topology links, std::vector<troupe::device> devices,
                std::vector<route_refs> memory)
      : name_(std::move(name)), links_(std::move(links)), devices_(std::move(devices)),
        memory_(std::move(memory)) {}

  std::string name() const override { return name_; }
  std::size_t routes() const override { return memory_.size(); }

  void write(std::size_t i, std::size_t offset, std::span<const std::byte> bytes) override {
    must(device_of(devices_, memory_[i].way.from)
             .upload(part(memory_[i].source, offset, bytes.size()), bytes)
             .wait());
  }

  void read(std::size_t i, std::size_t offset, std::span<std::byte> bytes) override {
    must(device_of(devices_, memory_[i].way.to)
             .download(part(memory_[i].target, offset, bytes.size()), bytes)
             .wait());
  }

  timing run(std::size_t size_bytes, std::size_t operations, std::size_t window) override {
    const auto copies = copies_of(size_bytes, window);
    timing result;
    const auto begin = clock::now();
    if (window == 1) {
      result.each.reserve(operations);
      for (std::size_t k = 0; k < operations; ++k) {
        const auto start = clock::now();
        must(issue(copies.front()).wait());
        result.each.push_back(microseconds(clock::now() - start));
      }
    } else {
      keep_in_flight(operations, window, [&](std::size_t k) { return issue(copies[k % window]); });
    }
    result.per_operation = microseconds(clock::now() - begin) / static_cast<double>(operations);
    return result;
  }

private:
  using batch = std::vector<troupe::copy_pair>;

  /// Returns the copies of each operation that can be in flight.
  std::vector<batch> copies_of(std::size_t size_bytes, std::size_t window) const {
    std::vector<batch> result(window);
    for (std::size_t k = 0; k < window; ++k)
      for (auto& x : memory_)
        result[k].push_back({part(x.target, k * size_bytes, size_bytes),
                             part(x.source, k * size_bytes, size_bytes)});
    return result;
  }

  troupe::pending<void> issue(const batch& x) const {
    if (x.size() == 1)
      return links_.copy(x.front().target, x.front().source, {.deadline = deadline});
    return links_.copy(x, {.deadline = deadline});
  }

  const std::string name_;
  const troupe::topology links_;
  const std::vector<troupe::device> devices_;
  const std::vector<route_refs> memory_;
};

} // namespace

std::vector<route_refs> allocate_for(const std::vector<route>& routes,
                                     const std::vector<troupe::device>& devices,
                                     std::size_t size_bytes) {
  std::vector<route_refs> result;
  for (auto& x : routes)
    result.push_back({x, must(device_of(devices, x.from).allocate(type, words(size_bytes)).wait()),
                      must(device_of(devices, x.to).allocate(type, words(size_bytes)).wait())});
  return result;
}

std::vector<route_refs> adopt_for(const std::vector<route_memory>& memory,
                                  const std::vector<troupe::device>& devices,
                                  std::size_t size_bytes) {
  const auto adopt = [&](int ordinal, const std::shared_ptr<void>& x) {
    return must(device_of(devices, ordinal)
                    .adopt(x.get(), words(size_bytes), type, [x](void*) { /* x goes with it */ }));
  };
  std::vector<route_refs> result;
  for (auto& x : memory)
    result.push_back({x.way, adopt(x.way.from, x.source), adopt(x.way.to, x.target)});
  return result;
}

std::unique_ptr<copying_contestant> make_troupe_copies(std::string name,
                                                       const troupe::topology& links,
                                                       const std::vector<troupe::device>& devices,
                                                       std::vector<route_refs> memory) {
  return std::make_unique<troupe_copies>(std::move(name), links, devices, std::move(memory));
}

} // namespace bench
