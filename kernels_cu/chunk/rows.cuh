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

  LA_DEVICE bool holds(i32 row) const { return row >= begin && row < end; }
  LA_DEVICE bool whole(i32 chunk) const { return begin == 0 && end == chunk; }
};

// The same for a whole segment of the sequence, whose rows are counted from its start: one segment has fewer than 2^31.
struct Reach {
  i64 first;
  i32 begin, end;

  // Rows first .. first + length of an array of `count` rows.
  static LA_DEVICE Reach cut(i64 first, i64 count, i32 length) {
    const i64 begin = first >= 0 ? 0 : -first < length ? -first : length;
    const i64 end = count - first < length ? count - first : length;
    return {first, static_cast<i32>(begin), static_cast<i32>(end > begin ? end : begin)};
  }

  LA_DEVICE Span chunk(i32 from, i32 size) const {
    const i32 low = begin - from, high = end - from;
    const i32 lower = low < 0 ? 0 : low < size ? low : size;
    return {first + from, lower, high < lower ? lower : high < size ? high : size};
  }

  // How many of the rows before `row` exist.
  LA_DEVICE i32 before(i32 row) const { return row <= begin ? 0 : (row < end ? row : end) - begin; }
};

// 1 / den; 0 where den is exactly 0: such a row of out is 0 and has no gradient. 1 if rows are not divided.
template <class Acc>
LA_DEVICE Acc inverse_den(const Params& p, Acc den) {
  return !p.normalize ? Acc(1) : den == Acc(0) ? Acc(0) : ptx::reciprocal(den);
}

// Sums of squares between kSmall and kLarge are taken as they are; rows outside are scaled up or down first.
template <class Acc> struct Range;
template <> struct Range<float> {
  static constexpr float kSmall = 1e-28f, kLarge = 1e28f, kUp = 0x1p+80f, kDown = 0x1p-80f;
};
template <> struct Range<double> {
  static constexpr double kSmall = 1e-280, kLarge = 1e280, kUp = 0x1p+600, kDown = 0x1p-600;
};

template <class Acc>
LA_DEVICE bool in_range(Acc sum) { return sum >= Range<Acc>::kSmall && sum <= Range<Acc>::kLarge; }
template <class Acc>
LA_DEVICE Acc scale_for(Acc sum) {
  return sum < Range<Acc>::kSmall ? Range<Acc>::kUp : sum > Range<Acc>::kLarge ? Range<Acc>::kDown : Acc(1);
}
template <class Acc>
LA_DEVICE Acc inverse_root(Acc sum) { return sum > Acc(0) ? ptx::reciprocal_sqrt(sum) : sum; }  // NaN for NaN

// What phi makes of elements outside the array, where phi(0) need not be 0: a zero; anything; or zero by itself, since phi(0) is
// taken off everywhere. To ask whether an element exists takes registers.
enum Outside { kZero, kAny, kShifted };

// `Threads` threads from `First` on share the rows of a chunk, and treat up to four of each at a time. `Streamed`: they hold no others,
// see chunk/streamed.cuh. `Groups`: so many of such threads stand one behind the other, and take turns with chunks.
template <class Arith, int Width, int Chunk, int Threads, int First = 0, bool Streamed = false, int Groups = 1>
struct Rows {
  using Acc = typename Arith::Acc;
  static constexpr int kPacket = 16 / sizeof(typename Arith::Elem);
  static constexpr int kPackets = Width / kPacket;
  // With warpgroups, lanes stand as in an operand of mma.sync: four lanes a row. Then every second row takes its packets in another
  // order, so that 8 lanes write to a line's 8 places at once.
  static constexpr bool kQuads = Arith::kWarpgroups;
  static constexpr int kMostLanes = kQuads ? 4 : 32;
  static constexpr int kLanes = kPackets < kMostLanes ? kPackets : kMostLanes;
  static constexpr int kPerLane = kPackets / kLanes;
  static constexpr int kAtOnce = Threads / kLanes;
  static constexpr int kPasses = (Chunk + kAtOnce - 1) / kAtOnce;
  // Where registers are few, a batch is one packet of a row.
  static constexpr int kShare = kQuads ? 1 : kPerLane;  // packets of a row in a batch
  static constexpr int kParts = kPerLane / kShare;
  static constexpr int kRegisters = kShare * kPacket * static_cast<int>(sizeof(Acc)) / 4;  // that a lane needs for a row
  // Rows of a batch, at most. While streamed ones are treated, as many others arrive.
  static constexpr int kMost = kQuads ? 1 : Streamed ? (kRegisters < 16 ? 16 / kRegisters : 1) : kRegisters > 8 ? 1 : 4;
  static constexpr int kBatch = kPasses < kMost ? kPasses : kMost;
  static constexpr int kBatches = kPasses / kBatch * kParts;
  static_assert(kPasses % kBatch == 0, "batches must be whole");
  static constexpr int kHeld = Streamed ? kBatch : kPasses;  // rows that a lane holds
  static_assert((kLanes & (kLanes - 1)) == 0, "the width of a tile must be a power of two");

  // A lane's share of one row, and of a batch of rows. The rows of a batch are treated side by side, step by step: a step has
  // a latency, which they hide for each other.
  struct Values { Acc x[kShare][kPacket]; };
  struct Batch {
    Values row[kBatch];
    int first, part;  // pass of the first row; first of its packets
  };
  static LA_DEVICE constexpr int first_pass(int batch) { return batch / kParts * kBatch; }
  // kBatches. Of streamed rows not known to the compiler, which would unroll loops over them, and hold all batches again.
  static LA_DEVICE int batches() { return kBatches + (Streamed ? unknown_zero() : 0); }
  static LA_DEVICE constexpr int held(int pass) { return Streamed ? 0 : pass; }
  struct Numbers {  // one for each row
    Acc x[kPasses];
    LA_DEVICE void read(Acc (&numbers)[kBatch], int batch) const {
#pragma unroll
      for (int r = 0; r < kBatch; ++r) numbers[r] = x[first_pass(batch) + r];
    }
  };

  Word4 raw[kHeld][kPerLane];

  static LA_DEVICE u32 id() { return Groups == 1 ? static_cast<u32>(thread()) - First : (static_cast<u32>(thread()) - First) % Threads; }
  static LA_DEVICE int row(int pass) { return static_cast<int>(id() / kLanes) + pass * kAtOnce; }
  static LA_DEVICE int packet(int i) {
    const int turn = kQuads ? static_cast<int>(id() / kLanes & 1) : 0;
    return static_cast<int>(id() % kLanes) + (i ^ turn) * kLanes;
  }
  static LA_DEVICE bool inside(int pass) { return Chunk % kAtOnce == 0 || row(pass) < Chunk; }

  // The start of this thread's first row, and the way to its next one, in bytes.
  struct Cursor {
    char* at;
    i64 step;
    LA_DEVICE char* place(int pass, int i, int packet_bytes) const { return at + pass * step + packet(i) * packet_bytes; }
  };
  static LA_DEVICE Cursor cursor(const Tensor& t, u64 head, Span span, int column) {
    const int size = element_bytes<Arith>(t);
    const i64 offset = (span.first + row(0)) * t.row + column + unknown_zero();
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
      const bool exists = inside(pass) && span.holds(row(pass));
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        raw[pass][i] = fetch_packet<Arith, kPacket>(t, c.place(pass, i, bytes), exists ? width - packet(i) * kPacket : 0);
      }
    }
  }

  // Rows as they are into a tile of this width, past the registers if they are whole: there behind ptx::copy_wait.
  template <class Tile>
  static LA_DEVICE void copy_in(const Tensor& t, u64 head, Span span, int column, int width, const Tile& tile) {
    static_assert(Tile::kWidth == Width && Arith::kFixedType, "a tile must be as wide as its rows, and of their type");
    if (all_whole(t, span, width)) {
      const Cursor c = cursor(t, head, span, column);
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) copy_16(tile.packet(row(pass), packet(i)), c.place(pass, i, 16));
      }
    } else {
      Rows rows;
      rows.fetch(t, head, span, column, width);
      rows.store_raw(tile);
    }
  }

  // What this thread copied into a tile, back into its registers.
  template <class Tile>
  LA_DEVICE void take(const Tile& tile) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) take(tile, pass, i);
    }
  }
  template <class Tile>
  LA_DEVICE void take(const Tile& tile, int pass, int i) {
    raw[pass][i] = *reinterpret_cast<const Word4*>(tile.packet(row(pass), packet(i)));
  }

  // The same way back, from a tile of this width.
  template <class Tile>
  static LA_DEVICE void copy_out(const Tensor& t, u64 head, Span span, int column, int width, const Tile& tile) {
    static_assert(Tile::kWidth == Width, "the tile must be as wide as its rows");
    const Cursor c = cursor(t, head, span, column);
    if (all_whole(t, span, width)) {
      const int zero = unknown_zero_but_sm_90();
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
          const unsigned char* from = tile.packet(row(pass) + zero, packet(i) + zero);
          store_16(c.place(pass, i, 16), *reinterpret_cast<const Word4*>(from));
        }
      }
      return;
    }
    const int bytes = kPacket * element_bytes<Arith>(t);
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      if (!inside(pass) || !span.holds(row(pass))) continue;
#pragma unroll 1
      for (int i = 0; i < kPerLane; ++i) {
        store_packet<Arith, kPacket>(t, c.place(pass, i, bytes), width - packet(i) * kPacket,
                                     tile.packet(row(pass), packet(i)));
      }
    }
  }

  LA_DEVICE Batch values(int batch, i32 dtype) const {
    Batch v;
    v.first = first_pass(batch);
    v.part = batch % kParts;
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
#pragma unroll
      for (int i = 0; i < kShare; ++i) decode_packet(raw[held(v.first) + r][v.part + i], dtype, v.row[r].x[i]);
    }
    return v;
  }

  // f(x, r, column) for each element, r being the row's number in the batch.
  template <class F>
  static LA_DEVICE void each(Batch& v, F f) {
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
#pragma unroll
      for (int i = 0; i < kShare; ++i) {
#pragma unroll
        for (int j = 0; j < kPacket; ++j) f(v.row[r].x[i][j], r, packet(v.part + i) * kPacket + j);
      }
    }
  }

  // Each row's sum of products with vectors[r * stride].
  static LA_DEVICE void dots(Acc (&sum)[kBatch], const Batch& v, const Values* vectors, int stride) {
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      const Values& vector = vectors[r * stride];
      Acc even = 0, odd = 0;
#pragma unroll
      for (int i = 0; i < kShare; ++i) {
#pragma unroll
        for (int j = 0; j < kPacket; j += 2) {
          even = ptx::fma(v.row[r].x[i][j], vector.x[i][j], even);
          odd = ptx::fma(v.row[r].x[i][j + 1], vector.x[i][j + 1], odd);
        }
      }
      sum[r] = even + odd;
    }
    if constexpr (Arith::kSharesSums && kBatch == 4 && kLanes >= 4) {
      add_up_shared(sum);
      return;
    }
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
#pragma unroll
      for (int r = 0; r < kBatch; ++r) sum[r] += shuffle_xor(sum[r], mask);
    }
  }

  // Sums over a row's lanes, of which each quarter adds up one of four rows and then tells the others: fewer exchanges.
  static LA_DEVICE void add_up_shared(Acc (&sum)[kBatch]) {
    const int lane = lane_id();
    const bool upper = lane & kLanes / 2, odd = lane & kLanes / 4;
    const Acc even_row = (upper ? sum[2] : sum[0]) + shuffle_xor(upper ? sum[0] : sum[2], kLanes / 2);
    const Acc odd_row = (upper ? sum[3] : sum[1]) + shuffle_xor(upper ? sum[1] : sum[3], kLanes / 2);
    Acc own = (odd ? odd_row : even_row) + shuffle_xor(odd ? even_row : odd_row, kLanes / 4);
#pragma unroll
    for (int mask = kLanes / 8; mask > 0; mask /= 2) own += shuffle_xor(own, mask);
#pragma unroll
    for (int r = 0; r < kBatch; ++r) sum[r] = shuffle_from(own, (lane & -kLanes) + (r / 2) * (kLanes / 2) + (r % 2) * (kLanes / 4));
  }

  static LA_DEVICE void scale(Batch& v, const Acc* factor) {
    each(v, [&](Acc& x, int r, int) { x *= factor[r]; });
  }

  // Of every row: the factor that makes its length 1, and 1 / |x|; where the squares leave the range of Acc, rows are scaled by a
  // power of two first. A zero row stays zero, with 0.
  struct Norms { Acc factor[kHeld], inverse[kHeld]; };

  // With quads, what `normalise` needs, found here; otherwise it finds it itself.
  LA_DEVICE Norms norms(const Params& p) {
    Norms norms;
    if constexpr (kQuads) {
#pragma unroll
      for (Acc& x : norms.factor) x = 1;
      if (p.unit_norm) find(norms);
    }
    return norms;
  }

  // Those of the packets that this thread has put into a tile, which are taken from there. Rows that must be scaled first are scaled
  // in their place.
  template <class Tile>
  LA_DEVICE Norms take_norms(const Params& p, const Tile& tile) {
    Norms norms;
    take(tile);
#pragma unroll
    for (Acc& x : norms.factor) x = 1;
    if (!p.unit_norm) return norms;
    Acc sum[kPasses];
    squares(sum);
    bool plain = true;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      plain = plain && in_range(sum[pass]);
      norms.factor[pass] = norms.inverse[pass] = ptx::reciprocal_sqrt(sum[pass]);
    }
    if (!warp_any(!plain)) return norms;
    Acc prescale[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) prescale[pass] = scale_for(sum[pass]);
#pragma unroll 1
    for (int i = 0; i < kPerLane; ++i) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        Word4& at = *reinterpret_cast<Word4*>(tile.packet(row(pass), packet(i)));
        Acc x[kPacket];
        decode_packet(at, Arith::kDType, x);
#pragma unroll
        for (Acc& one : x) one *= prescale[pass];
        at = Arith::encode(x);
      }
    }
    take(tile);
    squares(sum);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      norms.factor[pass] = inverse_root(sum[pass]);
      norms.inverse[pass] = norms.factor[pass] * prescale[pass];
    }
    return norms;
  }

  // With quads, for all rows at once, before they are taken out of their registers, so that these are the only ones they need.
  LA_DEVICE void find(Norms& norms) {
    Acc sum[kPasses];
    squares(sum);
    bool plain = true;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      plain = plain && in_range(sum[pass]);
      norms.factor[pass] = norms.inverse[pass] = ptx::reciprocal_sqrt(sum[pass]);
    }
    if (!warp_any(!plain)) return;
    Acc prescale[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      prescale[pass] = scale_for(sum[pass]);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        Acc x[kPacket];
        decode_packet(raw[pass][i], Arith::kDType, x);
#pragma unroll
        for (Acc& one : x) one *= prescale[pass];
        raw[pass][i] = Arith::encode(x);
      }
    }
    squares(sum);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      norms.factor[pass] = inverse_root(sum[pass]);
      norms.inverse[pass] = norms.factor[pass] * prescale[pass];
    }
  }

  // As they stand, raw rows are both factors of a product whose diagonal is their sums of squares: a row or two a lane. But where
  // wgmma keeps the tensor cores busy, a product would wait for it.
  LA_DEVICE void squares(Acc (&sum)[kPasses]) const {
    if constexpr (Arith::kStreams) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        Acc part[2] = {};
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
          Acc x[kPacket];
          decode_packet(raw[pass][i], Arith::kDType, x);
#pragma unroll
          for (int j = 0; j < kPacket; ++j) part[j % 2] = ptx::fma(x[j], x[j], part[j % 2]);
        }
        sum[pass] = part[0] + part[1];
      }
#pragma unroll
      for (int mask = 1; mask < kLanes; mask *= 2) {
#pragma unroll
        for (Acc& one : sum) one += shuffle_xor(one, mask);
      }
      return;
    }
    static_assert(kQuads && kPasses <= 2, "lanes must stand as in an operand of 16 rows");
    Acc c[kPasses][4] = {};
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
#pragma unroll
      for (int w = 0; w < 4; w += 2) {
        const Word4 &x = raw[0][i], &y = raw[kPasses - 1][i];
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          const Word4& z = raw[pass][i];
          mma_bf16(c[pass], {x.w[w], y.w[w], x.w[w + 1], y.w[w + 1]}, {z.w[w], z.w[w + 1]});
        }
      }
    }
    const int g = lane_row();
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      sum[pass] = shuffle_from(g & 1 ? c[pass][2 * pass + 1] : c[pass][2 * pass], g * 4 + g / 2);
    }
  }

  // v / |v|, if rows are to have length 1.
  static LA_DEVICE void normalise(const Params& p, Batch& v, Norms& norms) {
    if (!kQuads && !p.unit_norm) return;
    Acc* factor = norms.factor + held(v.first);
    if constexpr (!kQuads) {
      Acc* inverse = norms.inverse + held(v.first);
      Acc sum[kBatch];
      dots(sum, v, v.row, 1);
      bool plain = true;
#pragma unroll
      for (int r = 0; r < kBatch; ++r) {
        plain = plain && in_range(sum[r]);
        factor[r] = inverse[r] = ptx::reciprocal_sqrt(sum[r]);
      }
      if (warp_any(!plain)) {
        Acc prescale[kBatch];
#pragma unroll
        for (int r = 0; r < kBatch; ++r) prescale[r] = scale_for(sum[r]);
        scale(v, prescale);
        dots(sum, v, v.row, 1);
#pragma unroll
        for (int r = 0; r < kBatch; ++r) {
          factor[r] = inverse_root(sum[r]);
          inverse[r] = factor[r] * prescale[r];
        }
      }
    }
    scale(v, factor);
  }

  // phi of each element.
  template <class Feature, Outside Outside = kZero>
  static LA_DEVICE void map(Batch& v, Span span, int width) {
    each(v, [&](Acc& x, int r, int column) {
      const Acc y = Feature::value(x);
      if constexpr (Outside == kShifted) {
        x = y - Acc(Feature::kAtZero);
      } else {
        x = Outside == kAny || Feature::kAtZero == 0 || exists(v.first + r, span, column, width) ? y : Acc(0);
      }
    });
  }

  // Takes `offset` off each element of the array.
  static LA_DEVICE void shift(Batch& v, Span span, int width, Acc offset) {
    each(v, [&](Acc& x, int r, int column) { x = exists(v.first + r, span, column, width) ? x - offset : x; });
  }

  // Takes vector[column] off the rows that exist.
  static LA_DEVICE void subtract(Batch& v, Span span, const Acc* vector) {
    each(v, [&](Acc& x, int r, int column) { x = span.holds(row(v.first + r)) ? x - vector[column] : x; });
  }

  // The same in a tile, of the packets that this thread put there.
  template <class Tile>
  static LA_DEVICE void subtract(const Tile& tile, Span span, const Acc* vector) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (!inside(pass) || !span.holds(row(pass))) continue;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        Word4& at = *reinterpret_cast<Word4*>(tile.packet(row(pass), packet(i)));
        Acc x[kPacket];
        decode_packet(at, Arith::kDType, x);
#pragma unroll
        for (int j = 0; j < kPacket; ++j) x[j] -= vector[packet(i) * kPacket + j];
        at = Arith::encode(x);
      }
    }
  }

  static LA_DEVICE bool exists(int pass, Span span, int column, int width) {
    return row(pass) < Chunk && span.holds(row(pass)) && column < width;
  }

  // Writes the columns of the tile, which begins at column `window` of the row.
  template <class Tile>
  static LA_DEVICE void store(const Tile& tile, const Batch& v, int window = 0) {
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
#pragma unroll
      for (int i = 0; i < kShare; ++i) put(tile, v.first + r, v.part + i, window, Arith::encode(v.row[r].x[i]));
    }
  }

  // Rows as they came, where the array's type is the tile's.
  template <class Tile>
  LA_DEVICE void store_raw(const Tile& tile) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) put(tile, pass, i, 0, raw[pass][i]);
    }
  }

  // The same less vector[column], a row at a time: where workers hold most of the registers, loaders must do with few.
  template <class Tile>
  LA_DEVICE void store_less(const Tile& tile, const Acc* vector, i32 dtype) const {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        Acc x[kPacket];
        decode_packet(raw[pass][i], dtype, x);
#pragma unroll
        for (int j = 0; j < kPacket; ++j) x[j] -= vector[packet(i) * kPacket + j];
        put(tile, pass, i, 0, Arith::encode(x));
      }
    }
  }

  template <class Tile>
  static LA_DEVICE void put(const Tile& tile, int pass, int i, int window, const Word4& value) {
    const int at = packet(i) - window / kPacket;
    if (inside(pass) && (Tile::kWidth == Width || (at >= 0 && at < Tile::kWidth / kPacket))) {
      *reinterpret_cast<Word4*>(tile.packet(row(pass), at)) = value;
    }
  }

  // One number for each row of a batch, to vector[row].
  static LA_DEVICE void store(Acc* vector, int batch, const Acc* numbers) {
    if (id() % kLanes != 0 || batch % kParts != 0) return;
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      const int pass = first_pass(batch) + r;
      if (inside(pass)) vector[row(pass)] = numbers[r];
    }
  }

  // And back.
  static LA_DEVICE void read(Acc (&numbers)[kBatch], const Acc* vector, int batch) {
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      const int pass = first_pass(batch) + r;
      numbers[r] = inside(pass) ? vector[row(pass)] : Acc(0);
    }
  }

  // One number a row, from an array; `otherwise` where there is no row, or no array.
  static LA_DEVICE Numbers fetch(const RowVector& from, i64 head, Span span, Acc otherwise) {
    Numbers numbers;
#pragma unroll
    for (Acc& x : numbers.x) x = otherwise;
    if (from.data == 0) return numbers;
    const Acc* at = reinterpret_cast<const Acc*>(from.data) + head + span.first + row(0) + unknown_zero();
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (inside(pass) && span.holds(row(pass))) load_number(at + pass * kAtOnce, numbers.x[pass]);
    }
    return numbers;
  }

  static LA_DEVICE void invert(const Params& p, Numbers& den) {
#pragma unroll
    for (Acc& x : den.x) x = inverse_den(p, x);
  }

  static LA_DEVICE Values columns_of(const Acc* vector) {
    Values v;
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
#pragma unroll
      for (int j = 0; j < kPacket; ++j) v.x[i][j] = vector[packet(i) * kPacket + j];
    }
    return v;
  }

  static LA_DEVICE void clear(Values& v) {
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
#pragma unroll
      for (int j = 0; j < kPacket; ++j) v.x[i][j] = 0;
    }
  }

  // sum += v[row], or weight[row] v[row], over this lane's rows. Rows that do not exist are zeros.
  static LA_DEVICE void add(Values& sum, const Batch& v) {
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
#pragma unroll
      for (int i = 0; i < kShare; ++i) {
#pragma unroll
        for (int j = 0; j < kPacket; ++j) sum.x[i][j] += v.row[r].x[i][j];
      }
    }
  }
  static LA_DEVICE void add(Values& sum, const Batch& v, const Acc (&weight)[kBatch]) {
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
#pragma unroll
      for (int i = 0; i < kShare; ++i) {
#pragma unroll
        for (int j = 0; j < kPacket; ++j) sum.x[i][j] = ptx::fma(weight[r], v.row[r].x[i][j], sum.x[i][j]);
      }
    }
  }

  // A warp's sum of each of `Window` columns from `window`, to partial[warp][column].
  template <int Window>
  static LA_DEVICE void store_column_sums(Acc* partial, Values sum, int window = 0) {
    constexpr int kVector = 16 / sizeof(Acc);
    struct alignas(16) Vector { Acc x[kVector]; };
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
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
          *reinterpret_cast<Vector*>(partial + static_cast<int>(id() / 32) * Window + at + j) = part;
        }
      }
    }
  }
};

}  // namespace la
