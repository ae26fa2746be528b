// From the state warps' products to dq. With Y the products (of dout, where g = dout / den is meant), K the sum of k~ so far, and
// z = q / |q|:
//
//   delta' = (a s + b q~ . Y) / den,   dq~ = b (Y - delta' K),   dq = (h - z (z . h)) / |q|,   h = phi'(z) dq~
//
// delta' being delta less g . c (see chunk/epilogue.cuh). z . h is b (r . Y - delta' r . K) with r = z phi'(z), which is q~ here; and
// b q~ . K is den less a for each key. The result takes the place of q.
//
// What enters as z are elements of q, whose rows Score has brought to a moderate length; numbers of a row are divided by it instead.
#pragma once
#include "stream/pipe.cuh"

namespace la {

template <class Config>
struct Gradient {
  using Pipe = la::Pipe<Config>;
  using Feature = typename Config::Feature;
  using P = Products<Config>;
  // Sets of 16 rows; and how many are read before the first is written, since the compiler keeps the order of reading and writing.
  static constexpr int kSets = Config::kChunk / 16, kAtOnce = kSets / 2;
  static_assert(kSame<Feature, Identity> || kSame<Feature, Relu>, "z phi'(z) must be phi(z)");

  const Params& p;
  const typename Pipe::Piece& piece;
  const typename Pipe::Chunk& now;

  // phi(q) . Y of each row, shared by the state warps; and what follows from it.
  template <int Wide>
  LA_DEVICE void begin(const float (&result)[Wide]) const {
#pragma unroll
    for (int m0 = 0; m0 < kSets; m0 += kAtOnce) {
      float sum[kAtOnce];
#pragma unroll
      for (int m = 0; m < kAtOnce; ++m) sum[m] = dots_of(result, m0 + m);
#pragma unroll
      for (int m = 0; m < kAtOnce; ++m) {
        if (P::holds_sum()) Pipe::dots(warp_id())[P::row(m0 + m, P::summed_row())] = sum[m];
      }
    }
    sync();
    if (thread() < Config::kChunk) find_factors(thread());
    sync();
  }
  template <int Wide>
  LA_DEVICE float dots_of(const float (&result)[Wide], int m) const {
    float x[4][2], share[4];
    P::read(x, Pipe::tile_x(now.rows.at), m);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      share[i] = Feature::value(x[i][0]) * result[P::place(m, i, 0)];
      share[i] = ptx::fma(Feature::value(x[i][1]), result[P::place(m, i, 1)], share[i]);
    }
    return P::sum_columns_of(share);
  }
  static LA_DEVICE void sync() { sync_named(4, 32 * Config::kStateWarps); }

  LA_DEVICE void find_factors(int row) const {
    float dot = 0;
#pragma unroll
    for (int w = 0; w < Config::kStateWarps; ++w) dot += Pipe::dots(w)[row];
    const float shorter = Pipe::factors(now.pair.at, 2)[row], inverse_length = Pipe::factors(now.pair.at, 4)[row];
    dot *= shorter;
    const float a = scalar_a<float>(p), b = scalar_b<float>(p);
    const float den = Pipe::factors(now.pair.at, 0)[row], inverse = inverse_den(p, den);
    const float s = Pipe::factors(now.pair.at, 1)[row];
    const float of_keys = p.normalize ? den - a * piece.count_seen(now.step, row) : 0.f;  // b q~ . K
    const float delta = p.normalize ? ptx::fma(a, s, b * dot) * inverse * inverse : 0.f;
    const float along = ptx::fma(b * inverse, dot, -delta * of_keys);
    // inverse_length comes last: rows may be long, as b may be small
    Pipe::row_factors()[row] = {b * inverse * inverse_length, b * delta * inverse_length,
                                p.unit_norm ? along * inverse_length * shorter : 0.f};
    const Span span = piece.rows_at(now.step);
    if (piece.places.delta == 0 || piece.split != 0 || !span.holds(row)) return;
    const float whole = p.normalize ? ptx::fma(Pipe::factors(now.pair.at, 3)[row], inverse, delta) : 0.f;
    store_number(piece.places.delta, span.first + row, whole);
  }

  template <int Wide>
  LA_DEVICE void finish(const float (&result)[Wide], const float (&running)[32], const float (&before)[2]) const {
    const auto tile = Pipe::tile_x(now.rows.at);
#pragma unroll
    for (int m = 0; m < kSets; ++m) {
      float x[4][2];
      P::read(x, tile, m);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const typename Pipe::RowFactors f = Pipe::row_factors()[P::row(m, i)];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float key = before[c] + (Config::kCausal ? running[P::place(m, i, c)] : 0.f);
          const float h = Feature::derivative(x[i][c]) * ptx::fma(f.of_result, result[P::place(m, i, c)], -f.of_running * key);
          x[i][c] = ptx::fma(-x[i][c], f.along, h);
        }
      }
      u32 r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) r[i] = pack_bf16(x[i / 2 * 2][i % 2], x[i / 2 * 2 + 1][i % 2]);
      stmatrix_x4_trans(P::near_block(tile, m), r);
    }
  }
};

}  // namespace la
