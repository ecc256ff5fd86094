// A ring and the records that the ring tests send: record n has a length and content that follow from n, so a reader
// can tell a torn, lost, repeated or reordered one.
#pragma once
#include <cstring>
#include <span>

#include "check.h"
#include "glm53d/ring.h"

namespace test {

inline constexpr uint64_t kWorld = 0x77;
inline constexpr uint16_t kType = 4;
inline constexpr uint64_t kSecond = 1'000'000'000;

struct Ring {
  explicit Ring(size_t capacity, uint32_t num_readers = 1) {
    CHECK(segment.create("test", glm53d::ring_segment_bytes(capacity, num_readers)) == glm53d::Status::kOk);
    CHECK(glm53d::ring_init(segment, kWorld, num_readers) == glm53d::Status::kOk);
    header = glm53d::open_ring(segment, kWorld);
    CHECK(header != nullptr && header->capacity == capacity);
  }

  glm53d::Segment segment;
  glm53d::RingHeader* header;
};

// 8 ... max bytes: the number n, then a pattern made from it.
inline size_t length_of(uint64_t n, size_t max) { return 8 + (n * 0x9E3779B97F4A7C15 >> 40) % (max - 7); }

inline void fill(std::byte* payload, uint64_t n, size_t length) {
  std::memcpy(payload, &n, 8);
  for (size_t i = 8; i < length; ++i) payload[i] = static_cast<std::byte>(n * 31 + i);
}

inline glm53d::Status append(glm53d::RingWriter& writer, uint64_t n) {
  const size_t length = length_of(n, writer.max_length());
  std::byte* payload = nullptr;
  const glm53d::Status status = writer.append(kType, length, &payload);
  if (status == glm53d::Status::kOk) fill(payload, n, length);
  return status;
}

// Is this record n, whole?
inline bool is_record(const glm53d::RecordView& record, uint64_t n, size_t max) {
  if (record.type != kType || record.payload.size() != length_of(n, max)) return false;
  uint64_t found;
  std::memcpy(&found, record.payload.data(), 8);
  if (found != n) return false;
  for (size_t i = 8; i < record.payload.size(); ++i) {
    if (record.payload[i] != static_cast<std::byte>(n * 31 + i)) return false;
  }
  return true;
}

}  // namespace test
