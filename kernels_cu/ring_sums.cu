// ring_sums: the pre-pass of accumulate.cu over arrays of float32, whose rows are copied into a ring of tiles past the registers.
//
//   grid     one block for each (head, piece)
//   reads    k, v of the piece; or, Reversed, q, dout, den and delta
//   writes   slot `piece` of the workspace p.final, as accumulate.cu
#include "ring/gather.cuh"

namespace la {

template <class Config>
LA_KERNEL(Config::kThreads, Config::kMinBlocks) ring_sums(LA_GRID_CONSTANT const Params p) {
  RingGather<Config> gather(p);
  gather.run();
}

}  // namespace la
