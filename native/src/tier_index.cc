#include "glm53d/tier_index.h"

namespace glm53d {

TierIndex::TierIndex(size_t capacity) : capacity_(capacity), buckets_(64, kNone) {}

int32_t TierIndex::new_entry() {
  if (first_free_ != kNone) {
    const int32_t entry = first_free_;
    first_free_ = entries_[entry].next;
    return entry;
  }
  if (entries_.size() == capacity_) return kNone;
  entries_.emplace_back();
  if (entries_.size() == buckets_.size()) grow_buckets();
  return static_cast<int32_t>(entries_.size() - 1);
}

void TierIndex::grow_buckets() {
  buckets_.assign(2 * buckets_.size(), kNone);
  for (size_t entry = 0; entry < entries_.size(); ++entry) {
    if (entries_[entry].state == State::kFree) continue;
    int32_t& head = bucket(entries_[entry].hash);
    entries_[entry].next = head;
    head = static_cast<int32_t>(entry);
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
  (e.older == kNone ? oldest_ : entries_[e.older].newer) = e.newer;
  (e.newer == kNone ? newest_ : entries_[e.newer].older) = e.older;
  e.older = e.newer = kNone;
}

void TierIndex::link_newest(int32_t entry) noexcept {
  entries_[entry].older = newest_;
  (newest_ == kNone ? oldest_ : entries_[newest_].newer) = entry;
  newest_ = entry;
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
  Added added{std::vector<int32_t>(hashes.size(), kNone), {}};
  std::vector<int32_t> held(hashes.size());  // until all have their place: what is there, then what is added
  for (size_t i = 0; i < hashes.size(); ++i) {
    held[i] = lookup(hashes[i]);
    if (held[i] != kNone) pin({&held[i], 1});
  }
  for (size_t i = hashes.size(); i-- > 0;) {
    if (held[i] != kNone || lookup(hashes[i]) != kNone) continue;
    int32_t entry = new_entry();
    if (entry == kNone) {
      const int32_t oldest = oldest_;
      if (oldest == kNone) break;
      added.dropped.push_back(entries_[oldest].hash);
      unlink(oldest);
      forget(oldest);
      entry = new_entry();
    }
    Entry& e = entries_[entry];
    int32_t& head = bucket(hashes[i]);
    e.hash = hashes[i];
    e.state = filling ? State::kFilling : State::kReady;
    e.next = head;
    head = entry;
    e.pins = 1;
    ++size_;
    ++num_pinned_;
    added.entries[i] = entry;
    if (!filling) held[i] = entry;
  }
  for (const int32_t entry : held)
    if (entry != kNone) unpin({&entry, 1});
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
  std::vector<Hash128> hashes;
  while (oldest_ != kNone) {
    const int32_t entry = oldest_;
    hashes.push_back(entries_[entry].hash);
    unlink(entry);
    forget(entry);
  }
  return hashes;
}

bool TierIndex::alive(int32_t entry) const noexcept {
  return entry >= 0 && static_cast<size_t>(entry) < entries_.size() && entries_[entry].state != State::kFree;
}

std::string TierIndex::check() const {
  const auto wrong = [](int32_t entry, const char* what) { return "entry " + std::to_string(entry) + ": " + what; };
  size_t size = 0, pinned = 0, num_free = 0, in_order = 0, in_buckets = 0;
  for (int32_t entry = 0; entry < static_cast<int32_t>(entries_.size()); ++entry) {
    const Entry& e = entries_[entry];
    if (e.state == State::kFree) continue;
    ++size;
    pinned += e.pins > 0;
    if (lookup(e.hash) != entry) return wrong(entry, "is not found by its hash");
    if (e.state != State::kReady && e.pins == 0) return wrong(entry, "is not found and not pinned");
  }
  for (int32_t entry = first_free_; entry != kNone; entry = entries_[entry].next)
    if (entries_[entry].state != State::kFree || ++num_free > entries_.size()) return wrong(entry, "is not free");
  for (int32_t entry = oldest_, before = kNone; entry != kNone; before = entry, entry = entries_[entry].newer) {
    if (entries_[entry].older != before || ++in_order > size) return wrong(entry, "breaks the order");
    if (entries_[entry].pins > 0) return wrong(entry, "is pinned and may be dropped");
  }
  for (const int32_t head : buckets_)
    for (int32_t entry = head; entry != kNone; entry = entries_[entry].next) ++in_buckets;
  if (size != size_ || in_buckets != size || size + num_free != entries_.size() || entries_.size() > capacity_)
    return "the number of entries is wrong";
  if (pinned != num_pinned_ || in_order + pinned != size) return "the number of pinned entries is wrong";
  return {};
}

}  // namespace glm53d
