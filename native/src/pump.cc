#include "glm53d/pump.h"

#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace glm53d {
namespace {

// With nothing to read the thread wakes this often to see stop(); while somebody is slow, to see that he no longer is.
constexpr uint64_t kIdleWaitNs = 100'000'000, kSlowWaitNs = 5'000'000;
// While there are more pieces than one delivery takes, it wakes this often to see that the last one has been taken.
constexpr uint64_t kNextPartWaitNs = 500'000;
// Of a stream, in one delivery: objects and JSON are made of them all at once, with 20 logprobs each in milliseconds.
// So many streams are given as much; those with less are given it always.
constexpr size_t kMaxPieces = 256, kMaxParts = 4, kSmallPart = 4096;
// Records between two deliveries: a burst must not keep the loop waiting.
constexpr size_t kMaxBurst = 1024;
// Emptied deliveries worth keeping.
constexpr size_t kMaxPool = 8, kMaxPooledBytes = 1 << 20;

uint32_t index_of(uint64_t handle) noexcept { return static_cast<uint32_t>(handle); }

// The counter has one writer.
void add(std::atomic<uint64_t>& counter, uint64_t n) noexcept {
  counter.store(counter.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
}

OutEvent::Slice append(std::string& data, std::string_view bytes) {
  const OutEvent::Slice slice{data.size(), bytes.size()};
  data += bytes;
  return slice;
}

template <class T>
std::string_view bytes_of(std::span<const T> values) noexcept {
  return {reinterpret_cast<const char*>(values.data()), values.size_bytes()};
}

}  // namespace

// ---- the loop's side ------------------------------------------------------------------------------------------------

Pump::Pump(const ByteVocab& vocab, size_t max_slots, Markup markup)
    : vocab_(vocab), markup_(std::move(markup)), slots_(max_slots) {}

Pump::~Pump() {
  stop();
  if (eventfd_ >= 0) ::close(eventfd_);
}

Status Pump::open_ring(const Segment& segment, uint64_t world_id) noexcept {
  eventfd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  return eventfd_ < 0 ? Status::kSystem : reader_.open(segment, world_id);
}

void Pump::start() {
  // Signals are for the thread that Python runs in.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread_.native_handle(), "glm53d-pump");
}

void Pump::stop() noexcept {
  stop_.store(true, std::memory_order_relaxed);
  if (thread_.joinable()) thread_.join();
}

void Pump::open(uint64_t handle, OutSpec spec) {
  commands_.push(std::make_unique<Command>(Command{nullptr, handle, std::move(spec), std::nullopt}));
}

void Pump::close(uint64_t handle) {
  commands_.push(std::make_unique<Command>(Command{nullptr, handle, std::nullopt, std::nullopt}));
}

void Pump::set_slow(uint64_t handle, bool slow) {
  commands_.push(std::make_unique<Command>(Command{nullptr, handle, std::nullopt, slow}));
}

std::span<const OutPiece> Pump::collect() {
  for (auto& delivery : taken_) {
    delivery->data.clear();
    delivery->events.clear();
    delivery->records.clear();
    if (delivery->data.capacity() <= kMaxPooledBytes) spare_.push(std::move(delivery));
  }
  taken_.clear();
  pieces_.clear();

  uint64_t count;
  [[maybe_unused]] const ssize_t reset = read(eventfd_, &count, sizeof count);  // before the take: see pump.h, Wake
  deliveries_.take([this](std::unique_ptr<Delivery> delivery) { taken_.push_back(std::move(delivery)); });
  add(num_taken_, taken_.size());
  for (const auto& delivery : taken_)
    for (const OutEvent& event : delivery->events) pieces_.push_back({delivery.get(), &event});
  if (taken_.size() > 1)  // a stream's pieces side by side, in the order they were made
    std::stable_sort(pieces_.begin(), pieces_.end(),
                     [](const OutPiece& a, const OutPiece& b) { return a.event->handle < b.event->handle; });
  return pieces_;
}

PumpStats Pump::stats() const noexcept {
  const auto get = [](const std::atomic<uint64_t>& counter) { return counter.load(std::memory_order_relaxed); };
  const Counters& c = counters_;
  return {get(c.records), get(c.tokens),    get(c.frames),     get(c.stale), get(c.order_errors),
          get(c.malformed), get(c.unknown_ids)};
}

// ---- the pump's thread ----------------------------------------------------------------------------------------------

void Pump::run() noexcept {  // the one exception possible is bad_alloc, and without memory the process cannot go on
  while (!stop_.load(std::memory_order_relaxed)) {
    const uint64_t at_most = parts_wait_ ? kNextPartWaitNs : num_slow_ > 0 ? kSlowWaitNs : kIdleWaitNs;
    Status status = reader_.wait(0, at_most);
    if (status == Status::kOk) status = drain();
    obey();
    if (status == Status::kPeerGone || status == Status::kCorrupt) {
      flush_slow();
      deliver(true);
      ended_.store(status, std::memory_order_release);  // partner: the acquire in writer_gone()
      signal();
      return;
    }
    deliver(false);
  }
}

// kOk: perhaps there is more.
Status Pump::drain() {
  for (size_t n = 0; n < kMaxBurst; ++n) {
    RecordView record;
    const Status status = reader_.peek(&record);
    if (status != Status::kOk) return status;
    obey();  // behind the peek: whoever opened a request before sending it has done so before this record
    handle_record(record);
    reader_.pop();
  }
  return Status::kOk;
}

void Pump::obey() {
  commands_.take([this](std::unique_ptr<Command> command) { obey(*command); });
}

void Pump::obey(Command& command) {
  Slot& slot = slots_[index_of(command.handle)];
  if (command.open) {
    free_slot(slot);
    slot.handle = command.handle;
    slot.out.emplace(vocab_, markup_, std::move(*command.open));
    return;
  }
  if (slot.handle != command.handle) return;  // it has ended meanwhile
  if (command.slow)
    set_slow(slot, *command.slow);
  else
    free_slot(slot);
}

void Pump::handle_record(const RecordView& record) {
  add(counters_.records, 1);
  const std::string_view payload = bytes_of(record.payload);
  if (record.type == static_cast<uint16_t>(RecordType::kOutput))
    handle_output(payload);
  else
    writing().records.push_back({record.type, append(writing().data, payload)});
}

void Pump::handle_output(std::string_view payload) {
  OutputRecord head{};
  std::memcpy(&head, payload.data(), std::min(payload.size(), sizeof head));
  const size_t ids_bytes = size_t{head.num_ids} * sizeof(int32_t);
  const size_t tail_bytes = head.error_bytes > 0 ? align8(ids_bytes) + head.error_bytes : ids_bytes;
  const size_t num_rows = head.logprob_width > 0 ? size_t{head.num_prompt_logprobs} + head.num_ids : 0;
  const size_t num_logprobs = num_rows * head.logprob_width, logprobs_at = sizeof head + align8(tail_bytes);
  const size_t most = payload.size() / sizeof(Logprob);  // a product of larger numbers might wrap
  if (payload.size() < sizeof head + tail_bytes ||
      (num_rows > 0 && (num_rows > most || head.logprob_width > most ||
                        payload.size() < logprobs_at + num_logprobs * sizeof(Logprob)))) {
    add(counters_.malformed, 1);
    return;
  }
  Slot* slot = find(head.handle);
  if (slot == nullptr) return add(counters_.stale, 1);
  if (head.token_offset != slot->num_ids) return fail_order(*slot, head);

  // A record lies 8-aligned in the ring, and its ids behind a head of whole words.
  const std::span ids(reinterpret_cast<const int32_t*>(payload.data() + sizeof head), head.num_ids);
  if (!ids.empty() && slot->first_token_ns == 0) slot->first_token_ns = monotonic_ns();
  slot->num_ids += head.num_ids;
  add(counters_.tokens, head.num_ids);
  std::span<const Logprob> logprobs;
  if (num_rows > 0) {
    logprobs = {reinterpret_cast<const Logprob*>(payload.data() + logprobs_at), num_logprobs};
    const size_t of_prompt = size_t{head.num_prompt_logprobs} * head.logprob_width;
    slot->out->feed_prompt(head.num_prompt_logprobs, logprobs.first(of_prompt));
    logprobs = logprobs.subspan(of_prompt);
  }
  add(counters_.unknown_ids, slot->out->feed(ids, head.held_bytes, logprobs));
  if (head.finish_reason != static_cast<uint32_t>(FinishReason::kNone))
    end_stream(*slot, payload.substr(0, sizeof head + tail_bytes));
  else if (slot->out->streamed() && !slot->slow)
    write_out(*slot);
}

// [R13] What is missing cannot be had again, so the stream ends with what it got and an error.
void Pump::fail_order(Slot& slot, const OutputRecord& head) {
  add(counters_.order_errors, 1);
  const std::string error = "internal_error: token " + std::to_string(head.token_offset) +
                            " of this request came where " + std::to_string(slot.num_ids) + " was the next";
  OutputRecord last = head;
  last.num_ids = last.held_bytes = last.num_prompt_logprobs = last.logprob_width = 0;
  last.finish_reason = static_cast<uint32_t>(FinishReason::kError);
  last.error_bytes = static_cast<uint32_t>(error.size());
  std::string record(reinterpret_cast<const char*>(&last), sizeof last);
  end_stream(slot, record + error);
}

void Pump::end_stream(Slot& slot, std::string_view record) {
  OutputRecord head{};
  std::memcpy(&head, record.data(), sizeof head);
  slot.out->finish(head.finish_reason == static_cast<uint32_t>(FinishReason::kStop));
  write_out(slot);
  slot.finish = record;
  mark_dirty(slot);
}

// What has come leaves. Of a collected request, that is its pieces alone, and only at the end.
void Pump::write_out(Slot& slot) {
  if (slot.out->framed()) add(counters_.frames, slot.out->write_frames(slot.frames));
  slot.out->write_pieces(slot.pieces);
  if (!slot.frames.empty() || !slot.pieces.empty()) mark_dirty(slot);
}

void Pump::set_slow(Slot& slot, bool slow) {
  if (slot.slow == slow) return;
  slot.slow = slow;
  slow ? ++num_slow_ : --num_slow_;
  if (!slow && slot.out->streamed()) write_out(slot);
}

void Pump::flush_slow() {
  for (Slot& slot : slots_)
    if (slot.slow) set_slow(slot, false);
}

// The slot of an open handle; nullptr for one that is closed or has had its last record.
Pump::Slot* Pump::find(uint64_t handle) noexcept {
  const uint32_t index = index_of(handle);
  if (index >= slots_.size()) return nullptr;
  Slot& slot = slots_[index];
  return slot.handle == handle && slot.out && slot.finish.empty() ? &slot : nullptr;
}

void Pump::free_slot(Slot& slot) noexcept {
  if (slot.slow) --num_slow_;
  slot = Slot{};
}

void Pump::mark_dirty(Slot& slot) {
  if (!slot.dirty) dirty_.push_back(index_of(slot.handle));
  slot.dirty = true;
}

// Of each stream at most so many pieces; the rest waits until all that was delivered has been taken, and the reader is
// not slow.
void Pump::deliver(bool everything) {
  const bool all_taken = num_taken_.load(std::memory_order_relaxed) == num_delivered_;
  std::vector<uint32_t> rests;  // whoever had a part is behind those who had none
  size_t num_later = 0, num_parts = 0;
  parts_wait_ = false;
  for (const uint32_t index : dirty_) {
    Slot& slot = slots_[index];
    if (!slot.dirty) continue;  // it was closed since
    const bool is_part = slot.num_handed > 0 || slot.pieces.size() > kSmallPart;
    const bool waits = slot.num_handed > 0 && (slot.slow || !all_taken);
    if (!everything && (waits || (is_part && num_parts == kMaxParts))) {
      dirty_[num_later++] = index;
      parts_wait_ |= !slot.slow;
      continue;
    }
    num_parts += is_part;
    deliver_slot(slot, everything);
    if (!slot.dirty) continue;
    rests.push_back(index);
    parts_wait_ |= !slot.slow;
  }
  dirty_.resize(num_later);
  dirty_.insert(dirty_.end(), rests.begin(), rests.end());
  if (writing_ == nullptr) return;
  ++num_delivered_;
  if (deliveries_.push(std::move(writing_))) signal();
}

void Pump::deliver_slot(Slot& slot, bool everything) {
  std::string_view pieces = std::string_view(slot.pieces).substr(slot.num_handed);
  if (!everything) pieces = PieceReader::first(pieces, kMaxPieces);
  slot.num_handed += pieces.size();
  slot.dirty = slot.num_handed < slot.pieces.size();
  Delivery& delivery = writing();
  std::string& data = delivery.data;
  OutEvent event{.handle = slot.handle,
                 .frames = append(data, slot.frames),
                 .pieces = append(data, pieces),
                 .finish = slot.dirty ? OutEvent::Slice{} : append(data, slot.finish),
                 .text = {},
                 .reasoning = {},
                 .ids = {},
                 .reasoning_tokens = slot.out->reasoning_tokens(),
                 .first_token_ns = slot.first_token_ns};
  slot.frames.clear();
  if (!slot.dirty) {
    slot.pieces.clear();
    slot.num_handed = 0;
  }
  if (event.finish.size > 0) {
    event.text = append(data, slot.out->content());
    event.reasoning = append(data, slot.out->reasoning());
    event.ids = append(data, bytes_of(slot.out->ids()));
    free_slot(slot);
  }
  delivery.events.push_back(event);
}

// The delivery that is being filled.
Delivery& Pump::writing() {
  if (writing_ != nullptr) return *writing_;
  spare_.take([this](std::unique_ptr<Delivery> delivery) {
    if (pool_.size() < kMaxPool) pool_.push_back(std::move(delivery));
  });
  if (pool_.empty()) {
    writing_ = std::make_unique<Delivery>();
  } else {
    writing_ = std::move(pool_.back());
    pool_.pop_back();
  }
  return *writing_;
}

void Pump::signal() noexcept {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(eventfd_, &one, sizeof one);
}

}  // namespace glm53d
