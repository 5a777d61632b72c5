/// The ways to run a verb, as contestants.
#pragma once

#include "contestant.hpp"
#include "verbs.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace bench {

/// A way and a mode in it, which the report names.
struct contestant_label {
  std::string_view way; ///< raw: NCCL by hand; nccl, direct: troupe's collectives_policy
  std::string_view mode;
  std::string_view text;
  bool pipelined = true; ///< false: runs one operation after the other only
};

/// Returns all labels. The first one is of the reference.
std::span<const contestant_label> all_labels() noexcept;
/// Returns the label with that text.
const contestant_label& label_of(std::string_view text);

/// A buffer of a rank. A verb in place has `send` only.
enum class direction : std::uint8_t { send, recv };

/// The memory that contestants need on each rank.
struct footprint {
  std::size_t send_bytes = 0;
  std::size_t recv_bytes = 0;
};

/// One way to run a verb on float32 numbers.
class verb_contestant : public contestant {
public:
  verb_contestant(const verb& what, const contestant_label& label) : what_(what), label_(label) {}

  std::string name() const final { return std::string{label_.text}; }

  virtual std::size_t ranks() const = 0;

  /// Copies host memory to a buffer of `rank`, from element `first` on (`write`), or back (`read`).
  /// Blocks.
  /// @thread any; one per rank at the same time
  virtual void write(std::size_t rank, direction where, std::size_t first,
                     std::span<const float> numbers) = 0;
  virtual void read(std::size_t rank, direction where, std::size_t first,
                    std::span<float> numbers) = 0;

  /// Runs operations with blocks of `count` elements, as `run` does. Returns when every rank is
  /// done with the last one.
  virtual timing drive(std::size_t count, std::size_t operations, std::size_t window) = 0;

  /// Compares every element of every result.
  void verify(std::size_t size_bytes, std::size_t window) final;
  timing run(std::size_t size_bytes, std::size_t operations, std::size_t window) final {
    return drive(size_bytes / sizeof(float), operations, window);
  }

protected:
  const verb& what() const { return what_; }

private:
  void fill(std::size_t rank, std::size_t count);
  void compare(std::size_t rank, std::size_t count, std::size_t window, double repetition);

  const verb& what_;
  const contestant_label& label_;
};

/// Makes a contestant of one way.
using contestant_maker =
    std::function<std::unique_ptr<contestant>(const verb& what, const contestant_label& label)>;

} // namespace bench
