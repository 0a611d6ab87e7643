// The kinds of weights on CPU: how activations are made ready for their products, and what a sum of products stands for.
#pragma once

#include "matmul.h"
#include "quantized_rows.h"

namespace jaxkv {

constexpr int64_t kRowsOfItem = 8;  // that a thread prepares at a time

// Calls work(t) for each row, on the pool's threads.
template <class Pool, class Work>
void for_rows(Pool& pool, int64_t rows, Work&& work) {
  parallel_for(pool, (rows + kRowsOfItem - 1) / kRowsOfItem, [&](int64_t item) {
    for (int64_t t = item * kRowsOfItem; t < std::min(rows, (item + 1) * kRowsOfItem); ++t) work(t);
  });
}

// Weights in the type of the activations, which are read where they lie. Matrices are [out, in].
template <class T>
struct FloatWeights {
  using Activation = T;
  using Product = std::conditional_t<std::is_same_v<T, BFloat16>, BFloat16Words, Float32Words>;

  const T* values;
  bool packed;

  template <class Pool, int Matrices, class Put>
  static void multiply_rows(Pool& pool, const T* x, int64_t rows, int64_t width, int64_t out,
                            const FloatWeights (&weights)[Matrices], Scratch&, Put put) {
    Matmul call{};
    call.packed = weights[0].packed;
    call.T = rows, call.out = out, call.row_bytes = width * static_cast<int64_t>(sizeof(T));
    call.words = call.activation_words = call.row_bytes / 4;
    call.activations = reinterpret_cast<const uint32_t*>(x);
    const char* matrices[Matrices];
    for (int m = 0; m < Matrices; ++m) matrices[m] = reinterpret_cast<const char*>(weights[m].values);
    multiply<Product>(call, matrices, pool, put);
  }
};

// int8 weights with a scale per output; activations of type T are quantized row by row.
template <class T>
struct Int8Weights {
  using Activation = T;

  const int8_t* values;
  const float* scales;
  bool rotated;
  bool packed;

  template <class Pool, int Matrices, class Put>
  static void multiply_rows(Pool& pool, const T* x, int64_t rows, int64_t width, int64_t out,
                            const Int8Weights (&weights)[Matrices], Scratch& scratch, Put put) {
    Matmul call{};
    call.packed = weights[0].packed;
    call.T = rows, call.out = out, call.row_bytes = width;
    call.words = call.activation_words = (width + 3) / 4;
    auto* quantized = reinterpret_cast<int8_t*>(scratch.floats(rows * (call.words + 2)));
    auto* row_of = reinterpret_cast<QuantizedRow*>(quantized + rows * call.words * 4);
    for_rows(pool, rows, [&](int64_t t) {
      row_of[t] = quantize_row(x + t * width, width, weights[0].rotated, call.words * 4, quantized + t * call.words * 4);
    });
    call.activations = reinterpret_cast<const uint32_t*>(quantized);
    const char* matrices[Matrices];
    for (int m = 0; m < Matrices; ++m) matrices[m] = reinterpret_cast<const char*>(weights[m].values);
    multiply<Int8Words>(call, matrices, pool, [&](int64_t t, int64_t column, int64_t count, const Ints (&sums)[Matrices]) {
      // Sums that are too large by 128 times the row's wrap around, and back.
      Floats results[Matrices];
      for (int m = 0; m < Matrices; ++m) {
        const Ints exact = (Ints)((Words)sums[m] - 128u * static_cast<uint32_t>(row_of[t].sum));
        const Floats scales = load_floats(weights[m].scales + column, count) * row_of[t].scale;
        results[m] = __builtin_convertvector(exact, Floats) * scales;
      }
      put(t, column, count, results);
    });
  }
};

}  // namespace jaxkv
