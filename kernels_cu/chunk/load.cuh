// The rows of a chunk: fetched raw into registers while the chunk before is worked on, then transformed on their way
// to shared memory. No array is read twice for its norms, features or sums.
#pragma once
#include "chunk/block.cuh"

namespace la {

template <class Config>
struct Load {
  using Arith = typename Config::Arith;
  using Role = typename Config::Role;
  using Feature = typename Config::Feature;
  using Acc = typename Config::Acc;
  static constexpr int kColumnWidth = Role::kKeyFeatures ? Config::kColumns : Config::kRow;
  using InnerRows = Rows<Arith, Config::kInner, Config::kChunk, Config::kThreads>;
  using ColumnRows = Rows<Arith, kColumnWidth, Config::kChunk, Config::kThreads>;
  static constexpr bool kForward = kSame<Role, Forward>, kGradQ = kSame<Role, GradQ>, kGradV = kSame<Role, GradV>,
                        kGradK = kSame<Role, GradK>;

  const Params& p;
  const Block<Config>& block;
  InnerRows a;
  ColumnRows x;  // GradQ: q, GradK: k
  InnerRows b;
  ColumnRows c;
  typename InnerRows::Numbers den_a;               // GradQ
  typename InnerRows::Numbers den_b, delta_b;      // GradK
  typename ColumnRows::Numbers den_c;              // GradV
  typename ColumnRows::Numbers delta_c;            // GradK

  LA_DEVICE Load(const Params& params, const Block<Config>& where) : p(params), block(where) {}

  // Which array is A, X, B, C.
  LA_DEVICE const Tensor& array_a() const { return kForward ? p.q : kGradQ ? p.dout : kGradV ? p.k : p.v; }
  LA_DEVICE const Tensor& array_x() const { return kGradQ ? p.q : p.k; }
  LA_DEVICE const Tensor& array_b() const { return kForward ? p.k : kGradQ ? p.v : kGradV ? p.q : p.dout; }
  LA_DEVICE const Tensor& array_c() const { return kForward ? p.v : kGradQ ? p.k : kGradV ? p.dout : p.q; }

  LA_DEVICE void find_addresses() const {
    if (thread() != 0) return;
    using Where = Block<Config>;
    block.address(Where::kRowsA) = block.head.template address<Arith>(array_a());
    block.address(Where::kRowsX) = block.head.template address<Arith>(array_x());
    block.address(Where::kSourcesB) = block.head.template address<Arith>(array_b());
    block.address(Where::kSourcesC) = block.head.template address<Arith>(array_c());
    block.address(Where::kResult) = block.head.template address<Arith>(p.dst);
  }

  LA_DEVICE void fetch_rows(i64 step) {
    using Where = Block<Config>;
    const Span span = block.rows(p, step);
    a.fetch(array_a(), block.address(Where::kRowsA), span, 0, Role::kKeyFeatures ? p.d : p.e);
    if constexpr (kGradQ) den_a = InnerRows::fetch(p.den, block.head.offset(p.den.lead), span, Acc(1));
    if constexpr (Role::kThroughFeatures) x.fetch(array_x(), block.address(Where::kRowsX), span, 0, p.d);
  }

  LA_DEVICE void fetch_sources(i64 step, i32 member) {
    if constexpr (Config::kCausal) {
      using Where = Block<Config>;
      Head head = block.head;
      u64 at_b = block.address(Where::kSourcesB), at_c = block.address(Where::kSourcesC);
      if constexpr (Role::kReversed) {
        if (block.group > 1) {
          head.place(p, member, p.outer, p.rank);
          at_b = head.template address<Arith>(array_b());
          at_c = head.template address<Arith>(array_c());
        }
      }
      const Span span = block.sources(p, step);
      b.fetch(array_b(), at_b, span, 0, Role::kKeyFeatures ? p.d : p.e);
      c.fetch(array_c(), at_c, span, Role::kKeyFeatures ? block.column0 : 0,
              Role::kKeyFeatures ? p.e - block.column0 : p.d);
      if constexpr (kGradV) den_c = ColumnRows::fetch(p.den, head.offset(p.den.lead), span, Acc(1));
      if constexpr (kGradK) {
        den_b = InnerRows::fetch(p.den, head.offset(p.den.lead), span, Acc(1));
        delta_b = InnerRows::fetch(p.delta, head.offset(p.delta.lead), span, Acc(0));
        delta_c = ColumnRows::fetch(p.delta, head.offset(p.delta.lead), span, Acc(0));
      }
    }
  }

  // 1 / den; 0 where den is exactly 0: such a row of out is 0 and has no gradient. 1 if rows are not divided.
  template <class Numbers>
  LA_DEVICE Numbers inverse(Numbers den) const {
#pragma unroll
    for (Acc& x : den.x) x = !p.normalize ? Acc(1) : x == Acc(0) ? Acc(0) : ptx::reciprocal(x);
    return den;
  }

  template <class R>
  LA_DEVICE typename R::All features(const R& rows, const Tensor& t, Span span) const {
    typename R::All v = rows.values(t.dtype);
    if (p.unit_norm) R::normalise(v);
    R::template map<Feature>(v, span, p.d);
    return v;
  }

  // g = dout / den
  template <class R>
  LA_DEVICE typename R::All scaled(const R& rows, const typename R::Numbers& factor) const {
    typename R::All v = rows.values(p.dout.dtype);
    R::scale(v, factor);
    return v;
  }

  LA_DEVICE void put_rows(i64 step) {
    using R = InnerRows;
    const Span span = block.rows(p, step);
    typename R::All v;
    if constexpr (kForward) v = features(a, p.q, span);
    if constexpr (kGradV) v = features(a, p.k, span);
    if constexpr (kGradK) v = a.values(p.v.dtype);
    if constexpr (kGradQ) {
      den_a = inverse(den_a);
      v = scaled(a, den_a);
      R::store(block.vector(Config::kRowInverse), den_a);
    }
    R::store(block.tile_a(), v);
    if constexpr (kForward) {
      const typename R::Values keys = R::columns_of(block.inner_sum(block.parity));
      R::store(block.vector(Config::kRowFirst), R::dots(v, &keys, 0));
    }
    if constexpr (kGradQ) {
      const typename R::Values centre = R::columns_of(block.centre(block.parity));
      const typename R::Values rest = R::columns_of(block.rest(block.parity));
      R::store(block.vector(Config::kRowFirst), R::dots(v, &centre, 0));
      R::store(block.vector(Config::kRowSecond), R::dots(v, &rest, 0));  // g . (v_sum - count c)
    }
    if constexpr (Role::kThroughFeatures) put_unmapped();
  }

  // Rows of q or k themselves, normalised but not mapped, and 1 / |x|: what the gradient passes through.
  LA_DEVICE void put_unmapped() {
    using R = ColumnRows;
    typename R::All v = x.values(array_x().dtype);
    R::store(block.vector(Config::kRowNorm), p.unit_norm ? R::normalise(v) : R::same(Acc(1)));
    R::store(block.tile_x(), v, block.column0);
  }

  LA_DEVICE void put_sources(i64 step) {
    if constexpr (Config::kCausal) {
      const Span span = block.sources(p, step);
      put_b(span);
      put_c(span);
    }
  }

  LA_DEVICE void put_b(Span span) {
    using R = InnerRows;
    typename R::All v;
    if constexpr (kForward) v = features(b, p.k, span);
    if constexpr (kGradV) v = features(b, p.q, span);
    if constexpr (kGradQ) v = b.values(p.v.dtype);
    if constexpr (kGradK) {
      v = scaled(b, inverse(den_b));
      R::store(block.vector(Config::kRowFirst), delta_b);
    }
    R::store(block.tile_b(), v);
    if constexpr (kForward || kGradQ) {
      typename R::Values sum;
      R::clear(sum);
      R::add(sum, v, R::same(Acc(1)));
      R::template store_column_sums<Config::kInner>(block.vector(Config::kInnerParts), sum);
    }
  }

  LA_DEVICE void put_c(Span span) {
    using R = ColumnRows;
    const int window = Role::kKeyFeatures ? 0 : block.column0;
    typename R::All v;
    typename R::Numbers weight = R::same(Acc(1));
    if constexpr (kForward) v = c.values(p.v.dtype);
    if constexpr (kGradQ) v = features(c, p.k, span);
    if constexpr (kGradV) {
      v = scaled(c, inverse(den_c));
      weight = R::same(Acc(p.a));
    }
    if constexpr (kGradK) {
      v = features(c, p.q, span);
#pragma unroll
      for (int pass = 0; pass < R::kPasses; ++pass) weight.x[pass] = -Acc(p.b) * delta_c.x[pass];
    }
    R::store(block.tile_c(), v, window);
    typename R::Values sum;
    R::clear(sum);
    R::add(sum, v, weight);
    R::template store_column_sums<Config::kColumns>(block.vector(Config::kColumnParts), sum, window);
  }

  // Adds the chunk's column sums to the running ones, in the other copy: this chunk still needs the sums before it.
  LA_DEVICE void sum_columns(i64 step) {
    const int now = block.parity, next = now ^ 1;
    if constexpr (kForward || kGradQ) {
      const Acc count = block.count_before(step + 1);
      for (int i = thread(); i < Config::kInner; i += Config::kThreads) {
        Acc sum = block.inner_sum(now)[i];
#pragma unroll
        for (int w = 0; w < Config::kWarps; ++w) sum += block.vector(Config::kInnerParts)[w * Config::kInner + i];
        block.inner_sum(next)[i] = sum;
        if constexpr (kGradQ) block.set_centre(p, next, i, sum, count);
      }
    }
    for (int i = thread(); i < Config::kColumns; i += Config::kThreads) {
      Acc sum = block.column_sum(now)[i];
#pragma unroll
      for (int w = 0; w < Config::kWarps; ++w) sum += block.vector(Config::kColumnParts)[w * Config::kColumns + i];
      block.column_sum(next)[i] = sum;
    }
  }
};

}  // namespace la
