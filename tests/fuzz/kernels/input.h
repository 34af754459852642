// Reads values from the bytes of one input; beyond the end all values are zero.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

// Ends the process, which the fuzzer reports with the input, if a promise is broken.
#define PROMISE(condition)                                                   \
  do {                                                                       \
    if (!(condition)) {                                                      \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);   \
      std::abort();                                                          \
    }                                                                        \
  } while (false)

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : at_(data), end_(data + size) {}

  bool is_empty() const { return at_ == end_; }

  template <typename Value>
  Value next() {
    Value value{};
    const std::size_t size = std::min<std::size_t>(sizeof value, end_ - at_);
    if (size > 0) std::memcpy(&value, at_, size);
    at_ += size;
    return value;
  }

  // A number from `low` to `high`.
  std::int64_t number(std::int64_t low, std::int64_t high) { return low + next<std::uint8_t>() % (high - low + 1); }

  std::string_view take(std::size_t size) {
    size = std::min<std::size_t>(size, end_ - at_);
    const std::string_view taken(reinterpret_cast<const char*>(at_), size);
    at_ += size;
    return taken;
  }

  std::string_view rest() { return take(end_ - at_); }

 private:
  const std::uint8_t* at_;
  const std::uint8_t* end_;
};
