// The courier: a thread that describes the block's parts, and sends for the rows of each chunk as soon as a slot is free.
#pragma once
#include "stream/kv_pipe.cuh"

namespace la {

template <class Config>
struct Courier {
  using Pipe = la::Pipe<Config>;
  using Piece = typename Pipe::Piece;

  const StreamParams& params;

  LA_DEVICE void run() {
    const u32 parts = Pipe::parts(params.p);
    typename Pipe::Chunk chunk;
#pragma unroll 1
    while (chunk.exists(parts)) {
      Piece& piece = Pipe::piece(chunk.ordinal);
      if (chunk.begins()) piece.describe(params, chunk.part);
      Pipe::wait_round_before(Pipe::kFree, chunk.slot);
      Mbarrier* const full = Pipe::barrier(Pipe::kFull + chunk.slot.at);
      mbarrier_arrive_expect(full, Config::kSourcesLoaded + (Config::kOwnRows ? 0 : Config::kRowsLoaded));
      if constexpr (Config::kCausal) send_sources(piece, chunk, full);
      if constexpr (Config::kHasRows && !Config::kOwnRows) send_rows(piece, chunk, full);
      if constexpr (Config::kOwnRows) {
        Pipe::wait_round_before(Pipe::kRowsFree, chunk.rows);
        Mbarrier* const rows_full = Pipe::barrier(Pipe::kRowsFull + chunk.rows.at);
        mbarrier_arrive_expect(rows_full, Config::kRowsLoaded);
        send_rows(piece, chunk, rows_full);
      }
      chunk.next(piece.chunks);
    }
  }

  using Chunk = typename Pipe::Chunk;

  LA_DEVICE void send_rows(const Piece& piece, const Chunk& chunk, Mbarrier* full) {
    const i32 row = static_cast<i32>(piece.rows_at(chunk.step).first), at = chunk.rows.at;
    if constexpr (Config::kKeyValue) {
      load<Config::kInner>(KeyValuePipe<Config>::k(at), &params.k, piece.at[Pipe::kK], 0, row, full);
      load<Config::kInner>(KeyValuePipe<Config>::v(at), &params.v, piece.at[Pipe::kV], 0, row, full);
    } else if constexpr (Config::kGradQ) {
      load<Config::kInner>(Pipe::tile_a(at), &params.dout, piece.at[Pipe::kDout], 0, row, full);
      load<Config::kColumns>(Pipe::tile_x(at), &params.q, piece.at[Pipe::kQ], piece.column0, row, full);
    } else {
      load<Config::kInner>(Pipe::tile_a(at), &params.q, piece.at[Pipe::kQ], 0, row, full);
    }
  }

  LA_DEVICE void send_sources(const Piece& piece, const Chunk& chunk, Mbarrier* full) {
    const i32 row = static_cast<i32>(piece.sources_at(chunk.step).first), slot = chunk.slot.at;
    if constexpr (Config::kKeyValue) {
      load<Config::kInner>(KeyValuePipe<Config>::q(slot), &params.q, piece.at[Pipe::kQ], 0, row, full);
      load<Config::kInner>(KeyValuePipe<Config>::g(slot), &params.dout, piece.at[Pipe::kDout], 0, row, full);
    } else if constexpr (Config::kGradQ) {
      load<Config::kInner>(Pipe::tile_b(slot), &params.v, piece.at[Pipe::kV], 0, row, full);
      load<Config::kColumns>(Pipe::tile_c(slot), &params.k, piece.at[Pipe::kK], piece.column0, row, full);
    } else {
      load<Config::kInner>(Pipe::tile_b(slot), &params.k, piece.at[Pipe::kK], 0, row, full);
      load<Config::kColumns>(Pipe::tile_c(slot), &params.v, piece.at[Pipe::kV], piece.column0, row, full);
    }
  }

  template <int Width, class Tile>
  static LA_DEVICE void load(const Tile& tile, const TensorMap* map, const i32 (&at)[3], i32 column0, i32 row, Mbarrier* full) {
#pragma unroll
    for (int column = 0; column < Width; column += 64) tma_load(tile.panel(column), map, {column0 + column, row, at[0], at[1], at[2]}, full);
  }
};

}  // namespace la
