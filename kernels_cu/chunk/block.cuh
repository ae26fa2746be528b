// Which part of the work a block has, and names for its shared memory.
#pragma once
#include "chunk/heads.cuh"
#include "chunk/products.cuh"

namespace la {

template <class Config>
struct Block {
  using Role = typename Config::Role;
  using Acc = typename Config::Acc;
  static constexpr bool kQueryRows = !Role::kReversed;

  unsigned char* shared;
  Head head;
  i32 split, group;   // which of the result's column blocks; how many heads are summed over
  int column0;        // first column of the result in this block
  i64 segment, first_chunk, chunks;
  int parity = 0;     // which of the two copies of the running sums is current
  Acc start_count = 0;

  LA_DEVICE explicit Block(const Params& p) : shared(dynamic_shared()) {
    i64 index = block();
    split = static_cast<i32>(index % p.splits);
    index /= p.splits;
    segment = index % p.segments;
    head.place(p, index / p.segments, 0, p.outer);
    group = Role::kReversed && Config::kCausal ? group_size(p) : 1;
    column0 = split * Config::kColumns;
    first_chunk = segment * p.chunks_per_segment;
    const i64 left = p.chunks - first_chunk;
    chunks = left < p.chunks_per_segment ? left : p.chunks_per_segment;
    origin = p.origin;
    keys = p.m;
  }

  LA_DEVICE bool last_segment(const Params& p) const { return segment + 1 == p.segments; }

  // The slot of the workspace that holds the sum over everything before this segment (behind it, when reversed).
  LA_DEVICE i64 first_slot(const Params& p) const {
    if (p.pieces == 0) return 0;
    const i64 slots = p.segments * p.pieces;
    return Role::kReversed ? (segment + 1) * p.pieces - 1 : segment * p.pieces < slots ? segment * p.pieces : slots - 1;
  }

  // Steps go forwards or backwards over the segment's chunks; positions: see Params::query_shift.
  LA_DEVICE i64 position(i64 step) const {
    return origin + (Role::kReversed ? first_chunk + chunks - 1 - step : first_chunk + step) * Config::kChunk;
  }
  LA_DEVICE Span rows(const Params& p, i64 step) const { return span(p, step, kQueryRows); }
  LA_DEVICE Span sources(const Params& p, i64 step) const { return span(p, step, !kQueryRows); }

  // How many keys the state holds before `step` (roles that walk forwards).
  LA_DEVICE Acc count_before(i64 step) const {
    if (!Config::kCausal) return start_count;
    const auto within = [this](i64 x) { return x < 0 ? 0 : x > keys ? keys : x; };
    return start_count + static_cast<Acc>(within(position(step)) - within(position(0)));
  }

  LA_DEVICE typename Config::InnerTile tile_a() const { return {shared + Config::kA}; }
  LA_DEVICE typename Config::InnerTile tile_b() const { return {shared + Config::kB}; }
  LA_DEVICE typename Config::ColumnTile tile_c() const { return {shared + Config::kC}; }
  LA_DEVICE typename Config::ColumnTile tile_x() const { return {shared + Config::kX}; }
  LA_DEVICE typename Config::ColumnTile stage() const { return {shared + Config::kStage}; }
  LA_DEVICE typename Config::WeightsTile weights() const { return {shared + Config::kWeights}; }

  LA_DEVICE Cell<Acc>* exchange() const { return reinterpret_cast<Cell<Acc>*>(shared + Config::kExchange); }

  // Addresses of the block's own head in each array, found once.
  enum Array { kRowsA, kRowsX, kSourcesB, kSourcesC, kResult, kArrays };
  LA_DEVICE u64& address(int array) const { return reinterpret_cast<u64*>(shared + Config::kAddresses)[array]; }

  LA_DEVICE Acc* vector(int at) const { return reinterpret_cast<Acc*>(shared + Config::kVectors) + at; }
  LA_DEVICE Acc* inner_sum(int copy) const { return vector(Config::kInnerSum + copy * Config::kInner); }
  LA_DEVICE Acc* centre(int copy) const { return vector(Config::kCentre + copy * Config::kInner); }
  LA_DEVICE Acc* rest(int copy) const { return vector(Config::kRest + copy * Config::kInner); }
  LA_DEVICE Acc* column_sum(int copy) const { return vector(Config::kColumnSum + copy * Config::kColumns); }

  // GradQ: dq does not change when a constant is added to v, so the mean c of the values so far is taken off. The large
  // parts of sum (g . v) k and delta sum k, which would cancel after rounding, are then never formed.
  LA_DEVICE void set_centre(const Params& p, int copy, int i, Acc sum, Acc count) const {
    const Acc c = p.normalize && count > Acc(0) ? sum / count : Acc(0);
    centre(copy)[i] = c;
    rest(copy)[i] = ptx::fma(-count, c, sum);
  }

 private:
  i64 origin, keys;

  LA_DEVICE Span span(const Params& p, i64 step, bool queries) const {
    const i64 at = position(step);
    return queries ? Span::cut(at - p.query_shift, p.n, Config::kChunk) : Span::cut(at, p.m, Config::kChunk);
  }
};

}  // namespace la
