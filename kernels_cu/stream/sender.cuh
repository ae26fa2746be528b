// The sender: a warp that carries results from shared memory into their arrays, while the state warps go on.
#pragma once
#include "stream/kv_pipe.cuh"

namespace la {

template <class Config>
struct Sender {
  using Pipe = la::Pipe<Config>;
  using Piece = typename Pipe::Piece;

  const StreamParams& params;

  LA_DEVICE void run() {
    const u32 parts = Pipe::parts(params.p);
    typename Pipe::Chunk now;
#pragma unroll 1
    while (now.exists(parts)) {
      const Piece& piece = Pipe::piece(now.ordinal);
      if constexpr (Config::kHasStage) {
        Pipe::wait(Pipe::kStaged, now.stage);
        send<Pipe::kDst>(piece, piece.rows_at(now.step), Pipe::stage());
      }
      if constexpr (Config::kInPlace) {
        Pipe::wait(Pipe::kDone, now.result());
        send<Pipe::kDst>(piece, piece.rows_at(now.step), Pipe::result(now));
        if constexpr (Config::kKeyValue) send<Pipe::kSecond>(piece, piece.rows_at(now.step), KeyValuePipe<Config>::second_result(now));
      }
      if (lane_id() == 0) tma_wait_read();
      sync_warp();
      if constexpr (Config::kHasStage) Pipe::arrive(Pipe::kSent, now.stage);
      if constexpr (Config::kInPlace) Pipe::arrive(Pipe::kSlotSent ? Pipe::kFree : Pipe::kRowsFree, now.result());
      now.next(piece.chunks);
    }
  }

  template <int Array, class Tile>
  LA_DEVICE void send(const Piece& piece, Span span, const Tile& tile) const {
    constexpr bool kSecond = Array == Pipe::kSecond;
    const Tensor& t = kSecond ? params.of_second : params.p.dst;
    if (t.data == 0 || span.begin == span.end) return;
    // Rows before an array's first are loaded as zeros, but to store them is an illegal instruction.
    if (params.axes[Array][3] == 0 || span.begin > 0) return copy<kSecond>(t, piece, span, tile);
    if (lane_id() != 0) return;
    const TensorMap& map = kSecond ? params.second : params.dst;
    const i32 (&at)[3] = piece.at[Array];
#pragma unroll
    for (int column = 0; column < Config::kColumns; column += 64) {
      tma_store(&map, tile.panel(column), {piece.column0 + column, static_cast<i32>(span.first), at[0], at[1], at[2]});
    }
    tma_commit();
  }

  // Row by row.
  template <bool Second, class Tile>
  LA_DEVICE void copy(const Tensor& t, const Piece& piece, Span span, const Tile& tile) const {
    constexpr int kPackets = Config::kColumns / 8;  // of a row, 8 or 16
    const int packet = lane_id() % kPackets, column = piece.column0 + packet * 8;
    const int width = (Second || !Config::kInPlace ? params.p.e : params.p.d) - column;
    const u64 head = Second ? piece.second : piece.places.dst;
    int row = span.begin + lane_id() / kPackets;
    char* to = reinterpret_cast<char*>(head) + ((span.first + row) * t.row + column) * 2;
#pragma unroll 1
    for (; row < span.end; row += 32 / kPackets) {
      const auto* from = reinterpret_cast<const bf16*>(tile.packet(row, packet));
      if (t.aligned && width >= 8) {
        store_16(to, *reinterpret_cast<const Word4*>(from));
      } else {
#pragma unroll 1
        for (int i = 0; i < 8 && i < width; ++i) store_2(to + 2 * i, from[i].bits);
      }
      to += t.row * (2 * 32 / kPackets);
    }
  }
};

}  // namespace la
