/// Orders operations by their accesses to buffers: a use follows earlier accesses that conflict
/// with it, and supersedes those that later uses need not follow any more.
#pragma once

#include "operation/buffer.hpp"
#include "operation/operation.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace troupe::detail {

/// An access that another access has superseded.
struct superseded_access {
  buffer* memory; ///< of both accesses
  access what;
};

/// The accesses and operations that an operation must follow.
struct dependencies {
  std::vector<std::shared_ptr<operation>> behind; ///< held operations that it must follow
  // Recorded only if the operation may become held:
  std::vector<superseded_access> superseded;
  std::vector<std::uint64_t> since; ///< `access::since` of each of its uses
};

/// Returns the longest prefix of `all` that consists of ascending ranges of one buffer.
inline std::span<const use> first_run(std::span<const use> all) {
  std::size_t end = 1;
  while (end < all.size() && all[end].memory == all[end - 1].memory &&
         all[end].begin >= all[end - 1].end)
    ++end;
  return all.first(end);
}

/// Returns whether no operation has to follow part `at` of `by` any more.
inline bool is_over(const std::shared_ptr<operation>& by, const part& at) {
  return !by || by->settled() || is_delivered(at);
}

/// Adds to `users`, which the loss of a process ends, what was admitted to overwrite memory of
/// other devices that this process may still write: its result would not be certain. Requests
/// for that memory from now on wait until the work of the process is over.
void add_overwriters(locked lock, std::vector<std::shared_ptr<operation>>& users);

/// Removes the accesses for which `f` returns true.
template <class F> void remove_if(access_list& from, F f) {
  for (std::size_t i = 0; i < from.size();)
    if (f(from[i]))
      from.remove(i);
    else
      ++i;
}

/// Orders `uses`, which are new in `op`. `held`: the operation may become held.
void order_uses(locked lock, const std::shared_ptr<operation>& op, dependencies& around,
                std::span<const use> uses, bool held);
/// Orders `run` behind those of `accesses` that are older than `before`.
void order_run(locked, const std::shared_ptr<operation>& op, dependencies& around,
               std::span<const use> run, access_list& accesses, std::uint64_t before, bool held);
/// Adds the access of `u`, which is ordered, to those of its buffer. `since`: `access::since`.
void note_use(locked lock, const std::shared_ptr<operation>& op, dependencies& around, const use& u,
              std::uint64_t since, bool held);

} // namespace troupe::detail
