// kernels_cu/ptx/thread.cuh on the host.
#pragma once
#include "machine/machine.hpp"
#include "ptx/types.cuh"

namespace emulation {

struct Nothing {};
inline void do_nothing(Lanes<Nothing>) {}

template <class T>
struct ShuffleLane {
  T value;
  int from;  // a lane
  T result;
};

template <class T>
inline void shuffle(Lanes<ShuffleLane<T>> lanes) {
  for (int i = 0; i < warp_size; ++i) lanes[i].result = lanes[lanes[i].from & 31].value;
}

template <class T>
inline T shuffled(const Site& site, T value, int from) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle: T must have 4 or 8 bytes");
  ShuffleLane<T> mine = {value, from, value};
  warp_collective<shuffle<T>>(site, mine);
  return mine.result;
}

inline void any(Lanes<bool> predicates) {
  bool any = false;
  for (int i = 0; i < warp_size; ++i) any = any || predicates[i];
  for (int i = 0; i < warp_size; ++i) predicates[i] = any;
}

}  // namespace emulation

namespace ptx {

inline i32 thread() { return emulation::machine.current; }
inline i32 block() { return emulation::machine.block; }
inline i32 grid() { return emulation::machine.grid; }

inline void sync_block(LA_EMULATION_SITE) { emulation::block_barrier({"sync_block", file, line}); }

inline void sync_named(i32 id, i32 count, LA_EMULATION_SITE) {
  emulation::named_barrier(id, count, file, line);
}

inline void sync_warp(LA_EMULATION_SITE) {
  emulation::Nothing nothing;
  emulation::warp_collective<emulation::do_nothing>({"sync_warp", file, line}, nothing);
}

template <class T>
inline T shuffle_xor(T value, i32 mask, LA_EMULATION_SITE) {
  return emulation::shuffled({"shuffle_xor", file, line}, value, thread() % 32 ^ mask);
}

template <class T>
inline T shuffle_from(T value, i32 lane, LA_EMULATION_SITE) {
  return emulation::shuffled({"shuffle_from", file, line}, value, lane);
}

inline bool warp_any(bool predicate, LA_EMULATION_SITE) {
  emulation::warp_collective<emulation::any>({"warp_any", file, line}, predicate);
  return predicate;
}

// 0, and the compiler does not know it.
inline i32 unknown_zero() {
  i32 zero = 0;
  asm volatile("" : "+r"(zero));
  return zero;
}
inline i32 unknown_zero_but_sm_90() { return unknown_zero(); }
inline void forget_shared() {}
constexpr bool kFewRegisters = false;

inline void pin(float (&x)[2]) { (void)x; }
inline void pin(double (&x)[2]) { (void)x; }

inline unsigned char* dynamic_shared() { return emulation::machine.shared; }

}  // namespace ptx
