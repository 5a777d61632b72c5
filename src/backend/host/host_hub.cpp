#include "backend/host/host_hub.hpp"

#include "backend/host/host_group.hpp"
#include "backend/host/hub_rank.hpp"
#include "foundation/error_text.hpp"
#include "foundation/start_thread.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <poll.h>
#include <pthread.h>
#include <sys/random.h>

namespace troupe::detail {

namespace {

/// The time limit for a stranger to send the secret.
constexpr std::chrono::seconds hello_limit{2};

/// The time limit for a rank to read why its communicator has ended, and to disconnect.
constexpr std::chrono::milliseconds farewell_limit{500};

/// The pause after an accept failed because too many files were open.
constexpr std::chrono::milliseconds accept_pause{100};

/// The most connections that belong to no communicator.
constexpr std::ptrdiff_t most_strangers = 64;

/// @units bytes that are read from one connection before others have their turn
constexpr std::size_t read_at_once = std::size_t{1} << 20;

/// The most called-off communicators that are remembered.
constexpr std::size_t most_called_off = 256;

caf::error rank_failed(int rank, std::string detail) {
  return make_error({.code = errc::nccl_error, .detail = std::move(detail), .rank = rank});
}

caf::error process_gone(int rank) {
  return rank_failed(rank, "the process of rank " + std::to_string(rank) + " has ended");
}

caf::error hub_closed() {
  return make_error(errc::nccl_error, "the backend of the hub was closed");
}

/// Compares in a time that does not depend on the content.
bool is_same(std::span<const std::byte> x, std::span<const std::byte> y) noexcept {
  std::byte difference{0};
  for (std::size_t i = 0; i < x.size(); ++i)
    difference |= x[i] ^ y[i];
  return difference == std::byte{0};
}

/// @return 0, or `errno`
int fill_random(std::span<std::byte> target) noexcept {
  while (!target.empty()) {
    const auto got = ::getrandom(target.data(), target.size(), 0);
    if (got >= 0)
      target = target.subspan(static_cast<std::size_t>(got));
    else if (errno != EINTR)
      return errno;
  }
  return 0;
}

} // namespace

/// The ranks of one communicator that have connected, in the end all of them.
struct host_hub::meeting {
  meeting(std::uint64_t its_number, int size)
      : number(its_number), guests(static_cast<std::size_t>(size)) {}

  bool is_complete() const noexcept { return there == guests.size(); }

  const std::uint64_t number;
  std::vector<guest*> guests; ///< by rank; null: not connected yet, or gone
  std::size_t there = 0;
  std::shared_ptr<host_group> group; ///< set once all ranks are connected
};

host_hub::guest::guest(file_descriptor x) noexcept
    : socket(std::move(x)), targets{writable_bytes_of(hello)}, until(clock::now() + hello_limit) {}

host_hub::guest::~guest() = default;

caf::expected<std::unique_ptr<host_hub>> host_hub::start(const std::string& address) noexcept {
  auto at = address_from_string(address);
  if (!at)
    return std::move(at.error());
  auto listener = listen_at(*at);
  if (!listener)
    return std::move(listener.error());
  auto wake = wake_up::create();
  if (!wake)
    return std::move(wake.error());
  std::unique_ptr<host_hub> result{new host_hub{std::move(*listener), std::move(*wake), *at}};
  if (const int code = fill_random(result->secret_); code != 0)
    return system_failure(errc::unavailable, "getrandom", code);
  if (auto error =
          start_thread(result->thread_, [self = result.get()] { self->run(); }, "for a hub"))
    return error;
  return result;
}

host_hub::host_hub(file_descriptor listener, wake_up wake, socket_address address)
    : listener_(std::move(listener)), wake_(std::move(wake)), address_(address) {}

host_hub::~host_hub() {
  if (!thread_.joinable())
    return;
  stopping_ = true;
  wake_.signal();
  thread_.join();
}

hub_invitation host_hub::invite() noexcept {
  return {.secret = secret_, .group = next_++, .hub = address_};
}

bool host_hub::has_invited(const hub_invitation& x) const noexcept {
  return is_same(x.secret, secret_);
}

void host_hub::call_off(std::uint64_t group) noexcept {
  {
    std::lock_guard lock{unwanted_mutex_};
    unwanted_.push_back(group);
  }
  wake_.signal();
}

void host_hub::run() noexcept {
  pthread_setname_np(pthread_self(), "troupe.hub");
  while (!stopped_ || !guests_.empty()) {
    serve();
    call_off_unwanted();
    if (stopping_ && !stopped_)
      stop_all();
    for (auto i = guests_.begin(); i != guests_.end();) {
      if (look_after(*i)) {
        ++i;
        continue;
      }
      part(*i);
      i = guests_.erase(i);
    }
  }
}

void host_hub::serve() noexcept {
  const auto now = clock::now();
  std::vector<pollfd> wanted;
  std::vector<guest*> askers;
  wanted.push_back({wake_.native(), POLLIN, 0});
  wanted.push_back({accept_from_ <= now ? listener_.get() : -1, POLLIN, 0});
  for (auto& x : guests_)
    if (x.next != stage::over) {
      wanted.push_back({x.socket.get(), POLLIN, 0});
      askers.push_back(&x);
    }
  // An error, which can only be out of memory, counts as no input: all is checked again.
  if (::poll(wanted.data(), wanted.size(), patience(now)) <= 0)
    return;
  if (wanted[0].revents != 0)
    wake_.clear();
  for (std::size_t i = 0; i < askers.size(); ++i) {
    if (wanted[i + 2].revents != 0)
      read(*askers[i]);
    askers[i]->heard = true;
  }
  if (wanted[1].revents != 0)
    accept();
}

int host_hub::patience(clock::time_point now) const noexcept {
  auto first = clock::time_point::max();
  if (accept_from_ > now)
    first = accept_from_;
  for (const auto& x : guests_)
    first = std::min(first, x.until);
  if (first == clock::time_point::max())
    return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(first - now).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000));
}

void host_hub::accept() noexcept {
  const auto is_stranger = [](const guest& x) { return !x.met; };
  while (true) {
    auto oldest = guests_.end(); // makes room; never a guest whose first input is unread
    if (std::ranges::count_if(guests_, is_stranger) >= most_strangers) {
      oldest =
          std::ranges::find_if(guests_, [&](const guest& x) { return is_stranger(x) && x.heard; });
      if (oldest == guests_.end())
        return;
    }
    auto socket = accept_from(listener_);
    if (!socket)
      break;
    if (oldest != guests_.end())
      guests_.erase(oldest);
    guests_.emplace_back(std::move(socket));
  }
  if (errno != EAGAIN && errno != EWOULDBLOCK)
    accept_from_ = clock::now() + accept_pause;
}

bool host_hub::look_after(guest& x) noexcept {
  if (x.rank) {
    if (!x.told && x.met->group->error()) {
      x.told = true;
      x.rank->tell_end();
      if (x.next != stage::over)
        x.next = stage::nothing;
      x.until = std::min(x.until, clock::now() + farewell_limit);
    }
    if (x.rank->finished()) {
      x.rank.reset();
      if (!x.left && !x.told)
        lost(x); // a send to it has failed
      see_out(x);
    }
  }
  const auto cut = x.until <= clock::now();
  if (cut && x.rank) {
    shut_down(x.socket.get()); // ends a send of its rank that does not finish
    x.until = clock::time_point::max();
    if (!x.told && !x.left)
      lost(x);
    x.next = stage::over;
  }
  return x.rank || (!cut && x.next != stage::over);
}

void host_hub::stop_all() noexcept {
  stopped_ = true;
  listener_.reset();
  accept_from_ = {};
  const auto all = meetings_;
  for (const auto& [number, x] : all) {
    if (x->group)
      x->group->end(hub_closed());
    else
      call_off(*x, hub_closed());
  }
  for (auto& x : guests_)
    if (x.next == stage::hello)
      x.next = stage::over;
}

void host_hub::read(guest& x) noexcept {
  auto budget = read_at_once;
  std::array<std::byte, 4096> dropped{};
  while (x.next != stage::over) {
    const auto drops = x.next == stage::nothing;
    if (!drops && x.filled == x.targets.size()) {
      take_in(x);
      continue;
    }
    if (budget == 0)
      return;
    std::span<std::byte> target{dropped};
    if (!drops)
      target = x.targets[x.filled];
    const auto got = receive_some(x.socket.get(), target.first(std::min(target.size(), budget)));
    if (got < 0)
      return;
    if (got == 0)
      return lost(x);
    const auto taken = static_cast<std::size_t>(got);
    budget -= taken;
    if (drops)
      continue;
    auto& rest = x.targets[x.filled];
    rest = rest.subspan(taken);
    x.filled += rest.empty();
  }
}

void host_hub::expect(guest& x, stage next, mutable_blocks targets) noexcept {
  x.next = next;
  x.targets = std::move(targets);
  x.filled = 0;
}

void host_hub::expect_header(guest& x) noexcept {
  expect(x, stage::header, {writable_bytes_of(x.header)});
}

void host_hub::take_in(guest& x) noexcept {
  switch (x.next) {
  case stage::hello:
    return take_hello(x);
  case stage::header:
    return take_header(x);
  case stage::head:
    return take_head(x);
  case stage::data:
    return take_data(x);
  case stage::nothing:
  case stage::over:
    return;
  }
}

void host_hub::take_hello(guest& x) noexcept {
  if (x.hello.magic != wire_hello{}.magic || !is_same(x.hello.secret, secret_)) {
    x.next = stage::over;
    return;
  }
  x.until = clock::time_point::max();
  if (auto err = join(x))
    return dismiss(x, err);
  const frame_header accepted{.kind = frame_kind::accepted};
  if (!send_at_once(x.socket.get(), bytes_of(accepted)))
    return lost(x);
  expect_header(x);
  if (x.met->is_complete())
    open(*x.met);
}

caf::error host_hub::join(guest& x) {
  const auto& hello = x.hello;
  if (hello.group == 0 || hello.group >= next_ || hello.size <= 0 || hello.size > most_ranks)
    return make_error(errc::invalid_argument, "the communicator is unknown");
  if (const auto i = called_off_.find(hello.group); i != called_off_.end())
    return i->second;
  const auto found = meetings_.find(hello.group);
  auto to =
      found != meetings_.end() ? found->second : std::make_shared<meeting>(hello.group, hello.size);
  if (static_cast<std::size_t>(hello.size) != to->guests.size())
    return make_error(errc::invalid_argument, "a communicator of " + std::to_string(hello.size) +
                                                  " ranks, where another rank said " +
                                                  std::to_string(to->guests.size()));
  const auto r = static_cast<std::size_t>(hello.rank);
  if (hello.rank < 0 || hello.rank >= hello.size || to->guests[r] || to->group)
    return make_error(errc::invalid_argument,
                      "rank " + std::to_string(hello.rank) + " is already taken, or out of range");
  meetings_.try_emplace(hello.group, to);
  to->guests[r] = &x;
  ++to->there;
  x.met = std::move(to);
  return {};
}

void host_hub::open(meeting& x) noexcept {
  x.group = std::make_shared<host_group>(static_cast<int>(x.guests.size()));
  const frame_header ready{.kind = frame_kind::ready};
  for (auto* each : x.guests)
    // If a send fails, the guest has closed its side, which a later read notices.
    static_cast<void>(send_at_once(each->socket.get(), bytes_of(ready)));
  for (auto* each : x.guests) {
    each->rank = std::make_unique<hub_rank>(x.group, each->hello.rank, each->socket.get(),
                                            [this] { wake_.signal(); });
    if (auto err = each->rank->start()) {
      const end_frame frame{.why = wire_of(err)};
      static_cast<void>(send_at_once(each->socket.get(), bytes_of(frame)));
      x.group->end(std::move(err));
    }
  }
}

void host_hub::take_header(guest& x) noexcept {
  const auto& h = x.header;
  if (h.kind == frame_kind::leave)
    return leave(x);
  if (!x.rank)
    return misbehaved(x, "sent a frame before all ranks had joined");
  switch (h.kind) {
  case frame_kind::calls:
    if (h.head_bytes > most_head_bytes || h.data_bytes > most_data_bytes)
      return misbehaved(x, "sent a frame that is too large");
    break;
  case frame_kind::end:
    if (h.head_bytes != sizeof(wire_error) || h.data_bytes != 0)
      return misbehaved(x, "sent an error that cannot be parsed");
    break;
  default:
    return misbehaved(x, "sent an unexpected frame");
  }
  x.head.resize(h.head_bytes);
  expect(x, stage::head, {std::span{x.head}});
}

void host_hub::take_head(guest& x) noexcept {
  if (x.header.kind == frame_kind::end)
    return end(x);
  auto calls =
      remote_calls::decode(x.header, x.head, x.hello.rank, static_cast<int>(x.met->guests.size()));
  if (!calls) {
    x.met->group->end(std::move(calls.error()));
    x.next = stage::nothing;
    return;
  }
  x.calls = std::make_unique<remote_calls>(std::move(*calls));
  expect(x, stage::data, x.calls->sent());
}

void host_hub::take_data(guest& x) noexcept {
  if (!x.rank->make_calls(std::move(x.calls)))
    return misbehaved(x, "made calls before the last ones were complete");
  expect_header(x);
}

void host_hub::end(guest& x) noexcept {
  wire_error wire;
  std::memcpy(&wire, x.head.data(), sizeof wire);
  auto why = error_of(wire);
  if (!why)
    return misbehaved(x, "sent an error that cannot be parsed");
  x.met->group->end(std::move(*why));
  x.next = stage::nothing;
}

void host_hub::leave(guest& x) noexcept {
  x.next = stage::nothing;
  x.left = true;
  x.until = clock::now() + farewell_limit;
  if (!x.rank) {
    part(x);
    return;
  }
  x.met->group->leave(x.hello.rank);
  x.rank->leave();
}

void host_hub::lost(guest& x) noexcept {
  x.next = stage::over;
  if (!x.met || x.left)
    return;
  const auto why = process_gone(x.hello.rank);
  if (x.met->group) {
    x.met->group->end(why);
    return wake_.signal(); // for guests that were already looked after
  }
  const auto met = x.met;
  part(x);
  call_off(*met, why);
}

void host_hub::misbehaved(guest& x, const char* how) noexcept {
  x.next = stage::nothing;
  const auto rank = x.hello.rank;
  const auto why = rank_failed(rank, "rank " + std::to_string(rank) + ' ' + how);
  if (x.met->group)
    return x.met->group->end(why);
  const auto met = x.met;
  call_off(*met, why);
}

void host_hub::call_off_unwanted() noexcept {
  std::vector<std::uint64_t> all;
  {
    std::lock_guard lock{unwanted_mutex_};
    all.swap(unwanted_);
  }
  const auto why = build_called_off();
  for (const auto group : all)
    if (const auto i = meetings_.find(group); i == meetings_.end())
      remember(group, why);
    else if (const auto met = i->second; !met->group)
      call_off(*met, why);
}

void host_hub::remember(std::uint64_t group, const caf::error& why) {
  called_off_.emplace(group, why);
  if (called_off_.size() > most_called_off)
    called_off_.erase(called_off_.begin());
}

void host_hub::call_off(meeting& x, const caf::error& why) noexcept {
  remember(x.number, why);
  const auto guests = x.guests;
  for (auto* each : guests)
    if (each)
      dismiss(*each, why); // the last one removes the meeting
  meetings_.erase(x.number);
}

void host_hub::dismiss(guest& x, const caf::error& why) noexcept {
  const end_frame frame{.why = wire_of(why)};
  part(x);
  if (!send_at_once(x.socket.get(), bytes_of(frame)))
    x.next = stage::over; // it does not read, or is gone
  see_out(x);
}

void host_hub::see_out(guest& x) noexcept {
  if (x.next == stage::over)
    return;
  x.next = stage::nothing;
  shut_down_sending(x.socket.get());
  x.until = std::min(x.until, clock::now() + farewell_limit);
}

void host_hub::part(guest& x) noexcept {
  const auto met = std::exchange(x.met, nullptr);
  if (!met)
    return;
  met->guests[static_cast<std::size_t>(x.hello.rank)] = nullptr;
  if (--met->there == 0)
    meetings_.erase(met->number);
}

} // namespace troupe::detail
