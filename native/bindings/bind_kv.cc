// For glm53d/kv: the prefix tree. Every call keeps the GIL: the longest takes tens of microseconds on the scheduler's
// step path, and getting the GIL back from another thread may take that thread's whole switch interval, milliseconds.
#include <nanobind/stl/pair.h>

#include <string>

#include "arrays.h"
#include "bindings.h"
#include "glm53d/prefix_tree.h"

namespace nb = nanobind;
using namespace glm53d;

namespace {

// The tree a scheduler sees: with its page size, and arguments that are checked.
struct CheckedTree {
  explicit CheckedTree(size_t page_size) : page_size(page_size) {
    if (page_size == 0) throw nb::value_error("page_size is 0");
  }

  PrefixTree::NodeId node(int64_t id) const {
    if (id < 0 || id > INT32_MAX || !tree.alive(static_cast<PrefixTree::NodeId>(id)))
      throw nb::value_error(("node " + std::to_string(id) + " is not in the tree").c_str());
    return static_cast<PrefixTree::NodeId>(id);
  }

  size_t page_size;
  PrefixTree tree;
};

std::span<const Hash128> run(const Hashes& hashes) {
  return {reinterpret_cast<const Hash128*>(hashes.data()), hashes.shape(0)};
}

auto insert(CheckedTree& self, int64_t node, const Hashes& hashes, const Array1<int32_t>& pages, uint64_t now) {
  if (hashes.shape(0) != pages.size()) throw nb::value_error("hashes and pages differ in length");
  std::vector<int32_t> owned(pages.size());
  const auto last = self.tree.insert(self.node(node), run(hashes), view(pages), now, owned.data());
  return std::pair(last, to_numpy<int32_t>(std::move(owned)));
}

}  // namespace

void bind_kv(nb::module_& m) {
  nb::class_<CheckedTree>(
      m, "PrefixTree",
      "Which pages of one KV pool hold which prefix. [R27] One owner, one thread. A node is an int, the root is 0;\n"
      "any but a locked one may be gone after evict(). `now` is a counter that never goes back.")
      .def(nb::init<size_t>(), nb::arg("page_size"))
      .def_ro("page_size", &CheckedTree::page_size)
      .def(
          "match",
          [](CheckedTree& self, const Hashes& hashes, uint64_t now) {
            const auto match = self.tree.match(run(hashes), now);
            return std::pair(match.num_pages, match.node);
          },
          nb::arg("hashes").noconvert(), nb::arg("now"),
          "(pages cached of this prefix, the node that ends there), all of it now last used. A node in whose middle\n"
          "it ends is split, so pages(node) is exactly the match.")
      .def(
          "peek", [](const CheckedTree& self, const Hashes& hashes) { return self.tree.peek(run(hashes)); },
          nb::arg("hashes").noconvert(), "Pages cached of this prefix; changes nothing.")
      .def(
          "lock", [](CheckedTree& self, int64_t node) { self.tree.lock(self.node(node)); }, nb::arg("node"),
          "Keep the node, and with it all before it, until as many unlock().")
      .def(
          "unlock",
          [](CheckedTree& self, int64_t node) {
            if (!self.tree.unlock(self.node(node)))
              throw std::runtime_error("node " + std::to_string(node) + " is not locked");
          },
          nb::arg("node"))
      .def(
          "pages",
          [](const CheckedTree& self, int64_t node) { return to_numpy<int32_t>(self.tree.pages(self.node(node))); },
          nb::arg("node"), "Page numbers from the root to the end of the node.")
      .def(
          "all_pages", [](const CheckedTree& self) { return to_numpy<int32_t>(self.tree.all_pages()); },
          "Every page in the tree, in no order.")
      .def("insert", &insert, nb::arg("node"), nb::arg("hashes").noconvert(), nb::arg("pages").noconvert(),
           nb::arg("now"),
           "Put pages behind a node: (the node that ends there, the tree's page for each hash).\n\n"
           "Where the tree had a page of that hash it keeps its own: there the returned page differs from the one\n"
           "given, and the given one stays the caller's.")
      .def(
          "evict", [](CheckedTree& self, size_t n) { return to_numpy<int32_t>(self.tree.evict(n)); }, nb::arg("n"),
          "Drop up to n pages and return them, the least recently used leaf first, each leaf from its tail.")
      .def_prop_ro("num_pages", [](const CheckedTree& self) { return self.tree.num_pages(); })
      .def_prop_ro("num_nodes", [](const CheckedTree& self) { return self.tree.num_nodes(); }, "Without the root.")
      .def_prop_ro(
          "evictable_pages", [](const CheckedTree& self) { return self.tree.evictable_pages(); },
          "Pages in no locked node and before none: what evict() could drop.")
      .def(
          "check",
          [](const CheckedTree& self) {
            const std::string wrong = self.tree.check();
            if (!wrong.empty()) throw std::runtime_error("prefix tree: " + wrong);
          },
          "Look at everything; raise RuntimeError saying which invariant is broken. Takes milliseconds.");
}
