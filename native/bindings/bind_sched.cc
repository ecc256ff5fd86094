// For glm53d/sched: the token log, the stop strings of what runs, and a step's passes over all slots.
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "glm53d/step.h"
#include "glm53d/stop_matcher.h"
#include "glm53d/token_log.h"

namespace nb = nanobind;
using glm53d::ByteVocab;
using glm53d::StopTable;
using glm53d::TokenLog;

namespace {

template <class Table>
void check_slot(const Table& table, int64_t slot) {
  if (slot < 0 || static_cast<size_t>(slot) >= table.max_slots())
    throw nb::index_error(("slot " + std::to_string(slot) + " of " + std::to_string(table.max_slots())).c_str());
}

// Every slot of a step lies in every array that is looked up by slot.
template <typename... Arrays>
void check_slots(const Array1<int32_t>& slots, const Arrays&... arrays) {
  for (const int32_t slot : view(slots))
    if (slot < 0 || ((static_cast<size_t>(slot) >= arrays.size()) || ...)) throw nb::index_error("a slot is out of range");
}

nb::tuple ready_rows(const Array1<int32_t>& slots, const Array1<int64_t>& seq_len, const Array1<int64_t>& prefix_len,
                     const Array1<int64_t>& end_len, const Array1<int64_t>& num_pages, const Array1<bool>& needs_value,
                     int64_t page_size, int64_t headroom, bool one_token) {
  check_slots(slots, seq_len, prefix_len, end_len, num_pages, needs_value);
  auto rows = glm53d::ready_rows({view(seq_len), view(prefix_len), view(end_len), view(num_pages), view(needs_value),
                                  page_size, headroom, one_token},
                                 view(slots));
  return nb::make_tuple(to_numpy<int32_t>(std::move(rows.prefix_len)), to_numpy<int32_t>(std::move(rows.sit_out)),
                        to_numpy<int32_t>(std::move(rows.need_pages)));
}

auto cut(const Array1<int32_t>& slots, const Array2<int32_t>& ids, const Array1<int32_t>& counts,
         const Array1<int64_t>& num_output, const Array1<int64_t>& max_output, const Array1<bool>& ignore_eos,
         const Array1<bool>& is_eos) {
  const size_t rows = slots.size(), width = ids.shape(1);
  if (counts.size() != rows || ids.shape(0) != rows) throw nb::value_error("slots, counts and ids differ in length");
  check_slots(slots, num_output, max_output, ignore_eos);
  const glm53d::CutRules rules{view(num_output), view(max_output), view(ignore_eos), view(is_eos)};
  std::vector<glm53d::Cut> cuts;
  cuts.reserve(rows);
  for (size_t i = 0; i < rows; ++i) {
    const int32_t count = counts.data()[i];
    if (count < 0 || static_cast<size_t>(count) > width) throw nb::value_error("a count is outside 0 .. width");
    cuts.push_back(cut_block(rules, slots.data()[i], {ids.data() + i * width, static_cast<size_t>(count)}));
  }
  return to_numpy<int32_t, 2>(std::move(cuts));
}

nb::tuple leaving(const TokenLog& log, const Array1<int32_t>& slots, const Array1<int64_t>& num_output,
                  const Array1<int64_t>& sent, const Array1<int64_t>& interval, const Array2<uint8_t>& heads,
                  uint64_t now_ns, bool all) {
  using glm53d::OutputRecord;
  if (heads.shape(1) != sizeof(OutputRecord)) throw nb::value_error("heads are not OutputRecords");
  const std::span records(reinterpret_cast<const OutputRecord*>(heads.data()), heads.shape(0));
  check_slots(slots, num_output, sent, interval, records);
  for (const int32_t slot : view(slots)) {
    check_slot(log, slot);
    const int64_t unsent = num_output.data()[slot] - sent.data()[slot];
    if (unsent < 0 || static_cast<size_t>(unsent) > log.get(slot).size())
      throw nb::value_error("more is unsent than the log has");
  }
  auto out = collect_leaving({view(num_output), view(sent), view(interval), records}, log, view(slots), now_ns, all);
  return nb::make_tuple(to_numpy<int32_t>(std::move(out.slots)), to_numpy<uint8_t, sizeof(OutputRecord)>(std::move(out.heads)),
                        to_numpy<int32_t>(std::move(out.ids)));
}

using Counts = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::tuple advance(TokenLog& log, const Array1<int32_t>& slots, const Array1<int32_t>& counts, const Array2<int32_t>& ids,
                  const Counts& seq_len, const Counts& num_output, const Counts& token_ns, int64_t now_ns) {
  const size_t rows = slots.size(), width = ids.shape(1);
  if (counts.size() != rows || ids.shape(0) != rows) throw nb::value_error("slots, counts and ids differ in length");
  check_slots(slots, seq_len, num_output, token_ns);
  for (size_t i = 0; i < rows; ++i) {
    check_slot(log, slots.data()[i]);
    if (counts.data()[i] < 0 || static_cast<size_t>(counts.data()[i]) > width)
      throw nb::value_error("a count is outside 0 .. width");
  }
  int64_t total = 0, longest = 0;
  for (size_t i = 0; i < rows; ++i) {
    const int32_t slot = slots.data()[i], count = counts.data()[i];
    int64_t& last = token_ns.data()[slot];
    if (last) longest = std::max(longest, now_ns - last);
    last = now_ns;
    log.append(slot, {ids.data() + i * width, static_cast<size_t>(count)});
    seq_len.data()[slot] += count;
    num_output.data()[slot] += count;
    total += count;
  }
  return nb::make_tuple(total, longest);
}

int32_t open_stops(StopTable& table, int64_t slot, const std::vector<nb::bytes>& stops, const Array1<int32_t>& ids,
                   bool skip_special, bool in_content, bool before_calls, bool keep_match, uint32_t min_ids) {
  check_slot(table, slot);
  std::vector<std::string_view> strings;
  for (const nb::bytes& stop : stops) {
    if (stop.size() == 0) throw nb::value_error("a stop string is empty");
    strings.emplace_back(stop.c_str(), stop.size());
  }
  table.open(slot, strings, {skip_special, in_content, before_calls, keep_match, min_ids});
  const StopTable::Fed fed = table.feed(slot, view(ids));
  if (fed.matched >= 0) throw nb::value_error("what was put out has a stop string already");
  return fed.held_bytes;
}

auto feed_stops(StopTable& table, const Array1<int32_t>& slots, const Array1<int32_t>& counts, const Array2<int32_t>& ids) {
  const size_t rows = slots.size(), width = ids.shape(1);
  if (counts.size() != rows || ids.shape(0) != rows) throw nb::value_error("slots, counts and ids differ in length");
  for (size_t i = 0; i < rows; ++i) {
    check_slot(table, slots.data()[i]);
    if (!table.is_open(slots.data()[i])) throw nb::value_error("a slot has no stop strings");
    if (counts.data()[i] < 0 || static_cast<size_t>(counts.data()[i]) > width)
      throw nb::value_error("a count is outside 0 .. width");
  }
  std::vector<StopTable::Fed> fed;
  fed.reserve(rows);
  for (size_t i = 0; i < rows; ++i)
    fed.push_back(table.feed(slots.data()[i], {ids.data() + i * width, static_cast<size_t>(counts.data()[i])}));
  return to_numpy<int32_t, 3>(std::move(fed));
}

}  // namespace

void bind_sched(nb::module_& m) {
  m.def("ready_rows", &ready_rows, nb::arg("slots").noconvert(), nb::arg("seq_len").noconvert(),
        nb::arg("prefix_len").noconvert(), nb::arg("end_len").noconvert(), nb::arg("num_pages").noconvert(),
        nb::arg("needs_value").noconvert(), nb::arg("page_size"), nb::arg("headroom"), nb::arg("one_token"),
        nb::sig("def ready_rows(slots: NDArray, seq_len: NDArray, prefix_len: NDArray, end_len: NDArray, num_pages: NDArray, "
                "needs_value: NDArray, page_size: int, headroom: int, one_token: bool) -> tuple[NDArray, NDArray, NDArray]"),
        "Of decoding slots, int32 each: (prefix_len of all, indices that sit out the next step, indices that lack pages). [R34]\n\n"
        "A slot whose last token is still being sampled sits out if it needs_value, if that is its last (end_len), and\n"
        "always without one_token, that is where a step may give several.");
  m.def("cut", &cut, nb::arg("slots").noconvert(), nb::arg("ids").noconvert(), nb::arg("counts").noconvert(),
        nb::arg("num_output").noconvert(), nb::arg("max_output").noconvert(), nb::arg("ignore_eos").noconvert(),
        nb::arg("is_eos").noconvert(),
        "Where each row's block of tokens ends: int32 [n, 2] of (count, verdict). [R38]\n\n"
        "Behind the first end-of-turn id (verdict 1), or where max_output is reached (2); else the whole block (0).");

  nb::class_<TokenLog>(m, "TokenLog", "The ids that each slot's request has put out since it was admitted. One owner, one thread.")
      .def(nb::init<size_t>(), nb::arg("max_slots"))
      .def("advance", &advance, nb::arg("slots").noconvert(), nb::arg("counts").noconvert(), nb::arg("ids").noconvert(),
           nb::arg("seq_len").noconvert(), nb::arg("num_output").noconvert(), nb::arg("token_ns").noconvert(), nb::arg("now_ns"),
           nb::sig("def advance(self, slots: NDArray, counts: NDArray, ids: NDArray, seq_len: NDArray, num_output: NDArray, "
                   "token_ns: NDArray, now_ns: int) -> tuple[int, int]"),
           "One step's tokens: ids[i, :counts[i]] go to slots[i], whose seq_len and num_output grow. All or nothing.\n\n"
           "token_ns: when each slot had its last one, 0: not yet; becomes now_ns. Returns how many tokens there were, and\n"
           "the longest time that a slot was without.")
      .def(
          "get",
          [](const TokenLog& log, int64_t slot, size_t start) {
            check_slot(log, slot);
            const auto ids = log.get(slot);
            if (start > ids.size()) throw nb::index_error("start is behind the end");
            return to_numpy<int32_t>(std::vector<int32_t>(ids.begin() + start, ids.end()));
          },
          nb::arg("slot"), nb::arg("start") = 0, "A copy of the slot's ids from start on.")
      .def("leaving", &leaving, nb::arg("slots").noconvert(), nb::arg("num_output").noconvert(), nb::arg("sent").noconvert(),
           nb::arg("interval").noconvert(), nb::arg("heads").noconvert(), nb::arg("now_ns"), nb::arg("all"),
           nb::sig("def leaving(self, slots: NDArray, num_output: NDArray, sent: NDArray, interval: NDArray, "
                   "heads: NDArray, now_ns: int, all: bool) -> tuple[NDArray, NDArray, NDArray]"),
           "Output records of those slots whose unsent ids should leave now: (slots, heads uint8 [n, record], ids of all).\n\n"
           "The first token at once, then every interval tokens; with all, whatever is unsent, and a head even for none.")
      .def(
          "length",
          [](const TokenLog& log, int64_t slot) {
            check_slot(log, slot);
            return log.get(slot).size();
          },
          nb::arg("slot"))
      .def(
          "clear",
          [](TokenLog& log, int64_t slot) {
            check_slot(log, slot);
            log.clear(slot);
          },
          nb::arg("slot"), "The slot is free: its ids and their memory go.");

  nb::class_<StopTable>(m, "StopTable", "The stop strings of the requests that run, by slot. [R38] [R40] One owner, one thread.")
      .def(nb::init<size_t, const ByteVocab&, int32_t, int32_t>(), nb::arg("max_slots"), nb::arg("vocab"),
           nb::arg("end_reasoning_id"), nb::arg("call_begin_id"), nb::keep_alive<1, 3>())
      .def("open", &open_stops, nb::arg("slot"), nb::arg("stops"), nb::arg("ids").noconvert(), nb::arg("skip_special"),
           nb::arg("in_content"), nb::arg("before_calls"), nb::arg("keep_match"), nb::arg("min_ids") = 0,
           "A request takes the slot, having put out ids; its held_bytes. ValueError when they have a stop string already.\n\n"
           "stops: bytes, none empty. in_content: what is before the first end_reasoning_id is not looked at. before_calls:\n"
           "nor what is from the first call_begin_id on. keep_match: what matches is shown; what is behind it never is.\n"
           "min_ids: the id that completes a string is this one, from 1 on, or a later one.")
      .def("feed", &feed_stops, nb::arg("slots").noconvert(), nb::arg("counts").noconvert(), nb::arg("ids").noconvert(),
           "One step's tokens, ids[i, :counts[i]] of slots[i], each open: int32 [n, 3] of (count, matched, held_bytes).\n\n"
           "count: the tokens up to the one that completes a stop string, matched its index; else all, and -1. held_bytes:\n"
           "of the text's end, what may be the beginning of a stop string; at a match, what is cut off.")
      .def(
          "close",
          [](StopTable& table, int64_t slot) {
            check_slot(table, slot);
            table.close(slot);
          },
          nb::arg("slot"), "The slot is free. Does nothing for one without stop strings.");
}
