// The flat module _native: one bind_*.cc per Python folder that uses it.
#include <nanobind/nanobind.h>

#include "bindings.h"

NB_MODULE(_native, m) {
  m.doc() = "Native parts of glm53d: shared memory, prefix tree, hashing, decoding and framing.";
  bind_ipc(m);
  bind_kv(m);
  bind_text(m);
  bind_front(m);
  bind_sched(m);
  bind_world(m);
}
