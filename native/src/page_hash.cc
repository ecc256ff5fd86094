#include "glm53d/page_hash.h"

#include <cstring>
#include <vector>

namespace glm53d {
namespace {

class Sip {
 public:
  explicit Sip(const HashKey& key) noexcept
      : v0_(key[0] ^ 0x736f6d6570736575), v1_(key[1] ^ 0x646f72616e646f6d ^ 0xee), v2_(key[0] ^ 0x6c7967656e657261),
        v3_(key[1] ^ 0x7465646279746573) {}

  void word(uint64_t m) noexcept {
    v3_ ^= m;
    round();
    v0_ ^= m;
  }

  // The message's last bytes; total is its whole length.
  Hash128 finish(const std::byte* tail, size_t tail_bytes, size_t total) noexcept {
    uint64_t last = 0;
    std::memcpy(&last, tail, tail_bytes);
    word(last | uint64_t{total & 0xff} << 56);
    v2_ ^= 0xee;
    round(), round(), round();
    const uint64_t lo = v0_ ^ v1_ ^ v2_ ^ v3_;
    v1_ ^= 0xdd;
    round(), round(), round();
    return {lo, v0_ ^ v1_ ^ v2_ ^ v3_};
  }

 private:
  void round() noexcept {
    v0_ += v1_, v1_ = std::rotl(v1_, 13), v1_ ^= v0_, v0_ = std::rotl(v0_, 32);
    v2_ += v3_, v3_ = std::rotl(v3_, 16), v3_ ^= v2_;
    v0_ += v3_, v3_ = std::rotl(v3_, 21), v3_ ^= v0_;
    v2_ += v1_, v1_ = std::rotl(v1_, 17), v1_ ^= v2_, v2_ = std::rotl(v2_, 32);
  }

  uint64_t v0_, v1_, v2_, v3_;
};

Hash128 absorb(Sip& sip, std::span<const std::byte> data, size_t total) noexcept {
  const size_t words = data.size() / 8;
  for (size_t i = 0; i < words; ++i) {
    uint64_t m;
    std::memcpy(&m, data.data() + 8 * i, 8);
    sip.word(m);
  }
  return sip.finish(data.data() + 8 * words, data.size() % 8, total);
}

}  // namespace

Hash128 siphash13_128(const HashKey& key, std::span<const std::byte> data) noexcept {
  Sip sip(key);
  return absorb(sip, data, data.size());
}

void page_hashes(std::span<const int32_t> ids, size_t page_size, const HashKey& key, std::span<const std::byte> seed,
                 Hash128* out) {
  const size_t num_pages = ids.size() / page_size;
  if (num_pages == 0) return;
  const auto page = [&](size_t i) { return std::as_bytes(ids.subspan(i * page_size, page_size)); };

  std::vector<std::byte> first(seed.begin(), seed.end());
  first.insert(first.end(), page(0).begin(), page(0).end());
  out[0] = siphash13_128(key, first);

  for (size_t i = 1; i < num_pages; ++i) {
    Sip sip(key);
    sip.word(out[i - 1].lo);
    sip.word(out[i - 1].hi);
    out[i] = absorb(sip, page(i), sizeof(Hash128) + page_size * sizeof(int32_t));
  }
}

}  // namespace glm53d
