// The FFI entry of the int8 matmul on CPU. Contract: api.py beside this file; what is checked here are the shapes.
#include "../native/ffi_rows.h"
#include "../native/weights.h"

namespace ffi = xla::ffi;

namespace {

using namespace jaxkv;

struct Shape {
  int64_t T, in, out;
};

template <class From, class To>
void multiply_as(const Shape& shape, ffi::ThreadPool& pool, const From* x, const int8_t* weights, const float* scales, bool rotated,
                 bool packed, To* out) {
  static thread_local Scratch scratch;
  const Int8Weights<From> matrices[] = {{weights, scales, rotated, packed}};
  const int64_t stride = shape.out;
  Int8Weights<From>::multiply_rows(pool, x, shape.T, shape.in, shape.out, matrices, scratch,
                                   [=](int64_t t, int64_t column, int64_t count, const Floats (&sums)[1]) {
                                     store_floats(sums[0], count, out + t * stride + column);
                                   });
}

template <class From>
ffi::Error multiply_from(const Shape& shape, ffi::ThreadPool& pool, const void* x, const int8_t* weights, const float* scales,
                         bool rotated, bool packed, ffi::AnyBuffer& out) {
  const auto* from = static_cast<const From*>(x);
  switch (out.element_type()) {
    case ffi::F32:
      multiply_as(shape, pool, from, weights, scales, rotated, packed, static_cast<float*>(out.untyped_data()));
      return ffi::Error::Success();
    case ffi::BF16:
      multiply_as(shape, pool, from, weights, scales, rotated, packed, static_cast<BFloat16*>(out.untyped_data()));
      return ffi::Error::Success();
    default:
      return ffi::Error::InvalidArgument("results must be float32 or bfloat16");
  }
}

ffi::Error int8_matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::S8> weights, ffi::Buffer<ffi::F32> scales,
                       ffi::BufferR0<ffi::S32> layer, ffi::BufferR0<ffi::S32> rows, ffi::Result<ffi::AnyBuffer> out, bool rotated,
                       bool packed) {
  const auto x_dims = x.dimensions(), dims = weights.dimensions(), out_dims = out->dimensions();
  if (x_dims.size() != 2 || dims.size() != 3 || x_dims[1] != dims[2] || dims[0] == 0 || out_dims.size() != 2 ||
      out_dims[0] != x_dims[0] || out_dims[1] != dims[1]) {
    return ffi::Error::InvalidArgument("int8 matmul wants x [T, in], weights [L, out, in] and a result [T, out]");
  }
  if (scales.element_count() != static_cast<size_t>(dims[0] * dims[1])) {
    return ffi::Error::InvalidArgument("the scales of int8 weights are [L, out]");
  }
  const Shape shape{clear_other_rows(*rows.typed_data(), x_dims[0], *out), dims[2], dims[1]};
  const int64_t at = std::clamp<int64_t>(*layer.typed_data(), 0, dims[0] - 1);
  const int8_t* values = weights.typed_data() + at * shape.out * shape.in;
  const float* layer_scales = scales.typed_data() + at * shape.out;
  switch (x.element_type()) {
    case ffi::F32:
      return multiply_from<float>(shape, pool, x.untyped_data(), values, layer_scales, rotated, packed, *out);
    case ffi::BF16:
      return multiply_from<BFloat16>(shape, pool, x.untyped_data(), values, layer_scales, rotated, packed, *out);
    default:
      return ffi::Error::InvalidArgument("activations must be float32 or bfloat16");
  }
}

}  // namespace

// All other symbols of the library are hidden.
extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* jaxkv_int8_matmul(XLA_FFI_CallFrame*);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_int8_matmul, int8_matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()           // x
                                  .Arg<ffi::Buffer<ffi::S8>>()     // weights
                                  .Arg<ffi::Buffer<ffi::F32>>()    // scales
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // layer
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // rows
                                  .Ret<ffi::AnyBuffer>()           // result
                                  .Attr<bool>("rotated")
                                  .Attr<bool>("packed"));
