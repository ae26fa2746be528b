// The workers: state and result. A turn of theirs is A S and the weights; a barrier, behind which the weights are whole; W C
// and the result; S += B^T C. Tiles come from the loaders (load.cuh), a turn ahead; results leave a turn behind.
#pragma once
#include "chunk/epilogue.cuh"
#include "chunk/state.cuh"
#include "chunk/weights.cuh"

namespace la {

template <class Config>
struct Work {
  using Role = typename Config::Role;
  using Acc = typename Config::Acc;
  using P = Products<Config>;
  using Turn = typename Block<Config>::Turn;
  using StateIO = StateCells<Config, Role::kKeyFeatures>;
  static constexpr bool kForward = kSame<Role, Forward>, kGradQ = kSame<Role, GradQ>, kGradV = kSame<Role, GradV>;

  const Params& p;
  const Block<Config>& block;
  typename P::State& state;

  LA_DEVICE void run() {
    if (p.start.kv != 0) {
      StateIO::read(state, p, StatePlace::find<Acc>(p.start, block.head, p, block.first_slot(p)).kv, block.column0);
      if constexpr (kGradQ && Config::kKeyOffset != 0) {
        StateIO::shift_keys(state, p, block.inner_sum(0), block.column0, Config::kKeyOffset);
      }
    } else {
      StateIO::clear(state);
    }
    typename P::Result result, running;
    Turn now;
#pragma unroll 1
    while (true) {
      sync_named(kTurn, Config::kThreads);  // the tiles are there; the results of the turn before are staged
      if (block.begins(now) && now.step > 0) Epilogue<Config>(p, block, now.step - 1).copy_out();
      if (!block.exists(now)) break;
      turn(now, result, running);
      if (Config::kCopies == 1) sync_named(kDone, Config::kThreads);
      now = block.after(now);
    }
    if constexpr (kForward && Config::kCausal) finish(now.copy);
  }

  LA_DEVICE void turn(Turn now, typename P::Result& result, typename P::Result& running) {
    if (block.begins(now)) begin_rows(result, running, now);
    if constexpr (Config::kCausal) {
      make_weights(p, block, now);
      sync_named(kAmongWorkers, Config::kWorkerThreads);
      P::template times_sources<kGradQ>(result, running, block.weights(), block.tile_c(now.copy));
    }
    if (block.ends(now)) {
      Epilogue<Config> epilogue(p, block, now.step);
      epilogue.begin(result, running);
      if constexpr (Role::kThroughFeatures) {
        sync_named(kAmongWorkers, Config::kWorkerThreads);
        epilogue.end(result, running);
      }
    }
    if constexpr (Config::kCausal) {  // last, when the result has left its registers
      P::update_state(state, block.tile_c(now.copy), block.tile_b(now.copy), Role::kReversed ? Acc(p.b) : Acc(1));
      if constexpr (!kSame<Role, GradK>) add_column_sums(now.copy);
    }
  }

  // The sums of C's columns for the next turn; of g they are weighted with a.
  LA_DEVICE void add_column_sums(int copy) {
    Cell<Acc> sum[Config::kSlices];
    P::sum_columns(sum, block.tile_c(copy));
    if ((lane_id() & 3) != 0) return;
    const Acc weight = kGradV ? Acc(p.a) : Acc(1);
#pragma unroll
    for (int n = 0; n < Config::kSlices; ++n) {
      const int column = P::first_column() + n * 8 + lane_row();
      block.column_sum(copy ^ 1)[column] = ptx::fma(weight, sum[n].x[0], block.column_sum(copy)[column]);
    }
  }

  // A S, in GradQ of the centred state, and the terms of rank one: the sums over the sources before the chunk. In GradQ
  // these start the running sum of keys.
  LA_DEVICE void begin_rows(typename P::Result& result, typename P::Result& running, Turn now) {
    const auto a = block.tile_a(now.row_copy());
    const Acc* columns = block.column_sum(now.copy) + P::first_column();
    if constexpr (kGradQ) {
      const Acc* centre = block.centre(now.copy);
      P::times_state(result, a, [&](int n, int k) {
        const Acc key = columns[n * 8 + lane_row()];
        Cell<Acc> c = state[n][k];
#pragma unroll
        for (int j = 0; j < 2; ++j) c.x[j] = ptx::fma(-key, centre[k * 8 + lane_column() + j], c.x[j]);
        return c;
      });
    } else {
      P::times_state(result, a, [&](int n, int k) { return state[n][k]; });
    }
    const Acc scale = kForward ? Acc(p.b) : Acc(1), weight = kForward ? Acc(p.a) : Acc(1);
#pragma unroll
    for (int n = 0; n < Config::kSlices; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const Acc sum = weight * columns[n * 8 + lane_column() + j];
#pragma unroll
        for (int m = 0; m < P::kRowBlocks; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            Acc& x = result[m][half][n].x[j];
            if constexpr (kGradQ) {
              running[m][half][n].x[j] = sum;
            } else {
              x = ptx::fma(scale, x, sum);
            }
          }
        }
      }
    }
  }

  // The final state, from the last segment of the first of the heads that share it.
  LA_DEVICE void finish(int copy) {
    if (p.final.kv == 0 || !block.last_segment(p) || !block.head.first(p.final.kv_lead)) return;
    const StatePlace at = StatePlace::find<Acc>(p.final, block.head, p, 0);
    StateIO::write(state, p, at.kv, block.column0);
    for (int i = thread(); i < Config::kColumns; i += Config::kWorkerThreads) {
      if (block.column0 + i < p.e) store_number(at.v_sum, block.column0 + i, block.column_sum(copy)[i]);
    }
    if (block.split != 0) return;
    for (int i = thread(); i < p.d; i += Config::kWorkerThreads) store_number(at.k_sum, i, block.inner_sum(copy)[i]);
    if (thread() == 0) store_number(at.count, 0, block.count_before(block.chunks));
  }
};

}  // namespace la
