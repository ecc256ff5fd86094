// One request's output: ids in, text of two phases out, as frames or collected. [R38] [R39] [R41]
//
//   ids ─> bytes ─> raw_: what held_bytes keeps back ─> UTF-8 ─> text_[reasoning], text_[content] ─> write_frames()
//
// A chat turn begins in reasoning; the first end_reasoning_id there ends it and has no bytes itself. What is held may
// span that border (a stop string is looked for across it), so raw_ remembers how many of its bytes are reasoning.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "glm53d/byte_vocab.h"
#include "glm53d/frames.h"
#include "glm53d/utf8.h"

namespace glm53d {

// How a request's tokens leave; the native form of front/job.py's OutSpec.
struct OutSpec {
  std::optional<Frame> content;    // absent: nothing is framed, all is collected
  std::optional<Frame> reasoning;  // absent: reasoning is framed like content
  bool starts_in_reasoning = false;
  bool with_ids = false;  // frames carry their ids
  bool skip_special = true;
};

enum Phase : size_t { kReasoning = 0, kContent = 1 };

class OutState {
 public:
  OutState(const ByteVocab& vocab, int32_t end_reasoning_id, OutSpec spec)
      : vocab_(&vocab), end_reasoning_id_(end_reasoning_id), spec_(std::move(spec)),
        arriving_(spec_.starts_in_reasoning ? kReasoning : kContent), leaving_(arriving_) {}

  // The next ids. The last held_bytes bytes of all so far are kept back, for as long as each call says so. Returns how
  // many ids were not in the vocabulary: they have no bytes.
  size_t feed(std::span<const int32_t> ids, size_t held_bytes);

  // Nothing more comes: what is kept back is dropped, a character that has begun becomes U+FFFD.
  void finish();

  // Append what has come since the last call, one frame for each phase that has any; returns how many.
  size_t write_frames(std::string& out);

  bool framed() const noexcept { return spec_.content.has_value(); }
  // Not yet framed; of a collected request, all.
  const std::string& text(Phase phase) const noexcept { return text_[phase]; }
  std::span<const int32_t> ids() const noexcept { return ids_; }  // of a collected request

  uint32_t reasoning_tokens() const noexcept { return reasoning_tokens_; }  // before end_reasoning_id

 private:
  void release(size_t num_bytes);

  const ByteVocab* vocab_;
  int32_t end_reasoning_id_;
  OutSpec spec_;
  Phase arriving_;  // of the next id
  Phase leaving_;   // of the next byte that leaves raw_; never ahead of arriving_
  std::string raw_;
  size_t raw_reasoning_ = 0;  // that many bytes at the front of raw_ are reasoning
  Utf8State utf8_;            // of leaving_
  std::array<std::string, 2> text_;
  std::vector<int32_t> ids_;  // not yet framed, both phases
  size_t ids_reasoning_ = 0;  // that many at the front of ids_ are reasoning's
  uint32_t reasoning_tokens_ = 0;
};

}  // namespace glm53d
