// y = x W' by the threads of a parallel region.
//
// For a few rows of x such a product takes as long as its weight takes to read, so the weight is read once: some outputs
// are summed for all rows while their weights are in the processor's first caches. A packed weight lies in the order in
// which it is read, so that sums of many outputs grow side by side in one register, and rows are many before they cost
// anything; other weights lie as torch keeps them.

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

// A weight (out in) of float, or of int8 times `scale` (out). Or a packed one of bfloat16 (panels, in / 2, kLanes, 2): a
// panel's kLanes outputs side by side, a pair of inputs after another, outputs filled up to whole panels.
struct Weight {
  const void* data = nullptr;
  const float* scale = nullptr;
  int64_t out = 0, in = 0;
  at::ScalarType kind = at::kFloat;
  bool is_packed = false;

  Weight() = default;
  Weight(const at::Tensor& weight, const at::Tensor* scales)
      : data(weight.const_data_ptr()),
        scale(scales ? scales->const_data_ptr<float>() : nullptr),
        out(weight.size(0)),
        in(weight.size(1)),
        kind(weight.scalar_type()),
        is_packed(weight.dim() == 4) {
    if (!is_packed) return;
    TORCH_CHECK(kind == at::kBFloat16 && weight.size(2) == kLanes && weight.size(3) == 2 && weight.is_contiguous(),
                "a packed weight has panels of ", kLanes, " outputs");
    out *= kLanes;
    in *= 2;
  }

  int64_t parts() const { return kind == at::kFloat ? 1 : 4; }  // numbers of a word
};

// sums[m * kOutputs + b] of M reordered rows of x and kOutputs rows of w.
using Block = void (*)(const float* x, const void* w, int64_t in, float* sums);

template <class Kind, int M>
void block(const float* x, const void* w, int64_t in, float* sums) {
  // as many outputs at once as there are registers for their sums, weights and an input
  constexpr int B = M == 1 ? 8 : M * 4 + 5 <= kRegisters ? 4 : 2;
  const auto* weight = static_cast<const typename Kind::Element*>(w);
  for (int b = 0; b < kOutputs; b += B)
    products<Kind, M, B>(x, weight + b * in, in, kOutputs, in, sums + b, kOutputs);
}

// The same for one output, where fewer than kOutputs are left.
template <class Kind, int M>
void single(const float* x, const void* w, int64_t in, float* sums) {
  products<Kind, M, 1>(x, static_cast<const typename Kind::Element*>(w), in, 0, in, sums, kOutputs);
}

template <class Kind>
inline Block block_of(int rows, bool is_whole) {
  static constexpr Block whole[] = {block<Kind, 1>, block<Kind, 2>, block<Kind, 3>, block<Kind, 4>,
                                    block<Kind, 5>, block<Kind, 6>, block<Kind, 7>, block<Kind, 8>};
  static constexpr Block singles[] = {single<Kind, 1>, single<Kind, 2>, single<Kind, 3>, single<Kind, 4>,
                                      single<Kind, 5>, single<Kind, 6>, single<Kind, 7>, single<Kind, 8>};
  return (is_whole ? whole : singles)[rows - 1];
}

inline Block block_of(at::ScalarType kind, int rows, bool is_whole) {
  return kind == at::kFloat ? block_of<Float>(rows, is_whole) : block_of<Int8>(rows, is_whole);
}

constexpr int kPackedRows = 12;  // summed while a panel passes by
// vectors of weights asked for before they are read: 8 KiB, so that they arrive in the second cache in time
constexpr int64_t kVectorsAhead = 128;

// sums[m * kLanes + output] of M rows of x, of float or bfloat16, and a panel of w.
template <class T, int M>
void panel(const T* x, const uint32_t* w, int64_t in, float* sums) {
  Floats found[M];
  for (int m = 0; m < M; m++) found[m] = Floats{};
  for (int64_t i = 0; i < in; i += 2) {
    const Words weights = load<Words>(w + i / 2 * kLanes);
    __builtin_prefetch(w + (i / 2 + kVectorsAhead) * kLanes, 0, 2);
    if constexpr (std::is_same_v<T, float>) {
      const Floats first = BFloat16::part(weights, 0), second = BFloat16::part(weights, 1);
      for (int m = 0; m < M; m++) found[m] += first * x[m * in + i];
      for (int m = 0; m < M; m++) found[m] += second * x[m * in + i + 1];
    } else {
      for (int m = 0; m < M; m++) found[m] = Pairs::add(found[m], Words{} + load<uint32_t>(x + m * in + i), weights);
    }
  }
  std::memcpy(sums, found, sizeof found);
}

template <class T>
using Panel = void (*)(const T* x, const uint32_t* w, int64_t in, float* sums);

template <class T, size_t... M>
inline Panel<T> panel_of(int64_t rows, std::index_sequence<M...>) {
  static constexpr Panel<T> panels[] = {panel<T, M + 1>...};
  return panels[rows - 1];
}

// Bytes of an input, which a packed weight takes as it is, of type T, and others as floats.
template <class T>
inline int64_t input_size(const Weight& weight) {
  return weight.is_packed ? sizeof(T) : sizeof(float);
}

// Inputs in the order, and of the type, in which they meet a weight's numbers.
template <class T, class From>
inline void reorder_for(const Weight& weight, const From* x, int64_t size, void* ordered) {
  if (weight.is_packed) {
    for (int64_t i = 0; i < size; i++) narrow(widened(x[i]), static_cast<T*>(ordered) + i);
    return;
  }
  auto* to = static_cast<float*>(ordered);
  if (weight.kind == at::kFloat) reorder<Float>(x, size, 1.0f, to);
  else reorder<Int8>(x, size, 1.0f, to);
}

// `multiply` by a packed weight.
template <class T, class Take>
inline void multiply_packed(const Weight& weight, const T* x, int64_t num_rows, const Take& take) {
  const int64_t num_panels = (weight.out + kLanes - 1) / kLanes;
  const int64_t thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
  const int64_t num_pieces = (num_rows + kPackedRows - 1) / kPackedRows;
  float sums[kPackedRows * kLanes] __attribute__((aligned(64)));
  for (int64_t n = num_panels * thread / num_threads; n < num_panels * (thread + 1) / num_threads; n++) {
    const uint32_t* w = static_cast<const uint32_t*>(weight.data) + n * kLanes * weight.in / 2;
    const int64_t first = n * kLanes, num = std::min<int64_t>(kLanes, weight.out - first);
    for (int64_t piece = 0; piece < num_pieces; piece++) {
      const int64_t row = num_rows * piece / num_pieces, rows = num_rows * (piece + 1) / num_pieces - row;
      panel_of<T>(rows, std::make_index_sequence<kPackedRows>{})(x + row * weight.in, w, weight.in, sums);
      for (int64_t m = 0; m < rows; m++) {
        if (num == kLanes) take(row + m, first, sums + m * kLanes, kLanes);  // a constant: loops become vectors
        else take(row + m, first, sums + m * kLanes, num);
      }
    }
  }
}

// This thread's share of the outputs of all rows of `x`, which are in the weight's order: `take(row, output, values,
// num)` is called with a few outputs at a time. Weights that are used one after another are shared out alike, so that a
// thread may go on to the next one without waiting.
template <class T, class Take>
inline void multiply(const Weight& weight, const void* x, int64_t num_rows, const Take& take) {
  if (weight.is_packed) return multiply_packed(weight, static_cast<const T*>(x), num_rows, take);
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
      const float* inputs = static_cast<const float*>(x) + row * weight.in;
      for (int64_t n = start; n < std::min(start + group, end); n++) {
        const int64_t first = n * kOutputs, num = std::min<int64_t>(kOutputs, weight.out - first);
        const char* w = static_cast<const char*>(weight.data) + first * size;
        const Block sum = block_of(weight.kind, static_cast<int>(rows), num == kOutputs);
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
