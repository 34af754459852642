#include "token_ids.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace lmkv {
namespace {

constexpr std::ptrdiff_t max_digits = 10;
constexpr std::ptrdiff_t max_shown = 20;
constexpr std::ptrdiff_t block_bytes = 64;
static_assert(std::endian::native == std::endian::little);

bool is_digit(char character) { return character >= '0' && character <= '9'; }

// Bit mask of the digits in a block of 64 characters; the first character is the lowest bit.
std::uint64_t digits_of(const char* block) {
  std::uint64_t digits = 0;
#if defined(__SSE2__)
  for (int at = 0; at < block_bytes; at += 16) {
    const __m128i characters = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block + at));
    const __m128i values = _mm_sub_epi8(characters, _mm_set1_epi8('0'));
    const __m128i are_digits = _mm_cmpeq_epi8(values, _mm_min_epu8(values, _mm_set1_epi8(9)));
    digits |= std::uint64_t{static_cast<std::uint32_t>(_mm_movemask_epi8(are_digits))} << at;
  }
#else
  for (int at = 0; at < block_bytes; ++at) digits |= std::uint64_t{is_digit(block[at])} << at;
#endif
  return digits;
}

// Parses 1 to 8 digits: shifts them to the end, then adds them in pairs, fours and eights.
std::uint32_t number_of(const char* text, int digits) {
  std::uint64_t values;
  std::memcpy(&values, text, sizeof values);
  values = (values & 0x0f0f0f0f0f0f0f0f) << (64 - 8 * digits);
  values = (values * 10 + (values >> 8)) & 0x00ff00ff00ff00ff;
  values = (values * 100 + (values >> 16)) & 0x0000ffff0000ffff;
  return static_cast<std::uint32_t>(values * 10000 + (values >> 32));
}

class Reader {
 public:
  explicit Reader(std::string_view text) : begin_(text.data()), at_(text.data()), end_(text.data() + text.size()) {}

  std::vector<std::uint32_t> list() {
    std::vector<std::uint32_t> ids;
    ids.reserve((end_ - at_) / 4);
    take('[');
    if (!next_is(']')) {
      do {
        skip_spaces();
        read_plain(ids);
        ids.push_back(number());
      } while (next_is(','));
      take(']');
    }
    skip_spaces();
    if (at_ != end_) refuse("nothing may follow the list");
    return ids;
  }

 private:
  void skip_spaces() {
    while (at_ != end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r')) ++at_;
  }

  bool next_is(char expected) {
    skip_spaces();
    if (at_ == end_ || *at_ != expected) return false;
    ++at_;
    return true;
  }

  void take(char expected) {
    if (!next_is(expected)) refuse(std::string("expected '") + expected + "'");
  }

  // Fast path: numbers that are separated by a comma and at most one space. Their limits are found for a whole block at
  // once, because branches on the length of a number cannot be predicted.
  void read_plain(std::vector<std::uint32_t>& ids) {
    while (end_ - at_ >= block_bytes + 8 && is_digit(*at_)) {
      const std::uint64_t digits = digits_of(at_);
      std::uint64_t begins = digits & ~(digits << 1);
      std::uint64_t ends = ~digits & (digits << 1);
      int begin = 0;
      while (begins &= begins - 1) {  // the last one of a block begins the next block
        const int end = std::countr_zero(ends);
        const int next = std::countr_zero(begins);
        const bool is_number = end - begin <= 8 && (at_[begin] != '0' || end - begin == 1);
        const bool is_followed = at_[end] == ',' && (next == end + 1 || (next == end + 2 && at_[end + 1] == ' '));
        if (!is_number || !is_followed) break;
        ids.push_back(number_of(at_ + begin, end - begin));
        ends &= ends - 1;
        begin = next;
      }
      at_ += begin;
      if (begin == 0) return;
    }
  }

  std::uint32_t number() {
    skip_spaces();
    const char* first = at_;
    std::uint64_t value = 0;
    while (at_ != end_ && is_digit(*at_) && at_ - first <= max_digits) {
      value = value * 10 + static_cast<std::uint64_t>(*at_++ - '0');
    }
    const std::ptrdiff_t digits = at_ - first;
    if (!digits || (digits > 1 && *first == '0') || value > std::numeric_limits<std::uint32_t>::max() ||
        (at_ != end_ && (*at_ == '.' || *at_ == 'e' || *at_ == 'E'))) {
      at_ = first;
      refuse("expected a whole number from 0 to 4294967295");
    }
    return static_cast<std::uint32_t>(value);
  }

  [[noreturn]] void refuse(const std::string& why) const {
    const char* stop = std::find_if(at_, at_ + std::min(end_ - at_, max_shown),
                                    [](char c) { return c < ' ' || c > '~'; });
    throw std::invalid_argument(why + " at byte " + std::to_string(at_ - begin_) + ", not '" + std::string(at_, stop) +
                                "'");
  }

  const char* begin_;
  const char* at_;
  const char* end_;
};

}  // namespace

std::vector<std::uint32_t> token_ids(std::string_view json) { return Reader(json).list(); }

}  // namespace lmkv
