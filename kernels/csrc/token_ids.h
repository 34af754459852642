// Token ids out of JSON text: a hundred thousand of them are no reason to make a hundred thousand Python objects.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace lmkv {

// The numbers in a JSON list of whole numbers from 0 to 2^32 - 1. Throws std::invalid_argument that says what is wrong.
std::vector<std::uint32_t> token_ids(std::string_view json);

}  // namespace lmkv
