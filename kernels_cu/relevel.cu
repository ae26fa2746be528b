// relevel: the gradient of a state, from relative to 0 to relative to the level c0 (sign 1) or back (sign -1): chunk/level.cuh.
//
//   grid     one block for each (head, kRelevelRows rows), a warp for each row of kv and one for v_sum
//   reads    p.from; v, for c0
//   writes   p.to.k_sum = k_sum + sign kv c0,  p.to.count = count + sign v_sum . c0;  p.to may be p.from
#include "chunk/level.cuh"

namespace la {

struct RelevelParams {
  StateParts from, to;
  Tensor v;
  i64 m;
  i32 size[kMaxRank];
  i32 rank;
  i32 sign;
  i32 d, e;
};

constexpr int kRelevelRows = 8;

template <class Acc>
LA_KERNEL(32 * kRelevelRows, 1) relevel(LA_GRID_CONSTANT const RelevelParams p) {
  const i32 blocks = (p.d + kRelevelRows) / kRelevelRows;
  const i32 row = block() % blocks * kRelevelRows + warp_id();
  if (row > p.d) return;
  Head head;
  head.place(p, static_cast<u32>(block() / blocks), 0, p.rank);
  const auto at = [&](u64 base, const i64(&lead)[kMaxRank]) { return reinterpret_cast<Acc*>(base) + head.offset(lead); };
  const bool last = row == p.d;
  const Acc* values = last ? at(p.from.v_sum, p.from.v_sum_lead) : at(p.from.kv, p.from.kv_lead) + static_cast<i64>(row) * p.e;
  Acc sum = 0;
  for (i32 i = lane_id(); i < p.e; i += 32) sum = ptx::fma(values[i], level<Acc>(p.v, head, p.m, i), sum);
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  if (lane_id() != 0) return;
  const Acc* from = last ? at(p.from.count, p.from.count_lead) : at(p.from.k_sum, p.from.k_sum_lead) + row;
  Acc* to = last ? at(p.to.count, p.to.count_lead) : at(p.to.k_sum, p.to.k_sum_lead) + row;
  *to = *from + Acc(p.sign) * sum;
}

}  // namespace la
