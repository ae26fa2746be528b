// GradQ: the warps that take the level off v, sum its columns, and say what the mean of v before each chunk is.
#pragma once
#include "stream/pipe.cuh"

namespace la {

// A thread has two columns of v, and writes them as one word: at 8 x 4096 x 16 x 128 the kernel takes 0.30 ms on an H200, and 0.34
// where threads write half words, or where the suppliers sum v, since a chunk is ready later then.
template <class Config>
struct Centre {
  using Pipe = la::Pipe<Config>;
  using Piece = typename Pipe::Piece;

  const Params& p;
  float sum[2] = {}, level[2] = {};  // before the chunk

  // A warp's columns are 8 packets; those of one belong to four lanes.
  static LA_DEVICE int packet() { return (warp_id() - Config::kFirstCentre) * 8 + (lane_id() & 7); }
  static LA_DEVICE int column() { return packet() * 8 + (lane_id() & 8) / 2 + (lane_id() & 16) / 8; }

  LA_DEVICE void run() {
    const u32 parts = Pipe::parts(p);
    typename Pipe::Chunk now;
#pragma unroll 1
    while (now.exists(parts)) {
      Pipe::wait(Pipe::kFull, now.slot);
      const Piece& piece = Pipe::piece(now.ordinal);
      if (now.begins()) begin(piece);
      put(Config::kCausal ? Pipe::tile_b(now.slot.at) : Pipe::tile_a(now.rows.at), piece.count_before(now.step), now.slot.at);
      const auto v = Pipe::tile_b(now.slot.at);
      const bool levelled = Config::kCausal && warp_any(level[0] != 0.f || level[1] != 0.f);
      if (levelled) take_level_off(v, piece.sources_at(now.step));
      fence_async();
      sync_warp();
      Pipe::arrive(Pipe::kReady, now.slot);
      if (Config::kCausal && !levelled) add(v);  // while others work on the chunk
      sync_warp();
      if constexpr (Config::kCausal) Pipe::arrive(Pipe::kFree, now.slot);
      now.next(piece.chunks);
    }
  }

  LA_DEVICE void begin(const Piece& piece) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] = level[i] = 0;
      if (column() + i >= p.e) continue;
      if (p.start.kv != 0) sum[i] = load_number<float>(Pipe::start(p, piece).v_sum, column() + i);
      if (Config::kCausal && p.levelled) level[i] = la::level<float>(p.v, piece.head, p.m, column() + i);
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
    return reinterpret_cast<u32*>(tile.packet(row, column() / 8)) + column() % 8 / 2;
  }

  // Rounded, and taken off.
  static LA_DEVICE u32 part_of(float (&x)[2]) {
    const u32 packed = pack_bf16(x[0], x[1]);
    x[0] -= bf16_low(packed);
    x[1] -= bf16_high(packed);
    return packed;
  }

  // Of a packet, each of its lanes sums every fourth row; then they share the columns out among themselves.
  template <class Tile>
  LA_DEVICE void add(const Tile& v) {
    float part[8] = {};
#pragma unroll 1
    for (int row = lane_id() / 8; row < Config::kChunk; row += 8) {
      float x[8], y[8];
      decode_packet(*reinterpret_cast<const Word4*>(v.packet(row, packet())), kBFloat16, x);
      decode_packet(*reinterpret_cast<const Word4*>(v.packet(row + 4, packet())), kBFloat16, y);
#pragma unroll
      for (int j = 0; j < 8; ++j) part[j] += x[j] + y[j];
    }
    const bool upper = lane_id() & 8, last = lane_id() & 16;
    float half[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) half[j] = (upper ? part[4 + j] : part[j]) + shuffle_xor(upper ? part[j] : part[4 + j], 8);
#pragma unroll
    for (int j = 0; j < 2; ++j) sum[j] += (last ? half[2 + j] : half[j]) + shuffle_xor(last ? half[j] : half[2 + j], 16);
  }

  // Rows that do not exist stay zeros.
  template <class Tile>
  LA_DEVICE void take_level_off(const Tile& v, Span span) {
#pragma unroll 1
    for (int row = 0; row < Config::kChunk; row += 4) {
      u32 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = *word(v, row + i);
      sync_warp();  // all of them are on their way
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!span.holds(row + i)) continue;
        const float low = bf16_low(x[i]) - level[0], high = bf16_high(x[i]) - level[1];
        *word(v, row + i) = pack_bf16(low, high);
        sum[0] += low;
        sum[1] += high;
      }
    }
  }
};

}  // namespace la
