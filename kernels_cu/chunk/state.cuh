// The running state between registers and global memory, where it is kept as kv[D, E], k_sum[D], v_sum[E], count.
#pragma once
#include "chunk/heads.cuh"
#include "chunk/warpgroup.cuh"

namespace la {

// Where one head's state lies, at one slot of a workspace or as the caller's arrays.
struct StatePlace {
  u64 kv, k_sum, v_sum, count;  // addresses

  template <class Acc, class Sized>
  static LA_DEVICE StatePlace find(const StateParts& s, const Head& head, const Sized& p, i64 slot) {
    const i64 d = p.d, e = p.e;
    const auto at = [](u64 base, i64 index) { return base + static_cast<u64>(index * static_cast<i64>(sizeof(Acc))); };
    return {at(s.kv, head.offset(s.kv_lead) + slot * d * e), at(s.k_sum, head.offset(s.k_sum_lead) + slot * d),
            at(s.v_sum, head.offset(s.v_sum_lead) + slot * e), at(s.count, head.offset(s.count_lead) + slot)};
  }
};

// `KeyFeatures`: a warp's columns are values and the inner axis is that of the features; otherwise the other way round.
template <class Config, bool KeyFeatures>
struct StateCells {
  using Acc = typename Config::Acc;
  using Cells = typename Products<Config>::State;

  // Of a wide state a few cells at a time are on their way, with their addresses: all of them need more registers than there are.
  static LA_DEVICE void pause(int k) {
    if constexpr (Config::kInner > 128) {
      if (k % 4 == 0) sync_warp();
    }
  }

  // f(cell, whether it exists, its address). One address steps from inner column to inner column: one for each of them would
  // take the registers that the state is in.
  template <class F>
  static LA_DEVICE void each(Cells& cells, const Params& p, u64 kv, int column0, int inner0, F f) {
    const int columns = KeyFeatures ? p.e : p.d, inners = KeyFeatures ? p.d : p.e;
    const int column = column0 + Products<Config>::first_column() + lane_row(), inner = inner0 + lane_column();
    const i64 row = static_cast<i64>(p.e) * static_cast<i64>(sizeof(Acc)), one = sizeof(Acc);
    const i64 column_step = KeyFeatures ? one : row, inner_step = KeyFeatures ? row : one;
    u64 at = kv + static_cast<u64>(column * column_step + inner * inner_step);
#pragma unroll
    for (int k = 0; k < Config::kInner / 8; ++k) {
      pause(k);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int n = 0; n < Config::kSlices; ++n) {
          const bool exists = column + n * 8 < columns && inner + k * 8 + j < inners;
          f(cells[n][k].x[j], exists, at + static_cast<u64>(n * 8 * column_step));
        }
        at += static_cast<u64>(j == 0 ? inner_step : 7 * inner_step);
      }
    }
  }

  // The state of keys that are less by `offset` in every column: kv - offset v_sum^T, inner axis being that of the values.
  static LA_DEVICE void shift_keys(Cells& cells, const Params& p, const Acc* v_sum, int column0, Acc offset) {
    static_assert(!KeyFeatures, "a warp's columns must be those of the keys");
#pragma unroll
    for (int k = 0; k < Config::kInner / 8; ++k) {
      pause(k);
#pragma unroll
      for (int n = 0; n < Config::kSlices; ++n) {
        const bool exists = column0 + Products<Config>::first_column() + n * 8 + lane_row() < p.d;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          Acc& x = cells[n][k].x[j];
          const Acc shifted = ptx::fma(-offset, v_sum[k * 8 + lane_column() + j], x);
          x = exists ? shifted : x;
        }
      }
    }
  }

  static LA_DEVICE void clear(Cells& cells) {
#pragma unroll
    for (int n = 0; n < Config::kSlices; ++n) {
#pragma unroll
      for (int k = 0; k < Config::kInner / 8; ++k) cells[n][k] = {{Acc(0), Acc(0)}};
    }
  }

  static LA_DEVICE void read(Cells& cells, const Params& p, u64 kv, int column0) {
    each(cells, p, kv, column0, 0, [kv](Acc& x, bool exists, u64 at) {
      if constexpr (Config::kInner > 128) {  // without branches, for which a wide state leaves too few registers
        const Acc there = load_number<Acc>(exists ? at : kv, 0);
        x = exists ? there : Acc(0);
      } else {
        x = exists ? load_number<Acc>(at, 0) : Acc(0);
      }
    });
  }

  static LA_DEVICE void add(Cells& cells, const Params& p, u64 kv, int column0) {
    each(cells, p, kv, column0, 0, [](Acc& x, bool exists, u64 at) { x += exists ? load_number<Acc>(at, 0) : Acc(0); });
  }

  static LA_DEVICE void write(Cells& cells, const Params& p, u64 kv, int column0, int inner0 = 0) {
    each(cells, p, kv, column0, inner0, [](Acc& x, bool exists, u64 at) { if (exists) store_number(at, 0, x); });
  }
};

// One vector of the state into shared memory, zeros behind its end.
template <class Acc>
LA_DEVICE void read_vector(Acc* to, int width, u64 from, i64 column0, i64 count, int threads) {
  for (int i = thread(); i < width; i += threads) {
    to[i] = from != 0 && column0 + i < count ? load_number<Acc>(from, column0 + i) : Acc(0);
  }
}

}  // namespace la
