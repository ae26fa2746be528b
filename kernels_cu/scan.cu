// scan: from what each piece of the sequence adds to the state before it (behind it, when reversed).
//
//   grid     one block for each (head, kScanWidth numbers of the state)
//   reads    slots 0 .. pieces of the workspace p.slots; the initial state p.start
//   writes   the same slots: slot i becomes start + the sum of the slots before i; the total to p.total
//
// Pieces are added in one order, by one thread a number: the result does not depend on the launch.
#include "chunk/heads.cuh"

namespace la {

struct ScanParams {
  StateParts slots, start, total;  // start.kv or total.kv = 0: none
  i32 size[kMaxRank];
  i32 rank, pieces;
  i32 summed;   // how many of the slots hold sums; the others are not read
  i32 reversed;
  i32 d, e;
};

constexpr int kScanWidth = 256;

// One of the four parts: `size` numbers a head, of which this thread has number i.
template <class Acc>
LA_DEVICE void scan_part(const ScanParams& p, i64 i, i64 size, u64 slots, u64 start, u64 total) {
  Acc* slot = reinterpret_cast<Acc*>(slots);
  Acc sum = start != 0 ? reinterpret_cast<const Acc*>(start)[i] : Acc(0);
  for (i32 s = 0; s < p.pieces; ++s) {
    Acc& x = slot[(p.reversed ? p.pieces - 1 - s : s) * size + i];
    const Acc own = s < p.summed ? x : Acc(0);
    x = sum;
    sum += own;
  }
  if (total != 0) reinterpret_cast<Acc*>(total)[i] = sum;
}

template <class Acc>
LA_KERNEL(kScanWidth, 1) scan(LA_GRID_CONSTANT const ScanParams p) {
  const i64 kv = static_cast<i64>(p.d) * p.e, numbers = kv + p.d + p.e + 1;
  const i32 blocks = static_cast<i32>((numbers + kScanWidth - 1) / kScanWidth);
  u32 index = static_cast<u32>(block() / blocks);
  i64 i = block() % blocks * kScanWidth + thread();
  if (i >= numbers) return;
  Head head;
#pragma unroll
  for (i32 axis = kMaxRank - 1; axis >= 0; --axis) {
    head.at[axis] = axis < p.rank ? static_cast<i32>(index % static_cast<u32>(p.size[axis])) : 0;
    if (axis < p.rank) index /= static_cast<u32>(p.size[axis]);
  }
  const auto part = [&](u64 StateParts::*base, const i64 (StateParts::*lead)[kMaxRank], i64 size) {
    const auto at = [&](const StateParts& s) {
      return s.kv == 0 ? u64(0) : s.*base + static_cast<u64>(head.offset(s.*lead) * static_cast<i64>(sizeof(Acc)));
    };
    scan_part<Acc>(p, i, size, at(p.slots), at(p.start), at(p.total));
  };
  if (i < kv) return part(&StateParts::kv, &StateParts::kv_lead, kv);
  i -= kv;
  if (i < p.d) return part(&StateParts::k_sum, &StateParts::k_sum_lead, p.d);
  i -= p.d;
  if (i < p.e) return part(&StateParts::v_sum, &StateParts::v_sum_lead, p.e);
  i -= p.e;
  part(&StateParts::count, &StateParts::count_lead, 1);
}

}  // namespace la
