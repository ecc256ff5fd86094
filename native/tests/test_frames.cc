// Frames: what is escaped and what is not, byte for byte.
#include <array>
#include <string>

#include "check.h"
#include "glm53d/frames.h"

using namespace glm53d;

static std::string escaped(std::string_view text) {
  std::string out;
  append_json_escaped(text, out);
  return out;
}

static void only_quotes_backslashes_and_controls_are_escaped() {
  CHECK(escaped("a\"b\\c/\x7f") == "a\\\"b\\\\c/\x7f");
  CHECK(escaped("\n\t\r\b\f\x01\x1f") == "\\n\\t\\r\\b\\f\\u0001\\u001f");
  CHECK(escaped(std::string_view("\0x", 2)) == "\\u0000x");
  CHECK(escaped("é你😀\u2028") == "é你😀\u2028");
  CHECK(escaped("") == "");
}

static void a_frame_is_prefix_text_ids_and_suffix() {
  const Frame frame{"data: {\"t\":\"", "\"}\n\n"}, frame_with_ids{"data: {\"t\":\"", "}\n\n"};
  std::string out = "before ";
  append_frame(frame, "\"", out);
  CHECK(out == "before data: {\"t\":\"\\\"\"}\n\n");

  out.clear();
  const std::array<int32_t, 3> ids{0, 154879, -2147483647 - 1};
  append_frame(frame_with_ids, "x", ids, out);
  append_frame(frame_with_ids, "", std::span(ids).first(0), out);
  CHECK(out == "data: {\"t\":\"x\",\"output_ids\":[0,154879,-2147483648]}\n\ndata: {\"t\":\"\",\"output_ids\":[]}\n\n");
}

int main() {
  only_quotes_backslashes_and_controls_are_escaped();
  a_frame_is_prefix_text_ids_and_suffix();
}
