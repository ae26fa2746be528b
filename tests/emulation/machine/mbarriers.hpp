// Barriers in shared memory. What hardware keeps in their 8 bytes is kept here, by their offsets;
// the bytes hold a word made of it, so that whoever writes over them is found at the next use.
//
// A phase is known to waiters by its parity only. So it must not end before those who wait for the
// phase before it have gone on, and nobody arrives for it before somebody has waited for that one:
// otherwise the barrier gets more arrivals than a phase has.
#pragma once
#include <vector>

#include "machine/machine.hpp"

namespace emulation {

struct BarrierState {
  u32 offset;
  int arrivals, missing;  // of a phase; of this one, still
  u32 ended, seen;        // phases; as many as somebody knows of
  long long bytes;        // that are expected in this phase and have not come
  Site start;             // of mbarrier_init
  // By warps. Who waits for this phase; and who waited for the last and has not gone on yet.
  u32 waiting[max_threads / warp_size], released[max_threads / warp_size];

  unsigned long long word() const {
    return 0xffa5b5c5ull << 32 ^ static_cast<unsigned long long>(ended) << 20 ^
           static_cast<unsigned long long>(missing) ^ static_cast<unsigned long long>(bytes) << 40;
  }
};

constexpr int max_arrivals = (1 << 20) - 1;

static std::vector<BarrierState> mbarriers;

static void reset_mbarriers() { mbarriers.clear(); }

inline BarrierState* find_mbarrier(u32 offset) {
  for (BarrierState& barrier : mbarriers)
    if (barrier.offset == offset) return &barrier;
  return nullptr;
}

inline u32 mbarrier_offset(const Site& site, const void* p) {
  const auto offset = static_cast<const unsigned char*>(p) - machine.shared;
  if (offset < 0 || offset + 8 > machine.shared_bytes)
    fail("gives %s (%s:%d) %p, at offset %lld of %d bytes of shared memory", site.operation,
         site.file, site.line, p, static_cast<long long>(offset), machine.shared_bytes);
  if (offset % 8)
    fail("gives %s (%s:%d) offset %lld of shared memory, no multiple of 8", site.operation,
         site.file, site.line, static_cast<long long>(offset));
  return static_cast<u32>(offset);
}

inline void write_word(const BarrierState& barrier) {
  const unsigned long long word = barrier.word();
  __builtin_memcpy(machine.shared + barrier.offset, &word, sizeof word);
}

// The barrier at `p`, which must be one.
inline BarrierState& used_mbarrier(const Site& site, const void* p) {
  const u32 offset = mbarrier_offset(site, p);
  BarrierState* barrier = find_mbarrier(offset);
  if (!barrier)
    fail("is at %s (%s:%d) for offset %u of shared memory, where no mbarrier_init was",
         site.operation, site.file, site.line, offset);
  const unsigned long long word = barrier->word();
  if (std::memcmp(machine.shared + offset, &word, sizeof word))
    fail("is at %s (%s:%d) for offset %u of shared memory, but its mbarrier was overwritten",
         site.operation, site.file, site.line, offset);
  return *barrier;
}

static void init_mbarrier(const Site& site, void* p, int arrivals) {
  const u32 offset = mbarrier_offset(site, p);
  if (arrivals < 1 || arrivals > max_arrivals)
    fail("is at %s (%s:%d) with %d arrivals, allowed: 1 to %d", site.operation, site.file,
         site.line, arrivals, max_arrivals);
  if (const BarrierState* other = find_mbarrier(offset))
    fail("is at %s (%s:%d) for offset %u of shared memory, but an mbarrier is there already "
         "(%s:%d)", site.operation, site.file, site.line, offset, other->start.file,
         other->start.line);
  mbarriers.push_back(BarrierState{offset, arrivals, arrivals, 0, 0, 0, site, {}, {}});
  write_word(mbarriers.back());
}

// A thread that has waited for the phase before and has not gone on, or none.
inline int late_waiter(const BarrierState& barrier) {
  for (int w = 0; w < machine.warp_count; ++w)
    if (barrier.released[w]) return w * warp_size + __builtin_ctz(barrier.released[w]);
  return none;
}

// All who wait can run; those of a warp before this one do so at once.
static void end_phase(const Site& site, BarrierState& barrier) {
  if (const int late = late_waiter(barrier); late != none) {
    const Site& other = machine.threads[late].site;
    fail("is at %s (%s:%d) and ends a phase of the mbarrier at offset %u, but thread %d, which "
         "waited for the one before at %s (%s:%d), has not gone on", site.operation, site.file,
         site.line, barrier.offset, late, other.operation, other.file, other.line);
  }
  ++barrier.ended;
  barrier.missing = barrier.arrivals;
  write_word(barrier);
  for (int w = 0; w < machine.warp_count; ++w) {
    const u32 lanes = barrier.waiting[w];
    barrier.released[w] = lanes;
    barrier.waiting[w] = 0;
    machine.warps[w].at_mbarrier &= ~lanes;
    machine.warps[w].ready |= lanes;
  }
  if (first_ready() / warp_size != machine.current / warp_size) run_other_warp();
}

static void check_phase(const Site& site, BarrierState& barrier) {
  if (barrier.missing == 0 && barrier.bytes == 0) end_phase(site, barrier);
  else write_word(barrier);
}

static void arrive_at_mbarrier(const Site& site, void* p, int bytes = 0) {
  BarrierState& barrier = used_mbarrier(site, p);
  if (barrier.seen != barrier.ended)
    fail("is at %s (%s:%d) and one more than the %d arrivals that a phase of the mbarrier at "
         "offset %u has: nobody has waited for it since they came", site.operation, site.file,
         site.line, barrier.arrivals, barrier.offset);
  if (barrier.missing == 0)
    fail("is at %s (%s:%d) and one more than the %d arrivals that a phase of the mbarrier at "
         "offset %u has, which lacks only %lld bytes", site.operation, site.file, site.line,
         barrier.arrivals, barrier.offset, barrier.bytes);
  barrier.bytes += bytes;
  --barrier.missing;
  check_phase(site, barrier);
}

// What a copy brings.
static void bring_bytes(const Site& site, void* p, int bytes) {
  BarrierState& barrier = used_mbarrier(site, p);
  if (barrier.bytes < bytes)
    fail("is at %s (%s:%d) and brings %d bytes to the mbarrier at offset %u, which expects %lld",
         site.operation, site.file, site.line, bytes, barrier.offset, barrier.bytes);
  barrier.bytes -= bytes;
  check_phase(site, barrier);
}

static void wait_at_mbarrier(const Site& site, const void* p, int parity) {
  const u32 offset = used_mbarrier(site, p).offset;
  if (parity != 0 && parity != 1)
    fail("is at %s (%s:%d) for parity %d, allowed: 0 and 1", site.operation, site.file, site.line,
         parity);
  BarrierState* barrier = find_mbarrier(offset);
  if (static_cast<int>(barrier->ended & 1) == parity) {
    const int warp_index = machine.current / warp_size;
    const u32 lane = 1u << machine.current % warp_size;
    machine.threads[machine.current].site = site;
    machine.warps[warp_index].ready &= ~lane;
    machine.warps[warp_index].at_mbarrier |= lane;
    barrier->waiting[warp_index] |= lane;
    run_others();
    barrier = find_mbarrier(offset);  // others may have been made meanwhile
    barrier->released[warp_index] &= ~lane;
  }
  barrier->seen = barrier->ended;
}

static Wanted wanted_by(int thread) {
  Wanted wanted = {};
  const int warp = thread / warp_size, lane = thread % warp_size;
  for (const BarrierState& barrier : mbarriers)
    if (barrier.waiting[warp] >> lane & 1) {
      const int written = std::snprintf(wanted.text, sizeof wanted.text,
                                        " for parity %u at offset %u, which lacks %d of %d arrivals",
                                        barrier.ended & 1, barrier.offset, barrier.missing,
                                        barrier.arrivals);
      if (barrier.bytes)
        std::snprintf(wanted.text + written, sizeof wanted.text - written, " and %lld bytes",
                      barrier.bytes);
    }
  return wanted;
}

}  // namespace emulation
