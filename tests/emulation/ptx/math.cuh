// kernels_cu/ptx/math.cuh on the host.
#pragma once
#include <cmath>

#include "ptx/types.cuh"

namespace ptx {

inline float exp(float x) { return std::exp(x); }
inline double exp(double x) { return std::exp(x); }
inline float reciprocal(float x) { return 1.0f / x; }
inline double reciprocal(double x) { return 1.0 / x; }
inline float reciprocal_sqrt(float x) { return 1.0f / std::sqrt(x); }
inline double reciprocal_sqrt(double x) { return 1.0 / std::sqrt(x); }
inline float square_root(float x) { return std::sqrt(x); }
inline float fma(float x, float y, float z) { return std::fma(x, y, z); }
inline double fma(double x, double y, double z) { return std::fma(x, y, z); }

}  // namespace ptx
