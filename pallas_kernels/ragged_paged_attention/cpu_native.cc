// The FFI entry of ragged paged attention on CPU. Contract: api.py beside this file; what is checked here are the
// shapes.
#include "cpu_native_schedule.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using jaxkv::ActivationType;
using jaxkv::AttentionCall;
using jaxkv::AttentionShape;
using jaxkv::PoolType;
using Ints = ffi::Buffer<ffi::S32>;

ffi::Error attend(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer pages, ffi::Buffer<ffi::F32> scales,
                  ffi::BufferR0<ffi::S32> layer, Ints page_table, Ints cu_q_lens, Ints kv_lens, ffi::BufferR0<ffi::S32> num_seqs,
                  ffi::Buffer<ffi::F32> sinks, ffi::Result<ffi::AnyBuffer> out, float scale, int64_t window, float soft_cap) {
  const auto q_dims = q.dimensions(), pages_dims = pages.dimensions(), table_dims = page_table.dimensions();
  if (q_dims.size() != 3 || pages_dims.size() != 6 || table_dims.size() != 2 || pages_dims[2] != 2) {
    return ffi::Error::InvalidArgument("attention wants q [T, H, D], pages [L, P, 2, K, page, D] and page_table [S, W]");
  }
  const int64_t layers = pages_dims[0], heads = q_dims[1];
  AttentionShape shape{};
  shape.T = q_dims[0], shape.S = table_dims[0], shape.W = table_dims[1];
  shape.P = pages_dims[1], shape.K = pages_dims[3], shape.page_size = pages_dims[4], shape.D = pages_dims[5];
  if (shape.K == 0 || heads % shape.K || q_dims[2] != shape.D || shape.P == 0 || shape.page_size == 0) {
    return ffi::Error::InvalidArgument("q's heads and head dim do not fit the pages");
  }
  shape.G = heads / shape.K;
  if (cu_q_lens.element_count() != static_cast<size_t>(shape.S + 1) || kv_lens.element_count() != static_cast<size_t>(shape.S)) {
    return ffi::Error::InvalidArgument("cu_q_lens and kv_lens do not fit page_table");
  }

  AttentionCall call{};
  call.shape = shape;
  if (out->element_type() != q.element_type()) return ffi::Error::InvalidArgument("the output has not q's type");
  switch (q.element_type()) {
    case ffi::F32:
      call.activations = ActivationType::kFloat32;
      break;
    case ffi::BF16:
      call.activations = ActivationType::kBFloat16;
      break;
    default:
      return ffi::Error::InvalidArgument("queries must be float32 or bfloat16");
  }
  PoolType type;
  int64_t itemsize;
  switch (pages.element_type()) {
    case ffi::F32:
      type = PoolType::kFloat32, itemsize = 4;
      break;
    case ffi::BF16:
      type = PoolType::kBFloat16, itemsize = 2;
      break;
    case ffi::S8:
      type = PoolType::kInt8, itemsize = 1;
      break;
    default:
      return ffi::Error::InvalidArgument("pages must be float32, bfloat16 or int8");
  }
  const int64_t rows_of_layer = shape.P * 2 * shape.K * shape.page_size;
  const int64_t at = std::clamp<int64_t>(*layer.typed_data(), 0, layers - 1) * rows_of_layer;
  if (type == PoolType::kInt8 && scales.element_count() > 0) {
    if (scales.element_count() != static_cast<size_t>(layers * rows_of_layer)) {
      return ffi::Error::InvalidArgument("the scales of an int8 pool are [L, P, 2, K, page], or empty");
    }
    call.scales = scales.typed_data() + at;
  }
  if (sinks.element_count() > 0) {
    if (sinks.element_count() != static_cast<size_t>(heads)) return ffi::Error::InvalidArgument("sinks are one per query head");
    call.sinks = sinks.typed_data();
  }
  call.q = q.untyped_data();
  call.out = out->untyped_data();
  call.pages = static_cast<const char*>(pages.untyped_data()) + at * shape.D * itemsize;
  call.page_table = page_table.typed_data();
  call.cu_q_lens = cu_q_lens.typed_data();
  call.kv_lens = kv_lens.typed_data();
  call.num_seqs = *num_seqs.typed_data();
  call.scale = scale;
  call.window = window;
  call.soft_cap = soft_cap;
  jaxkv::attend(type, call, pool);
  return ffi::Error::Success();
}

}  // namespace

// All other symbols of the library are hidden.
extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* jaxkv_ragged_paged_attention(XLA_FFI_CallFrame*);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_ragged_paged_attention, attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()           // q
                                  .Arg<ffi::AnyBuffer>()           // pages
                                  .Arg<ffi::Buffer<ffi::F32>>()    // scales, or empty
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // layer
                                  .Arg<Ints>()                     // page_table
                                  .Arg<Ints>()                     // cu_q_lens
                                  .Arg<Ints>()                     // kv_lens
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // num_seqs
                                  .Arg<ffi::Buffer<ffi::F32>>()    // sinks, or empty
                                  .Ret<ffi::AnyBuffer>()           // out
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("soft_cap"));
