// Which pages of KV a slower tier holds, by hash: host memory of one attention-DP rank, or the node's files. [R32]
//
//   buckets  hash -> first entry -> next ...        one entry per page, at most `capacity`; entry i is page i of a host pool
//   order    oldest <-> ... <-> newest              entries that may be dropped, by last use; pinned ones are not in it
//
// Entries and buckets grow with what is there: a folder of files may have room for many more pages than it ever gets.
//
// A page's hash stands for all before it, so there is no tree here: a prefix is there as far as its hashes are found one
// after the other. An entry that is filling, until settle(), or condemned has its hash and is pinned, but is not found.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "glm53d/page_hash.h"

namespace glm53d {

class TierIndex {
 public:
  static constexpr int32_t kNone = -1;

  struct Added {
    std::vector<int32_t> entries;  // of each hash; kNone: it is there already, or nothing may be dropped for it
    std::vector<Hash128> dropped;
  };

  explicit TierIndex(size_t capacity);

  // How many of these, from the first on, are there.
  size_t count(std::span<const Hash128> hashes) const noexcept;
  // The entries of hashes that are there, else kNone.
  std::vector<int32_t> find(std::span<const Hash128> hashes) const;

  // Give hashes entries where they have none, dropping those least recently used, but none of these; the last hash is the
  // last that goes without. All are last used, in their order. filling: pinned once, and not found before settle().
  Added add(std::span<const Hash128> hashes, bool filling);
  // A filling entry has its page, or will not get it and is free. Unpinned once.
  void settle(int32_t entry, bool filled) noexcept;
  // A pinned entry is not found any more, and free when its last pin goes.
  void condemn(int32_t entry) noexcept { entries_[entry].state = State::kCondemned; }
  void pin(std::span<const int32_t> entries) noexcept;
  void unpin(std::span<const int32_t> entries) noexcept;
  // Forget all that nobody pins; their hashes.
  std::vector<Hash128> clear();

  bool alive(int32_t entry) const noexcept;
  bool pinned(int32_t entry) const noexcept { return entries_[entry].pins > 0; }
  bool filling(int32_t entry) const noexcept { return entries_[entry].state == State::kFilling; }
  size_t capacity() const noexcept { return capacity_; }
  size_t size() const noexcept { return size_; }
  size_t num_pinned() const noexcept { return num_pinned_; }

  // What is wrong, or empty. Looks at everything.
  std::string check() const;

 private:
  enum class State : uint8_t { kFree, kFilling, kReady, kCondemned };
  struct Entry {
    Hash128 hash{};
    int32_t next = kNone;                  // of its bucket, or of the free ones
    int32_t older = kNone, newer = kNone;  // in the order
    uint32_t pins = 0;
    State state = State::kFree;
  };

  int32_t lookup(const Hash128& hash) const noexcept;
  int32_t& bucket(const Hash128& hash) noexcept { return buckets_[hash.lo & (buckets_.size() - 1)]; }
  void unlink(int32_t entry) noexcept;
  void link_newest(int32_t entry) noexcept;
  void forget(int32_t entry) noexcept;  // unpinned, and out of the order
  int32_t new_entry();                  // kNone: all there may be are in use
  void grow_buckets();

  const size_t capacity_;
  std::vector<Entry> entries_;
  std::vector<int32_t> buckets_;  // a power of two, more than there are entries
  int32_t first_free_ = kNone;
  int32_t oldest_ = kNone, newest_ = kNone;
  size_t size_ = 0;
  size_t num_pinned_ = 0;
};

}  // namespace glm53d
