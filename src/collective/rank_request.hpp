/// The request of one rank for an operation that all of its ranks request, and the request for an
/// exchange: several messages that complete together.
#pragma once

#include "admission/admission.hpp"
#include "collective/rank_call.hpp"
#include "foundation/rank_set.hpp"
#include "operation/operation.hpp"
#include "operation/room.hpp"
#include <troupe/collective.hpp>
#include <troupe/collective_kind.hpp>
#include <troupe/error.hpp>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace troupe::detail {

class collective_operation;
class collective_world;
class runtime;

/// One rank's request for an operation that all ranks request, and from which it gets its result.
class rank_request final : public operation_of<collective_done>, public rank_submission {
public:
  /// Made in advance; `begin` starts it.
  rank_request() : operation_of("", 0) {}
  /// Starts a request for the world without the ranks in `absent`.
  void begin(const char* verb, std::shared_ptr<collective_world> world, rank_call call,
             rank_set absent, const request_options& options);
  std::uint64_t number() const noexcept override;
  collective_kind what() const noexcept { return call_.call.what; }
  std::int32_t peer() const noexcept { return call_.call.peer; }
  caf::expected<operation*> joint(locked lock) override;
  caf::expected<operation*> alone(locked lock, queue_bound bound) override;
  void count_refused(locked lock, const caf::error& why) override;
  std::span<const use> uses() const override { return {uses_.data(), use_count_}; }
  const void* match_key() const noexcept override;
  std::shared_ptr<operation> whole(locked lock, std::span<rank_submission* const> all) override;
  void join_whole(locked lock, std::span<rank_submission* const> all,
                  const std::shared_ptr<operation>& joint) override;
  bool join(locked lock, std::shared_ptr<operation> self) override;
  caf::error refuse_cycle() override;
  void placed(const caf::error& why) override;
  /// Waits for room, as `room` says, and enqueues the request. A refusal becomes its reply.
  void start(room_policy room);
  /// The same together with other requests of its rank, for `admission::place_together`; `before`
  /// of them precede it in its call queue. Call `watch` afterwards.
  admission::submission begin_together(std::size_t before);
  void watch();
  /// Completes the request: its rank's part is done. Returns false if it was completed before.
  bool succeed() noexcept;
  /// Completes the request with the result of its completed operation, unless it has a reply
  /// already.
  void end() noexcept;
  /// Returns which threads make room for the request.
  room_maker who_makes_room(locked lock, queue_bound bound) const;
  /// Notes that the request was refused with `why` before it was enqueued. Call
  /// `end_refused` afterwards.
  void note_refused(locked lock, const caf::error& why);
  void end_refused(const caf::error& why);
  /// Ends the request with its exchange: the requester ended that, or another message of it failed.
  void end_beside(early_end how, const caf::error& why) noexcept;

protected:
  void before_answer(const caf::error& error) noexcept override;
  void end_early(early_end how) noexcept override;

private:
  void become_part_of(locked lock, std::shared_ptr<collective_operation> joint,
                      std::shared_ptr<operation> self);
  failure describe_call(errc code, std::string detail) const;
  void end_early(early_end how, errc code, const std::string& detail) noexcept;
  std::shared_ptr<collective_operation> make_joint(locked lock);
  caf::error check_line(std::size_t ahead, queue_bound bound) const;
  caf::error check_room(locked lock, queue_bound bound) const;
  caf::error wait_for_room(room_policy room);
  const lane& own_lane() const;

  // Members that placing needs, kept together, from `rank_submission` on.
  std::uint64_t membership_ = 0;
  rank_set absent_;
  std::shared_ptr<collective_world> world_;
  std::shared_ptr<collective_operation> joint_; // its operation; under the admission lock
  std::atomic<std::uint64_t> joint_number_{0};
  std::uint32_t use_count_ = 0;
  bool counts_ = false; // among the calls of its rank
  std::array<use, 2> uses_;
  rank_call call_; // the operation refers to it

  std::shared_ptr<collective_operation> found_; // the operation that it may join
  std::shared_ptr<collective_operation> ended_; // the one that its refusal ended, for all ranks
  std::size_t before_ = 0;                      // others of its exchange before it in its queue
  std::shared_ptr<collective_operation> made_;  // made in advance, for `found_`
};

/// Several requests of one rank that get their positions in one step and complete together: when
/// all are done, or with the first that fails. A failure ends the other requests.
class exchange_request final : public operation_of<collective_done> {
public:
  /// `requests`: requests for messages, not started yet, in order.
  exchange_request(std::shared_ptr<runtime> owner,
                   std::vector<std::shared_ptr<rank_request>> requests);
  /// Gives all requests their positions, or refuses all of them.
  void start(room_policy room);

protected:
  void end_early(early_end how) noexcept override;

private:
  void on_answer_of(const rank_request& x) noexcept;
  void end_all(early_end how, const caf::error& why) noexcept;

  const std::shared_ptr<runtime> owner_;
  const std::vector<std::shared_ptr<rank_request>> requests_;
  std::atomic<std::size_t> left_;
};

} // namespace troupe::detail
