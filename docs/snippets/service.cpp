// A service: an actor with a message of its own, whose requests are answered in batches.

#include "checks.hpp"
#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <chrono>
#include <cstddef>
#include <future>
#include <utility>
#include <vector>

using namespace std::chrono_literals;
using snippets::check;
using snippets::must;

// [message]
/// A request of a client. The answer is a `host_buffer` with the outputs.
struct question {
  troupe::host_buffer inputs = {};
  troupe::request_options options = {}; ///< `troupe::request` sets the deadline
};

CAF_BEGIN_TYPE_ID_BLOCK(questions, ::troupe::first_message_type_id)
CAF_ADD_TYPE_ID(questions, (question))
CAF_END_TYPE_ID_BLOCK(questions)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(question) // it stays in this process
// [message]

namespace {

constexpr std::size_t width = 4; // elements of a question

using buffers = std::vector<troupe::host_buffer>;
using numbers = std::vector<float>;
using batch_server =
    troupe::batch_server<troupe::host_buffer, troupe::host_buffer, troupe::any_gpu_ref>;

/// The model only stores its inputs and reads them back.
troupe::task<troupe::any_gpu_ref> load(const troupe::device& on) {
  co_return co_await troupe::value_of(on.allocate(troupe::dtype::float32, 8 * width));
}

troupe::task<buffers> run(const troupe::device& on, const troupe::any_gpu_ref& memory,
                          const buffers& batch) {
  const auto part = *memory.slice(0, batch.size() * width);
  const troupe::host_buffer results{part.size_bytes()};
  on.upload(part, troupe::concatenate(batch));
  co_await troupe::value_of(on.download(part, results));
  co_return *results.split(batch.size());
}

// [service]
class service : public caf::event_based_actor {
public:
  service(caf::actor_config& cfg, std::vector<troupe::device> replicas)
      : event_based_actor(cfg), server_(std::move(replicas), {.most = 8}, load, run) {}

  caf::behavior make_behavior() override {
    return {troupe::runs_tasks(), [this](const question& x) { return answer(x); },
            [this](const troupe::shutdown&) {
              server_.close().then(troupe::executor_of(this), [this](const auto&) { quit(); });
            }};
  }

private:
  caf::typed_response_promise<troupe::host_buffer> answer(const question& x) {
    auto promise = make_response_promise<troupe::host_buffer>();
    if (x.inputs.size_bytes() != width * sizeof(float))
      promise.deliver(troupe::make_error(troupe::errc::shape_mismatch, "wrong number of inputs"));
    else
      server_.ask(x.inputs, x.options.deadline)
          .then(troupe::executor_of(this), [promise](auto outputs) mutable {
            if (outputs)
              promise.deliver(std::move(*outputs));
            else
              promise.deliver(outputs.error());
          });
    return promise;
  }

  batch_server server_;
};
// [service]

/// Asks from an actor. Returns the answer.
caf::expected<numbers> ask(caf::actor_system& sys, const caf::actor& service, const numbers& inputs,
                           std::chrono::nanoseconds deadline) {
  std::promise<caf::expected<numbers>> result;
  sys.spawn([&](caf::event_based_actor* self) {
    // [request]
    troupe::request(self, service, question{troupe::host_buffer{inputs}}, deadline)
        .then(
            [&result](const troupe::host_buffer& outputs) {
              const auto all = outputs.as<float>();
              result.set_value(numbers{all.begin(), all.end()});
            },
            [&result](const caf::error& why) { result.set_value(why); });
    // [request]
  });
  return result.get_future().get();
}

void run_service(caf::actor_system& sys) {
  std::vector<troupe::device> replicas;
  for (const int x : troupe::all_devices(sys))
    replicas.push_back(must(troupe::device::open(sys, x)));
  const auto asked = sys.spawn<service>(replicas);
  for (int i = 0; i < 100; ++i) {
    const numbers inputs(width, static_cast<float>(i));
    check(must(ask(sys, asked, inputs, 10s)) == inputs, "an answer");
  }
  const auto wrong = ask(sys, asked, numbers(width + 1), 10s);
  check(!wrong && troupe::code_of(wrong.error()) == troupe::errc::shape_mismatch, "a check");
  const auto late = ask(sys, asked, numbers(width), 1ns);
  check(!late && troupe::code_of(late.error()) == troupe::errc::deadline_exceeded, "a deadline");
  caf::scoped_actor self{sys};
  troupe::tell(self, asked, troupe::shutdown{});
  self->wait_for(asked);
}

} // namespace

int main(int argc, char** argv) {
  // [register]
  troupe::register_messages<caf::id_block::questions>();
  // [register]
  return snippets::run_with_devices(argc, argv, run_service);
}
