// The keys of a prompt's chunks, as lmkv/keys.py defines them, for chunks without extras.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace lmkv {

using KeyBytes = std::array<std::uint8_t, 16>;

// One key per chunk of `chunk_size` tokens, and one for the tokens after the full chunks.
std::vector<KeyBytes> chunk_keys(std::span<const std::uint32_t> tokens, const KeyBytes& root, std::size_t chunk_size,
                                 bool portable);

}  // namespace lmkv
