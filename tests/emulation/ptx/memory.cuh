// kernels_cu/ptx/memory.cuh on the host. What the instructions demand and plain C++ would let pass
// is checked: pointers aligned to the width, and into global, not shared, memory.
#pragma once
#include "machine/machine.hpp"
#include "ptx/types.cuh"

namespace emulation {

template <int bytes>
inline void check_global(const void* p, const char* operation) {
  const auto address = reinterpret_cast<std::uint64_t>(p);
  if (address % bytes) fail("uses %s at %p, which is not a multiple of %d", operation, p, bytes);
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

// Done at once: as late as the wait would show only what is read before it, and that reads the
// NaN that shared memory starts with.
inline void copy_16(void* to, const void* from) {
  const Word4 word = emulation::load<Word4>(from, "copy_16");
  __builtin_memcpy(to, &word, sizeof word);
}
inline void copy_wait() {}

inline void store_16(void* p, const Word4& v) { emulation::store(p, v, "store_16"); }
inline void store_8(void* p, const Word2& v) { emulation::store(p, v, "store_8"); }
inline void store_4(void* p, u32 v) { emulation::store(p, v, "store_4"); }
inline void store_2(void* p, u16 v) { emulation::store(p, v, "store_2"); }

}  // namespace ptx
