// y = x W' + b for a few rows of x, as an operator of torch.

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include <optional>
#include <vector>

#include "linear.h"

namespace draftsmith {
namespace {

// beyond, torch's own product is faster, that of bfloat16 sooner where there are no instructions for it here
constexpr int64_t kMostRows = 32, kMostUnpairedRows = 16;

template <class T>
void run(const Weight& weight, const at::Tensor& x, int64_t num_rows, at::Tensor& y) {
  const T* rows = static_cast<const T*>(x.const_data_ptr());
  T* results = static_cast<T*>(y.mutable_data_ptr());
  thread_local Buffer memory;
  float* ordered = memory.get(num_rows * weight.in);
  const Weight::Form form = weight.form(std::is_same_v<T, uint16_t>);
  reorder_for(form, rows, num_rows * weight.in, ordered);
#pragma omp parallel
  multiply(weight, form, ordered, num_rows, [&](int64_t row, int64_t output, const float* values, int64_t num) {
    for (int64_t b = 0; b < num; b++) narrow(values[b], results + row * weight.out + output + b);
  });
}

// x (.. in) is float or bfloat16, and so is the result; weight (out in) float, bfloat16 or int8, the latter times
// `scale` (out, float).
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& scale,
                  const std::optional<at::Tensor>& bias) {
  const Weight read(weight, scale ? &*scale : nullptr);
  const int64_t num_rows = read.in ? x.numel() / read.in : 0;
  const at::ScalarType type = x.scalar_type();
  const bool fits = read.in % (kLanes * read.parts()) == 0 && weight.is_contiguous() &&
                    (type == at::kFloat || type == at::kBFloat16);
  const bool is_slow = type == at::kBFloat16 && !Pairs::kAreFast;
  if (!fits || num_rows > (is_slow ? kMostUnpairedRows : kMostRows)) {
    at::Tensor plain = weight.to(type);
    if (scale) plain.mul_(scale->unsqueeze(1));
    return at::linear(x, plain, bias);
  }
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = read.out;
  at::Tensor y = at::empty(shape, x.options());
  if (type == at::kFloat) run<float>(read, x.contiguous(), num_rows, y);
  else run<uint16_t>(read, x.contiguous(), num_rows, y);
  if (bias) y.add_(*bias);
  return y;
}

}  // namespace
}  // namespace draftsmith

TORCH_LIBRARY_FRAGMENT(draftsmith, library) {
  library.def("linear(Tensor x, Tensor weight, Tensor? scale, Tensor? bias) -> Tensor");
  library.def("has_pairs() -> bool", [] { return draftsmith::Pairs::kAreFast; });
}

TORCH_LIBRARY_IMPL(draftsmith, CPU, library) { library.impl("linear", draftsmith::linear); }
