// A shard of the chunk table: a hash table with open addressing that grows and shrinks in small steps.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <span>

#include "holder_sets.h"

namespace lmkv {

// A chunk key; its first eight bytes are also used in digests.
struct ChunkKey {
  std::uint64_t head;
  std::uint64_t tail;

  bool operator==(const ChunkKey&) const = default;

  // Keys are digests, but a node may send arbitrary ones.
  std::uint64_t hash() const {
    const std::uint64_t mixed = (head ^ tail >> 32) * 0x9E3779B97F4A7C15u;
    return (mixed ^ mixed >> 29 ^ tail) * 0xBF58476D1CE4E5B9u;
  }
};

// 24 bytes per chunk. An entry without holders is free.
struct ChunkEntry {
  ChunkKey key;
  std::uint32_t info;  // tokens in the low 20 bits, index of the spec above
  SetId holders;
};

class ChunkShard {
 public:
  // The entry of a key, or null. Valid until something is inserted or erased.
  ChunkEntry* find(const ChunkKey& key, std::uint64_t hash) const;

  // The entry of a key; a new one has no holders, and must be given some before the next call.
  ChunkEntry& find_or_insert(const ChunkKey& key, std::uint64_t hash);

  void erase(ChunkEntry* entry);

  // Drops the entries without holders; `dropped` is their number.
  void rebuild_without(std::uint32_t dropped);

  void prefetch(std::uint64_t hash) const {
    if (capacity_ > 0) __builtin_prefetch(&entries_[home(hash)]);
  }

  // All entries, including free ones.
  std::span<ChunkEntry> places() const { return {entries_.get(), capacity_}; }
  std::uint32_t size() const { return size_; }

 private:
  std::uint32_t home(std::uint64_t hash) const {
    return static_cast<std::uint32_t>((hash & 0xFFFFFFFFu) * capacity_ >> 32);
  }
  std::uint32_t after(std::uint32_t place) const { return place + 1 == capacity_ ? 0 : place + 1; }
  std::uint32_t find_place(const ChunkKey& key, std::uint64_t hash) const;
  void resize(std::uint32_t capacity);

  std::unique_ptr<ChunkEntry[]> entries_;
  std::uint32_t size_ = 0;
  std::uint32_t capacity_ = 0;
};

}  // namespace lmkv
