// Signals between processes: none is lost, what was written before is seen behind, the dead are noticed. [R11]
#include <array>

#include "check.h"
#include "glm53d/signals.h"

using namespace glm53d;
using namespace test;

static constexpr uint64_t kWorld = 5;
static constexpr uint64_t kForever = 60'000'000'000;

struct Shared {
  explicit Shared(uint32_t num_ranks) {
    CHECK(segment.create("signals", signals_segment_bytes(num_ranks)) == Status::kOk);
    CHECK(signals_init(segment, kWorld, num_ranks) == Status::kOk);
    CHECK(memory.create("memory", 4096) == Status::kOk);
  }
  uint64_t& word(size_t i) { return reinterpret_cast<uint64_t*>(memory.data())[i]; }
  Segment segment, memory;
};

static void an_end_is_held_once_and_only_in_its_world() {
  Shared shared(2);
  Signals first, second;
  CHECK(first.open(shared.segment, kWorld + 1, 0) == Status::kAbiMismatch);
  CHECK(first.open(shared.segment, kWorld, 2) == Status::kAbiMismatch);
  CHECK(first.open(shared.segment, kWorld, 0) == Status::kOk);
  CHECK(second.open(shared.segment, kWorld, 0) == Status::kTaken);
  CHECK(signals_init(shared.segment, kWorld, 3) == Status::kTooLarge);
  CHECK(signals_init(shared.segment, kWorld, kMaxSignalRanks + 1) == Status::kTooLarge);
}

// Plain words go back and forth under nothing but the counts: TSan would see a missing order, the check a stale word.
static void what_was_written_before_is_seen_behind() {
  constexpr uint64_t kRounds = 20'000;
  Shared shared(2);
  const auto play = [&](uint32_t me, uint64_t spin_ns) {
    Signals signals;
    CHECK(signals.open(shared.segment, kWorld, me) == Status::kOk);
    for (uint64_t n = 1; n <= kRounds; ++n) {
      if (me == 1) CHECK(signals.wait(0, n, spin_ns, kForever) == Status::kOk && shared.word(0) == n);
      shared.word(me) = n;
      signals.raise(1 - me, n);
      if (me == 0) CHECK(signals.wait(1, n, spin_ns, kForever) == Status::kOk && shared.word(1) == n);
    }
  };
  const pid_t child = start([&] { play(1, 0); });
  play(0, 5'000);
  join(child);
}

static void all_meet_all() {
  constexpr uint32_t kRanks = 4;
  Shared shared(kRanks);
  pid_t children[kRanks];
  for (uint32_t me = 0; me < kRanks; ++me) {
    children[me] = start([&] {
      Signals signals;
      CHECK(signals.open(shared.segment, kWorld, me) == Status::kOk);
      for (uint64_t n = 1; n <= 2'000; ++n) {
        shared.word(n % 2 * kRanks + me) = n;  // two rooms in turn, as the ids of a step have them
        for (uint32_t other = 0; other < kRanks; ++other)
          if (other != me) signals.raise(other, n);
        for (uint32_t other = 0; other < kRanks; ++other)
          if (other != me) CHECK(signals.wait(other, n, n % 2 * 2'000, kForever) == Status::kOk);
        for (uint32_t other = 0; other < kRanks; ++other) CHECK(shared.word(n % 2 * kRanks + other) == n);
      }
    });
  }
  for (const pid_t child : children) join(child);
}

static void who_waits_for_the_dead_is_told_when_main_says_so() {
  Shared shared(3);
  Signals signals;
  CHECK(signals.open(shared.segment, kWorld, 0) == Status::kOk);
  CHECK(signals.wait(1, 1, 0, 1'000'000) == Status::kTimeout);
  const pid_t child = start([&] {
    Signals theirs;
    CHECK(theirs.open(shared.segment, kWorld, 1) == Status::kOk);
    theirs.raise(0, 1);
    for (;;) pause();
  });
  CHECK(signals.wait(1, 1, 0, kForever) == Status::kOk);
  const pid_t marker = start([&] {
    CHECK(kill(child, SIGKILL) == 0);
    mark_rank_gone(*open_signals(shared.segment, kWorld), 1);
  });
  CHECK(signals.wait(1, 2, 0, kForever) == Status::kPeerGone);
  CHECK(signals.wait(1, 1, 0, kForever) == Status::kOk);  // what it told before stands
  join(marker);
  CHECK(kill_now(child) == true);
}

static void an_export_is_seen_whole_or_not_at_all() {
  Shared shared(2);
  Signals ours, theirs;
  CHECK(ours.open(shared.segment, kWorld, 0) == Status::kOk && theirs.open(shared.segment, kWorld, 1) == Status::kOk);
  std::array<unsigned char, kHandleBytes> handle, seen{};
  handle.fill(7);
  CHECK(ours.exported(1, seen) == 0 && seen[0] == 0);
  theirs.export_memory(handle, 4096);
  CHECK(ours.exported(1, seen) == 4096 && seen == handle);
}

static void memory_that_its_owner_sizes_is_mapped_by_others() {
  Segment owner, reader;
  CHECK(owner.create("memory", 0) == Status::kOk && owner.size() == 0);
  CHECK(reader.attach(dup(owner.fd())) == Status::kOk && reader.size() == 0);
  CHECK(owner.set_size(8192) == Status::kOk && owner.set_size(8192) == Status::kTaken);
  owner.data()[8191] = std::byte{9};
  CHECK(reader.refresh() == Status::kOk && reader.size() == 8192 && reader.data()[8191] == std::byte{9});
}

int main() {
  an_end_is_held_once_and_only_in_its_world();
  what_was_written_before_is_seen_behind();
  all_meet_all();
  who_waits_for_the_dead_is_told_when_main_says_so();
  an_export_is_seen_whole_or_not_at_all();
  memory_that_its_owner_sizes_is_mapped_by_others();
}
