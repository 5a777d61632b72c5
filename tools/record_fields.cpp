#include "record_fields.hpp"

#include <algorithm>

namespace flight {

using nlohmann::json;
using troupe::detail::peer_text;

namespace {

/// A member is found by comparing names. So there may not be many.
constexpr std::size_t most_members = 100;

} // namespace

void record_fields::add(const std::string& name, json x) {
  if (all_.size() == most_members)
    throw bad_record("an object has more than " + std::to_string(most_members) + " members");
  all_.emplace_back(name, std::move(x));
}

const json* record_fields::find(std::string_view name) const {
  const auto i =
      std::find_if(all_.rbegin(), all_.rend(), [&](auto& one) { return one.first == name; });
  return i == all_.rend() ? nullptr : &i->second;
}

const json& record_fields::at(const char* name) const {
  if (const auto* x = find(name))
    return *x;
  throw bad_record("\"" + std::string{name} + "\" is missing");
}

std::string record_fields::text(const char* name, std::size_t most) const {
  const auto& x = at(name);
  if (!x.is_string())
    throw_wrong(name, "a text");
  return peer_text(x.get_ref<const std::string&>(), most);
}

std::string record_fields::text_or_null(const char* name, std::size_t most) const {
  return at(name).is_null() ? "" : text(name, most);
}

std::string record_fields::text_or_none(const char* name) const {
  return find(name) == nullptr ? "" : text(name);
}

std::int64_t record_fields::time(const char* name) const {
  constexpr std::int64_t most = std::int64_t{1} << 62; // so that differences do not overflow
  return number<std::int64_t>(name, 0, most);
}

void record_fields::need_array(const char* name) const {
  if (!at(name).is_array())
    throw_wrong(name, "an array");
}

void record_fields::need_object_or_null(const char* name) const {
  if (const auto& x = at(name); !x.is_object() && !x.is_null())
    throw_wrong(name, "an object");
}

void record_fields::throw_wrong(const char* name, const std::string& needed) const {
  const auto& x = at(name);
  throw bad_record("\"" + std::string{name} + "\" is " +
                   (x.is_structured() ? std::string{"an "} + x.type_name() : text_of(x)) +
                   ", and not " + needed);
}

std::string text_of(const json& x) {
  return peer_text(x.dump(-1, ' ', false, json::error_handler_t::replace));
}

} // namespace flight
