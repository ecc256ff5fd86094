// Chained, keyed 128-bit hash of each full page of a prompt. [R19]
//
//   hash[0] = SipHash(key, seed || ids of page 0)      hash[i] = SipHash(key, hash[i-1] || ids of page i)
//
// So a page's hash stands for everything before it too, and equal hashes mean equal prefixes. SipHash-1-3 with 128-bit
// output (Aumasson, Bernstein): keyed, so that nobody outside can make two prompts collide; one round per word keeps a
// million tokens near a millisecond. Ids are hashed as little-endian int32, which is how they lie in memory.
#pragma once
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

namespace glm53d {

static_assert(std::endian::native == std::endian::little, "hashes and records are read in place");

struct Hash128 {
  uint64_t lo, hi;
  bool operator==(const Hash128&) const = default;
};
static_assert(sizeof(Hash128) == 16, "an array of hashes is a numpy array [n, 2] of uint64");

using HashKey = std::array<uint64_t, 2>;

// Of any bytes.
Hash128 siphash13_128(const HashKey& key, std::span<const std::byte> data) noexcept;

// Hash every full page of ids into out, which has room for ids.size() / page_size. A seed is any bytes: the fingerprint
// that starts a chain, or the 16 bytes of the page before to go on with one.
void page_hashes(std::span<const int32_t> ids, size_t page_size, const HashKey& key, std::span<const std::byte> seed,
                 Hash128* out);

}  // namespace glm53d
