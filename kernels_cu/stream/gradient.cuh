// From the state warps' products to dq. With Y the products (of dout, where g = dout / den is meant), K the sum of k~ so far, and z = q / |q|:
//
//   delta' = (a s + b q~ . Y) / den,   dq~ = b (Y - delta' K),   dq = (h - z (z . h)) / |q|,   h = phi'(z) dq~
//
// delta' being delta less g . c (see chunk/epilogue.cuh). z . h is b (r . Y - delta' r . K) with r = z phi'(z), which is q~ here; and
// b q~ . K is den less a for each key. The result takes the place of q.
#pragma once
#include "stream/pipe.cuh"

namespace la {

template <class Config>
struct Gradient {
  using Pipe = la::Pipe<Config>;
  using Feature = typename Config::Feature;
  using P = Products<Config>;
  static_assert(kSame<Feature, Identity> || kSame<Feature, Relu>, "z phi'(z) must be phi(z)");

  const Params& p;
  const typename Pipe::Piece& piece;
  const typename Pipe::Chunk& now;

  // Of 16 rows and the lane's two columns: element (i, c) of set m stands at this place of a product.
  static LA_DEVICE constexpr int at(int m, int i, int c) { return (m * 2 + i / 2) * 4 + c * 2 + i % 2; }

  LA_DEVICE void read(float (&z)[4][2], float (&inverse_length)[4], int m) const {
    P::read(z, Pipe::tile_x(now.rows.at), m);
    struct alignas(8) Pair { float x[2]; };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Pair pair = *reinterpret_cast<const Pair*>(Pipe::factors(now.pair.at, 2) + P::row(m, 2 * half));
      inverse_length[2 * half] = pair.x[0];
      inverse_length[2 * half + 1] = pair.x[1];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) z[i][c] *= inverse_length[i];
    }
  }

  // q~ . Y of each row, shared by the state warps; and what follows from it.
  template <int Wide>
  LA_DEVICE void begin(const float (&result)[Wide]) const {
#pragma unroll
    for (int m = 0; m < Config::kChunk / 16; ++m) {
      float z[4][2], inverse_length[4], share[4];
      read(z, inverse_length, m);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        share[i] = Feature::value(z[i][0]) * result[at(m, i, 0)];
        share[i] = ptx::fma(Feature::value(z[i][1]), result[at(m, i, 1)], share[i]);
      }
      const float sum = P::sum_columns_of(share);
      if (P::holds_sum()) Pipe::dots(warp_id())[P::row(m, P::summed_row())] = sum;
    }
    sync();
    if (thread() < Config::kChunk) find_factors(thread());
    sync();
  }
  static LA_DEVICE void sync() { sync_named(4, 32 * Config::kStateWarps); }

  LA_DEVICE void find_factors(int row) const {
    float dot = 0;
#pragma unroll
    for (int w = 0; w < Config::kStateWarps; ++w) dot += Pipe::dots(w)[row];
    const float a = scalar_a<float>(p), b = scalar_b<float>(p);
    const float den = Pipe::factors(now.pair.at, 0)[row], inverse = inverse_den(p, den);
    const float s = Pipe::factors(now.pair.at, 1)[row];
    const float of_keys = p.normalize ? den - a * piece.count_seen(now.step, row) : 0.f;  // b q~ . K
    const float delta = p.normalize ? ptx::fma(a, s, b * dot) * inverse * inverse : 0.f;
    const float along = ptx::fma(b * inverse, dot, -delta * of_keys);
    Pipe::row_factors()[row] = {b * inverse, b * delta, p.unit_norm ? along : 0.f, Pipe::factors(now.pair.at, 2)[row]};
    const Span span = piece.rows_at(now.step);
    if (piece.places.delta == 0 || piece.split != 0 || !span.holds(row)) return;
    const float whole = p.normalize ? ptx::fma(Pipe::factors(now.pair.at, 3)[row], inverse, delta) : 0.f;
    store_number(piece.places.delta, span.first + row, whole);
  }

  template <int Wide>
  LA_DEVICE void finish(const float (&result)[Wide], const float (&running)[32], const float (&before)[2]) const {
    const auto tile = Pipe::tile_x(now.rows.at);
#pragma unroll
    for (int m = 0; m < Config::kChunk / 16; ++m) {
      float z[4][2], inverse_length[4], x[4][2];
      read(z, inverse_length, m);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const typename Pipe::RowFactors f = Pipe::row_factors()[P::row(m, i)];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float key = before[c] + (Config::kCausal ? running[at(m, i, c)] : 0.f);
          const float h = Feature::derivative(z[i][c]) * ptx::fma(f.of_result, result[at(m, i, c)], -f.of_running * key);
          x[i][c] = ptx::fma(-z[i][c], f.along, h) * f.inverse_length;
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
