/// What device memory must hold after operations of which some failed, and some may have run or
/// not.
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

/// The elements of a buffer as the bits of their type; none: nobody knows.
using content = std::vector<std::optional<std::uint64_t>>;

/// What became of an operation as far as its requester knows.
enum class fate : std::uint8_t {
  failed,  ///< what it was writing is as before, or cannot be read
  perhaps, ///< it was answered before its end: as `failed`, or as `ran`
  ran,
};

bool is_floating_point(dtype type);

/// `sum` and `prod` of integers; `min` and `max` of all numbers.
std::uint64_t combine(dtype type, reduce_op op, std::uint64_t a, std::uint64_t b);

/// A collective of all its ranks; of a message, the two ranks' that take part.
struct collective_shape {
  collective_kind kind = collective_kind::all_reduce; ///< a message: send
  dtype type = dtype::uint32;
  reduce_op op = reduce_op::sum;
  int root = 0;
  std::vector<std::uint64_t> factors;             ///< of premul_sum, by rank
  std::vector<std::vector<std::uint64_t>> counts; ///< of all_to_all_v
};

/// What each rank receives; nothing where it receives nothing.
/// @shape sends: of each rank, of a message the sender's alone; the result of a message: one
std::vector<content> received(const collective_shape& x, const std::vector<content>& sends);

/// Buffers and the versions of their contents, one for each operation that writes them, in the
/// order of admission. An operation's fate is said later, and then all is worked out: a version has
/// several possible contents where it is not known whether an operation ran.
class content_model {
public:
  using version = std::size_t;
  using effect = std::size_t;

  struct place {
    version at = 0;
    std::size_t first = 0;
    std::size_t count = 0;
  };

  /// A new buffer.
  std::size_t add(content initial);
  version latest(std::size_t buffer) const { return latest_[buffer]; }

  /// An operation that reads `reads`, and gives `run` of them.
  using function = std::function<std::vector<content>(const std::vector<content>&)>;
  effect begin(std::vector<place> reads, function run);
  /// Its output number `output` goes into a part of a buffer, which has another version then.
  version write(effect by, std::size_t output, std::size_t buffer, std::size_t first,
                std::size_t count);
  /// The version is written by another operation, that was known too late.
  void written_by(version what, effect by, std::size_t output);
  /// Until it is said, it failed.
  void decide(effect what, fate how) { effects_[what].how = how; }

  /// May it be unreadable: did something that failed, or may have, write it?
  bool doubtful(version x) const;

  /// For an error message: none if one of the possible contents is `got`.
  std::string difference(const place& where, const content& got);

private:
  struct effect_entry {
    std::vector<place> reads;
    function run;
    fate how = fate::failed;
    std::optional<std::vector<std::vector<content>>> outputs; ///< worked out
  };
  struct version_entry {
    content initial; ///< of one that nobody wrote
    bool written = false;
    version before = 0;
    std::size_t first = 0;
    std::size_t count = 0;
    effect by = 0;
    std::size_t output = 0;
    std::optional<std::vector<content>> possible; ///< worked out
  };

  const std::vector<content>& possible(version x);
  const std::vector<std::vector<content>>& outputs(effect x);

  std::vector<version> latest_; // by buffer
  std::vector<version_entry> versions_;
  std::vector<effect_entry> effects_;
};

} // namespace troupe::testing
