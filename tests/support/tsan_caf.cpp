// Tells ThreadSanitizer how CAF 0.17 passes a message from one thread to another.
//
// Distributions compile libcaf without instrumentation. The sanitizer cannot see the atomics of its
// mailboxes and reference counts. It would report every message as a race between the sender, which
// writes it, and the receiver, which reads it. Suppressions would hide all reports about actors,
// since libcaf is in the stack of every handler. So this file interposes the functions of libcaf
// that pass a message or an actor to another thread. It adds the ordering that libcaf's atomics
// guarantee:
//
// - enqueue happens before the handler that receives the message
// - a handler of an actor happens before the next handler of that actor
// - releasing a reference happens before the destructor of the actor or of the message's content
//
// Linked into tests only, and only with -fsanitize=thread and CAF 0.17. It requires that libcaf's
// calls of its own functions go through the dynamic linker, as they do in Debian's package.

#include <caf/actor_control_block.hpp>
#include <caf/mailbox_element.hpp>
#include <caf/memory_managed.hpp>
#include <caf/message.hpp>

#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>

namespace {

// Returns CAF's function that one of the functions below replaces.
template <class Function> Function* next(const char* symbol) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, symbol));
}

// A message is passed as its mailbox element, and deleted as its base class.
void hand_over(caf::mailbox_element* element) {
  if (element != nullptr) {
    __tsan_release(element);
    __tsan_release(static_cast<caf::memory_managed*>(element));
  }
}

} // namespace

// The functions below have the mangled names of CAF's member functions. `self` is `this`, and a
// std::unique_ptr parameter is passed as the address of the caller's object.

#define INTERPOSE(result, name, symbol, ...)                                                       \
  extern "C" result name(__VA_ARGS__) __asm__(symbol);                                             \
  result name(__VA_ARGS__)

#define SCHEDULED_ENQUEUE                                                                          \
  "_ZN3caf15scheduled_actor7enqueueESt10unique_ptrINS_15mailbox_elementENS_6detail8disposerEEPNS_" \
  "14execution_unitE"
INTERPOSE(void, troupe_scheduled_enqueue, SCHEDULED_ENQUEUE, void* self,
          caf::mailbox_element** element, void* context) {
  static const auto real = next<void(void*, caf::mailbox_element**, void*)>(SCHEDULED_ENQUEUE);
  hand_over(*element);
  real(self, element, context);
}

#define BLOCKING_ENQUEUE                                                                           \
  "_ZN3caf14blocking_actor7enqueueESt10unique_ptrINS_15mailbox_elementENS_6detail8disposerEEPNS_"  \
  "14execution_unitE"
INTERPOSE(void, troupe_blocking_enqueue, BLOCKING_ENQUEUE, void* self,
          caf::mailbox_element** element, void* context) {
  static const auto real = next<void(void*, caf::mailbox_element**, void*)>(BLOCKING_ENQUEUE);
  hand_over(*element);
  real(self, element, context);
}

#define BLOCKING_VISIT "_ZN3caf14blocking_actor15mailbox_visitorclERNS_15mailbox_elementE"
INTERPOSE(int, troupe_blocking_visit, BLOCKING_VISIT, void* self, caf::mailbox_element* element) {
  static const auto real = next<int(void*, caf::mailbox_element*)>(BLOCKING_VISIT);
  __tsan_acquire(element);
  return real(self, element);
}

#define LAUNCH "_ZN3caf15scheduled_actor6launchEPNS_14execution_unitEbb"
INTERPOSE(void, troupe_launch, LAUNCH, void* self, void* context, bool lazy, bool hide) {
  static const auto real = next<void(void*, void*, bool, bool)>(LAUNCH);
  __tsan_release(self);
  real(self, context, lazy, hide);
}

// The scheduler calls it through a base class at offset 160 of the actor.
#define RESUME "_ZThn160_N3caf15scheduled_actor6resumeEPNS_14execution_unitEm"
INTERPOSE(int, troupe_resume, RESUME, char* base, void* context, std::size_t throughput) {
  static const auto real = next<int(char*, void*, std::size_t)>(RESUME);
  __tsan_acquire(base - 160);
  return real(base, context, throughput);
}

#define INITIALIZE "_ZN3caf17event_based_actor10initializeEv"
INTERPOSE(void, troupe_initialize, INITIALIZE, void* self) {
  static const auto real = next<void(void*)>(INITIALIZE);
  real(self);
  __tsan_release(self);
}

#define REACTIVATE "_ZN3caf15scheduled_actor10reactivateERNS_15mailbox_elementE"
INTERPOSE(int, troupe_reactivate, REACTIVATE, void* self, caf::mailbox_element* element) {
  static const auto real = next<int(void*, caf::mailbox_element*)>(REACTIVATE);
  __tsan_acquire(element);
  __tsan_acquire(self);
  const int result = real(self, element);
  __tsan_release(self);
  return result;
}

#define REQUEST_DELETION "_ZNK3caf14memory_managed16request_deletionEb"
INTERPOSE(void, troupe_request_deletion, REQUEST_DELETION, void* self, bool decremented) {
  static const auto real = next<void(void*, bool)>(REQUEST_DELETION);
  __tsan_acquire(self);
  real(self, decremented);
}

// Several threads read an error. Its content is destroyed with the last copy.
void give_up(const caf::message* x) {
  if (const auto* content = x->cvals().get())
    __tsan_release(
        const_cast<caf::memory_managed*>(static_cast<const caf::memory_managed*>(content)));
}

#define MESSAGE_END "_ZN3caf7messageD1Ev"
INTERPOSE(void, troupe_message_end, MESSAGE_END, caf::message* self) {
  static const auto real = next<void(caf::message*)>(MESSAGE_END);
  give_up(self);
  real(self);
}

#define MESSAGE_BASE_END "_ZN3caf7messageD2Ev"
INTERPOSE(void, troupe_message_base_end, MESSAGE_BASE_END, caf::message* self) {
  static const auto real = next<void(caf::message*)>(MESSAGE_BASE_END);
  give_up(self);
  real(self);
}

namespace caf {

// The same as CAF's functions, but compiled here, with atomics that the sanitizer sees.
void intrusive_ptr_release_weak(actor_control_block* x) {
  if (x->weak_refs.fetch_sub(1, std::memory_order_acq_rel) == 1)
    x->block_dtor(x);
}

void intrusive_ptr_release(actor_control_block* x) {
  if (x->strong_refs.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    x->data_dtor(x->get());
    intrusive_ptr_release_weak(x);
  }
}

} // namespace caf
