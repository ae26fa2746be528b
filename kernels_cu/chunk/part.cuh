// Which part of the work a block has: a head, a segment of its sequence, a split of the result's columns.
#pragma once
#include "chunk/level.cuh"
#include "chunk/state.cuh"

namespace la {

template <class Config>
struct Part {
  using Role = typename Config::Role;
  using Acc = typename Config::Acc;
  static constexpr bool kQueryRows = !Role::kReversed;
  static constexpr bool kGroups = Config::kGrouped;

  Head head;
  // Where the head's rows begin in each array, 0 for an array that is not there. A block that sums over heads finds those of
  // its sources from turn to turn.
  struct Places { u64 q, k, v, dout, dst, den, delta; } places;
  i32 split, group;   // which of the result's column blocks; how many heads are summed over
  int column0;        // first column of the result in this part
  i32 segment, chunks;
  Reach rows, sources;  // of the segment
  Acc start_count;      // keys before the segment

  // The `index`th part; its start_count comes later.
  LA_DEVICE void describe(const Params& p, u32 index) {
    Head own;  // in registers: parts lie in shared memory
    split = static_cast<i32>(index % p.splits);
    index /= p.splits;
    segment = static_cast<i32>(index % p.segments);
    own.place(p, index / p.segments, 0, p.outer);
    const auto place = [&](const Tensor& t) { return own.template address<typename Config::Arith>(t); };
    const u64 den = own.template place<Acc>(p.den), delta = own.template place<Acc>(p.delta);
    if constexpr (Config::Arith::kStreams) {  // which reads the others by maps
      places = {0, 0, 0, 0, place(p.dst), den, delta};
    } else {
      places = {place(p.q), place(p.k), place(p.v), place(p.dout), place(p.dst), den, delta};
    }
    head = own;
    group = kGroups ? group_size(p) : 1;
    column0 = split * Config::kColumns;
    const i64 first = segment * p.chunks_per_segment, left = p.chunks - first;
    chunks = static_cast<i32>(left < p.chunks_per_segment ? left : p.chunks_per_segment);
    // Queries and keys of the segment, by position; see Params::query_shift.
    const i64 position = p.origin + first * Config::kChunk;
    const Reach queries = Reach::cut(position - p.query_shift, p.n, chunks * Config::kChunk);
    const Reach keys = Reach::cut(position, p.m, chunks * Config::kChunk);
    rows = kQueryRows ? queries : keys;
    sources = kQueryRows ? keys : queries;
  }

  LA_DEVICE bool last_segment(const Params& p) const { return segment + 1 == p.segments; }

  // The slot of the workspace that holds the sum over everything before this segment (behind it, when reversed).
  LA_DEVICE i64 first_slot(const Params& p) const {
    if (p.pieces == 0) return 0;
    return Role::kReversed ? (segment + 1) * p.pieces - 1 : segment * p.pieces;
  }

  // Steps go forwards or backwards over the segment's chunks.
  LA_DEVICE i32 first_row(i32 step) const { return (Role::kReversed ? chunks - 1 - step : step) * Config::kChunk; }
  LA_DEVICE Span rows_at(i32 step) const { return rows.chunk(first_row(step), Config::kChunk); }
  LA_DEVICE Span sources_at(i32 step) const { return sources.chunk(first_row(step), Config::kChunk); }

  // How many keys row `row` of a step sees (roles that walk forwards).
  LA_DEVICE Acc count_seen(i32 step, int row) const {
    return Config::kCausal ? start_count + static_cast<Acc>(sources.before(first_row(step) + row + 1)) : start_count;
  }

  // How many keys the state holds before `step` (roles that walk forwards).
  LA_DEVICE Acc count_before(i32 step) const {
    return Config::kCausal ? start_count + static_cast<Acc>(sources.before(first_row(step))) : start_count;
  }
};

}  // namespace la
