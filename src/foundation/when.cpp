#include <troupe/detail/user_call.hpp>
#include <troupe/when.hpp>

#include <atomic>
#include <utility>

namespace troupe::detail {

namespace {

class joined final : public completion {
public:
  joined(completions parts, std::size_t awaited, std::function<caf::error(std::size_t)> gather)
      : parts_(std::move(parts)), left_(awaited), gather_(std::move(gather)) {}

  void begin() {
    const auto self = std::static_pointer_cast<joined>(shared_from_this());
    for (std::size_t i = 0; i < parts_.size(); ++i)
      parts_[i]->on_answer([self, i] { self->note(i); });
  }

  void cancel() noexcept override {
    const auto keep = shared_from_this(); // its last owner may end with its first part
    for (auto& x : parts_)
      x->cancel();
  }

private:
  void note(std::size_t i) noexcept {
    if (left_.fetch_sub(1) == 1) // it passes 1 once
      answer(call_user(errc::unavailable, "the copy of a result", [&] { return gather_(i); }));
  }

  const completions parts_;
  std::atomic<std::size_t> left_;
  const std::function<caf::error(std::size_t)> gather_;
};

} // namespace

std::shared_ptr<completion> join(completions parts, std::size_t awaited,
                                 std::function<caf::error(std::size_t)> gather) {
  auto result = std::make_shared<joined>(std::move(parts), awaited, std::move(gather));
  if (awaited == 0)
    result->answer({});
  result->begin();
  return result;
}

caf::error first_error(const completions& parts) {
  for (auto& x : parts)
    if (x->error())
      return x->error();
  return {};
}

} // namespace troupe::detail
