/// The memory and the first messages of a parent and its worker.
#pragma once

#include "worker/protocol/life_line.hpp"
#include "worker/protocol/shared_memory.hpp"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

namespace troupe::detail {

/// A worker's report of its own failure, written before it ended.
struct worker_report {
  std::int32_t code = 0;        ///< the worker's choice
  std::string text;             ///< as `peer_text` returns it
  std::int32_t native_code = 0; ///< as `failure::native_code`
};

/// Place of a report in shared memory.
class report_area {
public:
  /// Writes without allocating or locking. Only the first report counts; a long text is cut.
  /// @thread any; a signal handler too
  void write(std::int32_t code, std::string_view text, std::int32_t native_code) noexcept;

  /// Returns the report if it was written completely.
  std::optional<worker_report> read() const;

private:
  enum class state : std::uint32_t { empty, begun, ready };

  std::atomic<state> state_{state::empty};
  std::int32_t code_ = 0;
  std::int32_t native_code_ = 0;
  std::uint32_t size_ = 0;
  std::array<char, 1008> text_{};
};

/// Shows if the worker is inside a call that may hang. One of its threads marks its calls.
struct work_progress {
  std::atomic<std::uint64_t> count{0}; ///< begins and ends; odd inside a call
  std::atomic<std::uint32_t> call{0};  ///< latest call; the page's owners define the numbers

  /// Marks a call during its own lifetime.
  class mark {
  public:
    mark(work_progress& on, std::uint32_t call) noexcept
        : on_(on), begun_(on.count.load(std::memory_order_relaxed) | 1) {
      on_.call.store(call, std::memory_order_relaxed);
      on_.count.store(begun_, std::memory_order_release);
    }
    ~mark() { on_.count.store(begun_ + 1, std::memory_order_release); }
    mark(const mark&) = delete;
    mark& operator=(const mark&) = delete;

  private:
    work_progress& on_;
    const std::uint64_t begun_;
  };
};

/// Start of the shared memory; the area for the page's owners follows.
/// Each process may overwrite it at any time, so a reader trusts no value that could do harm.
struct worker_page {
  static constexpr std::size_t size_bytes = 4096;

  alignas(64) life_line parent_line;               ///< held by the parent
  alignas(64) life_line worker_line;               ///< held by the worker
  alignas(64) std::atomic<std::uint64_t> beats{0}; ///< grows while the worker is alive
  alignas(64) work_progress progress;
  alignas(64) report_area report;
};

static_assert(sizeof(worker_page) <= worker_page::size_bytes);
static_assert(std::is_standard_layout_v<worker_page>);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

/// Initializes the page of a shared memory. Only for the creator of the memory.
worker_page& begin_page(const shared_memory& memory) noexcept;
worker_page& page_of(const shared_memory& memory) noexcept;
/// Returns the memory after the page.
std::span<std::byte> area_of(const shared_memory& memory) noexcept;

/// The first message of each side. The parent's has the descriptor of the shared memory; the
/// worker's answers it. The first three fields are the same in all versions of the library.
struct worker_hello {
  static constexpr std::uint64_t right_magic = 0x7472'6f75'7065'0a57;
  static constexpr std::uint32_t right_protocol = 3;

  std::uint64_t magic = right_magic;
  std::uint32_t size_bytes = sizeof(worker_hello);
  std::uint32_t protocol = right_protocol;
  std::array<char, 32> version{}; ///< of the library
  std::uint64_t page_bytes = sizeof(worker_page);
  std::uint64_t area_bytes = 0;
  std::int64_t beat_period_ns = 0;
  std::array<char, 448> refusal{}; ///< from the worker: why it refuses; empty: it accepts

  std::span<const std::byte> bytes() const noexcept { return std::as_bytes(std::span{this, 1}); }
  void refuse(std::string_view why) noexcept;
};

static_assert(std::is_trivially_copyable_v<worker_hello>);

/// Makes a hello with this library's version.
worker_hello make_hello() noexcept;

/// Reads the hello of a peer and checks its version.
/// @param peer subject of the error text, such as "the worker"
/// @errors errc::unavailable: another version, or no hello; the text names both versions
caf::expected<worker_hello> read_hello(std::span<const std::byte> from, std::string_view peer);

/// Argument of a worker, followed by the number of its descriptor.
inline constexpr std::string_view worker_flag = "--troupe-worker=";

/// Environment variable with the same number, until the worker has met its parent.
inline constexpr const char* worker_variable = "TROUPE_WORKER";

} // namespace troupe::detail
