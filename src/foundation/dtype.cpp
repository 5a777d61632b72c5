#include "foundation/enum_name.hpp"
#include "foundation/narrow_float.hpp"
#include <troupe/dtype.hpp>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <optional>
#include <string_view>

namespace troupe {

namespace {

template <class E> struct named {
  std::string_view name;
  E value;
};

/// Returns the one of `all` that is called `name`, as in the program or as in `others`.
template <class All, class E, std::size_t N>
std::optional<E> find(const All& all, const named<E> (&others)[N], std::string_view name) noexcept {
  if (auto i = std::ranges::find(all, name, detail::enum_name<E>); i != std::end(all))
    return *i;
  const auto* i = std::ranges::find(others, name, &named<E>::name);
  return i == std::end(others) ? std::nullopt : std::optional{i->value};
}

constexpr named<dtype> other_type_names[] = {
    {"i8", dtype::int8},
    {"u8", dtype::uint8},
    {"i32", dtype::int32},
    {"int", dtype::int32},
    {"u32", dtype::uint32},
    {"i64", dtype::int64},
    {"u64", dtype::uint64},
    {"f16", dtype::float16},
    {"fp16", dtype::float16},
    {"half", dtype::float16},
    {"bf16", dtype::bfloat16},
    {"f32", dtype::float32},
    {"fp32", dtype::float32},
    {"float", dtype::float32},
    {"f64", dtype::float64},
    {"fp64", dtype::float64},
    {"double", dtype::float64},
    {"fp8_e4m3", dtype::float8_e4m3},
    {"f8e4m3", dtype::float8_e4m3},
    {"e4m3", dtype::float8_e4m3},
    {"fp8_e5m2", dtype::float8_e5m2},
    {"f8e5m2", dtype::float8_e5m2},
    {"e5m2", dtype::float8_e5m2},
    {"c64", dtype::complex64},
    {"c128", dtype::complex128},
};

constexpr named<reduce_op> other_operation_names[] = {
    {"product", reduce_op::prod}, {"average", reduce_op::avg}, {"mean", reduce_op::avg}};

} // namespace

std::string_view to_string(dtype x) noexcept { return detail::enum_name(x); }

std::optional<dtype> dtype_from_string(std::string_view name) noexcept {
  return find(all_dtypes, other_type_names, name);
}

std::string_view to_string(reduce_op x) noexcept { return detail::enum_name(x); }

std::optional<reduce_op> reduce_op_from_string(std::string_view name) noexcept {
  return find(all_reduce_ops, other_operation_names, name);
}

float16::float16(float x) noexcept : bits{detail::float16_format::encode(x)} {}
float16::operator float() const noexcept { return detail::float16_format::decode(bits); }

bfloat16::bfloat16(float x) noexcept : bits{detail::bfloat16_format::encode(x)} {}
bfloat16::operator float() const noexcept { return detail::bfloat16_format::decode(bits); }

float8_e4m3::float8_e4m3(float x) noexcept : bits{detail::float8_e4m3_format::encode(x)} {}
float8_e4m3::operator float() const noexcept { return detail::float8_e4m3_format::decode(bits); }

float8_e5m2::float8_e5m2(float x) noexcept : bits{detail::float8_e5m2_format::encode(x)} {}
float8_e5m2::operator float() const noexcept { return detail::float8_e5m2_format::decode(bits); }

} // namespace troupe
