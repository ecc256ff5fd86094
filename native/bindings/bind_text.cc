// For glm53d/text: page hashes, byte vocabulary, decoder.
#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "glm53d/byte_vocab.h"
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

void make_vocab(ByteVocab* self, const std::vector<nb::bytes>& tokens, const std::vector<bool>& special) {
  if (tokens.size() != special.size()) throw nb::value_error("tokens and special differ in length");
  ByteVocab vocab;
  for (size_t i = 0; i < tokens.size(); ++i) vocab.add({tokens[i].c_str(), tokens[i].size()}, special[i]);
  new (self) ByteVocab(std::move(vocab));
}

nb::bytes token_bytes(const ByteVocab& vocab, int32_t id) {
  if (!vocab.contains(id)) throw nb::index_error(("id " + std::to_string(id) + " is not in the vocabulary").c_str());
  const std::string_view bytes = vocab.bytes(id, false);
  return nb::bytes(bytes.data(), bytes.size());
}

nb::bytes feed(Decoder& decoder, const Array1<int32_t>& ids) {
  std::string out;
  {
    nb::gil_scoped_release release;
    decoder.feed(ids.data(), ids.size(), out);
  }
  return nb::bytes(out.data(), out.size());
}

nb::bytes finish(Decoder& decoder) {
  std::string out;
  decoder.finish(out);
  return nb::bytes(out.data(), out.size());
}

}  // namespace

void bind_text(nb::module_& m) {
  m.def("page_hashes", &hash_pages, nb::arg("ids").noconvert(), nb::arg("page_size"), nb::arg("key"), nb::arg("seed"),
        "The chained hash of each full page, uint64 [num_full_pages, 2]. [R19]\n\n"
        "key: 16 bytes. seed: what the chain starts from, any bytes; a page's 16 bytes continue behind it.");

  nb::class_<ByteVocab>(m, "ByteVocab", "The bytes of each token id. Immutable: any thread may use it.")
      .def("__init__", &make_vocab, nb::arg("tokens"), nb::arg("special"),
           "tokens: the bytes of id 0, 1, 2 ...; special: which of them a decoder may skip.")
      .def("__len__", &ByteVocab::size)
      .def("__getitem__", &token_bytes, nb::arg("id"));

  nb::class_<Decoder>(m, "Decoder",
                      "Ids in any pieces to UTF-8, each character as soon as it is whole. [R39] One thread.\n\n"
                      "All output together equals b''.join(tokens).decode('utf-8', errors='replace').")
      .def(nb::init<const ByteVocab&, bool>(), nb::arg("vocab"), nb::arg("skip_special"), nb::keep_alive<1, 2>())
      .def("feed", &feed, nb::arg("ids").noconvert(), "The UTF-8 that is certain now; an unknown id adds none.")
      .def("finish", &finish, "U+FFFD when a character has begun, else nothing. The decoder is fresh again.")
      .def_prop_ro("unknown_ids", &Decoder::unknown_ids, "How many ids were outside the vocabulary.");
}
