// Text and ids of added tokens in the order they came, as bytes that can be handed on. [R41]
//
//   piece = id | -1 length text | token        token = (-2 | -3) width Logprob[width]
//
// id, length, width: 32 bits, in this machine's order. -2: a token of the output, behind the text that its bytes have
// completed; -3: one of the prompt. Never two texts in a row, never an empty one.
#pragma once
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "glm53d/records.h"

namespace glm53d {

class PieceWriter {
 public:
  void add_id(int32_t id) {
    put(id);
    in_text_ = false;
  }

  // row: the token's Logprobs; its end, ids below 0, is left out.
  void add_token(bool is_prompt, std::span<const Logprob> row) {
    size_t width = row.size();
    while (width > 1 && row[width - 1].id < 0) --width;
    put(is_prompt ? kPromptToken : kToken);
    put(static_cast<int32_t>(width));
    data_.append(reinterpret_cast<const char*>(row.data()), width * sizeof(Logprob));
    in_text_ = false;
  }

  // append(std::string&) appends any number of bytes, which lengthen a text that is last.
  template <class Append>
  void add_text(Append&& append) {
    if (!in_text_) {
      text_at_ = data_.size();
      put(kText);
      put(0);
    }
    append(data_);
    const size_t size = data_.size() - text_at_ - kHead;
    in_text_ = size > 0;
    if (!in_text_) return data_.resize(text_at_);
    const auto length = static_cast<uint32_t>(size);
    std::memcpy(&data_[text_at_ + sizeof(int32_t)], &length, sizeof length);
  }

  std::string_view data() const noexcept { return data_; }
  // What comes next begins a piece. Keeps the memory.
  void clear() noexcept {
    data_.clear();
    in_text_ = false;
  }

 private:
  friend class PieceReader;
  static constexpr int32_t kText = -1, kToken = -2, kPromptToken = -3;
  static constexpr size_t kHead = 2 * sizeof(int32_t);

  void put(int32_t value) { data_.append(reinterpret_cast<const char*>(&value), sizeof value); }

  std::string data_;
  size_t text_at_ = 0;  // where the last text's head is
  bool in_text_ = false;
};

class PieceReader {
 public:
  // Call text(std::string_view), id(int32_t) or token(bool is_prompt, std::span<const Logprob>) for each piece of what a
  // writer, or several one behind the other, gave.
  template <class Text, class Id, class Token>
  static void read(std::string_view data, Text&& text, Id&& id, Token&& token) {
    std::vector<Logprob> row;
    while (!data.empty()) {
      const Head head = head_of(data);
      const std::string_view body = data.substr(head.size, head.body_size);
      if (head.kind >= 0) {
        id(head.kind);
      } else if (head.kind == PieceWriter::kText) {
        text(body);
      } else {
        row.resize(body.size() / sizeof(Logprob));
        std::memcpy(row.data(), body.data(), body.size());
        token(head.kind == PieceWriter::kPromptToken, std::span<const Logprob>(row));
      }
      data.remove_prefix(head.size + head.body_size);
    }
  }

  // The beginning of data that its first pieces are, at most so many; and the tokens behind them that may share a
  // character with their text.
  static std::string_view first(std::string_view data, size_t most) {
    size_t at = 0;
    for (size_t left = most + kMaxShared; left > 0 && at < data.size(); --left) {
      const Head head = head_of(data.substr(at));
      if (left <= kMaxShared && head.kind != PieceWriter::kToken) break;
      at += head.size + head.body_size;
    }
    return data.substr(0, at);
  }

 private:
  static constexpr size_t kMaxShared = 3;  // a character has at most four bytes

  struct Head {
    int32_t kind;  // an id is all of its piece
    size_t size, body_size;
  };

  // Of the piece that data begins with.
  static Head head_of(std::string_view data) {
    int32_t head[2] = {};
    std::memcpy(head, data.data(), sizeof(int32_t));
    if (head[0] >= 0) return {head[0], sizeof(int32_t), 0};
    std::memcpy(head, data.data(), sizeof head);
    const size_t unit = head[0] == PieceWriter::kText ? 1 : sizeof(Logprob);
    return {head[0], sizeof head, static_cast<uint32_t>(head[1]) * unit};
  }
};

}  // namespace glm53d
