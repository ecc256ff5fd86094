// For glm53d/ipc: record layouts.
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "glm53d/records.h"

namespace nb = nanobind;

namespace glm53d {
namespace {

struct RecordLayout {
  size_t size;
  std::vector<std::tuple<std::string, std::string, size_t>> fields;
};

// The numpy format of a field: little-endian, as on every machine that we run on.
template <class T>
std::string numpy_format() {
  if constexpr (std::is_same_v<T, char>) return "S";
  const char kind = std::is_floating_point_v<T> ? 'f' : std::is_signed_v<T> ? 'i' : 'u';
  return std::string("<") + kind + std::to_string(sizeof(T));
}

std::map<std::string, RecordLayout> record_layouts() {
  std::map<std::string, RecordLayout> layouts;
#define GLM53D_LAYOUT_FIELD(type, name) layout.fields.emplace_back(#name, numpy_format<type>(), offsetof(Record, name));
#define GLM53D_LAYOUT_ARRAY(type, name, n)                                                                       \
  static_assert(std::is_same_v<type, char>, "an array of another type needs its numpy format here");            \
  layout.fields.emplace_back(#name, numpy_format<type>() + std::to_string(n), offsetof(Record, name));
#define GLM53D_LAYOUT(Name, list, bytes)                \
  {                                                     \
    using Record = Name;                                \
    RecordLayout layout{bytes, {}};                     \
    list(GLM53D_LAYOUT_FIELD, GLM53D_LAYOUT_ARRAY)      \
    layouts.emplace(#Name, std::move(layout));          \
  }
  GLM53D_RECORDS(GLM53D_LAYOUT)
#undef GLM53D_LAYOUT
#undef GLM53D_LAYOUT_ARRAY
#undef GLM53D_LAYOUT_FIELD
  return layouts;
}

}  // namespace
}  // namespace glm53d

void bind_ipc(nb::module_& m) {
  using namespace glm53d;
  nb::class_<RecordLayout>(m, "RecordLayout", "One fixed struct of records.h.")
      .def_ro("size", &RecordLayout::size)
      .def_ro("fields", &RecordLayout::fields, "(name, numpy format, offset) of each field, in order.");
  m.def("record_layouts", &record_layouts, "Every fixed struct of records.h by name: what numpy dtypes are made from.");
}
