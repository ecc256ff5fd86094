// The pump with a leader and a loop in threads of their own, for ThreadSanitizer; what it makes of cuts is in
// tests/property.
#include <poll.h>

#include <algorithm>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "glm53d/pump.h"
#include "ring_fixture.h"

using namespace glm53d;
using namespace test;

static constexpr size_t kStreams = 64;
static constexpr uint32_t kTokens = 400;

// Token i is the letter 'a' + i, the last one ends reasoning.
static const ByteVocab& letters() {
  static const ByteVocab vocab = [] {
    ByteVocab v;
    for (char c = 'a'; c <= 'z'; ++c) v.add(std::string_view(&c, 1), false);
    v.add("</think>", false);
    return v;
  }();
  return vocab;
}
static constexpr int32_t kThinkEnd = 26;
static const Markup& markup() {
  static const Markup ids{-1, kThinkEnd, {kThinkEnd}};
  return ids;
}

static uint64_t handle_of(size_t stream) { return uint64_t{1} << 32 | stream; }

// What a stream says: kThinkEnd at a third.
static int32_t token_of(size_t stream, uint32_t i) {
  return i == kTokens / 3 ? kThinkEnd : static_cast<int32_t>((stream * 7 + i) % 26);
}

static bool try_write(RingWriter& writer, size_t stream, uint32_t offset, uint32_t num_ids, FinishReason reason) {
  OutputRecord head{};
  head.handle = handle_of(stream);
  head.token_offset = offset;
  head.num_ids = num_ids;
  head.finish_reason = static_cast<uint32_t>(reason);
  std::byte* payload = nullptr;
  if (writer.append(static_cast<uint16_t>(RecordType::kOutput), sizeof head + align8(num_ids * 4), &payload) !=
      Status::kOk)
    return false;
  std::memcpy(payload, &head, sizeof head);
  for (uint32_t i = 0; i < num_ids; ++i) {
    const int32_t id = token_of(stream, offset + i);
    std::memcpy(payload + sizeof head + 4 * i, &id, 4);
  }
  return true;
}

// One to three tokens of every stream a step, published together.
static void lead(RingWriter& writer) {
  Random random(1);
  std::vector<uint32_t> said(kStreams);
  for (bool busy = true; busy; writer.publish()) {
    busy = false;
    for (size_t stream = 0; stream < kStreams; ++stream) {
      if (said[stream] == kTokens) continue;
      const auto n = static_cast<uint32_t>(std::min<uint64_t>(1 + below(random, 3), kTokens - said[stream]));
      const bool last = said[stream] + n == kTokens;
      if (try_write(writer, stream, said[stream], n, last ? FinishReason::kLength : FinishReason::kNone))
        said[stream] += n;  // else the ring is full: it goes with the next
      busy = true;
    }
  }
  writer.close();
}

static OutSpec framed() {
  OutSpec spec;
  spec.content = Frame{"C(", ")"};
  spec.reasoning = Frame{"R(", ")"};
  return spec;
}

struct Seen {
  std::string text[2];
  bool finished = false;
};

static void wait(const Pump& pump) {
  pollfd ready{pump.fileno(), POLLIN, 0};
  CHECK(poll(&ready, 1, 60'000) == 1);  // a minute without a wake is a lost one, not a slow machine
}

// Frames are R(text) and C(text); letters need no escape.
static void add_frames(Seen& seen, std::string_view frames) {
  while (!frames.empty()) {
    const size_t end = frames.find(')');
    CHECK(end != frames.npos && (frames[0] == 'R' || frames[0] == 'C') && frames[1] == '(');
    seen.text[frames[0] == 'R' ? kReasoning : kContent] += frames.substr(2, end - 2);
    frames.remove_prefix(end + 1);
  }
}

static void every_stream_gets_its_text_while_some_are_slow() {
  Ring ring(1 << 16);
  RingWriter writer;
  CHECK(writer.open(ring.segment, kWorld) == Status::kOk);
  Pump pump(letters(), kStreams, markup());
  CHECK(pump.open_ring(ring.segment, kWorld) == Status::kOk);
  pump.start();
  for (size_t stream = 0; stream < kStreams; ++stream) {
    OutSpec spec = stream % 4 != 0 ? framed() : OutSpec{};
    spec.starts_in_reasoning = true;
    pump.open(handle_of(stream), std::move(spec));
  }
  std::thread leader([&] { lead(writer); });

  Random random(2);
  std::map<uint64_t, Seen> seen;
  size_t num_finished = 0;
  while (num_finished < kStreams) {
    wait(pump);
    pump.take(
        [&](std::span<const OutPiece> pieces) {
          Seen& stream = seen[pieces[0].event->handle];
          CHECK(!stream.finished);
          for (const auto [delivery, event] : pieces) add_frames(stream, delivery->slice(event->frames));
          const auto [delivery, last] = pieces.back();
          if (last->finish.size == 0) return;
          stream.text[kReasoning] += delivery->slice(last->reasoning);
          stream.text[kContent] += delivery->slice(last->text);
          stream.finished = true;
          ++num_finished;
        },
        [](uint16_t, std::string_view) { CHECK(false); });
    pump.set_slow(handle_of(below(random, kStreams)), below(random, 2) == 0);
  }
  leader.join();

  for (size_t stream = 0; stream < kStreams; ++stream) {
    std::string expected[2];
    for (uint32_t i = 0; i < kTokens; ++i) {
      if (i == kTokens / 3) continue;
      expected[i < kTokens / 3 ? kReasoning : kContent] += static_cast<char>('a' + token_of(stream, i));
    }
    CHECK(seen[handle_of(stream)].text[kReasoning] == expected[kReasoning]);
    CHECK(seen[handle_of(stream)].text[kContent] == expected[kContent]);
  }
  const PumpStats stats = pump.stats();
  CHECK(stats.tokens == kStreams * kTokens && stats.stale == 0 && stats.order_errors == 0 && stats.malformed == 0);
  while (!pump.writer_gone()) wait(pump), pump.take([](auto) { CHECK(false); }, [](auto, auto) { CHECK(false); });
  CHECK(!pump.corrupt());
}

static void a_ring_that_makes_no_sense_ends_the_pump_and_is_told() {
  Ring ring(1 << 12);
  Pump pump(letters(), 1, markup());
  CHECK(pump.open_ring(ring.segment, kWorld) == Status::kOk);
  std::memset(ring.header->data(), 0xff, 8);
  ring.header->tail.store(64);
  pump.start();
  wait(pump);
  CHECK(pump.writer_gone() && pump.corrupt());
}

static void a_busy_pump_can_be_stopped_and_dropped_at_any_moment() {
  for (int round = 0; round < 5; ++round) {
    Ring ring(1 << 14);
    RingWriter writer;
    CHECK(writer.open(ring.segment, kWorld) == Status::kOk);
    std::thread leader;
    {
      Pump pump(letters(), kStreams, markup());
      CHECK(pump.open_ring(ring.segment, kWorld) == Status::kOk);
      for (size_t stream = 0; stream < kStreams; ++stream) pump.open(handle_of(stream), framed());
      pump.start();
      leader = std::thread([&] {
        for (uint32_t i = 0; i < 2000; ++i) {  // stops by itself: nobody reads any more
          (void)try_write(writer, i % kStreams, i / kStreams, 1, FinishReason::kNone);
          writer.publish();
        }
      });
      wait(pump);
    }
    leader.join();
  }
}

int main() {
  every_stream_gets_its_text_while_some_are_slow();
  a_ring_that_makes_no_sense_ends_the_pump_and_is_told();
  a_busy_pump_can_be_stopped_and_dropped_at_any_moment();
}
