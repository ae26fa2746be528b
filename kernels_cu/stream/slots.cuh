// The state before a part (behind it, where the walk is reversed), as the sum of slots of p.start: of one, which the caller gave or
// scan.cu made; or of those of all pieces before it (Params::adds), in scan.cu's order, so that both ways give the same bits.
#pragma once
#include "chunk/part.cuh"

namespace la {

struct Slots {
  StatePlace first;
  i32 count, step;  // how many, none where the sums begin with zeros; from one to the next

  template <class Config>
  static LA_DEVICE Slots find(const Params& p, const Part<Config>& part) {
    constexpr bool kReversed = Config::Role::kReversed;
    if (p.start.kv == 0) return {};
    if (!p.adds) return {StatePlace::find<float>(p.start, part.head, p, part.first_slot(p)), 1, 0};
    const i32 before = kReversed ? p.segments - 1 - part.segment : part.segment;
    return {StatePlace::find<float>(p.start, part.head, p, kReversed ? p.segments * p.pieces - 1 : 0), before * p.pieces,
            kReversed ? -1 : 1};
  }

  // Where the `i`th slot has a part of the state, which is of `size` numbers and begins in the first slot `at`.
  LA_DEVICE u64 place(u64 at, i32 i, i32 size) const { return at + static_cast<u64>(static_cast<i64>(i * step) * size * 4); }

  // One number of a part of the state. Several slots are on their way together.
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
