// y = x W' for a few rows of x, by the threads of a parallel region.
//
// Such a product takes as long as its weight takes to read, so the weight is read once: eight outputs are summed for
// all rows while their weights are in the processor's first caches.

#pragma once

#include <ATen/core/Tensor.h>
#include <omp.h>

#include <algorithm>

#include "lanes.h"

namespace draftsmith {

constexpr int kRows = 8;     // summed while a weight passes by
constexpr int kOutputs = 8;  // of one block
// blocks whose weights stay in the second cache while all rows pass by, and inputs that stay in the first one
constexpr int kGroup = 8, kInputs = 6144;

// A weight (out in) of float, bfloat16 or int8, the latter times `scale` (out).
struct Weight {
  // what its products are made of
  enum class Form { kFloat, kBFloat16, kInt8, kPairs };

  const void* data = nullptr;
  const float* scale = nullptr;
  int64_t out = 0, in = 0;
  at::ScalarType kind = at::kFloat;

  Weight() = default;
  Weight(const at::Tensor& weight, const at::Tensor* scales)
      : data(weight.const_data_ptr()),
        scale(scales ? scales->const_data_ptr<float>() : nullptr),
        out(weight.size(0)),
        in(weight.size(1)),
        kind(weight.scalar_type()) {}

  int64_t parts() const { return kind == at::kFloat ? 1 : kind == at::kBFloat16 ? 2 : 4; }

  // `narrow`: inputs are bfloat16, or may become it.
  Form form(bool narrow) const {
    if (kind == at::kBFloat16) return narrow && Pairs::kAreFast ? Form::kPairs : Form::kBFloat16;
    return kind == at::kFloat ? Form::kFloat : Form::kInt8;
  }
};

// Bytes of an input in a weight's order.
constexpr int64_t input_size(Weight::Form form) { return form == Weight::Form::kPairs ? 2 : 4; }

// sums[m * kOutputs + b] of M reordered rows of x and kOutputs rows of w.
using Block = void (*)(const void* x, const void* w, int64_t in, float* sums);

template <class Kind, int M>
void block(const void* x, const void* w, int64_t in, float* sums) {
  // as many outputs at once as there are registers for their sums, weights and an input
  constexpr int B = M == 1 ? 8 : M * 4 + 5 <= kRegisters ? 4 : 2;
  const auto* weight = static_cast<const typename Kind::Element*>(w);
  const auto* inputs = static_cast<const typename Kind::Input*>(x);
  for (int b = 0; b < kOutputs; b += B)
    products<Kind, M, B>(inputs, weight + b * in, in, kOutputs, in, sums + b, kOutputs);
}

// The same for one output, where fewer than kOutputs are left.
template <class Kind, int M>
void single(const void* x, const void* w, int64_t in, float* sums) {
  products<Kind, M, 1>(static_cast<const typename Kind::Input*>(x), static_cast<const typename Kind::Element*>(w), in, 0,
                       in, sums, kOutputs);
}

template <class Kind>
inline Block block_of(int rows, bool is_whole) {
  static constexpr Block whole[] = {block<Kind, 1>, block<Kind, 2>, block<Kind, 3>, block<Kind, 4>,
                                    block<Kind, 5>, block<Kind, 6>, block<Kind, 7>, block<Kind, 8>};
  static constexpr Block singles[] = {single<Kind, 1>, single<Kind, 2>, single<Kind, 3>, single<Kind, 4>,
                                      single<Kind, 5>, single<Kind, 6>, single<Kind, 7>, single<Kind, 8>};
  return (is_whole ? whole : singles)[rows - 1];
}

inline Block block_of(Weight::Form form, int rows, bool is_whole) {
  switch (form) {
    case Weight::Form::kFloat: return block_of<Float>(rows, is_whole);
    case Weight::Form::kBFloat16: return block_of<BFloat16>(rows, is_whole);
    case Weight::Form::kInt8: return block_of<Int8>(rows, is_whole);
    default: return block_of<Pairs>(rows, is_whole);
  }
}

// Inputs in the order, and of the type, in which they meet a weight's numbers.
template <class T>
inline void reorder_for(Weight::Form form, const T* x, int64_t size, void* ordered) {
  switch (form) {
    case Weight::Form::kFloat: return reorder<Float>(x, size, 1.0f, static_cast<float*>(ordered));
    case Weight::Form::kBFloat16: return reorder<BFloat16>(x, size, 1.0f, static_cast<float*>(ordered));
    case Weight::Form::kInt8: return reorder<Int8>(x, size, 1.0f, static_cast<float*>(ordered));
    default: return reorder<Pairs>(x, size, 1.0f, static_cast<uint16_t*>(ordered));
  }
}

// This thread's share of the outputs of all rows of `x`, which are in the order of `form`: `take(row, output, values,
// num)` is called with a few outputs at a time. Weights that are used one after another are shared out alike, so that a
// thread may go on to the next one without waiting.
template <class Take>
inline void multiply(const Weight& weight, Weight::Form form, const void* x, int64_t num_rows, const Take& take) {
  const int64_t num_blocks = (weight.out + kOutputs - 1) / kOutputs;
  const int64_t thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
  const int64_t size = weight.in * static_cast<int64_t>(c10::elementSize(weight.kind));
  // inputs of many rows are read again for every few outputs, so a piece of them has to stay in the first cache
  const int64_t fits = std::clamp<int64_t>(kInputs / weight.in, kRows / 2, kRows);
  // pieces as equal as can be: nine rows are five and four, not eight and one
  const int64_t num_pieces = num_rows <= kRows ? 1 : (num_rows + fits - 1) / fits;
  const int64_t group = num_pieces == 1 ? 1 : kGroup;
  const int64_t begin = num_blocks * thread / num_threads, end = num_blocks * (thread + 1) / num_threads;
  float sums[kRows * kOutputs];
  for (int64_t start = begin; start < end; start += group)
    for (int64_t piece = 0; piece < num_pieces; piece++) {
      const int64_t row = num_rows * piece / num_pieces, rows = num_rows * (piece + 1) / num_pieces - row;
      const char* inputs = static_cast<const char*>(x) + row * weight.in * input_size(form);
      for (int64_t n = start; n < std::min(start + group, end); n++) {
        const int64_t first = n * kOutputs, num = std::min<int64_t>(kOutputs, weight.out - first);
        const char* w = static_cast<const char*>(weight.data) + first * size;
        const Block sum = block_of(form, static_cast<int>(rows), num == kOutputs);
        if (num == kOutputs) sum(inputs, w, weight.in, sums);
        else
          for (int64_t b = 0; b < num; b++) sum(inputs, w + b * size, weight.in, sums + b);
        for (int64_t m = 0; m < rows; m++) {
          float* values = sums + m * kOutputs;
          if (weight.scale)
            for (int64_t b = 0; b < num; b++) values[b] *= weight.scale[first + b];
          if (num == kOutputs) take(row + m, first, values, kOutputs);  // a constant: loops over it become vectors
          else take(row + m, first, values, num);
        }
      }
    }
}

}  // namespace draftsmith
