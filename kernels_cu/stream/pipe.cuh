// The shared memory of a block of `stream`, and how its warps hand chunks to each other: each barrier stands for a thing of which
// there are several, and is waited for in turn.
//
//   full      a slot has the rows of a chunk                          courier -> suppliers, centre (or KeyLength), state
//   ready     the same, transformed, and the sums before it           suppliers (a group), centre -> scores, state
//   free      a slot is no longer read                                scores, state, centre (or the sender) -> courier
//   made      weights of a chunk, and what its rows are made with     scores -> state
//   used      the same are no longer read                             state -> scores
//   staged    the result of a chunk                                   state -> sender
//   sent      the same may be written over                            sender -> state
//   done      the result has taken the place of what it was made of   state -> sender
//   measured  |k| of each row, which has a moderate length now        KeyLength -> scores (or the state)
//
// Where rows have slots of their own (StreamConfig::kOwnRows), they are full and free by themselves. Those whose place the result takes
// are sent before they are free: rows, or sources (KeyValueConfig::kInSources).
// stream_key_value has no scores where nothing is masked.
// Courier and suppliers are what is often called the producer, the sender the store or epilogue warp.
#pragma once
#include "stream/config.cuh"
#include "stream/slots.cuh"

namespace la {

// Which of `Count` things comes next, and for how many rounds.
template <int Count>
struct Ring {
  i32 at = 0, round = 0;
  LA_DEVICE void next() {
    if (++at == Count) {
      at = 0;
      round ^= 1;
    }
  }
};

template <class Config>
struct Pipe {
  static constexpr int kSlots = Config::kSlots, kRowSlots = Config::kRowSlots;
  enum First {
    kFull = 0, kReady = kSlots, kFree = 2 * kSlots, kMade = 3 * kSlots, kUsed = kMade + 2,
    kStaged = kUsed + 2, kSent = kStaged + 1, kDone = kSent + 1, kRowsFull = kDone + kSlots, kRowsFree = kRowsFull + kRowSlots,
    kMeasured = kRowsFree + kRowSlots, kEnd = kMeasured + kRowSlots
  };
  static_assert(kEnd <= Config::kBarriers, "barriers must have room");
  static_assert(kSlots % Config::kSupplyGroups == 0, "of a slot, a part's rounds must be one group's: a parity tells of the last one only");
  static constexpr bool kSlotSent = Config::kInPlace && (!Config::kOwnRows || Config::kInSources);  // the sender gives a slot back
  static constexpr bool kRowsSent = Config::kInPlace && !kSlotSent;                                 // or rows
  static_assert(kRowSlots <= kSlots, "there is a barrier for each result");
  static constexpr int kReaders =
      (kSlotSent ? 1 : Config::kStateWarps) + Config::kScoreWarps + (Config::kCausal ? Config::kCentreWarps : 0);  // of a slot

  // A part, and where its head is on the leading axes of the maps.
  enum Array { kQ, kK, kV, kDout, kDst, kSecond, kArrays };
  struct Piece : Part<Config> {
    i32 at[kArrays][3];
    u64 second;  // as places.dst

    // Of roles that walk forwards. To add up the counts would take longer.
    LA_DEVICE float keys_before(const Params& p) const {
      const i64 first = this->sources.first;
      if (p.adds) return static_cast<float>(first < 0 ? 0 : first < p.m ? first : p.m);
      return p.start.kv == 0 ? 0.f : load_number<float>(Slots<Config>(p, *this).first.count, 0);
    }

    LA_DEVICE void describe(const StreamParams& params, u32 index) {
      Part<Config>::describe(params.p, index);
      this->start_count = Config::kHasRows && !Config::Role::kReversed ? keys_before(params.p) : 0.f;
      if constexpr (Config::kKeyValue) second = this->head.template address<typename Config::Arith>(params.of_second);
#pragma unroll 1
      for (int array = 0; array < kArrays; ++array) {
#pragma unroll
        for (int i = 0; i < 3; ++i) {
          const i32 axis = params.axes[array][i];
          at[array][i] = axis < 0 ? 0 : this->head.at[axis];
        }
      }
    }
  };
  static_assert(sizeof(Piece) <= Config::kPieceBytes, "a part's description must have room");

  // From chunk to chunk of all parts that the block has, one after the other.
  struct Chunk {
    u32 part = static_cast<u32>(block());
    i32 ordinal = 0, step = 0;
    Ring<kSlots> slot;
    Ring<kRowSlots> rows;
    Ring<Config::kPairs> pair;
    Ring<1> stage;
    LA_DEVICE bool exists(u32 parts) const { return part < parts; }
    LA_DEVICE bool begins() const { return step == 0; }
    // In place of what the result comes to lie.
    LA_DEVICE auto result() const {
      if constexpr (kSlotSent) return slot;
      else return rows;
    }
    // Whether a new part begins.
    LA_DEVICE bool next(i32 chunks) {
      slot.next();
      rows.next();
      pair.next();
      stage.next();
      if (++step < chunks) return false;
      step = 0;
      part += static_cast<u32>(grid());
      ++ordinal;
      return true;
    }
  };

  static LA_DEVICE u32 parts(const Params& p) {
    u32 count = static_cast<u32>(p.segments * p.splits);
#pragma unroll
    for (i32 axis = 0; axis < kMaxRank; ++axis) {
      if (axis < p.outer) count *= static_cast<u32>(p.size[axis]);
    }
    return count;
  }

  static LA_DEVICE unsigned char* shared() { return dynamic_shared() + unknown_zero(); }
  static LA_DEVICE Mbarrier* barrier(i32 which) { return reinterpret_cast<Mbarrier*>(shared() + Config::kBarrier) + which; }

  static_assert(Config::kPieces > kSlots + 3, "a part's description must last as long as it is needed");

  static LA_DEVICE void init_for_warps(Mbarrier* barrier, i32 warps) { mbarrier_init(barrier, warps * kArrivalsOfWarp); }

  // By one thread.
  static LA_DEVICE void init_barriers() {
    for (int i = 0; i < kSlots; ++i) {
      mbarrier_init(barrier(kFull + i), 1);
      init_for_warps(barrier(kReady + i), Config::kSupplyWarps / Config::kSupplyGroups + Config::kCentreWarps);
      init_for_warps(barrier(kFree + i), kReaders);
      init_for_warps(barrier(kDone + i), Config::kStateWarps);
    }
    if (!Config::kHasRows) return;
    for (int i = 0; i < kRowSlots; ++i) {
      mbarrier_init(barrier(kRowsFull + i), 1);
      if (Config::kLengthWarps > 0) init_for_warps(barrier(kMeasured + i), Config::kLengthWarps);
      init_for_warps(barrier(kRowsFree + i), (kRowsSent ? 1 : Config::kStateWarps) + Config::kScoreWarps);
    }
    for (int i = 0; Config::kScoreWarps > 0 && i < Config::kPairs; ++i) {
      init_for_warps(barrier(kMade + i), Config::kScoreWarps);
      init_for_warps(barrier(kUsed + i), Config::kStateWarps);
    }
    if (!Config::kHasStage) return;
    init_for_warps(barrier(kStaged), Config::kStateWarps);
    init_for_warps(barrier(kSent), 1);
  }

  static LA_DEVICE void begin() {
    if (thread() == 0) init_barriers();
    for (int i = 0; Config::kHasRows && i < kRowSlots; ++i) fill<Config::kInner>(tile_a(i), 0);
    for (int slot = 0; slot < kSlots; ++slot) {
      if constexpr (Config::kCausal) fill<Config::kInner>(tile_b(slot), 0);
    }
    if constexpr (Config::kCausal) {
      for (int i = 0; i < Config::kWeightsTiles; ++i) fill<64>(weights(i), 0x3f803f80);
    }
    if constexpr (Config::kOnesBytes > 0) {
      for (int i = thread(); i < 64 * 64; i += Config::kThreads) {
        const int row = i / 64, y = i % 64;
        reinterpret_cast<bf16*>(ones().packet(row, y / 8))[y % 8].bits = y <= row ? to_bf16(1.f) : 0;
      }
    }
    fence_async();
    sync_block();
  }

  // The lines behind the rows of a tile.
  template <int Width, class Tile>
  static LA_DEVICE void fill(const Tile& tile, u32 value) {
    for (int i = thread(); i < Width; i += Config::kThreads) {
      *reinterpret_cast<Word4*>(tile.packet(Config::kChunk + i % 8, i / 8)) = {{value, value, value, value}};
    }
  }

  // Once a ring is through, its barriers end their phases for another round.
  template <int Count>
  static LA_DEVICE void wait(First which, Ring<Count> ring) { mbarrier_wait(barrier(which + ring.at), ring.round); }
  template <int Count>
  static LA_DEVICE void wait_round_before(First which, Ring<Count> ring) { mbarrier_wait(barrier(which + ring.at), ring.round ^ 1); }
  // For the warp, once all of it is here.
  template <int Count>
  static LA_DEVICE void arrive(First which, Ring<Count> ring) {
    if (kArrivalsOfWarp > 1 || lane_id() == 0) mbarrier_arrive(barrier(which + ring.at));
  }

  // Suppliers: whether this one's group has the chunk, so that all parts are shared in the same way.
  static LA_DEVICE bool supplies(const Chunk& now) {
    constexpr int kGroups = Config::kSupplyGroups;
    return kGroups == 1 || now.step % kGroups == (warp_id() - Config::kFirstSupply) / 4;
  }
  static LA_DEVICE void sync_suppliers() { sync_named(1, 32 * Config::kSupplyWarps); }

  // Where the state behind a part goes: that of the last segment of the first of the heads that share it, or of each piece.
  static LA_DEVICE bool has_final(const Params& p, const Part<Config>& part) {
    if (!Config::kHasRows) return true;
    return p.final.kv != 0 && part.last_segment(p) && part.head.first(p.final.kv_lead);
  }
  static LA_DEVICE StatePlace final_state(const Params& p, const Part<Config>& part) {
    return StatePlace::find<float>(p.final, part.head, p, Config::kHasRows ? 0 : part.segment);
  }

  static LA_DEVICE Piece& piece(i32 ordinal) {
    return *reinterpret_cast<Piece*>(shared() + Config::kDescriptions + ordinal % Config::kPieces * Config::kPieceBytes);
  }
  static LA_DEVICE unsigned char* rows(i32 i) {
    return shared() + (Config::kOwnRows ? Config::kOwnRowsAt + i * Config::kRowBytes : i * Config::kSlot);
  }
  static LA_DEVICE typename Config::InnerTile tile_a(i32 i) { return {rows(i)}; }
  static LA_DEVICE typename Config::ColumnTile tile_x(i32 i) { return {rows(i) + Config::kX}; }
  static LA_DEVICE typename Config::InnerTile tile_b(i32 slot) { return {shared() + slot * Config::kSlot + Config::kB}; }
  static LA_DEVICE typename Config::ColumnTile tile_c(i32 slot) { return {shared() + slot * Config::kSlot + Config::kC}; }
  // Shares of a chunk's (Keys: a part's) sums of B's columns, a line for each warp of the suppliers.
  static LA_DEVICE float* column_parts(i32 i) {
    return reinterpret_cast<float*>(shared() + Config::kColumnParts) + i * Config::kSupplyWarps * Config::kInner;
  }
  static LA_DEVICE typename Config::WeightsTile weights(i32 i) { return {shared() + Config::kWeights + i * Config::kWeightsBytes}; }
  static LA_DEVICE typename Config::ColumnTile result(const Chunk& now) {
    return {(kSlotSent ? shared() + now.slot.at * Config::kSlot : rows(now.rows.at)) + Config::kResult};
  }
  static LA_DEVICE typename Config::ColumnTile stage() { return {shared() + Config::kStage}; }
  // Of each row, a line for each number. Forward: by which the result is multiplied, and with which the sum of C so far is added to
  // it. GradQ: den, s, 1 / |q| of a row as it lies in the tile, A . c, 1 / |q| (stream/score.cuh). stream_key_value: see KeyLength::put.
  static LA_DEVICE float* factors(i32 i, i32 which) {
    return reinterpret_cast<float*>(shared() + Config::kFactors) + (Config::kFactorLines * i + which) * Config::kChunk;
  }
  // GradQ: the weights of a running sum; the mean of v before the chunk in a slot; sums over a row, a line for each
  // state warp; what a row's elements are made with.
  using OnesTile = typename Config::Arith::template Tile<64, 64>;
  static LA_DEVICE OnesTile ones() { return {shared() + Config::kOnes}; }
  static LA_DEVICE float* numbers(i32 at) { return reinterpret_cast<float*>(shared() + at); }
  static LA_DEVICE float* centre(i32 slot) { return numbers(Config::kCentres) + slot * Config::kInner; }
  static LA_DEVICE float* dots(i32 warp) { return numbers(Config::kDots) + warp * Config::kChunk; }
  struct alignas(16) RowFactors { float of_result, of_running, along; };
  static LA_DEVICE RowFactors* row_factors() { return reinterpret_cast<RowFactors*>(shared() + Config::kRowFactors); }
};

}  // namespace la
