// Rows on their way past the registers into the tiles of a slot.
#pragma once
#include "ring/config.cuh"

namespace la {

// `width` columns from `column` of each row that exists, as they are, and zeros elsewhere: into the packets that this thread has of
// the tile (R is one of RingRows), which R::take gives it behind copy_wait_but. `head`: address of the head's first element.
template <class R, class Tile>
LA_DEVICE void send_rows(const Tensor& t, u64 head, Span span, int column, int width, const Tile& tile) {
  const typename R::Cursor c = R::cursor(t, head, span, column);
  if (R::all_whole(t, span, width)) {
#pragma unroll
    for (int pass = 0; pass < R::kPasses; ++pass) copy_16(R::place(tile, pass), c.place(pass, 0, 16));
    return;
  }
#pragma unroll 1
  for (int pass = 0; pass < R::kPasses; ++pass) {
    if (!R::inside(pass)) continue;
    const bool exists = span.holds(R::row(pass));
    unsigned char* const to = R::place(tile, pass);
    const int left = exists ? width - R::packet(0) * R::kPacket : 0;
    const int valid = left < 0 ? 0 : smaller(left, R::kPacket);
    const char* const from = c.place(pass, 0, 16);
    if (valid == 0) {
      *reinterpret_cast<Word4*>(to) = {};
    } else if (t.aligned) {
      copy_16_or_zero(to, from, 4 * valid);
    } else {
#pragma unroll
      for (int j = 0; j < R::kPacket; ++j) copy_4_or_zero(to + 4 * j, j < valid ? from + 4 * j : from, j < valid);
    }
  }
}

}  // namespace la
