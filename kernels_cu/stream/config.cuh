// What is fixed when `stream` is compiled, and where its shared memory lies.
#pragma once
#include "chunk/part.cuh"
#include "chunk/weights.cuh"

namespace la {

// Only the sums over the keys, as `accumulate` takes them: B is phi(k), C is v (less its level), and there are no rows.
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
  static constexpr bool kCausal = Causal, kGrouped = false, kHasRows = !kSame<Role, Keys>, kGradQ = kSame<Role, GradQ>, kKeyValue = false;
  static_assert(kHasRows || kCausal, "there must be rows or sources");
  static constexpr bool kInPlace = kGradQ, kHasStage = kHasRows && !kGradQ;  // the result takes the place of rows, or has a stage
  // Rows of A, and but for a power of two of X in GradQ, stay as they are: dout; or q where phi is the identity: what the norm divides
  // them by cancels in out, or enters its factor.
  static constexpr bool kPlainRows = kGradQ || kSame<Feature, Identity>;

  // A state warpgroup owns 64 columns; one warpgroup makes the weights, one (of Keys two, by turns) transforms the rows, and one has the
  // courier, the sender, and in GradQ those that find the mean of v.
  static constexpr int kStateWarps = Columns / 16, kScoreWarps = kHasRows ? 4 : 0;
  static constexpr int kSupplyGroups = kHasRows ? 1 : 2, kSupplyWarps = 4 * kSupplyGroups;  // groups take turns with chunks
  static constexpr int kFirstScore = kStateWarps, kFirstSupply = kFirstScore + kScoreWarps, kCourier = kFirstSupply + kSupplyWarps;
  static constexpr int kSender = kCourier + 1, kFirstCentre = kCourier + 2, kCentreWarps = kGradQ ? Inner / 64 : 0, kLengthWarps = 0;
  static constexpr int kThreads = 32 * (kCourier + 4), kSupplyThreads = 128;  // of a group
  // Warpgroups share the registers of the multiprocessor out anew. (A narrow state has enough of them; but where warps part for
  // other reasons, the compiler has products wait for each other. In GradQ the courier's warpgroup takes all that are left: Centre has
  // many rows on their way at once.)
  static constexpr bool kCrowded = kThreads == 640;
  static constexpr int kLaunchRegisters = kCrowded ? 96 : kThreads == 512 ? 128 : 168;
  static constexpr int kStateRegisters = !kHasRows ? 136 : kCrowded ? 160 : 168;
  static constexpr int kScoreRegisters = kCrowded ? (kGradQ ? 64 : 72) : 120;
  static constexpr int kSupplyRegisters = !kHasRows ? (kCrowded ? 88 : 144) : kCrowded ? (kGradQ ? 48 : 64) : 120;
  static constexpr int kCourierRegisters = !kGradQ ? 24 : kCrowded ? 48 : 104;
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

  // A slot has A, B and C. In GradQ rows have slots of their own, with A and X, where the result comes to lie; there is room for
  // fewer of these.
  static constexpr bool kOwnRows = kGradQ && Causal, kInSources = false;
  static constexpr int kSources = Causal ? InnerTile::bytes(kRows) + ColumnTile::bytes(kChunk) : 0;
  static constexpr int kX = kHasRows ? InnerTile::bytes(kRows) : 0, kResult = kX;
  static constexpr int kRowBytes = kX + (kGradQ ? ColumnTile::bytes(kChunk) : 0);
  static constexpr int kB = kOwnRows ? 0 : kRowBytes;
  static constexpr int kC = kB + (Causal ? InnerTile::bytes(kRows) : 0);
  static constexpr int kSlot = kSources + (kOwnRows ? 0 : kRowBytes);
  static constexpr int kRowsLoaded = 128 * ((kHasRows ? Inner : 0) + (kGradQ ? Columns : 0));  // bytes of a chunk's rows
  static constexpr int kSourcesLoaded = Causal ? 128 * (Inner + Columns) : 0;
  static constexpr int kWeightsBytes = Causal ? WeightsTile::bytes(kRows) : 0;
  static constexpr int kWeightsTiles = kHasRows ? 2 : 1;  // Keys needs the ones behind them
  static constexpr int kStageBytes = kHasStage ? ColumnTile::bytes(kChunk) : 0;
  static constexpr int kOnesBytes = kGradQ && Causal ? 64 * 128 : 0;  // where y <= x, see StateWork
  static constexpr int kFactorLines = kGradQ ? 5 : 2, kPairs = 2;  // of weights
  // kFactors, kColumnParts, and in GradQ kCentres, kDots, kRowFactors
  static constexpr int kNumbers = 2 * kFactorLines * kChunk + (Causal && !kGradQ ? 8 * Inner : 0) +
                                  (kGradQ ? 6 * Inner + kStateWarps * kChunk + 4 * kChunk : 0);
  static constexpr int kPieces = 16, kPieceBytes = 224;                 // see Pipe::piece
  static constexpr int kBarriers = 48;
  static constexpr int kBehind =
      kWeightsTiles * kWeightsBytes + kStageBytes + kOnesBytes + 4 * kNumbers + kPieces * kPieceBytes + 8 * kBarriers;
  static constexpr int kRoom = 232448 - kBehind;  // of the shared memory of a block
  static constexpr int kRowSlots_ = smaller(3, kRoom / (kRowBytes + kSources));
  static constexpr int kSlots = smaller(6, kOwnRows ? (kRoom - kRowSlots_ * kRowBytes) / kSources : kRoom / kSlot);
  static constexpr int kRowSlots = kOwnRows ? kRowSlots_ : kSlots;
  static constexpr int kOwnRowsAt = kSlots * kSlot;
  static constexpr int kWeights = kOwnRowsAt + (kOwnRows ? kRowSlots * kRowBytes : 0);
  static constexpr int kOnes = kWeights + kWeightsTiles * kWeightsBytes;
  static constexpr int kStage = kOnes + kOnesBytes;
  static constexpr int kFactors = kStage + kStageBytes;                            // [2][kFactorLines][kChunk], see Pipe::factors
  static constexpr int kColumnParts = kFactors + 8 * kFactorLines * kChunk;        // [2 / kSupplyGroups][kSupplyWarps][Inner]
  static constexpr int kLevel = kFactors, kFlags = kLevel + 2 * Columns;           // [Columns], [kSupplyWarps]: Keys makes no factors
  static constexpr int kCentres = kColumnParts + (Causal && !kGradQ ? 32 * Inner : 0);  // [6][Inner]
  static constexpr int kDots = kCentres + (kGradQ ? 24 * Inner : 0);               // [kStateWarps][kChunk]
  static constexpr int kRowFactors = kDots + (kGradQ ? 4 * kStateWarps * kChunk : 0);  // [kChunk] of 4
  static constexpr int kDescriptions = kFactors + 4 * kNumbers;
  static constexpr int kBarrier = kDescriptions + kPieces * kPieceBytes;
  static constexpr int kSharedBytes = kBarrier + 8 * kBarriers;
  static_assert(kSlots >= 3 && kRowSlots >= 2, "a chunk is worked on, one comes, and one is on its way");
};

}  // namespace la
