// Cuts a call into items of bounded size and runs them on a thread pool.
//
// Decodes are split over (sequence, KV head, kSplitKeys keys), prefill chunks over (sequence, KV head, tile of
// queries). The cuts do not depend on the number of threads or on the other sequences, and partial results are merged
// in order: so a sequence's output is the same to the bit in every batch.
#pragma once

#include <atomic>

#include "../native/parallel.h"
#include "cpu_native_decode.h"
#include "cpu_native_prefill.h"

namespace jaxkv {

struct PrefillTile {
  int64_t sequence, first_query, queries;
  int64_t cost;  // keys times rows
};

// A stretch of one decode's keys. The splits of a sequence are neighbours: `of` splits, this one is number `index`.
struct DecodeSplit {
  int64_t sequence, first, end, index, of;
};

template <class T, class Pool>
class AttentionRun {
 public:
  AttentionRun(const AttentionCall& call, Pool& pool) : call_(call), pool_(pool) {}

  void run() {
    plan();
    const int64_t K = call_.shape.K, tiles = static_cast<int64_t>(tiles_.size());
    const int64_t splits = static_cast<int64_t>(splits_.size());
    floats_ = DecodeState::floats(call_.shape.G, decode_width<T>(call_.shape.D));
    states_ = memory_.floats(splits * K * floats_);
    unfinished_ = std::vector<std::atomic<int32_t>>(static_cast<size_t>(splits * K));
    for (int64_t i = 0; i < splits * K; ++i)
      unfinished_[i].store(static_cast<int32_t>(splits_[i / K].of), std::memory_order_relaxed);
    const int64_t pairs = splits * K, run = pairs_per_item(pairs);
    parallel_for(pool_, tiles * K + (pairs + run - 1) / run, [this, tiles, K, pairs, run](int64_t item) {
      if (item < tiles * K) {
        const PrefillTile& tile = tiles_[item / K];
        attend_tile<T>(call_, tile.sequence, item % K, tile.first_query, tile.queries);
      } else {
        const int64_t first = (item - tiles * K) * run;
        decode(first, std::min(first + run, pairs));
      }
    });
  }

 private:
  void plan() {
    const AttentionShape& shape = call_.shape;
    const int64_t step = queries_per_tile();
    const int64_t sequences = std::clamp<int64_t>(call_.num_seqs, 0, shape.S);
    for (int64_t s = 0; s < sequences; ++s) {
      const SequenceRange range(call_, s);
      if (range.queries == 1 && range.keys > 0) {
        plan_decode(s, range);
      } else if (range.queries == 1) {
        zero_output(call_, range.row, 1);
      }
      for (int64_t query = 0; range.queries > 1 && query < range.queries; query += step) {
        const int64_t count = std::min(step, range.queries - query);
        const int64_t last = range.position(query + count - 1);
        tiles_.push_back({s, query, count, (last + 1 - call_.first_key(std::max<int64_t>(range.position(query), 0))) * count});
      }
    }
    std::stable_sort(tiles_.begin(), tiles_.end(), [](const PrefillTile& a, const PrefillTile& b) { return a.cost > b.cost; });
    const int64_t padding = sequences ? std::clamp<int64_t>(call_.cu_q_lens[sequences], 0, shape.T) : 0;
    zero_output(call_, padding, shape.T - padding);
  }

  // Pairs of a split and a KV head that a thread takes at once: neighbours, so that it can fetch the next one's keys early,
  // but few enough to spread.
  int64_t pairs_per_item(int64_t pairs) const {
    constexpr int64_t kMost = 8, kItemsPerThread = 4;
    return std::clamp<int64_t>(pairs / (kItemsPerThread * std::max<int64_t>(pool_.num_threads(), 1)), 1, kMost);
  }

  int64_t queries_per_tile() const {
    constexpr int64_t kTilesPerThread = 3;
    const int64_t G = call_.shape.G, large_tiles = call_.shape.T * G * call_.shape.K / kTileRows;
    return std::max<int64_t>((large_tiles >= kTilesPerThread * pool_.num_threads() ? kTileRows : kSmallTileRows) / G, 1);
  }

  void plan_decode(int64_t sequence, const SequenceRange& range) {
    const int64_t begin = call_.first_key(range.keys - 1);
    const int64_t first_split = begin / kSplitKeys, splits = (range.keys + kSplitKeys - 1) / kSplitKeys - first_split;
    for (int64_t i = 0; i < splits; ++i) {
      const int64_t at = (first_split + i) * kSplitKeys;
      splits_.push_back({sequence, std::max(at, begin), std::min(at + kSplitKeys, range.keys), i, splits});
    }
  }

  KeyRange keys_of(int64_t pair) const {
    const DecodeSplit& split = splits_[pair / call_.shape.K];
    return {split.sequence, pair % call_.shape.K, split.first, split.end};
  }

  // Pairs [first, end), pair p being split p / K and KV head p % K.
  void decode(int64_t first, int64_t end) {
    KeyRange keys = keys_of(first);
    KeyFinder<T>(call_, keys.sequence, keys.head).prefetch(keys.first, std::min(keys.first + 2 * kKeyBlock, keys.end));
    for (int64_t pair = first; pair < end; ++pair) {
      const bool last = pair + 1 == end;
      const KeyRange following = last ? keys : keys_of(pair + 1);
      decode_pair(pair, keys, last ? nullptr : &following);
      keys = following;
    }
  }

  void decode_pair(int64_t pair, const KeyRange& keys, const KeyRange* following) {
    const int64_t K = call_.shape.K, G = call_.shape.G, width = decode_width<T>(call_.shape.D);
    const int64_t index = pair / K, head = pair % K;
    const DecodeSplit& split = splits_[index];
    const int64_t row = SequenceRange(call_, split.sequence).row;
    DecodeState state(states_ + pair * floats_, G);
    state.clear(G, width);
    attend_keys<T>(call_, keys, row, following, state);

    const int64_t first = index - split.index;
    if (unfinished_[first * K + head].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    static thread_local Scratch scratch;
    DecodeState whole(scratch.floats(floats_), G);
    whole.clear(G, width);
    if (call_.sinks) whole.add_sinks(call_.sinks + head * G, G);
    for (int64_t i = 0; i < split.of; ++i) {
      merge_states(DecodeState(states_ + ((first + i) * K + head) * floats_, G), G, width, whole);
    }
    write_state<T>(call_, row, head, whole);
  }

  static inline thread_local Scratch memory_;  // of the calling thread: keeps its size from call to call

  const AttentionCall& call_;
  Pool& pool_;
  std::vector<PrefillTile> tiles_;
  std::vector<DecodeSplit> splits_;
  std::vector<std::atomic<int32_t>> unfinished_;  // [splits, K]: the first split's entry counts for its sequence and head
  float* states_ = nullptr;
  int64_t floats_ = 0;
};

enum class PoolType { kFloat32, kBFloat16, kInt8 };

template <class Pool>
void attend(PoolType type, const AttentionCall& call, Pool& pool) {
  switch (type) {
    case PoolType::kFloat32:
      return AttentionRun<float, Pool>(call, pool).run();
    case PoolType::kBFloat16:
      return AttentionRun<BFloat16, Pool>(call, pool).run();
    case PoolType::kInt8:
      return AttentionRun<int8_t, Pool>(call, pool).run();
  }
}

}  // namespace jaxkv
