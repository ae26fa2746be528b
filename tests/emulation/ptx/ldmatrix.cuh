// kernels_cu/ptx/ldmatrix.cuh on the host. Lanes 8i..8i+7 give the addresses of the rows of matrix
// i; lane l receives elements 2(l%4), 2(l%4)+1 of row l/4 (of column l/4 if trans), or gives them.
#pragma once
#include "machine/machine.hpp"
#include "ptx/types.cuh"

namespace emulation {

struct LdmatrixLane {
  u32* r;
  const void* row;
};

template <bool transposed>
LA_EMULATION_HOT inline void ldmatrix(Lanes<LdmatrixLane> lanes) {
  for (int matrix = 0; matrix < 4; ++matrix) {
    std::uint16_t m[8][8];
    for (int i = 0; i < 8; ++i) __builtin_memcpy(m[i], lanes[8 * matrix + i].row, 16);
    for (int lane = 0; lane < 32; ++lane) {
      const int i = lane / 4, j = 2 * (lane % 4);
      const std::uint16_t low = transposed ? m[j][i] : m[i][j],
                          high = transposed ? m[j + 1][i] : m[i][j + 1];
      lanes[lane].r[matrix] = low | static_cast<u32>(high) << 16;
    }
  }
}

struct StmatrixLane {
  const u32* r;
  void* row;
};

template <bool transposed>
LA_EMULATION_HOT inline void stmatrix(Lanes<StmatrixLane> lanes) {
  for (int matrix = 0; matrix < 4; ++matrix) {
    std::uint16_t m[8][8];
    for (int lane = 0; lane < 32; ++lane) {
      const int i = lane / 4, j = 2 * (lane % 4);
      (transposed ? m[j][i] : m[i][j]) = static_cast<std::uint16_t>(lanes[lane].r[matrix]);
      (transposed ? m[j + 1][i] : m[i][j + 1]) =
          static_cast<std::uint16_t>(lanes[lane].r[matrix] >> 16);
    }
    for (int i = 0; i < 8; ++i) __builtin_memcpy(lanes[8 * matrix + i].row, m[i], 16);
  }
}

// Each lane checks its own row, so that a fault names the lane.
inline void check_row(const void* row, const char* operation) {
  const auto offset = static_cast<const unsigned char*>(row) - machine.shared;
  if (offset < 0 || offset + 16 > machine.shared_bytes)
    fail("gives %s the row %p, at offset %lld of %d bytes of shared memory", operation, row,
         static_cast<long long>(offset), machine.shared_bytes);
  if (offset % 16)
    fail("gives %s a row at offset %lld, no multiple of 16", operation,
         static_cast<long long>(offset));
}

}  // namespace emulation

namespace ptx {

inline u32 shared_address(const void* p) {
  return static_cast<u32>(static_cast<const unsigned char*>(p) - emulation::machine.shared);
}

inline void ldmatrix_x4(u32 (&r)[4], const void* row, LA_EMULATION_SITE) {
  emulation::check_row(row, "ldmatrix");
  emulation::LdmatrixLane mine = {r, row};
  emulation::warp_collective<emulation::ldmatrix<false>>({"ldmatrix_x4", file, line}, mine);
}

inline void ldmatrix_x4_trans(u32 (&r)[4], const void* row, LA_EMULATION_SITE) {
  emulation::check_row(row, "ldmatrix");
  emulation::LdmatrixLane mine = {r, row};
  emulation::warp_collective<emulation::ldmatrix<true>>({"ldmatrix_x4_trans", file, line}, mine);
}

inline void stmatrix_x4(void* row, const u32 (&r)[4], LA_EMULATION_SITE) {
  emulation::check_row(row, "stmatrix");
  emulation::StmatrixLane mine = {r, row};
  emulation::warp_collective<emulation::stmatrix<false>>({"stmatrix_x4", file, line}, mine);
}

inline void stmatrix_x4_trans(void* row, const u32 (&r)[4], LA_EMULATION_SITE) {
  emulation::check_row(row, "stmatrix");
  emulation::StmatrixLane mine = {r, row};
  emulation::warp_collective<emulation::stmatrix<true>>({"stmatrix_x4_trans", file, line}, mine);
}

}  // namespace ptx
