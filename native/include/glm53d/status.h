// What a native call answers. Hot paths are noexcept and return one of these; only bindings turn one into an exception.
#pragma once
#include <cstdint>

namespace glm53d {

enum class [[nodiscard]] Status : uint32_t {
  kOk = 0,
  kFull,         // no room now; the caller decides what to do
  kEmpty,        // nothing to read now
  kTooLarge,     // a record that can never fit
  kTimeout,      // the deadline passed, or a signal ended the wait early
  kPeerGone,     // the other side is dead or has closed
  kAbiMismatch,  // magic, version or world id differ
  kSystem,       // a system call failed; errno says why
  kCorrupt,      // what lies in shared memory cannot be
  kTaken,        // this end is held already, or was marked gone
};

}  // namespace glm53d
