// Parses token ids from JSON text, without a Python object per number.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace lmkv {

// The integers of a JSON list, from 0 to 2^32 - 1. Throws std::invalid_argument with the reason.
std::vector<std::uint32_t> token_ids(std::string_view json);

}  // namespace lmkv
