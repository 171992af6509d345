// Attention of a few queries over the keys and values of a cache whose rows have their own lengths, by the threads of
// a parallel region.
//
// A row reads as far as its mask goes, not as far as the longest row of the batch. The query heads that share a
// key-value head are taken together, so keys and values are read once for all of them.

#pragma once

#include <algorithm>
#include <limits>

#include "lanes.h"

namespace draftsmith {

constexpr int kQueries = 4;  // taken together
constexpr int kAhead = 16;   // keys or values asked for before they are read

// exp(x) for x <= 0, and 0 far below. Degree 6 on |r| <= ln 2 / 2 after x = n ln 2 + r: 2 units in the last place.
inline Floats exponential(Floats x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, kept in the last bits
  const Floats least = Floats{} - 87.0f;
  const Floats bounded = x < least ? least : x;
  const Floats shifted = bounded * 1.44269504f + kRound;
  const Floats n = shifted - kRound;
  const Floats r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
  Floats y = Floats{} + 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const Floats powered = as<Floats>(as<Words>(y) + (as<Words>(shifted) << 23));
  return x < least ? Floats{} : powered;
}

// A few queries of one row that share a key-value head, over the keys `begin` to `end`.
template <class Kind>
struct Head {
  using Element = typename Kind::Element;
  const float* q;  // queries x size, reordered and scaled
  const Element* k;
  const Element* v;
  int64_t k_step, v_step, begin, end, size;

  // scores[key - begin], for every query one `step` further
  template <int M>
  void score(float* scores, int64_t step) const {
    int64_t key = begin;
    for (; key + 4 <= end; key += 4)
      products<Kind, M, 4>(q, k + key * k_step, k_step, kAhead, size, scores + key - begin, step);
    for (; key < end; key++)
      products<Kind, M, 1>(q, k + key * k_step, k_step, 1, size, scores + key - begin, step);
  }

  // sums[m * size + d] of weights times values; C words of values at once
  template <int M, int C>
  void sum_values(const float* weights, int64_t step, float* sums) const {
    constexpr int P = Kind::kParts;
    for (int64_t d = 0; d < size; d += kLanes * P * C) {
      Floats found[M][C][P];
      for (int m = 0; m < M; m++)
        for (int c = 0; c < C; c++)
          for (int p = 0; p < P; p++) found[m][c][p] = Floats{};
      for (int64_t key = begin; key < end; key++)
        for (int c = 0; c < C; c++) {
          const Words words = load<Words>(v + key * v_step + d + c * kLanes * P);
          __builtin_prefetch(v + (key + kAhead) * v_step + d + c * kLanes * P);
          for (int m = 0; m < M; m++)
            for (int p = 0; p < P; p++) found[m][c][p] += Kind::part(words, p) * weights[m * step + key - begin];
        }
      for (int m = 0; m < M; m++)
        for (int c = 0; c < C; c++)
          for (int p = 0; p < P; p++)
            for (int lane = 0; lane < kLanes; lane++)
              sums[m * size + d + (c * kLanes + lane) * P + p] = found[m][c][p][lane];
    }
  }

  template <int M>
  void attend(const bool* const* masks, float* scores, int64_t step, float* sums) const {
    constexpr int C = 4 / Kind::kParts;
    score<M>(scores, step);
    float scale[M];
    for (int m = 0; m < M; m++) scale[m] = soften(scores + m * step, masks[m]);
    if (size % (kLanes * 4) == 0) sum_values<M, C>(scores, step, sums);
    else sum_values<M, 1>(scores, step, sums);
    for (int m = 0; m < M; m++)
      for (int64_t d = 0; d < size; d++) sums[m * size + d] *= scale[m];
  }

  // Scores become weights; returns what they have to be multiplied by to sum to 1.
  float soften(float* scores, const bool* mask) const {
    const int64_t num = end - begin, padded = (num + kLanes - 1) / kLanes * kLanes;
    for (int64_t i = 0; i < num; i++) scores[i] = mask[begin + i] ? scores[i] : -std::numeric_limits<float>::infinity();
    std::fill(scores + num, scores + padded, -std::numeric_limits<float>::infinity());
    Floats largest = load<Floats>(scores);
    for (int64_t i = kLanes; i < padded; i += kLanes) {
      const Floats next = load<Floats>(scores + i);
      largest = next > largest ? next : largest;
    }
    float most = largest[0];
    for (int lane = 1; lane < kLanes; lane++) most = std::max(most, largest[lane]);
    for (int64_t i = 0; i < padded; i += kLanes) {
      const Floats weights = exponential(load<Floats>(scores + i) - most);
      std::memcpy(scores + i, &weights, sizeof weights);
    }
    return 1 / total(scores, mask + begin, num);
  }

  // The sum of the weights of `num` keys that the mask admits, in an order that does not depend on where they stand:
  // of a tree's candidates, others stand between those that become text, and the text's next step has to find the same.
  static float total(const float* weights, const bool* mask, int64_t num) {
    int64_t i = std::find(mask, mask + num, true) - mask;
    const int64_t hole = std::find(mask + i, mask + num, false) - mask;
    Floats sums = {};
    for (; i + kLanes <= hole; i += kLanes) sums += load<Floats>(weights + i);
    float rest[kLanes] = {};
    int filled = 0;
    for (; i < num; i++) {
      if (!mask[i]) continue;
      rest[filled++] = weights[i];
      if (filled < kLanes) continue;
      sums += load<Floats>(rest);
      std::fill_n(rest, kLanes, 0.0f);
      filled = 0;
    }
    sums += load<Floats>(rest);
    float sum = 0;
    for (int lane = 0; lane < kLanes; lane++) sum += sums[lane];
    return sum;
  }
};

// q (B H T D) of type Q; k and v (rows K S D) of one kind; mask (B or 1, 1, T S); the result is B T H D, of type Q.
template <class Kind, class Q>
struct Attention {
  struct Queries {
    const Q* data;
    int64_t row, head, step;
  } q;
  struct Past {
    const typename Kind::Element* data;
    int64_t row, head, step;
  } k, v;
  // What each query sees: its line of `data`; without data the first `first` keys and, of the `num` from `start` on,
  // its line of `then`.
  struct Sight {
    const bool* data;
    int64_t row, step;
    const int64_t *first, *start;
    const bool* then;
    int64_t num;
  } sight;
  Q* out;
  const int64_t* rows;  // of keys and values that each line of queries belongs to; none: in order
  int64_t num_rows, num_heads, num_queries, num_shared, length, size;
  float scaling;

  // Every thread of the region takes part.
  void run() const {
    const int64_t num = num_heads / num_shared * num_queries;  // queries of a key-value head
    const int64_t num_parts = (num + kQueries - 1) / kQueries;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < num_rows * num_shared * num_parts; task++)
      part(task / num_parts / num_shared, task / num_parts % num_shared, task % num_parts * kQueries, num);
  }

 private:
  const bool* seen(int64_t row, int64_t t, bool* line) const {
    const int64_t query = row * num_queries + t, first = sight.first[query];
    std::fill(line, line + first, true);
    std::fill(line + first, line + length, false);
    if (sight.then) {
      const int64_t start = sight.start[row], num = std::min(sight.num, length - start);
      std::copy_n(sight.then + query * sight.num, num, line + start);
    }
    return line;
  }

  // A few of the queries that share a key-value head, those of a query head together.
  void part(int64_t row, int64_t shared, int64_t start, int64_t num) const {
    const int64_t num_groups = num_heads / num_shared, together = std::min<int64_t>(kQueries, num - start);
    const int64_t step = (length + kLanes - 1) / kLanes * kLanes;
    thread_local Buffer memory;
    float* scores = memory.get(kQueries * (2 * step + 2 * size));
    float* sums = scores + kQueries * step;
    float* ordered = sums + kQueries * size;
    bool* room = reinterpret_cast<bool*>(ordered + kQueries * size);
    const bool* masks[kQueries];
    int64_t begin = length, end = 0;
    for (int64_t m = 0; m < together; m++) {
      const int64_t head = shared * num_groups + (start + m) / num_queries, t = (start + m) % num_queries;
      masks[m] = sight.data ? sight.data + row * sight.row + t * sight.step : seen(row, t, room + m * length);
      int64_t first = 0, last = length;
      while (first < begin && !masks[m][first]) first++;
      while (last > end && !masks[m][last - 1]) last--;
      begin = std::min(begin, first);
      end = std::max(end, last);
      reorder<Kind>(q.data + row * q.row + head * q.head + t * q.step, size, scaling, ordered + m * size);
    }
    const int64_t past = rows ? rows[row] : row;
    const Head<Kind> head{ordered, k.data + past * k.row + shared * k.head, v.data + past * v.row + shared * v.head,
                          k.step,  v.step, begin, end, size};
    if (end <= begin) std::fill(sums, sums + together * size, 0.0f);  // a place of the batch that nobody has taken
    else if (together == 4) head.template attend<4>(masks, scores, step, sums);
    else if (together == 3) head.template attend<3>(masks, scores, step, sums);
    else if (together == 2) head.template attend<2>(masks, scores, step, sums);
    else head.template attend<1>(masks, scores, step, sums);
    for (int64_t m = 0; m < together; m++) {
      const int64_t group = (start + m) / num_queries, t = (start + m) % num_queries;
      Q* to = out + ((row * num_queries + t) * num_heads + shared * num_groups + group) * size;
      for (int64_t d = 0; d < size; d++) narrow(sums[m * size + d], to + d);
    }
  }
};

}  // namespace draftsmith
