#include "actors/answer.hpp"
#include "actors/direct.hpp"
#include "actors/supervised.hpp"
#include "foundation/error_text.hpp"
#include "step/step_core.hpp"
#include <troupe/step.hpp>
#include <troupe/world.hpp>

#include <utility>

namespace troupe {

struct detail::step_access {
  static const std::shared_ptr<step_core>& core_of(const step& x) noexcept { return x.core_; }
};

namespace {

detail::step_core::answer refused(caf::error why) {
  return detail::refused_operation<step_done>("step", std::move(why));
}

caf::error why_empty() {
  return make_error(errc::invalid_argument, "there is no step: this object is empty");
}

detail::step_core::answer run_in(const detail::world_core& world, const step& what,
                                 const request_options& options) {
  const auto& core = detail::step_access::core_of(what);
  if (!core)
    return refused(why_empty());
  if (!core->is_of(world))
    return refused(
        detail::refusal("step", errc::invalid_argument,
                        "the step was recorded in another world than \"" + world.name() + '"'));
  return core->run(options);
}

} // namespace

caf::expected<step> world::record(const recording& requests,
                                  std::vector<named_buffers> buffers) const {
  const auto& core = detail::world_access::core_of(*this);
  if (!core)
    return detail::why_empty_world();
  auto made = detail::step_core::make(core, requests.requests(), std::move(buffers));
  if (!made)
    return std::move(made.error());
  return step{*this, std::move(*made)};
}

pending<step_done> world::run(const step& what, request_options options) const {
  const auto& core = detail::world_access::core_of(*this);
  return detail::answer(core ? run_in(*core, what, options) : refused(detail::why_empty_world()));
}

std::shared_ptr<detail::operation_of<step_done>>
detail::perform(const std::shared_ptr<world_core>& core, const run_step& x) {
  return run_in(*core, x.what, x.options);
}

void detail::add_writes_of_step(std::vector<use>& to, const run_step& x) {
  if (const auto& core = step_access::core_of(x.what))
    core->add_writes(to);
}

pending<step_done> step::run(request_options options) const {
  return detail::answer(core_ ? core_->run(options) : refused(why_empty()));
}

caf::error step::rebind_any(const std::string& name, std::vector<any_gpu_ref> refs) const {
  return core_ ? core_->rebind(name, std::move(refs)) : why_empty();
}

std::size_t step::size() const noexcept { return core_ ? core_->size() : 0; }

std::string step::runs_as() const { return core_ ? core_->runs_as() : std::string{}; }

} // namespace troupe
