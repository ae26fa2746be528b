// GradQ: the warps that take the level off v, sum its columns, and say what the mean of v before each chunk is.
#pragma once
#include "stream/pipe.cuh"

namespace la {

// A thread has two columns of v, and writes them as one word: at 8 x 4096 x 16 x 128 the kernel took 0.30 ms on an H200, and 0.34
// where threads wrote half words, or where the suppliers summed v, since a chunk is ready later then.
template <class Config>
struct Centre {
  using Pipe = la::Pipe<Config>;
  using Piece = typename Pipe::Piece;
  using Arith = typename Config::Arith;

  const Params& p;
  float sum[2] = {}, level[2] = {};  // before the chunk

  // A warp has the 64 columns of a panel, four sets of 16, each a product in add(). Of the columns whose sums a lane and its neighbour
  // get, it has two that lie side by side.
  static constexpr int kSets = 4;
  static LA_DEVICE int set() { return lane_id() & 3; }
  static LA_DEVICE bool odd() { return lane_row() & 1; }
  static LA_DEVICE int place() { return set() * 16 + (odd() ? 8 : 0) + (lane_row() & 6); }
  static LA_DEVICE int panel() { return (warp_id() - Config::kFirstCentre) * 16 * kSets; }
  static LA_DEVICE int column() { return panel() + place(); }
  template <class Tile>
  static LA_DEVICE Tile own(const Tile& tile) { return {tile.panel(panel())}; }

  LA_DEVICE void run() {
    const u32 parts = Pipe::parts(p);
    typename Pipe::Chunk now;
#pragma unroll 1
    while (now.exists(parts)) {
      Pipe::wait(Pipe::kFull, now.slot);
      const Piece& piece = Pipe::piece(now.ordinal);
      if (now.begins()) begin(piece);
      put(own(Config::kCausal ? Pipe::tile_b(now.slot.at) : Pipe::tile_a(now.rows.at)), piece.count_before(now.step), now.slot.at);
      const auto v = own(Pipe::tile_b(now.slot.at));
      const bool levelled = Config::kCausal && warp_any(level[0] != 0.f || level[1] != 0.f);
      if (levelled) take_level_off(v, piece.sources_at(now.step));
      fence_async();
      sync_warp();
      Pipe::arrive(Pipe::kReady, now.slot);
      if constexpr (Config::kCausal) {
        add(v);  // while others work on the chunk
        sync_warp();
        Pipe::arrive(Pipe::kFree, now.slot);
      }
      now.next(piece.chunks);
    }
  }

  LA_DEVICE void begin(const Piece& piece) {
    const Slots<Config> slots(p, piece);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] = level[i] = 0;
      const int own = column() + i + unknown_zero();  // or what follows of it would be kept in registers
      if (own >= p.e) continue;
      sum[i] = slots.number(slots.first.v_sum, p.e, own);
      if (Config::kCausal && p.levelled) level[i] = la::level<float, true>(p.v, piece.head, p.m, own);
    }
  }

  // The mean, and what is left of the sum: see Block::set_centre; each in three parts behind the rows, see StreamConfig::kRows.
  template <class Tile>
  LA_DEVICE void put(const Tile& tile, float count, i32 slot) const {
    const float share = p.normalize && count > 0.f ? ptx::reciprocal(count) : 0.f;
    struct alignas(8) Pair { float x[2]; } mean = {{sum[0] * share, sum[1] * share}};
    *reinterpret_cast<Pair*>(Pipe::centre(slot) + column()) = mean;
    float rest[2] = {ptx::fma(-count, mean.x[0], sum[0]), ptx::fma(-count, mean.x[1], sum[1])};
#pragma unroll
    for (int line = 0; line < 3; ++line) {
      *word(tile, Config::kChunk + line) = part_of(mean.x);
      *word(tile, Config::kChunk + 4 + line) = part_of(rest);
    }
  }

  template <class Tile>
  static LA_DEVICE u32* word(const Tile& tile, int row) {
    return reinterpret_cast<u32*>(tile.packet(row, place() / 8)) + place() % 8 / 2;
  }

  // Rounded, and taken off.
  static LA_DEVICE u32 part_of(float (&x)[2]) {
    const u32 packed = pack_bf16(x[0], x[1]);
    x[0] -= bf16_low(packed);
    x[1] -= bf16_high(packed);
    return packed;
  }

  // v^T times ones: of a set, a lane gets the sums of columns g and g + 8, g being lane / 4, and keeps those of its own set. Lanes of
  // g and g ^ 1 then exchange one each. A chunk is summed by itself, as in Products::update_state.
  template <class Tile>
  LA_DEVICE void add(const Tile& v) {
    constexpr int kSteps = Config::kChunk / Arith::kDepth;
    float kept[2] = {};
#pragma unroll
    for (int n = 0; n < kSets; ++n) {
      typename Arith::Slice x[kSteps][2];
#pragma unroll
      for (int k = 0; k < kSteps; ++k) Arith::load_transposed(x[k], v, n * 16, k * Arith::kDepth);
      sync_warp();  // all of them are on their way
      Cell<float> c[2][2] = {};  // of every second step: products wait for those they are added to
#pragma unroll
      for (int k = 0; k < kSteps; ++k) Arith::mma(c[k % 2][0], c[k % 2][1], x[k][0], x[k][1], {{0x3f803f80, 0x3f803f80}});
#pragma unroll
      for (int i = 0; i < 2; ++i) kept[i] = n == set() ? c[0][i].x[0] + c[1][i].x[0] : kept[i];
    }
    const float neighbour = shuffle_xor(odd() ? kept[0] : kept[1], 4);
    sum[0] += odd() ? neighbour : kept[0];
    sum[1] += odd() ? kept[1] : neighbour;
  }

  // Rows that do not exist stay zeros. It is the rounded rows that add() sums: those are in the products, and in what Keys sums.
  template <class Tile>
  LA_DEVICE void take_level_off(const Tile& v, Span span) {
    const u32 of_row = pack_bf16(level[0], level[1]);
#pragma unroll 1
    for (int row = 0; row < Config::kChunk; row += 4) {
      u32 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = *word(v, row + i);
      sync_warp();  // all of them are on their way
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!span.holds(row + i)) continue;
        *word(v, row + i) = sub_bf16(x[i], of_row);
      }
    }
  }
};

}  // namespace la
