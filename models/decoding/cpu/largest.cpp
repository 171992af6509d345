// The largest numbers of each line, and where they stand.
//
// torch finds how large they are in a tenth of the time in which it finds where they are, so here blocks are searched
// for the former, and only those that hold one of the largest for the latter.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "attention.h"

namespace draftsmith {
namespace {

constexpr int64_t kBlock = 256;

template <class T>
Floats floats(const T* x) {
  float values[kLanes];
  for (int lane = 0; lane < kLanes; lane++) values[lane] = widened(x[lane]);
  return load<Floats>(values);
}

template <class T>
struct Line {
  const T* x;
  int64_t size;
  struct Block {
    float most;           // of what is left
    int64_t begin, from;  // where it starts, and where the first of its largest may stand
    int64_t end, left;    // how many are left
  };
  std::vector<Block> blocks;

  // NaN where one is.
  float largest(int64_t begin, int64_t end) const {
    constexpr float kLeast = -std::numeric_limits<float>::infinity();
    Floats best = Floats{} + kLeast, sum = {};
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      const Floats values = floats(x + i);
      best = values > best ? values : best;
      sum += values * 0.0f;  // NaN of NaN, and of infinity, which is then looked at
    }
    float most = kLeast;
    bool is_odd = false;
    for (int lane = 0; lane < kLanes; lane++) {
      most = std::max(most, best[lane]);
      is_odd |= std::isnan(sum[lane]);
    }
    for (; i < end; i++) {
      most = std::max(most, widened(x[i]));
      is_odd |= std::isnan(widened(x[i]));
    }
    if (is_odd)
      for (i = begin; i < end; i++)
        if (std::isnan(widened(x[i]))) return widened(x[i]);
    return most;
  }

  // Takes the first of a block's largest; returns its place. What is left is smaller, or as large and behind it.
  int64_t take(Block& block) const {
    const float value = block.most;
    int64_t at = block.from;
    while (widened(x[at]) != value) at++;
    int64_t next = at + 1;
    while (next < block.end && widened(x[next]) != value) next++;
    block.left--;
    if (next < block.end) {
      block.from = next;
      return at;
    }
    block.from = block.begin;
    float most = -std::numeric_limits<float>::infinity();
    for (int64_t i = block.begin; i < block.end; i++) {
      const float other = widened(x[i]);
      most = other < value && other > most ? other : most;
    }
    block.most = most;
    return at;
  }

  // The `num` largest, the first of equal ones first; a NaN is all of them.
  void run(int64_t num, float* values, int64_t* places) {
    blocks.clear();
    for (int64_t begin = 0; begin < size; begin += kBlock) {
      const int64_t end = std::min(size, begin + kBlock);
      blocks.push_back({largest(begin, end), begin, begin, end, end - begin});
      if (!std::isnan(blocks.back().most)) continue;
      int64_t at = begin;
      while (!std::isnan(widened(x[at]))) at++;
      std::fill_n(values, num, widened(x[at]));
      std::fill_n(places, num, at);
      return;
    }
    for (int64_t k = 0; k < num; k++) {
      Block* best = nullptr;
      for (Block& block : blocks)
        if (block.left && (!best || block.most > best->most)) best = &block;
      values[k] = best->most;
      places[k] = take(*best);
    }
  }

  // log(sum(exp(x))), given the largest.
  float normaliser(float most) const {
    Floats sums = {};
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) sums += exponential(floats(x + i) - most);
    float sum = 0;
    for (int lane = 0; lane < kLanes; lane++) sum += sums[lane];
    for (; i < size; i++) sum += std::exp(widened(x[i]) - most);
    return most + std::log(sum);
  }
};

template <class T>
void run(const at::Tensor& x, int64_t num, bool is_law, at::Tensor& values, at::Tensor& places) {
  const int64_t size = x.size(-1), num_lines = x.numel() / size;
  const T* numbers = static_cast<const T*>(x.const_data_ptr());
  float* found = values.mutable_data_ptr<float>();
  int64_t* at = places.mutable_data_ptr<int64_t>();
#pragma omp parallel for schedule(static) if (num_lines > 1)
  for (int64_t n = 0; n < num_lines; n++) {
    thread_local Line<T> line;
    line.x = numbers + n * size;
    line.size = size;
    float* own = found + n * num;
    line.run(num, own, at + n * num);
    if (!is_law) continue;
    const float normaliser = line.normaliser(own[0]);
    for (int64_t k = 0; k < num; k++) own[k] -= normaliser;
  }
}

// Of logits (.. V), float or bfloat16, the `num` largest (.. num), as log-probabilities if `is_law`, and their ids.
std::tuple<at::Tensor, at::Tensor> largest(const at::Tensor& logits, int64_t num, bool is_law) {
  std::vector<int64_t> shape = logits.sizes().vec();
  shape.back() = num;
  at::Tensor values = at::empty(shape, logits.options().dtype(at::kFloat));
  at::Tensor places = at::empty(shape, logits.options().dtype(at::kLong));
  const at::Tensor given = logits.contiguous();
  if (!given.numel()) return {values, places};
  if (given.scalar_type() == at::kFloat) run<float>(given, num, is_law, values, places);
  else run<uint16_t>(given, num, is_law, values, places);
  return {values, places};
}

}  // namespace
}  // namespace draftsmith

TORCH_LIBRARY_FRAGMENT(draftsmith, library) {
  library.def("largest(Tensor logits, int num, bool is_law) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(draftsmith, CPU, library) { library.impl("largest", draftsmith::largest); }
