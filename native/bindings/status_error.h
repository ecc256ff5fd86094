// Status -> exception: the one place where a native answer becomes a Python error.
#pragma once
#include <nanobind/nanobind.h>

#include "glm53d/status.h"

namespace glm53d {

[[noreturn]] inline void raise_ours(const char* type, const char* message) {
  PyErr_SetString(nanobind::module_::import_("glm53d.errors").attr(type).ptr(), message);
  throw nanobind::python_error();
}

// Passes kOk; anything else becomes an exception, of glm53d.errors where it is about a peer.
inline void check(Status status) {
  switch (status) {
    case Status::kOk:
      return;
    case Status::kSystem:
      PyErr_SetFromErrno(PyExc_OSError);
      throw nanobind::python_error();
    case Status::kTooLarge:
      throw nanobind::value_error("larger than the segment can ever hold");
    case Status::kPeerGone:
      raise_ours("PeerGone", "the process at the other end of a channel is dead or has closed it");
    case Status::kAbiMismatch:
      raise_ours("AbiMismatch", "the segment is of another kind, version or world");
    case Status::kTaken:
      raise_ours("IpcError", "this end of the channel is held already, or was given up for dead");
    case Status::kCorrupt:
      raise_ours("IpcError", "what lies in the ring is no record");
    case Status::kTimeout:
      raise_ours("IpcError", "no whole row could be read: its writer is not one of ours");
    case Status::kFull:
    case Status::kEmpty:
      break;  // answers, not errors: the caller looks for them first
  }
  raise_ours("IpcError", "a ring gave an answer that its caller does not expect");
}

}  // namespace glm53d
