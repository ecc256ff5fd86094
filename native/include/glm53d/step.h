// What happens to every running slot in every step, in one pass each: whether it runs, where a block of tokens ends, what
// leaves now. The rules are the scheduler's (glm53d/sched); here they only run over arrays. [R33] [R37] [R38]
#pragma once
#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "glm53d/records.h"
#include "glm53d/token_log.h"

namespace glm53d {

enum class Verdict : int32_t { kGoesOn = 0, kEndOfTurn = 1, kFull = 2 };

struct Cut {
  int32_t count;  // tokens of the block that count; 0 for who wants none
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

// What the next step may do with each decoding slot. [R34]
struct ReadyRows {
  std::vector<int32_t> prefix_len;  // of each slot, in order
  std::vector<int32_t> sit_out;     // indices of slots that stay out of the step
  std::vector<int32_t> need_pages;  // indices of slots that go into it and lack pages for what it may write
};

// By slot, but for the last three.
struct ReadyRules {
  std::span<const int64_t> seq_len, prefix_len, end_len, num_pages;
  std::span<const bool> needs_value;
  int64_t page_size, headroom;
  bool one_token;  // a step gives a row exactly one token, so its length is known before its result
};

// A slot whose last token is still being sampled goes on if nothing hangs on which token that is, and it is not its last.
inline ReadyRows ready_rows(const ReadyRules& rules, std::span<const int32_t> slots) {
  ReadyRows rows;
  rows.prefix_len.reserve(slots.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    const int32_t slot = slots[i];
    const int64_t prefix = rules.prefix_len[slot];
    rows.prefix_len.push_back(static_cast<int32_t>(prefix));
    if (prefix >= rules.seq_len[slot] && (!rules.one_token || rules.needs_value[slot] || prefix + 1 >= rules.end_len[slot]))
      rows.sit_out.push_back(static_cast<int32_t>(i));
    else if (prefix + 1 + rules.headroom > rules.num_pages[slot] * rules.page_size)
      rows.need_pages.push_back(static_cast<int32_t>(i));
  }
  return rows;
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
