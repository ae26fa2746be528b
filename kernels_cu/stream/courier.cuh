// The courier: a thread that sends for the rows of each chunk as soon as a slot is free.
#pragma once
#include "stream/pipe.cuh"

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
      const Piece& piece = Pipe::piece(chunk.ordinal);
      Pipe::wait_round_before(Pipe::kFree, chunk.slot);
      send(piece, chunk.step, chunk.slot.at);
      chunk.next(piece.chunks);
    }
  }

  LA_DEVICE void send(const Piece& piece, i32 step, i32 slot) {
    Mbarrier* const full = Pipe::barrier(Pipe::kFull + slot);
    mbarrier_arrive_expect(full, Config::kSlotLoaded);
    const i32 row = static_cast<i32>(piece.rows_at(step).first), source = static_cast<i32>(piece.sources_at(step).first);
    if constexpr (Config::kHasRows) load<Config::kInner>(Pipe::tile_a(slot), &params.q, piece.at[Pipe::kQ], 0, row, full);
    if constexpr (Config::kCausal) {
      load<Config::kInner>(Pipe::tile_b(slot), &params.k, piece.at[Pipe::kK], 0, source, full);
      load<Config::kColumns>(Pipe::tile_c(slot), &params.v, piece.at[Pipe::kV], piece.column0, source, full);
    }
  }

  template <int Width, class Tile>
  static LA_DEVICE void load(const Tile& tile, const TensorMap* map, const i32 (&at)[3], i32 column0, i32 row, Mbarrier* full) {
#pragma unroll
    for (int column = 0; column < Width; column += 64) tma_load(tile.panel(column), map, {column0 + column, row, at[0], at[1], at[2]}, full);
  }
};

}  // namespace la
