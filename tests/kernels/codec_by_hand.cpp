// Encodes and decodes elements from stdin with the portable functions, for processors that the tests do not run on:
// ELEMENT CODE PLANE GROUP COUNT.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "codec.h"

int main(int, char** words) {
  const lmkv::CodecFormat format{static_cast<lmkv::Element>(std::atoi(words[1])),
                                 static_cast<lmkv::Code>(std::atoi(words[2])), std::atoll(words[3]), std::atoll(words[4])};
  const auto count = std::atoll(words[5]);
  std::vector<std::byte> chunk(count * lmkv::element_bytes(format.element)), encoded(lmkv::encoded_bytes(format, count));
  if (std::fread(chunk.data(), 1, chunk.size(), stdin) != chunk.size()) return 1;
  if (!lmkv::best_codec().encode(format, chunk.data(), count, encoded.data())) return 2;
  lmkv::best_codec().decode(format, encoded.data(), count, chunk.data());
  std::fwrite(encoded.data(), 1, encoded.size(), stdout);
  std::fwrite(chunk.data(), 1, chunk.size(), stdout);
}
