// One block of CUDA threads on one host thread.
//
// Every CUDA thread is a fiber that runs until it must wait for others: at a warp collective
// (shuffle, vote, ldmatrix, mma, sync_warp) for the 32 lanes of its warp, at sync_block for the
// whole block. The last lane to arrive does the work of all, and the lanes go on one after the
// other. Whatever hardware would answer with a hang or with garbage is a fault here: it ends the
// launch with a message.
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

// Where and what a thread waits for. The place is part of it: lanes that meet in the same operation
// from different lines have diverged, which hardware need not forgive.
struct Site {
  const char* operation;
  const char* file;
  int line;
};

// Bit l of each mask is lane l; every lane is in exactly one of them.
struct Warp {
  u32 ready, at_collective, at_barrier, returned;
};

struct Thread {
  Context context;
  Site site;
  void* operands;  // what this lane brings to the collective it waits at; lives on its stack
};

struct Machine {
  Thread threads[max_threads];
  Warp warps[max_threads / warp_size];
  int thread_count, warp_count, block;
  int current;     // the thread that runs
  int at_barrier;  // threads of the block that wait at sync_block
  bool reverse;    // of the ready lanes (and warps), run the last instead of the first
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

// Nearly always the very same literals, so the texts are not compared.
LA_EMULATION_INLINE bool same_text(const char* x, const char* y) {
  return x == y || std::strcmp(x, y) == 0;
}

LA_EMULATION_INLINE bool same(const Site& x, const Site& y) {
  return x.line == y.line && same_text(x.operation, y.operation) && same_text(x.file, y.file);
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

// The first warp that can run goes first, and runs until all of it waits at sync_block. So the
// order in a phase between two barriers is always the same and `reverse` is its exact opposite:
// where a barrier is missing, one of the two orders reads what was not yet written, or what was
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

// What the 32 lanes of a warp brought to a collective, in lane order.
template <class Operands>
struct Lanes {
  void* const* operands;
  LA_EMULATION_INLINE Operands& operator[](int lane) const {
    return *static_cast<Operands*>(operands[lane]);
  }
};

// One function for all collectives and all their calls: kernels unroll many of them.
LA_EMULATION_HOT [[gnu::noinline]] static void meet_warp(const Site& site, void* operands,
                                                         void (*work)(void* const* all_operands)) {
  const int warp_index = machine.current / warp_size;
  const u32 lane = 1u << machine.current % warp_size;
  Warp& warp = machine.warps[warp_index];
  if (warp.returned) fail_returned(site, warp_index, warp.returned);
  if (warp.at_barrier) fail_diverged(site, warp_index, warp.at_barrier);
  check_meeting(site, warp_index, warp.at_collective);
  Thread* threads = machine.threads + warp_index * warp_size;
  Thread& thread = machine.threads[machine.current];
  thread.site = site;
  thread.operands = operands;
  warp.ready &= ~lane;
  warp.at_collective |= lane;
  if (warp.at_collective == all_lanes) {
    void* all[warp_size];
    for (int i = 0; i < warp_size; ++i) all[i] = threads[i].operands;
    work(all);
    warp.at_collective = 0;
    warp.ready = all_lanes;
  }
  run(pick(warp_index));  // never none: a lane that is missing is ready, and now perhaps all are
}

// Waits until all lanes of the warp are here; `work(Lanes<Operands>)` is then called once. It reads
// what the lanes brought and writes their results into it.
template <auto work, class Operands>
inline void warp_collective(const Site& site, Operands& mine) {
  meet_warp(site, &mine, [](void* const* all) { work(Lanes<Operands>{all}); });
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
    machine.at_barrier = 0;
    for (int w = 0; w < machine.warp_count; ++w) machine.warps[w] = Warp{all_lanes, 0, 0, 0};
    run(first_ready());
    return;
  }
  const int next = pick(warp_index);
  run(next != none ? next : first_ready());  // never none: the thread that is missing is ready
}

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
  int next = pick(warp_index);
  if (next == none) next = first_ready();
  if (next != none) run(next);
  switch_context(machine.threads[machine.current].context, machine.launcher);
  __builtin_unreachable();  // nobody runs a thread that has returned
}

}  // namespace emulation
