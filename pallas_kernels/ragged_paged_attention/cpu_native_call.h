// One call of ragged paged attention: its arrays, shapes and options, and where keys and values lie.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "../native/elements.h"
#include "../native/scratch.h"

namespace jaxkv {

// Scores are formed for blocks of keys, between two updates of the running maximum, and blocks are folded into partial
// results of kSplitKeys keys, which are merged in order. Blocks and splits start at multiples of their size, whoever
// computes them: decode and prefill do the same arithmetic, in the same order, for a query and a key.
constexpr int64_t kKeyBlock = 64;
constexpr int64_t kSplitKeys = 256;
static_assert(kSplitKeys % kKeyBlock == 0 && kKeyBlock % kLanes == 0, "splits hold whole blocks, blocks whole vectors");

enum class ActivationType { kFloat32, kBFloat16 };

// Shapes: T tokens, S sequences, W page-table columns, K KV heads, G query heads of each, D head dim, P pages of a
// layer.
struct AttentionShape {
  int64_t T, S, W, K, G, D, P, page_size;
};

struct AttentionCall {
  AttentionShape shape;
  ActivationType activations;
  const void* q;              // [T, K, G, D]
  void* out;                  // [T, K, G, D]
  const void* pages;          // this layer's [P, 2, K, page, D]
  const float* scales;        // this layer's [P, 2, K, page], or null
  const float* sinks;         // [K, G], or null
  const int32_t* page_table;  // [S, W]
  const int32_t* cu_q_lens;   // [S + 1]
  const int32_t* kv_lens;     // [S]
  int64_t num_seqs;
  float scale;
  int64_t window;  // keys that a query sees; 0 = all
  float soft_cap;  // 0 = none

  bool soft_capped() const { return soft_cap > 0; }
  // What queries are multiplied by on reading, so that q.k is the score, or what tanh takes under a soft cap.
  float query_factor() const { return soft_capped() ? scale / soft_cap : scale; }
  // The first key that a query at `position` sees.
  int64_t first_key(int64_t position) const { return window > 0 ? std::max<int64_t>(position - window + 1, 0) : 0; }
};

// A sequence's queries and keys, cut to what the arrays hold, so that no content of the index arrays leads outside of
// them.
struct SequenceRange {
  int64_t row, queries, keys;

  SequenceRange(const AttentionCall& call, int64_t sequence) {
    const AttentionShape& shape = call.shape;
    row = std::clamp<int64_t>(call.cu_q_lens[sequence], 0, shape.T);
    queries = std::clamp<int64_t>(call.cu_q_lens[sequence + 1], row, shape.T) - row;
    keys = std::clamp<int64_t>(call.kv_lens[sequence], 0, shape.W * shape.page_size);
  }

  int64_t position(int64_t query) const { return keys - queries + query; }
};

inline void read_query(const AttentionCall& call, int64_t row, int64_t head, float* to) {
  const int64_t D = call.shape.D, at = (row * call.shape.K * call.shape.G + head) * D;
  if (call.activations == ActivationType::kFloat32) {
    convert_row(static_cast<const float*>(call.q) + at, D, call.query_factor(), to);
  } else {
    convert_row(static_cast<const BFloat16*>(call.q) + at, D, call.query_factor(), to);
  }
}

inline void write_output(const AttentionCall& call, int64_t row, int64_t head, const float* values, float factor) {
  const int64_t D = call.shape.D, at = (row * call.shape.K * call.shape.G + head) * D;
  if (call.activations == ActivationType::kFloat32) {
    store_row(values, D, factor, static_cast<float*>(call.out) + at);
  } else {
    store_row(values, D, factor, static_cast<BFloat16*>(call.out) + at);
  }
}

inline void zero_output(const AttentionCall& call, int64_t row, int64_t rows) {
  const int64_t row_bytes = call.shape.K * call.shape.G * call.shape.D * (call.activations == ActivationType::kFloat32 ? 4 : 2);
  std::memset(static_cast<char*>(call.out) + row * row_bytes, 0, static_cast<size_t>(rows * row_bytes));
}

// Finds the keys and values of one sequence and KV head, page by page.
template <class T>
class KeyFinder {
 public:
  KeyFinder(const AttentionCall& call, int64_t sequence, int64_t head)
      : call_(call), table_(call.page_table + sequence * call.shape.W), head_(head) {}

  // Calls visit(i, key row, value row, key scale, value scale) for the positions first + i of [first, end).
  // Rows hold D elements; scales are 1 in a pool without them. The table entries of these positions are read, no
  // others.
  template <class Visit>
  void visit(int64_t first, int64_t end, Visit&& visit) const {
    const int64_t D = call_.shape.D, to_value = rows_to_value();
    visit_tiles(first, end, [&](int64_t i, int64_t row, int64_t count) {
      const T* keys = static_cast<const T*>(call_.pages) + row * D;
      for (int64_t j = 0; j < count; ++j) {
        const T* key = keys + j * D;
        const float key_scale = call_.scales ? call_.scales[row + j] : 1.0f;
        const float value_scale = call_.scales ? call_.scales[row + j + to_value] : 1.0f;
        visit(i + j, key, key + to_value * D, key_scale, value_scale);
      }
    });
  }

  // Starts to bring the keys and values of [first, end) into the cache.
  void prefetch(int64_t first, int64_t end) const {
    constexpr int64_t kCacheLine = 64;
    const int64_t row_bytes = call_.shape.D * static_cast<int64_t>(sizeof(T)), to_value = rows_to_value() * row_bytes;
    visit_tiles(first, end, [&](int64_t, int64_t row, int64_t count) {
      const char* keys = static_cast<const char*>(call_.pages) + row * row_bytes;
      for (int64_t at = 0; at < count * row_bytes; at += kCacheLine) {
        __builtin_prefetch(keys + at, 0, 2);
        __builtin_prefetch(keys + to_value + at, 0, 2);
      }
    });
  }

 private:
  int64_t rows_to_value() const { return call_.shape.K * call_.shape.page_size; }

  // Calls visit(i, row, count) for each page that positions [first, end) lie on: `count` of them, from first + i on,
  // have their keys in the rows from `row` on of the layer's [P, 2, K, page] rows.
  template <class Visit>
  void visit_tiles(int64_t first, int64_t end, Visit&& visit) const {
    const AttentionShape& shape = call_.shape;
    for (int64_t at = first; at < end;) {
      const int64_t id = std::clamp<int64_t>(table_[at / shape.page_size], 0, shape.P - 1);
      const int64_t offset = at % shape.page_size, count = std::min(shape.page_size - offset, end - at);
      visit(at - first, (id * 2 * shape.K + head_) * shape.page_size + offset, count);
      at += count;
    }
  }

  const AttentionCall& call_;
  const int32_t* table_;
  int64_t head_;
};

inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace jaxkv
