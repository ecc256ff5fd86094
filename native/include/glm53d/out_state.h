// One request's output: ids in, text of three phases out, as frames, as pieces or collected. [R38] [R39] [R41]
//
//   ids ─> bytes ─> raw_: what held_bytes keeps back ─> UTF-8 ─┬─> text_[reasoning], text_[content] ─> write_frames()
//            └─> marks_: where an id is more than its bytes    └─> pieces_, in the phase python      ─> write_pieces()
//
// A chat turn begins in reasoning. The first end_reasoning there ends it and has no bytes; any id of python_ids ends
// reasoning or content for good: from it on a parser in Python wants text and added tokens apart. What is held may span
// such a border (a stop string is looked for across it), so marks wait in raw_ beside the bytes.
//
// With logprobs each token is a piece too, behind the text that its bytes have completed: so tokens wait as marks do, and
// then for the rest of a character. The end brings those whose text never shows.
#pragma once
#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "glm53d/byte_vocab.h"
#include "glm53d/frames.h"
#include "glm53d/pieces.h"
#include "glm53d/utf8.h"

namespace glm53d {

// The added tokens that the text of a turn is made of.
struct Markup {
  int32_t begin_reasoning, end_reasoning;
  std::vector<int32_t> pieces;  // ascending; each is a piece of its own where pieces are handed over
};

// How a request's tokens leave; the native form of front/job.py's OutSpec.
struct OutSpec {
  std::optional<Frame> content;    // absent: nothing is framed
  std::optional<Frame> reasoning;  // absent: reasoning is framed like content
  bool starts_in_reasoning = false;
  bool with_ids = false;  // frames carry their ids; not with pieces
  bool skip_special = true;
  std::vector<int32_t> python_ids;  // each begins the phase python
  bool all_python = false;          // all phases are handed over as pieces, none is framed or collected
  bool with_logprobs = false;       // each token is handed over as a piece; not with frames
};

enum Phase : size_t { kReasoning = 0, kContent = 1, kPython = 2 };

class OutState {
 public:
  // vocab and markup must outlive it.
  OutState(const ByteVocab& vocab, const Markup& markup, OutSpec spec);

  // The next ids. The last held_bytes bytes of all so far are kept back, for as long as each call says so; an added
  // token is kept back whole. Returns how many ids were not in the vocabulary: they have no bytes.
  // logprobs: a row for each id, all of one width; or none.
  size_t feed(std::span<const int32_t> ids, size_t held_bytes, std::span<const Logprob> logprobs = {});

  // Hand over so many of the prompt's tokens; rows as in feed().
  void feed_prompt(size_t num_tokens, std::span<const Logprob> logprobs);

  // Nothing more comes: the held bytes are dropped, a character that has begun becomes U+FFFD. A turn that stopped by
  // itself and never ended its thinking was all answer [F-F1].
  void finish(bool stopped);

  // Append what has come since the last call, one frame for each phase that has any; returns how many.
  size_t write_frames(std::string& out);
  // Append what has come since the last call, for PieceReader.
  void write_pieces(std::string& out);

  bool framed() const noexcept { return spec_.content.has_value(); }
  // Whether anything leaves before the end.
  bool streamed() const noexcept { return framed() || spec_.all_python; }
  // Of a collected request all, of a streamed one what the end has made content, but went out as reasoning.
  std::string_view content() const noexcept { return streamed() ? answer_ : text_[kContent]; }
  // Of a collected request.
  std::string_view reasoning() const noexcept { return text_[kReasoning]; }
  // Of any request all: what a later turn brings back as text is encoded in these. [R52]
  std::span<const int32_t> ids() const noexcept { return ids_; }

  uint32_t reasoning_tokens() const noexcept { return reasoning_tokens_; }

 private:
  // An id that is more than its bytes, which lie in raw_ at [begin, end).
  struct Mark {
    size_t begin, end;
    int32_t id;
    Phase after;
    bool is_piece;  // else it shows nowhere
    size_t token;   // its place in ids_
  };
  struct Token {
    size_t end;    // of its bytes, in raw_ and all that has left it
    size_t place;  // in ids_
    std::vector<Logprob> row;
  };
  enum class Entered : uint8_t { kNo, kYes, kLeft };

  bool mark(int32_t id, std::string_view bytes);
  void release(size_t num_bytes);
  void pass(const Mark& mark, std::string_view bytes);
  void append(std::string_view bytes);
  void append_tokens(std::string_view raw, size_t& at, size_t end, size_t before);
  void hand_over_tokens();
  template <class Append>
  void append_text(Append&& append);
  bool in_pieces() const noexcept { return leaving_ == kPython || spec_.all_python; }
  bool holds_content() const noexcept;
  std::span<const int32_t> unframed_ids(Phase phase) const noexcept;

  const ByteVocab* vocab_;
  const Markup* markup_;
  OutSpec spec_;
  int32_t first_marked_;  // no id below it is in markup or python_ids
  Phase arriving_;        // of the next id
  Phase leaving_;         // of the next byte that leaves raw_; never ahead of arriving_
  std::string raw_;
  size_t held_bytes_ = 0;  // at its end
  std::vector<Mark> marks_;  // in raw_, ascending
  std::deque<Token> tokens_;  // not handed over; the first num_left_ have left raw_
  size_t num_left_ = 0;
  size_t num_released_ = 0;  // bytes that have left raw_
  Utf8State utf8_;           // of leaving_
  std::array<std::string, 2> text_;
  std::array<Entered, 2> entered_{};
  PieceWriter pieces_;
  std::string thoughts_;      // of a streamed request in reasoning: all of it
  std::string answer_;
  bool finished_ = false;
  std::vector<int32_t> ids_;  // all that came: the ledger of the request's output
  size_t ids_reasoning_ = 0;  // that many at the front of ids_ are reasoning's
  size_t num_framed_ids_ = 0;
  uint32_t reasoning_tokens_ = 0;
};

}  // namespace glm53d
