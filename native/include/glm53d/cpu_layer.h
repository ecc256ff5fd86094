// One layer of the model for steps of a few tokens on a CPU: float32, one thread. The model's own form of a layer
// (glm53d/model/glm.py) is some eighty operations, of which each takes longer to start than to compute.
//
//   project   norm, the projections of queries and keys; this step's rows go into their pools
//   choose    of each query's rows the best by the layer's indexer, where there are more than it keeps
//   attend    each query over its own list of rows, absorbed: nothing is made of a row
//   finish    x += attention's output; x += mlp(norm x)
//
// The layers behind one that has an indexer attend to what that has chosen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace glm53d {

struct CpuLayerShape {
  size_t hidden, q_rank, kv_rank, rope, nope, value, heads;  // value: of a head
  size_t index_heads, index_dim;                             // 0: a layer that takes another's choice
  size_t width;                                              // of the MLP, or of each expert
  size_t experts, chosen;                                    // routed ones, and how many of them a token gets; 0: dense

  size_t query() const { return nope + rope; }  // of a head
  size_t row() const { return kv_rank + rope; }
  size_t all_queries() const { return heads * query() + index_heads * index_dim; }
};

// A matrix whose rows may stand apart.
struct Matrix {
  const float* data;
  size_t stride;
};

// Linears are [in, out]. A norm's weight is multiplied by sqrt(n), its floor is sqrt(n eps): see RmsNorm in layers.py.
struct CpuLayerWeights {
  const float *attention_norm, *mlp_norm, *q_norm, *kv_norm;
  const float *index_norm, *index_norm_bias;
  Matrix from_x;                      // to q latent, kv latent, rotated key, and an indexer's key and head weights
  Matrix from_q;                      // to the heads' queries, and an indexer's
  const float* kv_b;                  // [heads, nope + value, kv_rank]
  Matrix out;                         // [heads * value, hidden]
  const float *router, *router_bias;  // [experts, hidden], [experts]
  std::vector<Matrix> gate_up, down;  // of each routed expert, then of what sees every token
  float floor, q_floor, kv_floor, index_eps, scaling;
};

class CpuLayer {
 public:
  CpuLayer(const CpuLayerShape& shape, CpuLayerWeights weights) : shape_(shape), weights_(std::move(weights)) {}

  const CpuLayerShape& shape() const { return shape_; }

  // x [n, hidden], angles [n, rope] as cos, sin of each pair, locs [n]. Writes pool and index_pool (unless null) at
  // locs; queries [n, all_queries], of which an indexer's part is not rotated, and index_weights [n, index_heads].
  void project(size_t n, const float* x, const float* angles, const int64_t* locs, float* pool, float* index_pool,
               float* queries, float* index_weights) const;

  // queries [n, all_queries], weights [n, index_heads], locs [n, keys], hidden [n, keys] as 0 or -inf -> chosen [n, topk]
  // of locs, and chosen_hidden [n, topk] as hidden.
  void choose(size_t n, size_t keys, size_t topk, const float* queries, const float* weights, const float* angles,
              const float* index_pool, const int64_t* locs, const float* hidden, int64_t* chosen,
              float* chosen_hidden) const;

  // queries [n, all_queries], locs [n, keys], hidden [n, keys] as 0 or -inf -> attended [n, heads * value].
  void attend(size_t n, size_t keys, const float* queries, const float* pool, const int64_t* locs, const float* hidden,
              float* attended) const;

  // x [n, hidden] += what came of attended, and += the MLP.
  void finish(size_t n, const float* attended, float* x) const;

 private:
  CpuLayerShape shape_;
  CpuLayerWeights weights_;
};

}  // namespace glm53d
