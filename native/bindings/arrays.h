// numpy arrays in and out of bindings. Arguments are taken as they are (use .noconvert(): a wrong dtype is a TypeError,
// not a hidden copy); results own their memory.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <span>
#include <utility>
#include <vector>

template <typename T>
using Array1 = nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
template <typename T>
using Array2 = nanobind::ndarray<const T, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
using Hashes = nanobind::ndarray<const uint64_t, nanobind::shape<-1, 2>, nanobind::c_contig, nanobind::device::cpu>;

template <typename T>
std::span<const T> view(const Array1<T>& array) {
  return {array.data(), array.size()};
}

// A new numpy array [n, Columns...] of T that takes over values; an element may be a struct of Columns Ts.
template <typename T, ssize_t... Columns, typename Element>
auto to_numpy(std::vector<Element> values) {
  static_assert(sizeof(Element) == sizeof(T) * (size_t{1} * ... * Columns));
  auto held = std::make_unique<std::vector<Element>>(std::move(values));
  void* data = held->data();
  const size_t rows = held->size();
  nanobind::capsule owner(held.get(), [](void* p) noexcept { delete static_cast<std::vector<Element>*>(p); });
  held.release();
  using Result = nanobind::ndarray<nanobind::numpy, T, nanobind::shape<-1, Columns...>>;
  return Result(data, {rows, size_t{Columns}...}, owner);
}
