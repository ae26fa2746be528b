// From a block's number to the places of its head in every array. Offsets are 64-bit: broadcast axes have
// stride 0, and views may run backwards.
#pragma once
#include "tile/global.cuh"

namespace la {

// Coordinates of one head on the leading axes. The `outer` axes come from the block, the remaining ones (over which
// keys and values are shared) from a counter in the kernel's loop.
struct Head {
  i32 at[kMaxRank];

  // Division is of 32 bits, which a grid never exceeds: that of 64 is a subroutine, around which registers are saved.
  template <class Sized>
  LA_DEVICE void place(const Sized& p, u32 index, i32 from, i32 to) {
#pragma unroll
    for (i32 axis = kMaxRank - 1; axis >= 0; --axis) {
      if (axis >= from && axis < to) {
        at[axis] = static_cast<i32>(index % static_cast<u32>(p.size[axis]));
        index /= static_cast<u32>(p.size[axis]);
      } else if (axis >= to) {
        at[axis] = 0;
      }
    }
  }

  LA_DEVICE i64 offset(const i64 (&lead)[kMaxRank]) const {
    i64 sum = 0;
#pragma unroll
    for (i32 axis = 0; axis < kMaxRank; ++axis) sum += at[axis] * lead[axis];
    return sum;
  }

  // Address of this head's first element.
  template <class Arith>
  LA_DEVICE u64 address(const Tensor& t) const {
    return t.data + static_cast<u64>(offset(t.lead) * element_bytes<Arith>(t));
  }

  template <class Acc>
  LA_DEVICE u64 place(const RowVector& v) const {
    return v.data == 0 ? 0 : v.data + static_cast<u64>(offset(v.lead) * static_cast<i64>(sizeof(Acc)));
  }

  // Whether this head is the one of those sharing a place along `lead` that may write there.
  LA_DEVICE bool first(const i64 (&lead)[kMaxRank]) const {
    bool yes = true;
#pragma unroll
    for (i32 axis = 0; axis < kMaxRank; ++axis) yes = yes && (lead[axis] != 0 || at[axis] == 0);
    return yes;
  }
};

// The heads that a block sums over: 1 where nothing is shared.
LA_DEVICE i32 group_size(const Params& p) {
  i32 count = 1;
#pragma unroll
  for (i32 axis = 0; axis < kMaxRank; ++axis) {
    if (axis >= p.outer && axis < p.rank) count *= p.size[axis];
  }
  return count;
}

}  // namespace la
