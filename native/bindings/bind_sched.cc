// For glm53d/sched: the token log.
#include <string>

#include "arrays.h"
#include "bindings.h"
#include "glm53d/token_log.h"

namespace nb = nanobind;
using glm53d::TokenLog;

namespace {

void check_slot(const TokenLog& log, int64_t slot) {
  if (slot < 0 || static_cast<size_t>(slot) >= log.max_slots())
    throw nb::index_error(("slot " + std::to_string(slot) + " of " + std::to_string(log.max_slots())).c_str());
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
}
