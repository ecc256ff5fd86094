// For glm53d/sched: the token log, and the stop strings of what runs.
#include <nanobind/stl/vector.h>

#include <string>
#include <string_view>
#include <vector>

#include "arrays.h"
#include "bindings.h"
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

void append(TokenLog& log, const Array1<int32_t>& slots, const Array1<int32_t>& counts, const Array2<int32_t>& ids) {
  const size_t rows = slots.size(), width = ids.shape(1);
  if (counts.size() != rows || ids.shape(0) != rows) throw nb::value_error("slots, counts and ids differ in length");
  for (size_t i = 0; i < rows; ++i) {
    check_slot(log, slots.data()[i]);
    if (counts.data()[i] < 0 || static_cast<size_t>(counts.data()[i]) > width)
      throw nb::value_error("a count is outside 0 .. width");
  }
  for (size_t i = 0; i < rows; ++i)
    log.append(slots.data()[i], {ids.data() + i * width, static_cast<size_t>(counts.data()[i])});
}

std::vector<int32_t> tails(const TokenLog& log, const Array1<int32_t>& slots, const Array1<int32_t>& counts) {
  if (counts.size() != slots.size()) throw nb::value_error("slots and counts differ in length");
  size_t total = 0;
  for (size_t i = 0; i < slots.size(); ++i) {
    check_slot(log, slots.data()[i]);
    if (counts.data()[i] < 0 || static_cast<size_t>(counts.data()[i]) > log.get(slots.data()[i]).size())
      throw nb::value_error("a count is outside 0 .. length");
    total += counts.data()[i];
  }
  std::vector<int32_t> out;
  out.reserve(total);
  for (size_t i = 0; i < slots.size(); ++i) {
    const auto ids = log.tail(slots.data()[i], counts.data()[i]);
    out.insert(out.end(), ids.begin(), ids.end());
  }
  return out;
}

int32_t open_stops(StopTable& table, int64_t slot, const std::vector<nb::bytes>& stops, const Array1<int32_t>& ids,
                   bool skip_special, bool in_content, bool keep_match) {
  check_slot(table, slot);
  std::vector<std::string_view> strings;
  for (const nb::bytes& stop : stops) {
    if (stop.size() == 0) throw nb::value_error("a stop string is empty");
    strings.emplace_back(stop.c_str(), stop.size());
  }
  table.open(slot, strings, {skip_special, in_content, keep_match});
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
  nb::class_<TokenLog>(m, "TokenLog", "The ids of each slot's request, prompt and output. One owner, one thread.")
      .def(nb::init<size_t>(), nb::arg("max_slots"))
      .def(
          "reset", [](TokenLog& log, int64_t slot, const Array1<int32_t>& ids) {
            check_slot(log, slot);
            log.reset(slot, view(ids));
          },
          nb::arg("slot"), nb::arg("ids").noconvert(), "A new request takes the slot; ids are all it has so far.")
      .def("append", &append, nb::arg("slots").noconvert(), nb::arg("counts").noconvert(), nb::arg("ids").noconvert(),
           "One step's tokens: ids[i, :counts[i]] go to slots[i]. All or nothing.")
      .def(
          "get",
          [](const TokenLog& log, int64_t slot, size_t start) {
            check_slot(log, slot);
            const auto ids = log.get(slot);
            if (start > ids.size()) throw nb::index_error("start is behind the end");
            return to_numpy<int32_t>(std::vector<int32_t>(ids.begin() + start, ids.end()));
          },
          nb::arg("slot"), nb::arg("start") = 0, "A copy of the slot's ids from start on.")
      .def(
          "tails",
          [](const TokenLog& log, const Array1<int32_t>& slots, const Array1<int32_t>& counts) {
            return to_numpy<int32_t>(tails(log, slots, counts));
          },
          nb::arg("slots").noconvert(), nb::arg("counts").noconvert(),
          "The last counts[i] ids of each slots[i], one after the other: what the throttle has not sent.")
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
      .def(nb::init<size_t, const ByteVocab&, int32_t>(), nb::arg("max_slots"), nb::arg("vocab"),
           nb::arg("end_reasoning_id"), nb::keep_alive<1, 3>())
      .def("open", &open_stops, nb::arg("slot"), nb::arg("stops"), nb::arg("ids").noconvert(), nb::arg("skip_special"),
           nb::arg("in_content"), nb::arg("keep_match"),
           "A request takes the slot, having put out ids; its held_bytes. ValueError when they have a stop string already.\n\n"
           "stops: bytes, none empty. in_content: what is before the first end_reasoning_id is not looked at. keep_match:\n"
           "what matches is shown; what is behind it never is.")
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
