// What each slot has said since it was admitted. Owned by the scheduler, one thread.
//
// A request that is retracted, or whose finished pages are hashed for the tree, needs its ids again; a Python list per
// request would cost the step one append per row.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace glm53d {

class TokenLog {
 public:
  explicit TokenLog(size_t max_slots) : slots_(max_slots) {}

  size_t max_slots() const noexcept { return slots_.size(); }

  void append(size_t slot, std::span<const int32_t> ids) {
    slots_[slot].insert(slots_[slot].end(), ids.begin(), ids.end());
  }

  std::span<const int32_t> get(size_t slot) const noexcept { return slots_[slot]; }

  // The slot's last `count` ids, count <= its length.
  std::span<const int32_t> tail(size_t slot, size_t count) const noexcept {
    return std::span(slots_[slot]).last(count);
  }

  // The slot is free: gives its memory back, a million-token history is 4 MB.
  void clear(size_t slot) noexcept { std::vector<int32_t>().swap(slots_[slot]); }

 private:
  std::vector<std::vector<int32_t>> slots_;
};

}  // namespace glm53d
