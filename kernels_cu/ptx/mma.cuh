// mma.sync (sm_80 and newer): c += a * b on one warp. With g = lane / 4 and t = lane % 4,
//   m16n8k16 bf16: a = (g, 2t..) (g+8, 2t..) (g, 2t+8..) (g+8, 2t+8..), b = (2t.., g) (2t+8.., g)
//   m16n8k8  tf32: a = (g, t) (g+8, t) (g, t+4) (g+8, t+4),             b = (t, g) (t+4, g)
//   m8n8k4   f64:  a = (g, t),                                          b = (t, g)
// and c = (g, 2t..2t+1), (g+8, 2t..2t+1) in all of them (f64 has the first pair only).
#pragma once
#include "ptx/types.cuh"

namespace ptx {

LA_DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

LA_DEVICE void mma_tf32(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

LA_DEVICE void mma_f64(double (&c)[2], double a, double b) {
  asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
               : "+d"(c[0]), "+d"(c[1]) : "d"(a), "d"(b));
}

}  // namespace ptx
