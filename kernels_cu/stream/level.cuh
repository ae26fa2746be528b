// The level of a part's columns of v (chunk/level.cuh), which the suppliers take off its rows.
#pragma once
#include "stream/packets.cuh"
#include "stream/pipe.cuh"

namespace la {

template <class Config>
struct PartLevel {
  using Pipe = la::Pipe<Config>;
  using R = Rows<typename Config::Arith, Config::kColumns, Config::kChunk, Config::kSupplyThreads, 32 * Config::kFirstSupply, false,
                 Config::kSupplyGroups>;
  static_assert(Config::kColumns <= Config::kSupplyThreads, "a thread has a column");

  bool any = false;  // whether a column has another than 0

  static LA_DEVICE bf16* columns() { return reinterpret_cast<bf16*>(Pipe::numbers(Config::kLevel)); }  // an element of v each

  // When a part begins.
  LA_DEVICE void find(const Params& p, const typename Pipe::Piece& piece) {
    if (!p.levelled) return;
    const i32 id = thread() - 32 * Config::kFirstSupply, column = piece.column0 + id;
    float own = 0;
    Pipe::sync_suppliers();  // others still take off the level of the part before
    if (id < Config::kColumns) {
      if (column < p.e) own = la::level<float, true>(p.v, piece.head, p.m, column);
      columns()[id].bits = to_bf16(own);
    }
    float* const said = Pipe::numbers(Config::kFlags);
    const bool of_warp = warp_any(own != 0.f);
    if (lane_id() == 0) said[warp_id() - Config::kFirstSupply] = of_warp ? 1.f : 0.f;
    Pipe::sync_suppliers();
    any = false;
#pragma unroll
    for (int i = 0; i < Config::kSupplyWarps; ++i) any = any || said[i] != 0.f;
  }

  // Rows that do not exist stay zeros.
  template <class Tile>
  LA_DEVICE void take_off(const Tile& tile, Span rows) const {
    if (!any) return;
#pragma unroll
    for (int pass = 0; pass < R::kPasses; ++pass) {
      if (!rows.holds(R::row(pass))) continue;
#pragma unroll
      for (int i = 0; i < R::kPerLane; ++i) {
        Word4& at = *reinterpret_cast<Word4*>(tile.packet(R::row(pass), R::packet(i)));
        const Word4 x = at, level = *reinterpret_cast<const Word4*>(columns() + R::packet(i) * 8);
        at = {{sub_bf16(x.w[0], level.w[0]), sub_bf16(x.w[1], level.w[1]), sub_bf16(x.w[2], level.w[2]), sub_bf16(x.w[3], level.w[3])}};
      }
    }
  }
};

}  // namespace la
