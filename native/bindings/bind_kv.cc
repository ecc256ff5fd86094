#include "bindings.h"

void bind_kv(nanobind::module_&) {}
