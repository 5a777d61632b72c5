/// A cache that is bounded by entries and bytes.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

namespace troupe::blas {

/// Keeps the values that were used last. `Value` has `size_bytes()`.
/// @thread one
template <class Value> class lru_cache {
public:
  lru_cache(std::size_t most_entries, std::size_t most_bytes)
      : most_entries_(most_entries), most_bytes_(most_bytes) {}

  /// Returns the value of that key; null if there is none.
  std::shared_ptr<Value> find(const std::string& key) {
    const auto i = places_.find(key);
    if (i == places_.end())
      return nullptr;
    entries_.splice(entries_.begin(), entries_, i->second);
    return i->second->value;
  }

  /// Adds a value whose key is not there, and drops those that were not used for longest.
  void add(std::string key, std::shared_ptr<Value> value) {
    const auto bytes = size_of(key, *value);
    bytes_ += bytes;
    entries_.push_front({std::move(key), std::move(value), bytes});
    places_.emplace(entries_.front().key, entries_.begin());
    while (entries_.size() > 1 && (entries_.size() > most_entries_ || bytes_ > most_bytes_)) {
      bytes_ -= entries_.back().bytes;
      places_.erase(entries_.back().key);
      entries_.pop_back();
    }
  }

  void clear() noexcept {
    places_.clear();
    entries_.clear();
    bytes_ = 0;
  }

  std::size_t size() const noexcept { return entries_.size(); }
  std::size_t size_bytes() const noexcept { return bytes_; }

private:
  struct entry {
    std::string key;
    std::shared_ptr<Value> value;
    std::size_t bytes;
  };
  using place = typename std::list<entry>::iterator;

  /// Returns about how much memory an entry takes: both keys, the nodes and the value.
  static std::size_t size_of(const std::string& key, const Value& value) noexcept {
    return 2 * key.size() + sizeof(entry) + sizeof(std::pair<std::string, place>) +
           8 * sizeof(void*) + value.size_bytes();
  }

  const std::size_t most_entries_;
  const std::size_t most_bytes_;
  std::size_t bytes_ = 0;
  std::list<entry> entries_; // the one that was used last is the first
  std::unordered_map<std::string, place> places_;
};

} // namespace troupe::blas
