// A block's part of the work and names for its shared memory.
#pragma once
#include "chunk/part.cuh"

namespace la {

template <class Config>
struct Block : Part<Config> {
  using Base = Part<Config>;
  using Role = typename Config::Role;
  using Acc = typename Config::Acc;
  using Base::chunks, Base::column0, Base::group, Base::head, Base::kGroups, Base::start_count;
  // Has rows of v, to take its level off.
  static constexpr bool kLevelled = kSame<Role, GradK> || (kSame<Role, GradQ> && Config::kCausal);

  i32 zero;  // 0, see shared()

  // The block's description is the same for all threads: it lies in shared memory, not in the registers of each.
  static LA_DEVICE Block& make(const Params& p) {
    Block& block = *reinterpret_cast<Block*>(dynamic_shared() + Config::kDescription);
    if (thread() == 0) block.begin(p);
    sync_block();
    return block;
  }

  LA_DEVICE void begin(const Params& p) {
    static_assert(sizeof(Block) <= Config::kDescriptionBytes, "the description must fit its place");
    zero = 0;
    this->describe(p, static_cast<u32>(block()));
  }

  // Turns: a chunk of rows, and within it one member of the group of heads that are summed over. What exists twice in shared
  // memory alternates: what belongs to sources (B, C, running sums) from turn to turn, what belongs to rows (A, X, the
  // result) from step to step.
  struct Turn {
    i32 step = 0, member = 0, copy = 0;
    LA_DEVICE i32 row_copy() const { return step & 1; }
  };
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
    const StatePlace at = StatePlace::find<Acc>(p.start, head, p, this->first_slot(p));
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

  // With a zero that the compiler does not know: addresses are then not computed ahead of loops and barriers, where they would
  // occupy registers all along. A register's is the quicker one, and shared memory's the one that takes no register.
  LA_DEVICE unsigned char* shared() const {
    return dynamic_shared() + (Config::kZeroInRegister ? unknown_zero() : zero);
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
