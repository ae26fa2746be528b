// kernels_cu/ptx/mma.cuh on the host: the fragments of 32 lanes are gathered into matrices,
// multiplied and scattered. With g = lane / 4 and t = lane % 4,
//   m16n8k16 bf16: a = (g, 2t..) (g+8, 2t..) (g, 2t+8..) (g+8, 2t+8..), b = (2t.., g) (2t+8.., g)
//   m16n8k8  tf32: a = (g, t) (g+8, t) (g, t+4) (g+8, t+4),             b = (t, g) (t+4, g)
//   m8n8k4   f64:  a = (g, t),                                          b = (t, g)
// and c = (g, 2t..2t+1), (g+8, 2t..2t+1) in all of them (f64 has the first pair only).
#pragma once
#include "machine/machine.hpp"
#include "machine/products.hpp"
#include "ptx/convert.cuh"
#include "ptx/types.cuh"

namespace emulation {

struct MmaLane {
  float* c;
  const u32* a;
  const u32* b;
};

// c[16][8] += a[16][K] b[K][8] in float32. Rows of 8 are one vector, whatever the optimiser does.
template <int K>
LA_EMULATION_INLINE void multiply(const Lanes<MmaLane>& lanes, const float (&a)[16][K],
                                  const Row8 (&b)[K]) {
  Row8 c[16];
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = lanes[lane].c[i];
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < K; ++k) c[i] += a[i][k] * b[k];
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) lanes[lane].c[i] = c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
}

LA_EMULATION_HOT inline void multiply_bf16(Lanes<MmaLane> lanes) {
  float a[16][16];
  Row8 b[16];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      float* pair = &a[g + i % 2 * 8][2 * t + i / 2 * 8];
      pair[0] = ptx::bf16_low(lanes[lane].a[i]);
      pair[1] = ptx::bf16_high(lanes[lane].a[i]);
    }
    for (int i = 0; i < 2; ++i) {
      b[2 * t + 8 * i][g] = ptx::bf16_low(lanes[lane].b[i]);
      b[2 * t + 8 * i + 1][g] = ptx::bf16_high(lanes[lane].b[i]);
    }
  }
  multiply<16>(lanes, a, b);
}

// The unit reads the upper 19 bits of a register and ignores the rest.
LA_EMULATION_INLINE float cut_to_tf32(u32 bits) { return ptx::as_float(bits & 0xffffe000u); }

LA_EMULATION_HOT inline void multiply_tf32(Lanes<MmaLane> lanes) {
  float a[16][8];
  Row8 b[8];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][t + i / 2 * 4] = cut_to_tf32(lanes[lane].a[i]);
    for (int i = 0; i < 2; ++i) b[t + 4 * i][g] = cut_to_tf32(lanes[lane].b[i]);
  }
  multiply<8>(lanes, a, b);
}

struct MmaF64Lane {
  double* c;
  double a, b;
};

LA_EMULATION_HOT inline void multiply_f64(Lanes<MmaF64Lane> lanes) {
  double a[8][4], b[4][8];
  for (int lane = 0; lane < warp_size; ++lane) {
    a[lane / 4][lane % 4] = lanes[lane].a;
    b[lane % 4][lane / 4] = lanes[lane].b;
  }
  for (int lane = 0; lane < warp_size; ++lane)
    for (int i = 0; i < 2; ++i)
      for (int k = 0; k < 4; ++k) lanes[lane].c[i] += a[lane / 4][k] * b[k][lane % 4 * 2 + i];
}

}  // namespace emulation

namespace ptx {

inline void mma_bf16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2], LA_EMULATION_SITE) {
  emulation::MmaLane mine = {c, a, b};
  emulation::warp_collective<emulation::multiply_bf16>({"mma_bf16", file, line}, mine);
}

inline void mma_tf32(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2], LA_EMULATION_SITE) {
  emulation::MmaLane mine = {c, a, b};
  emulation::warp_collective<emulation::multiply_tf32>({"mma_tf32", file, line}, mine);
}

inline void mma_f64(double (&c)[2], double a, double b, LA_EMULATION_SITE) {
  emulation::MmaF64Lane mine = {c, a, b};
  emulation::warp_collective<emulation::multiply_f64>({"mma_f64", file, line}, mine);
}

}  // namespace ptx
