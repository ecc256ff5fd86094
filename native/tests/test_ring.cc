// The ring in one thread: what a record's way through it keeps, and what is refused. [R6] [R7]
#include <algorithm>
#include <vector>

#include "ring_fixture.h"

using namespace glm53d;
using namespace test;

static void records_come_out_as_they_went_in_wherever_the_end_falls() {
  for (size_t capacity : {64, 128, 1024, 8192}) {
    Random random(capacity);
    Ring ring(capacity);
    RingWriter writer;
    RingReader reader;
    CHECK(writer.open(ring.segment, kWorld) == Status::kOk && reader.open(ring.segment, kWorld) == Status::kOk);
    uint64_t appended = 0, published = 0, popped = 0;
    for (int i = 0; i < 30'000; ++i) {
      switch (below(random, 3)) {
        case 0:
          for (uint64_t n = below(random, 4); n > 0 && append(writer, appended) == Status::kOk; --n) ++appended;
          break;
        case 1:
          writer.publish();
          published = appended;
          break;
        default:
          RecordView record;
          const Status status = reader.peek(&record);
          CHECK(status == (popped < published ? Status::kOk : Status::kEmpty));
          if (status == Status::kEmpty) break;
          CHECK(is_record(record, popped, writer.max_length()));
          CHECK(reinterpret_cast<uintptr_t>(record.payload.data()) % 8 == 0);
          reader.pop();
          ++popped;
      }
    }
    CHECK(popped > 1000);
  }
}

static void a_full_ring_refuses_and_changes_nothing() {
  Ring ring(256);
  RingWriter writer;
  RingReader reader;
  CHECK(writer.open(ring.segment, kWorld) == Status::kOk && reader.open(ring.segment, kWorld) == Status::kOk);
  std::byte* payload;
  uint64_t fitted = 0;
  while (writer.append(kType, 24, &payload) == Status::kOk) fill(payload, fitted++, 24);
  CHECK(fitted == 8 && writer.free_bytes() == 0);
  CHECK(writer.append(kType, 0, &payload) == Status::kFull);
  writer.publish();
  RecordView record;
  for (uint64_t n = 0; n < fitted; ++n) {
    CHECK(reader.peek(&record) == Status::kOk && record.payload.size() == 24);
    CHECK(std::memcmp(record.payload.data(), &n, 8) == 0);
    reader.pop();
  }
  CHECK(reader.peek(&record) == Status::kEmpty && writer.free_bytes() == 256);
}

static void the_longest_record_fits_an_empty_ring_at_every_offset() {
  for (size_t steps = 0; steps < 64; ++steps) {
    Ring ring(512);
    RingWriter writer;
    RingReader reader;
    CHECK(writer.open(ring.segment, kWorld) == Status::kOk && reader.open(ring.segment, kWorld) == Status::kOk);
    std::byte* payload;
    RecordView record;
    for (size_t i = 0; i < steps; ++i) {
      CHECK(writer.append(kType, 0, &payload) == Status::kOk);
      writer.publish();
      CHECK(reader.peek(&record) == Status::kOk && record.payload.empty());
      reader.pop();
    }
    CHECK(writer.max_length() == 248);
    CHECK(writer.append(kType, 249, &payload) == Status::kTooLarge);
    CHECK(writer.append(kType, 248, &payload) == Status::kOk);
    fill(payload, steps, 248);
    writer.publish();
    CHECK(reader.peek(&record) == Status::kOk && record.payload.size() == 248);
    reader.pop();
  }
}

static void every_reader_sees_every_record_and_the_slowest_live_one_bounds_the_writer() {
  Ring ring(1024, 3);
  RingWriter writer;
  RingReader fast, slow;  // the third attaches late: until then it stands at the start
  CHECK(writer.open(ring.segment, kWorld) == Status::kOk);
  CHECK(fast.open(ring.segment, kWorld, 0) == Status::kOk && slow.open(ring.segment, kWorld, 1) == Status::kOk);
  const auto fill_ring = [&](uint64_t n) {
    while (append(writer, n) == Status::kOk) ++n;
    writer.publish();
    return n;
  };
  const auto drain = [&](RingReader& reader, uint64_t from, uint64_t to) {
    RecordView record;
    for (; from < to; ++from) {
      CHECK(reader.peek(&record) == Status::kOk && is_record(record, from, writer.max_length()));
      reader.pop();
    }
    CHECK(reader.peek(&record) == Status::kEmpty);
  };
  const uint64_t first = fill_ring(0);
  CHECK(first > 2);
  drain(fast, 0, first);
  drain(slow, 0, first);
  CHECK(fill_ring(first) == first);  // the absent one has read nothing
  RingReader late;
  CHECK(late.open(ring.segment, kWorld, 2) == Status::kOk);
  drain(late, 0, first);
  const uint64_t second = fill_ring(first);
  CHECK(second > first);
  drain(fast, first, second);
  drain(late, first, second);
  CHECK(fill_ring(second) == second);
  mark_reader_gone(*ring.header, 1);
  const uint64_t third = fill_ring(second);
  CHECK(third > second);
  drain(fast, second, third);
  drain(late, second, third);
  fast.close();
  late.close();
  std::byte* payload;
  Status status = Status::kOk;
  while (status == Status::kOk) status = writer.append(kType, 100, &payload);
  CHECK(status == Status::kPeerGone);  // nobody is left to read
}

static void each_end_is_taken_once() {
  Ring ring(256, 2);
  RingReader reader, other;
  CHECK(reader.open(ring.segment, kWorld, 0) == Status::kOk && other.open(ring.segment, kWorld, 0) == Status::kTaken);
  CHECK(other.open(ring.segment, kWorld, 2) == Status::kAbiMismatch);
  {
    RingWriter writer, second;
    CHECK(writer.open(ring.segment, kWorld) == Status::kOk && second.open(ring.segment, kWorld) == Status::kTaken);
  }
  RingWriter writer;
  CHECK(writer.open(ring.segment, kWorld) == Status::kTaken);  // the one that went out of scope closed it
  mark_reader_gone(*ring.header, 1);
  CHECK(other.open(ring.segment, kWorld, 1) == Status::kTaken);  // given up before it came
}

static void a_reader_takes_what_a_closed_writer_published_then_sees_it_gone() {
  Ring ring(1024);
  RingReader reader;
  CHECK(reader.open(ring.segment, kWorld) == Status::kOk);
  {
    RingWriter writer;
    CHECK(writer.open(ring.segment, kWorld) == Status::kOk);
    CHECK(append(writer, 0) == Status::kOk);
    writer.publish();
    CHECK(append(writer, 1) == Status::kOk);  // never published
  }
  RecordView record;
  CHECK(reader.wait(0, kSecond) == Status::kOk && reader.peek(&record) == Status::kOk);
  reader.pop();
  CHECK(reader.wait(0, kSecond) == Status::kPeerGone && reader.peek(&record) == Status::kEmpty);
}

static void a_wait_ends_at_its_deadline() {
  Ring ring(1024);
  RingReader reader;
  CHECK(reader.open(ring.segment, kWorld) == Status::kOk);
  for (uint64_t spin_ns : {uint64_t{0}, uint64_t{1'000'000}, kSecond}) {
    const uint64_t start = monotonic_ns();
    CHECK(reader.wait(spin_ns, 5'000'000) == Status::kTimeout);
    CHECK(monotonic_ns() - start >= 5'000'000);
  }
}

static void what_no_writer_writes_is_corrupt_and_nothing_outside_is_read() {
  Random random(1);
  int corrupt = 0;
  for (int i = 0; i < 20'000; ++i) {
    Ring ring(256);
    RingReader reader;
    CHECK(reader.open(ring.segment, kWorld) == Status::kOk);
    for (size_t at = 0; at < 256; at += 8) {
      const uint32_t lengths[] = {0, 8, 100, 248, 256, 0xFFFFFFF8, 0xFFFFFFFF, static_cast<uint32_t>(random())};
      const uint16_t types[] = {0, kType, kWrapMark, kType};
      const RecordHeader header{lengths[below(random, 8)], types[below(random, 4)], 0};
      std::memcpy(ring.header->data() + at, &header, sizeof header);
    }
    const uint64_t tails[] = {8, 16, 64, 256, 264, 7, random()};
    ring.header->tail.store(tails[below(random, 7)]);
    RecordView record;
    Status status = Status::kOk;
    for (int n = 0; status == Status::kOk && n < 64; ++n) {
      status = reader.peek(&record);
      if (status != Status::kOk) break;
      const auto* end = record.payload.data() + record.payload.size();
      CHECK(record.payload.data() >= ring.header->data() && end <= ring.header->data() + 256);
      reader.pop();
    }
    corrupt += status == Status::kCorrupt;
  }
  CHECK(corrupt > 10'000);
}

int main() {
  records_come_out_as_they_went_in_wherever_the_end_falls();
  a_full_ring_refuses_and_changes_nothing();
  the_longest_record_fits_an_empty_ring_at_every_offset();
  every_reader_sees_every_record_and_the_slowest_live_one_bounds_the_writer();
  each_end_is_taken_once();
  a_reader_takes_what_a_closed_writer_published_then_sees_it_gone();
  a_wait_ends_at_its_deadline();
  what_no_writer_writes_is_corrupt_and_nothing_outside_is_read();
}
