// What loaders do, done by all warps: rows are copied into the slot of the turn behind (Bring::send), and a turn later put through
// norm and feature map, rounded and summed where they lie (Bring::put). A thread has the same packets both times, so that it
// waits for its own copies only.
#pragma once
#include "ring/copies.cuh"

namespace la {

template <class Config>
struct Bring : Load<Config> {
  using L = Load<Config>;
  using Arith = typename Config::Arith;
  using Role = typename Config::Role;
  using Turn = typename L::Turn;
  using InnerRows = typename L::InnerRows;
  using ColumnRows = typename L::ColumnRows;
  using L::p, L::block, L::a, L::b, L::c;

  LA_DEVICE Bring(const Params& params, const Block<Config>& where) : L(params, where) {}

  // The rows and numbers of the first turn. There is a barrier behind, before they are put.
  LA_DEVICE void begin(Turn first) {
    send(first);
    this->fetch_numbers(first);
    this->put_numbers(first);
  }

  // Where there is no such turn, nothing is in its group of copies.
  LA_DEVICE void send(Turn t) const {
    if (block.exists(t)) {
      const int inner = Role::kKeyFeatures ? p.d : p.e, columns = Role::kKeyFeatures ? p.e : p.d;
      if (block.begins(t)) {
        const Span rows = block.rows_at(t.step);
        send_rows<InnerRows>(this->array_a(), this->place_a(), rows, 0, inner, block.tile_a(t.row_copy()));
        if constexpr (Role::kThroughFeatures) {
          send_rows<ColumnRows>(this->array_x(), this->place_x(), rows, 0, columns, block.tile_x(t.row_copy()));
        }
      }
      if constexpr (Config::kCausal) {
        const Span sources = block.sources_at(t.step);
        send_rows<InnerRows>(this->array_b(), this->place_b(t), sources, 0, inner, block.tile_b(t.copy));
        send_rows<ColumnRows>(this->array_c(), this->place_c(t), sources, 0, columns, block.tile_c(t.copy));
      }
    }
    copy_commit();
  }

  // Behind `send` of the turn behind, which may go on.
  LA_DEVICE void put(Turn now) {
    this->fetch_numbers(block.after(now));
    copy_wait_but<1>();
    if (block.begins(now)) {
      a.take(block.tile_a(now.row_copy()));
      this->put_a(now);
      if constexpr (Role::kThroughFeatures) {
        ColumnRows x;
        x.take(block.tile_x(now.row_copy()));
        this->put_x(x, now);
      }
    }
    if constexpr (Config::kCausal) {
      b.take(block.tile_b(now.copy));
      this->put_b(now);
      if constexpr (!Config::kForward) {  // where C is v, as it is
        c.take(block.tile_c(now.copy));
        this->put_c(now);
      }
    }
  }

  // Behind a barrier: what the turn behind needs of this one's sums, and its numbers.
  LA_DEVICE void hand_on(Turn now) {
    this->add_sums(now);
    this->put_numbers(block.after(now));
  }
};

}  // namespace la
