// Memory that a thread keeps between calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace jaxkv {

// Aligned scratch memory that a thread keeps between calls.
class Scratch {
 public:
  // `count` floats whose first is at the start of a cache line. Valid until the next call on this object.
  float* floats(int64_t count) {
    const size_t wanted = static_cast<size_t>(count) + kLine;
    if (memory_.size() < wanted) memory_.resize(wanted);
    void* start = memory_.data();
    size_t space = memory_.size() * sizeof(float);
    return static_cast<float*>(std::align(kLine * sizeof(float), static_cast<size_t>(count) * sizeof(float), start, space));
  }

 private:
  static constexpr size_t kLine = 16;
  std::vector<float> memory_;
};

}  // namespace jaxkv
