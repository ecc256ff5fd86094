// Where a request's text ends because it says one of its stop strings. [R38] [R40]
//
// Aho-Corasick over the bytes of all its strings. The state is the node of the longest suffix of the text so far that some
// string begins with; so its depth is how many bytes must not show yet, and a string is found at its last byte.
//
//   "abc", "bd"    root ─a─ 1 ─b─ 2 ─c─ 3*       * ends a string
//                     └──b─ 4 ─d─ 5*             back(2) = 4: behind "ab", "b" may be the beginning of "bd"
//
// Of several strings that end at one byte the longest counts: it began first. At most 16 strings, so a node has at most 16
// children and a linked list finds one as fast as a table of 256 would, at a thirtieth of the memory.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "glm53d/byte_vocab.h"

namespace glm53d {

class StopMatcher {
 public:
  // Each string has at least one byte.
  explicit StopMatcher(std::span<const std::string_view> stops) : nodes_(1) {
    for (size_t i = 0; i < stops.size(); ++i) add(stops[i], static_cast<int32_t>(i));
    link();
  }

  // The next bytes, up to the end of the first string that one of them completes; how many that were. Not after a match.
  size_t feed(std::string_view bytes) noexcept {
    for (size_t i = 0; i < bytes.size(); ++i) {
      state_ = next(state_, static_cast<uint8_t>(bytes[i]));
      if (nodes_[state_].stop >= 0) return i + 1;
    }
    return bytes.size();
  }

  // The next bytes, which complete no string.
  void pass(std::string_view bytes) noexcept {
    for (const char c : bytes) state_ = next(state_, static_cast<uint8_t>(c));
  }
  void restart() noexcept { state_ = 0; }  // as at the beginning of a text

  int32_t matched() const noexcept { return nodes_[state_].stop; }           // index of the string, -1: none
  size_t match_bytes() const noexcept { return nodes_[state_].stop_bytes; }  // its length
  size_t held_bytes() const noexcept { return nodes_[state_].depth; }        // that many at the end may become a match

 private:
  struct Node {
    uint32_t child = 0, sibling = 0;  // 0: none, the root is nobody's child
    uint32_t back = 0;                // of this node's longest proper suffix that is in the trie
    int32_t stop = -1;                // the longest string that ends here
    uint32_t stop_bytes = 0;
    uint32_t depth = 0;
    uint8_t byte = 0;  // by which its parent leads here
  };

  uint32_t child(uint32_t node, uint8_t byte) const noexcept {
    uint32_t at = nodes_[node].child;
    while (at != 0 && nodes_[at].byte != byte) at = nodes_[at].sibling;
    return at;
  }

  // Constant on average: each way back makes the depth smaller, which grows by one a byte.
  uint32_t next(uint32_t node, uint8_t byte) const noexcept {
    for (;; node = nodes_[node].back) {
      const uint32_t found = child(node, byte);
      if (found != 0 || node == 0) return found;
    }
  }

  void add(std::string_view string, int32_t index) {
    uint32_t node = 0;
    for (const char c : string) {
      const uint8_t byte = static_cast<uint8_t>(c);
      uint32_t found = child(node, byte);
      if (found == 0) {
        found = static_cast<uint32_t>(nodes_.size());
        const uint32_t depth = nodes_[node].depth + 1;
        nodes_.push_back({0, nodes_[node].child, 0, -1, 0, depth, byte});
        nodes_[node].child = found;
      }
      node = found;
    }
    if (nodes_[node].stop < 0) {  // else the same string came before
      nodes_[node].stop = index;
      nodes_[node].stop_bytes = nodes_[node].depth;
    }
  }

  // Ways back, in order of depth: a node's suffixes are shorter than itself.
  void link() {
    std::vector<uint32_t> order{0};
    for (size_t i = 0; i < order.size(); ++i) {
      const uint32_t parent = order[i];
      for (uint32_t at = nodes_[parent].child; at != 0; at = nodes_[at].sibling) {
        order.push_back(at);
        Node& node = nodes_[at];
        if (parent != 0) node.back = next(nodes_[parent].back, node.byte);
        const Node& suffix = nodes_[node.back];
        if (node.stop < 0) {
          node.stop = suffix.stop;
          node.stop_bytes = suffix.stop_bytes;
        }
      }
    }
  }

  std::vector<Node> nodes_;
  uint32_t state_ = 0;
};

// The matchers of the requests that run, by slot. Owned by the scheduler, one thread. The vocabulary must outlive it.
class StopTable {
 public:
  StopTable(size_t max_slots, const ByteVocab& vocab, int32_t end_reasoning_id, int32_t call_begin_id)
      : vocab_(&vocab), end_reasoning_id_(end_reasoning_id), call_begin_id_(call_begin_id), slots_(max_slots) {}

  // As the request's text is made: main's OutSpec has the same.
  struct Spec {
    bool skip_special;   // special tokens have no bytes
    bool in_content;     // the text begins behind the first end_reasoning_id
    bool before_calls;   // it ends before the first call_begin_id
    bool keep_match;     // what matches is part of the text
    uint32_t min_ids = 0;  // an id before this one, from 1 on, completes nothing
  };
  // What became of a row's ids. A match ends the row at the id that completes it.
  struct Fed {
    int32_t num_ids;
    int32_t matched;     // index of the stop string, -1: none
    int32_t held_bytes;  // at the end of the text: not to be shown yet, or at a match ever
  };

  size_t max_slots() const noexcept { return slots_.size(); }
  bool is_open(size_t slot) const noexcept { return slots_[slot].has_value(); }

  void open(size_t slot, std::span<const std::string_view> stops, Spec spec) {
    slots_[slot].emplace(Slot{StopMatcher(stops), spec, spec.in_content ? Part::kReasoning : Part::kText, 0});
  }
  void close(size_t slot) noexcept { slots_[slot].reset(); }

  Fed feed(size_t slot, std::span<const int32_t> ids) noexcept {
    Slot& s = *slots_[slot];
    for (size_t i = 0; i < ids.size(); ++i) {
      ++s.num_ids;
      if (s.spec.before_calls && ids[i] == call_begin_id_) {
        s.part = Part::kCalls;
        s.matcher.restart();
      }
      if (s.part == Part::kReasoning && ids[i] == end_reasoning_id_) {
        s.part = Part::kText;
        continue;
      }
      if (s.part != Part::kText || !vocab_->contains(ids[i])) continue;
      const std::string_view bytes = vocab_->bytes(ids[i], s.spec.skip_special);
      if (bytes.empty()) continue;  // behind a string that was passed it would complete that
      if (s.num_ids < s.spec.min_ids) {
        s.matcher.pass(bytes);
        continue;
      }
      const size_t behind = bytes.size() - s.matcher.feed(bytes);
      if (s.matcher.matched() < 0) continue;
      const size_t match = s.spec.keep_match ? 0 : s.matcher.match_bytes();
      return {static_cast<int32_t>(i + 1), s.matcher.matched(), static_cast<int32_t>(match + behind)};
    }
    return {static_cast<int32_t>(ids.size()), -1, static_cast<int32_t>(s.matcher.held_bytes())};
  }

 private:
  enum class Part { kReasoning, kText, kCalls };  // strings are looked for in the text alone
  struct Slot {
    StopMatcher matcher;
    Spec spec;
    Part part;
    uint32_t num_ids;
  };
  const ByteVocab* vocab_;
  const int32_t end_reasoning_id_, call_begin_id_;
  std::vector<std::optional<Slot>> slots_;
};

}  // namespace glm53d
