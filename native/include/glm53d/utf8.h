// Bytes in any pieces -> valid UTF-8, as soon as each character is whole. [R39]
//
// Concatenated output equals Python's bytes.decode("utf-8", errors="replace") of all the input: each maximal subpart of
// an ill-formed sequence (Unicode, section 3.9) becomes one U+FFFD. No history is kept beyond a character that has
// begun.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace glm53d {

// The beginning of a character whose end has not come: a lead byte and the continuation bytes so far, at most 3 in all.
struct Utf8State {
  uint8_t pending[3] = {};
  uint8_t num_pending = 0;
};

// Append to out all of bytes that is decided.
void utf8_feed(Utf8State& state, std::string_view bytes, std::string& out);

// No more comes: what has begun becomes U+FFFD. The state is fresh again.
void utf8_finish(Utf8State& state, std::string& out);

}  // namespace glm53d
