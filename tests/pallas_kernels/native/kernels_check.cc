// Runs the native kernels without JAX, for the sanitizers: arrays are exactly as large as they must be, index arrays
// are hostile, and the pools run helpers at once, late or never. Compares with a plain double loop. Exit code 0 if all
// is well.
#include <cmath>
#include <cstdio>
#include <functional>
#include <random>

#include "kv_write/cpu_native_write.h"
#include "ragged_paged_attention/cpu_native_schedule.h"
#include "thread_pool.h"

namespace {

using namespace jaxkv;

struct LatePool {  // helpers run when the caller is long done
  std::vector<std::function<void()>> tasks;
  int64_t num_threads() const { return 8; }
  template <class F>
  void Schedule(F&& task) {
    tasks.emplace_back(std::forward<F>(task));
  }
  ~LatePool() {
    for (auto& task : tasks) task();
  }
};

struct Options {
  int64_t K, G, D, page, window;
  float soft_cap;
  bool sinks;
};

template <class T>
struct Pool {
  std::vector<T> pages;
  std::vector<float> scales;
  double at(int64_t row, int64_t d, int64_t D) const {
    return double(to_float(pages[row * D + d])) * (scales.empty() ? 1.0 : scales[row]);
  }
};

// The largest error of a call's output against softmax(q k) v in double.
template <class T, class Threads>
double check(const Options& o, const std::vector<std::pair<int32_t, int32_t>>& lens, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  int64_t width = 1, num_pages = 1, T_ = 2;
  for (auto [queries, keys] : lens) {
    width = std::max<int64_t>(width, (keys + o.page - 1) / o.page);
    num_pages += (keys + o.page - 1) / o.page;
    T_ += queries;
  }
  const int64_t S = static_cast<int64_t>(lens.size()), H = o.K * o.G, rows = num_pages * 2 * o.K * o.page;
  std::vector<int32_t> table(S * width, -1), cu(S + 1, 0), kv_lens(S), page_ids, offsets;
  std::vector<float> keys, values, q(T_ * H * o.D), out(q.size(), 7.0f), sinks(o.sinks ? H : 0);
  int32_t next = 0;
  for (int64_t s = 0; s < S; ++s) {
    cu[s + 1] = cu[s] + lens[s].first;
    kv_lens[s] = lens[s].second;
    for (int32_t at = 0; at < lens[s].second; ++at) {
      if (at % o.page == 0) table[s * width + at / o.page] = next++;
      page_ids.push_back(table[s * width + at / o.page]);
      offsets.push_back(static_cast<int32_t>(at % o.page));
    }
  }
  for (auto* array : {&keys, &values}) array->resize(page_ids.size() * o.K * o.D);
  for (auto* array : {&keys, &values, &q, &sinks}) {
    for (float& value : *array) value = normal(random);
  }
  Pool<T> pool;
  pool.pages.resize(rows * o.D);
  if (sizeof(T) == 1) pool.scales.assign(rows, NAN);
  WriteCall write{static_cast<int64_t>(page_ids.size()),
                  o.K,
                  o.D,
                  num_pages,
                  o.page,
                  pool.pages.data(),
                  pool.scales.empty() ? nullptr : pool.scales.data(),
                  page_ids.data(),
                  offsets.data()};
  write_kv<float, T>(write, keys.data(), values.data());

  AttentionCall call{};
  call.shape = {T_, S, width, o.K, o.G, o.D, num_pages, o.page};
  call.activations = ActivationType::kFloat32;
  call.q = q.data(), call.out = out.data(), call.pages = pool.pages.data();
  call.scales = pool.scales.empty() ? nullptr : pool.scales.data();
  call.sinks = o.sinks ? sinks.data() : nullptr;
  call.page_table = table.data(), call.cu_q_lens = cu.data(), call.kv_lens = kv_lens.data();
  call.num_seqs = S, call.scale = 0.2f, call.window = o.window, call.soft_cap = o.soft_cap;
  const PoolType type = sizeof(T) == 4 ? PoolType::kFloat32 : sizeof(T) == 2 ? PoolType::kBFloat16 : PoolType::kInt8;
  {
    Threads threads;
    attend(type, call, threads);
  }

  double worst = 0;
  for (int64_t s = 0; s < S; ++s) {
    for (int64_t i = 0; i < lens[s].first; ++i) {
      const int64_t position = lens[s].second - lens[s].first + i;
      const int64_t first = o.window ? std::max<int64_t>(0, position - o.window + 1) : 0;
      for (int64_t h = 0; h < H; ++h) {
        std::vector<double> mixed(o.D, 0.0);
        double total = o.sinks ? std::exp(double(sinks[h])) : 0.0;
        for (int64_t at = first; at <= position; ++at) {
          const int64_t row = (table[s * width + at / o.page] * 2 * o.K + h / o.G) * o.page + at % o.page;
          double dot = 0;
          for (int64_t d = 0; d < o.D; ++d) dot += q[((cu[s] + i) * H + h) * o.D + d] * pool.at(row, d, o.D);
          dot *= 0.2;
          if (o.soft_cap > 0) dot = o.soft_cap * std::tanh(dot / o.soft_cap);
          total += std::exp(dot);
          for (int64_t d = 0; d < o.D; ++d) mixed[d] += std::exp(dot) * pool.at(row + o.K * o.page, d, o.D);
        }
        for (int64_t d = 0; d < o.D; ++d) {
          worst = std::max(worst, std::fabs(out[((cu[s] + i) * H + h) * o.D + d] - mixed[d] / total));
        }
      }
    }
  }
  for (size_t i = cu[S] * H * o.D; i < out.size(); ++i) worst = std::max<double>(worst, std::fabs(out[i]));

  // Index arrays that hold nonsense must not lead outside of the arrays.
  for (auto* array : {&cu, &kv_lens, &table}) {
    for (int32_t& value : *array) value = static_cast<int32_t>(random()) % 3000;
  }
  LatePool threads;
  attend(type, call, threads);
  return worst;
}

template <class T>
bool check_all(const char* name) {
  const std::vector<std::pair<int32_t, int32_t>> lens = {{1, 300}, {40, 70}, {0, 5}, {1, 1}, {3, 3}, {0, 0}, {1, 63}, {7, 130}};
  const Options cases[] = {{2, 3, 64, 16, 0, 0.0f, false},
                           {1, 8, 128, 4, 0, 0.0f, true},
                           {2, 1, 80, 64, 9, 0.0f, false},
                           {1, 7, 16, 3, 100, 5.0f, true},
                           {1, 5, 24, 128, 1, 0.0f, false}};
  bool good = true;
  for (const Options& o : cases) {
    const double error = std::max(check<T, ThreadPool>(o, lens, 1), check<T, LatePool>(o, lens, 2));
    std::printf("%s K=%d G=%d D=%d page=%d: error %.2e\n", name, int(o.K), int(o.G), int(o.D), int(o.page), error);
    good = good && error < 1e-4;
  }
  return good;
}

bool check_functions() {
  double worst_exp = 0, worst_tanh = 0;
  for (float x = -87.0f; x < 20.0f; x += 0.00037f) {
    worst_exp = std::max(worst_exp, std::fabs(jaxkv::exp(splat(x))[0] / std::exp(double(x)) - 1));
    worst_tanh = std::max(worst_tanh, std::fabs(jaxkv::tanh(splat(x))[0] - std::tanh(double(x))));
  }
  std::printf("exp: relative error %.2e, tanh: error %.2e\n", worst_exp, worst_tanh);
  const float inf = INFINITY;
  return worst_exp < 1e-6 && worst_tanh < 3e-7 && jaxkv::exp(splat(0.0f))[0] == 1.0f && jaxkv::exp(splat(-inf))[0] == 0.0f &&
         std::isnan(jaxkv::exp(splat(NAN))[0]) && jaxkv::tanh(splat(inf))[0] == 1.0f;
}

}  // namespace

int main() {
  const bool functions = check_functions(), floats = check_all<float>("float32");
  const bool halves = check_all<BFloat16>("bfloat16"), bytes = check_all<int8_t>("int8");
  return functions && floats && halves && bytes ? 0 : 1;
}
