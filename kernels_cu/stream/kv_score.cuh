// The score warps of `stream_key_value`: both weights of a chunk's keys on its own queries.
#pragma once
#include "stream/kv_pipe.cuh"

namespace la {

template <class Config>
struct KeyValueScore {
  using Pipe = KeyValuePipe<Config>;
  using Chunk = typename Pipe::Chunk;
  using Piece = typename Pipe::Piece;

  const Params& p;

  LA_DEVICE void run() {
    const u32 parts = Pipe::parts(p);
    Chunk now;
#pragma unroll 1
    while (now.exists(parts)) {
      Pipe::wait(Pipe::kReady, now.slot);
      turn(now);
      now.next(Pipe::piece(now.ordinal).chunks);
    }
  }

  static LA_DEVICE int first_row() { return (warp_id() - Config::kFirstScore) * 16; }
  static LA_DEVICE int row(int half) { return first_row() + half * 8 + lane_row(); }

  LA_DEVICE void turn(const Chunk& now) {
    const auto k = Pipe::k(now.rows.at);
    float w[32];
    Pipe::wait(Pipe::kMeasured, now.rows);
    multiply(w, k, Pipe::q(now.slot.at));
    wgmma_wait<0>();
    wgmma_pin(w);
    Pipe::wait_round_before(Pipe::kUsed, now.pair);
    const float length[2] = {Pipe::factors(now.rows.at, 2)[row(0)], Pipe::factors(now.rows.at, 2)[row(1)]};
    each(w, Pipe::offset(now.slot.at), [&](float x, float offset, int half) { return ptx::fma(length[half], offset, x); });
    put(w, Pipe::weights());
    put_lines(now);
    multiply(w, Pipe::v(now.rows.at), Pipe::g(now.slot.at));
    wgmma_wait<0>();
    wgmma_pin(w);
    each(w, Pipe::delta(now.slot.at), [](float x, float delta, int) { return x - delta; });
    put(w, Pipe::key_weights());
    fence_async();
    sync_warp();
    Pipe::arrive(Pipe::kMade, now.pair);
    Pipe::arrive(Pipe::kFree, now.slot);
    Pipe::arrive(Pipe::kRowsFree, now.rows);
  }

  template <class Tile>
  static LA_DEVICE void multiply(float (&w)[32], const Tile& a, const Tile& b) {
    wgmma_pin(w);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Config::kInner; k += 16) wgmma<kAlongK, kAlongK>(w, a.along(0, k), b.along(0, k), k > 0);
    wgmma_commit();
  }

  // f(score, number of the source, half) where the row sees the source, zeros elsewhere. (Sources that do not exist are rows of zeros.)
  template <class F>
  static LA_DEVICE void each(float (&w)[32], const float* of_sources, F f) {
    struct alignas(8) Pair { float x[2]; };
    const int first = 2 * (lane_id() & 3), reach = row(0) - first;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const Pair pair = *reinterpret_cast<const Pair*>(of_sources + n * 8 + first);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& x = w[4 * n + 2 * half + j];
          const float y = f(x, pair.x[j], half);
          x = n * 8 + j - half * 8 >= reach ? y : 0.f;  // the causal mask
        }
      }
    }
  }

  template <class Tile>
  static LA_DEVICE void put(const float (&w)[32], const Tile& tile) {
    const int lane = lane_id();
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      u32 r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) r[i] = pack_bf16(w[4 * n + 2 * i], w[4 * n + 2 * i + 1]);
      stmatrix_x4(tile.packet_near(first_row(), n, lane & 15, lane >> 4), r);
    }
  }

  // What the state warps sum q and g with: in two parts, so that each lane has both in its columns of the product.
  LA_DEVICE void put_lines(const Chunk& now) const {
    const int id = thread() - 32 * Config::kFirstScore + unknown_zero();  // or addresses would be kept in registers
    const int y = id % Config::kChunk;
    const bool of_keys = id >= Config::kChunk;
    const float x = of_keys ? -Pipe::delta(now.slot.at)[y] : Pipe::offset(now.slot.at)[y];
    const auto tile = of_keys ? Pipe::key_weights() : Pipe::weights();
    const u16 high = to_bf16(x), low = to_bf16(x - bf16_low(high));
#pragma unroll
    for (int line = 0; line < 8; ++line) {
      reinterpret_cast<bf16*>(tile.packet(Config::kChunk + line, y / 8))[y % 8].bits = line % 2 == 0 ? high : low;
    }
  }
};

}  // namespace la
