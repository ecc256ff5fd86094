#include "bindings.h"

void bind_front(nanobind::module_&) {}
