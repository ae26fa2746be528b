// Integer names (NVRTC has no <cstdint>), storage types, and how a function is marked for the device.
#pragma once

#define LA_DEVICE __device__ __forceinline__
#define LA_KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define LA_GRID_CONSTANT __grid_constant__

namespace ptx {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

// 16-bit floats are storage here: arithmetic is done in float. Declaring them ourselves keeps the
// library free of cuda_fp16.h and cuda_bf16.h, which a wheels-only installation need not have.
struct bf16 { u16 bits; };
struct f16 { u16 bits; };

struct alignas(16) Word4 { u32 w[4]; };
struct alignas(8) Word2 { u32 w[2]; };

}  // namespace ptx
