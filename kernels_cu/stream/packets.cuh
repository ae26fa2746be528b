// Rows of a tile changed where they lie, each by the threads that share it.
#pragma once
#include "chunk/rows.cuh"

namespace la {

// f(elements, pass) of each of the thread's packets. A loop, two packets of each row at a time: unrolled, it would take its share of the
// instruction cache from the other warps.
template <class R, class Tile, class F>
LA_DEVICE void each_packet(const Tile& tile, F f) {
#pragma unroll 1
  for (int pair = 0; pair < R::kPerLane; pair += 2) {
    float x[2][R::kPasses][8];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int pass = 0; pass < R::kPasses; ++pass) {
        decode_packet(*reinterpret_cast<const Word4*>(tile.packet(R::row(pass), R::packet(pair + i))), kBFloat16, x[i][pass]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int pass = 0; pass < R::kPasses; ++pass) {
        f(x[i][pass], pass);
        u32 packed[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) packed[j] = pack_bf16(x[i][pass][2 * j], x[i][pass][2 * j + 1]);
        *reinterpret_cast<Word4*>(tile.packet(R::row(pass), R::packet(pair + i))) = {{packed[0], packed[1], packed[2], packed[3]}};
      }
    }
  }
}

// Rows whose elements may be multiplied by those of others as they are: of a moderate length, or zeros.
LA_DEVICE bool moderate(float length) { return length == 0.f || (length > 1e-4f && length < 1e4f); }

// The power of two that brings a length to 1/2 to 1; of one that is no number, a small one.
LA_DEVICE float scale_to_one(float length) {
  const i32 exponent = static_cast<i32>(as_bits(length) >> 23 & 0xff);
  return length == 0.f ? 1.f : as_float(static_cast<u32>(exponent < 253 ? 253 - exponent : 1) << 23);
}

LA_DEVICE void scale_packet(Word4& packet, float by) {
#pragma unroll
  for (u32& pair : packet.w) pair = pack_bf16(bf16_low(pair) * by, bf16_high(pair) * by);
}

}  // namespace la
