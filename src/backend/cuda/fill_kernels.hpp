/// The kernels of fill.cu by their names, for the device code and for the code that launches it.
#pragma once

/// X(bytes): fill_2 writes patterns of two bytes, ...
#define TROUPE_FILL_KERNELS(X) X(2) X(4) X(8) X(16)

/// The most words that one `write_words` writes: its arguments have at most 4,096 bytes.
#define TROUPE_WORDS_AT_ONCE 480

/// X(name, NCCL's type, device type): multiply_int8 multiplies elements of ncclInt8, ...
#define TROUPE_MULTIPLY_KERNELS(X)                                                                 \
  X(int8, ncclInt8, std::int8_t)                                                                   \
  X(uint8, ncclUint8, std::uint8_t)                                                                \
  X(int32, ncclInt32, std::int32_t)                                                                \
  X(uint32, ncclUint32, std::uint32_t)                                                             \
  X(int64, ncclInt64, std::int64_t)                                                                \
  X(uint64, ncclUint64, std::uint64_t)                                                             \
  X(float16, ncclFloat16, __half)                                                                  \
  X(bfloat16, ncclBfloat16, __nv_bfloat16)                                                         \
  X(float32, ncclFloat32, float)                                                                   \
  X(float64, ncclFloat64, double)                                                                  \
  X(float8_e4m3, ncclFloat8e4m3, __nv_fp8_e4m3)                                                    \
  X(float8_e5m2, ncclFloat8e5m2, __nv_fp8_e5m2)
