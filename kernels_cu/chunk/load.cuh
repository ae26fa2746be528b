// The loaders: rows of the next chunk, fetched raw into registers well ahead and transformed on their way to shared
// memory. No array is read twice for its norms, features or sums.
#pragma once
#include "chunk/running_sums.cuh"

namespace la {

template <class Config>
struct Load {
  using Arith = typename Config::Arith;
  using Role = typename Config::Role;
  using Feature = typename Config::Feature;
  using Acc = typename Config::Acc;
  using Turn = typename Block<Config>::Turn;
  static constexpr int kColumnWidth = Role::kKeyFeatures ? Config::kColumns : Config::kRow;
  using InnerRows = typename Config::template LoadedRows<Config::kInner>;
  using ColumnRows = typename Config::template LoadedRows<kColumnWidth>;
  static constexpr bool kForward = kSame<Role, Forward>, kGradQ = kSame<Role, GradQ>, kGradV = kSame<Role, GradV>,
                        kGradK = kSame<Role, GradK>;

  // Where workers do not take the sums over rows (RunningSums), loaders do. Where they do, v is copied as it is, past the
  // registers.
  static constexpr bool kSums = !Arith::kWarpgroups;
  static constexpr bool kCopyA = !kSums && kGradK, kCopyB = !kSums && kGradQ, kCopyC = !kSums && kForward;

  const Params& p;
  const Block<Config>& block;
  InnerRows a;
  InnerRows b;
  ColumnRows c;
  // Of the turn behind, too: 1 / den of the queries, and in GradK their delta. A thread brings a few rows' numbers for all.
  static constexpr int kNumbers = (kGradK ? 2 : kGradQ || kGradV ? 1 : 0) * Config::kChunk;
  static constexpr int kNumbersEach = (kNumbers + Config::kLoaderThreads - 1) / Config::kLoaderThreads;
  Acc numbers[larger(1, kNumbersEach)];

  LA_DEVICE Load(const Params& params, const Block<Config>& where) : p(params), block(where) {}

  // A tile's registers are free as soon as it is put down, and other rows are sent for at once: of A, B and C those of the turn
  // behind, which have a whole turn to arrive. X is needed last and sent for last, where A was: so three arrays wait, not four.
  LA_DEVICE void run() {
    Turn next;
    if constexpr (kNumbers > 0) {
      fetch_numbers(next);
      put_numbers(next);
      sync_named(kAmongLoaders, Config::kLoaderThreads);
    }
    if (Config::kPrefetch) {
      fetch_a(next);
      fetch_b(next);
      fetch_c(next);
    }
#pragma unroll 1
    while (true) {
      const bool exists = block.exists(next);
      if (exists) put(next);
      if constexpr (Arith::kWarpgroups) fence_async();
      sync_named(kTurn, Config::kThreads);  // `next` is there
      if (!exists) return;
      if constexpr (kSums) add_sums(next);
      put_numbers(block.after(next));
      // Sums and numbers for the turn behind it are there.
      if constexpr (kSums || kNumbers > 0) sync_named(kAmongLoaders, Config::kLoaderThreads);
      if (Config::kCopies == 1) sync_named(kDone, Config::kThreads);
      next = block.after(next);
    }
  }

  LA_DEVICE void put(Turn now) {
    const bool begins = block.begins(now);
    const Turn then = block.after(now);
    ColumnRows x;  // GradQ: q, GradK: k
    fetch_numbers(then);
    copy_values(now);
    if (!Config::kPrefetch) {
      fetch_a(now);
      if (begins) put_a(now);
      fetch_x(x, now);
      if (begins) put_x(x, now);
      a = InnerRows{};
      x = ColumnRows{};
      fetch_b(now);
      put_b(now);
      b = InnerRows{};
      fetch_c(now);
      put_c(now);
      c = ColumnRows{};
    } else if (kCopyB) {  // the workers have more to do than the loaders, who may wait for X
      put_a(now);
      fetch_a(then);
      put_c(now);
      fetch_x(x, now);
      fetch_c(then);
      put_x(x, now);
    } else if (Role::kThroughFeatures) {
      if (begins) put_a(now);
      fetch_x(x, now);
      put_b(now);
      fetch_a(then);
      put_c(now);
      fetch_b(then);
      if (begins) put_x(x, now);
      fetch_c(then);
    } else {
      if (begins) put_a(now);
      fetch_a(then);
      put_b(now);
      fetch_b(then);
      put_c(now);
      fetch_c(then);
    }
    if constexpr (!kSums) copy_wait();
    if (p.levelled) take_level_off(now);
  }

  // Which array is A, X, B, C, and where its rows begin.
  LA_DEVICE const Tensor& array_a() const { return kForward ? p.q : kGradQ ? p.dout : kGradV ? p.k : p.v; }
  LA_DEVICE const Tensor& array_x() const { return kGradQ ? p.q : p.k; }
  LA_DEVICE const Tensor& array_b() const { return kForward ? p.k : kGradQ ? p.v : kGradV ? p.q : p.dout; }
  LA_DEVICE const Tensor& array_c() const { return kForward ? p.v : kGradQ ? p.k : kGradV ? p.dout : p.q; }

  using Places = typename Block<Config>::Places;
  LA_DEVICE u64 place_a() const {
    const Places& at = block.places;
    return kForward ? at.q : kGradQ ? at.dout : kGradV ? at.k : at.v;
  }
  LA_DEVICE u64 place_x() const { return kGradQ ? block.places.q : block.places.k; }
  LA_DEVICE u64 place_b(Turn t) const {
    const Places& at = block.places;
    if (sums_heads()) return source_head(t).template address<Arith>(array_b());
    return kForward ? at.k : kGradQ ? at.v : kGradV ? at.q : at.dout;
  }
  LA_DEVICE u64 place_c(Turn t) const {
    const Places& at = block.places;
    if (sums_heads()) return source_head(t).template address<Arith>(array_c());
    return kForward ? at.v : kGradQ ? at.k : kGradV ? at.dout : at.q;
  }
  LA_DEVICE u64 place(const RowVector& v, u64 own, Turn t) const {
    return sums_heads() ? source_head(t).template place<Acc>(v) : own;
  }

  LA_DEVICE bool sums_heads() const { return Config::kGrouped && block.group > 1; }
  LA_DEVICE Head source_head(Turn t) const {
    Head head = block.head;
    head.place(p, static_cast<u32>(t.member), p.outer, p.rank);
    return head;
  }

  LA_DEVICE void copy_values(Turn t) const {
    const u64 values = block.places.v;
    if constexpr (kCopyA) InnerRows::copy_in(p.v, values, block.rows_at(t.step), 0, p.e, block.tile_a(t.row_copy()));
    if constexpr (Config::kCausal && kCopyB) {
      InnerRows::copy_in(p.v, values, block.sources_at(t.step), 0, p.e, block.tile_b(t.copy));
    }
    if constexpr (Config::kCausal && kCopyC) {
      ColumnRows::copy_in(p.v, values, block.sources_at(t.step), block.column0, p.e - block.column0, block.tile_c(t.copy));
    }
  }

  // Off v where it was copied as it is.
  LA_DEVICE void take_level_off(Turn t) const {
    if constexpr (kCopyA) InnerRows::subtract(block.tile_a(t.row_copy()), block.rows_at(t.step), block.level());
    if constexpr (Config::kCausal && kCopyB) {
      InnerRows::subtract(block.tile_b(t.copy), block.sources_at(t.step), block.level());
    }
  }

  LA_DEVICE void fetch_a(Turn t) {
    if (kCopyA || !block.exists(t) || !block.begins(t)) return;
    const Span span = block.rows_at(t.step);
    a.fetch(array_a(), place_a(), span, 0, Role::kKeyFeatures ? p.d : p.e);
  }

  LA_DEVICE void fetch_x(ColumnRows& x, Turn t) const {
    if constexpr (Role::kThroughFeatures) {
      if (!block.exists(t) || !block.begins(t)) return;
      x.fetch(array_x(), place_x(), block.rows_at(t.step), 0, p.d);
    }
  }

  LA_DEVICE void fetch_b(Turn t) {
    if constexpr (Config::kCausal && !kCopyB) {
      if (!block.exists(t)) return;
      const Span span = block.sources_at(t.step);
      b.fetch(array_b(), place_b(t), span, 0, Role::kKeyFeatures ? p.d : p.e);
    }
  }

  LA_DEVICE void fetch_c(Turn t) {
    if constexpr (Config::kCausal && !kCopyC) {
      if (!block.exists(t)) return;
      const Span span = block.sources_at(t.step);
      c.fetch(array_c(), place_c(t), span, Role::kKeyFeatures ? block.column0 : 0,
              Role::kKeyFeatures ? p.e - block.column0 : p.d);
    }
  }

  // Where there is no den (rows are not divided) or no row, 1 and 0 take its place.
  LA_DEVICE void fetch_numbers(Turn t) {
    if (kNumbers == 0 || !block.exists(t)) return;
    const Span span = kGradQ ? block.rows_at(t.step) : block.sources_at(t.step);
    const i32 id = thread() - Config::kFirstLoader;
#pragma unroll
    for (int pass = 0; pass < kNumbersEach; ++pass) {
      const i32 i = id + pass * Config::kLoaderThreads, row = i % Config::kChunk;
      const bool is_delta = i >= Config::kChunk;
      const u64 from = is_delta ? place(p.delta, block.places.delta, t) : place(p.den, block.places.den, t);
      numbers[pass] = is_delta ? Acc(0) : Acc(1);
      if (i < kNumbers && from != 0 && span.holds(row)) numbers[pass] = load_number<Acc>(from, span.first + row);
    }
  }

  LA_DEVICE void put_numbers(Turn t) const {
    if (kNumbers == 0 || !block.exists(t)) return;
    const int copy = kGradQ ? t.row_copy() : t.copy;
    const i32 id = thread() - Config::kFirstLoader;
#pragma unroll
    for (int pass = 0; pass < kNumbersEach; ++pass) {
      const i32 i = id + pass * Config::kLoaderThreads;
      if (i >= kNumbers) continue;
      if (i < Config::kChunk) block.numbers(copy, kInverse)[i] = inverse_den(p, numbers[pass]);
      if (i >= Config::kChunk) {
        block.numbers(copy, kFirst)[i - Config::kChunk] = numbers[pass];
        if constexpr (!kSums) {
          RunningSums<Config>::split(block.source_lines(copy), 0, i - Config::kChunk, -scalar_b<Acc>(p) * numbers[pass]);
        }
      }
    }
  }

  template <Outside Outside = kZero, class R>
  LA_DEVICE typename R::Batch features(R& rows, typename R::Norms& norms, int batch, const Tensor& t, Span span) const {
    typename R::Batch v = rows.values(batch, element_type<Arith>(t));
    R::normalise(p, v, norms);
    R::template map<Feature, Outside>(v, span, p.d);
    return v;
  }

  // From dout to g.
  template <class R>
  LA_DEVICE void scale(typename R::Batch& v, int copy, int batch) const {
    Acc inverse[R::kBatch];
    R::read(inverse, block.numbers(copy, kInverse), batch);
    R::scale(v, inverse);
  }

  LA_DEVICE void put_a(Turn t) {
    if constexpr (kGradK) {
      if constexpr (!kCopyA) a.store_less(block.tile_a(t.row_copy()), block.level(), element_type<Arith>(p.v));
    } else {
      put_a_batches(t);
    }
  }

  LA_DEVICE void put_a_batches(Turn t) {
    using R = InnerRows;
    const Span span = block.rows_at(t.step);
    const int copy = t.row_copy();  // in these roles of the sums, too: each step is one turn
    constexpr bool kDots = kSums && (kForward || kGradQ);
    typename R::Values first, second;
    if constexpr (kDots && kForward) first = R::columns_of(block.inner_sum(copy));
    typename R::Norms of_a;
    if constexpr (Role::kKeyFeatures) of_a = a.norms(p);
#pragma unroll
    for (int batch = 0; batch < R::batches(); ++batch) {
      typename R::Batch v;
      if constexpr (kForward) {
        v = features<kAny>(a, of_a, batch, p.q, span);  // it meets zeros of B, and of the sums
        R::each(v, [&](Acc& one, int, int) { one *= scalar_b<Acc>(p); });
      }
      if constexpr (kGradV) v = features<kAny>(a, of_a, batch, p.k, span);
      if constexpr (kGradQ) {
        v = a.values(batch, element_type<Arith>(p.dout));
        scale<R>(v, copy, batch);
      }
      R::store(block.tile_a(copy), v);
      Acc dots[R::kBatch];
      if constexpr (kDots && kGradQ) {
        first = R::columns_of(block.centre(copy));
        second = R::columns_of(block.rest(copy));
      }
      if constexpr (kDots) {
        R::dots(dots, v, &first, 0);
        R::store(block.numbers(copy, kFirst), batch, dots);
      }
      if constexpr (kDots && kGradQ) {
        R::dots(dots, v, &second, 0);  // g . (v_sum - count c)
        R::store(block.numbers(copy, kSecond), batch, dots);
      }
    }
  }

  // Rows of q or k themselves, normalised but not mapped, and 1 / |x|: what the gradient passes through.
  LA_DEVICE void put_x(ColumnRows& x, Turn t) const {
    if constexpr (Role::kThroughFeatures) {
      using R = ColumnRows;
      const int copy = t.row_copy();
      typename R::Norms of_x = x.norms(p);
#pragma unroll
      for (int batch = 0; batch < R::batches(); ++batch) {
        typename R::Batch v = x.values(batch, element_type<Arith>(array_x()));
        R::normalise(p, v, of_x);
        R::store(block.tile_x(copy), v, block.column0);
        if (p.unit_norm) R::store(block.numbers(copy, kNorm), batch, of_x.inverse + R::held(v.first));
      }
    }
  }

  LA_DEVICE void put_b(Turn t) {
    if constexpr (Config::kCausal && !kCopyB) {
      using R = InnerRows;
      const Span span = block.sources_at(t.step);
      typename R::Norms of_b;
      if constexpr (Role::kKeyFeatures) of_b = b.norms(p);
      constexpr bool kSum = kSums && (kForward || kGradQ);
      typename R::Values sum;
      R::clear(sum);
#pragma unroll
      for (int batch = 0; batch < R::batches(); ++batch) {
        typename R::Batch v;
        if constexpr (Role::kKeyFeatures) v = features(b, of_b, batch, array_b(), span);
        if constexpr (kGradQ) {
          v = b.values(batch, element_type<Arith>(p.v));
          R::subtract(v, span, block.level());
        }
        if constexpr (kGradK) {
          v = b.values(batch, element_type<Arith>(p.dout));
          scale<R>(v, t.copy, batch);
        }
        R::store(block.tile_b(t.copy), v);
        if constexpr (kSum) R::add(sum, v);
      }
      if constexpr (kSum) R::template store_column_sums<Config::kInner>(block.vector(Config::kInnerParts), sum);
    }
  }

  LA_DEVICE void put_c(Turn t) {
    if constexpr (Config::kCausal && kForward && Arith::kFixedType) {
      if constexpr (!kCopyC) c.store_raw(block.tile_c(t.copy));
    } else if constexpr (Config::kCausal) {
      using R = ColumnRows;
      const Span span = block.sources_at(t.step);
      const int window = Role::kKeyFeatures ? 0 : block.column0;
      typename R::Norms of_c;
      if constexpr (Role::kThroughFeatures) of_c = c.norms(p);
      constexpr bool kSum = kSums && kGradK;
      typename R::Values sum;
      R::clear(sum);
#pragma unroll
      for (int batch = 0; batch < R::batches(); ++batch) {
        typename R::Batch v;
        if constexpr (kForward) v = c.values(batch, element_type<Arith>(p.v));
        if constexpr (kGradQ) v = features<kShifted>(c, of_c, batch, p.k, span);  // less Config::kKeyOffset
        if constexpr (kGradV) {
          v = c.values(batch, element_type<Arith>(p.dout));
          scale<R>(v, t.copy, batch);
        }
        if constexpr (kGradK) v = features<kAny>(c, of_c, batch, p.q, span);  // it meets zeros of B, of W and of delta
        if constexpr (kSum) {
          Acc delta[R::kBatch];
          R::read(delta, block.numbers(t.copy, kFirst), batch);
#pragma unroll
          for (Acc& one : delta) one *= -scalar_b<Acc>(p);
          R::add(sum, v, delta);
        }
        R::store(block.tile_c(t.copy), v, window);
      }
      if constexpr (kSum) {
        R::template store_column_sums<Config::kColumns>(block.vector(Config::kColumnParts), sum, window);
      }
    }
  }

  // Adds the sums over a turn's sources to the running ones, in the other copy: this turn still needs the sums before it. The
  // sums of C without weights come from the workers; see Work::add_column_sums.
  LA_DEVICE void add_sums(Turn t) {
    if constexpr (Config::kCausal) {
      const int now = t.copy;
      const int id = thread() - Config::kFirstLoader;
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
