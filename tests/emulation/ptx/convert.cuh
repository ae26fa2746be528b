// kernels_cu/ptx/convert.cuh on the host, bit by bit as the instructions do it.
#pragma once
#include "machine/machine.hpp"
#include "ptx/types.cuh"

namespace emulation {

template <class To, class From>
LA_EMULATION_INLINE To same_bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To r;
  __builtin_memcpy(&r, &x, sizeof r);
  return r;
}

}  // namespace emulation

namespace ptx {

LA_EMULATION_INLINE float as_float(u32 bits) { return emulation::same_bits<float>(bits); }
inline u32 as_bits(float x) { return emulation::same_bits<u32>(x); }
inline double as_double(u32 low, u32 high) {
  return emulation::same_bits<double>(low | static_cast<u64>(high) << 32);
}
inline u32 low_word(double x) { return static_cast<u32>(emulation::same_bits<u64>(x)); }
inline u32 high_word(double x) { return static_cast<u32>(emulation::same_bits<u64>(x) >> 32); }

inline u16 to_bf16(float x) {
  const u32 bits = as_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // every NaN becomes this one
  return static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline u16 to_f16(float x) {
  if (x != x) return 0x7fff;
  return emulation::same_bits<u16>(static_cast<_Float16>(x));
}

inline u32 pack_bf16(float low, float high) {
  return to_bf16(low) | static_cast<u32>(to_bf16(high)) << 16;
}
inline u32 pack_f16(float low, float high) {
  return to_f16(low) | static_cast<u32>(to_f16(high)) << 16;
}

LA_EMULATION_INLINE float bf16_low(u32 w) { return as_float(w << 16); }
LA_EMULATION_INLINE float bf16_high(u32 w) { return as_float(w & 0xffff0000u); }

// A difference of two is exact as a float, unless it is rounded to one of them anyway.
inline u32 sub_bf16(u32 x, u32 y) {
  return pack_bf16(bf16_low(x) - bf16_low(y), bf16_high(x) - bf16_high(y));
}

inline float f16_to_float(u16 h) { return static_cast<float>(emulation::same_bits<_Float16>(h)); }
inline float f16_low(u32 w) { return f16_to_float(static_cast<u16>(w)); }
inline float f16_high(u32 w) { return f16_to_float(static_cast<u16>(w >> 16)); }

// To nearest, ties away from zero.
inline u32 to_tf32(float x) {
  const u32 bits = as_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffffffu;
  return (bits + 0x1000u) & 0xffffe000u;
}

// NaN here is not always what it is there.
inline u32 sum_to_tf32(float x) { return to_tf32(x); }

}  // namespace ptx
