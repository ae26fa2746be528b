// Arithmetic for arrays of float32, whose rows are copied into tiles as they are. Products are those of tile/arith.cuh, but operands
// come to lie in the registers where mma.sync wants them: to move them there takes more instructions than the products do.
#pragma once
#include "ring/tile.cuh"
#include "tile/arith.cuh"

namespace la {

template <class Arith> struct RingArith;

// What both have in common. In its own order a slice has columns t and t + 4 of its 8, in the order of tile/arith.cuh 2t and 2t + 1.
template <class Base>
struct RingArithOf : Base {
  using Slice = typename Base::Slice;
  template <int Width, int Rows> using Tile = RingTile<Width>;
  static constexpr bool kFixedType = true;
  static constexpr bool kSharesSums = true;  // see Rows::dots
  static constexpr bool kCheapSlice = true;  // of a chunk's few rows

  // `Count` times 8 rows from `row`, 8 columns from `k`: right factors.
  template <int Count, class Tile>
  static LA_DEVICE void load(Slice (&s)[Count], const Tile& tile, int row, int k) {
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      float x[2];
      Base::read(x, tile, row + 8 * i, k);
      s[i] = RingArith<Base>::operand(x[0], x[1]);
    }
  }

  template <int Count, class Tile>
  static LA_DEVICE void load_transposed(Slice (&s)[Count], const Tile& tile, int row, int k) {
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      float x[2];
      Base::read_transposed(x, tile, row + 8 * i, k);
      if constexpr (Tile::kRaw) s[i] = RingArith<Base>::rounded(x[0], x[1]);
      else s[i] = RingArith<Base>::operand(x[0], x[1]);
    }
  }

  // 16 rows as left and as right factors of one product, in their own order.
  template <class Tile>
  static LA_DEVICE void load_left(Slice (&s)[2], const Tile& tile, int row, int k) {
    const int lane = lane_id();
    u32 r[4];
    ldmatrix_x4(r, tile.packet_near(row, k / 4, lane & 15, lane >> 4));
    s[0] = RingArith<Base>::operand(as_float(r[0]), as_float(r[2]));
    s[1] = RingArith<Base>::operand(as_float(r[1]), as_float(r[3]));
  }
  template <class Tile>
  static LA_DEVICE void load_right(Slice (&s)[2], const Tile& tile, int row, int k) {
    const int lane = lane_id();
    u32 r[4];
    ldmatrix_x4(r, tile.packet_near(row, k / 4, (lane & 7) + ((lane >> 4) << 3), lane >> 3 & 1));
    s[0] = RingArith<Base>::operand(as_float(r[0]), as_float(r[1]));
    s[1] = RingArith<Base>::operand(as_float(r[2]), as_float(r[3]));
  }
};

template <>
struct RingArith<Tf32> : RingArithOf<Tf32> {
  // One of a tile, whose lower bits products cut off.
  static LA_DEVICE float number(float x) { return as_float(as_bits(x) & 0xffffe000u); }

  static LA_DEVICE Slice operand(float x0, float x1) { return {{as_bits(x0), as_bits(x1)}}; }
  static LA_DEVICE Slice rounded(float x0, float x1) { return {{sum_to_tf32(x0 + 0.f), sum_to_tf32(x1 + 0.f)}}; }
  static LA_DEVICE void mma_ones(Cell<float>& c0, Cell<float>& c1, const Slice& a0, const Slice& a1, const Slice& b) {
    mma(c0, c1, a0, a1, b);
  }

  static LA_DEVICE Slice slice(const Cell<float>* c) { return {{sum_to_tf32(c->x[0]), sum_to_tf32(c->x[1])}}; }

  template <class Tile>
  static LA_DEVICE void store_pair(const Tile& tile, int row, int column, float x0, float x1) {
    *reinterpret_cast<Word2*>(tile.pair(row, column)) = {{sum_to_tf32(x0), sum_to_tf32(x1)}};
  }

  static LA_DEVICE Word4 encode(const float (&x)[4]) {
    return {{sum_to_tf32(x[0] + 0.f), sum_to_tf32(x[1] + 0.f), sum_to_tf32(x[2] + 0.f), sum_to_tf32(x[3] + 0.f)}};
  }
};

template <>
struct RingArith<Tf32x3> : RingArithOf<Tf32x3> {
  static LA_DEVICE float number(float x) { return x; }

  // The product takes the upper bits of `high`.
  static LA_DEVICE Slice operand(float x0, float x1) {
    Slice s = split(x0, x1);
    s.high[0] = as_bits(x0);
    s.high[1] = as_bits(x1);
    return s;
  }
  static LA_DEVICE Slice rounded(float x0, float x1) { return operand(x0, x1); }

  // Where b holds zeros and ones.
  static LA_DEVICE void mma_ones(Cell<float>& c0, Cell<float>& c1, const Slice& a0, const Slice& a1, const Slice& b) {
    float c[4] = {c0.x[0], c0.x[1], c1.x[0], c1.x[1]};
    mma_tf32(c, {a0.low[0], a1.low[0], a0.low[1], a1.low[1]}, b.high);
    mma_tf32(c, {a0.high[0], a1.high[0], a0.high[1], a1.high[1]}, b.high);
    c0 = {{c[0], c[1]}};
    c1 = {{c[2], c[3]}};
  }

  static LA_DEVICE Slice slice(const Cell<float>* c) { return operand(c->x[0], c->x[1]); }
};

}  // namespace la
