// sweep: the operator and each of its gradients, one walk over the sequence.
//
//   grid     one block for each (head, segment of the sequence, split of the result's columns); splits vary fastest
//   reads    A for each row x; B and C for each source y (causal); the state before the segment
//   writes   the rows of out, dq, dk or dv in its segment and split; den or delta; the final state
//
//   out[x] = A[x] S + w[x, :] C + (rank-one terms),   S += B^T C         chunk after chunk,
//
// S being the sum over the chunks that lie before. Where not causal, S is the sum over all sources, taken by the
// kernel `accumulate`, and the walk has no sources. A, B, C: chunk/config.cuh; w: chunk/weights.cuh; who does what when:
// chunk/work.cuh and chunk/load.cuh.
#include "chunk/load.cuh"
#include "chunk/work.cuh"

namespace la {

template <class Config>
LA_KERNEL(Config::kThreads, Config::kMinBlocks) sweep(LA_GRID_CONSTANT const Params p) {
  Block<Config>& block = Block<Config>::make(p);
  block.start(p);
  if constexpr (Config::Arith::kWarpgroups) {
    RunningSums<Config>::begin(block);
    ptx::fence_async();
    ptx::sync_block();
  }
  if (warp_id() < Config::kWorkers) {
    Config::template share_registers<Config::kWorkerRegisters>();
    typename Products<Config>::State state;
    Work<Config>{p, block, state}.run();
  } else {
    Config::template share_registers<Config::kLoaderRegisters>();
    Load<Config>(p, block).run();
  }
}

}  // namespace la
