// Arbitrary data that the other process writes or sends does no harm. All data is seeded.

#include "actors/program_note.hpp"
#include "support/eventually.hpp"
#include "support/forwarding_backend.hpp"
#include "support/no_threads.hpp"
#include "support/recording_backend.hpp"
#include "worker/child/worker_service.hpp"
#include "worker/parent/remote_device.hpp"
#include "worker/parent/worker_link.hpp"
#include "worker/protocol/command_ring.hpp"
#include "worker/worker_support.hpp"
#include <troupe/worker_program.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <stop_token>
#include <thread>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>

namespace troupe::testing {
namespace {

using detail::command;
using detail::command_head;
using detail::command_ring;
using detail::command_ring_words;
using detail::control;
using detail::control_head;
using detail::link_area;
using detail::worker_hello;
using detail::worker_link;
using detail::worker_parent;
using detail::worker_process;

class dice {
public:
  explicit dice(std::uint64_t seed) : engine_(seed) {}

  std::uint64_t below(std::uint64_t end) { return engine_() % end; }
  bool one_in(std::uint64_t n) { return below(n) == 0; }
  std::vector<std::byte> bytes(std::size_t size) {
    std::vector<std::byte> result(size);
    for (auto& x : result)
      x = static_cast<std::byte>(engine_());
    return result;
  }
  /// Returns a small number, a number near a bound, or any number.
  std::uint64_t number() {
    switch (below(4)) {
    case 0:
      return below(32);
    case 1:
      return std::uint64_t{1} << below(64);
    case 2:
      return 0 - below(32);
    default:
      return engine_();
    }
  }

private:
  std::mt19937_64 engine_;
};

/// Returns the peak memory of this process. @units KiB
long most_memory() {
  rusage use{};
  return ::getrusage(RUSAGE_SELF, &use) == 0 ? use.ru_maxrss : -1;
}

/// Zeroed memory of a link, which both processes share.
struct shared_area {
  std::unique_ptr<link_area> area = std::make_unique<link_area>();
};

// -- the ring

struct small_ring {
  command_ring_words words;
  alignas(64) std::array<std::byte, 1024> bytes{};
};

TEST(Nonsense, AReaderOfARingStaysInside) {
  dice any{1};
  for (int i = 0; i < 5000; ++i) {
    small_ring both;
    command_ring reader{both.words, both.bytes};
    for (auto& x : both.bytes)
      x = any.one_in(3) ? static_cast<std::byte>(any.below(256)) : std::byte{};
    for (int k = 0; k < 100 && !reader.broken(); ++k) {
      if (any.one_in(2))
        both.words.written.store(any.one_in(4) ? any.number()
                                               : both.words.read.load() + 16 * any.below(66));
      command_head head;
      std::span<const std::byte> body;
      if (!reader.peek(head, body))
        continue;
      ASSERT_GE(body.data(), both.bytes.data());
      ASSERT_LE(body.data() + body.size(), both.bytes.data() + both.bytes.size());
      ASSERT_LE(body.size(), reader.limit());
      ASSERT_NE(head.kind, 0);
      reader.pop(head);
    }
  }
}

TEST(Nonsense, AWriterOfARingOverwritesNothingThatWasNotRead) {
  dice any{2};
  int broken = 0;
  for (int i = 0; i < 5000; ++i) {
    small_ring both;
    command_ring writer{both.words, both.bytes};
    std::uint64_t read = 0; // the largest valid claim so far
    std::uint64_t written = 0;
    for (int k = 0; k < 100 && !writer.broken(); ++k) {
      const auto claimed =
          any.one_in(10) ? any.number() : read + 16 * any.below((written - read) / 16 + 1);
      both.words.read.store(claimed);
      if (claimed - read <= written - read)
        read = claimed;
      both.words.written.store(any.number()); // the writer uses its own count
      const auto body = any.bytes(any.below(writer.limit() + 1));
      const command_head head{static_cast<std::uint32_t>(body.size()), 1, 0, 0};
      if (!writer.try_write(head, body, {}))
        continue;
      written = both.words.written.load();
      ASSERT_LE(written - read, both.bytes.size());
    }
    broken += writer.broken() ? 1 : 0;
  }
  EXPECT_GT(broken, 1000);
}

TEST(Nonsense, AReaderReadsWhatAWriterWrote) {
  dice any{3};
  small_ring both;
  command_ring writer{both.words, both.bytes};
  command_ring reader{both.words, both.bytes};
  std::deque<std::vector<std::byte>> in_it;
  for (int i = 0; i < 20'000; ++i) {
    if (any.one_in(2)) {
      auto body = any.bytes(any.below(writer.limit() + 1));
      const auto half = std::span<const std::byte>{body}.first(body.size() / 2);
      const auto rest = std::span<const std::byte>{body}.subspan(half.size());
      const command_head head{static_cast<std::uint32_t>(body.size()), 7, 1, 9};
      if (writer.try_write(head, half, rest))
        in_it.push_back(std::move(body));
      else
        ASSERT_FALSE(in_it.empty());
    } else {
      command_head head;
      std::span<const std::byte> body;
      ASSERT_EQ(reader.peek(head, body), !in_it.empty());
      if (in_it.empty())
        continue;
      ASSERT_TRUE(std::equal(body.begin(), body.end(), in_it.front().begin(), in_it.front().end()));
      reader.pop(head);
      in_it.pop_front();
    }
  }
  EXPECT_FALSE(writer.broken() || reader.broken());
}

/// If a reader makes room before the writer sleeps, the writer does not sleep.
TEST(Nonsense, AWriterSeesRoomThatCameBeforeItSlept) {
  small_ring both;
  command_ring writer{both.words, both.bytes};
  command_ring reader{both.words, both.bytes};
  const command_head head{static_cast<std::uint32_t>(writer.limit()), 1, 0, 0};
  const std::vector<std::byte> body(writer.limit());
  while (writer.try_write(head, body, {})) {
  }
  command_head first;
  std::span<const std::byte> what;
  ASSERT_TRUE(reader.peek(first, what));
  reader.pop(first);
  const auto begin = clock::now();
  writer.wait_for_room(20s);
  EXPECT_LT(clock::now() - begin, 10s);
}

// -- data that a parent reads

class silent_control final : public detail::control_sender {
public:
  explicit silent_control(std::atomic<int>& kills) : kills_(kills) {}
  caf::error send(std::span<const std::byte>, std::optional<int>) noexcept override { return {}; }
  void kill() noexcept override { ++kills_; }

private:
  std::atomic<int>& kills_;
};

struct parents_side {
  shared_area shared;
  std::atomic<int> kills{0};
  std::shared_ptr<worker_link> link = std::make_shared<worker_link>(
      3, *shared.area, nullptr, std::make_unique<silent_control>(kills));
};

bool is_lost_for_nonsense(parents_side& x) {
  return x.link->lost() && x.kills == 1 && code_of(x.link->loss()) == errc::worker_lost &&
         failure_of(x.link->loss())->device == 3 &&
         describe(x.link->loss()).find("malformed") != std::string::npos;
}

TEST(Nonsense, MessagesOfAWorkerLoseItAlone) {
  dice any{4};
  int lost = 0;
  for (int i = 0; i < 2000; ++i) {
    parents_side x;
    int answers = 0;
    constexpr int requests = 3;
    for (int k = 0; k < requests; ++k)
      x.link->request(control::map, {}, std::nullopt, [&](const auto&) { ++answers; });
    for (int k = 0; k < 20 && !x.link->lost(); ++k) {
      detail::wire_writer message;
      control_head head;
      head.number = any.one_in(3) ? any.number() : 1 + any.below(requests);
      head.kind = any.one_in(4) ? static_cast<control>(any.number()) : control::map;
      message.put(head);
      if (any.one_in(2))
        message.put(any.one_in(2) ? caf::error{} : make_error(errc::out_of_memory, "none left"));
      const auto more = any.bytes(any.below(any.one_in(10) ? detail::control_bytes : 100));
      std::vector<std::byte> all{message.bytes().begin(), message.bytes().end()};
      all.insert(all.end(), more.begin(), more.end());
      if (any.one_in(3))
        all.resize(any.below(all.size() + 1));
      x.link->received(all);
    }
    if (x.link->lost()) {
      ++lost;
      EXPECT_EQ(answers, requests);
      EXPECT_EQ(code_of(x.link->loss()), errc::worker_lost);
    }
  }
  EXPECT_GT(lost, 1600);
}

detail::program_note some_program_note(detail::program_note::kind what) {
  detail::program_note note;
  note.what = what;
  note.view.name = "some world";
  note.view.members = {{0, 1, 2}, {1, 0, 3}};
  note.view.reason = make_error(errc::stalled, "it stands still");
  note.program = "some program";
  note.bytes = {1, 2, 3};
  note.why = make_error(errc::launch_failed, "it shall fail");
  note.number = 12;
  note.name = "weights";
  note.memory = {1, 2, 3, 4, dtype::float64, 5, 6};
  return note;
}

TEST(Nonsense, NotesOfProgramsCostNoMoreThanTheirBytes) {
  using detail::program_note;
  const auto before = most_memory();
  dice any{14};
  for (const auto what : {program_note::kind::ended, program_note::kind::keep}) {
    const auto note = some_program_note(what);
    const auto right = to_bytes(note);
    const auto same = detail::program_note_of(right);
    ASSERT_TRUE(same);
    if (what == program_note::kind::ended) { // else there is padding in it
      EXPECT_EQ(to_bytes(*same), right);
    }
    EXPECT_EQ(same->view.members, note.view.members);
    EXPECT_EQ(same->bytes, note.bytes);
    EXPECT_EQ(describe(same->why), describe(note.why));
    for (std::size_t cut = 0; cut < right.size(); ++cut)
      EXPECT_FALSE(detail::program_note_of(std::span{right}.first(cut)));
    int refused = 0;
    for (int i = 0; i < 20'000; ++i) {
      auto wrong = right;
      if (any.one_in(10)) {
        wrong = any.bytes(any.below(400));
      } else {
        const auto at = any.below(wrong.size() - 4);
        for (auto k = at; k < at + 1 + any.below(4); ++k)
          wrong[k] = any.one_in(2) ? std::byte{0xff} : static_cast<std::byte>(any.below(256));
      }
      refused += detail::program_note_of(wrong) ? 0 : 1;
    }
    EXPECT_GT(refused, 5000);
  }
  EXPECT_LT(most_memory() - before, 50 << 10);
}

TEST(Nonsense, RequestsOfProgramsForMemoryAreChecked) {
  using detail::program_note;
  for (const auto what : {program_note::kind::keep, program_note::kind::kept}) {
    const auto note = some_program_note(what);
    const auto same = detail::program_note_of(to_bytes(note));
    ASSERT_TRUE(same);
    EXPECT_EQ(same->number, note.number);
    EXPECT_EQ(same->name, note.name);
    EXPECT_EQ(same->memory, note.memory);
    const auto is_refused = [&](auto change) {
      auto wrong = note;
      change(wrong);
      return !detail::program_note_of(to_bytes(wrong));
    };
    EXPECT_TRUE(is_refused([](program_note& x) { x.name.clear(); }));
    EXPECT_TRUE(is_refused([](program_note& x) { x.name.assign(most_kept_name_bytes + 1, 'x'); }));
    EXPECT_TRUE(is_refused([](program_note& x) { x.memory.count = 0; }));
    EXPECT_TRUE(is_refused([](program_note& x) { x.memory.count = SIZE_MAX / 4; }));
    EXPECT_TRUE(is_refused([](program_note& x) { x.memory.type = static_cast<dtype>(99); }));
    EXPECT_TRUE(is_refused([](program_note& x) { x.what = static_cast<program_note::kind>(12); }));
  }
}

TEST(Nonsense, RepliesInTheAreaLoseTheWorkerAlone) {
  dice any{5};
  for (int i = 0; i < 1000; ++i) {
    parents_side x;
    auto& area = *x.shared.area;
    const auto content = any.bytes(64);
    std::copy(content.begin(), content.end(), area.reply.begin());
    const auto size = any.number();
    area.reply_size.store(static_cast<std::uint32_t>(size));
    const auto replied = any.one_in(2) ? 1 : 1 + any.number() / 2;
    area.replied.store(replied); // of the next command, or of a future one
    const auto got = x.link->ask(command::memory, detail::no_arguments{});
    if (replied != 1 || static_cast<std::uint32_t>(size) > area.reply.size()) {
      EXPECT_TRUE(is_lost_for_nonsense(x)) << replied << " " << size;
    } else if (!got) {
      EXPECT_TRUE(code_of(got.error()).has_value());
    }
  }
}

TEST(Nonsense, EventsThatWereNeverRecordedAreNotDone) {
  parents_side x;
  const auto event = x.link->take_event().value();
  const auto record = x.link->next_record(event);
  x.shared.area->done[event].store(record);
  EXPECT_TRUE(x.link->is_done(event, record));
  EXPECT_FALSE(x.link->lost());
  x.shared.area->done[event].store(record + 1);
  static_cast<void>(x.link->is_done(event, record));
  EXPECT_TRUE(is_lost_for_nonsense(x));
}

TEST(Nonsense, ARingThatWasReadTooFarLosesTheWorker) {
  parents_side x;
  x.shared.area->words.read.store(1 << 30);
  caf::error error;
  for (int i = 0; i < 100'000 && !error; ++i)
    error = x.link->tell(command::memory, std::array<std::uint64_t, 8>{});
  EXPECT_TRUE(has_code(error, errc::worker_lost));
  EXPECT_TRUE(is_lost_for_nonsense(x));
}

/// Another host may give any reason for the loss of its worker.
TEST(Nonsense, AnyLossOfAWorkerIsThatOfItsDeviceAlone) {
  for (auto code : {errc::device_fault, errc::lane_stuck, errc::worker_lost, errc::unavailable,
                    errc::invalid_argument, errc::out_of_memory}) {
    parents_side x;
    caf::error told;
    x.link->on_loss([&](const caf::error& why) { told = why; });
    x.link->lose(make_error(code, "on purpose"));
    EXPECT_TRUE(has_code(x.link->loss(), errc::worker_lost)) << to_string(code);
    EXPECT_EQ(told, x.link->loss());
  }
}

/// Streams of other devices wait for these words. They must be done whatever the worker wrote last.
TEST(Nonsense, WordsOfAWorkerThatIsGoneAreDone) {
  parents_side x;
  x.link->lose(make_error(errc::worker_lost, "the test wants it"));
  for (auto& word : x.shared.area->done)
    word.store(0);
  x.link->reaped();
  for (auto& word : x.shared.area->done)
    ASSERT_GE(word.load(), std::uint64_t{1} << 62);
}

/// Replies to each command. With `fails` the reply is an error.
class answering {
public:
  answering(link_area& area, std::atomic<bool>& fails)
      : area_(area), fails_(fails), thread_([this] { run(); }) {}
  ~answering() {
    stop_ = true;
    ring_.wake_reader();
    thread_.join();
  }
  int asked() const { return asked_; }

private:
  void run() {
    while (!stop_) {
      command_head head;
      std::span<const std::byte> body;
      if (!ring_.peek(head, body)) {
        ring_.wait_for_command(10ms, [this] { return stop_.load(); });
        continue;
      }
      ring_.pop(head);
      ++asked_;
      detail::wire_writer answer;
      answer.put(fails_ ? make_error(errc::nccl_error, "behind its back") : caf::error{});
      std::copy(answer.bytes().begin(), answer.bytes().end(), area_.reply.begin());
      area_.reply_size = static_cast<std::uint32_t>(answer.bytes().size());
      area_.replied = head.number;
      area_.to_asker.ring();
    }
  }

  link_area& area_;
  std::atomic<bool>& fails_;
  command_ring ring_{area_.words, area_.commands};
  std::atomic<bool> stop_{false};
  std::atomic<int> asked_{0};
  std::thread thread_;
};

TEST(RemoteCommunicator, AsksAboutErrorsOnlyWhenThereAreNewOnes) {
  parents_side x;
  auto& errors = x.shared.area->communicator_errors;
  std::atomic<bool> fails{false};
  answering worker{*x.shared.area, fails};
  detail::remote_communicator rank{x.link, 1};
  EXPECT_TRUE(is_ok(rank.asynchronous_error()));
  EXPECT_EQ(worker.asked(), 0);
  errors = 1; // an error of another communicator
  for (int i = 0; i < 3; ++i)
    EXPECT_TRUE(is_ok(rank.asynchronous_error()));
  EXPECT_EQ(worker.asked(), 1);
  errors = 2;
  fails = true;
  for (int i = 0; i < 3; ++i) // each of its calls gets the error
    EXPECT_TRUE(has_code(rank.asynchronous_error(), errc::nccl_error));
  EXPECT_EQ(worker.asked(), 4);
}

// -- data that a worker reads

/// Ignores the addresses that it is given. A worker trusts its parent's addresses.
class blind_device final : public forwarding_device {
public:
  using forwarding_device::forwarding_device;
  caf::error copy(void*, const void*, std::size_t, copy_direction, stream_view) noexcept override {
    return {};
  }
  caf::error fill(void*, std::span<const std::byte>, std::size_t, stream_view) noexcept override {
    return {};
  }
  caf::error wait_word(stream_view, const std::atomic<std::uint64_t>*,
                       std::uint64_t) noexcept override {
    return {};
  }
};

class blind_backend final : public forwarding_backend {
public:
  using forwarding_backend::forwarding_backend;
  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override {
    return open_as<blind_device>(ordinal);
  }
};

/// A worker's service, which runs on this thread.
struct workers_side {
  explicit workers_side(std::size_t bytes_per_device = 1 << 20)
      : service(std::make_shared<blind_backend>(std::make_shared<recording_backend>(
                    make_host_backend({.devices = 1, .bytes_per_device = bytes_per_device}),
                    std::vector{std::make_shared<recorder>()})),
                *shared.area, options()) {
    must(service.open());
  }

  detail::service_options options() {
    detail::service_options result;
    result.send = [this](std::span<const std::byte> x, std::optional<int>) {
      longest = std::max(longest.load(), x.size());
      {
        std::lock_guard lock{mutex};
        latest.assign(x.begin(), x.end());
      }
      ++answers;
      return caf::error{};
    };
    result.on_fault = [this](const caf::error& why) {
      if (!faults++)
        first_fault = why;
      service.stop();
    };
    return result;
  }

  /// Sends a request, and returns the worker's reply.
  template <class T> detail::worker_reply ask(control kind, const T& body) {
    const auto before = answers.load();
    detail::wire_writer message;
    message.put(control_head{1, kind});
    message.put(body);
    service.received(message.bytes(), std::nullopt);
    if (!eventually([&] { return answers != before; }, patience))
      throw std::runtime_error("a request has no reply");
    std::lock_guard lock{mutex};
    detail::wire_reader reader{latest};
    reader.get<control_head>();
    if (auto error = reader.get<caf::error>())
      return error;
    const auto result = reader.get_bytes();
    return detail::worker_answer{{result.begin(), result.end()}, {}};
  }

  shared_area shared;
  std::mutex mutex;
  std::vector<std::byte> latest; ///< of its answers
  std::atomic<int> answers{0};
  std::atomic<std::size_t> longest{0};
  std::atomic<int> faults{0};
  caf::error first_fault;
  detail::worker_service service;
};

constexpr auto last_command = static_cast<std::uint64_t>(command::stop);

TEST(Protocol, NamesCommandsAndRequestsByTheirValues) {
  EXPECT_EQ(to_string(command::skip), "skip");
  EXPECT_EQ(to_string(command::create_stream), "create_stream");
  EXPECT_EQ(to_string(command::launch), "launch");
  EXPECT_EQ(to_string(command::stop), "stop");
  EXPECT_EQ(to_string(static_cast<command>(last_command + 1)), "unknown");
  EXPECT_EQ(to_string(control{}), "unknown");
  EXPECT_EQ(to_string(control::set_up), "set_up");
  EXPECT_EQ(to_string(control::destroy), "destroy");
  EXPECT_EQ(to_string(control::call_off), "call_off");
  EXPECT_EQ(detail::call_name(1u << 20), "unknown");
}

command any_command(dice& any) { return static_cast<command>(1 + any.below(last_command + 3)); }

/// Returns a body that may be valid for the command.
std::vector<std::byte> body_of(command what, dice& any) {
  detail::wire_writer to;
  switch (what) {
  case command::enqueue: {
    to.put(
        detail::enqueue_args{any.below(3), any.below(4), static_cast<std::uint32_t>(any.number())});
    for (auto n = any.below(4); n > 0; --n) {
      collective_call call;
      call.what = static_cast<collective_kind>(any.below(14));
      call.type = static_cast<dtype>(any.below(12));
      call.count = any.number();
      to.put(call);
    }
    break;
  }
  case command::launch:
    to.put(detail::launch_request{"unregistered",
                                  {{nullptr, any.number(), static_cast<dtype>(any.below(20))}},
                                  {},
                                  any.bytes(any.below(20)),
                                  any.below(4)});
    break;
  case command::record_graph:
    to.put(detail::graph_args{any.below(8), any.below(4)});
    for (auto n = any.below(4); n > 0; --n) {
      const auto inner = any_command(any);
      to.put(inner);
      to.put_bytes(body_of(inner, any));
    }
    break;
  case command::launch_graph:
    to.put(detail::graph_args{any.below(8), any.below(4)});
    break;
  case command::replay:
    to.put(detail::replay_args{
        any.below(3), {any.below(8), any.below(4)}, {any.below(3), any.below(5000)}});
    break;
  case command::enqueue_in_step:
    to.put(detail::enqueue_in_step_args{{any.below(3), any.below(4), 1},
                                        static_cast<std::uint32_t>(any.below(3)),
                                        {any.below(3), any.below(5000)}});
    to.put(collective_call{});
    break;
  default:
    for (auto n = any.below(8); n > 0; --n)
      to.put(any.number());
  }
  std::vector<std::byte> result{to.bytes().begin(), to.bytes().end()};
  if (any.one_in(4))
    result.resize(any.below(result.size() + 1));
  if (any.one_in(4) && !result.empty())
    result[any.below(result.size())] = static_cast<std::byte>(any.below(256));
  if (any.one_in(20)) {
    const auto more = any.bytes(any.below(4096));
    result.insert(result.end(), more.begin(), more.end());
  }
  return result;
}

TEST(Nonsense, CommandsGetAnErrorAndNothingElse) {
  const auto before = most_memory();
  int answered = 0;
  int refused = 0;
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    dice any{100 + seed};
    workers_side x;
    std::thread driver{[&] { x.service.run(); }};
    auto kills = std::make_unique<std::atomic<int>>(0);
    auto link = std::make_shared<worker_link>(0, *x.shared.area, nullptr,
                                              std::make_unique<silent_control>(*kills));
    must(link->ask(command::open_memory, detail::no_arguments{}));
    must(link->ask(command::create_stream, detail::no_arguments{}));
    for (int i = 0; i < 100 && x.faults == 0; ++i) {
      auto what = any_command(any);
      if (what == command::stop || what == command::record) // no reply unless they fail
        what = command::fill;
      const auto body = body_of(what, any);
      auto got = link->ask_bytes(what, body, {}, 10s);
      ASSERT_FALSE(link->lost()) << describe(link->loss());
      ++answered;
      refused += got ? 0 : 1;
    }
    x.service.stop();
    driver.join();
    EXPECT_EQ(x.faults, 0) << describe(x.first_fault);
  }
  EXPECT_EQ(answered, 6000);
  EXPECT_GT(refused, 3000);
  EXPECT_LT(most_memory() - before, 200 << 10);
}

TEST(Nonsense, ARingOfGarbageEndsTheWorkerWithItsReason) {
  dice any{6};
  int ended = 0;
  for (int i = 0; i < 300; ++i) {
    workers_side x;
    auto& area = *x.shared.area;
    const auto content = any.bytes(4096);
    std::copy(content.begin(), content.end(), area.commands.begin());
    area.words.written.store(any.one_in(2) ? any.number() : 16 * any.below(256));
    if (area.words.written == 0)
      continue;
    std::thread driver{[&] { x.service.run(); }};
    const auto until = clock::now() + patience;
    while (x.faults == 0 && area.words.read != area.words.written && clock::now() < until)
      std::this_thread::yield();
    x.service.stop();
    driver.join();
    ASSERT_LT(clock::now(), until);
    if (x.faults != 0) {
      ++ended;
      EXPECT_TRUE(code_of(x.first_fault).has_value());
    }
  }
  EXPECT_GT(ended, 250);
}

TEST(Nonsense, MessagesOfAParentGetAnErrorOrEndTheWorker) {
  const auto before = most_memory();
  dice any{7};
  int cases = 0;
  int ends = 0;
  for (int i = 0; i < 100; ++i) {
    workers_side x;
    std::thread driver{[&] { x.service.run(); }};
    for (int k = 0; k < 50 && x.faults == 0; ++k, ++cases) {
      control_head head;
      head.number = any.number();
      do // the other ranks of a build do not exist
        head.kind = static_cast<control>(any.one_in(4) ? any.number() : any.below(10));
      while (head.kind == control::build);
      auto body = any.bytes(any.below(any.one_in(10) ? detail::control_bytes : 40));
      if (head.kind == control::map && any.one_in(2)) {
        detail::wire_writer args;
        args.put(detail::map_args{any.number(), any.number()});
        body.assign(args.bytes().begin(), args.bytes().end());
      }
      std::vector<std::byte> message(sizeof head + body.size());
      std::memcpy(message.data(), &head, sizeof head);
      std::copy(body.begin(), body.end(), message.begin() + sizeof head);
      const auto cut = any.one_in(20);
      if (cut)
        message.resize(any.below(sizeof head));
      std::optional<detail::file_descriptor> passed;
      if (any.one_in(3))
        passed.emplace(::memfd_create("nonsense", 0));
      const auto answers = x.answers.load();
      x.service.received(message, std::move(passed));
      EXPECT_EQ(x.faults != 0, cut);
      if (!cut) {
        const auto until = clock::now() + patience;
        while (x.answers == answers && clock::now() < until)
          std::this_thread::yield();
        EXPECT_EQ(x.answers, answers + 1);
      }
    }
    ends += x.faults != 0 ? 1 : 0;
    x.service.stop();
    driver.join();
    EXPECT_LE(x.longest, detail::control_bytes);
  }
  EXPECT_GT(cases, 1000);
  EXPECT_GT(ends, 50);
  EXPECT_LT(most_memory() - before, 200 << 10);
}

/// Returns the number of replies to one message. @units replies
int answers_to(workers_side& x, control kind, std::span<const std::byte> body,
               std::optional<detail::file_descriptor> passed = std::nullopt) {
  const auto before = x.answers.load();
  detail::wire_writer message;
  message.put(control_head{1, kind});
  std::vector<std::byte> all{message.bytes().begin(), message.bytes().end()};
  all.insert(all.end(), body.begin(), body.end());
  x.service.received(all, std::move(passed));
  return x.answers - before;
}

TEST(Service, AnswersWithoutAThreadForARequest) {
  workers_side x;
  const std::array<std::int32_t, 2> pair{0, 0};
  const no_threads held;
  EXPECT_EQ(answers_to(x, control::peer_link, std::as_bytes(std::span{pair})), 1);
  EXPECT_EQ(x.faults, 0);
}

/// A rank that does not end would hold up the device for good.
TEST(Service, EndsRanksWithoutAThread) {
  workers_side x;
  std::jthread driver{[&](const std::stop_token& stop) {
    const std::stop_callback end{stop, [&] { x.service.stop(); }};
    x.service.run();
  }};
  for (const auto how : {control::abort, control::destroy}) {
    detail::build_args what;
    const auto id = must(x.ask(control::make_communicator_id, detail::no_arguments{}));
    what.id = detail::wire_reader{id.bytes}.get<communicator_id>();
    what.size = 1;
    const auto built = must(x.ask(control::build, what));
    const auto key = detail::wire_reader{built.bytes}.get<detail::communicator_key>();
    const no_threads held;
    must(x.ask(control::close, key));
    must(x.ask(how, key));
  }
  EXPECT_EQ(x.faults, 0);
}

TEST(Service, KeepsNoDescriptorOfMemoryThatItHasMapped) {
  workers_side x;
  auto memory = must(detail::shared_memory::create(4096));
  detail::file_descriptor passed{::fcntl(memory.descriptor(), F_DUPFD_CLOEXEC, 0)};
  const int native = passed.get();
  const detail::map_args what{1, 4096};
  EXPECT_EQ(answers_to(x, control::map, detail::bytes_of(what), std::move(passed)), 1);
  EXPECT_EQ(::fcntl(native, F_GETFD), -1);
}

/// A process other than the parent sends arbitrary data.
TEST(Nonsense, HellosAreRefused) {
  dice any{8};
  for (int i = 0; i < 1000; ++i) {
    auto ends = must(detail::message_socket::pair());
    auto hello = detail::make_hello();
    std::vector<std::byte> bytes{hello.bytes().begin(), hello.bytes().end()};
    switch (any.below(4)) {
    case 0: // garbage
      bytes = any.bytes(1 + any.below(6000));
      break;
    case 1: // truncated
      bytes.resize(1 + any.below(bytes.size() - 1));
      break;
    case 2: // another version or other sizes
      for (auto n = 1 + any.below(4); n > 0; --n)
        bytes[any.below(offsetof(worker_hello, refusal))] ^=
            static_cast<std::byte>(1 + any.below(255));
      break;
    default: // valid except for the memory
      break;
    }
    detail::file_descriptor memory{
        ::memfd_create("nonsense", any.one_in(2) ? MFD_ALLOW_SEALING : 0)};
    const int passed = memory.get();
    must(ends.first.send(bytes, any.one_in(3) ? std::span<const int>{}
                                              : std::span<const int>{&passed, 1}));
    const int theirs = ::dup(ends.second.native());
    std::string flag = std::string{detail::worker_flag} + std::to_string(theirs);
    std::string name = "worker";
    const std::array<char*, 2> arguments{name.data(), flag.data()};
    const auto met = worker_parent::attach(arguments, {.hello_limit = patience});
    ASSERT_FALSE(met);
    EXPECT_TRUE(has_code(met, errc::unavailable) || has_code(met, errc::invalid_argument) ||
                has_code(met, errc::out_of_range))
        << describe(met.error());
    // The other side gets the reason.
    std::array<std::byte, 4096> answer;
    EXPECT_GT(must(ends.first.receive(answer, 0, clock::now() + patience)).size_bytes, 0u);
  }
}

// -- whole processes

/// A worker that writes and sends random data, from its seed, until it is killed.
TROUPE_CHILD(HostileWorker) {
  const auto arguments = main_arguments();
  dice any{std::stoull(arguments[2])};
  auto parent = must(worker_parent::attach(arguments));
  auto* area = parent.area().data();
  const auto size = parent.area().size();
  for (;;) {
    for (int i = 0; i < 64; ++i) {
      const auto x = any.number();
      std::memcpy(area + any.below(size - sizeof x), &x, sizeof x);
    }
    const auto message = any.bytes(1 + any.below(any.one_in(10) ? 100'000 : 200));
    if (parent.socket().send(message, {}, clock::now() + 1s))
      ::pause();
  }
}

TEST(Nonsense, OfAWholeWorkerHarmsNobody) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    auto options = worker_of("HostileWorker");
    options.arguments.push_back(std::to_string(seed));
    options.area_bytes = sizeof(link_area);
    auto process = std::make_shared<worker_process>(must(worker_process::start(options)));
    struct sender final : detail::control_sender {
      explicit sender(std::shared_ptr<worker_process> x) : to(std::move(x)) {}
      caf::error send(std::span<const std::byte> bytes, std::optional<int>) noexcept override {
        return to->socket().send(bytes, {}, clock::now() + 100ms);
      }
      void kill() noexcept override { static_cast<void>(to->kill()); }
      std::shared_ptr<worker_process> to;
    };
    auto* area = new (process->area().data()) link_area;
    auto link = std::make_shared<worker_link>(0, *area, process, std::make_unique<sender>(process));
    link->set_request_limit(1s);
    std::thread receiver{[&] {
      const auto error = detail::receive_all(process->socket(),
                                             [&](auto message, auto) { link->received(message); });
      link->give_up(detail::lost_worker(0, error));
    }};
    std::thread lane{[&] {
      while (!link->lost())
        static_cast<void>(link->ask(command::memory, detail::no_arguments{}));
    }};
    lane.join();
    receiver.join();
    EXPECT_TRUE(has_code(link->loss(), errc::worker_lost)) << describe(link->loss());
    EXPECT_TRUE(process->wait_exit(clock::now() + patience).has_value());
  }
}

/// A worker running this binary, which has sent its hello and waits for its first message.
struct waiting_worker {
  waiting_worker()
      : process(must(worker_process::start(options(), seen.listener()))),
        area(new(process.area().data()) link_area) {}

  static detail::worker_options options() {
    detail::worker_options result;
    result.program = "/proc/self/exe";
    result.hello_limit = patience;
    result.area_bytes = sizeof(link_area);
    return result;
  }
  void send(std::span<const std::byte> message) {
    must(process.socket().send(message, {}, clock::now() + patience));
  }

  witness seen;
  worker_process process;
  link_area* area;
};

std::vector<std::byte> first_message(const detail::worker_setup& what) {
  detail::wire_writer message;
  control_head head;
  head.number = 1;
  head.kind = control::set_up;
  message.put(head);
  message.put(what);
  return {message.bytes().begin(), message.bytes().end()};
}

detail::worker_setup usual_setup() {
  return {"host", 0, 0, {.devices = 2, .bytes_per_device = 1 << 20, .links = {{0, 1}}}};
}

TEST(Nonsense, AFirstMessageIsServedOrEndsTheWorkerWithItsReason) {
  dice any{9};
  int ended = 0;
  for (int i = 0; i < 40; ++i) {
    auto message = first_message(usual_setup());
    switch (any.below(3)) {
    case 0:
      message = any.bytes(1 + any.below(2000));
      break;
    case 1:
      message.resize(1 + any.below(message.size() - 1));
      break;
    default:
      for (auto n = 1 + any.below(3); n > 0; --n)
        message[sizeof(control_head) + any.below(message.size() - sizeof(control_head))] =
            static_cast<std::byte>(any.below(256));
    }
    waiting_worker worker;
    worker.send(message);
    std::vector<std::byte> answer(detail::control_bytes);
    const auto got = must(worker.process.socket().receive(answer, 0, clock::now() + patience));
    if (got.what == detail::received::kind::message) {
      detail::wire_reader reader{std::span{answer}.first(got.size_bytes)};
      EXPECT_EQ(reader.get<control_head>().kind, control::set_up);
      if (!reader.get<caf::error>())
        continue; // it is valid
    }
    ++ended;
    const auto end = worker.seen.wait_end();
    ASSERT_TRUE(end.report.has_value());
    EXPECT_FALSE(end.report->text.empty());
  }
  EXPECT_GT(ended, 20);
}

TEST(Nonsense, MessagesThatCannotBeEndTheWorkerWithItsReason) {
  for (const std::size_t size : {std::size_t{1}, detail::control_bytes + 1}) {
    waiting_worker worker;
    worker.send(first_message(usual_setup()));
    std::vector<std::byte> answer(detail::control_bytes);
    must(worker.process.socket().receive(answer, 0, clock::now() + patience));
    worker.send(std::vector<std::byte>(size));
    const auto end = worker.seen.wait_end();
    ASSERT_TRUE(end.report.has_value()) << size;
    EXPECT_FALSE(end.report->text.empty());
  }
}

} // namespace
} // namespace troupe::testing
