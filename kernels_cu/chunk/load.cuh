// The loaders: rows of the next chunk, fetched raw into registers well ahead and transformed on their way to shared
// memory. No array is read twice for its norms, features or sums.
#pragma once
#include "chunk/block.cuh"

namespace la {

template <class Config>
struct Load {
  using Arith = typename Config::Arith;
  using Role = typename Config::Role;
  using Feature = typename Config::Feature;
  using Acc = typename Config::Acc;
  using Turn = typename Block<Config>::Turn;
  static constexpr int kColumnWidth = Role::kKeyFeatures ? Config::kColumns : Config::kRow;
  using InnerRows = Rows<Arith, Config::kInner, Config::kChunk, Config::kLoaderThreads, Config::kWorkerThreads>;
  using ColumnRows = Rows<Arith, kColumnWidth, Config::kChunk, Config::kLoaderThreads, Config::kWorkerThreads>;
  static constexpr bool kForward = kSame<Role, Forward>, kGradQ = kSame<Role, GradQ>, kGradV = kSame<Role, GradV>,
                        kGradK = kSame<Role, GradK>;

  const Params& p;
  const Block<Config>& block;
  InnerRows a;
  ColumnRows x;  // GradQ: q, GradK: k
  InnerRows b;
  ColumnRows c;
  typename InnerRows::Numbers den_a;           // GradQ
  typename InnerRows::Numbers den_b, delta_b;  // GradK
  typename ColumnRows::Numbers den_c;          // GradV
  typename ColumnRows::Numbers delta_c;        // GradK

  LA_DEVICE Load(const Params& params, const Block<Config>& where) : p(params), block(where) {}

  // A tile's registers are free as soon as it is put down, and its rows of the turn behind are sent for at once: they have
  // a whole turn to arrive.
  LA_DEVICE void run() {
    Turn next;
    if (Config::kPrefetch) {
      fetch_a(next);
      fetch_x(next);
      fetch_b(next);
      fetch_c(next);
    }
#pragma unroll 1
    while (true) {
      if (block.exists(next)) {
        const bool begins = block.begins(next);
        each(next, [&](Turn t) { fetch_a(t); }, [&] { if (begins) put_a(next); });
        each(next, [&](Turn t) { fetch_x(t); }, [&] { if (begins) put_x(next); });
        each(next, [&](Turn t) { fetch_b(t); }, [&] { put_b(next); });
        each(next, [&](Turn t) { fetch_c(t); }, [&] { put_c(next); });
      }
      sync_named(kTurn, Config::kThreads);  // `next` is there
      if (!block.exists(next)) return;
      add_sums(next);
      sync_named(kAmongLoaders, Config::kLoaderThreads);  // the sums for the turn behind it are there
      if (Config::kCopies == 1) sync_named(kDone, Config::kThreads);
      next = block.after(next);
    }
  }

  // Puts a tile of this turn down and sends for the next one; without prefetch, sends for this one first.
  template <class Fetch, class Put>
  LA_DEVICE void each(Turn turn, Fetch fetch, Put put) {
    if (!Config::kPrefetch) fetch(turn);
    put();
    if (Config::kPrefetch) fetch(block.after(turn));
  }

  // Which array is A, X, B, C, and where its head is.
  LA_DEVICE const Tensor& array_a() const { return kForward ? p.q : kGradQ ? p.dout : kGradV ? p.k : p.v; }
  LA_DEVICE const Tensor& array_x() const { return kGradQ ? p.q : p.k; }
  LA_DEVICE const Tensor& array_b() const { return kForward ? p.k : kGradQ ? p.v : kGradV ? p.q : p.dout; }
  LA_DEVICE const Tensor& array_c() const { return kForward ? p.v : kGradQ ? p.k : kGradV ? p.dout : p.q; }

  LA_DEVICE Head head(Turn t) const {
    Head head = block.head;
    if (Role::kReversed && block.group > 1) head.place(p, static_cast<u32>(t.member), p.outer, p.rank);
    return head;
  }

  LA_DEVICE void fetch_a(Turn t) {
    if (!block.exists(t) || !block.begins(t)) return;
    const Span span = block.rows_at(t.step);
    a.fetch(array_a(), block.head.template address<Arith>(array_a()), span, 0, Role::kKeyFeatures ? p.d : p.e);
    if constexpr (kGradQ) den_a = InnerRows::fetch(p.den, block.head.offset(p.den.lead), span, Acc(1));
  }

  LA_DEVICE void fetch_x(Turn t) {
    if constexpr (Role::kThroughFeatures) {
      if (!block.exists(t) || !block.begins(t)) return;
      x.fetch(array_x(), block.head.template address<Arith>(array_x()), block.rows_at(t.step), 0, p.d);
    }
  }

  LA_DEVICE void fetch_b(Turn t) {
    if constexpr (Config::kCausal) {
      if (!block.exists(t)) return;
      const Span span = block.sources_at(t.step);
      const Head at = head(t);
      b.fetch(array_b(), at.template address<Arith>(array_b()), span, 0, Role::kKeyFeatures ? p.d : p.e);
      if constexpr (kGradK) {
        den_b = InnerRows::fetch(p.den, at.offset(p.den.lead), span, Acc(1));
        delta_b = InnerRows::fetch(p.delta, at.offset(p.delta.lead), span, Acc(0));
      }
    }
  }

  LA_DEVICE void fetch_c(Turn t) {
    if constexpr (Config::kCausal) {
      if (!block.exists(t)) return;
      const Span span = block.sources_at(t.step);
      const Head at = head(t);
      c.fetch(array_c(), at.template address<Arith>(array_c()), span, Role::kKeyFeatures ? block.column0 : 0,
              Role::kKeyFeatures ? p.e - block.column0 : p.d);
      if constexpr (kGradV) den_c = ColumnRows::fetch(p.den, at.offset(p.den.lead), span, Acc(1));
      if constexpr (kGradK) delta_c = ColumnRows::fetch(p.delta, at.offset(p.delta.lead), span, Acc(0));
    }
  }

  template <class R>
  LA_DEVICE typename R::Batch features(const R& rows, int batch, const Tensor& t, Span span) const {
    typename R::Batch v = rows.values(batch, t.dtype);
    Acc inverse[R::kBatch];
    if (p.unit_norm) R::normalise(v, inverse);
    R::template map<Feature>(v, span, p.d);
    return v;
  }

  LA_DEVICE void put_a(Turn t) {
    if constexpr (kGradK && Arith::kFixedType) {
      a.store_raw(block.tile_a(t.row_copy()));
    } else {
      put_a_batches(t);
    }
  }

  LA_DEVICE void put_a_batches(Turn t) {
    using R = InnerRows;
    const Span span = block.rows_at(t.step);
    const int copy = t.row_copy();  // in these roles of the sums, too: each step is one turn
    typename R::Values first, second;
    if constexpr (kForward) first = R::columns_of(block.inner_sum(copy));
    if constexpr (kGradQ) {
      first = R::columns_of(block.centre(copy));
      second = R::columns_of(block.rest(copy));
      R::invert(p, den_a);
    }
#pragma unroll
    for (int batch = 0; batch < R::kBatches; ++batch) {
      typename R::Batch v;
      if constexpr (kForward) v = features(a, batch, p.q, span);
      if constexpr (kGradV) v = features(a, batch, p.k, span);
      if constexpr (kGradK) v = a.values(batch, p.v.dtype);
      if constexpr (kGradQ) {
        v = a.values(batch, p.dout.dtype);
        R::scale(v, den_a);
        R::store(block.numbers(copy, kInverse), batch, den_a.x + batch * R::kBatch);
      }
      R::store(block.tile_a(copy), v);
      Acc dots[R::kBatch];
      if constexpr (kForward || kGradQ) {
        R::dots(dots, v, &first, 0);
        R::store(block.numbers(copy, kFirst), batch, dots);
      }
      if constexpr (kGradQ) {
        R::dots(dots, v, &second, 0);  // g . (v_sum - count c)
        R::store(block.numbers(copy, kSecond), batch, dots);
      }
    }
  }

  // Rows of q or k themselves, normalised but not mapped, and 1 / |x|: what the gradient passes through.
  LA_DEVICE void put_x(Turn t) {
    if constexpr (Role::kThroughFeatures) {
      using R = ColumnRows;
      const int copy = t.row_copy();
#pragma unroll
      for (int batch = 0; batch < R::kBatches; ++batch) {
        typename R::Batch v = x.values(batch, array_x().dtype);
        Acc inverse[R::kBatch];
#pragma unroll
        for (Acc& one : inverse) one = 1;
        if (p.unit_norm) R::normalise(v, inverse);
        R::store(block.numbers(copy, kNorm), batch, inverse);
        R::store(block.tile_x(copy), v, block.column0);
      }
    }
  }

  LA_DEVICE void put_b(Turn t) {
    if constexpr (Config::kCausal) {
      using R = InnerRows;
      const Span span = block.sources_at(t.step);
      typename R::Values sum;
      R::clear(sum);
      if constexpr (kGradK) R::invert(p, den_b);
#pragma unroll
      for (int batch = 0; batch < R::kBatches; ++batch) {
        typename R::Batch v;
        if constexpr (kForward) v = features(b, batch, p.k, span);
        if constexpr (kGradV) v = features(b, batch, p.q, span);
        if constexpr (kGradQ) v = b.values(batch, p.v.dtype);
        if constexpr (kGradK) {
          v = b.values(batch, p.dout.dtype);
          R::scale(v, den_b);
          R::store(block.numbers(t.copy, kFirst), batch, delta_b.x + batch * R::kBatch);
        }
        R::store(block.tile_b(t.copy), v);
        if constexpr (kForward || kGradQ) R::add(sum, v);
      }
      if constexpr (kForward || kGradQ) R::template store_column_sums<Config::kInner>(block.vector(Config::kInnerParts), sum);
    }
  }

  LA_DEVICE void put_c(Turn t) {
    if constexpr (Config::kCausal && kForward && Arith::kFixedType) {
      c.store_raw(block.tile_c(t.copy));
    } else if constexpr (Config::kCausal) {
      using R = ColumnRows;
      const Span span = block.sources_at(t.step);
      const int window = Role::kKeyFeatures ? 0 : block.column0;
      typename R::Values sum;
      R::clear(sum);
      if constexpr (kGradV) R::invert(p, den_c);
#pragma unroll
      for (Acc& one : delta_c.x) one *= -Acc(p.b);
#pragma unroll
      for (int batch = 0; batch < R::kBatches; ++batch) {
        typename R::Batch v;
        if constexpr (kForward) v = c.values(batch, p.v.dtype);
        if constexpr (kGradQ) {
          v = features(c, batch, p.k, span);
          if (Config::kKeyOffset != 0) R::shift(v, span, p.d, Config::kKeyOffset);
        }
        if constexpr (kGradV) {
          v = c.values(batch, p.dout.dtype);
          R::scale(v, den_c);
        }
        if constexpr (kGradK) {
          v = features(c, batch, p.q, span);
          R::add(sum, v, delta_c);
        }
        R::store(block.tile_c(t.copy), v, window);
      }
      if constexpr (kGradK) {
        R::template store_column_sums<Config::kColumns>(block.vector(Config::kColumnParts), sum, window);
      }
    }
  }

  // Adds the sums over a turn's sources to the running ones, in the other copy: this turn still needs the sums before it. The
  // sums of C without weights come from the tensor cores; see Work::add_column_sums.
  LA_DEVICE void add_sums(Turn t) {
    if constexpr (Config::kCausal) {
      const int now = t.copy;
      const int id = thread() - Config::kWorkerThreads;
      if constexpr (kForward || kGradQ) {
        const Acc count = block.count_before(t.step + 1);
        for (int i = id; i < Config::kInner; i += Config::kLoaderThreads) {
          const Acc sum = block.inner_sum(now)[i] + parts(Config::kInnerParts, Config::kInner, i);
          block.inner_sum(now ^ 1)[i] = sum;
          if constexpr (kGradQ) block.set_centre(p, now ^ 1, i, sum, count);
        }
      }
      if constexpr (kGradK) {
        for (int i = id; i < Config::kColumns; i += Config::kLoaderThreads) {
          block.column_sum(now ^ 1)[i] = block.column_sum(now)[i] + parts(Config::kColumnParts, Config::kColumns, i);
        }
      }
    }
  }

  // The sum over the loaders' shares of column i.
  LA_DEVICE Acc parts(int at, int width, int i) const {
    Acc sum = 0;
#pragma unroll
    for (int w = 0; w < Config::kLoaders; ++w) sum += block.vector(at)[w * width + i];
    return sum;
  }
};

}  // namespace la
