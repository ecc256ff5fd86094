// For glm53d/text: page hashes.
#include <cstring>

#include "arrays.h"
#include "bindings.h"
#include "glm53d/page_hash.h"

namespace nb = nanobind;
using namespace glm53d;

namespace {

std::span<const std::byte> span_of(const nb::bytes& bytes) {
  return {static_cast<const std::byte*>(bytes.data()), bytes.size()};
}

auto hash_pages(const Array1<int32_t>& ids, size_t page_size, const nb::bytes& key, const nb::bytes& seed) {
  if (page_size == 0) throw nb::value_error("page_size is 0");
  HashKey k;
  if (key.size() != sizeof(k)) throw nb::value_error("the key has 16 bytes");
  std::memcpy(k.data(), key.data(), sizeof(k));
  std::vector<Hash128> hashes(ids.size() / page_size);
  {
    nb::gil_scoped_release release;  // the arguments are kept alive by the call
    page_hashes(view(ids), page_size, k, span_of(seed), hashes.data());
  }
  return to_numpy<uint64_t, 2>(std::move(hashes));
}

}  // namespace

void bind_text(nb::module_& m) {
  m.def("page_hashes", &hash_pages, nb::arg("ids").noconvert(), nb::arg("page_size"), nb::arg("key"), nb::arg("seed"),
        "The chained hash of each full page, uint64 [num_full_pages, 2]. [R19]\n\n"
        "key: 16 bytes. seed: what the chain starts from, any bytes; the 16 bytes of a page's hash continue behind it.");
}
