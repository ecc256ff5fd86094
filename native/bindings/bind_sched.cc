#include "bindings.h"

void bind_sched(nanobind::module_&) {}
