/// The request of one rank for an exchange: several messages that complete together.
#pragma once

#include "operation/operation.hpp"
#include <troupe/collective.hpp>
#include <troupe/error.hpp>

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

namespace troupe::detail {

class rank_request;
class runtime;

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
