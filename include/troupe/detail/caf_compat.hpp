/// The only file that depends on the version of CAF: 0.17.6 (Debian, Ubuntu) or 1.x (vcpkg, Conan).
/// It includes little of CAF; a file that sends or spawns includes `caf/all.hpp` itself.
#pragma once

#include <caf/actor_system_config.hpp>
#include <caf/allowed_unsafe_message_type.hpp>
#include <caf/binary_deserializer.hpp>
#include <caf/binary_serializer.hpp>
#include <caf/blocking_actor.hpp>
#include <caf/config.hpp>
#include <caf/error.hpp>
#include <caf/event_based_actor.hpp>
#include <caf/expected.hpp>
#include <caf/fwd.hpp>
#include <caf/message.hpp>
#include <caf/message_id.hpp>
#include <caf/message_priority.hpp>
#include <caf/response_promise.hpp>
#include <caf/resumable.hpp>
#include <caf/scoped_actor.hpp>
#include <caf/thread_hook.hpp>
#include <caf/type_id.hpp>

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#if CAF_MAJOR_VERSION >= 1 // CAF_VERSION is an octal literal in 1.0 and 1.1
#define TROUPE_CAF1 1
#include <caf/anon_mail.hpp>
#include <caf/blocking_response_handle.hpp>
#include <caf/event_based_response_handle.hpp>
#include <caf/init_global_meta_objects.hpp>
#include <caf/io/middleman.hpp>
#include <caf/mailbox_element.hpp>
#include <caf/scheduler.hpp>
#include <caf/thread_owner.hpp>
#elif CAF_MINOR_VERSION == 17
#define TROUPE_CAF1 0
#include <caf/execution_unit.hpp>
#include <caf/scheduler/abstract_coordinator.hpp>
#else
#error "troupe needs CAF 0.17.6 or CAF 1.0.2 and newer"
#endif

/// Whether the condition variable on which an actor system waits is known. It is private in CAF.
#if CAF_MAJOR_VERSION == 0 || (CAF_MAJOR_VERSION == 1 && CAF_MINOR_VERSION <= 1)
#define TROUPE_CAF_HAS_RUNNING_CONDITION 1
#else
#define TROUPE_CAF_HAS_RUNNING_CONDITION 0
#endif

namespace troupe::detail {

/// Registers the library's messages with CAF 1.x, which must happen before their first use. CAF
/// 0.17 gets them from the configuration. Cheap after the first time.
struct known_types {
  known_types();
};

/// One named field of a message, for `fields`.
template <class T> struct field_ref {
  const char* name;
  T& value;
};

template <class T> field_ref<T> field(const char* name, T& value) { return {name, value}; }

/// Returns `dest`, or an invalid handle if a payload that cannot be serialized would leave the
/// process. CAF then drops a send and fails a request, and does not corrupt the connection (1.x).
template <class... Ts, class Self, class Dest> Dest checked(const Self& self, const Dest& dest) {
  if constexpr ((caf::allowed_unsafe_message_type<std::decay_t<Ts>>::value || ...))
    if (dest && dest.node() != self->node())
      return Dest{};
  return dest;
}

/// Whether `Self`, a pointer to an actor or a `caf::scoped_actor`, is a blocking actor.
template <class Self>
inline constexpr bool is_blocking_actor =
    std::is_base_of_v<caf::blocking_actor, std::remove_cvref_t<decltype(*std::declval<Self>())>>;

/// Returns the id for a request of `self` that is made without a message.
template <class Self> caf::message_id new_request_id(const Self& self) {
  return self->new_request_id(caf::message_priority::normal);
}

#if TROUPE_CAF1

#define TROUPE_ERROR_ENUM(type, category) CAF_ERROR_CODE_ENUM(type)
#define TROUPE_INSPECT_ENUM(type)                                                                  \
  template <class Inspector> bool inspect(Inspector& f, type& x) {                                 \
    return ::troupe::detail::inspect_enum(f, x);                                                   \
  }

template <class> using inspect_result = bool;

template <class Inspector, class T, class... Fs>
bool fields(Inspector& f, T& x, const char* name, field_ref<Fs>... fs) {
  return f.object(x).pretty_name(name).fields(f.field(fs.name, fs.value)...);
}

template <class Inspector, class E> bool inspect_enum(Inspector& f, E& x) {
  using rep = std::underlying_type_t<E>;
  if (f.has_human_readable_format())
    return f.apply([&x] { return std::string{to_string(x)}; },
                   [](std::string_view) { return false; });
  return f.apply([&x] { return static_cast<rep>(x); },
                 [&x](rep y) {
                   x = static_cast<E>(y);
                   return true;
                 });
}

/// Serializes `x` as a `Repr`.
template <class Repr, class Inspector, class T, class Get, class Set>
bool inspect_as(Inspector& f, T& x, Get get, Set set) {
  return f.object(x).fields(f.field(
      "as", [&] { return get(x); },
      [&](Repr y) {
        x = set(y);
        return true;
      }));
}

/// Registers the blocks' types with CAF, before the first configuration. Can be called again.
template <class... Blocks> void init_types() {
  static const bool once = [] {
    (caf::init_global_meta_objects<Blocks>(), ...);
    caf::io::middleman::init_global_meta_objects();
    caf::core::init_global_meta_objects();
    return true;
  }();
  (void)once;
}

struct config_base : caf::actor_system_config {
  /// Sets an option of CAF; `key` without the prefix "caf.".
  template <class T> void caf_option(const std::string& key, T x) {
    set("caf." + key, std::move(x));
  }
  template <class... Blocks> void add_types() {}
  template <class E> void add_errors(const char*) {}
};

/// Returns the text of an error of another library's category.
inline std::string describe_foreign(const caf::error& e) { return to_string(e); }

/// Returns the command-line argument in the context of an error of CAF's parser, if there is one.
inline std::optional<std::string> argument_of(const caf::message& context) {
  if (context.size() != 1 || !context.match_element<std::string>(0))
    return std::nullopt;
  return context.get_as<std::string>(0);
}

/// Returns whether the command-line parser has printed what --help and similar options request.
inline bool has_printed_help(const caf::actor_system_config& cfg) noexcept {
  return cfg.helptext_printed();
}

template <class E> bool in_category(const caf::error& e) {
  return e.category() == caf::type_id_v<E>;
}

/// Returns whether the receiver has ended: it then replies with its exit reason, perhaps none.
inline bool means_receiver_down(const caf::error& e) {
  return e == caf::none || in_category<caf::exit_reason>(e);
}

template <class Self, class Dest, class... Ts>
void send(const Self& self, const Dest& dest, Ts&&... xs) {
  self->mail(std::forward<Ts>(xs)...).send(checked<Ts...>(self, dest));
}

/// Sends without a sender; callable from any thread.
template <class Dest, class... Ts> void anon_send(const Dest& dest, Ts&&... xs) {
  caf::anon_mail(std::forward<Ts>(xs)...).send(dest);
}

template <class Self, class Dest, class Dur, class... Ts>
void send_after(const Self& self, const Dest& dest, Dur delay, Ts&&... xs) {
  self->mail(std::forward<Ts>(xs)...).delay(delay).send(dest);
}

template <class Self, class Dest, class Dur, class... Ts>
auto request(const Self& self, const Dest& dest, Dur timeout, Ts&&... xs) {
  return self->mail(std::forward<Ts>(xs)...).request(checked<Ts...>(self, dest), timeout);
}

/// Returns the handle by which `self` receives the response to the request `id`.
template <class Self> auto response_to(const Self& self, caf::message_id id) {
  auto& who = *self;
  if constexpr (is_blocking_actor<Self>)
    return caf::blocking_response_handle<caf::message>{&who, id.response_id(), caf::infinite};
  else
    return caf::event_based_response_handle<caf::message>{&who, id.response_id(), {}};
}

/// Returns the serialized form of `x`, as sent between processes.
template <class T>
caf::expected<std::vector<std::byte>> to_bytes(caf::actor_system& sys, const T& x) {
  caf::byte_buffer buffer;
  caf::binary_serializer sink{sys, buffer};
  if (!sink.apply(x))
    return sink.get_error();
  return std::vector<std::byte>{buffer.begin(), buffer.end()};
}

template <class T>
caf::error from_bytes(caf::actor_system& sys, const std::vector<std::byte>& bytes, T& x) {
  caf::binary_deserializer source{sys, bytes};
  if (!source.apply(x))
    return source.get_error();
  return {};
}

/// The context that a pool worker passes to its jobs.
using pool_context = caf::scheduler;

/// A job of the pool. Its owner keeps it alive.
class pool_job : public caf::resumable {
public:
  virtual resume_result run(pool_context* on, std::size_t throughput) = 0;

  resume_result resume(pool_context* on, std::size_t throughput) final {
    return run(on, throughput);
  }
  void ref_resumable() const noexcept final {}
  void deref_resumable() const noexcept final {}
};

/// Receives, in place of the pool, the actors that a message has made runnable.
class job_sink : public caf::scheduler {
public:
  explicit job_sink(caf::actor_system&) {}
  void schedule(caf::resumable* job) final { take(job); }
  void delay(caf::resumable* job) final { take(job); }
  void start() final {}
  void stop() final {}

protected:
  virtual void take(caf::resumable* job) = 0;
};

inline void run_in_pool(caf::actor_system& sys, caf::resumable* job) {
  sys.scheduler().schedule(job);
}

/// Puts `job`, which has just run, behind the other jobs of a worker.
inline void run_later(caf::resumable* job, pool_context* on) { on->delay(job); }

/// Returns whether the actor has ended, or is about to on a thread that has a handle of it.
inline bool has_ended(const caf::abstract_actor& x) {
  return x.getf(caf::abstract_actor::is_terminated_flag);
}

/// Puts a response into the mailbox of `receiver`; callable from any thread. If that makes an actor
/// of the pool runnable, it goes to `runs_on`, or to the pool if `runs_on` is null.
inline void enqueue_response(const caf::strong_actor_ptr& receiver,
                             const caf::strong_actor_ptr& sender, caf::message_id request,
                             caf::message content, job_sink* runs_on) {
  if (receiver)
    receiver->enqueue(caf::make_mailbox_element(sender, request.response_id(), std::move(content)),
                      runs_on);
}

template <class Base = caf::event_based_actor> struct actor_base : Base {
  using Base::Base;

  template <class H, class F> // F: void(const caf::error&)
  void on_down(const H& handle, F f) {
    this->monitor(handle, [f](const caf::error& why) mutable { f(why); });
  }

  template <class F, class... Fs> // F: void(caf::exit_msg&)
  caf::behavior with_exit(F f, Fs... fs) {
    return {[f](caf::exit_msg& x) mutable { f(x); }, std::move(fs)...};
  }

  /// Returns the same behavior, with `other(name of the first element's type)` for messages without
  /// a handler. It returns the error for the requester; the sender of a message that is no request
  /// gets none.
  ///
  /// CAF 1.1 deprecates default handlers in favor of a last handler that takes a `caf::message`.
  /// Such a handler is a part of the behavior. A default handler gets only what is left when CAF's
  /// own handlers have had their turn: those for errors that other actors send, and for actors that
  /// are down.
  ///
  /// @thread that of the actor
  template <class Other, class F, class... Fs> // Other: caf::error(std::string)
  caf::behavior with_exit_and_others(Other other, F f, Fs... fs) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    this->set_default_handler(
        [this, other](caf::scheduled_actor*, caf::message& x) -> caf::skippable_result {
          const std::string type{x.empty() ? std::string_view{"nothing"}
                                           : std::string_view{caf::query_type_name(x.type_at(0))}};
          auto error = other(type);
          if (!this->current_message_id().is_request())
            return caf::message{};
          return error;
        });
#pragma GCC diagnostic pop
    return with_exit(std::move(f), std::move(fs)...);
  }
};

/// Calls `f(is_pool_worker)` at the start of each thread of the actor system.
template <class F> struct thread_start_hook : caf::thread_hook {
  explicit thread_start_hook(F g) : f(g) {}
  void init(caf::actor_system&) override {}
  void thread_started(caf::thread_owner owner) override {
    f(owner == caf::thread_owner::scheduler);
  }
  void thread_terminates() override {}
  F f;
};

#else // CAF 0.17

#define TROUPE_ERROR_ENUM(type, category) CAF_ERROR_CODE_ENUM(type, category)
#define TROUPE_INSPECT_ENUM(type)

template <class Inspector> using inspect_result = typename Inspector::result_type;

template <class Inspector, class T, class... Fs>
inspect_result<Inspector> fields(Inspector& f, T&, const char* name, field_ref<Fs>... fs) {
  return f(caf::meta::type_name(name), fs.value...);
}

template <class Repr, class Inspector, class T, class Get, class Set>
inspect_result<Inspector> inspect_as(Inspector& f, T& x, Get get, Set set) {
  Repr y = get(x);
  auto load = [&]() -> caf::error {
    x = set(y);
    return caf::none;
  };
  return f(y, caf::meta::load_callback(load));
}

template <class... Blocks> void init_types() {}

struct config_base : caf::actor_system_config {
  template <class T> void caf_option(const std::string& key, T x) {
    if constexpr (std::is_convertible_v<T, std::string>) // such as scheduler.policy
      set(key, caf::atom_from_string(std::string{x}));
    else
      set(key, std::move(x));
  }
  template <class... Blocks> void add_types() { (add_message_types<Blocks>(), ...); }
  template <class E> void add_errors(const char* category) {
    add_error_category(caf::atom_from_string(std::string{category}),
                       [](uint8_t x, caf::atom_value, const caf::message& context) {
                         std::string text{to_string(static_cast<E>(x))};
                         return context.empty() ? text : text + to_string(context);
                       });
  }
};

inline std::string describe_foreign(const caf::error& e) {
  if (e.category() != caf::atom("system"))
    return to_string(e); // with its context
  auto text = to_string(static_cast<caf::sec>(e.code()));
  return e.context().empty() ? text : text + to_string(e.context());
}

inline std::optional<std::string> argument_of(const caf::message& context) {
  using dictionary = caf::config_value::dictionary;
  if (context.size() != 1 || !context.match_element<dictionary>(0))
    return std::nullopt;
  auto& all = context.get_as<dictionary>(0);
  const auto i = all.find("argument");
  if (i == all.end() || !caf::holds_alternative<std::string>(i->second))
    return std::nullopt;
  return caf::get<std::string>(i->second);
}

inline bool has_printed_help(const caf::actor_system_config& cfg) noexcept {
  return cfg.cli_helptext_printed;
}

template <class E> bool in_category(const caf::error& e) {
  using factory = caf::detail::error_factory<E>;
  if constexpr (factory::specialized)
    return e.category() == factory::category;
  else // CAF's own; 0 is no error
    return e.category() == caf::make_error(static_cast<E>(1)).category();
}

inline bool means_receiver_down(const caf::error& e) { return e == caf::none; }

template <class Self, class Dest, class... Ts>
void send(const Self& self, const Dest& dest, Ts&&... xs) {
  self->send(checked<Ts...>(self, dest), std::forward<Ts>(xs)...);
}

template <class Dest, class... Ts> void anon_send(const Dest& dest, Ts&&... xs) {
  caf::anon_send(dest, std::forward<Ts>(xs)...);
}

template <class Self, class Dest, class Dur, class... Ts>
void send_after(const Self& self, const Dest& dest, Dur delay, Ts&&... xs) {
  self->delayed_send(dest, delay, std::forward<Ts>(xs)...);
}

template <class Self, class Dest, class Dur, class... Ts>
auto request(const Self& self, const Dest& dest, Dur timeout, Ts&&... xs) {
  return self->request(checked<Ts...>(self, dest), timeout, std::forward<Ts>(xs)...);
}

template <class Self> auto response_to(const Self& self, caf::message_id id) {
  using handle = decltype(self->request(std::declval<const caf::actor&>(),
                                        std::declval<const caf::duration&>(), 0));
  return handle{id.response_id(), &*self};
}

template <class T>
caf::expected<std::vector<std::byte>> to_bytes(caf::actor_system& sys, const T& x) {
  std::vector<char> buffer;
  caf::binary_serializer sink{sys, buffer};
  if (auto error = sink(x))
    return error;
  auto* begin = reinterpret_cast<const std::byte*>(buffer.data());
  return std::vector<std::byte>{begin, begin + buffer.size()};
}

template <class T>
caf::error from_bytes(caf::actor_system& sys, const std::vector<std::byte>& bytes, T& x) {
  caf::binary_deserializer source{sys, reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  return source(x);
}

using pool_context = caf::execution_unit;

class pool_job : public caf::resumable {
public:
  virtual resume_result run(pool_context* on, std::size_t throughput) = 0;

  resume_result resume(pool_context* on, std::size_t throughput) final {
    return run(on, throughput);
  }
  void intrusive_ptr_add_ref_impl() final {}
  void intrusive_ptr_release_impl() final {}
};

class job_sink : public caf::execution_unit {
public:
  explicit job_sink(caf::actor_system& sys) : execution_unit(&sys) {}
  void exec_later(caf::resumable* job) final { take(job); }

protected:
  virtual void take(caf::resumable* job) = 0;
};

inline void run_in_pool(caf::actor_system& sys, caf::resumable* job) {
  sys.scheduler().enqueue(job);
}

inline void run_later(caf::resumable* job, pool_context* on) { on->exec_later(job); }

inline bool has_ended(const caf::abstract_actor& x) {
  return x.getf(caf::abstract_actor::is_cleaned_up_flag);
}

inline void enqueue_response(const caf::strong_actor_ptr& receiver,
                             const caf::strong_actor_ptr& sender, caf::message_id request,
                             caf::message content, job_sink* runs_on) {
  if (receiver)
    receiver->enqueue(sender, request.response_id(), std::move(content), runs_on);
}

template <class Base = caf::event_based_actor> struct actor_base : Base {
  explicit actor_base(caf::actor_config& cfg) : Base(cfg) {
    this->set_down_handler([this](caf::down_msg& down) {
      auto i = down_.find(down.source);
      if (i == down_.end())
        return;
      auto f = std::move(i->second);
      down_.erase(i);
      f(down.reason);
    });
  }

  template <class H, class F> void on_down(const H& handle, F f) {
    this->monitor(handle);
    down_.emplace(handle.address(), std::move(f));
  }

  template <class F, class... Fs> caf::behavior with_exit(F f, Fs... fs) {
    this->set_exit_handler(std::move(f));
    return {std::move(fs)...};
  }

  template <class Other, class F, class... Fs>
  caf::behavior with_exit_and_others(Other other, F f, Fs... fs) {
    this->set_default_handler([this, other](caf::scheduled_actor*,
                                            caf::message_view& x) -> caf::result<caf::message> {
      auto& content = x.content();
      auto error = other(content.empty() ? std::string{"nothing"}
                                         : this->system().types().portable_name(content.type(0)));
      if (!this->current_message_id().is_request())
        return caf::message{};
      return error;
    });
    return with_exit(std::move(f), std::move(fs)...);
  }

private:
  std::unordered_multimap<caf::actor_addr, std::function<void(const caf::error&)>> down_;
};

template <class F> struct thread_start_hook : caf::thread_hook {
  explicit thread_start_hook(F g) : f(g) {}
  void init(caf::actor_system&) override {}
  void thread_started() override { // CAF 0.17 gives only the name of a thread
    char name[16] = {};
    pthread_getname_np(pthread_self(), name, sizeof name);
    f(std::string_view{name} == "caf.multiplexer");
  }
  void thread_terminates() override {}
  F f;
};

#endif

/// Runs `job` as a pool worker does.
inline void run_job(caf::resumable* job, pool_context* on, std::size_t throughput) {
  if (job->resume(on, throughput) == caf::resumable::resume_later)
    run_later(job, on);
  else
    intrusive_ptr_release(job);
}

/// Returns the code of `e` if `e` belongs to the enumeration `E`.
template <class E> std::optional<E> error_as(const caf::error& e) {
  if (e != caf::none && in_category<E>(e))
    return static_cast<E>(e.code());
  return std::nullopt;
}

/// Sends a request and blocks. A dead receiver gives `sec::request_receiver_down` on every CAF.
template <class T, class Dest, class Dur, class... Ts>
caf::expected<T> ask(caf::scoped_actor& self, const Dest& dest, Dur timeout, Ts&&... xs) {
  caf::expected<T> result{caf::error{}};
  auto on_error = [&](caf::error& e) {
    result = means_receiver_down(e) ? caf::make_error(caf::sec::request_receiver_down) : e;
  };
  auto pending = request(self, dest, timeout, std::forward<Ts>(xs)...);
  if constexpr (std::is_void_v<T>)
    std::move(pending).receive([&] { result = caf::expected<void>{}; }, on_error);
  else
    std::move(pending).receive([&](T& x) { result = std::move(x); }, on_error);
  return result;
}

} // namespace troupe::detail
