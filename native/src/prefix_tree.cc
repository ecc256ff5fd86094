#include "glm53d/prefix_tree.h"

#include <algorithm>
#include <functional>

namespace glm53d {
namespace {

// Of two runs.
size_t common_prefix(std::span<const Hash128> a, std::span<const Hash128> b) noexcept {
  const size_t n = std::min(a.size(), b.size());
  return std::mismatch(a.begin(), a.begin() + n, b.begin()).first - a.begin();
}

}  // namespace

PrefixTree::PrefixTree() : nodes_(1) { nodes_[kRoot].parent = kRoot; }

bool PrefixTree::alive(NodeId node) const noexcept {
  return node >= 0 && static_cast<size_t>(node) < nodes_.size() && nodes_[node].parent >= 0;
}

PrefixTree::NodeId PrefixTree::child(NodeId parent, const Hash128& first) const noexcept {
  const auto found = children_.find({parent, first});
  return found == children_.end() ? -1 : found->second;
}

PrefixTree::Match PrefixTree::match(std::span<const Hash128> hashes, uint64_t now) {
  NodeId node = kRoot;
  size_t done = 0;
  while (done < hashes.size()) {
    NodeId next = child(node, hashes[done]);
    if (next < 0) break;
    const size_t same = common_prefix(nodes_[next].hashes, hashes.subspan(done));
    const bool whole = same == nodes_[next].hashes.size();
    if (!whole) next = split(next, same);
    nodes_[next].last_use = now;
    node = next;
    done += same;
    if (!whole) break;
  }
  return {done, node};
}

size_t PrefixTree::peek(std::span<const Hash128> hashes) const noexcept {
  NodeId node = kRoot;
  size_t done = 0;
  while (done < hashes.size()) {
    node = child(node, hashes[done]);
    if (node < 0) break;
    const size_t same = common_prefix(nodes_[node].hashes, hashes.subspan(done));
    done += same;
    if (same < nodes_[node].hashes.size()) break;
  }
  return done;
}

void PrefixTree::lock(NodeId node) noexcept {
  if (nodes_[node].locks++ == 0) hold(node);
}

bool PrefixTree::unlock(NodeId node) noexcept {
  if (nodes_[node].locks == 0) return false;
  if (--nodes_[node].locks == 0) release(node);
  return true;
}

// One more reason to keep the node: passed on to its ancestors up to the first that is held already.
void PrefixTree::hold(NodeId node) noexcept {
  while (nodes_[node].held++ == 0 && node != kRoot) {
    evictable_pages_ -= nodes_[node].pages.size();
    node = nodes_[node].parent;
  }
}

void PrefixTree::release(NodeId node) noexcept {
  queue_if_evictable(node);
  while (--nodes_[node].held == 0 && node != kRoot) {
    evictable_pages_ += nodes_[node].pages.size();
    node = nodes_[node].parent;
  }
}

std::vector<int32_t> PrefixTree::pages(NodeId node) const {
  size_t total = 0;
  for (NodeId n = node; n != kRoot; n = nodes_[n].parent) total += nodes_[n].pages.size();
  std::vector<int32_t> out(total);
  auto end = out.end();
  for (NodeId n = node; n != kRoot; n = nodes_[n].parent)
    end = std::copy_backward(nodes_[n].pages.begin(), nodes_[n].pages.end(), end);
  return out;
}

std::vector<int32_t> PrefixTree::all_pages() const {
  std::vector<int32_t> out;
  out.reserve(num_pages_);
  for (const Node& node : nodes_) out.insert(out.end(), node.pages.begin(), node.pages.end());
  return out;
}

PrefixTree::NodeId PrefixTree::insert(NodeId node, std::span<const Hash128> hashes, std::span<const int32_t> pages,
                                      uint64_t now, int32_t* owned) {
  size_t done = 0;
  while (done < hashes.size()) {
    NodeId next = child(node, hashes[done]);
    if (next < 0) break;
    const size_t same = common_prefix(nodes_[next].hashes, hashes.subspan(done));
    if (same < nodes_[next].hashes.size()) next = split(next, same);
    std::copy_n(nodes_[next].pages.begin(), same, owned + done);
    nodes_[next].last_use = now;
    node = next;
    done += same;
  }
  if (done == hashes.size()) return node;

  const NodeId leaf = new_node(node, now);
  nodes_[leaf].hashes.assign(hashes.begin() + done, hashes.end());
  nodes_[leaf].pages.assign(pages.begin() + done, pages.end());
  children_.emplace(ChildKey{node, hashes[done]}, leaf);
  ++nodes_[node].num_children;
  std::copy(pages.begin() + done, pages.end(), owned + done);
  num_pages_ += hashes.size() - done;
  evictable_pages_ += hashes.size() - done;
  queue_if_evictable(leaf);
  return leaf;
}

PrefixTree::NodeId PrefixTree::new_node(NodeId parent, uint64_t now) {
  NodeId id;
  if (free_ids_.empty()) {
    id = static_cast<NodeId>(nodes_.size());
    nodes_.emplace_back();
  } else {
    id = free_ids_.back();
    free_ids_.pop_back();
  }
  nodes_[id].parent = parent;
  nodes_[id].last_use = now;
  return id;
}

PrefixTree::NodeId PrefixTree::split(NodeId node, size_t at) {
  const NodeId front = new_node(nodes_[node].parent, nodes_[node].last_use);
  Node& lower = nodes_[node];
  Node& upper = nodes_[front];
  upper.hashes.assign(lower.hashes.begin(), lower.hashes.begin() + at);
  upper.pages.assign(lower.pages.begin(), lower.pages.begin() + at);
  lower.hashes.erase(lower.hashes.begin(), lower.hashes.begin() + at);
  lower.pages.erase(lower.pages.begin(), lower.pages.begin() + at);
  upper.num_children = 1;
  upper.held = lower.held > 0 ? 1 : 0;
  lower.parent = front;
  children_[{upper.parent, upper.hashes[0]}] = front;
  children_.emplace(ChildKey{front, lower.hashes[0]}, node);
  return front;
}

void PrefixTree::queue_if_evictable(NodeId id) {
  Node& node = nodes_[id];
  if (id == kRoot || node.queued || node.locks > 0 || node.num_children > 0) return;
  node.queued = true;
  lru_.emplace_back(node.last_use, id);
  std::push_heap(lru_.begin(), lru_.end(), std::greater<>{});
}

PrefixTree::Evicted PrefixTree::evict(size_t n) {
  Evicted out;
  out.pages.reserve(std::min(n, evictable_pages_));
  out.hashes.reserve(std::min(n, evictable_pages_));
  while (out.pages.size() < n && !lru_.empty()) {
    std::pop_heap(lru_.begin(), lru_.end(), std::greater<>{});
    const auto [pushed_use, id] = lru_.back();
    lru_.pop_back();
    Node& node = nodes_[id];
    node.queued = false;
    if (pushed_use != node.last_use) {  // used since: back in line, if it still belongs there
      queue_if_evictable(id);
      continue;
    }
    if (node.locks > 0 || node.num_children > 0) continue;  // queued again when it becomes a free leaf

    const size_t take = std::min(n - out.pages.size(), node.pages.size());
    out.pages.insert(out.pages.end(), node.pages.rbegin(), node.pages.rbegin() + take);
    out.hashes.insert(out.hashes.end(), node.hashes.rbegin(), node.hashes.rbegin() + take);
    num_pages_ -= take;
    evictable_pages_ -= take;
    if (take < node.pages.size()) {
      node.pages.resize(node.pages.size() - take);
      node.hashes.resize(node.pages.size());
      queue_if_evictable(id);
      continue;
    }
    const NodeId parent = node.parent;
    // Inserting behind a node does not walk up to touch it; what was behind it used it too.
    nodes_[parent].last_use = std::max(nodes_[parent].last_use, node.last_use);
    children_.erase({parent, node.hashes[0]});
    node = Node{};
    free_ids_.push_back(id);
    --nodes_[parent].num_children;
    queue_if_evictable(parent);
  }
  return out;
}

std::string PrefixTree::check() const {
  const auto wrong = [](NodeId id, const char* what) { return "node " + std::to_string(id) + ": " + what; };
  std::vector<uint32_t> num_children(nodes_.size()), held(nodes_.size()), entries(nodes_.size());
  size_t num_pages = 0, evictable = 0, num_alive = 0;
  for (const auto& [pushed_use, id] : lru_) {
    if (!alive(id)) return wrong(id, "waits for eviction but is free");
    if (pushed_use > nodes_[id].last_use) return wrong(id, "was queued later than it was used");
    ++entries[id];
  }
  for (NodeId id = 1; id < static_cast<NodeId>(nodes_.size()); ++id) {
    const Node& node = nodes_[id];
    if (node.parent < 0) continue;
    ++num_alive;
    if (!alive(node.parent)) return wrong(id, "its parent is free");
    if (node.hashes.empty() || node.hashes.size() != node.pages.size()) return wrong(id, "its run is broken");
    if (child(node.parent, node.hashes[0]) != id) return wrong(id, "is not found under its parent");
    ++num_children[node.parent];
    if (node.held > 0) ++held[node.parent];
    num_pages += node.pages.size();
    if (node.held == 0) evictable += node.pages.size();
  }
  for (NodeId id = 0; id < static_cast<NodeId>(nodes_.size()); ++id) {
    const Node& node = nodes_[id];
    if (!alive(id)) continue;
    if (num_children[id] != node.num_children) return wrong(id, "its children are miscounted");
    if (node.held != held[id] + (node.locks > 0 ? 1 : 0)) return wrong(id, "its locks are miscounted");
    if (entries[id] != (node.queued ? 1u : 0u)) return wrong(id, "its place in the eviction order is lost or doubled");
    if (id != kRoot && node.locks == 0 && node.num_children == 0 && !node.queued)
      return wrong(id, "is a free leaf that no eviction would find");
  }
  if (num_alive != num_nodes() || num_alive != children_.size()) return "the number of nodes is wrong";
  if (num_pages != num_pages_) return "the number of pages is wrong";
  if (evictable != evictable_pages_) return "the number of evictable pages is wrong";
  std::vector<int32_t> pages = all_pages();
  std::sort(pages.begin(), pages.end());
  const auto twice = std::adjacent_find(pages.begin(), pages.end());
  if (twice != pages.end()) return "page " + std::to_string(*twice) + " is in the tree twice";
  return {};
}

}  // namespace glm53d
