// Segments: memory by descriptor, headers that must match. [R5]
#include <sys/resource.h>

#include "check.h"
#include "glm53d/ring.h"
#include "glm53d/seqlock.h"

using namespace glm53d;

static void a_segment_is_the_same_memory_at_both_descriptors() {
  Segment made, found;
  CHECK(made.create("test", 4096) == Status::kOk);
  CHECK(found.attach(dup(made.fd())) == Status::kOk);
  CHECK(found.size() == 4096 && found.data() != made.data());
  CHECK(made.data()[4095] == std::byte{0});
  made.data()[4095] = std::byte{42};
  CHECK(found.data()[4095] == std::byte{42});
}

static void the_memory_outlives_the_descriptor() {
  Segment segment;
  CHECK(segment.create("test", 4096) == Status::kOk);
  const int fd = segment.fd();
  segment.close();
  CHECK(segment.fd() == -1 && fcntl(fd, F_GETFD) == -1);
  segment.data()[0] = std::byte{1};
}

static void a_descriptor_is_not_inherited_by_an_exec() {
  Segment made, found;
  CHECK(made.create("test", 4096) == Status::kOk);
  CHECK(found.attach(dup(made.fd())) == Status::kOk);
  CHECK(fcntl(made.fd(), F_GETFD) == FD_CLOEXEC && fcntl(found.fd(), F_GETFD) == FD_CLOEXEC);
}

static void what_cannot_be_had_is_an_error_with_errno() {
  Segment bad;
  CHECK(bad.attach(-1) == Status::kSystem && errno == EBADF);
  signal(SIGXFSZ, SIG_IGN);
  const rlimit small{4096, 4096};
  CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
  Segment large;
  CHECK(large.create("test", 8192) == Status::kSystem && errno == EFBIG);
}

static void a_header_of_another_kind_version_or_world_is_refused() {
  Segment segment;
  CHECK(segment.create("test", 4096) == Status::kOk);
  CHECK(open_ring(segment, 0) == nullptr);  // nothing is there yet
  CHECK(ring_init(segment, 5, 1) == Status::kOk);
  CHECK(open_ring(segment, 5) != nullptr);
  CHECK(open_ring(segment, 6) == nullptr);
  CHECK(open_board(segment, 5) == nullptr);
  auto& header = *reinterpret_cast<SegmentHeader*>(segment.data());
  header.abi_version += 1;
  CHECK(open_ring(segment, 5) == nullptr);
  header.abi_version -= 1;
  header.magic += 1;
  CHECK(open_ring(segment, 5) == nullptr);
}

static void sizes_that_reach_outside_the_segment_are_refused() {
  Segment ring, board;
  CHECK(ring.create("test", 4096) == Status::kOk && ring_init(ring, 5, 2) == Status::kOk);
  RingHeader* header = open_ring(ring, 5);
  for (uint64_t capacity : {uint64_t{0}, uint64_t{3000}, uint64_t{4096}, uint64_t{1} << 63}) {
    header->capacity = capacity;
    CHECK(open_ring(ring, 5) == nullptr);
  }
  header->capacity = 2048;
  CHECK(open_ring(ring, 5) != nullptr);
  for (uint32_t readers : {0u, 64u, 65u, ~0u}) {
    header->num_readers = readers;
    CHECK(open_ring(ring, 5) == nullptr);
  }
  CHECK(board.create("test", board_segment_bytes(2, 1)) == Status::kOk && board_init(board, 5, 2, 1) == Status::kOk);
  for (uint32_t rows : {3u, ~0u}) {
    open_board(board, 5)->num_dp = rows;
    CHECK(open_board(board, 5) == nullptr);
    reinterpret_cast<BoardHeader*>(board.data())->num_dp = 2;
  }
}

static void what_does_not_fit_is_not_initialised() {
  Segment segment;
  CHECK(segment.create("test", ring_segment_bytes(kMinCapacity, 1)) == Status::kOk);
  CHECK(ring_init(segment, 5, 2) == Status::kTooLarge);
  CHECK(ring_init(segment, 5, 0) == Status::kTooLarge);
  CHECK(ring_init(segment, 5, kMaxReaders + 1) == Status::kTooLarge);
  CHECK(board_init(segment, 5, 2, 2) == Status::kTooLarge);
  CHECK(ring_init(segment, 5, 1) == Status::kOk && open_ring(segment, 5)->capacity == kMinCapacity);
}

int main() {
  a_segment_is_the_same_memory_at_both_descriptors();
  the_memory_outlives_the_descriptor();
  a_descriptor_is_not_inherited_by_an_exec();
  a_header_of_another_kind_version_or_world_is_refused();
  sizes_that_reach_outside_the_segment_are_refused();
  what_does_not_fit_is_not_initialised();
  what_cannot_be_had_is_an_error_with_errno();  // last: it lowers a limit of the process
}
