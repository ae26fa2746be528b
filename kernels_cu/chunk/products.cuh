// Products of tiles with mma.sync. A warp owns kSlices * 8 columns of the result, and of the running state S^T (columns of the
// result by inner columns), which never leaves its registers. Those of sm_90a, under the same names: chunk/warpgroup.cuh.
#pragma once
#include "chunk/config.cuh"

namespace la {

template <class Config, bool Warpgroups = Config::Arith::kWarpgroups>
struct Products {
  using Arith = typename Config::Arith;
  using Acc = typename Config::Acc;
  using Slice = typename Arith::Slice;
  static constexpr int kSlices = Config::kSlices;
  static constexpr int kDepth = Arith::kDepth;
  static constexpr int kRowBlocks = Config::kChunk / 16;

  using Result = Cell<Acc>[kRowBlocks][2][kSlices];      // [16-row block][upper, lower 8 rows][column slice]
  using State = Cell<Acc>[kSlices][Config::kInner / 8];  // [column slice][8 inner columns]

  static constexpr bool kAsynchronous = false;

  static LA_DEVICE int first_column() { return warp_id() * 8 * kSlices; }

  // A lane's elements of the result, in sets of kRows rows: which they are, and the same ones of a tile.
  static constexpr int kSets = 2 * kRowBlocks, kRows = 1, kColumns = 2 * kSlices;
  static LA_DEVICE int row(int set, int) { return set * 8 + lane_row(); }
  static LA_DEVICE int column(int c) { return first_column() + c / 2 * 8 + lane_column() + c % 2; }
  static LA_DEVICE Acc& at(Result& result, int set, int, int c) { return result[set / 2][set % 2][c / 2].x[c % 2]; }

  template <class Tile>
  static LA_DEVICE void read(Acc (&x)[kRows][kColumns], const Tile& tile, int set) {
#pragma unroll
    for (int n = 0; n < kSlices; ++n) Arith::load_pair(tile.pair(set * 8, first_column() + n * 8), x[0][2 * n], x[0][2 * n + 1]);
  }

  // The result into a tile; unrounded where the tile is on its way to an array of another type.
  template <class Tile>
  static LA_DEVICE void store(const Tile& tile, Result& result) {
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < kSlices; ++n) {
          const Cell<Acc>& c = result[m][half][n];
          const int row = m * 16 + half * 8, column = first_column() + n * 8;
          if constexpr (Arith::kFixedType) {
            Arith::store_pair(tile, row, column, c.x[0], c.x[1]);
          } else {
            typename Config::Elem* to = tile.pair(row, column);
            to[0] = c.x[0];
            to[1] = c.x[1];
          }
        }
      }
    }
  }

  // The sum over this warp's columns of the lane's share of a row, row(set, summed_row()).
  static LA_DEVICE Acc sum_columns_of(const Acc (&x)[kRows]) {
    const Acc sum = x[0] + shuffle_xor(x[0], 1);
    return sum + shuffle_xor(sum, 2);
  }
  static LA_DEVICE int summed_row() { return 0; }
  static LA_DEVICE bool holds_sum() { return (lane_id() & 3) == 0; }

  // There is nothing to wait for.
  template <class Registers> static LA_DEVICE void open(Registers&) {}
  static LA_DEVICE void close() {}
  // A state that stays as it is would be split into operands ahead of the walk, and occupy its registers twice.
  static LA_DEVICE void hold(State& state) {
    if constexpr (Config::kInner > 128 && !Config::kCausal) {
#pragma unroll
      for (int n = 0; n < kSlices; ++n) {
#pragma unroll
        for (int k = 0; k < Config::kInner / 8; ++k) ptx::pin(state[n][k].x);
      }
    }
  }
  template <int Left, class Registers> static LA_DEVICE void wait(Registers&) {}

  // Operands of a wide product arrive 64 inner columns at a time: all at once they would occupy more registers than the state leaves.
  static LA_DEVICE void pause(int inner) {
    if constexpr (Config::kInner > 128) {
      if (inner % 64 == 0) sync_warp();
    }
  }

  // Scores of 16 rows against `Blocks` blocks of 16 sources. A warp has every kGroups-th of them.
  template <int Blocks>
  struct Scores {
    Cell<Acc> x[Blocks][2][2];  // [block][row half][column half]
    LA_DEVICE Acc& at(int i, int half, int n, int j) { return x[i][half][n].x[j]; }
  };
  static LA_DEVICE constexpr int source_block(int group, int i, int, int groups) { return group + i * groups; }

  // `a` and `b` give the tiles.
  template <int Blocks, class A, class B>
  static LA_DEVICE void score(Scores<Blocks>& w, A a, B b, int m, int group) {
    w = {};
#pragma unroll
    for (int k = 0; k < Config::kInner; k += kDepth) {
      pause(k);
      Slice rows[2];
      Arith::load(rows, a(), m * 16, k);
#pragma unroll
      for (int i = 0; i < Blocks; ++i) {
        const int u = source_block(group, i, Blocks, Config::kGroups);
        if (u >= kRowBlocks || (Config::Role::kReversed ? u < m : u > m)) continue;  // no row of the block sees a source of it
        Slice columns[2];
        Arith::load(columns, b(), u * 16, k);
        Arith::mma(w.x[i][0][0], w.x[i][1][0], rows[0], rows[1], columns[0]);
        Arith::mma(w.x[i][0][1], w.x[i][1][1], rows[0], rows[1], columns[1]);
      }
    }
  }

  // result += A S if it `begins`; all of it with part 0. `operand(slice, cell)` gives the state's cells as they enter the product.
  template <int Part, class Tile, class Operand>
  static LA_DEVICE void times_state(Result& result, const Tile& a, bool begins, Operand operand) {
    if (Part != 0 || !begins) return;
#pragma unroll
    for (int k = 0; k < Config::kInner / kDepth; ++k) {
      pause(k * kDepth);
      Slice s[kSlices];
#pragma unroll
      for (int n = 0; n < kSlices; ++n) {
        Cell<Acc> cells[kDepth / 8];
#pragma unroll
        for (int i = 0; i < kDepth / 8; ++i) cells[i] = operand(n, k * (kDepth / 8) + i);
        s[n] = Arith::slice(cells);
      }
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
        Slice rows[2];
        Arith::load(rows, a, m * 16, k * kDepth);
#pragma unroll
        for (int n = 0; n < kSlices; ++n) Arith::mma(result[m][0][n], result[m][1][n], rows[0], rows[1], s[n]);
      }
    }
  }

  // Whether rows of 16-row block m have sources among k .. k + kDepth of the same chunk.
  static LA_DEVICE constexpr bool reaches(int m, int k) {
    return Config::Role::kReversed ? k + kDepth > m * 16 : k < m * 16 + 16;
  }

  // Ones where a row of block m sees source k + i: the weights of a running sum.
  static LA_DEVICE Slice ones(int m, int half, int k) {
    const int row = m * 16 + half * 8 + lane_row();
    Cell<Acc> cells[kDepth / 8];
#pragma unroll
    for (int i = 0; i < kDepth / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) cells[i].x[j] = k + i * 8 + lane_column() + j <= row ? Acc(1) : Acc(0);
    }
    return Arith::slice(cells);
  }

  // result += W C; with `Running`, running += (ones where y <= x) C from the same operands.
  template <bool Running, class Weights, class Tile>
  static LA_DEVICE void times_sources(Result& result, Result& running, const Weights& w, const Tile& c, const Weights&) {
#pragma unroll
    for (int k = 0; k < Config::kChunk; k += kDepth) {
      Slice columns[kSlices];
      Arith::load_transposed(columns, c, first_column(), k);
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
        if (!reaches(m, k)) continue;
        Slice rows[2];
        Arith::load(rows, w, m * 16, k);
#pragma unroll
        for (int n = 0; n < kSlices; ++n) Arith::mma(result[m][0][n], result[m][1][n], rows[0], rows[1], columns[n]);
        if constexpr (Running) {
          const Slice one[2] = {ones(m, 0, k), ones(m, 1, k)};
#pragma unroll
          for (int n = 0; n < kSlices; ++n) Arith::mma(running[m][0][n], running[m][1][n], one[0], one[1], columns[n]);
        }
      }
    }
  }

  static LA_DEVICE void mma_columns(Cell<Acc> (&c)[kSlices], const Slice (&a)[kSlices], const Slice& b) {
    static_assert(kSlices == 2 || kSlices == 1, "a warp owns 8 or 16 columns");
    if constexpr (kSlices == 2) {
      Arith::mma(c[0], c[1], a[0], a[1], b);
    } else {
      Arith::mma(c[0], a[0], b);
    }
  }

  // One row of ones in the place of B: the sums of C's columns.
  static LA_DEVICE Slice all_ones() {
    Cell<Acc> cells[kDepth / 8];
#pragma unroll
    for (int i = 0; i < kDepth / 8; ++i) cells[i] = {{Acc(1), Acc(1)}};
    return Arith::slice(cells);
  }

  // sum[n] = the sum over the chunk of column n * 8 + lane_row() of this warp's columns of C.
  template <class ColumnTile>
  static LA_DEVICE void sum_columns(Acc (&sum)[kSlices], const ColumnTile& c) {
    const Slice one = all_ones();
    Cell<Acc> cells[kSlices] = {};
#pragma unroll
    for (int k = 0; k < Config::kChunk; k += kDepth) {
      Slice columns[kSlices];
      Arith::load_transposed(columns, c, first_column(), k);
      mma_columns(cells, columns, one);
    }
#pragma unroll
    for (int n = 0; n < kSlices; ++n) sum[n] = cells[n].x[0];
  }

  // S^T += scale C^T B. Each chunk is summed by itself and added on the CUDA cores: the tensor cores' accumulators truncate, which
  // over a long sequence would drift.
  template <class ColumnTile, class InnerTile>
  static LA_DEVICE void update_state(State& state, const ColumnTile& c, const InnerTile& b, Acc scale) {
    constexpr int kSteps = Config::kChunk / kDepth;
    // Inner columns at a time: independent sums that hide each other's latency, where there are registers for them.
    constexpr int kWide = Config::kInner > 128 ? 16 : 32;
    Slice kept[Arith::kCheapSlice ? kSteps : 1][kSlices];
    if constexpr (Arith::kCheapSlice) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) Arith::load_transposed(kept[k], c, first_column(), k * kDepth);
    }
#pragma unroll
    for (int inner = 0; inner < Config::kInner; inner += kWide) {
      pause(inner);
      Cell<Acc> sum[kWide / 8][kSlices] = {};
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        if constexpr (!Arith::kCheapSlice) Arith::load_transposed(kept[0], c, first_column(), k * kDepth);
#pragma unroll
        for (int i = 0; i < kWide; i += 16) {
          Slice rows[2];
          Arith::load_transposed(rows, b, inner + i, k * kDepth);
          mma_columns(sum[i / 8], kept[Arith::kCheapSlice ? k : 0], rows[0]);
          mma_columns(sum[i / 8 + 1], kept[Arith::kCheapSlice ? k : 0], rows[1]);
        }
      }
#pragma unroll
      for (int i = 0; i < kWide / 8; ++i) {
#pragma unroll
        for (int n = 0; n < kSlices; ++n) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            Acc& x = state[n][inner / 8 + i].x[j];
            x = ptx::fma(scale, sum[i][n].x[j], x);
          }
        }
      }
    }
  }
};

}  // namespace la
