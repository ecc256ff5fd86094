#include "bindings.h"

void bind_text(nanobind::module_&) {}
