// The difference between two computations of the KV of a layer, in two passes over both.
//
//   mean   root mean square of the differences, as a share of `size`
//   most   the largest difference, as a share of the smaller magnitude of both values and `size`
//   size   root mean square of the fresh values
//
// Both are infinite if a number is finite in one of them only, or a sum of squares is too large for float32. Elements that
// are finite in neither count as zeros.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lmkv {

// bytes: elements of one byte, whose values a table has.
enum class Number : int { bfloat16, float16, float32, bytes };

struct Difference {
  double mean;
  double most;
};

using Differ = Difference (*)(Number number, const float* table, const std::byte* fresh, const std::byte* held,
                              std::int64_t count);

Difference portable_difference(Number number, const float* table, const std::byte* fresh, const std::byte* held,
                               std::int64_t count);

// The fastest function that this processor supports. Sums have another order in each: their last digits differ.
Differ best_differ();

}  // namespace lmkv
