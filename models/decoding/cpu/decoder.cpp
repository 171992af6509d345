// A decoding step of a whole model in one call: layers of rotary attention and a gated SiLU network, both behind root
// mean square norms and added to what they read (Llama, Mistral, Qwen2, Qwen3).
//
// A step of few tokens takes as long as its weights take to read. Called one by one, its hundreds of small operations
// take as long again. Here the threads of one parallel region go through all of them, and wait for each other five
// times a layer. What a thread needs of all rows, norms and activations, each computes for itself: that is sooner done
// than waited for. Everything but the cache and the weights is float, and of a bfloat16 model, where the processor
// multiplies bfloat16, what meets its weights: eight tokens then take hardly longer than one.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <cmath>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "attention.h"
#include "linear.h"

namespace draftsmith {
namespace {

using Parts = c10::Dict<std::string, at::Tensor>;

struct Linear {
  Weight weight;
  const float* bias = nullptr;

  Linear(const Parts& parts, const std::string& name) {
    const auto scale = parts.find(name + ".scale"), given = parts.find(name + ".bias");
    const std::optional<at::Tensor> scales = scale == parts.end() ? std::nullopt : std::optional(scale->value());
    weight = Weight(parts.at(name), scales ? &*scales : nullptr);
    if (given != parts.end()) bias = given->value().const_data_ptr<float>();
  }

  void shift(int64_t first, float* values, int64_t num) const {
    if (bias)
      for (int64_t b = 0; b < num; b++) values[b] += bias[first + b];
  }
};

const float* vector_of(const Parts& parts, const std::string& name) {
  const auto found = parts.find(name);
  return found == parts.end() ? nullptr : found->value().const_data_ptr<float>();
}

struct Layer {
  const float *norm, *q_norm, *k_norm, *mlp_norm;
  Linear q, k, v, o, gate, up, down;

  explicit Layer(const Parts& parts)
      : norm(vector_of(parts, "norm")),
        q_norm(vector_of(parts, "q_norm")),
        k_norm(vector_of(parts, "k_norm")),
        mlp_norm(vector_of(parts, "mlp_norm")),
        q(parts, "q"),
        k(parts, "k"),
        v(parts, "v"),
        o(parts, "o"),
        gate(parts, "gate"),
        up(parts, "up"),
        down(parts, "down") {}
};

// y = x / sqrt(mean(x^2) + eps) * weight
inline void normalise(const float* x, const float* weight, int64_t size, float eps, float* y) {
  Floats squares = {};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Floats values = load<Floats>(x + i);
    squares += values * values;
  }
  float sum = 0;
  for (int lane = 0; lane < kLanes; lane++) sum += squares[lane];
  const float scale = 1 / std::sqrt(sum / static_cast<float>(size) + eps);
  for (int64_t i = 0; i < size; i += kLanes) {
    const Floats values = load<Floats>(x + i) * scale * load<Floats>(weight + i);
    std::memcpy(y + i, &values, sizeof values);
  }
}

// y = silu(gate) * up
inline void activate(const float* gate, const float* up, int64_t size, float* y) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const Floats x = load<Floats>(gate + i);
    const Floats e = exponential(x < 0.0f ? x : -x);
    const Floats values = x * (x < 0.0f ? e : Floats{} + 1.0f) / (1.0f + e) * load<Floats>(up + i);
    std::memcpy(y + i, &values, sizeof values);
  }
}

// Rows from which on the threads share out what else each computes for itself: then that takes longer than waiting.
constexpr int64_t kShared = 4;

// What a thread computes for itself.
struct Own {
  Buffer line, ordered;
};

// One call: B rows of T new tokens.
template <class Kind>
struct Call {
  using Element = typename Kind::Element;
  int64_t num_rows, num_tokens;  // tokens of all rows
  const int64_t *tokens, *positions, *slots;
  const float *cos, *sin;  // of every position
  int64_t num_heads, num_shared, size;
  float eps;
  float *x, *q, *k, *v, *found, *gate, *up;  // tokens x ...
  float* ordered;                            // common to all threads
  Attention<Kind, float> attention;

  // Rows that `fill(row, line)` writes, in a weight's order.
  template <class Fill>
  const void* ordered_for(const Linear& linear, Own& own, int64_t num, const Fill& fill) const {
    const int64_t in = linear.weight.in;
    const bool is_shared = num >= kShared;
    float* line = own.line.get(in);
    void* lines = is_shared ? ordered : own.ordered.get(num * in);
    const int64_t thread = is_shared ? omp_get_thread_num() : 0, num_threads = is_shared ? omp_get_num_threads() : 1;
    for (int64_t m = num * thread / num_threads; m < num * (thread + 1) / num_threads; m++) {
      fill(m, line);
      const int64_t place = m * in * input_size<Element>(linear.weight);
      reorder_for<Element>(linear.weight, line, in, static_cast<char*>(lines) + place);
    }
    if (is_shared) {
#pragma omp barrier
    }
    return lines;
  }

  void store(const Linear& linear, const void* input, float* to) const {
    multiply<Element>(linear.weight, input, num_tokens, [&](int64_t m, int64_t o, float* values, int64_t num) {
      linear.shift(o, values, num);
      for (int64_t b = 0; b < num; b++) to[m * linear.weight.out + o + b] = values[b];
    });
  }

  void add(const Linear& linear, const void* input) const {
    multiply<Element>(linear.weight, input, num_tokens, [&](int64_t m, int64_t o, float* values, int64_t num) {
      linear.shift(o, values, num);
      for (int64_t b = 0; b < num; b++) x[m * linear.weight.out + o + b] += values[b];
    });
  }

  // Turns a head's features by its token's position (rotary embedding, 2104.09864).
  void rotate(float* head, const float* norm, int64_t token) const {
    if (norm) normalise(head, norm, size, eps, head);
    const float *c = cos + positions[token] * size, *s = sin + positions[token] * size;
    for (int64_t d = 0; d < size / 2; d++) {
      const float first = head[d], second = head[d + size / 2];
      head[d] = first * c[d] - second * s[d];
      head[d + size / 2] = second * c[d + size / 2] + first * s[d + size / 2];
    }
  }

  // The new tokens' places in the cache get their keys and values.
  void place(const Layer& layer, Element* keys, Element* values) const {
    const int64_t num = num_heads + 2 * num_shared;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < num_tokens * num; task++) {
      const int64_t token = task / num, line = token / (num_tokens / num_rows);
      const int64_t row = attention.rows ? attention.rows[line] : line;
      int64_t head = task % num;
      if (head < num_heads) {
        rotate(q + (token * num_heads + head) * size, layer.q_norm, token);
        continue;
      }
      head -= num_heads;
      const bool is_value = head >= num_shared;
      head -= is_value ? num_shared : 0;
      float* from = (is_value ? v : k) + (token * num_shared + head) * size;
      if (!is_value) rotate(from, layer.k_norm, token);
      Element* to = (is_value ? values : keys) + row * attention.k.row + head * attention.k.head +
                    slots[token] * attention.k.step;
      for (int64_t d = 0; d < size; d++) narrow(from[d], to + d);
    }
  }

  void run(const Layer& layer, Element* keys, Element* values, Own& own) const {
    const int64_t width = layer.q.weight.in, inner = layer.down.weight.in;
    const void* input = ordered_for(layer.q, own, num_tokens, [&](int64_t m, float* line) {
      normalise(x + m * width, layer.norm, width, eps, line);
    });
    store(layer.q, input, q);
    store(layer.k, input, k);
    store(layer.v, input, v);
#pragma omp barrier
    place(layer, keys, values);
    Attention<Kind, float> own_attention = attention;
    own_attention.k.data = keys;
    own_attention.v.data = values;
    own_attention.run();
    const int64_t heads = layer.o.weight.in;
    input = ordered_for(layer.o, own, num_tokens, [&](int64_t m, float* line) {
      std::copy_n(found + m * heads, heads, line);
    });
    add(layer.o, input);
#pragma omp barrier
    input = ordered_for(layer.gate, own, num_tokens, [&](int64_t m, float* line) {
      normalise(x + m * width, layer.mlp_norm, width, eps, line);
    });
    store(layer.gate, input, gate);
    store(layer.up, input, up);
#pragma omp barrier
    input = ordered_for(layer.down, own, num_tokens, [&](int64_t m, float* line) {
      activate(gate + m * inner, up + m * inner, inner, line);
    });
    add(layer.down, input);
#pragma omp barrier
  }
};

class Decoder : public torch::CustomClassHolder {
 public:
  // A layer's parts: weights q, k, v, o, gate, up, down (out in, or packed), their .scale (of int8) and .bias, norm,
  // mlp_norm and perhaps q_norm and k_norm. Of the model: embedding (V D), norm, head, and cos and sin (positions, head
  // size). All vectors and cos and sin are float; weights that read one input are of one type.
  Decoder(c10::List<Parts> layers, Parts model, int64_t num_outputs, int64_t num_heads, int64_t num_shared, double eps,
          double scaling)
      : held_(layers), model_(model), head_(model, "head"), num_heads_(num_heads), num_shared_(num_shared),
        eps_(static_cast<float>(eps)), scaling_(static_cast<float>(scaling)) {
    for (const Parts& parts : layers) layers_.emplace_back(parts);
    head_.weight.out = num_outputs;  // a packed head has more
  }

  // tokens, positions and slots (B T): ids, places in the text and in the cache; keys and values (rows K S D, of a layer
  // each), which the new tokens' are written to, into `rows` (B) or in order. A token sees the text up to itself; of a
  // tree, its text, of `lengths` (B), and the candidates behind it that `sees` (B T N) admits. Logits (B U V) in the
  // cache's type after the tokens at `places` (U), after all without, and what the head read there (B U D).
  std::tuple<at::Tensor, at::Tensor> forward(
      const at::Tensor& tokens, const at::Tensor& positions, const at::Tensor& slots, std::vector<at::Tensor> keys,
      std::vector<at::Tensor> values, const std::optional<at::Tensor>& lengths, const std::optional<at::Tensor>& sees,
      const std::optional<at::Tensor>& rows, const std::optional<at::Tensor>& places) {
    const bool is_float = keys[0].scalar_type() == at::kFloat;
    const int64_t num = places ? places->numel() : tokens.size(1);
    at::Tensor logits = at::empty({tokens.size(0), num, head_.weight.out}, keys[0].options());
    at::Tensor features = at::empty({tokens.size(0), num, head_.weight.in}, keys[0].options());
    if (is_float) run<Float>(tokens, positions, slots, keys, values, lengths, sees, rows, places, logits, features);
    else run<BFloat16>(tokens, positions, slots, keys, values, lengths, sees, rows, places, logits, features);
    return {logits, features};
  }

 private:
  c10::List<Parts> held_;
  Parts model_;
  std::vector<Layer> layers_;
  Linear head_;
  int64_t num_heads_, num_shared_;
  float eps_, scaling_;
  Buffer memory_;
  std::vector<int64_t> first_;  // keys that each token sees without exception

  template <class Kind>
  void run(const at::Tensor& tokens, const at::Tensor& positions, const at::Tensor& slots,
           const std::vector<at::Tensor>& keys, const std::vector<at::Tensor>& values,
           const std::optional<at::Tensor>& lengths, const std::optional<at::Tensor>& sees,
           const std::optional<at::Tensor>& rows, const std::optional<at::Tensor>& places, at::Tensor& logits,
           at::Tensor& features) {
    using Element = typename Kind::Element;
    const int64_t num_rows = tokens.size(0), num_new = tokens.size(1), num_tokens = num_rows * num_new;
    const int64_t size = keys[0].size(3), width = head_.weight.in, inner = layers_[0].down.weight.in;
    const int64_t num_heads = num_heads_, num_shared = num_shared_, heads = num_heads * size;
    const int64_t shared = num_shared * size, outputs = head_.weight.out;
    const int64_t widest = std::max({width, heads, inner});
    float* next = memory_.get(num_tokens * (width + 2 * heads + 2 * shared + 2 * inner + widest));
    const auto take = [&](int64_t each) { return std::exchange(next, next + num_tokens * each); };
    const at::Tensor &embedding = model_.at("embedding"), &cos = model_.at("cos");
    const at::Tensor ids = tokens.contiguous(), at = positions.contiguous(), where = slots.contiguous();
    const auto dense = [](const std::optional<at::Tensor>& x) { return x ? x->contiguous() : at::Tensor(); };
    const at::Tensor lines = dense(rows), asked = dense(places), text = dense(lengths), then = dense(sees);
    Call<Kind> call{.num_rows = num_rows,
                    .num_tokens = num_tokens,
                    .tokens = ids.const_data_ptr<int64_t>(),
                    .positions = at.const_data_ptr<int64_t>(),
                    .slots = where.const_data_ptr<int64_t>(),
                    .cos = cos.const_data_ptr<float>(),
                    .sin = model_.at("sin").const_data_ptr<float>(),
                    .num_heads = num_heads,
                    .num_shared = num_shared,
                    .size = size,
                    .eps = eps_,
                    .x = take(width),
                    .q = take(heads),
                    .k = take(shared),
                    .v = take(shared),
                    .found = take(heads),
                    .gate = take(inner),
                    .up = take(inner),
                    .ordered = take(widest)};
    const typename Attention<Kind, float>::Past past{nullptr, keys[0].stride(0), keys[0].stride(1), size};
    call.attention = {.q = {call.q, num_new * heads, size, heads},
                      .k = past,
                      .v = past,
                      .sight = {},
                      .out = call.found,
                      .rows = rows ? lines.const_data_ptr<int64_t>() : nullptr,
                      .num_rows = num_rows,
                      .num_heads = num_heads,
                      .num_queries = num_new,
                      .num_shared = num_shared,
                      .length = keys[0].size(2),
                      .size = size,
                      .scaling = scaling_};
    const auto is_in = [](int64_t index, int64_t size) { return 0 <= index && index < size; };
    first_.resize(num_tokens);
    for (int64_t m = 0; m < num_tokens; m++) {
      TORCH_CHECK(is_in(call.tokens[m], embedding.size(0)), "token ", call.tokens[m], " is not one of the model's ",
                  embedding.size(0));
      TORCH_CHECK(is_in(call.positions[m], cos.size(0)) && is_in(call.slots[m], keys[0].size(2)), "position ",
                  call.positions[m], " or place ", call.slots[m], " lies outside the cache of ", keys[0].size(2));
      first_[m] = call.positions[m] + 1;
    }
    if (lengths) {
      call.attention.sight.start = text.const_data_ptr<int64_t>();
      call.attention.sight.then = then.const_data_ptr<bool>();
      call.attention.sight.num = then.size(2);
      for (int64_t m = 0; m < num_tokens; m++)
        first_[m] = std::min(first_[m], call.attention.sight.start[m / num_new]);
    }
    call.attention.sight.first = first_.data();
    const int64_t num_asked = places ? asked.numel() : num_new;
    const int64_t* wanted = places ? asked.const_data_ptr<int64_t>() : nullptr;
    const float* norm = vector_of(model_, "norm");
    auto* results = static_cast<Element*>(logits.mutable_data_ptr());
    auto* read = static_cast<Element*>(features.mutable_data_ptr());
#pragma omp parallel
    {
      thread_local Own own;
#pragma omp for schedule(static)
      for (int64_t m = 0; m < num_tokens; m++) embed(embedding, call.tokens[m], call.x + m * width, width);
      for (size_t n = 0; n < layers_.size(); n++)
        call.run(layers_[n], static_cast<Element*>(keys[n].mutable_data_ptr()),
                 static_cast<Element*>(values[n].mutable_data_ptr()), own);
      const void* input = call.ordered_for(head_, own, num_rows * num_asked, [&](int64_t m, float* line) {
        const int64_t row = m / num_asked, n = m % num_asked;
        normalise(call.x + (row * num_new + (wanted ? wanted[n] : n)) * width, norm, width, eps_, line);
        for (int64_t d = 0; d < width; d++) narrow(line[d], read + m * width + d);
      });
      const auto take_logits = [&](int64_t m, int64_t o, float* values, int64_t num) {
        head_.shift(o, values, num);
        for (int64_t b = 0; b < num; b++) narrow(values[b], results + m * outputs + o + b);
      };
      multiply<Element>(head_.weight, input, num_rows * num_asked, take_logits);
    }
  }

  static void embed(const at::Tensor& embedding, int64_t token, float* x, int64_t width) {
    if (embedding.scalar_type() == at::kFloat) {
      std::copy_n(embedding.const_data_ptr<float>() + token * width, width, x);
      return;
    }
    const auto* from = static_cast<const uint16_t*>(embedding.const_data_ptr()) + token * width;
    for (int64_t d = 0; d < width; d++) x[d] = widened(from[d]);
  }
};

}  // namespace
}  // namespace draftsmith

TORCH_LIBRARY_FRAGMENT(draftsmith, library) {
  library.class_<draftsmith::Decoder>("Decoder")
      .def(torch::init<c10::List<draftsmith::Parts>, draftsmith::Parts, int64_t, int64_t, int64_t, double, double>())
      .def("forward", &draftsmith::Decoder::forward);
}
