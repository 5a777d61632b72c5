/// The binary form of data that is sent between processes of one build.
#pragma once

#include <troupe/error.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ranges>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace troupe::detail {

/// Excludes views and pointers, because the memory that they refer to would not be sent.
template <class T>
concept wire_value =
    std::is_trivially_copyable_v<T> && !std::is_pointer_v<T> && !std::ranges::view<T>;

/// Returns a value as it lies in memory.
template <wire_value T> std::span<const std::byte> bytes_of(const T& x) noexcept {
  return std::as_bytes(std::span{&x, 1});
}

class wire_writer {
public:
  template <wire_value T> void put(const T& x) { append(&x, sizeof x); }
  void put(std::string_view x) { put_bytes(std::as_bytes(std::span{x.data(), x.size()})); }
  /// Writes the number of bytes before them, so that the reader finds their end.
  void put_bytes(std::span<const std::byte> x) {
    put(static_cast<std::uint32_t>(x.size()));
    append(x.data(), x.size());
  }
  template <wire_value T> void put_all(std::span<const T> x) { put_bytes(std::as_bytes(x)); }

  std::span<const std::byte> bytes() const noexcept { return data_; }
  void clear() noexcept { data_.clear(); }

private:
  void append(const void* from, std::size_t size) {
    const auto end = data_.size();
    data_.resize(end + size);
    if (size > 0)
      std::memcpy(data_.data() + end, from, size);
  }

  std::vector<std::byte> data_;
};

/// Reads the output of a `wire_writer`. Missing data reads as zero or empty, and `ok` is false from
/// then on.
class wire_reader {
public:
  explicit wire_reader(std::span<const std::byte> data) noexcept : data_(data) {}

  template <wire_value T> T get() noexcept {
    if constexpr (std::is_same_v<T, bool>) { // no byte but 0 and 1 is valid
      const auto x = get<std::uint8_t>();
      ok_ = ok_ && x <= 1;
      return x == 1;
    }
    T result{};
    if (const auto from = take(sizeof(T)); from.size() == sizeof(T))
      std::memcpy(&result, from.data(), sizeof(T));
    return result;
  }
  std::span<const std::byte> get_bytes() noexcept { return take(get<std::uint32_t>()); }
  std::string get_string() {
    const auto from = get_bytes();
    return {reinterpret_cast<const char*>(from.data()), from.size()};
  }
  /// Returns values that `put_all` wrote.
  template <wire_value T> std::vector<T> get_all() {
    const auto from = get_bytes();
    ok_ = ok_ && from.size() % sizeof(T) == 0;
    std::vector<T> result(from.size() / sizeof(T));
    if (!result.empty())
      std::memcpy(result.data(), from.data(), result.size() * sizeof(T));
    return result;
  }

  /// Returns the bytes that are not read yet.
  std::span<const std::byte> rest() const noexcept { return data_; }
  bool ok() const noexcept { return ok_; }
  /// Notes that the data is malformed.
  void fail() noexcept { ok_ = false; }
  bool at_end() const noexcept { return data_.empty(); }

private:
  std::span<const std::byte> take(std::size_t size) noexcept {
    if (size > data_.size()) {
      ok_ = false;
      data_ = {};
      return {};
    }
    const auto result = data_.first(size);
    data_ = data_.subspan(size);
    return result;
  }

  std::span<const std::byte> data_;
  bool ok_ = true;
};

/// An error of the library keeps its fields; any other becomes `errc::internal` with its text.
void put(wire_writer& to, const caf::error& x);
caf::error get_error(wire_reader& from);

} // namespace troupe::detail
