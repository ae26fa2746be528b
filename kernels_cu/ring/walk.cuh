// A walk in which all warps do the same. A turn is: send for the rows of the turn behind; put this turn's rows; a barrier; what the
// workers do (chunk/work.cuh), with a barrier between weights and products, and two more where sums over rows are taken; a
// barrier, behind which the slot is free. Other blocks of the multiprocessor work while this one waits.
#pragma once
#include "ring/bring.cuh"
#include "ring/products.cuh"

namespace la {

template <class Config>
struct RingWalk {
  using P = Products<Config>;
  using Turn = typename Block<Config>::Turn;

  const Params& p;
  const Block<Config>& block;

  LA_DEVICE void run() {
    typename P::State state;
    typename P::Result result, running;
    Work<Config> work{p, block, state};
    Bring<Config> bring(p, block);
    Turn now;
    bring.begin(now);
    work.begin();
    sync_block();
#pragma unroll 1
    while (block.exists(now)) {
      const Turn then = block.after(now);
      bring.send(then);
      bring.put(now);
      sync_block();
      bring.hand_on(now);
      work.turn(now, result, running);
      sync_block();
      now = then;
    }
    if constexpr (Config::kForward && Config::kCausal) work.finish(now.copy);
  }
};

}  // namespace la
