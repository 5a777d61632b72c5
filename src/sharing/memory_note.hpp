/// Notes between two processes that use the same device, about memory that one lends to the other.
#pragma once

#include "operation/buffer.hpp"
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
    claim = 1,  ///< asks to use the memory of `token` in `mode`
    lent,       ///< granted: it is at `address`, indeterminate or skipped in `unreadable`; with a
                ///< `word` in which the borrower notes what it writes (`buffer::begin_write`)
    refused,    ///< not granted, because of `why`
    given_back, ///< the sender no longer uses or wants the memory, which it leaves indeterminate or
                ///< skipped in `unreadable`
  };

  kind what = kind::claim;
  /// Number of the claim, given by the process that claims.
  std::uint64_t number = 0;
  gpu_token token = {};
  access_mode mode = access_mode::read;
  std::uint64_t address = 0;
  caf::error why = {};
  std::uint32_t word = 0;                        ///< as `shared_word::number`; 0: none
  std::vector<unreadable_range> unreadable = {}; ///< offsets from the first lent byte
};

/// Returns the bytes of a message: long texts are cut, and too many `unreadable` are merged into
/// one.
std::vector<std::byte> to_note(memory_note x);
/// Returns the note; none if the bytes are malformed.
std::optional<memory_note> memory_note_of(std::span<const std::byte> note);

} // namespace troupe::detail
