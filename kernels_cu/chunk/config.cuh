// Everything that is fixed when a kernel is compiled, and where its shared memory lies.
#pragma once
#include "chunk/streamed.cuh"

namespace la {

// The operator and its three gradients are one sum over sources y for each row x,
//
//     out[x] = sum_y w[x, y] C[y],    w[x, y] = w0 + w1 (A[x] . B[y]) (less an offset of the row or source),
//
// with y <= x, or y >= x where `kReversed`. A role says what A, B and C are (v in GradQ and GradK less a constant,
// chunk/level.cuh); chunk/weights.cuh, what w is.
//
//              A         B         C         x        y
//   Forward    b phi(q)  phi(k)    v         query    key
//   GradQ      g         v         phi(k)    query    key      then through phi and the norm of q
//   GradV      phi(k)    phi(q)    g         key      query
//   GradK      v         g         phi(q)    key      query    then through phi and the norm of k
struct Forward { static constexpr bool kReversed = false, kKeyFeatures = true, kThroughFeatures = false; };
struct GradQ { static constexpr bool kReversed = false, kKeyFeatures = false, kThroughFeatures = true; };
struct GradV { static constexpr bool kReversed = true, kKeyFeatures = true, kThroughFeatures = false; };
struct GradK { static constexpr bool kReversed = true, kKeyFeatures = false, kThroughFeatures = true; };
// kKeyFeatures: the inner axis is D and the result's axis is E; otherwise the other way round.

template <class A, class B> constexpr bool kSame = false;
template <class A> constexpr bool kSame<A, A> = true;

LA_DEVICE constexpr int larger(int x, int y) { return x > y ? x : y; }
LA_DEVICE constexpr int smaller(int x, int y) { return x < y ? x : y; }

// Inner: padded width of the axis that A and B share. Columns: the result's columns in one block; Row: the whole padded row
// they are cut from. Chunk: rows worked on at a time. Slices: the 8-column slices of the result that a worker owns.
template <class Arith_, class Role_, class Feature_, int Inner, int Columns, int Row, int Chunk, int Slices, int Loaders,
          bool Causal>
struct SweepConfig {
  using Arith = Arith_;
  using Role = Role_;
  using Feature = Feature_;
  using Elem = typename Arith::Elem;
  using Acc = typename Arith::Acc;
  static constexpr int kInner = Inner, kColumns = Columns, kRow = Row, kChunk = Chunk, kSlices = Slices;
  static constexpr bool kCausal = Causal, kGradQ = kSame<Role, GradQ>;
  // Gradients of k and v are summed over the heads that share them. A result that waits for other heads leaves warpgroups too few
  // registers: they have one head, and the plan takes another arithmetic where heads are shared.
  static constexpr bool kGrouped = Role::kReversed && Causal && !Arith::kWarpgroups;
  // GradQ works on k~ less this number. The rows of k~ may be a small part, which tells them apart, on top of phi(0), and it is
  // this part that rounding must spare.
  static constexpr int kKeyOffset = Feature::kAtZero;

  // Two kinds of warps: workers hold the state and make the result, loaders bring the rows of the next chunk. A multiprocessor
  // has room for 12 warps with 168 registers a thread or 16 with 128.
  static constexpr int kWorkers = Columns / (8 * Slices);
  static constexpr int kLoaders = Loaders;
  static constexpr int kWorkerThreads = 32 * kWorkers, kLoaderThreads = 32 * kLoaders;
  static constexpr int kThreads = kWorkerThreads + kLoaderThreads, kFirstLoader = kWorkerThreads;
  static constexpr bool kStraight = false;  // results go by a stage to their array
  static constexpr bool kZeroInRegister = sizeof(Elem) == 2;  // see Block::shared
  // Where rows are wide, or a warpgroup has a wide state, one block has the multiprocessor and its registers to itself.
  static constexpr bool kAlone = larger(Inner, Row) * static_cast<int>(sizeof(Elem)) >= 512 || sizeof(Acc) == 8 ||
                                 (Arith::kWarpgroups && Inner == 128);
  static constexpr int kMinBlocks = kAlone ? 1 : larger(1, (2 * kLoaders <= kWorkers ? 384 : 512) / kThreads);
  static constexpr int kRowBlocks = Chunk / 16;                             // 16-row blocks of a chunk
  static constexpr int kGroups = larger(1, smaller(kRowBlocks, kWorkers / kRowBlocks));  // warps that share a row block
  static constexpr int kWeightsWidth = larger(Chunk, 128 / static_cast<int>(sizeof(Elem)));
  // Warpgroups share their registers out anew: workers hold the state, the result and an operand, loaders rows that wait.
  static constexpr int kLaunchRegisters = 65536 / (kThreads * kMinBlocks) / 8 * 8;
  static constexpr bool kShares = Arith::kWarpgroups && kLaunchRegisters < 200;
  static constexpr int kWorkerRegisters =
      Loaders < kWorkers ? 168 : Inner == 64 ? 144 : 152;
  static constexpr int kLoaderRegisters = (kLaunchRegisters * kThreads / 32 - kWorkerRegisters * kWorkers) / Loaders / 8 * 8;
  template <int Registers>
  static LA_DEVICE void share_registers() {
    if constexpr (!kShares) return;
    else if constexpr (Registers > kLaunchRegisters) take_registers<Registers>();
    else give_registers<Registers>();
  }
  static_assert(Chunk % 16 == 0 && Columns % (8 * Slices) == 0 && Columns <= Row, "blocks must tile the result");
  static_assert(kWorkers >= 1 && (kWorkers % kRowBlocks == 0 || kRowBlocks % kWorkers == 0), "warps must tile the weights");

  // Shared memory. The tiles of a chunk and its result exist twice: the next chunk is put down while this one is worked on, and
  // the result of the one before leaves. In float64 there is room for one copy of the tiles, and no registers for rows that
  // wait: loaders and workers take turns.
  static constexpr int kCopies = sizeof(Acc) == 8 ? 1 : 2;
  static constexpr bool kPrefetch = kCopies == 2;

  // Of wide rows in float64 a lane has no registers for all that it brings where it masks, not even of one array.
  static constexpr bool kStreamed = !kPrefetch && Causal && larger(Inner, Row) > 128;
  template <int Width>
  using LoadedRows = typename WaitingRows<kStreamed>::template Type<Arith, Width, Chunk, kLoaderThreads, kFirstLoader>;

  using InnerTile = typename Arith::template Tile<Inner, Chunk>;
  using ColumnTile = typename Arith::template Tile<Columns, Chunk>;
  using WeightsTile = typename Arith::template Tile<kWeightsWidth, Chunk>;
  using VectorLines = typename Arith::template Tile<Inner, 8>;
  using SourceLines = typename Arith::template Tile<kWeightsWidth, 8>;

  static constexpr int kA = 0;
  static constexpr int kB = kA + InnerTile::bytes(Chunk);
  static constexpr int kC = kB + (Causal ? InnerTile::bytes(Chunk) : 0);
  static constexpr int kX = kC + (Causal ? ColumnTile::bytes(Chunk) : 0);
  static constexpr int kTiles = kX + (Role::kThroughFeatures ? ColumnTile::bytes(Chunk) : 0);  // of one copy
  static_assert(kTiles % InnerTile::bytes(1) == 0, "tiles must begin at a multiple of their rows' length");
  static constexpr int kStage = kCopies * kTiles;
  static constexpr int kWeights = kStage + 2 * ColumnTile::bytes(Chunk);
  static constexpr int kOnes = kWeights + (Causal ? WeightsTile::bytes(Chunk) : 0);  // of GradQ, see Products; then of RunningSums
  static constexpr int kVectorLines = kOnes + (Causal && Arith::kWarpgroups && kGradQ ? WeightsTile::bytes(Chunk) : 0);
  static constexpr int kSourceLines = kVectorLines + (Arith::kWarpgroups ? VectorLines::bytes(8) : 0);
  static constexpr int kDescription = kSourceLines + (Arith::kWarpgroups ? 2 * SourceLines::bytes(8) : 0);  // see Block
  static constexpr int kDescriptionBytes = 192;
  static constexpr int kVectors = kDescription + kDescriptionBytes;
  // Vectors of accumulators, in elements from kVectors on.
  static constexpr int kInnerSum = 0;                          // [2][Inner]   sums of B
  static constexpr int kCentre = kInnerSum + 2 * Inner;        // [2][Inner]   GradQ: mean of v so far
  static constexpr int kRest = kCentre + 2 * Inner;            // [2][Inner]   GradQ: sum of v less count times the mean
  static constexpr int kColumnSum = kRest + 2 * Inner;         // [2][Columns] weighted sums of C
  static constexpr int kInnerParts = kColumnSum + 2 * Columns;           // [kLoaders][Inner]
  static constexpr int kColumnParts = kInnerParts + kLoaders * Inner;    // [kLoaders][Columns]
  // [Inner] GradQ, GradK: the level of v, in a place that the role does not use.
  static constexpr int kLevel = kSame<Role, GradQ> ? kColumnParts : kCentre;
  static constexpr int kRowParts = kColumnParts + larger(kLoaders * Columns, kSame<Role, GradQ> ? Inner : 0);  // [kGroups][Chunk]
  static constexpr int kRowNumbers = kRowParts + kGroups * Chunk;       // [2][4][Chunk] see RowNumber
  static constexpr int kDotParts = kRowNumbers + 8 * Chunk;              // [kWorkers][Chunk][kRowSums]; Forward: [kWorkers][Chunk]
  static constexpr int kRowFactors = kDotParts + kRowSums * kWorkers * Chunk;      // [Chunk] RowFactors; see Epilogue
  static constexpr int kSharedBytes = kVectors + static_cast<int>(sizeof(Acc)) * (kRowFactors + 4 * Chunk);
};

// Barriers: all threads of a block meet once a turn, and again behind it if there is one copy of the tiles; workers, and
// loaders, among themselves in between.
enum Barrier { kTurn = 1, kAmongWorkers = 2, kAmongLoaders = 3, kDone = 4 };

// Numbers that belong to the rows of a chunk, from load.cuh:
//   kFirst    Forward: b q~ . k_sum;  GradQ: g . c;  GradK: delta of the source
//   kSecond   GradQ: g . (v_sum - count c)
//   kInverse  GradQ: 1 / den;  GradV, GradK: that of the source
//   kNorm     GradQ, GradK: 1 / |x|
enum RowNumber { kFirst, kSecond, kInverse, kNorm };

// The pre-pass: kv[Inner, Columns] += B^T C over a piece of the sequence, from keys or (Reversed) from queries. Row: the whole
// padded width of the features, which Inner may be a part of.
template <class Arith_, class Feature_, bool Reversed, int Inner, int Row, int Columns, int Chunk, int Slices>
struct StateConfig {
  using Arith = Arith_;
  using Feature = Feature_;
  using Elem = typename Arith::Elem;
  using Acc = typename Arith::Acc;
  static constexpr bool kReversed = Reversed;
  static constexpr int kInner = Inner, kRow = Row, kColumns = Columns, kChunk = Chunk, kSlices = Slices;
  static constexpr int kWarps = Columns / (8 * Slices);
  static constexpr int kThreads = 32 * kWarps;
  template <int Width>
  using LoadedRows = Rows<Arith, Width, Chunk, kThreads>;

  using InnerTile = typename Arith::template Tile<Inner, Chunk>;
  using ColumnTile = typename Arith::template Tile<Columns, Chunk>;
  static constexpr int kB = 0;
  static constexpr int kC = kB + InnerTile::bytes(Chunk);
  static constexpr int kVectors = kC + ColumnTile::bytes(Chunk);
  static constexpr int kInnerParts = 0;
  static constexpr int kColumnParts = kInnerParts + kWarps * Inner;
  static constexpr int kLevel = kColumnParts;  // [Columns], until the sums take the place
  static constexpr int kCounts = kColumnParts + kWarps * Columns;  // [kWarps]
  static constexpr int kSharedBytes = kVectors + static_cast<int>(sizeof(Acc)) * (kCounts + kWarps);
};

}  // namespace la
