// GradQ: the warps that take the level off v, sum its columns, and say what the mean of v before each chunk is.
#pragma once
#include "stream/pipe.cuh"

namespace la {

template <class Config>
struct Centre {
  using Pipe = la::Pipe<Config>;
  using Piece = typename Pipe::Piece;
  // Lanes that share a packet, and the columns that each of them has of its 8 in the end.
  static constexpr int kShare = 8 * 64 / Config::kInner, kOwn = 8 / kShare, kPackets = 32 / kShare;

  const Params& p;
  float sum[kOwn] = {}, level[kOwn] = {};  // before the chunk

  static LA_DEVICE int packet() { return (warp_id() - Config::kFirstCentre) * kPackets + lane_id() % kPackets; }
  // Each exchange of `add` halves a lane's columns.
  static LA_DEVICE bool upper(int exchange) { return lane_id() & (kPackets << exchange); }
  static LA_DEVICE int column() { return packet() * 8 + upper(0) * 4 + upper(1) * 2 + (kOwn == 1 ? upper(2) : 0); }

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
      const bool levelled = Config::kCausal && warp_any(level[0] != 0.f || level[kOwn - 1] != 0.f);
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
    for (int i = 0; i < kOwn; ++i) {
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
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      float mean = sum[i] * share, rest = ptx::fma(-count, mean, sum[i]);
      Pipe::centre(slot)[column() + i] = mean;
#pragma unroll
      for (int line = 0; line < 3; ++line) {
        element(tile, Config::kChunk + line, i).bits = part_of(mean);
        element(tile, Config::kChunk + 4 + line, i).bits = part_of(rest);
      }
    }
  }

  template <class Tile>
  static LA_DEVICE bf16& element(const Tile& tile, int row, int i) {
    return reinterpret_cast<bf16*>(tile.packet(row, packet()))[column() % 8 + i];
  }

  // Rounded, and taken off.
  static LA_DEVICE u16 part_of(float& x) {
    const u16 bits = to_bf16(x);
    x -= bf16_low(bits);
    return bits;
  }

  // The lanes of a packet share out its rows first, then the sums of its columns.
  template <class Tile>
  LA_DEVICE void add(const Tile& v) {
    float part[8] = {};
#pragma unroll 1
    for (int row = lane_id() / kPackets; row < Config::kChunk; row += 2 * kShare) {
      float x[8], y[8];
      decode_packet(*reinterpret_cast<const Word4*>(v.packet(row, packet())), kBFloat16, x);
      decode_packet(*reinterpret_cast<const Word4*>(v.packet(row + kShare, packet())), kBFloat16, y);
#pragma unroll
      for (int j = 0; j < 8; ++j) part[j] += x[j] + y[j];
    }
    float half[4], quarter[2];
    exchange<0>(half, part);
    exchange<1>(quarter, half);
    if constexpr (kOwn == 1) {
      float own[1];
      exchange<2>(own, quarter);
      sum[0] += own[0];
    } else {
      sum[0] += quarter[0];
      sum[kOwn - 1] += quarter[1];
    }
  }
  template <int Number, int Count>
  static LA_DEVICE void exchange(float (&kept)[Count], const float (&all)[2 * Count]) {
#pragma unroll
    for (int j = 0; j < Count; ++j) {
      const float low = all[j], high = all[Count + j];
      kept[j] = (upper(Number) ? high : low) + shuffle_xor(upper(Number) ? low : high, kPackets << Number);
    }
  }

  // Rows that do not exist stay zeros.
  template <class Tile>
  LA_DEVICE void take_level_off(const Tile& v, Span span) {
#pragma unroll 1
    for (int row = span.begin; row < span.end; ++row) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        bf16& x = element(v, row, i);
        const float left = bf16_low(x.bits) - level[i];
        x.bits = to_bf16(left);
        sum[i] += left;
      }
    }
  }
};

}  // namespace la
