// For glm53d/model: a layer on a CPU. Weights come as arrays and are checked; what changes from call to call comes as
// addresses, which Python tells in 0.1 us where an array's description takes 10.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>

#include "arrays.h"
#include "bindings.h"
#include "glm53d/cpu_layer.h"

namespace nb = nanobind;
using namespace nb::literals;
using glm53d::CpuLayer;
using glm53d::CpuLayerShape;
using glm53d::CpuLayerWeights;
using glm53d::Matrix;

namespace {

using Rows = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using Vector = Array1<float>;

Matrix matrix(const Rows& array, size_t in, size_t out, const char* name) {
  if (array.shape(0) != in || array.shape(1) != out || array.stride(1) != 1)
    throw nb::value_error((std::string(name) + " is not [" + std::to_string(in) + ", " + std::to_string(out) + "]").c_str());
  return {array.data(), static_cast<size_t>(array.stride(0))};
}

const float* vector(const Vector& array, size_t size, const char* name) {
  if (array.size() != size) throw nb::value_error((std::string(name) + " is not [" + std::to_string(size) + "]").c_str());
  return array.data();
}

template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

void bind_model(nb::module_& m) {
  nb::class_<CpuLayer>(m, "CpuLayer", "A layer for steps of a few tokens, float32, one thread. Keeps no weight alive.")
      .def(
          "__init__",
          [](CpuLayer* self, size_t hidden, size_t q_rank, size_t kv_rank, size_t rope, size_t nope, size_t value,
             size_t heads, size_t index_heads, size_t index_dim, size_t width, size_t chosen,
             const Vector& attention_norm, const Vector& mlp_norm, const Vector& q_norm, const Vector& kv_norm,
             const std::optional<Vector>& index_norm, const std::optional<Vector>& index_norm_bias, const Rows& from_x,
             const Rows& from_q, const Rows& kv_b, const Rows& out, const std::optional<Rows>& router,
             const std::optional<Vector>& router_bias, const std::vector<Rows>& gate_up, const std::vector<Rows>& down,
             float floor, float q_floor, float kv_floor, float index_eps, float scaling) {
            if (gate_up.empty() || gate_up.size() != down.size()) throw nb::value_error("gate_up and down differ in length");
            const size_t experts = gate_up.size() - 1;
            const bool routes = experts > 0, indexes = index_dim > 0;
            if (rope % 2 || indexes != (index_heads > 0) || (indexes && rope > index_dim))
              throw nb::value_error("rope turns pairs of every key, and an indexer has heads and a width");
            if (routes != router.has_value() || routes != router_bias.has_value() || chosen > experts)
              throw nb::value_error("routed experts need a router, and nothing else does");
            if (indexes != index_norm.has_value() || indexes != index_norm_bias.has_value())
              throw nb::value_error("an indexer needs a norm, and nothing else does");
            const CpuLayerShape s{hidden, q_rank,      kv_rank,   rope,  nope,    value,
                                  heads,  index_heads, index_dim, width, experts, chosen};
            CpuLayerWeights w{};
            w.attention_norm = vector(attention_norm, hidden, "attention_norm");
            w.mlp_norm = vector(mlp_norm, hidden, "mlp_norm");
            w.q_norm = vector(q_norm, q_rank, "q_norm");
            w.kv_norm = vector(kv_norm, kv_rank, "kv_norm");
            if (index_dim) {
              w.index_norm = vector(*index_norm, index_dim, "index_norm");
              w.index_norm_bias = vector(*index_norm_bias, index_dim, "index_norm_bias");
            }
            w.from_x = matrix(from_x, hidden, q_rank + s.row() + index_dim + index_heads, "from_x");
            w.from_q = matrix(from_q, q_rank, s.all_queries(), "from_q");
            const Matrix rows_of_heads = matrix(kv_b, heads * (nope + value), kv_rank, "kv_b");
            if (rows_of_heads.stride != kv_rank) throw nb::value_error("kv_b is not contiguous");
            w.kv_b = rows_of_heads.data;
            w.out = matrix(out, heads * value, hidden, "out");
            if (experts) {
              const Matrix of_router = matrix(*router, experts, hidden, "router");
              if (of_router.stride != hidden) throw nb::value_error("router is not contiguous");
              w.router = of_router.data;
              w.router_bias = vector(*router_bias, experts, "router_bias");
            }
            for (const Rows& each : gate_up) w.gate_up.push_back(matrix(each, hidden, 2 * width, "gate_up"));
            for (const Rows& each : down) w.down.push_back(matrix(each, width, hidden, "down"));
            w.floor = floor, w.q_floor = q_floor, w.kv_floor = kv_floor, w.index_eps = index_eps, w.scaling = scaling;
            new (self) CpuLayer(s, std::move(w));
          },
          nb::kw_only(), "hidden"_a, "q_rank"_a, "kv_rank"_a, "rope"_a, "nope"_a, "value"_a, "heads"_a,
          "index_heads"_a, "index_dim"_a, "width"_a, "chosen"_a, "attention_norm"_a.noconvert(),
          "mlp_norm"_a.noconvert(), "q_norm"_a.noconvert(), "kv_norm"_a.noconvert(), "index_norm"_a.noconvert().none(),
          "index_norm_bias"_a.noconvert().none(), "from_x"_a.noconvert(), "from_q"_a.noconvert(), "kv_b"_a.noconvert(),
          "out"_a.noconvert(), "router"_a.noconvert().none(), "router_bias"_a.noconvert().none(),
          "gate_up"_a.noconvert(), "down"_a.noconvert(), "floor"_a, "q_floor"_a, "kv_floor"_a, "index_eps"_a, "scaling"_a,
          "Linears are [in, out]; kv_b is [heads * (nope + value), kv_rank]; gate_up and down are those of the routed\n"
          "experts, then of what sees every token. Norms as RmsNorm has them. Raises ValueError for a wrong size.")
      .def_prop_ro("all_queries", [](const CpuLayer& self) { return self.shape().all_queries(); },
                   "The width of queries: those of all heads, then the indexer's.")
      .def(
          "project",
          [](const CpuLayer& self, size_t n, uintptr_t x, uintptr_t angles, uintptr_t locs, uintptr_t pool,
             uintptr_t index_pool, uintptr_t queries, uintptr_t index_weights) {
            self.project(n, at<float>(x), at<float>(angles), at<int64_t>(locs), at<float>(pool), at<float>(index_pool),
                         at<float>(queries), at<float>(index_weights));
          },
          nb::call_guard<nb::gil_scoped_release>(),
          "Addresses of x, angles and locs, then of what is written: see native/include/glm53d/cpu_layer.h.")
      .def(
          "choose",
          [](const CpuLayer& self, size_t n, size_t keys, size_t topk, uintptr_t queries, uintptr_t weights,
             uintptr_t angles, uintptr_t index_pool, uintptr_t locs, uintptr_t hidden, uintptr_t chosen,
             uintptr_t chosen_hidden) {
            self.choose(n, keys, topk, at<float>(queries), at<float>(weights), at<float>(angles), at<float>(index_pool),
                        at<int64_t>(locs), at<float>(hidden), at<int64_t>(chosen), at<float>(chosen_hidden));
          },
          nb::call_guard<nb::gil_scoped_release>(),
          "Likewise; chosen and chosen_hidden are written.")
      .def(
          "attend",
          [](const CpuLayer& self, size_t n, size_t keys, uintptr_t queries, uintptr_t pool, uintptr_t locs,
             uintptr_t hidden, uintptr_t attended) {
            self.attend(n, keys, at<float>(queries), at<float>(pool), at<int64_t>(locs), at<float>(hidden),
                        at<float>(attended));
          },
          nb::call_guard<nb::gil_scoped_release>(),
          "Likewise; attended is written.")
      .def(
          "finish",
          [](const CpuLayer& self, size_t n, uintptr_t attended, uintptr_t x) {
            self.finish(n, at<float>(attended), at<float>(x));
          },
          nb::call_guard<nb::gil_scoped_release>(),
          "Likewise; x is added to.");
}
