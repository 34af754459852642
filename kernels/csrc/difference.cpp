#include "difference.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace lmkv {
namespace {

// The functions below are compiled once for each instruction set, of which the compiler vectorizes the loops over lanes.
#define LMKV_INLINE __attribute__((always_inline)) inline

constexpr int lanes = 32;
// Elements whose squares are summed in float32 before the sum is added to one in float64.
constexpr std::int64_t block = 64 * lanes;
constexpr double infinite = std::numeric_limits<double>::infinity();
constexpr std::uint32_t exponent = 0x7F800000U;

template <Number number>
struct Numbers;

template <>
struct Numbers<Number::bfloat16> {
  using Bits = std::uint16_t;
  LMKV_INLINE static std::uint32_t wide(Bits bits, const float*) { return static_cast<std::uint32_t>(bits) << 16; }
};

template <>
struct Numbers<Number::float16> {
  using Bits = std::uint16_t;
  // The exponents of the two formats differ by 112; that of infinities becomes the highest one.
  LMKV_INLINE static std::uint32_t wide(Bits bits, const float*) {
    const auto magnitude = static_cast<std::uint32_t>(bits & 0x7FFFU) << 13;
    const auto scaled = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112F);
    const std::uint32_t finite = (bits & 0x7C00U) == 0x7C00U ? magnitude | exponent : scaled;
    return finite | static_cast<std::uint32_t>(bits & 0x8000U) << 16;
  }
};

template <>
struct Numbers<Number::float32> {
  using Bits = std::uint32_t;
  LMKV_INLINE static std::uint32_t wide(Bits bits, const float*) { return bits; }
};

template <>
struct Numbers<Number::bytes> {
  using Bits = std::uint8_t;
  LMKV_INLINE static std::uint32_t wide(Bits bits, const float* table) { return std::bit_cast<std::uint32_t>(table[bits]); }
};

LMKV_INLINE std::uint32_t is_special(std::uint32_t wide) { return (wide & exponent) == exponent ? 1U : 0U; }
LMKV_INLINE float finite(std::uint32_t wide) { return std::bit_cast<float>((wide & exponent) == exponent ? 0U : wide); }
LMKV_INLINE float magnitude(float value) { return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) & 0x7FFFFFFFU); }

struct Sums {
  double fresh = 0;
  double difference = 0;
  std::uint32_t mismatches = 0;
};

template <Number number>
LMKV_INLINE void add_squares(const typename Numbers<number>::Bits* fresh, const typename Numbers<number>::Bits* held,
                             std::int64_t count, const float* table, Sums& sums) {
  float own[lanes] = {}, apart[lanes] = {};
  std::uint32_t mismatches[lanes] = {};
  const auto add = [&](std::int64_t at, int lane) __attribute__((always_inline)) {
    const auto one = Numbers<number>::wide(fresh[at], table), other = Numbers<number>::wide(held[at], table);
    mismatches[lane] |= is_special(one) ^ is_special(other);
    const float value = finite(one), difference = value - finite(other);
    own[lane] += value * value;
    apart[lane] += difference * difference;
  };
  std::int64_t at = 0;
  for (; at + lanes <= count; at += lanes) {
    for (int lane = 0; lane < lanes; ++lane) add(at + lane, lane);
  }
  for (; at < count; ++at) add(at, 0);
  for (int lane = 0; lane < lanes; ++lane) {
    sums.fresh += own[lane];
    sums.difference += apart[lane];
    sums.mismatches |= mismatches[lane];
  }
}

template <Number number>
LMKV_INLINE float largest_share(const typename Numbers<number>::Bits* fresh, const typename Numbers<number>::Bits* held,
                                std::int64_t count, const float* table, float size) {
  float most[lanes] = {};
  const auto add = [&](std::int64_t at, int lane) __attribute__((always_inline)) {
    const float value = finite(Numbers<number>::wide(fresh[at], table));
    const float other = finite(Numbers<number>::wide(held[at], table));
    const float own = magnitude(value), theirs = magnitude(other);
    const float share = magnitude(value - other) / ((own < theirs ? own : theirs) + size);
    most[lane] = share > most[lane] ? share : most[lane];
  };
  std::int64_t at = 0;
  for (; at + lanes <= count; at += lanes) {
    for (int lane = 0; lane < lanes; ++lane) add(at + lane, lane);
  }
  for (; at < count; ++at) add(at, 0);
  return *std::max_element(most, most + lanes);
}

template <Number number>
LMKV_INLINE Difference difference_of(const float* table, const std::byte* fresh_bytes, const std::byte* held_bytes,
                                     std::int64_t count) {
  using Bits = typename Numbers<number>::Bits;
  const auto* fresh = reinterpret_cast<const Bits*>(fresh_bytes);
  const auto* held = reinterpret_cast<const Bits*>(held_bytes);
  constexpr double too_large = std::numeric_limits<float>::max();
  Sums sums;
  for (std::int64_t first = 0; first < count; first += block) {
    add_squares<number>(fresh + first, held + first, std::min(block, count - first), table, sums);
  }
  if (sums.mismatches != 0) return {infinite, infinite};
  if (sums.fresh > too_large || sums.difference > too_large) return {infinite, infinite};
  const double size = std::max(std::sqrt(sums.fresh / static_cast<double>(count)),
                               static_cast<double>(std::numeric_limits<float>::min()));
  const double mean = std::sqrt(sums.difference / static_cast<double>(count)) / size;
  return {mean, largest_share<number>(fresh, held, count, table, static_cast<float>(size))};
}

#define LMKV_DIFFERENCE(space, target)                                                                               \
  namespace space {                                                                                                  \
  target Difference difference(Number number, const float* table, const std::byte* fresh, const std::byte* held,     \
                               std::int64_t count) {                                                                 \
    switch (number) {                                                                                                \
      case Number::bfloat16: return difference_of<Number::bfloat16>(table, fresh, held, count);                      \
      case Number::float16: return difference_of<Number::float16>(table, fresh, held, count);                        \
      case Number::float32: return difference_of<Number::float32>(table, fresh, held, count);                        \
      case Number::bytes: return difference_of<Number::bytes>(table, fresh, held, count);                            \
    }                                                                                                                \
    return {infinite, infinite};                                                                                     \
  }                                                                                                                  \
  }

LMKV_DIFFERENCE(portable, )
#if defined(__x86_64__)
LMKV_DIFFERENCE(avx2, __attribute__((target("avx2"))))
LMKV_DIFFERENCE(avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512"))))
#endif

}  // namespace

Difference portable_difference(Number number, const float* table, const std::byte* fresh, const std::byte* held,
                               std::int64_t count) {
  return portable::difference(number, table, fresh, held, count);
}

Differ best_differ() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return avx512::difference;
  }
  if (__builtin_cpu_supports("avx2")) return avx2::difference;
#endif
  return portable::difference;
}

}  // namespace lmkv
