// kernels_cu/ptx/wgmma.cuh on the host: each warp multiplies its own 16 rows, when it waits for
// them (machine/products.hpp). The bytes of an operand are found as hardware does it: the address
// as if lines lay there plainly, and then its bits 7-9, the line, onto bits 4-6, the packet.
#pragma once
#include "machine/products.hpp"
#include "ptx/convert.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/types.cuh"

namespace emulation {

typedef std::uint16_t Packet __attribute__((vector_size(16)));  // 8 bf16
typedef u32 Words8 __attribute__((vector_size(32)));

LA_EMULATION_INLINE u32 swizzle(u32 address) { return address ^ (address >> 3 & 0x70); }

LA_EMULATION_INLINE Packet read_packet(const unsigned char* memory, u32 address) {
  Packet p;
  __builtin_memcpy(&p, memory + swizzle(address), sizeof p);
  return p;
}

LA_EMULATION_INLINE Row8 widen(Packet p) {
  return reinterpret_cast<Row8>(__builtin_convertvector(p, Words8) << 16);
}

LA_EMULATION_INLINE void transpose(Packet (&m)[8]) {
  constexpr Packet low = {0, 8, 1, 9, 2, 10, 3, 11}, high = {4, 12, 5, 13, 6, 14, 7, 15};
  // Each turn moves one bit of the line's number into the packet's, from line 4 on.
  for (int turn = 0; turn < 3; ++turn) {
    Packet next[8];
    for (int i = 0; i < 4; ++i) {
      next[2 * i] = __builtin_shuffle(m[i], m[i + 4], low);
      next[2 * i + 1] = __builtin_shuffle(m[i], m[i + 4], high);
    }
    for (int i = 0; i < 8; ++i) m[i] = next[i];
  }
}

// Where 8x8 elements begin: the `x`th along rows of a (columns of b), the `k`th along the sum.
// Their lines are 128 bytes apart.
template <bool across>
LA_EMULATION_INLINE u32 tile_address(const Operand& from, int x, int k) {
  return across ? from.start + k * from.stride + x / 8 * from.aside + x % 8 * 16
                : from.start + x * from.stride + k * 16;
}

// Vectors are along packets, or, transposed, along lines.
template <bool transposed>
LA_EMULATION_INLINE void read_tile(u32 address, Row8 (&rows)[8]) {
  Packet m[8];
  for (int line = 0; line < 8; ++line) m[line] = read_packet(machine.shared, address + line * 128);
  if constexpr (transposed) transpose(m);
  for (int i = 0; i < 8; ++i) rows[i] = widen(m[i]);
}

template <bool across>
LA_EMULATION_INLINE void read_a(const Product& product, float (&a)[16][16]) {
  for (int x = 0; x < 2; ++x) {
    for (int k = 0; k < 2; ++k) {
      Row8 rows[8];
      const int block = product.warp % warpgroup * 2 + x;
      read_tile<across>(tile_address<across>(product.a, block, k), rows);
      for (int i = 0; i < 8; ++i) __builtin_memcpy(&a[8 * x + i][8 * k], &rows[i], sizeof rows[i]);
    }
  }
}

LA_EMULATION_INLINE void read_a_registers(const Product& product, float (&a)[16][16]) {
  for (int lane = 0; lane < warp_size; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      float* pair = &a[g + i % 2 * 8][2 * t + i / 2 * 8];
      pair[0] = ptx::bf16_low(product.registers[lane][i]);
      pair[1] = ptx::bf16_high(product.registers[lane][i]);
    }
  }
}

enum class From { along_k, across, registers };

// c[16][n] = (c +) a[16][16] b[16][n] in float32.
template <int n, From a_from, bool b_across>
LA_EMULATION_HOT inline void multiply_wide(const Product& product,
                                           Row8 (&c)[16][max_columns / 8]) {
  float a[16][16];
  if constexpr (a_from == From::registers) read_a_registers(product, a);
  else read_a<a_from == From::across>(product, a);
  Row8 b[16][n / 8];
  for (int x = 0; x < n / 8; ++x) {
    for (int k = 0; k < 2; ++k) {
      Row8 rows[8];
      read_tile<!b_across>(tile_address<b_across>(product.b, x, k), rows);
      for (int i = 0; i < 8; ++i) b[8 * k + i][x] = rows[i];
    }
  }
  constexpr int width = n > 96 ? n / 16 : n / 8;  // no more sums than the processor has registers
  for (int first = 0; first < n / 8; first += width) {
    for (int i = 0; i < 16; ++i) {
      Row8 sum[width];
      for (int j = 0; j < width; ++j) sum[j] = product.keep ? c[i][first + j] : Row8{};
      for (int k = 0; k < 16; ++k)
        for (int j = 0; j < width; ++j) sum[j] += a[i][k] * b[k][first + j];
      for (int j = 0; j < width; ++j) c[i][first + j] = sum[j];
    }
  }
}

struct WgmmaLane {
  float* d;
  const u32* registers;  // of a, or null
  unsigned long long a, b;
  int keep;
  const Site* site;
};

// A descriptor of `count` rows of a or columns of b.
template <bool across>
inline Operand decode(unsigned long long descriptor, int count, const char* name,
                      const Site& site) {
  const Operand operand = {static_cast<u32>(descriptor & 0x3fff) * 16,
                           static_cast<u32>(descriptor >> 32 & 0x3fff) * 16,
                           static_cast<u32>(descriptor >> 16 & 0x3fff) * 16};
  const int mode = static_cast<int>(descriptor >> 62);
  if (mode != 1 || descriptor & 0x3fffc000c000c000ull)
    fail("gives %s (%s:%d) %s = %#llx, swizzle mode %d, allowed: mode 1 (128 bytes), no offset",
         site.operation, site.file, site.line, name, descriptor, mode);
  const u32 within = operand.start % 1024;
  if (across ? within != 0 : within >= 128 || within % 32)
    fail("gives %s (%s:%d) %s at offset %u of shared memory, allowed: multiples of 1024%s",
         site.operation, site.file, site.line, name, operand.start,
         across ? "" : ", and 32, 64 or 96 behind");
  const int atoms = across ? 2 : count / 8;
  if (operand.stride % 1024 || (atoms > 1 && operand.stride == 0))
    fail("gives %s (%s:%d) %s with atoms %u bytes apart, allowed: multiples of 1024",
         site.operation, site.file, site.line, name, operand.stride);
  // The distance between atoms side by side counts for nothing where there is one.
  const int beside = across ? (count - 1) / 64 : 0;
  if (beside && (operand.aside % 1024 || operand.aside == 0))
    fail("gives %s (%s:%d) %s with atoms side by side %u bytes apart, allowed: multiples of 1024",
         site.operation, site.file, site.line, name, operand.aside);
  const u32 end = operand.start - within + (atoms - 1) * operand.stride + beside * operand.aside +
                  1024;
  if (end > static_cast<u32>(machine.shared_bytes))
    fail("gives %s (%s:%d) %s at offsets %u to %u of %d bytes of shared memory", site.operation,
         site.file, site.line, name, operand.start, end, machine.shared_bytes);
  return operand;
}

// Whether a thread has written lines of an operand without a fence_async after.
template <bool across>
LA_EMULATION_HOT inline bool unfenced(const Operand& operand, int count) {
  if (async_view.bytes.empty()) return true;
  const unsigned char *now = machine.shared, *then = &async_view.bytes[0];
  Packet changed = {};
  for (int x = 0; x < count / 8; ++x) {
    for (int k = 0; k < 2; ++k) {
      for (int line = 0; line < 8; ++line) {
        const u32 at = tile_address<across>(operand, x, k) + line * 128;
        changed |= read_packet(now, at) ^ read_packet(then, at);
      }
    }
  }
  for (int i = 0; i < 8; ++i)
    if (changed[i]) return true;
  return false;
}

// wgmma may read what was written before a fence_async. Who wrote what is not known here: a fence
// counts for all that is in shared memory when its warp next waits, or any next multiplies. So one
// behind the last write to an operand is enough, whatever others write elsewhere; what is found is
// a fence that is missing.
template <bool across>
inline void check_fenced(const Operand& operand, int count, const char* name, const Site& site) {
  keep_fenced();
  if (unfenced<across>(operand, count))
    fail("is at %s (%s:%d), but no fence_async follows the last writes to %s in shared memory",
         site.operation, site.file, site.line, name);
}

template <int n, From a_from, bool b_across>
inline void issue(Lanes<WgmmaLane> lanes) {
  const int warp = machine.current / warp_size;
  const WgmmaLane& first = lanes[0];
  const Site& site = *first.site;
  Queue& queue = queues[warp];
  float* d[warp_size];
  for (int lane = 0; lane < warp_size; ++lane) {
    const WgmmaLane& mine = lanes[lane];
    if (mine.a != first.a || mine.b != first.b || mine.keep != first.keep)
      fail("is at %s (%s:%d), where lane %d gives a = %#llx, b = %#llx, keep = %d, but lane 0 "
           "%#llx, %#llx, %d", site.operation, site.file, site.line, lane, mine.a, mine.b,
           mine.keep, first.a, first.b, first.keep);
    d[lane] = mine.d;
  }
  check_warpgroup({multiply_wide<n, a_from, b_across>, site, first.a, first.b, first.keep,
                   machine.current});
  queue.products.emplace_back();
  Product& product = queue.products.back();
  product.run = multiply_wide<n, a_from, b_across>;
  product.site = site;
  product.keep = first.keep;
  product.warp = warp;
  if constexpr (a_from == From::registers) {
    for (int lane = 0; lane < warp_size; ++lane)
      std::memcpy(product.registers[lane], lanes[lane].registers, sizeof product.registers[lane]);
  } else {
    product.a = decode<a_from == From::across>(first.a, 64, "a", site);
    check_fenced<a_from == From::across>(product.a, 64, "a", site);
  }
  product.b = decode<b_across>(first.b, n, "b", site);
  check_fenced<b_across>(product.b, n, "b", site);
  product.accumulator = find_accumulator(queue, d, n / 2, first.keep, site);
  Accumulator& accumulator = queue.accumulators[product.accumulator];
  // Products of one shape that chain need no fence between them; registers written since do.
  if (!queue.fenced && (accumulator.pending == 0 || a_from == From::registers))
    fail("is at %s (%s:%d), but no wgmma_fence opens the run of products", site.operation,
         site.file, site.line);
  ++accumulator.pending;
  if (machine.early) product.run(product, accumulator.c);
}

template <int n, From a_from, bool b_across>
inline void meet_wgmma(float* d, const u32* registers, unsigned long long a, unsigned long long b,
                       int keep, const char* file, int line) {
  const Site site = {"wgmma", file, line};
  WgmmaLane mine = {d, registers, a, b, keep != 0, &site};
  warp_collective<issue<n, a_from, b_across>>(site, mine);
}

inline void open_products(Lanes<Site>) { queues[machine.current / warp_size].fenced = true; }
inline void close_products(Lanes<Site>) { commit_products(); }
template <int left>
inline void wait_for_products(Lanes<Site> sites) {
  run_products(left, sites[0]);
}

}  // namespace emulation

namespace ptx {

enum Major : i32 { kAlongK = 0, kAcross = 1 };

inline u64 wgmma_operand(const void* start, u32 aside = 16) {
  const auto offset = static_cast<const unsigned char*>(start) - emulation::machine.shared;
  if (offset < 0 || offset >= emulation::machine.shared_bytes || offset % 16)
    emulation::fail("gives wgmma_operand %p, at offset %lld of %d bytes of shared memory, allowed: "
                    "multiples of 16", start, static_cast<long long>(offset),
                    emulation::machine.shared_bytes);
  if (aside % 16 || aside / 16 > 0x3fff)
    emulation::fail("gives wgmma_operand atoms side by side %u bytes apart, allowed: multiples of "
                    "16 up to %d", aside, 0x3fff * 16);
  constexpr u64 kAtomStride = 1024 / 16, kSwizzle128 = 1;
  return shared_address(start) >> 4 | u64(aside / 16) << 16 | kAtomStride << 32 | kSwizzle128 << 62;
}

inline void wgmma_fence(LA_EMULATION_SITE) {
  emulation::Site site = {"wgmma_fence", file, line};
  emulation::warp_collective<emulation::open_products>(site, site);
}

inline void wgmma_commit(LA_EMULATION_SITE) {
  emulation::Site site = {"wgmma_commit", file, line};
  emulation::warp_collective<emulation::close_products>(site, site);
}

template <int Left>
inline void wgmma_wait(LA_EMULATION_SITE) {
  static_assert(Left >= 0 && Left <= 7, "wgmma_wait: Left must be 0 to 7");
  emulation::Site site = {"wgmma_wait", file, line};
  emulation::warp_collective<emulation::wait_for_products<Left>>(site, site);
}

// Nothing moves across the calls of the machine in any case.
template <int Count>
inline void wgmma_pin(float (&d)[Count]) {
  static_cast<void>(d);
}

inline void fence_async() { emulation::async_view.fence = true; }

template <int Count>
inline void take_registers() {
  static_assert(Count % 8 == 0 && 24 <= Count && Count <= 256, "take_registers: 24 to 256, by 8");
}

template <int Count>
inline void give_registers() {
  static_assert(Count % 8 == 0 && 24 <= Count && Count <= 256, "give_registers: 24 to 256, by 8");
}

template <Major A, Major B>
inline void wgmma(float (&d)[4], u64 a, u64 b, i32 keep, LA_EMULATION_SITE) {
  constexpr auto from = A == kAcross ? emulation::From::across : emulation::From::along_k;
  emulation::meet_wgmma<8, from, B == kAcross>(d, nullptr, a, b, keep, file, line);
}

template <Major A, Major B>
inline void wgmma(float (&d)[16], u64 a, u64 b, i32 keep, LA_EMULATION_SITE) {
  constexpr auto from = A == kAcross ? emulation::From::across : emulation::From::along_k;
  emulation::meet_wgmma<32, from, B == kAcross>(d, nullptr, a, b, keep, file, line);
}

template <Major A, Major B>
inline void wgmma(float (&d)[32], u64 a, u64 b, i32 keep, LA_EMULATION_SITE) {
  constexpr auto from = A == kAcross ? emulation::From::across : emulation::From::along_k;
  emulation::meet_wgmma<64, from, B == kAcross>(d, nullptr, a, b, keep, file, line);
}

template <Major B>
inline void wgmma(float (&d)[32], const u32 (&a)[4], u64 b, i32 keep, LA_EMULATION_SITE) {
  constexpr auto from = emulation::From::registers;
  emulation::meet_wgmma<64, from, B == kAcross>(d, a, 0, b, keep, file, line);
}

template <Major A, Major B>
inline void wgmma(float (&d)[36], u64 a, u64 b, i32 keep, LA_EMULATION_SITE) {
  constexpr auto from = A == kAcross ? emulation::From::across : emulation::From::along_k;
  emulation::meet_wgmma<72, from, B == kAcross>(d, nullptr, a, b, keep, file, line);
}

template <Major B>
inline void wgmma(float (&d)[36], const u32 (&a)[4], u64 b, i32 keep, LA_EMULATION_SITE) {
  constexpr auto from = emulation::From::registers;
  emulation::meet_wgmma<72, from, B == kAcross>(d, a, 0, b, keep, file, line);
}

template <Major A, Major B>
inline void wgmma(float (&d)[64], u64 a, u64 b, i32 keep, LA_EMULATION_SITE) {
  constexpr auto from = A == kAcross ? emulation::From::across : emulation::From::along_k;
  emulation::meet_wgmma<128, from, B == kAcross>(d, nullptr, a, b, keep, file, line);
}

}  // namespace ptx
