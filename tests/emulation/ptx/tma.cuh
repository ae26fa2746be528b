// kernels_cu/ptx/tma.cuh on the host. A map is what emulated_map in backend.py makes. What is loaded
// is there at once; what is stored is read as late as it may be, or as early (machine/stores.hpp).
#pragma once
#include "machine/products.hpp"
#include "machine/stores.hpp"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"

namespace ptx {

struct alignas(64) TensorMap {
  u64 data, strides[4];  // bytes, of the axes behind the first
  u32 sizes[5], box[5], item;
  u64 unused[5];
};
static_assert(sizeof(TensorMap) == 128, "a map must have the size of the driver's");

}  // namespace ptx

namespace emulation {

// f(offset in shared memory, address or null, bytes) for each packet of the box at `at`, null where it is outside the array.
template <class F>
inline void each_packet(const ptx::TensorMap& map, const void* shared, const ptx::i32 (&at)[5], const Site& site, F f) {
  const auto offset = static_cast<const unsigned char*>(shared) - machine.shared;
  const int bytes = static_cast<int>(map.box[0] * map.item), rows = static_cast<int>(map.box[1]);
  if (offset < 0 || offset % 1024 || offset + bytes * rows > machine.shared_bytes)
    fail("gives %s (%s:%d) offset %lld of %d bytes of shared memory, allowed: multiples of 1024", site.operation,
         site.file, site.line, static_cast<long long>(offset), machine.shared_bytes);
  bool inside = true;
  unsigned long long base = map.data;
  for (int axis = 2; axis < 5; ++axis) {
    inside = inside && at[axis] >= 0 && static_cast<u32>(at[axis]) < map.sizes[axis];
    base += static_cast<unsigned long long>(at[axis]) * map.strides[axis - 1];
  }
  const int per_packet = 16 / static_cast<int>(map.item);
  for (int row = 0; row < rows; ++row) {
    const long long y = static_cast<long long>(at[1]) + row;
    for (int packet = 0; packet < bytes / 16; ++packet) {
      const long long x = at[0] + static_cast<long long>(packet) * per_packet;
      const long long left = static_cast<long long>(map.sizes[0]) - x;
      const bool exists = inside && y >= 0 && y < static_cast<long long>(map.sizes[1]) && x >= 0 && left > 0;
      const int count = !exists ? 0 : left < per_packet ? static_cast<int>(left) : per_packet;
      const unsigned long long from = base + static_cast<unsigned long long>(y) * map.strides[0] + static_cast<unsigned long long>(x) * map.item;
      f(static_cast<u32>(offset) + static_cast<u32>(row * bytes + ((packet ^ row) & 7) * 16), reinterpret_cast<unsigned char*>(from),
        count * static_cast<int>(map.item));
    }
  }
}

}  // namespace emulation

namespace ptx {

inline void tma_load(void* to, const TensorMap* map, const i32 (&at)[5], Mbarrier* barrier, LA_EMULATION_SITE) {
  const emulation::Site site = {"tma_load", file, line};
  emulation::keep_fenced();
  emulation::each_packet(*map, to, at, site, [](u32 offset, const unsigned char* from, int bytes) {
    unsigned char* const packet = emulation::machine.shared + offset;
    __builtin_memset(packet, 0, 16);
    if (bytes) __builtin_memcpy(packet, from, static_cast<unsigned>(bytes));
    // wgmma sees what comes this way without a fence.
    if (!emulation::async_view.bytes.empty()) __builtin_memcpy(&emulation::async_view.bytes[offset], packet, 16);
  });
  emulation::bring_bytes(site, barrier, static_cast<int>(map->box[0] * map->box[1] * map->item));
}

inline void tma_store(const TensorMap* map, const void* from, const i32 (&at)[5], LA_EMULATION_SITE) {
  const emulation::Site site = {"tma_store", file, line};
  for (int axis = 0; axis < 5; ++axis)
    if (at[axis] < 0)
      emulation::fail("gives %s (%s:%d) coordinate %d of axis %d, allowed: 0 and more", site.operation, site.file,
                      site.line, at[axis], axis);
  emulation::keep_fenced();
  emulation::each_packet(*map, from, at, site, [&site](u32 offset, unsigned char* to, int bytes) {
    if (bytes == 0) return;
    const unsigned char* const packet = emulation::machine.shared + offset;
    if (emulation::async_view.bytes.empty() || __builtin_memcmp(&emulation::async_view.bytes[offset], packet, 16))
      emulation::fail("is at %s (%s:%d), but no fence_async follows the last writes to shared memory", site.operation,
                      site.file, site.line);
    emulation::start_store(site, to, offset, bytes);
  });
}
inline void tma_commit() { emulation::commit_stores(); }
inline void tma_wait_read(LA_EMULATION_SITE) { emulation::finish_stores({"tma_wait_read", file, line}); }

}  // namespace ptx
