// Feature maps phi and their derivatives. To add one: a policy here, under its capitalised name, and a case; its formula in
// la_cupy/features.py and, written anew, in la_cupy/reference.py; and a line in tests/cases.py.
#pragma once
#include "ptx/all.cuh"

namespace la {

// kAtZero: phi(0). Where it is 0, zeros behind the end of a row stay zeros.
struct Identity {
  static constexpr int kAtZero = 0;
  template <class T> static LA_DEVICE T value(T x) { return x; }
  template <class T> static LA_DEVICE T derivative(T) { return T(1); }
};

// elu(x) + 1
struct Elu1 {
  static constexpr int kAtZero = 1;
  template <class T> static LA_DEVICE T value(T x) { return x > T(0) ? x + T(1) : ptx::exp(x); }
  template <class T> static LA_DEVICE T derivative(T x) { return x > T(0) ? T(1) : ptx::exp(x); }
};

// Written so that a NaN stays a NaN.
struct Relu {
  static constexpr int kAtZero = 0;
  template <class T> static LA_DEVICE T value(T x) { return x < T(0) ? T(0) : x; }
  template <class T> static LA_DEVICE T derivative(T x) { return x > T(0) ? T(1) : T(0); }
};

struct Silu {
  static constexpr int kAtZero = 0;
  template <class T> static LA_DEVICE T value(T x) { return x * ptx::reciprocal(T(1) + ptx::exp(-x)); }
  template <class T> static LA_DEVICE T derivative(T x) {
    const T s = ptx::reciprocal(T(1) + ptx::exp(-x));
    return s + x * s * (T(1) - s);
  }
};

struct Exp {
  static constexpr int kAtZero = 1;
  template <class T> static LA_DEVICE T value(T x) { return ptx::exp(x); }
  template <class T> static LA_DEVICE T derivative(T x) { return ptx::exp(x); }
};

// phi where it is known at run time only, by its place in la_cupy/features.py.
template <class T>
LA_DEVICE T feature_value(i32 feature, T x) {
  switch (feature) {
    case 1: return Elu1::value(x);
    case 2: return Relu::value(x);
    case 3: return Silu::value(x);
    case 4: return Exp::value(x);
    default: return Identity::value(x);
  }
}

}  // namespace la
