/// The members of an object of a flight record, with checks of their types.
#pragma once

#include "foundation/peer_text.hpp"
#include "record.hpp"

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace flight {

/// The members of an object. Members that are arrays or objects are here without their content.
/// All functions that return a member throw `bad_record` if it is missing or of another type.
class record_fields {
public:
  using json = nlohmann::json;

  /// Adds a member. Of members with the same name, the last one counts.
  void add(const std::string& name, json x);
  void clear() { all_.clear(); }

  /// Returns null if there is no such member.
  const json* find(std::string_view name) const;
  const json& at(const char* name) const;

  /// Returns a printable text of at most `most` bytes.
  std::string text(const char* name, std::size_t most = troupe::detail::most_peer_name) const;
  /// The same; empty if the member is null.
  std::string text_or_null(const char* name,
                           std::size_t most = troupe::detail::most_peer_name) const;
  /// The same; empty if there is no such member.
  std::string text_or_none(const char* name) const;

  /// Returns a whole number. One out of range would become another one unnoticed.
  template <class T>
  T number(const char* name, T least = std::numeric_limits<T>::min(),
           T most = std::numeric_limits<T>::max()) const {
    const auto& x = at(name);
    const auto fits = [=](auto v) {
      return std::in_range<T>(v) && static_cast<T>(v) >= least && static_cast<T>(v) <= most;
    };
    if (x.is_number_unsigned() ? fits(x.get<std::uint64_t>())
                               : x.is_number_integer() && fits(x.get<std::int64_t>()))
      return x.get<T>();
    throw_wrong(name,
                "a whole number from " + std::to_string(least) + " to " + std::to_string(most));
  }
  /// @units ns
  std::int64_t time(const char* name) const;

  void need_array(const char* name) const;
  void need_object_or_null(const char* name) const;

private:
  [[noreturn]] void throw_wrong(const char* name, const std::string& needed) const;

  std::vector<std::pair<std::string, json>> all_;
};

/// Returns a JSON value as printable text.
std::string text_of(const nlohmann::json& x);

} // namespace flight
