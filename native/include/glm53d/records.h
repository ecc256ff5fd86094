// Every record that crosses a process, described once. [R10] [R12] [R53]
//
// A record is a fixed struct, then a tail whose parts are counted in the struct and lie in the order given at the struct.
// Each part of a tail starts at a multiple of 8 bytes from the start of the record. The field lists below are the single
// source: C++ gets its structs from them, Python its numpy dtypes (glm53d/ipc/records.py, through record_layouts()).
//
// F(type, name) is one field, A(type, name, n) an array of n. All structs are packed by construction: fields are ordered so
// that no padding is needed, which the static_asserts at the end check.
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace glm53d {

inline constexpr uint32_t kAbiVersion = 1;

// What a ring record is. 0 is never written, 0xFFFF is the ring's own wrap mark.
enum class RecordType : uint16_t {
  kGenerate = 1,       // request ring: GenerateRecord
  kAbort = 2,          // request ring: AbortRecord
  kControl = 3,        // request ring, and batch ring for followers: ControlRecord
  kOutput = 4,         // output ring: OutputRecord
  kControlResult = 5,  // output ring: ControlResultRecord
  kBatch = 6,          // batch ring: BatchRecord
  kResult = 7,         // result rings: ResultRecord
};

enum class FinishReason : uint32_t {
  kNone = 0,      // goes on
  kStop = 1,      // an end-of-turn id or a stop id (matched_id), or a stop string
  kLength = 2,    // max_new_tokens, or the end of the context or of the pool
  kAbort = 3,     // asked for by main
  kError = 4,     // error_bytes of text follow
};

// Request ring. Tail: int32 prompt_ids[num_prompt_ids], int32 output_ids[num_output_ids] (already emitted, a resumed
// request only), uint64 page_hashes[num_page_hashes][2] of the prompt's full pages, int32 stop_ids[num_stop_ids], bytes
// stop_strings[stop_bytes] (each: uint16 length, then its bytes), Bias logit_bias[num_logit_bias],
// bytes grammar[grammar_bytes], bytes rid[rid_bytes] (UTF-8, for logs only).
#define GLM53D_GENERATE_RECORD(F, A)                                                                                     \
  F(uint64_t, handle)                                                                                                    \
  F(uint64_t, group)           /* handle of the first of n > 1 children, 0: alone */                                     \
  F(uint64_t, seed)            /* chosen by main when the client gave none */                                            \
  F(uint64_t, session)         /* hash of the session key, 0: none */                                                    \
  F(uint64_t, arrival_ns)      /* CLOCK_MONOTONIC, last byte of the body read */                                         \
  F(uint64_t, deadline_ns)     /* 0: none */                                                                             \
  F(int64_t, bootstrap_room)   /* which rank it names, by its remainder; -1: none [R25] */                               \
  F(uint64_t, chain_lo)        /* what the chain of page hashes starts from */                                           \
  F(uint64_t, chain_hi)                                                                                                  \
  F(uint32_t, num_prompt_ids)                                                                                            \
  F(uint32_t, num_output_ids)                                                                                            \
  F(uint32_t, num_page_hashes)                                                                                           \
  F(uint32_t, num_stop_ids)                                                                                              \
  F(uint32_t, stop_bytes)                                                                                                \
  F(uint32_t, num_logit_bias)                                                                                            \
  F(uint32_t, grammar_bytes)                                                                                             \
  F(uint32_t, grammar_kind)    /* 0: none, 1: holds from the first token on, 2: from behind </think> on */               \
  F(uint32_t, rid_bytes)                                                                                                 \
  F(uint32_t, flags)                                                                                                     \
  F(uint32_t, max_new_tokens)  /* in all, those already emitted included */                                              \
  F(uint32_t, min_new_tokens)                                                                                            \
  F(uint32_t, stream_interval) /* tokens between two output records; the first goes at once */                           \
  F(int32_t, priority)                                                                                                   \
  F(int32_t, dp_rank)          /* -1: the scheduler chooses */                                                           \
  F(int32_t, thinking_budget)  /* tokens, -1: none */                                                                    \
  F(int32_t, cached_device)    /* tokens found at first admission, by tier; -1: not admitted before */                   \
  F(int32_t, cached_host)                                                                                                \
  F(int32_t, cached_storage)                                                                                             \
  F(int32_t, top_k)            /* 0: off */                                                                              \
  F(int32_t, top_logprobs)     /* -1: no logprobs */                                                                     \
  F(int32_t, logprob_start)    /* first prompt position with logprobs, -1: none */                                       \
  F(float, temperature)        /* 0: greedy */                                                                           \
  F(float, top_p)                                                                                                        \
  F(float, min_p)                                                                                                        \
  F(float, frequency_penalty)                                                                                            \
  F(float, presence_penalty)                                                                                             \
  F(float, repetition_penalty)

// What is added to an id's logit.
#define GLM53D_BIAS(F, A) \
  F(int32_t, id)          \
  F(float, bias)

#define GLM53D_ABORT_RECORD(F, A) \
  F(uint64_t, handle)

#define GLM53D_CONTROL_RECORD(F, A)                         \
  F(uint64_t, call_id) /* echoed in the result */           \
  F(uint32_t, op)                                           \
  F(uint32_t, arg)

#define GLM53D_CONTROL_RESULT_RECORD(F, A) \
  F(uint64_t, call_id)                     \
  F(uint64_t, op)                          \
  F(uint64_t, value)

// One id and the natural logarithm of its probability. Where tokens have logprobs, a token's are a row of them: its own,
// then those of the likeliest ids, most likely first; behind them id -1 to the row's width. A prompt's first token has
// NaN: nothing stands before it.
#define GLM53D_LOGPROB(F, A) \
  F(int32_t, id)             \
  F(float, logprob)

// Output ring. Tail: int32 ids[num_ids], bytes error[error_bytes] ("code: sentence"), and with logprob_width
// Logprob[num_prompt_logprobs + num_ids][logprob_width]: of the prompt's next tokens, then of the ids here.
#define GLM53D_OUTPUT_RECORD(F, A)                                                                     \
  F(uint64_t, handle)                                                                                  \
  F(uint32_t, token_offset)    /* of the first id here among the request's output [R13] */             \
  F(uint32_t, num_ids)                                                                                 \
  F(uint32_t, finish_reason)                                                                           \
  F(int32_t, matched_id)       /* the id that ended it, -1: none */                                    \
  F(int32_t, matched_stop)     /* index of the stop string that ended it, -1: none */                  \
  F(uint32_t, held_bytes)      /* bytes of text at the end that must not show yet, or ever [R38] */    \
  F(uint32_t, num_prompt_ids)                                                                          \
  F(uint32_t, num_output_ids)  /* emitted in all, those here included */                               \
  F(uint32_t, cached_device)                                                                           \
  F(uint32_t, cached_host)                                                                             \
  F(uint32_t, cached_storage)                                                                          \
  F(uint32_t, num_accepted)    /* draft tokens accepted */                                             \
  F(uint32_t, num_retractions)                                                                         \
  F(uint32_t, flags)           /* THINKING_FORCED */                                                   \
  F(int32_t, dp_rank)                                                                                  \
  F(uint32_t, error_bytes)                                                                             \
  F(uint64_t, inbox_ns)        /* marks [R23], CLOCK_MONOTONIC, 0: not reached */                      \
  F(uint64_t, admitted_ns)                                                                             \
  F(uint64_t, first_forward_ns)                                                                        \
  F(uint64_t, prefill_done_ns)                                                                         \
  F(uint64_t, last_token_ns)                                                                           \
  F(uint64_t, queue_ns)        /* sum of all stretches of waiting */                                   \
  F(uint32_t, num_prompt_logprobs)                                                                     \
  F(uint32_t, logprob_width)   /* 0: the request has not asked for logprobs */

// A slot's sampling parameters, sent once when a request takes the slot. Inside BatchRecord's tail.
#define GLM53D_SLOT_INIT(F, A)                                           \
  F(uint64_t, seed)                                                      \
  F(int32_t, slot)                                                       \
  F(int32_t, top_k)                                                      \
  F(float, temperature)                                                  \
  F(float, top_p)                                                        \
  F(float, min_p)                                                        \
  F(int32_t, dp_rank)                                                    \
  F(uint32_t, num_prompt_ids)                                            \
  F(uint32_t, min_new_tokens)  /* before these no end-of-turn id is sampled */

// What a slot has beyond that, if anything: a row of the sampling tables, and what the row begins with. Sent when a
// request takes the slot, with its SlotInit, and again when the ids it has said are not those that were sampled.
#define GLM53D_TABLE_INIT(F, A)                                                                    \
  F(int32_t, slot)                                                                                 \
  F(int32_t, row)      /* numbered over the node: attention-DP rank d has the d-th part of them */ \
  F(float, base_bias)  /* of ids without a bias in the batch: 0; or -inf, they are never sampled */ \
  F(float, frequency_penalty)                                                                      \
  F(float, presence_penalty)                                                                       \
  F(float, repetition_penalty)

// One page of KV on its way between tiers, or from another rank: what the numbers mean says its kind. [R32]
#define GLM53D_PAGE_MOVE(F, A)                                                                                        \
  F(uint64_t, hash_lo)         /* of the page, the name of its file */                                                \
  F(uint64_t, hash_hi)                                                                                                \
  F(int32_t, kind)             /* MoveKind */                                                                         \
  F(int32_t, dp_rank)          /* whose ranks do it */                                                                \
  F(int32_t, source)           /* a page of the pool that kind says */                                                \
  F(int32_t, target)                                                                                                  \
  F(int32_t, source_rank)      /* kPeer: the attention-DP rank whose pool source is of */                             \
  F(int32_t, id)               /* of one that ends at any time: a result names it then */

// Batch ring: what one step runs on every rank. glm53d/ipc/batch.py names the tail's arrays and their order.
#define GLM53D_BATCH_RECORD(F, A)                                        \
  F(uint64_t, step)            /* 1, 2, 3 ... without a gap [R9] */      \
  F(uint64_t, world_id)                                                  \
  F(uint32_t, num_rows)                                                  \
  F(uint32_t, num_tokens)                                                \
  F(uint32_t, num_inits)                                                 \
  F(uint32_t, num_runs)        /* runs of pages appended to tables */    \
  F(uint32_t, num_pages)       /* in all runs */                         \
  F(uint32_t, num_tables)                                                \
  F(uint32_t, num_bias)        /* of all table rows */                   \
  F(uint32_t, num_said)        /* of all table rows */                   \
  F(uint32_t, attn_dp_size)                                              \
  F(uint32_t, mode)            /* attention: 0 dp, 2 cp */               \
  F(uint32_t, num_top_logprobs) /* num_rows, or 0: no row asks */        \
  F(uint32_t, num_targets)     /* num_tokens, or 0: no prompt asks */    \
  F(uint32_t, num_moves)                                                 \
  F(uint32_t, wait_us)         /* for a file, before the result is given */ \
  F(uint32_t, num_masks)                                                 \
  F(uint32_t, mask_words)      /* of each: a bit per id of the tokenizer */

// Result rings. Tail: int32 counts[num_rows], int32 ids[num_rows][width]; row i gave ids[i][:counts[i]]. Where a row has
// asked, int32 logprob_rows[num_logprobs], in order, and Logprob[num_logprobs][logprob_width]. Then int32 done[num_done],
// failed[num_failed]: ids of page moves that have ended.
#define GLM53D_RESULT_RECORD(F, A)                                       \
  F(uint64_t, step)                                                      \
  F(uint64_t, world_id)                                                  \
  F(uint64_t, start_ns)                                                  \
  F(uint64_t, end_ns)                                                    \
  F(uint32_t, num_rows)                                                  \
  F(uint32_t, width)                                                     \
  F(uint32_t, num_logprobs)                                              \
  F(uint32_t, logprob_width)                                             \
  F(uint32_t, num_done)                                                  \
  F(uint32_t, num_failed)

// Board: one row per attention-DP rank, written by the leader. [R8]
#define GLM53D_LOAD_ROW(F, A)                                            \
  F(uint64_t, step)            /* last step planned */                   \
  F(uint64_t, step_start_ns)   /* of the running step, 0: between */     \
  F(uint64_t, last_step_ns)    /* how long the last one took */          \
  F(uint64_t, updated_ns)                                                \
  F(uint32_t, num_running)                                               \
  F(uint32_t, num_waiting)                                               \
  F(uint64_t, num_running_tokens)                                        \
  F(uint64_t, num_waiting_tokens)  /* uncached */                        \
  F(uint32_t, pages_total)                                               \
  F(uint32_t, pages_free)                                                \
  F(uint32_t, pages_cached)    /* in the tree, nobody's lock on them */  \
  F(uint32_t, pages_locked)    /* in the tree, in use */                 \
  F(uint32_t, pages_owned)     /* held by one request alone */           \
  F(uint32_t, num_nodes)       /* of the prefix tree */                  \
  F(uint64_t, steps)           /* counters since the world began */      \
  F(uint64_t, prefill_tokens)                                            \
  F(uint64_t, cached_tokens)                                             \
  F(uint64_t, decode_tokens)                                             \
  F(uint64_t, finished)                                                  \
  F(uint64_t, aborted)                                                   \
  F(uint64_t, retracted)                                                 \
  F(uint64_t, stale_records)                                             \
  F(uint64_t, books_checked)   /* times the books were found in order */ \
  F(uint64_t, expired)         /* waited too long, or too late for their deadline */ \
  F(uint64_t, dropped)         /* tokens sampled that did not count */ \
  F(uint64_t, thinking_forced) /* times that a thinking budget was used up */ \
  F(uint64_t, sessions_kept)   /* prefixes kept behind turns that will go on */ \
  F(uint64_t, sessions_resumed) /* the next turn came */ \
  F(uint64_t, sessions_expired) /* it did not come in time */ \
  F(uint64_t, sessions_evicted) /* others needed the room */ \
  F(uint64_t, prefill_rate)    /* prompt tokens per second the node computes */ \
  F(uint64_t, longest_gap_ns)  /* between two tokens of a running stream, of the last 10 to 20 s */ \
  F(uint32_t, host_pages_total)                                          \
  F(uint32_t, host_pages_used)                                           \
  F(uint32_t, file_pages_total) /* of the node, in the first row */      \
  F(uint32_t, file_pages_used)                                           \
  F(uint64_t, cached_host_tokens) /* of cached_tokens */                 \
  F(uint64_t, cached_storage_tokens)                                     \
  F(uint64_t, pages_saved)     /* from a pool to host memory */          \
  F(uint64_t, pages_loaded)    /* from host memory to a pool */          \
  F(uint64_t, pages_copied)    /* from one pool to another */            \
  F(uint64_t, pages_stored)    /* from host memory to files */           \
  F(uint64_t, pages_fetched)   /* from files to host memory */           \
  F(uint64_t, files_failed)    /* that could not be written, or were damaged */ \
  F(uint64_t, drafts_verified) /* times that a request's drafts were held against the model */ \
  F(uint64_t, drafts_accepted_1) /* in how many of these the first was right, the first two, ... */ \
  F(uint64_t, drafts_accepted_2)                                         \
  F(uint64_t, drafts_accepted_3)                                         \
  F(uint64_t, drafts_accepted_4)                                         \
  F(uint64_t, drafts_accepted_5)                                         \
  F(uint64_t, received)        /* generate records the leader has taken from the request ring */

// Board: one row per rank, written by that rank. State: 0 starting, 1 loaded, 2 running, 3 stopped, 4 failed. [R3]
#define GLM53D_RANK_ROW(F, A)                                            \
  F(uint64_t, pid)                                                       \
  F(uint32_t, state)                                                     \
  F(uint32_t, percent)                                                   \
  F(uint32_t, attn_dp_rank)                                              \
  F(uint32_t, attn_tp_rank)                                              \
  F(uint32_t, ep_rank)                                                   \
  F(uint32_t, num_pages)                                                 \
  F(uint32_t, page_size)                                                 \
  F(uint32_t, max_req_input_len)                                         \
  F(uint64_t, kv_bytes_per_token)                                        \
  F(uint64_t, weight_bytes)                                              \
  F(uint64_t, init_ns)         /* seconds per phase, in ns: imports */   \
  F(uint64_t, load_ns)         /* weights */                             \
  F(uint64_t, heartbeat_ns)                                              \
  A(char, phase, 32)                                                     \
  A(char, last_words, 512)     /* why it stopped, UTF-8, NUL-padded */

// Every fixed struct above, in one list: X(StructName, field list, size in bytes).
#define GLM53D_RECORDS(X)                                                \
  X(GenerateRecord, GLM53D_GENERATE_RECORD, 184)                         \
  X(Bias, GLM53D_BIAS, 8)                                                \
  X(AbortRecord, GLM53D_ABORT_RECORD, 8)                                 \
  X(ControlRecord, GLM53D_CONTROL_RECORD, 16)                            \
  X(ControlResultRecord, GLM53D_CONTROL_RESULT_RECORD, 24)               \
  X(OutputRecord, GLM53D_OUTPUT_RECORD, 128)                             \
  X(Logprob, GLM53D_LOGPROB, 8)                                          \
  X(SlotInit, GLM53D_SLOT_INIT, 40)                                      \
  X(TableInit, GLM53D_TABLE_INIT, 24)                                    \
  X(PageMove, GLM53D_PAGE_MOVE, 40)                                      \
  X(BatchRecord, GLM53D_BATCH_RECORD, 80)                                \
  X(ResultRecord, GLM53D_RESULT_RECORD, 56)                              \
  X(LoadRow, GLM53D_LOAD_ROW, 360)                                       \
  X(RankRow, GLM53D_RANK_ROW, 624)

#define GLM53D_FIELD(type, name) type name;
#define GLM53D_ARRAY(type, name, n) type name[n];
#define GLM53D_STRUCT(Name, fields, size)                                                             \
  struct Name {                                                                                       \
    fields(GLM53D_FIELD, GLM53D_ARRAY)                                                                \
  };                                                                                                  \
  static_assert(sizeof(Name) == size && sizeof(Name) % 8 == 0, "shared-memory ABI");                  \
  static_assert(std::is_standard_layout_v<Name> && std::is_trivially_copyable_v<Name>, "shared-memory ABI");
GLM53D_RECORDS(GLM53D_STRUCT)
#undef GLM53D_STRUCT

static_assert(offsetof(GenerateRecord, num_prompt_ids) == 72 && offsetof(GenerateRecord, temperature) == 160);
static_assert(offsetof(OutputRecord, inbox_ns) == 72 && offsetof(OutputRecord, held_bytes) == 28);
static_assert(offsetof(LoadRow, pages_total) == 56 && offsetof(RankRow, phase) == 80);

inline constexpr size_t align8(size_t n) { return (n + 7) & ~size_t{7}; }

}  // namespace glm53d
