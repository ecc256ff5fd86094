#include "glm53d/cpu_layer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

// Each of these is compiled once for each width of vectors, and the processor's own is taken when the module is loaded:
// too early for the thread sanitizer.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_THREAD__)
#define GLM53D_VECTORS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define GLM53D_VECTORS
#endif
#define GLM53D_INLINE [[gnu::always_inline]] inline

namespace glm53d {
namespace {

constexpr size_t kLanes = 16;

GLM53D_INLINE float dot(const float* a, const float* b, size_t n) {
  float sums[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (size_t lane = 0; lane < kLanes; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  float rest = 0;
  for (; i < n; ++i) rest += a[i] * b[i];
  // As a tree, which vectors can do.
  for (size_t lane = 0; lane < 8; ++lane) sums[lane] += sums[lane + 8];
  for (size_t lane = 0; lane < 4; ++lane) sums[lane] += sums[lane + 4];
  return rest + ((sums[0] + sums[2]) + (sums[1] + sums[3]));
}

GLM53D_INLINE void rms_norm(const float* x, const float* weight, float floor, size_t n, float* y) {
  const float scale = 1.0f / std::sqrt(dot(x, x, n) + floor * floor);
  for (size_t i = 0; i < n; ++i) y[i] = x[i] * scale * weight[i];
}

GLM53D_INLINE void layer_norm(const float* x, const float* weight, const float* bias, float eps, size_t n, float* y) {
  float mean = 0, square = 0;
  for (size_t i = 0; i < n; ++i) mean += x[i];
  mean /= static_cast<float>(n);
  for (size_t i = 0; i < n; ++i) square += (x[i] - mean) * (x[i] - mean);
  const float scale = 1.0f / std::sqrt(square / static_cast<float>(n) + eps);
  for (size_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * scale * weight[i] + bias[i];
}

// Pairs (2i, 2i + 1) of x[dim], which stay where they are.
GLM53D_INLINE void rotate(float* x, const float* angles, size_t dim) {
  for (size_t i = 0; i < dim; i += 2) {
    const float even = x[i], odd = x[i + 1], cos = angles[i], sin = angles[i + 1];
    x[i] = even * cos - odd * sin;
    x[i + 1] = even * sin + odd * cos;
  }
}

GLM53D_INLINE float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Memory that a thread keeps: as much as its largest call has needed.
class Scratch {
 public:
  explicit Scratch(size_t floats) {
    if (kept_.size() < floats) kept_.resize(floats);
  }

  float* take(size_t floats) {
    used_ += floats;
    return kept_.data() + used_ - floats;
  }

 private:
  static thread_local std::vector<float> kept_;
  size_t used_ = 0;
};
thread_local std::vector<float> Scratch::kept_;

// Width floats, which the compiler keeps in as few registers as there are for them.
template <size_t Width>
struct Lanes {
  typedef float type __attribute__((vector_size(Width * sizeof(float))));
};

// y[Tokens, Count * Width] (+)= x[Tokens, in] w[in, Count * Width]
template <size_t Tokens, size_t Count, size_t Width>
GLM53D_INLINE void block(const float* x, size_t x_stride, Matrix w, size_t in, float* y, size_t y_stride, bool adds) {
  typename Lanes<Width>::type sums[Tokens][Count] = {}, row[Count];
  if (adds)
    for (size_t t = 0; t < Tokens; ++t) std::memcpy(sums[t], y + t * y_stride, sizeof(sums[t]));
  for (size_t i = 0; i < in; ++i) {
    std::memcpy(row, w.data + i * w.stride, sizeof(row));
    for (size_t t = 0; t < Tokens; ++t)
      for (size_t j = 0; j < Count; ++j) sums[t][j] += x[t * x_stride + i] * row[j];
  }
  for (size_t t = 0; t < Tokens; ++t) std::memcpy(y + t * y_stride, sums[t], sizeof(sums[t]));
}

template <size_t Tokens>
GLM53D_INLINE void rows(const float* x, size_t x_stride, Matrix w, size_t in, size_t out, float* y, size_t y_stride,
                        bool adds) {
  size_t j = 0;
  const auto take = [&]<size_t Count, size_t Width>() __attribute__((always_inline)) {
    for (; j + Count * Width <= out; j += Count * Width)
      block<Tokens, Count, Width>(x, x_stride, {w.data + j, w.stride}, in, y + j, y_stride, adds);
  };
  take.template operator()<2, 16>();
  take.template operator()<1, 16>();
  take.template operator()<1, 4>();
  take.template operator()<1, 1>();
}

// y[n, out] (+)= x[n, in] w[in, out]. A token's numbers do not depend on how many others there are.
GLM53D_INLINE void product(size_t n, const float* x, size_t x_stride, Matrix w, size_t in, size_t out, float* y,
                           size_t y_stride, bool adds) {
  size_t t = 0;
  for (; t + 4 <= n; t += 4)
    rows<4>(x + t * x_stride, x_stride, w, in, out, y + t * y_stride, y_stride, adds);
  for (; t < n; ++t) rows<1>(x + t * x_stride, x_stride, w, in, out, y + t * y_stride, y_stride, adds);
}

// In place of gate[width], up[width]: share * silu(gate) * up, in the first half.
GLM53D_INLINE void gated(float* x, size_t width, float share) {
  for (size_t i = 0; i < width; ++i) x[i] = share * (x[i] * sigmoid(x[i])) * x[width + i];
}

GLM53D_VECTORS void project_few(const CpuLayerShape& s, const CpuLayerWeights& w, size_t n, const float* x,
                                const float* angles, const int64_t* locs, float* pool, float* index_pool,
                                float* queries, float* index_weights) {
  const size_t from_x = s.q_rank + s.row() + s.index_dim + s.index_heads;
  Scratch scratch(n * (s.hidden + from_x));
  float *normed = scratch.take(n * s.hidden), *found = scratch.take(n * from_x);
  for (size_t t = 0; t < n; ++t) rms_norm(x + t * s.hidden, w.attention_norm, w.floor, s.hidden, normed + t * s.hidden);
  product(n, normed, s.hidden, w.from_x, s.hidden, from_x, found, from_x, false);
  for (size_t t = 0; t < n; ++t) {
    float* q_latent = found + t * from_x;
    const float *kv_latent = q_latent + s.q_rank, *key = kv_latent + s.kv_rank, *index_key = key + s.rope;
    float* row = pool + static_cast<size_t>(locs[t]) * s.row();
    rms_norm(kv_latent, w.kv_norm, w.kv_floor, s.kv_rank, row);
    std::copy_n(key, s.rope, row + s.kv_rank);
    rotate(row + s.kv_rank, angles + t * s.rope, s.rope);
    if (index_pool) {
      float* index_row = index_pool + static_cast<size_t>(locs[t]) * s.index_dim;
      layer_norm(index_key, w.index_norm, w.index_norm_bias, w.index_eps, s.index_dim, index_row);
      rotate(index_row, angles + t * s.rope, s.rope);
    }
    std::copy_n(index_key + s.index_dim, s.index_heads, index_weights + t * s.index_heads);
    rms_norm(q_latent, w.q_norm, w.q_floor, s.q_rank, q_latent);
  }
  product(n, found, from_x, w.from_q, s.q_rank, s.all_queries(), queries, s.all_queries(), false);
  for (size_t t = 0; t < n; ++t)
    for (size_t head = 0; head < s.heads; ++head)
      rotate(queries + t * s.all_queries() + head * s.query() + s.nope, angles + t * s.rope, s.rope);
}

// Of each query the topk rows with the best sum_h w_h relu(q_h . k), of equal ones the first, in the order of locs: so
// attention adds in one order, whoever else is asked. Behind those that it sees, a row of its own that is hidden.
GLM53D_VECTORS void choose_few(const CpuLayerShape& s, size_t n, size_t keys, size_t topk, const float* queries,
                               const float* weights, const float* angles, const float* pool, const int64_t* locs,
                               const float* hidden, int64_t* chosen, float* chosen_hidden) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(s.index_heads * s.index_dim));
  Scratch scratch(s.index_dim + s.index_dim * s.index_heads + keys * (s.index_dim + s.index_heads));
  float *query = scratch.take(s.index_dim), *turned = scratch.take(s.index_dim * s.index_heads);
  float *seen = scratch.take(keys * s.index_dim), *dots = scratch.take(keys * s.index_heads);
  static thread_local std::vector<uint64_t> rank, best;  // score above, complement of the place below: no two are equal
  rank.resize(keys);
  for (size_t t = 0; t < n; ++t) {
    const float *own = queries + t * s.all_queries() + s.heads * s.query(), *weight = weights + t * s.index_heads;
    for (size_t head = 0; head < s.index_heads; ++head) {
      std::copy_n(own + head * s.index_dim, s.index_dim, query);
      rotate(query, angles + t * s.rope, s.rope);
      for (size_t i = 0; i < s.index_dim; ++i) turned[i * s.index_heads + head] = query[i];
    }
    for (size_t key = 0; key < keys; ++key)
      std::copy_n(pool + static_cast<size_t>(locs[t * keys + key]) * s.index_dim, s.index_dim,
                  seen + key * s.index_dim);
    product(keys, seen, s.index_dim, {turned, s.index_heads}, s.index_dim, s.index_heads, dots, s.index_heads, false);
    for (size_t key = 0; key < keys; ++key) {
      float* of_key = dots + key * s.index_heads;
      for (size_t head = 0; head < s.index_heads; ++head) of_key[head] = std::max(of_key[head], 0.0f);
      // With 0 added, -0 is 0. An integer of the float's order: all bits turned if negative, else the first.
      const float score = scale * dot(of_key, weight, s.index_heads) + hidden[t * keys + key] + 0.0f;
      const uint32_t bits = std::bit_cast<uint32_t>(score);
      const uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
      rank[key] = uint64_t{ordered} << 32 | static_cast<uint32_t>(~key);
    }
    best = rank;
    const auto last = best.begin() + static_cast<ptrdiff_t>(std::min(topk, keys)) - 1;
    std::nth_element(best.begin(), last, best.end(), std::greater<>());
    size_t number = 0;
    for (size_t key = 0; key < keys; ++key)
      if (rank[key] >= *last && !std::isinf(hidden[t * keys + key])) {
        chosen[t * topk + number] = locs[t * keys + key];
        chosen_hidden[t * topk + number++] = 0.0f;
      }
    std::fill(chosen + t * topk + number, chosen + (t + 1) * topk, locs[t * keys]);
    std::fill(chosen_hidden + t * topk + number, chosen_hidden + (t + 1) * topk, -std::numeric_limits<float>::infinity());
  }
}

// One query's next Heads heads over its keys; queries and attended are those of the first of them. absorbed: memory for
// that, for latents and for scores.
template <size_t Heads>
GLM53D_INLINE void attend_heads(const CpuLayerShape& s, const float* kv_b, size_t keys, const float* queries,
                                const float* pool, const int64_t* locs, const float* hidden, float* absorbed,
                                float* attended) {
  using Each = typename Lanes<Heads>::type;  // one number of each head
  const float scale = 1.0f / std::sqrt(static_cast<float>(s.query()));
  const size_t of_head = (s.nope + s.value) * s.kv_rank;
  float *latents = absorbed + Heads * s.row(), *scores = latents + Heads * s.kv_rank;
  for (size_t head = 0; head < Heads; ++head) {  // absorbed [row, Heads]
    const float* query = queries + head * s.query();
    product(1, query, 0, {kv_b + head * of_head, s.kv_rank}, s.nope, s.kv_rank, latents, 0, false);
    for (size_t i = 0; i < s.kv_rank; ++i) absorbed[i * Heads + head] = latents[i];
    for (size_t i = 0; i < s.rope; ++i) absorbed[(s.kv_rank + i) * Heads + head] = query[s.nope + i];
  }
  Each most = Each{} - std::numeric_limits<float>::infinity(), sums = {};
  size_t key = 0;
  const auto score = [&]<size_t Keys>() __attribute__((always_inline)) {  // scores [keys, Heads]
    for (; key + Keys <= keys; key += Keys) {
      const float* row[Keys];
      Each found[Keys] = {}, query;
      for (size_t k = 0; k < Keys; ++k) row[k] = pool + static_cast<size_t>(locs[key + k]) * s.row();
      for (size_t i = 0; i < s.row(); ++i) {
        std::memcpy(&query, absorbed + i * Heads, sizeof(query));
        for (size_t k = 0; k < Keys; ++k) found[k] += row[k][i] * query;
      }
      for (size_t k = 0; k < Keys; ++k) {
        found[k] = found[k] * scale + hidden[key + k];
        most = found[k] > most ? found[k] : most;
        std::memcpy(scores + (key + k) * Heads, &found[k], sizeof(query));
      }
    }
  };
  score.template operator()<4>();
  score.template operator()<1>();
  for (key = 0; key < keys; ++key)
    for (size_t head = 0; head < Heads; ++head) {
      float& one = scores[key * Heads + head];
      one = std::exp(one - most[head]);
      sums[head] += one;
    }
  size_t at = 0;
  const auto gather = [&]<size_t Width>() __attribute__((always_inline)) {
    for (; at + Width <= s.kv_rank; at += Width) {
      typename Lanes<Width>::type found[Heads] = {}, part;
      for (size_t key = 0; key < keys; ++key) {
        std::memcpy(&part, pool + static_cast<size_t>(locs[key]) * s.row() + at, sizeof(part));
        for (size_t head = 0; head < Heads; ++head) found[head] += scores[key * Heads + head] * part;
      }
      for (size_t head = 0; head < Heads; ++head)
        std::memcpy(latents + head * s.kv_rank + at, &found[head], sizeof(part));
    }
  };
  gather.template operator()<32>();
  gather.template operator()<4>();
  gather.template operator()<1>();
  for (size_t head = 0; head < Heads; ++head) {
    const float* values = kv_b + head * of_head + s.nope * s.kv_rank;
    for (size_t i = 0; i < s.value; ++i)
      attended[head * s.value + i] = dot(latents + head * s.kv_rank, values + i * s.kv_rank, s.kv_rank) / sums[head];
  }
}

GLM53D_VECTORS void attend_few(const CpuLayerShape& s, const CpuLayerWeights& w, size_t n, size_t keys,
                               const float* queries, const float* pool, const int64_t* locs, const float* hidden,
                               float* attended) {
  const size_t room = 4 * (s.row() + s.kv_rank + keys);
  float* absorbed = Scratch(room).take(room);
  const size_t of_head = (s.nope + s.value) * s.kv_rank;
  for (size_t t = 0; t < n; ++t) {
    const float* query = queries + t * s.all_queries();
    float* out = attended + t * s.heads * s.value;
    size_t head = 0;
    for (; head + 4 <= s.heads; head += 4)
      attend_heads<4>(s, w.kv_b + head * of_head, keys, query + head * s.query(), pool, locs + t * keys,
                      hidden + t * keys, absorbed, out + head * s.value);
    for (; head < s.heads; ++head)
      attend_heads<1>(s, w.kv_b + head * of_head, keys, query + head * s.query(), pool, locs + t * keys,
                      hidden + t * keys, absorbed, out + head * s.value);
  }
}

GLM53D_VECTORS void finish_few(const CpuLayerShape& s, const CpuLayerWeights& w, size_t n, const float* attended,
                               float* x) {
  Scratch scratch(n * s.hidden + n * 2 * s.width + 2 * s.experts);
  float *normed = scratch.take(n * s.hidden), *wide = scratch.take(n * 2 * s.width);
  float *scores = scratch.take(s.experts), *biased = scratch.take(s.experts);
  static thread_local std::vector<size_t> best;
  best.resize(s.chosen);
  product(n, attended, s.heads * s.value, w.out, s.heads * s.value, s.hidden, x, s.hidden, true);
  for (size_t t = 0; t < n; ++t) rms_norm(x + t * s.hidden, w.mlp_norm, w.floor, s.hidden, normed + t * s.hidden);
  for (size_t t = 0; t < n && s.experts; ++t) {
    const float* token = normed + t * s.hidden;
    for (size_t e = 0; e < s.experts; ++e) {
      scores[e] = sigmoid(dot(token, w.router + e * s.hidden, s.hidden));
      biased[e] = scores[e] + w.router_bias[e];
    }
    float sum = 0;
    for (size_t& e : best) {  // of equal ones the first
      e = static_cast<size_t>(std::max_element(biased, biased + s.experts) - biased);
      biased[e] = -std::numeric_limits<float>::infinity();
      sum += scores[e];
    }
    for (const size_t e : best) {
      product(1, token, s.hidden, w.gate_up[e], s.hidden, 2 * s.width, wide, 2 * s.width, false);
      gated(wide, s.width, scores[e] * (w.scaling / (sum + 1e-20f)));
      product(1, wide, 2 * s.width, w.down[e], s.width, s.hidden, x + t * s.hidden, s.hidden, true);
    }
  }
  product(n, normed, s.hidden, w.gate_up.back(), s.hidden, 2 * s.width, wide, 2 * s.width, false);
  for (size_t t = 0; t < n; ++t) gated(wide + t * 2 * s.width, s.width, 1.0f);
  product(n, wide, 2 * s.width, w.down.back(), s.width, s.hidden, x, s.hidden, true);
}

}  // namespace

void CpuLayer::project(size_t n, const float* x, const float* angles, const int64_t* locs, float* pool,
                       float* index_pool, float* queries, float* index_weights) const {
  project_few(shape_, weights_, n, x, angles, locs, pool, index_pool, queries, index_weights);
}

void CpuLayer::choose(size_t n, size_t keys, size_t topk, const float* queries, const float* weights,
                      const float* angles, const float* index_pool, const int64_t* locs, const float* hidden,
                      int64_t* chosen, float* chosen_hidden) const {
  choose_few(shape_, n, keys, topk, queries, weights, angles, index_pool, locs, hidden, chosen, chosen_hidden);
}

void CpuLayer::attend(size_t n, size_t keys, const float* queries, const float* pool, const int64_t* locs,
                      const float* hidden, float* attended) const {
  attend_few(shape_, weights_, n, keys, queries, pool, locs, hidden, attended);
}

void CpuLayer::finish(size_t n, const float* attended, float* x) const {
  finish_few(shape_, weights_, n, attended, x);
}

}  // namespace glm53d
