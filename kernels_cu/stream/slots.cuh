// The state before a part (behind it, where the walk is reversed), as the sum of slots of p.start: of one, which the caller gave or
// scan.cu made; or of those of all pieces before it (Params::adds), in scan.cu's order, so that both ways give the same bits.
#pragma once
#include "chunk/part.cuh"

namespace la {

// Where these lie, in the order of the walk.
template <class Config>
struct Slots {
  static constexpr bool kReversed = Config::Role::kReversed;
  StatePlace first;
  i32 count;  // none where the sums begin with zeros

  LA_DEVICE Slots(const Params& p, const Part<Config>& part) {
    const i64 last = static_cast<i64>(p.segments) * p.pieces - 1;
    first = StatePlace::find<float>(p.start, part.head, p, !p.adds ? part.first_slot(p) : kReversed ? last : 0);
    count = p.start.kv == 0 ? 0 : !p.adds ? 1 : (kReversed ? p.segments - 1 - part.segment : part.segment) * p.pieces;
  }

  // Where the slot `i` behind the first has a part of the state, of `size` numbers.
  static LA_DEVICE u64 place(u64 at, i32 i, i32 size) { return at + static_cast<u64>(static_cast<i64>(i) * size * (kReversed ? -4 : 4)); }

  // One number of it, added up. Several slots are on their way together.
  LA_DEVICE float number(u64 at, i32 size, i32 index) const {
    constexpr int kAhead = 4;
    float sum = 0;
    at += static_cast<u64>(index) * 4;
#pragma unroll 1
    for (i32 left = count; left > 0; left -= kAhead) {
      float x[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        x[j] = j < left ? load_number<float>(at, 0) : 0.f;
        at = place(at, 1, size);
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) sum += x[j];
    }
    return sum;
  }
};

}  // namespace la
