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
  using Sums = RunningSums<Config>;
  static constexpr bool kTakesSums = Config::Arith::kWarpgroups, kDots = kTakesSums && Sums::kInnerSums;
  static constexpr bool kForward = kSame<Role, Forward>, kGradQ = kSame<Role, GradQ>, kGradV = kSame<Role, GradV>;

  const Params& p;
  const Block<Config>& block;
  typename P::State& state;

  // The state before the segment.
  LA_DEVICE void begin() {
    if (p.start.kv != 0) {
      StateIO::read(state, p, StatePlace::find<Acc>(p.start, block.head, p, block.first_slot(p)).kv, block.column0);
      if constexpr (kGradQ && Config::kKeyOffset != 0) {
        StateIO::shift_keys(state, p, block.inner_sum(0), block.column0, Config::kKeyOffset);
      }
    } else {
      StateIO::clear(state);
    }
  }

  LA_DEVICE void run() {
    begin();
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
    if (block.begins(now)) start_rows(result, now);
    P::open(result);
    if constexpr (Config::kCausal) {
      multiply(now, result, running);
    } else {
      multiply_state(now, result);
      start_running(running, now);
    }
    if (block.ends(now)) {
      Epilogue<Config> epilogue(p, block, now.step);
      epilogue.begin(result, running);
      if constexpr (Role::kThroughFeatures) {
        sync_named(kAmongWorkers, Config::kWorkerThreads);
        epilogue.end(result, running);
      }
    }
    if constexpr (Config::kCausal) update_state(now);  // last, when the result has left its registers
  }

  // A S and W C. Products on their way (see P::close) are, first, those of the scores and of half of A S, then the others.
  LA_DEVICE void multiply(Turn now, typename P::Result& result, typename P::Result& running) {
    typename Weights<Config>::Scores scores;
    typename Sums::Dots dots;
    Acc first[2] = {};
    Weights<Config>::begin(scores, block, now);
    if constexpr (kDots) Sums::begin_dots(dots, block, now);
    P::close();
    times_state<0>(result, now);
    finish_rows(result, now);
    P::close();
    P::template wait<1>(scores.x);
    if constexpr (kDots) {
      P::template wait<1>(dots);
      Sums::finish_dots(first, dots, block, now);
    }
    Weights<Config>::finish(scores, p, block, now, first);
    sync_named(kAmongWorkers, Config::kWorkerThreads);
    P::hold(state);
    times_state<1>(result, now);
    start_running(running, now);
    P::template times_sources<kGradQ>(result, running, block.weights(), block.tile_c(now.copy), block.ones());
  }

  // A S alone, where not causal.
  LA_DEVICE void multiply_state(Turn now, typename P::Result& result) {
    typename Sums::Dots dots;
    Acc first[2];
    if constexpr (!P::kAsynchronous) P::hold(state);
    if constexpr (kDots) Sums::begin_dots(dots, block, now);
    times_state<0>(result, now);
    finish_rows(result, now);
    times_state<1>(result, now);
    P::close();
    P::template wait<0>(result);
    if constexpr (kDots) {
      P::template wait<0>(dots);
      Sums::finish_dots(first, dots, block, now);
      sync_named(kAmongWorkers, Config::kWorkerThreads);
    }
  }

  // The state and the sums behind the chunk.
  LA_DEVICE void update_state(Turn now) {
    const Acc scale = Role::kReversed ? scalar_b<Acc>(p) : Acc(1);
    if constexpr (kTakesSums) {
      typename Sums::Dots columns;
      Sums::begin_columns(columns, block, now.copy);
      P::update_state(state, block.tile_c(now.copy), block.tile_b(now.copy), scale);
      Sums::finish_columns(columns, p, block, now.copy);
      Sums::add_inner(p, block, now);
    } else {
      // Of a wide state in GradV the sums come first: behind the state they spilled two of its cells.
      constexpr bool kSumsFirst = kGradV && Config::kInner > 128;
      if constexpr (kSumsFirst) add_column_sums(now.copy);
      P::update_state(state, block.tile_c(now.copy), block.tile_b(now.copy), scale);
      if constexpr (!kSumsFirst && !kSame<Role, GradK>) add_column_sums(now.copy);
    }
  }

  // The sums of C's columns for the next turn, where the loaders do not take them; of g they are weighted with a.
  LA_DEVICE void add_column_sums(int copy) {
    Acc sum[Config::kSlices];
    if constexpr (kGradQ) forget_shared();  // with two results it has most to keep
    P::sum_columns(sum, block.tile_c(copy));
    if ((lane_id() & 3) != 0) return;
    const Acc weight = kGradV ? scalar_a<Acc>(p) : Acc(1);
#pragma unroll
    for (int n = 0; n < Config::kSlices; ++n) {
      const int column = P::first_column() + n * 8 + lane_row();
      block.column_sum(copy ^ 1)[column] = ptx::fma(weight, sum[n], block.column_sum(copy)[column]);
    }
  }

  // The terms of rank one: the sums over the sources before the chunk. In GradQ these start the running sum of keys.
  LA_DEVICE Acc rank_one(int column, Turn now) const {
    return kGradQ ? Acc(0) : (kForward ? scalar_a<Acc>(p) : Acc(1)) * block.column_sum(now.copy)[column];
  }

  // Products that run on their own are put on top of these. Others come first: the tensor cores cut off what is small beside
  // an accumulator, which float32 would notice.
  LA_DEVICE void start_rows(typename P::Result& result, Turn now) {
    each_column(result, [&](int column) { return P::kAsynchronous ? rank_one(column, now) : Acc(0); }, assign);
  }
  LA_DEVICE void finish_rows(typename P::Result& result, Turn now) {
    if constexpr (P::kAsynchronous || kGradQ) return;
    if (!block.begins(now)) return;
    each_column(result, [&](int column) { return rank_one(column, now); }, [](Acc& x, Acc y) { x += y; });
  }
  LA_DEVICE void start_running(typename P::Result& running, Turn now) {
    if constexpr (kGradQ) each_column(running, [&](int column) { return block.column_sum(now.copy)[column]; }, assign);
  }

  static LA_DEVICE void assign(Acc& x, Acc y) { x = y; }

  // f(x, value(column)) for each element x of the result.
  template <class Value, class F>
  static LA_DEVICE void each_column(typename P::Result& result, Value value, F f) {
#pragma unroll
    for (int c = 0; c < P::kColumns; ++c) {
      const Acc y = value(P::column(c));
#pragma unroll
      for (int set = 0; set < P::kSets; ++set) {
#pragma unroll
        for (int i = 0; i < P::kRows; ++i) f(P::at(result, set, i, c), y);
      }
    }
  }

  // result += A S, in GradQ of the centred state.
  template <int Part>
  LA_DEVICE void times_state(typename P::Result& result, Turn now) {
    const auto a = block.tile_a(now.row_copy());
    if constexpr (kGradQ) {
      const Acc* columns = block.column_sum(now.copy) + P::first_column();
      const Acc* centre = block.centre(now.copy);
      P::template times_state<Part>(result, a, block.begins(now), [&](int n, int k) {
        const Acc key = columns[n * 8 + lane_row()];
        Cell<Acc> c = state[n][k];
#pragma unroll
        for (int j = 0; j < 2; ++j) c.x[j] = ptx::fma(-key, centre[k * 8 + lane_column() + j], c.x[j]);
        return c;
      });
    } else {
      P::template times_state<Part>(result, a, block.begins(now), [&](int n, int k) { return state[n][k]; });
    }
  }

  // The final state, from the last segment of the first of the heads that share it.
  LA_DEVICE void finish(int copy) {
    if (p.final.kv == 0 || !block.last_segment(p) || !block.head.first(p.final.kv_lead)) return;
    const auto first = [] { return thread() + (Config::kInner > 128 ? unknown_zero() : 0); };  // not kept all along a wide walk
    const StatePlace at = StatePlace::find<Acc>(p.final, block.head, p, 0);
    StateIO::write(state, p, at.kv, block.column0);
    for (int i = first(); i < Config::kColumns; i += Config::kWorkerThreads) {
      if (block.column0 + i < p.e) store_number(at.v_sum, block.column0 + i, block.column_sum(copy)[i]);
    }
    if (block.split != 0) return;
    for (int i = first(); i < p.d; i += Config::kWorkerThreads) store_number(at.k_sum, i, block.inner_sum(copy)[i]);
    if (thread() == 0) store_number(at.count, 0, block.count_before(block.chunks));
  }
};

}  // namespace la
