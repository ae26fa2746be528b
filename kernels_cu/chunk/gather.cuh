// The pre-pass over one piece of the sequence: see accumulate.cu.
#pragma once
#include "chunk/state.cuh"

namespace la {

template <class Config>
struct Gather {
  using Arith = typename Config::Arith;
  using Acc = typename Config::Acc;
  using Feature = typename Config::Feature;
  using P = Products<Config>;
  using RowsB = Rows<Arith, Config::kInner, Config::kChunk, Config::kThreads>;
  using RowsC = Rows<Arith, Config::kColumns, Config::kChunk, Config::kThreads>;
  static constexpr bool kReversed = Config::kReversed;

  const Params& p;
  Head head;
  i32 split, group;
  int column0;
  i64 piece, first, chunks;
  unsigned char* shared;
  RowsB b;
  RowsC c;
  typename RowsC::Numbers den_c;
  typename RowsB::Numbers delta_b;
  typename RowsB::Values inner_sum;
  typename RowsC::Values column_sum;
  Acc count = 0;
  typename P::State state;

  LA_DEVICE explicit Gather(const Params& params) : p(params), shared(dynamic_shared()) {
    i64 index = block();
    split = static_cast<i32>(index % p.splits);
    index /= p.splits;
    piece = index % p.segments;
    head.place(p, index / p.segments, 0, p.outer);
    group = kReversed ? group_size(p) : 1;
    column0 = split * Config::kColumns;
    first = piece * p.chunks_per_segment;
    const i64 left = p.chunks - first;
    chunks = left < p.chunks_per_segment ? left : p.chunks_per_segment;
  }

  LA_DEVICE typename Config::InnerTile tile_b() const { return {shared + Config::kB}; }
  LA_DEVICE typename Config::ColumnTile tile_c() const { return {shared + Config::kC}; }
  LA_DEVICE Acc* vector(int at) const { return reinterpret_cast<Acc*>(shared + Config::kVectors) + at; }

  LA_DEVICE Span span(i64 step) const {
    const i64 position = p.origin + (first + step) * Config::kChunk;
    return kReversed ? Span::cut(position - p.query_shift, p.n, Config::kChunk) : Span::cut(position, p.m, Config::kChunk);
  }

  LA_DEVICE void fetch(i64 step, i32 member) {
    const Span rows = span(step);
    Head at = head;
    if (kReversed && group > 1) at.place(p, member, p.outer, p.rank);
    const Tensor& tb = kReversed ? p.q : p.k;
    const Tensor& tc = kReversed ? p.dout : p.v;
    b.fetch(tb, at.template address<Arith>(tb), rows, 0, p.d);
    c.fetch(tc, at.template address<Arith>(tc), rows, column0, p.e - column0);
    if constexpr (kReversed) {
      den_c = RowsC::fetch(p.den, at.offset(p.den.lead), rows, Acc(1));
      delta_b = RowsB::fetch(p.delta, at.offset(p.delta.lead), rows, Acc(0));
    }
  }

  LA_DEVICE void put(i64 step) {
    const Span rows = span(step);
    typename RowsB::All vb = b.values((kReversed ? p.q : p.k).dtype);
    if (p.unit_norm) RowsB::normalise(vb);
    RowsB::template map<Feature>(vb, rows, p.d);
    RowsB::store(tile_b(), vb);
    typename RowsB::Numbers weight = RowsB::same(Acc(1));
#pragma unroll
    for (int pass = 0; pass < RowsB::kPasses; ++pass) {
      const int row = RowsB::row(pass);
      if constexpr (kReversed) weight.x[pass] = -Acc(p.b) * delta_b.x[pass];
      if (RowsB::packet(0) == 0 && row < Config::kChunk && rows.holds(row)) {
        count += kReversed ? -Acc(p.a) * delta_b.x[pass] : Acc(1);
      }
    }
    RowsB::add(inner_sum, vb, weight);

    typename RowsC::All vc = c.values((kReversed ? p.dout : p.v).dtype);
    if constexpr (kReversed) {
#pragma unroll
      for (Acc& x : den_c.x) x = !p.normalize ? Acc(1) : x == Acc(0) ? Acc(0) : ptx::reciprocal(x);
      RowsC::scale(vc, den_c);
    }
    RowsC::store(tile_c(), vc);
    RowsC::add(column_sum, vc, RowsC::same(kReversed ? Acc(p.a) : Acc(1)));
  }

  LA_DEVICE void run() {
    RowsB::clear(inner_sum);
    RowsC::clear(column_sum);
    StateCells<Config, true>::clear(state);
    i64 step = -1;
    i32 member = group - 1;
#pragma unroll 1
    while (step < chunks) {  // turn -1 only sends for the first rows
      shared = dynamic_shared() + unknown_zero();
      if (step >= 0) {
        put(step);
        sync_block();
      }
      const bool wraps = member + 1 == group;
      const i64 next = wraps ? step + 1 : step;
      const i32 next_member = wraps ? 0 : member + 1;
      if (next < chunks) fetch(next, next_member);
      if (step >= 0) {
        P::update_state(state, tile_c(), tile_b(), kReversed ? Acc(p.b) : Acc(1));
        sync_block();
      }
      step = next;
      member = next_member;
    }
    finish();
  }

  LA_DEVICE void finish() {
    RowsB::template store_column_sums<Config::kInner>(vector(Config::kInnerParts), inner_sum);
    RowsC::template store_column_sums<Config::kColumns>(vector(Config::kColumnParts), column_sum);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) count += shuffle_xor(count, mask);
    if (lane_id() == 0) vector(Config::kCounts)[warp_id()] = count;
    sync_block();
    const StatePlace at = StatePlace::find<Acc>(p.final, head, p, piece);
    StateCells<Config, true>::write(state, p, at.kv, column0);
    write_sums(at.v_sum, Config::kColumnParts, Config::kColumns, column0, p.e);
    if (split == 0) write_sums(at.k_sum, Config::kInnerParts, Config::kInner, 0, p.d);
    if (split == 0) write_sums(at.count, Config::kCounts, 1, 0, 1);
  }

  LA_DEVICE void write_sums(u64 to, int parts, int width, int column, int count_of) {
    for (int i = thread(); i < width && column + i < count_of; i += Config::kThreads) {
      Acc sum = 0;
      for (int w = 0; w < Config::kWarps; ++w) sum += vector(parts)[w * width + i];
      store_number(to, column + i, sum);
    }
  }
};

}  // namespace la
