#include "actors/answer.hpp"
#include "actors/supervised.hpp"
#include "foundation/error_text.hpp"
#include "step/step_core.hpp"
#include <troupe/step.hpp>
#include <troupe/world.hpp>

#include <utility>

namespace troupe {

namespace {

pending<step_done> refused(caf::error why) {
  return detail::answer(detail::refused_operation<step_done>("step", std::move(why)));
}

caf::error why_empty() {
  return make_error(errc::invalid_argument, "there is no step: this object is empty");
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
  if (!core)
    return refused(detail::why_empty_world());
  if (what.core_ && !what.core_->is_of(*core))
    return refused(
        detail::refusal("step", errc::invalid_argument,
                        "the step was recorded in another world than \"" + core->name() + '"'));
  return what.run(options);
}

pending<step_done> step::run(request_options options) const {
  return core_ ? detail::answer(core_->run(options)) : refused(why_empty());
}

caf::error step::rebind_any(const std::string& name, std::vector<any_gpu_ref> refs) const {
  return core_ ? core_->rebind(name, std::move(refs)) : why_empty();
}

std::size_t step::size() const noexcept { return core_ ? core_->size() : 0; }

std::string step::runs_as() const { return core_ ? core_->runs_as() : std::string{}; }

} // namespace troupe
