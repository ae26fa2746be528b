// wgmma (sm_90a): d = a b, or d += a b where `keep`, on the four warps of a warpgroup; a is 64 x 16, b is 16 x N, N twice the
// length of d. It runs on its own: registers it reads or writes may not be touched, nor shared memory it reads be overwritten,
// before wgmma_wait. Warp w of the warpgroup has rows 16w .. 16w + 15 of a and d; with g = lane / 4 and t = lane % 4,
//   d[4i + 2h + j] = (g + 8h, 8i + 2t + j),    a = (g, 2t..) (g + 8, 2t..) (g, 2t + 8..) (g + 8, 2t + 8..).
// Operands in shared memory lie in atoms of 8 lines of 128 bytes, at multiples of 1024; 16-byte packet p of line l stands at p ^ l.
//   kAlongK  a line is 64 elements along K, of one row of a or one column of b; the next 8 of these are 1024 bytes on
//   kAcross  a line is 64 rows of a or columns of b, of one k; the next 8 k are 1024 bytes on
#pragma once
#include "ptx/ldmatrix.cuh"

namespace ptx {

enum Major : i32 { kAlongK = 0, kAcross = 1 };

// The operand that begins at `start`: where an atom begins, or kAlongK a multiple of 16 elements into its first line.
// One that begins later is that many 16 bytes more.
constexpr u32 kWgmmaOperandHigh = 1024 / 16 | 1u << 30;  // distance of the atoms, 128-byte swizzle
// Where it is wider than an atom (kAcross, more than 64 rows of a or columns of b), the next atoms are `aside` bytes on.
LA_DEVICE u64 wgmma_operand(const void* start, u32 aside = 16) {
  return shared_address(start) >> 4 | aside / 16 << 16 | static_cast<u64>(kWgmmaOperandHigh) << 32;
}

// Opens a run of products, behind ordinary accesses to their registers; closes a group; waits for all but the last `Left` groups.
LA_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
LA_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Left> LA_DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(Left) : "memory"); }

// Accumulators stay in the registers where the products left them: the compiler may move nothing across.
template <int Count>
LA_DEVICE void wgmma_pin(float (&d)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
}

// This thread's writes to shared memory become visible to wgmma, behind a barrier.
LA_DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Each warp of a warpgroup takes, or gives back, registers: `Count` a thread from now on, a multiple of 8.
template <int Count> LA_DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(Count)); }
template <int Count> LA_DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(Count)); }

template <Major A, Major B>
LA_DEVICE void wgmma(float (&d)[4], u64 a, u64 b, i32 keep) {
  asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %6, 0;\n"
               "mov.b64 a, {%4, %9};\nmov.b64 b, {%5, %9};\n"
               "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, a, b, p, 1, 1, %7, %8;\n}\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(u32(a)), "r"(u32(b)), "r"(keep), "n"(i32(A)), "n"(i32(B)), "n"(kWgmmaOperandHigh));
}

template <Major A, Major B>
LA_DEVICE void wgmma(float (&d)[16], u64 a, u64 b, i32 keep) {
  asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %18, 0;\n"
               "mov.b64 a, {%16, %21};\nmov.b64 b, {%17, %21};\n"
               "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
               "%8, %9, %10, %11, %12, %13, %14, %15}, a, b, p, 1, 1, %19, %20;\n}\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
               : "r"(u32(a)), "r"(u32(b)), "r"(keep), "n"(i32(A)), "n"(i32(B)), "n"(kWgmmaOperandHigh));
}

template <Major A, Major B>
LA_DEVICE void wgmma(float (&d)[32], u64 a, u64 b, i32 keep) {
  asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %34, 0;\n"
               "mov.b64 a, {%32, %37};\nmov.b64 b, {%33, %37};\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
               "%8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, p, 1, 1, %35, %36;\n}\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
               : "r"(u32(a)), "r"(u32(b)), "r"(keep), "n"(i32(A)), "n"(i32(B)), "n"(kWgmmaOperandHigh));
}

template <Major B>
LA_DEVICE void wgmma(float (&d)[32], const u32 (&a)[4], u64 b, i32 keep) {
  asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %37, 0;\n"
               "mov.b64 b, {%36, %39};\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
               "%8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
               "{%32, %33, %34, %35}, b, p, 1, 1, %38;\n}\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(u32(b)), "r"(keep), "n"(i32(B)), "n"(kWgmmaOperandHigh));
}

template <Major A, Major B>
LA_DEVICE void wgmma(float (&d)[36], u64 a, u64 b, i32 keep) {
  asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %38, 0;\n"
               "mov.b64 a, {%36, %41};\nmov.b64 b, {%37, %41};\n"
               "wgmma.mma_async.sync.aligned.m64n72k16.f32.bf16.bf16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35}, a, b, p, 1, 1, %39, %40;\n}\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
                 "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
               : "r"(u32(a)), "r"(u32(b)), "r"(keep), "n"(i32(A)), "n"(i32(B)), "n"(kWgmmaOperandHigh));
}

template <Major B>
LA_DEVICE void wgmma(float (&d)[36], const u32 (&a)[4], u64 b, i32 keep) {
  asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %41, 0;\n"
               "mov.b64 b, {%40, %43};\n"
               "wgmma.mma_async.sync.aligned.m64n72k16.f32.bf16.bf16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35}, {%36, %37, %38, %39}, b, p, 1, 1, %42;\n}\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
                 "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(u32(b)), "r"(keep), "n"(i32(B)), "n"(kWgmmaOperandHigh));
}

template <Major A, Major B>
LA_DEVICE void wgmma(float (&d)[64], u64 a, u64 b, i32 keep) {
  asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %66, 0;\n"
               "mov.b64 a, {%64, %69};\nmov.b64 b, {%65, %69};\n"
               "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, a, b, p, 1, 1, %67, %68;\n}\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
                 "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
                 "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                 "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
                 "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
               : "r"(u32(a)), "r"(u32(b)), "r"(keep), "n"(i32(A)), "n"(i32(B)), "n"(kWgmmaOperandHigh));
}

}  // namespace ptx
