// The output pump: a thread of main that turns what the leader publishes into bytes for sockets. [R13] [R41]
//
//   output ring ─> pump: slot by handle, check, decode, frame ─> Delivery ─> deliveries_ ── eventfd ─> loop: take()
//                     ^ commands_ <─ open, close, set_slow: loop                      spare_ <─ emptied deliveries
//
// The thread never takes the GIL, and neither side ever waits for the other: both hand over through a Handoff. Commands
// are looked at before every record, and a request is opened before it is sent, so no record comes to an unknown slot.
//
// Wake. The pump writes the eventfd when it pushes into an empty deliveries_; take() first resets the eventfd, then
// empties. A push after that emptying finds it empty and signals again, so nothing is left lying.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "glm53d/byte_vocab.h"
#include "glm53d/handoff.h"
#include "glm53d/out_state.h"
#include "glm53d/records.h"
#include "glm53d/ring.h"
#include "glm53d/segment.h"
#include "glm53d/status.h"

namespace glm53d {

// What one stream got in one delivery. Slices are of the Delivery's data.
struct OutEvent {
  struct Slice {
    size_t begin = 0, size = 0;
  };
  uint64_t handle;
  Slice frames;
  Slice pieces;                // behind the frames; for PieceReader
  Slice finish;                // the last OutputRecord, whole; empty: it goes on
  Slice text, reasoning, ids;  // with finish; see OutState::content(), reasoning(), ids()
  uint32_t reasoning_tokens;   // so far
  uint64_t first_token_ns;     // CLOCK_MONOTONIC when its first ids were read, 0: none yet
};

// Everything the pump did between two wakes of itself.
struct Delivery {
  struct Record {
    uint16_t type;
    OutEvent::Slice payload;
  };
  Delivery* next = nullptr;
  std::string data;
  std::vector<OutEvent> events;  // a handle at most once
  std::vector<Record> records;   // all that is no OutputRecord, in order

  std::string_view slice(OutEvent::Slice s) const noexcept { return std::string_view(data).substr(s.begin, s.size); }
};

// An event where it lies; the next take() ends its life.
struct OutPiece {
  const Delivery* delivery;
  const OutEvent* event;
};

struct PumpStats {
  uint64_t records, tokens, frames;
  uint64_t stale;         // records of a handle that is not open [R12]
  uint64_t order_errors;  // records whose first token was not the next one [R13]
  uint64_t malformed;     // records shorter than they say
  uint64_t unknown_ids;   // not in the vocabulary
};

class Pump {
 public:
  // vocab and the segment must outlive the pump.
  Pump(const ByteVocab& vocab, size_t max_slots, Markup markup);
  Pump(const Pump&) = delete;
  ~Pump();

  // Take the reading end of the output ring, and the eventfd. kSystem: errno says why.
  Status open_ring(const Segment& segment, uint64_t world_id) noexcept;
  void start();
  // Ends the thread, within a tenth of a second; what it delivered can still be taken.
  void stop() noexcept;

  // By the loop. Commands take effect in the order given, before any record read later. The index of a handle, its low
  // 32 bits, is below max_slots; 0 is no handle.
  void open(uint64_t handle, OutSpec spec);
  void close(uint64_t handle);
  // While slow, text is kept per phase; it leaves as one frame each, pieces behind, from within milliseconds of false or
  // from the finish on.
  void set_slow(uint64_t handle, bool slow);

  // By the loop, when fileno() is readable: stream(std::span<const OutPiece>) for each stream, its pieces in order, and
  // record(type, payload) for each other record. What has more pieces than the loop should make events of at once comes
  // in parts, the finish with the last.
  template <class Stream, class Record>
  void take(Stream&& stream, Record&& record) {
    for (std::span<const OutPiece> rest = collect(); !rest.empty();) {
      size_t n = 1;
      while (n < rest.size() && rest[n].event->handle == rest[0].event->handle) ++n;
      stream(rest.first(n));
      rest = rest.subspan(n);
    }
    for (const auto& delivery : taken_)
      for (const Delivery::Record& r : delivery->records) record(r.type, delivery->slice(r.payload));
  }

  size_t max_slots() const noexcept { return slots_.size(); }
  int fileno() const noexcept { return eventfd_; }
  // No more output will come, and all that came can be taken: the writer is gone, or what it wrote cannot be read.
  bool writer_gone() const noexcept { return ended_.load(std::memory_order_acquire) != Status::kOk; }
  bool corrupt() const noexcept { return ended_.load(std::memory_order_acquire) == Status::kCorrupt; }
  PumpStats stats() const noexcept;

 private:
  struct Command {
    Command* next = nullptr;
    uint64_t handle;
    std::optional<OutSpec> open;  // else set_slow or close
    std::optional<bool> slow;
  };
  struct Slot {
    uint64_t handle = 0;  // 0: nobody's
    std::optional<OutState> out;
    uint32_t num_ids = 0;
    bool slow = false;
    bool dirty = false;   // in dirty_: something is not yet delivered
    uint64_t first_token_ns = 0;
    std::string frames;     // not yet delivered
    std::string pieces;     // the same; behind the frames,
    size_t num_handed = 0;  // but for so many bytes at their beginning
    std::string finish;
  };
  struct Counters {  // W: the pump thread alone   R: anyone
    std::atomic<uint64_t> records{0}, tokens{0}, frames{0}, stale{0}, order_errors{0}, malformed{0}, unknown_ids{0};
  };

  void run() noexcept;
  Status drain();
  void obey();
  void obey(Command& command);
  void handle_record(const RecordView& record);
  void handle_output(std::string_view payload);
  void fail_order(Slot& slot, const OutputRecord& head);
  void end_stream(Slot& slot, std::string_view record);
  void write_out(Slot& slot);
  void set_slow(Slot& slot, bool slow);
  void free_slot(Slot& slot) noexcept;
  void mark_dirty(Slot& slot);
  void flush_slow();
  void deliver(bool everything);
  void deliver_slot(Slot& slot, bool everything);
  Slot* find(uint64_t handle) noexcept;
  Delivery& writing();
  void signal() noexcept;
  std::span<const OutPiece> collect();

  const ByteVocab& vocab_;
  const Markup markup_;
  RingReader reader_;
  int eventfd_ = -1;
  std::thread thread_;

  Handoff<Command> commands_;     // loop -> pump
  Handoff<Delivery> deliveries_;  // pump -> loop
  Handoff<Delivery> spare_;       // loop -> pump, emptied, with their memory
  std::atomic<bool> stop_{false};            // W: stop()   R: pump; relaxed, it orders nothing
  std::atomic<Status> ended_{Status::kOk};   // W: pump   R: loop; release after the last delivery
  std::atomic<uint64_t> num_taken_{0};       // deliveries   W: loop   R: pump; relaxed, it only says when to go on
  Counters counters_;

  // The pump thread's.
  std::vector<Slot> slots_;
  std::vector<uint32_t> dirty_;
  size_t num_slow_ = 0;
  uint64_t num_delivered_ = 0;
  bool parts_wait_ = false;  // of some stream in dirty_, until what was delivered has been taken
  std::unique_ptr<Delivery> writing_;
  std::vector<std::unique_ptr<Delivery>> pool_;

  // The loop's.
  std::vector<std::unique_ptr<Delivery>> taken_;
  std::vector<OutPiece> pieces_;
};

}  // namespace glm53d
