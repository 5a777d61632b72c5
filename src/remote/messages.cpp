#include "remote/messages.hpp"

#include "foundation/peer_text.hpp"
#include <troupe/version.hpp>

#include <algorithm>
#include <cstring>
#include <string_view>

namespace troupe::detail {

namespace {

template <std::size_t N> void put_text(std::array<char, N>& to, std::string_view text) noexcept {
  std::copy_n(text.data(), std::min(text.size(), N - 1), to.data());
}

template <std::size_t N> std::string text_of(const std::array<char, N>& from) {
  return peer_text({from.data(), ::strnlen(from.data(), N)});
}

bool is_name(std::string_view x) noexcept {
  return !x.empty() && std::all_of(x.begin(), x.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  });
}

} // namespace

caf::expected<host_hello> make_host_hello(const std::string& name) {
  host_hello result;
  if (!is_name(name) || name.size() >= result.name.size())
    return make_error(errc::invalid_argument, "invalid host name: '" + name +
                                                  "'; letters, digits, '.', '_' and '-', at most " +
                                                  std::to_string(result.name.size() - 1));
  put_text(result.version, version_string);
  put_text(result.name, name);
  return result;
}

caf::expected<std::string> read_host_hello(std::span<const std::byte> from) {
  host_hello got;
  const auto told = std::min(from.size(), sizeof got);
  std::copy_n(from.data(), told, reinterpret_cast<std::byte*>(&got)); // also if `from` is empty
  constexpr auto same_in_all = offsetof(host_hello, name);
  if (told < same_in_all || got.magic != host_hello::right_magic)
    return make_error(errc::unavailable, "it does not speak troupe: its first frame, of " +
                                             std::to_string(from.size()) + " bytes, is no hello");
  if (text_of(got.version) != version_string || got.protocol != host_hello::right_protocol)
    return make_error(errc::unavailable,
                      "it has version " + text_of(got.version) + " (protocol " +
                          std::to_string(got.protocol) + ") of troupe, this is " + version_string +
                          " (protocol " + std::to_string(host_hello::right_protocol) + ")");
  if (from.size() != sizeof got || got.size_bytes != sizeof got)
    return make_error(errc::unavailable, "it was built otherwise: a hello of " +
                                             std::to_string(from.size()) + " bytes instead of " +
                                             std::to_string(sizeof got));
  auto name = text_of(got.name);
  if (!is_name(name))
    return make_error(errc::unavailable, "it has an invalid name: '" + name + "'");
  return name;
}

} // namespace troupe::detail
