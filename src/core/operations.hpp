/// The verbs: what each does on its lane.
#pragma once

#include "core/operation.hpp"
#include "core/staging.hpp"
#include <troupe/device_status.hpp>
#include <troupe/gpu_ref.hpp>
#include <troupe/host_buffer.hpp>
#include <troupe/launch.hpp>

#include <atomic>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace troupe::detail {

/// A `use` of a whole handle by part `part`.
use use_of(const any_gpu_ref& ref, bool reads, bool writes, std::size_t part = 0);

/// Do they share bytes?
bool overlap(const any_gpu_ref& a, const any_gpu_ref& b) noexcept;

class allocate_operation final : public operation_of<any_gpu_ref> {
public:
  allocate_operation(std::size_t count, dtype type, bool zeroed);
  caf::expected<issue_outcome> issue(part& p, lane& on) override;

private:
  std::size_t count_;
  dtype type_;
  bool zeroed_;
};

/// `value` is unused: it says that something without a result is done.
struct nothing {};

/// Host memory to device memory, or back.
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

/// Lets later requests read the bytes of `ref` that were skipped.
class accept_operation final : public operation_of<nothing> {
public:
  explicit accept_operation(const any_gpu_ref& ref);
  bool marks_skipped() const noexcept override { return false; }
  caf::expected<issue_outcome> issue(part& p, lane& on) override;
};

/// On one device.
class copy_operation final : public operation_of<nothing> {
public:
  copy_operation(const any_gpu_ref& target, const any_gpu_ref& source);
  caf::expected<issue_outcome> issue(part& p, lane& on) override;

private:
  std::byte* target_;
  const std::byte* source_;
  std::size_t size_;
};

/// While a user's callable runs on this thread for an operation: what the operation uses is in
/// order, whatever was admitted after it.
class callable_scope {
public:
  explicit callable_scope(const operation& of) noexcept;
  ~callable_scope();
  callable_scope(const callable_scope&) = delete;
  callable_scope& operator=(const callable_scope&) = delete;

  /// Does the operation of this thread's callable use all of [begin, end)?
  static bool covers(const buffer& memory, std::size_t begin, std::size_t end) noexcept;
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
    std::weak_ptr<completion> of; ///< it may be given up before they are called
    int device = -1;
    std::uint64_t generation = 0;
    std::atomic<bool> failed{false}; ///< one of them
  };
  /// In the stream.
  static void call(host_call& x) noexcept;

protected:
  void on_settled() noexcept override;

private:
  caf::error in_full(const caf::error& error, const host_functions& of) const;

  launch_function function_;
  std::shared_ptr<host_functions> host_functions_ = std::make_shared<host_functions>();
};

/// A registered launch on a device of another process.
class remote_launch_operation final : public operation_of<nothing> {
public:
  remote_launch_operation(std::string name, std::vector<std::byte> arguments,
                          const std::vector<any_gpu_ref>& reads,
                          const std::vector<any_gpu_ref>& writes);
  caf::expected<issue_outcome> issue(part& p, lane& on) override;

private:
  const std::string name_;
  const std::vector<std::byte> arguments_;
  std::vector<launch_memory> reads_;
  std::vector<launch_memory> writes_;
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

/// Makes a user's stream wait for what uses the buffer, which then is the user's until `release`.
class acquire_operation final : public operation_of<nothing> {
public:
  acquire_operation(const any_gpu_ref& ref, access_mode mode, stream_view user);
  bool marks_skipped() const noexcept override { return false; }
  caf::error on_admit(queue_bound bound) override;
  caf::expected<issue_outcome> issue(part& p, lane& on) override;

protected:
  void on_leave() noexcept override;
  void on_success() noexcept override;
  void on_settled() noexcept override;

private:
  std::shared_ptr<buffer> memory_;
  access_mode mode_;
  stream_view user_;
};

/// What another process may do with a buffer, until this goes.
class memory_lease {
public:
  /// Of what a `lend_operation` that went well took into account.
  memory_lease(std::shared_ptr<buffer> memory, access_mode mode) noexcept
      : memory_(std::move(memory)), mode_(mode) {}
  ~memory_lease();
  memory_lease(const memory_lease&) = delete;
  memory_lease& operator=(const memory_lease&) = delete;

private:
  const std::shared_ptr<buffer> memory_;
  const access_mode mode_;
};

/// Over when nothing that came before uses the memory. If it goes well, the buffer is another
/// process's as long as the `memory_lease` is there that whoever asked for it makes. What is
/// half-written stays so.
class lend_operation final : public operation_of<nothing> {
public:
  lend_operation(any_gpu_ref ref, access_mode mode);
  bool marks_skipped() const noexcept override { return false; }
  caf::error on_admit(queue_bound bound) override;
  caf::expected<issue_outcome> issue(part& p, lane& on) override;
  const any_gpu_ref& ref() const noexcept { return ref_; }
  access_mode mode() const noexcept { return mode_; }
  /// What is half-written of the memory, where it is to be written.
  const std::vector<buffer::wound>& wounds() const noexcept { return wounds_; }

protected:
  void on_leave() noexcept override;
  void on_success() noexcept override;
  void on_settled() noexcept override;

private:
  const any_gpu_ref ref_;
  const access_mode mode_;
  std::vector<buffer::wound> wounds_;
};

/// Lets what comes after wait for the user's stream.
class release_operation final : public operation_of<nothing> {
public:
  release_operation(const any_gpu_ref& ref, access_mode mode, stream_view user);
  bool marks_skipped() const noexcept override { return false; }
  caf::error on_admit(queue_bound bound) override;
  caf::expected<issue_outcome> issue(part& p, lane& on) override;

protected:
  void end_early(early_end how) noexcept override;

private:
  any_gpu_ref ref_;
  access_mode mode_;
  stream_view user_;
};

} // namespace troupe::detail
