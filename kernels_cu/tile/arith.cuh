// Arithmetic policies: how numbers are kept in shared memory and multiplied on the tensor cores.
//
// All of them speak of two shapes. A `Cell` is an 8x8 block of accumulators: lane (g, t) = (lane / 4, lane % 4)
// holds columns 2t, 2t+1 of row g. A `Slice` is 8 rows by kDepth columns of an operand, spread over a warp. A
// product of 16x8 takes two slices of the left factor and one of the right; left and right slices are laid out
// alike, and one or two cells side by side become a slice without any exchange between lanes. So the
// running state, which is accumulated in cells, is an operand as it stands.
//
// kDepth columns of a tf32 or f64 slice are taken in the order 0, 2, 4, 6, 1, 3, 5, 7: the order of a sum does not
// matter, and a lane's two elements are then neighbours, as they are in a cell.
#pragma once
#include "ptx/all.cuh"
#include "tile/shared.cuh"

namespace la {

using namespace ptx;

template <class Acc>
struct Cell { Acc x[2]; };

LA_DEVICE int lane_id() { return thread() & 31; }
LA_DEVICE int warp_id() { return static_cast<int>(static_cast<u32>(thread()) / 32); }
LA_DEVICE int lane_row() { return lane_id() >> 2; }
LA_DEVICE int lane_column() { return (lane_id() & 3) * 2; }

// bfloat16 operands, float32 accumulation.
struct Bf16 {
  template <int Width, int Rows> using Tile = SharedTile<bf16, Width>;
  static constexpr bool kWarpgroups = false, kStreams = false, kSharesSums = false;
  using Elem = bf16;
  using Acc = float;
  static constexpr int kDepth = 16;
  static constexpr int kDType = 0;           // of Elem; see DType in chunk/params.cuh
  static constexpr bool kFixedType = true;   // global arrays hold Elem; the other policies read any narrower float
  static constexpr bool kCheapSlice = true;  // a slice is small enough to be kept instead of loaded again
  struct Slice { u32 w[2]; };

  static LA_DEVICE float round(float x) { return bf16_low(pack_bf16(x, 0.f)); }

  // 16 rows from `row`, kDepth columns from `k`.
  template <class Tile>
  static LA_DEVICE void load(Slice (&s)[2], const Tile& tile, int row, int k) {
    const int lane = lane_id();
    u32 r[4];
    ldmatrix_x4(r, tile.packet_near(row, k / 8, lane & 15, lane >> 4));
    s[0] = {{r[0], r[2]}};
    s[1] = {{r[1], r[3]}};
  }

  // The same of the transposed tile: 16 of its columns from `row`, kDepth of its rows from `k`.
  template <class Tile>
  static LA_DEVICE void load_transposed(Slice (&s)[2], const Tile& tile, int row, int k) {
    const int lane = lane_id();
    u32 r[4];
    ldmatrix_x4_trans(r, tile.packet_near(k, row / 8, (lane & 7) + ((lane >> 4) << 3), lane >> 3 & 1));
    s[0] = {{r[0], r[2]}};
    s[1] = {{r[1], r[3]}};
  }

  static LA_DEVICE Slice slice(const Cell<float>* c) {
    return {{pack_bf16(c[0].x[0], c[0].x[1]), pack_bf16(c[1].x[0], c[1].x[1])}};
  }

  static LA_DEVICE void mma(Cell<float>& c0, Cell<float>& c1, const Slice& a0, const Slice& a1, const Slice& b) {
    float c[4] = {c0.x[0], c0.x[1], c1.x[0], c1.x[1]};
    mma_bf16(c, {a0.w[0], a1.w[0], a0.w[1], a1.w[1]}, b.w);
    c0 = {{c[0], c[1]}};
    c1 = {{c[2], c[3]}};
  }

  // This lane's two elements of the 8x8 block at (row, column).
  template <class Tile>
  static LA_DEVICE void store_pair(const Tile& tile, int row, int column, float x0, float x1) {
    *reinterpret_cast<u32*>(tile.pair(row, column)) = pack_bf16(x0, x1);
  }

  static LA_DEVICE void load_pair(const bf16* p, float& x0, float& x1) {
    const u32 w = *reinterpret_cast<const u32*>(p);
    x0 = bf16_low(w);
    x1 = bf16_high(w);
  }

  static LA_DEVICE Word4 encode(const float (&x)[8]) {
    return {{pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])}};
  }
};

// The same on sm_90a, where four warps form a product with wgmma; see chunk/warpgroup.cuh.
struct Bf16Wgmma : Bf16 {
  template <int Width, int Rows> using Tile = PanelTile<bf16, Width, Rows>;
  static constexpr bool kWarpgroups = true, kStreams = false;
};

// The same where chunks stream through warps with roles of their own; see stream.cu.
struct Bf16Stream : Bf16Wgmma {
  static constexpr bool kStreams = true;
};

// What the policies with 32-bit elements share: where a lane's elements lie.
struct Float32Tiles {
  template <int Width, int Rows> using Tile = SharedTile<float, Width>;
  static constexpr bool kWarpgroups = false, kStreams = false, kSharesSums = false;
  using Elem = float;
  using Acc = float;
  static constexpr int kDepth = 8;
  static constexpr int kDType = 2;
  static constexpr bool kFixedType = false;
  static constexpr bool kCheapSlice = false;

  template <class Tile>
  static LA_DEVICE void read(float (&x)[2], const Tile& tile, int row, int k) {
    const Word2 w = *reinterpret_cast<const Word2*>(tile.pair(row, k));
    x[0] = as_float(w.w[0]);
    x[1] = as_float(w.w[1]);
  }

  template <class Tile>
  static LA_DEVICE void read_transposed(float (&x)[2], const Tile& tile, int row, int k) {
    x[0] = *tile.down(k, row, 0);
    x[1] = *tile.down(k, row, 1);
  }

  static LA_DEVICE void load_pair(const float* p, float& x0, float& x1) {
    const Word2 w = *reinterpret_cast<const Word2*>(p);
    x0 = as_float(w.w[0]);
    x1 = as_float(w.w[1]);
  }
};

// TF32 operands (10 mantissa bits, the exponent range of float32): float32 with precision="tf32", and float16,
// whose inputs are exact in TF32 while sums and weights outgrow its range.
struct Tf32 : Float32Tiles {
  struct Slice { u32 w[2]; };

  static LA_DEVICE float round(float x) { return as_float(to_tf32(x)); }
  static LA_DEVICE Slice slice(const Cell<float>* c) { return {{to_tf32(c->x[0]), to_tf32(c->x[1])}}; }

  template <class Tile>
  static LA_DEVICE void load(Slice (&s)[2], const Tile& tile, int row, int k) {
    for (int i = 0; i < 2; ++i) {
      float x[2];
      read(x, tile, row + 8 * i, k);
      s[i] = {{as_bits(x[0]), as_bits(x[1])}};  // tiles hold numbers that are rounded already
    }
  }

  template <int Count, class Tile>
  static LA_DEVICE void load_transposed(Slice (&s)[Count], const Tile& tile, int row, int k) {
    for (int i = 0; i < Count; ++i) {
      float x[2];
      read_transposed(x, tile, row + 8 * i, k);
      s[i] = {{as_bits(x[0]), as_bits(x[1])}};
    }
  }

  static LA_DEVICE void mma(Cell<float>& c0, Cell<float>& c1, const Slice& a0, const Slice& a1, const Slice& b) {
    float c[4] = {c0.x[0], c0.x[1], c1.x[0], c1.x[1]};
    mma_tf32(c, {a0.w[0], a1.w[0], a0.w[1], a1.w[1]}, b.w);
    c0 = {{c[0], c[1]}};
    c1 = {{c[2], c[3]}};
  }

  template <class Tile>
  static LA_DEVICE void store_pair(const Tile& tile, int row, int column, float x0, float x1) {
    *reinterpret_cast<Word2*>(tile.pair(row, column)) = {{to_tf32(x0), to_tf32(x1)}};
  }

  static LA_DEVICE Word4 encode(const float (&x)[4]) {
    return {{to_tf32(x[0]), to_tf32(x[1]), to_tf32(x[2]), to_tf32(x[3])}};
  }
};

// 3xTF32: x = high + low, each in TF32; high*high + high*low + low*high is float32 to within 2^-20.
struct Tf32x3 : Float32Tiles {
  struct Slice { u32 high[2], low[2]; };

  static LA_DEVICE float round(float x) { return x; }

  // Cut, not rounded: the rest is exact either way, and what mma.sync then cuts off the rest is below 2^-21 of x.
  static LA_DEVICE Slice split(float x0, float x1) {
    Slice s;
    s.high[0] = as_bits(x0) & 0xffffe000u;
    s.high[1] = as_bits(x1) & 0xffffe000u;
    s.low[0] = as_bits(x0 - as_float(s.high[0]));
    s.low[1] = as_bits(x1 - as_float(s.high[1]));
    return s;
  }

  static LA_DEVICE Slice slice(const Cell<float>* c) { return split(c->x[0], c->x[1]); }

  template <class Tile>
  static LA_DEVICE void load(Slice (&s)[2], const Tile& tile, int row, int k) {
    for (int i = 0; i < 2; ++i) {
      float x[2];
      read(x, tile, row + 8 * i, k);
      s[i] = split(x[0], x[1]);
    }
  }

  template <int Count, class Tile>
  static LA_DEVICE void load_transposed(Slice (&s)[Count], const Tile& tile, int row, int k) {
    for (int i = 0; i < Count; ++i) {
      float x[2];
      read_transposed(x, tile, row + 8 * i, k);
      s[i] = split(x[0], x[1]);
    }
  }

  static LA_DEVICE void mma(Cell<float>& c0, Cell<float>& c1, const Slice& a0, const Slice& a1, const Slice& b) {
    float c[4] = {c0.x[0], c0.x[1], c1.x[0], c1.x[1]};
    mma_tf32(c, {a0.low[0], a1.low[0], a0.low[1], a1.low[1]}, b.high);
    mma_tf32(c, {a0.high[0], a1.high[0], a0.high[1], a1.high[1]}, b.low);
    mma_tf32(c, {a0.high[0], a1.high[0], a0.high[1], a1.high[1]}, b.high);
    c0 = {{c[0], c[1]}};
    c1 = {{c[2], c[3]}};
  }

  template <class Tile>
  static LA_DEVICE void store_pair(const Tile& tile, int row, int column, float x0, float x1) {
    *reinterpret_cast<Word2*>(tile.pair(row, column)) = {{as_bits(x0), as_bits(x1)}};
  }

  static LA_DEVICE Word4 encode(const float (&x)[4]) {
    return {{as_bits(x[0]), as_bits(x[1]), as_bits(x[2]), as_bits(x[3])}};
  }
};

// float64 throughout.
struct F64 {
  template <int Width, int Rows> using Tile = SharedTile<double, Width>;
  static constexpr bool kWarpgroups = false, kStreams = false, kSharesSums = false;
  using Elem = double;
  using Acc = double;
  static constexpr int kDepth = 8;
  static constexpr int kDType = 3;
  static constexpr bool kFixedType = false;
  static constexpr bool kCheapSlice = false;
  struct Slice { double w[2]; };

  static LA_DEVICE double round(double x) { return x; }
  static LA_DEVICE Slice slice(const Cell<double>* c) { return {{c->x[0], c->x[1]}}; }

  template <class Tile>
  static LA_DEVICE void load(Slice (&s)[2], const Tile& tile, int row, int k) {
    for (int i = 0; i < 2; ++i) {
      const double* p = tile.pair(row + 8 * i, k);
      s[i] = {{p[0], p[1]}};
    }
  }

  template <int Count, class Tile>
  static LA_DEVICE void load_transposed(Slice (&s)[Count], const Tile& tile, int row, int k) {
    for (int i = 0; i < Count; ++i) {
      s[i] = {{*tile.down(k, row + 8 * i, 0), *tile.down(k, row + 8 * i, 1)}};
    }
  }

  static LA_DEVICE void mma(Cell<double>& c, const Slice& a, const Slice& b) {
    mma_f64(c.x, a.w[0], b.w[0]);
    mma_f64(c.x, a.w[1], b.w[1]);
  }

  static LA_DEVICE void mma(Cell<double>& c0, Cell<double>& c1, const Slice& a0, const Slice& a1, const Slice& b) {
    mma(c0, a0, b);
    mma(c1, a1, b);
  }

  template <class Tile>
  static LA_DEVICE void store_pair(const Tile& tile, int row, int column, double x0, double x1) {
    double* p = tile.pair(row, column);
    p[0] = x0;
    p[1] = x1;
  }

  static LA_DEVICE void load_pair(const double* p, double& x0, double& x1) {
    x0 = p[0];
    x1 = p[1];
  }

  static LA_DEVICE Word4 encode(const double (&x)[2]) {
    return {{low_word(x[0]), high_word(x[0]), low_word(x[1]), high_word(x[1])}};
  }
};

}  // namespace la
