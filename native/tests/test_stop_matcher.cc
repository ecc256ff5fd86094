// Stop strings: what is found and held back, against looking at the whole text; and what the table makes of ids.
#include <string>
#include <vector>

#include "check.h"
#include "glm53d/stop_matcher.h"

using namespace glm53d;
using namespace test;

struct Found {
  size_t end;
  int32_t stop;
};

// The first byte behind which some string is complete, and the longest that is.
static Found find_plainly(std::string_view text, const std::vector<std::string_view>& stops) {
  for (size_t end = 1; end <= text.size(); ++end) {
    Found found{end, -1};
    for (size_t i = 0; i < stops.size(); ++i) {
      const bool ends_here = text.substr(0, end).ends_with(stops[i]);
      if (ends_here && (found.stop < 0 || stops[i].size() > stops[found.stop].size())) found.stop = static_cast<int32_t>(i);
    }
    if (found.stop >= 0) return found;
  }
  return {text.size(), -1};
}

static size_t longest_beginning_at_the_end(std::string_view text, const std::vector<std::string_view>& stops) {
  size_t longest = 0;
  for (const std::string_view stop : stops)
    for (size_t n = 1; n < stop.size(); ++n)
      if (text.ends_with(stop.substr(0, n)) && n > longest) longest = n;
  return longest;
}

static std::string random_text(Random& random, size_t max_size, int num_letters) {
  std::string text(below(random, max_size + 1), 'a');
  for (char& c : text) c = static_cast<char>('a' + below(random, num_letters));
  return text;
}

static void every_byte_finds_and_holds_what_the_whole_text_says() {
  Random random(1);
  size_t num_found = 0;
  for (int round = 0; round < 20'000; ++round) {
    const int num_letters = 1 + static_cast<int>(below(random, 3));
    std::vector<std::string> strings(1 + below(random, 4));
    for (std::string& s : strings) s = "a" + random_text(random, 6, num_letters);
    const std::vector<std::string_view> stops(strings.begin(), strings.end());
    const std::string text = random_text(random, 40, num_letters);

    StopMatcher matcher(stops);
    size_t end = 0;
    while (end < text.size() && matcher.matched() < 0) {
      const std::string_view piece = std::string_view(text).substr(end, 1 + below(random, 5));
      const size_t used = matcher.feed(piece);
      CHECK(used == piece.size() || matcher.matched() >= 0);
      end += used;
      if (matcher.matched() < 0)
        CHECK(matcher.held_bytes() == longest_beginning_at_the_end(std::string_view(text).substr(0, end), stops));
    }
    const Found found = find_plainly(text, stops);
    CHECK(end == found.end && matcher.matched() == found.stop);
    if (found.stop < 0) continue;
    ++num_found;
    CHECK(matcher.match_bytes() == stops[found.stop].size());
  }
  CHECK(num_found > 5'000);
}

static void sixteen_strings_of_a_thousand_equal_bytes_are_found_in_linear_time() {
  std::vector<std::string> strings;
  for (int i = 0; i < 16; ++i) strings.push_back(std::string(1023, 'a') + static_cast<char>('b' + i));
  const std::vector<std::string_view> stops(strings.begin(), strings.end());
  StopMatcher matcher(stops);
  const std::string text(4 << 20, 'a');  // a way back for every byte: quadratic would be 4 G steps
  CHECK(matcher.feed(text) == text.size() && matcher.matched() < 0 && matcher.held_bytes() == 1023);
  CHECK(matcher.feed("q") == 1 && matcher.matched() == 15);
}

// 0 "ab"   1 "c"   2 <special> "S"   3 </think>   4 no bytes   5 "xcdy"   6 <c>, which begins a call
static ByteVocab vocab() {
  ByteVocab v;
  v.add("ab", false);
  v.add("c", false);
  v.add("S", true);
  v.add("</think>", false);
  v.add("", false);
  v.add("xcdy", false);
  v.add("<c>", false);
  return v;
}

static StopTable::Fed feed(std::vector<std::string_view> stops, StopTable::Spec spec, std::vector<int32_t> ids) {
  const ByteVocab v = vocab();
  StopTable table(2, v, 3, 6);
  table.open(1, stops, spec);
  return table.feed(1, ids);
}

static bool is(StopTable::Fed fed, int32_t num_ids, int32_t matched, int32_t held) {
  return fed.num_ids == num_ids && fed.matched == matched && fed.held_bytes == held;
}

static void a_row_ends_at_the_id_that_completes_a_string() {
  CHECK(is(feed({"bc"}, {true, false, false, false}, {0, 1, 0, 1}), 2, 0, 2));
  CHECK(is(feed({"bc"}, {true, false, false, false}, {0, 4, 99, -1, 1, 0}), 5, 0, 2));  // ids without bytes part nothing
  CHECK(is(feed({"zz", "bca"}, {true, false, false, false}, {0, 1}), 2, -1, 2));
}

static void what_is_behind_a_match_is_cut_off_and_the_match_unless_it_is_kept() {
  CHECK(is(feed({"c"}, {true, false, false, false}, {0, 5}), 2, 0, 3));
  CHECK(is(feed({"c"}, {true, false, false, true}, {0, 5}), 2, 0, 2));
  CHECK(is(feed({"y"}, {true, false, false, true}, {0, 5}), 2, 0, 0));
}

static void special_tokens_have_bytes_only_when_they_show() {
  CHECK(is(feed({"bc"}, {true, false, false, false}, {0, 2, 1}), 3, 0, 2));
  CHECK(is(feed({"bS"}, {false, false, false, false}, {0, 2, 1}), 2, 0, 2));
  CHECK(is(feed({"bS"}, {true, false, false, false}, {0, 2, 1}), 3, -1, 0));
}

static void in_content_looks_behind_the_first_end_of_reasoning_only() {
  CHECK(is(feed({"c", ">c"}, {true, true, false, false}, {1, 3, 0, 1}), 4, 0, 1));
  CHECK(is(feed({"c"}, {true, true, false, false}, {1, 1}), 2, -1, 0));
  CHECK(is(feed({"think>c"}, {true, true, false, false}, {3, 1}), 2, -1, 0));    // that end has no bytes itself,
  CHECK(is(feed({"think>c"}, {true, true, false, false}, {3, 3, 1}), 3, 0, 7));  // a second one is text
  CHECK(is(feed({"think>c"}, {true, false, false, false}, {3, 1}), 2, 0, 7));
}

static void before_calls_looks_at_nothing_from_the_first_call_on() {
  CHECK(is(feed({"c"}, {true, true, true, false}, {3, 0, 6, 1}), 4, -1, 0));
  CHECK(is(feed({"bc"}, {true, true, true, false}, {3, 0, 6}), 3, -1, 0));   // nothing is held any more
  CHECK(is(feed({"c"}, {true, true, true, false}, {6, 3, 1}), 3, -1, 0));    // it may begin in the reasoning
  CHECK(is(feed({"c"}, {true, false, true, false}, {0, 1, 6}), 2, 0, 1));
  CHECK(is(feed({"<c>"}, {true, true, false, false}, {3, 6}), 2, 0, 3));    // text where nobody reads calls
}

static void no_id_before_the_least_number_completes_a_string() {
  CHECK(is(feed({"c"}, {true, false, false, false, 3}, {1, 0, 1, 1}), 3, 0, 1));
  CHECK(is(feed({"bc"}, {true, false, false, false, 2}, {0, 1}), 2, 0, 2));          // it may begin before
  CHECK(is(feed({"c"}, {true, false, false, false, 2}, {1, 4, 0}), 3, -1, 0));       // an id without bytes completes nothing
  CHECK(is(feed({"c", "abcab"}, {true, false, false, false, 4}, {0, 1, 4, 0}), 4, 1, 5));
}

int main() {
  every_byte_finds_and_holds_what_the_whole_text_says();
  sixteen_strings_of_a_thousand_equal_bytes_are_found_in_linear_time();
  a_row_ends_at_the_id_that_completes_a_string();
  what_is_behind_a_match_is_cut_off_and_the_match_unless_it_is_kept();
  special_tokens_have_bytes_only_when_they_show();
  in_content_looks_behind_the_first_end_of_reasoning_only();
  before_calls_looks_at_nothing_from_the_first_call_on();
  no_id_before_the_least_number_completes_a_string();
}
