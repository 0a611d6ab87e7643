// The FFI entry that packs weights where they lie. Contract: weight.py beside this file.
#include "../native/matmul.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using namespace jaxkv;

template <class Product>
void pack_all(ffi::ThreadPool& pool, int64_t layers, int64_t out, int64_t row_bytes, char* weights) {
  Matmul call{};
  call.out = out, call.row_bytes = row_bytes, call.words = row_bytes / 4;
  const int64_t panels = out / kPanel;
  parallel_for(pool, layers * panels, [&](int64_t item) {
    static thread_local Scratch scratch;
    auto* panel = reinterpret_cast<uint32_t*>(scratch.floats(call.words * kPanel));
    char* layer = weights + item / panels * out * row_bytes;
    const int64_t first = item % panels * kPanel;
    pack_panel<Product>(call, layer, first, true, panel);
    std::memcpy(layer + first * row_bytes, panel, static_cast<size_t>(kPanel * row_bytes));
  });
}

ffi::Error pack_weight(ffi::ThreadPool pool, ffi::AnyBuffer weights, ffi::Result<ffi::AnyBuffer> packed) {
  const auto dims = weights.dimensions();
  if (dims.size() != 3) return ffi::Error::InvalidArgument("a weight to pack is [L, out, in]");
  if (packed->untyped_data() != weights.untyped_data())
    return ffi::Error::Internal("weights must be packed in place, but XLA gave the result its own memory");
  auto* bytes = static_cast<char*>(packed->untyped_data());
  switch (weights.element_type()) {
    case ffi::F32:
      pack_all<Float32Words>(pool, dims[0], dims[1], 4 * dims[2], bytes);
      return ffi::Error::Success();
    case ffi::BF16:
      if (dims[2] % 2) break;
      pack_all<BFloat16Words>(pool, dims[0], dims[1], 2 * dims[2], bytes);
      return ffi::Error::Success();
    case ffi::S8:
      if (dims[2] % 4) break;
      pack_all<Int8Words>(pool, dims[0], dims[1], dims[2], bytes);
      return ffi::Error::Success();
    default:
      return ffi::Error::InvalidArgument("weights must be float32, bfloat16 or int8");
  }
  return ffi::Error::InvalidArgument("the rows of a weight to pack must be whole words of 4 bytes");
}

}  // namespace

// All other symbols of the library are hidden.
extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* jaxkv_pack_weight(XLA_FFI_CallFrame*);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkv_pack_weight, pack_weight,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()    // weights
                                  .Ret<ffi::AnyBuffer>());  // packed weights
