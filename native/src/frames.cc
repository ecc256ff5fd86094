#include "glm53d/frames.h"

#include <algorithm>
#include <charconv>

namespace glm53d {
namespace {

bool needs_escape(char c) noexcept { return static_cast<uint8_t>(c) < 0x20 || c == '"' || c == '\\'; }

void append_escape(char c, std::string& out) {
  constexpr std::string_view kHex = "0123456789abcdef";
  switch (c) {
    case '"': out += "\\\""; return;
    case '\\': out += "\\\\"; return;
    case '\n': out += "\\n"; return;
    case '\r': out += "\\r"; return;
    case '\t': out += "\\t"; return;
    case '\b': out += "\\b"; return;
    case '\f': out += "\\f"; return;
  }
  out += "\\u00";
  out += kHex[c >> 4];
  out += kHex[c & 15];
}

}  // namespace

void append_json_escaped(std::string_view text, std::string& out) {
  for (auto at = text.begin(); at != text.end();) {
    const auto stop = std::find_if(at, text.end(), needs_escape);
    out.append(at, stop);
    if (stop == text.end()) return;
    append_escape(*stop, out);
    at = stop + 1;
  }
}

void append_frame(const Frame& frame, std::string_view text, std::string& out) {
  out += frame.prefix;
  append_json_escaped(text, out);
  out += frame.suffix;
}

void append_frame(const Frame& frame, std::string_view text, std::span<const int32_t> ids, std::string& out) {
  out += frame.prefix;
  append_json_escaped(text, out);
  out += "\",\"output_ids\":[";
  for (size_t i = 0; i < ids.size(); ++i) {
    char digits[12];
    if (i > 0) out += ',';
    out.append(digits, std::to_chars(digits, digits + sizeof digits, ids[i]).ptr);
  }
  out += ']';
  out += frame.suffix;
}

}  // namespace glm53d
