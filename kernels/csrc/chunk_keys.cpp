#include "chunk_keys.h"

#include <algorithm>
#include <bit>

#include "sha256.h"

namespace lmkv {

static_assert(std::endian::native == std::endian::little, "tokens are hashed as they lie in memory");

std::vector<KeyBytes> chunk_keys(std::span<const std::uint32_t> tokens, const KeyBytes& root, std::size_t chunk_size,
                                 bool portable) {
  std::vector<KeyBytes> keys;
  keys.reserve(tokens.size() / chunk_size + 1);
  KeyBytes parent = root;
  for (; !tokens.empty(); tokens = tokens.subspan(std::min(chunk_size, tokens.size()))) {
    const auto chunk = tokens.first(std::min(chunk_size, tokens.size()));
    Sha256 hash(portable);
    hash.update(parent);
    hash.update({reinterpret_cast<const std::uint8_t*>(chunk.data()), chunk.size_bytes()});
    const Sha256::Digest digest = hash.finish();
    std::copy_n(digest.begin(), parent.size(), parent.begin());
    keys.push_back(parent);
  }
  return keys;
}

}  // namespace lmkv
