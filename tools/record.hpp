/// A flight record, as read from a file.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace flight {

/// The file cannot be used; the text says why in one sentence, and may quote the file.
class bad_record : public std::runtime_error {
public:
  using runtime_error::runtime_error;
};

/// States in the order of an operation's course.
enum class state { not_called, not_issued, issuing, issued, started, done, failed };

const char* to_string(state x);

/// The work of a device for an operation. Times are nanoseconds of one clock; 0: not yet, or not
/// seen.
struct part {
  std::uint64_t operation = 0;
  std::string verb;
  int device = -1;
  int rank = -1;           ///< -1: outside of worlds
  std::uint64_t world = 0; ///< 0: none
  std::uint64_t epoch = 0;
  std::string way = {}; ///< of a collective
  std::uint64_t generation = 0;
  std::uint64_t count = 0;
  std::string dtype;  ///< empty: none
  std::string memory; ///< the buffers, as text
  std::string stream;
  std::int64_t admitted = 0;
  std::int64_t issued = 0;
  std::int64_t started = 0;
  std::int64_t over = 0;
  state at = state::not_issued;
  std::string error; ///< empty: none
  int native_code = 0;

  bool is_over() const { return over != 0 || at == state::done || at == state::failed; }
  std::string title() const { return verb + " #" + std::to_string(operation); }
};

struct device {
  int ordinal = -1;
  std::uint64_t generation = 0;
  std::string phase;
  std::string reason;               ///< empty: none
  std::uint64_t next_waits_for = 0; ///< operation; 0: none
  std::vector<part> parts;
};

struct cause {
  std::string text;
  std::string code;
  std::int64_t time = 0;
  std::uint64_t operation = 0;    ///< 0: none
  std::vector<std::string> parts; ///< progress of each rank, if the operation had several
};

/// All texts are as `peer_text` returns them (src/foundation/peer_text.hpp).
struct record {
  std::string host;
  std::int64_t process = 0;
  std::int64_t time = 0;
  std::int64_t unix_time = 0; ///< the moment of `time`, in nanoseconds since 1970
  std::optional<cause> why;   ///< none: the record was requested
  std::map<std::uint64_t, std::string> worlds;
  std::vector<device> devices;
};

/// Reads a record from a file. It takes memory of about the size of the file. Throws `bad_record`
/// and std::bad_alloc.
record read_record(const std::string& path);

} // namespace flight
