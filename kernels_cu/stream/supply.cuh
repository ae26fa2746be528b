// The suppliers: they put rows, where they lie, through norm and feature map, and sum the columns of k; in Keys, v less its
// level, by two groups that take turns with chunks. In GradQ they have k only, and stream/centre.cuh has v.
#pragma once
#include "stream/level.cuh"

namespace la {

template <class Config>
struct Supply {
  using Feature = typename Config::Feature;
  using Pipe = la::Pipe<Config>;
  using Chunk = typename Pipe::Chunk;
  using Piece = typename Pipe::Piece;
  static constexpr int kFirst = 32 * Config::kFirstSupply;
  using InnerRows = Rows<typename Config::Arith, Config::kInner, Config::kChunk, Config::kSupplyThreads, kFirst, false,
                         Config::kSupplyGroups>;
  using ColumnRows = Rows<typename Config::Arith, Config::kColumns, Config::kChunk, Config::kSupplyThreads, kFirst>;

  // A lane's share of the sums of columns, see transform.
  template <class R>
  struct Sums {
    float x[R::kPerLane / 2][8];
    LA_DEVICE void add(const Sums& other) {
#pragma unroll
      for (int pair = 0; pair < R::kPerLane / 2; ++pair) {
#pragma unroll
        for (int j = 0; j < 8; ++j) x[pair][j] += other.x[pair][j];
      }
    }
  };

  const Params& p;
  u32 parts;
  float sum;  // of column id() of B before the chunk; Keys: of the part, at its end
  PartLevel<Config> level;

  LA_DEVICE explicit Supply(const Params& params) : p(params), parts(Pipe::parts(params)), sum(0) {}

  static LA_DEVICE i32 id() { return thread() - kFirst; }
  static LA_DEVICE int warp() { return warp_id() - Config::kFirstSupply; }
  static LA_DEVICE void sync() { Pipe::sync_suppliers(); }

  LA_DEVICE void run() {
    Chunk now;
    Sums<InnerRows> of_part;
#pragma unroll 1
    while (now.exists(parts)) {
      const bool own = Pipe::supplies(now);
      if (own) Pipe::wait(Pipe::kFull, now.slot);
      if (!Config::kHasRows && now.begins()) sync();  // the part is described, for all of them
      const Piece& piece = Pipe::piece(now.ordinal);
      if constexpr (Config::kHasRows) {
        put(now, piece);
      } else {
        if (now.begins()) begin(piece, of_part);
        if (own) put_keys(now, piece, of_part);
        if (now.step + 1 == piece.chunks) {
          add_sums(of_part, Pipe::column_parts(0));
          finish(piece);
        }
      }
      now.next(piece.chunks);
    }
  }

  // Keys: sums stay with the threads until the part ends.
  LA_DEVICE void begin(const Piece& piece, Sums<InnerRows>& of_part) {
    sum = 0;
    of_part = {};
    level.find(p, piece);
  }
  LA_DEVICE void put_keys(const Chunk& now, const Piece& piece, Sums<InnerRows>& of_part) const {
    const i32 slot = now.slot.at;
    Sums<InnerRows> sums;
    transform(Pipe::tile_b(slot), sums);
    level.take_off(Pipe::tile_c(slot), piece.sources_at(now.step));
    hand_over(now);
    of_part.add(sums);
  }

  static LA_DEVICE void hand_over(const Chunk& now) {
    fence_async();
    sync_warp();
    Pipe::arrive(Pipe::kReady, now.slot);
  }

  LA_DEVICE void put(const Chunk& now, const Piece& piece) {
    const i32 slot = now.slot.at;
    Sums<InnerRows> sums;
    if constexpr (Config::kGradQ) {
      if constexpr (Config::kCausal) transform<ColumnRows>(Pipe::tile_c(slot));
    } else {
      if (now.begins()) begin(piece);
      put_lines(Config::kCausal ? Pipe::tile_b(slot) : Pipe::tile_a(now.rows.at), sum);
      if constexpr (!Config::kPlainRows) transform<InnerRows>(Pipe::tile_a(slot));
      if constexpr (Config::kCausal) transform(Pipe::tile_b(slot), sums);
    }
    if (!Config::kGradQ && p.b_float == 0.f) {
      sync();
      clear(Pipe::tile_a(slot));
    }
    hand_over(now);
    if constexpr (Config::kCausal && !Config::kGradQ) {
      add_sums(sums, Pipe::column_parts(now.pair.at));
      if (now.step + 1 == piece.chunks) finish(piece);
    }
  }

  // The sum before the first chunk.
  LA_DEVICE void begin(const Piece& piece) {
    sum = 0;
    const Slots<Config> slots(p, piece);
    const i32 own = id() + unknown_zero();  // or what follows of it would be kept in registers
    if (own < p.d) sum = slots.number(slots.first.k_sum, p.d, own);
  }

  // The sums behind the last chunk.
  LA_DEVICE void finish(const Piece& piece) const {
    if (!Pipe::has_final(p, piece) || piece.split != 0) return;
    const StatePlace at = Pipe::final_state(p, piece);
    if (id() < p.d) store_number(at.k_sum, id(), sum);
    if (id() == 0) store_number(at.count, 0, piece.count_before(piece.chunks));
  }

  // See StreamConfig::kRows.
  template <class Tile>
  LA_DEVICE void put_lines(const Tile& tile, float x) const {
    if (id() >= Config::kInner) return;
#pragma unroll
    for (int line = 0; line < 3; ++line) {
      const u16 bits = to_bf16(x);
      reinterpret_cast<bf16*>(tile.packet(Config::kChunk + line, id() / 8))[id() % 8].bits = bits;
      x -= bf16_low(bits);
    }
  }

  // phi(x / |x|), of the rows of a tile in their place; with `sums`, the lane's share of the sums of columns.
  //
  // Of a row's packets, a lane has its number i at i ^ 1 in every second row (Rows::packet): so sums over rows begin with an exchange
  // of packets that lie side by side, and these are transformed together. They are taken twice: to keep all of them there are too
  // few registers.

  template <class Tile>
  LA_DEVICE void transform(const Tile& tile, Sums<InnerRows>& sums) const {
    InnerRows rows;
    typename InnerRows::Norms norms = rows.take_norms(p, tile);
    each_packet(rows, tile, sums, [&](typename InnerRows::Batch& v) {
      InnerRows::normalise(p, v, norms);
      InnerRows::each(v, [](float& x, int, int) { x = Feature::value(x); });
      InnerRows::store(tile, v);
    });
  }

  // The same without sums.
  template <class R, class Tile>
  LA_DEVICE void transform(const Tile& tile) const {
    static_assert(Feature::kAtZero == 0, "zeros outside the array must stay zeros");
    R rows;
    const typename R::Norms norms = rows.take_norms(p, tile);
    la::each_packet<R>(tile, [&](float (&x)[8], int pass) {
#pragma unroll
      for (float& one : x) one = Feature::value(one * norms.factor[pass]);
    });
  }

  template <class R, class Tile, class F>
  static LA_DEVICE void each_packet(R& rows, const Tile& tile, Sums<R>& half, F f) {
    constexpr int kPerLane = R::kPerLane;
#pragma unroll
    for (int pair = 0; pair < kPerLane / 2; ++pair) {
      sync_warp();
#pragma unroll
      for (int i = 2 * pair; i < 2 * pair + 2; ++i) {
#pragma unroll
        for (int pass = 0; pass < R::kPasses; ++pass) rows.take(tile, pass, i);
      }
      float sums[2][8] = {};
#pragma unroll
      for (int i = 2 * pair; i < 2 * pair + 2; ++i) {
#pragma unroll
        for (int pass = 0; pass < R::kPasses; ++pass) {
          typename R::Batch v = rows.values(pass * kPerLane + i, kBFloat16);
          f(v);
#pragma unroll
          for (int j = 0; j < 8; ++j) sums[i % 2][j] += v.row[0].x[0][j];
        }
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) half.x[pair][j] = sums[0][j] + shuffle_xor(sums[1][j], 4);
    }
  }

  // Over rows that stand 8 and 16 lanes apart, each exchange halving the columns that a lane sums; then over warps.
  LA_DEVICE void add_sums(const Sums<InnerRows>& sums, float* parts_of_sum) {
    constexpr int kHalf = InnerRows::kPerLane / 2;
    constexpr int kLeft = kHalf * 8 / 4;
    const bool second = lane_id() & 8, third = lane_id() & 16;
    float half[2 * kLeft];
    struct alignas(4 * kLeft) Vector { float x[kLeft]; } quarter;
#pragma unroll
    for (int j = 0; j < 2 * kLeft; ++j) {
      const float low = sums.x[0][j], high = sums.x[kHalf - 1][kHalf == 1 ? 2 * kLeft + j : j];
      half[j] = (second ? high : low) + shuffle_xor(second ? low : high, 8);
    }
#pragma unroll
    for (int j = 0; j < kLeft; ++j) {
      const float low = half[j], high = half[kLeft + j];
      quarter.x[j] = (third ? high : low) + shuffle_xor(third ? low : high, 16);
    }
    constexpr int kStep = kHalf == 2 ? 64 : 4;  // between the halves: packets 0 and 2 of a lane, or columns of one
    float* to = parts_of_sum + warp() * Config::kInner + InnerRows::packet(0) * 8 + (second ? kStep : 0) + (third ? kLeft : 0);
    *reinterpret_cast<Vector*>(to) = quarter;
    sync();
    if (id() >= Config::kInner) return;
#pragma unroll
    for (int w = 0; w < Config::kSupplyWarps; ++w) sum += parts_of_sum[w * Config::kInner + id()];
  }

  template <class Tile>
  static LA_DEVICE void clear(const Tile& tile) {
#pragma unroll 1
    for (int i = id(); i < Config::kChunk * Config::kInner / 8; i += Config::kSupplyThreads) {
      *reinterpret_cast<Word4*>(tile.packet(i % Config::kChunk, i / Config::kChunk)) = {};
    }
  }
};

}  // namespace la
