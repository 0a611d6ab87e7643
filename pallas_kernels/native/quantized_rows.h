// Activations quantized to int8 row by row, after the rotation of `quantized_matmul/rotation.py` where the weights are rotated.
#pragma once

#include <cmath>
#include <limits>

#include "elements.h"
#include "scratch.h"

namespace jaxkv {

constexpr int kRotated = 64;  // neighbouring inputs that are mixed

// x H of one block, H being Sylvester's Hadamard matrix over 8: six rounds of sums and differences of values 32 apart, each
// followed by the shuffle that brings the next bit of the index to the top.
inline void rotate_block(float* block) {
  constexpr int kVectors = kRotated / kLanes, kHalf = kVectors / 2;
  constexpr std::make_integer_sequence<int, kLanes> lanes{};
  Floats x[kVectors];
  unroll<kVectors>([&](auto i) JAXKV_INLINE { x[i] = load(block + i * kLanes); });
  for (int round = 0; round < 6; ++round) {
    Floats mixed[kVectors];
    unroll<kHalf>([&](auto i) JAXKV_INLINE {
      const Floats sum = x[i] + x[i + kHalf], difference = x[i] - x[i + kHalf];
      mixed[2 * i] = interleave<0>(sum, difference, lanes);
      mixed[2 * i + 1] = interleave<kLanes / 2>(sum, difference, lanes);
    });
    unroll<kVectors>([&](auto i) JAXKV_INLINE { x[i] = mixed[i]; });
  }
  unroll<kVectors>([&](auto i) JAXKV_INLINE { store(block + i * kLanes, x[i] * 0.125f); });
}

struct QuantizedRow {
  float scale;  // x = value * scale; NaN if a value is NaN or infinite
  int32_t sum;  // of the values
};

// values: `padded` of them, zero beyond `width`. The largest magnitude becomes 127; ties round to even.
template <class T>
QuantizedRow quantize_row(const T* x, int64_t width, bool rotated, int64_t padded, int8_t* values) {
  constexpr float kSmallest = 0x1p-118f;  // of a row's largest magnitude: the inverse of its scale must be finite
  constexpr float kRound = 12582912.0f;   // 1.5 * 2^23: added to a small float, it leaves the rounded integer in the low bits
  static thread_local Scratch scratch;
  float* wide = scratch.floats(width);
  convert_row(x, width, 1.0f, wide);
  if (rotated) {
    for (int64_t at = 0; at + kRotated <= width; at += kRotated) rotate_block(wide + at);
  }
  Floats tops{}, checks{};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const Floats value = load(wide + i);
    tops = max(tops, (Floats)((Words)value & 0x7fffffffu));
    checks += value * 0.0f;
  }
  float top = max_lanes(tops), check = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) check += checks[lane];
  for (; i < width; ++i) top = std::max(top, std::fabs(wide[i])), check += wide[i] * 0.0f;

  const float inverse = top < kSmallest ? 0.0f : 127.0f / top;
  int32_t sum = 0;
  for (int64_t j = 0; j < width; ++j) {
    const float shifted = wide[j] * inverse + kRound;
    int32_t bits;
    std::memcpy(&bits, &shifted, sizeof(bits));
    values[j] = static_cast<int8_t>(bits);
    sum += values[j];
  }
  std::memset(values + width, 0, static_cast<size_t>(padded - width));
  return {check == 0.0f ? top / 127.0f : std::numeric_limits<float>::quiet_NaN(), sum};
}

}  // namespace jaxkv
