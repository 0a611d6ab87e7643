// Attention of one query per sequence: memory-bound, so keys and values are read once, as they are stored, for all
// query heads of a KV head.
//
// Scores have keys along the vector lanes: rows of keys are transposed, as 32-bit words, in registers. Values have the head
// dim along the lanes and are added to accumulators that stay in registers.
#pragma once

#include "cpu_native_call.h"

namespace jaxkv {

constexpr int kDecodeHeads = kVectorRegisters >= 32 ? 4 : 2;    // query heads whose accumulators share the registers
constexpr int kDecodeVectors = kVectorRegisters >= 32 ? 4 : 2;  // accumulator vectors of each

// Running softmax of the G query heads of one KV head. values is [G, padded D] in packed order.
struct DecodeState {
  float* top;
  float* total;
  float* values;

  static int64_t floats(int64_t G, int64_t width) { return G * (width + 2); }
  DecodeState(float* memory, int64_t G) : top(memory), total(memory + G), values(memory + 2 * G) {}

  void clear(int64_t G, int64_t width) {
    std::fill(top, top + G, kLowest);
    std::fill(total, total + G, 0.0f);
    std::fill(values, values + G * width, 0.0f);
  }

  // A sink is a key whose value is zero.
  void add_sinks(const float* sinks, int64_t G) {
    for (int64_t h = 0; h < G; ++h) top[h] = std::max(sinks[h], kLowest);
    std::fill(total, total + G, 1.0f);
  }
};

// Rows [first, count) of the block of keys at a multiple of kKeyBlock; the key rows before them repeat row `first`.
template <class T>
struct BlockRows {
  const T* keys[kKeyBlock];
  const T* values[kKeyBlock];
  float key_scales[kKeyBlock];
  float value_scales[kKeyBlock];
  int64_t first = 0;
  int64_t count = 0;

  void set(int64_t i, const T* key, const T* value, float key_scale, float value_scale) {
    keys[i] = key;
    values[i] = value;
    key_scales[i] = key_scale;
    value_scales[i] = value_scale;
    if (i == first) std::fill(keys, keys + first, key);
  }
};

// Asks for the rows of the next block while this one is computed: a few at a time, as the core can wait for only so many
// cache lines at once, and to the second level, as it can wait for still fewer on their way to the first.
template <class T>
inline void prefetch_rows(const T* const* rows, int64_t first, int64_t end, int64_t width) {
  constexpr int64_t kCacheLine = 64 / sizeof(T);
  for (int64_t i = first; i < end; ++i) {
    for (int64_t at = 0; at < width; at += kCacheLine) __builtin_prefetch(rows[i] + at, 0, 2);
  }
}

// scores[h][key] = q[h] . key for the block's keys; those of other keys mean nothing.
template <class T, int Heads>
void score_heads(const BlockRows<T>& block, const BlockRows<T>* next, const float* q, int64_t width, float* scores) {
  constexpr int kParts = Packed<T>::kParts;
  for (int64_t first = 0; first < block.count; first += kLanes) {
    const T* keys[kLanes];
    for (int i = 0; i < kLanes; ++i) keys[i] = block.keys[std::min(first + i, block.count - 1)];
    Floats sums[Heads];
    unroll<Heads>([&](auto h) JAXKV_INLINE { sums[h] = Floats{}; });
    for (int64_t d = 0; d < width; d += Packed<T>::kElements) {
      Words words[kLanes];
      unroll<kLanes>([&](auto i) JAXKV_INLINE { words[i] = load<Words>(keys[i] + d); });
      transpose(words);
      unroll<kLanes>([&](auto i) JAXKV_INLINE {
        unroll<kParts>([&](auto part) JAXKV_INLINE {
          const Floats values = Packed<T>::template part<part>(words[i]);
          unroll<Heads>([&](auto h) JAXKV_INLINE { sums[h] += values * splat(q[h * width + d + i * kParts + part]); });
        });
      });
      if (next && d == 0) prefetch_rows(next->keys, first, std::min(first + kLanes, next->count), width);
    }
    unroll<Heads>([&](auto h) JAXKV_INLINE { store(scores + h * kKeyBlock + first, sums[h]); });
  }
}

// acc[h][...] = acc[h][...] * shrink[h] + sum over keys of weights[h][key] * value, for Loads vector loads of each
// value row.
template <class T, int Heads, int Loads>
inline void mix_columns(const BlockRows<T>& block, const BlockRows<T>* next, int64_t column, int64_t width, const float* weights,
                        const float* shrink, float* acc) {
  constexpr int kParts = Packed<T>::kParts, kVectors = Loads * kParts;
  Floats sums[Heads][kVectors];
  unroll<Heads>([&](auto h) JAXKV_INLINE {
    unroll<kVectors>([&](auto v) JAXKV_INLINE { sums[h][v] = load(acc + h * width + column + v * kLanes) * shrink[h]; });
  });
  for (int64_t key = block.first; key < block.count; ++key) {
    if (next && key >= next->first && key < next->count) prefetch_rows(next->values, key, key + 1, width);
    const T* row = block.values[key] + column;
    Floats weight[Heads];
    unroll<Heads>([&](auto h) JAXKV_INLINE { weight[h] = splat(weights[h * kKeyBlock + key]); });
    unroll<Loads>([&](auto l) JAXKV_INLINE {
      const Words words = load<Words>(row + l * Packed<T>::kElements);
      unroll<kParts>([&](auto part) JAXKV_INLINE {
        const Floats values = Packed<T>::template part<part>(words);
        unroll<Heads>([&](auto h) JAXKV_INLINE { sums[h][l * kParts + part] += weight[h] * values; });
      });
    });
  }
  unroll<Heads>([&](auto h) JAXKV_INLINE {
    unroll<kVectors>([&](auto v) JAXKV_INLINE { store(acc + h * width + column + v * kLanes, sums[h][v]); });
  });
}

template <class T, int Heads>
void mix_heads(const BlockRows<T>& block, const BlockRows<T>* next, int64_t width, const float* weights, const float* shrink,
               float* acc) {
  constexpr int kLoads = std::max(1, kDecodeVectors / Packed<T>::kParts);
  constexpr int64_t kColumns = kLoads * Packed<T>::kElements;
  int64_t column = 0;
  for (; column + kColumns <= width; column += kColumns)
    mix_columns<T, Heads, kLoads>(block, column == 0 ? next : nullptr, column, width, weights, shrink, acc);
  for (; column < width; column += Packed<T>::kElements)
    mix_columns<T, Heads, 1>(block, column == 0 ? next : nullptr, column, width, weights, shrink, acc);
}

// Calls body(integral_constant<Heads>, first head) for groups of at most kDecodeHeads heads.
template <class Body>
inline void for_head_groups(int64_t G, Body&& body) {
  int64_t h = 0;
  for (; h + kDecodeHeads <= G; h += kDecodeHeads) body(std::integral_constant<int, kDecodeHeads>{}, h);
  const int64_t rest = G - h;
  if (rest == 1) body(std::integral_constant<int, 1>{}, h);
  if constexpr (kDecodeHeads > 2) {
    if (rest == 2) body(std::integral_constant<int, 2>{}, h);
    if (rest == 3) body(std::integral_constant<int, 3>{}, h);
  }
}

// Turns one head's scores into weights that are relative to the new running maximum. Returns what older sums shrink by.
template <class T>
inline float weigh(const AttentionCall& call, const BlockRows<T>& block, float* scores, float& top, float& total) {
  const int64_t count = block.count;
  const auto first = static_cast<int32_t>(block.first), end = static_cast<int32_t>(count);
  Floats highest = splat(top);
  Ints key;
  for (int lane = 0; lane < kLanes; ++lane) key[lane] = lane;
  for (int64_t i = 0; i < count; i += kLanes, key += kLanes) {
    Floats score = load(scores + i);
    if (call.scales) score *= load(block.key_scales + i);
    if (call.soft_capped()) score = call.soft_cap * tanh(score);
    score = select((key >= first) & (key < end), score, splat(kMasked));
    store(scores + i, score);
    highest = max(score, highest);
  }
  const float new_top = max_lanes(highest);
  Floats sum = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats weight = exp(load(scores + i) - new_top);
    sum += weight;
    store(scores + i, call.scales ? weight * load(block.value_scales + i) : weight);
  }
  const float shrink = exp(splat(top - new_top))[0];
  float sums[kLanes];
  store(sums, sum);
  top = new_top;
  const float added = sum_pairs(sums);  // before the product, so that the compiler contracts it with the sum, as in prefill
  total = total * shrink + added;
  return shrink;
}

// Folds one block into the running softmax. next: the block that comes then, or null.
template <class T>
void fold_block(const AttentionCall& call, const BlockRows<T>& block, const BlockRows<T>* next, const float* q, int64_t width,
                float* scores, float* shrink, DecodeState& state) {
  const int64_t G = call.shape.G;
  for_head_groups(G, [&](auto heads, int64_t h) {
    score_heads<T, heads>(block, h == 0 ? next : nullptr, q + h * width, width, scores + h * kKeyBlock);
  });
  for (int64_t h = 0; h < G; ++h) shrink[h] = weigh(call, block, scores + h * kKeyBlock, state.top[h], state.total[h]);
  for_head_groups(G, [&](auto heads, int64_t h) {
    mix_heads<T, heads>(block, h == 0 ? next : nullptr, width, scores + h * kKeyBlock, shrink + h, state.values + h * width);
  });
}

// Whether rows of D elements can be read as whole vectors; otherwise blocks are first copied to padded float rows.
template <class T>
inline bool reads_in_place(int64_t D) {
  return D % Packed<T>::kElements == 0;
}

// Floats of a row of DecodeState::values.
template <class T>
inline int64_t decode_width(int64_t D) {
  return reads_in_place<T>(D) ? D : round_up(D, kLanes);
}

// Where element i of a head lies in such a row.
template <class T>
inline int64_t decode_position(int64_t D, int64_t i) {
  return reads_in_place<T>(D) ? packed_position<T>(i) : i;
}

// One decode's query heads of one KV head, and where the keys are.
template <class T>
struct DecodeQuery {
  const AttentionCall& call;
  KeyFinder<T> finder;
  const float* q;  // [G, width]
  int64_t width;
  float* scores;  // [G, kKeyBlock]
  float* shrink;  // [G]
};

// Rows of the block that holds position `at`, of the positions [at, end).
template <class Row>
inline void start_block(int64_t at, int64_t end, BlockRows<Row>& block) {
  block.first = at % kKeyBlock;
  block.count = std::clamp<int64_t>(end - (at - block.first), 0, kKeyBlock);
}

// Keys [first, end) of one KV head of a sequence.
struct KeyRange {
  int64_t sequence, head, first, end;
};

template <class T>
void find_block(const KeyFinder<T>& finder, int64_t at, int64_t end, BlockRows<T>& block) {
  start_block(at, end, block);
  finder.visit(at, at - block.first + block.count,
               [&](int64_t i, const T* key, const T* value, float key_scale, float value_scale) {
                 block.set(block.first + i, key, value, key_scale, value_scale);
               });
}

// following: the keys that this thread attends to afterwards, or null: their first block is fetched during the last.
template <class T>
void attend_in_place(const DecodeQuery<T>& query, const KeyRange& keys, const KeyRange* following, DecodeState& state) {
  BlockRows<T> blocks[2];
  find_block(query.finder, keys.first, keys.end, blocks[0]);
  for (int64_t at = keys.first, now = 0; at < keys.end; now = 1 - now) {
    at += kKeyBlock - at % kKeyBlock;
    if (at >= keys.end && following) {
      const KeyFinder<T> finder(query.call, following->sequence, following->head);
      find_block(finder, following->first, following->end, blocks[1 - now]);
    } else {
      find_block(query.finder, at, keys.end, blocks[1 - now]);
    }
    fold_block(query.call, blocks[now], &blocks[1 - now], query.q, query.width, query.scores, query.shrink, state);
  }
}

// The same through copies of the rows in `padded` [2 * kKeyBlock, width], whose padding is zero.
template <class T>
void attend_copied(const DecodeQuery<T>& query, const KeyRange& keys, float* padded, DecodeState& state) {
  BlockRows<float> block;
  for (int64_t at = keys.first; at < keys.end; at += kKeyBlock - at % kKeyBlock) {
    start_block(at, keys.end, block);
    query.finder.visit(at, at - block.first + block.count,
                       [&](int64_t i, const T* key, const T* value, float key_scale, float value_scale) {
                         float* copy = padded + 2 * i * query.width;
                         convert_row(key, query.call.shape.D, 1.0f, copy);
                         convert_row(value, query.call.shape.D, 1.0f, copy + query.width);
                         block.set(block.first + i, copy, copy + query.width, key_scale, value_scale);
                       });
    fold_block<float>(query.call, block, nullptr, query.q, query.width, query.scores, query.shrink, state);
  }
}

// Folds keys into `state`; the query is row `row` of q. following: see attend_in_place.
template <class T>
void attend_keys(const AttentionCall& call, const KeyRange& keys, int64_t row, const KeyRange* following, DecodeState& state) {
  static thread_local Scratch scratch;
  const int64_t G = call.shape.G, D = call.shape.D, width = decode_width<T>(D);
  const bool in_place = reads_in_place<T>(D);
  float* q = scratch.floats(G * (width + kKeyBlock + 1) + (in_place ? 0 : 2 * kKeyBlock * width));
  float* scores = q + G * width;
  float* shrink = scores + G * kKeyBlock;
  float* padded = shrink + G;
  std::fill(q, q + G * width, 0.0f);
  for (int64_t h = 0; h < G; ++h) read_query(call, row, keys.head * G + h, q + h * width);
  const DecodeQuery<T> query{call, KeyFinder<T>(call, keys.sequence, keys.head), q, width, scores, shrink};
  if (in_place) {
    attend_in_place(query, keys, following, state);
  } else {
    std::fill(padded, padded + 2 * kKeyBlock * width, 0.0f);
    attend_copied(query, keys, padded, state);
  }
}

// Adds `other`, which holds later keys of the same query, to `state`.
inline void merge_states(const DecodeState& other, int64_t G, int64_t width, DecodeState& state) {
  for (int64_t h = 0; h < G; ++h) {
    const float top = std::max(state.top[h], other.top[h]);
    const Floats mine = exp(splat(state.top[h] - top)), its = exp(splat(other.top[h] - top));
    state.top[h] = top;
    state.total[h] = blend(splat(state.total[h]), mine, splat(other.total[h]), its)[0];
    for (int64_t d = h * width; d < (h + 1) * width; d += kLanes) {
      store(state.values + d, blend(load(state.values + d), mine, load(other.values + d), its));
    }
  }
}

template <class T>
void write_state(const AttentionCall& call, int64_t row, int64_t head, const DecodeState& state) {
  static thread_local Scratch scratch;
  const int64_t G = call.shape.G, D = call.shape.D, width = decode_width<T>(D);
  float* plain = scratch.floats(D);
  for (int64_t h = 0; h < G; ++h) {
    for (int64_t d = 0; d < D; ++d) plain[d] = state.values[h * width + decode_position<T>(D, d)];
    write_output(call, row, head * G + h, plain, state.total[h] == 0 ? 1.0f : 1.0f / state.total[h]);
  }
}

}  // namespace jaxkv
