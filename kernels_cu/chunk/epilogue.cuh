// From accumulators to the result.
//   Forward  out = num / den, den = a count + b q~ . k_sum + sum of the chunk's weights
//   GradQ    Y = the sum over g . (v - c) k~ so far, K = the sum of k~ so far. delta' = delta - g . c comes from the same Y,
//            so that their errors cancel as they do themselves:
//                delta' = (a s + b q~ . Y) / den,    dq~ = b (Y - delta' K),    s = sum of weights + g . (v_sum - count c)
//            With k~ less an offset o (Config::kKeyOffset), Y is short of o s and K of o n, n being the number of keys.
//   GradV    as it stands
//   GradK    dk~ as it stands
// and then, for GradQ and GradK, through phi and the norm: with z = x / |x| and h = phi'(z) d~,
//                dx = (h - z (z . h)) / |x|.
// A few sums over a row are all that this needs: with r = z phi'(z), those of r Y, q~ Y, r K, q~ and r. Where the row's columns
// are split over several blocks, a first launch (kDots) leaves each block's share in `dots`, and a second (kApply) adds
// the shares up and applies them.
#pragma once
#include "chunk/weights.cuh"

namespace la {

template <class Config>
struct Epilogue {
  using Arith = typename Config::Arith;
  using Role = typename Config::Role;
  using Feature = typename Config::Feature;
  using Acc = typename Config::Acc;
  using P = Products<Config>;
  static constexpr bool kGradQ = kSame<Role, GradQ>;
  static constexpr int kUsed = !kGradQ ? 1 : Config::kKeyOffset == 0 ? 3 : kRowSums;  // sums over a row

  const Params& p;
  const Block<Config>& block;
  i32 step;
  int copy;
  Span span;

  LA_DEVICE Epilogue(const Params& params, const Block<Config>& where, i32 at)
      : p(params), block(where), step(at), copy(at & 1), span(where.rows_at(at)) {}

  // What `apply` needs of a row: dx = (phi' (result - delta running + offset) - z along) inverse_norm, up to factors.
  struct alignas(2 * sizeof(Acc)) RowFactors { Acc delta, along, offset, inverse_norm; };
  LA_DEVICE RowFactors* row_factors() const { return reinterpret_cast<RowFactors*>(block.vector(Config::kRowFactors)); }

  // What a warp can do with its own columns: the whole of it, or its share of the sums over rows.
  LA_DEVICE void begin(typename P::Result& result, typename P::Result& running) {
    if constexpr (kSame<Role, Forward>) normalise(result);
    if constexpr (Role::kThroughFeatures) {
      if (p.phase != kApply) row_dots(result, running);
    } else {
      leave(result);
    }
  }

  // The rest, behind a barrier, where sums over rows are needed.
  LA_DEVICE void end(typename P::Result& result, typename P::Result& running) {
    if constexpr (Role::kThroughFeatures) {
      find_row_factors();
      sync_named(kAmongWorkers, Config::kWorkerThreads);
      if (p.phase == kDots) return;
      apply(result, running);
      leave(result);
    }
  }

  LA_DEVICE void leave(typename P::Result& result) const {
    if constexpr (Config::kStraight) {
      write(result);
    } else {
      P::store(block.stage(copy), result);
    }
  }

  // From the registers to global memory, in float32: eight lanes have neighbouring columns, the 32 bytes that memory moves at a time.
  LA_DEVICE void write(typename P::Result& result) const {
    if (p.dst.data == 0) return;
    if (span.whole(Config::kChunk) && width() >= Config::kColumns) {
      write(result, [](int, int) { return true; });
    } else {
      write(result, [&](int row, int column) { return span.holds(row) && column < width(); });
    }
  }
  template <class Exists>
  LA_DEVICE void write(typename P::Result& result, Exists exists) const {
    const i64 first = (span.first + P::row(0, 0)) * p.dst.row + block.column0 + P::column(0);
    float* to = reinterpret_cast<float*>(block.places.dst) + first;
#pragma unroll
    for (int set = 0; set < P::kSets; ++set) {
#pragma unroll
      for (int i = 0; i < P::kRows; ++i) {
#pragma unroll
        for (int c = 0; c < P::kColumns; ++c) {
          if (exists(P::row(set, i), P::column(c))) store_number(to + (P::column(c) - P::column(0)), P::at(result, set, i, c));
        }
        to += (P::row(set + (i + 1) / P::kRows, (i + 1) % P::kRows) - P::row(set, i)) * p.dst.row;
      }
    }
  }

  // Columns of the result from the block's first one on.
  LA_DEVICE int width() const { return (Role::kKeyFeatures ? p.e : p.d) - block.column0; }

  // Each warp finds the factors of all rows for itself, a row or two a lane: waiting for another would take longer.
  LA_DEVICE void normalise(typename P::Result& result) {
    const Acc before = scalar_a<Acc>(p) * block.count_before(step);
    Acc* factors = block.vector(Config::kDotParts) + warp_id() * Config::kChunk;
    for (int row = lane_id(); row < Config::kChunk; row += 32) {
      const Acc den = before + block.numbers(copy, kFirst)[row] + sum_of_weights(block, row);
      if (block.split == 0 && warp_id() == 0 && block.places.den != 0 && span.holds(row)) {
        store_number(block.places.den, span.first + row, den);
      }
      factors[row] = inverse_den(p, den);
    }
    sync_warp();
#pragma unroll
    for (int set = 0; set < P::kSets; ++set) {
#pragma unroll
      for (int i = 0; i < P::kRows; ++i) {
        const Acc factor = factors[P::row(set, i)];
#pragma unroll
        for (int c = 0; c < P::kColumns; ++c) P::at(result, set, i, c) *= factor;
      }
    }
  }

  // z, phi(z), phi'(z) and z phi'(z) at one place. Outside the array they multiply zeros.
  struct Mapped { Acc z, value, slope, radial; };
  static LA_DEVICE Mapped mapped(Acc z) {
    const Acc slope = Feature::derivative(z);
    return {z, Arith::round(Feature::value(z)), slope, z * slope};
  }

  LA_DEVICE void apply(typename P::Result& result, typename P::Result& running) {
#pragma unroll
    for (int set = 0; set < P::kSets; ++set) {
      Acc z[P::kRows][P::kColumns];
      P::read(z, block.tile_x(copy), set);
#pragma unroll
      for (int i = 0; i < P::kRows; ++i) {
        const RowFactors row = row_factors()[P::row(set, i)];
#pragma unroll
        for (int c = 0; c < P::kColumns; ++c) {
          Acc& x = P::at(result, set, i, c);
          const Mapped f = mapped(z[i][c]);
          if constexpr (kGradQ) x = scalar_b<Acc>(p) * (x - row.delta * P::at(running, set, i, c) + row.offset);
          x = p.unit_norm ? (f.slope * x - f.z * row.along) * row.inverse_norm : f.slope * x;
        }
      }
    }
  }

  LA_DEVICE void row_dots(typename P::Result& result, typename P::Result& running) {
    Acc* parts = block.vector(Config::kDotParts) + warp_id() * Config::kChunk * kRowSums;
#pragma unroll
    for (int set = 0; set < P::kSets; ++set) {
      Acc z[P::kRows][P::kColumns], dots[kRowSums][P::kRows] = {};
      P::read(z, block.tile_x(copy), set);
#pragma unroll
      for (int i = 0; i < P::kRows; ++i) {
#pragma unroll
        for (int c = 0; c < P::kColumns; ++c) {
          const Mapped f = mapped(z[i][c]);
          const Acc y = P::at(result, set, i, c);
          dots[0][i] = ptx::fma(f.radial, y, dots[0][i]);
          if constexpr (kGradQ) {
            dots[1][i] = ptx::fma(f.value, y, dots[1][i]);
            dots[2][i] = ptx::fma(f.radial, P::at(running, set, i, c), dots[2][i]);
            if (Config::kKeyOffset != 0 && block.column0 + P::column(c) < p.d) {
              dots[3][i] += f.value;
              dots[4][i] += f.radial;
            }
          }
        }
      }
#pragma unroll
      for (int x = 0; x < kUsed; ++x) {
        const Acc sum = P::sum_columns_of(dots[x]);
        if (P::holds_sum()) parts[P::row(set, P::summed_row()) * kRowSums + x] = sum;
      }
    }
  }

  // delta', z . h and what the offset adds to Y - delta' K, for each row, from its sums.
  LA_DEVICE void find_row_factors() {
    for (int row = thread(); row < Config::kChunk; row += Config::kWorkerThreads) {
      const bool exists = span.holds(row);
      const i64 at = block.head.offset(p.dots.lead) + (span.first + row) * p.splits * kRowSums;
      Acc dots[kRowSums] = {};
#pragma unroll
      for (int i = 0; i < kUsed; ++i) {
        if (p.phase == kApply) {
          for (int split = 0; exists && split < p.splits; ++split) dots[i] += load_number<Acc>(p.dots.data, at + split * kRowSums + i);
        } else {
#pragma unroll
          for (int w = 0; w < Config::kWorkers; ++w) {
            dots[i] += block.vector(Config::kDotParts)[(w * Config::kChunk + row) * kRowSums + i];
          }
        }
        if (p.phase == kDots && exists) store_number(p.dots.data, at + block.split * kRowSums + i, dots[i]);
      }
      if (p.phase == kDots) continue;
      Acc delta = 0, along = dots[0], offset = 0;
      if constexpr (kGradQ) {
        const Acc sum = sum_of_weights(block, row) + block.numbers(copy, kSecond)[row];
        const Acc inverse_den = block.numbers(copy, kInverse)[row];
        const Acc shift = Config::kKeyOffset * sum;  // of Y
        if (p.normalize) delta = ptx::fma(scalar_a<Acc>(p), sum, scalar_b<Acc>(p) * ptx::fma(shift, dots[3], dots[1])) * inverse_den;
        offset = Config::kKeyOffset * (sum - delta * block.count_seen(step, row));
        along = scalar_b<Acc>(p) * (dots[0] - delta * dots[2] + offset * dots[4]);
        if (block.split == 0 && exists && block.places.delta != 0) {
          const Acc whole = p.normalize ? delta + block.numbers(copy, kFirst)[row] : Acc(0);
          store_number(block.places.delta, span.first + row, whole);
        }
      }
      row_factors()[row] = {delta, along, offset, block.numbers(copy, kNorm)[row]};
    }
  }

  // The staged rows to global memory, whole packets of neighbouring lanes side by side.
  LA_DEVICE void copy_out() {
    if (p.dst.data == 0 || p.phase == kDots) return;
    using R = Rows<Arith, Config::kColumns, Config::kChunk, Config::kWorkerThreads>;
    R::copy_out(p.dst, block.places.dst, span, block.column0, width(), block.stage(copy));
  }
};

}  // namespace la
