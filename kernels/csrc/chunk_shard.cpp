#include "chunk_shard.h"

#include <algorithm>
#include <utility>

namespace lmkv {
namespace {

// Between half and four fifths full: 30 to 45 bytes per chunk.
constexpr std::uint32_t min_capacity = 4;
constexpr std::uint32_t fill_limit(std::uint32_t capacity) { return capacity - (capacity + 4) / 5; }
constexpr std::uint32_t grown(std::uint32_t capacity) { return std::max(min_capacity, capacity + capacity / 2); }
constexpr std::uint32_t capacity_for(std::uint32_t size) {
  return size == 0 ? 0 : std::max(min_capacity, size + size / 2);
}

}  // namespace

// The slot of a key, or the free slot for it, which exists because a shard is never full.
std::uint32_t ChunkShard::find_place(const ChunkKey& key, std::uint64_t hash) const {
  std::uint32_t place = home(hash);
  while (entries_[place].holders != no_holders && entries_[place].key != key) place = after(place);
  return place;
}

ChunkEntry* ChunkShard::find(const ChunkKey& key, std::uint64_t hash) const {
  if (size_ == 0) return nullptr;
  ChunkEntry& entry = entries_[find_place(key, hash)];
  return entry.holders == no_holders ? nullptr : &entry;
}

ChunkEntry& ChunkShard::find_or_insert(const ChunkKey& key, std::uint64_t hash) {
  if (ChunkEntry* const known = find(key, hash)) return *known;
  if (size_ >= fill_limit(capacity_)) resize(grown(capacity_));
  ChunkEntry& entry = entries_[find_place(key, hash)];
  entry.key = key;
  ++size_;
  return entry;
}

void ChunkShard::erase(ChunkEntry* entry) {
  // Backward-shift deletion: following entries move up, so there are no tombstones and searches stay short.
  auto hole = static_cast<std::uint32_t>(entry - entries_.get());
  for (std::uint32_t place = after(hole); entries_[place].holders != no_holders; place = after(place)) {
    const std::uint32_t wanted = home(entries_[place].key.hash());
    const bool stays = hole < place ? hole < wanted && wanted <= place : hole < wanted || wanted <= place;
    if (stays) continue;
    entries_[hole] = entries_[place];
    hole = place;
  }
  entries_[hole].holders = no_holders;
  --size_;
  if (capacity_ > min_capacity && size_ < capacity_ / 4) resize(capacity_for(size_));
}

void ChunkShard::rebuild_without(std::uint32_t dropped) {
  size_ -= dropped;
  resize(capacity_for(size_));
}

void ChunkShard::resize(std::uint32_t capacity) {
  const std::unique_ptr<ChunkEntry[]> old = std::move(entries_);
  const std::uint32_t old_capacity = std::exchange(capacity_, capacity);
  entries_ = capacity ? std::make_unique<ChunkEntry[]>(capacity) : nullptr;
  for (std::uint32_t place = 0; place < old_capacity; ++place) {
    const ChunkEntry& entry = old[place];
    if (entry.holders != no_holders) entries_[find_place(entry.key, entry.key.hash())] = entry;
  }
}

}  // namespace lmkv
