/// What a parent and its worker share, and what they say before they do.
#pragma once

#include "worker/life_line.hpp"
#include "worker/shared_memory.hpp"

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

/// What a worker said of its own failure before it ended.
struct worker_report {
  std::int32_t code = 0; ///< the worker's choice
  std::string text;
};

/// A report's place in shared memory.
class report_area {
public:
  /// Takes no memory and no lock. Only the first report counts; what is too long is cut.
  /// @thread any; a signal handler too
  void write(std::int32_t code, std::string_view text) noexcept;

  /// None, unless it was written to its end.
  std::optional<worker_report> read() const;

private:
  enum class state : std::uint32_t { empty, begun, ready };

  std::atomic<state> state_{state::empty};
  std::int32_t code_ = 0;
  std::uint32_t size_ = 0;
  std::array<char, 1012> text_{};
};

/// Whether the worker is inside a call that may be stuck: one thread of it marks its calls.
struct work_progress {
  std::atomic<std::uint64_t> count{0}; ///< of begins and ends: odd inside a call
  std::atomic<std::uint32_t> call{0};  ///< the last one; what it means is the page's owners'

  /// Marks a call for as long as it lives.
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

/// The begin of the shared memory; an area for the page's owners follows. Either process may
/// overwrite it at any time: whoever reads it believes nothing that could harm.
struct worker_page {
  static constexpr std::size_t size_bytes = 4096;

  alignas(64) life_line parent_line;               ///< held by the parent
  alignas(64) life_line worker_line;               ///< held by the worker
  alignas(64) std::atomic<std::uint64_t> beats{0}; ///< the worker's sign of life
  alignas(64) work_progress progress;
  alignas(64) report_area report;
};

static_assert(sizeof(worker_page) <= worker_page::size_bytes);
static_assert(std::is_standard_layout_v<worker_page>);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

/// The page of a shared memory, begun anew: only for who has created it.
worker_page& begin_page(const shared_memory& memory) noexcept;
worker_page& page_of(const shared_memory& memory) noexcept;
/// What follows the page.
std::span<std::byte> area_of(const shared_memory& memory) noexcept;

/// The first message of each side. The parent's carries the descriptor of the shared memory, the
/// worker's answers it. Its first three fields are the same in all versions of the library.
struct worker_hello {
  static constexpr std::uint64_t right_magic = 0x7472'6f75'7065'0a57;
  static constexpr std::uint32_t right_protocol = 1;

  std::uint64_t magic = right_magic;
  std::uint32_t size_bytes = sizeof(worker_hello);
  std::uint32_t protocol = right_protocol;
  std::array<char, 32> version{}; ///< of the library
  std::uint64_t page_bytes = sizeof(worker_page);
  std::uint64_t area_bytes = 0;
  std::int64_t beat_period_ns = 0;
  std::array<char, 448> refusal{}; ///< the worker's: why it does not want to; empty: it does

  std::span<const std::byte> bytes() const noexcept { return std::as_bytes(std::span{this, 1}); }
  void refuse(std::string_view why) noexcept;
};

static_assert(std::is_trivially_copyable_v<worker_hello>);

/// With this library's version.
worker_hello make_hello() noexcept;

/// What a peer has sent, if it is a hello of this version.
/// @param peer for the error's sentence: "the worker", ...
/// @errors errc::unavailable: another version, or no hello at all; the sentence names both versions
caf::expected<worker_hello> read_hello(std::span<const std::byte> from, std::string_view peer);

/// Followed by the number of the worker's descriptor in its arguments.
inline constexpr std::string_view worker_flag = "--troupe-worker=";

/// The same in its environment, until it has met its parent.
inline constexpr const char* worker_variable = "TROUPE_WORKER";

} // namespace troupe::detail
