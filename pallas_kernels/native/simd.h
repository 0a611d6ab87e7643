// Vectors of the width that the target CPU has, through the vector types that GCC and Clang share: no intrinsics here.
// The compiler lowers them to AVX-512, AVX2, SSE or NEON.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace jaxkv {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kVectorRegisters = 32;
#elif defined(__AVX__)
constexpr int kLanes = 8;
constexpr int kVectorRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4;
constexpr int kVectorRegisters = 32;
#else
constexpr int kLanes = 4;
constexpr int kVectorRegisters = 16;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

// Calls body(integral_constant<int, i>) for i in [0, Count). Unlike a loop that the optimizer unrolls later, this gives
// arrays of vectors constant indices from the start, so that they become registers.
template <class Body, int... I>
__attribute__((always_inline)) inline void unroll(Body&& body, std::integer_sequence<int, I...>) {
  (body(std::integral_constant<int, I>{}), ...);
}
template <int Count, class Body>
__attribute__((always_inline)) inline void unroll(Body&& body) {
  unroll(body, std::make_integer_sequence<int, Count>{});
}
#define JAXKV_INLINE __attribute__((always_inline))  // of a lambda, after its parameters

// Below every score, and finite, so that (masked score) - (running maximum) is never inf - inf.
constexpr float kLowest = -1e30f;
constexpr float kMasked = -__builtin_inff();

// Dereferenced rather than copied by memcpy, which GCC 12 folds into every use as a load of its own.
template <class Vector = Floats>
inline Vector load(const void* from) {
  typedef Vector Unaligned __attribute__((aligned(1), may_alias));
  return *static_cast<const Unaligned*>(from);
}

template <class Vector>
inline void store(void* to, Vector value) {
  typedef Vector Unaligned __attribute__((aligned(1), may_alias));
  *static_cast<Unaligned*>(to) = value;
}

inline Floats splat(float value) {
  return value - Floats{};
}
inline Ints splat_int(int32_t value) {
  return value - Ints{};
}
inline Floats select(Ints mask, Floats yes, Floats no) {
  return mask ? yes : no;
}
inline Floats max(Floats a, Floats b) {
  return select(a > b, a, b);
}

// exp(x) for x <= 88 within 4e-7 relative; exactly 1 at 0 and exactly 0 below -87.3, at -inf too. NaN stays NaN.
inline Floats exp(Floats x) {
  constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: added to a float below 2^22, it leaves the rounded integer in the low bits
  const Floats shifted = x * kLog2E + kRound;
  const Floats n = shifted - kRound;
  const Floats r = (x - n * kLn2High) - n * kLn2Low;
  Floats p = r * 0.0013836795f + 0.008374857f;  // minimax polynomial of exp on [-ln2 / 2, ln2 / 2]
  p = p * r + 0.04166823f;
  p = p * r + 0.1666642f;
  p = p * r + 0.4999999f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const Floats scaled = (Floats)(((Words)shifted << 23) + (Words)p);
  return select(x < -87.3f, Floats{}, scaled);
}

inline Floats tanh(Floats x) {
  const Floats magnitude = (Floats)((Words)x & 0x7fffffffu);
  const Floats e = exp(-2.0f * magnitude);
  const Floats y = (1.0f - e) / (1.0f + e);
  return (Floats)((Words)y | ((Words)x & 0x80000000u));
}

// Lanes a[First], b[First], a[First + 1], b[First + 1], ...
template <int First, int... I>
inline Floats interleave(Floats a, Floats b, std::integer_sequence<int, I...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, (First + I / 2 + I % 2 * kLanes)...);
#else
  return __builtin_shuffle(a, b, Ints{(First + I / 2 + I % 2 * kLanes)...});
#endif
}

// Exchanges rows and lanes of a square of kLanes vectors.
template <class Vector>
inline void transpose(Vector (&rows)[kLanes]) {
  constexpr int kHalf = kLanes / 2;
  constexpr std::make_integer_sequence<int, kLanes> lanes{};
  // Interleaving row i with row i + kHalf rotates the bits of (row, lane) by one: after log2(kLanes) times they have
  // changed places.
  for (int span = 1; span < kLanes; span *= 2) {
    Vector mixed[kLanes];
    unroll<kHalf>([&](auto i) JAXKV_INLINE {
      const Floats a = (Floats)rows[i], b = (Floats)rows[i + kHalf];
      mixed[2 * i] = (Vector)interleave<0>(a, b, lanes);
      mixed[2 * i + 1] = (Vector)interleave<kHalf>(a, b, lanes);
    });
    unroll<kLanes>([&](auto i) JAXKV_INLINE { rows[i] = mixed[i]; });
  }
}

// to[j][i] = from[i][j] for kLanes x kLanes floats; rows are `from_stride` and `to_stride` floats apart.
inline void transpose_block(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  Floats rows[kLanes];
  unroll<kLanes>([&](auto i) JAXKV_INLINE { rows[i] = load(from + i * from_stride); });
  transpose(rows);
  unroll<kLanes>([&](auto i) JAXKV_INLINE { store(to + i * to_stride, rows[i]); });
}

// The sum of kLanes values by pairs of neighbours, pairs of pairs and so on: one order for all who must agree to the bit.
template <class Value>
inline Value sum_pairs(Value (&values)[kLanes]) {
  for (int count = kLanes; count > 1; count /= 2) {
    for (int i = 0; i < count / 2; ++i) values[i] = values[2 * i] + values[2 * i + 1];
  }
  return values[0];
}

// a * x + b * y, always contracted the same way.
inline Floats blend(Floats a, Floats x, Floats b, Floats y) {
  return a * x + b * y;
}

inline float max_lanes(Floats values) {
  float top = values[0];
  for (int lane = 1; lane < kLanes; ++lane) top = values[lane] > top ? values[lane] : top;
  return top;
}

}  // namespace jaxkv
