// The pre-pass over one piece of the sequence: see accumulate.cu.
#pragma once
#include "chunk/level.cuh"
#include "chunk/state.cuh"

namespace la {

template <class Config>
struct Gather {
  using Arith = typename Config::Arith;
  using Acc = typename Config::Acc;
  using Feature = typename Config::Feature;
  using P = Products<Config>;
  using RowsB = typename Config::template LoadedRows<Config::kRow>;
  using RowsC = typename Config::template LoadedRows<Config::kColumns>;
  static constexpr bool kReversed = Config::kReversed;
  static constexpr int kOffset = Feature::kAtZero;

  const Params& p;
  Head head;
  i32 group;
  int column0, inner0;  // first column and first inner column of the state in this block
  i64 piece;
  i32 chunks;
  Reach reach;  // of the piece
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
    u32 index = static_cast<u32>(block());
    const u32 split = index % p.splits, column_splits = (p.e + Config::kColumns - 1) / Config::kColumns;
    // with an unknown zero: or the split, too, is kept to the end, where column0 is compared with 0
    column0 = static_cast<int>(split % column_splits) * Config::kColumns + unknown_zero_but_sm_90();
    inner0 = static_cast<int>(split / column_splits) * Config::kInner + unknown_zero_but_sm_90();
    index /= p.splits;
    piece = index % p.segments;
    head.place(p, index / p.segments, 0, p.outer);
    group = kReversed ? group_size(p) : 1;
    const i64 first = piece * p.chunks_per_segment, left = p.chunks - first;
    chunks = static_cast<i32>(left < p.chunks_per_segment ? left : p.chunks_per_segment);
    const i64 position = p.origin + first * Config::kChunk;
    reach = kReversed ? Reach::cut(position - p.query_shift, p.n, chunks * Config::kChunk)
                      : Reach::cut(position, p.m, chunks * Config::kChunk);
  }

  LA_DEVICE typename Config::InnerTile tile_b() const { return {shared + Config::kB}; }
  LA_DEVICE typename Config::ColumnTile tile_c() const { return {shared + Config::kC}; }
  LA_DEVICE Acc* vector(int at) const { return reinterpret_cast<Acc*>(shared + Config::kVectors) + at; }

  LA_DEVICE Span span(i32 step) const { return reach.chunk(step * Config::kChunk, Config::kChunk); }

  LA_DEVICE Head head_of(i32 member) const {
    Head at = head;
    if (kReversed && group > 1) at.place(p, static_cast<u32>(member), p.outer, p.rank);
    return at;
  }
  LA_DEVICE const Tensor& array_b() const { return kReversed ? p.q : p.k; }
  LA_DEVICE const Tensor& array_c() const { return kReversed ? p.dout : p.v; }

  LA_DEVICE void fetch(i32 step, i32 member) {
    const Span rows = span(step);
    const Head at = head_of(member);
    b.fetch(array_b(), at.template address<Arith>(array_b()), rows, 0, p.d);
    c.fetch(array_c(), at.template address<Arith>(array_c()), rows, column0, p.e - column0);
    fetch_numbers(at, rows);
  }

  LA_DEVICE void fetch_numbers(const Head& at, Span rows) {
    if constexpr (kReversed) {
      den_c = RowsC::fetch(p.den, at.offset(p.den.lead), rows, Acc(1));
      delta_b = RowsB::fetch(p.delta, at.offset(p.delta.lead), rows, Acc(0));
    }
  }

  LA_DEVICE void put(i32 step) {
    const Span rows = span(step);
#pragma unroll
    for (int pass = 0; pass < RowsB::kPasses; ++pass) {
      const int row = RowsB::row(pass) + unknown_zero_but_sm_90();  // not to be kept from chunk to chunk
      if (RowsB::packet(0) == 0 && RowsB::inside(pass) && rows.holds(row)) {
        count += kReversed ? -scalar_a<Acc>(p) * delta_b.x[pass] : Acc(1);
      }
      if constexpr (kReversed) delta_b.x[pass] *= -scalar_b<Acc>(p);
    }
    const i32 dtype_b = element_type<Arith>(array_b());
    typename RowsB::Norms norms = b.norms(p);
#pragma unroll
    for (int batch = 0; batch < RowsB::kBatches; ++batch) {
      typename RowsB::Batch v = b.values(batch, dtype_b);
      RowsB::normalise(p, v, norms);
      RowsB::template map<Feature>(v, rows, p.d);
      if constexpr (kReversed) {
        Acc weight[RowsB::kBatch];
        delta_b.read(weight, batch);
        RowsB::add(inner_sum, v, weight);
      } else {
        RowsB::add(inner_sum, v);
      }
      // Products are taken of features less phi(0), which `finish` makes up for: rounding then spares what tells rows apart.
      if (kOffset != 0) RowsB::shift(v, rows, p.d, kOffset);
      RowsB::store(tile_b(), v, inner0);
    }
    if constexpr (kReversed) RowsC::invert(p, den_c);
#pragma unroll
    for (int batch = 0; batch < RowsC::kBatches; ++batch) {
      typename RowsC::Batch v = c.values(batch, element_type<Arith>(array_c()));
      if constexpr (kReversed) {
        Acc inverse[RowsC::kBatch];
        den_c.read(inverse, batch);
        RowsC::scale(v, inverse);
      } else if (p.levelled) {
        RowsC::subtract(v, rows, vector(Config::kLevel));
      }
      RowsC::store(tile_c(), v);
      RowsC::add(column_sum, v);
    }
  }

  LA_DEVICE void begin() {
    RowsB::clear(inner_sum);
    RowsC::clear(column_sum);
    StateCells<Config, true>::clear(state);
    if (!kReversed && p.levelled) find_level();
  }

  LA_DEVICE void run() {
    begin();
    i32 step = -1;
    i32 member = group - 1;
#pragma unroll 1
    while (step < chunks) {  // turn -1 only sends for the first rows
      shared = dynamic_shared() + unknown_zero();
      if (step >= 0) {
        put(step);
        sync_block();
      }
      const bool wraps = member + 1 == group;
      const i32 next = wraps ? step + 1 : step;
      const i32 next_member = wraps ? 0 : member + 1;
      if (next < chunks) fetch(next, next_member);
      if (step >= 0) {
        P::update_state(state, tile_c(), tile_b(), kReversed ? scalar_b<Acc>(p) : Acc(1));
        sync_block();
      }
      step = next;
      member = next_member;
    }
    finish();
  }

  LA_DEVICE void find_level() const {
    for (int i = thread(); i < Config::kColumns; i += Config::kThreads) {
      vector(Config::kLevel)[i] = column0 + i < p.e ? level<Acc>(p.v, head, p.m, column0 + i) : Acc(0);
    }
    sync_block();
  }

  LA_DEVICE void finish() {
    RowsB::template store_column_sums<Config::kInner>(vector(Config::kInnerParts), inner_sum, inner0);
    RowsC::template store_column_sums<Config::kColumns>(vector(Config::kColumnParts), column_sum);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) count += shuffle_xor(count, mask);
    if (lane_id() == 0) vector(Config::kCounts)[warp_id()] = count;
    sync_block();
    if (kOffset != 0) add_offset();
    const StatePlace at = StatePlace::find<Acc>(p.final, head, p, piece);
    StateCells<Config, true>::write(state, p, at.kv, column0, inner0);
    if (inner0 == 0) write_sums(at.v_sum, Config::kColumnParts, Config::kColumns, column0, p.e, kReversed ? scalar_a<Acc>(p) : Acc(1));
    if (column0 == 0) write_sums(at.k_sum, Config::kInnerParts, Config::kInner, inner0, p.d, Acc(1));
    if (column0 == 0 && inner0 == 0) write_sums(at.count, Config::kCounts, 1, 0, 1, Acc(1));
  }

  // kv += offset times the sums of C's columns, with the scale that kv has.
  LA_DEVICE void add_offset() {
    const Acc scale = (kReversed ? scalar_b<Acc>(p) : Acc(1)) * kOffset;
#pragma unroll
    for (int n = 0; n < Config::kSlices; ++n) {
      const Acc sum = scale * total(Config::kColumnParts, Config::kColumns, P::first_column() + n * 8 + lane_row());
#pragma unroll
      for (int k = 0; k < Config::kInner / 8; ++k) {
#pragma unroll
        for (int j = 0; j < 2; ++j) state[n][k].x[j] += sum;
      }
    }
  }

  // The sum over the warps' shares of column i.
  LA_DEVICE Acc total(int parts, int width, int i) const {
    Acc sum = 0;
    for (int w = 0; w < Config::kWarps; ++w) sum += vector(parts)[w * width + i];
    return sum;
  }

  LA_DEVICE void write_sums(u64 to, int parts, int width, int column, int count_of, Acc weight) {
    for (int i = thread(); i < width && column + i < count_of; i += Config::kThreads) {
      store_number(to, column + i, weight * total(parts, width, i));
    }
  }
};

}  // namespace la
