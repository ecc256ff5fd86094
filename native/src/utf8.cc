#include "glm53d/utf8.h"

#include <cstring>

namespace glm53d {
namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";

// Bytes of a character that begins with this one; 0: none does.
int char_len(uint8_t lead) noexcept {
  if (lead < 0x80) return 1;
  if (lead < 0xc2) return 0;  // a continuation, or the lead of an overlong form
  if (lead < 0xe0) return 2;
  if (lead < 0xf0) return 3;
  return lead < 0xf5 ? 4 : 0;
}

// Whether b can follow what is pending. Only the second byte has bounds of its own: no overlong forms, no surrogates,
// nothing above U+10FFFF.
bool continues(const Utf8State& state, uint8_t b) noexcept {
  uint8_t low = 0x80, high = 0xbf;
  if (state.num_pending == 1) {
    switch (state.pending[0]) {
      case 0xe0: low = 0xa0; break;
      case 0xed: high = 0x9f; break;
      case 0xf0: low = 0x90; break;
      case 0xf4: high = 0x8f; break;
    }
  }
  return low <= b && b <= high;
}

// How many bytes at the beginning are ASCII. Tokens are short, so eight at a time are few steps and few branches.
size_t ascii_len(std::string_view bytes) noexcept {
  size_t n = 0;
  for (uint64_t word; n + 8 <= bytes.size(); n += 8) {
    std::memcpy(&word, bytes.data() + n, 8);
    if (word & 0x8080808080808080) break;
  }
  while (n < bytes.size() && static_cast<uint8_t>(bytes[n]) < 0x80) ++n;
  return n;
}

}  // namespace

void utf8_feed(Utf8State& state, std::string_view bytes, std::string& out) {
  for (size_t i = 0; i < bytes.size();) {
    if (state.num_pending == 0) {
      const size_t run = ascii_len(bytes.substr(i));
      out.append(bytes.data() + i, run);
      i += run;
      if (i == bytes.size()) return;
    }
    const uint8_t b = bytes[i];
    if (state.num_pending == 0) {
      if (char_len(b) == 0)
        out += kReplacement;
      else
        state.pending[state.num_pending++] = b;
      ++i;
    } else if (!continues(state, b)) {
      utf8_finish(state, out);  // and b is looked at again, as the beginning of something
    } else if (state.num_pending + 1 == char_len(state.pending[0])) {
      out.append(reinterpret_cast<const char*>(state.pending), state.num_pending);
      out += static_cast<char>(b);
      state.num_pending = 0;
      ++i;
    } else {
      state.pending[state.num_pending++] = b;
      ++i;
    }
  }
}

void utf8_finish(Utf8State& state, std::string& out) {
  if (state.num_pending > 0) out += kReplacement;
  state.num_pending = 0;
}

}  // namespace glm53d
