// Rows that one process writes and anybody reads, neither ever waiting for the other: the load board. [R8]
//
//   SeqlockRow | seq | copy 0 | copy 1 |      write n fills copy n % 2, then stores seq = n
//
// Two copies, because with one, as in the plain seqlock, a writer killed in the middle leaves a row that nobody can
// read any more: just the row that says what the dead process did last. Here the copy that seq names stays whole.
//
// No torn read is taken. A reader loads seq = n, copies copy n % 2, loads seq again and takes the row if it is still n.
// The copy changes under it only by write n + 2, whose words are release stores behind seq.store(n + 1); a reader that
// loads (acquire) one of them therefore sees seq >= n + 1 afterwards, and tries again. Each new try means that a whole
// write happened meanwhile, so some process always gets on.
#pragma once
#include <cstring>
#include <new>

#include "glm53d/futex.h"
#include "glm53d/segment.h"

namespace glm53d {

template <class Row>
class alignas(kCacheLine) SeqlockRow {
 public:
  static constexpr int kMaxTries = 10000;  // a reader that loses this often met no writer of ours

  // By the row's one writer.
  void write(const Row& row) noexcept {
    uint64_t words[kWords];
    std::memcpy(words, &row, sizeof row);
    const uint64_t n = seq_.load(std::memory_order_relaxed) + 1;
    for (size_t i = 0; i < kWords; ++i) copies_[n % 2][i].store(words[i], std::memory_order_release);
    seq_.store(n, std::memory_order_release);  // partner: acquire in read
  }

  // The last row written, all zeros before the first. kTimeout: overtaken kMaxTries times.
  Status read(Row* row) const noexcept {
    uint64_t words[kWords];
    for (int i = 0; i < kMaxTries; ++i) {
      const uint64_t n = seq_.load(std::memory_order_acquire);
      for (size_t j = 0; j < kWords; ++j) words[j] = copies_[n % 2][j].load(std::memory_order_acquire);
      if (seq_.load(std::memory_order_relaxed) == n) {  // stays behind the loads above: they are acquire
        std::memcpy(row, words, sizeof *row);
        return Status::kOk;
      }
    }
    return Status::kTimeout;
  }

 private:
  static constexpr size_t kWords = sizeof(Row) / sizeof(uint64_t);
  static_assert(sizeof(Row) % sizeof(uint64_t) == 0 && std::is_trivially_copyable_v<Row>);

  std::atomic<uint64_t> seq_{0};                // W: the writer   R: anyone
  std::atomic<uint64_t> copies_[2][kWords]{};   // W: the writer   R: anyone
};

struct alignas(kCacheLine) BoardHeader {
  SegmentHeader segment;
  uint32_t num_dp;     // W: creator, before any peer attaches
  uint32_t num_ranks;  // W: creator, before any peer attaches

  SeqlockRow<LoadRow>* loads() noexcept { return reinterpret_cast<SeqlockRow<LoadRow>*>(this + 1); }
  SeqlockRow<RankRow>* ranks() noexcept { return reinterpret_cast<SeqlockRow<RankRow>*>(loads() + num_dp); }
};
static_assert(std::is_standard_layout_v<BoardHeader> && sizeof(BoardHeader) == 128, "shared-memory ABI");
static_assert(sizeof(SeqlockRow<LoadRow>) == 768 && sizeof(SeqlockRow<RankRow>) == 1280, "shared-memory ABI");

inline constexpr uint32_t kMaxBoardRows = 4096;  // of each kind; keeps sizes far from overflow

// Bytes of a segment that holds a board of so many rows.
constexpr size_t board_segment_bytes(uint32_t num_dp, uint32_t num_ranks) noexcept {
  return sizeof(BoardHeader) + num_dp * sizeof(SeqlockRow<LoadRow>) + num_ranks * sizeof(SeqlockRow<RankRow>);
}

// kTooLarge: the segment is too small for the rows, or there are more than kMaxBoardRows.
inline Status board_init(const Segment& segment, uint64_t world_id, uint32_t num_dp, uint32_t num_ranks) noexcept {
  if (num_dp > kMaxBoardRows || num_ranks > kMaxBoardRows) return Status::kTooLarge;
  if (segment.size() < board_segment_bytes(num_dp, num_ranks)) return Status::kTooLarge;
  BoardHeader* header = new (segment.data()) BoardHeader{};
  header->num_dp = num_dp;
  header->num_ranks = num_ranks;
  for (uint32_t i = 0; i < num_dp; ++i) new (header->loads() + i) SeqlockRow<LoadRow>{};
  for (uint32_t i = 0; i < num_ranks; ++i) new (header->ranks() + i) SeqlockRow<RankRow>{};
  init_header(header->segment, SegmentKind::kBoard, world_id);
  return Status::kOk;
}

// The board in the segment, or nullptr: another version or world, or sizes that contradict the segment's.
inline BoardHeader* open_board(const Segment& segment, uint64_t world_id) noexcept {
  BoardHeader* header = open_header<BoardHeader>(segment, SegmentKind::kBoard, world_id);
  if (header == nullptr || header->num_dp > kMaxBoardRows || header->num_ranks > kMaxBoardRows) return nullptr;
  return board_segment_bytes(header->num_dp, header->num_ranks) <= segment.size() ? header : nullptr;
}

}  // namespace glm53d
