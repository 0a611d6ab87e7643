// A parallel loop over XLA's thread pool that cannot deadlock on it.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

namespace jaxkv {

namespace internal {

// What the threads of one loop share. Helpers that start late hold it after the loop has returned: they find no item
// left.
struct Loop {
  Loop(int64_t items, void (*run)(void*, int64_t), void* work) : items(items), run(run), work(work) {}

  const int64_t items;
  void (*const run)(void*, int64_t);
  void* const work;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  std::mutex mutex;
  std::condition_variable all_done;

  void take_part() {
    int64_t mine = 0;
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items; ++mine) run(work, item);
    if (mine == 0) return;
    if (done.fetch_add(mine, std::memory_order_acq_rel) + mine == items) {
      const std::lock_guard<std::mutex> lock(mutex);
      all_done.notify_all();
    }
  }

  void wait() {
    constexpr int kSpins = 2000;  // a few microseconds: about one item
    for (int spin = 0; spin < kSpins; ++spin) {
      if (done.load(std::memory_order_acquire) == items) return;
    }
    std::unique_lock<std::mutex> lock(mutex);
    all_done.wait(lock, [this] { return done.load(std::memory_order_acquire) == items; });
  }
};

}  // namespace internal

// Calls work(item) for each item of [0, items) and returns when all are done. The calling thread works too and waits
// only for items that a running thread has taken, so that it ends even if the pool never runs a helper. Pool:
// `NumThreads()` and `Schedule(callable)`, as xla::ffi::ThreadPool has them.
template <class Pool, class Work>
void parallel_for(Pool& pool, int64_t items, Work&& work) {
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), items) - 1;
  if (helpers <= 0) {
    for (int64_t item = 0; item < items; ++item) work(item);
    return;
  }
  auto run = [](void* work, int64_t item) { (*static_cast<std::remove_reference_t<Work>*>(work))(item); };
  auto loop = std::make_shared<internal::Loop>(items, run, &work);
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([loop] { loop->take_part(); });
  loop->take_part();
  loop->wait();
}

}  // namespace jaxkv
