#include "flight_report.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <ctime>
#include <iterator>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

namespace flight {

namespace {

using parts = std::vector<const part*>;

/// @units ns to s
std::string seconds(std::int64_t x) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.6f s", static_cast<double>(x) / 1e9);
  return text.data();
}

std::string blanks(const std::string& beside, std::size_t width) {
  return std::string(width - std::min(beside.size(), width), ' ');
}
std::string left(const std::string& x, std::size_t width) { return x + blanks(x, width); }
std::string right(const std::string& x, std::size_t width) { return blanks(x, width) + x; }

std::string list(const std::vector<int>& x) {
  std::string result;
  for (auto& one : x)
    result += (result.empty() ? "" : ", ") + std::to_string(one);
  return result;
}

std::string of_type(const part& x) {
  return x.dtype.empty() ? "" : " (" + std::to_string(x.count) + " x " + x.dtype + ")";
}

/// Returns when the part reached its current state.
std::int64_t since(const part& x) {
  for (auto time : {x.over, x.started, x.issued})
    if (time != 0)
      return time;
  return x.admitted;
}

bool earlier(const part* a, const part* b) {
  return std::pair{a->admitted, a->operation} < std::pair{b->admitted, b->operation};
}

/// Finds devices and their unfinished work. Each rank of each world asks for them.
class device_directory {
public:
  explicit device_directory(const record& x) {
    for (auto& one : x.devices) {
      auto& at = devices_.try_emplace(one.ordinal, one_device{&one, {}}).first->second;
      for (auto& p : one.parts)
        if (!p.is_over()) {
          unfinished_.try_emplace(p.operation, &p);
          insert(at.oldest, p);
        }
    }
  }

  const device& device_of(const part& p) const { return *devices_.at(p.device).self; }
  /// Returns the oldest unfinished part of another operation on the device of `p`; null if none
  /// is older than `p`.
  const part* oldest_before(const part& p) const {
    for (auto* x : devices_.at(p.device).oldest)
      if (x != nullptr && x->operation != p.operation)
        return earlier(x, &p) ? x : nullptr;
    return nullptr;
  }
  /// Returns an unfinished part; null if there is none.
  const part* unfinished(std::uint64_t operation) const {
    const auto i = unfinished_.find(operation);
    return i == unfinished_.end() ? nullptr : i->second;
  }

private:
  using two_parts = std::array<const part*, 2>; // of two operations, the older one first
  struct one_device {
    const device* self;
    two_parts oldest;
  };

  static void insert(two_parts& to, const part& p) {
    if (to[0] == nullptr || earlier(&p, to[0])) {
      if (to[0] != nullptr && to[0]->operation != p.operation)
        to[1] = to[0];
      to[0] = &p;
    } else if (p.operation != to[0]->operation && (to[1] == nullptr || earlier(&p, to[1]))) {
      to[1] = &p;
    }
  }

  std::map<int, one_device> devices_; // by ordinal
  std::unordered_map<std::uint64_t, const part*> unfinished_;
};

/// Report on the ranks of one world.
class world_report {
public:
  world_report(const record& x, const device_directory& all_devices, std::uint64_t world, parts all)
      : x_(x), all_devices_(all_devices), world_(world), all_(std::move(all)) {
    for (auto* p : all_)
      device_of_[p->rank] = p->device;
    choose_operation();
  }

  std::string text() const {
    auto name = x_.worlds.find(world_);
    auto result = "world " + std::to_string(world_) +
                  (name != x_.worlds.end() ? " \"" + name->second + "\"" : std::string{});
    if (in_question_.empty())
      return result + ": every recorded operation is over; no rank is behind.\n" + table();
    auto& any = *in_question_.begin()->second;
    result += ", epoch " + std::to_string(any.epoch) + ": ";
    return result + verdict() + "\n" + table();
  }

private:
  /// Chooses the operation in question: the one that the cause names, or else the oldest that is
  /// not over or that the cause ended.
  void choose_operation() {
    const part* chosen = nullptr;
    for (auto* p : all_)
      if (x_.why && x_.why->operation == p->operation)
        chosen = p;
    if (chosen == nullptr)
      for (auto* p : all_)
        if ((!p->is_over() || (x_.why && p->error == x_.why->code)) &&
            (chosen == nullptr || earlier(p, chosen)))
          chosen = p;
    if (chosen == nullptr)
      return;
    for (auto* p : all_)
      if (p->operation == chosen->operation)
        in_question_[p->rank] = p;
  }

  /// Returns the progress of a rank, as of the failure if the record has one for this operation.
  state progress(const part& p) const {
    if (x_.why && x_.why->operation == p.operation) {
      auto rank = static_cast<std::size_t>(p.rank);
      if (rank < x_.why->parts.size()) {
        auto& then = x_.why->parts[rank];
        for (auto s : {state::issued, state::started, state::done})
          if (then == to_string(s))
            return s;
        if (then == to_string(state::not_issued)) // the lane may have been in the call
          return p.issued != 0 && p.issued <= x_.why->time ? state::issuing
                                                           : std::min(p.at, state::not_issued);
      }
    }
    if (p.at == state::failed)
      return p.started != 0 ? state::started : state::issued;
    return p.at;
  }

  /// Returns the title of the operation in question, from a rank that knows its details.
  std::string title() const {
    for (auto& [rank, p] : in_question_)
      if (!p->dtype.empty())
        return p->title() + of_type(*p);
    return in_question_.begin()->second->title();
  }

  std::string verdict() const {
    std::map<state, std::vector<int>> ranks;
    for (auto& [rank, p] : in_question_)
      ranks[progress(*p)].push_back(rank);
    auto& [least, behind] = *ranks.begin();
    if (ranks.size() == 1)
      return "all ranks have come equally far in " + title() + ": " + to_string(least) + ".";
    std::string result;
    for (auto rank : behind)
      result += (result.empty() ? "rank " : ", rank ") + std::to_string(rank) + " (device " +
                std::to_string(device_of_.at(rank)) + ")";
    result += behind.size() == 1 ? " is" : " are";
    result += " behind in " + title() + ": " + to_string(least);
    for (auto i = std::next(ranks.begin()); i != ranks.end(); ++i)
      result += std::string{i == std::next(ranks.begin()) ? ", while " : ", and "} +
                (i->second.size() == 1 ? "rank " : "ranks ") + list(i->second) +
                (i->second.size() == 1 ? " is " : " are ") + to_string(i->first);
    result += ".";
    for (auto rank : behind)
      result += obstacle(*in_question_.at(rank));
    return result;
  }

  /// Returns the obstacle of `p`, as far as the record shows it.
  std::string obstacle(const part& p) const {
    auto& device = all_devices_.device_of(p);
    if (p.at == state::not_called)
      return {};
    auto where = "\n  device " + std::to_string(p.device);
    if (p.over == 0 && p.at == state::issuing)
      return where + " has been inside the call that issues it for " + seconds(x_.time - p.issued) +
             ".";
    if (const auto* first = all_devices_.oldest_before(p))
      return where + " is at " + first->title() +
             ", which comes before it: " + to_string(first->at) + " for " +
             seconds(x_.time - since(*first)) + ".";
    if (p.issued == 0 && device.next_waits_for != 0)
      return where + " waits for #" + std::to_string(device.next_waits_for) + waited_for(device);
    if (device.phase != "ready")
      return where + " is " + device.phase + (device.reason.empty() ? "" : ": " + device.reason) +
             ".";
    if (!p.error.empty() && p.issued == 0)
      return where + " did not issue it: " + p.error + ".";
    return {};
  }

  std::string waited_for(const device& on) const {
    const auto* p = all_devices_.unfinished(on.next_waits_for);
    return p == nullptr ? "."
                        : " (" + p->verb + "), which on device " + std::to_string(p->device) +
                              " is " + to_string(p->at) + ".";
  }

  /// Returns a table of each rank's last work.
  std::string table() const {
    std::string result;
    auto line = [&](const std::array<std::string, 6>& cells) {
      result += "  " + right(cells[0], 4) + "  " + right(cells[1], 6) + "  " + left(cells[2], 22) +
                " " + left(cells[3], 14) + "  " + left(cells[4], 22) + " " + cells[5] + "\n";
    };
    line({"rank", "device", "last done", "", "then", ""});
    const auto latest = latest_of_ranks();
    for (auto& [rank, device] : device_of_) {
      std::array<std::string, 6> cells{
          std::to_string(rank), std::to_string(device), "-", "", "-", ""};
      const auto& [last, next] = latest.at(rank);
      if (last != nullptr) {
        cells[2] = last->title();
        cells[3] = ago(last->over);
      }
      if (next != nullptr) {
        cells[4] = next->title();
        cells[5] = std::string{to_string(next->at)} +
                   (next->error.empty() ? "" : ", " + next->error) + ", " + ago(since(*next));
      }
      line(cells);
    }
    return result;
  }

  std::string ago(std::int64_t time) const { return seconds(time - x_.time); }

  /// The last completed part of a rank, and the operation in question or the first part that is
  /// not over. Null: none.
  struct latest_parts {
    const part* last = nullptr;
    const part* next = nullptr;
  };

  std::map<int, latest_parts> latest_of_ranks() const {
    std::map<int, latest_parts> result;
    for (auto* p : all_) {
      auto& [last, next] = result[p->rank];
      if (p->at == state::done && (last == nullptr || p->over > last->over))
        last = p;
      if (!p->is_over() && (next == nullptr || earlier(p, next)))
        next = p;
    }
    for (auto& [rank, p] : in_question_)
      result[rank].next = p;
    return result;
  }

  const record& x_;
  const device_directory& all_devices_;
  const std::uint64_t world_;
  const parts all_;
  std::map<int, int> device_of_; // by rank
  std::map<int, const part*> in_question_;
};

/// Returns the unfinished work of devices outside of worlds.
std::string other_work(const record& x) {
  std::string result;
  for (auto& device : x.devices)
    for (auto& p : device.parts)
      if (p.world == 0 && !p.is_over())
        result += "device " + std::to_string(device.ordinal) + ": " + p.title() + of_type(p) +
                  " is not over: " + to_string(p.at) + " for " + seconds(x.time - since(p)) + ".\n";
  return result;
}

std::string header(const record& x) {
  auto time = static_cast<std::time_t>(x.unix_time / 1'000'000'000);
  std::array<char, 32> when{};
  std::tm utc{};
  if (gmtime_r(&time, &utc) != nullptr)
    std::strftime(when.data(), when.size(), "%Y-%m-%d %H:%M:%S", &utc);
  std::size_t count = 0;
  for (auto& device : x.devices)
    count += device.parts.size();
  auto result = "flight record of process " + std::to_string(x.process) + " on " + x.host + ", " +
                when.data() + " UTC: " + std::to_string(count) + " parts of operations on " +
                std::to_string(x.devices.size()) + " devices\n";
  return result + "cause: " + (x.why ? x.why->text : "none; it was requested") + "\n";
}

} // namespace

std::string report(const record& x) {
  std::map<std::uint64_t, parts> worlds;
  for (auto& device : x.devices)
    for (auto& p : device.parts)
      if (p.world != 0)
        worlds[p.world].push_back(&p);
  const device_directory all_devices{x};
  auto result = header(x);
  for (auto& [id, all] : worlds)
    result += "\n" + world_report{x, all_devices, id, std::move(all)}.text();
  if (auto others = other_work(x); !others.empty())
    result += "\n" + others;
  return result;
}

} // namespace flight
