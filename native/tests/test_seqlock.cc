// The board: rows are read whole, whatever their writer does meanwhile. [R8]
#include <thread>

#include "check.h"
#include "glm53d/seqlock.h"

using namespace glm53d;
using namespace test;

struct Board {
  Board() {
    CHECK(segment.create("board", board_segment_bytes(2, 2)) == Status::kOk);
    CHECK(board_init(segment, 5, 2, 2) == Status::kOk);
    header = open_board(segment, 5);
    CHECK(header != nullptr);
  }
  Segment segment;
  BoardHeader* header;
};

// A row that is all n: any mix of two is found out.
static RankRow row_of(uint64_t n) {
  RankRow row;
  uint64_t words[sizeof row / 8];
  for (uint64_t& word : words) word = n;
  std::memcpy(&row, words, sizeof row);
  return row;
}

// The n of a row; a torn one fails.
static uint64_t number_in(const RankRow& row) {
  uint64_t words[sizeof row / 8];
  std::memcpy(words, &row, sizeof row);
  for (uint64_t word : words) CHECK(word == words[0]);
  return words[0];
}

static uint64_t read_number(Board& board) {
  RankRow row;
  CHECK(board.header->ranks()[1].read(&row) == Status::kOk);
  return number_in(row);
}

static void a_row_is_zeros_then_the_last_one_written() {
  Board board;
  CHECK(read_number(board) == 0);
  for (uint64_t n = 1; n < 5; ++n) {
    board.header->ranks()[1].write(row_of(n));
    CHECK(read_number(board) == n);
  }
  RankRow neighbour;
  LoadRow load;
  CHECK(board.header->ranks()[0].read(&neighbour) == Status::kOk && number_in(neighbour) == 0);
  CHECK(board.header->loads()[1].read(&load) == Status::kOk && load.step == 0);
}

static void readers_see_whole_rows_that_never_go_back() {
  Board board;
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (uint64_t n = 1; !stop.load(); ++n) {
      board.header->ranks()[1].write(row_of(n));
      for (uint64_t i = n % 256; i > 0; --i) cpu_relax();
    }
  });
  std::thread readers[2];
  for (std::thread& reader : readers) {
    reader = std::thread([&] {
      uint64_t last = 0;
      for (int i = 0; i < 20'000 || last == 0; ++i) {
        const uint64_t n = read_number(board);
        CHECK(n >= last);
        last = n;
      }
    });
  }
  for (std::thread& reader : readers) reader.join();
  stop.store(true);
  writer.join();
}

static void a_writer_killed_in_the_middle_leaves_the_row_before() {
  Random random(std::random_device{}());
  int written = 0;
  for (int i = 0; i < 300; ++i) {
    Board board;
    const pid_t child = start([&] {
      for (uint64_t n = 1;; ++n) board.header->ranks()[1].write(row_of(n));
    });
    const timespec time{0, static_cast<long>(below(random, 2'000'000))};
    nanosleep(&time, nullptr);
    CHECK(kill_now(child));
    written += read_number(board) > 0;
  }
  CHECK(written > 0);
}

int main() {
  a_row_is_zeros_then_the_last_one_written();
  readers_see_whole_rows_that_never_go_back();
  a_writer_killed_in_the_middle_leaves_the_row_before();
}
