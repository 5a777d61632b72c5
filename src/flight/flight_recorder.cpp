#include "flight/flight_recorder.hpp"

#include "foundation/log.hpp"
#include "foundation/never_destroyed.hpp"
#include "foundation/system_call.hpp"
#include "foundation/write_file.hpp"
#include "lane/lane.hpp"
#include "operation/operation.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <set>
#include <string_view>
#include <utility>

#include <unistd.h>

namespace troupe::detail {

namespace {

/// How many causes are remembered. A remembered cause is not written again.
constexpr std::size_t causes_kept = 64;

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

/// Returns whether `x` is a failure of its own: not an end that was requested, and not a
/// consequence of the end of the runtime.
bool is_cause(const caf::error& x, bool everything_ended) {
  auto code = code_of(x);
  if (!x || code == errc::unavailable || code == errc::device_reset)
    return false;
  return !everything_ended || severity_of(x) == severity::process;
}

/// Writes the file, whole or not at all.
caf::error write_file(const std::string& path, const std::string& text) {
  const no_file_size_signal guard;
  const auto why = replace_file(path, text);
  if (!why)
    return {};
  if (!why->left.empty())
    log(log_level::warning, "cannot remove " + why->left);
  failure result{.code = errc::unavailable, .detail = "cannot write the flight record " + path};
  if (*why->api == '\0') {
    result.detail += ": " + to_string(*why);
  } else {
    result.api = why->api;
    result.native_name = system_text(why->code);
    result.native_code = why->code;
  }
  return make_error(std::move(result));
}

/// A request without a part on a lane: the thread that writes completes it, or its deadline does.
class record_operation final : public operation_of<nothing> {
public:
  record_operation() : operation_of("record_flight", 0) {}
  bool needs_devices() const noexcept override { return false; }
};

using part_key = std::pair<std::uint64_t, std::uint32_t>;

part_key key_of(const flight_entry& x) { return {x.operation, x.part}; }

/// Merges records. A ring has the parts that its lane has issued, unless newer ones have
/// overwritten them; the other parts are in `open`.
std::vector<flight_entry> merged(const std::vector<flight_entry>& ring,
                                 const std::vector<flight_entry>& open) {
  std::set<part_key> known;
  for (auto& x : ring)
    known.insert(key_of(x));
  std::vector<flight_entry> result;
  auto add = [&](auto when) {
    for (auto& x : open)
      if (when(x.progress.state) && !known.contains(key_of(x)))
        result.push_back(x);
  };
  auto is_issuing = [](flight_state x) { return x == flight_state::issuing; };
  auto waits = [](flight_state x) { return x >= flight_state::not_issued; };
  add([&](flight_state x) { return !is_issuing(x) && !waits(x); });
  result.insert(result.end(), ring.begin(), ring.end());
  add(is_issuing);
  add(waits);
  return result;
}

/// The records of all actor systems that are being written because something ended.
struct records_on_their_way {
  std::mutex mutex;
  std::condition_variable none;
  std::size_t number = 0;
};

records_on_their_way& on_their_way() { return never_destroyed<records_on_their_way>(); }

class on_its_way {
public:
  on_its_way() {
    auto& all = on_their_way();
    std::lock_guard lock{all.mutex};
    ++all.number;
  }
  ~on_its_way() {
    auto& all = on_their_way();
    std::lock_guard lock{all.mutex};
    if (--all.number == 0)
      all.none.notify_all();
  }
  on_its_way(const on_its_way&) = delete;
  on_its_way& operator=(const on_its_way&) = delete;
};

} // namespace

bool flight_recorder::wait_written(clock::time_point until) {
  auto& all = on_their_way();
  std::unique_lock lock{all.mutex};
  return all.none.wait_until(lock, until, [&] { return all.number == 0; });
}

flight_snapshot flight_recorder::take() const {
  using std::chrono::system_clock;
  flight_snapshot result;
  result.host = host_name();
  result.process = ::getpid();
  std::map<const lane*, std::vector<flight_entry>> open;
  owner_.admissions().drain(); // else enqueued submissions belong to no operation
  // Read the open operations first: if a lane issues one meanwhile, its ring has it when read.
  owner_.deadlines().for_each([&](operation& op) {
    auto records = op.open_records();
    for (auto& x : records) {
      auto* on = op.parts()[x.part].on;
      if (x.progress.state == flight_state::issuing)
        x.issued_at = on->issuing_since();
      open[on].push_back(x);
    }
  });
  for (auto& x : owner_.lanes()) {
    auto& state = x->state();
    result.devices.push_back({state.ordinal(), state.generation(), state.phase(), state.reason(),
                              x->record().holder(), merged(x->record().read(), open[x.get()])});
  }
  result.taken_at = clock::now().time_since_epoch().count();
  result.unix_time =
      std::chrono::duration_cast<std::chrono::nanoseconds>(system_clock::now().time_since_epoch())
          .count();
  return result;
}

std::string flight_recorder::file_for(const caf::error& cause) {
  if (options_.path.empty() || !is_cause(cause, owner_.ended()))
    return {};
  auto text = describe(cause);
  std::lock_guard lock{mutex_};
  if (std::find(causes_.begin(), causes_.end(), text) != causes_.end())
    return {};
  causes_.push_back(std::move(text));
  if (causes_.size() > causes_kept)
    causes_.pop_front();
  auto result = options_.path;
  constexpr std::string_view process = "%p";
  if (auto at = result.find(process); at != std::string::npos)
    result.replace(at, process.size(), std::to_string(::getpid()));
  written_ = std::min(written_ + 1, std::max<std::size_t>(options_.files, 1));
  if (written_ > 1)
    result += "." + std::to_string(written_);
  return result;
}

void flight_recorder::on_end(const caf::error& cause) noexcept {
  try {
    auto path = file_for(cause);
    auto keep = owner_.weak_from_this().lock();
    if (path.empty() || !keep)
      return;
    auto now = clock::now().time_since_epoch().count();
    owner_.workers().run([this, keep = std::move(keep), path = std::move(path), cause, now,
                          written = std::make_shared<on_its_way>()] {
      auto x = take();
      x.cause = cause;
      x.caused_at = now;
      if (auto error = write_file(path, to_json(x)))
        log(log_level::error, "a flight record is lost", error);
      else
        log(log_level::info, "the flight record is " + path);
    });
  } catch (const std::exception& e) {
    log(log_level::error, std::string{"a flight record is lost: "} + e.what());
  }
}

std::shared_ptr<operation_of<nothing>> flight_recorder::write(const std::string& path,
                                                              clock::time_point deadline) {
  auto answer = std::make_shared<record_operation>();
  answer->deadline = deadline;
  auto refuse = [&](errc code, const char* why) {
    answer->answer(make_error(answer->describe(code, why)));
    return answer;
  };
  if (path.empty())
    return refuse(errc::invalid_argument, "a flight record needs the name of a file");
  if (deadline <= clock::now())
    return refuse(errc::deadline_exceeded, "its deadline was over before it began");
  auto owner = owner_.shared_from_this();
  owner->deadlines().add(*answer);
  answer->on_answer([owner = owner_.weak_from_this(), of = std::weak_ptr{answer}] {
    auto alive = owner.lock();
    auto x = of.lock();
    if (alive && x)
      alive->deadlines().remove(*x);
  });
  owner->workers().run(
      [this, owner, answer, path] { answer->answer(write_file(path, to_json(take()))); });
  return answer;
}

} // namespace troupe::detail
