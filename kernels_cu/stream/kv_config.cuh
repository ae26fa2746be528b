// dk and dv in one walk backwards: rows x are keys, sources y queries; B and C of the two are the same tiles.
//
//   dv[x] = k~[x] R + sum_y w[x, y] g[y] + a (sum of g),                   w[x, y] = a + b k~[x] . q~[y]   (y >= x)
//   dk~[x] = R v[x] + sum_y u[x, y] b q~[y] - (sum of delta b q~),         u[x, y] = v[x] . g[y] - delta[y]
//   R += b q~ g^T                                                                                         [D, E]
//
// v and delta less the level (chunk/level.cuh), g = dout / den; dk = (dk~ - z (z . dk~)) / |k|, z = k / |k|. Rows of k stay as they are, as
// those of q do in Forward: what enters with k~ is |k| times as large, and divided by it in the end.
#pragma once
#include "stream/config.cuh"

namespace la {

struct GradKV { static constexpr bool kReversed = true, kKeyFeatures = true, kThroughFeatures = false; };

// Width: padded D and E. Rows (k, v) and sources (q, which becomes b q~ in its place, and dout, which becomes g) have rings of slots.
template <class Arith_, class Feature_, int Width>
struct KeyValueConfig {
  using Arith = Arith_;
  using Role = GradKV;
  using Feature = Feature_;
  using Elem = typename Arith::Elem;
  using Acc = float;
  static_assert(kSame<Feature, Identity>, "z must follow from k~");
  static constexpr int kInner = Width, kColumns = Width, kChunk = 64, kSlices = 2;
  static constexpr bool kCausal = true, kGrouped = false, kHasRows = true, kGradQ = false, kOwnRows = true, kKeyValue = true;

  static constexpr int kStateWarps = Width / 16, kScoreWarps = 4, kSupplyWarps = 4;
  static constexpr int kFirstScore = kStateWarps, kFirstSupply = kFirstScore + kScoreWarps, kCourier = kFirstSupply + kSupplyWarps;
  static constexpr int kThreads = 32 * (kCourier + 4), kSupplyThreads = 32 * kSupplyWarps;
  static constexpr bool kCrowded = kThreads == 640;
  static constexpr int kLaunchRegisters = kCrowded ? 96 : 128, kStateRegisters = 168;
  static constexpr int kScoreRegisters = kCrowded ? 72 : 120, kSupplyRegisters = kCrowded ? 48 : 120, kCourierRegisters = 24;
  template <int Registers>
  static LA_DEVICE void share_registers() {
    if constexpr (Registers > kLaunchRegisters) take_registers<Registers>();
    if constexpr (Registers < kLaunchRegisters) give_registers<Registers>();
  }

  using InnerTile = typename Arith::template Tile<Width, kChunk>;
  using ColumnTile = InnerTile;
  using WeightsTile = typename Arith::template Tile<64, kChunk + 8>;  // behind w: ones; behind u: -delta in three parts
  using CopyTile = typename Arith::template Tile<Width, Width>;       // R^T, lines of E

  static constexpr int kTile = InnerTile::bytes(kChunk), kSlot = 2 * kTile, kRowBytes = 2 * kTile, kX = kTile;
  static constexpr int kRowsLoaded = 2 * kTile, kSourcesLoaded = 2 * kTile;
  static constexpr int kWeightsTile = WeightsTile::bytes(kChunk + 8), kWeightsBytes = 2 * kWeightsTile;
  static constexpr int kFactorLines = 2;
  static constexpr int kPieces = 16, kPieceBytes = 240, kBarriers = 40;
  static constexpr int kSlots = Width == 128 ? 2 : 4, kRowSlots = Width == 128 ? 2 : 3;
  static constexpr int kOwnRowsAt = kSlots * kSlot;
  static constexpr int kWeights = kOwnRowsAt + kRowSlots * kRowBytes;
  static constexpr int kCopy = kWeights + 2 * kWeightsBytes;
  static constexpr int kStage = kCopy + CopyTile::bytes(Width);
  static constexpr int kFactors = kStage + kTile;                              // [2][kFactorLines][kChunk]
  static constexpr int kDelta = kFactors + 8 * kFactorLines * kChunk;          // [kSlots][kChunk]
  static constexpr int kLevel = kDelta + 4 * kSlots * kChunk;                  // [Width]
  static constexpr int kDots = kLevel + 4 * Width;                             // [kStateWarps][kChunk]
  static constexpr int kAlong = kDots + 4 * kStateWarps * kChunk;              // [kChunk]
  static constexpr int kFlags = kAlong + 4 * kChunk;                           // [8]
  static constexpr int kDescriptions = kFlags + 32;
  static constexpr int kBarrier = kDescriptions + kPieces * kPieceBytes;
  static constexpr int kSharedBytes = kBarrier + 8 * kBarriers;
  static_assert(kSharedBytes <= 232448, "shared memory of a block");
};

}  // namespace la
