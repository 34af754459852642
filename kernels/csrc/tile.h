// Copying and summing one run of bytes, as fast as this processor can.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lmkv {

// One instruction set's way. Sizes are multiples of 8; `first_word` is the index in the chunk of the first word.
// Stores may bypass the caches: `publish` must come between the last of them and whatever tells others of them.
struct TileKernels {
  const char* isa;
  std::uint64_t (*gather)(const std::byte* source, std::byte* target, std::size_t size_bytes, std::uint64_t first_word);
  void (*scatter)(const std::byte* source, std::byte* target, std::size_t size_bytes);
  std::uint64_t (*checksum)(const std::byte* source, std::size_t size_bytes, std::uint64_t first_word);
  void (*publish)();
};

// Runs everywhere.
const TileKernels& portable_kernels();

// The fastest that this processor runs.
const TileKernels& best_kernels();

}  // namespace lmkv
