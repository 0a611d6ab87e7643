// down(silu(gate(x)) * up(x)) of a block of rows. What the gate and the other matrix give for a row and column meets in
// registers.
#pragma once

#include "weights.h"

namespace jaxkv {

inline Floats silu(Floats x) {
  const Floats result = x / (1.0f + exp(select(x < -88.0f, splat(88.0f), -x)));
  // Below -88 the result is nothing; but an infinite x must show.
  return select((x < -88.0f) & (x > -__builtin_inff()), Floats{}, result);
}

template <class Weights>
struct GatedMlp {
  using T = typename Weights::Activation;

  int64_t rows, width, hidden;  // x [rows, width], gate and up [hidden, width], down [width, hidden]
  const T* x;
  Weights gate, up, down;

  // The results are put in T's `out` [rows, width].
  template <class Pool>
  void run(Pool& pool, T* out) const {
    static thread_local Scratch inner, outer;
    auto* activated = reinterpret_cast<T*>(inner.floats((rows * hidden * static_cast<int64_t>(sizeof(T)) + 3) / 4));
    const int64_t F = hidden, E = width;
    const Weights both[] = {gate, up};
    Weights::multiply_rows(pool, x, rows, width, hidden, both, outer,
                           [=](int64_t t, int64_t column, int64_t count, const Floats (&sums)[2]) {
                             store_floats(silu(sums[0]) * sums[1], count, activated + t * F + column);
                           });
    const Weights last[] = {down};
    Weights::multiply_rows(
        pool, activated, rows, hidden, width, last, outer,
        [=](int64_t t, int64_t column, int64_t count, const Floats (&sums)[1]) { store_floats(sums[0], count, out + t * E + column); });
  }
};

}  // namespace jaxkv
