// Vectors of floats, and the sums of products that both kernels are made of.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace draftsmith {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX__)
constexpr int kLanes = 8, kRegisters = 16;
#else
constexpr int kLanes = 4, kRegisters = 32;
#endif

using Floats __attribute__((vector_size(kLanes * 4))) = float;
using Words __attribute__((vector_size(kLanes * 4))) = uint32_t;
using Integers __attribute__((vector_size(kLanes * 4))) = int32_t;

template <class To, class From>
inline To as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class T>
inline T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Numbers are read as words of 32 bits that hold one float, two bfloat16 or four int8. Part k of all words makes one
// vector, so kLanes * kParts numbers come as kParts vectors, and not in their own order.
struct Float {
  using Element = float;
  static constexpr int kParts = 1;
  static Floats part(Words words, int) { return as<Floats>(words); }
};

struct BFloat16 {
  using Element = uint16_t;
  static constexpr int kParts = 2;
  static Floats part(Words words, int k) { return as<Floats>(k ? words & 0xffff0000u : words << 16); }
};

struct Int8 {
  using Element = int8_t;
  static constexpr int kParts = 4;
  static Floats part(Words words, int k) {
    return __builtin_convertvector(as<Integers>(words << (24 - 8 * k)) >> 24, Floats);
  }
};

// Products of two neighbouring bfloat16 numbers with two others, and their sum: one instruction, where a processor has
// it.
struct Pairs {
#if defined(__AVX512BF16__)
  static constexpr bool kAreFast = true;
  static Floats add(Floats sums, Words a, Words b) {
    return as<Floats>(_mm512_dpbf16_ps(as<__m512>(sums), as<__m512bh>(a), as<__m512bh>(b)));
  }
#else
  static constexpr bool kAreFast = false;
  static Floats add(Floats sums, Words a, Words b) {
    return sums + BFloat16::part(a, 0) * BFloat16::part(b, 0) + BFloat16::part(a, 1) * BFloat16::part(b, 1);
  }
#endif
};

// Memory for floats that starts with a line of the cache: vectors across two lines take twice as long to read, which
// halves the speed of sums of products.
class Buffer {
 public:
  // Room for at least so many; what was there is lost when it grows.
  float* get(int64_t size) {
    if (size > size_) {
      const int64_t lines = (size * sizeof(float) + kLine - 1) / kLine;
      memory_.reset(static_cast<float*>(std::aligned_alloc(kLine, lines * kLine)));
      size_ = lines * kLine / sizeof(float);
    }
    return memory_.get();
  }

 private:
  static constexpr int64_t kLine = 64;
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  std::unique_ptr<float, Free> memory_;
  int64_t size_ = 0;
};

inline float widened(float value) { return value; }
inline float widened(uint16_t value) { return as<float>(static_cast<uint32_t>(value) << 16); }

inline void narrow(float value, float* to) { *to = value; }
inline void narrow(float value, uint16_t* to) {  // to the nearest, ties to even
  const uint32_t bits = as<uint32_t>(value);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  *to = static_cast<uint16_t>((is_nan ? bits | 0x400000u : bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// Lane l of the result is lane place(l) of `a` and, behind them, `b`.
template <class Place, size_t... L>
inline Floats shuffled(Floats a, Floats b, Place, std::index_sequence<L...>) {
  return __builtin_shufflevector(a, b, Place::of(L)...);
}

template <class Place>
inline Floats shuffled(Floats a, Floats b) {
  return shuffled(a, b, Place{}, std::make_index_sequence<kLanes>{});
}

template <int First>
struct EverySecond {
  static constexpr int of(int lane) { return 2 * lane + First; }
};

template <int First>
struct EverySecondOfQuarters {
  static constexpr int of(int lane) {
    return lane / 4 * 4 + lane % 2 * 2 + First + (lane % 4 < 2 ? 0 : kLanes);
  }
};

// Of 2 * kLanes numbers, those at even and those at odd places.
inline void split(const float* x, Floats* even, Floats* odd) {
  const Floats a = load<Floats>(x), b = load<Floats>(x + kLanes);
  *even = shuffled<EverySecond<0>>(a, b);
  *odd = shuffled<EverySecond<1>>(a, b);
}

inline void split(const uint16_t* x, Floats* even, Floats* odd) {
  const Words words = load<Words>(x);
  *even = BFloat16::part(words, 0);
  *odd = BFloat16::part(words, 1);
}

// `size` numbers times `scale`, in the order in which numbers of another kind come.
template <class Kind, class T>
inline void reorder(const T* x, int64_t size, float scale, float* ordered) {
  constexpr int P = Kind::kParts;
  if constexpr (P == 1) {
    for (int64_t i = 0; i < size; i++) ordered[i] = widened(x[i]) * scale;
    return;
  }
  for (int64_t start = 0; start < size; start += kLanes * P) {
    Floats parts[P > 1 ? P : 2];
    split(x + start, &parts[0], &parts[1]);
    if constexpr (P == 4) {
      Floats even, odd;
      split(x + start + 2 * kLanes, &even, &odd);
      const Floats first = parts[0], second = parts[1];
      parts[0] = shuffled<EverySecond<0>>(first, even);
      parts[1] = shuffled<EverySecond<0>>(second, odd);
      parts[2] = shuffled<EverySecond<1>>(first, even);
      parts[3] = shuffled<EverySecond<1>>(second, odd);
    }
    for (int k = 0; k < P; k++) {
      const Floats scaled = parts[k] * scale;
      std::memcpy(ordered + start + k * kLanes, &scaled, sizeof scaled);
    }
  }
}

// Sums of neighbouring lanes of two vectors, those of `b` behind those of `a` in every four.
inline Floats pair_sums(Floats a, Floats b) {
  return shuffled<EverySecondOfQuarters<0>>(a, b) + shuffled<EverySecondOfQuarters<1>>(a, b);
}

template <int Lanes>
using Part __attribute__((vector_size(Lanes * 4))) = float;

// First half plus second half, until four are left.
template <int Lanes, size_t... L>
inline Part<4> folded(Part<Lanes> x, std::index_sequence<L...> half) {
  if constexpr (Lanes == 4) return x;
  else
    return folded<Lanes / 2>(__builtin_shufflevector(x, x, L...) + __builtin_shufflevector(x, x, (L + Lanes / 2)...),
                             std::make_index_sequence<Lanes / 4>{});
}

// The sums of the lanes of four vectors.
inline Part<4> totals(Floats a, Floats b, Floats c, Floats d) {
  const Floats all = pair_sums(pair_sums(a, b), pair_sums(c, d));
  return folded<kLanes>(all, std::make_index_sequence<kLanes / 2>{});
}

// Inner products of M reordered rows of x with B rows of w, y[m * y_step + b]. A product's terms are added in one
// order whatever M and B are. What follows w by `ahead` rows is asked for meanwhile.
template <class Kind, int M, int B>
__attribute__((always_inline)) inline void products(const float* x, const typename Kind::Element* w, int64_t w_step,
                                                    int64_t ahead, int64_t size, float* y, int64_t y_step) {
  Floats sums[M][B];
  for (int m = 0; m < M; m++)
    for (int b = 0; b < B; b++) sums[m][b] = Floats{};
  for (int64_t i = 0; i < size; i += kLanes * Kind::kParts) {
    Words words[B];
    for (int b = 0; b < B; b++) {
      words[b] = load<Words>(w + b * w_step + i);
      // without it the processor waits for memory before every block; into its second cache, for what arrives in
      // the first one too early makes the sums of several rows wait
      __builtin_prefetch(w + (b + ahead) * w_step + i, 0, 2);
    }
    for (int k = 0; k < Kind::kParts; k++) {
      Floats weights[B];
      for (int b = 0; b < B; b++) weights[b] = Kind::part(words[b], k);
      for (int m = 0; m < M; m++) {
        const Floats inputs = load<Floats>(x + m * size + i + k * kLanes);
        for (int b = 0; b < B; b++) sums[m][b] += inputs * weights[b];
      }
    }
  }
  const Floats none = {};
  for (int m = 0; m < M; m++)
    for (int b = 0; b < B; b += 4) {
      const Part<4> values = totals(sums[m][b], b + 1 < B ? sums[m][b + 1] : none,
                                    b + 2 < B ? sums[m][b + 2] : none, b + 3 < B ? sums[m][b + 3] : none);
      std::memcpy(y + m * y_step + b, &values, std::min(4, B - b) * sizeof(float));
    }
}

}  // namespace draftsmith
