// Products of tiles. A warp owns kSlices * 8 columns of the result, and of the running state S^T (columns of the result by
// inner columns), which never leaves its registers. Where two warps share the columns, each holds half of the state's
// inner axis, makes half of every sum over it, and finishes every other 16-row block of the result.
#pragma once
#include "chunk/config.cuh"

namespace la {

template <class Config>
struct Products {
  using Arith = typename Config::Arith;
  using Acc = typename Config::Acc;
  using Slice = typename Arith::Slice;
  static constexpr int kSlices = Config::kSlices;
  static constexpr int kDepth = Arith::kDepth;
  static constexpr int kHalves = Config::kHalves;
  static constexpr int kRowBlocks = Config::kChunk / 16;
  static constexpr int kOwnBlocks = kRowBlocks / kHalves;
  static constexpr int kOwnInner = Config::kInner / kHalves;

  using Partial = Cell<Acc>[kRowBlocks][2][kSlices];  // [16-row block][upper, lower 8 rows][column slice]
  using Result = Cell<Acc>[kOwnBlocks][2][kSlices];   // the blocks that this warp finishes
  using State = Cell<Acc>[kSlices][kOwnInner / 8];    // [column slice][8 inner columns]

  static LA_DEVICE int column_warp() { return kHalves == 1 ? warp_id() : warp_id() % Config::kColumnWarps; }
  static LA_DEVICE int half() { return kHalves == 1 ? 0 : warp_id() / Config::kColumnWarps; }
  static LA_DEVICE int first_column() { return column_warp() * 8 * kSlices; }
  static LA_DEVICE int first_inner() { return half() * kOwnInner; }
  static LA_DEVICE int row_block(int own) { return kHalves == 1 ? own : own * 2 + half(); }

  // This warp's columns of `tile`, transposed, for rows k .. k + kDepth.
  template <class Tile>
  static LA_DEVICE void load_columns(Slice (&s)[kSlices], const Tile& tile, int k) {
    Arith::load_transposed(s, tile, first_column(), k);
  }

  // partial = A S over this warp's inner columns. `operand(slice, cell)` gives the state's cells as they enter the product.
  template <class Tile, class Operand>
  static LA_DEVICE void times_state(Partial& partial, const Tile& a, Operand operand) {
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
      for (int n = 0; n < kSlices; ++n) partial[m][0][n] = partial[m][1][n] = {{Acc(0), Acc(0)}};
    }
#pragma unroll
    for (int k = 0; k < kOwnInner / kDepth; ++k) {
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
        Arith::load(rows, a, m * 16, first_inner() + k * kDepth);
#pragma unroll
        for (int n = 0; n < kSlices; ++n) Arith::mma(partial[m][0][n], partial[m][1][n], rows[0], rows[1], s[n]);
      }
    }
  }

  // Where two warps share the columns: hands the other's row blocks over, before a barrier; `result` takes up, behind it,
  // what the other left. Lanes of the two hold the same places, so each finds its own line.
  static LA_DEVICE void give(Cell<Acc>* exchange, const Partial& partial) {
    if constexpr (kHalves == 2) {
      Cell<Acc>* to = exchange + (half() * Config::kColumnWarps + column_warp()) * kOwnBlocks * 2 * kSlices * 32 + lane_id();
#pragma unroll
      for (int i = 0; i < kOwnBlocks; ++i) {
#pragma unroll
        for (int x = 0; x < 2 * kSlices; ++x) {
          const Cell<Acc>&upper = partial[2 * i + 1][x / kSlices][x % kSlices], &lower = partial[2 * i][x / kSlices][x % kSlices];
          to[(i * 2 * kSlices + x) * 32] = half() == 0 ? upper : lower;
        }
      }
    }
  }

  static LA_DEVICE void take(Result& result, const Partial& partial, const Cell<Acc>* exchange) {
    const Cell<Acc>* from =
        exchange + ((1 - half()) * Config::kColumnWarps + column_warp()) * kOwnBlocks * 2 * kSlices * 32 + lane_id();
#pragma unroll
    for (int i = 0; i < kOwnBlocks; ++i) {
#pragma unroll
      for (int x = 0; x < 2 * kSlices; ++x) {
        Cell<Acc>& to = result[i][x / kSlices][x % kSlices];
        if constexpr (kHalves == 1) {
          to = partial[i][x / kSlices][x % kSlices];
        } else {
          const Cell<Acc>&upper = partial[2 * i + 1][x / kSlices][x % kSlices], &lower = partial[2 * i][x / kSlices][x % kSlices];
          const Cell<Acc> own = half() == 0 ? lower : upper, other = from[(i * 2 * kSlices + x) * 32];
          to = {{own.x[0] + other.x[0], own.x[1] + other.x[1]}};
        }
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
  static LA_DEVICE void times_sources(Result& result, Result& running, const Weights& w, const Tile& c) {
#pragma unroll
    for (int k = 0; k < Config::kChunk; k += kDepth) {
      Slice columns[kSlices];
      Arith::load_transposed(columns, c, first_column(), k);
#pragma unroll
      for (int i = 0; i < kOwnBlocks; ++i) {
        const int m = row_block(i);
        if (!reaches(m, k)) continue;
        Slice rows[2];
        Arith::load(rows, w, m * 16, k);
#pragma unroll
        for (int n = 0; n < kSlices; ++n) Arith::mma(result[i][0][n], result[i][1][n], rows[0], rows[1], columns[n]);
        if constexpr (Running) {
          const Slice one[2] = {ones(m, 0, k), ones(m, 1, k)};
#pragma unroll
          for (int n = 0; n < kSlices; ++n) Arith::mma(running[i][0][n], running[i][1][n], one[0], one[1], columns[n]);
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

  // S^T += scale C^T B. Each chunk is summed by itself and added on the CUDA cores: the tensor cores' accumulators
  // truncate, which over a long sequence would drift.
  template <class ColumnTile, class InnerTile>
  static LA_DEVICE void update_state(State& state, const ColumnTile& c, const InnerTile& b, Acc scale) {
    constexpr int kSteps = Config::kChunk / kDepth;
    constexpr int kWide = 32;  // inner columns at a time: independent sums that hide each other's latency
    Slice kept[Arith::kCheapSlice ? kSteps : 1][kSlices];
    if constexpr (Arith::kCheapSlice) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) Arith::load_transposed(kept[k], c, first_column(), k * kDepth);
    }
#pragma unroll
    for (int inner = 0; inner < kOwnInner; inner += kWide) {
      Cell<Acc> sum[kWide / 8][kSlices] = {};
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        if constexpr (!Arith::kCheapSlice) Arith::load_transposed(kept[0], c, first_column(), k * kDepth);
#pragma unroll
        for (int i = 0; i < kWide; i += 16) {
          Slice rows[2];
          Arith::load_transposed(rows, b, first_inner() + inner + i, k * kDepth);
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
