// The score warps: the weights of a chunk's rows on its own sources, and den.
//
//   w[x, y] = a / b + A[x] . B[y]  (y <= x),    den[x] = a / b count + A[x] . (sum of B so far) + sum of w[x, :]
//
// where the result is out / b. Where rows of A are q instead of q / |q| (StreamConfig::kPlainRows), these are |q| times as large,
// and so are a / b here and the result. (b = 0: A is zeros, and b is taken for 1.)
//
// In GradQ, c being the mean of v so far, and A dout,
//
//   w[x, y] = A[x] . (B[y] - c)  (y <= x),    s[x] = A[x] . (sum of v so far less count c) + sum of w[x, :]
//
// and den is given.
#pragma once
#include "stream/packets.cuh"
#include "stream/pipe.cuh"

namespace la {

template <class Config>
struct Score {
  using Pipe = la::Pipe<Config>;
  using Chunk = typename Pipe::Chunk;
  using Piece = typename Pipe::Piece;
  static constexpr int kWidth = Config::kCausal ? 36 : 4;  // of the products: rows of B, and the lines behind

  const Params& p;
  float b, a_over_b;

  LA_DEVICE explicit Score(const Params& params)
      : p(params), b(params.b_float == 0.f ? 1.f : params.b_float), a_over_b(params.a_float / b) {}

  LA_DEVICE void run() {
    const u32 parts = Pipe::parts(p);
    Chunk now;
#pragma unroll 1
    while (now.exists(parts)) {
      Pipe::wait(Pipe::kReady, now.slot);
      const i32 chunks = Pipe::piece(now.ordinal).chunks;
      begin(Pipe::piece(now.ordinal));
#pragma unroll 1
      for (bool more = true; more; more = !now.next(chunks)) turn(now);
    }
  }

  // Of the part: its sources from the chunk on, and the keys before it.
  struct Left {
    i32 begin, end;
    LA_DEVICE bool whole() const { return begin <= 0 && end >= Config::kChunk; }
    LA_DEVICE bool holds(i32 row) const { return row >= begin && row < end; }
    LA_DEVICE void next() {
      begin -= Config::kChunk;
      end -= Config::kChunk;
    }
  };
  Left sources;
  float count;

  LA_DEVICE void begin(const Piece& piece) {
    sources = {piece.sources.begin, piece.sources.end};
    count = piece.start_count;
  }

  LA_DEVICE void turn(const Chunk& now) {
    Pipe::wait(Pipe::kReady, now.slot);
    if constexpr (Config::kGradQ) {
      weigh_gradient(now);
    } else {
      weigh(now);
    }
    if constexpr (Config::kCausal) {
      const i32 low = sources.begin > 0 ? sources.begin : 0, high = sources.end < Config::kChunk ? sources.end : Config::kChunk;
      if constexpr (!Config::kGradQ) count += static_cast<float>(high > low ? high - low : 0);
      sources.next();
    }
  }

  LA_DEVICE void weigh(const Chunk& now) {
    const auto rows = Pipe::tile_a(now.rows.at);
    float length[2] = {1.f, 1.f}, w[kWidth], den[2];
    multiply(w, now);
    float squares[2];
    if constexpr (Config::kPlainRows) add_squares<Config::kInner>(squares, rows, {1.f, 1.f});
    wgmma_wait<0>();
    wgmma_pin(w);
    if (Config::kPlainRows && p.unit_norm) find_lengths<Config::kInner>(length, squares, rows);
    Pipe::arrive(Pipe::kFree, now.slot);
    find_den(den, w, length);
    Pipe::wait_round_before(Pipe::kUsed, now.pair);
    if constexpr (Config::kCausal) put(w, now.pair.at);
    put_factors(den, length, now.pair.at);
    fence_async();
    sync_warp();
    Pipe::arrive(Pipe::kMade, now.pair);
    store_den(den, length, Pipe::piece(now.ordinal), now.step);
  }

  LA_DEVICE void weigh_gradient(const Chunk& now) {
    const auto rows = Pipe::tile_x(now.rows.at);
    float length[2] = {1.f, 1.f}, w[kWidth], den[2], squares[2];
    load_den(den, Pipe::piece(now.ordinal), now.step);
    if constexpr (Config::kOwnRows) Pipe::wait(Pipe::kRowsFull, now.rows);
    multiply(w, now);
    add_squares<Config::kColumns>(squares, rows, {1.f, 1.f});
    wgmma_wait<0>();
    wgmma_pin(w);
    float scale[2] = {1.f, 1.f};
    if (p.unit_norm) {
      find_lengths<Config::kColumns>(length, squares, rows);
      shorten(rows, length, scale);
    }
    Pipe::arrive(Pipe::kFree, now.slot);
    if constexpr (Config::kOwnRows) Pipe::arrive(Pipe::kRowsFree, now.rows);
    Pipe::wait_round_before(Pipe::kUsed, now.pair);
    // Lanes t = 0, 1 of a quad have the products with the parts of c, lanes 2, 3 those with the rest of the sum.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float x = w[kWidth - 4 + 2 * half], y = w[kWidth - 3 + 2 * half];
      float share = x + (lane_id() & 1 ? 0.f : y);
      share += shuffle_xor(share, 1);
      const float of_row = shuffle_from(share, lane_id() & 28), of_rest = shuffle_from(share, (lane_id() & 28) + 2);
      if constexpr (Config::kCausal) mask(w, half, -of_row);
      const float sum = of_rest + sum_of_row(w, half);
      if ((lane_id() & 3) == 0) {
        Pipe::factors(now.pair.at, 0)[row(half)] = den[half];
        Pipe::factors(now.pair.at, 1)[row(half)] = sum;
        const float inverse = length[half] == 0.f ? 0.f : ptx::reciprocal(length[half]);
        Pipe::factors(now.pair.at, 2)[row(half)] = inverse;
        Pipe::factors(now.pair.at, 3)[row(half)] = of_row;
        Pipe::factors(now.pair.at, 4)[row(half)] = inverse * scale[half];
      }
    }
    if constexpr (Config::kCausal) put(w, now.pair.at);
    fence_async();
    sync_warp();
    Pipe::arrive(Pipe::kMade, now.pair);
  }

  // 1 where there is no den, or no row.
  LA_DEVICE void load_den(float (&den)[2], const Piece& piece, i32 step) const {
    const Span span = piece.rows_at(step);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      den[half] = 1.f;
      if (piece.places.den != 0 && span.holds(row(half))) den[half] = load_number<float>(piece.places.den, span.first + row(half));
    }
  }

  static LA_DEVICE int first_row() { return (warp_id() - Config::kFirstScore) * 16; }
  static LA_DEVICE int row(int half) { return first_row() + half * 8 + lane_row(); }

  // |x| of the lane's two rows, a quarter of each by each lane of a quad. Where it is 0: in GradQ 0, otherwise 1.
  template <int Width, class Tile>
  static LA_DEVICE void find_lengths(float (&length)[2], const float (&sum)[2], const Tile& tile) {
    length[0] = square_root(sum[0]);
    length[1] = square_root(sum[1]);
    if (warp_any(!in_range(sum[0]) || !in_range(sum[1]))) scale_lengths<Width>(length, sum, tile);
  }

  // Squares that leave the range of a float are taken of scaled elements.
  template <int Width, class Tile>
  static LA_DEVICE void scale_lengths(float (&length)[2], const float (&sum)[2], const Tile& tile) {
    float scale[2], scaled[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scale[half] = sum[half] < Range<float>::kSmall ? Range<float>::kUp : sum[half] > Range<float>::kLarge ? Range<float>::kDown : 1.f;
    }
    add_squares<Width>(scaled, tile, scale);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float zero = Config::kGradQ ? 0.f : 1.f;
      length[half] = scaled[half] == 0.f ? zero : square_root(scaled[half]) * ptx::reciprocal(scale[half]);
    }
  }

  // GradQ: long and short rows times a power of two, to a length of about 1, so that the state warps may multiply with them as they are.
  template <class Tile>
  static LA_DEVICE void shorten(const Tile& tile, float (&length)[2], float (&scale)[2]) {
    if (!warp_any(!moderate(length[0]) || !moderate(length[1]))) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scale[half] = scale_to_one(length[half]);
      length[half] *= scale[half];
    }
#pragma unroll 1
    for (int i = 0; i < Config::kColumns / 32; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) scale_packet(*reinterpret_cast<Word4*>(tile.packet(row(half), packet(i))), scale[half]);
    }
  }

  // Packet i of the lane's in a row. Two rows side by side begin with different ones, so that they fill a line of shared memory.
  static LA_DEVICE int packet(int i) { return (lane_id() & 3) + (i ^ (lane_row() & 1)) * 4; }

  template <int Width, class Tile>
  static LA_DEVICE void add_squares(float (&sum)[2], const Tile& tile, const float (&scale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float parts[2] = {};
#pragma unroll
      for (int i = 0; i < Width / 32; ++i) {
        float x[8];
        decode_packet(*reinterpret_cast<const Word4*>(tile.packet(row(half), packet(i))), kBFloat16, x);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float one = x[j] * scale[half];
          parts[j % 2] = ptx::fma(one, one, parts[j % 2]);
        }
      }
      sum[half] = add_quad(parts[0] + parts[1]);
    }
  }

  static LA_DEVICE float add_quad(float x) {
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
  }

  static LA_DEVICE void multiply(float (&w)[kWidth], const Chunk& now) {
    wgmma_pin(w);
    wgmma_fence();
    const auto a = Pipe::tile_a(now.rows.at);
#pragma unroll
    for (int k = 0; k < Config::kInner; k += 16) {
      if constexpr (Config::kCausal) wgmma<kAlongK, kAlongK>(w, a.along(0, k), Pipe::tile_b(now.slot.at).along(0, k), k > 0);
      else wgmma<kAlongK, kAlongK>(w, a.along(0, k), a.along(Config::kChunk, k), k > 0);
    }
    wgmma_commit();
  }

  // From scores to weights, and the sums over a row.
  LA_DEVICE void find_den(float (&den)[2], float (&w)[kWidth], const float (&length)[2]) const {
    const int t = lane_id() & 3;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Lanes t = 0 and 1 of a quad have the products with the three parts of the sums.
      const float x = w[kWidth - 4 + 2 * half], y = w[kWidth - 3 + 2 * half];
      const float of_sums = t == 0 ? x + y : t == 1 ? x : 0.f;
      const float a = a_over_b * length[half];
      if constexpr (Config::kCausal) mask(w, half, a);
      den[half] = ptx::fma(a, count, sum_of_row(w, half) + add_quad(of_sums));
    }
  }

  // w + a where the row sees the source, 0 elsewhere.
  LA_DEVICE void mask(float (&w)[kWidth], int half, float a) const {
    const int t = lane_id() & 3, reach = row(half) - 2 * t;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& one = w[4 * n + 2 * half + j];
        const bool sees = n * 8 + j <= reach;  // the causal mask
        one = sees ? a + one : 0.f;
      }
    }
    if (sources.whole()) return;
    const Left own = {sources.begin - 2 * t, sources.end - 2 * t};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (!own.holds(n * 8 + j)) w[4 * n + 2 * half + j] = 0.f;
      }
    }
  }

  static LA_DEVICE float sum_of_row(const float (&w)[kWidth], int half) {
    float sums[2] = {};
#pragma unroll
    for (int n = 0; Config::kCausal && n < 8; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) sums[j] += w[4 * n + 2 * half + j];
    }
    return add_quad(sums[0] + sums[1]);
  }

  static LA_DEVICE void put(const float (&w)[kWidth], i32 pair) {
    const auto tile = Pipe::weights(pair);
    const int lane = lane_id();
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      u32 r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) r[i] = pack_bf16(w[4 * n + 2 * i], w[4 * n + 2 * i + 1]);
      stmatrix_x4(tile.packet_near(first_row(), n, lane & 15, lane >> 4), r);
    }
  }

  LA_DEVICE void put_factors(const float (&den)[2], const float (&length)[2], i32 pair) const {
    if ((lane_id() & 3) != 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float factor = p.normalize ? inverse_den(p, den[half]) : b * ptx::reciprocal(length[half]);
      Pipe::factors(pair, 0)[row(half)] = factor;
      Pipe::factors(pair, 1)[row(half)] = factor * (a_over_b * length[half]);
    }
  }

  LA_DEVICE void store_den(const float (&den)[2], const float (&length)[2], const Piece& piece, i32 step) const {
    if (piece.places.den == 0 || piece.split != 0 || (lane_id() & 3) != 0) return;
    const Span span = piece.rows_at(step);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (span.holds(row(half))) store_number(piece.places.den, span.first + row(half), den[half] * ptx::reciprocal(length[half]) * b);
    }
  }
};

}  // namespace la
