// Rows that arrive while those before them are treated, a batch at a time, and are in registers only then: under the names of
// Rows, where all of a chunk's wait in registers for their turn.
#pragma once
#include "chunk/rows.cuh"

namespace la {

template <class Arith, int Width, int Chunk, int Threads, int First>
struct StreamedRows : Rows<Arith, Width, Chunk, Threads, First, true> {
  using R = Rows<Arith, Width, Chunk, Threads, First, true>;
  using Acc = typename R::Acc;
  using Batch = typename R::Batch;
  static_assert(R::kParts == 1, "a batch must have whole rows");

  const Tensor* from;
  typename R::Cursor cursor;
  Span span;
  int width;

  // Sends for the first batch. The others follow behind it, in their order: each `values` sends for the next one.
  LA_DEVICE void fetch(const Tensor& t, u64 head, Span rows, int column, int columns) {
    from = &t;
    cursor = R::cursor(t, head, rows, column);
    span = rows;
    width = columns;
    fetch(0);
  }

  LA_DEVICE void fetch(int batch) {
    const int bytes = R::kPacket * element_bytes<Arith>(*from);
#pragma unroll
    for (int r = 0; r < R::kBatch; ++r) {
      const int pass = R::first_pass(batch) + r;
      const bool exists = R::inside(pass) && span.holds(R::row(pass));
#pragma unroll
      for (int i = 0; i < R::kPerLane; ++i) {
        const int left = exists ? width - R::packet(i) * R::kPacket : 0;
        this->raw[r][i] = fetch_packet<Arith, R::kPacket>(*from, cursor.place(pass, i, bytes), left);
      }
    }
  }

  LA_DEVICE Batch values(int batch, i32 dtype) {
    const Batch v = R::values(batch, dtype);
    if (batch + 1 < R::kBatches) fetch(batch + 1);
    return v;
  }

  template <class Tile>
  LA_DEVICE void store_less(const Tile& tile, const Acc* vector, i32 dtype) {
#pragma unroll 1
    for (int batch = 0; batch < R::kBatches; ++batch) {
      Batch v = values(batch, dtype);
      R::each(v, [&](Acc& x, int, int column) { x -= vector[column]; });
      R::store(tile, v);
    }
  }
};

// Rows that wait for their turn; or `Streamed` ones, which do not.
template <bool Streamed>
struct WaitingRows {
  template <class Arith, int Width, int Chunk, int Threads, int First>
  using Type = Rows<Arith, Width, Chunk, Threads, First>;
};
template <>
struct WaitingRows<true> {
  template <class Arith, int Width, int Chunk, int Threads, int First>
  using Type = StreamedRows<Arith, Width, Chunk, Threads, First>;
};

}  // namespace la
