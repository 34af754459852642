// Transposes rows whose elements are not contiguous: vLLM's CPU attention stores keys with the tokens innermost.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace lmkv {

// Rows whose first elements are contiguous, as are their second ones, at a stride in bytes.
struct Transposed {
  std::byte* first;
  std::int64_t element_stride;
  std::int64_t element_bytes;  // 1, 2, 4 or 8
};

// Copies `row_count` rows from `first_row` on to `target`, where they are contiguous.
void read_rows(const Transposed& rows, std::int64_t first_row, std::int64_t row_count, std::int64_t row_bytes,
               std::byte* target);

// The inverse, from row 0 on.
void write_rows(const Transposed& rows, std::int64_t row_count, std::int64_t row_bytes, const std::byte* source);

// Calls `work(scratch, first row, row count)` for as many rows at a time as fit into a scratch that stays in the
// first-level cache. A row is smaller than that.
template <typename Work>
void for_each_piece(std::int64_t row_bytes, std::int64_t row_count, Work work) {
  constexpr std::int64_t scratch_bytes = 16 << 10;
  alignas(64) std::byte scratch[scratch_bytes];
  const std::int64_t step = scratch_bytes / row_bytes;
  for (std::int64_t row = 0; row < row_count; row += step) work(scratch, row, std::min(step, row_count - row));
}

}  // namespace lmkv
