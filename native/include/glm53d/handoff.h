// Hand things from some threads of one process to another thread, without a lock: an intrusive stack that is taken
// whole.
//
//   head_ -> newest -> ... -> oldest      push: new->next = head, CAS head      take: exchange head with null, reverse
//
// No ABA: nobody takes a single item off, and a pushed one is not touched again by who pushed it.
#pragma once
#include <atomic>
#include <memory>
#include <utility>

namespace glm53d {

// T has a member `T* next`, which is the handoff's while it holds the item.
template <class T>
class Handoff {
 public:
  Handoff() = default;
  Handoff(const Handoff&) = delete;
  ~Handoff() {
    take([](std::unique_ptr<T>) {});
  }

  // True: it was empty, so the taker may have to be woken. Any thread.
  bool push(std::unique_ptr<T> item) noexcept {
    T* const node = item.release();
    T* seen = head_.load(std::memory_order_relaxed);
    do {
      node->next = seen;
      // release: what the item holds is seen by who takes it. Partner: the acquire in take().
    } while (!head_.compare_exchange_weak(seen, node, std::memory_order_release, std::memory_order_relaxed));
    return seen == nullptr;
  }

  // Call each(std::unique_ptr<T>) with every item, oldest first. One thread.
  //
  // The relaxed look that makes an empty one cheap misses nothing that happened before: a push that happens before
  // take(), by whatever chain of synchronisation, is seen by coherence.
  template <class Each>
  void take(Each&& each) {
    if (head_.load(std::memory_order_relaxed) == nullptr) return;
    T* newest = head_.exchange(nullptr, std::memory_order_acquire);
    T* oldest = nullptr;
    while (newest != nullptr) {
      T* const older = newest->next;
      newest->next = oldest;
      oldest = newest;
      newest = older;
    }
    while (oldest != nullptr) {
      std::unique_ptr<T> item(oldest);
      oldest = oldest->next;
      each(std::move(item));
    }
  }

 private:
  std::atomic<T*> head_{nullptr};  // W: any pusher, the taker   R: both
};

}  // namespace glm53d
