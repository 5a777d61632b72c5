/// The binary form of data that is sent between processes of one build.
#pragma once

#include <troupe/error.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <ranges>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace troupe::detail {

class wire_writer;

/// `X` is the message `T`: const for a writer, not const for a reader.
template <class X, class T>
concept message_of = std::same_as<std::remove_const_t<X>, T>;

/// A type with a function that names its members once, in the order in which they are sent, and the
/// conditions under which a reader accepts them:
///
///     void wire_fields(auto& wire, message_of<range> auto& x) {
///       wire(x.begin, x.end);
///       wire.require(x.begin <= x.end);
///     }
template <class T>
concept wire_message = requires(wire_writer& to, const T& x) { wire_fields(to, x); };

/// A value that is sent as it lies in memory. Excludes views and pointers, because the memory that
/// they refer to would not be sent; a void pointer is an address in another process.
template <class T>
concept wire_value =
    std::is_trivially_copyable_v<T> && !wire_message<T> &&
    (!std::is_pointer_v<T> || std::is_void_v<std::remove_pointer_t<T>>) && !std::ranges::view<T>;

/// Returns a value as it lies in memory.
template <wire_value T> std::span<const std::byte> bytes_of(const T& x) noexcept {
  return std::as_bytes(std::span{&x, 1});
}

class wire_writer {
public:
  template <class... T> void operator()(const T&... x) { (put(x), ...); }
  /// Does nothing: the reader checks.
  void require(bool) const noexcept {}

  template <wire_value T> void put(const T& x) { append(&x, sizeof x); }
  template <wire_message T> void put(const T& x) { wire_fields(*this, x); }
  template <class T> void put(const std::vector<T>& x) {
    if constexpr (wire_value<T>) {
      put_bytes(std::as_bytes(std::span{x}));
    } else {
      put(static_cast<std::uint32_t>(x.size()));
      for (auto& y : x)
        put(y);
    }
  }
  void put(std::string_view x) { put_bytes(std::as_bytes(std::span{x.data(), x.size()})); }
  /// An error of the library keeps its fields; any other becomes `errc::internal` with its text.
  void put(const caf::error& x);
  /// Writes the number of bytes before them, so that the reader finds their end.
  void put_bytes(std::span<const std::byte> x, std::span<const std::byte> more = {}) {
    put(static_cast<std::uint32_t>(x.size() + more.size()));
    append(x.data(), x.size());
    append(more.data(), more.size());
  }

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

  template <class... T> void operator()(T&... x) { (read(x), ...); }
  /// Notes that the data is malformed if it is not `valid`.
  void require(bool valid) noexcept { ok_ = ok_ && valid; }

  template <class T> T get() {
    T result{};
    read(result);
    return result;
  }
  std::span<const std::byte> get_bytes() noexcept { return take(get<std::uint32_t>()); }

  /// Returns the bytes that are not read yet.
  std::span<const std::byte> rest() const noexcept { return data_; }
  bool ok() const noexcept { return ok_; }
  bool at_end() const noexcept { return data_.empty(); }

private:
  template <wire_value T> void read(T& x) noexcept {
    x = {};
    if (const auto from = take(sizeof x); from.size() == sizeof x)
      std::memcpy(&x, from.data(), sizeof x);
  }
  template <wire_message T> void read(T& x) { wire_fields(*this, x); }
  template <class T> void read(std::vector<T>& x) {
    if constexpr (wire_value<T>) {
      const auto from = get_bytes();
      require(from.size() % sizeof(T) == 0);
      x.resize(from.size() / sizeof(T));
      if (!x.empty())
        std::memcpy(x.data(), from.data(), x.size() * sizeof(T));
    } else {
      x.clear();
      for (auto left = get<std::uint32_t>(); left > 0 && ok_; --left)
        read(x.emplace_back());
    }
  }
  void read(bool& x) noexcept { // no byte but 0 and 1 is valid
    const auto byte = get<std::uint8_t>();
    require(byte <= 1);
    x = byte == 1;
  }
  void read(std::string& x) {
    const auto from = get_bytes();
    x.assign(reinterpret_cast<const char*>(from.data()), from.size());
  }
  /// Reads an error that is not valid as `errc::internal`. Its texts are those of a peer
  /// (peer_text.hpp).
  void read(caf::error& x);

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

/// Returns the message that the bytes hold; none if they are malformed, or more than the message.
template <class T> std::optional<T> read_message(std::span<const std::byte> bytes) {
  wire_reader from{bytes};
  auto result = from.get<T>();
  if (!from.ok() || !from.at_end())
    return std::nullopt;
  return result;
}

} // namespace troupe::detail
