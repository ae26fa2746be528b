// Barriers in shared memory (sm_90): a phase ends when `arrivals` threads have arrived, and whoever waits for it goes on. Phases
// count 0, 1, 0, ...: to wait for parity 1 of a new barrier is to wait for nothing.
#pragma once
#include "ptx/ldmatrix.cuh"

namespace ptx {

struct alignas(8) Mbarrier { u64 state; };

LA_DEVICE void mbarrier_init(Mbarrier* barrier, i32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// How often a warp arrives, once all of it is here. (racecheck orders only what the arriving thread itself has read and written.)
#ifdef LA_RACECHECK
constexpr i32 kArrivalsOfWarp = 32;
#else
constexpr i32 kArrivalsOfWarp = 1;
#endif

LA_DEVICE void mbarrier_arrive(Mbarrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}

// And the phase does not end before so many bytes have come, too.
LA_DEVICE void mbarrier_arrive_expect(Mbarrier* barrier, i32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}

LA_DEVICE void mbarrier_wait(Mbarrier* barrier, i32 parity) {
  asm volatile("{\n.reg .pred p;\nagain:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}\n"
               :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}

}  // namespace ptx
