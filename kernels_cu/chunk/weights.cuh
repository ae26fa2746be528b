// The weights w[x, y] of a chunk's rows on its own sources, into shared memory:
//   Forward, GradV   a + b A[x].B[y]
//   GradQ            A[x].B[y] - g[x].c              (c: see Block::set_centre)
//   GradK            b (A[x].B[y] - delta[y])
// and, for rows that are queries, their sums over the sources.
#pragma once
#include "chunk/block.cuh"

namespace la {

template <class Config>
LA_DEVICE typename Config::Acc weight(const Params& p, const typename Config::Acc* first, typename Config::Acc score, int row,
                                      int column) {
  using Role = typename Config::Role;
  using Acc = typename Config::Acc;
  if constexpr (kSame<Role, GradQ>) return score - first[row];
  if constexpr (kSame<Role, GradK>) return Acc(p.b) * (score - first[column]);
  return ptx::fma(Acc(p.b), score, Acc(p.a));
}

// Takes the weights of a 16x16 block on sources that a row does not see, or that do not exist.
template <class Config>
LA_DEVICE void mask(Cell<typename Config::Acc> (&w)[2][2], int m, int u, Span sources) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = m * 16 + half * 8 + lane_row();
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int y = u * 16 + n * 8 + lane_column() + j;
        bool sees = sources.holds(y);
        sees = sees && (Config::Role::kReversed ? y >= row : y <= row);  // the causal mask
        if (!sees) w[half][n].x[j] = 0;
      }
    }
  }
}

// A warp makes every kGroups-th 16x16 block of its 16 rows (of each kWarps-th 16 rows, if warps are few).
template <class Config>
LA_DEVICE void make_weights(const Params& p, const Block<Config>& block, typename Block<Config>::Turn turn) {
  using Arith = typename Config::Arith;
  using Acc = typename Config::Acc;
  constexpr int kBlocks = Config::kRowBlocks, kGroups = Config::kGroups;
  constexpr int kEach = (kBlocks + kGroups - 1) / kGroups;
  constexpr bool kReversed = Config::Role::kReversed;
  const int warp = warp_id(), group = warp / kBlocks;
  const Span sources = block.sources_at(turn.step);
  const Acc* first = block.numbers(kSame<typename Config::Role, GradK> ? turn.copy : turn.row_copy(), kFirst);
  if (group >= kGroups) return;
#pragma unroll 1
  for (int m = warp % kBlocks; m < kBlocks; m += Config::kWorkers) {
    Cell<Acc> w[kEach][2][2] = {};  // [block][row half][column half]
#pragma unroll
    for (int k = 0; k < Config::kInner; k += Arith::kDepth) {
      typename Arith::Slice rows[2];
      Arith::load(rows, block.tile_a(turn.row_copy()), m * 16, k);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int u = group + i * kGroups;
        if (u >= kBlocks || (kReversed ? u < m : u > m)) continue;  // no row of the block sees a source of it
        typename Arith::Slice columns[2];
        Arith::load(columns, block.tile_b(turn.copy), u * 16, k);
        Arith::mma(w[i][0][0], w[i][1][0], rows[0], rows[1], columns[0]);
        Arith::mma(w[i][0][1], w[i][1][1], rows[0], rows[1], columns[1]);
      }
    }
    Acc sum[2] = {};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int u = group + i * kGroups;
      if (u >= kBlocks || (kReversed ? u < m : u > m)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            Acc& x = w[i][half][n].x[j];
            x = weight<Config>(p, first, x, m * 16 + half * 8 + lane_row(), u * 16 + n * 8 + lane_column() + j);
          }
        }
      }
      if (u == m || !sources.whole(Config::kChunk)) mask<Config>(w[i], m, u, sources);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const Acc x0 = w[i][half][n].x[0], x1 = w[i][half][n].x[1];
          sum[half] += x0 + x1;
          Arith::store_pair(block.weights(), m * 16 + half * 8, u * 16 + n * 8, x0, x1);
        }
      }
    }
    if constexpr (!kReversed) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sum[half] += shuffle_xor(sum[half], 1);
        sum[half] += shuffle_xor(sum[half], 2);
        if ((lane_id() & 3) == 0) {
          block.vector(Config::kRowParts)[group * Config::kChunk + m * 16 + half * 8 + lane_row()] = sum[half];
        }
      }
    }
  }
}

// The sum of a row's weights over the chunk's own sources.
template <class Config>
LA_DEVICE typename Config::Acc sum_of_weights(const Block<Config>& block, int row) {
  typename Config::Acc sum = 0;
  if constexpr (Config::kCausal) {
#pragma unroll
    for (int group = 0; group < Config::kGroups; ++group) sum += block.vector(Config::kRowParts)[group * Config::kChunk + row];
  }
  return sum;
}

}  // namespace la
