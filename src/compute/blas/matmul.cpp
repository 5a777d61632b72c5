/// The requests of troupe/blas.hpp: they pack their arguments, and the launch unpacks them.
#include "compute/blas/arguments.hpp"
#include "compute/blas/host_product.hpp"
#include "foundation/enum_name.hpp"
#include <troupe/bytes.hpp>
#if TROUPE_HAS_CUDA
#include "compute/blas/lt_products.hpp"
#endif

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace troupe::blas {

std::string_view to_string(transpose x) noexcept { return detail::enum_name(x); }
std::string_view to_string(activation x) noexcept { return detail::enum_name(x); }
std::string_view to_string(precision x) noexcept { return detail::enum_name(x); }

namespace {

constexpr const char* launch_name = "troupe.blas.matmul";

/// A launch of the library with its handles, or their names.
template <class Memory> struct packed {
  product what;
  std::vector<Memory> reads;
  std::vector<Memory> writes;
};

template <class Memory> layout layout_of(const basic_matrix<Memory>& x) noexcept {
  layout result;
  result.rows = x.rows;
  result.columns = x.columns;
  result.leading = x.leading != 0 ? x.leading : x.columns;
  result.batch_stride = x.batch_stride != 0 ? x.batch_stride : x.rows * result.leading;
  result.op = x.op;
  return result;
}

bool is_there(const any_gpu_ref& x) noexcept { return static_cast<bool>(x); }
bool is_there(const buffer_name& x) noexcept { return !x.name.empty(); }

/// Returns the first elements of the memory; all of it if it has fewer.
any_gpu_ref first_of(const any_gpu_ref& x, std::uint64_t count) {
  const auto part = x.slice(0, count);
  return part ? *part : x;
}
buffer_name first_of(const buffer_name& x, std::uint64_t count) {
  return {x.name, x.first, std::min<std::size_t>(x.count, count)};
}

std::size_t count_of(const any_gpu_ref& x) noexcept { return x.count(); }
std::size_t count_of(const buffer_name& x) noexcept { return x.count; }

/// Returns the part of the memory that is used; all of it if that cannot be told.
template <class Memory>
Memory used_of(const Memory& x, const caf::expected<std::uint64_t>& extent) {
  return extent && *extent < count_of(x) ? first_of(x, *extent) : x;
}

/// Returns whether the matrices fill all of the memory that they use.
bool is_dense(const layout& x, std::uint64_t batches) noexcept {
  return (x.rows == 1 || x.leading == x.columns) &&
         (batches == 1 || x.batch_stride == x.rows * x.columns);
}

/// The matrices of a product; each list has one element, or one for each of the batch.
template <class Memory> struct operands {
  std::span<const basic_matrix<Memory>> a, b, c, d;
};

template <class Memory> void set_options(product& to, const basic_matmul_options<Memory>& what) {
  to.alpha[0] = what.alpha.real();
  to.alpha[1] = what.alpha.imag();
  to.beta[0] = what.beta.real();
  to.beta[1] = what.beta.imag();
  to.function = what.function;
  to.compute = what.compute;
  to.deterministic = what.deterministic ? 1 : 0;
  to.auxiliary_leading = what.auxiliary_leading != 0 ? what.auxiliary_leading
                         : to.has_bits()             ? (to.columns() + 127) / 128 * 128
                                                     : to.columns();
}

template <class Memory>
packed<Memory> pack(const operands<Memory>& m, const basic_matmul_options<Memory>& what,
                    std::uint64_t batches, bool only_prepares) {
  packed<Memory> result;
  auto& x = result.what;
  x.a = layout_of(m.a.front());
  x.b = layout_of(m.b.front());
  x.c = layout_of(m.c.front());
  x.d = layout_of(m.d.front());
  x.batches = batches;
  x.by_address = m.d.size() > 1 ? 1 : 0;
  x.reads_c = what.beta != 0.0 ? 1 : 0;
  x.only_prepares = only_prepares ? 1 : 0;
  set_options(x, what);
  const auto each = x.by_address != 0 ? 1 : batches;
  result.reads.reserve(m.a.size() + m.b.size() + 2 * m.d.size() + extras);
  result.writes.reserve(m.d.size() + 2);
  const auto add = [&](std::vector<Memory>& to, const auto& all) {
    for (auto& y : all)
      to.push_back(used_of(y.memory, extent_of(layout_of(y), each)));
  };
  add(result.reads, m.a);
  add(result.reads, m.b);
  if (x.reads_c != 0)
    add(result.reads, m.c);
  add(only_prepares ? result.reads : result.writes, m.d);
  const std::array<const Memory*, extras> more{&what.bias,    &what.auxiliary, &what.bias_gradient,
                                               &what.a_scale, &what.b_scale,   &what.d_scale};
  for (std::size_t i = 0; i < extras; ++i) {
    x.has[i] = is_there(*more[i]) ? 1 : 0;
    const auto which = static_cast<extra>(i);
    if (x.has[i] != 0)
      (x.writes(which) ? result.writes : result.reads)
          .push_back(used_of(*more[i], extent_of(x, which)));
  }
  if (!only_prepares && !is_dense(x.d, each))
    add(result.reads, m.d); // what is between its rows stays
  return result;
}

template <class Memory>
packed<Memory> pack_one(const basic_matrix<Memory>& a, const basic_matrix<Memory>& b,
                        const basic_matrix<Memory>& d, const basic_matmul_options<Memory>& what,
                        bool only_prepares = false) {
  const auto& c = is_there(what.c.memory) || what.c.rows != 0 ? what.c : d;
  return pack<Memory>({{&a, 1}, {&b, 1}, {&c, 1}, {&d, 1}}, what, what.batches, only_prepares);
}

pending<void> start(const device& on, packed<any_gpu_ref> x, request_options options) {
  options.overlap = true;
  return on.launch(launch_name, to_bytes(x.what), std::move(x.reads), std::move(x.writes), options);
}

caf::error check_alike(const std::vector<matrix>& all, std::size_t number, const char* name) {
  if (all.size() != number)
    return make_error(errc::shape_mismatch, std::string{name} + " has " +
                                                std::to_string(all.size()) + " matrices, and d " +
                                                std::to_string(number));
  const auto first = layout_of(all.front());
  if (std::ranges::any_of(all, [&](auto& x) { return !(layout_of(x) == first); }))
    return make_error(errc::shape_mismatch,
                      std::string{"the matrices of "} + name + " are not alike");
  return {};
}

/// Returns what a launch with its arguments is; an error if they are not of this library.
caf::expected<std::pair<product, product_memory>> unpack(std::span<const launch_memory> reads,
                                                         std::span<const launch_memory> writes,
                                                         std::span<const std::byte> arguments) {
  auto what = from_bytes<product>(arguments);
  if (!what)
    return what.error();
  const auto memory = divide(*what, reads, writes);
  if (!memory)
    return make_error(errc::invalid_argument, "the buffers do not belong to the arguments");
  what->a.type = memory->a.front().type;
  what->b.type = memory->b.front().type;
  what->d.type = memory->d.front().type;
  what->c.type = memory->c.empty() ? what->d.type : memory->c.front().type;
  return std::pair{*what, *memory};
}

/// Returns handles as memory. In place of its address each buffer has a range of its own.
/// @errors errc::stale_ref: a handle without memory
caf::expected<std::vector<launch_memory>> as_memory(const std::vector<any_gpu_ref>& all,
                                                    std::vector<const void*>& buffers) {
  constexpr std::uintptr_t most_bytes = std::uintptr_t{1} << 48; // more than a buffer has
  std::vector<launch_memory> result;
  for (auto& x : all) {
    if (!x)
      return make_error(errc::stale_ref, "a matrix has no memory");
    const auto i = std::ranges::find(buffers, x.memory().get());
    const auto number = static_cast<std::uintptr_t>(i - buffers.begin());
    if (i == buffers.end())
      buffers.push_back(x.memory().get());
    result.push_back(
        {reinterpret_cast<void*>((number + 1) * most_bytes + x.offset()), x.count(), x.type()});
  }
  return result;
}

caf::error check_launch(std::span<const launch_memory> reads, std::span<const launch_memory> writes,
                        std::span<const std::byte> arguments) {
  const auto x = unpack(reads, writes, arguments);
  return x ? check(x->first, x->second) : x.error();
}

/// Checks a request that has not gone to a device yet.
caf::error check_packed(const packed<any_gpu_ref>& x) {
  std::vector<const void*> buffers;
  const auto reads = as_memory(x.reads, buffers);
  if (!reads)
    return reads.error();
  const auto writes = as_memory(x.writes, buffers);
  if (!writes)
    return writes.error();
  return check_launch(*reads, *writes, std::as_bytes(std::span{&x.what, 1}));
}

caf::error prepare_launch([[maybe_unused]] launch_context& context,
                          std::span<const launch_memory> reads,
                          std::span<const launch_memory> writes,
                          std::span<const std::byte> arguments) {
  const auto x = unpack(reads, writes, arguments);
  if (!x)
    return x.error();
#if TROUPE_HAS_CUDA
  if (context.cuda_stream() != nullptr)
    return prepare_by_lt(context, x->first, x->second);
#endif
  return {};
}

/// Plans do not depend on alpha and beta, except on whether c is read.
void clear_factors(std::span<std::byte> arguments) {
  auto x = from_bytes<product>(arguments);
  if (!x)
    return;
  for (auto* factor : {&x->alpha, &x->beta})
    std::ranges::fill(*factor, 0.0);
  std::ranges::copy(std::as_bytes(std::span{&*x, 1}), arguments.begin());
}

caf::error enqueue_launch(launch_context& context, std::span<const launch_memory> reads,
                          std::span<const launch_memory> writes,
                          std::span<const std::byte> arguments) {
  const auto x = unpack(reads, writes, arguments);
  if (!x)
    return x.error();
  if (x->first.only_prepares)
    return {};
#if TROUPE_HAS_CUDA
  if (context.cuda_stream() != nullptr)
    return enqueue_by_lt(context, x->first, x->second);
#endif
  return context.run_on_host(host_product(x->first, x->second));
}

[[maybe_unused]] const bool registered = [] {
#if TROUPE_HAS_CUDA
  auto error = register_library(lt_library_name, make_lt_products);
#else
  caf::error error;
#endif
  if (!error)
    error = register_launch(launch_name, library_launch{.verb = "matmul",
                                                        .enqueue = enqueue_launch,
                                                        .check = check_launch,
                                                        .prepare = prepare_launch,
                                                        .clear_ignored = clear_factors,
                                                        .repeats = repetition::replays});
  return !error; // else the names are taken: its requests fail
}();

} // namespace

void replay_kernels([[maybe_unused]] bool on) noexcept {
#if TROUPE_HAS_CUDA
  replay_products(on);
#endif
}

pending<void> matmul(const device& on, const matrix& a, const matrix& b, const matrix& d,
                     const matmul_options& what, request_options options) {
  return start(on, pack_one(a, b, d, what), options);
}

pending<void> matmul(const device& on, const std::vector<matrix>& a, const std::vector<matrix>& b,
                     const std::vector<matrix>& d, const matmul_options& what,
                     const std::vector<matrix>& c, request_options options) {
  if (d.empty())
    return pending<void>{make_error(errc::invalid_argument, "no matrices")};
  const auto& of_c = c.empty() ? d : c;
  caf::error error;
  if (what.batches != 1 || what.c.memory)
    error = make_error(errc::invalid_argument, "c and the batch are lists of matrices here");
  const std::pair<const std::vector<matrix>*, const char*> lists[] = {
      {&a, "a"}, {&b, "b"}, {&of_c, "c"}, {&d, "d"}};
  for (auto& [all, name] : lists)
    if (!error)
      error = check_alike(*all, d.size(), name);
  if (error)
    return pending<void>{std::move(error)};
  return start(on, pack<any_gpu_ref>({a, b, of_c, d}, what, d.size(), false), options);
}

caf::expected<launch> matmul_message(const matrix& a, const matrix& b, const matrix& d,
                                     const matmul_options& what, request_options options) {
  auto x = pack_one(a, b, d, what);
  if (auto error = check_packed(x))
    return error;
  options.overlap = true;
  return launch{launch_name, to_bytes(x.what), std::move(x.reads), std::move(x.writes), options};
}

void matmul(recording& to, const named_matrix& a, const named_matrix& b, const named_matrix& d,
            const named_matmul_options& what) {
  auto x = pack_one(a, b, d, what);
  to.launch(launch_name, to_bytes(x.what), std::move(x.reads), std::move(x.writes));
}

void matmul(const rank_recording& to, const named_matrix& a, const named_matrix& b,
            const named_matrix& d, const named_matmul_options& what) {
  auto x = pack_one(a, b, d, what);
  to.launch(launch_name, to_bytes(x.what), std::move(x.reads), std::move(x.writes));
}

pending<void> prepare(const device& on, const matrix& a, const matrix& b, const matrix& d,
                      const matmul_options& what, request_options options) {
  return start(on, pack_one(a, b, d, what, true), options);
}

} // namespace troupe::blas
