// Every instruction and CUDA built-in that the kernels use, each behind one wrapper.
// Nothing outside this folder contains inline assembly or names a built-in, so that the host
// emulation (tests/emulation/ptx) can replace the folder and run the same kernels on a CPU.
#pragma once
#include "ptx/types.cuh"
#include "ptx/thread.cuh"
#include "ptx/memory.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
