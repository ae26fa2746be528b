// The suppliers of `stream_key_value`: q through the norm, times b; dout divided by den; v less its level.
#pragma once
#include "stream/kv_pipe.cuh"

namespace la {

template <class Config>
struct KeyValueSupply {
  using Pipe = KeyValuePipe<Config>;
  using Chunk = typename Pipe::Chunk;
  using Piece = typename Pipe::Piece;
  using R = Rows<typename Config::Arith, Config::kInner, Config::kChunk, Config::kSupplyThreads, 32 * Config::kFirstSupply>;

  const Params& p;
  bool levelled;

  static LA_DEVICE i32 id() { return thread() - 32 * Config::kFirstSupply; }
  static LA_DEVICE void sync() { sync_named(1, Config::kSupplyThreads); }

  LA_DEVICE void run() {
    const u32 parts = Pipe::parts(p);
    Chunk now;
#pragma unroll 1
    while (now.exists(parts)) {
      Pipe::wait(Pipe::kFull, now.slot);
      const Piece& piece = Pipe::piece(now.ordinal);
      if (now.begins()) find_level(piece);
      put(now, piece);
      now.next(piece.chunks);
    }
  }

  LA_DEVICE void put(const Chunk& now, const Piece& piece) {
    const Span sources = piece.sources_at(now.step);
    float inverse[R::kPasses], delta = 0.f;
#pragma unroll
    for (int pass = 0; pass < R::kPasses; ++pass) {
      const bool exists = piece.places.den != 0 && sources.holds(R::row(pass));
      inverse[pass] = exists ? load_number<float>(piece.places.den, sources.first + R::row(pass)) : 1.f;
    }
    const bool has_delta = id() < Config::kChunk && piece.places.delta != 0 && sources.holds(id());
    if (has_delta) delta = load_number<float>(piece.places.delta, sources.first + id());
    normalise(Pipe::q(now.slot.at));
    if (id() < Config::kChunk) Pipe::delta(now.slot.at)[id()] = delta;
    divide(Pipe::g(now.slot.at), inverse);
    Pipe::wait(Pipe::kRowsFull, now.rows);
    if (levelled) R::subtract(Pipe::v(now.rows.at), piece.rows_at(now.step), Pipe::level());
    fence_async();
    sync_warp();
    Pipe::arrive(Pipe::kReady, now.slot);
  }

  template <class Tile>
  LA_DEVICE void normalise(const Tile& tile) const {
    R rows;
    typename R::Norms norms = rows.take_norms(p, tile);
    each_packet(rows, tile, [&](typename R::Batch& v, int pass) {
      R::normalise(p, v, norms);
      (void)pass;
      R::each(v, [&](float& x, int, int) { x *= p.b_float; });
    });
  }

  template <class Tile>
  LA_DEVICE void divide(const Tile& tile, const float (&den)[R::kPasses]) const {
    if (!p.normalize) return;
    R rows;
    each_packet(rows, tile, [&](typename R::Batch& v, int pass) {
      const float inverse = inverse_den(p, den[pass]);
      R::each(v, [&](float& x, int, int) { x *= inverse; });
    });
  }

  // Two packets of each row at a time.
  template <class Tile, class F>
  static LA_DEVICE void each_packet(R& rows, const Tile& tile, F f) {
#pragma unroll
    for (int pair = 0; pair < R::kPerLane; pair += 2) {
      sync_warp();
#pragma unroll
      for (int i = pair; i < pair + 2; ++i) {
#pragma unroll
        for (int pass = 0; pass < R::kPasses; ++pass) rows.take(tile, pass, i);
      }
#pragma unroll
      for (int i = pair; i < pair + 2; ++i) {
#pragma unroll
        for (int pass = 0; pass < R::kPasses; ++pass) {
          typename R::Batch v = rows.values(pass * R::kPerLane + i, kBFloat16);
          f(v, pass);
          R::store(tile, v);
        }
      }
    }
  }

  LA_DEVICE void find_level(const Piece& piece) {
    bool any = false;
    if (id() < Config::kInner) {
      const float own = p.levelled && id() < p.e ? la::level<float>(p.v, piece.head, p.m, id()) : 0.f;
      Pipe::level()[id()] = own;
      any = own != 0.f;
    }
    float* const said = Pipe::numbers(Config::kFlags);
    const bool of_warp = warp_any(any);
    if (lane_id() == 0) said[warp_id() - Config::kFirstSupply] = of_warp ? 1.f : 0.f;
    sync();
    levelled = said[0] + said[1] + said[2] + said[3] != 0.f;
  }
};

}  // namespace la
