// Results of which only the first rows are wanted: a step's padding costs nothing.
#pragma once

#include <algorithm>
#include <cstring>

#include "xla/ffi/api/ffi.h"

namespace jaxkv {

// Zeroes the rows of `out` [T, ...] from `wanted` on, and returns how many are left.
inline int64_t clear_other_rows(int64_t wanted, int64_t T, xla::ffi::AnyBuffer& out) {
  const int64_t rows = std::clamp<int64_t>(wanted, 0, T);
  if (rows == T) return T;
  const size_t row_bytes = out.size_bytes() / static_cast<size_t>(T);
  std::memset(static_cast<char*>(out.untyped_data()) + static_cast<size_t>(rows) * row_bytes, 0,
              static_cast<size_t>(T - rows) * row_bytes);
  return rows;
}

}  // namespace jaxkv
