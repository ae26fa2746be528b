// The warps of `stream_key_value` that find |k| of each row, a lane each, and bring long and short rows to a moderate length.
#pragma once
#include "stream/kv_pipe.cuh"
#include "stream/packets.cuh"

namespace la {

template <class Config>
struct KeyLength {
  using Pipe = KeyValuePipe<Config>;
  using Range = la::Range<float>;

  const Params& p;

  static LA_DEVICE int row() { return thread() - 32 * Config::kFirstLength; }

  LA_DEVICE void run() {
    const u32 parts = Pipe::parts(p);
    typename Pipe::Chunk now;
#pragma unroll 1
    while (now.exists(parts)) {
      Pipe::wait(Config::kOwnRows ? Pipe::kRowsFull : Pipe::kFull, now.rows);
      put(now.rows.at, p.unit_norm ? length(Pipe::k(now.rows.at)) : 1.f);
      fence_async();
      sync_warp();
      Pipe::arrive(Pipe::kMeasured, now.rows);
      now.next(Pipe::piece(now.ordinal).chunks);
    }
  }

  // Of a row as it lies in the tile 1 / |k| and |k|; and 1 / |k|. Where |k| is 0, k~ is 0 and has no gradient.
  static LA_DEVICE void put(i32 rows, float length) {
    const bool zero = length == 0.f;
    float scale = 1.f;
    if (warp_any(!moderate(length))) scale = shorten(Pipe::k(rows), length);
    const float inverse = ptx::reciprocal(zero ? 1.f : length);
    Pipe::factors(rows, 0)[row()] = inverse;
    Pipe::factors(rows, 1)[row()] = zero ? 0.f : inverse * scale;
    Pipe::factors(rows, 2)[row()] = zero ? 1.f : length;
  }

  // A long or short row times a power of two, to a length of about 1, so that others may multiply with it as it is.
  template <class Tile>
  static LA_DEVICE float shorten(const Tile& k, float& length) {
    const float scale = scale_to_one(length);
    length *= scale;
#pragma unroll 1
    for (int i = 0; i < Config::kInner / 8; ++i) scale_packet(*reinterpret_cast<Word4*>(k.packet(row(), i)), scale);
    return scale;
  }

  // Squares that leave the range of a float are taken of scaled elements.
  template <class Tile>
  static LA_DEVICE float length(const Tile& k) {
    float sum = squares(k, 1.f), scale = 1.f;
    if (warp_any(!(sum >= Range::kSmall && sum <= Range::kLarge))) {
      scale = sum < Range::kSmall ? Range::kUp : sum > Range::kLarge ? Range::kDown : 1.f;
      sum = squares(k, scale);
    }
    return sum == 0.f ? 0.f : square_root(sum) * ptx::reciprocal(scale);
  }

  template <class Tile>
  static LA_DEVICE float squares(const Tile& k, float scale) {
    float sum[4] = {};
#pragma unroll 1
    for (int first = 0; first < Config::kInner / 8; first += 4) {
      Word4 raw[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) raw[i] = *reinterpret_cast<const Word4*>(k.packet(row(), first + i));
      sync_warp();  // all of them are on their way
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x[8];
        decode_packet(raw[i], kBFloat16, x);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          x[j] *= scale;
          sum[j % 4] = ptx::fma(x[j], x[j], sum[j % 4]);
        }
      }
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }
};

}  // namespace la
