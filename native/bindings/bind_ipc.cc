// For glm53d/ipc: segments, rings, board, record layouts.
//
// All calls but wait() keep the GIL: an append or a read is one copy, below a microsecond for a step's records, and
// some tens for a prompt of 100,000 tokens, once in a request's life. One thread at a time uses an end.
//
// Over 400 lines, because the package's docstrings and argument names are here: the stub is made of them.
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "glm53d/records.h"
#include "glm53d/ring.h"
#include "glm53d/segment.h"
#include "glm53d/seqlock.h"
#include "glm53d/signals.h"
#include "status_error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace glm53d {
namespace {

// ---- arguments -----------------------------------------------------------------------------------------------------

// The bytes of a bytes object, an array or any other C-contiguous buffer, while it lives.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  ~Buffer() { PyBuffer_Release(&view_); }  // does nothing when nothing was taken

  void take(nb::handle source) {
    if (PyObject_GetBuffer(source.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  const void* data() const { return view_.buf; }
  size_t size() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

constexpr size_t kMaxParts = 32;  // of a record; the longest has eight, each perhaps with padding behind it

// ---- the ring's ends -----------------------------------------------------------------------------------------------

bool try_append(RingWriter& writer, uint16_t type, nb::sequence parts) {
  if (type == 0 || type == kWrapMark) throw nb::value_error("0 and 0xFFFF are not record types");
  std::array<Buffer, kMaxParts> buffers;
  size_t num_parts = 0, length = 0;
  for (nb::handle part : parts) {
    if (num_parts == kMaxParts) throw nb::value_error("a record has at most 32 parts");
    buffers[num_parts].take(part);
    length += buffers[num_parts++].size();
  }
  std::byte* payload = nullptr;
  const Status status = writer.append(type, length, &payload);
  if (status == Status::kFull) return false;
  check(status);
  for (size_t i = 0; i < num_parts; ++i) {
    if (buffers[i].size() == 0) continue;  // its data may be null
    std::memcpy(payload, buffers[i].data(), buffers[i].size());
    payload += buffers[i].size();
  }
  return true;
}

bool try_write(RingWriter& writer, uint16_t type, nb::sequence parts) {
  if (!try_append(writer, type, parts)) return false;
  writer.publish();
  return true;
}

using Ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

size_t try_append_outputs(RingWriter& writer, nb::handle heads_buffer, Ids ids) {
  Buffer buffer;
  buffer.take(heads_buffer);
  if (buffer.size() % sizeof(OutputRecord) != 0) throw nb::value_error("heads are not whole OutputRecords");
  const size_t num_heads = buffer.size() / sizeof(OutputRecord);
  const auto* heads = static_cast<const std::byte*>(buffer.data());
  // Checked before the first append, so that a wrong argument changes nothing.
  size_t num_ids = 0;
  for (size_t i = 0; i < num_heads; ++i) {
    OutputRecord head;
    std::memcpy(&head, heads + i * sizeof head, sizeof head);
    if (head.error_bytes != 0) throw nb::value_error("an output with an error text goes by try_append");
    if (sizeof head + head.num_ids * sizeof(int32_t) > writer.max_length()) check(Status::kTooLarge);
    num_ids += head.num_ids;
  }
  if (num_ids != ids.size()) throw nb::value_error("the heads' num_ids do not add up to the ids");
  const int32_t* next_ids = ids.data();
  for (size_t i = 0; i < num_heads; ++i) {
    OutputRecord head;
    std::memcpy(&head, heads + i * sizeof head, sizeof head);
    const size_t ids_bytes = head.num_ids * sizeof(int32_t);
    std::byte* payload = nullptr;
    const Status status =
        writer.append(static_cast<uint16_t>(RecordType::kOutput), sizeof head + ids_bytes, &payload);
    if (status == Status::kFull) return i;
    check(status);
    std::memcpy(payload, &head, sizeof head);
    if (ids_bytes > 0) std::memcpy(payload + sizeof head, next_ids, ids_bytes);
    next_ids += head.num_ids;
  }
  return num_heads;
}

using Record = std::tuple<uint16_t, nb::bytes>;

std::optional<Record> read_one(RingReader& reader) {
  RecordView view{};
  const Status status = reader.peek(&view);
  if (status == Status::kEmpty) return std::nullopt;
  check(status);
  Record record{view.type, nb::bytes(view.payload.data(), view.payload.size())};
  reader.pop();
  return record;
}

std::vector<Record> read_all(RingReader& reader, size_t max_records) {
  std::vector<Record> records;
  while (records.size() < max_records) {
    std::optional<Record> record = read_one(reader);
    if (!record) break;
    records.push_back(std::move(*record));
  }
  return records;
}

bool wait_for_record(RingReader& reader, uint64_t spin_ns, uint64_t timeout_ns) {
  Status status;
  {
    nb::gil_scoped_release released;
    status = reader.wait(spin_ns, timeout_ns);
  }
  if (status == Status::kTimeout) return false;
  check(status);
  return true;
}

RingHeader& open_or_raise(const Segment& segment, uint64_t world_id) {
  RingHeader* header = open_ring(segment, world_id);
  if (header == nullptr) check(Status::kAbiMismatch);
  return *header;
}

// ---- the board -----------------------------------------------------------------------------------------------------

struct Board {
  BoardHeader* header;

  SeqlockRow<LoadRow>& load(uint32_t dp) const {
    if (dp >= header->num_dp) throw nb::index_error("no such attention-DP rank on the board");
    return header->loads()[dp];
  }
  SeqlockRow<RankRow>& rank(uint32_t i) const {
    if (i >= header->num_ranks) throw nb::index_error("no such rank on the board");
    return header->ranks()[i];
  }
};

template <class Row>
void write_row(SeqlockRow<Row>& to, nb::handle source) {
  Buffer buffer;
  buffer.take(source);
  if (buffer.size() != sizeof(Row)) throw nb::value_error("not one row of this kind");
  Row row;
  std::memcpy(&row, buffer.data(), sizeof row);
  to.write(row);
}

template <class Row>
nb::bytes read_row(const SeqlockRow<Row>& from) {
  Row row;
  check(from.read(&row));
  return nb::bytes(&row, sizeof row);
}

// ---- record layouts ------------------------------------------------------------------------------------------------

struct RecordLayout {
  size_t size;
  std::vector<std::tuple<std::string, std::string, size_t>> fields;
};

// The numpy format of a field: little-endian, as on every machine that we run on.
template <class T>
std::string numpy_format() {
  if constexpr (std::is_same_v<T, char>) return "S";
  const char kind = std::is_floating_point_v<T> ? 'f' : std::is_signed_v<T> ? 'i' : 'u';
  return std::string("<") + kind + std::to_string(sizeof(T));
}

std::map<std::string, RecordLayout> record_layouts() {
  std::map<std::string, RecordLayout> layouts;
#define GLM53D_LAYOUT_FIELD(type, name) layout.fields.emplace_back(#name, numpy_format<type>(), offsetof(Record, name));
#define GLM53D_LAYOUT_ARRAY(type, name, n)                                                                       \
  static_assert(std::is_same_v<type, char>, "an array of another type needs its numpy format here");            \
  layout.fields.emplace_back(#name, numpy_format<type>() + std::to_string(n), offsetof(Record, name));
#define GLM53D_LAYOUT(Name, list, bytes)                \
  {                                                     \
    using Record = Name;                                \
    RecordLayout layout{bytes, {}};                     \
    list(GLM53D_LAYOUT_FIELD, GLM53D_LAYOUT_ARRAY)      \
    layouts.emplace(#Name, std::move(layout));          \
  }
  GLM53D_RECORDS(GLM53D_LAYOUT)
#undef GLM53D_LAYOUT
#undef GLM53D_LAYOUT_ARRAY
#undef GLM53D_LAYOUT_FIELD
  return layouts;
}

}  // namespace
}  // namespace glm53d

// ---- what Python sees ----------------------------------------------------------------------------------------------

using namespace glm53d;

static void bind_segment(nb::module_& m) {
  nb::class_<Segment>(m, "Segment", "A piece of shared memory without a name in the file system. [R5]")
      .def_static(
          "create",
          [](const std::string& name, size_t size) {
            Segment segment;
            check(segment.create(name.c_str(), size));
            return segment;
          },
          "name"_a, "size"_a,
          "Fresh zeroed memory. The name is for people, in lists of open files. OSError when there is no room.\n\n"
          "Of size 0 it has none until its owner calls set_size.")
      .def_static(
          "attach",
          [](int fd) {
            Segment segment;
            check(segment.attach(fd));
            return segment;
          },
          "fd"_a, "The memory behind a descriptor that create() made here or in the spawning process; takes fd over.")
      .def("set_size", [](Segment& segment, size_t size) { check(segment.set_size(size)); }, "size"_a,
           "Give a segment made with size 0 its memory, once, in the process that owns it. OSError without room.")
      .def(
          "array",
          [](nb::object self) {
            Segment& segment = nb::cast<Segment&>(self);
            check(segment.refresh());
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(segment.data(), {segment.size()}, self);
          },
          nb::sig("def array(self) -> numpy.typing.NDArray[numpy.uint8]"),
          "The memory itself [size], which lives as long as the array; of a segment sized since it came here, all of it.")
      .def_prop_ro("fd", &Segment::fd, "-1 after close().")
      .def_prop_ro("size", &Segment::size, "In bytes.")
      .def("close", &Segment::close, "Give up the descriptor. The memory stays mapped while an end of it is held.");
}

static void bind_ring(nb::module_& m) {
  m.def("ring_segment_bytes", &ring_segment_bytes, "capacity"_a, "num_readers"_a = 1,
        "Size of a segment for a ring with this capacity in bytes, a power of two.");
  m.def(
      "ring_init",
      [](const Segment& segment, uint64_t world_id, uint32_t num_readers) {
        check(ring_init(segment, world_id, num_readers));
      },
      "segment"_a, "world_id"_a, "num_readers"_a = 1,
      "Make a fresh segment a ring, its capacity the largest power of two that fits. With more than one reader each "
      "sees every record, and the slowest bounds the writer. [R6] [R7]");
  m.def(
      "mark_writer_gone",
      [](const Segment& segment, uint64_t world_id) { mark_writer_gone(open_or_raise(segment, world_id)); },
      "segment"_a, "world_id"_a, "The writer's process is dead: readers take what it published, then raise PeerGone.");
  m.def(
      "mark_reader_gone",
      [](const Segment& segment, uint64_t world_id, uint32_t index) {
        RingHeader& header = open_or_raise(segment, world_id);
        if (index >= header.num_readers) throw nb::index_error("the ring has no such reader");
        mark_reader_gone(header, index);
      },
      "segment"_a, "world_id"_a, "index"_a = 0,
      "The reader's process is dead: it no longer bounds the writer, which raises PeerGone when no reader is left.");

  nb::class_<RingWriter>(m, "RingWriter", "The writing end of a ring. Never waits; one thread at a time.")
      .def(
          "__init__",
          [](RingWriter* self, const Segment& segment, uint64_t world_id) {
            check((new (self) RingWriter)->open(segment, world_id));
          },
          "segment"_a, "world_id"_a, nb::keep_alive<1, 2>(),
          "Raises AbiMismatch, or IpcError when the ring has had a writer.")
      .def("try_append", &try_append, "type"_a, "parts"_a,
           "Write one record, the parts' bytes one after the other, to be seen at the next publish(). False when there "
           "is no room: nothing changed. ValueError above max_length; PeerGone when nobody is left to read.")
      .def("try_append_outputs", &try_append_outputs, "heads"_a, "ids"_a.noconvert(),
           "try_append an OutputRecord for each head (their bytes in a row), with its num_ids of the ids behind it; "
           "none may have an error text. Returns how many fitted.")
      .def("publish", &RingWriter::publish, "Show readers all that was appended; wakes those that sleep.")
      .def("try_write", &try_write, "type"_a, "parts"_a, "try_append, then publish.")
      .def_prop_ro("free_bytes", &RingWriter::free_bytes,
                   "A record takes 8 bytes more than its parts, rounded up to 8.")
      .def_prop_ro("max_length", &RingWriter::max_length, "Bytes of the longest record that ever fits.")
      .def("close", &RingWriter::close, "Say that no record follows; what was published can still be read.");

  nb::class_<RingReader>(m, "RingReader", "A reading end of a ring; one thread at a time.")
      .def(
          "__init__",
          [](RingReader* self, const Segment& segment, uint64_t world_id, uint32_t index) {
            check((new (self) RingReader)->open(segment, world_id, index));
          },
          "segment"_a, "world_id"_a, "index"_a = 0, nb::keep_alive<1, 2>(),
          "Raises AbiMismatch, or IpcError when the ring has had this reader.")
      .def("read", &read_one,
           "The oldest record as (type, bytes), or None. IpcError when the ring holds no valid record.")
      .def(
          "peek",
          [](nb::object self) -> std::optional<std::tuple<uint16_t, nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>>> {
            RecordView view{};
            const Status status = nb::cast<RingReader&>(self).peek(&view);
            if (status == Status::kEmpty) return std::nullopt;
            check(status);
            void* data = const_cast<std::byte*>(view.payload.data());
            return std::tuple(view.type, nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {view.payload.size()}, self));
          },
          nb::sig("def peek(self) -> tuple[int, numpy.typing.NDArray[numpy.uint8]] | None"),
          "The oldest record as (type, bytes where they lie in the ring), or None. Read them, then pop().")
      .def("pop", &RingReader::pop, "The peeked record's bytes are the writer's again.")
      .def("read_all", &read_all, "max_records"_a = 1024, "All records there are, oldest first.")
      .def("wait", &wait_for_record, "spin_ns"_a, "timeout_ns"_a,
           "True once there is something to read; False after timeout_ns, or earlier when a signal arrived. Spins for "
           "the first spin_ns, then sleeps. PeerGone when the writer is gone and nothing is left to read.")
      .def("close", &RingReader::close, "Stop counting as a reader: the writer no longer waits for this end.");
}

static void bind_board(nb::module_& m) {
  m.def("board_segment_bytes", &board_segment_bytes, "num_dp"_a, "num_ranks"_a,
        "Size of a segment for a board with so many rows.");
  m.def(
      "board_init",
      [](const Segment& segment, uint64_t world_id, uint32_t num_dp, uint32_t num_ranks) {
        check(board_init(segment, world_id, num_dp, num_ranks));
      },
      "segment"_a, "world_id"_a, "num_dp"_a, "num_ranks"_a, "Make a fresh segment a board, all rows zero. [R8]");
  nb::class_<Board>(m, "Board", "Rows that one process each writes and anybody reads, none ever waiting. [R8]")
      .def(
          "__init__",
          [](Board* self, const Segment& segment, uint64_t world_id) {
            BoardHeader* header = open_board(segment, world_id);
            if (header == nullptr) check(Status::kAbiMismatch);
            new (self) Board{header};
          },
          "segment"_a, "world_id"_a, nb::keep_alive<1, 2>(), "Raises AbiMismatch.")
      .def_prop_ro("num_dp", [](const Board& board) { return board.header->num_dp; }, "Number of LoadRows.")
      .def_prop_ro("num_ranks", [](const Board& board) { return board.header->num_ranks; }, "Number of RankRows.")
      .def("write_load", [](Board& board, uint32_t dp, nb::handle row) { write_row(board.load(dp), row); }, "dp"_a,
           "row"_a, "Replace a LoadRow; by the leader only.")
      .def("read_load", [](const Board& board, uint32_t dp) { return read_row(board.load(dp)); }, "dp"_a,
           "The bytes of the LoadRow last written, zeros before the first.")
      .def("write_rank", [](Board& board, uint32_t i, nb::handle row) { write_row(board.rank(i), row); }, "i"_a,
           "row"_a, "Replace a RankRow; by that rank only.")
      .def("read_rank", [](const Board& board, uint32_t i) { return read_row(board.rank(i)); }, "i"_a,
           "The bytes of the RankRow last written, zeros before the first.");
}

static void bind_signals(nb::module_& m) {
  m.def("signals_segment_bytes", &signals_segment_bytes, "num_ranks"_a,
        "Size of a segment for the signals of so many ranks.");
  m.def(
      "signals_init",
      [](const Segment& segment, uint64_t world_id, uint32_t num_ranks) {
        check(signals_init(segment, world_id, num_ranks));
      },
      "segment"_a, "world_id"_a, "num_ranks"_a, "Make a fresh segment the signals between ranks. [R11]");
  m.def(
      "mark_rank_gone",
      [](const Segment& segment, uint64_t world_id, uint32_t rank) {
        SignalHeader* header = open_signals(segment, world_id);
        if (header == nullptr) check(Status::kAbiMismatch);
        if (rank >= header->num_ranks) throw nb::index_error("there is no such rank");
        mark_rank_gone(*header, rank);
      },
      "segment"_a, "world_id"_a, "rank"_a, "The rank's process is dead: whoever waits for it sees PeerGone.");

  nb::class_<Signals>(m, "Signals", "One rank's end of the signals between all; one thread at a time. [R11]")
      .def(
          "__init__",
          [](Signals* self, const Segment& segment, uint64_t world_id, uint32_t rank) {
            check((new (self) Signals)->open(segment, world_id, rank));
          },
          "segment"_a, "world_id"_a, "rank"_a, nb::keep_alive<1, 2>(),
          "Raises AbiMismatch, or IpcError when the rank has had its end.")
      .def_prop_ro("rank", &Signals::rank)
      .def_prop_ro("num_ranks", &Signals::num_ranks)
      .def(
          "set",
          [](Signals& signals, uint32_t to, uint64_t value) {
            if (to >= signals.num_ranks()) throw nb::index_error("there is no such rank");
            signals.raise(to, value);
          },
          "to"_a, "value"_a, "Tell a rank that we have come to value, which never falls.")
      .def(
          "wait",
          [](Signals& signals, uint32_t from, uint64_t value, uint64_t spin_ns, uint64_t timeout_ns) {
            if (from >= signals.num_ranks()) throw nb::index_error("there is no such rank");
            Status status;
            {
              nb::gil_scoped_release released;
              status = signals.wait(from, value, spin_ns, timeout_ns);
            }
            if (status == Status::kTimeout) return false;
            check(status);
            return true;
          },
          "of"_a, "value"_a, "spin_ns"_a, "timeout_ns"_a,
          "True once that rank has come to value; False after timeout_ns, or earlier when a signal arrived. PeerGone when "
          "it is gone and has not. Spins for the first spin_ns, then sleeps.")
      .def(
          "export_memory",
          [](Signals& signals, nb::bytes handle, uint64_t num_bytes) {
            if (handle.size() != kHandleBytes || num_bytes == 0) throw nb::value_error("not a handle of 64 bytes");
            signals.export_memory(std::span<const unsigned char, kHandleBytes>(
                                      static_cast<const unsigned char*>(handle.data()), kHandleBytes), num_bytes);
          },
          "handle"_a, "num_bytes"_a, "Show how to open our device memory, and its size; once.")
      .def(
          "exported",
          [](const Signals& signals, uint32_t of) -> std::optional<std::tuple<nb::bytes, uint64_t>> {
            if (of >= signals.num_ranks()) throw nb::index_error("there is no such rank");
            std::array<unsigned char, kHandleBytes> handle;
            const uint64_t num_bytes = signals.exported(of, handle);
            if (num_bytes == 0) return std::nullopt;
            return std::tuple(nb::bytes(handle.data(), handle.size()), num_bytes);
          },
          "of"_a, "(handle, bytes) of a rank's device memory, or None before it has shown it.")
      .def("close", &Signals::close, "Nobody waits for this rank any more.");
}

void bind_ipc(nb::module_& m) {
  nb::class_<RecordLayout>(m, "RecordLayout", "One fixed struct of records.h.")
      .def_ro("size", &RecordLayout::size)
      .def_ro("fields", &RecordLayout::fields, "(name, numpy format, offset) of each field, in order.");
  nb::enum_<RecordType>(m, "RecordType", nb::is_arithmetic(), "What a ring record is.")
      .value("GENERATE", RecordType::kGenerate)
      .value("ABORT", RecordType::kAbort)
      .value("CONTROL", RecordType::kControl)
      .value("OUTPUT", RecordType::kOutput)
      .value("CONTROL_RESULT", RecordType::kControlResult)
      .value("BATCH", RecordType::kBatch)
      .value("RESULT", RecordType::kResult);
  nb::enum_<FinishReason>(m, "FinishReason", nb::is_arithmetic(), "Why a request ended; NONE while it goes on.")
      .value("NONE", FinishReason::kNone)
      .value("STOP", FinishReason::kStop)
      .value("LENGTH", FinishReason::kLength)
      .value("ABORT", FinishReason::kAbort)
      .value("ERROR", FinishReason::kError);
  m.def("record_layouts", &record_layouts, "Every fixed struct of records.h by name: what numpy dtypes are made from.");
  bind_segment(m);
  bind_ring(m);
  bind_board(m);
  bind_signals(m);
}
