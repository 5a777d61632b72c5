/// Memory of all ranks of a world that its communicators may use as windows.
#pragma once

#include "operation/admission_lock.hpp"
#include "operation/device_state.hpp"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace troupe::detail {

class communicator;

/// One allocation: a piece of the same size on each rank. Its pieces are freed together, when no
/// handle to any of them is left and no communicator has them as windows any more.
class symmetric_memory : public std::enable_shared_from_this<symmetric_memory> {
public:
  /// `on_unused` is called once, on any thread, when no handle is left. It must not block.
  symmetric_memory(std::size_t ranks, std::size_t size_bytes,
                   std::function<void(std::shared_ptr<symmetric_memory>)> on_unused);
  ~symmetric_memory();
  symmetric_memory(const symmetric_memory&) = delete;
  symmetric_memory& operator=(const symmetric_memory&) = delete;

  std::size_t size_bytes() const noexcept { return size_bytes_; }
  std::byte* address(std::size_t rank) const noexcept { return pieces_[rank].address; }

  /// Adds the piece of rank `rank`, in the present generation of `home`. @thread the rank's lane
  void add(std::size_t rank, std::shared_ptr<device_state> home, void* address);
  /// Notes that the handles of one piece are gone.
  void drop() noexcept;
  /// Returns whether a handle is left and all pieces are of their devices' present generations.
  bool usable() const noexcept;

  enum class state : std::uint8_t { none, asked_for, registered, failed };
  state with(locked, const communicator* x) const noexcept;
  void set(locked, const communicator* x, state s);

private:
  struct piece {
    std::shared_ptr<device_state> home;
    std::byte* address = nullptr;
    std::uint64_t generation = 0;
  };

  const std::size_t size_bytes_;
  const std::function<void(std::shared_ptr<symmetric_memory>)> on_unused_;
  std::vector<piece> pieces_; // by rank
  std::atomic<std::size_t> in_use_{0};
  std::vector<std::pair<const communicator*, state>> states_; // of existing communicators
};

/// The place of a handle's memory in an allocation; `of` is null for plain memory.
struct symmetric_place {
  const symmetric_memory* of = nullptr;
  std::size_t offset = 0;

  friend bool operator==(const symmetric_place&, const symmetric_place&) = default;
};

} // namespace troupe::detail
