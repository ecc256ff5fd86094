// The handoff between threads: nothing lost, nothing twice, each pusher's order kept.
#include <sched.h>

#include <thread>
#include <vector>

#include "check.h"
#include "glm53d/handoff.h"

using namespace glm53d;

struct Item {
  Item* next = nullptr;
  int pusher;
  int number;
};

static void every_item_arrives_once_in_its_pushers_order() {
  constexpr int kPushers = 3, kItems = 5000;
  Handoff<Item> handoff;
  std::atomic<int> signals{0};
  std::vector<std::thread> threads;
  for (int pusher = 0; pusher < kPushers; ++pusher) {
    threads.emplace_back([&, pusher] {
      for (int i = 0; i < kItems; ++i)
        if (handoff.push(std::make_unique<Item>(Item{nullptr, pusher, i}))) ++signals;
    });
  }
  int next[kPushers] = {}, taken = 0, batches = 0;
  while (taken < kPushers * kItems) {
    const int before = taken;
    handoff.take([&](std::unique_ptr<Item> item) {
      CHECK(item->number == next[item->pusher]++);
      ++taken;
    });
    batches += taken > before;
    sched_yield();
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(signals == batches);  // each batch was announced exactly once
}

static void what_is_not_taken_is_freed() {
  Handoff<Item> handoff;
  CHECK(handoff.push(std::make_unique<Item>()));
  CHECK(!handoff.push(std::make_unique<Item>()));
}

int main() {
  every_item_arrives_once_in_its_pushers_order();
  what_is_not_taken_is_freed();
}
