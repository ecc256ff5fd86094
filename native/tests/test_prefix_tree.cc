// The prefix tree under random calls, for the sanitizers; its answers are held against a model in tests/property.
#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "glm53d/prefix_tree.h"

using namespace glm53d;
using test::below;
using test::Random;

// The prompt's path as hashes: equal prefixes, equal hashes.
static std::vector<Hash128> hashes_of(const std::string& prompt) {
  std::vector<Hash128> hashes;
  Hash128 last{0, 0};
  for (const char c : prompt) {
    const auto ids = static_cast<int32_t>(c);
    page_hashes(std::span(&ids, 1), 1, HashKey{5, 6}, std::as_bytes(std::span(&last, 1)), &last);
    hashes.push_back(last);
  }
  return hashes;
}

static void every_page_is_in_one_place_after_any_call(uint64_t seed) {
  Random random(seed);
  PrefixTree tree;
  std::vector<int32_t> free_pages(200);
  for (size_t i = 0; i < free_pages.size(); ++i) free_pages[i] = static_cast<int32_t>(i);
  std::vector<std::pair<PrefixTree::NodeId, std::vector<int32_t>>> locks;

  for (uint64_t now = 1; now <= 1000; ++now) {
    std::string prompt(below(random, 20), 'a');
    for (char& c : prompt) c += below(random, 8) == 0;
    const std::vector<Hash128> hashes = hashes_of(prompt);
    switch (below(random, 4)) {
      case 0:
      case 1: {
        const auto [num_pages, node] = tree.match(hashes, now);
        CHECK(num_pages == tree.peek(hashes) && tree.pages(node).size() == num_pages);
        const size_t missing = hashes.size() - num_pages;
        if (missing > free_pages.size()) break;
        const std::vector<int32_t> mine(free_pages.end() - missing, free_pages.end());
        std::vector<int32_t> owned(missing);
        const auto rest = std::span(hashes).subspan(num_pages);
        const PrefixTree::NodeId last = tree.insert(node, rest, mine, now, owned.data());
        CHECK(owned == mine && tree.pages(last).size() == hashes.size());
        free_pages.resize(free_pages.size() - missing);
        if (below(random, 2) == 0) {
          tree.lock(last);
          locks.emplace_back(last, tree.pages(last));
        }
        break;
      }
      case 2:
        if (!locks.empty()) {
          std::swap(locks[below(random, locks.size())], locks.back());
          CHECK(tree.pages(locks.back().first) == locks.back().second);
          CHECK(tree.unlock(locks.back().first));
          locks.pop_back();
        }
        break;
      case 3: {
        const size_t n = below(random, 10), evictable = tree.evictable_pages();
        const std::vector<int32_t> dropped = tree.evict(n).pages;
        CHECK(dropped.size() == std::min(n, evictable));
        free_pages.insert(free_pages.end(), dropped.begin(), dropped.end());
        break;
      }
    }
    CHECK(tree.check().empty());
    std::vector<int32_t> all = tree.all_pages();
    all.insert(all.end(), free_pages.begin(), free_pages.end());
    CHECK(all.size() == 200 && std::set<int32_t>(all.begin(), all.end()).size() == 200);
  }
}

static void a_node_that_is_not_locked_cannot_be_unlocked() {
  PrefixTree tree;
  CHECK(!tree.unlock(PrefixTree::kRoot));
  CHECK(!tree.alive(1) && !tree.alive(-1) && tree.alive(PrefixTree::kRoot));
}

int main() {
  for (uint64_t seed = 0; seed < 5; ++seed) every_page_is_in_one_place_after_any_call(seed);
  a_node_that_is_not_locked_cannot_be_unlocked();
}
