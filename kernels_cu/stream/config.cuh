// What is fixed when `stream` is compiled, and where its shared memory lies.
#pragma once
#include "chunk/part.cuh"
#include "chunk/weights.cuh"

namespace la {

// Only the sums over the keys, as `accumulate` takes them: B is phi(k), C is v, and there are no rows.
struct Keys { static constexpr bool kReversed = false, kKeyFeatures = true, kThroughFeatures = false; };

// Inner, Columns: as in SweepConfig. A, B and C of a chunk lie in one of kSlots slots, a ring that suppliers fill.
template <class Arith_, class Role_, class Feature_, int Inner, int Columns, bool Causal>
struct StreamConfig {
  using Arith = Arith_;
  using Role = Role_;
  using Feature = Feature_;
  using Elem = typename Arith::Elem;
  using Acc = float;
  static constexpr int kInner = Inner, kColumns = Columns, kChunk = 64, kSlices = 2;
  static constexpr bool kCausal = Causal, kGrouped = false, kHasRows = !kSame<Role, Keys>;
  static_assert(kHasRows || kCausal, "there must be rows or sources");
  // Rows of A stay as they are where phi is the identity: what the norm divides them by cancels in out, or enters its factor.
  static constexpr bool kPlainRows = kSame<Feature, Identity>;

  // A state warpgroup owns 64 columns; one warpgroup makes the weights, one transforms the rows, and of one a thread sends for them.
  static constexpr int kStateWarps = Columns / 16, kScoreWarps = kHasRows ? 4 : 0, kSupplyWarps = 4;
  static constexpr int kFirstScore = kStateWarps, kFirstSupply = kFirstScore + kScoreWarps, kCourier = kFirstSupply + kSupplyWarps;
  static constexpr int kThreads = 32 * (kCourier + 4), kSupplyThreads = 32 * kSupplyWarps;
  // Warpgroups share the registers of the multiprocessor out anew. (A narrow state has enough of them; but where warps part for
  // other reasons, the compiler has products wait for each other.)
  static constexpr bool kCrowded = kThreads == 640;
  static constexpr int kLaunchRegisters = kCrowded ? 96 : kThreads == 512 ? 128 : 168;
  static constexpr int kStateRegisters = kCrowded ? 160 : kHasRows ? 168 : 136;
  static constexpr int kScoreRegisters = kCrowded ? 72 : 120;
  static constexpr int kSupplyRegisters = kCrowded ? 64 : kHasRows ? 120 : 144;
  static constexpr int kCourierRegisters = 24;
  template <int Registers>
  static LA_DEVICE void share_registers() {
    if constexpr (Registers > kLaunchRegisters) take_registers<Registers>();
    if constexpr (Registers < kLaunchRegisters) give_registers<Registers>();
  }

  // Behind the 64 rows of A, B and the weights stand 8 lines more, which take part in products: of B the sums of its columns so
  // far, in three parts that together have all bits of a float; of A zeros, of the weights ones. So the products of A with
  // the sums, and the sums of C's columns, come with the others. Where there is no B, A has the lines.
  static constexpr int kRows = kChunk + 8;
  using InnerTile = typename Arith::template Tile<Inner, kRows>;
  using ColumnTile = typename Arith::template Tile<Columns, kChunk>;
  using WeightsTile = typename Arith::template Tile<64, kRows>;

  static constexpr int kA = 0;
  static constexpr int kB = kA + (kHasRows ? InnerTile::bytes(kRows) : 0);
  static constexpr int kC = kB + (Causal ? InnerTile::bytes(kRows) : 0);
  static constexpr int kSlot = kC + (Causal ? ColumnTile::bytes(kChunk) : 0);
  static constexpr int kSlotLoaded = 128 * ((kHasRows ? Inner : 0) + (Causal ? Inner + Columns : 0));  // bytes of a chunk's rows
  static constexpr int kWeightsBytes = Causal ? WeightsTile::bytes(kRows) : 0, kStageBytes = kHasRows ? ColumnTile::bytes(kChunk) : 0;
  static constexpr int kNumbers = 4 * kChunk + (Causal ? 2 * kSupplyWarps * Inner : 0);  // kFactors, kColumnParts
  static constexpr int kPieces = 16, kPieceBytes = 208;                 // see Pipe::piece
  static constexpr int kBarriers = 32;
  static constexpr int kBehind = 2 * kWeightsBytes + kStageBytes + 4 * kNumbers + kPieces * kPieceBytes + 8 * kBarriers;
  static constexpr int kMost = 232448;  // shared memory of a block
  static constexpr int kSlots = smaller(6, (kMost - kBehind) / kSlot);
  static constexpr int kWeights = kSlots * kSlot;
  static constexpr int kStage = kWeights + 2 * kWeightsBytes;
  static constexpr int kFactors = kStage + kStageBytes;   // [2][2][kChunk] floats, see Pipe::factors
  static constexpr int kColumnParts = kFactors + 16 * kChunk;  // [2][kSupplyWarps][Inner] floats
  static constexpr int kDescriptions = kFactors + 4 * kNumbers;
  static constexpr int kBarrier = kDescriptions + kPieces * kPieceBytes;
  static constexpr int kSharedBytes = kBarrier + 8 * kBarriers;
  static_assert(kSlots >= 3, "a chunk is worked on, one comes, and one is on its way");
};

}  // namespace la
