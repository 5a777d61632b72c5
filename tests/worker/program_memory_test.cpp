// Device memory of programs in workers: it comes from the slabs of the parent.

#include "support/eventually.hpp"
#include "support/random.hpp"
#include "worker/program_fixture.hpp"
#include <troupe/device.hpp>

#include <caf/all.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <random>
#include <vector>

namespace troupe::testing {

namespace {

constexpr std::size_t mib = std::size_t{1} << 20;
constexpr std::size_t device_bytes = 256 * mib; ///< of a virtual device

/// An order to the program.
struct memory_order {
  enum class verb : std::uint8_t {
    churn,    ///< allocates and frees `value` times, and checks the content of all
    allocate, ///< keeps memory of so many bytes
    drop,     ///< frees all that it keeps
    offer     ///< lends what it keeps to the parent
  };
  verb what = verb::churn;
  std::uint64_t value = 0;
};

struct memory_outcome {
  errc code{};
  gpu_token token;
};

class memory_user {
public:
  explicit memory_user(device d) : device_(std::move(d)) {}

  memory_outcome obey(const memory_order& x) {
    memory_outcome result;
    if (auto error = act(x, result))
      result.code = code_of(error).value_or(errc::internal);
    return result;
  }

private:
  using verb = memory_order::verb;

  caf::error act(const memory_order& x, memory_outcome& result) {
    switch (x.what) {
    case verb::churn:
      return churn(x.value);
    case verb::allocate: {
      auto made = device_.allocate<std::uint8_t>(x.value);
      if (!made)
        return made.error();
      kept_.push_back(*made);
      return error_of(device_.fill(*made, std::uint8_t{7}).wait());
    }
    case verb::drop:
      kept_.clear();
      return {};
    case verb::offer: {
      auto token = device_.offer(kept_.back());
      if (!token)
        return token.error();
      result.token = *token;
      return {};
    }
    }
    return make_error(errc::internal, "no such order");
  }

  caf::error churn(std::uint64_t steps) {
    std::mt19937_64 random{steps};
    std::vector<std::pair<gpu_ref<std::uint8_t>, std::uint8_t>> held;
    for (; steps > 0; --steps) {
      if (held.size() < 30 && chance(random, 0.6)) {
        auto made = device_.allocate<std::uint8_t>(chance(random, 0.05) ? pick(random, 1, 20 * mib)
                                                                        : pick(random, 1, 50'000));
        if (!made)
          return made.error();
        held.emplace_back(*made, static_cast<std::uint8_t>(pick(random, 1, 255)));
        if (auto filled = device_.fill(held.back().first, held.back().second).wait(); !filled)
          return filled.error();
      } else if (!held.empty()) {
        const auto x =
            std::next(held.begin(), static_cast<std::ptrdiff_t>(pick(random, 0, held.size() - 1)));
        auto got = device_.download(x->first);
        if (!got)
          return got.error();
        if (*got != std::vector<std::uint8_t>(x->first.count(), x->second))
          return make_error(errc::internal, "memory has the content of other memory");
        held.erase(x);
      }
    }
    return {};
  }

  device device_;
  std::vector<gpu_ref<std::uint8_t>> kept_;
};

[[maybe_unused]] const bool registered = [] {
  must(register_program("memory user", [](const program_place& place) {
    return place.system.spawn<caf::detached>([place](caf::event_based_actor*) -> caf::behavior {
      auto state = std::make_shared<memory_user>(place.rank.where());
      return {[place, state](const program_message& x) {
        auto result = state->obey(must(from_bytes<memory_order>(x.bytes)));
        if (auto lost = place.report(to_bytes(result)))
          ADD_FAILURE() << describe(lost);
      }};
    });
  }));
  return true;
}();

class ProgramMemory : public ProgramsTest {
protected:
  using verb = memory_order::verb;

  void begin(int devices, world_limits limits = {}, kept_memory keeps = kept_memory::after_end) {
    const auto make_backend = [=](std::shared_ptr<backend>) {
      worker_backend_options options{
          .backend = "host", .host = {.devices = devices, .bytes_per_device = device_bytes}};
      options.cuda.keep_freed = 1ms;
      options.workers.keep_memory = keeps;
      return must(make_worker_backend(options));
    };
    auto where = in_worker_processes(devices);
    if (!on_cuda())
      where = {.devices = devices, .wrap = make_backend};
    start(std::move(where), {"memory user", {}}, limits);
    const bool has_standby = collectives_ != collectives_policy::nccl; // which takes memory
    ASSERT_TRUE(until([=, this] {
      return view_.phase == world_phase::ready && view_.standby_ready >= has_standby;
    }));
  }
  void TearDown() override {
    ref_ = {};
    ProgramsTest::TearDown();
  }

  /// Sends an order, to be done by the present process of the rank or the next one.
  memory_outcome tell(verb what, std::uint64_t value = 0, int rank = 0) {
    const auto before = reports_.size();
    detail::send(*self_, actor_, program_message{rank, to_bytes(memory_order{what, value})});
    EXPECT_TRUE(until([&] { return reports_.size() > before; }));
    return reports_.size() > before ? must(from_bytes<memory_outcome>(reports_.back().bytes))
                                    : memory_outcome{errc::internal, {}};
  }
  std::uint64_t free_bytes(int ordinal = 0) {
    return must(answer_of(system_->open(ordinal).stats())).free_bytes;
  }
  /// Kills the process, and waits for the next one.
  void kill_and_wait(int ordinal) {
    const auto d = must(device::open(*system_, ordinal));
    const auto before = d.incarnation();
    EXPECT_TRUE(has_code(kill_worker(d), errc::worker_lost));
    EXPECT_TRUE(eventually([&] { return d.incarnation() > before; }));
  }

  any_gpu_ref ref_;
};

TEST_F(ProgramMemory, HoldsWhatIsWrittenToEachAllocation) {
  TROUPE_NEEDS_DEVICES(2);
  begin(2);
  for (int rank : {0, 1})
    EXPECT_EQ(tell(verb::churn, 1500, rank).code, errc{});
}

TEST_F(ProgramMemory, GoesBackToTheDevice) {
  TROUPE_HOST_ONLY("devices of a known size");
  begin(1);
  const auto before = free_bytes();
  EXPECT_EQ(tell(verb::allocate, 200 * mib).code, errc{});
  EXPECT_LE(free_bytes(), before - 200 * mib);
  EXPECT_EQ(tell(verb::drop).code, errc{});
  EXPECT_TRUE(eventually([&] { return free_bytes() == before; }));
}

TEST_F(ProgramMemory, IsSharedWithTheParent) {
  TROUPE_HOST_ONLY("devices of a known size");
  begin(1);
  EXPECT_EQ(tell(verb::allocate, 200 * mib).code, errc{});
  auto d = system_->open(0);
  EXPECT_TRUE(has_code(d.allocate<std::uint8_t>(200 * mib), errc::out_of_memory));
  EXPECT_EQ(tell(verb::drop).code, errc{});
  {
    gpu_ref<std::uint8_t> own; // of what the program does not use any more
    ASSERT_TRUE(eventually([&] {
      auto made = d.allocate<std::uint8_t>(200 * mib);
      if (made)
        own = std::move(*made);
      return static_cast<bool>(made);
    }));
    EXPECT_EQ(tell(verb::allocate, 200 * mib).code, errc::out_of_memory);
    EXPECT_EQ(tell(verb::allocate, std::uint64_t{1} << 50).code, errc::out_of_memory);
  }
  EXPECT_TRUE(eventually([&] { return tell(verb::allocate, 200 * mib).code == errc{}; }));
}

TEST_F(ProgramMemory, OfALostProcessComesBack) {
  TROUPE_HOST_ONLY("devices of a known size");
  begin(1);
  const auto before = free_bytes();
  EXPECT_EQ(tell(verb::allocate, 200 * mib).code, errc{});
  kill_and_wait(0);
  EXPECT_TRUE(eventually([&] { return free_bytes() == before; }));
}

/// The next program gets the memory that the lost one had, as soon as that has ended.
TEST_F(ProgramMemory, IsThereForTheNextProgramAfterEachOfManyLosses) {
  TROUPE_HOST_ONLY("devices of a known size");
  world_limits limits;
  limits.standby = standby_policy::full;
  begin(1, limits);
  const auto before = free_bytes();
  for (int i = 0; i < 50; ++i) {
    ASSERT_EQ(tell(verb::allocate, 200 * mib).code, errc{}) << i;
    kill_and_wait(0);
  }
  EXPECT_TRUE(eventually([&] { return free_bytes() == before; }));
}

TEST_F(ProgramMemory, IsThereForTheNextProgramWithoutKeptMemory) {
  TROUPE_HOST_ONLY("devices of a known size");
  begin(1, {}, kept_memory::none);
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(tell(verb::allocate, 200 * mib).code, errc{}) << i;
    kill_and_wait(0);
  }
}

/// The parent's memory is a neighbour of the program's in the same slabs.
TEST_F(ProgramMemory, LeavesMemoryOfTheParentAlone) {
  begin(1);
  const auto d = system_->open(0);
  const auto own = must(d.allocate<float>(1000));
  must(answer_of(d.fill(own, 4.0f)));
  EXPECT_EQ(tell(verb::churn, 500).code, errc{});
  kill_and_wait(0);
  EXPECT_EQ(tell(verb::churn, 500).code, errc{});
  EXPECT_TRUE(holds(d, own, std::vector<float>(1000, 4)));
}

TEST_F(ProgramMemory, OutlivesAReset) {
  begin(1);
  const auto d = system_->open(0);
  EXPECT_EQ(tell(verb::allocate, 1000).code, errc{});
  must(answer_of(d.reset()));
  const auto token = tell(verb::offer);
  EXPECT_EQ(token.code, errc{});
  const auto there = must(d.claim<std::uint8_t>(token.token, access_mode::read));
  EXPECT_TRUE(holds(d, there, std::vector<std::uint8_t>(1000, 7)));
}

/// Devices read it where it is.
TEST_F(ProgramMemory, IsReachedByOtherDevices) {
  TROUPE_NEEDS_DEVICES(2);
  begin(2);
  const auto d = system_->open(0);
  const auto other = system_->open(1);
  EXPECT_EQ(tell(verb::allocate, 1000).code, errc{});
  const auto there = must(d.claim<std::uint8_t>(tell(verb::offer).token, access_mode::read));
  const auto t = must(topology::open(system_->get(), {.devices = system_->ordinals()}));
  const auto to = must(other.allocate<std::uint8_t>(1000));
  must(answer_of(t.copy(to, there)));
  EXPECT_TRUE(holds(other, to, std::vector<std::uint8_t>(1000, 7)));
  EXPECT_EQ(t.stats().staged_copies, 0u);
}

} // namespace

} // namespace troupe::testing
