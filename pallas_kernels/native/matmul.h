// A matrix of activations [T, in] times the transpose of one of weights [out, in], both packed into 32-bit words: one
// float32, two bfloat16, or four bytes.
//
// The weights are taken in panels of kPanel rows. A panel is transposed, so that a vector holds one word of kLanes
// outputs; each word of an activation is then broadcast against it. An output is summed over `in` in order, whatever
// the number of rows and threads: a row's result is the same to the bit in every batch.
#pragma once

#include <algorithm>
#include <cstring>

#include "dot.h"
#include "parallel.h"
#include "scratch.h"

namespace jaxkv {

constexpr int kPanelVectors = kVectorRegisters == 32 ? 3 : 2;
constexpr int kPanel = kPanelVectors * kLanes;
constexpr int kRowsAtOnce = kVectorRegisters == 32 ? 8 : 4;  // times kPanelVectors sums stay in registers

// How words are multiplied: `pack` turns a word of weights into what `step` takes.
struct Float32Words {
  using Sum = Floats;
  static Words pack(Words weights) { return weights; }
  static Sum step(Sum sum, Words weights, Words activations) { return sum + (Floats)weights * (Floats)activations; }
};
struct BFloat16Words {
  using Sum = Floats;
  static Words pack(Words weights) { return weights; }
  static Sum step(Sum sum, Words weights, Words activations) { return dot_pairs(sum, weights, activations); }
};
// Weights become unsigned, larger by 128: a sum is too large by 128 times the sum of the row's activations.
struct Int8Words {
  using Sum = Ints;
  static Words pack(Words weights) { return weights ^ 0x80808080u; }
  static Sum step(Sum sum, Words weights, Words activations) { return dot_bytes(sum, weights, activations); }
};

// activations: T rows of `words` words, `activation_words` apart. A matrix of weights: `out` rows of `row_bytes` without
// gaps; where that is no multiple of 4, the rest of an activation's last word is zero. packed: whole panels lie as
// `pack_panel` makes them, where their rows would.
struct Matmul {
  int64_t T, out, row_bytes, words, activation_words;
  const uint32_t* activations;
  bool packed;
};

// The words [at, at + kLanes) of a row of weights; zero beyond its end.
inline Words load_words(const char* row, int64_t at, int64_t row_bytes) {
  const int64_t left = row_bytes - 4 * at;
  if (left >= 4 * kLanes) return load<Words>(row + 4 * at);
  Words words{};
  std::memcpy(&words, row + 4 * at, static_cast<size_t>(left));
  return words;
}

constexpr int64_t kCacheLine = 64;

// Bytes that are fetched into the cache in steps, while others are worked on.
struct Ahead {
  const char* at;
  int lines_of_step;

  void step() {
    for (int i = 0; i < lines_of_step; ++i, at += kCacheLine) __builtin_prefetch(at, 0, 2);
  }
};

inline void fetch(const char* from, const char* end) {
  for (; from < end; from += kCacheLine) __builtin_prefetch(from, 0, 2);
}

// panel[word][i] = word of weight row `first` + i; zero for rows that do not exist. cold: nobody has fetched the rows.
template <class Product>
void pack_panel(const Matmul& call, const char* weights, int64_t first, bool cold, uint32_t* panel) {
  for (int part = 0; part < kPanelVectors; ++part) {
    const int64_t row = first + part * kLanes, rows = std::clamp<int64_t>(call.out - row, 0, kLanes);
    const char* from = weights + row * call.row_bytes;
    // Read side by side, rows would keep only a few cache lines on their way at once.
    if (cold) fetch(from, from + rows * call.row_bytes);
    for (int64_t at = 0; at < call.words; at += kLanes) {
      Words square[kLanes];
      if (rows == kLanes && 4 * (at + kLanes) <= call.row_bytes) {
        unroll<kLanes>([&](auto i) JAXKV_INLINE { square[i] = load<Words>(from + i * call.row_bytes + 4 * at); });
      } else {
        for (int i = 0; i < kLanes; ++i) {
          square[i] = i < rows ? load_words(from + i * call.row_bytes, at, call.row_bytes) : Words{};
        }
      }
      transpose(square);
      uint32_t* to = panel + at * kPanel + part * kLanes;
      for (int i = 0; i < kLanes && at + i < call.words; ++i) store(to + i * kPanel, Product::pack(square[i]));
    }
  }
}

// The sums of Rows activations with one panel.
template <class Product, int Rows>
inline void multiply_tile(const Matmul& call, int64_t row, const uint32_t* panel, Ahead& ahead,
                          typename Product::Sum (&sums)[Rows][kPanelVectors]) {
  const uint32_t* x = call.activations + row * call.activation_words;
  const int64_t stride = call.activation_words;
  typename Product::Sum local[Rows][kPanelVectors] = {};
  for (int64_t word = 0; word < call.words; ++word) {
    ahead.step();
    Words weights[kPanelVectors];
    unroll<kPanelVectors>([&](auto j) JAXKV_INLINE { weights[j] = load<Words>(panel + word * kPanel + j * kLanes); });
    unroll<Rows>([&](auto i) JAXKV_INLINE {
      const Words splat = x[i * stride + word] - Words{};
      unroll<kPanelVectors>([&](auto j) JAXKV_INLINE { local[i][j] = Product::step(local[i][j], weights[j], splat); });
    });
  }
  unroll<Rows>([&](auto i) JAXKV_INLINE { unroll<kPanelVectors>([&](auto j) JAXKV_INLINE { sums[i][j] = local[i][j]; }); });
}

// The panels of several matrices at one weight row, and the panels after them.
template <int Matrices>
struct Panels {
  const uint32_t* words[Matrices];
  Ahead ahead[Matrices];
};

template <class Product, int Rows, int Matrices, class Store>
void finish_tile(const Matmul& call, int64_t row, int64_t rows, int64_t first, Panels<Matrices>& panels, Store& put) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return finish_tile<Product, Rows - 1, Matrices>(call, row, rows, first, panels, put);
  }
  typename Product::Sum sums[Matrices][Rows][kPanelVectors];
  for (int m = 0; m < Matrices; ++m) multiply_tile<Product, Rows>(call, row, panels.words[m], panels.ahead[m], sums[m]);
  for (int i = 0; i < Rows; ++i) {
    for (int j = 0; j < kPanelVectors; ++j) {
      const int64_t column = first + j * kLanes;
      if (column >= call.out) break;
      typename Product::Sum of_column[Matrices];
      for (int m = 0; m < Matrices; ++m) of_column[m] = sums[m][i][j];
      put(row + i, column, std::min<int64_t>(kLanes, call.out - column), of_column);
    }
  }
}

// The outputs of rows [begin, end) for the panels at weight row `first`.
template <class Product, int Matrices, class Store>
void multiply_panels(const Matmul& call, const char* const (&weights)[Matrices], int64_t begin, int64_t end, int64_t first,
                     bool cold, Store& put) {
  static thread_local Scratch scratch;
  auto* memory = reinterpret_cast<uint32_t*>(scratch.floats(Matrices * call.words * kPanel));
  // A panel has kPanel / 16 cache lines per word. The next one's are fetched while this one is multiplied, so that memory and
  // multipliers work at the same time.
  constexpr int kLinesOfWord = (kPanel + 15) / 16;
  const int64_t tiles = (end - begin + kRowsAtOnce - 1) / kRowsAtOnce, fetching = std::min<int64_t>(tiles, kLinesOfWord);
  const bool has_next = first + 2 * kPanel <= call.out;
  Panels<Matrices> panels;
  for (int m = 0; m < Matrices; ++m) {
    const char* rows = weights[m] + first * call.row_bytes;
    if (call.packed && first + kPanel <= call.out) {
      panels.words[m] = reinterpret_cast<const uint32_t*>(rows);
    } else {
      uint32_t* words = memory + m * call.words * kPanel;
      pack_panel<Product>(call, weights[m], first, cold, words);
      panels.words[m] = words;
    }
    panels.ahead[m] = {rows + kPanel * call.row_bytes, 0};
  }
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const bool fetch = has_next && tile < fetching;
    for (Ahead& ahead : panels.ahead) ahead.lines_of_step = fetch ? static_cast<int>((kLinesOfWord + fetching - 1) / fetching) : 0;
    const int64_t row = begin + tile * kRowsAtOnce;
    finish_tile<Product, kRowsAtOnce, Matrices>(call, row, std::min<int64_t>(kRowsAtOnce, end - row), first, panels, put);
  }
}

// Multiplies by several matrices of one shape side by side. Calls put(row, column, count, sums), sums being those of each
// matrix, once for each `count` <= kLanes neighbouring outputs of a row, on the pool's threads.
template <class Product, int Matrices, class Pool, class Store>
void multiply(const Matmul& call, const char* const (&weights)[Matrices], Pool& pool, Store put) {
  constexpr int64_t kChunk = 128;   // rows that repay the packing of a panel
  constexpr int64_t kFewRows = 64;  // below, memory is the limit: a thread takes neighbouring panels
  if (call.out == 0 || call.T == 0) return;
  const int64_t panels = (call.out + kPanel - 1) / kPanel, threads = std::max<int64_t>(pool.num_threads(), 1);
  const int64_t chunk = panels < 4 * threads ? kChunk : std::max<int64_t>(call.T, 1), chunks = (call.T + chunk - 1) / chunk;
  const int64_t run = call.T < kFewRows ? (panels + 2 * threads - 1) / (2 * threads) : 1, runs = (panels + run - 1) / run;
  parallel_for(pool, runs * chunks, [&](int64_t item) {
    const int64_t begin = item % chunks * chunk, end = std::min(begin + chunk, call.T), first = item / chunks * run;
    for (int64_t panel = first; panel < std::min(first + run, panels); ++panel) {
      multiply_panels<Product>(call, weights, begin, end, panel * kPanel, panel == first, put);
    }
  });
}

}  // namespace jaxkv
