/// A flight record, as it stands in a file.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace flight {

/// The file cannot be used; says why in one sentence.
class bad_record : public std::runtime_error {
public:
  using runtime_error::runtime_error;
};

/// In the order of their course.
enum class state { not_called, not_issued, issuing, issued, started, done, failed };

const char* to_string(state x);

/// What a device did for an operation. Times are nanoseconds of one clock; 0: not yet, or nobody
/// saw it.
struct part {
  std::uint64_t operation = 0;
  std::string verb;
  int device = -1;
  int rank = -1;           ///< -1: of no world
  std::uint64_t world = 0; ///< 0: none
  std::uint64_t epoch = 0;
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
  std::vector<std::string> parts; ///< how far each rank was, where the operation had several
};

struct record {
  std::string host;
  std::int64_t process = 0;
  std::int64_t time = 0;
  std::int64_t unix_time = 0; ///< the same moment, nanoseconds since 1970
  std::optional<cause> why;   ///< none: somebody asked for it
  std::map<std::uint64_t, std::string> worlds;
  std::vector<device> devices;
};

/// Throws `bad_record`.
record read_record(const std::string& path);

} // namespace flight
