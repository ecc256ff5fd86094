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
    w.floor = 0.9f, w.q_floor = 0.5f, w.kv_floor = 1.7f, w.index_eps = 1e-6f, w.scaling = 2.5f;
    return CpuLayer(shape, w);
  }

  CpuLayerShape shape;
  Values norm, from_x, from_q, kv_b, out, router, router_bias, gate_up, down;
};

using Doubles = std::vector<double>;

// y[out] = x[in] w[in, out]
static Doubles product(const Doubles& x, Matrix w, size_t out) {
  Doubles y(out);
  for (size_t i = 0; i < x.size(); ++i)
    for (size_t j = 0; j < out; ++j) y[j] += x[i] * w.data[i * w.stride + j];
  return y;
}

static Doubles rms_norm(Doubles x, const Values& weight, double floor) {
  double square = floor * floor;
  for (const double value : x) square += value * value;
  for (size_t i = 0; i < x.size(); ++i) x[i] *= weight[i] / std::sqrt(square);
  return x;
}

static Doubles layer_norm(Doubles x, const Values& weight, const Values& bias, double eps) {
  double mean = 0, square = 0;
  for (const double value : x) mean += value / double(x.size());
  for (const double value : x) square += (value - mean) * (value - mean) / double(x.size());
  for (size_t i = 0; i < x.size(); ++i) x[i] = (x[i] - mean) / std::sqrt(square + eps) * weight[i] + bias[i];
  return x;
}

// The first `rope` of x turned, pair by pair, by what angles say as cos, sin.
static Doubles rotated(Doubles x, const float* angles, size_t rope) {
  for (size_t i = 0; i < rope; i += 2) {
    const double even = x[i], odd = x[i + 1];
    x[i] = even * angles[i] - odd * angles[i + 1];
    x[i + 1] = even * angles[i + 1] + odd * angles[i];
  }
  return x;
}

static Doubles cut(const Doubles& x, size_t from, size_t count) {
  return Doubles(x.begin() + ptrdiff_t(from), x.begin() + ptrdiff_t(from + count));
}

static void check_near(const float* found, const Doubles& wanted) {
  for (size_t i = 0; i < wanted.size(); ++i) CHECK(near(found[i], wanted[i]));
}

static double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

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

static void projections_are_those_of_the_normed_states(uint64_t seed) {
  test::Random random(seed);
  const Drawn drawn(random, 4);
  const auto& s = drawn.shape;
  const size_t n = 1 + test::below(random, 6);
  const Values x = draw(random, n * s.hidden), angles = draw(random, n * s.rope);
  std::vector<int64_t> locs(n);
  std::iota(locs.begin(), locs.end(), 3);
  Values pool(50 * s.row()), keys(50 * s.index_dim), queries(n * s.all_queries()), weights(n * s.index_heads);
  drawn.layer().project(n, x.data(), angles.data(), locs.data(), pool.data(), keys.data(), queries.data(),
                        weights.data());
  for (size_t t = 0; t < n; ++t) {
    const float* turn = angles.data() + t * s.rope;
    const Doubles state(x.begin() + ptrdiff_t(t * s.hidden), x.begin() + ptrdiff_t((t + 1) * s.hidden));
    const size_t width = drawn.from_x_width();
    const Doubles found = product(rms_norm(state, drawn.norm, 0.9f), {drawn.from_x.data(), width}, width);
    const size_t key = s.q_rank + s.kv_rank, index_key = key + s.rope;
    const float* row = pool.data() + size_t(locs[t]) * s.row();
    check_near(row, rms_norm(cut(found, s.q_rank, s.kv_rank), drawn.norm, 1.7f));
    check_near(row + s.kv_rank, rotated(cut(found, key, s.rope), turn, s.rope));
    check_near(keys.data() + size_t(locs[t]) * s.index_dim,
               rotated(layer_norm(cut(found, index_key, s.index_dim), drawn.norm, drawn.norm, 1e-6f), turn, s.rope));
    check_near(weights.data() + t * s.index_heads, cut(found, index_key + s.index_dim, s.index_heads));
    Doubles query = product(rms_norm(cut(found, 0, s.q_rank), drawn.norm, 0.5f), {drawn.from_q.data(), s.all_queries()},
                            s.all_queries());
    for (size_t h = 0; h < s.heads; ++h) {
      const size_t at = h * s.query() + s.nope;
      const Doubles turned = rotated(cut(query, at, s.rope), turn, s.rope);
      std::copy(turned.begin(), turned.end(), query.begin() + ptrdiff_t(at));
    }
    check_near(queries.data() + t * s.all_queries(), query);
  }
}

static void states_get_attention_and_the_mlp(uint64_t seed, size_t experts) {
  test::Random random(seed);
  const Drawn drawn(random, experts);
  const auto& s = drawn.shape;
  const size_t n = 1 + test::below(random, 6);
  const Values x = draw(random, n * s.hidden), attended = draw(random, n * s.heads * s.value);
  Values states = x;
  drawn.layer().finish(n, attended.data(), states.data());
  for (size_t t = 0; t < n; ++t) {
    const auto own = attended.begin() + ptrdiff_t(t * s.heads * s.value);
    Doubles state = product(Doubles(own, own + ptrdiff_t(s.heads * s.value)), {drawn.out.data(), s.hidden}, s.hidden);
    for (size_t i = 0; i < s.hidden; ++i) state[i] += x[t * s.hidden + i];
    const Doubles normed = rms_norm(state, drawn.norm, 0.9f);
    Doubles share(experts + 1), scores(experts), biased(experts);
    share[experts] = 1;  // what sees every token
    for (size_t e = 0; e < experts; ++e) {
      for (size_t i = 0; i < s.hidden; ++i) scores[e] += normed[i] * drawn.router[e * s.hidden + i];
      scores[e] = sigmoid(scores[e]);
      biased[e] = scores[e] + drawn.router_bias[e];
    }
    std::vector<size_t> order(experts);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return biased[a] > biased[b]; });
    double sum = 0;
    for (size_t i = 0; i < s.chosen; ++i) sum += scores[order[i]];
    for (size_t i = 0; i < s.chosen; ++i) share[order[i]] = scores[order[i]] * 2.5 / sum;
    for (size_t e = 0; e <= experts; ++e) {
      Doubles wide = product(normed, {drawn.gate_up.data() + e * s.hidden * 2 * s.width, 2 * s.width}, 2 * s.width);
      for (size_t i = 0; i < s.width; ++i) wide[i] *= share[e] * sigmoid(wide[i]) * wide[s.width + i];
      const Doubles out = product(cut(wide, 0, s.width), {drawn.down.data() + e * s.width * s.hidden, s.hidden}, s.hidden);
      for (size_t i = 0; i < s.hidden; ++i) state[i] += out[i];
    }
    check_near(states.data() + t * s.hidden, state);
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
  const Values angles = draw(random, asked.n * s.rope);
  std::vector<int64_t> chosen(asked.n * topk);
  Values chosen_hidden(asked.n * topk);
  drawn.layer().choose(asked.n, asked.keys, topk, queries.data(), weights.data(), angles.data(), pool.data(),
                       asked.locs.data(), asked.hidden.data(), chosen.data(), chosen_hidden.data());
  for (size_t t = 0; t < asked.n; ++t) {
    std::vector<Doubles> q;  // of each head, turned
    for (size_t h = 0; h < s.index_heads; ++h) {
      const float* of_head = queries.data() + t * s.all_queries() + s.heads * s.query() + h * s.index_dim;
      q.push_back(rotated(Doubles(of_head, of_head + s.index_dim), angles.data() + t * s.rope, s.rope));
    }
    std::vector<double> scores(asked.keys);
    std::vector<size_t> order;
    for (size_t k = 0; k < asked.keys; ++k) {
      if (asked.hidden[t * asked.keys + k] == 0.0f) order.push_back(k);
      const float* row = pool.data() + asked.locs[t * asked.keys + k] * s.index_dim;
      for (size_t h = 0; h < s.index_heads; ++h) {
        double dot = 0;
        for (size_t i = 0; i < s.index_dim; ++i) dot += q[h][i] * row[i];
        scores[k] += weights[t * s.index_heads + h] * std::max(dot, 0.0);
      }
    }
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return scores[a] > scores[b] + 1e-5; });
    order.resize(std::min(order.size(), topk));
    std::sort(order.begin(), order.end());  // they come in the order of locs
    std::vector<int64_t> wanted, found;
    for (const size_t k : order) wanted.push_back(asked.locs[t * asked.keys + k]);
    for (size_t i = 0; i < topk; ++i) {
      if (chosen_hidden[t * topk + i] == 0.0f) found.push_back(chosen[t * topk + i]);
      else CHECK(chosen[t * topk + i] == asked.locs[t * asked.keys]);  // a row of the same request
    }
    CHECK(wanted == found);
  }
  // Rows that nobody sees, behind: the same choice in the same order.
  const size_t more = asked.keys + 7;
  std::vector<int64_t> padded(asked.n * more), again(chosen.size());
  Values padded_hidden(asked.n * more, kHidden), again_hidden(chosen.size());
  for (size_t t = 0; t < asked.n; ++t) {
    std::fill_n(padded.begin() + ptrdiff_t(t * more), more, asked.locs[t * asked.keys]);
    std::copy_n(asked.locs.begin() + ptrdiff_t(t * asked.keys), asked.keys, padded.begin() + ptrdiff_t(t * more));
    std::copy_n(asked.hidden.begin() + ptrdiff_t(t * asked.keys), asked.keys, padded_hidden.begin() + ptrdiff_t(t * more));
  }
  drawn.layer().choose(asked.n, more, topk, queries.data(), weights.data(), angles.data(), pool.data(), padded.data(),
                       padded_hidden.data(), again.data(), again_hidden.data());
  CHECK(again == chosen);
  CHECK(again_hidden == chosen_hidden);
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
    projections_are_those_of_the_normed_states(seed);
    states_get_attention_and_the_mlp(seed, seed % 2 ? 4 : 0);
    a_tokens_numbers_do_not_depend_on_the_others(seed, seed % 2 ? 4 : 0);
  }
}
