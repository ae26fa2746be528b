// The level c0 of a head: a constant that the gradients of q and k take off v where rows are divided by den. Neither changes,
//
//     dw[i, j] = g[i] . v[j] - delta[i] = g[i] . (v[j] - c0) - (delta[i] - g[i] . c0),
//
// but products and sums, and with them their errors, then have the size of the spread of v and not that of its mean. All that
// goes from kernel to kernel is meant relative to c0: delta, the sums over keys, and the sums over queries, which are their
// gradients:
//
//     kv - k_sum c0^T,  k_sum,  v_sum - count c0,  count          dkv,  dk_sum + dkv c0,  dv_sum,  dcount + dv_sum . c0
//
// What the caller gives (initial_state, dstate) and gets is not: scan.cu and relevel.cu change over.
#pragma once
#include "chunk/heads.cuh"

namespace la {

// One column of c0: that of the middle row of v where seven of eight more rows are near it, and 0 otherwise. So v stays as it is,
// exact, where it has no mean to speak of, but for a column in ten thousand; and an odd row, the first say, does not set the level.
// Elsewhere v - c0 is exact where v lies between c0 / 2 and 2 c0, which it would not be less a mean. NaN and infinity are near
// nothing.
// With `BFloat16` v is of this type, and no branches keep loads from being on their way together.
template <class Acc, bool BFloat16 = false>
LA_DEVICE Acc level(const Tensor& v, const Head& head, i64 m, int column) {
  const i64 first = head.offset(v.lead) + column;
  const auto value = [&](i64 row) {
    const i64 index = first + row * v.row;
    if constexpr (BFloat16) return bf16_low(load_2(reinterpret_cast<const void*>(v.data + static_cast<u64>(2 * index))));
    else return load_element<Acc>(v, index);
  };
  const Acc middle = value(m / 2);
  Acc others[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) others[i] = value((2 * i + 1) * m / 16);
  const auto size = [](Acc x) { return x < Acc(0) ? -x : x; };
  int near = 0;
#pragma unroll
  for (const Acc x : others) near += 2 * size(x - middle) < size(middle);
  return near >= 7 ? middle : Acc(0);
}

}  // namespace la
