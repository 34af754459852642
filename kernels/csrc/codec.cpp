#include "codec.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>

namespace lmkv {
namespace {

// Each function below is compiled once for each instruction set, of which the compiler vectorizes the loops: on aarch64
// the portable ones by NEON, which `tests/kernels/test_codecs_aarch64.py` sees to. They use integers where
// floating-point comparisons would keep it from that.
#define LMKV_INLINE __attribute__((always_inline)) inline

// Magnitudes from here on cannot be scaled without an overflow; infinities and NaNs are among them.
constexpr float largest = 0x1p126F;
// Groups of smaller magnitudes are encoded as zeros: their reciprocals would overflow.
constexpr float least = 0x1p-100F;

template <Element element>
struct Elements;

template <>
struct Elements<Element::bfloat16> {
  using Bits = std::uint16_t;
  static constexpr Bits too_large = std::bit_cast<std::uint32_t>(largest) >> 16;
  LMKV_INLINE static float value(Bits bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
  LMKV_INLINE static Bits bits(float value) {
    const auto whole = std::bit_cast<std::uint32_t>(value);
    return static_cast<Bits>((whole + 0x7FFFU + ((whole >> 16) & 1U)) >> 16);
  }
};

template <>
struct Elements<Element::float16> {
  using Bits = std::uint16_t;
  static constexpr Bits too_large = 0x7C00;
  // The exponents of the two formats differ by 112.
  LMKV_INLINE static float value(Bits bits) {
    const auto magnitude = std::bit_cast<float>(static_cast<std::uint32_t>(bits & 0x7FFFU) << 13) * 0x1p112F;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) |
                                (static_cast<std::uint32_t>(bits & 0x8000U) << 16));
  }
  LMKV_INLINE static Bits bits(float value) {
    const auto sign = (std::bit_cast<std::uint32_t>(value) >> 16) & 0x8000U;
    const auto whole = std::bit_cast<std::uint32_t>(value * 0x1p-112F) & 0x7FFFFFFFU;
    return static_cast<Bits>(((whole + 0xFFFU + ((whole >> 13) & 1U)) >> 13) | sign);
  }
};

template <>
struct Elements<Element::float32> {
  using Bits = std::uint32_t;
  static constexpr Bits too_large = std::bit_cast<std::uint32_t>(largest);
  LMKV_INLINE static float value(Bits bits) { return std::bit_cast<float>(bits); }
  LMKV_INLINE static Bits bits(float value) { return std::bit_cast<std::uint32_t>(value); }
};

// The greatest magnitude's bits.
template <typename Bits>
LMKV_INLINE Bits greatest_magnitude(const Bits* source, std::int64_t count) {
  constexpr Bits magnitude = std::numeric_limits<Bits>::max() >> 1;
  Bits most = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const Bits bits = source[i] & magnitude;
    most = bits > most ? bits : most;
  }
  return most;
}

// Rounds to the nearest integer, ties to even: the low bits of the result are those of the integer.
LMKV_INLINE std::uint32_t rounded(float value) { return std::bit_cast<std::uint32_t>(value + 0x1.8p23F); }

LMKV_INLINE std::uint8_t to_fp8(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  const std::uint32_t rounded_bits = magnitude + 0x7FFFFU + ((magnitude >> 20) & 1U);
  const std::int32_t normal = static_cast<std::int32_t>(rounded_bits >> 20) - (120 << 3);
  // Below 2^-6 codes are multiples of 2^-9: the last bit of 2^14. They are the greater ones there, and at most 8, the
  // least code of the others: no choice is needed, which GCC would make a branch for aarch64.
  const std::int32_t multiple =
      std::bit_cast<std::int32_t>(std::bit_cast<float>(magnitude) + 0x1p14F) - std::bit_cast<std::int32_t>(0x1p14F);
  const std::int32_t subnormal = multiple < 8 ? multiple : 8;
  const std::int32_t code = subnormal > normal ? subnormal : normal;
  return static_cast<std::uint8_t>(static_cast<std::uint32_t>(code) | (bits >> 24 & 0x80U));
}

LMKV_INLINE float from_fp8(std::uint8_t code) {
  const auto magnitude = std::bit_cast<float>(static_cast<std::uint32_t>(code & 0x7FU) << 20) * 0x1p120F;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | (static_cast<std::uint32_t>(code & 0x80U) << 24));
}

constexpr std::int64_t scale_count(Code code) { return code == Code::int4 ? 2 : 1; }
constexpr float most_of(Code code) { return code == Code::fp8 ? 448.0F : 127.0F; }
constexpr std::int64_t code_bytes(Code code, std::int64_t count) { return code == Code::int4 ? (count + 1) / 2 : count; }

// Encodes a group by its greatest magnitude; false if that is too large.
template <Element element, Code code>
LMKV_INLINE bool encode_group(const typename Elements<element>::Bits* source, std::int64_t count, float* scale,
                              std::uint8_t* codes) {
  using Type = Elements<element>;
  const auto most = greatest_magnitude(source, count);
  if (most >= Type::too_large) return false;
  const float value = Type::value(most);
  const bool is_zero = value < least;
  scale[0] = is_zero ? 0.0F : value / most_of(code);
  const float inverse = is_zero ? 0.0F : most_of(code) / value;
  for (std::int64_t i = 0; i < count; ++i) {
    const float scaled = Type::value(source[i]) * inverse;
    if constexpr (code == Code::fp8) {
      codes[i] = to_fp8(scaled);
    } else {
      codes[i] = static_cast<std::uint8_t>(rounded(scaled));
    }
  }
  return true;
}

template <Element element, Code code>
LMKV_INLINE void decode_group(const std::uint8_t* codes, std::int64_t count, const float* scale,
                              typename Elements<element>::Bits* target) {
  const float by = scale[0];
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = code == Code::fp8 ? from_fp8(codes[i]) : static_cast<float>(static_cast<std::int8_t>(codes[i]));
    target[i] = Elements<element>::bits(value * by);
  }
}

// Half a byte for an element: 16 steps from the least value to the greatest. The second half of a group's elements is in
// the upper halves of the bytes.
template <Element element>
LMKV_INLINE bool encode_halves(const typename Elements<element>::Bits* source, std::int64_t count, float* scale,
                               std::uint8_t* codes) {
  using Type = Elements<element>;
  using Bits = typename Type::Bits;
  using Order = std::make_signed_t<Bits>;
  constexpr Bits magnitude = std::numeric_limits<Bits>::max() >> 1;
  const auto order = [](Bits bits) __attribute__((always_inline)) {
    const auto sign = static_cast<Bits>(static_cast<Order>(bits) >> (8 * sizeof(Bits) - 1));
    return static_cast<Order>(bits ^ (sign & magnitude));
  };
  if (greatest_magnitude(source, count) >= Type::too_large) return false;
  Order low = std::numeric_limits<Order>::max(), high = std::numeric_limits<Order>::min();
  for (std::int64_t i = 0; i < count; ++i) {
    const Order at = order(source[i]);
    low = at < low ? at : low;
    high = at > high ? at : high;
  }
  const auto bits_of = [&](Order at) { return static_cast<Bits>(order(static_cast<Bits>(at))); };  // is its own inverse
  const float first = Type::value(bits_of(low)), range = Type::value(bits_of(high)) - first;
  const bool is_flat = range < least;
  scale[0] = is_flat ? 0.0F : range / 15.0F;
  scale[1] = first;
  const float inverse = is_flat ? 0.0F : 15.0F / range;
  const std::int64_t half = (count + 1) / 2;
  const auto code_of = [&](Bits bits) __attribute__((always_inline)) {
    return rounded((Type::value(bits) - first) * inverse) & 0xFU;
  };
  for (std::int64_t i = 0; i < count / 2; ++i) {
    codes[i] = static_cast<std::uint8_t>(code_of(source[i]) | (code_of(source[half + i]) << 4));
  }
  if (count % 2) codes[half - 1] = static_cast<std::uint8_t>(code_of(source[half - 1]));
  return true;
}

template <Element element>
LMKV_INLINE void decode_halves(const std::uint8_t* codes, std::int64_t count, const float* scale,
                               typename Elements<element>::Bits* target) {
  const float by = scale[0], first = scale[1];
  const std::int64_t half = (count + 1) / 2;
  for (std::int64_t i = 0; i < half; ++i) {
    target[i] = Elements<element>::bits(first + static_cast<float>(static_cast<std::int32_t>(codes[i] & 0xFU)) * by);
  }
  for (std::int64_t i = 0; i < count / 2; ++i) {
    target[half + i] =
        Elements<element>::bits(first + static_cast<float>(static_cast<std::int32_t>(codes[i] >> 4)) * by);
  }
}

// The number of groups of `count` elements.
std::int64_t group_count(const CodecFormat& format, std::int64_t count) {
  const auto groups = [&](std::int64_t elements) { return (elements + format.group_elements - 1) / format.group_elements; };
  return count / format.plane_elements * groups(format.plane_elements) + groups(count % format.plane_elements);
}

// Calls `each(first element, elements)` for each group, in order, until it returns false.
template <typename Each>
LMKV_INLINE bool for_groups(const CodecFormat& format, std::int64_t count, Each each) {
  for (std::int64_t plane = 0; plane < count; plane += format.plane_elements) {
    const std::int64_t end = std::min(plane + format.plane_elements, count);
    for (std::int64_t at = plane; at < end; at += format.group_elements) {
      if (!each(at, std::min(format.group_elements, end - at))) return false;
    }
  }
  return true;
}

template <Element element, Code code>
LMKV_INLINE bool encode_all(const CodecFormat& format, const std::byte* chunk, std::int64_t count, std::byte* encoded) {
  const auto* source = reinterpret_cast<const typename Elements<element>::Bits*>(chunk);
  std::byte* scales = encoded;
  auto* codes = reinterpret_cast<std::uint8_t*>(encoded + group_count(format, count) * scale_count(code) * 4);
  return for_groups(format, count, [&](std::int64_t at, std::int64_t size) __attribute__((always_inline)) {
    float scale[2] = {0.0F, 0.0F};
    bool is_encoded;
    if constexpr (code == Code::int4) {
      is_encoded = encode_halves<element>(source + at, size, scale, codes);
    } else {
      is_encoded = encode_group<element, code>(source + at, size, scale, codes);
    }
    std::memcpy(scales, scale, 4 * scale_count(code));
    scales += 4 * scale_count(code);
    codes += code_bytes(code, size);
    return is_encoded;
  });
}

template <Element element, Code code>
LMKV_INLINE void decode_all(const CodecFormat& format, const std::byte* encoded, std::int64_t count, std::byte* chunk) {
  auto* target = reinterpret_cast<typename Elements<element>::Bits*>(chunk);
  const std::byte* scales = encoded;
  const auto* codes = reinterpret_cast<const std::uint8_t*>(encoded + group_count(format, count) * scale_count(code) * 4);
  for_groups(format, count, [&](std::int64_t at, std::int64_t size) __attribute__((always_inline)) {
    float scale[2];
    std::memcpy(scale, scales, 4 * scale_count(code));
    if constexpr (code == Code::int4) {
      decode_halves<element>(codes, size, scale, target + at);
    } else {
      decode_group<element, code>(codes, size, scale, target + at);
    }
    scales += 4 * scale_count(code);
    codes += code_bytes(code, size);
    return true;
  });
}

template <Element element>
LMKV_INLINE void split_all(const std::byte* chunk, std::int64_t count, std::byte* planes) {
  using Bits = typename Elements<element>::Bits;
  const auto* source = reinterpret_cast<const Bits*>(chunk);
  auto* target = reinterpret_cast<std::uint8_t*>(planes);
  for (std::size_t byte = 0; byte < sizeof(Bits); ++byte, target += count) {
    for (std::int64_t i = 0; i < count; ++i) target[i] = static_cast<std::uint8_t>(std::rotl(source[i], 1) >> (8 * byte));
  }
}

template <Element element>
LMKV_INLINE void join_all(const std::byte* planes, std::int64_t count, std::byte* chunk) {
  using Bits = typename Elements<element>::Bits;
  const auto* source = reinterpret_cast<const std::uint8_t*>(planes);
  auto* target = reinterpret_cast<Bits*>(chunk);
  for (std::int64_t i = 0; i < count; ++i) {
    Bits bits = 0;
    for (std::size_t byte = 0; byte < sizeof(Bits); ++byte) {
      bits = static_cast<Bits>(bits | static_cast<Bits>(source[byte * count + i]) << (8 * byte));
    }
    target[i] = std::rotr(bits, 1);
  }
}

// Calls `Work<element, code>::run`.
#define LMKV_FOR_CODES(function, element, ...)                                                     \
  switch (format.code) {                                                                           \
    case Code::fp8: return function<element, Code::fp8>(__VA_ARGS__);                              \
    case Code::int8: return function<element, Code::int8>(__VA_ARGS__);                            \
    case Code::int4: return function<element, Code::int4>(__VA_ARGS__);                            \
  }
#define LMKV_FOR_ELEMENTS(kind, function)                                                          \
  switch (kind) {                                                                                  \
    case Element::bfloat16: function(Element::bfloat16) break;                                     \
    case Element::float16: function(Element::float16) break;                                       \
    case Element::float32: function(Element::float32) break;                                       \
  }

#define LMKV_CODEC(space, target)                                                                                      \
  namespace space {                                                                                                    \
  target bool encode(const CodecFormat& format, const std::byte* chunk, std::int64_t count, std::byte* encoded) {      \
    LMKV_FOR_ELEMENTS(format.element, LMKV_ENCODE)                                                                     \
    return false;                                                                                                      \
  }                                                                                                                    \
  target void decode(const CodecFormat& format, const std::byte* encoded, std::int64_t count, std::byte* chunk) {      \
    LMKV_FOR_ELEMENTS(format.element, LMKV_DECODE)                                                                     \
  }                                                                                                                    \
  target void split(Element element, const std::byte* chunk, std::int64_t count, std::byte* planes) {                  \
    LMKV_FOR_ELEMENTS(element, LMKV_SPLIT)                                                                             \
  }                                                                                                                    \
  target void join(Element element, const std::byte* planes, std::int64_t count, std::byte* chunk) {                   \
    LMKV_FOR_ELEMENTS(element, LMKV_JOIN)                                                                              \
  }                                                                                                                    \
  constexpr CodecKernels kernels{#space, encode, decode, split, join};                                                 \
  }
#define LMKV_ENCODE(element) LMKV_FOR_CODES(encode_all, element, format, chunk, count, encoded)
#define LMKV_DECODE(element) LMKV_FOR_CODES(decode_all, element, format, encoded, count, chunk)
#define LMKV_SPLIT(element) split_all<element>(chunk, count, planes);
#define LMKV_JOIN(element) join_all<element>(planes, count, chunk);

LMKV_CODEC(portable, )
#if defined(__x86_64__)
LMKV_CODEC(avx2, __attribute__((target("avx2"))))
LMKV_CODEC(avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512"))))
#endif

}  // namespace

const CodecKernels& portable_codec() { return portable::kernels; }

const CodecKernels& best_codec() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return avx512::kernels;
  }
  if (__builtin_cpu_supports("avx2")) return avx2::kernels;
#endif
  return portable::kernels;
}

std::int64_t element_bytes(Element element) { return element == Element::float32 ? 4 : 2; }

std::int64_t encoded_bytes(const CodecFormat& format, std::int64_t count) {
  const std::int64_t scales = group_count(format, count) * scale_count(format.code) * 4;
  if (format.code != Code::int4) return scales + count;
  std::int64_t codes = 0;
  const std::int64_t plane = format.plane_elements, group = format.group_elements;
  const auto plane_bytes = [&](std::int64_t elements) {
    return elements / group * code_bytes(Code::int4, group) + code_bytes(Code::int4, elements % group);
  };
  codes = count / plane * plane_bytes(plane) + plane_bytes(count % plane);
  return scales + codes;
}

}  // namespace lmkv
