#include "transpose.h"

namespace lmkv {
namespace {

// A square of elements at a time, so that each cache line that is touched is used whole before it is left.
template <typename Element, typename Copy>
void visit(std::int64_t row_count, std::int64_t element_count, Copy copy) {
  constexpr std::int64_t side = 64 / sizeof(Element);
  for (std::int64_t row = 0; row < row_count; row += side) {
    const std::int64_t row_end = std::min(row + side, row_count);
    for (std::int64_t element = 0; element < element_count; element += side) {
      const std::int64_t element_end = std::min(element + side, element_count);
      for (std::int64_t e = element; e < element_end; ++e) {
        for (std::int64_t r = row; r < row_end; ++r) copy(r, e);
      }
    }
  }
}

template <typename Element>
Element* at(const Transposed& rows, std::int64_t row, std::int64_t element) {
  return reinterpret_cast<Element*>(rows.first + row * rows.row_stride + element * rows.element_stride);
}

// Calls `work` with an element's type in place of its size.
template <typename Work>
void with_element(std::int64_t element_bytes, Work work) {
  switch (element_bytes) {
    case 1: return work(std::uint8_t{});
    case 2: return work(std::uint16_t{});
    case 4: return work(std::uint32_t{});
    default: return work(std::uint64_t{});
  }
}

}  // namespace

void read_rows(const Transposed& rows, std::int64_t first_row, std::int64_t row_count, std::int64_t row_bytes,
               std::byte* target) {
  with_element(rows.element_bytes, [&](auto type) {
    using Element = decltype(type);
    const std::int64_t width = row_bytes / static_cast<std::int64_t>(sizeof(Element));
    auto* const out = reinterpret_cast<Element*>(target);
    visit<Element>(row_count, width, [&](std::int64_t row, std::int64_t element) {
      out[row * width + element] = *at<const Element>(rows, first_row + row, element);
    });
  });
}

void write_rows(const Transposed& rows, std::int64_t row_count, std::int64_t row_bytes, const std::byte* source) {
  with_element(rows.element_bytes, [&](auto type) {
    using Element = decltype(type);
    const std::int64_t width = row_bytes / static_cast<std::int64_t>(sizeof(Element));
    const auto* const in = reinterpret_cast<const Element*>(source);
    visit<Element>(row_count, width, [&](std::int64_t row, std::int64_t element) {
      *at<Element>(rows, row, element) = in[row * width + element];
    });
  });
}

}  // namespace lmkv
