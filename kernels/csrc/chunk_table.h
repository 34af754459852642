// The table of chunks and their holders, of which the coordinator's layout map consists. Pure and single-threaded.
//
// A slot represents one instance, or its snapshot until that is complete. Lookups see live slots only.
//
//     free -> staged -> live -> retired -> free
//               '--------------^
//
// Retiring takes constant time: sets of holders may contain a retired slot until a sweep has passed, and only then is
// its number reused.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "chunk_shard.h"
#include "holder_sets.h"

namespace lmkv {

using Slot = std::uint32_t;
using SpecId = std::uint32_t;
inline constexpr Slot no_slot = ~0u;
inline constexpr std::uint32_t max_tokens = (1u << 20) - 1;
inline constexpr SpecId max_specs = 1u << 12;

enum class SlotState : std::uint8_t { free, staged, live, retired };

// The chunks of one spec in one tier of a slot.
struct Holding {
  int tier;
  SpecId spec;
  std::int64_t chunk_count;
  std::uint64_t key_sum;  // of the keys' first eight bytes
};

struct Run {
  int tier;
  std::uint64_t chunk_count;
  std::uint64_t token_count;
};

// The prefix of a prompt that a slot holds.
struct Match {
  Slot slot;
  std::uint64_t chunk_count;
  std::uint64_t token_count;
  std::vector<Run> runs;
};

// Keys that one slot holds in one tier.
struct Part {
  Slot slot;
  int tier;
  SpecId spec;
  std::string keys;
};

class ChunkTable {
 public:
  ChunkTable();
  ChunkTable(const ChunkTable&) = delete;

  // --- Slots

  Slot open_slot();  // staged
  void show(Slot slot) { slots_[slot].state = SlotState::live; }
  void retire(Slot slot);

  // --- Writing; tokens and tiers have been checked, keys are whole

  // The index of a fingerprint, which is added if it is new; `max_specs` if the table is full.
  SpecId spec_of(std::string_view fingerprint);

  // Adds chunks to a tier of a slot, and returns those that it did not hold there. They have `tokens` tokens, except
  // those in `partials`: index and tokens, in order. The first holder of a chunk determines its tokens and spec.
  std::string admit(Slot slot, int tier, SpecId spec, std::uint32_t tokens, std::string_view keys,
                    std::span<const std::pair<std::uint32_t, std::uint32_t>> partials);

  // Removes chunks from a tier of a slot, and returns those that it held there.
  std::string evict(Slot slot, int tier, std::string_view keys);

  // Frees the chunks of retired slots, about `limit` at a time; returns whether there are more.
  bool sweep(std::size_t limit);

  // --- Reading

  // All live slots except `excluded` that hold the first chunk; longest match first.
  std::vector<Match> lookup(std::string_view keys, Slot excluded) const;

  // Chunks and tokens of the prefix that a slot holds in one of `tiers`.
  Run match_at(Slot slot, Holder tiers, std::string_view keys) const;

  // One byte per key: whether the slot holds it in one of `tiers`.
  std::string held(Slot slot, Holder tiers, std::string_view keys) const;

  // The fingerprint under which a chunk is held; null if no live slot does.
  const std::string* fingerprint_of(std::string_view key) const;

  // A step of an iteration over live slots, about `limit` pairs of chunk and holder; moves the cursor, to 0 at the end.
  std::vector<Part> scan(std::size_t& cursor, std::size_t limit) const;

  SlotState state(Slot slot) const { return slots_[slot].state; }
  const std::vector<Holding>& holdings(Slot slot) const { return slots_[slot].holdings; }
  const std::string& fingerprint(SpecId spec) const { return specs_[spec].fingerprint; }
  std::size_t size() const { return size_; }
  std::size_t slot_count() const { return slots_.size(); }
  std::size_t set_count() const { return sets_.size(); }

  // A description of the first inconsistency, or nothing. Reads the whole table.
  std::string check() const;

 private:
  struct SlotRecord {
    SlotState state = SlotState::free;
    std::vector<Holding> holdings;  // of few tiers and specs
  };
  struct Spec {
    std::string fingerprint;
    std::int64_t chunk_count = 0;
  };

  class Step;

  bool is_live(Holder holder) const { return slots_[slot_of(holder)].state == SlotState::live; }
  bool is_retired(Holder holder) const { return slots_[slot_of(holder)].state == SlotState::retired; }
  Holder tiers_of(SetId set, Slot slot) const;

  ChunkShard& shard_of(std::uint64_t hash) { return shards_[hash >> shard_shift]; }
  const ChunkShard& shard_of(std::uint64_t hash) const { return shards_[hash >> shard_shift]; }
  template <typename Visit>
  void visit_keys(std::string_view keys, Visit visit) const;
  template <typename Visit>
  void visit_entries(std::string_view keys, Visit visit) const;

  void note(Slot slot, int tier, SpecId spec, const ChunkKey& key, int sign);
  void finish(Slot slot);
  void set_holders(ChunkEntry& entry, SetId holders);
  void sweep_shard(ChunkShard& shard, Step& step);

  static constexpr std::size_t shard_count = 1 << 12;  // at ten million chunks, growing one takes some 20 us
  static constexpr int shard_shift = 52;

  std::vector<ChunkShard> shards_;
  HolderSets sets_;
  std::vector<SlotRecord> slots_;
  std::vector<Spec> specs_;
  std::unordered_map<std::string, SpecId> spec_ids_;
  std::size_t size_ = 0;
  std::vector<Slot> retired_;   // since the sweep began
  std::vector<Slot> sweeping_;  // when it began
  std::size_t next_shard_ = 0;  // of the sweep
};

}  // namespace lmkv
