// Signals: of each two ranks, counters by which one tells the other how far it is; and what each exports. [R11]
//
//   SignalHeader | one SignalRow for each rank, with one Count for each rank behind it
//
//   row(to).counts()[from]    only grows: rank `from` raises it, rank `to` waits for it
//   row(rank).handle          how other processes open that rank's device memory; nothing in the shm form
//
// Order:  `from` writes what `to` shall read, in memory that both map, then stores the count; `to` loads the count, then
//         reads. Nothing else synchronises.
// Death:  a rank that is killed never raises its counts again: main marks its row gone, and whoever waits for it sees it.
//
// No wake-up is lost, by the argument in ring.h: the waiter stores `asleep`, then looks at the counts; who raises one
// stores it, then looks at `asleep`. All four are seq_cst, so one of the two sees the other.
#pragma once
#include <algorithm>
#include <cstring>
#include <new>
#include <span>

#include "glm53d/futex.h"
#include "glm53d/segment.h"

namespace glm53d {

inline constexpr uint32_t kMaxSignalRanks = 64;
inline constexpr size_t kHandleBytes = 64;  // of a CUDA IPC memory handle

struct alignas(kCacheLine) Count {
  std::atomic<uint64_t> value{0};                             // W: the row's peer   R: the row's rank
};

struct alignas(kCacheLine) SignalRow {
  std::atomic<uint32_t> asleep{0};                            // W: this rank, wakers   R: its peers
  std::atomic<Liveness> state{Liveness::kAbsent};             // W: this rank, main     R: its peers
  std::atomic<uint64_t> exported_bytes{0};                    // W: this rank, behind the handle   R: its peers
  unsigned char handle[kHandleBytes]{};                       // W: this rank, once     R: its peers, behind exported_bytes

  Count* counts() noexcept { return reinterpret_cast<Count*>(this + 1); }
};

struct SignalHeader {
  SegmentHeader segment;
  uint32_t num_ranks;                                         // W: creator, before any peer attaches

  SignalRow& row(uint32_t rank) noexcept {
    std::byte* rows = reinterpret_cast<std::byte*>(this) + kCacheLine * 2;
    return *reinterpret_cast<SignalRow*>(rows + rank * (sizeof(SignalRow) + num_ranks * sizeof(Count)));
  }
};
static_assert(std::is_standard_layout_v<SignalHeader> && sizeof(SignalHeader) == 2 * kCacheLine, "shared-memory ABI");
static_assert(std::is_standard_layout_v<SignalRow> && sizeof(SignalRow) == 2 * kCacheLine, "shared-memory ABI");
static_assert(offsetof(SignalRow, exported_bytes) == 8 && offsetof(SignalRow, handle) == 16, "shared-memory ABI");
static_assert(std::is_standard_layout_v<Count> && sizeof(Count) == kCacheLine, "shared-memory ABI");

// Bytes of a segment that holds the signals of so many ranks.
constexpr size_t signals_segment_bytes(uint32_t num_ranks) noexcept {
  return sizeof(SignalHeader) + num_ranks * (sizeof(SignalRow) + num_ranks * sizeof(Count));
}

// kTooLarge: the segment is too small for the ranks, or there are more than kMaxSignalRanks.
inline Status signals_init(const Segment& segment, uint64_t world_id, uint32_t num_ranks) noexcept {
  if (num_ranks < 1 || num_ranks > kMaxSignalRanks) return Status::kTooLarge;
  if (segment.size() < signals_segment_bytes(num_ranks)) return Status::kTooLarge;
  SignalHeader* header = new (segment.data()) SignalHeader{};
  header->num_ranks = num_ranks;
  for (uint32_t i = 0; i < num_ranks; ++i) {
    SignalRow* row = new (&header->row(i)) SignalRow{};
    for (uint32_t j = 0; j < num_ranks; ++j) new (row->counts() + j) Count{};
  }
  init_header(header->segment, SegmentKind::kSignals, world_id);
  return Status::kOk;
}

// The signals in the segment, or nullptr: another version or world, or sizes that contradict the segment's.
inline SignalHeader* open_signals(const Segment& segment, uint64_t world_id) noexcept {
  SignalHeader* header = open_header<SignalHeader>(segment, SegmentKind::kSignals, world_id);
  if (header == nullptr || header->num_ranks < 1 || header->num_ranks > kMaxSignalRanks) return nullptr;
  return signals_segment_bytes(header->num_ranks) <= segment.size() ? header : nullptr;
}

inline void wake_row(SignalRow& row) noexcept {
  row.asleep.store(0);
  futex_wake(row.asleep);
}

// By the rank when it closes, and by main when its process is dead.
inline void mark_rank_gone(SignalHeader& header, uint32_t rank) noexcept {
  header.row(rank).state.store(Liveness::kGone);
  for (uint32_t i = 0; i < header.num_ranks; ++i) wake_row(header.row(i));
}

// One rank's end. One thread.
class Signals {
 public:
  Signals() = default;
  Signals(const Signals&) = delete;
  ~Signals() { close(); }

  // kAbiMismatch (also when there is no such rank), or kTaken: each end is held once in its life.
  Status open(const Segment& segment, uint64_t world_id, uint32_t rank) noexcept {
    SignalHeader* header = open_signals(segment, world_id);
    if (header == nullptr || rank >= header->num_ranks) return Status::kAbiMismatch;
    Liveness expected = Liveness::kAbsent;
    if (!header->row(rank).state.compare_exchange_strong(expected, Liveness::kAttached)) return Status::kTaken;
    header_ = header;
    rank_ = rank;
    return Status::kOk;
  }

  uint32_t rank() const noexcept { return rank_; }
  uint32_t num_ranks() const noexcept { return header_->num_ranks; }

  // Tells rank `to` that we have come to `value`.
  void raise(uint32_t to, uint64_t value) noexcept {
    SignalRow& row = header_->row(to);
    row.counts()[rank_].value.store(value);
    if (row.asleep.load() != 0) wake_row(row);
  }

  // Until rank `from` has come to `value`. kPeerGone: it is gone and has not. kTimeout: not yet, or a signal of the
  // operating system arrived. Spins for spin_ns of the timeout first.
  Status wait(uint32_t from, uint64_t value, uint64_t spin_ns, uint64_t timeout_ns) noexcept {
    Status status = poll(from, value);
    if (status != Status::kEmpty) return status;
    const uint64_t deadline = deadline_after(timeout_ns);
    const uint64_t spin_end = std::min(deadline, deadline_after(spin_ns));
    while (monotonic_ns() < spin_end) {
      for (int i = 0; i < 16; ++i) cpu_relax();
      status = poll(from, value);
      if (status != Status::kEmpty) return status;
    }
    SignalRow& mine = header_->row(rank_);
    Status slept = Status::kOk;
    while (slept == Status::kOk) {
      mine.asleep.store(1);
      status = poll(from, value);
      if (status != Status::kEmpty) break;
      slept = futex_wait(mine.asleep, 1, deadline);
    }
    mine.asleep.store(0, std::memory_order_relaxed);  // seen late, it costs a peer one wake that wakes nobody
    return status == Status::kEmpty ? Status::kTimeout : status;
  }

  // Shows our device memory to all; once.
  void export_memory(std::span<const unsigned char, kHandleBytes> handle, uint64_t num_bytes) noexcept {
    SignalRow& mine = header_->row(rank_);
    std::memcpy(mine.handle, handle.data(), kHandleBytes);
    mine.exported_bytes.store(num_bytes);
  }

  // What rank `of` has exported: 0 bytes before it has.
  uint64_t exported(uint32_t of, std::span<unsigned char, kHandleBytes> handle) const noexcept {
    SignalRow& row = header_->row(of);
    const uint64_t num_bytes = row.exported_bytes.load();
    if (num_bytes != 0) std::memcpy(handle.data(), row.handle, kHandleBytes);
    return num_bytes;
  }

  // Nobody waits for us any more.
  void close() noexcept {
    if (header_ != nullptr && !closed_) mark_rank_gone(*header_, rank_);
    closed_ = true;
  }

 private:
  Status poll(uint32_t from, uint64_t value) noexcept {
    const bool gone = header_->row(from).state.load() == Liveness::kGone;  // first: once seen, the count is final
    if (header_->row(rank_).counts()[from].value.load() >= value) return Status::kOk;
    return gone ? Status::kPeerGone : Status::kEmpty;
  }

  SignalHeader* header_ = nullptr;
  uint32_t rank_ = 0;
  bool closed_ = false;
};

}  // namespace glm53d
