// kernels_cu/ptx/types.cuh on the host: functions for the device are ordinary ones.
#pragma once

#define LA_DEVICE inline
#define LA_KERNEL(threads, blocks) void
#define LA_GRID_CONSTANT

namespace ptx {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

struct bf16 { u16 bits; };
struct f16 { u16 bits; };

struct alignas(16) Word4 { u32 w[4]; };
struct alignas(8) Word2 { u32 w[2]; };

}  // namespace ptx

// Collectives take the caller's place as a last argument that nobody writes: it lets the machine
// tell lanes apart that meet in the same operation from different lines, and a fault name the line.
#define LA_EMULATION_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()
