// Text -> the bytes of a server-sent event. Knows JSON strings and no dialect: what stands around the text it is told.
// [R41]
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace glm53d {

// prefix + JSON-escaped text + suffix is one whole event.
struct Frame {
  std::string prefix, suffix;
  // Sent before the first event of a phase and behind its last. The phase that a turn begins in is entered with whatever
  // comes first, any other by its first text; one that was not entered is not left.
  std::string enter{}, leave{};
};

// Append text, which is valid UTF-8, as it stands inside a JSON string: escaped are only " \ and controls below 0x20.
void append_json_escaped(std::string_view text, std::string& out);

// Append one event. With ids, `","output_ids":[1,2]` stands between text and suffix, which then starts after a value.
void append_frame(const Frame& frame, std::string_view text, std::string& out);
void append_frame(const Frame& frame, std::string_view text, std::span<const int32_t> ids, std::string& out);

}  // namespace glm53d
