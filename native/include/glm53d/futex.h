// Waiting across processes: a 32-bit word in shared memory, and the clock that deadlines are in. [R5]
//
// Never FUTEX_PRIVATE_FLAG: with it the kernel keys the word by address space, and another process's wake finds nobody.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>

#include "glm53d/status.h"

namespace glm53d {

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4,
              "the kernel and the other process see the plain word");
static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(std::atomic<uint64_t>) == 8,
              "a fallback lock would be private to each process");

// CLOCK_MONOTONIC, one clock for all processes of a host. [R23]
inline uint64_t monotonic_ns() noexcept {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

// The deadline of a wait that may take timeout_ns from now; the longest ones are cut to a century, not wrapped.
inline uint64_t deadline_after(uint64_t timeout_ns) noexcept {
  constexpr uint64_t kCenturyNs = 3'155'760'000'000'000'000;
  return monotonic_ns() + (timeout_ns < kCenturyNs ? timeout_ns : kCenturyNs);
}

// Inside a spin loop: gives the core's other hyperthread the execution units.
inline void cpu_relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleeps while word == expected, until futex_wake or the deadline. kOk: look again (woken, for whatever reason);
// kTimeout: the deadline passed, or a signal arrived and its handler should get to run.
inline Status futex_wait(std::atomic<uint32_t>& word, uint32_t expected, uint64_t deadline_ns) noexcept {
  const timespec deadline{static_cast<time_t>(deadline_ns / 1'000'000'000),
                          static_cast<long>(deadline_ns % 1'000'000'000)};
  // WAIT_BITSET because, unlike WAIT, it takes an absolute deadline.
  const long rc = syscall(SYS_futex, &word, FUTEX_WAIT_BITSET, expected, &deadline, nullptr, FUTEX_BITSET_MATCH_ANY);
  return rc != 0 && (errno == ETIMEDOUT || errno == EINTR) ? Status::kTimeout : Status::kOk;
}

inline void futex_wake(std::atomic<uint32_t>& word) noexcept {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace glm53d
