// Attention of a tile of queries of one sequence, for one KV head: compute-bound, so everything is a small float
// matmul.
//
// The rows of a tile are (query, query head) pairs. They run along the vector lanes: scores are [keys, rows] and
// outputs [D, rows], so that the softmax over keys never crosses lanes, and keys and values enter as scalars in the
// order in which they are stored. Blocks of keys start at multiples of kKeyBlock, and a key that a row does not see
// leaves it exactly as it was: a row's result does not depend on how its prompt was cut into chunks, and is that
// of a decode.
#pragma once

#include "cpu_native_call.h"

namespace jaxkv {

constexpr int64_t kTileRows = 192;                             // a block's conversion to float serves this many rows
constexpr int64_t kSmallTileRows = 64;                         // the same where large tiles are too few to keep all threads busy
constexpr int kPanelVectors = kVectorRegisters >= 32 ? 4 : 3;  // rows of a panel: at most this many vectors
constexpr int kMatmulRows = 4;                                 // kMatmulRows * kPanelVectors accumulators fill the registers

static_assert(kLanes % kMatmulRows == 0 && kKeyBlock % kMatmulRows == 0, "rows padded to whole vectors are whole matmul tiles");

// c[m][r] += sum over k of a[m * row_step + k * depth_step] * b[k][r], for kMatmulRows m and Vectors vectors of r; b
// and c have Vectors vectors in a row. With Keep, c[m][r] is first multiplied by keep[r], else it starts from zero.
template <int Vectors, bool Keep>
inline void matmul_rows(const float* a, int64_t row_step, int64_t depth_step, const float* b, int64_t depth, const float* keep,
                        float* c) {
  constexpr int64_t kWidth = Vectors * kLanes;
  Floats sums[kMatmulRows][Vectors];
  unroll<kMatmulRows>([&](auto m) JAXKV_INLINE {
    unroll<Vectors>([&](auto v) JAXKV_INLINE {
      if constexpr (Keep) {
        sums[m][v] = load(c + m * kWidth + v * kLanes) * load(keep + v * kLanes);
      } else {
        sums[m][v] = Floats{};
      }
    });
  });
  for (int64_t k = 0; k < depth; ++k) {
    Floats right[Vectors];
    unroll<Vectors>([&](auto v) JAXKV_INLINE { right[v] = load(b + k * kWidth + v * kLanes); });
    unroll<kMatmulRows>([&](auto m) JAXKV_INLINE {
      const Floats left = splat(a[m * row_step + k * depth_step]);
      unroll<Vectors>([&](auto v) JAXKV_INLINE { sums[m][v] += left * right[v]; });
    });
  }
  unroll<kMatmulRows>(
      [&](auto m) JAXKV_INLINE { unroll<Vectors>([&](auto v) JAXKV_INLINE { store(c + m * kWidth + v * kLanes, sums[m][v]); }); });
}

// A block of keys and values in float; rows that nobody may read are zero.
struct FloatBlock {
  float* keys;          // [kKeyBlock, depth]
  float* values;        // [kKeyBlock, depth]
  float* key_scales;    // [kKeyBlock]
  float* value_scales;  // [kKeyBlock]
  int64_t first;        // position of row 0
  int64_t depth;        // D, rounded up to kLanes; the rest of a row is zero
};

// A running softmax of a panel's rows.
struct PanelState {
  float* top;      // [rows]
  float* total;    // [rows]
  float* outputs;  // [depth, rows]

  static int64_t floats(int64_t depth, int64_t rows) { return (depth + 2) * rows; }
  PanelState(float* memory, int64_t rows) : top(memory), total(top + rows), outputs(total + rows) {}

  void clear(int64_t depth, int64_t rows) {
    std::fill(top, top + rows, kLowest);
    std::fill(total, outputs + depth * rows, 0.0f);
  }
};

// Up to kPanelVectors vectors of rows. What one split of the keys gives is in `part`, what all before it gave in `whole`.
struct Panel {
  float* scores;       // [kKeyBlock, rows], shared by all panels
  int64_t rows;        // a multiple of kLanes; those without a query repeat the last one's position and have zeros for a query
  float* queries;      // [depth, rows]
  float* shrink;       // [rows]
  int32_t* positions;  // [rows]
  PanelState part, whole;
  int64_t first_position = 0, last_position = 0;

  static int64_t floats(int64_t depth, int64_t rows) { return (depth + 2) * rows + 2 * PanelState::floats(depth, rows); }
  Panel(float* memory, float* scores, int64_t depth, int64_t rows)
      : scores(scores),
        rows(rows),
        queries(memory),
        shrink(queries + depth * rows),
        positions(reinterpret_cast<int32_t*>(shrink + rows)),
        part(shrink + 2 * rows, rows),
        whole(shrink + 2 * rows + PanelState::floats(depth, rows), rows) {}

  // Adds the split in `part` to `whole` and clears it.
  void merge(int64_t depth) const {
    PanelState empty = part;
    for (int64_t r = 0; r < rows; r += kLanes) {
      const Floats old_top = load(whole.top + r), part_top = load(part.top + r), top = max(old_top, part_top);
      const Floats mine = exp(old_top - top), its = exp(part_top - top);
      store(whole.top + r, top);
      store(whole.total + r, blend(load(whole.total + r), mine, load(part.total + r), its));
      for (int64_t at = r; at < depth * rows; at += rows) {
        store(whole.outputs + at, blend(load(whole.outputs + at), mine, load(part.outputs + at), its));
      }
    }
    empty.clear(depth, rows);
  }
};

// Scales, caps and masks `count` keys' scores, updates the running maximum and turns the scores into weights.
template <int Vectors>
inline void weigh_panel(const AttentionCall& call, const FloatBlock& block, const Panel& panel, int64_t count) {
  constexpr int64_t kWidth = Vectors * kLanes;
  const int64_t last_key = block.first + count - 1;
  const bool masked = last_key > panel.first_position || block.first < call.first_key(panel.last_position);
  const bool changes = masked || call.soft_capped() || call.scales;
  const int32_t window = call.window > 0 ? static_cast<int32_t>(std::min<int64_t>(call.window, INT32_MAX)) : INT32_MAX;
  const PanelState& state = panel.part;
  for (int v = 0; v < Vectors; ++v) {
    float* scores = panel.scores + v * kLanes;
    const Ints position = load<Ints>(panel.positions + v * kLanes);
    const Floats old_top = load(state.top + v * kLanes);
    Floats top = old_top;
    for (int64_t key = 0; key < count; ++key) {
      Floats score = load(scores + key * kWidth);
      if (changes) {
        if (call.scales) score *= block.key_scales[key];
        if (call.soft_capped()) score = call.soft_cap * tanh(score);
        const Ints ago = position - static_cast<int32_t>(block.first + key);
        score = select((ago >= 0) & (ago < window), score, splat(kMasked));
        store(scores + key * kWidth, score);
      }
      top = max(score, top);
    }
    Floats sums[kLanes];  // a decode has every kLanes-th key in the same lane
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      Floats sum = {};
      for (int64_t key = lane; key < count; key += kLanes) {
        const Floats weight = exp(load(scores + key * kWidth) - top);
        sum += weight;
        store(scores + key * kWidth, call.scales ? weight * block.value_scales[key] : weight);
      }
      sums[lane] = sum;
    }
    const Floats shrink = exp(old_top - top);
    store(state.top + v * kLanes, top);
    store(panel.shrink + v * kLanes, shrink);
    const Floats added = sum_pairs(sums);
    store(state.total + v * kLanes, load(state.total + v * kLanes) * shrink + added);
  }
}

template <int Vectors>
void fold_panel(const AttentionCall& call, const FloatBlock& block, int64_t count, const Panel& panel) {
  constexpr int64_t kWidth = Vectors * kLanes;
  for (int64_t key = 0; key < count; key += kMatmulRows) {
    matmul_rows<Vectors, false>(block.keys + key * block.depth, block.depth, 1, panel.queries, call.shape.D, nullptr,
                                panel.scores + key * kWidth);
  }
  weigh_panel<Vectors>(call, block, panel, count);
  for (int64_t d = 0; d < block.depth; d += kMatmulRows) {
    matmul_rows<Vectors, true>(block.values + d, 1, block.depth, panel.scores, count, panel.shrink,
                               panel.part.outputs + d * kWidth);
  }
}

inline void fold_any_panel(const AttentionCall& call, const FloatBlock& block, int64_t count, const Panel& panel) {
  static_assert(kPanelVectors <= 4, "a case for each number of vectors");
  switch (panel.rows / kLanes) {
    case 1:
      return fold_panel<1>(call, block, count, panel);
    case 2:
      return fold_panel<2>(call, block, count, panel);
    case 3:
      return fold_panel<3>(call, block, count, panel);
    default:
      return fold_panel<kPanelVectors>(call, block, count, panel);
  }
}

// Reads keys and values of positions [begin, end), which lie within the block at block.first.
template <class T>
void read_block(const KeyFinder<T>& finder, int64_t D, int64_t begin, int64_t end, FloatBlock& block) {
  const int64_t depth = block.depth, before = begin - block.first;
  const int64_t until = std::min(round_up(end - block.first, kMatmulRows), kKeyBlock);
  for (float* rows : {block.keys, block.values}) {
    std::fill(rows, rows + before * depth, 0.0f);
    std::fill(rows + (end - block.first) * depth, rows + until * depth, 0.0f);
  }
  std::fill(block.key_scales, block.key_scales + before, 0.0f);
  std::fill(block.value_scales, block.value_scales + before, 0.0f);
  finder.visit(begin, end, [&](int64_t i, const T* key, const T* value, float key_scale, float value_scale) {
    convert_row(key, D, 1.0f, block.keys + (before + i) * depth);
    convert_row(value, D, 1.0f, block.values + (before + i) * depth);
    block.key_scales[before + i] = key_scale;
    block.value_scales[before + i] = value_scale;
  });
}

// The rows of a tile in order: row r of the tile is query r / G, head r % G.
struct TileRows {
  const AttentionCall& call;
  const SequenceRange& range;
  int64_t head, first_query;

  int64_t query(int64_t row) const { return first_query + row / call.shape.G; }
  int64_t query_head(int64_t row) const { return head * call.shape.G + row % call.shape.G; }
};

// Fills in queries, positions and starting state of the panel that holds rows [first, first + used). plain: [panel
// rows, depth].
inline void start_panel(const TileRows& tile, int64_t first, int64_t used, float* plain, int64_t depth, Panel& panel) {
  const AttentionCall& call = tile.call;
  const int64_t rows = panel.rows;
  std::fill(plain, plain + rows * depth, 0.0f);
  panel.part.clear(depth, rows);
  panel.whole.clear(depth, rows);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = first + std::min(r, used - 1), h = tile.query_head(row);
    panel.positions[r] = static_cast<int32_t>(tile.range.position(tile.query(row)));
    panel.whole.top[r] = call.sinks ? std::max(call.sinks[h], kLowest) : kLowest;
    panel.whole.total[r] = call.sinks ? 1.0f : 0.0f;
    if (r < used) read_query(call, tile.range.row + tile.query(row), h, plain + r * depth);
  }
  for (int64_t r = 0; r < rows; r += kLanes) {
    for (int64_t d = 0; d < depth; d += kLanes) transpose_block(plain + r * depth + d, depth, panel.queries + d * rows + r, rows);
  }
  panel.first_position = panel.positions[0];
  panel.last_position = panel.positions[rows - 1];
}

inline void finish_panel(const TileRows& tile, int64_t first, int64_t used, float* plain, int64_t depth, const Panel& panel) {
  const int64_t rows = panel.rows;
  for (int64_t r = 0; r < rows; r += kLanes) {
    for (int64_t d = 0; d < depth; d += kLanes)
      transpose_block(panel.whole.outputs + d * rows + r, rows, plain + r * depth + d, depth);
  }
  for (int64_t r = 0; r < used; ++r) {
    const float total = panel.whole.total[r];
    write_output(tile.call, tile.range.row + tile.query(first + r), tile.query_head(first + r), plain + r * depth,
                 total == 0 ? 1.0f : 1.0f / total);
  }
}

// Attention of `queries` queries of a sequence from `first_query` on, for one KV head.
template <class T>
void attend_tile(const AttentionCall& call, int64_t sequence, int64_t head, int64_t first_query, int64_t queries) {
  static thread_local Scratch scratch;
  static thread_local std::vector<Panel> panels;
  constexpr int64_t kPanelRows = kPanelVectors * kLanes;
  const int64_t D = call.shape.D, depth = round_up(D, kLanes);
  const SequenceRange range(call, sequence);
  const TileRows tile{call, range, head, first_query};
  const int64_t rows = queries * call.shape.G;

  float* memory =
      scratch.floats(2 * kKeyBlock * (depth + 1) + (kKeyBlock + depth) * kPanelRows + Panel::floats(depth, round_up(rows, kLanes)));
  float* key_scales = memory + 2 * kKeyBlock * depth;
  FloatBlock block{memory, memory + kKeyBlock * depth, key_scales, key_scales + kKeyBlock, 0, depth};
  float* scores = key_scales + 2 * kKeyBlock;
  float* plain = scores + kKeyBlock * kPanelRows;
  float* next = plain + kPanelRows * depth;
  if (depth > D) std::fill(memory, scores, 0.0f);
  panels.clear();
  for (int64_t row = 0; row < rows; row += kPanelRows) {
    const int64_t used = std::min(rows - row, kPanelRows);
    Panel& panel = panels.emplace_back(next, scores, depth, round_up(used, kLanes));
    start_panel(tile, row, used, plain, depth, panel);
    next += Panel::floats(depth, panel.rows);
  }

  const KeyFinder<T> finder(call, sequence, head);
  const int64_t end = panels.back().last_position + 1;
  const int64_t begin = call.first_key(std::max<int64_t>(panels.front().first_position, 0));
  for (block.first = begin / kKeyBlock * kKeyBlock; block.first < end; block.first += kKeyBlock) {
    const int64_t stop = std::min(block.first + kKeyBlock, end);
    read_block(finder, D, std::max(block.first, begin), stop, block);
    const bool ends_split = (block.first + kKeyBlock) % kSplitKeys == 0 || block.first + kKeyBlock >= end;
    for (const Panel& panel : panels) {
      const int64_t count = std::min(stop, panel.last_position + 1) - block.first;
      const bool seen = count > 0 && block.first + kKeyBlock > call.first_key(std::max<int64_t>(panel.first_position, 0));
      if (seen) fold_any_panel(call, block, count, panel);
      if (ends_split) panel.merge(depth);
    }
  }
  for (size_t i = 0; i < panels.size(); ++i) {
    const int64_t row = static_cast<int64_t>(i) * kPanelRows;
    finish_panel(tile, row, std::min(rows - row, kPanelRows), plain, depth, panels[i]);
  }
}

}  // namespace jaxkv
