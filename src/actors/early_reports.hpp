/// The reports of programs that come before the first subscriber.
#pragma once

#include <troupe/detail/caf_compat.hpp>
#include <troupe/worker_program.hpp>

#include <caf/all.hpp>

#include <cstddef>
#include <deque>
#include <utility>
#include <variant>

namespace troupe::detail {

/// Keeps the reports and ends of programs that come before their world's first subscriber, for it:
/// the newest ones.
class early_reports {
public:
  static constexpr std::size_t most_bytes = std::size_t{1} << 20;

  void keep(const program_report& x) { keep(entry{x}, x.bytes.size()); }
  void keep(const program_ended& x) { keep(entry{x}, 0); }

  /// Sends all to the first subscriber. From then on nothing is kept.
  template <class Self> void hand_over(Self* self, const caf::actor& first) {
    for (auto& x : std::exchange(all_, {}))
      std::visit([&](auto& what) { send(self, first, std::move(what)); }, x.what);
    over_ = true;
  }

private:
  using entry = std::variant<program_report, program_ended>;
  struct kept {
    entry what;
    std::size_t size_bytes = 0;
  };

  void keep(entry what, std::size_t content_bytes) {
    if (over_)
      return;
    const auto size_bytes = sizeof(kept) + content_bytes;
    all_.push_back({std::move(what), size_bytes});
    size_bytes_ += size_bytes;
    while (size_bytes_ > most_bytes) {
      size_bytes_ -= all_.front().size_bytes;
      all_.pop_front();
    }
  }

  std::deque<kept> all_;
  std::size_t size_bytes_ = 0;
  bool over_ = false;
};

} // namespace troupe::detail
