/// What two processes that have the same device tell each other of memory that one lends the other.
#pragma once

#include "core/buffer.hpp"
#include <troupe/gpu_ref.hpp>
#include <troupe/launch.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace troupe::detail {

struct memory_note {
  enum class kind : std::uint8_t {
    claim = 1,  ///< may the sender use what `token` names as `mode` says?
    lent,       ///< yes: it is at `address`, and half-written or skipped where `wounds` says
    refused,    ///< no, because of `why`
    given_back, ///< the sender is done with it, and has left it half-written or skipped where
                ///< `wounds` says;
                ///< or does not want it any more
  };

  kind what = kind::claim;
  /// Of the claim, by whoever made it.
  std::uint64_t number = 0;
  gpu_token token;
  access_mode mode = access_mode::read;
  std::uint64_t address = 0;
  caf::error why;
  std::vector<wound> wounds; ///< from the first byte that was lent
};

/// It fits into a message: texts are cut, and wounds that are too many become one.
std::vector<std::byte> to_note(const memory_note& x);
/// None: it makes no sense.
std::optional<memory_note> memory_note_of(std::span<const std::byte> note);

} // namespace troupe::detail
