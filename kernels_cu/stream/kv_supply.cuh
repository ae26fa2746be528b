// The suppliers of `stream_key_value`: dout times b / (|q| den), and what is taken of each query besides; v less its level, where nothing
// is masked that alone. In Queries they count, too.
#pragma once
#include "stream/kv_pipe.cuh"
#include "stream/level.cuh"

namespace la {

template <class Config>
struct KeyValueSupply {
  using Pipe = KeyValuePipe<Config>;
  using Chunk = typename Pipe::Chunk;
  using Piece = typename Pipe::Piece;
  using R = Rows<typename Config::Arith, Config::kInner, Config::kChunk, Config::kSupplyThreads, 32 * Config::kFirstSupply, false,
                 Config::kSupplyGroups>;

  const Params& p;
  PartLevel<Config> level;
  float sum;  // Queries: of delta over this thread's rows of the part

  static LA_DEVICE i32 id() { return thread() - 32 * Config::kFirstSupply; }

  LA_DEVICE explicit KeyValueSupply(const Params& params) : p(params), sum(0) {}

  LA_DEVICE void run() {
    const u32 parts = Pipe::parts(p);
    Chunk now;
#pragma unroll 1
    while (now.exists(parts)) {
      const bool own = Pipe::supplies(now);
      if (own) Pipe::wait(Pipe::kFull, now.slot);
      if (!Config::kHasRows && now.begins()) Pipe::sync_suppliers();  // the part is described, for all of them
      const Piece& piece = Pipe::piece(now.ordinal);
      if constexpr (Config::kHasRows) {
        if (now.begins()) level.find(p, piece);
      }
      if (own) put(now, piece);
      if (!Config::kHasRows && now.step + 1 == piece.chunks) finish(piece);
      now.next(piece.chunks);
    }
  }

  LA_DEVICE void put(const Chunk& now, const Piece& piece) {
    if constexpr (Config::kCausal) put_sources(now, piece);
    if constexpr (Config::kOwnRows) Pipe::wait(Pipe::kRowsFull, now.rows);
    if constexpr (Config::kHasRows) level.take_off(Pipe::v(now.rows.at), piece.rows_at(now.step));
    fence_async();
    sync_warp();
    Pipe::arrive(Pipe::kReady, now.slot);
  }

  LA_DEVICE void put_sources(const Chunk& now, const Piece& piece) {
    const Span sources = piece.sources_at(now.step);
    float den[R::kPasses], delta[R::kPasses];
#pragma unroll
    for (int pass = 0; pass < R::kPasses; ++pass) {
      const bool exists = sources.holds(R::row(pass));
      den[pass] = exists && piece.places.den != 0 ? load_number<float>(piece.places.den, sources.first + R::row(pass)) : 1.f;
      delta[pass] = exists && piece.places.delta != 0 ? load_number<float>(piece.places.delta, sources.first + R::row(pass)) : 0.f;
    }
    const auto q = Pipe::q(now.slot.at);
    const bool flat = p.b_float == 0.f;  // q is zeros then, and b is taken for 1
    if (flat) clear(q);
    R rows;
    typename R::Norms norms = rows.take_norms(p, q);
    bool all_moderate = true;
#pragma unroll
    for (const float x : norms.factor) all_moderate = all_moderate && moderate(x);
    if (warp_any(!all_moderate)) shorten(q, norms.factor);
    const float b = flat ? 1.f : p.b_float, a_over_b = p.a_float * ptx::reciprocal(b);
#pragma unroll
    for (int pass = 0; pass < R::kPasses; ++pass) {
      const float inverse = norms.factor[pass] == 0.f ? 1.f : norms.factor[pass];
      const int row = R::row(pass);
      const float offset = a_over_b * ptx::reciprocal(inverse), of_query = delta[pass] * (b * inverse);
      if constexpr (!Config::kHasRows) {
        put_lines(Pipe::value_lines(now.slot.at), row, offset);
        put_lines(Pipe::key_lines(now.slot.at), row, -of_query);
        if ((lane_id() & 3) == 0) sum += delta[pass];
      } else if ((lane_id() & 3) == 0) {
        Pipe::offset(now.slot.at)[row] = offset;
        Pipe::delta(now.slot.at)[row] = of_query;
      }
      den[pass] = b * inverse * inverse_den(p, den[pass]);
    }
    each_packet<R>(Pipe::g(now.slot.at), [&](float (&x)[8], int pass) {
#pragma unroll
      for (float& one : x) one *= den[pass];
    });
  }

  // Long and short rows times a power of two, to a length of about 1: they meet rows of k, which may be long or short as well.
  template <class Tile>
  static LA_DEVICE void shorten(const Tile& q, float (&factor)[R::kPasses]) {
    float by[R::kPasses];
#pragma unroll
    for (int pass = 0; pass < R::kPasses; ++pass) {
      by[pass] = factor[pass] == 0.f ? 1.f : as_float(as_bits(factor[pass]) & 0x7f800000);
      factor[pass] *= ptx::reciprocal(by[pass]);
    }
#pragma unroll 1
    for (int i = 0; i < R::kPerLane; ++i) {
#pragma unroll
      for (int pass = 0; pass < R::kPasses; ++pass) {
        scale_packet(*reinterpret_cast<Word4*>(q.packet(R::row(pass), R::packet(i))), by[pass]);
      }
    }
  }

  // As KeyValueScore::put_lines. Of a row's four lanes each has two lines.
  template <class Tile>
  static LA_DEVICE void put_lines(const Tile& tile, int row, float x) {
    const u16 high = to_bf16(x), low = to_bf16(x - bf16_low(high));
    const int first = lane_id() & 3;
#pragma unroll
    for (int line = 0; line < 8; line += 4) {
      reinterpret_cast<bf16*>(tile.packet(line + first, row / 8))[row % 8].bits = first % 2 == 0 ? high : low;
    }
  }

  // The count's gradient. The flags are written again behind another barrier, of the next part.
  LA_DEVICE void finish(const Piece& piece) {
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) sum += shuffle_xor(sum, mask);
    float* const said = Pipe::numbers(Config::kFlags);
    if (lane_id() == 0) said[warp_id() - Config::kFirstSupply] = sum;
    Pipe::sync_suppliers();
    sum = 0;
    if (id() != 0) return;
    float whole = 0;
#pragma unroll
    for (int i = 0; i < Config::kSupplyWarps; ++i) whole += said[i];
    store_number(Pipe::final_state(p, piece).count, 0, -p.a_float * whole);
  }

  // A thread's own packets.
  template <class Tile>
  static LA_DEVICE void clear(const Tile& tile) {
#pragma unroll
    for (int pass = 0; pass < R::kPasses; ++pass) {
#pragma unroll
      for (int i = 0; i < R::kPerLane; ++i) *reinterpret_cast<Word4*>(tile.packet(R::row(pass), R::packet(i))) = {};
    }
  }
};

}  // namespace la
