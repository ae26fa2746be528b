// Rows in tiles, as chunk/rows.cuh treats them.
#pragma once
#include "chunk/rows.cuh"

namespace la {

template <class Arith, int Width, int Chunk, int Threads>
struct RingRows : Rows<Arith, Width, Chunk, Threads> {
  using Base = Rows<Arith, Width, Chunk, Threads>;
  using Batch = typename Base::Batch;
  using Base::kAtOnce, Base::kPasses, Base::raw;
  static_assert(Base::kPerLane == 1, "a lane has one packet of a row");

  // This thread's packet of its `pass`th row. Rows whose numbers are alike modulo 8 have their packets in the same order.
  template <class Tile>
  static LA_DEVICE unsigned char* place(const Tile& tile, int pass) {
    if constexpr (kAtOnce % 8 == 0) return tile.packet_near(pass * kAtOnce, 0, Base::row(0), Base::packet(0));
    else return tile.packet(Base::row(pass), Base::packet(0));
  }

  template <class Tile>
  LA_DEVICE void take(const Tile& tile) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (Base::inside(pass)) raw[pass][0] = *reinterpret_cast<const Word4*>(place(tile, pass));
    }
  }

  template <class Tile>
  static LA_DEVICE void put(const Tile& tile, int pass, const Word4& value) {
    if (Base::inside(pass)) *reinterpret_cast<Word4*>(place(tile, pass)) = value;
  }

  using Base::store;
  template <class Tile>
  static LA_DEVICE void store(const Tile& tile, const Batch& v, int = 0) {
#pragma unroll
    for (int r = 0; r < Base::kBatch; ++r) put(tile, v.first + r, Arith::encode(v.row[r].x[0]));
  }

  template <class Tile>
  LA_DEVICE void store_less(const Tile& tile, const float* vector, i32) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      float x[Base::kPacket];
      decode_packet(raw[pass][0], kFloat32, x);
#pragma unroll
      for (int j = 0; j < Base::kPacket; ++j) x[j] -= vector[Base::packet(0) * Base::kPacket + j];
      put(tile, pass, Arith::encode(x));
    }
  }
};

}  // namespace la
