// kernels_cu/ptx/mbarrier.cuh on the host (machine/mbarriers.hpp).
#pragma once
#include "machine/mbarriers.hpp"
#include "ptx/types.cuh"

namespace ptx {

struct alignas(8) Mbarrier { u64 state; };

inline void mbarrier_init(Mbarrier* barrier, i32 arrivals, LA_EMULATION_SITE) {
  emulation::init_mbarrier({"mbarrier_init", file, line}, barrier, arrivals);
}

constexpr i32 kArrivalsOfWarp = 1;

inline void mbarrier_arrive(Mbarrier* barrier, LA_EMULATION_SITE) {
  emulation::arrive_at_mbarrier({"mbarrier_arrive", file, line}, barrier);
}

inline void mbarrier_arrive_expect(Mbarrier* barrier, i32 bytes, LA_EMULATION_SITE) {
  emulation::arrive_at_mbarrier({"mbarrier_arrive_expect", file, line}, barrier, bytes);
}

inline void mbarrier_wait(Mbarrier* barrier, i32 parity, LA_EMULATION_SITE) {
  emulation::wait_at_mbarrier({"mbarrier_wait", file, line}, barrier, parity);
}

}  // namespace ptx
