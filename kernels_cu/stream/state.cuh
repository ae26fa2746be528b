// The state warps: a warpgroup holds 64 rows of S^T, S being the sum of B^T C over the chunks before, and forms 64 columns of the
// result,
//
//   out^T = S^T A^T + C^T w^T + a / b (sum of C so far),   times b / den,   S^T += C^T B.
//
// What GradQ makes of it: stream/gradient.cuh.
#pragma once
#include "stream/gradient.cuh"

namespace la {

template <class Config>
struct StateWork {
  using Pipe = la::Pipe<Config>;
  using Chunk = typename Pipe::Chunk;
  using Piece = typename Pipe::Piece;
  using P = Products<Config>;
  using IO = StateCells<Config, Config::Role::kKeyFeatures>;
  static constexpr int kInner = Config::kInner;
  static constexpr int kWide = Config::kCausal ? 36 : 32;  // with the sums of C's columns

  const Params& p;
  float s[kInner / 2];  // see Products::gather
  float sum[2];  // of C's column P::column(c), before the chunk

  LA_DEVICE explicit StateWork(const Params& params) : p(params) {}

  LA_DEVICE void run() {
    const u32 parts = Pipe::parts(p);
    Chunk now;
#pragma unroll 1
    while (now.exists(parts)) {
      Pipe::wait(Pipe::kFull, now.slot);  // the part is described
      const Piece& piece = Pipe::piece(now.ordinal);
      const i32 chunks = piece.chunks;
      begin(piece);
#pragma unroll 1
      for (bool more = true; more; more = !now.next(chunks)) {
        if constexpr (Config::kHasRows) turn(piece, now);
        else add(now);
      }
      finish(piece);
    }
  }

  static LA_DEVICE int group_column() { return warp_id() / 4 * 64; }

  LA_DEVICE void turn(const Piece& piece, const Chunk& now) {
    const i32 slot = now.slot.at, pair = now.pair.at;
    const auto a = Pipe::tile_a(now.rows.at);
    const auto c = Pipe::tile_c(slot);
    Pipe::wait(Pipe::kReady, now.slot);
    if constexpr (Config::kOwnRows) Pipe::wait(Pipe::kRowsFull, now.rows);
    u32 operand[kInner / 16][4];
    find_operand(operand, slot);
    const float before[2] = {sum[0], sum[1]};
    float result[kWide];
    wgmma_pin(s);
    wgmma_pin(result);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kInner / 16; ++k) wgmma<kAlongK>(result, operand[k], a.along(0, k * 16), k > 0);
    Pipe::wait(Pipe::kMade, now.pair);
    if constexpr (Config::kCausal) {
      const auto w = Pipe::weights(pair);
#pragma unroll
      for (int k = 0; k < Config::kChunk; k += 16) wgmma<kAcross, kAlongK>(result, c.across(k, group_column()), w.along(0, k), 1);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(result);
    float running[32];
    if constexpr (Config::kCausal) {
      sum[0] += result[32];
      sum[1] += result[34];
      const auto b = Pipe::tile_b(slot);
      if constexpr (Config::kGradQ) {
        wgmma_pin(running);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < Config::kChunk; k += 16) {
          wgmma<kAcross, kAlongK>(running, c.across(k, group_column()), Pipe::ones().along(0, k), k > 0);
        }
        wgmma_commit();
      }
      wgmma_pin(s);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < Config::kChunk; k += 16) wgmma<kAcross, kAcross>(s, c.across(k, group_column()), b.across(k, 0), 1);
      wgmma_commit();
    }
    if constexpr (Config::kGradQ) {
      Gradient<Config> gradient{p, piece, now};
      gradient.begin(result);
      if constexpr (Config::kCausal) {
        wgmma_wait<0>();
        wgmma_pin(running);
        wgmma_pin(s);
        Pipe::arrive(Pipe::kFree, now.slot);
      }
      gradient.finish(result, running, before);
      fence_async();
      sync_warp();
      Pipe::arrive(Pipe::kUsed, now.pair);
      Pipe::arrive(Pipe::kDone, now.result());
    } else {
      Pipe::wait_round_before(Pipe::kSent, now.stage);
      stage(result, before, pair);
      fence_async();
      sync_warp();
      Pipe::arrive(Pipe::kUsed, now.pair);
      Pipe::arrive(Pipe::kStaged, now.stage);
      if constexpr (Config::kCausal) {
        wgmma_wait<0>();
        wgmma_pin(s);
      }
      Pipe::arrive(Pipe::kFree, now.slot);
    }
  }

  // The state as it enters the product, in GradQ less the product of its sums over keys with the mean of v: v is taken less its mean.
  LA_DEVICE void find_operand(u32 (&operand)[kInner / 16][4], i32 slot) const {
    struct alignas(8) Pair { float x[2]; };
#pragma unroll
    for (int k = 0; k < kInner / 8; ++k) {
      float x[4] = {s[4 * k], s[4 * k + 1], s[4 * k + 2], s[4 * k + 3]};
      if constexpr (Config::kGradQ) {
        const Pair centre = *reinterpret_cast<const Pair*>(Pipe::centre(slot) + k * 8 + lane_column());
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = ptx::fma(-sum[i / 2], centre.x[i % 2], x[i]);
      }
      operand[k / 2][k % 2 * 2] = pack_bf16(x[0], x[1]);
      operand[k / 2][k % 2 * 2 + 1] = pack_bf16(x[2], x[3]);
    }
  }

  // S^T += C^T B, and the sums of C's columns, where there are no rows.
  LA_DEVICE void add(const Chunk& now) {
    const auto c = Pipe::tile_c(now.slot.at);
    const auto b = Pipe::tile_b(now.slot.at);
    const auto ones = Pipe::weights(0);
    Pipe::wait(Pipe::kReady, now.slot);
    float sums[4];
    wgmma_pin(s);
    wgmma_pin(sums);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Config::kChunk; k += 16) {
      wgmma<kAcross, kAcross>(s, c.across(k, group_column()), b.across(k, 0), 1);
      wgmma<kAcross, kAlongK>(sums, c.across(k, group_column()), ones.along(Config::kChunk, k), k > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(s);
    wgmma_pin(sums);
    sum[0] += sums[0];
    sum[1] += sums[2];
    Pipe::arrive(Pipe::kFree, now.slot);
  }

  static LA_DEVICE void stage(const float (&result)[kWide], const float (&before)[2], i32 pair) {
    const auto tile = Pipe::stage();
    constexpr int kAtOnce = Config::kChunk / 32;  // of 16 rows: all that is read of shared memory comes before what is written
    struct alignas(8) Pair { float x[2]; };
#pragma unroll
    for (int m0 = 0; m0 < Config::kChunk / 16; m0 += kAtOnce) {
      Pair factor[kAtOnce][2], of_sum[kAtOnce][2];
#pragma unroll
      for (int m = 0; m < kAtOnce; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = (m0 + m) * 16 + half * 8 + lane_column();
          factor[m][half] = *reinterpret_cast<const Pair*>(Pipe::factors(pair, 0) + row);
          of_sum[m][half] = *reinterpret_cast<const Pair*>(Pipe::factors(pair, 1) + row);
        }
      }
#pragma unroll
      for (int m = 0; m < kAtOnce; ++m) {
        u32 r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const Pair f = factor[m][i / 2], g = of_sum[m][i / 2];
          const float* x = result + (m0 + m) * 8 + i * 2;
          r[i] = pack_bf16(ptx::fma(x[0], f.x[0], before[i % 2] * g.x[0]), ptx::fma(x[1], f.x[1], before[i % 2] * g.x[1]));
        }
        stmatrix_x4_trans(P::near_block(tile, m0 + m), r);
      }
    }
  }

  LA_DEVICE void begin(const Piece& piece) {
    typename P::State cells;
    IO::clear(cells);
    sum[0] = sum[1] = 0;
    const Slots<Config> slots(p, piece);
    const i32 size = Config::kGradQ ? p.d : p.e;
#pragma unroll 1
    for (i32 i = 0; i < slots.count; ++i) {
      IO::add(cells, p, slots.place(slots.first.kv, i, p.d * p.e), piece.column0);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int column = piece.column0 + P::column(c);
        const u64 at = slots.place(Config::kGradQ ? slots.first.k_sum : slots.first.v_sum, i, size);
        if (column < size) sum[c] += load_number<float>(at, column);
      }
    }
    P::gather(s, cells);
  }

  LA_DEVICE void finish(const Piece& piece) {
    if (Config::kGradQ || !Config::kCausal || !Pipe::has_final(p, piece)) return;
    const StatePlace at = Pipe::final_state(p, piece);
    typename P::State cells;
    P::scatter(cells, s);
    IO::write(cells, p, at.kv, piece.column0);
    if ((lane_id() & 3) != 0) return;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = piece.column0 + P::column(c);
      if (column < p.e) store_number(at.v_sum, column, sum[c]);
    }
  }
};

}  // namespace la
