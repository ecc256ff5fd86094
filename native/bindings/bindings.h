// What module.cc puts together.
#pragma once
#include <nanobind/nanobind.h>

void bind_ipc(nanobind::module_& m);    // segments, rings, board, record layouts
void bind_kv(nanobind::module_& m);     // prefix tree
void bind_text(nanobind::module_& m);   // page hashes, byte vocabulary, decoder
void bind_front(nanobind::module_& m);  // output pump
void bind_sched(nanobind::module_& m);  // token log, stop strings, a step's passes over slots
void bind_model(nanobind::module_& m);  // a layer on a CPU
void bind_world(nanobind::module_& m);  // parent-death signal
