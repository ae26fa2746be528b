// Kernels that check the emulation itself, and that are written as the library's kernels are.
#include "ptx/all.cuh"

namespace la {

using namespace ptx;

// One wrapper per kernel: every lane reads its operands from its row of `in` and writes its results
// to its row of `out`, both [blocks * threads][words] 32-bit words.
struct LaneParams {
  const u32* in;
  u32* out;
  i32 in_words, out_words, mask;
};

template <class Wrapper>
LA_KERNEL(128, 1) per_lane(LA_GRID_CONSTANT const LaneParams params) {
  const i64 row = static_cast<i64>(block()) * Wrapper::kThreads + thread();
  Wrapper::run(params.in + row * params.in_words, params.out + row * params.out_words, params.mask);
}

struct Indices {
  static constexpr int kThreads = 96;
  static LA_DEVICE void run(const u32*, u32* out, i32) {
    out[0] = static_cast<u32>(block());
    out[1] = static_cast<u32>(thread());
    out[2] = static_cast<u32>(grid());
  }
};

struct MmaBf16 {
  static constexpr int kThreads = 32;
  static LA_DEVICE void run(const u32* in, u32* out, i32) {
    float c[4] = {as_float(in[6]), as_float(in[7]), as_float(in[8]), as_float(in[9])};
    mma_bf16(c, {in[0], in[1], in[2], in[3]}, {in[4], in[5]});
    for (int i = 0; i < 4; ++i) out[i] = as_bits(c[i]);
  }
};

struct MmaTf32 {
  static constexpr int kThreads = 32;
  static LA_DEVICE void run(const u32* in, u32* out, i32) {
    float c[4] = {as_float(in[6]), as_float(in[7]), as_float(in[8]), as_float(in[9])};
    mma_tf32(c, {in[0], in[1], in[2], in[3]}, {in[4], in[5]});
    for (int i = 0; i < 4; ++i) out[i] = as_bits(c[i]);
  }
};

struct MmaF64 {
  static constexpr int kThreads = 32;
  static LA_DEVICE void run(const u32* in, u32* out, i32) {
    double c[2] = {as_double(in[4], in[5]), as_double(in[6], in[7])};
    mma_f64(c, as_double(in[0], in[1]), as_double(in[2], in[3]));
    for (int i = 0; i < 2; ++i) {
      out[2 * i] = low_word(c[i]);
      out[2 * i + 1] = high_word(c[i]);
    }
  }
};

// The lane's 16-byte row goes to shared memory, in reverse order, so that addresses count.
template <bool transposed>
struct Ldmatrix {
  static constexpr int kThreads = 32;
  static LA_DEVICE void run(const u32* in, u32* out, i32) {
    u32* row = reinterpret_cast<u32*>(dynamic_shared()) + 4 * (31 - thread());
    for (int i = 0; i < 4; ++i) row[i] = in[i];
    sync_warp();
    u32 r[4];
    if constexpr (transposed) ldmatrix_x4_trans(r, row);
    else ldmatrix_x4(r, row);
    for (int i = 0; i < 4; ++i) out[i] = r[i];
  }
};

// The way back: each matrix is written by its lanes, and each lane reads its row again.
template <bool transposed>
struct Stmatrix {
  static constexpr int kThreads = 32;
  static LA_DEVICE void run(const u32* in, u32* out, i32) {
    u32* row = reinterpret_cast<u32*>(dynamic_shared()) + 4 * (31 - thread());
    const u32 r[4] = {in[0], in[1], in[2], in[3]};
    if constexpr (transposed) stmatrix_x4_trans(row, r);
    else stmatrix_x4(row, r);
    sync_warp();
    for (int i = 0; i < 4; ++i) out[i] = row[i];
  }
};

struct Shuffles {
  static constexpr int kThreads = 64;
  static LA_DEVICE void run(const u32* in, u32* out, i32 mask) {
    out[0] = shuffle_xor(in[0], mask);
    out[1] = as_bits(shuffle_xor(as_float(in[1]), mask));
    const double x = shuffle_xor(as_double(in[2], in[3]), mask);
    out[2] = low_word(x);
    out[3] = high_word(x);
    out[4] = warp_any(in[0] == 7u);
  }
};

struct Conversions {
  static constexpr int kThreads = 32;
  static LA_DEVICE void run(const u32* in, u32* out, i32) {
    const float x = as_float(in[0]), y = as_float(in[1]);
    out[0] = pack_bf16(x, y);
    out[1] = pack_f16(x, y);
    out[2] = to_tf32(x);
    out[3] = to_bf16(x) | static_cast<u32>(to_f16(y)) << 16;
    out[4] = as_bits(bf16_low(out[0]));
    out[5] = as_bits(bf16_high(out[0]));
    out[6] = as_bits(f16_low(out[1]));
    out[7] = as_bits(f16_high(out[1]));
  }
};

struct Memory {
  static constexpr int kThreads = 32;
  static LA_DEVICE void run(const u32* in, u32* out, i32) {
    store_16(out, load_16(in));
    store_8(out + 4, load_8(in + 4));
    store_4(out + 6, load_4(in + 6));
    const char* half = reinterpret_cast<const char*>(in + 7);
    store_2(reinterpret_cast<char*>(out + 7), load_2(half));
    store_2(reinterpret_cast<char*>(out + 7) + 2, load_2(half + 2));
  }
};

struct Maths {
  static constexpr int kThreads = 32;
  static LA_DEVICE void run(const u32* in, u32* out, i32) {
    const float x = as_float(in[0]);
    const double z = x;
    const float f[4] = {ptx::exp(x), ptx::reciprocal_sqrt(x), ptx::fma(x, x, x),
                        ptx::square_root(x)};
    const double d[3] = {ptx::exp(z), ptx::reciprocal_sqrt(z), ptx::fma(z, z, z)};
    for (int i = 0; i < 4; ++i) out[i] = as_bits(f[i]);
    for (int i = 0; i < 3; ++i) {
      out[4 + 2 * i] = low_word(d[i]);
      out[5 + 2 * i] = high_word(d[i]);
    }
  }
};

// out[b] = x[b] y[b]^T, 64x64 each: bf16 in, float32 out, one block of 4 warps per product and 16
// rows per warp, `repeats` times over. As a kernel would: global -> shared -> ldmatrix -> mma.
struct GemmParams {
  const bf16* x;
  const bf16* y;
  float* out;
  i32 repeats;
};

template <int kSize>
LA_KERNEL(128, 1) gemm(LA_GRID_CONSTANT const GemmParams params) {
  constexpr int kPitch = kSize + 8;  // elements; shifts rows by 16 bytes against bank conflicts
  bf16* x = reinterpret_cast<bf16*>(dynamic_shared());
  bf16* y = x + kSize * kPitch;
  const i64 offset = static_cast<i64>(block()) * kSize * kSize;
  const int lane = thread() % 32, warp_row = thread() / 32 * 16;
  float c[kSize / 8][4] = {};
  for (int repeat = 0; repeat < params.repeats; ++repeat) {
    sync_block();
    for (int i = thread() * 8; i < kSize * kSize; i += 128 * 8) {
      const int at = i / kSize * kPitch + i % kSize;
      *reinterpret_cast<Word4*>(x + at) = load_16(params.x + offset + i);
      *reinterpret_cast<Word4*>(y + at) = load_16(params.y + offset + i);
    }
    sync_block();
    for (int k = 0; k < kSize; k += 16) {
      u32 a[4];
      ldmatrix_x4(a, x + (warp_row + lane % 16) * kPitch + k + lane / 16 * 8);
      for (int j = 0; j < kSize / 8; j += 2) {
        u32 b[4];  // rows of y are columns of y^T: no transposition
        ldmatrix_x4(b, y + (j * 8 + lane % 8 + lane / 16 * 8) * kPitch + k + lane / 8 % 2 * 8);
        mma_bf16(c[j], a, {b[0], b[1]});
        mma_bf16(c[j + 1], a, {b[2], b[3]});
      }
    }
  }
  for (int j = 0; j < kSize / 8; ++j) {
    for (int i = 0; i < 4; ++i) {
      const int row = warp_row + lane / 4 + i / 2 * 8, column = j * 8 + lane % 4 * 2 + i % 2;
      params.out[offset + row * kSize + column] = c[j][i];
    }
  }
}

// d[64][N] = (c +) a[64][64] b[64][N] by four products of one group. Operands come as an image of
// shared memory, or a as the registers [4][threads][4]; c and d as the registers [threads][N / 2].
struct WgmmaParams {
  const u32* image;
  const u32* registers;
  const float* c;
  float* d;
  i32 words, a, b;  // of the image; bytes to where the operands begin
  i32 aside;        // of b's atoms, where it is wider than one
  i32 keep;
};

template <Major A, Major B>
struct FromShared {
  template <int kCount>
  static LA_DEVICE void multiply(float (&d)[kCount], const WgmmaParams& params, int k, i32 keep) {
    const unsigned char *a = dynamic_shared() + params.a, *b = dynamic_shared() + params.b;
    wgmma<A, B>(d, wgmma_operand(a + k * (A == kAlongK ? 32 : 2048)),
                wgmma_operand(b + k * (B == kAlongK ? 32 : 2048), static_cast<u32>(params.aside)),
                keep);
  }
};

template <Major B>
struct FromRegisters {
  template <int kCount>
  static LA_DEVICE void multiply(float (&d)[kCount], const WgmmaParams& params, int k, i32 keep) {
    u32 a[4];
    for (int i = 0; i < 4; ++i) a[i] = params.registers[(128 * k + thread()) * 4 + i];
    const unsigned char* b = dynamic_shared() + params.b;
    const u32 aside = static_cast<u32>(params.aside);
    wgmma<B>(d, a, wgmma_operand(b + k * (B == kAlongK ? 32 : 2048), aside), keep);
  }
};

template <int kColumns, class Form>
LA_KERNEL(128, 1) warpgroup(LA_GRID_CONSTANT const WgmmaParams params) {
  u32* shared = reinterpret_cast<u32*>(dynamic_shared());
  for (int i = thread(); i < params.words; i += 128) shared[i] = params.image[i];
  fence_async();
  sync_block();
  constexpr int kCount = kColumns / 2;
  float d[kCount];
  for (int i = 0; i < kCount; ++i) d[i] = params.c[thread() * kCount + i];
  wgmma_pin(d);
  wgmma_fence();
  for (int k = 0; k < 4; ++k) Form::multiply(d, params, k, params.keep || k);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_pin(d);
  for (int i = 0; i < kCount; ++i) params.d[thread() * kCount + i] = d[i];
}

// What a kernel must not do, by number.
struct FaultParams {
  float* out;
  i32 zero;  // 0, but the compiler does not know
};

template <int kFault>
LA_KERNEL(64, 1) faulty(LA_GRID_CONSTANT const FaultParams params) {
  float* shared = reinterpret_cast<float*>(dynamic_shared());
  const int t = thread();
  const int zero = params.zero;
  if constexpr (kFault == 0) {
    if (t != 40) sync_block();
  }
  if constexpr (kFault == 1) {
    if (t == 40) return;
    sync_block();
  }
  if constexpr (kFault == 2) {
    if (t % 32 == 0) sync_warp();
  }
  if constexpr (kFault == 3) {
    if (t < 32) sync_block();
    else sync_block();
  }
  if constexpr (kFault == 4) {
    if (t % 32 != 3) shuffle_xor(t, 1);
  }
  if constexpr (kFault == 5) {
    if (t % 32 == 3) sync_block();
    else shuffle_xor(t, 1);
  }
  if constexpr (kFault == 6) {
    if (t % 32 == 3) warp_any(true);
    else sync_warp();
  }
  if constexpr (kFault == 7) shared[64 + t] = 1.f;  // launched with 256 bytes
  if constexpr (kFault == 8) shared[1 << 20] = 1.f;
  if constexpr (kFault == 9) params.out[0] = *reinterpret_cast<float*>(zero + 8ll);
  if constexpr (kFault == 10) store_4(params.out, static_cast<u32>(t / zero));
  if constexpr (kFault == 11) load_16(reinterpret_cast<char*>(params.out) + 4);
  if constexpr (kFault == 12) store_4(shared, 1u);
  if constexpr (kFault == 13) {
    u32 r[4];
    ldmatrix_x4(r, shared + 62);
  }
  if constexpr (kFault == 14) {
    u32 r[4];
    ldmatrix_x4(r, shared + 1);
  }
  if constexpr (kFault == 15) {
    float x[4] = {1.f, 2.f, 3.f, 4.f};
    params.out[0] = x[zero + 4];
  }
  if constexpr (kFault == 16) *reinterpret_cast<Word4*>(shared + 1 + zero) = Word4{{1, 2, 3, 4}};
  if constexpr (kFault == 17) {  // more than a stack
    volatile char big[300 * 1024];
    big[zero] = 1;
    params.out[0] = big[zero];
  }
  if constexpr (kFault == 18) params.out[16 + zero] = 1.f;  // launched with 16 floats and a fence
  if constexpr (kFault == 19) params.out[zero - 1] = 1.f;
  if constexpr (kFault == 20) {
    if (t < 32) sync_named(1, 64);
    else sync_named(2, 64);
  }
  if constexpr (kFault == 21) {
    if (t < 32) sync_named(1, 64);
    else sync_block();
  }
  if constexpr (kFault == 22) sync_named(1, t < 32 ? 64 : 32);
  if constexpr (kFault == 23) sync_named(1, t % 2 ? 64 : 32);
  if constexpr (kFault == 24) sync_named(1 + t % 2, 64);
  if constexpr (kFault == 25) sync_named(1, 32);
  if constexpr (kFault == 26) {
    if (t < 32) sync_named(1, 64);
  }
  if constexpr (kFault == 27) {
    if (t % 32 == 3) sync_named(1, 64);
    else sync_named(1, 64);
  }
  if constexpr (kFault == 28) sync_named(zero, 64);
  if constexpr (kFault == 29) sync_named(1, 48);
}

// A product of ones, 64x8x16: 16 everywhere. What may go wrong around it, by number.
struct Ones {
  float d[4] = {};
  u64 a = wgmma_operand(dynamic_shared()), b = wgmma_operand(dynamic_shared() + 8192);

  static constexpr int kBytes = 9216;
  static LA_DEVICE void fill(u32 word) {
    u32* shared = reinterpret_cast<u32*>(dynamic_shared());
    for (int i = thread(); i < kBytes / 4; i += 128) shared[i] = word;
    fence_async();
    sync_block();
  }
  LA_DEVICE void multiply(i32 keep = 0) { wgmma<kAlongK, kAlongK>(d, a, b, keep); }
};
constexpr u32 kOnes = 0x3f803f80;  // a pair of bfloat16

// out[0..127] = an accumulator of each thread
template <int kCase>
LA_KERNEL(128, 1) in_flight(LA_GRID_CONSTANT const FaultParams params) {
  Ones::fill(kOnes);
  Ones ones, more;
  float seen = 0.f;
  wgmma_fence();
  ones.multiply();
  wgmma_commit();
  if constexpr (kCase == 0) wgmma_wait<0>();
  if constexpr (kCase <= 1) seen = ones.d[0];  // 1: before the wait
  if constexpr (kCase == 2) {  // overwritten before the wait
    sync_block();
    Ones::fill(kOnes + 0x00800080);  // twos
  }
  if constexpr (kCase == 3 || kCase == 4) {  // the first group has ended, the second has not
    more.multiply();
    wgmma_commit();
    wgmma_wait<1>();
    seen = kCase == 3 ? ones.d[0] : more.d[0];
  }
  if constexpr (kCase == 5) {  // a chain over two groups ends with the last
    ones.multiply(1);
    wgmma_commit();
    wgmma_wait<1>();
    seen = ones.d[0];
  }
  if constexpr (kCase == 6) {  // and begins anew without `keep`
    ones.multiply(1);
    ones.multiply(0);
    ones.multiply(1);
    wgmma_commit();
  }
  wgmma_wait<0>();
  if constexpr (kCase == 2 || kCase == 6) seen = ones.d[0];
  params.out[thread()] = seen;
}

template <int kFault>
LA_KERNEL(128, 1) faulty_wgmma(LA_GRID_CONSTANT const FaultParams params) {
  const int t = thread();
  Ones::fill(kOnes);
  Ones ones;
  if constexpr (kFault == 0) {
    wgmma_fence();
    ones.multiply();
  }
  if constexpr (kFault == 1) {
    wgmma_fence();
    ones.multiply();
    wgmma_commit();
  }
  if constexpr (kFault == 2) {
    wgmma_fence();
    ones.multiply();
    wgmma_wait<0>();
  }
  if constexpr (kFault == 3) ones.multiply();
  if constexpr (kFault == 4) {  // the first run was opened, the second was not
    wgmma_fence();
    ones.multiply();
    wgmma_commit();
    wgmma_wait<0>();
    ones.multiply(1);
  }
  if constexpr (kFault == 5) {  // written behind the last fence_async
    dynamic_shared()[4096] = 1;
    sync_block();
    wgmma_fence();
    ones.multiply();
    wgmma_commit();
    wgmma_wait<0>();
    if (t == 0) dynamic_shared()[4096] = 2;
    sync_block();
    wgmma_fence();
    ones.multiply();
  }
  if constexpr (kFault == 6) {
    wgmma_fence();
    ones.multiply();
    wgmma_commit();
    if (t == 40) ones.d[2] += 1.f;
    wgmma_wait<0>();
  }
  if constexpr (kFault == 7) {
    wgmma_fence();
    if (t % 32 == 3) ones.b += 1024 / 16;
    ones.multiply();
  }
  if constexpr (kFault == 8) {
    wgmma_fence();
    if (t / 32 == 2) ones.a += 1024 / 16;
    ones.multiply();
    wgmma_commit();
    wgmma_wait<0>();
  }
  if constexpr (kFault == 9) {
    wgmma_fence();
    if (t / 32 != 1) ones.multiply();
    wgmma_commit();
    wgmma_wait<0>();
  }
  if constexpr (kFault == 10) {
    wgmma_fence();
    wgmma<kAlongK, kAlongK>(ones.d, ones.a, ones.b ^ u64(3) << 62, 0);
  }
  if constexpr (kFault == 11) {
    wgmma_fence();
    wgmma<kAlongK, kAlongK>(ones.d, ones.b, ones.b, 0);
  }
  if constexpr (kFault == 12) {
    wgmma_fence();
    wgmma<kAlongK, kAcross>(ones.d, ones.a, ones.a + 32 / 16, 0);
  }
  if constexpr (kFault == 13) {
    wgmma_fence();
    wgmma<kAlongK, kAlongK>(ones.d, ones.a, ones.a + 128 / 16, 0);
  }
  if constexpr (kFault == 14) {
    float d[16];
    wgmma_fence();
    wgmma<kAlongK, kAlongK>(d, ones.a, ones.a, 0);
    wgmma<kAlongK, kAlongK>(reinterpret_cast<float(&)[4]>(d[4]), ones.a, ones.b, 0);
  }
  if constexpr (kFault == 15) wgmma_operand(dynamic_shared() + Ones::kBytes + params.zero);
  if constexpr (kFault == 16) wgmma_operand(dynamic_shared() + 8 + params.zero);
  if constexpr (kFault == 17) stmatrix_x4_trans(dynamic_shared() + Ones::kBytes - 8, {0, 0, 0, 0});
  if constexpr (kFault == 18) {
    float d[36];
    wgmma_fence();
    wgmma<kAlongK, kAcross>(d, ones.a, ones.a, 0);
  }
  if constexpr (kFault == 19) {
    float d[64];
    wgmma_fence();
    wgmma<kAlongK, kAcross>(d, ones.a, wgmma_operand(dynamic_shared(), 8192), 0);
  }
  if constexpr (kFault == 20) wgmma_operand(dynamic_shared(), 1024 + 8);
}

// No thread has called fence_async; and half a warpgroup.
template <int kThreads>
LA_KERNEL(kThreads, 1) unfenced_wgmma(LA_GRID_CONSTANT const FaultParams) {
  Ones ones;
  wgmma_fence();
  ones.multiply();
  wgmma_commit();
  wgmma_wait<0>();
}

// A warpgroup multiplies ones, turn after turn, while two more warps write elsewhere, in two places
// by turns. What was written and fenced is multiplied then, and gives out[0..127]; by case, it is
// not fenced by who wrote it.
template <bool kFenced>
LA_KERNEL(192, 1) writers(LA_GRID_CONSTANT const FaultParams params) {
  constexpr int kTurns = 4;
  u32* shared = reinterpret_cast<u32*>(dynamic_shared());
  Mbarrier* written = reinterpret_cast<Mbarrier*>(dynamic_shared() + 3 * Ones::kBytes);
  for (int i = thread(); i < Ones::kBytes / 4; i += 192) shared[i] = kOnes;
  if (thread() == 0) {
    for (int turn = 0; turn < kTurns; ++turn) mbarrier_init(written + turn, 2);
  }
  fence_async();
  sync_block();
  if (thread() < 128) {
    float sum = 0.f;
    for (int turn = 0; turn < kTurns; ++turn) {
      for (int which = 0; which < 2; ++which) {
        if (which == 1) mbarrier_wait(written + turn, 0);
        Ones ones;
        if (which == 1) ones.b += (turn % 2 + 1) * (Ones::kBytes / 16);
        wgmma_fence();
        ones.multiply();
        wgmma_commit();
        wgmma_wait<0>();
        if (which == 1) sum += ones.d[0];
      }
      sync_named(1, 192);
    }
    params.out[thread()] = sum;
  } else {
    const int t = thread() - 128;
    for (int turn = 0; turn < kTurns; ++turn) {
      const int first = (turn % 2 + 1) * (Ones::kBytes / 4) + 8192 / 4;
      for (int i = t; i < 1024 / 4; i += 64) shared[first + i] = kOnes + turn * 0x00800080;
      if (kFenced || t < 32) fence_async();
      sync_warp();
      if (t % 32 == 0) mbarrier_arrive(written + turn);
      sync_named(1, 192);
    }
  }
}

// Rows go through two slots of shared memory, from two warps that copy them to two that sum them:
// out[t][4] = the sum of (turn + 1) in[turn][t ^ 32][4], of all turns but the fourth. What may be
// forgotten, by number: 1 to wait for a row, 2 for a free slot, 3 for the copies; 4 a slot is given
// back before it is read.
struct RingParams {
  const float* in;
  float* out;
};

template <int kForgotten>
LA_KERNEL(128, 1) ring(LA_GRID_CONSTANT const RingParams params) {
  constexpr int kTurns = 6;
  float* slots = reinterpret_cast<float*>(dynamic_shared());
  Mbarrier *ready = reinterpret_cast<Mbarrier*>(slots + 2 * 256), *free = ready + 2;
  if (thread() < 4) mbarrier_init(ready + thread(), 2);
  sync_block();
  const int t = thread() % 64;
  const auto arrive = [&](Mbarrier* barrier) {
    sync_warp();
    if (t % 32 == 0) mbarrier_arrive(barrier);
  };
  if (thread() < 64) {
    float sum[4] = {};
    for (int turn = 0; turn < kTurns; ++turn) {
      const int slot = turn % 2;
      if (kForgotten != 1) mbarrier_wait(ready + slot, turn / 2 % 2);
      if (kForgotten == 4) arrive(free + slot);
      for (int i = 0; i < 4; ++i)
        sum[i] += static_cast<float>(turn + 1) * slots[256 * slot + (t ^ 32) * 4 + i];
      if (kForgotten != 4) arrive(free + slot);
    }
    for (int i = 0; i < 4; ++i) params.out[4 * t + i] = sum[i];
  } else {
    const auto send = [&](int turn) {
      if (turn < kTurns) {
        if (kForgotten != 2) mbarrier_wait(free + turn % 2, turn / 2 % 2 ^ 1);
        const float* row = params.in + (64 * turn + t) * 4;
        copy_16_or_zero(slots + 256 * (turn % 2) + 4 * t, row, turn == 3 ? 0 : 16);
      }
      copy_commit();
    };
    send(0);
    for (int turn = 0; turn < kTurns; ++turn) {
      send(turn + 1);
      copy_wait_but<kForgotten == 3 ? 2 : 1>();
      arrive(ready + turn % 2);
    }
  }
}

// One lane alone waits for one lane of the other warp; the rest of its warp waits for it.
LA_KERNEL(64, 1) alone(LA_GRID_CONSTANT const FaultParams params) {
  float* shared = reinterpret_cast<float*>(dynamic_shared());
  Mbarrier* barrier = reinterpret_cast<Mbarrier*>(shared + 4);
  if (thread() == 9) mbarrier_init(barrier, 1);
  sync_block();
  for (int turn = 0; turn < 3; ++turn) {
    const int from = turn % 2;  // a warp
    if (thread() == 32 * from + 7) {
      mbarrier_wait(barrier, turn % 2 ^ 1);  // has ended, or never was
      shared[turn] = static_cast<float>(turn + 1);
      mbarrier_arrive(barrier);
    }
    if (thread() == 32 * (1 - from) + 5) mbarrier_wait(barrier, turn % 2);
    sync_warp();
    params.out[thread()] = shared[turn];
    sync_block();
  }
}

template <int kFault>
LA_KERNEL(64, 1) faulty_mbarrier(LA_GRID_CONSTANT const FaultParams params) {
  Mbarrier* barrier = reinterpret_cast<Mbarrier*>(dynamic_shared() + 64);
  const int t = thread();
  if (t == 0) mbarrier_init(barrier, kFault == 11 ? 1 : 2);
  if (t == 0) mbarrier_init(barrier + 1, 1);
  sync_block();
  if constexpr (kFault == 0) mbarrier_arrive(barrier + 2);
  if constexpr (kFault == 1) mbarrier_wait(barrier + 2, 0);
  if constexpr (kFault == 2) mbarrier_init(barrier + 1, 1);
  if constexpr (kFault == 3) mbarrier_init(barrier + 2, params.zero);
  if constexpr (kFault == 4) {
    if (t == 0) barrier->state = 0;
    sync_block();
    if (t == 32) mbarrier_arrive(barrier);
  }
  if constexpr (kFault == 5) mbarrier_arrive(barrier);  // of lane 0 of each warp it would be right
  if constexpr (kFault == 6) {
    if (t == 40) mbarrier_wait(barrier + 1, 0);
    if (t < 32) mbarrier_wait(barrier, 0);
    else sync_warp();
  }
  if constexpr (kFault == 7) {
    if (t == 63) mbarrier_arrive(barrier);
    if (t < 32) mbarrier_wait(barrier, 0);
  }
  if constexpr (kFault == 8) mbarrier_wait(barrier, 2);
  if constexpr (kFault == 9)
    mbarrier_arrive(reinterpret_cast<Mbarrier*>(dynamic_shared() + 68 + params.zero));
  if constexpr (kFault == 10) mbarrier_wait(barrier + 24, 0);
  if constexpr (kFault == 11) {
    if (t < 32) mbarrier_wait(barrier, 0);
    if (t % 32 == 0) mbarrier_arrive(barrier);  // for a warp that is not yet all here
  }
}

// out[t][4] = the first row of in [3][32][4], copied; or what is there where that is not waited for.
template <int kCase>
LA_KERNEL(32, 1) copies(LA_GRID_CONSTANT const RingParams params) {
  const int t = thread();
  float *mine = reinterpret_cast<float*>(dynamic_shared()) + 4 * t, *seen = mine;
  const float* row = params.in + 4 * t;
  if constexpr (kCase < 6) {
    copy_16_or_zero(mine, row, 16);
    if (kCase != 4 && kCase != 5) copy_commit();
    if (kCase == 2 || kCase == 3) {
      copy_16_or_zero(mine + 128, row + 128, 16);
      copy_commit();
      copy_wait_but<1>();
      if (kCase == 3) seen += 128;
    }
    if (kCase == 0 || kCase == 4) copy_wait_but<0>();
    if (kCase == 5) copy_wait();
  }
  if constexpr (kCase == 6) {  // from nowhere
    copy_16_or_zero(mine, nullptr, 0);
    copy_wait();
  }
  if constexpr (kCase == 7 || kCase == 8) copy_16(mine, row);
  if constexpr (kCase == 7) copy_wait();
  if constexpr (kCase == 9) {
    copy_16(mine, row);
    mine[1] = 1.f;
    copy_wait();
  }
  if constexpr (kCase == 10) copy_16(mine + 1, row);
  if constexpr (kCase == 11) copy_16_or_zero(mine + 512, row, 0);
  if constexpr (kCase == 12) copy_16_or_zero(mine, row + 1, 8);
  if constexpr (kCase == 13) copy_16_or_zero(mine, mine + 128, 16);
  if constexpr (kCase == 14) copy_16(mine, params.in + 96 * 4 + t * 4);
  if constexpr (kCase == 15) copy_16_or_zero(mine, row, 17);
  if constexpr (kCase == 16) {  // a part of it
    copy_16_or_zero(mine, row, t % 16);
    copy_wait();
  }
  if constexpr (kCase == 17) copy_16_or_zero(mine, params.in + 96 * 4, t == 3);
  for (int i = 0; i < 4; ++i) params.out[4 * t + i] = seen[i];
}

// A box of an array to shared memory and on to `image`, or from there to the array.
struct BoxParams {
  TensorMap map;
  u32* image;
  i32 at[5];
};
constexpr int kBox = 8192, kBoxBarrier = 9216;  // bytes: of a box, and before the barrier

LA_KERNEL(64, 1) box_load(LA_GRID_CONSTANT const BoxParams params) {
  u32* shared = reinterpret_cast<u32*>(dynamic_shared());
  Mbarrier* barrier = reinterpret_cast<Mbarrier*>(dynamic_shared() + kBoxBarrier);
  if (thread() == 0) mbarrier_init(barrier, 1);
  sync_block();
  if (thread() == 0) {
    mbarrier_arrive_expect(barrier, kBox);
    tma_load(shared, &params.map, params.at, barrier);
  }
  mbarrier_wait(barrier, 0);
  for (int i = thread(); i < kBox / 4; i += 64) params.image[i] = shared[i];
}

// What is in shared memory is stored as it is when the thread waits; the wait may come too late.
template <bool kWaits>
LA_KERNEL(64, 1) box_store(LA_GRID_CONSTANT const BoxParams params) {
  u32* shared = reinterpret_cast<u32*>(dynamic_shared());
  for (int i = thread(); i < kBox / 4; i += 64) shared[i] = params.image[i];
  fence_async();
  sync_block();
  if (thread() == 0) {
    tma_store(&params.map, shared, params.at);
    tma_commit();
    if (kWaits) tma_wait_read();
  }
  sync_block();
  for (int i = thread(); i < kBox / 4; i += 64) shared[i] = kOnes;
  sync_block();
  if (!kWaits && thread() == 0) tma_wait_read();
}

template <int kFault>
LA_KERNEL(32, 1) faulty_box(LA_GRID_CONSTANT const BoxParams params) {
  unsigned char* shared = dynamic_shared();
  Mbarrier* barrier = reinterpret_cast<Mbarrier*>(shared + kBoxBarrier);
  if (thread() == 0) mbarrier_init(barrier, 1);
  for (int i = thread(); i < kBox / 4; i += 32) reinterpret_cast<u32*>(shared)[i] = kOnes;
  if (kFault != 7) fence_async();
  sync_block();
  if (kFault == 8) shared[kBox - 1] = 1;
  sync_block();
  if (thread() == 0) {
    i32 at[5] = {0, 0, 0, 0, 0};
    if (kFault == 9) at[1] = -1;
    if (kFault == 10) at[4] = -1;
    if (kFault < 7) mbarrier_arrive_expect(barrier, kFault == 5 ? kBox + 16 : kFault == 6 ? kBox - 16 : kBox);
    if (kFault == 0) tma_load(shared + 512, &params.map, at, barrier);
    if (kFault == 1) tma_load(shared + 2048, &params.map, at, barrier);
    if (kFault == 2) tma_load(shared, &params.map, at, barrier + 1);
    if (kFault == 3) {
      tma_load(shared, &params.map, at, barrier);
      tma_load(shared, &params.map, at, barrier);
    }
    if (kFault == 4) mbarrier_arrive_expect(barrier, kBox);
    if (kFault == 5 || kFault == 6) tma_load(shared, &params.map, at, barrier);
    if (kFault >= 7) tma_store(&params.map, shared + (kFault == 14 ? 512 : 0), at);
    if (kFault == 11) tma_wait_read();
    if (kFault == 13) tma_commit();
  }
  if (kFault == 5) mbarrier_wait(barrier, 0);
}

// Neighbouring warps exchange a number through shared memory; the barrier between is optional.
template <bool kBarrier>
LA_KERNEL(64, 1) exchange(LA_GRID_CONSTANT const FaultParams params) {
  float* shared = reinterpret_cast<float*>(dynamic_shared());
  shared[thread()] = static_cast<float>(thread());
  if constexpr (kBarrier) sync_block();
  params.out[64 * block() + thread()] = shared[(thread() + 32) % 64];
}

// Two groups of two warps with loops of their own. What the first group exchanges goes to the
// second, by two halves of a mailbox, and is exchanged there again: lane by lane it is what began.
template <bool kBarrier>
LA_KERNEL(128, 1) roles(LA_GRID_CONSTANT const FaultParams params) {
  constexpr int kTurns = 5;
  float* shared = reinterpret_cast<float*>(dynamic_shared());
  const int t = thread() % 64, other = (t + 32) % 64;
  float *mailbox = shared, *mine = shared + 128 + thread() / 64 * 64;
  if (thread() < 64) {
    for (int turn = 0; turn < kTurns; ++turn) {
      mine[t] = static_cast<float>(t + 100 * turn);
      if constexpr (kBarrier) sync_named(1, 64);
      mailbox[turn % 2 * 64 + t] = mine[other];
      sync_named(3, 128);
    }
  } else {
    float sum = 0.f;
    for (int turn = 0; turn < kTurns; ++turn) {
      sync_named(3, 128);
      mine[t] = mailbox[turn % 2 * 64 + t];
      sync_named(2, 64);
      sum += mine[other];
      sync_named(2, 64);
    }
    params.out[t] = sum;
  }
}

// The first and the third warp meet, and the second has nothing to do with it; in the last turn the
// third may be gone.
template <bool kLeaves>
LA_KERNEL(128, 1) bystander(LA_GRID_CONSTANT const FaultParams params) {
  const int warp = thread() / 32;
  if (warp == 1) return;
  for (int turn = 0; turn < 3; ++turn) {
    if (kLeaves && turn == 2 && warp == 2) return;
    if (warp != 3) sync_named(15, 64);
  }
  if (warp == 0) params.out[thread()] = 1.f;
  if (warp == 3) sync_named(1, 32);
}

// Reads what nothing has written: shared memory is NaN at the start of every block.
LA_KERNEL(32, 1) unwritten(LA_GRID_CONSTANT const FaultParams params) {
  float* shared = reinterpret_cast<float*>(dynamic_shared());
  params.out[32 * block() + thread()] = shared[thread()];
  shared[thread()] = 1.f;
}

}  // namespace la
