// scan: from what each piece of the sequence adds to the state before it (behind it, when reversed).
//
//   grid     one block for each (head, kScanWidth numbers of the state)
//   reads    slots 0 .. pieces of the workspace p.slots; the initial state p.start; v, if p.start is to be made relative to
//            its level (chunk/level.cuh), as the slots are
//   writes   the same slots: slot i becomes start + the sum of the slots before i; the total to p.total
//
// Pieces are added in one order, by one thread a number: the result does not depend on the launch.
#include "chunk/level.cuh"

namespace la {

struct ScanParams {
  StateParts slots, start, total;  // start.kv or total.kv = 0: none
  Tensor v;                        // v.data = 0: p.start is taken as it is
  i64 m;
  i32 size[kMaxRank];
  i32 rank, pieces;
  i32 summed;   // how many of the slots hold sums; the others are not read
  i32 reversed;
  i32 d, e;
};

constexpr int kScanWidth = 256;

// Slots that are read before the first of them is written, so that a thread waits for all of them at once.
constexpr int kScanAhead = 8;

// One of the four parts: `size` numbers a head, of which this thread has number i. The start's is less by factor * c0.
template <class Acc>
LA_DEVICE void scan_part(const ScanParams& p, i64 i, i64 size, u64 slots, u64 start, u64 total, Acc factor, Acc c0) {
  Acc* slot = reinterpret_cast<Acc*>(slots);
  Acc sum = start != 0 ? ptx::fma(-factor, c0, reinterpret_cast<const Acc*>(start)[i]) : Acc(0);
  for (i32 s = 0; s < p.pieces; s += kScanAhead) {
    Acc* at[kScanAhead];
    Acc own[kScanAhead];
#pragma unroll
    for (int j = 0; j < kScanAhead; ++j) {
      at[j] = slot + (p.reversed ? p.pieces - 1 - s - j : s + j) * size + i;
      own[j] = s + j < p.summed ? *at[j] : Acc(0);
    }
#pragma unroll
    for (int j = 0; j < kScanAhead && s + j < p.pieces; ++j) {
      *at[j] = sum;
      sum += own[j];
    }
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
  head.place(p, index, 0, p.rank);
  using Lead = const i64 (StateParts::*)[kMaxRank];
  const auto at = [&](const StateParts& s, u64 StateParts::*base, Lead lead) {
    return s.kv == 0 ? u64(0) : s.*base + static_cast<u64>(head.offset(s.*lead) * static_cast<i64>(sizeof(Acc)));
  };
  const auto part = [&](u64 StateParts::*base, Lead lead, i64 size, Acc factor = 0, Acc c0 = 0) {
    scan_part<Acc>(p, i, size, at(p.slots, base, lead), at(p.start, base, lead), at(p.total, base, lead), factor, c0);
  };
  const auto start = [&](u64 StateParts::*base, Lead lead, i64 index) {
    return reinterpret_cast<const Acc*>(at(p.start, base, lead))[index];
  };
  const bool levelled = p.start.kv != 0 && p.v.data != 0;
  if (i < kv) {
    if (!levelled) return part(&StateParts::kv, &StateParts::kv_lead, kv);
    const u32 e = static_cast<u32>(p.e), row = static_cast<u32>(i) / e;
    const Acc c0 = level<Acc>(p.v, head, p.m, static_cast<int>(static_cast<u32>(i) % e));
    return part(&StateParts::kv, &StateParts::kv_lead, kv, start(&StateParts::k_sum, &StateParts::k_sum_lead, row), c0);
  }
  i -= kv;
  if (i < p.d) return part(&StateParts::k_sum, &StateParts::k_sum_lead, p.d);
  i -= p.d;
  if (i < p.e) {
    if (!levelled) return part(&StateParts::v_sum, &StateParts::v_sum_lead, p.e);
    const Acc c0 = level<Acc>(p.v, head, p.m, static_cast<int>(i));
    return part(&StateParts::v_sum, &StateParts::v_sum_lead, p.e, start(&StateParts::count, &StateParts::count_lead, 0), c0);
  }
  i -= p.e;
  part(&StateParts::count, &StateParts::count_lead, 1);
}

}  // namespace la
