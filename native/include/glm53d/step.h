// What happens to every running slot in every step, in one pass each: where a block of tokens ends, and what leaves now.
// The rules are the scheduler's (glm53d/sched/results.py, throttle.py); here they only run over arrays. [R33] [R37] [R38]
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "glm53d/records.h"
#include "glm53d/token_log.h"

namespace glm53d {

enum class Verdict : int32_t { kGoesOn = 0, kEndOfTurn = 1, kFull = 2 };

struct Cut {
  int32_t count;  // tokens of the block that count, at least 1
  Verdict verdict;
};

// The scheduler's arrays, by slot.
struct CutRules {
  std::span<const int64_t> num_output, max_output;
  std::span<const bool> ignore_eos;
  std::span<const bool> is_eos;  // by id
};

// A block is cut behind its first end-of-turn id, and where max_output is reached.
inline Cut cut_block(const CutRules& rules, int32_t slot, std::span<const int32_t> ids) noexcept {
  const int64_t room = rules.max_output[slot] - rules.num_output[slot];
  const auto count = static_cast<int32_t>(std::min<int64_t>(ids.size(), room));
  if (!rules.ignore_eos[slot]) {
    for (int32_t i = 0; i < count; ++i)
      if (static_cast<size_t>(ids[i]) < rules.is_eos.size() && rules.is_eos[ids[i]]) return {i + 1, Verdict::kEndOfTurn};
  }
  return {count, count >= room ? Verdict::kFull : Verdict::kGoesOn};
}

// Output records of those slots whose unsent ids should leave now.
struct Leaving {
  std::vector<int32_t> slots;
  std::vector<OutputRecord> heads;
  std::vector<int32_t> ids;  // of all heads, one after the other
};

struct ThrottleRules {
  std::span<const int64_t> num_output, sent, interval;
  std::span<const OutputRecord> heads;  // what a slot's record has besides what is filled in here
};

// The first token at once, then every `interval`; with `all`, whatever is unsent, and a head even for none.
inline Leaving collect_leaving(const ThrottleRules& rules, const TokenLog& log, std::span<const int32_t> slots,
                               uint64_t now_ns, bool all) {
  Leaving leaving;
  for (const int32_t slot : slots) {
    const int64_t sent = rules.sent[slot], total = rules.num_output[slot], unsent = total - sent;
    if (!all && (unsent == 0 || (unsent < rules.interval[slot] && sent > 0))) continue;
    OutputRecord head = rules.heads[slot];
    head.token_offset = static_cast<uint32_t>(sent);
    head.num_ids = static_cast<uint32_t>(unsent);
    head.num_output_ids = static_cast<uint32_t>(total);
    head.last_token_ns = now_ns;
    leaving.slots.push_back(slot);
    leaving.heads.push_back(head);
    const auto ids = log.tail(slot, unsent);
    leaving.ids.insert(leaving.ids.end(), ids.begin(), ids.end());
  }
  return leaving;
}

}  // namespace glm53d
