// The suppliers of GradQ: k through norm and feature map; v less its level, and what the mean of v is before each chunk.
#pragma once
#include "stream/supply.cuh"

namespace la {

template <class Config>
struct GradientSupply : Supply<Config> {
  using Base = Supply<Config>;
  using Pipe = la::Pipe<Config>;
  using Piece = typename Pipe::Piece;
  // Each warp has so many packets of v's rows, each packet so many lanes. These share out its rows first, then the sums of its columns,
  // one for each lane; or for two, the second of which only follows.
  static constexpr int kPackets = Config::kInner / 8 / Config::kSupplyWarps, kShare = 32 / kPackets;
  static_assert(kShare == 8 || kShare == 16, "a packet has 8 columns");

  float level = 0;
  using Base::p, Base::sum;  // of the lane's column

  LA_DEVICE explicit GradientSupply(const Params& params) : Base(params) {}

  static LA_DEVICE int packet() { return Base::warp() * kPackets + lane_id() % kPackets; }
  // Each exchange of `add` halves a lane's columns.
  static LA_DEVICE bool upper(int exchange) { return lane_id() & (kPackets << exchange); }
  static LA_DEVICE int column() { return packet() * 8 + upper(0) * 4 + upper(1) * 2 + upper(2); }
  static LA_DEVICE bool follows() { return kShare == 16 && upper(3); }

  LA_DEVICE void run() {
    typename Pipe::Chunk now;
#pragma unroll 1
    while (now.exists(this->parts)) {
      Pipe::wait(Pipe::kFull, now.slot);
      const Piece& piece = Pipe::piece(now.ordinal);
      if (now.begins()) begin(piece);
      put(Config::kCausal ? Pipe::tile_b(now.slot.at) : Pipe::tile_a(now.rows.at), piece.count_before(now.step), now.slot.at);
      const auto v = Pipe::tile_b(now.slot.at);
      const bool levelled = Config::kCausal && warp_any(level != 0.f);
      if constexpr (Config::kCausal) {
        Base::template transform<typename Base::ColumnRows>(Pipe::tile_c(now.slot.at));
        if (levelled) take_level_off(v, piece.sources_at(now.step));
      }
      fence_async();
      sync_warp();
      Pipe::arrive(Pipe::kReady, now.slot);
      if constexpr (Config::kCausal) {
        if (!levelled) add(v);  // while others work on the chunk
        sync_warp();
        Pipe::arrive(Pipe::kFree, now.slot);
      }
      now.next(piece.chunks);
    }
  }

  LA_DEVICE void begin(const Piece& piece) {
    sum = level = 0;
    if (column() >= p.e) return;
    if (p.start.kv != 0) sum = load_number<float>(Pipe::start(p, piece).v_sum, column());
    if (Config::kCausal && p.levelled) level = la::level<float>(p.v, piece.head, p.m, column());
  }

  // The mean, and what is left of the sum: see Block::set_centre; each in three parts behind the rows, see StreamConfig::kRows.
  template <class Tile>
  LA_DEVICE void put(const Tile& tile, float count, i32 slot) const {
    if (follows()) return;
    float mean = p.normalize && count > 0.f ? sum * ptx::reciprocal(count) : 0.f, rest = ptx::fma(-count, mean, sum);
    Pipe::centre(slot)[column()] = mean;
#pragma unroll
    for (int line = 0; line < 3; ++line) {
      element(tile, Config::kChunk + line).bits = part_of(mean);
      element(tile, Config::kChunk + 4 + line).bits = part_of(rest);
    }
  }

  template <class Tile>
  static LA_DEVICE bf16& element(const Tile& tile, int row) {
    return reinterpret_cast<bf16*>(tile.packet(row, packet()))[column() % 8];
  }

  // Rounded, and taken off.
  static LA_DEVICE u16 part_of(float& x) {
    const u16 bits = to_bf16(x);
    x -= bf16_low(bits);
    return bits;
  }

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
    float half[4], quarter[2], own[1];
    exchange<0>(half, part);
    exchange<1>(quarter, half);
    exchange<2>(own, quarter);
    if constexpr (kShare == 16) own[0] += shuffle_xor(own[0], kPackets << 3);
    sum += own[0];
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
      if (follows()) break;
      bf16& x = element(v, row);
      const float left = bf16_low(x.bits) - level;
      x.bits = to_bf16(left);
      sum += left;
    }
    sum = shuffle_from(sum, lane_id() & (kShare == 16 ? ~(kPackets << 3) : ~0));
  }
};

}  // namespace la
