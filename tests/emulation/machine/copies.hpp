// Copies to shared memory that a thread has started and not waited for: they end as late as they
// may, when the thread waits for their group, and until then their place reads as NaN. What they
// bring is read at once, as no kernel writes what it copies and a wild pointer shows its place.
#pragma once
#include <vector>

#include "machine/machine.hpp"

namespace emulation {

struct Copy {
  unsigned char* to;
  std::size_t count;
  unsigned char bytes[16];
};

// Of one thread, in the order in which they were started.
struct Copies {
  std::vector<Copy> started;
  std::vector<std::size_t> groups;  // behind the last copy of each group that is committed
};

static Copies copies[max_threads];

// At the start of a block. What a thread of the last one did not wait for is dropped.
static void reset_copies() {
  for (int i = 0; i < machine.thread_count; ++i) {
    copies[i].started.clear();
    copies[i].groups.clear();
  }
}

template <class Word>
LA_EMULATION_HOT inline void start_copy(void* to, const Word* word, const char* operation) {
  static_assert(sizeof(Word) == 4 || sizeof(Word) == 16, "a copy has 4 or 16 bytes");
  constexpr int bytes = sizeof(Word);
  auto* place = static_cast<unsigned char*>(to);
  const auto offset = place - machine.shared;
  if (offset < 0 || offset + bytes > machine.shared_bytes)
    fail("uses %s to %p, at offset %lld of %d bytes of shared memory", operation, to,
         static_cast<long long>(offset), machine.shared_bytes);
  if (offset % bytes)
    fail("uses %s to offset %lld of shared memory, no multiple of %d", operation,
         static_cast<long long>(offset), bytes);
  Copy copy = {place, sizeof(Word), {}};
  __builtin_memcpy(copy.bytes, word, sizeof(Word));
  copies[machine.current].started.push_back(copy);
  __builtin_memset(place, 0xff, sizeof(Word));
}

inline void commit_copies() {
  Copies& mine = copies[machine.current];
  mine.groups.push_back(mine.started.size());
}

// All but the last `left` groups.
LA_EMULATION_HOT inline void finish_copies(std::size_t left) {
  static constexpr unsigned char untouched[16] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
                                                  0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff};
  Copies& mine = copies[machine.current];
  if (mine.groups.size() <= left) return;
  const std::size_t ended = mine.groups.size() - left, end = mine.groups[ended - 1];
  for (std::size_t i = 0; i < end; ++i) {
    const Copy& copy = mine.started[i];
    if (std::memcmp(copy.to, untouched, copy.count))
      fail("waits for copies, but offset %lld of shared memory, where one goes, was written "
           "meanwhile", static_cast<long long>(copy.to - machine.shared));
    __builtin_memcpy(copy.to, copy.bytes, copy.count);
  }
  mine.started.erase(mine.started.begin(), mine.started.begin() + end);
  mine.groups.erase(mine.groups.begin(), mine.groups.begin() + ended);
  for (std::size_t& group : mine.groups) group -= end;
}

// Those of no group as well.
inline void finish_all_copies() {
  commit_copies();
  finish_copies(0);
}

}  // namespace emulation
