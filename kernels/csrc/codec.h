// Codecs of chunks: elements as codes of one byte or half a byte, with a scale for each group of elements.
//
//   chunk     planes of `plane_elements` each: the keys, or the values, of one head in one layer
//   plane     groups of `group_elements`; the last one may be shorter, and so may the chunk's last plane
//   encoded   scales of all groups as float32 (int4: scale and least value) | codes, group by group
//
// Groups never cross a plane, so the bound of an error follows from the keys or the values of one head alone.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lmkv {

enum class Element : int { bfloat16, float16, float32 };
enum class Code : int { fp8, int8, int4 };

struct CodecFormat {
  Element element;
  Code code;
  std::int64_t plane_elements;
  std::int64_t group_elements;
};

// The functions for one instruction set; all of them yield the same bits.
struct CodecKernels {
  const char* isa;
  bool (*encode)(const CodecFormat& format, const std::byte* chunk, std::int64_t count, std::byte* encoded);
  void (*decode)(const CodecFormat& format, const std::byte* encoded, std::int64_t count, std::byte* chunk);
  // Bytes of elements, plane by plane: first the least significant bytes of all elements, rotated left by one bit so
  // that the last plane has whole exponents.
  void (*split)(Element element, const std::byte* chunk, std::int64_t count, std::byte* planes);
  void (*join)(Element element, const std::byte* planes, std::int64_t count, std::byte* chunk);
};

const CodecKernels& portable_codec();

// The fastest functions that this processor supports.
const CodecKernels& best_codec();

std::int64_t element_bytes(Element element);

// Bytes of `count` encoded elements.
std::int64_t encoded_bytes(const CodecFormat& format, std::int64_t count);

}  // namespace lmkv
