/// Prefetches memory that another thread wrote, all lines at once. Otherwise each access to a
/// further line waits for it, about 0.1 us.
#pragma once

#include <cstddef>
#include <cstdint>

namespace troupe::detail {

/// Calls `f` with an address in each line of [`first`, `first` + `bytes`).
template <class F> void for_each_line(const void* first, std::size_t bytes, F f) noexcept {
  constexpr std::uintptr_t line = 64;
  auto begin = reinterpret_cast<std::uintptr_t>(first);
  for (auto at = begin & ~(line - 1); at < begin + bytes; at += line)
    f(reinterpret_cast<const void*>(at));
}

inline void prefetch_lines(const void* first, std::size_t bytes) noexcept {
  for_each_line(first, bytes, [](const void* x) { __builtin_prefetch(x); });
}

/// Prefetches a word that this thread is about to change.
inline void prefetch_to_change(const void* word) noexcept {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*static_cast<const std::byte*>(word)));
#else
  __builtin_prefetch(word, 1);
#endif
}

inline void prefetch_lines_to_change(const void* first, std::size_t bytes) noexcept {
  for_each_line(first, bytes, [](const void* x) { prefetch_to_change(x); });
}

/// The same from `first` to `last`, members of one object.
template <class A, class B>
void prefetch_members_to_change(const A& first, const B& last) noexcept {
  auto begin = reinterpret_cast<const std::byte*>(&first);
  auto end = reinterpret_cast<const std::byte*>(&last) + sizeof(B);
  prefetch_lines_to_change(begin, static_cast<std::size_t>(end - begin));
}

} // namespace troupe::detail
