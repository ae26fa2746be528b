// Copies of boxes between arrays and shared memory by the tensor memory accelerator (sm_90), one thread asking for each. What the
// array is, up to five axes, and what its box, stands in a map that the driver has made (la_cupy/tensor_maps.py): here 64 elements
// of 64 rows, whose packets lie in shared memory as wgmma wants them. Elements outside the array are read as zeros and not written.
#pragma once
#include "ptx/mbarrier.cuh"

namespace ptx {

struct alignas(64) TensorMap { u64 opaque[16]; };

// From element at[0] of row at[1] on; its bytes count as `barrier` expects them.
LA_DEVICE void tma_load(void* to, const TensorMap* map, const i32 (&at)[5], Mbarrier* barrier) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];"
               :: "r"(shared_address(to)), "l"(map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]),
                  "r"(shared_address(barrier)) : "memory");
}

// Closed by tma_commit; behind the wait, shared memory may be written again.
LA_DEVICE void tma_store(const TensorMap* map, const void* from, const i32 (&at)[5]) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];"
               :: "l"(map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]), "r"(shared_address(from)) : "memory");
}
LA_DEVICE void tma_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
LA_DEVICE void tma_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

}  // namespace ptx
