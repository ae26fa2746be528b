// Tiles in shared memory: rows of `Width` elements, cut into 16-byte packets whose order inside each
// 128-byte line is permuted by the row, so that every access pattern of the matrix instructions is free of
// bank conflicts: 8 rows at one packet (ldmatrix), 4 rows at two packets (64-bit loads along a row), and
// rows 0, 2, 4, 6 or 1, 3, 5, 7 at two packets (32-bit loads down a column).
#pragma once
#include "ptx/all.cuh"

namespace la {

using namespace ptx;

template <class Elem_, int Width>
struct SharedTile {
  using Elem = Elem_;
  static constexpr int kWidth = Width;
  static constexpr int kPacket = 16 / sizeof(Elem);
  static constexpr int kPitch = Width * sizeof(Elem);
  static_assert(kPitch % 128 == 0, "a row of a shared tile must fill whole 128-byte lines");

  unsigned char* base;

  static LA_DEVICE constexpr int bytes(int rows) { return rows * kPitch; }

  // Injective on 8 consecutive rows; its upper two bits are injective on each of the other two patterns.
  static LA_DEVICE int swizzle(int row) {
    return ((row >> 1 & 1) << 2) | (((row ^ row >> 2) & 1) << 1) | (row & 1);
  }

  LA_DEVICE unsigned char* packet(int row, int index) const {
    return base + row * kPitch + (index ^ swizzle(row)) * 16;
  }

  // packet(row + near_row, index + near), for a row that is a multiple of 8 and an index that shares no bit with `near`:
  // what depends on the lane (near_row, near) is computed once, and one XOR is left for each (row, index). Wide tiles have many
  // of these, which would be kept in registers all along a loop if they did not follow from `base`, a multiple of kPitch.
  LA_DEVICE unsigned char* packet_near(int row, int index, int near_row, int near) const {
    const int twist = (near ^ swizzle(near_row)) * 16;
    if constexpr (kWidth > 128) {
      const int lane_part = static_cast<int>(base - dynamic_shared()) + near_row * kPitch + twist;
      return dynamic_shared() + (lane_part ^ index * 16) + row * kPitch;
    } else {
      return base + near_row * kPitch + (twist ^ index * 16) + row * kPitch;
    }
  }

  // This lane's place in the 8x8 block at (row, column), both multiples of 8. With g = lane / 4 and t = lane % 4,
  // `pair` is the first of its elements (g, 2t) and (g, 2t + 1), `down` is its element (2t + j, g).
  LA_DEVICE Elem* pair(int row, int column) const {
    const int lane = thread() & 31, g = lane >> 2, c = (lane & 3) * 2;
    return reinterpret_cast<Elem*>(packet_near(row, column / kPacket, g, c / kPacket)) + c % kPacket;
  }

  LA_DEVICE Elem* down(int row, int column, int j) const {
    const int lane = thread() & 31, g = lane >> 2, c = (lane & 3) * 2 + j;
    return reinterpret_cast<Elem*>(packet_near(row, column / kPacket, c, g / kPacket)) + g % kPacket;
  }
};

// The layout of wgmma's operands: panels of 128-byte columns, each with all `Rows` rows one after the other; the order of the
// packets in a line is that of ptx/wgmma.cuh.
template <class Elem_, int Width, int Rows>
struct PanelTile {
  using Elem = Elem_;
  static constexpr int kWidth = Width;
  static constexpr int kPacket = 16 / sizeof(Elem);
  static constexpr int kPanel = 128 / sizeof(Elem);  // columns
  static_assert(Width % kPanel == 0 && Rows % 8 == 0, "a tile must consist of whole atoms");

  unsigned char* base;

  static LA_DEVICE constexpr int bytes(int rows) { return rows * Width * static_cast<int>(sizeof(Elem)); }

  LA_DEVICE unsigned char* packet(int row, int index) const {
    return base + (index >> 3) * (Rows * 128) + row * 128 + ((index ^ row) & 7) * 16;
  }

  // See SharedTile. All of it follows from `base`: what were known before would be kept in registers all along a loop.
  LA_DEVICE unsigned char* packet_near(int row, int index, int near_row, int near) const {
    const int lane_part = static_cast<int>(base - dynamic_shared()) + near_row * 128 + ((near ^ near_row) & 7) * 16;
    return dynamic_shared() + (lane_part ^ (index & 7) * 16) + (index >> 3) * (Rows * 128) + row * 128;
  }

  LA_DEVICE Elem* pair(int row, int column) const {
    const int lane = thread() & 31;
    return reinterpret_cast<Elem*>(packet_near(row, column / kPacket, lane >> 2, 0)) + (lane & 3) * 2;
  }

  // Where the columns from `column`, a multiple of kPanel, lie.
  LA_DEVICE unsigned char* panel(int column) const { return base + column / kPanel * (Rows * 128); }

  // Operands of wgmma: 16 columns from `column`, K running along the row; or 64 columns or more, K running down the rows.
  LA_DEVICE u64 along(int row, int column) const {
    const int bytes = column / kPanel * (Rows * 128) + row * 128 + column % kPanel * static_cast<int>(sizeof(Elem));
    return wgmma_operand(base) + static_cast<u64>(bytes / 16);
  }
  LA_DEVICE u64 across(int row, int column) const {
    return wgmma_operand(base, Rows * 128) + static_cast<u64>((column / kPanel * (Rows * 128) + row * 128) / 16);
  }
};

}  // namespace la
