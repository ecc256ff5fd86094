// The ring between threads: the same code as between processes, where ThreadSanitizer can see both sides. [R6] [R7]
#include <sched.h>

#include <thread>
#include <vector>

#include "ring_fixture.h"

using namespace glm53d;
using namespace test;

// A stall of more than this is a lost wake-up, not a slow machine.
static constexpr uint64_t kForever = 60 * kSecond;

static void write_all(RingWriter& writer, uint64_t num_records, uint64_t seed, bool one_at_a_time) {
  Random random(seed);
  for (uint64_t n = 0; n < num_records; ++n) {
    while (append(writer, n) == Status::kFull) {
      writer.publish();
      sched_yield();
    }
    if (one_at_a_time || below(random, 3) == 0) writer.publish();
    if (below(random, 50) == 0) sched_yield();
  }
  writer.close();  // without publish: the last ones may be lost, and the reader must not count on them
}

static uint64_t read_all(RingReader& reader, size_t max_length, uint64_t spin_ns) {
  for (uint64_t n = 0;;) {
    const Status status = reader.wait(spin_ns, kForever);
    if (status == Status::kPeerGone) return n;
    CHECK(status == Status::kOk);
    RecordView record;
    while (reader.peek(&record) == Status::kOk) {
      CHECK(is_record(record, n++, max_length));
      reader.pop();
    }
  }
}

static void records_arrive_whole_and_in_order(uint32_t num_readers, uint64_t spin_ns, bool one_at_a_time) {
  constexpr uint64_t kRecords = 10'000;
  Ring ring(4096, num_readers);
  RingWriter writer;
  CHECK(writer.open(ring.segment, kWorld) == Status::kOk);
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < num_readers; ++i) {
    threads.emplace_back([&ring, &writer, i, spin_ns, one_at_a_time] {
      RingReader reader;
      CHECK(reader.open(ring.segment, kWorld, i) == Status::kOk);
      const uint64_t num_read = read_all(reader, writer.max_length(), spin_ns);
      CHECK(one_at_a_time ? num_read == kRecords : num_read > kRecords / 2);
    });
  }
  write_all(writer, kRecords, num_readers, one_at_a_time);
  for (std::thread& thread : threads) thread.join();
}

// Each record is sent only after the one before was answered, so both sides fall asleep again and again, at every
// distance between the other's steps; one lost wake-up would stop it for kForever.
static void no_wake_up_is_lost() {
  Ring there(4096), back(4096);
  std::thread echo([&] {
    RingReader reader;
    RingWriter writer;
    CHECK(reader.open(there.segment, kWorld) == Status::kOk && writer.open(back.segment, kWorld) == Status::kOk);
    for (uint64_t n = 0; reader.wait(0, kForever) == Status::kOk; ++n) {
      RecordView record;
      CHECK(reader.peek(&record) == Status::kOk && is_record(record, n, writer.max_length()));
      reader.pop();
      CHECK(append(writer, n) == Status::kOk);
      writer.publish();
    }
  });
  RingWriter writer;
  RingReader reader;
  CHECK(writer.open(there.segment, kWorld) == Status::kOk && reader.open(back.segment, kWorld) == Status::kOk);
  Random random(3);
  for (uint64_t n = 0; n < 20'000; ++n) {
    for (uint64_t i = below(random, 200); i > 0; --i) cpu_relax();
    CHECK(append(writer, n) == Status::kOk);
    writer.publish();
    CHECK(reader.wait(below(random, 3000), kForever) == Status::kOk);
    RecordView record;
    CHECK(reader.peek(&record) == Status::kOk && is_record(record, n, writer.max_length()));
    reader.pop();
  }
  writer.close();
  echo.join();
}

static void marking_the_writer_gone_wakes_a_sleeper() {
  for (int i = 0; i < 200; ++i) {
    Ring ring(4096, 2);
    std::vector<std::thread> sleepers;
    for (uint32_t index : {0u, 1u}) {
      sleepers.emplace_back([&ring, index] {
        RingReader reader;
        CHECK(reader.open(ring.segment, kWorld, index) == Status::kOk);
        CHECK(reader.wait(0, kForever) == Status::kPeerGone);
      });
    }
    for (int spins = i * 20; spins > 0; --spins) cpu_relax();
    mark_writer_gone(*ring.header);
    for (std::thread& thread : sleepers) thread.join();
  }
}

int main() {
  records_arrive_whole_and_in_order(1, 0, true);
  records_arrive_whole_and_in_order(1, 20'000, false);
  records_arrive_whole_and_in_order(3, 0, false);
  records_arrive_whole_and_in_order(3, 20'000, true);
  no_wake_up_is_lost();
  marking_the_writer_gone_wakes_a_sleeper();
}
