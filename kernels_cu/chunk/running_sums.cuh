// Where warpgroups multiply: the running sums of the sources, and the products of rows with them, taken from the tiles on the
// tensor cores. A float32 number enters such a product as three bfloat16 numbers, which together hold all of its bits.
#pragma once
#include "chunk/block.cuh"

namespace la {

template <class Config>
struct RunningSums {
  using Role = typename Config::Role;
  static constexpr bool kInnerSums = kSame<Role, Forward> || kSame<Role, GradQ>;
  static constexpr bool kWeighted = kSame<Role, GradK>;
  using Dots = float[4];
  using Sums = float[32];
  using Turn = typename Block<Config>::Turn;
  static constexpr u32 kOnes = 0x3f803f80;  // two of them

  // Lines first .. first + 2 of a tile get the three parts of x at column i.
  template <class Tile>
  static LA_DEVICE void split(const Tile& tile, int first, int i, float x) {
#pragma unroll
    for (int part = 0; part < 3; ++part) {
      const u16 bits = to_bf16(x);
      reinterpret_cast<bf16*>(tile.packet(first + part, i / 8))[i % 8].bits = bits;
      x -= bf16_low(bits);
    }
  }

  // The vectors that rows of A are multiplied with, in lines 0-2 and 4-6.
  static LA_DEVICE void split_inner(const Block<Config>& block, int copy, int i) {
    split(block.vector_lines(), 0, i, kSame<Role, GradQ> ? block.centre(copy)[i] : block.inner_sum(copy)[i]);
    if constexpr (kSame<Role, GradQ>) split(block.vector_lines(), 4, i, block.rest(copy)[i]);
  }

  // What the sources of a turn are summed with: once each, or by GradK with -b delta, which its loaders split.
  static LA_DEVICE void begin(const Block<Config>& block) {
    if constexpr (Config::kCausal && !kWeighted) {
      for (int y = thread(); y < Config::kChunk; y += Config::kThreads) split(block.source_lines(0), 0, y, 1.f);
    }
    if constexpr (kInnerSums) {
      for (int i = thread(); i < Config::kInner; i += Config::kThreads) split_inner(block, 0, i);
    }
  }

  // A product with three lines, of a row of it: lanes t = 0, 1 of a quad have that with lines 0-2, t = 2, 3 with lines 4-6.
  static LA_DEVICE float of_three(const Dots& product, int half) {
    const float share = product[2 * half] + (lane_id() & 1 ? 0.f : product[2 * half + 1]);
    return share + shuffle_xor(share, 1);
  }

  // The products of the chunk's rows with the vectors. A warpgroup takes those of all 64 rows; a warp learns those of its 16 with
  // the first vector, which weights need, and the first warpgroup leaves both in shared memory.
  static LA_DEVICE void begin_dots(Dots& dots, const Block<Config>& block, Turn turn) {
    if constexpr (kInnerSums) {
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < Config::kInner; k += 16) {
        wgmma<kAlongK, kAlongK>(dots, block.tile_a(turn.row_copy()).along(0, k), block.vector_lines().along(0, k), k > 0);
      }
    }
  }

  static LA_DEVICE void finish_dots(float (&first)[2], Dots& dots, const Block<Config>& block, Turn turn) {
    if constexpr (kInnerSums) {
      const int lane = lane_id();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = of_three(dots, half);
        const int row = warp_id() % 4 * 16 + half * 8 + lane_row();
        if (warp_id() < 4 && (lane & 1) == 0 && (kSame<Role, GradQ> || (lane & 2) == 0)) {
          block.numbers(turn.row_copy(), lane & 2 ? kSecond : kFirst)[row] = sum;
        }
        first[half] = shuffle_from(sum, lane & 28);
      }
    }
  }

  // The sums of C's columns, weighted with lines 0-2 of source_lines; a warpgroup sums its own columns.
  static LA_DEVICE void begin_columns(Dots& sums, const Block<Config>& block, int copy) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Config::kChunk; k += 16) {
      wgmma<kAcross, kAlongK>(sums, block.tile_c(copy).across(k, warp_id() / 4 * 64), block.source_lines(copy).along(0, k), k > 0);
    }
  }

  static LA_DEVICE void finish_columns(Dots& sums, const Params& p, const Block<Config>& block, int copy) {
    wgmma_pin(sums);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = of_three(sums, half);
      if ((lane_id() & 3) != 0) continue;
      const int i = warp_id() * 16 + half * 8 + lane_row();
      block.column_sum(copy ^ 1)[i] = ptx::fma(kSame<Role, GradV> ? scalar_a<float>(p) : 1.f, sum, block.column_sum(copy)[i]);
    }
  }

  // The sums of B's columns: a warpgroup has 64 of them at a time, the same in every row of the product.
  static LA_DEVICE void add_inner(const Params& p, const Block<Config>& block, Turn turn) {
    if constexpr (kInnerSums) {
      constexpr int kGroups = Config::kWorkers / 4;
      const int copy = turn.copy;
#pragma unroll
      for (int part = 0; part < (Config::kInner / 64 + kGroups - 1) / kGroups; ++part) {
        const int column0 = (part * kGroups + warp_id() / 4) * 64 % Config::kInner;
        const u32 ones[4] = {kOnes, kOnes, kOnes, kOnes};
        Sums sums;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < Config::kChunk; k += 16) wgmma<kAcross>(sums, ones, block.tile_b(copy).across(k, column0), k > 0);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_pin(sums);
        if (warp_id() % 4 != 0 || part * kGroups + warp_id() / 4 >= Config::kInner / 64) continue;
        float own[2] = {sums[0], sums[1]};
#pragma unroll
        for (int i = 1; i < 8; ++i) {
#pragma unroll
          for (int j = 0; j < 2; ++j) own[j] = lane_row() == i ? sums[4 * i + j] : own[j];
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int i = column0 + lane_row() * 8 + lane_column() + j;
          const float sum = block.inner_sum(copy)[i] + own[j];
          block.inner_sum(copy ^ 1)[i] = sum;
          if constexpr (kSame<Role, GradQ>) block.set_centre(p, copy ^ 1, i, sum, block.count_before(turn.step + 1));
          split_inner(block, copy ^ 1, i);
        }
      }
      fence_async();
    }
  }
};

}  // namespace la
