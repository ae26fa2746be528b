// Global memory. Loads take the read-only path: no kernel of this library reads what it writes.
// They are volatile so that a prefetch stays where it was written, ahead of the arithmetic.
#pragma once
#include "ptx/ldmatrix.cuh"

namespace ptx {

LA_DEVICE Word4 load_16(const void* p) {
  Word4 r;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.w[0]), "=r"(r.w[1]), "=r"(r.w[2]), "=r"(r.w[3]) : "l"(p));
  return r;
}

LA_DEVICE Word2 load_8(const void* p) {
  Word2 r;
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(r.w[0]), "=r"(r.w[1]) : "l"(p));
  return r;
}

LA_DEVICE u32 load_4(const void* p) {
  u32 r;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(r) : "l"(p));
  return r;
}

LA_DEVICE u16 load_2(const void* p) {
  u16 r;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(r) : "l"(p));
  return r;
}

// 16 bytes to shared memory, past the registers; they are there behind the wait.
LA_DEVICE void copy_16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" :: "r"(shared_address(to)), "l"(from) : "memory");
}
LA_DEVICE void copy_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The same of `bytes` bytes, 0 to 16, and zeros behind them; closes a group of copies; waits for all but the last `Left` groups of
// this thread.
LA_DEVICE void copy_16_or_zero(void* to, const void* from, i32 bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :: "r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
}
// The same of one word, whose addresses are multiples of 4 only: it, or 0 where it does not exist.
LA_DEVICE void copy_4_or_zero(void* to, const void* from, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
               :: "r"(shared_address(to)), "l"(from), "r"(exists ? 4 : 0) : "memory");
}
LA_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Left> LA_DEVICE void copy_wait_but() { asm volatile("cp.async.wait_group %0;" :: "n"(Left) : "memory"); }

LA_DEVICE void store_16(void* p, const Word4& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :: "l"(p), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3]) : "memory");
}

LA_DEVICE void store_8(void* p, const Word2& v) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" :: "l"(p), "r"(v.w[0]), "r"(v.w[1]) : "memory");
}

LA_DEVICE void store_4(void* p, u32 v) { asm volatile("st.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }

LA_DEVICE void store_2(void* p, u16 v) { asm volatile("st.global.u16 [%0], %1;" :: "l"(p), "h"(v) : "memory"); }

}  // namespace ptx
