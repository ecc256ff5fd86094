// Which pages of KV hold which prefix: a radix tree over page hashes. One per attention-DP rank, one thread. [R27]
//
//   root(0) ─┬─ [h1 h2 h3] ─┬─ [h4 h5]          a node: a run of page hashes and the page number of each
//            │   7  2  9    │   4  1
//            │              └─ [h6] 3           children: one table for the whole tree, (parent, first hash) -> node
//            └─ [h8] 5
//
// A match compares runs of hashes in memory and does one table look-up per node, so a prompt of 15,625 pages costs tens
// of microseconds in one node as in 512.
//
// Locks. A request locks the last node it uses; ancestors stay because they have children. `held` of a node counts its
// held children, plus one while it is locked itself; a page is evictable exactly while its node's held is 0.
//
// Splits. When something ends inside a run, the front becomes a new node and the rest keeps id, locks and children: who
// locked a node locked all of it, so it goes on to mean the same pages.
//
// Eviction. Leaves with held == 0 wait in a heap by last use. Entries are not moved when a leaf is used, locked or
// extended, but looked at again when they come up: each node has one entry at most, each use costs one re-push at most.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "glm53d/page_hash.h"

namespace glm53d {

class PrefixTree {
 public:
  using NodeId = int32_t;
  static constexpr NodeId kRoot = 0;

  struct Match {
    size_t num_pages;
    NodeId node;  // matched whole; kRoot when num_pages is 0
  };
  struct Evicted {
    std::vector<int32_t> pages;
    std::vector<Hash128> hashes;  // of each
  };

  PrefixTree();

  // The longest cached prefix; makes all of it last used at `now`, a counter that never goes back.
  Match match(std::span<const Hash128> hashes, uint64_t now);
  // The same number, changing nothing.
  size_t peek(std::span<const Hash128> hashes) const noexcept;

  bool alive(NodeId node) const noexcept;
  void lock(NodeId node) noexcept;
  // False: the node was not locked.
  [[nodiscard]] bool unlock(NodeId node) noexcept;

  // From the root down to the node's last page.
  std::vector<int32_t> pages(NodeId node) const;
  std::vector<int32_t> all_pages() const;

  // Put pages behind `node`; owned[i] becomes the tree's page for hashes[i], which is not pages[i] where it had one
  // already.
  NodeId insert(NodeId node, std::span<const Hash128> hashes, std::span<const int32_t> pages, uint64_t now,
                int32_t* owned);
  // Drop up to n pages, least recently used leaf first, each from its tail.
  Evicted evict(size_t n);

  size_t num_pages() const noexcept { return num_pages_; }
  size_t num_nodes() const noexcept { return nodes_.size() - free_ids_.size() - 1; }
  size_t evictable_pages() const noexcept { return evictable_pages_; }

  // What is wrong, or empty. Looks at everything.
  std::string check() const;

 private:
  struct Node {
    NodeId parent = -1;  // -1: free
    uint32_t locks = 0;
    uint32_t held = 0;
    uint32_t num_children = 0;
    uint64_t last_use = 0;
    bool queued = false;  // has an entry in lru_
    std::vector<Hash128> hashes;
    std::vector<int32_t> pages;
  };
  struct ChildKey {
    NodeId parent;
    Hash128 first;
    bool operator==(const ChildKey&) const = default;
  };
  struct ChildKeyHash {
    // The page hash is keyed and uniform already.
    size_t operator()(const ChildKey& k) const noexcept {
      return k.first.lo ^ (uint64_t(k.parent) * 0x9e3779b97f4a7c15);
    }
  };
  using Entry = std::pair<uint64_t, NodeId>;  // last use when pushed

  NodeId child(NodeId parent, const Hash128& first) const noexcept;  // -1: none
  NodeId new_node(NodeId parent, uint64_t now);
  NodeId split(NodeId node, size_t at);  // the new front
  void hold(NodeId node) noexcept;
  void release(NodeId node) noexcept;
  void queue_if_evictable(NodeId node);

  std::vector<Node> nodes_;
  std::vector<NodeId> free_ids_;
  std::unordered_map<ChildKey, NodeId, ChildKeyHash> children_;
  std::vector<Entry> lru_;  // min-heap
  size_t num_pages_ = 0;
  size_t evictable_pages_ = 0;
};

}  // namespace glm53d
