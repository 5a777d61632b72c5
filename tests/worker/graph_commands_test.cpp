// The commands for graphs, between a device and the service of its worker. Both are in this
// process.

#include "support/eventually.hpp"
#include "support/one_device_pool.hpp"
#include "support/recording_backend.hpp"
#include "worker/parent/remote_device.hpp"
#include "worker/worker_in_process.hpp"
#include <troupe/launch.hpp>

#include <gmock/gmock.h>

#include <array>
#include <cstdint>
#include <cstring>

namespace troupe::testing {
namespace {

using detail::command;
using detail::shared_place;
using words = std::array<std::uint32_t, 4>;

constexpr const char* replaying = "troupe.testing.graphs.replaying";
constexpr const char* called_once = "troupe.testing.graphs.called_once";
constexpr const char* failing = "troupe.testing.graphs.failing";

int enqueued = 0;          // by the thread that drives the device, before the reply
void* workspace = nullptr; // the last one

caf::error count_enqueued(launch_context& context, std::span<const launch_memory>,
                          std::span<const launch_memory>, std::span<const std::byte> arguments) {
  ++enqueued;
  if (arguments.empty())
    return {};
  const auto room = context.workspace(arguments.size() << 20);
  workspace = room ? *room : nullptr;
  return room ? caf::error{} : room.error();
}

[[maybe_unused]] const bool registered = [] {
  must(register_launch(replaying,
                       library_launch{.enqueue = count_enqueued, .repeats = repetition::replays}));
  must(register_launch(called_once, library_launch{.enqueue = count_enqueued}));
  must(register_launch(
      failing,
      library_launch{.enqueue = [](launch_context&, auto, auto,
                                   auto) { return make_error(errc::unavailable, "on purpose"); },
                     .repeats = repetition::replays}));
  return true;
}();

class GraphCommands : public WorkerInProcess {
protected:
  GraphCommands() : GraphCommands(std::make_shared<recorder>()) {}

  void SetUp() override {
    must(device_.bind());
    must(device_.open_memory());
    stream_ = must(device_.create_stream());
    x_ = must(device_.allocate(sizeof(words), stream_));
    y_ = must(device_.allocate(sizeof(words), stream_));
    must(fill(x_, 1));
    must(fill(y_, 1));
  }

  caf::error fill(void* to, std::uint32_t value) {
    return device_.fill(to, std::as_bytes(std::span{&value, 1}), std::size(words{}), stream_);
  }
  caf::error copy(void* to, const void* from) {
    return device_.copy(to, from, sizeof(words), copy_direction::device_to_device, stream_);
  }
  words content(const void* x) {
    auto* const host = must(device_.allocate_pinned(sizeof(words)));
    must(device_.copy(host, x, sizeof(words), copy_direction::device_to_host, stream_));
    const auto event = must(device_.create_event());
    must(device_.record(event, stream_));
    must(device_.synchronize(event));
    must(device_.destroy_event(event));
    words result;
    std::memcpy(result.data(), host, sizeof result);
    must(device_.deallocate_pinned(host));
    return result;
  }
  caf::error launch(const char* name, std::vector<std::byte> arguments = {}) {
    return device_.launch_registered({name, {}, {}, arguments, nullptr}, stream_);
  }
  /// Records y = x, x = 7.
  graph_view record_copy() {
    return must(device_.record_graph(stream_, [&] {
      auto error = copy(y_, x_);
      return error ? error : fill(x_, 7);
    }));
  }

  const std::shared_ptr<recorder> recorder_;
  const std::shared_ptr<one_device_pool> pool_ = std::make_shared<one_device_pool>(link_);
  detail::remote_device device_{pool_, 0, kept_memory::none};
  stream_view stream_;
  void* x_ = nullptr;
  void* y_ = nullptr;

private:
  explicit GraphCommands(const std::shared_ptr<recorder>& x)
      : WorkerInProcess(std::make_shared<recording_backend>(
            make_host_backend({.devices = 1, .bytes_per_device = 64 << 20}), std::vector{x})),
        recorder_(x) {}
};

TEST_F(GraphCommands, RunWhatIsRecordedInEachLaunch) {
  EXPECT_TRUE(device_.records_graphs());
  const auto graph = record_copy();
  EXPECT_EQ(recorder_->recorded, 1);
  EXPECT_EQ(content(x_), (words{1, 1, 1, 1})); // nothing has run
  for (std::uint32_t i = 2; i < 5; ++i) {
    must(fill(x_, i));
    must(device_.launch_graph(graph, stream_));
    EXPECT_EQ(content(y_), (words{i, i, i, i}));
    EXPECT_EQ(content(x_), (words{7, 7, 7, 7}));
  }
  EXPECT_EQ(recorder_->launched, 3);
}

TEST_F(GraphCommands, AreRefusedAfterTheGraphIsDropped) {
  const auto dropped = record_copy();
  const auto kept = record_copy();
  must(device_.drop_graph(dropped));
  EXPECT_TRUE(eventually([&] { return recorder_->dropped == 1; }));
  EXPECT_TRUE(device_.launch_graph(dropped, stream_));
  must(device_.drop_graph(dropped)); // of a former worker, for example
  must(device_.launch_graph(kept, stream_));
  EXPECT_EQ(content(x_), (words{7, 7, 7, 7}));
  EXPECT_EQ(recorder_->dropped, 1);
}

TEST_F(GraphCommands, RecordNothingAfterAnError) {
  const auto failed = device_.record_graph(stream_, [&] {
    must(fill(x_, 3));
    return make_error(errc::overloaded, "on purpose");
  });
  ASSERT_FALSE(failed);
  EXPECT_TRUE(has_code(failed.error(), errc::overloaded));
  const auto refused = device_.record_graph(stream_, [&]() -> caf::error {
    must(fill(x_, 3));
    const auto more = device_.allocate(16, stream_);
    return more ? caf::error{} : more.error();
  });
  ASSERT_FALSE(refused);
  EXPECT_TRUE(has_code(refused.error(), errc::not_supported));
  EXPECT_NE(describe(refused.error()).find("\"allocate\" cannot be part of a graph"),
            std::string::npos);
  EXPECT_EQ(recorder_->recorded, 0);
  EXPECT_EQ(content(x_), (words{1, 1, 1, 1}));
  must(device_.launch_graph(record_copy(), stream_)); // the next one is not disturbed
  EXPECT_EQ(content(x_), (words{7, 7, 7, 7}));
}

/// The worker may be another program, in which the launch is registered in another way.
TEST_F(GraphCommands, RecordOnlyLaunchesThatTheWorkerReplays) {
  EXPECT_TRUE(device_.record_graph(stream_, [&] { return launch(replaying); }));
  const auto refused = device_.record_graph(stream_, [&] { return launch(called_once); });
  ASSERT_FALSE(refused);
  EXPECT_TRUE(has_code(refused.error(), errc::not_supported));
  EXPECT_EQ(recorder_->recorded, 1);
}

TEST_F(GraphCommands, FailIfTheyAreTooLongForOneMessage) {
  const auto graph = device_.record_graph(stream_, [&] {
    caf::error error;
    for (int i = 0; i < 10'000 && !error; ++i)
      error = fill(x_, 3);
    return error;
  });
  ASSERT_FALSE(graph);
  EXPECT_TRUE(has_code(graph.error(), errc::out_of_range)) << describe(graph.error());
  must(device_.launch_graph(record_copy(), stream_)); // the worker is still there
  EXPECT_EQ(content(x_), (words{7, 7, 7, 7}));
}

TEST_F(GraphCommands, FailIfTheyNameUnknownObjects) {
  const auto graph = reinterpret_cast<detail::graph_id>(record_copy().native);
  const auto stream = reinterpret_cast<detail::stream_id>(stream_.native);
  const auto ask = [&](auto what, const auto& arguments) {
    const auto done = link_->ask(what, arguments);
    return done ? caf::error{} : done.error();
  };
  using detail::enqueue_in_step_args, detail::graph_args, detail::replay_args;
  EXPECT_TRUE(ask(command::launch_graph, graph_args{graph + 1, stream}));
  EXPECT_TRUE(ask(command::launch_graph, graph_args{graph, stream + 1}));
  EXPECT_TRUE(ask(command::record_graph, graph_args{graph, stream})); // it is there
  EXPECT_TRUE(ask(command::record_graph, graph_args{0, stream}));
  EXPECT_TRUE(ask(command::record_graph, graph_args{graph + 1, stream + 1}));
  auto* const memory = must(pool_->segments().create(4096));
  const auto word = must(pool_->segments().place_of(memory, 4, *link_));
  const auto replay = [&](const shared_place& at) {
    return describe(ask(command::replay, replay_args{7, {graph, stream}, at}));
  };
  const auto enqueue = [&](std::uint32_t place, const shared_place& at) {
    return describe(ask(command::enqueue_in_step, enqueue_in_step_args{{7, stream, 1}, place, at}));
  };
  using ::testing::HasSubstr;
  const auto no_communicator = HasSubstr("its communicator has ended");
  EXPECT_THAT(replay(word), no_communicator);
  EXPECT_THAT(replay({}), no_communicator);
  EXPECT_THAT(enqueue(1, word), no_communicator);
  EXPECT_THAT(enqueue(0, word), HasSubstr("could not be read"));
  for (const auto& at : {shared_place{word.segment, 2}, shared_place{word.segment, 4096},
                         shared_place{word.segment + 1, 0}}) {
    EXPECT_THAT(replay(at), HasSubstr("no such host memory"));
    EXPECT_THAT(enqueue(1, at), HasSubstr("no such host memory"));
  }
  EXPECT_EQ(recorder_->recorded, 1);
  EXPECT_EQ(recorder_->launched, 0);
  EXPECT_FALSE(link_->lost()) << describe(link_->loss());
  must(pool_->segments().remove(memory));
}

/// A spare has no stream of the parent yet. Nothing runs there.
TEST_F(GraphCommands, LoadTheCodeOfLaunchesInASpare) {
  const auto prepare = [&](const char* name, std::size_t arguments) {
    detail::wire_writer request;
    request.put(detail::launch_request{name, {}, {}, std::vector<std::byte>(arguments), 0, {}});
    const auto done = link_->ask_bytes(command::prepare_launch, request.bytes());
    return done ? caf::error{} : done.error();
  };
  enqueued = 0;
  const auto before = device_.workspace_changes();
  EXPECT_TRUE(is_ok(prepare(replaying, 1)));
  EXPECT_EQ(enqueued, 1);
  EXPECT_EQ(recorder_->recorded, 1);
  EXPECT_EQ(recorder_->dropped, 1);
  EXPECT_EQ(recorder_->launched, 0);
  EXPECT_EQ(device_.workspace_changes(), before); // it gets none
  EXPECT_TRUE(is_ok(prepare(called_once, 1)));
  EXPECT_TRUE(is_ok(prepare(failing, 1)));
  EXPECT_EQ(recorder_->recorded, 1);
  must(device_.launch_graph(record_copy(), stream_));
  EXPECT_EQ(content(x_), (words{7, 7, 7, 7}));
}

/// A graph has the address of a workspace.
TEST_F(GraphCommands, CountChangesOfWorkspaces) {
  const auto before = device_.workspace_changes();
  must(launch(replaying, std::vector<std::byte>(1)));
  const auto first = workspace;
  const auto after = device_.workspace_changes();
  EXPECT_GT(after, before);
  must(launch(replaying, std::vector<std::byte>(1)));
  EXPECT_EQ(workspace, first);
  EXPECT_EQ(device_.workspace_changes(), after);
  must(launch(replaying, std::vector<std::byte>(2)));
  EXPECT_GT(device_.workspace_changes(), after);
}

} // namespace
} // namespace troupe::testing
