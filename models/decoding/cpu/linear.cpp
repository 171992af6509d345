// y = x W' + b for a few rows of x.
//
// Such a product takes as long as its weight takes to read, so the weight is read once: each block of outputs is summed
// for all rows while its weights pass by.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "lanes.h"

namespace draftsmith {
namespace {

constexpr int64_t kRows = 8;  // summed while a weight passes by
// beyond, torch's own product is faster: of floats, and of bfloat16, for which processors have instructions
constexpr int64_t kMostFloatRows = 32, kMostRows = 16;

struct Task {
  const float* x;      // rows x in, reordered
  const void* w;       // out x in
  const float* scale;  // out, or none
  void* y;             // rows x out
  int64_t in, out;
};

template <class Kind, class Y, int M, int B>
inline void block(const Task& task, int64_t first) {
  const auto* w = static_cast<const typename Kind::Element*>(task.w) + first * task.in;
  float sums[M * B];
  products<Kind, M, B>(task.x, w, task.in, B, task.in, sums, B);
  for (int m = 0; m < M; m++) {
    Y* y = static_cast<Y*>(task.y) + m * task.out + first;
    for (int b = 0; b < B; b++) narrow(task.scale ? sums[m * B + b] * task.scale[first + b] : sums[m * B + b], y + b);
  }
}

template <class Kind, class Y, int M>
void rows(const Task& task) {
  // as many outputs at once as there are registers for their sums
  constexpr int B = M == 1 ? 8 : M * 4 <= kRegisters ? 4 : 2;
  const int64_t num_blocks = task.out / B;
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < num_blocks; n++) block<Kind, Y, M, B>(task, n * B);
  for (int64_t o = num_blocks * B; o < task.out; o++) block<Kind, Y, M, 1>(task, o);
}

template <class Kind, class Y>
void run(Task task, const Y* x, int64_t num_rows) {
  static void (*const by_rows[])(const Task&) = {rows<Kind, Y, 1>, rows<Kind, Y, 2>, rows<Kind, Y, 3>,
                                                 rows<Kind, Y, 4>, rows<Kind, Y, 5>, rows<Kind, Y, 6>,
                                                 rows<Kind, Y, 7>, rows<Kind, Y, 8>};
  thread_local std::vector<float> ordered;
  ordered.resize(num_rows * task.in);
  reorder<Kind>(x, num_rows * task.in, 1.0f, ordered.data());
  for (int64_t row = 0; row < num_rows; row += kRows) {
    task.x = ordered.data() + row * task.in;
    by_rows[std::min(num_rows - row, kRows) - 1](task);
    task.y = static_cast<Y*>(task.y) + kRows * task.out;
  }
}

template <class Y>
void run(const Task& task, at::ScalarType kind, const void* x, int64_t num_rows) {
  const Y* rows = static_cast<const Y*>(x);
  if (kind == at::kFloat) run<Float>(task, rows, num_rows);
  else if (kind == at::kBFloat16) run<BFloat16>(task, rows, num_rows);
  else run<Int8>(task, rows, num_rows);
}

// x (.. in) is float or bfloat16, and so is the result; weight (out in) float, bfloat16 or int8, the latter times
// `scale` (out, float).
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& scale,
                  const std::optional<at::Tensor>& bias) {
  const int64_t out = weight.size(0), in = weight.size(1), num_rows = in ? x.numel() / in : 0;
  const at::ScalarType kind = weight.scalar_type(), type = x.scalar_type();
  const int64_t parts = kind == at::kFloat ? 1 : kind == at::kBFloat16 ? 2 : 4;
  const bool fits =
      in % (kLanes * parts) == 0 && weight.is_contiguous() && (type == at::kFloat || type == at::kBFloat16);
  if (!fits || num_rows > (type == at::kFloat ? kMostFloatRows : kMostRows)) {
    at::Tensor plain = weight.to(type);
    if (scale) plain.mul_(scale->unsqueeze(1));
    return at::linear(x, plain, bias);
  }
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = out;
  at::Tensor y = at::empty(shape, x.options());
  const at::Tensor given = x.contiguous();
  const Task task{nullptr, weight.const_data_ptr(), scale ? scale->const_data_ptr<float>() : nullptr,
                  y.mutable_data_ptr(), in, out};
  if (type == at::kFloat) run<float>(task, kind, given.const_data_ptr(), num_rows);
  else run<uint16_t>(task, kind, given.const_data_ptr(), num_rows);
  if (bias) y.add_(*bias);
  return y;
}

}  // namespace
}  // namespace draftsmith

TORCH_LIBRARY_FRAGMENT(draftsmith, library) {
  library.def("linear(Tensor x, Tensor weight, Tensor? scale, Tensor? bias) -> Tensor");
}

TORCH_LIBRARY_IMPL(draftsmith, CPU, library) { library.impl("linear", draftsmith::linear); }
