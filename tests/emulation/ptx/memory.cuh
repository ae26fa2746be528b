// kernels_cu/ptx/memory.cuh on the host. What the instructions demand and plain C++ would let pass
// is checked: pointers aligned to the width, and into global, not shared, memory.
#pragma once
#include "machine/copies.hpp"
#include "machine/machine.hpp"
#include "ptx/types.cuh"

namespace emulation {

template <int bytes>
inline void check_aligned(const void* p, const char* operation) {
  if (reinterpret_cast<std::uint64_t>(p) % bytes)
    fail("uses %s at %p, which is not a multiple of %d", operation, p, bytes);
}

template <int bytes>
inline void check_global(const void* p, const char* operation) {
  const auto address = reinterpret_cast<std::uint64_t>(p);
  check_aligned<bytes>(p, operation);
  // Unsigned, so that addresses below shared memory wrap to large distances.
  if (address - reinterpret_cast<std::uint64_t>(machine.shared) <
      static_cast<std::uint64_t>(machine.shared_bytes))
    fail("uses %s, which is for global memory, at %p in shared memory", operation, p);
}

template <class Word>
inline Word load(const void* p, const char* operation) {
  check_global<sizeof(Word)>(p, operation);
  Word r;
  __builtin_memcpy(&r, p, sizeof r);
  return r;
}

template <class Word>
inline void store(void* p, const Word& v, const char* operation) {
  check_global<sizeof(Word)>(p, operation);
  __builtin_memcpy(p, &v, sizeof v);
}

}  // namespace emulation

namespace ptx {

inline Word4 load_16(const void* p) { return emulation::load<Word4>(p, "load_16"); }
inline Word2 load_8(const void* p) { return emulation::load<Word2>(p, "load_8"); }
inline u32 load_4(const void* p) { return emulation::load<u32>(p, "load_4"); }
inline u16 load_2(const void* p) { return emulation::load<u16>(p, "load_2"); }

inline void copy_16(void* to, const void* from) {
  const Word4 word = emulation::load<Word4>(from, "copy_16");
  emulation::start_copy(to, &word, "copy_16");
}
inline void copy_wait() { emulation::finish_all_copies(); }

// What is not copied need not be there.
inline void copy_16_or_zero(void* to, const void* from, i32 bytes) {
  emulation::check_aligned<16>(from, "copy_16_or_zero");
  if (bytes < 0 || bytes > 16)
    emulation::fail("uses copy_16_or_zero of %d bytes, allowed: 0 to 16", bytes);
  if (bytes) emulation::check_global<16>(from, "copy_16_or_zero");
  Word4 word = {};
  __builtin_memcpy(&word, from, static_cast<u32>(bytes));
  emulation::start_copy(to, &word, "copy_16_or_zero");
}
inline void copy_4_or_zero(void* to, const void* from, bool exists) {
  u32 word = 0;
  if (exists) word = emulation::load<u32>(from, "copy_4_or_zero");
  emulation::start_copy(to, &word, "copy_4_or_zero");
}
inline void copy_commit() { emulation::commit_copies(); }

template <int Left>
inline void copy_wait_but() {
  static_assert(Left >= 0, "copy_wait_but: Left must be 0 or more");
  emulation::finish_copies(Left);
}

inline void store_16(void* p, const Word4& v) { emulation::store(p, v, "store_16"); }
inline void store_8(void* p, const Word2& v) { emulation::store(p, v, "store_8"); }
inline void store_4(void* p, u32 v) { emulation::store(p, v, "store_4"); }
inline void store_2(void* p, u16 v) { emulation::store(p, v, "store_2"); }

}  // namespace ptx
