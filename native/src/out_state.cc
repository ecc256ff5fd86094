#include "glm53d/out_state.h"

#include <algorithm>

namespace glm53d {
namespace {

bool has(const std::vector<int32_t>& ids, int32_t id) noexcept { return std::ranges::find(ids, id) != ids.end(); }

bool is_blank(std::string_view text) noexcept { return text.find_first_not_of(" \t\n\r\f\v") == text.npos; }

int32_t lowest(const Markup& markup, const OutSpec& spec) noexcept {
  int32_t id = std::min(markup.begin_reasoning, markup.end_reasoning);
  if (!markup.pieces.empty()) id = std::min(id, markup.pieces.front());
  for (const int32_t python_id : spec.python_ids) id = std::min(id, python_id);
  return id;
}

}  // namespace

OutState::OutState(const ByteVocab& vocab, const Markup& markup, OutSpec spec)
    : vocab_(&vocab), markup_(&markup), spec_(std::move(spec)), first_marked_(lowest(markup, spec_)),
      arriving_(spec_.starts_in_reasoning ? kReasoning : kContent), leaving_(arriving_) {}

size_t OutState::feed(std::span<const int32_t> ids, size_t held_bytes, std::span<const Logprob> logprobs) {
  const size_t width = ids.empty() || !spec_.with_logprobs ? 0 : logprobs.size() / ids.size();
  size_t unknown = 0;
  for (const int32_t id : ids) {
    const bool is_known = vocab_->contains(id);
    const std::string_view bytes = is_known ? vocab_->bytes(id, spec_.skip_special) : std::string_view{};
    unknown += !is_known;
    const Phase phase = arriving_;
    if (id < first_marked_ || !mark(id, bytes)) raw_ += bytes;
    reasoning_tokens_ += arriving_ == kReasoning;
    if (width > 0) {
      const auto row = logprobs.first(width);
      tokens_.push_back({num_released_ + raw_.size(), ids_.size(), {row.begin(), row.end()}});
      logprobs = logprobs.subspan(width);
    }
    ids_.push_back(id);
    ids_reasoning_ += phase == kReasoning;
  }
  held_bytes_ = std::min(held_bytes, raw_.size());
  release(raw_.size() - held_bytes_);
  return unknown;
}

void OutState::feed_prompt(size_t num_tokens, std::span<const Logprob> logprobs) {
  for (; spec_.with_logprobs && num_tokens > 0; --num_tokens) {
    const size_t width = logprobs.size() / num_tokens;
    pieces_.add_token(true, logprobs.first(width));
    logprobs = logprobs.subspan(width);
  }
}

// Whether the id is more than its bytes; then it has been taken into raw_ and marks_.
bool OutState::mark(int32_t id, std::string_view bytes) {
  const Phase before = arriving_;
  if (before == kReasoning && id == markup_->end_reasoning) {
    arriving_ = kContent;
    bytes = {};
  } else if (before != kPython && has(spec_.python_ids, id)) {
    arriving_ = kPython;
  }
  const bool is_piece = (arriving_ == kPython || spec_.all_python) && std::ranges::binary_search(markup_->pieces, id);
  // In a chat a <think> in the thinking and a second </think> behind it say nothing.
  const int32_t void_id = before == kReasoning ? markup_->begin_reasoning : markup_->end_reasoning;
  const bool is_void = spec_.starts_in_reasoning && id == void_id;
  if (arriving_ == before && !is_piece && !is_void) return false;
  marks_.push_back({raw_.size(), raw_.size() + bytes.size(), id, arriving_, is_piece, ids_.size()});
  raw_ += bytes;
  return true;
}

void OutState::release(size_t num_bytes) {
  const std::string_view raw = raw_;
  size_t at = 0, num_passed = 0;
  for (; num_passed < marks_.size() && marks_[num_passed].end <= num_bytes; ++num_passed) {
    const Mark& mark = marks_[num_passed];
    append_tokens(raw, at, mark.begin, mark.token);
    pass(mark, raw.substr(mark.begin, mark.end - mark.begin));
    at = mark.end;
    append_tokens(raw, at, at, mark.token + 1);
  }
  const bool meets_mark = num_passed < marks_.size();
  if (meets_mark) num_bytes = std::min(num_bytes, marks_[num_passed].begin);
  append_tokens(raw, at, num_bytes, meets_mark ? marks_[num_passed].token : SIZE_MAX);
  num_released_ += num_bytes;
  raw_.erase(0, num_bytes);
  marks_.erase(marks_.begin(), marks_.begin() + static_cast<ptrdiff_t>(num_passed));
  for (Mark& mark : marks_) mark.begin -= num_bytes, mark.end -= num_bytes;
}

void OutState::pass(const Mark& mark, std::string_view bytes) {
  append_text([this](std::string& out) { utf8_finish(utf8_, out); });
  hand_over_tokens();
  if (leaving_ == kReasoning && mark.after != kReasoning) std::string().swap(thoughts_);
  // A tag that is a piece of the thinking is part of its text.
  if (mark.after == kReasoning && mark.id != markup_->begin_reasoning) thoughts_ += bytes;
  if (mark.after == kPython && leaving_ == kContent && holds_content()) {
    pieces_.add_text([this](std::string& out) { out += text_[kContent]; });
    text_[kContent].clear();
  }
  leaving_ = mark.after;
  if (mark.is_piece) pieces_.add_id(mark.id);
}

void OutState::append(std::string_view bytes) {
  if (!bytes.empty()) append_text([&](std::string& out) { utf8_feed(utf8_, bytes, out); });
}

// What lies in raw from `at` to `end`, each token behind its bytes, up to the token at the place `before`. Moves at to end.
void OutState::append_tokens(std::string_view raw, size_t& at, size_t end, size_t before) {
  while (num_left_ < tokens_.size() && tokens_[num_left_].place < before) {
    const size_t token_end = tokens_[num_left_].end - num_released_;
    if (token_end > end) break;
    ++num_left_;
    append(raw.substr(at, token_end - at));
    at = token_end;
    if (utf8_.num_pending == 0) hand_over_tokens();
  }
  append(raw.substr(at, end - at));
  at = end;
}

// The text of those that have left raw_ is whole.
void OutState::hand_over_tokens() {
  for (; num_left_ > 0; --num_left_) {
    pieces_.add_token(false, tokens_.front().row);
    tokens_.pop_front();
  }
}

// append(std::string&) appends text of the phase leaving_.
template <class Append>
void OutState::append_text(Append&& append) {
  const auto append_and_keep = [&](std::string& out) {
    const size_t before = out.size();
    append(out);
    if (leaving_ == kReasoning && streamed()) thoughts_.append(out, before);
  };
  if (in_pieces())
    pieces_.add_text(append_and_keep);
  else
    append_and_keep(text_[leaving_]);
}

void OutState::finish(bool stopped) {
  // A piece that is kept back whole for its end alone: what stands before a stop string inside it is text.
  if (!marks_.empty() && marks_.front().is_piece && marks_.front().after == leaving_)
    append(std::string_view(raw_).substr(0, raw_.size() - held_bytes_));
  raw_.clear();
  marks_.clear();
  append_text([this](std::string& out) { utf8_finish(utf8_, out); });
  num_left_ = tokens_.size();
  hand_over_tokens();
  finished_ = true;
  if (!stopped || arriving_ != kReasoning) return;
  reasoning_tokens_ = 0;
  if (streamed())
    answer_.swap(thoughts_);
  else
    text_[kContent].swap(text_[kReasoning]);
}

// Where calls may follow, a blank beginning of the content is not framed: if nothing but calls follows, there is none.
bool OutState::holds_content() const noexcept {
  return framed() && !spec_.python_ids.empty() && !finished_ && entered_[kContent] == Entered::kNo &&
         is_blank(text_[kContent]);
}

size_t OutState::write_frames(std::string& out) {
  size_t num_frames = 0;
  for (const Phase phase : {kReasoning, kContent}) {
    const Frame& frame = phase == kReasoning && spec_.reasoning ? *spec_.reasoning : *spec_.content;
    const std::span<const int32_t> ids = spec_.with_ids ? unframed_ids(phase) : std::span<const int32_t>{};
    const bool has_frame = !(text_[phase].empty() && ids.empty()) && !(phase == kContent && holds_content());
    const bool begins = phase == (spec_.starts_in_reasoning ? kReasoning : kContent);
    if (entered_[phase] == Entered::kNo && (has_frame || begins)) {
      out += frame.enter;
      entered_[phase] = Entered::kYes;
    }
    if (has_frame) {
      if (spec_.with_ids)
        append_frame(frame, text_[phase], ids, out);
      else
        append_frame(frame, text_[phase], out);
      text_[phase].clear();
      ++num_frames;
    }
    if (entered_[phase] == Entered::kYes && (leaving_ > phase || finished_)) {
      out += frame.leave;
      entered_[phase] = Entered::kLeft;
    }
  }
  num_framed_ids_ = ids_.size();
  return num_frames;
}

std::span<const int32_t> OutState::unframed_ids(Phase phase) const noexcept {
  const size_t begin = phase == kReasoning ? 0 : ids_reasoning_;
  const size_t end = phase == kReasoning ? ids_reasoning_ : ids_.size();
  const size_t first = std::clamp(num_framed_ids_, begin, end);
  return std::span(ids_).subspan(first, end - first);
}

void OutState::write_pieces(std::string& out) {
  out += pieces_.data();
  pieces_.clear();
}

}  // namespace glm53d
