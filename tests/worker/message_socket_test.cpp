// Messages with descriptors, between two ends in one process.

#include "worker/worker_support.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <future>
#include <span>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

namespace troupe::testing {
namespace {

using detail::file_descriptor;
using detail::message_socket;
using detail::received;

struct both_ends {
  message_socket a;
  message_socket b;
};

/// During its lifetime the process cannot open any descriptor.
class few_descriptors {
public:
  few_descriptors() {
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    const file_descriptor next{::fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0)};
    auto few = before_;
    few.rlim_cur = static_cast<rlim_t>(next.get());
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  }
  ~few_descriptors() { EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &before_), 0); }
  few_descriptors(const few_descriptors&) = delete;
  few_descriptors& operator=(const few_descriptors&) = delete;

private:
  rlimit before_{};
};

both_ends make_ends() {
  auto ends = must(message_socket::pair());
  return {std::move(ends.first), std::move(ends.second)};
}

struct pipe_ends {
  file_descriptor read;
  file_descriptor write;
};

pipe_ends make_pipe() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0)
    throw std::runtime_error("pipe2");
  return {file_descriptor{ends[0]}, file_descriptor{ends[1]}};
}

std::span<const std::byte> bytes_of(std::string_view x) { return std::as_bytes(std::span{x}); }

TEST(MessageSocket, KeepsTheBoundsAndTheOrderOfMessages) {
  auto ends = make_ends();
  for (const auto* x : {"one", "two words", "3"})
    send_note(ends.a, x);
  for (const auto* x : {"one", "two words", "3"})
    EXPECT_EQ(receive_note(ends.b)->text, x);
  send_note(ends.b, "back");
  EXPECT_EQ(receive_note(ends.a)->text, "back");
}

TEST(MessageSocket, PassesDescriptors) {
  auto ends = make_ends();
  auto first = make_pipe();
  auto second = make_pipe();
  const std::array passed{first.write.get(), second.write.get()};
  send_note(ends.a, "x", passed);
  auto got = receive_note(ends.b);
  ASSERT_EQ(got->descriptors.size(), 2u);
  for (auto& x : got->descriptors)
    EXPECT_EQ(::fcntl(x.get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  ASSERT_EQ(::write(got->descriptors[1].get(), "z", 1), 1);
  EXPECT_TRUE(is_ready(second.read, 0ms));
  EXPECT_FALSE(is_ready(first.read, 0ms));
}

TEST(MessageSocket, ClosesDescriptorsThatNobodyAskedFor) {
  auto ends = make_ends();
  auto first = make_pipe();
  auto second = make_pipe();
  const std::array passed{first.write.get(), second.write.get()};
  std::array<std::byte, 8> bytes;
  for (const std::size_t wanted : {0u, 1u}) {
    send_note(ends.a, "x", passed);
    const auto got = must(ends.b.receive(bytes, wanted));
    EXPECT_EQ(got.descriptors.size(), wanted);
    EXPECT_EQ(got.refused, 2 - wanted);
  }
  first.write.reset();
  second.write.reset();
  EXPECT_TRUE(is_ready(first.read, 0ms)) << "the other end is held";
  EXPECT_TRUE(is_ready(second.read, 0ms));
}

TEST(MessageSocket, BringsAMessageWhoseDescriptorsHaveNoRoom) {
  auto ends = make_ends();
  auto pipe = make_pipe();
  const int passed = pipe.write.get();
  send_note(ends.a, "12345", {&passed, 1});
  send_note(ends.a, "next", {&passed, 1});
  std::array<std::byte, 8> bytes;
  {
    const few_descriptors held;
    const auto got = must(ends.b.receive(bytes, 1));
    EXPECT_EQ(got.what, received::kind::message);
    EXPECT_EQ(got.size_bytes, 5u);
    EXPECT_TRUE(got.descriptors.empty());
  }
  EXPECT_EQ(must(ends.b.receive(bytes, 1)).descriptors.size(), 1u);
}

TEST(MessageSocket, AMessageThatIsTooLongIsLostAndNothingElse) {
  auto ends = make_ends();
  auto pipe = make_pipe();
  const int passed = pipe.write.get();
  send_note(ends.a, "123456789", {&passed, 1});
  send_note(ends.a, "next");
  std::array<std::byte, 8> bytes;
  EXPECT_TRUE(has_code(ends.b.receive(bytes, 1), errc::out_of_range));
  pipe.write.reset();
  EXPECT_TRUE(is_ready(pipe.read, 0ms)) << "its descriptor was kept";
  EXPECT_EQ(must(ends.b.receive(bytes)).size_bytes, 4u);
}

TEST(MessageSocket, TheEndIsAValueAfterAllMessages) {
  auto ends = make_ends();
  send_note(ends.a, "last");
  send_note(ends.b, "never read");
  {
    auto closed = std::move(ends.a);
  }
  EXPECT_EQ(receive_note(ends.b)->text, "last");
  std::array<std::byte, 8> bytes;
  EXPECT_EQ(must(ends.b.receive(bytes)).what, received::kind::end);
  EXPECT_EQ(must(ends.b.receive(bytes)).what, received::kind::end);
  EXPECT_TRUE(has_code(ends.b.send(bytes_of("x")), errc::unavailable));
}

TEST(MessageSocket, AnInterruptionEndsAllWaiting) {
  auto ends = make_ends();
  std::promise<void> waits;
  auto blocked = std::async(std::launch::async, [&] {
    std::array<std::byte, 8> bytes;
    waits.set_value();
    return must(ends.b.receive(bytes)).what;
  });
  waits.get_future().wait();
  ends.b.interrupt();
  EXPECT_EQ(blocked.get(), received::kind::interrupted);
  std::array<std::byte, 8> bytes;
  EXPECT_EQ(must(ends.b.receive(bytes)).what, received::kind::interrupted) << "it stays so";
  EXPECT_TRUE(has_code(ends.b.send(bytes_of("x")), errc::unavailable));
  send_note(ends.a, "the peer sees nothing of it");
}

TEST(MessageSocket, WaitsNoLongerThanItShould) {
  auto ends = make_ends();
  std::array<std::byte, 8> bytes;
  const auto begin = clock::now();
  EXPECT_TRUE(has_code(ends.a.receive(bytes, 0, begin + 20ms), errc::deadline_exceeded));
  EXPECT_GE(clock::now() - begin, 20ms);
  const std::vector<std::byte> block(4096);
  caf::error e;
  int sent = 0;
  for (; !e && sent < 10'000; ++sent)
    e = ends.a.send(block, {}, clock::now() + 20ms);
  EXPECT_TRUE(has_code(e, errc::deadline_exceeded));
  EXPECT_GT(sent, 1);
  std::vector<std::byte> into(4096);
  EXPECT_EQ(must(ends.b.receive(into)).size_bytes, 4096u) << "what was sent before, is there";
  EXPECT_TRUE(is_ok(ends.a.send(block, {}, clock::now() + patience)));
}

TEST(MessageSocket, RefusesWhatCannotBeSent) {
  auto ends = make_ends();
  EXPECT_TRUE(has_code(ends.a.send({}), errc::invalid_argument));
  const std::vector<std::byte> huge(64 << 20);
  EXPECT_TRUE(has_code(ends.a.send(huge), errc::out_of_range));
  const std::vector<int> many(message_socket::most_descriptors + 1, 0);
  EXPECT_TRUE(has_code(ends.a.send(bytes_of("x"), many), errc::invalid_argument));
  const int none = 1 << 20;
  EXPECT_TRUE(has_code(ends.a.send(bytes_of("x"), {&none, 1}), errc::unavailable));
  send_note(ends.a, "well");
  EXPECT_EQ(receive_note(ends.b)->text, "well");
}

TEST(MessageSocket, CarriesAsManyDescriptorsAsTheSystemAllows) {
  auto ends = make_ends();
  const std::vector<int> many(message_socket::most_descriptors, STDERR_FILENO);
  send_note(ends.a, "x", many);
  EXPECT_EQ(receive_note(ends.b)->descriptors.size(), many.size());
}

TEST(MessageSocket, AnEmptyMessageIsNotTheEnd) {
  auto ends = make_ends();
  ASSERT_EQ(::send(ends.a.native(), "", 0, 0), 0);
  send_note(ends.a, "x");
  std::array<std::byte, 8> bytes;
  const auto got = must(ends.b.receive(bytes));
  EXPECT_EQ(got.what, received::kind::message);
  EXPECT_EQ(got.size_bytes, 0u);
  EXPECT_EQ(receive_note(ends.b)->text, "x");
}

TEST(MessageSocket, AdoptsNothingElse) {
  auto pipe = make_pipe();
  EXPECT_TRUE(has_code(message_socket::adopt(pipe.read.get()), errc::invalid_argument));
  EXPECT_TRUE(has_code(message_socket::adopt(1 << 20), errc::invalid_argument));
  file_descriptor stream{::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  EXPECT_TRUE(has_code(message_socket::adopt(stream.get()), errc::invalid_argument));
  for (auto* x : {&pipe.read, &stream})
    EXPECT_GE(::fcntl(x->get(), F_GETFD), 0) << "it was closed";
}

} // namespace
} // namespace troupe::testing
