// Runs the native matmuls and the gated MLP without JAX, for the sanitizers: arrays are exactly as large as they must be. Compares
// with plain double loops. Exit code 0 if all is well.
#include <cmath>
#include <cstdio>
#include <random>

#include "native/gated_mlp.h"
#include "thread_pool.h"

namespace {

using namespace jaxkv;

std::mt19937 random_bits(7);

template <class T>
std::vector<T> floats(int64_t count, float scale) {
  std::normal_distribution<float> normal;
  std::vector<T> values(count);
  for (T& value : values) from_float(normal(random_bits) * scale, value);
  return values;
}

template <class T>
std::vector<double> multiply_plainly(const std::vector<T>& x, const std::vector<double>& w, int64_t T_, int64_t in, int64_t out) {
  std::vector<double> result(T_ * out, 0.0);
  for (int64_t t = 0; t < T_; ++t) {
    for (int64_t o = 0; o < out; ++o) {
      for (int64_t i = 0; i < in; ++i) result[t * out + o] += double(to_float(x[t * in + i])) * w[o * in + i];
    }
  }
  return result;
}

template <class T>
std::vector<double> doubles(const std::vector<T>& values) {
  std::vector<double> result;
  for (T value : values) result.push_back(to_float(value));
  return result;
}

template <class T>
double relative_error(const std::vector<T>& got, const std::vector<double>& wanted) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    difference += std::pow(to_float(got[i]) - wanted[i], 2), norm += wanted[i] * wanted[i];
  }
  return std::sqrt(difference / norm);
}

// The bytes of whole panels in the order that a packed weight has.
template <class Product, class T>
std::vector<T> packed(const std::vector<T>& weights, int64_t out, int64_t in) {
  Matmul call{};
  call.out = out, call.row_bytes = in * static_cast<int64_t>(sizeof(T)), call.words = call.row_bytes / 4;
  std::vector<T> result = weights;
  std::vector<uint32_t> panel(call.words * kPanel);
  for (int64_t first = 0; first + kPanel <= out; first += kPanel) {
    pack_panel<Product>(call, reinterpret_cast<const char*>(weights.data()), first, first == 0, panel.data());
    std::memcpy(result.data() + first * in, panel.data(), panel.size() * 4);
  }
  return result;
}

template <class Weights, class T>
std::vector<float> run(const Weights& weights, const std::vector<T>& x, int64_t T_, int64_t in, int64_t out) {
  std::vector<float> result(T_ * out, NAN);
  Scratch scratch;
  ThreadPool pool;
  const Weights matrices[] = {weights};
  Weights::multiply_rows(pool, x.data(), T_, in, out, matrices, scratch,
                         [&](int64_t t, int64_t column, int64_t count, const Floats(&sums)[1]) {
                           store_floats(sums[0], count, result.data() + t * out + column);
                         });
  return result;
}

template <class T>
bool check_floats(const char* name, int64_t T_, int64_t in, int64_t out, double bound) {
  const auto x = floats<T>(T_ * in, 1.0f), w = floats<T>(out * in, 1.0f);
  const auto got = run(FloatWeights<T>{w.data(), false}, x, T_, in, out);
  const auto ordered = packed<typename FloatWeights<T>::Product>(w, out, in);
  const bool same = run(FloatWeights<T>{ordered.data(), true}, x, T_, in, out) == got;
  const double error = relative_error(got, multiply_plainly(x, doubles(w), T_, in, out));
  std::printf("%s %dx%dx%d: error %.2e, packed %s\n", name, int(T_), int(in), int(out), error, same ? "the same" : "DIFFERS");
  return same && error < bound;
}

bool check_int8(int64_t T_, int64_t in, int64_t out, bool rotated) {
  const auto x = floats<float>(T_ * in, 1.0f), scales = floats<float>(out, 1.0f);
  std::vector<int8_t> w(out * in);
  for (int8_t& value : w) value = static_cast<int8_t>(random_bits());
  const auto got = run(Int8Weights<float>{w.data(), scales.data(), rotated, false}, x, T_, in, out);
  bool same = true;
  if (in % 4 == 0) {
    const auto ordered = packed<Int8Words>(w, out, in);
    same = run(Int8Weights<float>{ordered.data(), scales.data(), rotated, true}, x, T_, in, out) == got;
  }
  std::vector<double> plain(w.begin(), w.end());
  for (int64_t i = 0; i < out * in; ++i) plain[i] *= scales[i / in];
  // (x H) w = x (H w): plain weights are rotated in double, by sums over the 64 inputs of a block.
  if (rotated) {
    for (int64_t block = 0; block < out * in; block += block % in + 2 * kRotated <= in ? kRotated : in - block % in) {
      std::vector<double> mixed(kRotated, 0.0);
      if (block % in + kRotated > in) continue;
      for (int64_t i = 0; i < kRotated; ++i) {
        for (int64_t j = 0; j < kRotated; ++j) mixed[i] += plain[block + j] * (__builtin_parityll(i & j) ? -0.125 : 0.125);
      }
      std::copy(mixed.begin(), mixed.end(), plain.begin() + block);
    }
  }
  const double error = relative_error(got, multiply_plainly(x, plain, T_, in, out));
  std::printf("int8 %dx%dx%d%s: error %.2e, packed %s\n", int(T_), int(in), int(out), rotated ? " rotated" : "", error,
              same ? "the same" : "DIFFERS");
  return same && error < 0.03;  // a row's largest value is about 3 of its standard deviations, and 127 steps
}

template <class T>
bool check_mlp(int64_t T_, int64_t E, int64_t F, double bound) {
  const auto x = floats<T>(T_ * E, 1.0f), gate = floats<T>(F * E, 0.1f), up = floats<T>(F * E, 0.1f), down = floats<T>(E * F, 0.1f);
  std::vector<T> out(T_ * E);
  {
    ThreadPool pool;
    const GatedMlp<FloatWeights<T>> mlp{T_, E, F, x.data(), {gate.data(), false}, {up.data(), false}, {down.data(), false}};
    mlp.run(pool, out.data());
  }
  auto activated = multiply_plainly(x, doubles(gate), T_, E, F);
  const auto other = multiply_plainly(x, doubles(up), T_, E, F);
  for (size_t i = 0; i < activated.size(); ++i) activated[i] *= other[i] / (1 + std::exp(-activated[i]));
  std::vector<float> rounded(activated.begin(), activated.end());
  const double error = relative_error(out, multiply_plainly(rounded, doubles(down), T_, F, E));
  std::printf("MLP %dx%dx%d: error %.2e\n", int(T_), int(E), int(F), error);
  return error < bound;
}

// The int8 MLP against its plain weights, and packed against not packed.
bool check_int8_mlp(int64_t T_, int64_t E, int64_t F) {
  const auto x = floats<float>(T_ * E, 1.0f);
  const std::vector<float> scales(F + E, 0.001f);
  std::vector<int8_t> gate(F * E), up(F * E), down(E * F);
  for (auto* weights : {&gate, &up, &down}) {
    for (int8_t& value : *weights) value = static_cast<int8_t>(random_bits());
  }
  auto result = [&](const std::vector<int8_t>& a, const std::vector<int8_t>& b, const std::vector<int8_t>& c, bool packed) {
    std::vector<float> out(T_ * E);
    ThreadPool pool;
    using Weights = Int8Weights<float>;
    const Weights first{a.data(), scales.data(), false, packed}, second{b.data(), scales.data(), false, packed};
    GatedMlp<Weights>{T_, E, F, x.data(), first, second, {c.data(), scales.data(), false, packed}}.run(pool, out.data());
    return out;
  };
  const auto got = result(gate, up, down, false);
  const bool same = result(packed<Int8Words>(gate, F, E), packed<Int8Words>(up, F, E), packed<Int8Words>(down, E, F), true) == got;
  auto plain = [](const std::vector<int8_t>& weights) {
    std::vector<double> values(weights.begin(), weights.end());
    for (double& value : values) value *= 0.001;
    return values;
  };
  auto activated = multiply_plainly(x, plain(gate), T_, E, F);
  const auto other = multiply_plainly(x, plain(up), T_, E, F);
  for (size_t i = 0; i < activated.size(); ++i) activated[i] *= other[i] / (1 + std::exp(-activated[i]));
  std::vector<float> rounded(activated.begin(), activated.end());
  const double error = relative_error(got, multiply_plainly(rounded, plain(down), T_, F, E));
  std::printf("int8 MLP %dx%dx%d: error %.2e, packed %s\n", int(T_), int(E), int(F), error, same ? "the same" : "DIFFERS");
  return same && error < 0.05;
}

}  // namespace

int main() {
  bool good = true;
  for (int64_t T_ : {1, 5, 9, 140}) {
    for (int64_t out : {17, 40, 97}) {
      good &= check_floats<float>("float32", T_, 37, out, 1e-5);
      good &= check_floats<BFloat16>("bfloat16", T_, 70, out, 1e-5);
      good &= check_int8(T_, 131, out, false);
      good &= check_int8(T_, 192, out, true);
    }
  }
  good &= check_int8(2, 70, 50, true);
  good &= check_mlp<float>(11, 30, 50, 1e-5) && check_mlp<BFloat16>(3, 64, 130, 1e-2) && check_int8_mlp(9, 100, 132);
  return good ? 0 : 1;
}
