// The index of a slower tier under random calls, for the sanitizers; its answers are held against a model in
// tests/property.
#include <string>
#include <vector>

#include "check.h"
#include "glm53d/tier_index.h"

using namespace glm53d;
using test::below;
using test::Random;

static void whatever_is_called_the_books_balance(uint64_t seed) {
  Random random(seed);
  const bool small = below(random, 2) == 0;  // a large one has to grow
  TierIndex index(small ? below(random, 12) : 400);
  std::vector<int32_t> pinned, filling;
  for (int i = 0; i < 2000; ++i) {
    std::vector<Hash128> hashes;
    for (uint64_t k = below(random, 6); k > 0; --k) hashes.push_back({below(random, small ? 20 : 1000) * 16, 7});
    switch (below(random, 6)) {
      case 0: {
        const bool fill = below(random, 2) == 0;
        const auto [entries, dropped] = index.add(hashes, fill);
        for (const int32_t entry : entries)
          if (entry != TierIndex::kNone && fill) filling.push_back(entry);
        break;
      }
      case 1:
        for (const int32_t entry : index.find(hashes)) {
          if (entry == TierIndex::kNone) continue;
          index.pin({&entry, 1});
          pinned.push_back(entry);
        }
        break;
      case 2:
        while (!filling.empty()) {
          index.settle(filling.back(), below(random, 2) == 0);
          filling.pop_back();
        }
        break;
      case 3:
        while (!pinned.empty() && below(random, 4) > 0) {
          if (below(random, 5) == 0) index.condemn(pinned.back());
          index.unpin({&pinned.back(), 1});
          pinned.pop_back();
        }
        break;
      case 4: index.count(hashes); break;
      default:
        if (below(random, 10) == 0) index.clear();
    }
    const std::string wrong = index.check();
    CHECK(wrong.empty());
    CHECK(index.size() <= index.capacity());
  }
}

int main() {
  for (uint64_t seed = 0; seed < 50; ++seed) whatever_is_called_the_books_balance(seed);
}
