// What is fixed when `ring` and `ring_sums` are compiled, and where their shared memory lies.
#pragma once
#include "chunk/gather.cuh"
#include "chunk/load.cuh"
#include "chunk/work.cuh"
#include "ring/arith.cuh"
#include "ring/rows.cuh"

namespace la {

// Blocks that hide each other's latencies: as many as a multiprocessor (of sm_90) has shared memory for, some of which CUDA takes for
// each, and a thread has 168 registers (with 128, and a third more blocks, it took as long); or 255, for wide rows and for
// exponentials beside 3xTF32.
template <class Arith, class Feature, int Inner>
LA_DEVICE constexpr int ring_blocks(int shared_bytes, int threads) {
  constexpr bool exponential = !kSame<Feature, Identity> && !kSame<Feature, Relu>;
  constexpr int most = Inner > 64 || (exponential && kSame<Arith, RingArith<Tf32x3>>) ? 256 : 384;
  return larger(1, smaller(233472 / (shared_bytes + 1024), most / threads));
}

template <bool First, class A, class B> struct ChooseType { using Type = A; };
template <class A, class B> struct ChooseType<false, A, B> { using Type = B; };
template <bool First, class A, class B> using Choose = typename ChooseType<First, A, B>::Type;

// Inner, Columns, Chunk: as in SweepConfig, but that a block has all columns, and products are those of ring/products.cuh. Tiles lie
// in a ring of kCopies slots.
template <class Arith_, class Role_, class Feature_, int Inner, int Columns, int Chunk, bool Causal>
struct RingConfig {
  using Arith = RingArith<Arith_>;
  using Role = Role_;
  using Feature = Feature_;
  using Elem = typename Arith::Elem;
  using Acc = typename Arith::Acc;
  static constexpr int kInner = Inner, kColumns = Columns, kRow = Columns, kChunk = Chunk, kSlices = 2;
  static constexpr bool kCausal = Causal, kGradQ = kSame<Role, GradQ>, kForward = kSame<Role, Forward>, kGradK = kSame<Role, GradK>;
  static constexpr bool kGrouped = Role::kReversed && Causal;
  static constexpr int kKeyOffset = Feature::kAtZero;
  static constexpr bool kStraight = true, kZeroInRegister = true;

  // All warps are workers and loaders by turns.
  static constexpr int kWorkers = Columns / (8 * kSlices), kLoaders = kWorkers, kFirstLoader = 0;
  static constexpr int kThreads = 32 * kWorkers, kWorkerThreads = kThreads, kLoaderThreads = kThreads;
  static constexpr int kRowBlocks = Chunk / 16;
  static constexpr int kGroups = larger(1, smaller(kRowBlocks, kWorkers / kRowBlocks));
  static constexpr int kWeightsWidth = larger(Chunk, 128 / static_cast<int>(sizeof(Elem)));
  static_assert(Chunk % 16 == 0 && Columns % (8 * kSlices) == 0, "blocks must tile the result");
  static_assert(kWorkers % kRowBlocks == 0 || kRowBlocks % kWorkers == 0, "warps must tile the weights");

  using InnerTile = typename Arith::template Tile<Inner, Chunk>;
  using ColumnTile = Choose<kForward, RawTile<Columns>, RingTile<Columns>>;  // C: in Forward v, as it is
  using WeightsTile = typename Arith::template Tile<kWeightsWidth, Chunk>;
  using VectorLines = InnerTile;  // of warpgroups only
  using SourceLines = WeightsTile;

  template <int Width>
  using LoadedRows = RingRows<Arith, Width, Chunk, kThreads>;

  // Rows of the turn behind are on their way into one slot while those of the other are worked on.
  static constexpr int kCopies = 2;
  static constexpr bool kPrefetch = true;
  static constexpr int kA = 0;
  static constexpr int kB = kA + InnerTile::bytes(Chunk);
  static constexpr int kC = kB + (Causal ? InnerTile::bytes(Chunk) : 0);
  static constexpr int kX = kC + (Causal ? ColumnTile::bytes(Chunk) : 0);
  static constexpr int kTiles = kX + (Role::kThroughFeatures ? ColumnTile::bytes(Chunk) : 0);  // of one slot
  static constexpr int kWeights = kCopies * kTiles, kOnes = kWeights;
  static constexpr int kDescription = kWeights + (Causal ? WeightsTile::bytes(Chunk) : 0);
  static constexpr int kDescriptionBytes = 192;
  static constexpr int kVectors = kDescription + kDescriptionBytes;
  // Vectors, by the names of SweepConfig, for the roles that have them. What the loaders sum is added up before the weights are
  // whole, and sums over rows of the result are taken behind that: they share a place.
  static constexpr int kInnerSum = 0;
  static constexpr int kCentre = kInnerSum + 2 * Inner;
  static constexpr int kRest = kCentre + (kGradQ ? 2 * Inner : 0);
  static constexpr int kLevel = kRest + (kGradQ ? 2 * Inner : 0);
  static constexpr int kColumnSum = kLevel + (Role::kThroughFeatures ? Inner : 0);
  static constexpr int kRowParts = kColumnSum + 2 * Columns;
  static constexpr int kRowNumbers = kRowParts + (Role::kReversed ? 0 : kGroups * Chunk);
  static constexpr int kRowFactors = kRowNumbers + 8 * Chunk;
  static constexpr int kInnerParts = kRowFactors + (Role::kThroughFeatures ? 4 * Chunk : 0);
  static constexpr int kColumnParts = kInnerParts, kDotParts = kInnerParts;
  static constexpr int kPartsLength = !Causal ? 0 : kForward || kGradQ ? kWorkers * Inner : kGradK ? kWorkers * Columns : 0;
  static constexpr int kDotsLength = kWorkers * Chunk * (Role::kThroughFeatures ? kRowSums : kForward ? 1 : 0);
  static constexpr int kSharedBytes = kVectors + static_cast<int>(sizeof(Acc)) * (kInnerParts + larger(kPartsLength, kDotsLength));

  static constexpr int kMinBlocks = ring_blocks<Arith, Feature, Inner>(kSharedBytes, kThreads);
};

// The pre-pass, as StateConfig, but that a block has all of kv. A slot has all of StateConfig's shared memory, so that nothing but
// its address changes from turn to turn.
template <class Arith, class Feature, bool Reversed, int Inner, int Columns, int Chunk>
struct RingSumsConfig : StateConfig<RingArith<Arith>, Feature, Reversed, Inner, Inner, Columns, Chunk, 2> {
  using Base = StateConfig<RingArith<Arith>, Feature, Reversed, Inner, Inner, Columns, Chunk, 2>;
  template <int Width>
  using LoadedRows = RingRows<RingArith<Arith>, Width, Chunk, Base::kThreads>;
  static constexpr int kCopies = 2;
  static constexpr int kSlot = (Base::kSharedBytes + 127) / 128 * 128;
  static constexpr int kSharedBytes = kCopies * kSlot;
  static constexpr int kMinBlocks = ring_blocks<RingArith<Arith>, Feature, Inner>(kSharedBytes, Base::kThreads);
};

}  // namespace la
