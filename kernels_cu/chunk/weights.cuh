// The weights w[x, y] of a chunk's rows on its own sources, into shared memory:
//   Forward          a + A[x].B[y]
//   GradV            a + b A[x].B[y]
//   GradQ            A[x].B[y] - g[x].c              (c: see Block::set_centre)
//   GradK            b (A[x].B[y] - delta[y])
// and, for rows that are queries, their sums over the sources.
#pragma once
#include "chunk/running_sums.cuh"

namespace la {

// The offsets are `of_row` and of_source[source].
template <class Config, class Acc>
LA_DEVICE Acc weight(const Params& p, Acc score, Acc of_row, const Acc* of_source, int source) {
  using Role = typename Config::Role;
  if constexpr (kSame<Role, GradQ>) return score - of_row;
  if constexpr (kSame<Role, GradK>) return scalar_b<Acc>(p) * (score - of_source[source]);
  if constexpr (kSame<Role, Forward>) return scalar_a<Acc>(p) + score;
  return ptx::fma(scalar_b<Acc>(p), score, scalar_a<Acc>(p));
}

// A warp makes the weights of 16 rows (of each kWorkers-th 16 rows, if warps are few) on every kGroups-th part of the sources.
template <class Config>
struct Weights {
  using Role = typename Config::Role;
  using Acc = typename Config::Acc;
  using P = Products<Config>;
  using Turn = typename Block<Config>::Turn;
  static constexpr int kBlocks = Config::kRowBlocks, kGroups = Config::kGroups;
  static constexpr int kEach = (kBlocks + kGroups - 1) / kGroups;
  static constexpr bool kReversed = Role::kReversed;
  using Scores = typename P::template Scores<kEach>;

  static LA_DEVICE int group() { return warp_id() / kBlocks; }

  // Where products run on their own, `begin` starts the scores that `finish` makes weights of. `of_rows`: offsets of the lane's two
  // rows, if they are known.
  static LA_DEVICE void begin(Scores& scores, const Block<Config>& block, Turn turn) {
    if constexpr (P::kAsynchronous) {
      score(scores, block, turn, warp_id() % kBlocks);
    }
  }

  static LA_DEVICE void finish(Scores& scores, const Params& p, const Block<Config>& block, Turn turn, Acc (&of_rows)[2]) {
    if constexpr (P::kAsynchronous) {
      make(scores, p, block, turn, warp_id() % kBlocks, of_rows);
      fence_async();
    } else {
      if (group() >= kGroups) return;
#pragma unroll 1
      for (int m = warp_id() % kBlocks; m < kBlocks; m += Config::kWorkers) {
        score(scores, block, turn, m);
        if constexpr (kSame<Role, GradQ>) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            of_rows[half] = block.numbers(turn.row_copy(), kFirst)[m * 16 + half * 8 + lane_row()];
          }
        }
        make(scores, p, block, turn, m, of_rows);
      }
    }
  }

  // Tiles are asked for again and again: an address for all of a product would occupy registers all along.
  static LA_DEVICE void score(Scores& scores, const Block<Config>& block, Turn turn, int m) {
    P::score(scores, [&] { return block.tile_a(turn.row_copy()); }, [&] { return block.tile_b(turn.copy); }, m, group());
  }

  static LA_DEVICE void make(Scores& w, const Params& p, const Block<Config>& block, Turn turn, int m, const Acc (&of_rows)[2]) {
    const Span sources = block.sources_at(turn.step);
    const Acc* of_sources = block.numbers(turn.copy, kFirst);  // GradK
    Acc sum[2] = {};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int u = P::source_block(group(), i, kEach, kGroups);
      if (u >= kBlocks || (kReversed ? u < m : u > m)) continue;  // no row of the block sees a source of it
      each(w, i, u, [&](Acc& x, int half, int y) { x = weight<Config>(p, x, of_rows[half], of_sources, y); });
      if (u == m || !sources.whole(Config::kChunk)) {
        each(w, i, u, [&](Acc& x, int half, int y) {
          const int row = m * 16 + half * 8 + lane_row();
          bool sees = sources.holds(y);
          sees = sees && (kReversed ? y >= row : y <= row);  // the causal mask
          if (!sees) x = 0;
        });
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const Acc x0 = w.at(i, half, n, 0), x1 = w.at(i, half, n, 1);
          sum[half] += x0 + x1;
          Config::Arith::store_pair(block.weights(), m * 16 + half * 8, u * 16 + n * 8, x0, x1);
        }
      }
    }
    if constexpr (!kReversed) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sum[half] += shuffle_xor(sum[half], 1);
        sum[half] += shuffle_xor(sum[half], 2);
        if ((lane_id() & 3) == 0) {
          block.vector(Config::kRowParts)[group() * Config::kChunk + m * 16 + half * 8 + lane_row()] = sum[half];
        }
      }
    }
  }

  // f(score, row half, source) for the scores of block i, on the 16 sources from 16u.
  template <class F>
  static LA_DEVICE void each(Scores& w, int i, int u, F f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          f(w.at(i, half, n, j), half, u * 16 + n * 8 + lane_column() + j);
        }
      }
    }
  }
};

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
