#include <troupe/recording.hpp>

#include <utility>

namespace troupe {

rank_recording recording::on(int rank) { return {*this, rank}; }

recording& recording::fill(buffer_name target, scalar element) {
  requests_.push_back({.what = detail::recorded_fill{std::move(target), element}});
  return *this;
}

recording& recording::copy(buffer_name target, buffer_name source) {
  requests_.push_back({.what = detail::recorded_copy{std::move(target), std::move(source)}});
  return *this;
}

recording& recording::launch(std::string name, std::vector<std::uint8_t> arguments,
                             std::vector<buffer_name> reads, std::vector<buffer_name> writes) {
  requests_.push_back({.what = detail::recorded_launch{std::move(name), std::move(arguments),
                                                       std::move(reads), std::move(writes)}});
  return *this;
}

const rank_recording& rank_recording::fill(buffer_name target, scalar element) const {
  to_->fill(std::move(target), element).requests_.back().rank = rank_;
  return *this;
}

const rank_recording& rank_recording::copy(buffer_name target, buffer_name source) const {
  to_->copy(std::move(target), std::move(source)).requests_.back().rank = rank_;
  return *this;
}

const rank_recording& rank_recording::launch(std::string name, std::vector<std::uint8_t> arguments,
                                             std::vector<buffer_name> reads,
                                             std::vector<buffer_name> writes) const {
  to_->launch(std::move(name), std::move(arguments), std::move(reads), std::move(writes))
      .requests_.back()
      .rank = rank_;
  return *this;
}

recording& recording::run(named_collective what) {
  requests_.push_back({.what = std::move(what)});
  return *this;
}

recording& recording::all_reduce(buffer_name buffers, reduce_op op) {
  return run({.send = std::move(buffers), .op = op});
}

recording& recording::all_reduce(buffer_name send, buffer_name recv, reduce_op op) {
  return run({.send = std::move(send), .recv = std::move(recv), .op = op});
}

recording& recording::reduce(buffer_name buffers, int root, reduce_op op) {
  auto recv = buffers;
  return reduce(std::move(buffers), std::move(recv), root, op);
}

recording& recording::reduce(buffer_name send, buffer_name recv, int root, reduce_op op) {
  return run({.kind = collective_kind::reduce,
              .send = std::move(send),
              .recv = std::move(recv),
              .op = op,
              .peer = root});
}

recording& recording::broadcast(buffer_name buffers, int root) {
  auto send = buffers;
  return broadcast(std::move(send), std::move(buffers), root);
}

recording& recording::broadcast(buffer_name send, buffer_name recv, int root) {
  return run({.kind = collective_kind::broadcast,
              .send = std::move(send),
              .recv = std::move(recv),
              .peer = root});
}

recording& recording::all_gather(buffer_name recv) {
  return run({.kind = collective_kind::all_gather, .recv = std::move(recv)});
}

recording& recording::all_gather(buffer_name send, buffer_name recv) {
  return run(
      {.kind = collective_kind::all_gather, .send = std::move(send), .recv = std::move(recv)});
}

recording& recording::reduce_scatter(buffer_name send, reduce_op op) {
  return run({.kind = collective_kind::reduce_scatter, .send = std::move(send), .op = op});
}

recording& recording::reduce_scatter(buffer_name send, buffer_name recv, reduce_op op) {
  return run({.kind = collective_kind::reduce_scatter,
              .send = std::move(send),
              .recv = std::move(recv),
              .op = op});
}

recording& recording::all_to_all(buffer_name send, buffer_name recv) {
  return run(
      {.kind = collective_kind::all_to_all, .send = std::move(send), .recv = std::move(recv)});
}

recording& recording::all_to_all_v(buffer_name send, buffer_name recv,
                                   std::vector<std::vector<std::uint64_t>> counts) {
  return run({.kind = collective_kind::all_to_all_v,
              .send = std::move(send),
              .recv = std::move(recv),
              .counts = std::move(counts)});
}

recording& recording::gather(buffer_name send, buffer_name recv, int root) {
  return run({.kind = collective_kind::gather,
              .send = std::move(send),
              .recv = std::move(recv),
              .peer = root});
}

recording& recording::scatter(buffer_name send, buffer_name recv, int root) {
  return run({.kind = collective_kind::scatter,
              .send = std::move(send),
              .recv = std::move(recv),
              .peer = root});
}

recording& recording::send_recv(int from, buffer_name send, int to, buffer_name recv) {
  return run({.kind = collective_kind::send,
              .send = std::move(send),
              .recv = std::move(recv),
              .rank = from,
              .peer = to});
}

recording& recording::barrier() { return run({.kind = collective_kind::barrier}); }

recording& recording::group(const recording& calls) {
  detail::recorded_group result;
  for (auto& x : calls.requests())
    if (auto* call = std::get_if<named_collective>(&x.what))
      result.calls.push_back(*call);
    else
      ++result.others;
  requests_.push_back({.what = std::move(result)});
  return *this;
}

} // namespace troupe
