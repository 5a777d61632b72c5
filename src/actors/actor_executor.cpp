#include "actors/let_go.hpp"
#include <troupe/actor_executor.hpp>
#include <troupe/detail/caf_compat.hpp>
#include <troupe/detail/type_ids.hpp>

#include <utility>

namespace troupe {

namespace {

class actor_executor final : public executor {
public:
  explicit actor_executor(caf::actor target) : target_(std::move(target)) {}
  ~actor_executor() override {
    detail::let_go(caf::actor_cast<caf::strong_actor_ptr>(std::move(target_)));
  }
  actor_executor(const actor_executor&) = delete;
  actor_executor& operator=(const actor_executor&) = delete;

  void post(std::function<void()> task) override {
    detail::anon_send(target_, actor_task{std::move(task)});
  }

private:
  caf::actor target_;
};

} // namespace

std::shared_ptr<executor> executor_of(caf::actor target) {
  return std::make_shared<actor_executor>(std::move(target));
}

} // namespace troupe
