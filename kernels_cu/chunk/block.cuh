// Which part of the work a block has, and names for its shared memory.
#pragma once
#include "chunk/level.cuh"
#include "chunk/state.cuh"

namespace la {

template <class Config>
struct Block {
  using Role = typename Config::Role;
  using Acc = typename Config::Acc;
  static constexpr bool kQueryRows = !Role::kReversed;
  // Has rows of v, to take its level off.
  static constexpr bool kLevelled = kSame<Role, GradK> || (kSame<Role, GradQ> && Config::kCausal);

  i32 zero;  // 0, see shared()
  Head head;
  // Where the head's rows begin in each array, 0 for an array that is not there. A block that sums over heads finds those of
  // its sources from turn to turn.
  struct Places { u64 q, k, v, dout, dst, den, delta; } places;
  i32 split, group;   // which of the result's column blocks; how many heads are summed over
  int column0;        // first column of the result in this block
  i32 segment, chunks;
  Reach rows, sources;  // of the segment
  Acc start_count;

  // The block's description is the same for all threads: it lies in shared memory, not in the registers of each.
  static LA_DEVICE Block& make(const Params& p) {
    Block& block = *reinterpret_cast<Block*>(dynamic_shared() + Config::kDescription);
    if (thread() == 0) block.describe(p);
    sync_block();
    return block;
  }

  LA_DEVICE void describe(const Params& p) {
    static_assert(sizeof(Block) <= Config::kDescriptionBytes, "the description must fit its place");
    zero = 0;
    u32 index = static_cast<u32>(block());
    split = static_cast<i32>(index % p.splits);
    index /= p.splits;
    segment = static_cast<i32>(index % p.segments);
    head.place(p, index / p.segments, 0, p.outer);
    const auto place = [&](const Tensor& t) { return head.template address<typename Config::Arith>(t); };
    places = {place(p.q), place(p.k), place(p.v), place(p.dout), place(p.dst), head.template place<Acc>(p.den),
              head.template place<Acc>(p.delta)};
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

  // Turns: a chunk of rows, and within it one member of the group of heads that are summed over. What exists twice in shared
  // memory alternates: what belongs to sources (B, C, running sums) from turn to turn, what belongs to rows (A, X, the
  // result) from step to step.
  struct Turn {
    i32 step = 0, member = 0, copy = 0;
    LA_DEVICE i32 row_copy() const { return step & 1; }
  };
  static constexpr bool kGroups = Config::kGrouped;
  LA_DEVICE bool exists(Turn t) const { return t.step < chunks; }
  LA_DEVICE bool begins(Turn t) const { return !kGroups || t.member == 0; }
  LA_DEVICE bool ends(Turn t) const { return !kGroups || t.member + 1 == group; }
  LA_DEVICE Turn after(Turn t) const {
    if (!kGroups) return {t.step + 1, 0, (t.step + 1) & 1};
    const bool ended = ends(t);
    return {ended ? t.step + 1 : t.step, ended ? 0 : t.member + 1, t.copy ^ 1};
  }

  // The sums before the segment, into both copies: where nothing is added to them, both stay as they are.
  LA_DEVICE void start(const Params& p) {
    const bool given = p.start.kv != 0;
    const StatePlace at = StatePlace::find<Acc>(p.start, head, p, first_slot(p));
    const u64 inner = !given ? 0 : Role::kKeyFeatures ? at.k_sum : at.v_sum;
    const u64 column = !given ? 0 : Role::kKeyFeatures ? at.v_sum : at.k_sum;
    if constexpr (Config::Arith::kWarpgroups) prepare();
    if constexpr (kLevelled) {
      for (int i = thread(); i < Config::kInner; i += Config::kThreads) {
        level()[i] = p.levelled && i < p.e ? la::level<Acc>(p.v, head, p.m, i) : Acc(0);
      }
    }
    if (thread() == 0) start_count = given ? load_number<Acc>(at.count, 0) : Acc(0);
    for (int copy = 0; copy < 2; ++copy) {
      read_vector<Acc>(inner_sum(copy), Config::kInner, inner, 0, Role::kKeyFeatures ? p.d : p.e, Config::kThreads);
      read_vector<Acc>(column_sum(copy), Config::kColumns, column, column0, Role::kKeyFeatures ? p.e : p.d, Config::kThreads);
    }
    sync_block();
    if constexpr (kSame<Role, GradQ>) {
      for (int i = thread(); i < Config::kColumns && column0 + i < p.d; i += Config::kThreads) {
        for (int copy = 0; copy < 2; ++copy) column_sum(copy)[i] -= Config::kKeyOffset * start_count;
      }
      for (int i = thread(); i < Config::kInner; i += Config::kThreads) {
        for (int copy = 0; copy < 2; ++copy) set_centre(p, copy, i, inner_sum(copy)[i], start_count);
      }
      sync_block();
    }
  }

  // What products with wgmma take for granted: no weights where no row sees a source, ones where it does, empty lines.
  LA_DEVICE void prepare() {
    for (int i = thread(); Config::kCausal && i < Config::kChunk * Config::kChunk; i += Config::kThreads) {
      const int row = i / Config::kChunk, y = i % Config::kChunk;
      reinterpret_cast<bf16*>(weights().packet(row, y / 8))[y % 8].bits = 0;
      if constexpr (Config::kGradQ) reinterpret_cast<bf16*>(ones().packet(row, y / 8))[y % 8].bits = y <= row ? to_bf16(1.f) : 0;
    }
    u32* const lines = reinterpret_cast<u32*>(shared() + Config::kVectorLines);
    for (int i = thread(); i < (Config::kDescription - Config::kVectorLines) / 4; i += Config::kThreads) lines[i] = 0;
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

  // With a zero that the compiler does not know: addresses are then not computed ahead of loops and barriers, where they would
  // occupy registers all along. A register's is the quicker one, and shared memory's the one that takes no register.
  LA_DEVICE unsigned char* shared() const {
    return dynamic_shared() + (sizeof(typename Config::Elem) == 2 ? unknown_zero() : zero);
  }

  LA_DEVICE unsigned char* tiles(int copy) const { return shared() + copy % Config::kCopies * Config::kTiles; }
  LA_DEVICE typename Config::InnerTile tile_a(int copy) const { return {tiles(copy) + Config::kA}; }
  LA_DEVICE typename Config::InnerTile tile_b(int copy) const { return {tiles(copy) + Config::kB}; }
  LA_DEVICE typename Config::ColumnTile tile_c(int copy) const { return {tiles(copy) + Config::kC}; }
  LA_DEVICE typename Config::ColumnTile tile_x(int copy) const { return {tiles(copy) + Config::kX}; }
  LA_DEVICE typename Config::ColumnTile stage(int copy) const {
    return {shared() + Config::kStage + copy * Config::ColumnTile::bytes(Config::kChunk)};
  }
  LA_DEVICE typename Config::WeightsTile weights() const { return {shared() + Config::kWeights}; }
  LA_DEVICE typename Config::WeightsTile ones() const { return {shared() + Config::kOnes}; }
  LA_DEVICE typename Config::VectorLines vector_lines() const { return {shared() + Config::kVectorLines}; }
  LA_DEVICE typename Config::SourceLines source_lines(int copy) const {
    return {shared() + Config::kSourceLines + (kSame<Role, GradK> ? copy * Config::SourceLines::bytes(8) : 0)};
  }

  LA_DEVICE Acc* vector(int at) const { return reinterpret_cast<Acc*>(shared() + Config::kVectors) + at; }
  LA_DEVICE Acc* numbers(int copy, RowNumber which) const {
    return vector(Config::kRowNumbers + (copy * 4 + which) * Config::kChunk);
  }
  LA_DEVICE Acc* inner_sum(int copy) const { return vector(Config::kInnerSum + copy * Config::kInner); }
  LA_DEVICE Acc* centre(int copy) const { return vector(Config::kCentre + copy * Config::kInner); }
  LA_DEVICE Acc* rest(int copy) const { return vector(Config::kRest + copy * Config::kInner); }
  LA_DEVICE Acc* level() const { return vector(Config::kLevel); }
  LA_DEVICE Acc* column_sum(int copy) const { return vector(Config::kColumnSum + copy * Config::kColumns); }

  // GradQ: dq does not change when a constant is added to v, so the mean c of the values so far is taken off. The large
  // parts of sum (g . v) k and delta sum k, which would cancel after rounding, are then never formed.
  LA_DEVICE void set_centre(const Params& p, int copy, int i, Acc sum, Acc count) const {
    const Acc c = p.normalize && count > Acc(0) ? sum / count : Acc(0);
    centre(copy)[i] = c;
    rest(copy)[i] = ptx::fma(-count, c, sum);
  }
};

}  // namespace la
