// dk and dv in one walk backwards: rows x are keys, sources y queries; B and C of the two are the same tiles.
//
//   dv[x] = k~[x] R + sum_y w[x, y] g[y] + a (sum of g),                   w[x, y] = a + b k~[x] . q~[y]   (y >= x)
//   dk~[x] = R v[x] + sum_y u[x, y] b q~[y] - (sum of delta b q~),         u[x, y] = v[x] . g[y] - delta[y]
//   R += b q~ g^T                                                                                         [D, E]
//
// v and delta less the level (chunk/level.cuh), g = dout / den; dk = (dk~ - z (z . dk~)) / |k|, z = k / |k|.
//
// Rows of q and k stay as they are, but for a power of two if they are long or short (stream/packets.cuh). What enters with k~ is |k|
// times as large, and divided by it in the end. b / |q| moves from b q~ to g and delta, which no longer are those above; then w is
// a / b |q| + k~ . q, and the sum of g that of a / b |q| g.
//
// In Queries there are no rows: only R and both sums, over each piece, as `accumulate` takes them. Where nothing is masked these are
// the sums over all queries, with which each part begins, and there are no sources.
#pragma once
#include "stream/config.cuh"

namespace la {

struct GradKV { static constexpr bool kReversed = true, kKeyFeatures = true, kThroughFeatures = false; };
struct Queries { static constexpr bool kReversed = true, kKeyFeatures = true, kThroughFeatures = false; };

// Width: padded D and E. Rows (k, v) and sources (q, and dout, which becomes g in its place) have rings of slots; rows alone have that
// of sources.
template <class Arith_, class Role_, class Feature_, int Width, bool Causal>
struct KeyValueConfig {
  using Arith = Arith_;
  using Role = Role_;
  using Feature = Feature_;
  using Elem = typename Arith::Elem;
  using Acc = float;
  static_assert(kSame<Feature, Identity>, "z must follow from k~");
  static constexpr int kInner = Width, kColumns = Width, kChunk = 64, kSlices = 2;
  static constexpr bool kCausal = Causal, kGrouped = false, kGradQ = false, kKeyValue = true;
  static constexpr bool kHasRows = kSame<Role, GradKV>, kOwnRows = kHasRows && Causal;
  static_assert(kHasRows || kCausal, "there must be rows or sources");
  // dk takes the place of k, dv that of v; or of q and g, where there is room for few rows: these need not wait then until it is sent.
  static constexpr bool kInPlace = kHasRows, kHasStage = false, kInSources = kOwnRows && Width == 128;

  static constexpr int kStateWarps = Width / 16, kScoreWarps = kOwnRows ? 4 : 0;
  static constexpr int kSupplyGroups = kHasRows ? 1 : 2, kSupplyWarps = 4 * kSupplyGroups;  // groups take turns with chunks
  static constexpr int kFirstScore = kStateWarps, kFirstSupply = kFirstScore + kScoreWarps, kCourier = kFirstSupply + kSupplyWarps;
  static constexpr int kSender = kCourier + 1, kFirstLength = kCourier + 2, kLengthWarps = kHasRows ? 2 : 0, kCentreWarps = 0;
  static constexpr int kThreads = 32 * (kCourier + 4), kSupplyThreads = 128;  // of a group
  static constexpr bool kCrowded = kThreads == 640;
  static constexpr int kLaunchRegisters = kCrowded ? 96 : kThreads == 512 ? 128 : 168, kStateRegisters = kHasRows ? 168 : 136;
  static constexpr int kScoreRegisters = kCrowded ? 64 : 120, kSupplyRegisters = kHasRows ? (kCrowded ? 40 : 120) : kCrowded ? 88 : 144;
  static constexpr int kCourierRegisters = !kHasRows ? 24 : kCrowded ? 40 : 56;
  template <int Registers>
  static LA_DEVICE void share_registers() {
    if constexpr (Registers > kLaunchRegisters) take_registers<Registers>();
    if constexpr (Registers < kLaunchRegisters) give_registers<Registers>();
  }

  using InnerTile = typename Arith::template Tile<Width, kChunk>;
  using ColumnTile = InnerTile;
  using WeightsTile = typename Arith::template Tile<64, kChunk + 8>;  // behind w: a / b |q|, behind u: -delta; in two parts, by turns
  using LinesTile = typename Arith::template Tile<64, 8>;             // of Queries, the same lines, two tiles for each slot
  using CopyTile = typename Arith::template Tile<Width, Width>;       // R^T, lines of E

  static constexpr int kTile = InnerTile::bytes(kChunk), kSlot = 2 * kTile, kRowBytes = kOwnRows ? 2 * kTile : 0, kX = kTile, kResult = 0;
  static constexpr int kRowsLoaded = kHasRows ? 2 * kTile : 0, kSourcesLoaded = Causal ? 2 * kTile : 0;
  static constexpr int kSlots = Width == 64 || !kHasRows ? 6 : Causal ? 3 : 5;
  static constexpr int kRowSlots = !kHasRows ? 1 : !Causal ? kSlots : Width == 128 ? 2 : 4;
  static constexpr int kLinesTile = LinesTile::bytes(8), kWeightsTile = WeightsTile::bytes(kChunk + 8);
  static constexpr int kWeightsBytes = kOwnRows ? 2 * kWeightsTile : kHasRows ? 0 : 2 * kSlots * kLinesTile;
  static constexpr int kFactorLines = 3, kPairs = 1;  // see KeyLength
  static constexpr int kPieces = 16, kPieceBytes = 240, kBarriers = 48;
  static constexpr int kOwnRowsAt = kSlots * kSlot;
  static constexpr int kWeights = kOwnRowsAt + kRowSlots * kRowBytes;
  static constexpr int kCopy = kWeights + kWeightsBytes;
  static constexpr int kFactors = kCopy + (kHasRows ? CopyTile::bytes(Width) : 0);  // [kRowSlots][kFactorLines][kChunk]
  static constexpr int kDelta = kFactors + 4 * kRowSlots * kFactorLines * kChunk;  // [kSlots][kChunk]
  static constexpr int kOffset = kDelta + 4 * kSlots * kChunk;                 // [kSlots][kChunk]
  static constexpr int kLevel = kOffset + 4 * kSlots * kChunk;                 // [Width]
  static constexpr int kDots = kLevel + 2 * Width;                             // [kStateWarps][kChunk]
  static constexpr int kAlong = kDots + 4 * kStateWarps * kChunk;              // [kChunk]
  static constexpr int kFlags = kAlong + 4 * kChunk;                           // [kSupplyWarps]
  static constexpr int kDescriptions = kFlags + 4 * kSupplyWarps;
  static constexpr int kBarrier = kDescriptions + kPieces * kPieceBytes;
  static constexpr int kSharedBytes = kBarrier + 8 * kBarriers;
  static_assert(kSharedBytes <= 232448, "shared memory of a block");
};

}  // namespace la
