// Rows on their way from global to shared memory: read raw a chunk ahead, then normalised, mapped, scaled and
// summed in registers. A row is spread over kLanes neighbouring lanes, so sums over it are a few shuffles.
#pragma once
#include "chunk/features.cuh"
#include "tile/global.cuh"

namespace la {

// Which rows of an array a chunk covers: row r of the chunk is row first + r of the array, for begin <= r < end.
struct Span {
  i64 first;
  i32 begin, end;

  static LA_DEVICE Span cut(i64 first, i64 count, i32 chunk) {
    const i64 begin = first >= 0 ? 0 : -first < chunk ? -first : chunk;
    const i64 end = count - first < chunk ? count - first : chunk;
    return {first, static_cast<i32>(begin), static_cast<i32>(end > begin ? end : begin)};
  }
  LA_DEVICE bool holds(i32 row) const { return row >= begin && row < end; }
  LA_DEVICE bool whole(i32 chunk) const { return begin == 0 && end == chunk; }
};

// Sums of squares between kSmall and kLarge are taken as they are; rows outside are scaled up or down first.
template <class Acc> struct Range;
template <> struct Range<float> {
  static constexpr float kSmall = 1e-28f, kLarge = 1e28f, kUp = 0x1p+80f, kDown = 0x1p-80f;
};
template <> struct Range<double> {
  static constexpr double kSmall = 1e-280, kLarge = 1e280, kUp = 0x1p+600, kDown = 0x1p-600;
};

template <class Arith, int Width, int Chunk, int Threads>
struct Rows {
  using Acc = typename Arith::Acc;
  static constexpr int kPacket = 16 / sizeof(typename Arith::Elem);
  static constexpr int kPackets = Width / kPacket;
  static constexpr int kLanes = kPackets < 32 ? kPackets : 32;
  static constexpr int kPerLane = kPackets / kLanes;
  static constexpr int kAtOnce = Threads / kLanes;
  static constexpr int kPasses = (Chunk + kAtOnce - 1) / kAtOnce;
  static_assert((kLanes & (kLanes - 1)) == 0, "the width of a tile must be a power of two");

  // A lane's share of one row, and of all its rows. Rows are treated side by side, step by step: a step has a latency,
  // which the rows of a lane hide for each other.
  struct Values { Acc x[kPerLane][kPacket]; };
  struct All { Values row[kPasses]; };
  struct Numbers { Acc x[kPasses]; };  // one number for each row

  Word4 raw[kPasses][kPerLane];

  static LA_DEVICE int row(int pass) { return static_cast<int>(static_cast<u32>(thread()) / kLanes) + pass * kAtOnce; }
  static LA_DEVICE int packet(int i) { return (thread() & (kLanes - 1)) + i * kLanes; }

  // The place of this thread's first packet, and the way to its next row, in bytes.
  struct Cursor {
    char* at;
    i64 step;
    LA_DEVICE char* place(int pass, int i, int packet_bytes) const { return at + pass * step + i * kLanes * packet_bytes; }
  };
  static LA_DEVICE Cursor cursor(const Tensor& t, u64 head, Span span, int column) {
    const int size = element_bytes<Arith>(t);
    const i64 offset = (span.first + row(0)) * t.row + column + unknown_zero() + packet(0) * kPacket;
    return {reinterpret_cast<char*>(head) + offset * size, kAtOnce * t.row * size};
  }
  static LA_DEVICE bool all_whole(const Tensor& t, Span span, int width) {
    return Chunk % kAtOnce == 0 && t.aligned && width >= Width && span.whole(Chunk) &&
           element_bytes<Arith>(t) == static_cast<int>(sizeof(typename Arith::Elem));
  }

  // `width` columns from `column` of each row that exists; zeros elsewhere. `head`: address of the head's first element.
  LA_DEVICE void fetch(const Tensor& t, u64 head, Span span, int column, int width) {
    const Cursor c = cursor(t, head, span, column);
    if (all_whole(t, span, width)) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) raw[pass][i] = load_16(c.place(pass, i, 16));
      }
      return;
    }
    const int bytes = kPacket * element_bytes<Arith>(t);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const bool exists = row(pass) < Chunk && span.holds(row(pass));
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        raw[pass][i] = fetch_packet<Arith, kPacket>(t, c.place(pass, i, bytes), exists ? width - packet(i) * kPacket : 0);
      }
    }
  }

  // The same way back, from a tile of this width.
  template <class Tile>
  static LA_DEVICE void copy_out(const Tensor& t, u64 head, Span span, int column, int width, const Tile& tile) {
    static_assert(Tile::kWidth == Width, "the tile must be as wide as its rows");
    const Cursor c = cursor(t, head, span, column);
    if (all_whole(t, span, width)) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
          store_16(c.place(pass, i, 16), *reinterpret_cast<const Word4*>(tile.packet(row(pass), packet(i))));
        }
      }
      return;
    }
    const int bytes = kPacket * element_bytes<Arith>(t);
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      if (row(pass) >= Chunk || !span.holds(row(pass))) continue;
#pragma unroll 1
      for (int i = 0; i < kPerLane; ++i) {
        store_packet<Arith, kPacket>(t, c.place(pass, i, bytes), width - packet(i) * kPacket,
                                     tile.packet(row(pass), packet(i)));
      }
    }
  }

  LA_DEVICE All values(i32 dtype) const {
    All v;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) decode_packet(raw[pass][i], dtype, v.row[pass].x[i]);
    }
    return v;
  }

  // f(x, pass, column) for each element.
  template <class F>
  static LA_DEVICE void each(All& v, F f) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
#pragma unroll
        for (int j = 0; j < kPacket; ++j) f(v.row[pass].x[i][j], pass, packet(i) * kPacket + j);
      }
    }
  }

  static LA_DEVICE void sum_over_rows(Numbers& sum) {
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) sum.x[pass] += shuffle_xor(sum.x[pass], mask);
    }
  }

  static LA_DEVICE Numbers squares(const All& v) { return dots(v, v.row, 1); }

  // Each row's sum of products with vectors[pass * stride].
  static LA_DEVICE Numbers dots(const All& v, const Values* vectors, int stride) {
    Numbers sum;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const Values& vector = vectors[pass * stride];
      Acc even = 0, odd = 0;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
#pragma unroll
        for (int j = 0; j < kPacket; j += 2) {
          even = ptx::fma(v.row[pass].x[i][j], vector.x[i][j], even);
          odd = ptx::fma(v.row[pass].x[i][j + 1], vector.x[i][j + 1], odd);
        }
      }
      sum.x[pass] = even + odd;
    }
    sum_over_rows(sum);
    return sum;
  }

  static LA_DEVICE void scale(All& v, const Numbers& factor) {
    each(v, [&](Acc& x, int pass, int) { x *= factor.x[pass]; });
  }

  // v / |v|; returns 1 / |v|. A zero row stays zero, with 0. Where the squares leave the range of Acc, rows are scaled by a
  // power of two before they are taken.
  static LA_DEVICE Numbers normalise(All& v) {
    using R = Range<Acc>;
    Numbers sum = squares(v), inverse;
    bool plain = true;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) plain = plain && sum.x[pass] >= R::kSmall && sum.x[pass] <= R::kLarge;
    if (!warp_any(!plain)) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) inverse.x[pass] = ptx::reciprocal_sqrt(sum.x[pass]);
      scale(v, inverse);
      return inverse;
    }
    Numbers prescale;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      prescale.x[pass] = sum.x[pass] < R::kSmall ? R::kUp : sum.x[pass] > R::kLarge ? R::kDown : Acc(1);
    }
    scale(v, prescale);
    sum = squares(v);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {  // 0 for a zero row, NaN for NaN
      inverse.x[pass] = sum.x[pass] > Acc(0) ? ptx::reciprocal_sqrt(sum.x[pass]) : sum.x[pass];
    }
    scale(v, inverse);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) inverse.x[pass] *= prescale.x[pass];
    return inverse;
  }

  // phi of each element; 0 outside the array, where phi(0) need not be 0.
  template <class Feature>
  static LA_DEVICE void map(All& v, Span span, int width) {
    each(v, [&](Acc& x, int pass, int column) {
      const Acc y = Feature::value(x);
      x = Feature::kZero || (row(pass) < Chunk && span.holds(row(pass)) && column < width) ? y : Acc(0);
    });
  }

  // Writes the columns of the tile, which begins at column `window` of the row, and leaves in v what the tile now holds:
  // sums over rounded numbers must be sums of the rounded numbers.
  template <class Tile>
  static LA_DEVICE void store(const Tile& tile, All& v, int window = 0) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int at = packet(i) - window / kPacket;
        const Word4 rounded = Arith::encode(v.row[pass].x[i]);
        const bool inside = Tile::kWidth == Width || (at >= 0 && at < Tile::kWidth / kPacket);
        if ((Chunk % kAtOnce == 0 || row(pass) < Chunk) && inside) {
          *reinterpret_cast<Word4*>(tile.packet(row(pass), at)) = rounded;
        }
        decode_packet(rounded, Arith::kDType, v.row[pass].x[i]);
      }
    }
  }

  // One number a row, to vector[row].
  static LA_DEVICE void store(Acc* vector, const Numbers& numbers) {
    if (packet(0) != 0) return;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (Chunk % kAtOnce == 0 || row(pass) < Chunk) vector[row(pass)] = numbers.x[pass];
    }
  }

  // One number a row, from an array; `otherwise` where there is no row, or no array.
  static LA_DEVICE Numbers fetch(const RowVector& from, i64 head, Span span, Acc otherwise) {
    Numbers numbers;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const bool exists = row(pass) < Chunk && span.holds(row(pass)) && from.data != 0;
      numbers.x[pass] = exists ? load_number<Acc>(from.data, head + span.first + row(pass)) : otherwise;
    }
    return numbers;
  }

  static LA_DEVICE Values columns_of(const Acc* vector) {
    Values v;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
#pragma unroll
      for (int j = 0; j < kPacket; ++j) v.x[i][j] = vector[packet(i) * kPacket + j];
    }
    return v;
  }

  static LA_DEVICE void clear(Values& v) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
#pragma unroll
      for (int j = 0; j < kPacket; ++j) v.x[i][j] = 0;
    }
  }

  // sum += weight[row] v[row], over this lane's rows. Rows that do not exist are zeros.
  static LA_DEVICE void add(Values& sum, const All& v, const Numbers& weight) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
#pragma unroll
        for (int j = 0; j < kPacket; ++j) {
          sum.x[i][j] = ptx::fma(weight.x[pass], v.row[pass].x[i][j], sum.x[i][j]);
        }
      }
    }
  }

  static LA_DEVICE Numbers same(Acc x) {
    Numbers numbers;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) numbers.x[pass] = x;
    return numbers;
  }

  // A warp's sum of each of `Window` columns from `window`, to partial[warp][column].
  template <int Window>
  static LA_DEVICE void store_column_sums(Acc* partial, Values sum, int window = 0) {
    constexpr int kVector = 16 / sizeof(Acc);
    struct alignas(16) Vector { Acc x[kVector]; };
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int at = packet(i) * kPacket - window;
#pragma unroll
      for (int j = 0; j < kPacket; ++j) {
#pragma unroll
        for (int mask = 16; mask >= kLanes; mask /= 2) sum.x[i][j] += shuffle_xor(sum.x[i][j], mask);
      }
      if (lane_id() < kLanes && (Window == Width || (at >= 0 && at < Window))) {
#pragma unroll
        for (int j = 0; j < kPacket; j += kVector) {
          Vector part;
#pragma unroll
          for (int x = 0; x < kVector; ++x) part.x[x] = sum.x[i][j + x];
          *reinterpret_cast<Vector*>(partial + warp_id() * Window + at + j) = part;
        }
      }
    }
  }
};

}  // namespace la
