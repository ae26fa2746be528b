// The state warps of `stream_key_value`: a warpgroup holds 64 rows of R^T, those of 64 columns of v, and forms 64 columns of dv and 64
// of dk. For dk it needs R the other way round: all warps put R^T, rounded, into shared memory.
//
//   dv^T = R^T K^T + G^T w^T,    dk~^T = R V^T + Q^T u^T,    R^T += G^T Q
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

  const StreamParams& params;
  const Params& p;
  float s[kInner / 2];
  float sum_g[2], sum_q[2];  // a (sum of g) of this lane's columns of v, sum of -delta b q~ of those of k

  LA_DEVICE explicit KeyValueState(const StreamParams& all) : params(all), p(all.p) {}

  LA_DEVICE void run() {
    const u32 parts = Pipe::parts(p);
    Chunk now;
#pragma unroll 1
    while (now.exists(parts)) {
      Pipe::wait(Pipe::kReady, now.slot);
      const Piece& piece = Pipe::piece(now.ordinal);
      const i32 chunks = piece.chunks;
      begin(piece);
#pragma unroll 1
      for (bool more = true; more; more = !now.next(chunks)) turn(piece, now);
    }
  }

  static LA_DEVICE int group_column() { return warp_id() / 4 * 64; }
  static LA_DEVICE bool leads() { return warp_id() % 4 == 0 && lane_id() == 0; }
  static LA_DEVICE void sync() { sync_named(2 + warp_id() / 4, 128); }
  static LA_DEVICE void sync_all() { sync_named(4, 32 * Config::kStateWarps); }

  LA_DEVICE void turn(const Piece& piece, const Chunk& now) {
    const i32 slot = now.slot.at, row = now.rows.at, pair = now.pair.at;
    const auto k = Pipe::k(row), v = Pipe::v(row), q = Pipe::q(slot), g = Pipe::g(slot);
    const auto u = Pipe::key_weights(pair);
    Pipe::wait(Pipe::kReady, now.slot);
    Pipe::wait(Pipe::kRowsFull, now.rows);
    u32 operand[kInner / 16][4];
#pragma unroll
    for (int i = 0; i < kInner / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) operand[i][j] = pack_bf16(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
    }
    put_copy(operand);
    fence_async();
    sync_all();
    Pipe::wait(Pipe::kMade, now.pair);
    make_values(operand, now);
    wgmma_pin(s);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kChunk; i += 16) wgmma<kAcross, kAcross>(s, g.across(i, group_column()), q.across(i, 0), 1);
    wgmma_commit();
    const auto copy = Pipe::copy();
    float dk[32], key_sums[4];
    wgmma_pin(dk);
    wgmma_pin(key_sums);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kInner; i += 16) wgmma<kAcross, kAlongK>(dk, copy.across(i, group_column()), v.along(0, i), i > 0);
#pragma unroll
    for (int i = 0; i < Config::kChunk; i += 16) {
      wgmma<kAcross, kAlongK>(dk, q.across(i, group_column()), u.along(0, i), 1);
      wgmma<kAcross, kAlongK>(key_sums, q.across(i, group_column()), u.along(Config::kChunk, i), i > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(s);
    wgmma_pin(dk);
    wgmma_pin(key_sums);
    finish_keys(dk, k, pair);
    sum_q[0] += of_three(key_sums, 0);
    sum_q[1] += of_three(key_sums, 1);
    sync_warp();
    Pipe::arrive(Pipe::kUsed, now.pair);
    fence_async();
    sync();
    const Span span = piece.rows_at(now.step);
    copy_out(params.second, piece, span, Pipe::stage(), Pipe::kSecond);
    copy_out(params.dst, piece, span, k, Pipe::kDst);
    if (leads()) tma_wait_read();
    sync();  // what follows may write where the results were
    if (leads()) mbarrier_arrive(Pipe::barrier(Pipe::kRowsFree + row));
    Pipe::arrive(Pipe::kFree, now.slot);
  }

  // dv, staged; and the sums of g.
  LA_DEVICE void make_values(const u32 (&operand)[kInner / 16][4], const Chunk& now) {
    const auto k = Pipe::k(now.rows.at), g = Pipe::g(now.slot.at);
    const auto w = Pipe::weights(now.pair.at);
    float dv[32], sums[4];
    wgmma_pin(s);
    wgmma_pin(dv);
    wgmma_pin(sums);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kInner / 16; ++i) wgmma<kAlongK>(dv, operand[i], k.along(0, i * 16), i > 0);
#pragma unroll
    for (int i = 0; i < Config::kChunk; i += 16) {
      wgmma<kAcross, kAlongK>(dv, g.across(i, group_column()), w.along(0, i), 1);
      wgmma<kAcross, kAlongK>(sums, g.across(i, group_column()), w.along(Config::kChunk, i), i > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(dv);
    wgmma_pin(sums);
    stage_values(dv, now.pair.at);
    sum_g[0] = ptx::fma(p.a_float, sums[0], sum_g[0]);
    sum_g[1] = ptx::fma(p.a_float, sums[2], sum_g[1]);
  }

  static LA_DEVICE void put_copy(const u32 (&operand)[kInner / 16][4]) {
    const int lane = lane_id();
    const auto copy = Pipe::copy();
#pragma unroll
    for (int i = 0; i < kInner / 16; ++i) stmatrix_x4(copy.packet_near(P::first_column(), 2 * i, lane & 15, lane >> 4), operand[i]);
  }

  // The sum of the products with three lines, of the lane's row of each half.
  static LA_DEVICE float of_three(const float (&x)[4], int half) {
    const int t = lane_id() & 3;
    float share = t == 0 ? x[2 * half] + x[2 * half + 1] : t == 1 ? x[2 * half] : 0.f;
    share += shuffle_xor(share, 1);
    return share + shuffle_xor(share, 2);
  }

  static LA_DEVICE constexpr int at(int m, int i, int c) { return (m * 2 + i / 2) * 4 + c * 2 + i % 2; }

  static LA_DEVICE void read_factors(float (&factor)[4], i32 pair, i32 which, int m) {
    struct alignas(8) Pair { float x[2]; };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Pair two = *reinterpret_cast<const Pair*>(Pipe::factors(pair, which) + P::row(m, 2 * half));
      factor[2 * half] = two.x[0];
      factor[2 * half + 1] = two.x[1];
    }
  }

  LA_DEVICE void stage_values(const float (&dv)[32], i32 pair) const {
#pragma unroll
    for (int m = 0; m < Config::kChunk / 16; ++m) {
      float factor[4];
      read_factors(factor, pair, 0, m);
      u32 r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int first = i / 2 * 2, c = i % 2;
        r[i] = pack_bf16(ptx::fma(dv[at(m, first, c)], factor[first], sum_g[c]), ptx::fma(dv[at(m, first + 1, c)], factor[first + 1], sum_g[c]));
      }
      stmatrix_x4_trans(P::near_block(Pipe::stage(), m), r);
    }
  }

  // dk from dk~, in the place of k.
  template <class Tile>
  LA_DEVICE void finish_keys(float (&dk)[32], const Tile& k, i32 pair) const {
#pragma unroll
    for (int m = 0; m < Config::kChunk / 16; ++m) {
      float z[4][2], inverse[4], share[4];
      P::read(z, k, m);
      read_factors(inverse, pair, 1, m);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        share[i] = 0;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = dk[at(m, i, c)];
          x += sum_q[c];
          share[i] = ptx::fma(z[i][c] * inverse[i], x, share[i]);
        }
      }
      const float sum = P::sum_columns_of(share);
      if (P::holds_sum()) Pipe::dots(warp_id())[P::row(m, P::summed_row())] = sum;
    }
    sync_all();
    if (thread() < Config::kChunk) {
      float dot = 0;
#pragma unroll
      for (int i = 0; i < Config::kStateWarps; ++i) dot += Pipe::dots(i)[thread()];
      Pipe::along()[thread()] = p.unit_norm ? dot : 0.f;
    }
    sync_all();
#pragma unroll
    for (int m = 0; m < Config::kChunk / 16; ++m) {
      float z[4][2], inverse[4];
      P::read(z, k, m);
      read_factors(inverse, pair, 1, m);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float along = Pipe::along()[P::row(m, i)];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = dk[at(m, i, c)];
          x = ptx::fma(-z[i][c] * inverse[i], along, x) * inverse[i];
        }
      }
      u32 r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) r[i] = pack_bf16(dk[at(m, i / 2 * 2, i % 2)], dk[at(m, i / 2 * 2 + 1, i % 2)]);
      stmatrix_x4_trans(P::near_block(k, m), r);
    }
  }

  template <class Tile>
  LA_DEVICE void copy_out(const TensorMap& map, const Piece& piece, Span span, const Tile& tile, i32 array) const {
    if (span.begin == span.end) return;
    if (span.begin > 0) return copy_rows(piece, span, tile, array);
    if (!leads()) return;
    const i32 (&at)[3] = piece.at[array];
    tma_store(&map, tile.panel(group_column()), {group_column(), static_cast<i32>(span.first), at[0], at[1], at[2]});
    tma_commit();
  }

  // See StateWork::copy_out.
  template <class Tile>
  LA_DEVICE void copy_rows(const Piece& piece, Span span, const Tile& tile, i32 array) const {
    const Tensor& t = array == Pipe::kDst ? p.dst : params.of_second;
    const u64 head = array == Pipe::kDst ? piece.places.dst : piece.head.template address<typename Config::Arith>(t);
    const int width = array == Pipe::kDst ? p.d : p.e;
    const i64 step = t.row * 2;
#pragma unroll 1
    for (int i = thread() % 128; i < Config::kChunk * 8; i += 128) {
      const int row = i / 8, packet = group_column() / 8 + i % 8;
      if (!span.holds(row)) continue;
      char* to = reinterpret_cast<char*>(head) + (span.first + row) * step + packet * 16;
      store_packet<typename Config::Arith, 8>(t, to, width - packet * 8, tile.packet(row, packet));
    }
  }

  LA_DEVICE void begin(const Piece& piece) {
    typename P::State cells;
    IO::clear(cells);
    sum_g[0] = sum_g[1] = sum_q[0] = sum_q[1] = 0;
    if (p.start.kv != 0) {
      const StatePlace at = Pipe::start(p, piece);
      IO::read(cells, p, at.kv, 0);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int column = P::column(c);
        if (column < p.e) sum_g[c] = load_number<float>(at.v_sum, column);
        if (column < p.d) sum_q[c] = load_number<float>(at.k_sum, column);
      }
    }
#pragma unroll
    for (int k = 0; k < kInner / 8; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[4 * k + i] = cells[i / 2][k].x[i % 2];
    }
  }
};

}  // namespace la
