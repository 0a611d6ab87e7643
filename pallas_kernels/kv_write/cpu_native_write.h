// Writes a step's new keys and values into the pages of one layer, in place.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../native/elements.h"

namespace jaxkv {

// Shapes: T tokens, K KV heads, D head dim, P pages of a layer.
struct WriteCall {
  int64_t T, K, D, P, page_size;
  void* pages;              // this layer's [P, 2, K, page, D]
  float* scales;            // this layer's [P, 2, K, page], or null
  const int32_t* page_ids;  // [T]
  const int32_t* offsets;   // [T]
};

template <class From, class To>
inline void write_row(const From* from, int64_t D, To* to, float*) {
  for (int64_t d = 0; d < D; ++d) from_float(to_float(from[d]), to[d]);
}

// Symmetric int8 with one scale, for finite rows that of quantize.py: the largest magnitude becomes 127, a row of zeros has
// scale 1, and no scale is subnormal, as its inverse might be infinite. Numbers are divided by it, where XLA may multiply by its
// reciprocal. NaN and infinity make the scale NaN, so that what is read back is not finite either.
template <class From>
inline void write_row(const From* from, int64_t D, int8_t* to, float* scale) {
  constexpr float kLargest = 127.0f, kSmallestScale = 0x1p-126f;
  float largest = 0.0f, poison = 0.0f;
  for (int64_t d = 0; d < D; ++d) {
    const float value = to_float(from[d]);
    largest = std::max(largest, std::fabs(value));
    poison += value - value;  // NaN if any value is not finite
  }
  const float divisor = largest == 0.0f ? 1.0f : std::max(largest * (1.0f / kLargest), kSmallestScale);
  *scale = divisor + poison;
  for (int64_t d = 0; d < D; ++d) {
    const float scaled = poison == 0.0f ? to_float(from[d]) / divisor : 1.0f;
    to[d] = static_cast<int8_t>(std::clamp(std::nearbyint(scaled), -kLargest, kLargest));
  }
}

// keys and values: [T, K, D]. Tokens whose page or offset is outside of the pool are dropped, as XLA's scatter does.
template <class From, class To>
void write_kv(const WriteCall& call, const From* keys, const From* values) {
  for (int64_t t = 0; t < call.T; ++t) {
    const int64_t page = call.page_ids[t], offset = call.offsets[t];
    if (page < 0 || page >= call.P || offset < 0 || offset >= call.page_size) continue;
    for (int64_t which = 0; which < 2; ++which) {
      const From* rows = (which == 0 ? keys : values) + t * call.K * call.D;
      for (int64_t head = 0; head < call.K; ++head) {
        const int64_t row = ((page * 2 + which) * call.K + head) * call.page_size + offset;
        float* scale = call.scales ? call.scales + row : nullptr;
        write_row(rows + head * call.D, call.D, static_cast<To*>(call.pages) + row * call.D, scale);
      }
    }
  }
}

}  // namespace jaxkv
