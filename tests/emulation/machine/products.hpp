// Products that a warp has issued and not waited for: wgmma runs on its own, and here as late as it
// may, when the warp waits, or as early, where machine.early. So whoever overwrites an operand in
// shared memory too early, or writes it too late, changes the result of one of the two, and an
// accumulator reads as NaN until the wait.
//
// A warp computes its own 16 rows by itself. That the four warps of a warpgroup issue the same
// products, which the instruction needs, is checked by a list of the warpgroup.
#pragma once
#include <vector>

#include "machine/machine.hpp"

namespace emulation {

typedef float Row8 __attribute__((vector_size(32)));

constexpr int max_columns = 128;  // of one product
constexpr int warpgroup = 4;      // warps
// A signalling NaN, which no arithmetic yields: registers that hold anything else at the wait have
// been written, if only by adding to them.
constexpr u32 in_flight = 0xffa5a5a5u;

// An operand in shared memory, in bytes: where it starts, and how far on the next atoms are, those
// along its lines' numbers and those side by side.
struct Operand {
  u32 start, stride, aside;
};

// The 16 rows of one warp, while products for them are queued.
struct Accumulator {
  Row8 c[16][max_columns / 8];
  float* d[warp_size];
  int count;    // floats of each lane
  int pending;  // products that are queued; 0: free
};

struct Product {
  void (*run)(const Product& product, Row8 (&c)[16][max_columns / 8]);
  Site site;
  Operand a, b;
  u32 registers[warp_size][4];  // of a, where it does not lie in shared memory
  int keep, warp, accumulator;
};

struct Queue {
  std::vector<Product> products;
  std::vector<std::size_t> groups;  // behind the last product of each group that is committed
  std::vector<Accumulator> accumulators;
  std::size_t issued;  // products of the list of the warpgroup that this warp has issued too
  bool fenced;         // by wgmma_fence, since the last wait
};

// What all four warps have to bring.
struct Issued {
  void (*run)(const Product&, Row8 (&)[16][max_columns / 8]);
  Site site;
  unsigned long long a, b;
  int keep, thread;
};

static Queue queues[max_threads / warp_size];
static std::vector<Issued> issued[max_threads / warp_size / warpgroup];

// Shared memory as wgmma may see it, and whether fence_async was called since it was kept.
struct AsyncView {
  bool fence;
  std::vector<unsigned char> bytes;
};
static AsyncView async_view;

// At the start of a block, which may follow one that failed.
static void reset_products() {
  for (int w = 0; w < machine.warp_count; ++w) {
    queues[w].products.clear();
    queues[w].groups.clear();
    queues[w].accumulators.clear();
    queues[w].issued = 0;
    queues[w].fenced = false;
    issued[w / warpgroup].clear();
  }
  async_view.fence = false;
  async_view.bytes.clear();
}

// A fence vouches for what its warp has written until that waits, not for what others write then.
static void keep_fenced() {
  if (!async_view.fence) return;
  async_view.bytes.assign(machine.shared, machine.shared + machine.shared_bytes);
  async_view.fence = false;
}

// A lane has pairs of neighbours: two of rows 8 apart in each eight columns.
LA_EMULATION_INLINE float* pair_of(const Accumulator& from, int lane, int pair) {
  const Row8& row = from.c[lane / 4 + pair % 2 * 8][pair / 2];
  return const_cast<float*>(reinterpret_cast<const float*>(&row)) + lane % 4 * 2;
}

LA_EMULATION_HOT inline void load_accumulator(Accumulator& to) {
  for (int lane = 0; lane < warp_size; ++lane)
    for (int i = 0; i < to.count / 2; ++i)
      __builtin_memcpy(pair_of(to, lane, i), to.d[lane] + 2 * i, 8);
}

LA_EMULATION_HOT inline void store_accumulator(const Accumulator& from) {
  for (int lane = 0; lane < warp_size; ++lane)
    for (int i = 0; i < from.count / 2; ++i)
      __builtin_memcpy(from.d[lane] + 2 * i, pair_of(from, lane, i), 8);
}

LA_EMULATION_HOT inline void poison(const Accumulator& which) {
  for (int lane = 0; lane < warp_size; ++lane)
    for (int i = 0; i < which.count; ++i)
      __builtin_memcpy(which.d[lane] + i, &in_flight, sizeof in_flight);
}

// The lane that has written into an accumulator, or none.
LA_EMULATION_HOT inline int written_lane(const Accumulator& which) {
  for (int lane = 0; lane < warp_size; ++lane) {
    u32 changed = 0;
    for (int i = 0; i < which.count; ++i) {
      u32 bits;
      __builtin_memcpy(&bits, which.d[lane] + i, sizeof bits);
      changed |= bits ^ in_flight;
    }
    if (changed) return lane;
  }
  return none;
}

// The accumulator of these registers, which queued products may already have: then they chain.
inline int find_accumulator(Queue& queue, float* const (&d)[warp_size], int count, int keep,
                            const Site& site) {
  int free = none;
  for (int i = 0; i < static_cast<int>(queue.accumulators.size()); ++i) {
    const Accumulator& other = queue.accumulators[i];
    if (!other.pending) free = i;
    else if (other.count == count && std::memcmp(other.d, d, sizeof d) == 0) return i;
    else if (other.d[0] < d[0] + count && d[0] < other.d[0] + other.count)
      fail("is at %s (%s:%d) for registers of which products still queued have a part",
           site.operation, site.file, site.line);
  }
  if (free == none) {
    free = static_cast<int>(queue.accumulators.size());
    queue.accumulators.emplace_back();
  }
  Accumulator& fresh = queue.accumulators[free];
  std::memcpy(fresh.d, d, sizeof d);
  fresh.count = count;
  fresh.pending = 0;
  if (keep) load_accumulator(fresh);
  poison(fresh);
  return free;
}

// Before a product is queued: do the other warps of the warpgroup bring the same?
static void check_warpgroup(const Issued& mine) {
  const int warp = machine.current / warp_size, first = warp / warpgroup * warpgroup;
  const Site& site = mine.site;
  if (first + warpgroup > machine.warp_count)
    fail("is at %s (%s:%d), but its warpgroup has %d of four warps", site.operation, site.file,
         site.line, machine.warp_count - first);
  std::vector<Issued>& list = issued[warp / warpgroup];
  if (queues[warp].issued == list.size()) {
    for (int w = first; w < first + warpgroup; ++w)
      if (machine.warps[w].returned) fail_returned(site, w, machine.warps[w].returned);
    list.push_back(mine);
  }
  const Issued& other = list[queues[warp].issued++];
  if (other.run != mine.run || !same(other.site, site))
    fail("is at %s (%s:%d), but thread %d of its warpgroup was at %s (%s:%d)", site.operation,
         site.file, site.line, other.thread, other.site.operation, other.site.file,
         other.site.line);
  if (other.a != mine.a || other.b != mine.b || other.keep != mine.keep)
    fail("gives %s (%s:%d) a = %#llx, b = %#llx, keep = %d, but thread %d of its warpgroup %#llx, "
         "%#llx, %d", site.operation, site.file, site.line, mine.a, mine.b, mine.keep,
         other.thread, other.a, other.b, other.keep);
  for (int w = first; w < first + warpgroup; ++w)
    if (queues[w].issued != list.size()) return;
  for (int w = first; w < first + warpgroup; ++w) queues[w].issued = 0;
  list.clear();
}

static void commit_products() {
  Queue& queue = queues[machine.current / warp_size];
  queue.groups.push_back(queue.products.size());
}

static void run_products(std::size_t left, const Site& site) {
  Queue& queue = queues[machine.current / warp_size];
  const std::size_t committed = queue.groups.empty() ? 0 : queue.groups.back();
  if (left == 0 && committed < queue.products.size()) {
    const Site& product = queue.products[committed].site;
    fail("waits for products (%s:%d), but no wgmma_commit follows %s (%s:%d)", site.file, site.line,
         product.operation, product.file, product.line);
  }
  queue.fenced = false;
  if (queue.groups.size() <= left) return;
  const std::size_t ended = queue.groups.size() - left, end = queue.groups[ended - 1];
  for (std::size_t i = 0; i < end; ++i) {
    const Product& product = queue.products[i];
    Accumulator& accumulator = queue.accumulators[product.accumulator];
    if (!machine.early) product.run(product, accumulator.c);
    if (--accumulator.pending) continue;
    if (const int lane = written_lane(accumulator); lane != none)
      fail("waits for products (%s:%d), but lane %d has written registers of %s (%s:%d) meanwhile",
           site.file, site.line, lane, product.site.operation, product.site.file,
           product.site.line);
    store_accumulator(accumulator);
  }
  queue.products.erase(queue.products.begin(), queue.products.begin() + end);
  queue.groups.erase(queue.groups.begin(), queue.groups.begin() + ended);
  for (std::size_t& group : queue.groups) group -= end;
}

// A thread has returned: a fault where its warp has not waited for all products, or where the
// others of its warpgroup have issued more.
static void check_products_return() {
  const int warp = machine.current / warp_size;
  const Queue& queue = queues[warp];
  if (!queue.products.empty()) {
    const Site& site = queue.products.back().site;
    const bool committed = !queue.groups.empty() && queue.groups.back() == queue.products.size();
    fail("returns from the kernel, but no %s follows %s (%s:%d)",
         committed ? "wgmma_wait" : "wgmma_commit", site.operation, site.file, site.line);
  }
  const std::vector<Issued>& list = issued[warp / warpgroup];
  if (queue.issued < list.size()) {
    const Issued& other = list[queue.issued];
    fail("returns from the kernel, but thread %d of its warpgroup was at %s (%s:%d)", other.thread,
         other.site.operation, other.site.file, other.site.line);
  }
}

}  // namespace emulation
