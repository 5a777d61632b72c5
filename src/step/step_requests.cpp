#include "step/step_requests.hpp"

#include "collective/collective_operation.hpp" // for conversion to operation
#include "collective/collective_writes.hpp"
#include "foundation/collective_rules.hpp"
#include "foundation/error_text.hpp"
#include "operation/skipping.hpp"
#include <troupe/world_status.hpp>

#include <algorithm>
#include <numeric>
#include <utility>

namespace troupe::detail {

namespace {

using buffer_rule_holders = buffer_rule::holders;

/// Replaces the names of one request by handles. The first error stays.
class binder {
public:
  binder(const step_buffers& buffers, std::size_t ranks) : buffers_(buffers), ranks_(ranks) {}

  caf::error take_error() noexcept { return std::move(error_); }

  step_request bind(const recorded_request& x) {
    step_request result;
    if (!x.rank) {
      result.ranks.resize(ranks_);
      std::iota(result.ranks.begin(), result.ranks.end(), std::size_t{0});
    } else if (is_rank("rank", *x.rank)) {
      result.ranks.push_back(static_cast<std::size_t>(*x.rank));
    }
    std::visit([&](auto& what) { bind(what, result); }, x.what);
    return result;
  }

private:
  void bind(const recorded_fill& x, step_request& to) {
    to.verb = "fill";
    to.what = step_fill{of_ranks(x.target, to.ranks), x.element};
  }

  void bind(const recorded_copy& x, step_request& to) {
    to.verb = "copy";
    to.what = step_copy{of_ranks(x.target, to.ranks), of_ranks(x.source, to.ranks)};
  }

  void bind(const recorded_launch& x, step_request& to) {
    to.verb = "launch";
    step_launch result{x.name, x.arguments, {}, {}};
    for (auto rank : to.ranks) {
      result.reads.push_back(of_rank(x.reads, rank));
      result.writes.push_back(of_rank(x.writes, rank));
    }
    to.what = std::move(result);
  }

  void bind(const named_collective& x, step_request& to) {
    to.verb = x.kind == collective_kind::send ? "send_recv" : to_string(x.kind).data();
    to.ranks.clear();
    to.what = call_of(x);
  }

  void bind(const recorded_group& x, step_request& to) {
    to.verb = "group";
    to.ranks.clear();
    if (x.others != 0)
      refuse(errc::invalid_argument, "a group has collectives only, not " +
                                         std::to_string(x.others) + " requests of other kinds");
    troupe::group result;
    for (auto& call : x.calls)
      result.calls.push_back(call_of(call));
    to.what = std::move(result);
  }

  collective call_of(const named_collective& x) {
    const auto& rules = rules_of(x.kind);
    collective result{.kind = x.kind,
                      .op = x.op,
                      .factors = x.factors,
                      .rank = x.rank,
                      .peer = x.peer,
                      .counts = x.counts};
    if (x.kind == collective_kind::send) {
      result.send = of_one(x.send, "sender", x.rank);
      result.recv = of_one(x.recv, "receiver", x.peer);
      return result;
    }
    result.send = held_by(rules.send, x.send, x.peer);
    result.recv = held_by(rules.recv, x.recv, x.peer);
    return result;
  }

  std::vector<any_gpu_ref> held_by(const buffer_rule& rule, const buffer_name& name, int root) {
    if (name.name.empty() && (rule.optional || rule.held_by == buffer_rule_holders::none))
      return {};
    if (rule.held_by == buffer_rule_holders::root)
      return of_one(name, "root", root);
    std::vector<std::size_t> all(ranks_);
    std::iota(all.begin(), all.end(), std::size_t{0});
    return of_ranks(name, all);
  }

  std::vector<any_gpu_ref> of_one(const buffer_name& name, const char* what, int rank) {
    if (!is_rank(what, rank))
      return {};
    return {part(name, static_cast<std::size_t>(rank))};
  }

  std::vector<any_gpu_ref> of_ranks(const buffer_name& name, std::span<const std::size_t> ranks) {
    std::vector<any_gpu_ref> result;
    for (auto rank : ranks)
      result.push_back(part(name, rank));
    return result;
  }

  std::vector<any_gpu_ref> of_rank(const std::vector<buffer_name>& names, std::size_t rank) {
    std::vector<any_gpu_ref> result;
    for (auto& x : names)
      result.push_back(part(x, rank));
    return result;
  }

  any_gpu_ref part(const buffer_name& name, std::size_t rank) {
    const auto found = buffers_.find(name.name);
    if (found == buffers_.end()) {
      refuse(errc::invalid_argument, "no buffers are named \"" + name.name + '"');
      return {};
    }
    const auto& whole = found->second[rank];
    if (!whole || (name.first == 0 && name.count == buffer_name::rest))
      return whole;
    const auto count = name.count != buffer_name::rest ? name.count
                       : name.first <= whole.count()   ? whole.count() - name.first
                                                       : 0;
    auto result = whole.slice(name.first, count);
    if (!result) {
      keep_first(error_, result.error());
      return {};
    }
    return std::move(*result);
  }

  bool is_rank(const char* what, int x) {
    if (x >= 0 && static_cast<std::size_t>(x) < ranks_)
      return true;
    refuse(errc::invalid_argument, out_of_range(what, x, ranks_));
    return false;
  }

  void refuse(errc code, std::string detail) {
    keep_first(error_, make_error(code, std::move(detail)));
  }

  const step_buffers& buffers_;
  const std::size_t ranks_;
  caf::error error_;
};

/// Makes the operations of one request.
class maker {
public:
  maker(const step_place& where, rank_set absent, const request_options& options,
        operation_batch& batch)
      : where_(where), absent_(absent), options_(options), batch_(batch) {}

  /// @errors why the request is refused
  caf::error make(const step_request& x) {
    return std::visit([&](auto& what) { return make(what, x); }, x.what);
  }

private:
  caf::error make(const step_fill& x, const step_request& of) {
    return on_devices(of, [&](const device_core& on, std::size_t i) {
      return on.fill(x.targets[i], x.element, options_);
    });
  }

  caf::error make(const step_copy& x, const step_request& of) {
    return on_devices(of, [&](const device_core& on, std::size_t i) {
      return on.copy(x.targets[i], x.sources[i], options_);
    });
  }

  caf::error make(const step_launch& x, const step_request& of) {
    return on_devices(of, [&](const device_core& on, std::size_t i) {
      return on.launch(x.name, x.arguments, x.reads[i], x.writes[i], options_);
    });
  }

  caf::error make(const collective& x, const step_request&) {
    return add(where_.world->prepare(collective_view{x}, options_, absent_));
  }

  caf::error make(const group& x, const step_request&) {
    auto what = x;
    what.options = options_;
    return add(where_.world->prepare(what, absent_));
  }

  template <class Request> caf::error on_devices(const step_request& of, Request request) {
    for (std::size_t i = 0; i < of.ranks.size(); ++i) {
      if (absent_.contains(of.ranks[i]))
        continue;
      const auto op = request(where_.devices[of.ranks[i]].into(batch_), i);
      if (op->completed()) // refused
        return op->error();
    }
    return {};
  }

  caf::error add(world_core::prepared made) {
    if (!made)
      return std::move(made.error());
    if (*made)
      batch_.push_back(std::move(*made));
    return {};
  }

  const step_place& where_;
  const rank_set absent_;
  const request_options& options_;
  operation_batch& batch_;
};

void add_writes_of(std::vector<use>& to, const step_fill& x, std::size_t) {
  add_writes(to, x.targets);
}

void add_writes_of(std::vector<use>& to, const step_copy& x, std::size_t) {
  add_writes(to, x.targets);
}

void add_writes_of(std::vector<use>& to, const step_launch& x, std::size_t) {
  for (auto& refs : x.writes)
    add_writes(to, refs);
}

void add_writes_of(std::vector<use>& to, const collective& x, std::size_t ranks) {
  add_writes(to, collective_view{x}, ranks);
}

void add_writes_of(std::vector<use>& to, const group& x, std::size_t ranks) {
  add_writes(to, x, ranks);
}

} // namespace

caf::error in_step(std::size_t index, std::string_view verb, const caf::error& why) {
  auto x = failure_of(why);
  if (!x)
    return why;
  if (x->verb.empty())
    x->verb = verb;
  x->detail = "request " + std::to_string(index + 1) + " of the step (" + std::string{verb} +
              "): " + x->detail;
  if (auto status = status_of(why))
    return caf::make_error(x->code, std::move(*x), std::move(*status));
  return make_error(std::move(*x));
}

caf::error step_operations::in_step(std::size_t i, const caf::error& why) const {
  return request_of.empty() ? why : detail::in_step(request_of[i], all[i]->verb(), why);
}

caf::expected<step_requests> step_requests::bind(std::span<const recorded_request> recorded,
                                                 const step_buffers& buffers, std::size_t ranks) {
  step_requests result;
  for (auto& x : recorded) {
    binder names{buffers, ranks};
    auto request = names.bind(x);
    if (auto error = names.take_error(); error)
      return in_step(result.size(), request.verb, error);
    result.requests_.push_back(std::move(request));
  }
  return result;
}

caf::expected<step_operations> step_requests::make(const step_place& where, rank_set absent,
                                                   const request_options& options) const {
  step_operations result;
  maker operations{where, absent, options, result.all};
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    if (auto error = operations.make(requests_[i]); error)
      return in_step(i, requests_[i].verb, error);
    result.request_of.resize(result.all.size(), i);
  }
  return result;
}

void step_requests::add_writes(std::vector<use>& to, std::size_t ranks) const {
  for (auto& x : requests_)
    std::visit([&](auto& what) { add_writes_of(to, what, ranks); }, x.what);
}

} // namespace troupe::detail
