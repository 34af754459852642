// The layout of KV in pages and chunks, and the checksum of a word: arithmetic that host and device code share.
//
//   pages of a rank    layer base + block id * block stride + head * head stride
//                      + part offset + row of the block * row stride + element * element stride
//   chunk              [layer][kv head of the model][part][row][element], from its extent's offset in the pool
//
// A row is one token's data in one part of one head: its key, its value, or its MLA latent. An opaque block of one head
// is one part of one row. Callers have checked all numbers.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define LMKV_HOST_DEVICE __host__ __device__
#else
#define LMKV_HOST_DEVICE
#endif

namespace lmkv {

constexpr int max_parts = 2;

// Offset and strides of one part's rows within a block of one head, in bytes.
struct Part {
  std::int64_t offset;
  std::int64_t row_stride;
  std::int64_t element_stride;
};

// The KV-cache pages of one tensor-parallel rank; the same in all its layers.
struct Pages {
  std::int64_t layer_count;
  std::int64_t block_stride_bytes;
  std::int64_t head_stride_bytes;
  std::int64_t rows_per_block;
  std::int64_t row_bytes;
  std::int64_t element_bytes;
  std::int64_t head_count;     // of this rank
  std::int64_t first_head;     // its first, counted over the heads of all layers of a chunk
  std::int64_t kv_head_count;  // of the model
  std::int64_t part_count;
  Part parts[max_parts];
};

// Rows to copy between the pages and one chunk. They are consecutive in the blocks: `first_row` of the chunk is row
// `first_slot` of the first block. The block ids begin at `first_id` of the call's list.
struct ChunkCopy {
  std::int64_t offset;       // of the chunk's extent in the pool, bytes
  std::int64_t extent_rows;  // rows of the whole chunk
  std::int64_t first_row;    // first row of the chunk to copy
  std::int64_t row_count;
  std::int64_t first_slot;
  std::int64_t first_id;
};

// One block of one head and layer: the unit of work. Numbered in the order in which a chunk holds them.
struct Tile {
  std::int64_t layer;
  std::int64_t head;   // of this rank
  std::int64_t block;  // of the copy
};

// The rows of a copy that one of its blocks holds.
struct Rows {
  std::int64_t in_block;  // the first of them, counted in the block
  std::int64_t in_chunk;  // and in the chunk
  std::int64_t count;
};

LMKV_HOST_DEVICE inline std::int64_t block_count(const Pages& pages, const ChunkCopy& copy) {
  return (copy.first_slot + copy.row_count + pages.rows_per_block - 1) / pages.rows_per_block;
}

// The tiles of a copy by number, in the order of the chunk.
LMKV_HOST_DEVICE inline Tile tile_in_chunk(const Pages& pages, const ChunkCopy& copy, std::int64_t index) {
  const std::int64_t blocks = block_count(pages, copy);
  const std::int64_t run = index / blocks;
  return {run / pages.head_count, run % pages.head_count, index % blocks};
}

// The tiles of a copy by number, in the order of most pages.
LMKV_HOST_DEVICE inline Tile tile_in_pages(const Pages& pages, const ChunkCopy& copy, std::int64_t index) {
  const std::int64_t blocks = block_count(pages, copy);
  const std::int64_t run = index / pages.head_count;
  return {run / blocks, index % pages.head_count, run % blocks};
}

LMKV_HOST_DEVICE inline Rows rows_of(const Pages& pages, const ChunkCopy& copy, std::int64_t block) {
  const std::int64_t begin = block * pages.rows_per_block;
  const std::int64_t end = begin + pages.rows_per_block;
  const std::int64_t last_slot = copy.first_slot + copy.row_count;
  const std::int64_t first = begin > copy.first_slot ? begin : copy.first_slot;
  const std::int64_t stop = end < last_slot ? end : last_slot;
  return {first - begin, copy.first_row + first - copy.first_slot, stop - first};
}

// Bytes from a layer's base address to a row's first element.
LMKV_HOST_DEVICE inline std::int64_t page_offset(const Pages& pages, const Part& part, std::int64_t block_id,
                                                 std::int64_t head, std::int64_t row) {
  return block_id * pages.block_stride_bytes + head * pages.head_stride_bytes + part.offset + row * part.row_stride;
}

// Bytes from the start of the chunk to a row.
LMKV_HOST_DEVICE inline std::int64_t chunk_offset(const Pages& pages, const ChunkCopy& copy, const Tile& tile,
                                                  std::int64_t part, std::int64_t row) {
  const std::int64_t head = tile.layer * pages.kv_head_count + pages.first_head + tile.head;
  return ((head * pages.part_count + part) * copy.extent_rows + row) * pages.row_bytes;
}

// The two keys of a word by its index in the chunk, one in each half; they are added to the halves of the word.
LMKV_HOST_DEVICE constexpr std::uint64_t word_key(std::uint64_t index) {
  const auto position = static_cast<std::uint32_t>(index + 1);
  return static_cast<std::uint64_t>(position * 0x85EBCA77U) << 32 | (position * 0x9E3779B1U);
}

// What one word adds to the checksum (docs/contribute/checksum.md).
LMKV_HOST_DEVICE inline std::uint64_t word_sum(std::uint64_t word, std::uint64_t key) {
  const auto low = static_cast<std::uint32_t>(word) + static_cast<std::uint32_t>(key);
  const auto high = static_cast<std::uint32_t>(word >> 32) + static_cast<std::uint32_t>(key >> 32);
  return word + static_cast<std::uint64_t>(low) * high;
}

}  // namespace lmkv
