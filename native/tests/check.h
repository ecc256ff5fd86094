// What the native tests share: a check that ends the process, random numbers from a seed, and child processes to kill.
#pragma once
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <random>

// Ends the process with 1, a child too: its parent then sees that it was not the kill that ended it.
#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) {                                                           \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      _exit(1);                                                                   \
    }                                                                             \
  } while (false)

namespace test {

using Random = std::mt19937_64;

inline uint64_t below(Random& random, uint64_t bound) { return random() % bound; }

// Runs body in a child process; the child ends with 0 when it returns.
template <class Body>
pid_t start(Body body) {
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    body();
    _exit(0);
  }
  return pid;
}

// SIGKILL: nothing in the child can clean up. True when that ended it, false when it had returned before.
inline bool kill_now(pid_t pid) {
  int status = 0;
  CHECK(kill(pid, SIGKILL) == 0);
  CHECK(waitpid(pid, &status, 0) == pid);
  CHECK(WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL : WEXITSTATUS(status) == 0);
  return WIFSIGNALED(status);
}

inline void join(pid_t pid) {
  int status = 0;
  CHECK(waitpid(pid, &status, 0) == pid);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace test
