// For glm53d/world and glm53d/worker: what a rank process asks of the kernel.
#include <sys/prctl.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <string>

#include "bindings.h"

namespace nb = nanobind;

void bind_world(nb::module_& m) {
  m.def(
      "set_parent_death_signal",
      [] {
        if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0)
          throw std::runtime_error(std::string("prctl(PR_SET_PDEATHSIG): ") + std::strerror(errno));
      },
      "Have the kernel kill this process when the thread that spawned it ends. The caller then re-checks getppid(): the "
      "parent may already be gone.");
}
