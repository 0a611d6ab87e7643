// The FFI entries of the gated MLP on CPU. Contract: api.py beside this file; what is checked here are the shapes.
#include "../native/ffi_rows.h"
#include "../native/gated_mlp.h"

namespace ffi = xla::ffi;

namespace {

using namespace jaxkv;
using Scales = ffi::Buffer<ffi::F32>;

struct Shape {
  int64_t T, E, F, layer;
};

// null if all is well, else what is wrong.
const char* read_shape(const ffi::AnyBuffer& x, const ffi::AnyBuffer& gate_up, const ffi::AnyBuffer& down,
                       const ffi::BufferR0<ffi::S32>& layer, const ffi::BufferR0<ffi::S32>& rows, ffi::AnyBuffer& out,
                       Shape& shape) {
  const auto x_dims = x.dimensions(), dims = gate_up.dimensions(), down_dims = down.dimensions();
  if (x_dims.size() != 2 || dims.size() != 4 || down_dims.size() != 3 || dims[1] != 2 || dims[0] == 0 || dims[0] != down_dims[0] ||
      dims[2] != down_dims[2] || dims[3] != x_dims[1] || down_dims[1] != x_dims[1]) {
    return "a gated MLP wants x [T, E], gate_up [L, 2, F, E] and down [L, E, F]";
  }
  if (out.element_type() != x.element_type() || out.element_count() != x.element_count()) return "the result must be like x";
  if (gate_up.element_type() != down.element_type()) return "gate_up and down must have one type";
  const int64_t at = std::clamp<int64_t>(*layer.typed_data(), 0, dims[0] - 1);
  shape = {clear_other_rows(*rows.typed_data(), x_dims[0], out), x_dims[1], dims[2], at};
  return nullptr;
}

template <class T>
void run_dense(const Shape& shape, ffi::ThreadPool& pool, const void* x, const void* gate_up, const void* down, bool packed,
               void* out) {
  const int64_t matrix = shape.E * shape.F;
  const T* gate = static_cast<const T*>(gate_up) + 2 * shape.layer * matrix;
  const T* last = static_cast<const T*>(down) + shape.layer * matrix;
  const GatedMlp<FloatWeights<T>> mlp{shape.T, shape.E, shape.F, static_cast<const T*>(x), {gate, packed}, {gate + matrix, packed}, {last, packed}};
  mlp.run(pool, static_cast<T*>(out));
}

ffi::Error dense(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer gate_up, ffi::AnyBuffer down, ffi::BufferR0<ffi::S32> layer,
                 ffi::BufferR0<ffi::S32> rows, ffi::Result<ffi::AnyBuffer> out, bool packed) {
  Shape shape;
  if (const char* wrong = read_shape(x, gate_up, down, layer, rows, *out, shape)) return ffi::Error::InvalidArgument(wrong);
  if (x.element_type() != gate_up.element_type()) return ffi::Error::InvalidArgument("x must have the type of the weights");
  switch (x.element_type()) {
    case ffi::F32:
      run_dense<float>(shape, pool, x.untyped_data(), gate_up.untyped_data(), down.untyped_data(), packed, out->untyped_data());
      return ffi::Error::Success();
    case ffi::BF16:
      if (shape.E % 2 || shape.F % 2) return ffi::Error::InvalidArgument("bfloat16 rows must hold an even number of elements");
      run_dense<BFloat16>(shape, pool, x.untyped_data(), gate_up.untyped_data(), down.untyped_data(), packed, out->untyped_data());
      return ffi::Error::Success();
    default:
      return ffi::Error::InvalidArgument("activations must be float32 or bfloat16");
  }
}

template <class T>
void run_int8(const Shape& shape, ffi::ThreadPool& pool, const void* x, const int8_t* gate_up, const float* gate_up_scales,
              const int8_t* down, const float* down_scales, bool rotated, bool packed, void* out) {
  const int64_t matrix = shape.E * shape.F;
  const int8_t* gate = gate_up + 2 * shape.layer * matrix;
  const float* gate_scales = gate_up_scales + 2 * shape.layer * shape.F;
  const GatedMlp<Int8Weights<T>> mlp{shape.T,
                                     shape.E,
                                     shape.F,
                                     static_cast<const T*>(x),
                                     {gate, gate_scales, rotated, packed},
                                     {gate + matrix, gate_scales + shape.F, rotated, packed},
                                     {down + shape.layer * matrix, down_scales + shape.layer * shape.E, rotated, packed}};
  mlp.run(pool, static_cast<T*>(out));
}

ffi::Error int8(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer gate_up, Scales gate_up_scales, ffi::AnyBuffer down,
                Scales down_scales, ffi::BufferR0<ffi::S32> layer, ffi::BufferR0<ffi::S32> rows, ffi::Result<ffi::AnyBuffer> out, bool rotated,
                bool packed) {
  Shape shape;
  if (const char* wrong = read_shape(x, gate_up, down, layer, rows, *out, shape)) return ffi::Error::InvalidArgument(wrong);
  if (gate_up.element_type() != ffi::S8) return ffi::Error::InvalidArgument("weights must be int8");
  const auto layers = gate_up.dimensions()[0];
  if (gate_up_scales.element_count() != static_cast<size_t>(layers * 2 * shape.F) ||
      down_scales.element_count() != static_cast<size_t>(layers * shape.E)) {
    return ffi::Error::InvalidArgument("the scales of int8 weights are [L, 2, F] and [L, E]");
  }
  const auto* values = static_cast<const int8_t*>(gate_up.untyped_data());
  const auto* down_values = static_cast<const int8_t*>(down.untyped_data());
  const float *scales = gate_up_scales.typed_data(), *last_scales = down_scales.typed_data();
  switch (x.element_type()) {
    case ffi::F32:
      run_int8<float>(shape, pool, x.untyped_data(), values, scales, down_values, last_scales, rotated, packed, out->untyped_data());
      return ffi::Error::Success();
    case ffi::BF16:
      run_int8<BFloat16>(shape, pool, x.untyped_data(), values, scales, down_values, last_scales, rotated, packed, out->untyped_data());
      return ffi::Error::Success();
    default:
      return ffi::Error::InvalidArgument("activations must be float32 or bfloat16");
  }
}

}  // namespace

// All other symbols of the library are hidden.
extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* jaxkv_gated_mlp(XLA_FFI_CallFrame*);
extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* jaxkv_gated_mlp_int8(XLA_FFI_CallFrame*);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_gated_mlp, dense,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()           // x
                                  .Arg<ffi::AnyBuffer>()           // gate_up
                                  .Arg<ffi::AnyBuffer>()           // down
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // layer
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // rows
                                  .Ret<ffi::AnyBuffer>()           // result
                                  .Attr<bool>("packed"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_gated_mlp_int8, int8,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()           // x
                                  .Arg<ffi::AnyBuffer>()           // gate_up
                                  .Arg<Scales>()                   // its scales
                                  .Arg<ffi::AnyBuffer>()           // down
                                  .Arg<Scales>()                   // its scales
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // layer
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // rows
                                  .Ret<ffi::AnyBuffer>()           // result
                                  .Attr<bool>("rotated")
                                  .Attr<bool>("packed"));
