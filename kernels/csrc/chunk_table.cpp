#include "chunk_table.h"

#include <malloc.h>

#include <algorithm>
#include <array>
#include <bit>
#include <iterator>
#include <tuple>

namespace lmkv {
namespace {

constexpr std::size_t key_bytes = sizeof(ChunkKey);
constexpr std::size_t prefetch_distance = 8;  // keys are far apart in memory: their entries are asked for in advance
constexpr int spec_shift = 20;

std::size_t key_count(std::string_view keys) { return keys.size() / key_bytes; }

ChunkKey key_at(std::string_view keys, std::size_t index) {
  ChunkKey key;
  std::memcpy(&key, keys.data() + index * key_bytes, key_bytes);
  return key;
}

void append(std::string& keys, const ChunkKey& key) { keys.append(reinterpret_cast<const char*>(&key), key_bytes); }

std::uint32_t tokens_of(const ChunkEntry& entry) { return entry.info & max_tokens; }
SpecId spec_id_of(const ChunkEntry& entry) { return entry.info >> spec_shift; }

int fastest(Holder tiers) { return std::countr_zero(tiers) + 1; }

// Ends a match; converts the start of each run to its length.
void close(Match& match, std::uint64_t chunk_count, std::uint64_t token_count) {
  match.chunk_count = chunk_count;
  match.token_count = token_count;
  for (auto run = match.runs.rbegin(); run != match.runs.rend(); ++run) {
    const Run begin = *run;
    run->chunk_count = chunk_count - begin.chunk_count;
    run->token_count = token_count - begin.token_count;
    chunk_count = begin.chunk_count;
    token_count = begin.token_count;
  }
}

}  // namespace

// The change of one call to sets of holders, memoized because adjacent chunks mostly have the same holders.
class ChunkTable::Step {
 public:
  enum class Kind { add, remove, clean };

  struct Result {
    SetId from = ~0u;
    SetId to = no_holders;
    bool abandoned = true;  // whether all holders are retired
  };

  Step(ChunkTable& table, Kind kind, Holder holder = 0) : table_(table), kind_(kind), holder_(holder) {}

  // The changed set; the same one if nothing changes.
  const Result& operator()(SetId from) {
    Result& known = memory_[from % memory_.size()];
    if (known.from != from) known = result(from);
    return known;
  }

 private:
  Result result(SetId from) {
    const std::span<const Holder> before = table_.sets_[from];
    kept_.clear();
    std::ranges::remove_copy_if(before, std::back_inserter(kept_),
                                [&](Holder holder) { return table_.is_retired(holder); });
    const bool abandoned = kept_.empty();
    const bool works = kind_ == Kind::clean ? kept_.size() < before.size() : change();
    return {from, works ? table_.sets_.intern(kept_) : from, abandoned};
  }

  // Adds or removes the holder; returns whether that changed anything.
  bool change() {
    const auto at = std::ranges::lower_bound(kept_, slot_of(holder_), {}, slot_of);
    const Holder tier = holder_ & all_tiers;
    const bool known = at != kept_.end() && slot_of(*at) == slot_of(holder_);
    const bool held = known && (*at & tier);
    if (held == (kind_ == Kind::add)) return false;
    if (!known) {
      kept_.insert(at, holder_);
    } else if ((*at ^= tier, (*at & all_tiers) == 0)) {
      kept_.erase(at);
    }
    return true;
  }

  ChunkTable& table_;
  const Kind kind_;
  const Holder holder_;
  std::array<Result, 64> memory_;
  std::vector<Holder> kept_;
};

ChunkTable::ChunkTable() : shards_(shard_count) {}

// --- Slots ------------------------------------------------------------------------------------------------------------

Slot ChunkTable::open_slot() {
  auto slot = std::ranges::find(slots_, SlotState::free, &SlotRecord::state);
  if (slot == slots_.end()) slot = slots_.emplace(slot);
  slot->state = SlotState::staged;
  return static_cast<Slot>(slot - slots_.begin());
}

void ChunkTable::retire(Slot slot) {
  slots_[slot] = {SlotState::retired, {}};
  retired_.push_back(slot);
}

// --- Writing ----------------------------------------------------------------------------------------------------------

SpecId ChunkTable::spec_of(std::string_view fingerprint) {
  const auto [known, is_new] = spec_ids_.try_emplace(std::string(fingerprint), max_specs);
  if (!is_new) return known->second;
  auto unused = std::ranges::find(specs_, 0, &Spec::chunk_count);
  if (unused == specs_.end() && specs_.size() == max_specs) {
    spec_ids_.erase(known);
    return max_specs;
  }
  if (unused == specs_.end()) {
    unused = specs_.emplace(unused);
  } else {
    spec_ids_.erase(unused->fingerprint);
  }
  unused->fingerprint = fingerprint;
  return known->second = static_cast<SpecId>(unused - specs_.begin());
}

std::string ChunkTable::admit(Slot slot, int tier, SpecId spec, std::uint32_t tokens, std::string_view keys,
                              std::span<const std::pair<std::uint32_t, std::uint32_t>> partials) {
  std::string gained;
  Step step(*this, Step::Kind::add, holder_of(slot, tier));
  visit_keys(keys, [&](std::size_t index, const ChunkKey& key, std::uint64_t hash) {
    const bool is_partial = !partials.empty() && partials.front().first == index;
    const std::uint32_t own_tokens = is_partial ? partials.front().second : tokens;
    if (is_partial) partials = partials.subspan(1);
    ChunkEntry& entry = shard_of(hash).find_or_insert(key, hash);
    const auto [from, to, abandoned] = step(entry.holders);
    if (from == to) return true;
    if (abandoned) {
      if (from == no_holders) {
        ++size_;
      } else {
        --specs_[spec_id_of(entry)].chunk_count;
      }
      ++specs_[spec].chunk_count;
      entry.info = own_tokens | spec << spec_shift;
    }
    set_holders(entry, to);
    note(slot, tier, spec_id_of(entry), key, +1);
    append(gained, key);
    return true;
  });
  finish(slot);
  return gained;
}

std::string ChunkTable::evict(Slot slot, int tier, std::string_view keys) {
  std::string lost;
  Step step(*this, Step::Kind::remove, holder_of(slot, tier));
  visit_keys(keys, [&](std::size_t, const ChunkKey& key, std::uint64_t hash) {
    ChunkEntry* const entry = shard_of(hash).find(key, hash);
    if (entry == nullptr) return true;
    const auto [from, to, abandoned] = step(entry->holders);
    if (from == to) return true;
    note(slot, tier, spec_id_of(*entry), key, -1);
    append(lost, key);
    set_holders(*entry, to);
    if (to == no_holders) {
      --specs_[spec_id_of(*entry)].chunk_count;
      --size_;
      shard_of(hash).erase(entry);
    }
    return true;
  });
  finish(slot);
  return lost;
}

bool ChunkTable::sweep(std::size_t limit) {
  if (sweeping_.empty()) {
    if (retired_.empty()) return false;
    // Retired slots are not written to, so swept shards do not contain them again.
    std::swap(sweeping_, retired_);
    next_shard_ = 0;
  }
  Step step(*this, Step::Kind::clean);
  for (std::size_t passed = 0; next_shard_ < shard_count && passed < limit; ++next_shard_) {
    passed += shards_[next_shard_].size();
    sweep_shard(shards_[next_shard_], step);
  }
  sets_.collect();
  if (next_shard_ == shard_count) {
    for (const Slot slot : sweeping_) slots_[slot].state = SlotState::free;
    sweeping_.clear();
#ifdef __GLIBC__
    malloc_trim(0);  // what was freed lies in small pieces, which would stay with the process: some milliseconds
#endif
  }
  return !sweeping_.empty() || !retired_.empty();
}

void ChunkTable::sweep_shard(ChunkShard& shard, Step& step) {
  std::uint32_t dropped = 0;
  for (ChunkEntry& entry : shard.places()) {
    if (entry.holders == no_holders) continue;
    const auto [from, to, abandoned] = step(entry.holders);
    if (from == to) continue;
    set_holders(entry, to);
    if (to == no_holders) {
      --specs_[spec_id_of(entry)].chunk_count;
      ++dropped;
    }
  }
  if (dropped == 0) return;
  size_ -= dropped;
  shard.rebuild_without(dropped);
}

// --- Reading ----------------------------------------------------------------------------------------------------------

std::vector<Match> ChunkTable::lookup(std::string_view keys, Slot excluded) const {
  std::vector<Match> going, ended;
  SetId last = no_holders;
  std::uint64_t token_count = 0;
  std::uint64_t chunk_count = 0;
  visit_entries(keys, [&](std::size_t index, const ChunkEntry* entry) {
    const SetId set = entry ? entry->holders : no_holders;
    if (index == 0) {
      for (const Holder holder : sets_[set]) {
        if (is_live(holder) && slot_of(holder) != excluded) {
          going.push_back({slot_of(holder), 0, 0, {{fastest(holder), 0, 0}}});
        }
      }
    } else if (set != last) {
      // Slots without this chunk are removed. Both lists are sorted by slot.
      auto holder = sets_[set].begin();
      const auto end = sets_[set].end();
      std::vector<Match> staying;
      for (Match& match : going) {
        while (holder != end && slot_of(*holder) < match.slot) ++holder;
        if (holder == end || slot_of(*holder) != match.slot) {
          close(match, chunk_count, token_count);
          ended.push_back(std::move(match));
          continue;
        }
        if (const int tier = fastest(*holder); tier != match.runs.back().tier) {
          match.runs.push_back({tier, chunk_count, token_count});
        }
        staying.push_back(std::move(match));
      }
      going = std::move(staying);
    }
    last = set;
    if (going.empty()) return false;
    ++chunk_count;
    token_count += tokens_of(*entry);
    return true;
  });
  for (Match& match : going) {
    close(match, chunk_count, token_count);
    ended.push_back(std::move(match));
  }
  std::ranges::sort(ended, std::ranges::greater(), &Match::chunk_count);
  return ended;
}

Run ChunkTable::match_at(Slot slot, Holder tiers, std::string_view keys) const {
  Run run{0, 0, 0};
  visit_entries(keys, [&](std::size_t, const ChunkEntry* entry) {
    if (entry == nullptr || (tiers_of(entry->holders, slot) & tiers) == 0) return false;
    ++run.chunk_count;
    run.token_count += tokens_of(*entry);
    return true;
  });
  return run;
}

std::string ChunkTable::held(Slot slot, Holder tiers, std::string_view keys) const {
  std::string flags(key_count(keys), '\0');
  visit_entries(keys, [&](std::size_t index, const ChunkEntry* entry) {
    flags[index] = entry != nullptr && (tiers_of(entry->holders, slot) & tiers) != 0;
    return true;
  });
  return flags;
}

const std::string* ChunkTable::fingerprint_of(std::string_view key) const {
  const std::string* fingerprint = nullptr;
  visit_entries(key, [&](std::size_t, const ChunkEntry* entry) {
    if (entry && std::ranges::any_of(sets_[entry->holders], [&](Holder holder) { return is_live(holder); })) {
      fingerprint = &specs_[spec_id_of(*entry)].fingerprint;
    }
    return false;
  });
  return fingerprint;
}

std::vector<Part> ChunkTable::scan(std::size_t& cursor, std::size_t limit) const {
  std::vector<Part> parts;
  std::unordered_map<std::uint64_t, std::size_t> part_indices;
  std::size_t seen = 0;
  for (; cursor < shard_count && seen < limit; ++cursor) {
    for (const ChunkEntry& entry : shards_[cursor].places()) {
      for (const Holder holder : sets_[entry.holders]) {
        if (!is_live(holder)) continue;
        for (int tier = 1; tier <= tier_count; ++tier) {
          if ((holder & all_tiers & holder_of(0, tier)) == 0) continue;
          const SpecId spec = spec_id_of(entry);
          const std::uint64_t place = std::uint64_t{holder_of(slot_of(holder), tier)} << 32 | spec;
          const auto [known, is_new] = part_indices.try_emplace(place, parts.size());
          if (is_new) parts.push_back({slot_of(holder), tier, spec, {}});
          append(parts[known->second].keys, entry.key);
          ++seen;
        }
      }
    }
  }
  if (cursor >= shard_count) cursor = 0;
  return parts;
}

std::string ChunkTable::check() const {
  std::vector<std::uint32_t> retained(1);
  std::vector<std::vector<Holding>> holdings(slots_.size());
  std::vector<std::int64_t> chunk_counts(specs_.size());
  std::size_t size = 0;
  for (std::size_t index = 0; index < shard_count; ++index) {
    const ChunkShard& shard = shards_[index];
    std::size_t in_shard = 0;
    for (const ChunkEntry& entry : shard.places()) {
      if (entry.holders == no_holders) continue;
      ++in_shard;
      const std::uint64_t hash = entry.key.hash();
      if (&shard_of(hash) != &shard || shard.find(entry.key, hash) != &entry) return "an entry cannot be found";
      if (sets_[entry.holders].empty()) return "a chunk is kept without a holder";
      if (retained.size() <= entry.holders) retained.resize(entry.holders + 1);
      ++retained[entry.holders];
      if (spec_id_of(entry) >= specs_.size()) return "a chunk has no spec";
      ++chunk_counts[spec_id_of(entry)];
      Slot least = 0;
      for (const Holder holder : sets_[entry.holders]) {
        const Slot slot = slot_of(holder);
        if (slot < least) return "holders are not in order";
        least = slot + 1;
        if (slot >= slots_.size() || slots_[slot].state == SlotState::free) return "a free slot holds a chunk";
        if ((holder & all_tiers) == 0) return "a holder holds a chunk in no tier";
        if (is_retired(holder)) continue;
        for (int tier = 1; tier <= tier_count; ++tier) {
          if ((holder & holder_of(0, tier)) == 0) continue;
          auto& of_slot = holdings[slot];
          auto same = [&](const Holding& one) { return one.tier == tier && one.spec == spec_id_of(entry); };
          auto known = std::ranges::find_if(of_slot, same);
          if (known == of_slot.end()) known = of_slot.insert(known, {tier, spec_id_of(entry), 0, 0});
          ++known->chunk_count;
          known->key_sum += entry.key.head;
        }
      }
    }
    if (in_shard != shard.size()) return "a shard has not the size it says";
    size += in_shard;
  }
  if (size != size_) return "the table has not the size it says";
  std::size_t set_count = 0;
  for (SetId id = 1; id < retained.size(); ++id) {
    if (sets_.retained(id) != retained[id]) return "a set is retained as often as it is not used";
    set_count += retained[id] > 0;
  }
  if (set_count != sets_.size()) return "a set exists that is not used";
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    auto key = [](const Holding& one) { return std::tuple(one.tier, one.spec, one.chunk_count, one.key_sum); };
    auto noted = slots_[slot].holdings;
    std::ranges::sort(noted, {}, key);
    std::ranges::sort(holdings[slot], {}, key);
    if (!std::ranges::equal(noted, holdings[slot], {}, key, key)) return "a slot's holdings are not what it holds";
  }
  for (std::size_t spec = 0; spec < specs_.size(); ++spec) {
    if (specs_[spec].chunk_count != chunk_counts[spec]) return "a spec has not as many chunks as it says";
    const auto known = spec_ids_.find(specs_[spec].fingerprint);
    if (known == spec_ids_.end() || known->second != spec) return "a fingerprint does not lead to its spec";
  }
  return "";
}

// --- Inside -----------------------------------------------------------------------------------------------------------

// The tiers in which a slot holds the chunks of a set.
Holder ChunkTable::tiers_of(SetId set, Slot slot) const {
  const auto holders = sets_[set];
  const auto at = std::ranges::lower_bound(holders, slot, {}, slot_of);
  return at != holders.end() && slot_of(*at) == slot ? *at & all_tiers : 0;
}

// Calls `visit(index, key, hash)` for each key until it answers false.
template <typename Visit>
void ChunkTable::visit_keys(std::string_view keys, Visit visit) const {
  const std::size_t count = key_count(keys);
  const auto prefetch = [&](std::size_t index) {
    const std::uint64_t hash = key_at(keys, index).hash();
    shard_of(hash).prefetch(hash);
  };
  for (std::size_t index = 0; index < std::min(prefetch_distance, count); ++index) prefetch(index);
  for (std::size_t index = 0; index < count; ++index) {
    if (index + prefetch_distance < count) prefetch(index + prefetch_distance);
    const ChunkKey key = key_at(keys, index);
    if (!visit(index, key, key.hash())) return;
  }
}

// Calls `visit(index, entry or null)` for each key until it answers false.
template <typename Visit>
void ChunkTable::visit_entries(std::string_view keys, Visit visit) const {
  visit_keys(keys, [&](std::size_t index, const ChunkKey& key, std::uint64_t hash) {
    return visit(index, static_cast<const ChunkEntry*>(shard_of(hash).find(key, hash)));
  });
}

// Counts one chunk that a slot gained or lost.
void ChunkTable::note(Slot slot, int tier, SpecId spec, const ChunkKey& key, int sign) {
  auto& holdings = slots_[slot].holdings;
  const auto same = [&](const Holding& one) { return one.tier == tier && one.spec == spec; };
  auto known = std::ranges::find_if(holdings, same);
  if (known == holdings.end()) known = holdings.insert(known, {tier, spec, 0, 0});
  known->chunk_count += sign;
  known->key_sum += sign > 0 ? key.head : -key.head;
}

// Housekeeping after a write.
void ChunkTable::finish(Slot slot) {
  std::erase_if(slots_[slot].holdings, [](const Holding& one) { return one.chunk_count == 0; });
  sets_.collect();
}

void ChunkTable::set_holders(ChunkEntry& entry, SetId holders) {
  if (holders != no_holders) sets_.retain(holders);
  if (entry.holders != no_holders) sets_.release(entry.holders);
  entry.holders = holders;
}

}  // namespace lmkv
