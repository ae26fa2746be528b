// The pre-pass over one piece of the sequence, rows coming as in ring/bring.cuh: see ring_sums.cu.
#pragma once
#include "ring/copies.cuh"

namespace la {

template <class Config>
struct RingGather : Gather<Config> {
  using G = Gather<Config>;
  using Arith = typename Config::Arith;
  using Acc = typename Config::Acc;
  using G::p, G::chunks, G::group, G::shared, G::column0;

  LA_DEVICE explicit RingGather(const Params& params) : G(params) {}

  // A chunk, and of it one member of the group of heads that are summed over.
  struct Turn {
    i32 step = 0, member = 0;
    LA_DEVICE Turn after(i32 group) const { return member + 1 == group ? Turn{step + 1, 0} : Turn{step, member + 1}; }
  };

  static LA_DEVICE unsigned char* slot(i32 copy) { return dynamic_shared() + unknown_zero() + copy * Config::kSlot; }

  LA_DEVICE void run() {
    shared = slot(1);
    if (!G::kReversed && p.levelled) this->find_level();
    shared = slot(0);
    this->begin();
    Turn now;
    i32 copy = 0;
    send(now);
    fetch_numbers(now);
#pragma unroll 1
    while (now.step < chunks) {
      const Turn then = now.after(group);
      shared = slot(copy ^ 1);
      send(then);
      shared = slot(copy);
      copy_wait_but<1>();
      this->b.take(this->tile_b());
      this->c.take(this->tile_c());
      this->put(now.step);
      fetch_numbers(then);
      sync_block();
      G::P::update_state(this->state, this->tile_c(), this->tile_b(), G::kReversed ? scalar_b<Acc>(p) : Acc(1));
      sync_block();
      copy ^= 1;
      now = then;
    }
    this->finish();
  }

  // Into `shared`.
  LA_DEVICE void send(Turn t) const {
    if (t.step < chunks) {
      const Span rows = this->span(t.step);
      const Head at = this->head_of(t.member);
      const Tensor &tb = this->array_b(), &tc = this->array_c();
      send_rows<typename G::RowsB>(tb, at.template address<Arith>(tb), rows, 0, p.d, this->tile_b());
      send_rows<typename G::RowsC>(tc, at.template address<Arith>(tc), rows, column0, p.e - column0, this->tile_c());
    }
    copy_commit();
  }

  LA_DEVICE void fetch_numbers(Turn t) {
    if (t.step < chunks) G::fetch_numbers(this->head_of(t.member), this->span(t.step));
  }
};

}  // namespace la
