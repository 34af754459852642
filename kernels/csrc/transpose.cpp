#include "transpose.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lmkv {
namespace {

// A matrix in memory; `stride` is the distance of its lines in bytes.
struct Source {
  const std::byte* first;
  std::int64_t stride;
};
struct Target {
  std::byte* first;
  std::int64_t stride;
};

#if defined(__x86_64__)
// Every x86-64 processor has these instructions.
void transpose_square(std::uint16_t, const std::byte* source, std::int64_t source_stride, std::byte* target,
                      std::int64_t target_stride) {
  __m128i a[8], b[8];
  for (int i = 0; i < 8; ++i) a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i * source_stride));
  for (int i = 0; i < 4; ++i) {
    b[2 * i] = _mm_unpacklo_epi16(a[i], a[i + 4]);
    b[2 * i + 1] = _mm_unpackhi_epi16(a[i], a[i + 4]);
  }
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = _mm_unpacklo_epi16(b[i], b[i + 4]);
    a[2 * i + 1] = _mm_unpackhi_epi16(b[i], b[i + 4]);
  }
  for (int i = 0; i < 4; ++i) {
    b[2 * i] = _mm_unpacklo_epi16(a[i], a[i + 4]);
    b[2 * i + 1] = _mm_unpackhi_epi16(a[i], a[i + 4]);
  }
  for (int i = 0; i < 8; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(target + i * target_stride), b[i]);
}

void transpose_square(std::uint32_t, const std::byte* source, std::int64_t source_stride, std::byte* target,
                      std::int64_t target_stride) {
  __m128i a[4], b[4];
  for (int i = 0; i < 4; ++i) a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i * source_stride));
  for (int i = 0; i < 2; ++i) {
    b[2 * i] = _mm_unpacklo_epi32(a[i], a[i + 2]);
    b[2 * i + 1] = _mm_unpackhi_epi32(a[i], a[i + 2]);
  }
  for (int i = 0; i < 2; ++i) {
    a[2 * i] = _mm_unpacklo_epi32(b[i], b[i + 2]);
    a[2 * i + 1] = _mm_unpackhi_epi32(b[i], b[i + 2]);
  }
  for (int i = 0; i < 4; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(target + i * target_stride), a[i]);
}
#endif

template <typename Element>
void transpose_square(Element, const std::byte* source, std::int64_t source_stride, std::byte* target,
                      std::int64_t target_stride) {
  constexpr int side = 16 / sizeof(Element);
  for (int line = 0; line < side; ++line) {
    for (int i = 0; i < side; ++i) {
      std::memcpy(target + i * target_stride + line * sizeof(Element),
                  source + line * source_stride + i * sizeof(Element), sizeof(Element));
    }
  }
}

// Line `l` of the source, of `width` elements, becomes column `l` of the target.
template <typename Element>
void transpose(const Source& source, const Target& target, std::int64_t lines, std::int64_t width) {
  constexpr std::int64_t side = 16 / sizeof(Element);
  constexpr std::int64_t size = sizeof(Element);
  const std::int64_t whole_lines = lines - lines % side;
  const std::int64_t whole_width = width - width % side;
  for (std::int64_t i = 0; i < whole_width; i += side) {
    for (std::int64_t line = 0; line < whole_lines; line += side) {
      transpose_square(Element{}, source.first + line * source.stride + i * size, source.stride,
                       target.first + i * target.stride + line * size, target.stride);
    }
  }
  for (std::int64_t line = 0; line < lines; ++line) {  // what is left at the ends
    for (std::int64_t i = line < whole_lines ? whole_width : 0; i < width; ++i) {
      std::memcpy(target.first + i * target.stride + line * size, source.first + line * source.stride + i * size,
                  size);
    }
  }
}

void transpose(std::int64_t element_bytes, const Source& source, const Target& target, std::int64_t lines,
               std::int64_t width) {
  switch (element_bytes) {
    case 1: return transpose<std::uint8_t>(source, target, lines, width);
    case 2: return transpose<std::uint16_t>(source, target, lines, width);
    case 4: return transpose<std::uint32_t>(source, target, lines, width);
    default: return transpose<std::uint64_t>(source, target, lines, width);
  }
}

}  // namespace

void read_rows(const Transposed& rows, std::int64_t first_row, std::int64_t row_count, std::int64_t row_bytes,
               std::byte* target) {
  const std::byte* const first = rows.first + first_row * rows.element_bytes;
  transpose(rows.element_bytes, {first, rows.element_stride}, {target, row_bytes}, row_bytes / rows.element_bytes,
            row_count);
}

void write_rows(const Transposed& rows, std::int64_t row_count, std::int64_t row_bytes, const std::byte* source) {
  transpose(rows.element_bytes, {source, row_bytes}, {rows.first, rows.element_stride}, row_count,
            row_bytes / rows.element_bytes);
}

}  // namespace lmkv
