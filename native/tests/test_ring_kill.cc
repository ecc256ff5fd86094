// The ring between processes, either of which is killed at a random moment. [R6] [R7]
#include <thread>
#include <vector>

#include "ring_fixture.h"

using namespace glm53d;
using namespace test;

static constexpr int kKills = 150;
static constexpr uint64_t kForever = 60 * kSecond;

static void pause_ns(uint64_t ns) {
  const timespec time{0, static_cast<long>(ns)};
  nanosleep(&time, nullptr);
}

// Up to 3 ms from now. Every other time only once the peer is there: under a sanitizer it may take longer than that to
// come.
static uint64_t random_moment(Random& random, int i, const std::atomic<Liveness>& peer) {
  while (i % 2 == 1 && peer.load() == Liveness::kAbsent) pause_ns(50'000);
  return monotonic_ns() + below(random, 3'000'000);
}

// Two counters in shared memory that survive whoever wrote them.
struct Counters {
  Counters() {
    CHECK(segment.create("counters", 4096) == Status::kOk);
    published = new (segment.data()) std::atomic<uint64_t>{0};
    popped = new (segment.data() + 64) std::atomic<uint64_t>{0};
  }
  Segment segment;
  std::atomic<uint64_t>* published;
  std::atomic<uint64_t>* popped;
};

// Returns how many records it took, each checked, until the writer is gone.
static uint64_t take_all(RingReader& reader, size_t max_length) {
  for (uint64_t n = 0;;) {
    const Status status = reader.wait(n % 2 * 5000, kForever);
    if (status == Status::kPeerGone) return n;
    CHECK(status == Status::kOk);
    RecordView record;
    while (reader.peek(&record) == Status::kOk) {
      CHECK(is_record(record, n++, max_length));
      reader.pop();
    }
  }
}

static void all_that_a_killed_writer_published_arrives_whole(Random& random) {
  uint64_t seen = 0;
  for (int i = 0; i < kKills; ++i) {
    Ring ring(4096);
    Counters counters;
    const pid_t child = start([&] {
      RingWriter writer;
      CHECK(writer.open(ring.segment, kWorld) == Status::kOk);
      for (uint64_t n = 0;; ++n) {
        while (append(writer, n) == Status::kFull) writer.publish();
        if (n % 3 != 0) continue;  // so that some die between append and publish
        writer.publish();
        counters.published->store(n + 1);
      }
    });
    uint64_t taken = 0;
    std::thread waiter([&] {
      RingReader reader;
      CHECK(reader.open(ring.segment, kWorld) == Status::kOk);
      taken = take_all(reader, ring.header->capacity / 2 - sizeof(RecordHeader));
    });
    const uint64_t moment = random_moment(random, i, ring.header->writer_state);
    while (monotonic_ns() < moment) pause_ns(10'000);
    CHECK(kill_now(child));
    mark_writer_gone(*ring.header);
    waiter.join();
    CHECK(taken >= counters.published->load());
    seen += taken;
  }
  CHECK(seen > kKills);  // or the test has shown nothing
}

static void a_sleeper_notices_that_its_idle_writer_was_killed() {
  for (int i = 0; i < kKills; ++i) {
    Ring ring(4096);
    const pid_t child = start([&] {
      RingWriter writer;
      CHECK(writer.open(ring.segment, kWorld) == Status::kOk);
      for (;;) pause();
    });
    std::thread waiter([&] {
      RingReader reader;
      CHECK(reader.open(ring.segment, kWorld) == Status::kOk);
      CHECK(reader.wait(0, kForever) == Status::kPeerGone);
    });
    CHECK(kill_now(child));
    mark_writer_gone(*ring.header);
    waiter.join();
  }
}

// Reads for ever; says how far it came.
static void read_for_ever(Ring& ring, Counters& counters, uint32_t index) {
  RingReader reader;
  CHECK(reader.open(ring.segment, kWorld, index) == Status::kOk);
  for (uint64_t n = 0; reader.wait(0, kForever) == Status::kOk;) {
    RecordView record;
    while (reader.peek(&record) == Status::kOk) {
      CHECK(is_record(record, n++, ring.header->capacity / 2 - sizeof(RecordHeader)));
      reader.pop();
      counters.popped->store(n);
    }
  }
}

static void a_killed_reader_fills_the_ring_and_the_writer_learns_that_it_is_gone(Random& random) {
  uint64_t seen = 0;
  for (int i = 0; i < kKills; ++i) {
    Ring ring(4096);
    Counters counters;
    RingWriter writer;
    CHECK(writer.open(ring.segment, kWorld) == Status::kOk);
    const pid_t child = start([&] { read_for_ever(ring, counters, 0); });
    const uint64_t moment = random_moment(random, i, ring.header->slots()[0].state);
    uint64_t n = 0;
    while (monotonic_ns() < moment) {
      if (append(writer, n) == Status::kOk) ++n;
      writer.publish();
    }
    CHECK(kill_now(child));
    while (append(writer, n) == Status::kOk) ++n;
    CHECK(append(writer, n) == Status::kFull);  // not known to be dead yet
    mark_reader_gone(*ring.header, 0);
    CHECK(append(writer, n) == Status::kPeerGone);
    CHECK(counters.popped->load() <= n);
    seen += counters.popped->load();
  }
  CHECK(seen > kKills);  // or the test has shown nothing
}

static void the_other_readers_go_on_when_one_is_killed(Random& random) {
  for (int i = 0; i < kKills; ++i) {
    Ring ring(4096, 3);
    Counters counters[3];
    RingWriter writer;
    CHECK(writer.open(ring.segment, kWorld) == Status::kOk);
    pid_t children[3];
    for (uint32_t r = 0; r < 3; ++r) children[r] = start([&] { read_for_ever(ring, counters[r], r); });
    const uint32_t victim = static_cast<uint32_t>(below(random, 3));
    const uint64_t moment = random_moment(random, i, ring.header->slots()[victim].state);
    uint64_t n = 0;
    while (monotonic_ns() < moment) {
      if (append(writer, n) == Status::kOk) ++n;
      writer.publish();
    }
    CHECK(kill_now(children[victim]));
    mark_reader_gone(*ring.header, victim);
    for (const uint64_t more = n + 50; n < more;) {
      const Status status = append(writer, n);
      CHECK(status == Status::kOk || status == Status::kFull);
      n += status == Status::kOk;
      writer.publish();
    }
    writer.close();
    for (uint32_t r = 0; r < 3; ++r) {
      if (r == victim) continue;
      join(children[r]);
      CHECK(counters[r].popped->load() == n);
    }
  }
}

int main() {
  Random random(std::random_device{}());
  all_that_a_killed_writer_published_arrives_whole(random);
  a_sleeper_notices_that_its_idle_writer_was_killed();
  a_killed_reader_fills_the_ring_and_the_writer_learns_that_it_is_gone(random);
  the_other_readers_go_on_when_one_is_killed(random);
}
