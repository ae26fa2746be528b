// scan: from what each piece of the sequence adds to the state before it (behind it, when reversed).
//
//   grid     for each head, a block for every kScanWidth * kScanNumbers numbers of kv, and one for the other parts of the state
//   reads    slots 0 .. pieces of the workspace p.slots; the initial state p.start; v, if p.start is to be made relative to
//            its level (chunk/level.cuh), as the slots are
//   writes   the same slots: slot i becomes start + the sum of the slots before i; the total to p.total
//
// Pieces are added in one order, by one thread a number: the result does not depend on the launch.
#include "chunk/level.cuh"
#include "chunk/state.cuh"

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

// Numbers of kv that a thread has, since to find its head takes longer than to add; and slots of which it reads them all before it
// writes the first, so that it waits for all of them at once.
constexpr int kScanNumbers = 4, kScanAhead = 4;

// `Count` numbers of one of the four parts, from number i on, as far apart as a block is wide. The part has `size` numbers a head, and
// begins with start(i). total = 0: none.
template <int Count, class Acc, class Start>
LA_DEVICE void scan_part(const ScanParams& p, i64 i, i64 size, u64 slots, u64 total, const Start& start) {
  const auto at = [&](int j) { return i + j * kScanWidth; };
  const auto slot = [&](i32 s) { return reinterpret_cast<Acc*>(slots) + (p.reversed ? p.pieces - 1 - s : s) * size; };
  Acc sum[Count];
#pragma unroll
  for (int j = 0; j < Count; ++j) sum[j] = at(j) < size ? start(at(j)) : Acc(0);
  for (i32 first = 0; first < p.pieces; first += kScanAhead) {
    Acc own[kScanAhead][Count];
#pragma unroll
    for (int s = 0; s < kScanAhead; ++s) {
#pragma unroll
      for (int j = 0; j < Count; ++j) own[s][j] = first + s < p.summed && at(j) < size ? slot(first + s)[at(j)] : Acc(0);
    }
#pragma unroll
    for (int s = 0; s < kScanAhead; ++s) {
#pragma unroll
      for (int j = 0; j < Count; ++j) {
        if (first + s < p.pieces && at(j) < size) slot(first + s)[at(j)] = sum[j];
        sum[j] += own[s][j];
      }
    }
  }
#pragma unroll
  for (int j = 0; j < Count; ++j) {
    if (total != 0 && at(j) < size) store_number(total, at(j), sum[j]);
  }
}

template <class Acc>
LA_KERNEL(kScanWidth, 1) scan(LA_GRID_CONSTANT const ScanParams p) {
  constexpr u32 kOfBlock = kScanWidth * kScanNumbers;
  const u32 e = static_cast<u32>(p.e), kv = static_cast<u32>(p.d) * e, blocks = (kv + kOfBlock - 1) / kOfBlock + 1;
  const u32 own = static_cast<u32>(block()) % blocks;
  Head head;
  head.place(p, static_cast<u32>(block()) / blocks, 0, p.rank);
  const auto find = [&](const StateParts& s) { return s.kv == 0 ? StatePlace{} : StatePlace::find<Acc>(s, head, p, 0); };
  const StatePlace slots = find(p.slots), start = find(p.start), total = find(p.total);
  // The start as it is, or less what its level makes of it: `of` is what the level is multiplied with.
  const auto before = [&](u64 part, i64 i, u64 of, i64 of_i, u32 column) {
    if (part == 0) return Acc(0);
    const Acc x = load_number<Acc>(part, i);
    if (p.v.data == 0 || of == 0) return x;
    return ptx::fma(-load_number<Acc>(of, of_i), level<Acc>(p.v, head, p.m, static_cast<int>(column)), x);
  };
  if (own + 1 < blocks) {
    scan_part<kScanNumbers, Acc>(p, own * kOfBlock + thread(), kv, slots.kv, total.kv, [&](i64 i) {
      const u32 n = static_cast<u32>(i);
      return before(start.kv, i, start.k_sum, n / e, n % e);
    });
    return;
  }
  for (i32 i = thread(); i < p.d; i += kScanWidth) {
    scan_part<1, Acc>(p, i, p.d, slots.k_sum, total.k_sum, [&](i64 n) { return before(start.k_sum, n, 0, 0, 0); });
  }
  for (i32 i = thread(); i < p.e; i += kScanWidth) {
    scan_part<1, Acc>(p, i, p.e, slots.v_sum, total.v_sum,
                      [&](i64 n) { return before(start.v_sum, n, start.count, 0, static_cast<u32>(n)); });
  }
  if (thread() == 0) scan_part<1, Acc>(p, 0, 1, slots.count, total.count, [&](i64 n) { return before(start.count, n, 0, 0, 0); });
}

}  // namespace la
