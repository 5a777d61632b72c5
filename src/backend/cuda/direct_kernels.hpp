/// The kernels of direct.cu by their names, for the device code and for the code that launches it.
#pragma once

/// X(name, device type): push_int8 and pull_int8 reduce elements of dtype::int8, ... In the order
/// of `dtype`.
#define TROUPE_DIRECT_TYPES(X)                                                                     \
  X(int8, std::int8_t)                                                                             \
  X(uint8, std::uint8_t)                                                                           \
  X(int32, std::int32_t)                                                                           \
  X(uint32, std::uint32_t)                                                                         \
  X(int64, std::int64_t)                                                                           \
  X(uint64, std::uint64_t)                                                                         \
  X(float16, __half)                                                                               \
  X(bfloat16, __nv_bfloat16)                                                                       \
  X(float32, float)                                                                                \
  X(float64, double)                                                                               \
  X(float8_e4m3, __nv_fp8_e4m3)                                                                    \
  X(float8_e5m2, __nv_fp8_e5m2)

/// X(name, most messages of a launch): move_few, move_many
#define TROUPE_DIRECT_MOVES(X)                                                                     \
  X(few, troupe::detail::direct::few_messages)                                                     \
  X(many, troupe::detail::direct::many_messages)

/// The same of trade_pair, trade_few.
#define TROUPE_DIRECT_TRADES(X)                                                                    \
  X(pair, troupe::detail::direct::messages_of_pair)                                                \
  X(few, troupe::detail::direct::few_messages)
