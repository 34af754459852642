// Where tiles lie in pages and in chunks, and how their words are summed: arithmetic that host and device code share.
//
//   pages of a rank    layer base + block id * block stride + head * head stride      -> tile
//   chunk              [layer][kv head of the model][block][tile], from its extent's offset in the pool
//
// A tile is one KV-cache block of one head and is moved whole. Wrappers have checked every number before it gets here.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define LMKV_HOST_DEVICE __host__ __device__
#else
#define LMKV_HOST_DEVICE
#endif

namespace lmkv {

// The KV-cache pages of one tensor-parallel rank; the same in all its layers.
struct Pages {
  std::int64_t layer_count;
  std::int64_t block_stride_bytes;
  std::int64_t head_stride_bytes;
  std::int64_t tile_bytes;
  std::int64_t head_count;     // of this rank
  std::int64_t first_head;     // its first, counted over the model
  std::int64_t kv_head_count;  // of the model
};

// Some blocks between the pages and one chunk. Its block ids are `block_count` of the call's list, from `first_id`.
struct BlockCopy {
  std::int64_t offset;              // of the chunk's extent in the pool, bytes
  std::int64_t extent_block_count;  // blocks of the whole chunk
  std::int64_t first_block;         // first block of the chunk to copy
  std::int64_t block_count;
  std::int64_t first_id;
};

// One tile of a copy, numbered in the order in which the chunk holds them.
struct TilePlace {
  std::int64_t layer;
  std::int64_t head;  // of this rank
  std::int64_t block;  // of the copy
};

LMKV_HOST_DEVICE inline TilePlace tile_place(const Pages& pages, const BlockCopy& copy, std::int64_t tile) {
  const std::int64_t run = tile / copy.block_count;
  return {run / pages.head_count, run % pages.head_count, tile % copy.block_count};
}

// Bytes from a layer's base address.
LMKV_HOST_DEVICE inline std::int64_t page_offset(const Pages& pages, std::int64_t block_id, std::int64_t head) {
  return block_id * pages.block_stride_bytes + head * pages.head_stride_bytes;
}

// Bytes from the start of the chunk.
LMKV_HOST_DEVICE inline std::int64_t chunk_offset(const Pages& pages, const BlockCopy& copy, const TilePlace& place) {
  const std::int64_t head = place.layer * pages.kv_head_count + pages.first_head + place.head;
  return (head * copy.extent_block_count + copy.first_block + place.block) * pages.tile_bytes;
}

// The two keys of a word by its index in the chunk, one in each half: they are added to the word's halves.
LMKV_HOST_DEVICE inline std::uint64_t word_key(std::uint64_t index) {
  const auto position = static_cast<std::uint32_t>(index + 1);
  return static_cast<std::uint64_t>(position * 0x85EBCA77U) << 32 | (position * 0x9E3779B1U);
}

// What one word adds to the checksum (docs/checksum.md).
LMKV_HOST_DEVICE inline std::uint64_t word_sum(std::uint64_t word, std::uint64_t key) {
  const auto low = static_cast<std::uint32_t>(word) + static_cast<std::uint32_t>(key);
  const auto high = static_cast<std::uint32_t>(word >> 32) + static_cast<std::uint32_t>(key >> 32);
  return word + static_cast<std::uint64_t>(low) * high;
}

}  // namespace lmkv
