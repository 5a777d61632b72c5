/// Checks what one request asks of single ranks, and makes their calls.
#pragma once

#include "collective/rank_call.hpp"
#include "foundation/rank_set.hpp"
#include <troupe/backend.hpp>
#include <troupe/error.hpp>
#include <troupe/gpu_ref.hpp>

#include <cstddef>
#include <memory>
#include <span>
#include <string>

namespace troupe::detail {

class lane;

/// Makes and checks the calls of single ranks for one request. Errors name rank and device.
class call_checker {
public:
  using lanes_view = std::span<const std::shared_ptr<lane>>;

  /// `x` and `lanes` outlive this. Rank i is on lanes[i].
  call_checker(const char* verb, const collective_view& x, lanes_view lanes)
      : call_checker(verb, x, lanes, lanes.size()) {}
  /// For a request of rank `alone`.
  call_checker(const char* verb, const collective_view& x, lanes_view lanes, std::size_t alone)
      : verb_(verb), x_(x), lanes_(lanes), named_rank_(alone) {}

  std::size_t size() const noexcept { return lanes_.size(); }
  /// The rank to name in an error if the request as a whole is wrong.
  std::size_t named_rank() const noexcept { return named_rank_; }

  /// Returns the error that refuses the call of `rank`, or the request if that is no rank.
  caf::error refuse(errc code, std::size_t rank, std::string detail) const;

  /// Fills `result`, which is empty. `send`, `recv`: the rank's handle, if the request has one for
  /// it.
  caf::error check(rank_call& result, std::size_t rank, const any_gpu_ref* send,
                   const any_gpu_ref* recv, const double* factor,
                   std::unique_ptr<exchange_plan> plan) const;

  /// Checks what must be the same in all ranks' calls of one collective.
  caf::error compare(const rank_call& a, const rank_call& b) const;
  /// Checks what does not depend on a rank: kind, reduction, root, and which arguments there are.
  caf::error check_request() const;
  /// Checks that `rank` is a rank of the world. `what`: its name in the error.
  caf::error check_rank(int rank, const char* what) const;
  /// Checks that `rank` is not in `absent`.
  caf::error check_there(int rank, rank_set absent) const;
  /// Checks the number of buffers.
  caf::error check_number(std::size_t there, std::size_t wanted) const;

private:
  caf::error check_handle(std::size_t rank, const any_gpu_ref& ref) const;

  const char* verb_;
  const collective_view& x_;
  lanes_view lanes_;
  std::size_t named_rank_;
};

} // namespace troupe::detail
