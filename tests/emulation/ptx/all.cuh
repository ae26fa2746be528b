// The host's stand-in for kernels_cu/ptx: the same names, emulated (see machine/machine.hpp).
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
