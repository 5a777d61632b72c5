#include "topology/link_tests.hpp"

#include "foundation/error_text.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <utility>

namespace troupe::detail {

namespace {

using namespace std::chrono_literals;
using bytes = std::vector<std::byte>;

/// How often a waiting test checks whether its requester still waits.
constexpr auto look = 100ms;

/// The result of the test of one link.
struct verdict {
  caf::error link;  ///< the link is wrong
  caf::error other; ///< the link could not be tested
};

bytes random_pattern(std::size_t size, std::uint64_t seed) {
  std::mt19937_64 random{seed};
  bytes result(size);
  for (std::size_t i = 0; i < size; i += sizeof(std::uint64_t)) {
    const std::uint64_t x = random();
    std::memcpy(result.data() + i, &x, std::min(sizeof x, size - i));
  }
  return result;
}

bytes complement(bytes x) {
  for (auto& b : x)
    b = ~b;
  return x;
}

std::shared_ptr<host_range> borrow(bytes& x) {
  return std::make_shared<host_range>(std::span<std::byte>{x});
}

class link_tester {
public:
  link_tester(topology_core& topology, const topology_core::answer& request)
      : topology_(topology), request_(request) {}

  bool ended() const noexcept { return request_->completed(); }

  /// Enables access again, wherever that is possible.
  caf::error connect(const std::vector<link_ends>& links) {
    std::set<std::size_t> places;
    for (auto& x : links)
      places.insert(x.from);
    std::vector<std::shared_ptr<connect_peers_operation>> all;
    for (auto place : places)
      all.push_back(topology_.start_connect(place, request_->deadline));
    caf::error first;
    for (auto& op : all)
      keep_first(first, wait(op));
    return first;
  }

  /// Copies patterns to the other end and back, each over its complement, and compares them. Where
  /// devices only read from each other, back alone.
  verdict check(const link_ends& x) {
    auto size = topology_.config().limits.pattern_bytes;
    auto scratch = allocate(x, size, 1);
    if (!scratch)
      return {{}, scratch.error()};
    auto& here = (*scratch)[0];
    auto& there = (*scratch)[1];
    auto pattern = random_pattern(size, x.from * topology_.size() + x.to);
    const bool writes = topology_.first_choice(x) == x;
    for (auto& content : {pattern, complement(pattern)}) {
      if (auto found =
              writes ? copy_and_compare(x.from, here, x.to, there, x.from, content) : verdict{};
          found.link || found.other)
        return found;
      if (auto found = copy_and_compare(x.to, there, x.from, here, x.from, content);
          found.link || found.other)
        return found;
    }
    return {};
  }

  /// Notes the result of the check of a link in that life. Returns why it could not be tested.
  caf::error note(const link_ends& x, const topology_core::link_life& life, const verdict& found) {
    if (found.link)
      topology_.take_out(x, link_check::wrong, found.link);
    else if (!found.other)
      topology_.mark_right(x, life);
    return found.other;
  }

  /// Measures a link. Sets `figures.bandwidth_both` only if the link back may be used too.
  verdict measure(const link_ends& x, topology_core::figures& figures) {
    auto size = topology_.config().limits.measured_bytes;
    auto out = allocate(x, size, 2);
    if (!out)
      return {{}, out.error()};
    const auto used = topology_.first_choice(x);
    const auto used_back = topology_.first_choice({x.to, x.from});
    auto copy = [&](std::size_t times) {
      return start_copy((*out)[1], (*out)[0], used.from, times);
    };
    auto copy_back = [&](std::size_t times) {
      return start_copy((*out)[2], (*out)[3], used_back.from, times);
    };
    auto warm_up = copy(1);
    if (auto why = wait(warm_up))
      return verdict_of(why);
    auto single = copy(1);
    if (auto why = wait(single))
      return verdict_of(why);
    auto times = times_for(single->done_at() - single->issued_at());
    auto many = copy(times);
    if (auto why = wait(many))
      return verdict_of(why);
    figures.bandwidth = gigabytes_per_second(times * size, many->done_at() - many->issued_at());
    if (topology_.is_enabled(used_back)) {
      auto back_first = copy_back(1);
      if (auto why = wait(back_first))
        return {{}, why}; // the link back has a measurement of its own
      many = copy(times);
      auto back = copy_back(times);
      auto why = wait(many);
      auto why_back = wait(back);
      if (why)
        return verdict_of(why);
      if (why_back)
        return {{}, why_back};
      figures.bandwidth_both = gigabytes_per_second(
          2 * times * size, std::max(many->done_at(), back->done_at()) -
                                std::min(many->issued_at(), back->issued_at()));
    }
    return measure_latency(used.from, (*out)[1], (*out)[0], figures);
  }

private:
  static constexpr auto measured_time = 20ms;
  static constexpr std::size_t most_times = 128; // far fewer than the launch queue holds
  static constexpr std::size_t latency_bytes = 8;
  static constexpr std::size_t latency_copies = 31;
  static constexpr std::size_t latency_warm_ups = 4;

  static std::size_t times_for(clock::duration one) {
    auto times = measured_time / std::max(one, clock::duration{1});
    return std::clamp<std::size_t>(static_cast<std::size_t>(times), 1, most_times);
  }

  static double gigabytes_per_second(std::size_t size_bytes, clock::duration time) {
    auto nanoseconds = std::chrono::duration<double, std::nano>(time).count();
    return static_cast<double>(size_bytes) / std::max(nanoseconds, 1.0);
  }

  verdict measure_latency(std::size_t by, const any_gpu_ref& target, const any_gpu_ref& source,
                          topology_core::figures& figures) {
    auto few = std::min(latency_bytes, source.count());
    auto to = target.slice(0, few);
    auto from = source.slice(0, few);
    if (!to || !from)
      return {{}, to ? from.error() : to.error()};
    std::vector<double> all;
    for (std::size_t i = 0; i < latency_warm_ups + latency_copies; ++i) {
      auto op = start_copy(*to, *from, by, 1);
      if (auto why = wait(op))
        return verdict_of(why);
      if (i >= latency_warm_ups)
        all.push_back(
            std::chrono::duration<double, std::micro>(op->done_at() - op->issued_at()).count());
    }
    auto middle = all.begin() + latency_copies / 2;
    std::nth_element(all.begin(), middle, all.end());
    figures.latency_us = *middle;
    return {};
  }

  /// Returns what an error of a copy over the link says about the link.
  static verdict verdict_of(const caf::error& why) {
    return code_of(why) == errc::link_failed ? verdict{why, {}} : verdict{{}, why};
  }

  request_options options() const {
    auto left =
        std::chrono::duration_cast<std::chrono::nanoseconds>(request_->deadline - clock::now());
    return {.deadline = std::max(left, 1ns)};
  }

  /// Waits for the result, or until the requester does not need it any more.
  template <class Operation> caf::error wait(const std::shared_ptr<Operation>& op) const {
    while (!op->wait_until(clock::now() + look))
      if (ended())
        op->cancel();
    // An operation that was cancelled because the request has ended has no cause of its own.
    return code_of(op->error()) == errc::cancelled && ended() ? request_->error() : op->error();
  }

  /// Allocates `pairs` buffers on each of the two devices: here, there, here, there ...
  caf::expected<std::vector<any_gpu_ref>> allocate(const link_ends& x, std::size_t size,
                                                   std::size_t pairs) const {
    std::vector<std::shared_ptr<operation_of<any_gpu_ref>>> all;
    for (std::size_t i = 0; i < pairs; ++i)
      for (auto place : {x.from, x.to})
        all.push_back(topology_.device_at(place).allocate(size, dtype::uint8, false, options()));
    std::vector<any_gpu_ref> result;
    caf::error first;
    for (auto& op : all) {
      keep_first(first, wait(op));
      result.push_back(op->error() ? any_gpu_ref{} : std::move(op->value));
    }
    if (first)
      return first;
    return result;
  }

  std::shared_ptr<peer_copy_operation> start_copy(const any_gpu_ref& target,
                                                  const any_gpu_ref& source, std::size_t by,
                                                  std::size_t times) const {
    auto& on = topology_.lane_at(by);
    auto op = std::make_shared<peer_copy_operation>(target, source, on.state().ordinal(), times);
    op->parts()[0].on = &on;
    op->deadline = request_->deadline;
    topology_.owner()->start(op);
    return op;
  }

  verdict copy_and_compare(std::size_t source_place, const any_gpu_ref& source,
                           std::size_t target_place, const any_gpu_ref& target, std::size_t by,
                           bytes content) {
    auto poison = complement(content);
    auto found = poison;
    auto from = topology_.device_at(source_place);
    auto to = topology_.device_at(target_place);
    auto written = from.upload(source, borrow(content), options());
    auto poisoned = to.upload(target, borrow(poison), options());
    auto copied = start_copy(target, source, by, 1);
    auto read = to.download(target, borrow(found), options());
    // Wait for all of them before their memory is freed.
    auto not_written = wait(written);
    auto not_poisoned = wait(poisoned);
    auto not_copied = wait(copied);
    auto not_read = wait(read);
    for (auto& why : {not_written, not_poisoned})
      if (why)
        return {{}, why};
    if (not_copied)
      return verdict_of(not_copied);
    if (not_read)
      return {{}, not_read};
    auto [wrong, right] = std::mismatch(found.begin(), found.end(), content.begin());
    if (wrong == found.end())
      return {};
    failure x = copied->describe(
        errc::link_failed,
        "byte " + std::to_string(wrong - found.begin()) + " of " + std::to_string(found.size()) +
            " came as " + std::to_string(std::to_integer<int>(*wrong)) + " in place of " +
            std::to_string(std::to_integer<int>(*right)) + ", copied from device " +
            std::to_string(source.device()) + " to device " + std::to_string(target.device()));
    x.verb = request_->verb();
    x.device = topology_.lane_at(by).state().ordinal();
    x.parts.clear();
    return {make_error(std::move(x)), {}};
  }

  topology_core& topology_;
  const topology_core::answer& request_;
};

/// Enables access again, and runs `test` on each link, until the request is completed. Returns the
/// first error.
template <class Test>
caf::error test_each(topology_core& topology, const topology_core::answer& request,
                     const std::vector<link_ends>& links, Test test) {
  link_tester tester{topology, request};
  if (tester.ended())
    return {};
  auto first = tester.connect(links);
  for (auto& x : links) {
    if (tester.ended())
      return {};
    keep_first(first, test(tester, x));
  }
  return first;
}

} // namespace

caf::error verify_all(topology_core& topology, const topology_core::answer& request,
                      const std::vector<link_ends>& links) {
  return test_each(topology, request, links, [&](auto& tester, auto& x) -> caf::error {
    if (!topology.is_possible(x))
      return {};
    if (auto why = topology.why_not_ready(x))
      return why;
    auto life = topology.connected_in(x);
    if (!life) // the graph shows that the link is not connected
      return {};
    return tester.note(x, *life, tester.check(x));
  });
}

caf::error check_new(topology_core& topology, const topology_core::answer& request,
                     const std::vector<link_ends>& links) {
  link_tester tester{topology, request};
  caf::error first;
  for (auto& x : links) {
    if (tester.ended() && code_of(request->error()) != errc::deadline_exceeded)
      return {};
    auto life = topology.connected_in(x);
    if (!life || !topology.waits_for_check(x))
      continue; // it is checked again later
    auto found = tester.ended() ? verdict{{}, request->error()} : tester.check(x);
    if (auto why = tester.note(x, *life, found)) {
      keep_first(first, why);
      auto now = topology.connected_in(x);
      if (now && *now == *life)
        topology.take_out(x, link_check::unchecked, why);
    }
  }
  return first;
}

caf::error measure_all(topology_core& topology, const topology_core::answer& request,
                       const std::vector<link_ends>& links) {
  return test_each(topology, request, links, [&](auto& tester, auto& x) -> caf::error {
    if (auto why = topology.why_not_ready(x))
      return why;
    const auto used = topology.first_choice(x);
    if (!topology.is_enabled(used))
      return {};
    topology_core::figures figures;
    auto found = tester.measure(x, figures);
    if (found.link) {
      topology.take_out(used, link_check::wrong, found.link);
      return found.link;
    }
    if (!found.other)
      topology.set_figures(x, figures);
    return found.other;
  });
}

} // namespace troupe::detail
