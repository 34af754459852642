#include "token_ids.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace lmkv {
namespace {

constexpr std::ptrdiff_t max_digits = 10;
constexpr std::ptrdiff_t max_shown = 20;

// The number that eight characters begin with, and how many of them are digits. Without a branch per digit, for their
// count is what no processor can predict: the digits are shifted to the end, and then added in pairs, fours and eights.
struct Eight {
  explicit Eight(const char* text) {
    std::uint64_t values;
    std::memcpy(&values, text, sizeof values);
    values ^= 0x3030303030303030;  // digits are now 0 to 9, in the order of the text from the lowest byte
    const std::uint64_t others = (values | (values + 0x7676767676767676)) & 0x8080808080808080;
    digits = std::countr_zero(others) / 8;
    if (digits == 0) return;
    values <<= 64 - 8 * digits;
    values = (values * 10 + (values >> 8)) & 0x00ff00ff00ff00ff;
    values = (values * 100 + (values >> 16)) & 0x0000ffff0000ffff;
    value = static_cast<std::uint32_t>(values * 10000 + (values >> 32));
  }

  int digits;
  std::uint32_t value = 0;
};
static_assert(std::endian::native == std::endian::little);

class Reader {
 public:
  explicit Reader(std::string_view text) : begin_(text.data()), at_(text.data()), end_(text.data() + text.size()) {}

  std::vector<std::uint32_t> list() {
    std::vector<std::uint32_t> ids;
    ids.reserve((end_ - at_) / 4);
    take('[');
    if (!next_is(']')) {
      do {
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

  std::uint32_t number() {
    skip_spaces();
    const char* first = at_;
    if (end_ - at_ > 8) {
      const Eight eight(at_);
      const bool is_whole = at_[eight.digits] == ',' || at_[eight.digits] == ' ';
      if (is_whole && (eight.digits == 1 || (eight.digits > 1 && *at_ != '0'))) {
        at_ += eight.digits;
        return eight.value;
      }
    }
    std::uint64_t value = 0;
    while (at_ != end_ && *at_ >= '0' && *at_ <= '9' && at_ - first <= max_digits) {
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
