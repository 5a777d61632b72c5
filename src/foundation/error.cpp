#include "foundation/enum_name.hpp"
#include <troupe/error.hpp>

#include <caf/deep_to_string.hpp>
#include <caf/message.hpp>
#include <caf/pec.hpp>
#include <caf/sec.hpp>

#include <string>
#include <utility>

namespace troupe {

std::string_view to_string(errc x) noexcept { return detail::enum_name(x); }

std::string_view to_string(severity x) noexcept { return detail::enum_name(x); }

severity severity_of(errc x) noexcept {
  switch (x) {
  case errc::overloaded:
  case errc::membership_changed:
  case errc::buffer_acquired:
    return severity::retry;
  case errc::invalid_argument:
  case errc::shape_mismatch:
  case errc::out_of_range:
  case errc::stale_ref:
  case errc::indeterminate:
  case errc::skipped:
  case errc::out_of_memory:
  case errc::deadline_exceeded:
  case errc::cancelled:
  case errc::unavailable:
  case errc::would_block:
  case errc::not_supported:
  case errc::launch_failed:
  case errc::cuda_error:
  case errc::link_failed:
  case errc::internal:
    return severity::operation;
  case errc::collective_mismatch:
  case errc::nccl_error:
  case errc::stalled:
  case errc::communicator_dead:
  case errc::rank_not_issued:
    return severity::communicator;
  case errc::device_reset:
  case errc::device_failed:
  case errc::worker_lost:
    return severity::device;
  case errc::device_fault:
  case errc::lane_stuck:
    return severity::process;
  }
  return severity::process;
}

std::string_view to_string(part_state x) noexcept {
  switch (x) {
  case part_state::not_issued:
    return "not issued";
  case part_state::issued:
    return "issued";
  case part_state::started:
    return "started";
  case part_state::done:
    return "done";
  case part_state::uninvolved:
    return "uninvolved";
  }
  return "unknown";
}

std::string to_string(const failure& x) {
  std::string text;
  if (!x.verb.empty()) {
    text = x.verb;
    if (x.operation != 0)
      text += " #" + std::to_string(x.operation);
    text += ": ";
  }
  text += to_string(x.code);
  std::string place;
  auto add = [&place](const std::string& part) { place += (place.empty() ? "" : ", ") + part; };
  if (x.rank >= 0)
    add("rank " + std::to_string(x.rank));
  if (x.device >= 0)
    add("device " + std::to_string(x.device));
  if (x.generation != 0)
    add("generation " + std::to_string(x.generation));
  if (x.epoch != 0)
    add("epoch " + std::to_string(x.epoch));
  if (!place.empty())
    text += " (" + place + ")";
  if (!x.detail.empty())
    text += ": " + x.detail;
  if (!x.api.empty()) {
    text += "; " + x.api + " gave ";
    text += x.native_name.empty() ? std::to_string(x.native_code)
                                  : x.native_name + " (" + std::to_string(x.native_code) + ")";
  }
  if (!x.parts.empty()) {
    const char* separator = "; ranks: ";
    for (std::size_t i = 0; i < x.parts.size(); ++i)
      if (x.parts[i] != part_state::uninvolved) {
        text += separator + std::to_string(i) + " " + std::string{to_string(x.parts[i])};
        separator = ", ";
      }
  }
  return text;
}

caf::error make_error(failure x) {
  static_cast<void>(detail::known_types{}); // errors may be made before any configuration
  auto code = x.code;
  return caf::make_error(code, std::move(x));
}

caf::error make_error(errc code, std::string detail) {
  return make_error({.code = code, .detail = std::move(detail)});
}

std::optional<errc> code_of(const caf::error& e) noexcept { return detail::error_as<errc>(e); }

std::optional<errc> cause_of(const caf::error& e) {
  const auto code = code_of(e);
  if (code != errc::indeterminate && code != errc::skipped)
    return code;
  const auto why = failure_of(e);
  return why ? why->cause : code;
}

std::optional<severity> severity_of(const caf::error& e) noexcept {
  auto code = code_of(e);
  return code ? std::optional{severity_of(*code)} : std::nullopt;
}

std::optional<failure> failure_of(const caf::error& e) {
  auto code = code_of(e);
  if (!code)
    return std::nullopt;
  auto& context = e.context();
  if (context.size() > 0 && context.match_element<failure>(0))
    return context.get_as<failure>(0);
  return failure{.code = *code};
}

namespace {

/// CAF's version decides whether it is called `illegal_argument` or `invalid_argument`.
constexpr auto wrong_argument = static_cast<caf::pec>(15);

std::string reason_of(caf::pec x) {
  switch (x) {
  case caf::pec::not_an_option:
    return "the option is unknown";
  case caf::pec::missing_argument:
    return "the option needs a value";
  case caf::pec::type_mismatch:
  case wrong_argument:
  case caf::pec::trailing_character:
  case caf::pec::unexpected_character:
  case caf::pec::unexpected_newline:
  case caf::pec::unexpected_eof:
    return "the value is malformed or of another type";
  case caf::pec::integer_overflow:
  case caf::pec::exponent_overflow:
  case caf::pec::timespan_overflow:
    return "the number is too large";
  case caf::pec::integer_underflow:
  case caf::pec::exponent_underflow:
    return "the number is too small";
  default:
    return "it cannot be parsed";
  }
}

std::string describe_parsing(caf::pec code, const caf::message& context) {
  if (auto argument = detail::argument_of(context))
    return "command line: " + *argument + ": " + reason_of(code);
  const auto text = "command line or configuration file: " + reason_of(code);
  return context.empty() ? text : text + ' ' + to_string(context); // of a file: line and column
}

std::string_view meaning_of(caf::sec x) {
  switch (x) {
  case caf::sec::unexpected_message:
    return "the actor does not understand this message";
  case caf::sec::unexpected_response:
    return "the response has another type than the requester expects";
  case caf::sec::request_receiver_down:
    return "the actor has ended";
  case caf::sec::request_timeout:
    return "the actor did not respond in time";
  case caf::sec::runtime_error:
    return "a message handler threw an exception";
  case caf::sec::cannot_connect_to_node:
    return "cannot connect to the other process";
  case caf::sec::cannot_open_port:
    return "cannot open the port";
  case caf::sec::no_actor_published_at_port:
    return "no actor is published at the port";
  default:
    return {};
  }
}

} // namespace

std::string describe(const caf::error& e) {
  if (!e)
    return "success";
  if (auto x = failure_of(e))
    return to_string(*x);
  if (auto code = detail::error_as<caf::pec>(e))
    return describe_parsing(*code, e.context());
  auto text = detail::describe_foreign(e);
  if (auto code = detail::error_as<caf::sec>(e))
    if (auto meaning = meaning_of(*code); !meaning.empty())
      return std::string{meaning} + " (" + text + ')';
  return text;
}

} // namespace troupe
