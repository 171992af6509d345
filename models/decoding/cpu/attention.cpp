// Attention of a few queries over a ragged cache, as an operator of torch.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "attention.h"

namespace draftsmith {
namespace {

template <class Kind, class T>
void run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask, double scaling,
         at::Tensor& out) {
  const auto past = [](const at::Tensor& x) -> typename Attention<Kind, T>::Past {
    return {static_cast<const typename Kind::Element*>(x.const_data_ptr()), x.stride(0), x.stride(1), x.stride(2)};
  };
  const Attention<Kind, T> attention{
      .q = {static_cast<const T*>(q.const_data_ptr()), q.stride(0), q.stride(1), q.stride(2)},
      .k = past(k),
      .v = past(v),
      .sight = {.data = mask.const_data_ptr<bool>(),
                .row = mask.size(0) == 1 ? 0 : mask.stride(0),
                .step = mask.stride(2)},
      .out = static_cast<T*>(out.mutable_data_ptr()),
      .rows = nullptr,
      .num_rows = q.size(0),
      .num_heads = q.size(1),
      .num_queries = q.size(2),
      .num_shared = k.size(1),
      .length = k.size(2),
      .size = q.size(3),
      .scaling = static_cast<float>(scaling)};
#pragma omp parallel
  attention.run();
}

// Lines that are read as vectors lie together.
at::Tensor dense(const at::Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

// All of one type.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask,
                     double scaling) {
  at::Tensor out = at::empty({q.size(0), q.size(2), q.size(1), q.size(3)}, q.options());
  if (q.scalar_type() == at::kFloat) run<Float, float>(dense(q), dense(k), dense(v), dense(mask), scaling, out);
  else run<BFloat16, uint16_t>(dense(q), dense(k), dense(v), dense(mask), scaling, out);
  return out;
}

}  // namespace
}  // namespace draftsmith

TORCH_LIBRARY_FRAGMENT(draftsmith, library) {
  library.def("attention(Tensor q, Tensor k, Tensor v, Tensor mask, float scaling) -> Tensor");
}

TORCH_LIBRARY_IMPL(draftsmith, CPU, library) { library.impl("attention", draftsmith::attention); }
