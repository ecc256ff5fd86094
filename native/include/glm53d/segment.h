// A memory segment shared by descriptor: nothing has a name in the file system, so nothing stays behind. [R5]
//
//   SegmentHeader | what its kind says: a ring (ring.h), the board (seqlock.h) or signals (signals.h)
//
// A rank's memory that others read (its KV pool on the CPU) has no header, and no size before that rank has found out how
// much it needs: made with size 0, sized by its owner, then mapped by its readers.
//
// A segment belongs to one world, that is one life of all ranks. It is initialised once, by main, before any rank
// starts; a restart makes new ones.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "glm53d/records.h"
#include "glm53d/status.h"

namespace glm53d {

inline constexpr uint64_t kSegmentMagic = 0x676c6d3533642e31;  // "glm53d.1"
inline constexpr size_t kCacheLine = 64;

enum class SegmentKind : uint32_t { kRing = 1, kBoard = 2, kSignals = 3 };

// Whether a process holds one end of a channel. absent -> attached -> gone, or absent -> gone; never back.
enum class Liveness : uint32_t { kAbsent = 0, kAttached = 1, kGone = 2 };

struct alignas(kCacheLine) SegmentHeader {  // W: creator, before any peer attaches
  uint64_t magic;
  uint32_t abi_version;
  SegmentKind kind;
  uint64_t world_id;
};
static_assert(std::is_standard_layout_v<SegmentHeader> && sizeof(SegmentHeader) == 64, "shared-memory ABI");

// Owns a mapping, and the descriptor until close(). What is opened in it keeps a pointer: the Segment must outlive it.
class Segment {
 public:
  Segment() = default;
  Segment(Segment&& other) noexcept : fd_(other.fd_), data_(other.data_), size_(other.size_) {
    other.fd_ = -1;
    other.data_ = nullptr;
  }
  Segment& operator=(Segment&&) = delete;
  ~Segment() {
    close();
    if (data_ != nullptr) munmap(data_, size_);
  }

  // Fresh zeroed memory, all of it backed now: a shortage shows here, at the start, not as a SIGBUS at some later
  // write. Of size 0: none yet. kSystem: see errno.
  Status create(const char* name, size_t size) noexcept {
    fd_ = memfd_create(name, MFD_CLOEXEC);
    if (fd_ < 0) return Status::kSystem;
    return size == 0 ? Status::kOk : set_size(size);
  }

  // Gives a segment made with size 0 its memory, once, in the one process that owns it.
  Status set_size(size_t size) noexcept {
    if (data_ != nullptr) return Status::kTaken;
    const int error = posix_fallocate(fd_, 0, static_cast<off_t>(size));
    if (error != 0) {
      errno = error;  // posix_fallocate returns it instead
      return Status::kSystem;
    }
    return map(size);
  }

  // Takes over a descriptor made by create(), in this process or in the one that spawned it.
  Status attach(int fd) noexcept {
    fd_ = fd;
    if (fcntl(fd_, F_SETFD, FD_CLOEXEC) != 0) return Status::kSystem;
    return refresh();
  }

  // Maps what the owner has sized since; of what is mapped, or still of size 0, nothing happens.
  Status refresh() noexcept {
    if (data_ != nullptr) return Status::kOk;
    struct stat info;
    if (fstat(fd_, &info) != 0) return Status::kSystem;
    return info.st_size == 0 ? Status::kOk : map(static_cast<size_t>(info.st_size));
  }

  // Gives up the descriptor; the memory stays mapped for those who use it.
  void close() noexcept {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

  int fd() const noexcept { return fd_; }
  size_t size() const noexcept { return size_; }
  std::byte* data() const noexcept { return data_; }

 private:
  Status map(size_t size) noexcept {
    void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (address == MAP_FAILED) return Status::kSystem;
    data_ = static_cast<std::byte*>(address);
    size_ = size;
    return Status::kOk;
  }

  int fd_ = -1;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

inline void init_header(SegmentHeader& header, SegmentKind kind, uint64_t world_id) noexcept {
  header = {kSegmentMagic, kAbiVersion, kind, world_id};
}

// The segment's memory as Header (which begins with a SegmentHeader), or nullptr when it is not one of that kind, of
// our version and of that world.
template <class Header>
Header* open_header(const Segment& segment, SegmentKind kind, uint64_t world_id) noexcept {
  static_assert(std::is_standard_layout_v<Header> && offsetof(Header, segment) == 0);
  if (segment.size() < sizeof(Header)) return nullptr;
  const SegmentHeader& found = *reinterpret_cast<const SegmentHeader*>(segment.data());
  const bool ours = found.magic == kSegmentMagic && found.abi_version == kAbiVersion && found.kind == kind &&
                    found.world_id == world_id;
  return ours ? reinterpret_cast<Header*>(segment.data()) : nullptr;
}

}  // namespace glm53d
