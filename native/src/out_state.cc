#include "glm53d/out_state.h"

#include <algorithm>

namespace glm53d {

size_t OutState::feed(std::span<const int32_t> ids, size_t held_bytes) {
  size_t unknown = 0;
  for (const int32_t id : ids) {
    const Phase phase = arriving_;
    if (phase == kReasoning && id == end_reasoning_id_) {
      arriving_ = kContent;
    } else {
      reasoning_tokens_ += phase == kReasoning;
      if (vocab_->contains(id)) {
        const std::string_view bytes = vocab_->bytes(id, spec_.skip_special);
        raw_ += bytes;
        if (phase == kReasoning) raw_reasoning_ += bytes.size();
      } else {
        ++unknown;
      }
    }
    if (spec_.with_ids || !framed()) {
      ids_.push_back(id);
      ids_reasoning_ += phase == kReasoning;
    }
  }
  release(raw_.size() - std::min(held_bytes, raw_.size()));
  return unknown;
}

void OutState::release(size_t num_bytes) {
  const std::string_view bytes = std::string_view(raw_).substr(0, num_bytes);
  const size_t reasoning = std::min(num_bytes, raw_reasoning_);
  utf8_feed(utf8_, bytes.substr(0, reasoning), text_[kReasoning]);
  raw_reasoning_ -= reasoning;
  if (leaving_ == kReasoning && arriving_ == kContent && raw_reasoning_ == 0) {
    utf8_finish(utf8_, text_[kReasoning]);
    leaving_ = kContent;
  }
  utf8_feed(utf8_, bytes.substr(reasoning), text_[kContent]);
  raw_.erase(0, num_bytes);
}

void OutState::finish() {
  raw_.clear();
  raw_reasoning_ = 0;
  utf8_finish(utf8_, text_[leaving_]);
}

size_t OutState::write_frames(std::string& out) {
  size_t num_frames = 0;
  for (const Phase phase : {kReasoning, kContent}) {
    const std::span all(ids_);
    const auto ids = phase == kReasoning ? all.first(ids_reasoning_) : all.subspan(ids_reasoning_);
    if (text_[phase].empty() && ids.empty()) continue;
    const Frame& frame = phase == kReasoning && spec_.reasoning ? *spec_.reasoning : *spec_.content;
    if (spec_.with_ids)
      append_frame(frame, text_[phase], ids, out);
    else
      append_frame(frame, text_[phase], out);
    text_[phase].clear();
    ++num_frames;
  }
  ids_.clear();
  ids_reasoning_ = 0;
  return num_frames;
}

}  // namespace glm53d
