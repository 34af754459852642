// SHA-256 and chunk keys: with and without the processor's instructions, and in any parts, the result is the same.
#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "chunk_keys.h"
#include "input.h"
#include "sha256.h"

namespace {

lmkv::Sha256::Digest digest_of(std::span<const std::uint8_t> bytes, bool portable, std::size_t part) {
  lmkv::Sha256 hash(portable);
  for (std::size_t at = 0; at < bytes.size(); at += part) hash.update(bytes.subspan(at, std::min(part, bytes.size() - at)));
  return hash.finish();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  const auto part = static_cast<std::size_t>(input.number(1, 200));
  const auto chunk_size = static_cast<std::size_t>(input.number(1, 64));
  const auto root = input.next<lmkv::KeyBytes>();
  const auto text = input.rest();
  const auto bytes = std::make_unique<std::uint8_t[]>(text.size());
  std::copy(text.begin(), text.end(), bytes.get());
  const std::span<const std::uint8_t> all(bytes.get(), text.size());
  const auto whole = digest_of(all, true, text.size() + 1);
  PROMISE(digest_of(all, false, text.size() + 1) == whole);
  PROMISE(digest_of(all, false, part) == whole);
  PROMISE(digest_of(all, true, part) == whole);

  std::vector<std::uint32_t> tokens(text.size() / 4);
  if (!tokens.empty()) std::memcpy(tokens.data(), text.data(), tokens.size() * 4);
  const auto keys = lmkv::chunk_keys(tokens, root, chunk_size, false);
  PROMISE(keys == lmkv::chunk_keys(tokens, root, chunk_size, true));
  PROMISE(keys.size() == (tokens.size() + chunk_size - 1) / chunk_size);
  auto parent = root;
  for (std::size_t index = 0; index < keys.size(); ++index) {
    std::vector<std::uint8_t> hashed(parent.begin(), parent.end());
    const std::size_t first = index * chunk_size, last = std::min(tokens.size(), first + chunk_size);
    const auto* const own = reinterpret_cast<const std::uint8_t*>(tokens.data());
    hashed.insert(hashed.end(), own + 4 * first, own + 4 * last);
    const auto expected = digest_of(hashed, true, hashed.size());
    PROMISE(std::equal(keys[index].begin(), keys[index].end(), expected.begin()));
    parent = keys[index];
  }
  return 0;
}
