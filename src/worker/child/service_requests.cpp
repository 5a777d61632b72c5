/// worker_service: answers the requests that come through the socket.
#include "foundation/error_text.hpp"
#include "foundation/log.hpp"
#include "foundation/other_processes.hpp"
#include "worker/child/worker_service.hpp"

#include <array>
#include <utility>
#include <vector>

namespace troupe::detail {

namespace {

memory_slab slab_of(const slab_args& x) {
  return {x.device, reinterpret_cast<void*>(x.address), x.size_bytes};
}

} // namespace

void worker_service::answer(const control_head& head, const caf::error& error,
                            std::span<const std::byte> result) noexcept {
  static_cast<void>(options_.send(answer_to(head, error, result).bytes(), std::nullopt));
  if (severity_of(error) == severity::process)
    fault(error);
}

template <class T>
void worker_service::answer(const control_head& head, const caf::expected<T>& result) noexcept {
  wire_writer value;
  const auto error = put_result(value, result);
  answer(head, error, value.bytes());
}

void worker_service::received(std::span<const std::byte> message,
                              std::optional<file_descriptor> descriptor) noexcept {
  after_hearing_from_another_process();
  wire_reader reader{message};
  const auto head = reader.get<control_head>();
  if (!reader.ok())
    return fault(make_error(errc::internal, "a message of the parent's could not be read"));
  serve_control(head, message.subspan(sizeof head), std::move(descriptor));
}

template <class T, class F>
void worker_service::with_arguments(const control_head& head, wire_reader& body, F f) {
  const auto x = body.get<T>();
  body.ok() ? f(x) : answer(head, malformed());
}

template <class T, class F>
void worker_service::answer_in_job(const control_head& head, wire_reader& body, F f) {
  with_arguments<T>(head, body,
                    [&](auto& x) { run_job(head, [this, head, x, f] { answer(head, f(x)); }); });
}

template <class T, class F>
void worker_service::answer_in_end(const control_head& head, wire_reader& body, F f) {
  with_arguments<T>(head, body, [&](auto& x) {
    begin_job();
    ends_->run([this, head, x, f] {
      answer(head, f(x));
      end_job();
    });
  });
}

void worker_service::serve_control(const control_head& head, std::span<const std::byte> body,
                                   std::optional<file_descriptor> descriptor) {
  wire_reader reader{body};
  switch (head.kind) {
  case control::peer_link:
    return answer_in_job<std::array<std::int32_t, 2>>(
        head, reader, [this](auto& pair) { return executes_->link(pair[0], pair[1]); });
  case control::make_communicator_id:
    return answer(head, executes_->make_communicator_id());
  case control::check_build:
    return answer_in_job<build_args>(head, reader, [this](auto& what) {
      const local_rank mine{what.rank, what.device};
      return executes_->check_build(what.size, {&mine, 1});
    });
  case control::build:
    return answer_in_job<build_args>(head, reader, [this](auto& what) { return build(what); });
  case control::make_direct_id:
    return answer(head, executes_->make_direct_id());
  case control::join_direct:
    return answer_in_job<join_args>(head, reader, [this](auto& what) { return join_direct(what); });
  case control::call_off:
    return with_arguments<communicator_id>(head, reader, [&](auto& id) {
      executes_->call_off(id);
      answer(head, caf::error{});
    });
  case control::close:
    return answer_in_end<communicator_key>(head, reader, [this](auto key) {
      close(key);
      return caf::error{};
    });
  case control::abort:
  case control::destroy:
    return answer_in_end<communicator_key>(
        head, reader, [this, how = head.kind](auto key) { return end(how, key); });
  case control::hand_over: {
    const auto key = reader.get<communicator_key>();
    const auto what = reader.get_bytes();
    return answer(head, reader.ok() ? hand_over(key, what) : malformed());
  }
  case control::map:
    return with_arguments<map_args>(
        head, reader, [&](auto& what) { answer(head, map(what, std::move(descriptor))); });
  case control::unmap:
    return with_arguments<std::uint64_t>(head, reader,
                                         [&](auto segment) { answer(head, unmap(segment)); });
  // These are calls of the driver that may take long for much memory.
  case control::make_slab:
    return with_arguments<slab_args>(head, reader, [&](auto& what) {
      run_job_or_here([this, head, what] { make_slab(head, what); });
    });
  case control::unmap_slab:
    return with_arguments<slab_args>(head, reader, [&](auto& what) {
      run_job_or_here([this, head, what] { answer(head, executes_->unmap_slab(slab_of(what))); });
    });
  case control::map_slab:
    return with_arguments<slab_args>(head, reader, [&](auto& what) {
      const auto of = std::make_shared<std::optional<file_descriptor>>(std::move(descriptor));
      run_job_or_here([this, head, what, of] { answer(head, map_slab(what, *of)); });
    });
  case control::drop_slab:
    return with_arguments<slab_args>(head, reader, [&](auto& what) { drop_slab(head, what); });
  case control::drop_graph:
    return with_arguments<graph_id>(head, reader, [&](graph_id graph) {
      post_to_device([this, graph] { drop_graph(graph); });
      answer(head, caf::error{});
    });
  case control::tell:
    if (programs_ != nullptr)
      programs_->received(body);
    return answer(head, caf::error{});
  case control::trim: {
    wire_writer ranges;
    ranges.put(programs_ != nullptr ? programs_->trim() : std::vector<lent_range>{});
    return answer(head, caf::error{}, ranges.bytes());
  }
  case control::demand_reply:
    return answer(head, take_reply(reader));
  case control::set_up:    // only valid as the first message
  case control::told:      // only sent by workers
  case control::lend:      // likewise
  case control::take_back: // likewise
    break;
  }
  answer(head, malformed());
}

caf::error worker_service::take_reply(wire_reader& body) {
  const auto number = body.get<std::uint64_t>();
  const auto error = body.get<caf::error>();
  const auto range = body.get<lent_range>();
  if (!body.ok() || programs_ == nullptr)
    return malformed();
  programs_->answered(number,
                      error ? caf::expected<lent_range>{error} : caf::expected<lent_range>{range});
  return {};
}

caf::expected<communicator_key> worker_service::build(const build_args& what) {
  if (what.rank < 0 || what.rank >= what.size)
    return malformed();
  const local_rank mine{what.rank, what.device};
  auto ranks = executes_->build(what.id, what.size, {&mine, 1});
  if (!ranks)
    return ranks.error();
  // On this thread: the one that drives the device has work of other communicators.
  stream_view stream;
  auto error = on_device([&] {
    auto made = device_->create_stream();
    if (!made)
      return made.error();
    stream = *made;
    return caf::error{};
  });
  if (!error)
    error = ranks->front()->connect(stream, connect_scope::everything);
  if (stream.native != nullptr)
    keep_first(error, on_device([&] { return device_->destroy_stream(stream); }));
  if (error) {
    if (auto end = executes_->abort(std::move(*ranks)))
      log(log_level::warning, "the end of a communicator gave an error", end);
    return error;
  }
  return keep(std::move(*ranks));
}

caf::expected<communicator_key> worker_service::join_direct(const join_args& what) {
  auto ranks = executes_->join_direct(what.id, what.rank, what.members);
  if (!ranks)
    return ranks.error();
  return keep(std::move(*ranks));
}

caf::expected<communicator_key> worker_service::keep(communicator_ranks rank) {
  if (rank.size() != 1)
    return make_error(errc::internal, "the build did not give exactly the requested rank");
  std::lock_guard lock{mutex_};
  communicators_.emplace(++last_communicator_, std::move(rank));
  return last_communicator_;
}

void worker_service::close(communicator_key key) {
  if (is_handed_over(key))
    return programs_->close(key);
  const std::lock_guard lock{mutex_};
  if (const auto i = communicators_.find(key); i != communicators_.end())
    i->second.front()->on_closed();
}

caf::error worker_service::end(control how, communicator_key key) {
  communicator_ranks owner;
  {
    std::unique_lock lock{mutex_};
    if (handed_over_.contains(key)) {
      lock.unlock();
      programs_->close(key);
      programs_->allow_end(key);
      lock.lock();
      one_gone_.wait(lock, [&] { return !handed_over_.contains(key); });
    }
    if (gone_.erase(key) != 0)
      return {};
    auto i = communicators_.find(key);
    if (i == communicators_.end())
      return no_such("communicator");
    owner = std::move(i->second);
    communicators_.erase(i);
    one_gone_.wait(lock, [&] { return marked_ != key; });
  }
  return how == control::abort ? executes_->abort(std::move(owner))
                               : executes_->destroy(std::move(owner));
}

caf::error worker_service::hand_over(communicator_key key, std::span<const std::byte> what) {
  communicator_ranks rank;
  {
    std::lock_guard lock{mutex_};
    auto i = communicators_.find(key);
    if (i == communicators_.end())
      return no_such("communicator");
    if (programs_ == nullptr)
      return make_error(errc::not_supported, "the worker has no programs");
    rank = std::move(i->second);
    communicators_.erase(i);
    handed_over_.insert(key);
  }
  return programs_->take(key, std::move(rank), what);
}

bool worker_service::is_handed_over(communicator_key key) {
  std::lock_guard lock{mutex_};
  return handed_over_.contains(key);
}

void worker_service::gone(communicator_key key) noexcept {
  std::lock_guard lock{mutex_};
  handed_over_.erase(key);
  gone_.insert(key);
  one_gone_.notify_all();
}

void worker_service::make_slab(const control_head& head, const slab_args& what) {
  if (what.device != options_.device)
    return answer(head, no_such("device"));
  const auto made = executes_->make_slab(slab_of(what));
  if (!made)
    return answer(head, made.error());
  const file_descriptor of_parent{*made}; // closed here when the parent has it
  auto error = options_.send(answer_to(head, {}).bytes(), of_parent.get());
  if (!error)
    return;
  keep_first(error, executes_->unmap_slab(slab_of(what)));
  answer(head, error);
}

caf::error worker_service::map_slab(const slab_args& what,
                                    const std::optional<file_descriptor>& descriptor) {
  if (!descriptor) // of this request alone
    return make_error(errc::out_of_memory, "no file descriptor arrived with device memory; the "
                                           "worker may have reached its limit");
  return executes_->map_slab(slab_of(what), descriptor->get(), options_.device);
}

void worker_service::drop_slab(const control_head& head, const slab_args& what) {
  post_to_device([this, head, what] {
    retire([this, head, what] {
      run_job_or_here([this, head, what] { answer(head, executes_->unmap_slab(slab_of(what))); });
    });
  });
}

// -- host memory that the parent shares

std::byte* worker_service::host_address(const shared_place& x, std::size_t size_bytes) {
  std::lock_guard lock{mutex_};
  auto i = segments_.find(x.segment);
  if (i == segments_.end())
    return nullptr;
  auto bytes = i->second.bytes();
  return x.offset <= bytes.size() && size_bytes <= bytes.size() - x.offset ? bytes.data() + x.offset
                                                                           : nullptr;
}

caf::error worker_service::map(const map_args& what, std::optional<file_descriptor> descriptor) {
  if (!descriptor)
    return make_error(
        errc::unavailable,
        "no file descriptor arrived with the memory; the worker may have reached its limit");
  {
    std::lock_guard lock{mutex_};
    if (segments_.contains(what.segment))
      return make_error(errc::invalid_argument, "the memory is mapped already");
  }
  auto memory = shared_memory::attach(std::move(*descriptor), what.size_bytes);
  if (!memory)
    return memory.error();
  memory->close_descriptor(); // descriptors are scarce
  if (auto error = device_->register_pinned(memory->bytes().data(), memory->bytes().size()))
    return error;
  std::lock_guard lock{mutex_};
  segments_.emplace(what.segment, std::move(*memory)); // no conflict: messages come one at a time
  return {};
}

caf::error worker_service::unmap(std::uint64_t segment) {
  std::shared_ptr<shared_memory> gone;
  {
    std::lock_guard lock{mutex_};
    auto i = segments_.find(segment);
    if (i == segments_.end())
      return no_such("host memory");
    gone = std::make_shared<shared_memory>(std::move(i->second));
    segments_.erase(i);
  }
  // Does not wait: it may take as long as the work in the streams.
  post_to_device([this, gone] {
    retire([this, gone] {
      run_job_or_here([this, gone] { // it may wait for the device
        if (auto error = device_->unregister_pinned(gone->bytes().data()))
          log(log_level::warning, "host memory could not be unregistered", error);
      });
    });
  });
  return {};
}

void worker_service::retire(std::function<void()> free) {
  auto& x = retired_.emplace_back(retired_memory{std::move(free), {}});
  if (auto error = record_in_all(x.passed))
    return fault(error);
  free_retired();
}

caf::error worker_service::record_in_all(std::vector<event_view>& events) {
  for (auto& [id, stream] : streams_) {
    auto event = take_event();
    if (!event)
      return event.error();
    events.push_back(*event);
    if (auto error = device_->record(*event, stream.native))
      return error;
  }
  return {};
}

void worker_service::free_retired() noexcept {
  while (!retired_.empty()) {
    auto& x = retired_.front();
    for (auto& event : x.passed) {
      auto done = device_->query(event);
      if (!done)
        return fault(done.error());
      if (!*done)
        return;
    }
    spare_events_.insert(spare_events_.end(), x.passed.begin(), x.passed.end());
    x.free();
    retired_.pop_front();
  }
}

} // namespace troupe::detail
