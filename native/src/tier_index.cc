#include "glm53d/tier_index.h"

#include <bit>

namespace glm53d {

TierIndex::TierIndex(size_t capacity) : entries_(capacity + 1), buckets_(std::bit_ceil(2 * capacity + 1), kNone) {
  const auto end = static_cast<int32_t>(capacity);
  entries_[end].older = entries_[end].newer = end;
  for (int32_t entry = end - 1; entry >= 0; --entry) {  // the lowest is the first free one
    entries_[entry].next = first_free_;
    first_free_ = entry;
  }
}

int32_t TierIndex::lookup(const Hash128& hash) const noexcept {
  int32_t entry = buckets_[hash.lo & (buckets_.size() - 1)];
  while (entry != kNone && entries_[entry].hash != hash) entry = entries_[entry].next;
  return entry;
}

size_t TierIndex::count(std::span<const Hash128> hashes) const noexcept {
  size_t n = 0;
  while (n < hashes.size()) {
    const int32_t entry = lookup(hashes[n]);
    if (entry == kNone || entries_[entry].state != State::kReady) break;
    ++n;
  }
  return n;
}

std::vector<int32_t> TierIndex::find(std::span<const Hash128> hashes) const {
  std::vector<int32_t> found(hashes.size());
  for (size_t i = 0; i < hashes.size(); ++i) {
    const int32_t entry = lookup(hashes[i]);
    found[i] = entry != kNone && entries_[entry].state == State::kReady ? entry : kNone;
  }
  return found;
}

void TierIndex::unlink(int32_t entry) noexcept {
  Entry& e = entries_[entry];
  entries_[e.older].newer = e.newer;
  entries_[e.newer].older = e.older;
  e.older = e.newer = kNone;
}

void TierIndex::link_newest(int32_t entry) noexcept {
  const auto end = static_cast<int32_t>(capacity());
  const int32_t before = entries_[end].older;
  entries_[entry].older = before;
  entries_[entry].newer = end;
  entries_[before].newer = entries_[end].older = entry;
}

void TierIndex::touch(std::span<const int32_t> entries) noexcept {
  for (const int32_t entry : entries) {
    if (entries_[entry].pins > 0) continue;  // last used when it is let go
    unlink(entry);
    link_newest(entry);
  }
}

void TierIndex::forget(int32_t entry) noexcept {
  int32_t* at = &bucket(entries_[entry].hash);
  while (*at != entry) at = &entries_[*at].next;
  *at = entries_[entry].next;
  entries_[entry] = Entry{};
  entries_[entry].next = first_free_;
  first_free_ = entry;
  --size_;
}

TierIndex::Added TierIndex::add(std::span<const Hash128> hashes, bool filling) {
  const auto end = static_cast<int32_t>(capacity());
  Added added{std::vector<int32_t>(hashes.size(), kNone), {}};
  for (size_t i = hashes.size(); i-- > 0;) {
    if (lookup(hashes[i]) != kNone) continue;
    if (first_free_ == kNone) {
      const int32_t oldest = entries_[end].newer;
      if (oldest == end) break;
      added.dropped.push_back(entries_[oldest].hash);
      unlink(oldest);
      forget(oldest);
    }
    const int32_t entry = first_free_;
    Entry& e = entries_[entry];
    first_free_ = e.next;
    int32_t& head = bucket(hashes[i]);
    e.hash = hashes[i];
    e.state = filling ? State::kFilling : State::kReady;
    e.next = head;
    head = entry;
    e.pins = 1;  // until all have their place
    ++size_;
    ++num_pinned_;
    added.entries[i] = entry;
  }
  if (!filling) {
    for (const int32_t entry : added.entries)
      if (entry != kNone) unpin({&entry, 1});
  }
  return added;
}

void TierIndex::settle(int32_t entry, bool filled) noexcept {
  entries_[entry].state = filled ? State::kReady : State::kCondemned;
  unpin({&entry, 1});
}

void TierIndex::pin(std::span<const int32_t> entries) noexcept {
  for (const int32_t entry : entries) {
    if (entries_[entry].pins++ > 0) continue;
    unlink(entry);
    ++num_pinned_;
  }
}

void TierIndex::unpin(std::span<const int32_t> entries) noexcept {
  for (const int32_t entry : entries) {
    if (--entries_[entry].pins > 0) continue;
    --num_pinned_;
    if (entries_[entry].state == State::kCondemned) {
      forget(entry);
    } else {
      link_newest(entry);
    }
  }
}

std::vector<Hash128> TierIndex::clear() {
  const auto end = static_cast<int32_t>(capacity());
  std::vector<Hash128> hashes;
  while (entries_[end].newer != end) {
    const int32_t entry = entries_[end].newer;
    hashes.push_back(entries_[entry].hash);
    unlink(entry);
    forget(entry);
  }
  return hashes;
}

bool TierIndex::alive(int32_t entry) const noexcept {
  return entry >= 0 && static_cast<size_t>(entry) < capacity() && entries_[entry].state != State::kFree;
}

std::string TierIndex::check() const {
  const auto wrong = [](int32_t entry, const char* what) { return "entry " + std::to_string(entry) + ": " + what; };
  const auto end = static_cast<int32_t>(capacity());
  size_t size = 0, pinned = 0, num_free = 0, in_order = 0, in_buckets = 0;
  for (int32_t entry = 0; entry < end; ++entry) {
    const Entry& e = entries_[entry];
    if (e.state == State::kFree) continue;
    ++size;
    pinned += e.pins > 0;
    if (lookup(e.hash) != entry) return wrong(entry, "is not found by its hash");
    if (e.state != State::kReady && e.pins == 0) return wrong(entry, "is not found and not pinned");
    if ((e.pins > 0) != (e.older == kNone)) return wrong(entry, "its pins and its place in the order differ");
  }
  for (int32_t entry = first_free_; entry != kNone; entry = entries_[entry].next, ++num_free)
    if (entries_[entry].state != State::kFree || num_free > capacity()) return wrong(entry, "is not free");
  for (int32_t entry = entries_[end].newer; entry != end; entry = entries_[entry].newer, ++in_order)
    if (entries_[entries_[entry].older].newer != entry || in_order > capacity()) return wrong(entry, "breaks the order");
  for (const int32_t head : buckets_)
    for (int32_t entry = head; entry != kNone; entry = entries_[entry].next) ++in_buckets;
  if (size != size_ || in_buckets != size || size + num_free != capacity()) return "the number of entries is wrong";
  if (pinned != num_pinned_ || in_order + pinned != size) return "the number of pinned entries is wrong";
  return {};
}

}  // namespace glm53d
