// Tiles of `ring`: as SharedTile, but of an address all that depends on the lane is one number, which is known ahead of a loop.
#pragma once
#include "tile/shared.cuh"

namespace la {

template <int Width>
struct RingTile : SharedTile<float, Width> {
  using Base = SharedTile<float, Width>;
  using Base::base, Base::kPitch, Base::swizzle;
  static constexpr bool kRaw = false;

  // Packet `index` of `row`, from where `lane` points to in the packets 0 .. 7 of a row.
  LA_DEVICE unsigned char* near(int row, int index, int lane) const {
    return base + row * kPitch + (index >> 3) * 128 + (lane ^ (index & 7) * 16);
  }
  static LA_DEVICE int lane_part(int row, int index, int element) { return row * kPitch + (index ^ swizzle(row)) * 16 + element * 4; }

  LA_DEVICE unsigned char* packet_near(int row, int index, int near_row, int near_index) const {
    return near(row, index, lane_part(near_row, near_index, 0));
  }

  LA_DEVICE float* pair(int row, int column) const {
    const int lane = thread() & 31, g = lane >> 2, c = (lane & 3) * 2;
    return reinterpret_cast<float*>(near(row, column / 4, lane_part(g, c / 4, c % 4)));
  }

  LA_DEVICE float* down(int row, int column, int j) const {
    const int lane = thread() & 31, g = lane >> 2, c = (lane & 3) * 2 + j;
    return reinterpret_cast<float*>(near(row, column / 4, lane_part(c, g / 4, g % 4)));
  }
};

// A tile whose numbers are as they came, and have still to be rounded if products take rounded ones.
template <int Width>
struct RawTile : RingTile<Width> {
  static constexpr bool kRaw = true;
};

}  // namespace la
