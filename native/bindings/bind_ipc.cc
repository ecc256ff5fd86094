#include "bindings.h"

void bind_ipc(nanobind::module_&) {}
