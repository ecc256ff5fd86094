// A layer's calls against the same in double and in the order of the definition, with sizes that no vector divides.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "check.h"
#include "glm53d/cpu_layer.h"

using namespace glm53d;
using Values = std::vector<float>;

static const float kHidden = -std::numeric_limits<float>::infinity();

static Values draw(test::Random& random, size_t n, float scale = 1.0f) {
  std::normal_distribution<float> normal(0.0f, scale);
  Values values(n);
  for (float& value : values) value = normal(random);
  return values;
}

static bool near(double a, double b) { return std::abs(a - b) <= 1e-4 * (1.0 + std::abs(b)); }

// Every weight a layer has, with experts or without.
struct Drawn {
  explicit Drawn(test::Random& random, size_t experts)
      : shape{13, 7, 9, 6, 5, 3, 5, 3, 10, 11, experts, experts ? size_t{2} : size_t{0}},
        norm(draw(random, 64)),
        from_x(draw(random, shape.hidden * from_x_width(), 0.3f)),
        from_q(draw(random, shape.q_rank * shape.all_queries(), 0.4f)),
        kv_b(draw(random, shape.heads * (shape.nope + shape.value) * shape.kv_rank, 0.3f)),
        out(draw(random, shape.heads * shape.value * shape.hidden, 0.3f)),
        router(draw(random, experts * shape.hidden)),
        router_bias(draw(random, experts)),
        gate_up(draw(random, (experts + 1) * shape.hidden * 2 * shape.width, 0.3f)),
        down(draw(random, (experts + 1) * shape.width * shape.hidden, 0.3f)) {}

  size_t from_x_width() const { return shape.q_rank + shape.row() + shape.index_dim + shape.index_heads; }

  CpuLayer layer() const {
    CpuLayerWeights w{};
    w.attention_norm = w.mlp_norm = w.q_norm = w.kv_norm = w.index_norm = w.index_norm_bias = norm.data();
    w.from_x = {from_x.data(), from_x_width()};
    w.from_q = {from_q.data(), shape.all_queries()};
    w.kv_b = kv_b.data();
    w.out = {out.data(), shape.hidden};
    w.router = router.data(), w.router_bias = router_bias.data();
    for (size_t e = 0; e <= shape.experts; ++e) {
      w.gate_up.push_back({gate_up.data() + e * shape.hidden * 2 * shape.width, 2 * shape.width});
      w.down.push_back({down.data() + e * shape.width * shape.hidden, shape.hidden});
    }
    w.floor = w.q_kv_floor = 0.1f, w.index_eps = 1e-6f, w.scaling = 2.5f;
    return CpuLayer(shape, w);
  }

  CpuLayerShape shape;
  Values norm, from_x, from_q, kv_b, out, router, router_bias, gate_up, down;
};

// Some queries, each with rows of its own in a pool of 50, some of them hidden.
struct Asked {
  Asked(test::Random& random, size_t n, size_t keys) : n(n), keys(keys), locs(n * keys), hidden(n * keys, 0.0f) {
    for (int64_t& loc : locs) loc = static_cast<int64_t>(test::below(random, 50));
    for (size_t i = 0; i < n * keys; ++i)
      if (i % keys && test::below(random, 4) == 0) hidden[i] = kHidden;
  }

  size_t n, keys;
  std::vector<int64_t> locs;
  Values hidden;
};

static void attention_is_a_softmax_over_what_is_seen(uint64_t seed) {
  test::Random random(seed);
  const Drawn drawn(random, 4);
  const auto& s = drawn.shape;
  const Asked asked(random, 1 + test::below(random, 6), 1 + test::below(random, 40));
  const Values queries = draw(random, asked.n * s.all_queries()), pool = draw(random, 50 * s.row());
  Values attended(asked.n * s.heads * s.value);
  drawn.layer().attend(asked.n, asked.keys, queries.data(), pool.data(), asked.locs.data(), asked.hidden.data(),
                       attended.data());
  for (size_t t = 0; t < asked.n; ++t)
    for (size_t h = 0; h < s.heads; ++h) {
      const float* q = queries.data() + t * s.all_queries() + h * s.query();
      const float* kv_b = drawn.kv_b.data() + h * (s.nope + s.value) * s.kv_rank;
      std::vector<double> shares(asked.keys), found(s.value);
      double sum = 0;
      for (size_t k = 0; k < asked.keys; ++k) {
        const float* row = pool.data() + asked.locs[t * asked.keys + k] * s.row();
        double score = 0;
        for (size_t i = 0; i < s.nope; ++i) {
          double key = 0;
          for (size_t c = 0; c < s.kv_rank; ++c) key += double{kv_b[i * s.kv_rank + c]} * row[c];
          score += q[i] * key;
        }
        for (size_t i = 0; i < s.rope; ++i) score += double{q[s.nope + i]} * row[s.kv_rank + i];
        shares[k] = std::exp(score / std::sqrt(double(s.query())) + asked.hidden[t * asked.keys + k]);
        sum += shares[k];
        for (size_t i = 0; i < s.value; ++i)
          for (size_t c = 0; c < s.kv_rank; ++c) found[i] += shares[k] * kv_b[(s.nope + i) * s.kv_rank + c] * row[c];
      }
      for (size_t i = 0; i < s.value; ++i) CHECK(near(attended[(t * s.heads + h) * s.value + i], found[i] / sum));
    }
}

static void the_best_rows_are_chosen_and_no_hidden_one(uint64_t seed) {
  test::Random random(seed);
  const Drawn drawn(random, 4);
  const auto& s = drawn.shape;
  const size_t topk = 1 + test::below(random, 12);
  const Asked asked(random, 1 + test::below(random, 4), topk + 1 + test::below(random, 30));
  Values queries = draw(random, asked.n * s.all_queries()), weights = draw(random, asked.n * s.index_heads);
  const Values pool = draw(random, 50 * s.index_dim);
  if (seed % 3 == 0) std::fill(weights.begin(), weights.end(), 0.0f);  // all are equal: the first ones
  Values angles(asked.n * s.rope, 0.0f);
  for (size_t i = 0; i < angles.size(); i += 2) angles[i] = 1.0f;  // turned by nothing
  std::vector<int64_t> chosen(asked.n * topk);
  Values chosen_hidden(asked.n * topk);
  drawn.layer().choose(asked.n, asked.keys, topk, queries.data(), weights.data(), angles.data(), pool.data(),
                       asked.locs.data(), asked.hidden.data(), chosen.data(), chosen_hidden.data());
  for (size_t t = 0; t < asked.n; ++t) {
    const float* q = queries.data() + t * s.all_queries() + s.heads * s.query();
    std::vector<double> scores(asked.keys);
    std::vector<size_t> order;
    for (size_t k = 0; k < asked.keys; ++k) {
      if (asked.hidden[t * asked.keys + k] == 0.0f) order.push_back(k);
      const float* row = pool.data() + asked.locs[t * asked.keys + k] * s.index_dim;
      for (size_t h = 0; h < s.index_heads; ++h) {
        double dot = 0;
        for (size_t i = 0; i < s.index_dim; ++i) dot += double{q[h * s.index_dim + i]} * row[i];
        scores[k] += weights[t * s.index_heads + h] * std::max(dot, 0.0);
      }
    }
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return scores[a] > scores[b] + 1e-5; });
    order.resize(std::min(order.size(), topk));
    std::vector<int64_t> wanted, found;
    for (const size_t k : order) wanted.push_back(asked.locs[t * asked.keys + k]);
    for (size_t i = 0; i < topk; ++i) {
      if (chosen_hidden[t * topk + i] == 0.0f) found.push_back(chosen[t * topk + i]);
      else CHECK(chosen[t * topk + i] == asked.locs[t * asked.keys]);  // a row of the same request
    }
    std::sort(wanted.begin(), wanted.end());
    std::sort(found.begin(), found.end());
    CHECK(wanted == found);
  }
}

static void a_tokens_numbers_do_not_depend_on_the_others(uint64_t seed, size_t experts) {
  test::Random random(seed);
  const Drawn drawn(random, experts);
  const auto& s = drawn.shape;
  const size_t n = 1 + test::below(random, 11);
  const CpuLayer layer = drawn.layer();
  const Values x = draw(random, n * s.hidden), angles = draw(random, n * s.rope);
  std::vector<int64_t> locs(n);
  std::iota(locs.begin(), locs.end(), 3);
  const Values attended = draw(random, n * s.heads * s.value);
  const auto run = [&](size_t first, size_t count, Values& pool, Values& keys, Values& out) {
    Values queries(count * s.all_queries()), weights(count * s.index_heads);
    layer.project(count, x.data() + first * s.hidden, angles.data() + first * s.rope, locs.data() + first, pool.data(),
                  keys.data(), queries.data(), weights.data());
    Values states(x.begin() + first * s.hidden, x.begin() + (first + count) * s.hidden);
    layer.finish(count, attended.data() + first * s.heads * s.value, states.data());
    for (const Values* part : {&queries, &weights, &states}) out.insert(out.end(), part->begin(), part->end());
    for (const float value : out) CHECK(std::isfinite(value));
  };
  Values pool(50 * s.row()), keys(50 * s.index_dim), pool_alone = pool, keys_alone = keys;
  Values together, alone;
  run(0, n, pool, keys, together);
  Values queries, weights, states;
  for (size_t t = 0; t < n; ++t) {
    Values one;
    run(t, 1, pool_alone, keys_alone, one);
    const auto cut = [&](size_t from, size_t count, Values& to) {
      to.insert(to.end(), one.begin() + from, one.begin() + from + count);
    };
    cut(0, s.all_queries(), queries);
    cut(s.all_queries(), s.index_heads, weights);
    cut(s.all_queries() + s.index_heads, s.hidden, states);
  }
  for (const Values* part : {&queries, &weights, &states}) alone.insert(alone.end(), part->begin(), part->end());
  CHECK(together == alone);
  CHECK(pool == pool_alone);
  CHECK(keys == keys_alone);
  CHECK(pool[2 * s.row()] == 0.0f && pool[3 * s.row()] != 0.0f && pool[(3 + n) * s.row()] == 0.0f);
}

int main() {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    attention_is_a_softmax_over_what_is_seen(seed);
    the_best_rows_are_chosen_and_no_hidden_one(seed);
    a_tokens_numbers_do_not_depend_on_the_others(seed, seed % 2 ? 4 : 0);
  }
}
