// Where a thread stands, and how threads of a block or warp wait for and talk to each other.
#pragma once
#include "ptx/types.cuh"

namespace ptx {

// 0, which the compiler does not know: addresses that it enters cannot be computed before this point, where they would
// occupy registers all along a loop.
LA_DEVICE i32 unknown_zero() {
  i32 zero = 0;
  asm volatile("" : "+r"(zero));
  return zero;
}

// The same, but for sm_90: there the compiler finds registers for what is known ahead of a loop, elsewhere it spills it.
LA_DEVICE i32 unknown_zero_but_sm_90() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
  return 0;
#else
  return unknown_zero();
#endif
}

// Whether the compiler needs more registers than for other GPUs: for sm_120.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr bool kFewRegisters = true;
#else
constexpr bool kFewRegisters = false;
#endif

// Where registers are few, much that follows from this was taken out of loops and then spilled: so it is found anew each time.
LA_DEVICE i32 thread() { return static_cast<i32>(threadIdx.x) + (kFewRegisters ? unknown_zero() : 0); }

LA_DEVICE i32 block() { return static_cast<i32>(blockIdx.x); }
LA_DEVICE i32 grid() { return static_cast<i32>(gridDim.x); }

LA_DEVICE void sync_block() { __syncthreads(); }
LA_DEVICE void sync_warp() { __syncwarp(); }

// Behind this, shared memory is read again for sm_80, which lacks registers to keep what was read before.
LA_DEVICE void forget_shared() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 800
  sync_warp();
#endif
}

// A barrier for `count` threads of the block, whole warps: 0 is that of sync_block, and ids go up to 7.
//
// For compute-sanitizer's racecheck it comes twice. That of CUDA 13.0 forgets a barrier where some of its warps go on to one of
// their own while others still leave it (tests/racecheck_reports.py). The second orders nothing that the first does not.
LA_DEVICE void sync_named(i32 id, i32 count) {
  asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(count) : "memory");
#ifdef LA_RACECHECK
  asm volatile("bar.sync %0, %1;" :: "r"(id + 8), "r"(count) : "memory");
#endif
}

template <class T>
LA_DEVICE T shuffle_xor(T value, i32 mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }

template <class T>
LA_DEVICE T shuffle_from(T value, i32 lane) { return __shfl_sync(0xffffffffu, value, lane); }

LA_DEVICE bool warp_any(bool predicate) { return __any_sync(0xffffffffu, predicate) != 0; }

// Numbers that may differ from now on, as far as the compiler knows: what depends on them cannot be computed before this point.
LA_DEVICE void pin(float (&x)[2]) { asm volatile("" : "+f"(x[0]), "+f"(x[1])); }
LA_DEVICE void pin(double (&x)[2]) { asm volatile("" : "+d"(x[0]), "+d"(x[1])); }

LA_DEVICE unsigned char* dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char la_dynamic_shared[];
  return la_dynamic_shared;
}

}  // namespace ptx
