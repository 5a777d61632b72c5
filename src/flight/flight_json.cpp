#include "flight/flight_json.hpp"

#include "foundation/peer_text.hpp"
#include "operation/operation.hpp"
#include <troupe/collective.hpp>
#include <troupe/version.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <concepts>
#include <map>
#include <string_view>
#include <utility>

namespace troupe::detail {

namespace {

/// In the order of `stream_kind`.
constexpr auto stream_names =
    std::to_array<std::string_view>({"compute", "upload", "download", "memory", "lend", "user",
                                     "overlap", "collective", "peer", "none"});
static_assert(stream_names.size() == stream_count + 1);

/// Writes JSON values one after the other, and sets the commas.
class json_writer {
public:
  json_writer& open(char bracket) {
    separate();
    text_ += bracket;
    fresh_ = true;
    return *this;
  }
  json_writer& close(char bracket) {
    text_ += bracket;
    fresh_ = false;
    return *this;
  }
  json_writer& line() {
    broken_ = true;
    return *this;
  }
  json_writer& key(std::string_view name) {
    value(name);
    text_ += ':';
    fresh_ = true;
    return *this;
  }
  json_writer& value(std::integral auto x) {
    separate();
    std::array<char, 24> digits{};
    auto end = std::to_chars(digits.data(), digits.data() + digits.size(), x).ptr;
    text_.append(digits.data(), end);
    return *this;
  }
  json_writer& value(std::string_view x) {
    separate();
    text_ += '"';
    while (!x.empty()) {
      auto length = character_length(x);
      if (length == 0)
        text_ += '?';
      else if (length > 1)
        text_ += x.substr(0, length);
      else
        escape(x.front());
      x.remove_prefix(std::max<std::size_t>(length, 1));
    }
    text_ += '"';
    return *this;
  }
  json_writer& null() {
    separate();
    text_ += "null";
    return *this;
  }
  json_writer& member(std::string_view name, const auto& x) { return key(name).value(x); }

  std::string take() { return std::move(text_); }

private:
  void separate() {
    if (!fresh_)
      text_ += ',';
    if (broken_)
      text_ += '\n';
    fresh_ = broken_ = false;
  }
  void escape(char c) {
    constexpr std::string_view hex = "0123456789abcdef";
    auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      text_ += '\\';
      text_ += c;
    } else if (byte < 0x20) {
      text_ += "\\u00";
      text_ += hex[byte >> 4];
      text_ += hex[byte & 15];
    } else {
      text_ += c;
    }
  }

  std::string text_;
  bool fresh_ = true; // the next value needs no comma
  bool broken_ = false;
};

void write_cause(json_writer& to, const caf::error& why, std::int64_t when) {
  if (!why) {
    to.null();
    return;
  }
  auto x = failure_of(why).value_or(failure{});
  to.open('{').member("text", describe(why)).member("time", when);
  to.member("code", to_string(x.code)).member("severity", to_string(severity_of(x.code)));
  to.member("verb", x.verb).member("operation", x.operation).member("rank", x.rank);
  to.member("device", x.device).member("generation", x.generation).member("epoch", x.epoch);
  to.member("api", x.api).member("native_name", x.native_name).member("native_code", x.native_code);
  to.member("detail", x.detail).key("parts").open('[');
  for (auto p : x.parts)
    to.value(to_string(p));
  to.close(']').close('}');
}

void write_refs(json_writer& to, const flight_entry& x) {
  to.key("refs").open('[');
  for (std::size_t i = 0; i < x.refs; ++i) {
    to.open('{').member("buffer", x.ref[i].buffer);
    to.member("begin", x.ref[i].begin).member("end", x.ref[i].end);
    std::string_view access = x.ref_reads(i) ? x.ref_writes(i) ? "rw" : "r" : "w";
    to.member("access", access).close('}');
  }
  to.close(']');
  if (x.refs_left_out != 0)
    to.member("refs_left_out", x.refs_left_out);
}

void write_entry(json_writer& to, const flight_entry& x) {
  to.line().open('{').member("operation", x.operation).member("verb", std::string_view{x.verb});
  if (x.step != 0)
    to.member("step", x.step);
  to.member("part", x.part).member("rank", x.rank).member("world", x.world.id);
  to.member("epoch", x.epoch).member("generation", x.generation).member("count", x.count);
  to.key("dtype");
  if (x.type == flight_entry::no_type)
    to.null();
  else
    to.value(to_string(static_cast<dtype>(x.type)));
  if (x.way != flight_entry::no_way)
    to.member("way", to_string(static_cast<collective_way>(x.way)));
  write_refs(to, x);
  to.member("stream", stream_names[std::min<std::size_t>(x.stream, stream_count)]);
  to.member("admitted", x.admitted_at).member("issued", x.issued_at);
  to.member("started", x.started_at).member("over", x.over_at);
  to.member("state", to_string(x.progress.state));
  if (x.progress.reached != 0)
    to.member("reached", x.progress.reached);
  if (x.progress.error != errc{})
    to.member("error", to_string(x.progress.error));
  if (x.progress.native_code != 0)
    to.member("native_code", x.progress.native_code);
  to.close('}');
}

void write_worlds(json_writer& to, const flight_snapshot& x) {
  std::map<std::uint64_t, std::string_view> names;
  for (auto& device : x.devices)
    for (auto& entry : device.operations)
      if (entry.world.id != 0)
        names.emplace(entry.world.id, entry.world.name.data());
  to.line().key("worlds").open('[');
  for (auto& [id, name] : names)
    to.open('{').member("id", id).member("name", name).close('}');
  to.close(']');
}

} // namespace

std::string to_json(const flight_snapshot& x) {
  json_writer to;
  to.open('{').member("format", std::string_view{"troupe flight record"});
  to.member("version", flight_format_version);
  to.member("library", std::string_view{version_string});
  to.line().member("host", std::string_view{x.host}).member("process", x.process);
  to.member("time", x.taken_at).member("unix_time", x.unix_time);
  to.line().key("cause");
  write_cause(to, x.cause, x.caused_at);
  write_worlds(to, x);
  to.line().key("devices").open('[');
  for (auto& device : x.devices) {
    to.line().open('{').member("device", device.ordinal).member("generation", device.generation);
    to.member("phase", to_string(device.phase)).key("reason");
    if (device.reason)
      to.value(std::string_view{describe(device.reason)});
    else
      to.null();
    to.member("next_waits_for", device.holder).key("operations").open('[');
    for (auto& entry : device.operations)
      write_entry(to, entry);
    to.close(']').close('}');
  }
  to.close(']').close('}');
  auto text = to.take();
  text += '\n';
  return text;
}

} // namespace troupe::detail
