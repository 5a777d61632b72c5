/// The verbs with NCCL alone, for comparison with troupe.
#pragma once

#include "verb_contestant.hpp"

#include <vector>

namespace bench {

/// Returns a maker for the modes of NCCL by hand:
/// - threads: a thread per rank issues and spins on an event. Another thread starts them and waits
///   for all;
/// - grouped: one thread issues for all ranks in a group and synchronizes their streams. One
///   operation at a time.
/// The contestants share a communicator, streams and buffers.
contestant_maker raw_maker(const std::vector<int>& devices, const footprint& memory);

} // namespace bench
