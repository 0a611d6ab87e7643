// The FFI entry of the matmul with float weights on CPU. Contract: api.py beside this file; what is checked here are the
// shapes.
#include "../native/ffi_rows.h"
#include "../native/weights.h"

namespace ffi = xla::ffi;

namespace {

using namespace jaxkv;

struct Shape {
  int64_t T, in, out;
};

template <class T, class To>
void multiply_to(const Shape& shape, ffi::ThreadPool& pool, const T* x, const T* weights, bool packed, To* out) {
  static thread_local Scratch scratch;
  const FloatWeights<T> matrices[] = {{weights, packed}};
  const int64_t stride = shape.out;
  FloatWeights<T>::multiply_rows(pool, x, shape.T, shape.in, shape.out, matrices, scratch,
                                 [=](int64_t t, int64_t column, int64_t count, const Floats (&sums)[1]) {
                                   store_floats(sums[0], count, out + t * stride + column);
                                 });
}

template <class T>
ffi::Error multiply_as(const Shape& shape, ffi::ThreadPool& pool, const void* x, const void* weights, int64_t layer,
                       bool packed, ffi::AnyBuffer& out) {
  const auto* from = static_cast<const T*>(x);
  const auto* matrix = static_cast<const T*>(weights) + layer * shape.out * shape.in;
  switch (out.element_type()) {
    case ffi::F32:
      multiply_to(shape, pool, from, matrix, packed, static_cast<float*>(out.untyped_data()));
      return ffi::Error::Success();
    case ffi::BF16:
      multiply_to(shape, pool, from, matrix, packed, static_cast<BFloat16*>(out.untyped_data()));
      return ffi::Error::Success();
    default:
      return ffi::Error::InvalidArgument("results must be float32 or bfloat16");
  }
}

ffi::Error dense_matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weights, ffi::BufferR0<ffi::S32> layer,
                        ffi::BufferR0<ffi::S32> rows, ffi::Result<ffi::AnyBuffer> out, bool packed) {
  const auto x_dims = x.dimensions(), dims = weights.dimensions(), out_dims = out->dimensions();
  if (x_dims.size() != 2 || dims.size() != 3 || x_dims[1] != dims[2] || dims[0] == 0 || out_dims.size() != 2 ||
      out_dims[0] != x_dims[0] || out_dims[1] != dims[1]) {
    return ffi::Error::InvalidArgument("matmul wants x [T, in], weights [L, out, in] and a result [T, out]");
  }
  if (x.element_type() != weights.element_type()) return ffi::Error::InvalidArgument("x must have the type of the weights");
  const Shape shape{clear_other_rows(*rows.typed_data(), x_dims[0], *out), dims[2], dims[1]};
  const int64_t at = std::clamp<int64_t>(*layer.typed_data(), 0, dims[0] - 1);
  switch (x.element_type()) {
    case ffi::F32:
      return multiply_as<float>(shape, pool, x.untyped_data(), weights.untyped_data(), at, packed, *out);
    case ffi::BF16:
      if (shape.in % 2) return ffi::Error::InvalidArgument("bfloat16 rows must hold an even number of elements");
      return multiply_as<BFloat16>(shape, pool, x.untyped_data(), weights.untyped_data(), at, packed, *out);
    default:
      return ffi::Error::InvalidArgument("activations must be float32 or bfloat16");
  }
}

}  // namespace

// All other symbols of the library are hidden.
extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* jaxkv_dense_matmul(XLA_FFI_CallFrame*);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_dense_matmul, dense_matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()           // x
                                  .Arg<ffi::AnyBuffer>()           // weights
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // layer
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // rows
                                  .Ret<ffi::AnyBuffer>()           // result
                                  .Attr<bool>("packed"));
