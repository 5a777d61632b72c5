/// The named buffers of a program, in its process (`program_place::keep`).
#pragma once

#include "actors/program_note.hpp"
#include "operation/operation.hpp"
#include <troupe/gpu_ref.hpp>
#include <troupe/worker_program.hpp>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace troupe::detail {

/// The named buffers of one rank in this process, which has claimed them from the parent until the
/// world ends.
/// @thread any
class kept_buffers : public std::enable_shared_from_this<kept_buffers> {
public:
  struct options {
    std::uint64_t first_number = 0; ///< of requests; other processes number theirs from elsewhere
    /// Sends a request for memory to the parent. `answered` gets the reply.
    std::function<caf::error(program_note)> ask;
    std::function<std::shared_ptr<operation_of<any_gpu_ref>>(const gpu_token&)> claim;
  };

  explicit kept_buffers(options x) : options_(std::move(x)), last_number_(options_.first_number) {}

  /// As `program_place::keep`. Blocks.
  caf::expected<any_kept_buffer> keep(const std::string& name, dtype type, std::size_t count);
  /// Takes the parent's reply.
  void answered(program_note reply);
  /// Ends waits, and gives the buffers back: the world or the worker ends.
  void end();

private:
  std::optional<any_gpu_ref> find(const std::string& name);
  caf::expected<program_note> ask(const std::string& name, dtype type, std::size_t count);
  caf::expected<any_gpu_ref> claim(const gpu_token& token);

  const options options_;
  std::mutex asking_; ///< held during a request, which the parent serves one at a time
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
  std::uint64_t last_number_;
  std::optional<program_note> reply_; ///< to the last request
  std::map<std::string, any_gpu_ref> all_;
};

} // namespace troupe::detail
