/// A backend whose devices record graphs: lists of the calls that another backend gets again in
/// each launch.
#pragma once

#include "support/forwarding_backend.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace troupe::testing {

using recorded_calls = std::vector<std::function<caf::error()>>;

/// What a device and its ranks of communicators record. Any thread may read the counters.
struct recorder {
  std::string file = {}; ///< gets a byte for each graph that is recorded or launched; may be empty
  recorded_calls* to = nullptr; ///< null: nothing is recorded
  void* stream = nullptr;       ///< that is recorded: calls in others are made at once
  std::atomic<int> recorded{0};
  std::atomic<int> launched{0};
  std::atomic<int> dropped{0};
  std::atomic<int> place{0};  ///< the last one
  std::atomic<int> places{0}; ///< calls of `enqueue` with a place in a step
  std::atomic<bool> refuses_copies{false};
  std::atomic<bool> fails_once{false};

  void note(std::atomic<int>& counter, const char* what) const {
    ++counter;
    if (!file.empty())
      std::ofstream{file + what, std::ios::app} << '.';
  }

  /// Records `f`, a call in `on`, or calls it.
  caf::error take(stream_view on, std::function<caf::error()> f) {
    if (to == nullptr || on.native != stream)
      return f();
    to->push_back(std::move(f));
    return {};
  }
};

class recording_device final : public forwarding_device {
public:
  recording_device(std::unique_ptr<backend_device> inner, std::shared_ptr<recorder> x)
      : forwarding_device(std::move(inner)), recorder_(std::move(x)) {}

  bool records_graphs() const noexcept override { return true; }
  caf::expected<graph_view>
  record_graph(stream_view stream, const std::function<caf::error()>& enqueue) noexcept override {
    auto calls = std::make_unique<recorded_calls>();
    recorder_->to = calls.get();
    recorder_->stream = stream.native;
    auto error = enqueue();
    recorder_->to = nullptr;
    if (!error && recorder_->fails_once.exchange(false))
      error = make_error(errc::cuda_error, "on purpose");
    if (error)
      return error;
    recorder_->note(recorder_->recorded, ".recorded");
    return graph_view{calls.release()};
  }
  caf::error launch_graph(graph_view graph, stream_view) noexcept override {
    recorder_->note(recorder_->launched, ".launched");
    for (auto& f : *static_cast<recorded_calls*>(graph.native))
      if (auto error = f())
        return error;
    return {};
  }
  caf::error drop_graph(graph_view graph) noexcept override {
    ++recorder_->dropped;
    delete static_cast<recorded_calls*>(graph.native);
    return {};
  }

  caf::error copy(void* to, const void* from, std::size_t size_bytes, copy_direction direction,
                  stream_view on) noexcept override {
    if (recorder_->to != nullptr && recorder_->refuses_copies)
      return make_error(errc::not_supported, "a copy is not recorded");
    return recorder_->take(on,
                           [=, this] { return inner_->copy(to, from, size_bytes, direction, on); });
  }
  caf::error fill(void* to, std::span<const std::byte> pattern, std::size_t times,
                  stream_view on) noexcept override {
    return recorder_->take(
        on, [=, this, bytes = std::vector<std::byte>(pattern.begin(), pattern.end())] {
          return inner_->fill(to, bytes, times, on);
        });
  }

private:
  const std::shared_ptr<recorder> recorder_;
};

class recording_rank final : public backend_communicator {
public:
  recording_rank(std::unique_ptr<backend_communicator> inner, std::shared_ptr<recorder> x)
      : inner_(std::move(inner)), recorder_(std::move(x)) {}

  caf::error connect(stream_view stream, connect_scope what) noexcept override {
    return inner_->connect(stream, what);
  }
  caf::error enqueue(std::span<const collective_call> calls, stream_view stream,
                     step_position where) noexcept override {
    if (where.place != 0) {
      recorder_->place = static_cast<int>(where.place);
      ++recorder_->places;
    }
    return recorder_->take(
        stream, [=, this, all = std::vector<collective_call>(calls.begin(), calls.end())] {
          return inner_->enqueue(all, stream);
        });
  }
  void compare_calls() noexcept override { inner_->compare_calls(); }
  caf::error asynchronous_error() noexcept override { return inner_->asynchronous_error(); }

  std::unique_ptr<backend_communicator> release() noexcept { return std::move(inner_); }

private:
  std::unique_ptr<backend_communicator> inner_;
  const std::shared_ptr<recorder> recorder_;
};

class recording_backend final : public forwarding_backend {
public:
  /// `recorders`: one for each device
  recording_backend(std::shared_ptr<backend> inner,
                    std::vector<std::shared_ptr<recorder>> recorders)
      : forwarding_backend(std::move(inner)), recorders_(std::move(recorders)) {}

  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override {
    return open_as<recording_device>(ordinal, recorder_of(ordinal));
  }
  caf::expected<communicator_ranks> build(const communicator_id& id, int size,
                                          std::span<const local_rank> ranks) noexcept override {
    return wrapped(inner_->build(id, size, ranks), ranks);
  }
  caf::expected<communicator_ranks>
  build_direct(std::span<const local_rank> ranks) noexcept override {
    return wrapped(inner_->build_direct(ranks), ranks);
  }
  caf::expected<communicator_ranks>
  join_direct(const communicator_id& id, int rank,
              std::span<const direct_member> members) noexcept override {
    const local_rank own{rank, members[static_cast<std::size_t>(rank)].device};
    return wrapped(inner_->join_direct(id, rank, members), {&own, 1});
  }
  caf::error abort(communicator_ranks ranks) noexcept override {
    return inner_->abort(inner_of(ranks));
  }
  caf::error destroy(communicator_ranks ranks) noexcept override {
    return inner_->destroy(inner_of(ranks));
  }

private:
  const std::shared_ptr<recorder>& recorder_of(int ordinal) const {
    return recorders_.at(static_cast<std::size_t>(ordinal));
  }
  caf::expected<communicator_ranks> wrapped(caf::expected<communicator_ranks> built,
                                            std::span<const local_rank> ranks) {
    if (!built)
      return std::move(built.error());
    communicator_ranks result;
    for (std::size_t i = 0; i < ranks.size(); ++i)
      result.push_back(
          std::make_unique<recording_rank>(std::move((*built)[i]), recorder_of(ranks[i].device)));
    return result;
  }
  static communicator_ranks inner_of(const communicator_ranks& ranks) {
    communicator_ranks result;
    for (auto& x : ranks)
      result.push_back(static_cast<recording_rank&>(*x).release());
    return result;
  }

  const std::vector<std::shared_ptr<recorder>> recorders_;
};

} // namespace troupe::testing
