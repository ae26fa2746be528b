// Everything that is fixed when a kernel is compiled, and where its shared memory lies.
#pragma once
#include "chunk/rows.cuh"

namespace la {

// The operator and its three gradients are one sum over sources y for each row x,
//
//     out[x] = sum_y w[x, y] C[y],    w[x, y] = w0 + w1 (A[x] . B[y]) (less an offset of the row or source),
//
// with y <= x, or y >= x where `kReversed`. A role says what A, B and C are; chunk/weights.cuh, what w is.
//
//              A         B         C         x        y
//   Forward    phi(q)    phi(k)    v         query    key
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

// Halves are there to have 16 warps on a multiprocessor, with 128 registers a thread, instead of 8 with 255.
LA_DEVICE constexpr int min_blocks(int threads, int halves) { return halves == 2 && threads < 512 ? 512 / threads : 1; }

// Inner: padded width of the axis that A and B share. Columns: the result's columns in one block; Row: the whole padded row
// they are cut from. Chunk: rows worked on at a time. Slices: the 8-column slices of the result that a warp owns. Halves: the
// warps that share them, each with its part of the state's inner axis and of the chunk's rows.
template <class Arith_, class Role_, class Feature_, int Inner, int Columns, int Row, int Chunk, int Slices, int Halves,
          bool Causal>
struct SweepConfig {
  using Arith = Arith_;
  using Role = Role_;
  using Feature = Feature_;
  using Elem = typename Arith::Elem;
  using Acc = typename Arith::Acc;
  static constexpr int kInner = Inner, kColumns = Columns, kRow = Row, kChunk = Chunk, kSlices = Slices;
  static constexpr bool kCausal = Causal;
  static constexpr int kHalves = Halves;

  static constexpr int kColumnWarps = Columns / (8 * Slices);
  static constexpr int kWarps = kColumnWarps * Halves;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kMinBlocks = min_blocks(kThreads, Halves);
  static_assert(Halves == 1 || (Halves == 2 && Chunk % 32 == 0 && Inner % 64 == 0), "halves must be whole");
  static constexpr int kRowBlocks = Chunk / 16;                             // 16-row blocks of a chunk
  static constexpr int kGroups = larger(1, smaller(kRowBlocks, kWarps / kRowBlocks));  // warps that share a row block
  static constexpr int kWeightsWidth = larger(Chunk, 128 / static_cast<int>(sizeof(Elem)));
  static_assert(Chunk % 16 == 0 && Columns % (8 * Slices) == 0 && Columns <= Row, "blocks must tile the result");
  static_assert(kWarps >= 1 && (kWarps % kRowBlocks == 0 || kRowBlocks % kWarps == 0), "warps must tile the weights");

  using InnerTile = SharedTile<Elem, Inner>;
  using ColumnTile = SharedTile<Elem, Columns>;
  using WeightsTile = SharedTile<Elem, kWeightsWidth>;

  // Shared memory: tiles first, then vectors of accumulators.
  static constexpr int kA = 0;
  static constexpr int kB = kA + InnerTile::bytes(Chunk);
  static constexpr int kC = kB + (Causal ? InnerTile::bytes(Chunk) : 0);
  static constexpr int kX = kC + (Causal ? ColumnTile::bytes(Chunk) : 0);
  static constexpr int kStage = kX + (Role::kThroughFeatures ? ColumnTile::bytes(Chunk) : 0);
  static constexpr int kWeights = kStage + ColumnTile::bytes(Chunk);
  // Halves: the rows of A S that belong to the other half's warp.
  static constexpr int kExchange = kWeights + (Causal ? WeightsTile::bytes(Chunk) : 0);
  static constexpr int kAddresses =  // of the block's heads
      kExchange + (Halves - 1) * Chunk * Columns * static_cast<int>(sizeof(Acc));
  static constexpr int kVectors = kAddresses + 64;
  // in elements of Acc, from kVectors on
  static constexpr int kInnerSum = 0;                          // [2][Inner]  sums of B
  static constexpr int kCentre = kInnerSum + 2 * Inner;        // [2][Inner]  GradQ: mean of v so far
  static constexpr int kRest = kCentre + 2 * Inner;            // [2][Inner]  GradQ: sum of v less count times the mean
  static constexpr int kColumnSum = kRest + 2 * Inner;         // [2][Columns] weighted sums of C
  static constexpr int kInnerParts = kColumnSum + 2 * Columns; // [kWarps][Inner]
  static constexpr int kColumnParts = kInnerParts + kWarps * Inner;      // [kWarps][Columns]
  static constexpr int kRowParts = kColumnParts + kWarps * Columns;      // [kGroups][Chunk] sums of weights
  static constexpr int kRowFirst = kRowParts + kGroups * Chunk;          // [Chunk] see chunk/load.cuh
  static constexpr int kRowSecond = kRowFirst + Chunk;                   // [Chunk]
  static constexpr int kRowInverse = kRowSecond + Chunk;                 // [Chunk] 1 / den
  static constexpr int kRowNorm = kRowInverse + Chunk;                   // [Chunk] 1 / |x|
  static constexpr int kDotParts = kRowNorm + Chunk;                     // [kColumnWarps][Chunk][3]; Forward: [kWarps][Chunk]
  static constexpr int kRowDots = kDotParts + 3 * kWarps * Chunk;        // [Chunk][2]
  static constexpr int kSharedBytes = kVectors + static_cast<int>(sizeof(Acc)) * (kRowDots + 2 * Chunk);
};

// The pre-pass: kv[Inner, Columns] += B^T C over a piece of the sequence, from keys or (Reversed) from queries.
template <class Arith_, class Feature_, bool Reversed, int Inner, int Columns, int Chunk, int Slices, int Halves>
struct StateConfig {
  using Arith = Arith_;
  using Feature = Feature_;
  using Elem = typename Arith::Elem;
  using Acc = typename Arith::Acc;
  static constexpr bool kReversed = Reversed;
  static constexpr int kInner = Inner, kColumns = Columns, kChunk = Chunk, kSlices = Slices;
  static constexpr int kHalves = Halves;
  static constexpr int kColumnWarps = Columns / (8 * Slices);
  static constexpr int kWarps = kColumnWarps * Halves;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kMinBlocks = min_blocks(kThreads, Halves);

  using InnerTile = SharedTile<Elem, Inner>;
  using ColumnTile = SharedTile<Elem, Columns>;
  static constexpr int kB = 0;
  static constexpr int kC = kB + InnerTile::bytes(Chunk);
  static constexpr int kVectors = kC + ColumnTile::bytes(Chunk);
  static constexpr int kInnerParts = 0;
  static constexpr int kColumnParts = kInnerParts + kWarps * Inner;
  static constexpr int kCounts = kColumnParts + kWarps * Columns;  // [kWarps]
  static constexpr int kSharedBytes = kVectors + static_cast<int>(sizeof(Acc)) * (kCounts + kWarps);
};

}  // namespace la
