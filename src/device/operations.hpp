/// The verbs: what each operation does on its lane.
#pragma once

#include "lane/staging.hpp"
#include "operation/operation.hpp"
#include <troupe/device_status.hpp>
#include <troupe/gpu_ref.hpp>
#include <troupe/host_buffer.hpp>
#include <troupe/launch.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace troupe::detail {

class allocate_operation final : public operation_of<any_gpu_ref> {
public:
  allocate_operation(std::size_t count, dtype type, bool zeroed);
  caf::expected<issue_outcome> issue(part& p, lane& on) override;

private:
  std::size_t count_;
  dtype type_;
  bool zeroed_;
};

/// A copy from host memory to device memory, or back.
class transfer_operation : public operation_of<nothing> {
public:
  transfer_operation(transfer::direction way, any_gpu_ref device, std::shared_ptr<host_range> host);
  caf::expected<issue_outcome> issue(part& p, lane& on) override;
  caf::expected<issue_outcome> proceed(part& p, lane& on) override;
  void on_part_done(part& p) noexcept override;
  std::shared_ptr<void> used_by_streams() const noexcept override { return host_; }

protected:
  void before_answer(const caf::error& error) noexcept override;
  void on_settled() noexcept override;

private:
  const transfer::direction way_;
  const std::shared_ptr<host_range> host_;
  transfer transfer_;
};

class fill_operation final : public operation_of<nothing> {
public:
  fill_operation(any_gpu_ref target, std::vector<std::byte> pattern);
  caf::expected<issue_outcome> issue(part& p, lane& on) override;

private:
  std::byte* target_;
  std::size_t count_;
  std::vector<std::byte> pattern_;
};

/// Lets later requests read the skipped bytes of `ref`.
class accept_operation final : public operation_of<nothing> {
public:
  explicit accept_operation(const any_gpu_ref& ref);
  bool marks_skipped() const noexcept override { return false; }
  caf::expected<issue_outcome> issue(part& p, lane& on) override;
};

/// A copy within one device.
class copy_operation final : public operation_of<nothing> {
public:
  copy_operation(const any_gpu_ref& target, const any_gpu_ref& source);
  caf::expected<issue_outcome> issue(part& p, lane& on) override;

private:
  std::byte* target_;
  const std::byte* source_;
  std::size_t size_;
};

class launch_operation final : public operation_of<nothing> {
public:
  launch_operation(launch_function function, const std::vector<any_gpu_ref>& reads,
                   const std::vector<any_gpu_ref>& writes);
  caf::expected<issue_outcome> issue(part& p, lane& on) override;
  std::shared_ptr<void> used_by_streams() const noexcept override { return host_functions_; }

  struct host_functions;
  struct host_call {
    host_call(std::function<void()> f, host_functions& x) : function(std::move(f)), among(&x) {}
    std::function<void()> function;
    host_functions* among;
  };
  struct host_functions {
    std::deque<host_call> calls;
    std::vector<const buffer*> used;
    std::weak_ptr<completion> of; ///< weak: it may be abandoned before they are called
    int device = -1;
    std::uint64_t generation = 0;
    std::atomic<bool> failed{false}; ///< one of the calls failed
  };
  /// Runs a host function; called by the stream.
  static void call(host_call& x) noexcept;

protected:
  void on_settled() noexcept override;

private:
  /// Returns the error of `x`, an operation with host functions.
  static caf::error in_full(const operation& x, const caf::error& error, int device,
                            std::uint64_t generation);

  launch_function function_;
  std::shared_ptr<host_functions> host_functions_; ///< null: there is none
};

/// Returns the memory of handles, for a registered launch.
std::vector<launch_memory> memory_of(const std::vector<any_gpu_ref>& refs);

/// A launch of a library, or any registered launch on a device of another process.
class registered_launch_operation final : public operation_of<nothing> {
public:
  /// @param library null: the launch is not a library's, or not registered in this process
  /// @param read,written the memory of the handles
  registered_launch_operation(std::shared_ptr<const library_launch> library, std::string name,
                              std::vector<std::byte> arguments,
                              const std::vector<any_gpu_ref>& reads,
                              const std::vector<any_gpu_ref>& writes,
                              std::vector<launch_memory> read, std::vector<launch_memory> written);
  caf::error prepare(part& p, lane& on) override;
  caf::expected<issue_outcome> issue(part& p, lane& on) override;
  bool has_right_result(const part&) const noexcept override { return verdict() == 0; }
  void on_part_done(part& p) noexcept override;
  std::shared_ptr<void> used_by_streams() const noexcept override;

protected:
  void on_settled() noexcept override;

private:
  registered_call as_call() const noexcept;
  /// Enqueues the work on a device of this process.
  caf::error enqueue(part& p, lane& on);
  /// Returns what the work has written to its word.
  std::int32_t verdict() const noexcept;

  const std::shared_ptr<const library_launch> library_;
  const std::string name_;
  const std::vector<std::byte> arguments_;
  const std::vector<launch_memory> reads_;
  const std::vector<launch_memory> writes_;
  std::shared_ptr<std::int32_t> verdict_; ///< its word; null: there is none
  std::shared_ptr<launch_operation::host_functions> host_functions_; ///< null: there is none
};

class stats_operation final : public operation_of<device_stats> {
public:
  stats_operation();
  caf::expected<issue_outcome> issue(part& p, lane& on) override;
};

class pinned_operation final : public operation_of<host_buffer> {
public:
  explicit pinned_operation(std::size_t size_bytes);
  caf::expected<issue_outcome> issue(part& p, lane& on) override;

private:
  std::size_t size_;
};

/// Makes a user's stream wait for earlier work on the buffer, which it then holds until `release`.
class acquire_operation final : public operation_of<nothing> {
public:
  acquire_operation(const any_gpu_ref& ref, access_mode mode, stream_view user);
  bool marks_skipped() const noexcept override { return false; }
  caf::error on_admit(locked lock, queue_bound bound) override;
  caf::expected<issue_outcome> issue(part& p, lane& on) override;

protected:
  void on_leave(locked lock) noexcept override;
  void on_success() noexcept override;
  void on_settled() noexcept override;

private:
  std::shared_ptr<buffer> memory_;
  access_mode mode_;
  stream_view user_;
};

/// Gives the buffer back. Later work on it waits for `event`, of the user's stream.
class release_operation final : public operation_of<nothing> {
public:
  release_operation(const any_gpu_ref& ref, access_mode mode, user_event event);
  /// Never refused for lack of room: it gives something back.
  bool bounded() const noexcept override { return false; }
  bool marks_skipped() const noexcept override { return false; }
  caf::error on_admit(locked lock, queue_bound bound) override;
  caf::expected<issue_outcome> issue(part& p, lane& on) override;

protected:
  void end_early(early_end how) noexcept override;
  void on_settled() noexcept override;

private:
  any_gpu_ref ref_;
  access_mode mode_;
  user_event event_;
};

} // namespace troupe::detail
