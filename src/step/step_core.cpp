#include "step/step_core.hpp"

#include "foundation/error_text.hpp"
#include "operation/skipping.hpp"
#include "runtime/retried_request.hpp"
#include "step/step_operation.hpp"
#include "step/step_run.hpp"

#include <algorithm>
#include <utility>

namespace troupe::detail {

namespace {

step_place place_of(std::shared_ptr<world_core> world) {
  step_place result;
  for (auto& on : world->lanes())
    result.devices.emplace_back(world->owner(), on, world->limits().deadline);
  result.world = std::move(world);
  return result;
}

std::string in_quotes(const std::string& name) { return '"' + name + '"'; }

caf::error no_such_name(const char* verb, const std::string& name) {
  return refusal(verb, errc::invalid_argument, "no buffers are named " + in_quotes(name));
}

std::string shape_of(const any_gpu_ref& x) {
  return std::to_string(x.count()) + " elements of " + std::string{to_string(x.type())};
}

/// Checks that handles for the same name have the same shapes, where both have memory.
caf::error check_same_shapes(const std::string& name, const std::vector<any_gpu_ref>& before,
                             const std::vector<any_gpu_ref>& after) {
  for (std::size_t rank = 0; rank < after.size(); ++rank)
    if (const auto &a = before[rank], &b = after[rank];
        a && b && (a.type() != b.type() || a.count() != b.count()))
      return make_error({.code = errc::shape_mismatch,
                         .detail = in_quotes(name) + " had " + shape_of(a) + ", not " + shape_of(b),
                         .verb = "rebind",
                         .rank = static_cast<int>(rank)});
  return {};
}

} // namespace

caf::expected<std::shared_ptr<step_core>> step_core::make(std::shared_ptr<world_core> of,
                                                          std::vector<recorded_request> recorded,
                                                          std::vector<named_buffers> buffers) {
  constexpr auto verb = "record";
  if (auto error = of->check_whole(verb); error)
    return error;
  step_buffers named;
  for (auto& x : buffers) {
    if (auto error = check_number(verb, x.name, x.handles.size(), of->size()); error)
      return error;
    if (!named.emplace(x.name, std::move(x.handles)).second)
      return refusal(verb, errc::invalid_argument,
                     "two lists of buffers are named " + in_quotes(x.name));
  }
  std::shared_ptr<step_core> result{
      new step_core{place_of(std::move(of)), std::move(recorded), std::move(named)}};
  auto bound = result->bind(result->buffers_);
  if (!bound)
    return std::move(bound.error());
  result->bound_ = std::move(*bound);
  return result;
}

caf::error step_core::check_number(const char* verb, const std::string& name, std::size_t number,
                                   std::size_t ranks) {
  if (number == ranks)
    return {};
  return refusal(verb, errc::invalid_argument,
                 std::to_string(number) + " handles named " + in_quotes(name) + " for " +
                     std::to_string(ranks) + " ranks");
}

caf::expected<step_core::shared_step> step_core::bind(const step_buffers& buffers) const {
  auto requests = step_requests::bind(recorded_, buffers, place_.world->size());
  if (!requests)
    return std::move(requests.error());
  return bind_step(std::move(*requests), place_);
}

caf::error step_core::rebind(const std::string& name, std::vector<any_gpu_ref> refs) {
  constexpr auto verb = "rebind";
  std::lock_guard lock{mutex_};
  auto buffers = buffers_;
  const auto found = buffers.find(name);
  if (found == buffers.end())
    return no_such_name(verb, name);
  if (auto error = check_number(verb, name, refs.size(), place_.world->size()); error)
    return error;
  if (auto error = check_same_shapes(name, found->second, refs); error)
    return error;
  found->second = std::move(refs);
  auto bound = bind(buffers);
  if (!bound)
    return std::move(bound.error());
  buffers_ = std::move(buffers);
  bound_ = std::move(*bound);
  return {};
}

std::string step_core::runs_as() const { return bound()->runs_as(); }

void step_core::add_writes(std::vector<use>& to) const {
  bound()->requests.add_writes(to, place_.world->size());
}

step_core::answer step_core::run(const request_options& options) const {
  const auto bound = this->bound();
  auto result = std::make_shared<step_run>();
  auto started = start(bound, *result, options);
  if (started) {
    result->begin(std::move(*started));
    return result;
  }
  if (!fails_validation(started.error())) {
    std::vector<use> writes;
    bound->requests.add_writes(writes, place_.world->size());
    mark_skipped(writes, started.error(),
                 options.retry_of != 0 ? options.retry_of : result->number());
  }
  result->answer(std::move(started.error()));
  return result;
}

/// Makes the operations of a run: one, if nothing asks for more.
caf::expected<step_operations> step_core::make(const shared_step& bound, rank_set absent,
                                               const request_options& options) const {
  const bool is_plain = absent.empty() && options.retry_of == 0 && !options.overlap;
  if (!is_plain || !bound->is_graph())
    return bound->requests.make(place_, absent, options);
  auto whole = step_operation::make(bound, place_, options.membership);
  if (!whole)
    return std::move(whole.error());
  step_operations result;
  result.all.push_back(std::move(*whole));
  return result;
}

caf::expected<step_operations> step_core::start(const shared_step& bound, step_run& run,
                                                const request_options& options) const {
  auto& world = *place_.world;
  if (auto error = check_no_retries(run.verb(), options); error)
    return error;
  if (options.deadline.count() < 0)
    return run.late();
  if (auto error = world.check_view(run.verb(), options.membership); error)
    return error;
  auto absent = world.to_leave_out(run.verb(), options);
  if (!absent)
    return std::move(absent.error());
  run.value.operation = run.number();
  for (std::size_t rank = 0; rank < world.size() && !absent->empty(); ++rank)
    if (!absent->contains(rank))
      run.value.ranks.push_back(static_cast<std::int32_t>(rank));
  auto made = make(bound, *absent, options);
  if (!made || made->all.empty())
    return made;
  const auto deadline =
      from_now(options.deadline.count() != 0 ? options.deadline : world.limits().deadline);
  for (auto& op : made->all) {
    op->deadline = deadline;
    op->set_step(run.number());
    if (options.retry_of != 0)
      op->set_retry_of(options.retry_of);
  }
  std::size_t refused = 0;
  auto error = world.owner()->admissions().admit_together(made->all, options.room, refused);
  if (error)
    return made->in_step(refused, error);
  return made;
}

} // namespace troupe::detail
