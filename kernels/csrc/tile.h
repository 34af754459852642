// Copies and checksums of rows, optimized for the instruction set of this processor.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lmkv {

// The functions for one instruction set. Rows are multiples of 8 bytes; strides are between rows. `gather` also
// computes the checksum: its rows are contiguous in the chunk, and `first_word` is the index of their first word there.
// Stores may bypass the caches: `publish` must be called after the last one, before other threads or processes read.
struct TileKernels {
  const char* isa;
  std::uint64_t (*gather)(const std::byte* pages, std::int64_t stride_bytes, std::byte* chunk, std::int64_t row_bytes,
                          std::int64_t row_count, std::uint64_t first_word);
  std::uint64_t (*gather_unsummed)(const std::byte* pages, std::int64_t stride_bytes, std::byte* chunk,
                                   std::int64_t row_bytes, std::int64_t row_count, std::uint64_t first_word);  // 0
  void (*copy)(const std::byte* source, std::int64_t source_stride, std::byte* target, std::int64_t target_stride,
               std::int64_t row_bytes, std::int64_t row_count);
  std::uint64_t (*checksum)(const std::byte* chunk, std::size_t size_bytes, std::uint64_t first_word);
  void (*publish)();
};

// Portable functions.
const TileKernels& portable_kernels();

// The fastest functions that this processor supports.
const TileKernels& best_kernels();

}  // namespace lmkv
