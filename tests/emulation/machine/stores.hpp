// Copies from shared memory that a thread has started and not waited for: shared memory is read as
// late as it may be, when the thread waits, or as early, where machine.early. So whoever writes there
// too early or too late changes what is stored in one of the two.
#pragma once
#include <vector>

#include "machine/machine.hpp"

namespace emulation {

struct Store {
  unsigned char* to;
  u32 offset;  // of shared memory
  int bytes;
  Site site;
};

// Of one thread.
struct Stores {
  std::vector<Store> started;
  std::size_t committed;
};

static Stores stores[max_threads];

// At the start of a block, which may follow one that failed.
static void reset_stores() {
  for (int i = 0; i < machine.thread_count; ++i) {
    stores[i].started.clear();
    stores[i].committed = 0;
  }
}

inline void run_store(const Store& store) {
  __builtin_memcpy(store.to, machine.shared + store.offset, static_cast<std::size_t>(store.bytes));
}

inline void start_store(const Site& site, unsigned char* to, u32 offset, int bytes) {
  stores[machine.current].started.push_back(Store{to, offset, bytes, site});
  if (machine.early) run_store(stores[machine.current].started.back());
}

inline void commit_stores() { stores[machine.current].committed = stores[machine.current].started.size(); }

inline void finish_stores(const Site& site) {
  Stores& mine = stores[machine.current];
  if (mine.committed < mine.started.size()) {
    const Site& store = mine.started[mine.committed].site;
    fail("is at %s (%s:%d), but no tma_commit follows %s (%s:%d)", site.operation, site.file, site.line,
         store.operation, store.file, store.line);
  }
  for (const Store& store : mine.started)
    if (!machine.early) run_store(store);
  mine.started.clear();
  mine.committed = 0;
}

// A thread has returned: shared memory may be gone before it is read.
static void check_stores_return() {
  const Stores& mine = stores[machine.current];
  if (mine.started.empty()) return;
  const Site& site = mine.started.back().site;
  fail("returns from the kernel, but no %s follows %s (%s:%d)",
       mine.committed == mine.started.size() ? "tma_wait_read" : "tma_commit", site.operation, site.file,
       site.line);
}

}  // namespace emulation
