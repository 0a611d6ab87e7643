// A parallel loop over XLA's thread pool that cannot deadlock on it.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

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

// Helpers that have finished a loop and wait for the next one. To wake a sleeping thread of the pool takes longer than most
// loops of a step; a thread that looks for work takes part at once.
class Lounge {
 public:
  // Shows a loop to those who wait; returns how many do.
  int64_t post(const std::shared_ptr<Loop>& loop) {
    const std::lock_guard<std::mutex> lock(mutex_);
    latest_ = loop;
    number_.fetch_add(1, std::memory_order_release);
    return waiting_.load(std::memory_order_relaxed);
  }

  // Takes part in the loop, and in those that are posted less than kPatience after the last.
  void take_part(std::shared_ptr<Loop> loop) {
    using Clock = std::chrono::steady_clock;
    constexpr auto kPatience = std::chrono::microseconds(100);
    for (;;) {
      uint64_t seen = number_.load(std::memory_order_acquire);
      loop->take_part();
      loop.reset();
      waiting_.fetch_add(1, std::memory_order_relaxed);
      for (const auto until = Clock::now() + kPatience; number_.load(std::memory_order_acquire) == seen;) {
        if (Clock::now() > until) {
          waiting_.fetch_sub(1, std::memory_order_relaxed);
          return;
        }
        std::this_thread::yield();  // to whoever else wants this core
      }
      waiting_.fetch_sub(1, std::memory_order_relaxed);
      const std::lock_guard<std::mutex> lock(mutex_);
      loop = latest_;
    }
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<Loop> latest_;
  std::atomic<uint64_t> number_{0};
  std::atomic<int64_t> waiting_{0};
};

inline Lounge& lounge() {
  static Lounge* one = new Lounge;  // never destroyed: helpers may outlive the exit of main
  return *one;
}

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
  const int64_t waiting = internal::lounge().post(loop);
  for (int64_t i = waiting; i < helpers; ++i) pool.Schedule([loop] { internal::lounge().take_part(loop); });
  loop->take_part();
  loop->wait();
}

}  // namespace jaxkv
