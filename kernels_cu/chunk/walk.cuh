// One block's walk over its segment: the order of events in a chunk. What happens in each is in load.cuh (global to
// shared), weights.cuh (w), products.cuh (matrix products), epilogue.cuh (result).
#pragma once
#include "chunk/epilogue.cuh"
#include "chunk/load.cuh"
#include "chunk/state.cuh"
#include "chunk/weights.cuh"

namespace la {

template <class Config>
struct Walk {
  using Role = typename Config::Role;
  using Acc = typename Config::Acc;
  using P = Products<Config>;
  using StateIO = StateCells<Config, Role::kKeyFeatures>;
  static constexpr bool kGradQ = kSame<Role, GradQ>;

  // References to the kernel's own variables: as members of one object, of which a part points to another, they
  // would be kept in memory instead of registers.
  const Params& p;
  Block<Config>& block;
  Load<Config>& load;
  typename P::State& state;

  LA_DEVICE void start() {
    const StatePlace at = StatePlace::find<Acc>(p.start, block.head, p, block.first_slot(p));
    const bool given = p.start.kv != 0;
    if (given) {
      StateIO::read(state, p, at.kv, block.column0);
    } else {
      StateIO::clear(state);
    }
    const u64 inner = given ? (Role::kKeyFeatures ? at.k_sum : at.v_sum) : 0;
    const u64 column = given ? (Role::kKeyFeatures ? at.v_sum : at.k_sum) : 0;
    read_vector<Acc>(block.inner_sum(0), Config::kInner, inner, 0, Role::kKeyFeatures ? p.d : p.e, Config::kThreads);
    read_vector<Acc>(block.column_sum(0), Config::kColumns, column, block.column0, Role::kKeyFeatures ? p.e : p.d,
                     Config::kThreads);
    load.find_addresses();
    block.start_count = given ? load_number<Acc>(at.count, 0) : Acc(0);
    sync_block();
    if constexpr (kGradQ) {
      for (int i = thread(); i < Config::kInner; i += Config::kThreads) {
        block.set_centre(p, 0, i, block.inner_sum(0)[i], block.start_count);
      }
      sync_block();
    }
  }

  LA_DEVICE void finish() {
    if (p.final.kv == 0 || !block.last_segment(p) || !block.head.first(p.final.kv_lead)) return;
    const StatePlace at = StatePlace::find<Acc>(p.final, block.head, p, 0);
    StateIO::write(state, p, at.kv, block.column0);
    for (int i = thread(); i < Config::kColumns; i += Config::kThreads) {
      if (block.column0 + i < p.e) store_number(at.v_sum, block.column0 + i, block.column_sum(block.parity)[i]);
    }
    if (block.split != 0) return;
    for (int i = thread(); i < p.d; i += Config::kThreads) store_number(at.k_sum, i, block.inner_sum(block.parity)[i]);
    if (thread() == 0) store_number(at.count, 0, block.count_before(block.chunks));
  }

  // Turn by turn: a chunk of rows, and within it one member of the group of heads that are summed over. The rows of the next
  // turn are on their way while this one is worked on; turn -1 only sends for them.
  LA_DEVICE void run() {
    start();
    i64 step = -1;
    i32 member = block.group - 1;
    typename P::Result result, running;
#pragma unroll 1
    while (step < block.chunks) {
      block.shared = dynamic_shared() + unknown_zero();
      const bool wraps = member + 1 == block.group, begins = member == 0;
      const i64 next = wraps ? step + 1 : step;
      if (step >= 0) {
        if (begins) load.put_rows(step);
        load.put_sources(step);
        sync_block();
      }
      if (next < block.chunks) {
        if (wraps) load.fetch_rows(next);
        load.fetch_sources(next, wraps ? 0 : member + 1);
      }
      if (step >= 0) work(step, begins, wraps, result, running);
      step = next;
      member = wraps ? 0 : member + 1;
    }
    if constexpr (kSame<Role, Forward> && Config::kCausal) finish();
  }

  LA_DEVICE void work(i64 step, bool begins, bool wraps, typename P::Result& result, typename P::Result& running) {
    if constexpr (Config::kCausal) load.sum_columns(step);
    typename P::Partial partial;
    if (begins) {
      times_state(partial);
      P::give(block.exchange(), partial);
    }
    if constexpr (Config::kCausal) make_weights(p, block, step);
    if constexpr (Config::kCausal || Config::kHalves > 1) sync_block();
    if (begins) {
      P::take(result, partial, block.exchange());
      add_sums(result, running);
    }
    if constexpr (Config::kCausal) {
      P::template times_sources<kGradQ>(result, running, block.weights(), block.tile_c());
      P::update_state(state, block.tile_c(), block.tile_b(), Role::kReversed ? Acc(p.b) : Acc(1));
      block.parity ^= 1;
    }
    if (wraps) Epilogue<Config>(p, block, step).run(result, running);
    sync_block();
    if (wraps) Epilogue<Config>(p, block, step).copy_out();
  }

  // A S, in GradQ of the centred state.
  LA_DEVICE void times_state(typename P::Partial& partial) {
    if constexpr (kGradQ) {
      const Acc* keys = block.column_sum(block.parity) + P::first_column();
      const Acc* centre = block.centre(block.parity) + P::first_inner();
      P::times_state(partial, block.tile_a(), [&](int n, int k) {
        const Acc key = keys[n * 8 + lane_row()];
        Cell<Acc> c = state[n][k];
#pragma unroll
        for (int j = 0; j < 2; ++j) c.x[j] = ptx::fma(-key, centre[k * 8 + lane_column() + j], c.x[j]);
        return c;
      });
    } else {
      P::times_state(partial, block.tile_a(), [&](int n, int k) { return state[n][k]; });
    }
  }

  // The terms of rank one: the sums over the sources before the chunk. In GradQ they start the running sum of keys.
  LA_DEVICE void add_sums(typename P::Result& result, typename P::Result& running) {
    const Acc scale = kSame<Role, Forward> ? Acc(p.b) : Acc(1), weight = kSame<Role, Forward> ? Acc(p.a) : Acc(1);
    const Acc* columns = block.column_sum(block.parity) + P::first_column();
#pragma unroll
    for (int n = 0; n < Config::kSlices; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const Acc sum = weight * columns[n * 8 + lane_column() + j];
#pragma unroll
        for (int i = 0; i < P::kOwnBlocks; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            Acc& x = result[i][half][n].x[j];
            if constexpr (kGradQ) {
              running[i][half][n].x[j] = sum;
            } else {
              x = ptx::fma(scale, x, sum);
            }
          }
        }
      }
    }
  }
};

}  // namespace la
