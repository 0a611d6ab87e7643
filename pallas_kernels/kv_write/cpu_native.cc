// The FFI entries of KV write on CPU: the pages (and scales) of the result are the arguments' own memory.
#include "cpu_native_write.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using jaxkv::WriteCall;
using Ids = ffi::BufferR1<ffi::S32>;

template <class From>
ffi::Error write_from(const WriteCall& call, ffi::DataType type, int64_t at, const void* keys, const void* values) {
  const auto* from_keys = static_cast<const From*>(keys);
  const auto* from_values = static_cast<const From*>(values);
  WriteCall layer = call;
  switch (type) {
    case ffi::F32:
      layer.pages = static_cast<float*>(call.pages) + at * call.D;
      jaxkv::write_kv<From, float>(layer, from_keys, from_values);
      return ffi::Error::Success();
    case ffi::BF16:
      layer.pages = static_cast<jaxkv::BFloat16*>(call.pages) + at * call.D;
      jaxkv::write_kv<From, jaxkv::BFloat16>(layer, from_keys, from_values);
      return ffi::Error::Success();
    case ffi::S8:
      if (call.scales == nullptr) return ffi::Error::InvalidArgument("an int8 pool wants scales");
      layer.pages = static_cast<int8_t*>(call.pages) + at * call.D;
      layer.scales = call.scales + at;
      jaxkv::write_kv<From, int8_t>(layer, from_keys, from_values);
      return ffi::Error::Success();
    default:
      return ffi::Error::InvalidArgument("pages must be float32, bfloat16 or int8");
  }
}

ffi::Error write(ffi::AnyBuffer pages, float* scales, ffi::BufferR0<ffi::S32> layer, ffi::AnyBuffer keys, ffi::AnyBuffer values,
                 Ids page_ids, Ids offsets, void* pages_out) {
  const auto dims = pages.dimensions(), key_dims = keys.dimensions();
  if (dims.size() != 6 || dims[2] != 2 || key_dims.size() != 3 || key_dims[1] != dims[3] || key_dims[2] != dims[5] ||
      dims[0] == 0) {
    return ffi::Error::InvalidArgument("KV write wants pages [L, P, 2, K, page, D] and keys [T, K, D]");
  }
  const auto tokens = static_cast<size_t>(key_dims[0]);
  if (values.element_count() != keys.element_count() || values.element_type() != keys.element_type() ||
      page_ids.element_count() != tokens || offsets.element_count() != tokens) {
    return ffi::Error::InvalidArgument("keys, values, page ids and offsets do not fit together");
  }
  if (pages_out != pages.untyped_data())
    return ffi::Error::Internal("KV write must be in place, but XLA gave the result its own memory");
  WriteCall call{};
  call.T = key_dims[0], call.K = dims[3], call.D = dims[5], call.P = dims[1], call.page_size = dims[4];
  call.pages = pages_out;
  call.scales = scales;
  call.page_ids = page_ids.typed_data();
  call.offsets = offsets.typed_data();
  const int64_t at = std::clamp<int64_t>(*layer.typed_data(), 0, dims[0] - 1) * call.P * 2 * call.K * call.page_size;
  switch (keys.element_type()) {
    case ffi::F32:
      return write_from<float>(call, pages.element_type(), at, keys.untyped_data(), values.untyped_data());
    case ffi::BF16:
      return write_from<jaxkv::BFloat16>(call, pages.element_type(), at, keys.untyped_data(), values.untyped_data());
    default:
      return ffi::Error::InvalidArgument("keys and values must be float32 or bfloat16");
  }
}

ffi::Error write_plain(ffi::AnyBuffer pages, ffi::BufferR0<ffi::S32> layer, ffi::AnyBuffer keys, ffi::AnyBuffer values,
                       Ids page_ids, Ids offsets, ffi::Result<ffi::AnyBuffer> pages_out) {
  return write(pages, nullptr, layer, keys, values, page_ids, offsets, pages_out->untyped_data());
}

ffi::Error write_scaled(ffi::AnyBuffer pages, ffi::Buffer<ffi::F32> scales, ffi::BufferR0<ffi::S32> layer, ffi::AnyBuffer keys,
                        ffi::AnyBuffer values, Ids page_ids, Ids offsets, ffi::Result<ffi::AnyBuffer> pages_out,
                        ffi::Result<ffi::Buffer<ffi::F32>> scales_out) {
  const auto dims = pages.dimensions();
  if (dims.size() != 6 || scales.element_count() * static_cast<size_t>(dims[5]) != pages.element_count()) {
    return ffi::Error::InvalidArgument("scales must be [L, P, 2, K, page]");
  }
  if (scales_out->typed_data() != scales.typed_data())
    return ffi::Error::Internal("KV write must be in place, but XLA gave the scales their own memory");
  return write(pages, scales_out->typed_data(), layer, keys, values, page_ids, offsets, pages_out->untyped_data());
}

}  // namespace

// All other symbols of the library are hidden.
extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* jaxkv_kv_write(XLA_FFI_CallFrame*);
extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* jaxkv_kv_write_scaled(XLA_FFI_CallFrame*);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_kv_write, write_plain,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()           // pages
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // layer
                                  .Arg<ffi::AnyBuffer>()           // keys
                                  .Arg<ffi::AnyBuffer>()           // values
                                  .Arg<Ids>()                      // page ids
                                  .Arg<Ids>()                      // offsets
                                  .Ret<ffi::AnyBuffer>());         // pages

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_kv_write_scaled, write_scaled,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()           // pages
                                  .Arg<ffi::Buffer<ffi::F32>>()    // scales
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // layer
                                  .Arg<ffi::AnyBuffer>()           // keys
                                  .Arg<ffi::AnyBuffer>()           // values
                                  .Arg<Ids>()                      // page ids
                                  .Arg<Ids>()                      // offsets
                                  .Ret<ffi::AnyBuffer>()           // pages
                                  .Ret<ffi::Buffer<ffi::F32>>());  // scales
