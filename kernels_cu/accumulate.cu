// accumulate: the state that each piece of the sequence adds, before the walk over it (sweep.cu).
//
//   grid     one block for each (head, piece, block of kv's columns, block of its rows); columns vary fastest
//   reads    k, v of the piece; or, Reversed, q, dout, den and delta
//   writes   slot `piece` of the workspace p.final:
//                keys      kv = sum k~ v^T,    k_sum = sum k~,          v_sum = sum v,    count = number of keys
//                          (p.levelled: of v less its level, chunk/level.cuh)
//                queries   kv = b sum q~ g^T,  k_sum = -b sum delta q~, v_sum = a sum g,  count = -a sum delta
//            the latter being the gradient of the former (g = dout / den).
#include "chunk/gather.cuh"

namespace la {

template <class Config>
LA_KERNEL(Config::kThreads, 1) accumulate(LA_GRID_CONSTANT const Params p) {
  Gather<Config> gather(p);
  gather.run();
}

}  // namespace la
