// For glm53d/front: the output pump.
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "glm53d/pump.h"
#include "status_error.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace glm53d;

namespace {

// A token of the output or the prompt, as Python gets it.
struct TokenLogprob {
  int32_t id;
  std::optional<float> logprob;
  std::vector<std::pair<int32_t, float>> top;
  bool is_prompt;
};

TokenLogprob token_of(bool is_prompt, std::span<const Logprob> row) {
  TokenLogprob token{row[0].id, row[0].logprob, {}, is_prompt};
  if (std::isnan(row[0].logprob)) token.logprob.reset();
  for (const Logprob& other : row.subspan(1)) token.top.emplace_back(other.id, other.logprob);
  return token;
}

std::string string_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

nb::bytes bytes_of(std::string_view view) { return nb::bytes(view.data(), view.size()); }

uint64_t checked(const Pump& pump, uint64_t handle) {
  if (handle == 0 || (handle & 0xffffffff) >= pump.max_slots()) throw nb::value_error("not a handle of this table");
  return handle;
}

using FrameBytes = std::optional<std::tuple<nb::bytes, nb::bytes, nb::bytes, nb::bytes>>;

std::optional<Frame> frame_of(const FrameBytes& frame) {
  if (!frame) return std::nullopt;
  const auto& [prefix, suffix, enter, leave] = *frame;
  return Frame{string_of(prefix), string_of(suffix), string_of(enter), string_of(leave)};
}

void open_stream(Pump& pump, uint64_t handle, const FrameBytes& content, const FrameBytes& reasoning,
                 bool starts_in_reasoning, bool with_ids, bool skip_special, std::vector<int32_t> python_ids,
                 bool all_python, bool with_logprobs) {
  if (reasoning && !content) throw nb::value_error("frames for reasoning need frames for content");
  if (content && all_python) throw nb::value_error("what is all python is not framed");
  if (with_logprobs && content) throw nb::value_error("tokens with logprobs are not framed");
  if (with_ids && (all_python || !python_ids.empty())) throw nb::value_error("pieces come without ids");
  pump.open(checked(pump, handle), OutSpec{.content = frame_of(content),
                                           .reasoning = frame_of(reasoning),
                                           .starts_in_reasoning = starts_in_reasoning,
                                           .with_ids = with_ids,
                                           .skip_special = skip_special,
                                           .python_ids = std::move(python_ids),
                                           .all_python = all_python,
                                           .with_logprobs = with_logprobs});
}

// The frames of all pieces as one bytes object.
nb::bytes joined_frames(std::span<const OutPiece> pieces) {
  if (pieces.size() == 1) return bytes_of(pieces[0].delivery->slice(pieces[0].event->frames));
  std::string frames;
  for (const OutPiece& piece : pieces) frames += piece.delivery->slice(piece.event->frames);
  return bytes_of(frames);
}

// The pieces of all: str, int and TokenLogprob.
nb::list joined_pieces(std::span<const OutPiece> events) {
  nb::list out;
  for (const auto [delivery, event] : events)
    PieceReader::read(
        delivery->slice(event->pieces), [&](std::string_view text) { out.append(nb::str(text.data(), text.size())); },
        [&](int32_t id) { out.append(id); },
        [&](bool is_prompt, std::span<const Logprob> row) { out.append(token_of(is_prompt, row)); });
  return out;
}

nb::list take(Pump& pump) {
  nb::list out;
  pump.take(
      [&](std::span<const OutPiece> pieces) {
        const auto [delivery, event] = pieces.back();
        const nb::object finish =
            event->finish.size > 0 ? nb::object(bytes_of(delivery->slice(event->finish))) : nb::object(nb::none());
        out.append(nb::make_tuple(event->handle, joined_frames(pieces), joined_pieces(pieces), finish,
                                  bytes_of(delivery->slice(event->text)), bytes_of(delivery->slice(event->reasoning)),
                                  bytes_of(delivery->slice(event->ids)), event->reasoning_tokens,
                                  event->first_token_ns));
      },
      [&](uint16_t type, std::string_view payload) {
        const nb::bytes empty("", 0);
        out.append(nb::make_tuple(0, empty, nb::list(), bytes_of(payload), empty, empty, empty, type, 0));
      });
  return out;
}

std::map<std::string, uint64_t> stats(const Pump& pump) {
  const PumpStats s = pump.stats();
  return {{"records", s.records},         {"tokens", s.tokens},       {"frames", s.frames},          {"stale", s.stale},
          {"order_errors", s.order_errors}, {"malformed", s.malformed}, {"unknown_ids", s.unknown_ids}};
}

}  // namespace

void bind_front(nb::module_& m) {
  nb::class_<TokenLogprob>(m, "TokenLogprob", "A token, the natural logarithm of its probability, and the likeliest ids'.")
      .def(
          "__init__",
          [](TokenLogprob* self, int32_t id, std::optional<float> logprob, std::vector<std::pair<int32_t, float>> top,
             bool is_prompt) { new (self) TokenLogprob{id, logprob, std::move(top), is_prompt}; },
          "id"_a, "logprob"_a.none(), "top"_a, "is_prompt"_a = false)
      .def_ro("id", &TokenLogprob::id)
      .def_ro("logprob", &TokenLogprob::logprob, "None: of a prompt's first token, before which nothing stands.")
      .def_ro("top", &TokenLogprob::top, "(id, logprob) of the likeliest ids, most likely first.")
      .def_ro("is_prompt", &TokenLogprob::is_prompt, "A token of the prompt, else of the output.");

  nb::class_<Pump>(m, "Pump",
                   "The thread that turns output records into frames. [R13] [R41] All methods are the event loop's.\n\n"
                   "A handle's low 32 bits are its slot. Constructing takes the reading end of the output ring.")
      .def(
          "__init__",
          [](Pump* self, const Segment& segment, uint64_t world_id, const ByteVocab& vocab, size_t max_slots,
             int32_t begin_reasoning_id, int32_t end_reasoning_id, std::vector<int32_t> piece_ids) {
            std::ranges::sort(piece_ids);
            Markup markup{begin_reasoning_id, end_reasoning_id, std::move(piece_ids)};
            auto* pump = new (self) Pump(vocab, max_slots, std::move(markup));
            const Status status = pump->open_ring(segment, world_id);
            if (status == Status::kOk) return;
            pump->~Pump();
            check(status);
          },
          "segment"_a, "world_id"_a, "vocab"_a, "max_slots"_a, "begin_reasoning_id"_a, "end_reasoning_id"_a,
          "piece_ids"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 4>())
      .def("start", &Pump::start, "Once.")
      .def("stop", &Pump::stop, nb::call_guard<nb::gil_scoped_release>(),
           "End the thread, within a tenth of a second. What it has made can still be taken.")
      .def("open", &open_stream, "handle"_a, "content"_a.none(), "reasoning"_a.none(), "starts_in_reasoning"_a,
           "with_ids"_a, "skip_special"_a, "python_ids"_a, "all_python"_a, "with_logprobs"_a = false,
           "How the request's tokens leave, see front/job.py's OutSpec. Before the request is sent.")
      .def(
          "close", [](Pump& pump, uint64_t handle) { pump.close(checked(pump, handle)); }, "handle"_a,
          "Forget the request: what still comes for it is stale.")
      .def(
          "set_slow", [](Pump& pump, uint64_t handle, bool slow) { pump.set_slow(checked(pump, handle), slow); },
          "handle"_a, "slow"_a, "While slow, text is kept; it leaves as one frame for each phase, pieces together.")
      .def("take", &take,
           nb::sig("def take(self)"
                   " -> list[tuple[int, bytes, list[str | int | TokenLogprob], bytes | None, bytes, bytes, bytes, int, int]]"),
           "All since the last take(), when fileno() is readable: for each stream one tuple\n"
           "(handle, frames, pieces, finish, text, reasoning, ids, reasoning_tokens, first_token_ns).\n\n"
           "pieces come behind the frames, some hundred at once: the rest with a next take(), and the finish with the\n"
           "last. finish: the last OutputRecord, whole, after which the handle is forgotten; else None; with it all ids\n"
           "(int32). text and reasoning come with the finish of a collected request; of a stream only text does, if its\n"
           "thinking has turned out to be its content. A record that is no output comes as\n"
           "(0, b'', [], payload, b'', b'', b'', its type, 0).")
      .def("fileno", &Pump::fileno, "An eventfd, readable when there is something to take, and when writer_gone turns.")
      .def("stats", &stats, "Counts since the start, by name: see PumpStats.")
      .def_prop_ro("writer_gone", &Pump::writer_gone, "No more output will come; what came can still be taken.")
      .def_prop_ro("corrupt", &Pump::corrupt, "writer_gone, because what lies in the ring cannot be read.");
}
