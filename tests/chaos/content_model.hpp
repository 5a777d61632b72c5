/// Model of the content of device memory after operations of which some failed and some may have
/// run.
#pragma once

#include <troupe/collective_kind.hpp>
#include <troupe/dtype.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace troupe::testing {

/// The elements of a buffer, as bits of their type. An element without a value is unknown.
using content = std::vector<std::optional<std::uint64_t>>;

/// The result of an operation as its requester knows it.
enum class fate : std::uint8_t {
  failed,  ///< its output is unchanged or unreadable
  perhaps, ///< the result came before its end: as `failed` or `ran`
  ran,
};

bool is_floating_point(dtype type);

/// Combines two elements: `sum` and `prod` of integers, `min` and `max` of all numbers.
std::uint64_t combine(dtype type, reduce_op op, std::uint64_t a, std::uint64_t b);

/// A collective of all its ranks, or a message between two of its ranks.
struct collective_shape {
  collective_kind kind = collective_kind::all_reduce; ///< send for a message
  dtype type = dtype::uint32;
  reduce_op op = reduce_op::sum;
  int root = 0;
  std::vector<std::uint64_t> factors;             ///< for premul_sum, by rank
  std::vector<std::vector<std::uint64_t>> counts; ///< for all_to_all_v
};

/// Returns the content that each rank receives; empty for ranks that receive none.
/// @shape sends: of each rank, for a message only the sender's; a message has one result
std::vector<content> received(const collective_shape& x, const std::vector<content>& sends);

/// Buffers and the versions of their contents: one version for each operation that writes them, in
/// order of admission. The fates of operations are decided later, and contents are computed then.
/// If it is unknown whether an operation ran, a version has several possible contents.
class content_model {
public:
  using version = std::size_t;
  using effect = std::size_t;

  struct place {
    version at = 0;
    std::size_t first = 0;
    std::size_t count = 0;
  };

  /// Adds a buffer. Returns its number.
  std::size_t add(content initial);
  version latest(std::size_t buffer) const { return latest_[buffer]; }

  /// An operation that reads `reads` and writes the results of `run`.
  using function = std::function<std::vector<content>(const std::vector<content>&)>;
  effect begin(std::vector<place> reads, function run);
  /// Writes output number `output` to a range of a buffer. Returns the new version.
  version write(effect by, std::size_t output, std::size_t buffer, std::size_t first,
                std::size_t count);
  /// Replaces the operation that writes the version, if that operation is known only later.
  void written_by(version what, effect by, std::size_t output);
  /// Decides the fate of an operation. Without a decision it failed.
  void decide(effect what, fate how) { effects_[what].how = how; }

  /// Returns true if an operation that writes the version failed or may have failed.
  bool doubtful(version x) const;

  /// Returns an error text, or an empty text if `got` is one of the possible contents.
  std::string difference(const place& where, const content& got);

private:
  struct effect_entry {
    std::vector<place> reads;
    function run;
    fate how = fate::failed;
    std::optional<std::vector<std::vector<content>>> outputs; ///< cached
  };
  struct version_entry {
    content initial; ///< of a version that no operation wrote
    bool written = false;
    version before = 0;
    std::size_t first = 0;
    std::size_t count = 0;
    effect by = 0;
    std::size_t output = 0;
    std::optional<std::vector<content>> possible; ///< cached
  };

  const std::vector<content>& possible(version x);
  const std::vector<std::vector<content>>& outputs(effect x);

  std::vector<version> latest_; // by buffer
  std::vector<version_entry> versions_;
  std::vector<effect_entry> effects_;
};

} // namespace troupe::testing
