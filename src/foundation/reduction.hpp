/// The arithmetic of collectives on the CPU, as `reduce_op` defines it and as NCCL's ring and tree
/// kernels do it: every step is in the element's type. So the result is that of two GPUs. It is
/// also that of any number of GPUs if each partial result is representable; otherwise it differs by
/// the roundings of the steps.
#pragma once

#include <troupe/dtype.hpp>

#include <cstddef>
#include <span>

namespace troupe::detail {

/// accumulator[i] = accumulator[i] op operand[i]; `avg` and `premul_sum` add.
/// @shape  accumulator, operand: `count` elements, aligned to their type, that do not overlap
/// @source NCCL 2.28.9, src/device/reduce_kernel.h, `Apply_Reduce`
void reduce_into(dtype type, reduce_op op, void* accumulator, const void* operand,
                 std::size_t count) noexcept;

/// The part of `premul_sum` before the sum: data[i] = data[i] * factor, rounded to the type;
/// integers wrap.
/// @shape  data: `count` elements, aligned to their type; factor: one element, of any alignment
/// @source NCCL 2.28.9, `FuncPreMulSum` in src/device/reduce_kernel.h
void scale(dtype type, void* data, std::size_t count, const void* factor) noexcept;

/// The part of `avg` before the sum: multiplies each element of a floating-point type by 1/ranks,
/// rounded to the type; leaves integers alone.
/// @shape  data: `count` elements, aligned to their type
/// @source NCCL 2.28.9, `ncclDevPreMulSum` in src/enqueue.cc and src/device/reduce_kernel.h
void begin_average(dtype type, void* data, std::size_t count, int ranks) noexcept;

/// The part of `avg` after the sum: divides each element of an integer type by `ranks`, toward
/// zero; leaves floating-point types alone.
/// @shape  data: `count` elements, aligned to their type
/// @source NCCL 2.28.9, `ncclDevSumPostDiv` in src/enqueue.cc and src/device/reduce_kernel.h
void finish_average(dtype type, void* data, std::size_t count, int ranks) noexcept;

/// out[i] = op over all inputs, in their order, of input[i], for every output.
/// @shape  inputs: at least one; inputs and outputs: `count` elements each, aligned to their type;
///         an output may be one of the inputs, and overlaps nothing else. factors: of `premul_sum`,
///         one element for each input, of any alignment
void reduce(dtype type, reduce_op op, std::span<const void* const> inputs,
            std::span<void* const> outputs, std::size_t count,
            std::span<const void* const> factors = {}) noexcept;

} // namespace troupe::detail
