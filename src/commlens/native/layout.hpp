// The layout of the black box, as far as the writer needs it. commlens/blackbox/layout.py is the original; a test compares the two.
#pragma once

#include <cstddef>
#include <cstdint>

namespace commlens {

constexpr uint64_t HEADER_SIZE = 4096;
constexpr uint64_t RECORD_SIZE = 192;
constexpr uint64_t RECORD_CRC_AT = 96;

// header: live words
constexpr uint64_t NEXT_INDEX = 272;
constexpr uint64_t SIDE_HEAD = 280;
constexpr uint64_t STEPS = 296;
constexpr uint64_t GAVE_UP = 416;
constexpr uint64_t LOST = 320;

// records: flags
constexpr uint32_t FLAG_COALESCED_MEMBER = 1 << 0;
constexpr uint32_t FLAG_COALESCED_END = 1 << 1;
constexpr uint32_t FLAG_CONCURRENT = 1 << 2;
constexpr uint32_t FLAG_ENTERED = 1 << 3;
constexpr uint32_t FLAG_ANY_SOURCE = 1 << 4;
constexpr uint32_t FLAG_CAPTURE = 1 << 6;

// records: life words
constexpr uint64_t TICK_NS = 100;
constexpr uint64_t ENTERED = 120;
constexpr uint64_t RETURNED = 128;
constexpr uint64_t WAIT_BEGAN = 136;
constexpr uint64_t WAIT_ENDED = 144;
constexpr uint64_t DONE = 152;
constexpr uint64_t OUTCOME = 160;
constexpr uint64_t REDUCE_OP = 176;
constexpr uint64_t SOURCE = REDUCE_OP;  // of a receive from any rank
constexpr uint64_t DURATION = 184;
constexpr uint64_t TAG_MASK = 0xFFFF;

constexpr uint64_t OUTCOME_NONE = 0;
constexpr uint64_t OUTCOME_COMPLETED = 1;
constexpr uint64_t OUTCOME_UNKNOWN = 3;
constexpr uint64_t HOW_NOT_YET = 0;
constexpr uint64_t HOW_RETURN = 1;
constexpr uint64_t HOW_WAIT = 2;
constexpr uint64_t HOW_POLL = 3;
constexpr uint64_t HOW_NATIVE_RECORDER = 4;
constexpr uint64_t HOW_UNKNOWN = 5;

// side table
constexpr uint64_t BLOB_HEAD = 16;  // u32 length, u32 CRC-32, u64 position
constexpr uint64_t BLOB_ALIGN = 8;
constexpr uint64_t BLOB_MAX = 64 * 1024;

// The announced part of a record, as it is in the box.
struct Record {
  uint64_t index, announced, group, asked, stack, module, sequence_number, step, coalescing_id;
  int64_t tag;
  uint32_t thread, flags;
  int32_t peer;
  uint32_t members;
};
static_assert(sizeof(Record) == RECORD_CRC_AT && offsetof(Record, tag) == 72 && offsetof(Record, members) == 92, "the layout's RECORD");

}  // namespace commlens
