// One block of CUDA threads on one host thread.
//
// Every CUDA thread is a fiber that runs until it must wait for others: at a warp collective
// (shuffle, vote, ldmatrix, mma, sync_warp) for the 32 lanes of its warp, at sync_block for the
// whole block, at sync_named for as many warps as it says, at mbarrier_wait for the arrivals of a
// phase. The last lane to arrive does the work of all, and the lanes go on one after the other.
// Whatever hardware would answer with a hang or with garbage is a fault here: it ends the launch
// with a message.
#pragma once
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "machine/context.hpp"

// The machine's own inner loops are optimised fully and go without the checks of undefined
// behaviour that the kernels get; the small functions in them are inlined in any case.
#define LA_EMULATION_HOT __attribute__((optimize("O3"), no_sanitize("undefined")))
#define LA_EMULATION_INLINE __attribute__((always_inline, no_sanitize("undefined"))) inline

namespace emulation {

using u32 = unsigned int;

constexpr int warp_size = 32;
constexpr int max_threads = 1024;
constexpr u32 all_lanes = 0xffffffffu;
constexpr int named_barriers = 16;  // of a block; number 0 is that of sync_block

// Where and what a thread waits for. The place is part of it: lanes that meet in the same operation
// from different lines have diverged, which hardware need not forgive.
struct Site {
  const char* operation;
  const char* file;
  int line;
};

// Bit l of each mask is lane l; every lane is in exactly one of them.
struct Warp {
  u32 ready, at_collective, at_barrier, at_named, at_mbarrier, returned;
};
constexpr Warp all_ready = {all_lanes, 0, 0, 0, 0, 0};

// A barrier of sync_named. Bit w of each mask is warp w.
struct Named {
  int count;    // threads it is for, as the last to come said
  u32 waiting;  // never enough for `count`: the last to arrive lets all go
  u32 group;    // who met here last, for the same count and since the last sync_block; 0: nobody
};

struct Thread {
  Context context;
  Site site;
  void* operands;  // what this lane brings to the collective it waits at; lives on its stack
};

struct Machine {
  Thread threads[max_threads];
  Warp warps[max_threads / warp_size];
  Named named[named_barriers];
  int thread_count, warp_count, block, grid;
  int current;     // the thread that runs
  int at_barrier;  // threads of the block that wait at sync_block
  bool reverse;    // of the ready lanes (and warps), run the last instead of the first
  bool early;      // what runs beside the threads ends at once, not when they wait for it
  unsigned char* shared;
  int shared_bytes;
  void (*kernel)(const void* params);
  const void* params;
  Context launcher;  // whoever started the block, and goes on when it has ended
  bool failed;
  std::uintptr_t fault_address;  // the instruction that failed, or 0
  char message[1024];
};

// `static`, not `inline`: an inline variable would be one object for all libraries in a process.
static Machine machine;

// Ends the block with a message. The fibers are left as they are: kernels own nothing to destroy.
[[noreturn, gnu::cold, gnu::noinline, gnu::format(printf, 1, 2)]] static void fail(
    const char* format, ...) {
  // A return address is behind its call, which may be the last of its line.
  if (!machine.fault_address)
    machine.fault_address = reinterpret_cast<std::uintptr_t>(__builtin_return_address(0)) - 1;
  int used = std::snprintf(machine.message, sizeof machine.message, "block %d, thread %d ",
                           machine.block, machine.current);
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(machine.message + used, sizeof machine.message - used, format, arguments);
  va_end(arguments);
  machine.failed = true;
  Context abandoned;
  switch_context(abandoned, machine.launcher);
  __builtin_unreachable();
}

// This thread is at `mine` while `others`, lanes of a warp, wait elsewhere.
[[noreturn, gnu::cold]] static void fail_diverged(const Site& mine, int warp, u32 others) {
  const int thread = warp * warp_size + __builtin_ctz(others);
  const Site& site = machine.threads[thread].site;
  fail("is at %s (%s:%d), but thread %d waits at %s (%s:%d)", mine.operation, mine.file, mine.line,
       thread, site.operation, site.file, site.line);
}

[[noreturn, gnu::cold]] static void fail_missed(int warp, u32 others) {
  const int thread = warp * warp_size + __builtin_ctz(others);
  const Site& site = machine.threads[thread].site;
  fail("returns from the kernel, but thread %d waits at %s (%s:%d)", thread, site.operation,
       site.file, site.line);
}

[[noreturn, gnu::cold]] static void fail_returned(const Site& mine, int warp, u32 others) {
  fail("is at %s (%s:%d), but thread %d has returned from the kernel", mine.operation, mine.file,
       mine.line, warp * warp_size + __builtin_ctz(others));
}

// This thread and another are at the same barrier, for different numbers of threads.
[[noreturn, gnu::cold]] static void fail_count(const Site& mine, int count, int thread, int other) {
  const Site& site = machine.threads[thread].site;
  fail("is at %s (%s:%d) for %d threads, but thread %d waits there (%s:%d) for %d", mine.operation,
       mine.file, mine.line, count, thread, site.file, site.line, other);
}

// Nearly always the very same literals, so the texts are not compared.
LA_EMULATION_INLINE bool same_text(const char* x, const char* y) {
  return x == y || std::strcmp(x, y) == 0;
}

LA_EMULATION_INLINE bool same(const Site& x, const Site& y) {
  return x.line == y.line && same_text(x.operation, y.operation) && same_text(x.file, y.file);
}

LA_EMULATION_INLINE bool has_returned(int thread) {
  return machine.warps[thread / warp_size].returned >> thread % warp_size & 1;
}

// What a thread waits for beyond its place: machine/mbarriers.hpp.
struct Wanted {
  char text[112];
};
static Wanted wanted_by(int thread);

// Nobody can run, and not all have returned. Lanes of a warp may wait in different places: one that
// waits at an mbarrier alone keeps the others at their collective.
[[noreturn, gnu::cold]] static void fail_deadlock() {
  char places[sizeof machine.message - 100] = "";  // what does not fit is left out
  std::size_t used = 0;
  for (int first = 0, end; first < machine.thread_count && used < sizeof places; first = end) {
    end = first + 1;
    if (has_returned(first)) continue;
    const Site& site = machine.threads[first].site;
    const Wanted wanted = wanted_by(first);
    while (end < machine.thread_count && !has_returned(end) &&
           same(machine.threads[end].site, site) &&
           std::strcmp(wanted_by(end).text, wanted.text) == 0)
      ++end;
    used += std::snprintf(places + used, sizeof places - used, "%s thread%s %d", used ? "," : "",
                          end - first > 1 ? "s" : "", first);
    if (end - first > 1 && used < sizeof places)
      used += std::snprintf(places + used, sizeof places - used, " to %d", end - 1);
    if (used < sizeof places)
      used += std::snprintf(places + used, sizeof places - used, " wait%s at %s (%s:%d)%s",
                            end - first > 1 ? "" : "s", site.operation, site.file, site.line,
                            wanted.text);
  }
  fail("was the last that could run, a deadlock:%s", places);
}

// The waiting threads of a warp must have come to the same place as this one.
LA_EMULATION_INLINE void check_meeting(const Site& mine, int warp, u32 waiting) {
  if (waiting && !same(machine.threads[warp * warp_size + __builtin_ctz(waiting)].site, mine))
    fail_diverged(mine, warp, waiting);
}

constexpr int none = -1;

LA_EMULATION_INLINE int pick(int warp) {
  const u32 ready = machine.warps[warp].ready;
  if (!ready) return none;
  return warp * warp_size + (machine.reverse ? 31 - __builtin_clz(ready) : __builtin_ctz(ready));
}

// The first warp that can run goes first, and runs until all of it waits at a barrier, or until it
// ends a phase of an mbarrier that a warp before it waits for. So the order in a phase between two
// barriers is always the same and `reverse` is its exact opposite: where a barrier is missing, or
// an arrival comes too early, one of the two orders reads what was not yet written, or what was
// already overwritten.
inline int first_ready() {
  for (int i = 0; i < machine.warp_count; ++i) {
    const int thread = pick(machine.reverse ? machine.warp_count - 1 - i : i);
    if (thread != none) return thread;
  }
  return none;
}

LA_EMULATION_INLINE void run(int next) {
  const int from = machine.current;
  if (next == from) return;
  machine.current = next;
  switch_context(machine.threads[from].context, machine.threads[next].context);
}

static void keep_fenced();  // machine/products.hpp

// All of the warp of this thread has gone as far as it can: the first that can run goes on.
inline void run_other_warp() {
  const int next = first_ready();
  if (next == none) fail_deadlock();
  keep_fenced();
  run(next);
}

// This thread waits: its warp goes on with the other lanes as long as it can.
LA_EMULATION_INLINE void run_others() {
  const int next = pick(machine.current / warp_size);
  if (next != none) run(next);
  else run_other_warp();
}

// What the 32 lanes of a warp brought to a collective, in lane order.
template <class Operands>
struct Lanes {
  void* const* operands;
  LA_EMULATION_INLINE Operands& operator[](int lane) const {
    return *static_cast<Operands*>(operands[lane]);
  }
};

// This lane waits for the others of its warp. Whether they are all here now.
LA_EMULATION_INLINE bool join_warp(const Site& site, void* operands) {
  const int warp_index = machine.current / warp_size;
  const u32 lane = 1u << machine.current % warp_size;
  Warp& warp = machine.warps[warp_index];
  if (warp.returned) fail_returned(site, warp_index, warp.returned);
  if (warp.at_barrier) fail_diverged(site, warp_index, warp.at_barrier);
  check_meeting(site, warp_index, warp.at_collective);
  Thread& thread = machine.threads[machine.current];
  thread.site = site;
  thread.operands = operands;
  warp.ready &= ~lane;
  warp.at_collective |= lane;
  return warp.at_collective == all_lanes;
}

// One function for all collectives and all their calls: kernels unroll many of them.
LA_EMULATION_HOT [[gnu::noinline]] static void meet_warp(const Site& site, void* operands,
                                                         void (*work)(void* const* all_operands)) {
  const int warp_index = machine.current / warp_size;
  if (join_warp(site, operands)) {
    Warp& warp = machine.warps[warp_index];
    Thread* threads = machine.threads + warp_index * warp_size;
    void* all[warp_size];
    for (int i = 0; i < warp_size; ++i) all[i] = threads[i].operands;
    work(all);
    warp.at_collective = 0;
    warp.ready = all_lanes;
  }
  run_others();
}

// Waits until all lanes of the warp are here; `work(Lanes<Operands>)` is then called once. It reads
// what the lanes brought and writes their results into it.
template <auto work, class Operands>
inline void warp_collective(const Site& site, Operands& mine) {
  meet_warp(site, &mine, [](void* const* all) { work(Lanes<Operands>{all}); });
}

// At the start of a block, and when all of it has come to sync_block.
inline void release_block() {
  machine.at_barrier = 0;
  for (int w = 0; w < machine.warp_count; ++w) machine.warps[w] = all_ready;
  for (Named& barrier : machine.named) barrier = Named{};
}

[[gnu::noinline]] static void block_barrier(const Site& site) {
  const int warp_index = machine.current / warp_size;
  const u32 lane = 1u << machine.current % warp_size;
  for (int w = 0; w < machine.warp_count; ++w) {
    if (machine.warps[w].returned) fail_returned(site, w, machine.warps[w].returned);
    check_meeting(site, w, machine.warps[w].at_barrier);
  }
  Warp& warp = machine.warps[warp_index];
  if (warp.at_collective) fail_diverged(site, warp_index, warp.at_collective);
  machine.threads[machine.current].site = site;
  warp.ready &= ~lane;
  warp.at_barrier |= lane;
  if (++machine.at_barrier == machine.thread_count) {
    release_block();
    run_other_warp();
  } else {
    run_others();
  }
}

// Where a thread waits tells named barriers apart by this name.
inline const char* named_operation(int id) {
  static const char* const operations[named_barriers] = {
      "",              "sync_named 1",  "sync_named 2",  "sync_named 3",
      "sync_named 4",  "sync_named 5",  "sync_named 6",  "sync_named 7",
      "sync_named 8",  "sync_named 9",  "sync_named 10", "sync_named 11",
      "sync_named 12", "sync_named 13", "sync_named 14", "sync_named 15"};
  return operations[id];
}

// The warp `warp` is at a named barrier, all of it: may it be?
static void check_named(const Named& barrier, const Site& site, int warp, int count) {
  const Thread* threads = machine.threads + warp * warp_size;
  for (int i = 0; i < warp_size; ++i)
    if (const int other = *static_cast<int*>(threads[i].operands); other != count)
      fail_count(site, count, warp * warp_size + i, other);
  if (barrier.waiting && barrier.count != count)
    fail_count(site, count, __builtin_ctz(barrier.waiting) * warp_size, barrier.count);
  if (barrier.count == count && barrier.group && !(barrier.group >> warp & 1))
    fail("is one more than the %d threads of %s (%s:%d): thread %d and others met there without it",
         count, site.operation, site.file, site.line, __builtin_ctz(barrier.group) * warp_size);
}

// A warp that the barrier waits for in vain, as it (or a lane of it) has returned: one of its
// group, or any where too few are left to fill the barrier.
static int missing_warp(const Named& barrier) {
  int left = 0, missing = none;
  for (int w = 0; w < machine.warp_count; ++w) {
    if (!machine.warps[w].returned) left += warp_size;
    else if (barrier.group >> w & 1) return w;
    else missing = w;
  }
  return left < barrier.count ? missing : none;
}

// The lanes of a warp meet first, at one place of the kernel; then the warps, which may come from
// different places. Between two sync_block those that meet at a barrier are always the same ones as
// long as `count` is: with others, who meets whom would be left to chance.
[[gnu::noinline]] static void named_barrier(int id, int count, const char* file, int line) {
  if (id < 1 || id >= named_barriers)
    fail("is at sync_named %d (%s:%d), allowed: 1 to %d", id, file, line, named_barriers - 1);
  const Site site = {named_operation(id), file, line};
  if (count < warp_size || count % warp_size || count > machine.thread_count)
    fail("is at %s (%s:%d) for %d threads, allowed: multiples of 32 up to %d", site.operation, file,
         line, count, machine.thread_count);
  const int warp_index = machine.current / warp_size;
  if (!join_warp(site, &count)) {
    run_others();
    return;
  }
  Named& barrier = machine.named[id];
  check_named(barrier, site, warp_index, count);
  if (barrier.count != count) barrier = Named{count, 0, 0};
  barrier.waiting |= 1u << warp_index;
  machine.warps[warp_index] = Warp{0, 0, 0, all_lanes, 0, 0};
  if (__builtin_popcount(barrier.waiting) * warp_size == count) {
    for (int w = 0; w < machine.warp_count; ++w)
      if (barrier.waiting >> w & 1) machine.warps[w] = all_ready;
    barrier.group = barrier.waiting;
    barrier.waiting = 0;
  } else if (const int missing = missing_warp(barrier); missing != none) {
    fail_returned(site, missing, machine.warps[missing].returned);
  }
  run_other_warp();
}

// A thread has returned: a fault where others wait for it.
static void check_named_return() {
  for (const Named& barrier : machine.named)
    if (barrier.waiting && missing_warp(barrier) != none)
      fail_missed(__builtin_ctz(barrier.waiting), all_lanes);
}

static void check_products_return();  // machine/products.hpp
static void check_stores_return();    // machine/stores.hpp

// What a fiber runs: the kernel, then the hand-over to whoever is left.
[[noreturn]] static void thread_main() {
  machine.kernel(machine.params);
  const int warp_index = machine.current / warp_size;
  Warp& warp = machine.warps[warp_index];
  if (warp.at_collective) fail_missed(warp_index, warp.at_collective);
  for (int w = 0; w < machine.warp_count; ++w)
    if (machine.warps[w].at_barrier) fail_missed(w, machine.warps[w].at_barrier);
  const u32 lane = 1u << machine.current % warp_size;
  warp.ready &= ~lane;
  warp.returned |= lane;
  check_named_return();
  check_products_return();
  check_stores_return();
  if (const int next = pick(warp_index); next != none) run(next);
  for (int w = 0; w < machine.warp_count; ++w)
    if (machine.warps[w].returned != all_lanes) run_other_warp();
  switch_context(machine.threads[machine.current].context, machine.launcher);
  __builtin_unreachable();  // nobody runs a thread that has returned
}

}  // namespace emulation
