// The score warps of `stream_key_value`: both weights of a chunk's keys on its own queries.
#pragma once
#include "stream/kv_pipe.cuh"
#include "stream/score.cuh"

namespace la {

template <class Config>
struct KeyValueScore {
  using Pipe = KeyValuePipe<Config>;
  using Chunk = typename Pipe::Chunk;
  using Piece = typename Pipe::Piece;
  using Lengths = Score<Config>;

  const Params& p;

  LA_DEVICE void run() {
    const u32 parts = Pipe::parts(p);
    Chunk now;
#pragma unroll 1
    while (now.exists(parts)) {
      Pipe::wait(Pipe::kReady, now.slot);
      const Piece& piece = Pipe::piece(now.ordinal);
      turn(now, piece.sources_at(now.step));
      now.next(piece.chunks);
    }
  }

  static LA_DEVICE int row(int half) { return Lengths::row(half); }

  LA_DEVICE void turn(const Chunk& now, Span sources) {
    const auto k = Pipe::k(now.rows.at);
    float w[32], squares[2], length[2] = {1.f, 1.f};
    multiply(w, k, Pipe::q(now.slot.at));
    Lengths::template add_squares<Config::kInner>(squares, k, {1.f, 1.f});
    wgmma_wait<0>();
    wgmma_pin(w);
    if (p.unit_norm) Lengths::template find_lengths<Config::kInner>(length, squares, k);
    Pipe::wait_round_before(Pipe::kUsed, now.pair);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Where |k| is 0, k~ is 0 and has no gradient.
      if ((lane_id() & 3) == 0) Pipe::factors(now.pair.at, 1)[row(half)] = length[half] == 0.f ? 0.f : ptx::reciprocal(length[half]);
      if (length[half] == 0.f) length[half] = 1.f;
      if ((lane_id() & 3) == 0) Pipe::factors(now.pair.at, 0)[row(half)] = ptx::reciprocal(length[half]);
      each(w, half, sources, [&](float& x, int) { x += p.a_float * length[half]; });
    }
    put(w, Pipe::weights(now.pair.at));
    multiply(w, Pipe::v(now.rows.at), Pipe::g(now.slot.at));
    wgmma_wait<0>();
    wgmma_pin(w);
    const float* delta = Pipe::delta(now.slot.at);
#pragma unroll
    for (int half = 0; half < 2; ++half) each(w, half, sources, [&](float& x, int y) { x -= delta[y]; });
    put(w, Pipe::key_weights(now.pair.at));
    put_lines(delta, Pipe::key_weights(now.pair.at));
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

  // f(score, source) where the row sees the source, zeros elsewhere.
  template <class F>
  static LA_DEVICE void each(float (&w)[32], int half, Span sources, F f) {
    const int t = lane_id() & 3;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& x = w[4 * n + 2 * half + j];
        const int y = n * 8 + 2 * t + j;
        f(x, y);
        const bool sees = y >= row(half) && sources.holds(y);  // the causal mask
        x = sees ? x : 0.f;
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
      stmatrix_x4(tile.packet_near(Lengths::first_row(), n, lane & 15, lane >> 4), r);
    }
  }

  // -delta, with which b q~ is summed: in three parts.
  template <class Tile>
  static LA_DEVICE void put_lines(const float* delta, const Tile& tile) {
    const int y = (warp_id() - Config::kFirstScore) * 32 + lane_id();
    if (y >= Config::kChunk) return;
    float rest = -delta[y];
#pragma unroll
    for (int line = 0; line < 3; ++line) {
      const u16 bits = to_bf16(rest);
      reinterpret_cast<bf16*>(tile.packet(Config::kChunk + line, y / 8))[y % 8].bits = bits;
      rest -= bf16_low(bits);
    }
  }
};

}  // namespace la
