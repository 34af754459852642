// Token ids of JSON text: as a plain parser reads them, or refused with a short reason; nothing beyond the text is read.
#include <algorithm>

#include "token_ids.h"

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "input.h"

namespace {

bool is_space(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }

// The grammar: "[" (number ("," number)*)? "]", with spaces anywhere between.
std::optional<std::vector<std::uint32_t>> plain(std::string_view text) {
  std::size_t at = 0;
  const auto skip = [&] { while (at < text.size() && is_space(text[at])) ++at; };
  const auto take = [&](char c) { skip(); return at < text.size() && text[at] == c ? (++at, true) : false; };
  std::vector<std::uint32_t> ids;
  if (!take('[')) return {};
  if (!take(']')) {
    do {
      skip();
      std::size_t end = at;
      while (end < text.size() && text[end] >= '0' && text[end] <= '9') ++end;
      const std::string digits(text.substr(at, end - at));
      if (digits.empty() || digits.size() > 10 || (digits.size() > 1 && digits[0] == '0')) return {};
      const unsigned long long value = std::stoull(digits);
      if (value > 0xffffffffull) return {};
      ids.push_back(static_cast<std::uint32_t>(value));
      at = end;
    } while (take(','));
    if (!take(']')) return {};
  }
  skip();
  if (at != text.size()) return {};
  return ids;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto copy = std::make_unique<char[]>(size);  // exactly as long: a read beyond it is found
  std::copy_n(data, size, copy.get());
  const std::string_view text(copy.get(), size);
  const auto expected = plain(text);
  try {
    const auto found = lmkv::token_ids(text);
    PROMISE(expected && found == *expected);
  } catch (const std::invalid_argument& error) {
    PROMISE(!expected);
    PROMISE(std::string_view(error.what()).size() < 200);
  }
  return 0;
}
