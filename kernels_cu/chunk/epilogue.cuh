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

  // f(row, m, half) for the rows, 8 at a time, of which this warp holds accumulators: this lane has row + lane_row().
  template <class F>
  static LA_DEVICE void each_row(F f) {
#pragma unroll
    for (int m = 0; m < P::kRowBlocks; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) f(m * 16 + half * 8, m, half);
    }
  }

  // What a warp can do with its own columns: the whole of it, or its share of the sums over rows.
  LA_DEVICE void begin(typename P::Result& result, typename P::Result& running) {
    if constexpr (kSame<Role, Forward>) normalise(result);
    if constexpr (Role::kThroughFeatures) {
      if (p.phase != kApply) row_dots(result, running);
    } else {
      put(result);
    }
  }

  // The rest, behind a barrier, where sums over rows are needed.
  LA_DEVICE void end(typename P::Result& result, typename P::Result& running) {
    if constexpr (Role::kThroughFeatures) {
      row_coefficients();
      sync_named(kAmongWorkers, Config::kWorkerThreads);
      if (p.phase == kDots) return;
      apply(result, running);
      put(result);
    }
  }

  LA_DEVICE void put(typename P::Result& result) {
    each_row([&](int row, int m, int half) {
#pragma unroll
      for (int n = 0; n < Config::kSlices; ++n) put(row, P::first_column() + n * 8, result[m][half][n]);
    });
  }

  LA_DEVICE void put(int row, int column, const Cell<Acc>& c) {
    if constexpr (Arith::kFixedType) {
      Arith::store_pair(block.stage(copy), row, column, c.x[0], c.x[1]);
    } else {  // unrounded: the stage is on its way out
      typename Config::Elem* to = block.stage(copy).pair(row, column);
      to[0] = c.x[0];
      to[1] = c.x[1];
    }
  }

  // Each warp finds the factors of all rows for itself, a row or two a lane: waiting for another would take longer.
  LA_DEVICE void normalise(typename P::Result& result) {
    const Acc before = Acc(p.a) * block.count_before(step);
    Acc* factors = block.vector(Config::kDotParts) + warp_id() * Config::kChunk;
    for (int row = lane_id(); row < Config::kChunk; row += 32) {
      const Acc den = before + Acc(p.b) * block.numbers(copy, kFirst)[row] + sum_of_weights(block, row);
      if (block.split == 0 && warp_id() == 0 && p.den.data != 0 && span.holds(row)) {
        store_number(p.den.data, block.head.offset(p.den.lead) + span.first + row, den);
      }
      factors[row] = inverse_den(p, den);
    }
    sync_warp();
    each_row([&](int row, int m, int half) {
      const Acc factor = factors[row + lane_row()];
#pragma unroll
      for (int n = 0; n < Config::kSlices; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) result[m][half][n].x[j] *= factor;
      }
    });
  }

  // z, phi(z), phi'(z) and z phi'(z) at one place. Outside the array they multiply zeros.
  struct Mapped { Acc z, value, slope, radial; };
  static LA_DEVICE Mapped mapped(Acc z) {
    const Acc slope = Feature::derivative(z);
    return {z, Arith::round(Feature::value(z)), slope, z * slope};
  }

  LA_DEVICE void apply(typename P::Result& result, typename P::Result& running) {
    const Acc* coefficients = block.vector(Config::kRowDots);
    each_row([&](int row8, int m, int half) {
      const int row = row8 + lane_row();
      const Acc delta = coefficients[3 * row], along = coefficients[3 * row + 1], offset = coefficients[3 * row + 2];
      const Acc inverse_norm = block.numbers(copy, kNorm)[row];
#pragma unroll
      for (int n = 0; n < Config::kSlices; ++n) {
        Acc z[2];
        Arith::load_pair(block.tile_x(copy).pair(row8, P::first_column() + n * 8), z[0], z[1]);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          Acc& x = result[m][half][n].x[j];
          const Mapped f = mapped(z[j]);
          if constexpr (kGradQ) x = Acc(p.b) * (x - delta * running[m][half][n].x[j] + offset);
          x = p.unit_norm ? (f.slope * x - f.z * along) * inverse_norm : f.slope * x;
        }
      }
    });
  }

  LA_DEVICE void row_dots(typename P::Result& result, typename P::Result& running) {
    each_row([&](int row, int m, int half) {
      Acc dots[kRowSums] = {};
#pragma unroll
      for (int n = 0; n < Config::kSlices; ++n) {
        Acc z[2];
        Arith::load_pair(block.tile_x(copy).pair(row, P::first_column() + n * 8), z[0], z[1]);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const Mapped f = mapped(z[j]);
          const Acc y = result[m][half][n].x[j];
          dots[0] = ptx::fma(f.radial, y, dots[0]);
          if constexpr (kGradQ) {
            dots[1] = ptx::fma(f.value, y, dots[1]);
            dots[2] = ptx::fma(f.radial, running[m][half][n].x[j], dots[2]);
            if (Config::kKeyOffset != 0 && block.column0 + P::first_column() + n * 8 + lane_column() + j < p.d) {
              dots[3] += f.value;
              dots[4] += f.radial;
            }
          }
        }
      }
#pragma unroll
      for (int x = 0; x < kUsed; ++x) {
        dots[x] += shuffle_xor(dots[x], 1);
        dots[x] += shuffle_xor(dots[x], 2);
        if ((lane_id() & 3) == 0) {
          block.vector(Config::kDotParts)[(warp_id() * Config::kChunk + row + lane_row()) * kRowSums + x] = dots[x];
        }
      }
    });
  }

  // delta', z . h and what the offset adds to Y - delta' K, for each row, from its sums.
  LA_DEVICE void row_coefficients() {
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
        if (p.normalize) delta = ptx::fma(Acc(p.a), sum, Acc(p.b) * ptx::fma(shift, dots[3], dots[1])) * inverse_den;
        offset = Config::kKeyOffset * (sum - delta * block.count_seen(step, row));
        along = Acc(p.b) * (dots[0] - delta * dots[2] + offset * dots[4]);
        if (block.split == 0 && exists && p.delta.data != 0) {
          const Acc whole = p.normalize ? delta + block.numbers(copy, kFirst)[row] : Acc(0);
          store_number(p.delta.data, block.head.offset(p.delta.lead) + span.first + row, whole);
        }
      }
      Acc* coefficients = block.vector(Config::kRowDots) + 3 * row;
      coefficients[0] = delta;
      coefficients[1] = along;
      coefficients[2] = offset;
    }
  }

  // The staged rows to global memory, whole packets of neighbouring lanes side by side.
  LA_DEVICE void copy_out() {
    if (p.dst.data == 0 || p.phase == kDots) return;
    using R = Rows<Arith, Config::kColumns, Config::kChunk, Config::kWorkerThreads>;
    R::copy_out(p.dst, block.head.template address<Arith>(p.dst), span, block.column0,
                (Role::kKeyFeatures ? p.e : p.d) - block.column0, block.stage(copy));
  }
};

}  // namespace la
