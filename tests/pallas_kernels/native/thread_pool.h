// A pool for the checks, in the place of XLA's.
#pragma once

#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

struct ThreadPool {  // helpers run at once, on threads of their own
  std::vector<std::thread> threads;
  int64_t num_threads() const { return 4; }
  template <class F>
  void Schedule(F&& task) {
    threads.emplace_back(std::forward<F>(task));
  }
  ~ThreadPool() {
    for (std::thread& thread : threads) thread.join();
  }
};
