/// A backend that wraps another one and records its use: objects that were made and not yet
/// destroyed, and work on device memory that does not exist.
#pragma once

#include "support/forwarding_backend.hpp"
#include <troupe/backend.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace troupe::testing {

/// @thread any
class backend_books {
public:
  backend_books() = default;
  backend_books(const backend_books&) = delete;
  backend_books& operator=(const backend_books&) = delete;
  /// Keeps pinned memory that a process without its devices cannot free, until the process ends.
  ~backend_books() {
    static auto* kept = new std::set<void*>;
    kept->insert(pinned_.begin(), pinned_.end());
  }

  enum item : std::size_t { allocation, pinned, stream, event, communicator, device, item_count };

  std::shared_ptr<backend> guard(std::shared_ptr<backend> inner);

  long number(item what) const {
    std::lock_guard lock{mutex_};
    return numbers_[what];
  }
  /// Blocks until no `what` is left. Returns false if `limit` is over before.
  bool wait_none(item what, std::chrono::nanoseconds limit) const {
    std::unique_lock lock{mutex_};
    return changed_.wait_for(lock, limit, [&] { return numbers_[what] == 0; });
  }
  /// Returns the errors found, one sentence each.
  std::vector<std::string> complaints() const {
    std::lock_guard lock{mutex_};
    return complaints_;
  }

  void add(item what, long by = 1) {
    std::lock_guard lock{mutex_};
    numbers_[what] += by;
    changed_.notify_all();
  }
  void allocated(int ordinal, void* memory, std::size_t size_bytes) {
    std::lock_guard lock{mutex_};
    memory_[ordinal][reinterpret_cast<std::uintptr_t>(memory)] = size_bytes;
    ++numbers_[allocation];
  }
  void pinned_block(void* memory) {
    std::lock_guard lock{mutex_};
    pinned_.insert(memory);
    ++numbers_[pinned];
  }
  void unpinned_block(void* memory) {
    std::lock_guard lock{mutex_};
    pinned_.erase(memory);
    --numbers_[pinned];
    changed_.notify_all();
  }
  void freed(int ordinal, void* memory) {
    std::lock_guard lock{mutex_};
    numbers_[allocation] -=
        static_cast<long>(memory_[ordinal].erase(reinterpret_cast<std::uintptr_t>(memory)));
    changed_.notify_all();
  }
  void freed_all(int ordinal) {
    std::lock_guard lock{mutex_};
    numbers_[allocation] -= static_cast<long>(memory_[ordinal].size());
    memory_[ordinal].clear();
    changed_.notify_all();
  }
  /// Records an error unless `memory` lies in one block that exists on the device.
  void touched(int ordinal, const void* memory, std::size_t size_bytes, const char* by) {
    auto begin = reinterpret_cast<std::uintptr_t>(memory);
    std::lock_guard lock{mutex_};
    auto& all = memory_[ordinal];
    auto i = all.upper_bound(begin);
    if (size_bytes == 0 ||
        (i != all.begin() && begin + size_bytes <= std::prev(i)->first + std::prev(i)->second))
      return;
    complaints_.push_back(std::string{by} + " on device " + std::to_string(ordinal) +
                          " touches memory that is not allocated");
  }

private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  long numbers_[item_count] = {};
  std::map<int, std::map<std::uintptr_t, std::size_t>> memory_; // by device: size of each block
  std::set<void*> pinned_;
  std::vector<std::string> complaints_;
};

class guarded_device final : public forwarding_device {
public:
  guarded_device(std::unique_ptr<backend_device> inner, backend_books& books, int ordinal)
      : forwarding_device(std::move(inner)), books_(books), ordinal_(ordinal) {
    books_.add(backend_books::device);
  }
  ~guarded_device() override {
    inner_.reset();
    books_.add(backend_books::device, -1);
  }

  caf::error close_memory() noexcept override {
    books_.freed_all(ordinal_);
    return inner_->close_memory();
  }
  caf::expected<void*> allocate(std::size_t size_bytes, stream_view stream) noexcept override {
    auto memory = inner_->allocate(size_bytes, stream);
    if (memory)
      books_.allocated(ordinal_, *memory, size_bytes);
    return memory;
  }
  caf::error deallocate(void* memory, stream_view stream) noexcept override {
    books_.freed(ordinal_, memory);
    return inner_->deallocate(memory, stream);
  }
  caf::expected<void*> allocate_pinned(std::size_t size_bytes) noexcept override {
    auto memory = inner_->allocate_pinned(size_bytes);
    if (memory)
      books_.pinned_block(*memory);
    return memory;
  }
  caf::error deallocate_pinned(void* memory) noexcept override {
    books_.unpinned_block(memory);
    return inner_->deallocate_pinned(memory);
  }
  std::function<caf::error(void*)> pinned_deleter() noexcept override {
    auto inner = inner_->pinned_deleter();
    if (!inner)
      return nullptr;
    return [&books = books_, inner = std::move(inner)](void* memory) {
      books.unpinned_block(memory);
      return inner(memory);
    };
  }
  caf::expected<stream_view> create_stream() noexcept override {
    return counted(backend_books::stream, inner_->create_stream());
  }
  caf::error destroy_stream(stream_view stream) noexcept override {
    books_.add(backend_books::stream, -1);
    return inner_->destroy_stream(stream);
  }
  caf::expected<event_view> create_event() noexcept override {
    return counted(backend_books::event, inner_->create_event());
  }
  caf::error destroy_event(event_view event) noexcept override {
    books_.add(backend_books::event, -1);
    return inner_->destroy_event(event);
  }
  caf::error copy(void* target, const void* source, std::size_t size_bytes,
                  copy_direction direction, stream_view stream) noexcept override {
    if (direction != copy_direction::device_to_host)
      books_.touched(ordinal_, target, size_bytes, "a copy");
    if (direction != copy_direction::host_to_device)
      books_.touched(ordinal_, source, size_bytes, "a copy");
    return inner_->copy(target, source, size_bytes, direction, stream);
  }
  caf::error fill(void* target, std::span<const std::byte> pattern, std::size_t count,
                  stream_view stream) noexcept override {
    books_.touched(ordinal_, target, count * pattern.size(), "a fill");
    return inner_->fill(target, pattern, count, stream);
  }
  caf::error copy_peer(void* target, int target_device, const void* source, int source_device,
                       std::size_t size_bytes, stream_view stream) noexcept override {
    books_.touched(target_device, target, size_bytes, "a copy between devices");
    books_.touched(source_device, source, size_bytes, "a copy between devices");
    return inner_->copy_peer(target, target_device, source, source_device, size_bytes, stream);
  }

private:
  template <class T> caf::expected<T> counted(backend_books::item what, caf::expected<T> x) {
    if (x)
      books_.add(what);
    return x;
  }

  backend_books& books_;
  int ordinal_;
};

class guarded_communicator final : public backend_communicator {
public:
  guarded_communicator(std::unique_ptr<backend_communicator> inner, backend_books& books,
                       local_rank place, int size)
      : inner_(std::move(inner)), books_(books), place_(place), size_(size) {}

  caf::error connect(stream_view stream, connect_scope what) noexcept override {
    return inner_->connect(stream, what);
  }
  caf::error enqueue(std::span<const collective_call> calls, stream_view stream,
                     step_position where) noexcept override {
    for (auto& x : calls) {
      auto element = size_of(x.type);
      books_.touched(place_.device, x.send, element * send_count(x), "a collective");
      books_.touched(place_.device, x.recv, element * recv_count(x), "a collective");
    }
    return inner_->enqueue(calls, stream, where);
  }
  void on_loss(std::function<void()> f) noexcept override { inner_->on_loss(std::move(f)); }
  std::shared_ptr<const device_life> life() const noexcept override { return inner_->life(); }
  void compare_calls() noexcept override { inner_->compare_calls(); }
  caf::error replay(graph_view graph, stream_view stream, backend_device& on,
                    std::uint32_t* reached) noexcept override {
    return inner_->replay(graph, stream, on, reached);
  }
  caf::error asynchronous_error() noexcept override { return inner_->asynchronous_error(); }

  const backend_communicator& inner() const noexcept { return *inner_; }
  std::unique_ptr<backend_communicator> release() noexcept { return std::move(inner_); }

private:
  std::size_t send_count(const collective_call& x) const {
    if (x.send == nullptr || x.plan != nullptr)
      return 0;
    bool parts = x.what == collective_kind::reduce_scatter ||
                 x.what == collective_kind::all_to_all || x.what == collective_kind::scatter;
    return parts ? x.count * static_cast<std::size_t>(size_) : x.count;
  }
  std::size_t recv_count(const collective_call& x) const {
    if (x.recv == nullptr || x.plan != nullptr)
      return 0;
    bool parts = x.what == collective_kind::all_gather || x.what == collective_kind::all_to_all ||
                 x.what == collective_kind::gather;
    return parts ? x.count * static_cast<std::size_t>(size_) : x.count;
  }

  std::unique_ptr<backend_communicator> inner_;
  backend_books& books_;
  local_rank place_;
  int size_;
};

class guarded_backend final : public forwarding_backend {
public:
  guarded_backend(std::shared_ptr<backend> inner, backend_books& books)
      : forwarding_backend(std::move(inner)), books_(books) {}

  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override {
    return open_as<guarded_device>(ordinal, books_, ordinal);
  }
  caf::expected<communicator_ranks> build(const communicator_id& id, int size,
                                          std::span<const local_rank> ranks) noexcept override {
    return guarded(inner_->build(id, size, ranks), size, ranks);
  }
  caf::expected<communicator_ranks>
  build_direct(std::span<const local_rank> ranks) noexcept override {
    return guarded(inner_->build_direct(ranks), static_cast<int>(ranks.size()), ranks);
  }
  bool is_current(const backend_communicator& rank, int ordinal) const noexcept override {
    return inner_->is_current(static_cast<const guarded_communicator&>(rank).inner(), ordinal);
  }
  caf::error abort(communicator_ranks ranks) noexcept override {
    return ended(inner_->abort(inner_of(std::move(ranks))));
  }
  caf::error destroy(communicator_ranks ranks) noexcept override {
    return ended(inner_->destroy(inner_of(std::move(ranks))));
  }

private:
  caf::expected<communicator_ranks> guarded(caf::expected<communicator_ranks> built, int size,
                                            std::span<const local_rank> ranks) {
    if (!built)
      return std::move(built.error());
    books_.add(backend_books::communicator);
    communicator_ranks result;
    for (std::size_t i = 0; i < ranks.size(); ++i)
      result.push_back(
          std::make_unique<guarded_communicator>(std::move((*built)[i]), books_, ranks[i], size));
    return result;
  }
  static communicator_ranks inner_of(const communicator_ranks& ranks) {
    communicator_ranks result;
    for (auto& x : ranks)
      result.push_back(static_cast<guarded_communicator&>(*x).release());
    return result;
  }
  caf::error ended(caf::error x) {
    books_.add(backend_books::communicator, -1);
    return x;
  }

  backend_books& books_;
};

/// The books must outlive the returned backend.
inline std::shared_ptr<backend> backend_books::guard(std::shared_ptr<backend> inner) {
  return std::make_shared<guarded_backend>(std::move(inner), *this);
}

} // namespace troupe::testing
