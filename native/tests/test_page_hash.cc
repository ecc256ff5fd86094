// Page hashes: the chain against its definition. The hash itself is held against a Python one in tests/unit.
#include <vector>

#include "check.h"
#include "glm53d/page_hash.h"

using namespace glm53d;

static const HashKey kKey{1, 2};

static std::span<const std::byte> bytes_of(const Hash128& hash) { return std::as_bytes(std::span(&hash, 1)); }

static void each_page_covers_the_hash_before_it_and_its_ids(size_t page_size) {
  test::Random random(page_size);
  std::vector<int32_t> ids(page_size * 5 + page_size - 1);
  for (int32_t& id : ids) id = static_cast<int32_t>(random());
  std::vector<Hash128> hashes(6, Hash128{7, 7});
  const std::vector<std::byte> seed(random() % 40, std::byte{3});
  page_hashes(ids, page_size, kKey, seed, hashes.data());

  std::vector<std::byte> before = seed;
  for (size_t i = 0; i < 5; ++i) {
    const auto page = std::as_bytes(std::span(ids).subspan(i * page_size, page_size));
    before.insert(before.end(), page.begin(), page.end());
    const Hash128 expected = siphash13_128(kKey, before);
    CHECK(hashes[i] == expected);
    before.assign(bytes_of(expected).begin(), bytes_of(expected).end());
  }
  CHECK((hashes[5] == Hash128{7, 7}));  // no page begun but not full has a hash
}

int main() {
  for (const size_t page_size : {1, 2, 3, 16, 64}) each_page_covers_the_hash_before_it_and_its_ids(page_size);
}
