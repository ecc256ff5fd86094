// For glm53d/kv: the prefix tree, and the index of a slower tier. Every call keeps the GIL: the longest takes tens of
// microseconds on the scheduler's step path, and getting the GIL back from another thread may take that thread's whole
// switch interval, milliseconds.
#include <nanobind/stl/pair.h>

#include <string>

#include "arrays.h"
#include "bindings.h"
#include "glm53d/prefix_tree.h"
#include "glm53d/tier_index.h"

namespace nb = nanobind;
using namespace glm53d;

namespace {

// The tree a scheduler sees: with arguments that are checked.
struct CheckedTree {
  PrefixTree::NodeId node(int64_t id) const {
    if (id < 0 || id > INT32_MAX || !tree.alive(static_cast<PrefixTree::NodeId>(id)))
      throw nb::value_error(("node " + std::to_string(id) + " is not in the tree").c_str());
    return static_cast<PrefixTree::NodeId>(id);
  }

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

// The index a scheduler sees: with entries that are checked.
struct CheckedIndex {
  explicit CheckedIndex(size_t capacity) : index(capacity) {}

  // Raises unless each entry is alive and may be treated so.
  std::span<const int32_t> entries(const Array1<int32_t>& array, bool pinned) const {
    for (const int32_t entry : view(array)) {
      if (!index.alive(entry)) throw nb::value_error(("entry " + std::to_string(entry) + " is free").c_str());
      if (pinned && !index.pinned(entry))
        throw std::runtime_error("entry " + std::to_string(entry) + " is not pinned");
    }
    return view(array);
  }

  TierIndex index;
};

auto add(CheckedIndex& self, const Hashes& hashes, bool filling) {
  auto [entries, dropped] = self.index.add(run(hashes), filling);
  return std::pair(to_numpy<int32_t>(std::move(entries)), to_numpy<uint64_t, 2>(std::move(dropped)));
}

void settle(CheckedIndex& self, int32_t entry, bool filled) {
  if (!self.index.alive(entry) || !self.index.filling(entry))
    throw std::runtime_error("entry " + std::to_string(entry) + " is not filling");
  self.index.settle(entry, filled);
}

void bind_index(nb::module_& m) {
  nb::class_<CheckedIndex>(
      m, "TierIndex",
      "Which pages of KV a slower tier holds, by hash. [R32] One owner, one thread. An entry is an int, the place of a\n"
      "page among `capacity`; one that nobody pins goes when another needs the room, the least recently used first.")
      .def(nb::init<size_t>(), nb::arg("capacity"))
      .def(
          "count", [](const CheckedIndex& self, const Hashes& hashes) { return self.index.count(run(hashes)); },
          nb::arg("hashes").noconvert(), "How many of these pages, from the first on, are there.")
      .def(
          "find",
          [](const CheckedIndex& self, const Hashes& hashes) { return to_numpy<int32_t>(self.index.find(run(hashes))); },
          nb::arg("hashes").noconvert(), "Their entries; -1 of those that are not there.")
      .def("add", &add, nb::arg("hashes").noconvert(), nb::arg("filling"),
           "Make room for pages: (their entries, the hashes dropped for them).\n\n"
           "An entry is -1 where the page is there or on its way, and so last used now; or all others are pinned: then\n"
           "the first hashes go without. filling: new ones are pinned and not found until settle().")
      .def("settle", &settle, nb::arg("entry"), nb::arg("filled"),
           "A filling entry has its page now, or is free because it did not get it; it is unpinned.")
      .def(
          "condemn",
          [](CheckedIndex& self, const Array1<int32_t>& entries) {
            for (const int32_t entry : self.entries(entries, true)) self.index.condemn(entry);
          },
          nb::arg("entries").noconvert(), "These pinned ones are not found any more, and free when their pins go.")
      .def(
          "pin",
          [](CheckedIndex& self, const Array1<int32_t>& entries) { self.index.pin(self.entries(entries, false)); },
          nb::arg("entries").noconvert(), "Keep these until as many unpin().")
      .def(
          "unpin",
          [](CheckedIndex& self, const Array1<int32_t>& entries) { self.index.unpin(self.entries(entries, true)); },
          nb::arg("entries").noconvert(), "They are last used when the last pin goes.")
      .def(
          "clear", [](CheckedIndex& self) { return to_numpy<uint64_t, 2>(self.index.clear()); },
          "Forget all that nobody pins; their hashes.")
      .def("__len__", [](const CheckedIndex& self) { return self.index.size(); })
      .def_prop_ro("capacity", [](const CheckedIndex& self) { return self.index.capacity(); })
      .def_prop_ro("num_pinned", [](const CheckedIndex& self) { return self.index.num_pinned(); })
      .def(
          "check",
          [](const CheckedIndex& self) {
            const std::string wrong = self.index.check();
            if (!wrong.empty()) throw std::runtime_error("tier index: " + wrong);
          },
          "Look at everything; raise RuntimeError saying which invariant is broken.");
}

}  // namespace

void bind_kv(nb::module_& m) {
  nb::class_<CheckedTree>(
      m, "PrefixTree",
      "Which pages of one KV pool hold which prefix. [R27] One owner, one thread. A node is an int, the root is 0;\n"
      "any but a locked one may be gone after evict(). `now` is a counter that never goes back.")
      .def(nb::init<>())
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
          "evict",
          [](CheckedTree& self, size_t n) {
            auto [pages, hashes] = self.tree.evict(n);
            return std::pair(to_numpy<int32_t>(std::move(pages)), to_numpy<uint64_t, 2>(std::move(hashes)));
          },
          nb::arg("n"),
          "Drop up to n pages: (them, their hashes), the least recently used leaf first, each leaf from its tail.")
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
  bind_index(m);
}
