// Messages of a program's own beside the library's.

#include "support/world_fixture.hpp"
#include <troupe/message_types.hpp>

#include <chrono>
#include <string>

namespace troupe::testing {

/// Has options, as the library's requests do.
struct riddle {
  std::string text = {};
  request_options options = {};
};
struct hint {
  int number = 0;
};

} // namespace troupe::testing

CAF_BEGIN_TYPE_ID_BLOCK(service_tests, ::troupe::first_message_type_id)
CAF_ADD_TYPE_ID(service_tests, (troupe::testing::riddle))
CAF_ADD_TYPE_ID(service_tests, (troupe::testing::hint))
CAF_END_TYPE_ID_BLOCK(service_tests)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(troupe::testing::riddle)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(troupe::testing::hint)

namespace troupe::testing {

namespace {

class oracle : public caf::event_based_actor {
public:
  using event_based_actor::event_based_actor;

  caf::behavior make_behavior() override {
    return {[this](const hint& x) { hints_ += x.number; },
            [this](const riddle& x) -> caf::result<std::string> {
              if (x.text.empty())
                return make_error(errc::invalid_argument, "an empty riddle");
              return x.text + " " + std::to_string(hints_) + " " +
                     std::to_string(x.options.deadline / 1ms);
            },
            [this](const shutdown&) { quit(); }};
  }

private:
  int hints_ = 0;
};

TEST(MessageTypes, OwnMessagesGoToOwnActors) {
  register_messages<caf::id_block::service_tests>();
  test_system system;
  caf::scoped_actor self{system.get()};
  const auto own = system.get().spawn<oracle>();
  tell(self, own, hint{3});
  tell(self, own, hint{4});
  std::string answer;
  caf::error error;
  const auto on_error = [&](const caf::error& why) { error = why; };
  request(self, own, riddle{.text = "how many"}, 250ms)
      .receive([&](const std::string& x) { answer = x; }, on_error);
  EXPECT_TRUE(is_ok(error));
  EXPECT_EQ(answer, "how many 7 250"); // `request` has set the deadline
  request(self, own, riddle{}, 250ms).receive([](const std::string&) {}, on_error);
  EXPECT_TRUE(has_code(error, errc::invalid_argument));
  tell(self, own, shutdown{});
  self->wait_for(own);
}

} // namespace

} // namespace troupe::testing
