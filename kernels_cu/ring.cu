// ring: the walk of sweep.cu over arrays of float32, whose rows are copied into a ring of tiles past the registers.
//
//   grid     as sweep.cu: one block for each (head, segment of the sequence)
//   reads    A for each row x; B and C for each source y (causal); the state before the segment
//   writes   the rows of out, dq, dk or dv in its segment; den or delta; the final state
//
// Small blocks of equal warps, several to a multiprocessor, hide each other's latencies: who does what when is in ring/walk.cuh.
#include "ring/walk.cuh"

namespace la {

template <class Config>
LA_KERNEL(Config::kThreads, Config::kMinBlocks) ring(LA_GRID_CONSTANT const Params p) {
  Block<Config>& block = Block<Config>::make(p);
  block.start(p);
  RingWalk<Config>{p, block}.run();
}

}  // namespace la
