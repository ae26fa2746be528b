// What a launch tells its kernel at run time. la_cupy/params.py packs the same structures; keep them in step.
#pragma once
#include "ptx/all.cuh"

namespace la {

using namespace ptx;

constexpr int kRowSums = 5;  // sums over a row that the gradients of q and k need
constexpr int kMaxRank = 6;  // leading axes that do not collapse into one another

enum DType : i32 { kBFloat16 = 0, kFloat16 = 1, kFloat32 = 2, kFloat64 = 3 };

// Rows of one array. Strides are in elements and may be 0 or negative; the last axis is contiguous.
struct Tensor {
  u64 data;
  i64 lead[kMaxRank];
  i64 row;
  i32 dtype;
  i32 aligned;  // every row starts on a packet boundary, so that packets are read and written whole
};

// One number a row (den, delta, ...), of the accumulator's type; rows are contiguous.
struct RowVector {
  u64 data;
  i64 lead[kMaxRank];
};

// The state kv[D, E], k_sum[D], v_sum[E], count, each part contiguous but for its leading axes. A workspace has
// several slots (one a piece of the sequence), which lie one after another within a head.
struct StateParts {
  u64 kv, k_sum, v_sum, count;
  i64 kv_lead[kMaxRank], k_sum_lead[kMaxRank], v_sum_lead[kMaxRank], count_lead[kMaxRank];
};

struct Params {
  Tensor q, k, v, dout, dst;  // dst: out, dq, dk or dv, whichever the kernel makes
  RowVector den, delta;
  RowVector dots;             // sums over a row that several blocks share, kRowSums a block; see chunk/epilogue.cuh
  StateParts start;           // the state before the first chunk, or a slot for each piece; kv = 0: zeros
  StateParts final;           // where the state after the last chunk goes; kv = 0: nowhere
  i32 size[kMaxRank];         // the leading axes: `outer` of them make the blocks, the others are summed over
  i32 outer, rank;
  i64 n, m;
  i32 d, e;
  i64 query_shift;            // query i stands at position i + query_shift, key j at position j
  i64 origin;                 // position of the first row of chunk 0
  i64 chunks, chunks_per_segment;
  i32 segments, splits;       // blocks a head: segments of the sequence times splits of the result's columns
  i32 pieces;                 // slots of `start` that make a segment; 0: it has one slot only
  i32 unit_norm;              // qk_norm == "l2"
  i32 normalize;
  i32 levelled;               // v is taken less a constant, see chunk/level.cuh
  i32 phase;                  // see SweepPhase
  double a, b;
  float a_float, b_float;     // the same: to convert them takes the double-precision unit, which is slow
  i32 adds;                   // slots of `start` hold the sums of single pieces, which the walk adds up (stream/slots.cuh)
};

// What `stream` is told besides: maps of its arrays (ptx/tma.cuh) with the arrays' leading axes, -1 for none.
struct StreamParams {
  TensorMap q, k, v, dout, dst, second;  // second: dv, where dst is dk
  i32 axes[6][4];
  Tensor of_second;
  Params p;
};

template <class Acc>
LA_DEVICE Acc scalar_a(const Params& p) {
  if constexpr (sizeof(Acc) == 8) return p.a;
  return p.a_float;
}

template <class Acc>
LA_DEVICE Acc scalar_b(const Params& p) {
  if constexpr (sizeof(Acc) == 8) return p.b;
  return p.b_float;
}

// A result whose columns are split over blocks needs sums over whole rows first, from a run of its own.
enum SweepPhase : i32 { kWhole = 0, kDots = 1, kApply = 2 };

}  // namespace la
