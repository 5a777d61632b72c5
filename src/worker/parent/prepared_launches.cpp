#include "worker/parent/prepared_launches.hpp"

#include "foundation/log.hpp"
#include "worker/parent/worker_link.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>
#include <utility>

namespace troupe::detail {

namespace {

constexpr std::uintptr_t largest_alignment = 256;

launch_memory without_address(launch_memory x) noexcept {
  const auto address = reinterpret_cast<std::uintptr_t>(x.address) | largest_alignment;
  x.address = reinterpret_cast<void*>(std::uintptr_t{1} << std::countr_zero(address));
  return x;
}

std::vector<launch_memory> without_addresses(std::span<const launch_memory> all) {
  std::vector<launch_memory> result{all.begin(), all.end()};
  std::ranges::transform(result, result.begin(), without_address);
  return result;
}

} // namespace

bool prepares(const launch_request& x, const registered_call& what) noexcept {
  return x.name == what.name && std::ranges::equal(x.arguments, what.arguments) &&
         std::ranges::equal(x.reads, what.reads, {}, {}, without_address) &&
         std::ranges::equal(x.writes, what.writes, {}, {}, without_address);
}

launch_request as_prepared(const registered_call& what) {
  return {std::string{what.name},
          without_addresses(what.reads),
          without_addresses(what.writes),
          {what.arguments.begin(), what.arguments.end()},
          0,
          {}};
}

void prepared_launches::add(std::vector<std::byte> x) {
  const std::lock_guard lock{mutex_};
  std::erase(all_, x);
  if (all_.size() == most)
    all_.pop_front();
  all_.push_back(std::move(x));
}

caf::error prepared_launches::prepare_in(worker_link& spare) const {
  std::deque<std::vector<std::byte>> all;
  {
    const std::lock_guard lock{mutex_};
    all = all_;
  }
  for (auto& x : all) {
    if (auto done = spare.ask_bytes(command::prepare_launch, x); !done)
      log(log_level::info, "a spare has not prepared a launch", done.error());
    if (auto why = spare.loss())
      return why;
  }
  return {};
}

} // namespace troupe::detail
