#include "record.hpp"

#include "record_fields.hpp"
#include "record_file.hpp"

#include <nlohmann/json.hpp>

#include <array>
#include <cstddef>
#include <istream>
#include <string>
#include <utility>
#include <vector>

namespace flight {

namespace {

using nlohmann::json;
using troupe::detail::most_peer_text;

constexpr const char* format_name = "troupe flight record";
constexpr int format_version = 1;
constexpr int most_rank = 4095;
constexpr int most_device = 1023;
/// The largest text of a cause, which lists all ranks. @units bytes
constexpr std::size_t most_cause = 64 << 10;
/// The largest number of buffers of an operation. The library writes 4.
constexpr std::size_t most_refs = 64;

constexpr std::array<std::pair<const char*, state>, 7> states{{{"not called", state::not_called},
                                                               {"not issued", state::not_issued},
                                                               {"issuing", state::issuing},
                                                               {"issued", state::issued},
                                                               {"started", state::started},
                                                               {"done", state::done},
                                                               {"failed", state::failed}}};

state state_of(const std::string& name) {
  for (auto& [text, x] : states)
    if (name == text)
      return x;
  throw bad_record("\"" + name + "\" is no state of an operation");
}

/// The objects and arrays of a record. Others are not of interest.
enum class scope {
  file,
  root,
  cause,
  cause_parts,
  worlds,
  world,
  devices,
  device,
  operations,
  operation,
  refs,
  ref
};

struct scope_rule {
  scope outer;
  const char* name; ///< in `outer`; empty: an element
  bool is_array;
  scope inner;
};

constexpr std::array<scope_rule, 11> scope_rules{
    {{scope::file, "", false, scope::root},
     {scope::root, "cause", false, scope::cause},
     {scope::cause, "parts", true, scope::cause_parts},
     {scope::root, "worlds", true, scope::worlds},
     {scope::worlds, "", false, scope::world},
     {scope::root, "devices", true, scope::devices},
     {scope::devices, "", false, scope::device},
     {scope::device, "operations", true, scope::operations},
     {scope::operations, "", false, scope::operation},
     {scope::operation, "refs", true, scope::refs},
     {scope::refs, "", false, scope::ref}}};

/// Builds a record from the events of the parser. Memory is taken for the record, and for the
/// members of one object of each kind.
class record_builder : public nlohmann::json_sax<json> {
public:
  bool null() override { return add({}); }
  bool boolean(bool x) override { return add(x); }
  bool number_integer(number_integer_t x) override { return add(x); }
  bool number_unsigned(number_unsigned_t x) override { return add(x); }
  bool number_float(number_float_t x, const string_t&) override { return add(x); }
  bool string(string_t& x) override { return add(std::move(x)); }
  bool binary(binary_t&) override { return add({}); } // not in JSON text
  bool key(string_t& x) override {
    if (unknown_ == 0)
      key_ = std::move(x);
    return true;
  }
  bool start_object(std::size_t) override { return open(false); }
  bool start_array(std::size_t) override { return open(true); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool parse_error(std::size_t, const std::string&, const json::exception& why) override {
    syntax_error = why.what();
    return false;
  }

  /// Returns the record of a file that was parsed to its end.
  record take(const std::string& path) {
    const auto* format = root_.find("format");
    if (format == nullptr || *format != format_name)
      throw bad_record(path + " is JSON, but no flight record of troupe");
    const auto* version = root_.find("version");
    if (version == nullptr || *version != format_version)
      throw bad_record(path + " has version " + (version == nullptr ? "none" : text_of(*version)) +
                       " of the form; this program reads version " +
                       std::to_string(format_version));
    guarded([this] { finish_record(); });
    if (!wrong_.empty())
      throw bad_record(path + " is no right flight record: " + wrong_);
    return std::move(record_);
  }

  std::string syntax_error; ///< empty: none

private:
  scope here() const { return scopes_.empty() ? scope::file : scopes_.back(); }

  /// Calls a function that may throw `bad_record`. The first such error is kept, since the file may
  /// turn out to be no flight record.
  template <class Function> void guarded(Function f) {
    try {
      f();
    } catch (const bad_record& e) {
      if (wrong_.empty())
        wrong_ = e.what();
    }
  }

  /// After an error the members of the root are still of interest.
  bool goes_on() const { return wrong_.empty() || here() == scope::root; }

  bool open(bool is_array) {
    if (unknown_ == 0) {
      for (auto& rule : scope_rules)
        if (rule.outer == here() && key_ == rule.name && rule.is_array == is_array) {
          add(is_array ? json::array() : json::object());
          scopes_.push_back(rule.inner);
          begin(rule.inner);
          key_.clear();
          return true;
        }
      add(is_array ? json::array() : json::object());
    }
    ++unknown_;
    return true;
  }

  bool close() {
    key_.clear();
    if (unknown_ != 0) {
      --unknown_;
      return true;
    }
    if (wrong_.empty())
      guarded([this] { finish(here()); });
    scopes_.pop_back();
    return true;
  }

  bool add(json x) {
    if (unknown_ == 0 && goes_on())
      guarded([&] { set(std::move(x)); });
    return true;
  }

  void begin(scope x) {
    if (auto* members = members_of(x))
      members->clear();
    if (x == scope::cause)
      cause_parts_.clear();
    if (x == scope::device)
      parts_.clear();
    if (x == scope::operation) {
      memory_.clear();
      refs_ = 0;
    }
  }

  /// Stores a value, or the beginning of an array or object.
  void set(json x) {
    if (auto* members = members_of(here()))
      members->add(key_, std::move(x));
    else if (here() == scope::cause_parts)
      add_cause_part(std::move(x));
    else if (here() != scope::file && !x.is_object())
      throw bad_record("an array has " + text_of(x) + " in place of an object");
  }

  record_fields* members_of(scope x) {
    switch (x) {
    case scope::root:
      return &root_;
    case scope::cause:
      return &cause_;
    case scope::world:
      return &world_;
    case scope::device:
      return &device_;
    case scope::operation:
      return &operation_;
    case scope::ref:
      return &ref_;
    default:
      return nullptr;
    }
  }

  void finish(scope x) {
    switch (x) {
    case scope::cause:
      return finish_cause();
    case scope::world:
      record_.worlds.emplace(world_.number<std::uint64_t>("id"), world_.text("name"));
      return;
    case scope::device:
      return finish_device();
    case scope::operation:
      return finish_operation();
    case scope::ref:
      return finish_ref();
    default:
      return;
    }
  }

  void add_cause_part(json x) {
    if (cause_parts_.size() > most_rank)
      throw bad_record("\"cause\" has more than " + std::to_string(most_rank + 1) + " parts");
    record_fields one;
    one.add("parts", std::move(x));
    cause_parts_.push_back(one.text("parts"));
  }

  void finish_cause() {
    cause_.need_array("parts");
    record_.why = cause{cause_.text("text", most_cause), cause_.text("code"), cause_.time("time"),
                        cause_.number<std::uint64_t>("operation"), std::move(cause_parts_)};
  }

  void finish_ref() {
    if (++refs_ > most_refs)
      throw bad_record("an operation has more than " + std::to_string(most_refs) + " refs");
    memory_ += (memory_.empty() ? "" : ", ") + ref_.text("access") + " buffer " +
               std::to_string(ref_.number<std::uint64_t>("buffer")) + " [" +
               std::to_string(ref_.number<std::uint64_t>("begin")) + ", " +
               std::to_string(ref_.number<std::uint64_t>("end")) + ")";
  }

  void finish_operation() {
    const auto& x = operation_;
    part result;
    result.operation = x.number<std::uint64_t>("operation");
    result.verb = x.text("verb");
    result.rank = x.number("rank", -1, most_rank);
    result.world = x.number<std::uint64_t>("world");
    result.epoch = x.number<std::uint64_t>("epoch");
    result.generation = x.number<std::uint64_t>("generation");
    result.count = x.number<std::uint64_t>("count");
    result.dtype = x.text_or_null("dtype");
    x.need_array("refs");
    result.memory = memory_;
    result.stream = x.text("stream");
    result.admitted = x.time("admitted");
    result.issued = x.time("issued");
    result.started = x.time("started");
    result.over = x.time("over");
    result.at = state_of(x.text("state"));
    result.way = x.text_or_none("way");
    result.error = x.text_or_none("error");
    if (x.find("native_code") != nullptr)
      result.native_code = x.number<int>("native_code");
    parts_.push_back(std::move(result));
  }

  void finish_device() {
    device result;
    result.ordinal = device_.number("device", 0, most_device);
    result.generation = device_.number<std::uint64_t>("generation");
    result.phase = device_.text("phase");
    result.reason = device_.text_or_null("reason", most_peer_text);
    result.next_waits_for = device_.number<std::uint64_t>("next_waits_for");
    device_.need_array("operations");
    for (auto& x : parts_)
      x.device = result.ordinal;
    result.parts = std::move(parts_);
    record_.devices.push_back(std::move(result));
  }

  void finish_record() {
    record_.host = root_.text("host");
    record_.process = root_.number<std::int64_t>("process", 0);
    record_.time = root_.time("time");
    record_.unix_time = root_.time("unix_time");
    root_.need_object_or_null("cause");
    root_.need_array("worlds");
    root_.need_array("devices");
  }

  std::vector<scope> scopes_;
  std::size_t unknown_ = 0; // depth within an array or object that is not of interest
  std::string key_;         // of the next value; empty: an element
  std::string wrong_;       // the first error; empty: none

  record_fields root_;
  record_fields cause_;
  record_fields world_;
  record_fields device_;
  record_fields operation_;
  record_fields ref_;
  std::vector<std::string> cause_parts_;
  std::vector<part> parts_; // of the device
  std::string memory_;      // of the operation
  std::size_t refs_ = 0;
  record record_;
};

} // namespace

const char* to_string(state x) { return states[static_cast<std::size_t>(x)].first; }

record read_record(const std::string& path) {
  record_file file{path};
  std::istream in{&file};
  record_builder builder;
  if (!json::sax_parse(in, &builder))
    throw bad_record(path + " is not JSON: " + builder.syntax_error);
  return builder.take(path);
}

} // namespace flight
