#include "chaos/content_model.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace troupe::testing {

namespace {

/// With more possible contents than this, all elements count as unknown.
constexpr std::size_t most_possible = 24;

std::uint64_t bits_of(dtype type, std::uint64_t x) {
  auto bits = 8 * size_of(type);
  return bits == 64 ? x : x & ((std::uint64_t{1} << bits) - 1);
}

bool is_signed(dtype type) {
  return type == dtype::int8 || type == dtype::int32 || type == dtype::int64;
}

bool less(dtype type, std::uint64_t a, std::uint64_t b) {
  auto sign = std::uint64_t{1} << (8 * size_of(type) - 1);
  if (is_signed(type))
    return (a ^ sign) < (b ^ sign);
  if (!is_floating_point(type))
    return a < b;
  auto in_order = [&](std::uint64_t x) { return (x & sign) != 0 ? bits_of(type, ~x) : x | sign; };
  return in_order(a) < in_order(b);
}

/// Divides and truncates toward zero.
std::uint64_t divided(dtype type, std::uint64_t x, std::size_t by) {
  if (!is_signed(type))
    return x / by;
  auto unused = 64 - 8 * size_of(type);
  auto value = static_cast<std::int64_t>(x << unused) >> unused;
  return bits_of(type, static_cast<std::uint64_t>(value / static_cast<std::int64_t>(by)));
}

content part(const content& x, std::size_t first, std::size_t count) {
  auto begin = x.begin() + static_cast<std::ptrdiff_t>(first);
  return {begin, begin + static_cast<std::ptrdiff_t>(count)};
}

void append(content& to, const content& x) { to.insert(to.end(), x.begin(), x.end()); }

content reduced(const collective_shape& x, const std::vector<content>& sends) {
  auto element = [&](std::size_t i) -> std::optional<std::uint64_t> {
    std::optional<std::uint64_t> result;
    for (std::size_t q = 0; q < sends.size(); ++q) {
      if (!sends[q][i])
        return std::nullopt;
      auto own = *sends[q][i];
      if (x.op == reduce_op::premul_sum)
        own = combine(x.type, reduce_op::prod, own, x.factors[q]);
      result = result ? combine(x.type, x.op, *result, own) : own;
    }
    return x.op == reduce_op::avg ? divided(x.type, *result, sends.size()) : *result;
  };
  content result;
  for (std::size_t i = 0; i < sends[0].size(); ++i)
    result.push_back(element(i));
  return result;
}

content gathered(const std::vector<content>& sends) {
  content result;
  for (auto& s : sends)
    append(result, s);
  return result;
}

/// Returns the `r`-th part of each rank's content, concatenated.
content exchanged(const std::vector<content>& sends, std::size_t r) {
  content result;
  for (auto& s : sends)
    append(result, part(s, r * (s.size() / sends.size()), s.size() / sends.size()));
  return result;
}

content exchanged(const collective_shape& x, const std::vector<content>& sends, std::size_t r) {
  content result;
  for (std::size_t q = 0; q < sends.size(); ++q) {
    auto& row = x.counts[q];
    auto first =
        std::accumulate(row.begin(), row.begin() + static_cast<std::ptrdiff_t>(r), std::size_t{0});
    append(result, part(sends[q], first, row[r]));
  }
  return result;
}

} // namespace

bool is_floating_point(dtype type) {
  switch (type) {
  case dtype::float16:
  case dtype::bfloat16:
  case dtype::float32:
  case dtype::float64:
  case dtype::float8_e4m3:
  case dtype::float8_e5m2:
    return true;
  default:
    return false;
  }
}

std::uint64_t combine(dtype type, reduce_op op, std::uint64_t a, std::uint64_t b) {
  switch (op) {
  case reduce_op::prod:
    return bits_of(type, a * b);
  case reduce_op::min:
    return less(type, a, b) ? a : b;
  case reduce_op::max:
    return less(type, a, b) ? b : a;
  default:
    return bits_of(type, a + b);
  }
}

std::vector<content> received(const collective_shape& x, const std::vector<content>& sends) {
  auto n = sends.size();
  auto root = static_cast<std::size_t>(x.root);
  std::vector<content> result(n);
  switch (x.kind) {
  case collective_kind::all_reduce:
    return std::vector<content>(n, reduced(x, sends));
  case collective_kind::reduce:
    result[root] = reduced(x, sends);
    break;
  case collective_kind::broadcast:
    return std::vector<content>(n, sends[root]);
  case collective_kind::all_gather:
    return std::vector<content>(n, gathered(sends));
  case collective_kind::gather:
    result[root] = gathered(sends);
    break;
  case collective_kind::reduce_scatter: {
    auto all = reduced(x, sends);
    for (std::size_t r = 0; r < n; ++r)
      result[r] = part(all, r * (all.size() / n), all.size() / n);
    break;
  }
  case collective_kind::scatter:
    for (std::size_t r = 0; r < n; ++r)
      result[r] = part(sends[root], r * (sends[root].size() / n), sends[root].size() / n);
    break;
  case collective_kind::all_to_all:
    for (std::size_t r = 0; r < n; ++r)
      result[r] = exchanged(sends, r);
    break;
  case collective_kind::all_to_all_v:
    for (std::size_t r = 0; r < n; ++r)
      result[r] = exchanged(x, sends, r);
    break;
  case collective_kind::send:
  case collective_kind::recv:
    return sends;
  case collective_kind::barrier:
    break;
  }
  return result;
}

std::size_t content_model::add(content initial) {
  auto& x = versions_.emplace_back();
  x.initial = std::move(initial);
  latest_.push_back(versions_.size() - 1);
  return latest_.size() - 1;
}

content_model::effect content_model::begin(std::vector<place> reads, function run) {
  effects_.push_back({std::move(reads), std::move(run), fate::failed, {}});
  return effects_.size() - 1;
}

content_model::version content_model::write(effect by, std::size_t output, std::size_t buffer,
                                            std::size_t first, std::size_t count) {
  auto& x = versions_.emplace_back();
  x.written = true;
  x.before = latest_[buffer];
  x.first = first;
  x.count = count;
  x.by = by;
  x.output = output;
  return latest_[buffer] = versions_.size() - 1;
}

void content_model::written_by(version what, effect by, std::size_t output) {
  versions_[what].by = by;
  versions_[what].output = output;
}

bool content_model::doubtful(version at) const {
  for (auto* x = &versions_[at]; x->written; x = &versions_[x->before]) {
    if (effects_[x->by].how != fate::ran)
      return true;
    if (x->count == versions_[0].initial.size())
      return false;
  }
  return false;
}

std::string content_model::difference(const place& where, const content& got) {
  std::string result = "no possible content";
  for (auto& x : possible(where.at)) {
    auto want = part(x, where.first, where.count);
    std::size_t i = 0;
    while (i < want.size() && (!want[i] || want[i] == got[i]))
      ++i;
    if (i == want.size())
      return {};
    result = "element " + std::to_string(i) + " is " + std::to_string(*got[i]) + ", not " +
             std::to_string(*want[i]);
  }
  return result + " (" + std::to_string(possible(where.at).size()) + " possible)";
}

const std::vector<content>& content_model::possible(version at) {
  if (versions_[at].possible)
    return *versions_[at].possible;
  auto x = versions_[at];
  if (!x.written)
    return versions_[at].possible.emplace(std::vector<content>{x.initial});
  auto how = effects_[x.by].how;
  std::vector<content> result;
  if (how != fate::ran)
    result = possible(x.before);
  if (how != fate::failed) {
    auto& all = outputs(x.by);
    for (auto& before : possible(x.before))
      for (auto& output : all) {
        auto after = before;
        std::copy(output[x.output].begin(), output[x.output].end(),
                  after.begin() + static_cast<std::ptrdiff_t>(x.first));
        result.push_back(std::move(after));
      }
  }
  std::sort(result.begin(), result.end());
  result.erase(std::unique(result.begin(), result.end()), result.end());
  if (result.size() > most_possible)
    result = {content(result[0].size())};
  return versions_[at].possible.emplace(std::move(result));
}

const std::vector<std::vector<content>>& content_model::outputs(effect at) {
  if (effects_[at].outputs)
    return *effects_[at].outputs;
  // All combinations of one possible content for each read.
  std::vector<std::vector<content>> inputs{{}};
  for (auto& r : effects_[at].reads) {
    std::vector<content> parts;
    for (auto& whole : possible(r.at))
      parts.push_back(part(whole, r.first, r.count));
    std::sort(parts.begin(), parts.end());
    parts.erase(std::unique(parts.begin(), parts.end()), parts.end());
    if (inputs.size() * parts.size() > most_possible)
      parts = {content(r.count)};
    std::vector<std::vector<content>> longer;
    for (auto& chosen : inputs)
      for (auto& p : parts) {
        longer.push_back(chosen);
        longer.back().push_back(p);
      }
    inputs = std::move(longer);
  }
  std::vector<std::vector<content>> result;
  for (auto& x : inputs)
    result.push_back(effects_[at].run(x));
  return effects_[at].outputs.emplace(std::move(result));
}

} // namespace troupe::testing
