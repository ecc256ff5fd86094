// UTF-8 from pieces: the table of Unicode section 3.9, and that no cut changes anything. Python's decoder is the
// measure in tests/property.
#include <string>
#include <string_view>

#include "check.h"
#include "glm53d/utf8.h"

using namespace glm53d;
using test::below;
using test::Random;

static std::string decoded(std::string_view bytes) {
  Utf8State state;
  std::string out;
  utf8_feed(state, bytes, out);
  utf8_finish(state, out);
  return out;
}

#define FFFD "\xef\xbf\xbd"

static void each_maximal_subpart_becomes_one_replacement() {
  CHECK(decoded("\xc0\xaf\xe0\x80\xbf\xf0\x81\x82\x41") == FFFD FFFD FFFD FFFD FFFD FFFD FFFD FFFD "A");  // table 3-8
  CHECK(decoded("\xed\xa0\x80\xed\xbf\xbf\xed\xaf\x41") == FFFD FFFD FFFD FFFD FFFD FFFD FFFD FFFD "A");  // table 3-9
  CHECK(decoded("\xf4\x91\x92\x93\xff\x41\x80\xbf\x42") == FFFD FFFD FFFD FFFD FFFD "A" FFFD FFFD "B");  // table 3-10
  CHECK(decoded("\xe1\x80\xe2\xf0\x91\x92\xf1\xbf\x41") == FFFD FFFD FFFD FFFD "A");                      // table 3-11
  CHECK(decoded("a\xf0\x9f\x98") == "a" FFFD);
}

static void no_cut_changes_the_text() {
  static constexpr uint8_t kEdges[] = {0x41, 0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc1, 0xc2,
                                       0xdf, 0xe0, 0xe1, 0xed, 0xef, 0xf0, 0xf1, 0xf4, 0xf5, 0xff};
  Random random(1);
  for (int round = 0; round < 20'000; ++round) {
    std::string bytes(below(random, 24), '\0');
    for (char& c : bytes) c = static_cast<char>(kEdges[below(random, sizeof kEdges)]);
    Utf8State state;
    std::string out;
    for (size_t at = 0; at < bytes.size();) {
      const size_t n = 1 + below(random, bytes.size() - at);
      utf8_feed(state, std::string_view(bytes).substr(at, n), out);
      CHECK(decoded(out) == out);  // what is out is valid by itself
      at += n;
    }
    utf8_finish(state, out);
    CHECK(out == decoded(bytes));
  }
}

int main() {
  each_maximal_subpart_becomes_one_replacement();
  no_cut_changes_the_text();
}
