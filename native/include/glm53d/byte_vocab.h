// The bytes that each token id stands for: one table per vocabulary, immutable, shared by all threads. [R39]
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "glm53d/utf8.h"

namespace glm53d {

class ByteVocab {
 public:
  void add(std::string_view token, bool special) {
    tokens_.push_back({static_cast<uint32_t>(bytes_.size()), static_cast<uint32_t>(token.size()) << 1 | special});
    bytes_.append(token);
  }

  size_t size() const noexcept { return tokens_.size(); }
  bool contains(int32_t id) const noexcept { return id >= 0 && static_cast<size_t>(id) < size(); }

  // Of an id it contains. A special token has no bytes when they are skipped.
  std::string_view bytes(int32_t id, bool skip_special) const noexcept {
    const Token token = tokens_[id];
    if (skip_special && (token.size_and_special & 1)) return {};
    return {bytes_.data() + token.begin, token.size_and_special >> 1};
  }

 private:
  // Eight bytes, because a step of many streams looks up ids all over the table and a cache miss is what each costs.
  struct Token {
    uint32_t begin;             // in bytes_
    uint32_t size_and_special;  // size << 1 | special
  };
  std::string bytes_;  // of all tokens, one behind the other
  std::vector<Token> tokens_;
};

// Ids in any pieces -> UTF-8 text. The vocabulary must outlive it.
class Decoder {
 public:
  Decoder(const ByteVocab& vocab, bool skip_special) noexcept : vocab_(vocab), skip_special_(skip_special) {}

  void feed(const int32_t* ids, size_t num_ids, std::string& out) {
    for (size_t i = 0; i < num_ids; ++i) {
      if (vocab_.contains(ids[i]))
        utf8_feed(state_, vocab_.bytes(ids[i], skip_special_), out);
      else
        ++unknown_ids_;
    }
  }
  void finish(std::string& out) { utf8_finish(state_, out); }

  // Ids outside the vocabulary so far: they decode to nothing.
  uint64_t unknown_ids() const noexcept { return unknown_ids_; }

 private:
  const ByteVocab& vocab_;
  const bool skip_special_;
  Utf8State state_;
  uint64_t unknown_ids_ = 0;
};

}  // namespace glm53d
