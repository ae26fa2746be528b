// Rows of global arrays, 16 bytes of a shared tile at a time. A packet is read raw, so that it can wait in a
// register while the chunk before it is worked on, and decoded when its turn comes.
#pragma once
#include "chunk/params.cuh"
#include "tile/arith.cuh"

namespace la {

LA_DEVICE int element_bytes(i32 dtype) { return dtype == kFloat64 ? 8 : dtype == kFloat32 ? 4 : 2; }

template <class Arith>
LA_DEVICE int element_bytes(const Tensor& t) {
  return Arith::kFixedType ? static_cast<int>(sizeof(typename Arith::Elem)) : element_bytes(t.dtype);
}

template <class Arith>
LA_DEVICE i32 element_type(const Tensor& t) { return Arith::kFixedType ? Arith::kDType : t.dtype; }

// The first `valid` elements of the packet at p; zeros behind them.
template <class Arith, int Count>
LA_DEVICE Word4 fetch_packet(const Tensor& t, const char* p, int valid) {
  Word4 raw = {{0, 0, 0, 0}};
  if (valid <= 0) return raw;
  const int size = element_bytes<Arith>(t);
  if (t.aligned && valid >= Count) {
    const int bytes = Count * size;
    if (bytes == 16) {
      raw = load_16(p);
    } else if (bytes == 8) {
      const Word2 w = load_8(p);
      raw.w[0] = w.w[0];
      raw.w[1] = w.w[1];
    } else {
      raw.w[0] = load_4(p);
    }
    return raw;
  }
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    if (i >= valid) break;
    if (size == 2) {
      raw.w[i / 2] |= static_cast<u32>(load_2(p + 2 * i)) << (i % 2 * 16);
    } else if (size == 4) {
      raw.w[i % 4] = load_4(p + 4 * i);
    } else {
      const Word2 w = load_8(p + 8 * i);
      raw.w[2 * i % 4] = w.w[0];
      raw.w[(2 * i + 1) % 4] = w.w[1];
    }
  }
  return raw;
}

LA_DEVICE float half_word(const Word4& raw, int i, i32 dtype) {
  const u32 w = raw.w[i / 2];
  if (dtype == kBFloat16) return i % 2 ? bf16_high(w) : bf16_low(w);
  return i % 2 ? f16_high(w) : f16_low(w);
}

LA_DEVICE void decode_packet(const Word4& raw, i32, float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = half_word(raw, i, kBFloat16);
}

LA_DEVICE void decode_packet(const Word4& raw, i32 dtype, float (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = dtype == kFloat32 ? as_float(raw.w[i]) : half_word(raw, i, dtype);
}

LA_DEVICE void decode_packet(const Word4& raw, i32 dtype, double (&x)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    x[i] = dtype == kFloat64   ? as_double(raw.w[2 * i], raw.w[2 * i + 1])
           : dtype == kFloat32 ? static_cast<double>(as_float(raw.w[i]))
                               : static_cast<double>(half_word(raw, i, dtype));
  }
}

// One element as the array keeps it, in the low bits.
LA_DEVICE u64 encode_element(i32 dtype, float x) {
  return dtype == kFloat32 ? as_bits(x) : dtype == kBFloat16 ? to_bf16(x) : to_f16(x);
}

LA_DEVICE u64 encode_element(i32 dtype, double x) {
  if (dtype == kFloat64) return static_cast<u64>(high_word(x)) << 32 | low_word(x);
  return encode_element(dtype, static_cast<float>(x));
}

LA_DEVICE void store_bits(void* p, int size, u64 bits) {
  if (size == 2) {
    store_2(p, static_cast<u16>(bits));
  } else if (size == 4) {
    store_4(p, static_cast<u32>(bits));
  } else {
    store_8(p, {{static_cast<u32>(bits), static_cast<u32>(bits >> 32)}});
  }
}

// Numbers of the accumulators' type, as they are.
LA_DEVICE Word4 encode_packet(const float (&x)[4]) { return {{as_bits(x[0]), as_bits(x[1]), as_bits(x[2]), as_bits(x[3])}}; }
LA_DEVICE Word4 encode_packet(const double (&x)[2]) {
  return {{low_word(x[0]), high_word(x[0]), low_word(x[1]), high_word(x[1])}};
}

// Writes the first `valid` elements of a packet of a shared tile.
template <class Arith, int Count>
LA_DEVICE void store_packet(const Tensor& t, char* p, int valid, const unsigned char* from) {
  using Elem = typename Arith::Elem;
  const int size = element_bytes<Arith>(t);
  const Word4 raw = *reinterpret_cast<const Word4*>(from);
  if (size == sizeof(Elem) && t.aligned && valid >= Count) {
    store_16(p, raw);
    return;
  }
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    if (i >= valid) break;
    if constexpr (Arith::kFixedType) {
      store_2(p + 2 * i, static_cast<u16>(raw.w[i / 2] >> (i % 2 * 16)));
    } else {
      store_bits(p + size * i, size, encode_element(t.dtype, reinterpret_cast<const Elem*>(from)[i]));
    }
  }
}

LA_DEVICE void load_number(const void* p, float& x) { x = as_float(load_4(p)); }
LA_DEVICE void load_number(const void* p, double& x) {
  const Word2 w = load_8(p);
  x = as_double(w.w[0], w.w[1]);
}
LA_DEVICE void store_number(void* p, float x) { store_4(p, as_bits(x)); }
LA_DEVICE void store_number(void* p, double x) { store_8(p, {{low_word(x), high_word(x)}}); }

template <class T>
LA_DEVICE T load_number(u64 base, i64 index) {
  T x;
  load_number(reinterpret_cast<const T*>(base) + index, x);
  return x;
}

template <class T>
LA_DEVICE void store_number(u64 base, i64 index, T x) { store_number(reinterpret_cast<T*>(base) + index, x); }

// One element of an array, by its offset from the first.
template <class Acc>
LA_DEVICE Acc load_element(const Tensor& t, i64 index) {
  const u64 at = t.data + static_cast<u64>(index * element_bytes(t.dtype));
  if (t.dtype == kFloat64) return static_cast<Acc>(load_number<double>(at, 0));
  if (t.dtype == kFloat32) return static_cast<Acc>(load_number<float>(at, 0));
  return static_cast<Acc>(half_word({{load_2(reinterpret_cast<const void*>(at)), 0, 0, 0}}, 0, t.dtype));
}

template <class Acc>
LA_DEVICE void store_element(const Tensor& t, i64 index, Acc x) {
  const int size = element_bytes(t.dtype);
  store_bits(reinterpret_cast<void*>(t.data + static_cast<u64>(index * size)), size, encode_element(t.dtype, x));
}

}  // namespace la
