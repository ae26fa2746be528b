// stream_key_value: dk and dv in one walk backwards on sm_90a, as stream.cu walks forwards; or, Queries, only the sums over queries.
//
//   grid     as many blocks as there is room for, each with several parts one after the other: (head, segment) each
//   reads    q, k, v, dout, den, delta; the gradient of the state behind the segment
//            not causal: k, v; the sums over all queries
//   writes   the rows of dk and dv in its segment
//            Queries: slot `segment` of the workspace p.final, as accumulate.cu
#include "stream/courier.cuh"
#include "stream/sender.cuh"
#include "stream/kv_length.cuh"
#include "stream/kv_score.cuh"
#include "stream/kv_state.cuh"
#include "stream/kv_supply.cuh"

namespace la {

template <class Config>
LA_KERNEL(Config::kThreads, 1) stream_key_value(LA_GRID_CONSTANT const StreamParams params) {
  KeyValuePipe<Config>::begin();
  if (warp_id() < Config::kFirstScore) {
    Config::template share_registers<Config::kStateRegisters>();
    KeyValueState<Config>(params.p).run();
  } else if (warp_id() < Config::kFirstSupply) {
    Config::template share_registers<Config::kScoreRegisters>();
    if constexpr (Config::kScoreWarps > 0) KeyValueScore<Config>{params.p}.run();
  } else if (warp_id() < Config::kCourier) {
    Config::template share_registers<Config::kSupplyRegisters>();
    KeyValueSupply<Config>(params.p).run();
  } else {
    Config::template share_registers<Config::kCourierRegisters>();
    if (warp_id() == Config::kSender) {
      if constexpr (Config::kHasRows) Sender<Config>{params}.run();
    } else if (Config::kHasRows && warp_id() >= Config::kFirstLength) {
      if constexpr (Config::kHasRows) KeyLength<Config>{params.p}.run();
    } else if (thread() == 32 * Config::kCourier) {
      Courier<Config>{params}.run();
    }
  }
}

}  // namespace la
