// The flat module _native: one bind_*.cc per Python folder that uses it.
#include <nanobind/nanobind.h>

#include "bindings.h"

namespace nb = nanobind;

NB_MODULE(_native, m) {
  // At exit Python does not free what modules and threads still hold, and nanobind would report each as a leak.
  nb::set_leak_warnings(false);
  m.doc() = "Native parts of glm53d: shared memory, prefix tree, hashing, decoding and framing.";
  bind_ipc(m);
  bind_kv(m);
  bind_text(m);
  bind_front(m);
  bind_sched(m);
  bind_model(m);
  bind_world(m);
}
