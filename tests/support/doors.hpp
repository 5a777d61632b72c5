/// Backends in which a test controls when devices, communicators and spares become available.
#pragma once

#include "support/forwarding_backend.hpp"

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>

namespace troupe::testing {

/// Blocks callers of pass() while it is closed.
class door {
public:
  void close() {
    std::lock_guard lock{mutex_};
    open_ = false;
  }
  void open() {
    std::lock_guard lock{mutex_};
    open_ = true;
    condition_.notify_all();
  }
  void pass() {
    std::unique_lock lock{mutex_};
    ++reached_;
    condition_.wait(lock, [this] { return open_; });
  }
  int reached() const {
    std::lock_guard lock{mutex_};
    return reached_;
  }

private:
  mutable std::mutex mutex_;
  std::condition_variable condition_;
  bool open_ = true;
  int reached_ = 0;
};

/// Keeps a door closed during its lifetime.
class closed_door {
public:
  explicit closed_door(door& x) : door_(x) { door_.close(); }
  ~closed_door() { door_.open(); }
  closed_door(const closed_door&) = delete;
  closed_door& operator=(const closed_door&) = delete;

private:
  door& door_;
};

struct doors {
  door devices; ///< passed by each device that opens or reopens
  door builds;  ///< passed by each build of a communicator
  door spares;
  std::map<int, std::atomic<int>> refused{}; ///< by device: number of attempts to open that fail
};

class behind_doors final : public forwarding_backend {
public:
  behind_doors(std::shared_ptr<backend> inner, std::shared_ptr<doors> ways)
      : forwarding_backend(std::move(inner)), ways_(std::move(ways)) {}

  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override {
    class guest final : public forwarding_device {
    public:
      guest(std::unique_ptr<backend_device> inner, std::shared_ptr<doors> ways, int ordinal)
          : forwarding_device(std::move(inner)), ways_(std::move(ways)), ordinal_(ordinal) {}
      caf::error bind() noexcept override {
        ways_->devices.pass();
        if (auto i = ways_->refused.find(ordinal_); i != ways_->refused.end() && i->second-- > 0)
          return make_error(errc::unavailable, "not yet");
        return inner_->bind();
      }

    private:
      std::shared_ptr<doors> ways_;
      int ordinal_;
    };
    return open_as<guest>(ordinal, ways_, ordinal);
  }
  caf::expected<communicator_ranks> build(const communicator_id& id, int size,
                                          std::span<const local_rank> ranks) noexcept override {
    ways_->builds.pass();
    return inner_->build(id, size, ranks);
  }
  caf::error provide_spare(int ordinal) noexcept override {
    ways_->spares.pass();
    return inner_->provide_spare(ordinal);
  }
  caf::error prepare_move(int ordinal) noexcept override {
    ways_->spares.pass();
    return inner_->prepare_move(ordinal);
  }

private:
  std::shared_ptr<doors> ways_;
};

} // namespace troupe::testing
