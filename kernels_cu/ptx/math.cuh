// Scalar functions, overloaded for float and double.
#pragma once
#include "ptx/types.cuh"

namespace ptx {

LA_DEVICE float exp(float x) { return ::expf(x); }
LA_DEVICE double exp(double x) { return ::exp(x); }
// To within 2 units in the last place; the exact ones are subroutines.
LA_DEVICE float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
LA_DEVICE double reciprocal(double x) { return 1.0 / x; }
LA_DEVICE float reciprocal_sqrt(float x) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
LA_DEVICE double reciprocal_sqrt(double x) { return 1.0 / ::sqrt(x); }
// Of a positive number whose square root's inverse is in range too: exact where the root is a float.
LA_DEVICE float square_root(float x) {
  const float y = reciprocal_sqrt(x), root = x * y;
  return ::fmaf(::fmaf(-root, root, x), 0.5f * y, root);
}
LA_DEVICE float fma(float x, float y, float z) { return ::fmaf(x, y, z); }
LA_DEVICE double fma(double x, double y, double z) { return ::fma(x, y, z); }

}  // namespace ptx
