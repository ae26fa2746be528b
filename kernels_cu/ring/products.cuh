// Products for `ring`, under the names of chunk/products.cuh. The result is formed transposed, S^T A^T + C^T W^T, as in
// chunk/warpgroup.cuh: so the state is the left factor as it stands, and A and W are right factors, whose pairs of columns are what
// mma.sync wants in two registers side by side. A warp owns 16 columns of the result, 8 rows of which are a tile.
#pragma once
#include "chunk/products.cuh"
#include "ring/config.cuh"

namespace la {

// The products of chunk/products.cuh for the same configuration, of which those that make the state are taken.
template <class Config> struct Untransposed : Config {};

template <class Arith_, class Role, class Feature, int Inner, int Columns, int Chunk, bool Causal>
struct Products<RingConfig<Arith_, Role, Feature, Inner, Columns, Chunk, Causal>, false>
    : Products<Untransposed<RingConfig<Arith_, Role, Feature, Inner, Columns, Chunk, Causal>>, false> {
  using Config = RingConfig<Arith_, Role, Feature, Inner, Columns, Chunk, Causal>;
  using Base = Products<Untransposed<Config>, false>;
  using Arith = typename Config::Arith;
  using Slice = typename Arith::Slice;
  using Base::first_column, Base::source_block;
  template <int Count> using Scores = typename Base::template Scores<Count>;
  static constexpr int kTiles = Chunk / 8, kBlocks = Chunk / 16, kSteps = Chunk / 8;

  using Result = Cell<float>[kTiles][2];  // [8 rows][left, right 8 columns], transposed

  // A lane's elements of the result, in sets of kRows rows.
  static constexpr int kSets = kTiles, kRows = 2, kColumns = 2;
  static LA_DEVICE int row(int set, int i) { return set * 8 + lane_column() + i; }
  static LA_DEVICE int column(int c) { return first_column() + c * 8 + lane_row(); }
  static LA_DEVICE float& at(Result& result, int set, int i, int c) { return result[set][c].x[i]; }

  template <class Tile>
  static LA_DEVICE void read(float (&x)[kRows][kColumns], const Tile& tile, int set) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) x[i][c] = Arith::number(*tile.down(set * 8, first_column() + c * 8, i));
    }
  }

  // Sums over this warp's columns: of the lane's two numbers, each the share of one row, the total of one is left with it, that of
  // row(set, summed_row()).
  static LA_DEVICE float sum_columns_of(const float (&x)[kRows]) {
    const bool odd = summed_row();
    float sum = (odd ? x[1] : x[0]) + shuffle_xor(odd ? x[0] : x[1], 4);
    sum += shuffle_xor(sum, 8);
    return sum + shuffle_xor(sum, 16);
  }
  static LA_DEVICE int summed_row() { return lane_row() & 1; }
  static LA_DEVICE bool holds_sum() { return lane_row() < 2; }

  // Scores are not transposed; where a warp has one block of them at most, it may have none.
  template <int Count, class A, class B>
  static LA_DEVICE void score(Scores<Count>& w, A a, B b, int m, int group) {
    w = {};
    const auto unseen = [&](int i) {
      const int u = source_block(group, i, Count, Config::kGroups);
      return u >= kBlocks || (Role::kReversed ? u < m : u > m);  // no row of the block sees a source of it
    };
    if (Count == 1 && unseen(0)) return;
#pragma unroll
    for (int k = 0; k < Inner; k += 8) {
      Slice rows[2];
      Arith::load_left(rows, a(), m * 16, k);
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        if (Count > 1 && unseen(i)) continue;
        Slice columns[2];
        Arith::load_right(columns, b(), source_block(group, i, Count, Config::kGroups) * 16, k);
        Arith::mma(w.x[i][0][0], w.x[i][1][0], rows[0], rows[1], columns[0]);
        Arith::mma(w.x[i][0][1], w.x[i][1][1], rows[0], rows[1], columns[1]);
      }
    }
  }

  // result += A S if it `begins`; all of it with part 0. `operand(slice, cell)` gives the state's cells as they enter the product.
  template <int Part, class Tile, class Operand>
  static LA_DEVICE void times_state(Result& result, const Tile& a, bool begins, Operand operand) {
    if constexpr (Part == 0) {
      if (!begins) return;
#pragma unroll
      for (int k = 0; k < Inner / 8; ++k) {
        Slice s[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const Cell<float> cell = operand(n, k);
          s[n] = Arith::slice(&cell);
        }
#pragma unroll
        for (int m = 0; m < kBlocks; ++m) {
          Slice rows[2];
          Arith::load(rows, a, m * 16, k * 8);
#pragma unroll
          for (int i = 0; i < 2; ++i) Arith::mma(result[2 * m + i][0], result[2 * m + i][1], s[0], s[1], rows[i]);
        }
      }
    }
  }

  // Whether rows of tile r have sources among the 8 of step k.
  static LA_DEVICE constexpr bool reaches(int r, int k) { return Role::kReversed ? k >= r : k <= r; }

  // Ones where a row of tile r sees a source of step k: the weights of a running sum.
  static LA_DEVICE Slice ones(int r, int k) {
    Cell<float> cell;
#pragma unroll
    for (int j = 0; j < 2; ++j) cell.x[j] = k < r || lane_column() + j <= lane_row() ? 1.f : 0.f;
    return Arith::operand(cell.x[0], cell.x[1]);
  }

  // result += W C; with `Running`, running += (ones where y <= x) C from the same operands.
  template <bool Running, class Weights, class Tile>
  static LA_DEVICE void times_sources(Result& result, Result& running, const Weights& w, const Tile& c, const Weights&) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      Slice columns[2];
      Arith::load_transposed(columns, c, first_column(), k * 8);
#pragma unroll
      for (int r = 0; r < kTiles; ++r) {
        if (!reaches(r, k)) continue;
        Slice rows[1];
        Arith::load(rows, w, r * 8, k * 8);
        Arith::mma(result[r][0], result[r][1], columns[0], columns[1], rows[0]);
        if constexpr (Running) Arith::mma_ones(running[r][0], running[r][1], columns[0], columns[1], ones(r, k));
      }
    }
  }
};

}  // namespace la
