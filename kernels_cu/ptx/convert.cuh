// Conversions between float and the narrower types, one instruction each.
#pragma once
#include "ptx/types.cuh"

namespace ptx {

LA_DEVICE float as_float(u32 bits) { return __uint_as_float(bits); }
LA_DEVICE u32 as_bits(float x) { return __float_as_uint(x); }
LA_DEVICE double as_double(u32 low, u32 high) { return __hiloint2double(static_cast<i32>(high), static_cast<i32>(low)); }
LA_DEVICE u32 low_word(double x) { return static_cast<u32>(__double2loint(x)); }
LA_DEVICE u32 high_word(double x) { return static_cast<u32>(__double2hiint(x)); }

// Two values in one register, the first in the low half; round to nearest even.
LA_DEVICE u32 pack_bf16(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

LA_DEVICE u32 pack_f16(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

LA_DEVICE float bf16_low(u32 w) { return as_float(w << 16); }
LA_DEVICE float bf16_high(u32 w) { return as_float(w & 0xffff0000u); }

// x - y of both halves, rounded once.
LA_DEVICE u32 sub_bf16(u32 x, u32 y) {
  u32 r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(y), "r"(0xbf80bf80u), "r"(x));
  return r;
}

LA_DEVICE float f16_to_float(u16 h) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(h));
  return r;
}
LA_DEVICE float f16_low(u32 w) { return f16_to_float(static_cast<u16>(w)); }
LA_DEVICE float f16_high(u32 w) { return f16_to_float(static_cast<u16>(w >> 16)); }

LA_DEVICE u16 to_bf16(float x) { return static_cast<u16>(pack_bf16(x, 0.f)); }
LA_DEVICE u16 to_f16(float x) { return static_cast<u16>(pack_f16(x, 0.f)); }

// Round to TF32 (10 mantissa bits), to nearest: mma.sync would cut the rest off, which is biased.
LA_DEVICE u32 to_tf32(float x) {
  u32 r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return r;
}

// The same of what arithmetic has made, whose NaN is 0x7fffffff, for a product, which cuts off the lower bits: one instruction on
// sm_90, where the other is three.
LA_DEVICE u32 sum_to_tf32(float x) {
  const i32 bits = __float_as_int(x);
  i32 up;
  asm("add.s32 %0, %1, 0x1000;" : "=r"(up) : "r"(bits));
  return static_cast<u32>(up > bits ? up : bits);
}

}  // namespace ptx
