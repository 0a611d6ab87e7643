// One step of many dot products: each 32-bit lane multiplies what it packs of two operands and adds it to its accumulator.
// The instructions that do this at once are the only intrinsics of this project: compilers do not find them in vector
// code. Other CPUs run the plain forms.
#pragma once

#include "elements.h"

#if defined(__AVX512VNNI__) || defined(__AVX512BF16__) || defined(__AVXVNNI__)
#include <immintrin.h>
#endif

namespace jaxkv {

// Four products of unsigned by signed bytes.
inline Ints dot_bytes(Ints sum, Words unsigned_bytes, Words signed_bytes) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)unsigned_bytes, (__m512i)signed_bytes);
#elif defined(__AVXVNNI__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)unsigned_bytes, (__m256i)signed_bytes);
#else
  typedef int16_t Shorts __attribute__((vector_size(4 * kLanes)));
  // A product of a byte by a signed byte fits into 16 bits, a sum of two does not.
  const Ints even = (Ints)((Shorts)(unsigned_bytes & 0x00ff00ffu) * ((Shorts)(signed_bytes << 8 & 0xff00ff00u) >> 8));
  const Ints odd = (Ints)((Shorts)(unsigned_bytes >> 8 & 0x00ff00ffu) * ((Shorts)signed_bytes >> 8));
  return sum + ((Ints)((Words)even << 16) >> 16) + (even >> 16) + ((Ints)((Words)odd << 16) >> 16) + (odd >> 16);
#endif
}

// Two products of bfloat16 pairs, in float32.
inline Floats dot_pairs(Floats sum, Words a, Words b) {
#if defined(__AVX512BF16__)
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  sum += (Floats)(a << 16) * (Floats)(b << 16);
  return sum + (Floats)(a & 0xffff0000u) * (Floats)(b & 0xffff0000u);
#endif
}

}  // namespace jaxkv
