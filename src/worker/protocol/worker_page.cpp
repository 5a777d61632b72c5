#include "worker/protocol/worker_page.hpp"

#include "foundation/peer_text.hpp"
#include <troupe/version.hpp>

#include <algorithm>
#include <cstring>
#include <new>

namespace troupe::detail {

namespace {

template <std::size_t N> void put(std::array<char, N>& to, std::string_view text) noexcept {
  to.fill('\0');
  std::copy_n(text.data(), std::min(text.size(), N - 1), to.data());
}

template <std::size_t N> std::string text_of(const std::array<char, N>& from) {
  return peer_text({from.data(), ::strnlen(from.data(), N)});
}

} // namespace

void report_area::write(std::int32_t code, std::string_view text,
                        std::int32_t native_code) noexcept {
  auto expected = state::empty;
  if (!state_.compare_exchange_strong(expected, state::begun))
    return;
  const auto size = std::min(text.size(), text_.size());
  std::memcpy(text_.data(), text.data(), size);
  size_ = static_cast<std::uint32_t>(size);
  code_ = code;
  native_code_ = native_code;
  state_.store(state::ready, std::memory_order_release);
}

std::optional<worker_report> report_area::read() const {
  if (state_.load(std::memory_order_acquire) != state::ready)
    return std::nullopt;
  // A copy, since the worker may still write to the text.
  const std::string text{text_.data(), std::min<std::size_t>(size_, text_.size())};
  return worker_report{code_, peer_text(text), native_code_};
}

worker_page& begin_page(const shared_memory& memory) noexcept {
  return *new (memory.bytes().data()) worker_page;
}

worker_page& page_of(const shared_memory& memory) noexcept {
  return *std::launder(reinterpret_cast<worker_page*>(memory.bytes().data()));
}

std::span<std::byte> area_of(const shared_memory& memory) noexcept {
  return memory.bytes().subspan(worker_page::size_bytes);
}

void worker_hello::refuse(std::string_view why) noexcept { put(refusal, why); }

worker_hello make_hello() noexcept {
  worker_hello result;
  put(result.version, version_string);
  return result;
}

caf::expected<worker_hello> read_hello(std::span<const std::byte> from, std::string_view peer) {
  const std::string who{peer};
  worker_hello result;
  const auto told = std::min(from.size(), sizeof result);
  std::copy_n(from.data(), told, reinterpret_cast<std::byte*>(&result)); // may be 0
  constexpr auto same_in_all = offsetof(worker_hello, page_bytes);
  if (told < same_in_all || result.magic != worker_hello::right_magic)
    return make_error(errc::unavailable, who + " does not speak troupe: its first message, of " +
                                             std::to_string(from.size()) + " bytes, is no hello");
  const auto ours = make_hello();
  if (result.version != ours.version || result.protocol != ours.protocol)
    return make_error(errc::unavailable, who + " has version " + text_of(result.version) +
                                             " (protocol " + std::to_string(result.protocol) +
                                             ") of troupe, this is " + version_string +
                                             " (protocol " + std::to_string(ours.protocol) + ")");
  if (from.size() != sizeof result || result.size_bytes != sizeof result ||
      result.page_bytes != ours.page_bytes)
    return make_error(errc::unavailable, who + " was built otherwise: a hello of " +
                                             std::to_string(from.size()) + " bytes instead of " +
                                             std::to_string(sizeof result) + ", a shared page of " +
                                             std::to_string(result.page_bytes) + " instead of " +
                                             std::to_string(ours.page_bytes));
  if (const auto refusal = text_of(result.refusal); !refusal.empty())
    return make_error(errc::unavailable, who + " refuses: " + refusal);
  return result;
}

} // namespace troupe::detail
