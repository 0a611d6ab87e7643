// The element types of activations and of the KV pool, and their conversions from and to float.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace jaxkv {

struct BFloat16 {
  uint16_t bits;
};

inline float to_float(float value) {
  return value;
}
inline float to_float(int8_t value) {
  return value;
}
inline float to_float(BFloat16 value) {
  const uint32_t bits = uint32_t{value.bits} << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

inline void from_float(float value, float& to) {
  to = value;
}
// Rounds to nearest, ties to even. NaN stays NaN.
inline void from_float(float value, BFloat16& to) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  to.bits = static_cast<uint16_t>(value == value ? rounded : 0x7fc0u);
}

template <class T>
inline void convert_row(const T* __restrict from, int64_t count, float factor, float* __restrict to) {
  for (int64_t i = 0; i < count; ++i) to[i] = to_float(from[i]) * factor;
}

template <class T>
inline void store_row(const float* __restrict from, int64_t count, float factor, T* __restrict to) {
  for (int64_t i = 0; i < count; ++i) from_float(from[i] * factor, to[i]);
}

// The first `count` of a vector's floats, rounded as from_float does.
inline void store_floats(Floats values, int64_t count, float* to) {
  if (count == kLanes) return store(to, values);
  std::memcpy(to, &values, static_cast<size_t>(count) * sizeof(*to));
}
inline void store_floats(Floats values, int64_t count, BFloat16* to) {
  typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
  const Words bits = (Words)values;
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Halves halves = __builtin_convertvector(values == values ? rounded : Words{} + 0x7fc0u, Halves);
  if (count == kLanes) return store(to, halves);
  std::memcpy(to, &halves, static_cast<size_t>(count) * sizeof(*to));
}
inline Floats load_floats(const float* from, int64_t count) {
  if (count == kLanes) return load(from);
  Floats values{};
  std::memcpy(&values, from, static_cast<size_t>(count) * sizeof(*from));
  return values;
}

// A vector load of packed elements gives kParts float vectors. Unpacking by shifts of 32-bit words leaves every
// kParts-th element in the same vector: element i of the load is lane i / kParts of part i % kParts. Dot products do
// not mind, as long as the other operand lies in the same order (`packed_position`).
template <class T>
struct Packed {
  static constexpr int kParts = 4 / sizeof(T);
  static constexpr int kElements = kParts * kLanes;

  template <int Part>
  static Floats part(Words words) {
    if constexpr (kParts == 1) {
      return (Floats)words;
    } else if constexpr (kParts == 2) {
      return Part == 0 ? (Floats)(words << 16) : (Floats)(words & 0xffff0000u);
    } else {
      return __builtin_convertvector((Ints)(words << (24 - 8 * Part)) >> 24, Floats);
    }
  }
};

template <class T>
inline int64_t packed_position(int64_t i) {
  constexpr int64_t kParts = Packed<T>::kParts, kElements = Packed<T>::kElements;
  const int64_t within = i % kElements;
  return i - within + within % kParts * kLanes + within / kParts;
}

}  // namespace jaxkv
