// Runs the blocks of a grid one after the other: stacks, shared memory, checks of the launch.
#pragma once
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include "machine/copies.hpp"
#include "machine/machine.hpp"
#include "machine/mbarriers.hpp"
#include "machine/products.hpp"
#include "machine/stores.hpp"
#include "machine/traps.hpp"

namespace emulation {

constexpr std::size_t stack_bytes = 256 * 1024;
constexpr int max_shared_bytes = 227 * 1024;  // of one block, on Hopper
constexpr int max_params_bytes = 4096;        // of one kernel

// The instruction that failed as addr2line wants it, an offset in this library's file; 0: unknown.
inline std::uintptr_t fault_offset() {
  Dl_info here, there;
  if (!dladdr(&machine, &here) || !dladdr(reinterpret_cast<void*>(machine.fault_address), &there))
    return 0;
  return here.dli_fbase == there.dli_fbase
             ? machine.fault_address - reinterpret_cast<std::uintptr_t>(here.dli_fbase)
             : 0;
}

// A kernel behind a plain pointer: Entry<&kernel>::call(params) and the size of its Params.
template <auto kernel>
struct Entry;
template <class Params, void (*kernel)(Params)>
struct Entry<kernel> {
  static constexpr std::size_t params_bytes = sizeof(Params);
  static void call(const void* params) { kernel(*static_cast<const Params*>(params)); }
};

struct Kernel {
  void (*call)(const void* params);
  std::size_t params_bytes;
};

// Pages from the system, far from everything else: the addresses on either side trap, so a wild
// index into shared memory cannot end in somebody's stack. The margins are addresses only and cost
// no memory.
class Pages {
 public:
  explicit Pages(std::size_t bytes) : page_(static_cast<std::size_t>(sysconf(_SC_PAGESIZE))) {
    size_ = (bytes + page_ - 1) / page_ * page_;
    base_ = mmap(nullptr, size_ + 2 * margin, PROT_NONE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base_ == MAP_FAILED) return;
    if (mprotect(begin(), size_, PROT_READ | PROT_WRITE) == 0) return;
    munmap(base_, size_ + 2 * margin);
    base_ = MAP_FAILED;
  }
  ~Pages() {
    if (base_ != MAP_FAILED) munmap(base_, size_ + 2 * margin);
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  bool valid() const { return base_ != MAP_FAILED; }
  unsigned char* begin() const { return static_cast<unsigned char*>(base_) + margin; }
  std::size_t size() const { return size_; }
  // Makes the page at an offset trap as well.
  void seal(std::size_t offset) const { mprotect(begin() + offset, page_, PROT_NONE); }

 private:
  static constexpr std::size_t margin = std::size_t{256} << 20;
  std::size_t page_, size_;
  void* base_;
};

// Shared memory, and behind it a zone that no kernel may write. Both are filled before each block
// with what reads as NaN in every float type, so results show when a kernel reads what it did not
// write.
class SharedMemory {
 public:
  explicit SharedMemory(int bytes)
      : bytes_(bytes), pages_(static_cast<std::size_t>(bytes) + guard_bytes) {}
  bool valid() const { return pages_.valid(); }
  unsigned char* begin() const { return pages_.begin(); }

  void fill() {
    std::memset(begin(), 0xff, bytes_);
    for (unsigned char* p = begin() + bytes_; p < end(); ++p) *p = guard(p);
  }
  // The offset of the first byte of the guard zone that was written, or -1.
  long overrun() const {
    for (const unsigned char* p = begin() + bytes_; p < end(); ++p)
      if (*p != guard(p)) return p - begin();
    return -1;
  }

 private:
  static constexpr std::size_t guard_bytes = 2048;
  // 0xfffe as u16, so that writing -1 is seen too.
  static unsigned char guard(const unsigned char* p) {
    return reinterpret_cast<std::uintptr_t>(p) % 2 ? 0xff : 0xfe;
  }
  unsigned char* end() const { return pages_.begin() + pages_.size(); }
  int bytes_;
  Pages pages_;
};

inline bool refuse(const char* what, long arrived, long allowed) {
  std::snprintf(machine.message, sizeof machine.message, "launch with %s = %ld, allowed: up to %ld",
                what, arrived, allowed);
  return false;
}

inline bool run_block(const Pages& stacks) {
  release_block();
  reset_products();
  reset_mbarriers();
  reset_copies();
  reset_stores();
  for (int i = 0; i < machine.thread_count; ++i) {
    // Stacks a power of two apart would all fall into the same few sets of the caches.
    const std::size_t colour = static_cast<std::size_t>(i % 64) * 320;
    unsigned char* stack = stacks.begin() + i * stack_bytes;
    make_context(machine.threads[i].context, stack, stack_bytes - colour, thread_main);
  }
  machine.current = first_ready();
  switch_context(machine.launcher, machine.threads[machine.current].context);
  return !machine.failed;
}

inline bool launch(const Kernel& kernel, const void* params, std::size_t params_bytes, int grid,
                   int threads, int shared_bytes, bool reverse, bool early) {
  machine.fault_address = 0;
  if (params_bytes != kernel.params_bytes) {
    std::snprintf(machine.message, sizeof machine.message,
                  "launch with params of %zu bytes, Params has %zu", params_bytes,
                  kernel.params_bytes);
    return false;
  }
  if (threads < warp_size || threads > max_threads) return refuse("threads", threads, max_threads);
  if (threads % warp_size) {
    std::snprintf(
        machine.message, sizeof machine.message,
        "launch with threads = %d, allowed: multiples of 32 (warp collectives need whole warps)",
        threads);
    return false;
  }
  if (grid < 1) return refuse("grid", grid, 0x7fffffff);
  if (shared_bytes < 0 || shared_bytes > max_shared_bytes)
    return refuse("shared_bytes", shared_bytes, max_shared_bytes);
  if (params_bytes > max_params_bytes)
    return refuse("sizeof(Params)", static_cast<long>(params_bytes), max_params_bytes);

  alignas(128) unsigned char aligned_params[max_params_bytes];  // Python aligns bytes to 16 at best
  std::memcpy(aligned_params, params, params_bytes);
  Pages stacks(threads * stack_bytes);
  SharedMemory shared(shared_bytes);
  if (!stacks.valid() || !shared.valid()) {
    std::snprintf(machine.message, sizeof machine.message, "the host has no memory for the stacks");
    return false;
  }
  // A stack grows down; one that overflows must not reach the next thread's.
  for (int i = 0; i < threads; ++i) stacks.seal(i * stack_bytes);
  machine.thread_count = threads;
  machine.warp_count = threads / warp_size;
  machine.grid = grid;
  machine.reverse = reverse;
  machine.early = early;
  machine.shared = shared.begin();
  machine.shared_bytes = shared_bytes;
  machine.kernel = kernel.call;
  machine.params = aligned_params;
  machine.failed = false;
  Traps traps;
  for (int i = 0; i < grid; ++i) {
    machine.block = reverse ? grid - 1 - i : i;
    shared.fill();
    if (!run_block(stacks)) return false;
    const long offset = shared.overrun();
    if (offset < 0) continue;
    std::snprintf(machine.message, sizeof machine.message,
                  "block %d wrote behind its %d bytes of shared memory, first at offset %ld",
                  machine.block, shared_bytes, offset);
    return false;
  }
  return true;
}

}  // namespace emulation
