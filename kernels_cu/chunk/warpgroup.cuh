// Products of tiles with wgmma. A warpgroup owns 64 columns of the result and of the running state S^T. It forms the transposed
// result, S^T A^T + C^T W^T: so the state, which stays in registers, is the left factor as it stands, and all other factors are
// tiles in shared memory. A warp holds the same 16 columns of S^T, laid out alike, as with mma.sync.
#pragma once
#include "chunk/products.cuh"

namespace la {

template <class Config>
struct Products<Config, true> {
  using Arith = typename Config::Arith;
  using InnerTile = typename Config::InnerTile;
  using ColumnTile = typename Config::ColumnTile;
  static constexpr bool kAsynchronous = true;
  static constexpr int kInner = Config::kInner, kChunk = Config::kChunk;
  static constexpr int kRowBlocks = kChunk / 16;
  static_assert(Config::kSlices == 2 && kChunk == 64, "a warp owns 16 columns, a warpgroup's weights have 64 rows");

  // Of the block at rows 8r, columns 8n, the lane's two elements stand at 4r + 2n: rows 2t, 2t + 1 of column g.
  using Result = float[kChunk / 2];
  using State = Cell<float>[2][kInner / 8];  // [8 columns][8 inner columns]

  static LA_DEVICE int first_column() { return warp_id() * 16; }
  static LA_DEVICE int group_column() { return warp_id() / 4 * 64; }

  // A lane's elements of the result, in sets of kRows rows: here of the 16 from 16m.
  static constexpr int kSets = kRowBlocks, kRows = 4, kColumns = 2;
  static LA_DEVICE int row(int m, int i) { return m * 16 + i / 2 * 8 + lane_column() + i % 2; }
  static LA_DEVICE int column(int c) { return first_column() + c * 8 + lane_row(); }
  static LA_DEVICE constexpr int place(int m, int i, int c) { return (m * 2 + i / 2) * 4 + c * 2 + i % 2; }
  static LA_DEVICE float& at(Result& result, int m, int i, int c) { return result[place(m, i, c)]; }

  // The state as one product's accumulator: of the block at inner columns 8k, columns 8n, a lane's elements stand at 4k + 2n.
  static LA_DEVICE void gather(float (&s)[kInner / 2], const State& state) {
#pragma unroll
    for (int k = 0; k < kInner / 8; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[4 * k + i] = state[i / 2][k].x[i % 2];
    }
  }
  static LA_DEVICE void scatter(State& state, const float (&s)[kInner / 2]) {
#pragma unroll
    for (int k = 0; k < kInner / 8; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) state[i / 2][k].x[i % 2] = s[4 * k + i];
    }
  }

  // The same elements of a tile; and the result into one.
  static LA_DEVICE void read(float (&x)[kRows][kColumns], const ColumnTile& tile, int m) {
    u32 r[4];
    ldmatrix_x4_trans(r, near_block(tile, m));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i / 2 * 2][i % 2] = bf16_low(r[i]);
      x[i / 2 * 2 + 1][i % 2] = bf16_high(r[i]);
    }
  }
  static LA_DEVICE void store(const ColumnTile& tile, Result& result) {
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) {
      u32 r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) r[i] = pack_bf16(result[m * 8 + 2 * i], result[m * 8 + 2 * i + 1]);
      stmatrix_x4_trans(near_block(tile, m), r);
    }
  }
  static LA_DEVICE unsigned char* near_block(const ColumnTile& tile, int m) {
    const int lane = lane_id();
    return tile.packet_near(m * 16, first_column() / 8, (lane & 7) + ((lane >> 4) << 3), lane >> 3 & 1);
  }

  // Sums over this warp's columns: of the lane's four numbers, each the share of one row, the total of one is left with it, that
  // of row(set, summed_row()).
  static LA_DEVICE float sum_columns_of(const float (&x)[kRows]) {
    const bool upper = lane_id() & 16, odd = lane_id() & 8;
    float a = upper ? x[2] : x[0], b = upper ? x[3] : x[1];
    a += shuffle_xor(upper ? x[0] : x[2], 16);
    b += shuffle_xor(upper ? x[1] : x[3], 16);
    float sum = odd ? b : a;
    sum += shuffle_xor(odd ? a : b, 8);
    return sum + shuffle_xor(sum, 4);
  }
  static LA_DEVICE int summed_row() { return lane_id() >> 3; }
  static LA_DEVICE bool holds_sum() { return (lane_id() & 4) == 0; }

  // Products run between these, on registers that nothing else touches meanwhile: see Work::turn.
  template <int Count>
  static LA_DEVICE void open(float (&x)[Count]) { wgmma_pin(x); }
  static LA_DEVICE void close() { wgmma_commit(); }
  // Nothing that depends on the state is computed ahead, to wait in registers.
  static LA_DEVICE void hold(State& state) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int k = 0; k < kInner / 8; ++k) wgmma_pin(state[n][k].x);
    }
  }
  template <int Left, int Count>
  static LA_DEVICE void wait(float (&x)[Count]) {
    wgmma_wait<Left>();
    wgmma_pin(x);
  }

  // result += (A S)^T, half of it with each `Part`; as it was if not `begins`: products on their way do not go around branches.
  // `operand(slice, cell)` gives the state's cells as they enter the product.
  template <int Part, class Operand>
  static LA_DEVICE void times_state(Result& result, const InnerTile& a, bool begins, Operand operand) {
    constexpr int kSteps = kInner / 32;
    u32 s[kSteps][4];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Cell<float> c = operand(i % 2, 2 * (Part * kSteps + k) + i / 2);
        s[k][i] = begins ? pack_bf16(c.x[0], c.x[1]) : 0;
      }
    }
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) wgmma<kAlongK>(result, s[k], a.along(0, (Part * kSteps + k) * 16), 1);
  }

  // Scores of the 16 rows that this warp has of the chunk against `Blocks` blocks of 16 sources, those of its warpgroup.
  template <int Blocks>
  struct Scores {
    float x[Blocks * 8];
    LA_DEVICE float& at(int i, int half, int n, int j) { return x[(2 * i + n) * 4 + 2 * half + j]; }
  };
  static LA_DEVICE constexpr int source_block(int group, int i, int blocks, int) { return group * blocks + i; }

  template <int Blocks, class A, class B>
  static LA_DEVICE void score(Scores<Blocks>& w, A tile_a, B tile_b, int, int group) {
    const InnerTile a = tile_a(), b = tile_b();
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kInner / 16; ++k) {
      wgmma<kAlongK, kAlongK>(w.x, a.along(0, k * 16), b.along(group * 16 * Blocks, k * 16), k > 0);
    }
  }

  // result += (W C)^T; with `Running`, running += (ones where y <= x) C transposed. Waits for all of `result`.
  template <bool Running, class Weights>
  static LA_DEVICE void times_sources(Result& result, Result& running, const Weights& w, const ColumnTile& c, const Weights& ones) {
#pragma unroll
    for (int k = 0; k < kChunk; k += 16) wgmma<kAcross, kAlongK>(result, c.across(k, group_column()), w.along(0, k), 1);
    wgmma_commit();
    wait<0>(result);
    if constexpr (Running) {
      wgmma_pin(running);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kChunk; k += 16) wgmma<kAcross, kAlongK>(running, c.across(k, group_column()), ones.along(0, k), 1);
      wgmma_commit();
      wait<0>(running);
    }
  }

  // S^T += scale C^T B. Each chunk is summed by itself and added on the CUDA cores: the tensor cores' accumulators truncate, which
  // over a long sequence would drift.
  static LA_DEVICE void update_state(State& state, const ColumnTile& c, const InnerTile& b, float scale) {
#pragma unroll
    for (int inner = 0; inner < kInner; inner += 64) {
      float own[32];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kChunk; k += 16) wgmma<kAcross, kAcross>(own, c.across(k, group_column()), b.across(k, inner), k > 0);
      wgmma_commit();
      wait<0>(own);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float& x = state[n][inner / 8 + k].x[j];
            x = ptx::fma(scale, own[4 * k + 2 * n + j], x);
          }
        }
      }
    }
  }
};

}  // namespace la
