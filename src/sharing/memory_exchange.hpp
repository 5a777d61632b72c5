/// Exchange of device memory between two processes with the same device: a worker's program, and
/// the parent that owns the device. Each lends memory of its handles and borrows from the other.
#pragma once

#include "runtime/runtime.hpp"
#include "sharing/lend_operation.hpp"
#include "sharing/memory_note.hpp"
#include <troupe/backend.hpp>
#include <troupe/gpu_ref.hpp>
#include <troupe/launch.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace troupe::detail {

/// The exchange of one runtime. @thread any
class memory_exchange final : public runtime_listener {
public:
  explicit memory_exchange(runtime& owner);

  /// Keeps the memory for `grace`, or until it is claimed. Returns a token for it.
  /// @errors errc::stale_ref; errc::invalid_argument: the memory of another actor system;
  ///         errc::unavailable
  caf::expected<gpu_token> offer(const any_gpu_ref& ref, std::chrono::nanoseconds grace);

  using answer = std::shared_ptr<operation_of<any_gpu_ref>>;
  /// Returns the memory that `token` names, as a handle on the device `on`.
  answer claim(const std::shared_ptr<device_state>& on, const gpu_token& token, access_mode mode,
               clock::time_point deadline);

  /// Handles `note`, sent by the process that has device `ordinal`.
  void on_memory_note(int ordinal, std::span<const std::byte> note) override;
  /// Drops claims, loans and offers on a device that closed because of `why`. Its memory is gone,
  /// and perhaps the process that had it.
  void on_devices_closed(const caf::error& why) override;
  /// Takes back the memory that the lost processes had. Marks what they could write, except memory
  /// that they have left complete.
  void on_lost_work_over(int ordinal) override;
  /// Stops all notes to other processes. Called first when the runtime closes.
  void on_close() noexcept override;

private:
  /// A claim that waits for the other process's reply.
  struct claimed {
    answer to;
    std::shared_ptr<device_state> on;
    std::uint64_t incarnation = 0; ///< of the process that is asked
    gpu_token token;
    access_mode mode = access_mode::read;
  };
  /// Memory that the other process has, or is about to get.
  struct lent {
    std::shared_ptr<lend_operation> how;
    std::unique_ptr<memory_lease> lease; ///< set once the memory is lent
    std::uint64_t incarnation = 0;       ///< of the process that has it
    caf::error loss = {};                ///< why that process ended
    /// Where the process notes what it writes; null: it does not.
    std::shared_ptr<const shared_word> word = {};
  };
  /// A claim of memory that a lost process had. It waits until the work of that process is over.
  struct postponed {
    memory_note claim;
    std::uint64_t incarnation = 0; ///< of the process that claims
  };
  /// The claims that lost processes of one device had.
  struct lost_loans {
    std::vector<lent> all;
    std::size_t ending = 0; ///< threads that end loans, which are not in `all` any more
    std::vector<postponed> waiting;
  };
  struct offered {
    any_gpu_ref what;
    std::uint64_t number = 0;
    std::uint64_t timer = 0;
  };
  /// The borrower's device ordinal, and the claim's number in its process.
  using loan = std::pair<int, std::uint64_t>;
  using job = std::function<void(memory_exchange&)>;
  /// Jobs for one process. They run in order and one at a time, because they may block.
  struct post {
    std::deque<job> jobs;
    bool busy = false;
  };

  answer resolve(answer to, const device_state& on, const gpu_token& token);
  bool is_claimed(std::uint64_t number);
  /// Removes and returns the claim. None: it is answered, or about to be.
  std::optional<claimed> take_claim(std::uint64_t number);
  void borrow(const memory_note& note);
  void give_back(int device, std::uint64_t number, std::vector<unreadable_range> unreadable);
  /// `of_process`: incarnation of the process that claims; none: the present one.
  void lend(int to, const memory_note& note, std::optional<std::uint64_t> of_process = {});
  /// Lets a claim of memory that a lost process had wait. Returns false if it need not.
  bool postpone(int to, const memory_note& note, const buffer& memory, std::uint64_t incarnation);
  bool forget_postponed(loan which);
  void lend_over(loan which, const lend_operation& how);
  std::optional<lent> take_lent(loan which);
  void take_back(loan which, const std::vector<unreadable_range>& unreadable);
  void take_offer(const any_gpu_ref& what);
  void end_offer(const buffer* memory, std::uint64_t number);
  void refuse(int to, std::uint64_t number, caf::error why);
  void tell_soon(int ordinal, memory_note note);
  void do_soon(int ordinal, job what);
  void work_off(int ordinal);
  static bool has_ended(const lent& x) noexcept;
  bool is_crowded(int ordinal);
  template <class F> auto later(F f);

  runtime& owner_;
  std::mutex mutex_;
  bool closed_ = false;
  std::uint64_t last_number_;
  std::map<std::uint64_t, claimed> claims_;
  std::map<int, std::map<std::uint64_t, lent>> lent_; ///< by borrower and number of the claim
  std::map<int, lost_loans> lost_;                    ///< by borrower
  std::multimap<const buffer*, offered> offers_;
  std::map<int, post> posts_;
};

} // namespace troupe::detail
