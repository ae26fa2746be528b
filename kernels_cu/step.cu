// step: the operator where a few positions follow a state, as when a model writes token by token.
//
//   grid     one block for each (head of the state, block of its columns); columns vary fastest
//   reads    q, k, v; the state before them
//   writes   out and den; the state behind them, if it is wanted
//
//   key by key           kv += k~[j] v[j]^T
//   query by query       out[i] = (a v_sum + b q~[i] kv) / den[i],  den[i] = a count + b q~[i] . k_sum
//
// with the state behind the last key that the query sees. Time goes into reading the state and writing it: a block has its part in
// registers, all of which is on its way before anything else begins. Heads of q that share keys are rows of the same block, so that
// their state is read once. Sums are of Acc throughout; with so few rows, tensor cores would have nothing to do.
#include "chunk/level.cuh"
#include "chunk/rows.cuh"
#include "chunk/state.cuh"

namespace la {

struct StepParams {
  Params p;  // query_shift = m: not causal
  i32 feature;
};

constexpr int kStepWidth = 256;   // D at most; a block has as many threads as D, in whole warps
constexpr int kStepKeys = 16;     // at most
constexpr int kStepQueries = 8;   // worked on at a time
constexpr int kStepRows = 16;     // of kv in a thread
constexpr int kStepLanes = 16;    // threads that share a row of kv
constexpr int kStepWarps = kStepWidth / 32;

template <class Acc> struct Packets { using Arith = Tf32x3; };  // how arrays are read
template <> struct Packets<double> { using Arith = F64; };

template <class Acc>
struct Step {
  using Arith = typename Packets<Acc>::Arith;
  static constexpr int kVector = 16 / sizeof(Acc);                      // numbers that are read and written together
  static constexpr int kColumns = kStepLanes * kVector;                 // of kv in a block
  static constexpr int kPackets = kStepWidth / (32 * kVector);          // of a row of q or k in a lane
  struct alignas(16) Vector { Acc x[kVector]; };

  struct Shared {
    Acc k[kStepKeys][kStepWidth], q[kStepQueries][kStepWidth], k_sum[kStepWidth];
    Acc v[kStepKeys][kColumns], v_sum[kColumns];
    Acc parts[kStepQueries][kStepWarps][kColumns];  // q~ kv, of each warp's rows of kv
    i64 out[kStepQueries];     // where the queries' rows of the result begin
    u64 den_at[kStepQueries];  // their places in p.den; 0: not to be written
    Head head;
    i32 seen[kStepQueries];  // keys that they see
    Acc den[kStepQueries], count;
  };

  const Params& p;
  const i32 feature;
  Shared& shared;
  i32 column0, group, rows, warps;  // rows: of q, those of all heads that share the state
  Vector kv[kStepRows];

  LA_DEVICE Step(const StepParams& of) : p(of.p), feature(of.feature), shared(*reinterpret_cast<Shared*>(dynamic_shared())) {
    column0 = block() % p.splits * kColumns;
    group = group_size(p);
    rows = static_cast<i32>(p.n) * group;
    warps = (p.d + 31) / 32;
  }

  LA_DEVICE void run() {
    read_state();
    sync_block();
    read_values();
    i32 seen = 0;
    for (i32 first = 0; first < rows; first += kStepQueries) {
      if (first > 0) sync_block();  // the rows before have left
      put_rows(first == 0 ? static_cast<i32>(p.m) : 0, first);
      sync_block();
      const i32 some = queries(first);
      find_dens(some);
      for (i32 i = 0; i < some; ++i) {
        for (const i32 last = shared.seen[i]; seen < last; ++seen) add_key(seen);
        multiply(i);
      }
      sync_block();
      write_rows(some);
    }
    for (; seen < p.m; ++seen) add_key(seen);
    if (p.final.kv != 0) write_state();
  }

  // --- the state. A thread has kVector columns of kStepRows rows; kStepLanes threads stand side by side.

  LA_DEVICE static i32 lane() { return thread() % kStepLanes; }
  LA_DEVICE static i32 row0() { return thread() / kStepLanes * kStepRows; }

  // whole(numbers, address) of each row, or number(one, address) of each number where packets are not aligned.
  template <class Whole, class Number>
  LA_DEVICE void each(u64 from, const Whole& whole, const Number& number) {
    const i32 column = column0 + lane() * kVector;
    const u64 pitch = static_cast<u64>(p.e) * sizeof(Acc);
    const u64 at = from + static_cast<u64>(row0()) * pitch + static_cast<u64>(column) * sizeof(Acc);
    const bool aligned = from % 16 == 0 && p.e % kVector == 0;
    if (aligned) {
#pragma unroll
      for (int i = 0; i < kStepRows; ++i) {
        if (row0() + i < p.d && column < p.e) whole(kv[i], at + i * pitch);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kStepRows; ++i) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          if (row0() + i < p.d && column + j < p.e) number(kv[i].x[j], at + i * pitch + j * sizeof(Acc));
        }
      }
    }
  }

  LA_DEVICE void read_state() {
    Head head;
    head.place(p, static_cast<u32>(block() / p.splits), 0, p.outer);
    const StatePlace start = StatePlace::find<Acc>(p.start, head, p, 0);
#pragma unroll
    for (Vector& row : kv) row = Vector{};
    each(start.kv, [](Vector& x, u64 at) { decode_packet(load_16(reinterpret_cast<const void*>(at)), Arith::kDType, x.x); },
         [](Acc& x, u64 at) { x = load_number<Acc>(at, 0); });
    const i32 i = thread();
    shared.k_sum[i] = i < p.d ? load_number<Acc>(start.k_sum, i) : Acc(0);
    for (i32 c = i; c < kColumns; c += 32 * warps) {
      shared.v_sum[c] = column0 + c < p.e ? load_number<Acc>(start.v_sum, column0 + c) : Acc(0);
    }
    if (i != 0) return;
    shared.count = load_number<Acc>(start.count, 0);
    shared.head = head;
  }

  LA_DEVICE void write_state() {
    const StatePlace final = StatePlace::find<Acc>(p.final, shared.head, p, 0);
    each(final.kv, [](Vector& x, u64 at) { store_16(reinterpret_cast<void*>(at), encode_packet(x.x)); },
         [](Acc& x, u64 at) { store_number(at, 0, x); });
    const i32 i = thread(), m = static_cast<i32>(p.m);
    for (i32 c = i; c < kColumns; c += 32 * warps) {
      if (column0 + c < p.e) store_number(final.v_sum, column0 + c, value_sum(c, m));
    }
    if (column0 > 0) return;
    if (i < p.d) store_number(final.k_sum, i, key_sum(i, m));
    if (i == 0) store_number(final.count, 0, shared.count + Acc(m));
  }

  LA_DEVICE void add_key(i32 j) {
    const Vector v = *reinterpret_cast<const Vector*>(shared.v[j] + lane() * kVector);
#pragma unroll
    for (int i = 0; i < kStepRows; ++i) {
      const Acc k = shared.k[j][row0() + i];
#pragma unroll
      for (int c = 0; c < kVector; ++c) kv[i].x[c] = ptx::fma(k, v.x[c], kv[i].x[c]);
    }
  }

  // q~ kv of the query in place i, to the parts that write_rows adds up.
  LA_DEVICE void multiply(i32 i) {
    Vector sum = {};
#pragma unroll
    for (int r = 0; r < kStepRows; ++r) {
      const Acc q = shared.q[i][row0() + r];
#pragma unroll
      for (int c = 0; c < kVector; ++c) sum.x[c] = ptx::fma(q, kv[r].x[c], sum.x[c]);
    }
#pragma unroll
    for (int c = 0; c < kVector; ++c) sum.x[c] += shuffle_xor(sum.x[c], kStepLanes);
    if (lane_id() < kStepLanes) *reinterpret_cast<Vector*>(shared.parts[i][warp_id()] + lane() * kVector) = sum;
  }

  // --- sums of the state and of the first `seen` keys

  LA_DEVICE Acc key_sum(i32 d, i32 seen) const {
    Acc sum = shared.k_sum[d];
#pragma unroll 4
    for (i32 j = 0; j < seen; ++j) sum += shared.k[j][d];
    return sum;
  }

  LA_DEVICE Acc value_sum(i32 column, i32 seen) const {
    Acc sum = shared.v_sum[column];
#pragma unroll 4
    for (i32 j = 0; j < seen; ++j) sum += shared.v[j][column];
    return sum;
  }

  // --- rows of q, k and v. Row r of q is query r / group of head r % group of those that share the state.

  LA_DEVICE i32 queries(i32 first) const { return rows - first < kStepQueries ? rows - first : kStepQueries; }

  // Packet i of the row at `first`, of which `width` elements are left.
  LA_DEVICE static Word4 fetch(const Tensor& from, i64 first, i32 i, i32 width) {
    const u64 at = from.data + static_cast<u64>((first + i * kVector) * element_bytes<Arith>(from));
    return fetch_packet<Arith, kVector>(from, reinterpret_cast<const char*>(at), width - i * kVector);
  }

  LA_DEVICE void read_values() {
    const i64 first = shared.head.offset(p.v.lead) + column0;
    for (i32 i = thread(); i < p.m * kStepLanes; i += 32 * warps) {
      const i32 j = i / kStepLanes, packet = i % kStepLanes;
      Vector v;
      decode_packet(fetch(p.v, first + j * p.v.row, packet, p.e - column0), p.v.dtype, v.x);
      *reinterpret_cast<Vector*>(shared.v[j] + packet * kVector) = v;
    }
  }

  // A row of q or k on its way to `to`.
  struct Row {
    Word4 raw[kPackets];
    Acc* to;
    i32 dtype;
  };

  // The first `keys` rows of k, and those of q from `first` on: a warp has two at a time, to wait for both at once.
  LA_DEVICE void put_rows(i32 keys, i32 first) {
    const i32 count = keys + queries(first);
    for (i32 i = warp_id(); i < count; i += 2 * warps) {
      Row row[2];
      row[0] = fetch_row(i, keys, first);
      const bool both = i + warps < count;
      if (both) row[1] = fetch_row(i + warps, keys, first);
      put_row(row[0]);
      if (both) put_row(row[1]);
    }
  }

  LA_DEVICE Row fetch_row(i32 i, i32 keys, i32 first) {
    const bool is_key = i < keys;
    const i32 place = is_key ? i : i - keys, row = first + place, at = is_key ? i : row / group;
    const Tensor& from = is_key ? p.k : p.q;
    Head own = shared.head;
    if (!is_key) own.place(p, static_cast<u32>(row - at * group), p.outer, p.rank);
    if (!is_key && lane_id() == 0) {
      const u64 den = own.template place<Acc>(p.den);
      const i64 seen = at + p.query_shift + 1;
      shared.seen[place] = static_cast<i32>(seen < 0 ? 0 : seen < p.m ? seen : p.m);
      shared.den_at[place] = column0 > 0 || den == 0 ? 0 : den + static_cast<u64>(at) * sizeof(Acc);
      shared.out[place] = own.offset(p.dst.lead) + at * p.dst.row + column0;
    }
    Row found;
#pragma unroll
    for (int n = 0; n < kPackets; ++n) {
      found.raw[n] = fetch(from, own.offset(from.lead) + at * from.row, lane_id() + 32 * n, p.d);
    }
    found.to = (is_key ? shared.k : shared.q)[place];
    found.dtype = from.dtype;
    return found;
  }

  // phi(norm(x)) of the row, zeros behind its end.
  LA_DEVICE void put_row(const Row& row) const {
    Vector x[kPackets];
#pragma unroll
    for (int i = 0; i < kPackets; ++i) decode_packet(row.raw[i], row.dtype, x[i].x);
    if (p.unit_norm) {
      Acc sum = squares(x);
      const Acc scale = scale_for(sum);
      if (scale != Acc(1)) {
        multiply(x, scale);
        sum = squares(x);
      }
      multiply(x, inverse_root(sum));
    }
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
      const i32 d = (lane_id() + 32 * i) * kVector;
      if (d < 32 * warps) *reinterpret_cast<Vector*>(row.to + d) = x[i];
    }
    if (feature == 0) return;  // the identity
    sync_warp();
    for (i32 d = lane_id(); d < p.d; d += 32) row.to[d] = feature_value(feature, row.to[d]);
  }

  LA_DEVICE static void multiply(Vector (&x)[kPackets], Acc factor) {
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) x[i].x[j] *= factor;
    }
  }

  LA_DEVICE static Acc squares(const Vector (&x)[kPackets]) {
    Acc sum = 0;
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) sum = ptx::fma(x[i].x[j], x[i].x[j], sum);
    }
    return warp_sum(sum);
  }

  LA_DEVICE static Acc warp_sum(Acc x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
    return x;
  }

  // --- results

  LA_DEVICE void find_dens(i32 some) {
    for (i32 i = warp_id(); i < some; i += warps) {
      const i32 seen = shared.seen[i];
      Acc dot = 0;
      for (i32 d = lane_id(); d < p.d; d += 32) dot = ptx::fma(shared.q[i][d], key_sum(d, seen), dot);
      dot = warp_sum(dot);
      if (lane_id() != 0) continue;
      const Acc den = ptx::fma(scalar_a<Acc>(p), shared.count + Acc(seen), scalar_b<Acc>(p) * dot);
      shared.den[i] = den;
      if (shared.den_at[i] != 0) store_number(shared.den_at[i], 0, den);
    }
  }

  LA_DEVICE void write_rows(i32 some) const {
    for (i32 i = thread(); i < some * kColumns; i += 32 * warps) {
      const i32 at = i / kColumns, c = i % kColumns;
      if (column0 + c >= p.e) continue;
      Acc product = 0;
#pragma unroll 4
      for (i32 w = 0; w < warps; ++w) product += shared.parts[at][w][c];
      const Acc num = ptx::fma(scalar_a<Acc>(p), value_sum(c, shared.seen[at]), scalar_b<Acc>(p) * product);
      store_element(p.dst, shared.out[at] + c, num * inverse_den(p, shared.den[at]));
    }
  }
};

template <class Acc>
LA_KERNEL(kStepWidth, sizeof(Acc) == 8 ? 1 : 2) step(LA_GRID_CONSTANT const StepParams p) {
  Step<Acc>(p).run();
}

}  // namespace la
