// y = x W' + b as operators of torch: for a few rows of x, or of a packed weight.

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include <optional>
#include <vector>

#include "linear.h"

namespace draftsmith {
namespace {

// beyond, torch's own product is faster, that of bfloat16 sooner
constexpr int64_t kMostRows = 32, kMostNarrowRows = 16;

template <class T>
void run(const Weight& weight, const at::Tensor& x, int64_t num_rows, at::Tensor& y) {
  const T* rows = static_cast<const T*>(x.const_data_ptr());
  T* results = static_cast<T*>(y.mutable_data_ptr());
  thread_local Buffer memory;
  const void* ordered = rows;
  if (!weight.is_packed) {
    reorder_for<T>(weight, rows, num_rows * weight.in, memory.get(num_rows * weight.in));
    ordered = memory.get(0);
  }
#pragma omp parallel
  multiply<T>(weight, ordered, num_rows, [&](int64_t row, int64_t output, const float* values, int64_t num) {
    for (int64_t b = 0; b < num; b++) narrow(values[b], results + row * weight.out + output + b);
  });
}

at::Tensor product(const Weight& weight, const at::Tensor& x, const std::optional<at::Tensor>& bias) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = weight.out;
  at::Tensor y = at::empty(shape, x.options());
  const int64_t num_rows = x.numel() / weight.in;
  if (x.scalar_type() == at::kFloat) run<float>(weight, x.contiguous(), num_rows, y);
  else run<uint16_t>(weight, x.contiguous(), num_rows, y);
  if (bias) y.add_(*bias);
  return y;
}

// x (.. in) is float or bfloat16, and so is the result; weight (out in) float, or int8 times `scale` (out, float).
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& scale,
                  const std::optional<at::Tensor>& bias) {
  const Weight read(weight, scale ? &*scale : nullptr);
  const int64_t num_rows = read.in ? x.numel() / read.in : 0;
  const at::ScalarType type = x.scalar_type();
  const bool fits = read.in % (kLanes * read.parts()) == 0 && weight.is_contiguous() && read.kind != at::kBFloat16 &&
                    (type == at::kFloat || type == at::kBFloat16);
  if (!fits || num_rows > (type == at::kBFloat16 ? kMostNarrowRows : kMostRows)) {
    at::Tensor plain = weight.to(type);
    if (scale) plain.mul_(scale->unsqueeze(1));
    return at::linear(x, plain, bias);
  }
  return product(read, x, bias);
}

// x (.. in) is float or bfloat16, and so is the result; the weight is packed, of `out` outputs.
at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& weight, int64_t out,
                         const std::optional<at::Tensor>& bias) {
  Weight read(weight, nullptr);
  const bool is_known = x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16;
  TORCH_CHECK(read.is_packed && x.size(-1) == read.in && is_known, "a packed weight of ", read.in,
              " inputs takes as many numbers of float32 or bfloat16, not ", x.sizes(), " of ", x.dtype());
  read.out = out;
  return product(read, x, bias);
}

}  // namespace
}  // namespace draftsmith

TORCH_LIBRARY_FRAGMENT(draftsmith, library) {
  library.def("linear(Tensor x, Tensor weight, Tensor? scale, Tensor? bias) -> Tensor");
  library.def("packed_linear(Tensor x, Tensor weight, int out, Tensor? bias) -> Tensor");
  library.def("lanes() -> int", [] { return static_cast<int64_t>(draftsmith::kLanes); });
  library.def("has_pairs() -> bool", [] { return draftsmith::Pairs::kAreFast; });
}

TORCH_LIBRARY_IMPL(draftsmith, CPU, library) {
  library.impl("linear", draftsmith::linear);
  library.impl("packed_linear", draftsmith::packed_linear);
}
