// The ring: one writer process, R reader processes that each see every record. [R6] [R7]
//
// With R = 1 it is the request, output and result ring, with more the batch ring; only the number of heads differs.
//
//   tail     bytes ever published    head     bytes ever consumed, one for each reader
//   data[]   at (counter & (capacity - 1)); capacity is a power of two
//
//   record   | uint32 length | uint16 type | uint16 0 | payload | zero to seven bytes, so that the next is 8-aligned |
//
// A record does not straddle the end: a wrap mark (type 0xFFFF) says that the rest is unused. Therefore a record may be
// half the capacity at most: then an empty ring takes it wherever head stands.
//
// Always: head <= tail <= head + capacity, for each head that is not gone.
// Order:  writer fills the bytes, then tail.store; reader loads tail, then reads them. Reader uses them up, then
//         head.store(release); writer head.load(acquire), then overwrites. Nothing else synchronises: all other fields
//         are constant once a peer is attached, or are liveness and sleep words, below.
// Death:  a writer killed before its tail.store has published nothing. A reader killed stands still, so the writer sees
//         a full ring until main marks that reader gone; then it no longer counts. With no reader left: kPeerGone.
//
// No wake-up is lost.
//   Reader: (1) asleep.store(1)    (2) loads writer_state, then tail: nothing    (3) futex_wait(asleep, 1)
//   Writer: (4) tail.store         (5) asleep.load, and if 1:                    (6) asleep.store(0), futex_wake
//   (1) (2) (4) (5) are seq_cst, so they have one order that all agree on. If (2) did not see the tail of (4), then (1)
//   is before (2) is before (4) is before (5), and (5) sees the 1. Then either (6) comes before the kernel compares the
//   word in (3), which returns at once, or the reader is already on the kernel's list, where the wake finds it: the
//   kernel compares and enlists under the lock that the wake takes. If (6) belongs to an earlier sleep and comes late,
//   the reader wakes for nothing and looks again. For a writer marked gone the argument is the same, with
//   writer_state.store(gone) in place of (4); there (6) is unconditional, for a writer that was killed inside it.
#pragma once
#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <span>

#include "glm53d/futex.h"
#include "glm53d/segment.h"

namespace glm53d {

inline constexpr uint32_t kMaxReaders = 64;
inline constexpr uint64_t kMinCapacity = 64;
inline constexpr uint16_t kWrapMark = 0xFFFF;

struct ReaderSlot {
  alignas(kCacheLine) std::atomic<uint64_t> head{0};            // W: this reader   R: writer, when its room runs out
  alignas(kCacheLine) std::atomic<uint32_t> asleep{0};          // W: this reader, waker   R: writer, at each publish
  std::atomic<Liveness> state{Liveness::kAbsent};               // W: this reader, main   R: writer, with head
};

struct RingHeader {
  SegmentHeader segment;
  uint64_t capacity;                                            // W: creator, before any peer attaches
  uint32_t num_readers;                                         // W: creator, before any peer attaches
  std::atomic<Liveness> writer_state{Liveness::kAbsent};        // W: writer, main   R: readers
  alignas(kCacheLine) std::atomic<uint64_t> tail{0};            // W: writer         R: readers

  ReaderSlot* slots() noexcept { return reinterpret_cast<ReaderSlot*>(this + 1); }
  std::byte* data() noexcept { return reinterpret_cast<std::byte*>(slots() + num_readers); }
};
static_assert(std::atomic<Liveness>::is_always_lock_free, "a fallback lock would be private to each process");
static_assert(std::is_standard_layout_v<ReaderSlot> && sizeof(ReaderSlot) == 128, "shared-memory ABI");
static_assert(std::is_standard_layout_v<RingHeader> && sizeof(RingHeader) == 192, "shared-memory ABI");
static_assert(offsetof(RingHeader, writer_state) == 76 && offsetof(RingHeader, tail) == 128, "shared-memory ABI");

struct RecordHeader {
  uint32_t length;  // of the payload
  uint16_t type;    // RecordType, or kWrapMark
  uint16_t zero;
};
static_assert(sizeof(RecordHeader) == 8, "shared-memory ABI");

// A record where it lies in the ring.
struct RecordView {
  uint16_t type;
  std::span<const std::byte> payload;  // 8-aligned
};

// Bytes of a segment that holds a ring of this capacity.
constexpr size_t ring_segment_bytes(size_t capacity, uint32_t num_readers) noexcept {
  return sizeof(RingHeader) + num_readers * sizeof(ReaderSlot) + capacity;
}

// Makes the segment a ring, with the largest power of two that fits as its capacity. kTooLarge: not even kMinCapacity
// fits, or num_readers is not 1 ... kMaxReaders.
inline Status ring_init(const Segment& segment, uint64_t world_id, uint32_t num_readers) noexcept {
  if (num_readers < 1 || num_readers > kMaxReaders) return Status::kTooLarge;
  if (segment.size() < ring_segment_bytes(kMinCapacity, num_readers)) return Status::kTooLarge;
  RingHeader* header = new (segment.data()) RingHeader{};
  header->capacity = std::bit_floor(segment.size() - ring_segment_bytes(0, num_readers));
  header->num_readers = num_readers;
  for (uint32_t i = 0; i < num_readers; ++i) new (header->slots() + i) ReaderSlot{};
  init_header(header->segment, SegmentKind::kRing, world_id);
  return Status::kOk;
}

// The ring in the segment, or nullptr: another version or world, or sizes that contradict the segment's.
inline RingHeader* open_ring(const Segment& segment, uint64_t world_id) noexcept {
  RingHeader* header = open_header<RingHeader>(segment, SegmentKind::kRing, world_id);
  if (header == nullptr || header->num_readers < 1 || header->num_readers > kMaxReaders) return nullptr;
  if (!std::has_single_bit(header->capacity) || header->capacity < kMinCapacity) return nullptr;
  const size_t room = segment.size() - std::min(segment.size(), ring_segment_bytes(0, header->num_readers));
  return header->capacity <= room ? header : nullptr;
}

inline Status claim(std::atomic<Liveness>& state) noexcept {
  Liveness expected = Liveness::kAbsent;
  return state.compare_exchange_strong(expected, Liveness::kAttached) ? Status::kOk : Status::kTaken;
}

// By the writer when it closes, and by main when the writer's process is dead: readers take what was published, then
// see kPeerGone; those that sleep are woken.
inline void mark_writer_gone(RingHeader& header) noexcept {
  header.writer_state.store(Liveness::kGone);
  for (ReaderSlot& slot : std::span(header.slots(), header.num_readers)) {
    slot.asleep.store(0);
    futex_wake(slot.asleep);
  }
}

// By the reader when it closes, and by main when its process is dead: it no longer bounds the writer.
inline void mark_reader_gone(RingHeader& header, uint32_t index) noexcept {
  header.slots()[index].state.store(Liveness::kGone);
}

// The writing end. One thread. Never waits.
class RingWriter {
 public:
  RingWriter() = default;
  RingWriter(const RingWriter&) = delete;
  ~RingWriter() { close(); }

  // kAbiMismatch, or kTaken: a ring has one writer in its life.
  Status open(const Segment& segment, uint64_t world_id) noexcept {
    RingHeader* header = open_ring(segment, world_id);
    if (header == nullptr) return Status::kAbiMismatch;
    const Status status = claim(header->writer_state);
    if (status == Status::kOk) header_ = header;
    return status;
  }

  // The longest payload that this ring can ever take.
  size_t max_length() const noexcept { return header_->capacity / 2 - sizeof(RecordHeader); }

  // Makes room for a record; the caller fills payload, all of it, before publish(). kFull changes nothing. kTooLarge:
  // it will never fit. kPeerGone: nobody is left to read it.
  Status append(uint16_t type, size_t length, std::byte** payload) noexcept {
    if (length > max_length()) return Status::kTooLarge;
    const uint64_t needed = sizeof(RecordHeader) + align8(length);
    const uint64_t to_end = header_->capacity - (appended_ & (header_->capacity - 1));
    const uint64_t skipped = needed > to_end ? to_end : 0;
    if (skipped + needed > room()) {
      const Status status = refresh();
      if (status != Status::kOk) return status;
      if (skipped + needed > room()) return Status::kFull;
    }
    if (skipped > 0) {
      put_header({0, kWrapMark, 0});
      appended_ += skipped;
    }
    *payload = put_header({static_cast<uint32_t>(length), type, 0});
    appended_ += needed;
    return Status::kOk;
  }

  // Makes all that was appended visible at once, and wakes readers that sleep.
  void publish() noexcept {
    if (appended_ == published_) return;
    header_->tail.store(appended_);  // (4), seq_cst
    published_ = appended_;
    for (ReaderSlot& slot : std::span(header_->slots(), header_->num_readers)) {
      if (slot.asleep.load() != 0) {  // (5), seq_cst
        slot.asleep.store(0);         // (6)
        futex_wake(slot.asleep);
      }
    }
  }

  // Bytes that are free now; a record takes 8 more than its payload, and perhaps what is left before the end.
  uint64_t free_bytes() noexcept {
    return refresh() == Status::kOk ? room() : 0;
  }

  // Marks this end gone. What was not published is lost; what was can still be read.
  void close() noexcept {
    if (header_ != nullptr && !closed_) mark_writer_gone(*header_);
    closed_ = true;
  }

 private:
  uint64_t room() const noexcept { return header_->capacity - (appended_ - slowest_); }

  // Takes the slowest live reader's head. One that has not attached yet stands at 0 and counts.
  Status refresh() noexcept {
    uint64_t slowest = UINT64_MAX;
    for (ReaderSlot& slot : std::span(header_->slots(), header_->num_readers)) {
      // acquire: what that reader still read is read before we overwrite it.
      if (slot.state.load() != Liveness::kGone) slowest = std::min(slowest, slot.head.load(std::memory_order_acquire));
    }
    if (slowest == UINT64_MAX) return Status::kPeerGone;
    slowest_ = slowest;
    return Status::kOk;
  }

  std::byte* put_header(RecordHeader header) noexcept {
    std::byte* at = header_->data() + (appended_ & (header_->capacity - 1));
    std::memcpy(at, &header, sizeof header);
    return at + sizeof header;
  }

  RingHeader* header_ = nullptr;
  bool closed_ = false;
  uint64_t published_ = 0;  // our own copy of tail
  uint64_t appended_ = 0;   // >= published_
  uint64_t slowest_ = 0;    // a head as last seen: it may have moved on since, never back
};

// One reading end. One thread.
class RingReader {
 public:
  RingReader() = default;
  RingReader(const RingReader&) = delete;
  ~RingReader() { close(); }

  // kAbiMismatch (also when there is no reader of that index), or kTaken: each end is held once in its life.
  Status open(const Segment& segment, uint64_t world_id, uint32_t index = 0) noexcept {
    RingHeader* header = open_ring(segment, world_id);
    if (header == nullptr || index >= header->num_readers) return Status::kAbiMismatch;
    const Status status = claim(header->slots()[index].state);
    if (status == Status::kOk) {
      header_ = header;
      slot_ = header->slots() + index;
    }
    return status;
  }

  // The oldest record that was not popped, in place, or kEmpty. kCorrupt: a length or type that no writer writes;
  // nothing outside the ring was touched, and there is no way on.
  Status peek(RecordView* record) noexcept {
    if (head_ == tail_) {
      tail_ = header_->tail.load(std::memory_order_acquire);
      if (head_ == tail_) return Status::kEmpty;
    }
    if (tail_ - head_ > header_->capacity || tail_ % 8 != 0) return Status::kCorrupt;
    RecordHeader found = header_at(head_);
    if (found.type == kWrapMark) {
      const uint64_t skipped = header_->capacity - (head_ & (header_->capacity - 1));
      if (skipped >= tail_ - head_) return Status::kCorrupt;  // a mark is published with the record behind it
      head_ += skipped;
      found = header_at(head_);
    }
    const uint64_t taken = sizeof(RecordHeader) + align8(found.length);
    const uint64_t offset = head_ & (header_->capacity - 1);
    if (found.type == 0 || found.type == kWrapMark || found.zero != 0) return Status::kCorrupt;
    if (taken > tail_ - head_ || taken > header_->capacity - offset) return Status::kCorrupt;
    *record = {found.type, {header_->data() + offset + sizeof(RecordHeader), found.length}};
    next_ = head_ + taken;
    return Status::kOk;
  }

  // Gives the peeked record's bytes back to the writer; the view is dead.
  void pop() noexcept {
    head_ = next_;
    slot_->head.store(head_, std::memory_order_release);  // partner: acquire in RingWriter::refresh
  }

  // kOk: there is something to read. kPeerGone: the writer is gone and all it published has been read. kTimeout:
  // nothing yet, or a signal arrived. Spins for spin_ns of the timeout first: a sleeper costs the writer a system call.
  Status wait(uint64_t spin_ns, uint64_t timeout_ns) noexcept {
    Status status = poll();
    if (status != Status::kEmpty) return status;
    const uint64_t deadline = deadline_after(timeout_ns);
    const uint64_t spin_end = std::min(deadline, deadline_after(spin_ns));
    while (monotonic_ns() < spin_end) {
      for (int i = 0; i < 16; ++i) cpu_relax();
      status = poll();
      if (status != Status::kEmpty) return status;
    }
    Status slept = Status::kOk;
    while (slept == Status::kOk) {
      slot_->asleep.store(1);  // (1), seq_cst
      status = poll();         // (2)
      if (status != Status::kEmpty) break;
      slept = futex_wait(slot_->asleep, 1, deadline);  // (3)
    }
    // Relaxed: seen late, it costs the writer one wake that wakes nobody.
    slot_->asleep.store(0, std::memory_order_relaxed);
    return status == Status::kEmpty ? Status::kTimeout : status;
  }

  // Marks this end gone: it no longer bounds the writer.
  void close() noexcept {
    if (slot_ != nullptr) slot_->state.store(Liveness::kGone);
  }

 private:
  // The state before the tail: once gone is seen, the tail is final.
  Status poll() noexcept {
    const bool gone = header_->writer_state.load() == Liveness::kGone;  // seq_cst, as the next
    if (head_ == tail_) tail_ = header_->tail.load();
    if (head_ != tail_) return Status::kOk;
    return gone ? Status::kPeerGone : Status::kEmpty;
  }

  RecordHeader header_at(uint64_t position) const noexcept {
    RecordHeader header;
    std::memcpy(&header, header_->data() + (position & (header_->capacity - 1)), sizeof header);
    return header;
  }

  RingHeader* header_ = nullptr;
  ReaderSlot* slot_ = nullptr;
  uint64_t head_ = 0;  // our own copy of slot_->head, past a wrap mark already
  uint64_t next_ = 0;  // behind the peeked record
  uint64_t tail_ = 0;  // as last seen: it may have moved on since, never back
};

}  // namespace glm53d
