// One request's output: phases with their enter and leave, pieces, and what is held across a border. Any cut of any
// output is compared with the rules in tests/property.
#include <string>
#include <vector>

#include "check.h"
#include "glm53d/out_state.h"

using namespace glm53d;

// Ids: 0 'a', 1 first half of "é", 2 its second half, 3 a blank, then added tokens.
enum : int32_t { kA, kFirst, kSecond, kBlank, kArgKey, kThink, kToolCall, kThinkEnd };

static const ByteVocab& vocab() {
  static const ByteVocab tokens = [] {
    ByteVocab v;
    for (const char* token : {"a", "\xc3", "\xa9", "\n", "<arg_key>", "<think>", "<tool_call>", "</think>"})
      v.add(token, false);
    return v;
  }();
  return tokens;
}
static const Markup& markup() {
  static const Markup ids{kThink, kThinkEnd, {kArgKey, kThink, kToolCall, kThinkEnd}};
  return ids;
}

static OutSpec framed() {
  OutSpec spec;
  spec.content = Frame{"C(", ")", "<c>", "</c>"};
  spec.reasoning = Frame{"R(", ")", "<r>", "</r>"};
  spec.starts_in_reasoning = true;
  spec.python_ids = {kToolCall};
  return spec;
}

static std::string frames(OutState& out) {
  std::string data;
  out.write_frames(data);
  return data;
}

// Ids as [n], texts as they are, tokens as <n>, '|' between.
static std::string pieces(OutState& out) {
  std::string data, shown;
  out.write_pieces(data);
  PieceReader::read(
      data, [&](std::string_view text) { shown += std::string(text) + "|"; },
      [&](int32_t id) { shown += "[" + std::to_string(id) + "]|"; },
      [&](bool, std::span<const Logprob> row) { shown.append("<").append(std::to_string(row[0].id)).append(">|"); });
  return shown;
}

static void feed(OutState& out, std::vector<int32_t> ids, size_t held = 0) { CHECK(out.feed(ids, held) == 0); }

static void a_phase_is_entered_and_left_once() {
  OutState out(vocab(), markup(), framed());
  feed(out, {kA});
  CHECK(frames(out) == "<r>R(a)");
  feed(out, {kA});
  CHECK(frames(out) == "R(a)");
  feed(out, {kThinkEnd});
  CHECK(frames(out) == "</r>");
  feed(out, {kBlank});
  CHECK(frames(out).empty());  // perhaps only calls follow
  feed(out, {kA});
  CHECK(frames(out) == "<c>C(\\na)");
  feed(out, {kToolCall, kA});
  CHECK(frames(out) == "</c>" && pieces(out) == "[6]|a|");
  out.finish(true);
  CHECK(frames(out).empty() && out.content().empty() && out.reasoning_tokens() == 2);
}

static void a_turn_without_text_enters_and_leaves_only_where_it_began() {
  OutState out(vocab(), markup(), framed());
  feed(out, {kThinkEnd, kBlank, kToolCall});
  CHECK(frames(out) == "<r></r>" && pieces(out) == "\n|[6]|");
  out.finish(true);
  CHECK(frames(out).empty());
}

static void thinking_that_stops_was_the_answer() {
  for (const bool stopped : {true, false}) {
    OutState streamed(vocab(), markup(), framed()), collected(vocab(), markup(), [] {
      OutSpec spec;
      spec.starts_in_reasoning = true;
      return spec;
    }());
    for (OutState* out : {&streamed, &collected}) {
      feed(*out, {kA, kThink, kA, kFirst});
      out->finish(stopped);
    }
    CHECK(frames(streamed) == "<r>R(aa\uFFFD)</r>");
    CHECK(streamed.content() == (stopped ? "aa\uFFFD" : "") && streamed.reasoning_tokens() == (stopped ? 0 : 4));
    CHECK(collected.content() == (stopped ? "aa\uFFFD" : "") && collected.reasoning() == (stopped ? "" : "aa\uFFFD"));
  }
}

static void what_is_held_may_span_a_border_and_a_tag_is_held_whole() {
  OutState out(vocab(), markup(), framed());
  feed(out, {kA, kA, kThinkEnd, kA}, 2);
  CHECK(frames(out) == "<r>R(a)");
  feed(out, {kToolCall, kA}, 3);  // two bytes of the tag
  CHECK(frames(out) == "R(a)</r><c>C(a)" && pieces(out).empty());
  feed(out, {}, 1);
  CHECK(frames(out) == "</c>" && pieces(out) == "[6]|");
  out.finish(true);  // what is still held never shows
  CHECK(pieces(out).empty());
}

static void a_character_does_not_go_on_behind_a_tag() {
  OutState out(vocab(), markup(), framed());
  feed(out, {kThinkEnd, kA, kThinkEnd, kToolCall, kFirst});
  CHECK(frames(out) == "<r></r><c>C(a)</c>" && pieces(out) == "[6]|");
  feed(out, {kSecond, kFirst, kArgKey, kSecond});
  CHECK(pieces(out) == "é\uFFFD|[4]|\uFFFD|");
}

static void all_python_hands_over_every_phase() {
  OutSpec spec;
  spec.starts_in_reasoning = spec.all_python = true;
  OutState out(vocab(), markup(), spec);
  feed(out, {kA, kThink, kA});
  CHECK(pieces(out) == "a|[5]|a|");
  feed(out, {kThinkEnd, kA, kToolCall});
  CHECK(pieces(out) == "[7]|a|[6]|" && !out.framed() && out.streamed() && out.reasoning_tokens() == 3);
}

static void a_token_comes_behind_the_text_that_its_bytes_complete() {
  OutSpec spec;
  spec.starts_in_reasoning = spec.all_python = spec.with_logprobs = true;
  OutState out(vocab(), markup(), spec);
  const auto say = [&](std::vector<int32_t> ids, size_t held = 0) {
    std::vector<Logprob> rows;
    for (const int32_t id : ids) rows.insert(rows.end(), {{id, -1.0f}, {-1, 0.0f}});
    CHECK(out.feed(ids, held, rows) == 0);
    return pieces(out);
  };
  out.feed_prompt(1, std::vector<Logprob>{{kBlank, 0.0f}});
  CHECK(say({kA, kFirst}) == "<3>|a|<0>|");
  CHECK(say({kSecond}) == "é|<1>|<2>|");
  CHECK(say({kFirst, kThinkEnd}) == "\uFFFD|<1>|[7]|<7>|");  // nothing goes on behind a tag
  CHECK(say({kA, kA}, 1) == "a|<0>|");
  out.finish(true);  // what is held never shows, and its token comes
  CHECK(pieces(out) == "<0>|");
}

static void of_a_tag_in_which_a_stop_string_begins_the_rest_is_text() {
  for (const bool in_python : {false, true}) {
    OutSpec spec = framed();
    spec.starts_in_reasoning = false;
    spec.all_python = !in_python;
    OutState out(vocab(), markup(), spec);
    feed(out, {kToolCall, kA});
    pieces(out);
    feed(out, {kArgKey}, 5);  // "_key>"
    CHECK(pieces(out).empty());
    out.finish(true);
    CHECK(pieces(out) == "<arg|");
  }
}

int main() {
  a_phase_is_entered_and_left_once();
  a_turn_without_text_enters_and_leaves_only_where_it_began();
  thinking_that_stops_was_the_answer();
  what_is_held_may_span_a_border_and_a_tag_is_held_whole();
  a_character_does_not_go_on_behind_a_tag();
  all_python_hands_over_every_phase();
  a_token_comes_behind_the_text_that_its_bytes_complete();
  of_a_tag_in_which_a_stop_string_begins_the_rest_is_text();
}
