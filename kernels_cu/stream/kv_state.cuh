// The state warps of `stream_key_value`: a warpgroup holds 64 rows of R^T, those of 64 columns of v, and forms 64 columns of dv and 64
// of dk. For dk it needs R the other way round: all warps put R^T, rounded, into shared memory.
//
//   dv^T = R^T K^T + G^T w^T,    dk~^T = R V^T + Q^T u^T,    R^T += G^T Q
//
// In Queries the last alone, which they write with the sums; where nothing is masked, the first of both sums, and R^T stays as it is.
#pragma once
#include "stream/kv_pipe.cuh"

namespace la {

template <class Config>
struct KeyValueState {
  using Pipe = KeyValuePipe<Config>;
  using Chunk = typename Pipe::Chunk;
  using Piece = typename Pipe::Piece;
  using P = Products<Config>;
  using IO = StateCells<Config, true>;
  static constexpr int kInner = Config::kInner;

  const Params& p;
  float s[kInner / 2];
  u32 rounded[kInner / 16][4];  // the same, as it enters a product
  float sum_g[2], sum_q[2];  // behind the chunk: a (sum of g) of this lane's columns of v, sum of -delta b q~ of those of k

  LA_DEVICE explicit KeyValueState(const Params& params) : p(params) {}

  LA_DEVICE void run() {
    const u32 parts = Pipe::parts(p);
    Chunk now;
#pragma unroll 1
    while (now.exists(parts)) {
      Pipe::wait(Pipe::kFull, now.slot);  // the part is described
      const Piece& piece = Pipe::piece(now.ordinal);
      const i32 chunks = piece.chunks;
      begin(piece);
#pragma unroll 1
      for (bool more = true; more; more = !now.next(chunks)) {
        if constexpr (!Config::kHasRows) add(now);
        else if constexpr (Config::kCausal) turn(now);
        else turn_unmasked(now);
      }
      if constexpr (!Config::kHasRows) finish(piece);
    }
  }

  static LA_DEVICE int group_column() { return warp_id() / 4 * 64; }
  static LA_DEVICE void sync_all() { sync_named(4, 32 * Config::kStateWarps); }

  LA_DEVICE void turn(const Chunk& now) {
    const i32 row = now.rows.at;
    const auto k = Pipe::k(row), v = Pipe::v(row), q = Pipe::q(now.slot.at), g = Pipe::g(now.slot.at);
    const auto w = Pipe::weights(), u = Pipe::key_weights();
    const auto copy = Pipe::copy();
    Pipe::wait(Pipe::kReady, now.slot);
    Pipe::wait(Pipe::kRowsFull, now.rows);
    round();
    Pipe::wait(Pipe::kMade, now.pair);
    float dv[32], of_g[4], dk[32], of_q[4];
    wgmma_pin(s);
    wgmma_pin(dv);
    wgmma_pin(of_g);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kInner / 16; ++i) wgmma<kAlongK>(dv, rounded[i], k.along(0, i * 16), i > 0);
#pragma unroll
    for (int i = 0; i < Config::kChunk; i += 16) {
      wgmma<kAcross, kAlongK>(dv, g.across(i, group_column()), w.along(0, i), 1);
      wgmma<kAcross, kAlongK>(of_g, g.across(i, group_column()), w.along(Config::kChunk, i), i > 0);
    }
    wgmma_commit();
    fence_async();
    sync_all();  // all of the copy is there
    wgmma_wait<0>();
    wgmma_pin(dv);
    wgmma_pin(of_g);
    wgmma_pin(s);
    wgmma_pin(dk);
    wgmma_pin(of_q);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kInner; i += 16) wgmma<kAcross, kAlongK>(dk, copy.across(i, group_column()), v.along(0, i), i > 0);
#pragma unroll
    for (int i = 0; i < Config::kChunk; i += 16) {
      wgmma<kAcross, kAlongK>(dk, q.across(i, group_column()), u.along(0, i), 1);
      wgmma<kAcross, kAlongK>(of_q, q.across(i, group_column()), u.along(Config::kChunk, i), i > 0);
    }
    wgmma_commit();
#pragma unroll
    for (int i = 0; i < Config::kChunk; i += 16) wgmma<kAcross, kAcross>(s, g.across(i, group_column()), q.across(i, 0), 1);
    wgmma_commit();
    u32 values[Config::kChunk / 16][4];
    finish_values(values, dv, row);
    add(sum_g, of_g);
    wgmma_wait<1>();
    wgmma_pin(dk);
    wgmma_pin(of_q);
    Pipe::arrive(Pipe::kUsed, now.pair);
    find_dots(dk, k);
    add(sum_q, of_q);
    if constexpr (Config::kInSources) wgmma_wait<0>();  // which reads what is written over
    put_values(values, now);
    wgmma_wait<0>();
    wgmma_pin(s);
    if constexpr (!Config::kInSources) Pipe::arrive(Pipe::kFree, now.slot);
    put_keys(dk, now);
  }

  // Where nothing is masked.
  LA_DEVICE void turn_unmasked(const Chunk& now) const {
    const i32 row = now.rows.at;
    const auto k = Pipe::k(row), v = Pipe::v(row);
    const auto copy = Pipe::copy();
    Pipe::wait(Pipe::kReady, now.slot);
    Pipe::wait(Pipe::kMeasured, now.rows);
    float dv[32], dk[32];
    wgmma_pin(dv);
    wgmma_pin(dk);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kInner / 16; ++i) wgmma<kAlongK>(dv, rounded[i], k.along(0, i * 16), i > 0);
    wgmma_commit();
#pragma unroll
    for (int i = 0; i < kInner; i += 16) wgmma<kAcross, kAlongK>(dk, copy.across(i, group_column()), v.along(0, i), i > 0);
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_pin(dv);
    u32 values[Config::kChunk / 16][4];
    finish_values(values, dv, row);
    wgmma_wait<0>();
    wgmma_pin(dk);
    find_dots(dk, k);
    put_values(values, now);
    put_keys(dk, now);
  }

  LA_DEVICE void add(const Chunk& now) {
    const i32 slot = now.slot.at;
    const auto q = Pipe::q(slot), g = Pipe::g(slot);
    const auto of_values = Pipe::value_lines(slot), of_keys = Pipe::key_lines(slot);
    Pipe::wait(Pipe::kReady, now.slot);
    float of_g[4], of_q[4];
    wgmma_pin(s);
    wgmma_pin(of_g);
    wgmma_pin(of_q);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kChunk; i += 16) {
      wgmma<kAcross, kAcross>(s, g.across(i, group_column()), q.across(i, 0), 1);
      wgmma<kAcross, kAlongK>(of_g, g.across(i, group_column()), of_values.along(0, i), i > 0);
      wgmma<kAcross, kAlongK>(of_q, q.across(i, group_column()), of_keys.along(0, i), i > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(s);
    wgmma_pin(of_g);
    wgmma_pin(of_q);
    add(sum_g, of_g);
    add(sum_q, of_q);
    Pipe::arrive(Pipe::kFree, now.slot);
  }

  LA_DEVICE void finish(const Piece& piece) const {
    const StatePlace at = Pipe::final_state(p, piece);
    typename P::State cells;
    P::scatter(cells, s);
    IO::write(cells, p, at.kv, 0);
    if ((lane_id() & 3) != 0) return;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = P::column(c);
      if (column < p.e) store_number(at.v_sum, column, sum_g[c]);
      if (column < p.d) store_number(at.k_sum, column, sum_q[c]);
    }
  }

  static LA_DEVICE void add(float (&sum)[2], const float (&lines)[4]) {
    sum[0] += lines[0] + lines[1];
    sum[1] += lines[2] + lines[3];
  }

  // R^T as products take it: from registers for dv, from shared memory for dk.
  LA_DEVICE void round() {
    const int lane = lane_id();
    const auto copy = Pipe::copy();
#pragma unroll
    for (int i = 0; i < kInner / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) rounded[i][j] = pack_bf16(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
    }
#pragma unroll
    for (int i = 0; i < kInner / 16; ++i) stmatrix_x4(copy.packet_near(P::first_column(), 2 * i, lane & 15, lane >> 4), rounded[i]);
  }

  static LA_DEVICE void read_numbers(float (&x)[4], const float* of_rows, int m) {
    struct alignas(8) Pair { float x[2]; };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Pair two = *reinterpret_cast<const Pair*>(of_rows + P::row(m, 2 * half));
      x[2 * half] = two.x[0];
      x[2 * half + 1] = two.x[1];
    }
  }

  // dv, packed.
  LA_DEVICE void finish_values(u32 (&values)[Config::kChunk / 16][4], const float (&dv)[32], i32 row) const {
#pragma unroll
    for (int m = 0; m < Config::kChunk / 16; ++m) {
      float factor[4];
      read_numbers(factor, Pipe::factors(row, 0), m);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int first = i / 2 * 2, c = i % 2;
        values[m][i] = pack_bf16(ptx::fma(dv[P::place(m, first, c)], factor[first], sum_g[c]),
                                 ptx::fma(dv[P::place(m, first + 1, c)], factor[first + 1], sum_g[c]));
      }
    }
  }

  // dk~, whole; and k . dk~ of each row, shared by the state warps.
  template <class Tile>
  LA_DEVICE void find_dots(float (&dk)[32], const Tile& k) const {
    constexpr int kSets = Config::kChunk / 16;
    float sum[kSets];
#pragma unroll
    for (int m = 0; m < kSets; ++m) {
      float x[4][2], share[4];
      P::read(x, k, m);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        dk[P::place(m, i, 0)] += sum_q[0];
        dk[P::place(m, i, 1)] += sum_q[1];
        share[i] = ptx::fma(x[i][0], dk[P::place(m, i, 0)], x[i][1] * dk[P::place(m, i, 1)]);
      }
      sum[m] = P::sum_columns_of(share);
    }
#pragma unroll
    for (int m = 0; m < kSets; ++m) {
      if (P::holds_sum()) Pipe::dots(warp_id())[P::row(m, P::summed_row())] = sum[m];
    }
  }

  LA_DEVICE void put_values(const u32 (&values)[Config::kChunk / 16][4], const Chunk& now) const {
    sync_all();  // no product reads what is written over any more
    if (thread() < Config::kChunk) find_along(thread(), now.rows.at);
#pragma unroll
    for (int m = 0; m < Config::kChunk / 16; ++m) stmatrix_x4_trans(P::near_block(Pipe::second_result(now), m), values[m]);
  }

  LA_DEVICE void put_keys(float (&dk)[32], const Chunk& now) const {
    sync_all();
    finish_keys(dk, now);
    fence_async();
    sync_warp();
    Pipe::arrive(Pipe::kDone, now.result());
    if constexpr (Config::kInSources) Pipe::arrive(Pipe::kRowsFree, now.rows);
  }

  // By how much of k a row is less: (z . dk~) / |k|^2, where |k| is one as k lies in the tile, and one true.
  LA_DEVICE void find_along(int row, i32 rows) const {
    float dot = 0;
#pragma unroll
    for (int i = 0; i < Config::kStateWarps; ++i) dot += Pipe::dots(i)[row];
    const float inverse = Pipe::factors(rows, 0)[row];
    Pipe::along()[row] = p.unit_norm ? dot * inverse * inverse * Pipe::factors(rows, 1)[row] : 0.f;
  }

  // dk from dk~. All that is read comes before what is written: the compiler keeps their order.
  LA_DEVICE void finish_keys(float (&dk)[32], const Chunk& now) const {
    constexpr int kAtOnce = Config::kChunk / 32;
    const i32 rows = now.rows.at;
    const auto k = Pipe::k(rows);
#pragma unroll
    for (int m0 = 0; m0 < Config::kChunk / 16; m0 += kAtOnce) {
      float x[kAtOnce][4][2], inverse[kAtOnce][4], along[kAtOnce][4];
#pragma unroll
      for (int m = 0; m < kAtOnce; ++m) {
        P::read(x[m], k, m0 + m);
        read_numbers(inverse[m], Pipe::factors(rows, 1), m0 + m);
        read_numbers(along[m], Pipe::along(), m0 + m);
      }
#pragma unroll
      for (int m = 0; m < kAtOnce; ++m) {
        u32 r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& y = dk[P::place(m0 + m, i, c)];
            y = ptx::fma(-x[m][i][c], along[m][i], y * inverse[m][i]);
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) r[i] = pack_bf16(dk[P::place(m0 + m, i / 2 * 2, i % 2)], dk[P::place(m0 + m, i / 2 * 2 + 1, i % 2)]);
        stmatrix_x4_trans(P::near_block(Pipe::result(now), m0 + m), r);
      }
    }
  }

  LA_DEVICE void begin(const Piece& piece) {
    typename P::State cells;
    IO::clear(cells);
    sum_g[0] = sum_g[1] = sum_q[0] = sum_q[1] = 0;
    const Slots<Config> slots(p, piece);
#pragma unroll 1
    for (i32 i = 0; i < slots.count; ++i) {
      IO::add(cells, p, slots.place(slots.first.kv, i, p.d * p.e), 0);
      const u64 v_sum = slots.place(slots.first.v_sum, i, p.e), k_sum = slots.place(slots.first.k_sum, i, p.d);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int column = P::column(c);
        if (column < p.e) sum_g[c] += load_number<float>(v_sum, column);
        if (column < p.d) sum_q[c] += load_number<float>(k_sum, column);
      }
    }
    P::gather(s, cells);
    if constexpr (!Config::kCausal) {
      round();
      fence_async();
      sync_all();
    }
  }
};

}  // namespace la
