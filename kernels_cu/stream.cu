// stream: the walk of sweep.cu for sm_90a, where chunks stream through warps with roles of their own.
//
//   grid     as many blocks as there is room for, each of which has several parts one after the other; a part is one of sweep's blocks
//   reads    A for each row; B and C for each source (causal); the state before the segment; den (GradQ)
//   writes   the rows of out or dq in its segment and split; den or delta; the final state, or that of each piece (Keys)
//
// A courier sends for rows (stream/courier.cuh), suppliers transform them (stream/supply.cuh; in GradQ stream/centre.cuh, too), score
// warps make weights of them (stream/score.cuh), state warps keep the state and form the result (stream/state.cuh, gradient.cuh), a
// sender carries it away (stream/sender.cuh); stream/pipe.cuh says how they wait for each other.
#include "stream/centre.cuh"
#include "stream/courier.cuh"
#include "stream/sender.cuh"
#include "stream/score.cuh"
#include "stream/state.cuh"
#include "stream/supply.cuh"

namespace la {

template <class Config>
LA_KERNEL(Config::kThreads, 1) stream(LA_GRID_CONSTANT const StreamParams params) {
  Pipe<Config>::begin();
  if (warp_id() < Config::kFirstScore) {
    Config::template share_registers<Config::kStateRegisters>();
    StateWork<Config>(params.p).run();
  } else if (warp_id() < Config::kFirstSupply) {
    Config::template share_registers<Config::kScoreRegisters>();
    if constexpr (Config::kHasRows) Score<Config>(params.p).run();
  } else if (warp_id() < Config::kCourier) {
    Config::template share_registers<Config::kSupplyRegisters>();
    Supply<Config>(params.p).run();
  } else {
    Config::template share_registers<Config::kCourierRegisters>();
    if (warp_id() == Config::kSender) {
      if constexpr (Config::kHasRows) Sender<Config>{params}.run();
    } else if (warp_id() >= Config::kFirstCentre) {
      if constexpr (Config::kCentreWarps > 0) {
        if (warp_id() < Config::kFirstCentre + Config::kCentreWarps) Centre<Config>{params.p}.run();
      }
    } else if (thread() == 32 * Config::kCourier) {
      Courier<Config>{params}.run();
    }
  }
}

}  // namespace la
