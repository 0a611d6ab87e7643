// Attention of one query per sequence: memory-bound, so keys and values are read once, as they are stored, for all
// query heads of a KV head.
//
// Vectors run along the head dim. A block's scores are dot products kept as vectors of partial sums until a whole
// vector of keys is there, whose sums are then formed together; its values are added to accumulators that stay in
// registers.
#pragma once

#include "cpu_native_call.h"

namespace jaxkv {

constexpr int64_t kDecodeBlock = 64;                            // keys between two updates of the running maximum
constexpr int kDecodeHeads = kVectorRegisters >= 32 ? 4 : 2;    // query heads whose accumulators share the registers
constexpr int kDecodeVectors = kVectorRegisters >= 32 ? 4 : 2;  // accumulator vectors of each
constexpr int kDecodeKeys = 4;                                  // keys whose partial sums share the registers

// Running softmax of the G query heads of one KV head. values is [G, padded D] in packed order.
struct DecodeState {
  float* top;
  float* total;
  float* values;

  static int64_t floats(int64_t G, int64_t width) { return G * (width + 2); }
  DecodeState(float* memory, int64_t G) : top(memory), total(memory + G), values(memory + 2 * G) {}
};

template <class T>
struct BlockRows {
  const T* keys[kDecodeBlock];
  const T* values[kDecodeBlock];
  float key_scales[kDecodeBlock];
  float value_scales[kDecodeBlock];
  int64_t count = 0;
};

// Asks for the rows of the next block while this one is computed: a few at a time, as the core can wait for only so
// many cache lines at once.
template <class T>
inline void prefetch_rows(const T* const* rows, int64_t first, int64_t end, int64_t width) {
  constexpr int64_t kCacheLine = 64 / sizeof(T);
  for (int64_t i = first; i < end; ++i) {
    for (int64_t at = 0; at < width; at += kCacheLine) __builtin_prefetch(rows[i] + at);
  }
}

// Partial sums of Heads x kDecodeKeys dot products: partial[h][key][lane], keys `kLanes` vectors per head.
template <class T, int Heads>
inline void dot_keys(const T* const* keys, const float* q, int64_t width, float* partial) {
  Floats sums[kDecodeKeys][Heads];
  unroll<kDecodeKeys>([&](auto key) JAXKV_INLINE { unroll<Heads>([&](auto h) JAXKV_INLINE { sums[key][h] = Floats{}; }); });
  for (int64_t d = 0; d < width; d += Packed<T>::kElements) {
    Words words[kDecodeKeys];
    unroll<kDecodeKeys>([&](auto key) JAXKV_INLINE { words[key] = load<Words>(keys[key] + d); });
    unroll<Packed<T>::kParts>([&](auto part) JAXKV_INLINE {
      Floats query[Heads];
      unroll<Heads>([&](auto h) JAXKV_INLINE { query[h] = load(q + h * width + d + part * kLanes); });
      unroll<kDecodeKeys>([&](auto key) JAXKV_INLINE {
        const Floats values = Packed<T>::template part<part>(words[key]);
        unroll<Heads>([&](auto h) JAXKV_INLINE { sums[key][h] += values * query[h]; });
      });
    });
  }
  unroll<Heads>([&](auto h) JAXKV_INLINE {
    unroll<kDecodeKeys>([&](auto key) JAXKV_INLINE { store(partial + (h * kLanes + key) * kLanes, sums[key][h]); });
  });
}

// scores[h][key] = q[h] . key for the block's keys; what follows them up to a multiple of kLanes means nothing.
template <class T, int Heads>
void score_heads(const BlockRows<T>& block, const BlockRows<T>* next, const float* q, int64_t width, float* scores) {
  alignas(64) float partial[Heads * kLanes * kLanes];
  for (int64_t first = 0; first < block.count; first += kLanes) {
    for (int64_t key = 0; key < kLanes; key += kDecodeKeys) {
      const T* keys[kDecodeKeys];
      for (int i = 0; i < kDecodeKeys; ++i) keys[i] = block.keys[std::min(first + key + i, block.count - 1)];
      dot_keys<T, Heads>(keys, q, width, partial + key * kLanes);
      if (next) prefetch_rows(next->keys, first + key, std::min(first + key + kDecodeKeys, next->count), width);
    }
    for (int h = 0; h < Heads; ++h) store(scores + h * kDecodeBlock + first, sum_each(partial + h * kLanes * kLanes, kLanes));
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
  for (int64_t key = 0; key < block.count; ++key) {
    if (next && key < next->count) prefetch_rows(next->values, key, key + 1, width);
    const T* row = block.values[key] + column;
    Floats weight[Heads];
    unroll<Heads>([&](auto h) JAXKV_INLINE { weight[h] = splat(weights[h * kDecodeBlock + key]); });
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
  Floats highest = splat(top);
  Ints key;
  for (int lane = 0; lane < kLanes; ++lane) key[lane] = lane;
  for (int64_t i = 0; i < count; i += kLanes) {
    Floats score = load(scores + i);
    if (call.scales) score *= load(block.key_scales + i);
    if (call.soft_capped()) score = call.soft_cap * tanh(score);
    score = select(key + static_cast<int32_t>(i) < static_cast<int32_t>(count), score, splat(kMasked));
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
  top = new_top;
  total = total * shrink + sum_lanes(sum);
  return shrink;
}

// Folds one block into the running softmax. next: the block that comes then, or null.
template <class T>
void fold_block(const AttentionCall& call, const BlockRows<T>& block, const BlockRows<T>* next, const float* q, int64_t width,
                float* scores, float* shrink, DecodeState& state) {
  const int64_t G = call.shape.G;
  for_head_groups(G, [&](auto heads, int64_t h) {
    score_heads<T, heads>(block, h == 0 ? next : nullptr, q + h * width, width, scores + h * kDecodeBlock);
  });
  for (int64_t h = 0; h < G; ++h) shrink[h] = weigh(call, block, scores + h * kDecodeBlock, state.top[h], state.total[h]);
  for_head_groups(G, [&](auto heads, int64_t h) {
    mix_heads<T, heads>(block, h == 0 ? next : nullptr, width, scores + h * kDecodeBlock, shrink + h, state.values + h * width);
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

inline void start_state(const AttentionCall& call, int64_t head, bool with_sink, int64_t width, DecodeState& state) {
  const int64_t G = call.shape.G;
  for (int64_t h = 0; h < G; ++h) {
    state.top[h] = with_sink ? std::max(call.sinks[head * G + h], kLowest) : kLowest;
    state.total[h] = with_sink ? 1.0f : 0.0f;
  }
  std::fill(state.values, state.values + G * width, 0.0f);
}

// One decode's query heads of one KV head, and where the keys are.
template <class T>
struct DecodeQuery {
  const AttentionCall& call;
  KeyFinder<T> finder;
  const float* q;  // [G, width]
  int64_t width;
  float* scores;  // [G, kDecodeBlock]
  float* shrink;  // [G]
};

template <class T>
void attend_in_place(const DecodeQuery<T>& query, int64_t first, int64_t end, DecodeState& state) {
  BlockRows<T> blocks[2];
  auto find = [&](int64_t at, BlockRows<T>& block) {
    block.count = std::clamp<int64_t>(end - at, 0, kDecodeBlock);
    query.finder.visit(at, at + block.count, [&](int64_t i, const T* key, const T* value, float key_scale, float value_scale) {
      block.keys[i] = key;
      block.values[i] = value;
      block.key_scales[i] = key_scale;
      block.value_scales[i] = value_scale;
    });
  };
  find(first, blocks[0]);
  for (int64_t at = first; at < end; at += kDecodeBlock) {
    const int64_t now = (at - first) / kDecodeBlock % 2;
    find(at + kDecodeBlock, blocks[1 - now]);
    fold_block(query.call, blocks[now], &blocks[1 - now], query.q, query.width, query.scores, query.shrink, state);
  }
}

// The same through copies of the rows in `padded` [2 * kDecodeBlock, width], whose padding is zero.
template <class T>
void attend_copied(const DecodeQuery<T>& query, int64_t first, int64_t end, float* padded, DecodeState& state) {
  BlockRows<float> block;
  for (int64_t at = first; at < end; at += kDecodeBlock) {
    block.count = std::min(kDecodeBlock, end - at);
    query.finder.visit(at, at + block.count, [&](int64_t i, const T* key, const T* value, float key_scale, float value_scale) {
      float* copy = padded + 2 * i * query.width;
      convert_row(key, query.call.shape.D, 1.0f, copy);
      convert_row(value, query.call.shape.D, 1.0f, copy + query.width);
      block.keys[i] = copy;
      block.values[i] = copy + query.width;
      block.key_scales[i] = key_scale;
      block.value_scales[i] = value_scale;
    });
    fold_block<float>(query.call, block, nullptr, query.q, query.width, query.scores, query.shrink, state);
  }
}

// Folds keys [first, end) of a sequence into `state`; the query is row `row` of q.
template <class T>
void attend_keys(const AttentionCall& call, int64_t sequence, int64_t head, int64_t row, int64_t first, int64_t end,
                 DecodeState& state) {
  static thread_local Scratch scratch;
  const int64_t G = call.shape.G, D = call.shape.D, width = decode_width<T>(D);
  const bool in_place = reads_in_place<T>(D);
  float* q = scratch.floats(G * (width + kDecodeBlock + 1) + D + (in_place ? 0 : 2 * kDecodeBlock * width));
  float* scores = q + G * width;
  float* shrink = scores + G * kDecodeBlock;
  float* plain = shrink + G;
  float* padded = plain + D;
  std::fill(q, q + G * width, 0.0f);
  for (int64_t h = 0; h < G; ++h) {
    read_query(call, row, head * G + h, plain);
    for (int64_t d = 0; d < D; ++d) q[h * width + decode_position<T>(D, d)] = plain[d];
  }
  const DecodeQuery<T> query{call, KeyFinder<T>(call, sequence, head), q, width, scores, shrink};
  if (in_place) {
    attend_in_place(query, first, end, state);
  } else {
    std::fill(padded, padded + 2 * kDecodeBlock * width, 0.0f);
    attend_copied(query, first, end, padded, state);
  }
}

// Adds `other`, which holds later keys of the same query, to `state`.
inline void merge_states(const DecodeState& other, int64_t G, int64_t width, DecodeState& state) {
  for (int64_t h = 0; h < G; ++h) {
    const float top = std::max(state.top[h], other.top[h]);
    const float mine = exp(splat(state.top[h] - top))[0], its = exp(splat(other.top[h] - top))[0];
    state.top[h] = top;
    state.total[h] = state.total[h] * mine + other.total[h] * its;
    for (int64_t d = h * width; d < (h + 1) * width; ++d) state.values[d] = state.values[d] * mine + other.values[d] * its;
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
