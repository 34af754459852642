// Copying and summing rows of bytes, as fast as this processor can.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lmkv {

// One instruction set's way. Rows are multiples of 8 bytes, strides go from one row to the next. `gather` also sums; in
// the chunk its rows lie side by side, and `first_word` is the index there of the first row's first word. Stores may bypass
// the caches: `publish` must come between the last of them and whatever tells others of them.
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

// Runs everywhere.
const TileKernels& portable_kernels();

// The fastest that this processor runs.
const TileKernels& best_kernels();

}  // namespace lmkv
