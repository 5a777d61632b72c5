#include "backend/faults/fault_injector.hpp"
#include <troupe/testing/fault_plan.hpp>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

namespace troupe {

namespace detail {

namespace {

constexpr std::array<std::string_view, 26> verb_names{"open",
                                                      "bind",
                                                      "open_memory",
                                                      "close_memory",
                                                      "allocate",
                                                      "deallocate",
                                                      "allocate_pinned",
                                                      "create_stream",
                                                      "create_event",
                                                      "record",
                                                      "wait",
                                                      "query",
                                                      "synchronize",
                                                      "copy",
                                                      "fill",
                                                      "launch_host",
                                                      "enable_peer",
                                                      "build",
                                                      "connect",
                                                      "collective",
                                                      "asynchronous_error",
                                                      "abort",
                                                      "destroy",
                                                      "link",
                                                      "admit_peer",
                                                      "copy_peer"};

constexpr std::array<std::string_view, 8> fault_names{
    "fail", "out_of_memory", "not_issued", "hang", "slow", "block", "poison", "corrupt"};

static_assert(verb_count == verb_names.size());
static_assert(fault_count == fault_names.size());

} // namespace

} // namespace detail

namespace testing {

std::string_view to_string(verb x) noexcept {
  const auto i = detail::index_of(x);
  return i < detail::verb_names.size() ? detail::verb_names[i] : "?";
}

std::string_view to_string(fault x) noexcept {
  const auto i = detail::index_of(x);
  return i < detail::fault_names.size() ? detail::fault_names[i] : "?";
}

fault_plan::fault_plan(std::uint64_t seed, const std::vector<fault_rule>& rules)
    : injector_(std::make_shared<detail::fault_injector>(seed, rules)) {}

fault_plan::~fault_plan() = default;

std::size_t fault_plan::add(const fault_rule& rule) { return injector_->add(rule); }

void fault_plan::disarm() noexcept { injector_->disarm(); }

void fault_plan::release() noexcept {
  injector_->open_gates([](const detail::gate& x) { return x.kind != fault::not_issued; });
}

void fault_plan::poison() noexcept { injector_->poison(); }

bool fault_plan::poisoned() const noexcept { return injector_->poisoned(); }

std::uint64_t fault_plan::injected() const noexcept { return injector_->injected(); }

std::uint64_t fault_plan::injected(fault kind) const noexcept { return injector_->injected(kind); }

std::uint64_t fault_plan::injected_by(std::size_t rule) const noexcept {
  return injector_->injected_by(rule);
}

bool fault_plan::wait_injected(fault kind, std::uint64_t count,
                               std::chrono::nanoseconds limit) const noexcept {
  return injector_->wait_injected(kind, count, limit);
}

} // namespace testing

} // namespace troupe
