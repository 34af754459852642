// Copies between pages and chunks: as a loop over single elements does them, in any layout and with any number of
// threads. With THREADS the chunks are large enough for several threads.
#include <algorithm>
#include <memory>
#include <vector>

#include "chunk_copy.h"
#include "input.h"

namespace {

#ifdef THREADS
constexpr std::int64_t min_row_count = 1 << 12, row_bytes_unit = 2048, max_factor = 1;  // 4 MiB for each thread
#else
constexpr std::int64_t min_row_count = 1, row_bytes_unit = 8, max_factor = 16;
#endif
constexpr std::int64_t max_count = max_factor > 1 ? 3 : 1;  // of layers, heads and copies

std::byte byte_of(std::uint64_t index) { return static_cast<std::byte>(index * 0x9E3779B97F4A7C15ull >> 56); }

std::unique_ptr<std::byte[]> filled(std::size_t size, std::uint64_t seed) {
  auto bytes = std::make_unique<std::byte[]>(size);
  for (std::size_t at = 0; at < size; ++at) bytes[at] = byte_of(at + seed);
  return bytes;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  lmkv::Pages pages{};
  pages.layer_count = input.number(1, max_count);
  pages.head_count = input.number(1, max_count);
  pages.first_head = input.number(0, max_count - 1);
  pages.kv_head_count = pages.first_head + pages.head_count + input.number(0, max_count - 1);
  pages.part_count = input.number(1, std::min<std::int64_t>(max_count, 2));
  pages.rows_per_block = input.number(1, 17);
  const bool is_transposed = input.number(0, 1) == 1;
  pages.element_bytes = 1 << input.number(0, 3);
  pages.row_bytes = row_bytes_unit * input.number(1, max_factor);
  const std::int64_t elements = pages.row_bytes / pages.element_bytes;
  const std::int64_t gap = is_transposed ? 0 : 8 * input.number(0, 2);
  const std::int64_t part_bytes = pages.rows_per_block * (pages.row_bytes + gap);
  for (int part = 0; part < pages.part_count; ++part) {
    pages.parts[part] = is_transposed
        ? lmkv::Part{part * part_bytes, pages.element_bytes, pages.element_bytes * pages.rows_per_block}
        : lmkv::Part{part * part_bytes, pages.row_bytes + gap, pages.element_bytes};
  }
  pages.head_stride_bytes = part_bytes * pages.part_count;
  pages.block_stride_bytes = pages.head_stride_bytes * pages.head_count + 8 * input.number(0, 3);

  std::vector<lmkv::ChunkCopy> copies;
  std::vector<std::int64_t> block_ids;
  std::int64_t pool_bytes = 0;
  const std::int64_t copy_count = input.number(1, max_count);
  for (std::int64_t index = 0; index < copy_count; ++index) {
    lmkv::ChunkCopy copy{};
    copy.first_row = input.number(0, 9);
    copy.row_count = min_row_count + input.number(0, 60);
    copy.extent_rows = copy.first_row + copy.row_count + input.number(0, 9);
    copy.first_slot = input.number(0, pages.rows_per_block - 1);
    copy.first_id = static_cast<std::int64_t>(block_ids.size());
    copy.offset = pool_bytes;
    pool_bytes += (copy.extent_rows * pages.row_bytes * pages.part_count * pages.kv_head_count * pages.layer_count + 63) / 64 * 64;
    for (std::int64_t block = 0; block < lmkv::block_count(pages, copy); ++block) {
      block_ids.push_back(static_cast<std::int64_t>(block_ids.size()));
    }
    copies.push_back(copy);
  }
  std::ranges::reverse(block_ids);
  const int threads = static_cast<int>(input.number(1, 4));
  const bool is_portable = input.number(0, 1) == 1;
  const lmkv::TileKernels& kernels = is_portable ? lmkv::portable_kernels() : lmkv::best_kernels();

  const std::int64_t layer_bytes = static_cast<std::int64_t>(block_ids.size()) * pages.block_stride_bytes;
  std::vector<std::unique_ptr<std::byte[]>> layers, copied;
  std::vector<std::uint64_t> addresses, copied_addresses;
  for (std::int64_t layer = 0; layer < pages.layer_count; ++layer) {
    layers.push_back(filled(layer_bytes, layer + 1));
    copied.push_back(filled(layer_bytes, 77));
    addresses.push_back(reinterpret_cast<std::uint64_t>(layers.back().get()));
    copied_addresses.push_back(reinterpret_cast<std::uint64_t>(copied.back().get()));
  }
  const std::unique_ptr<std::byte[]> memory = filled(pool_bytes + 64, 5);
  auto* const pool = reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(memory.get()) + 63) & ~63ull);
  std::vector<std::byte> expected(pool, pool + pool_bytes);
  std::vector<std::uint64_t> sums(copies.size()), expected_sums(copies.size());

  const auto each = [&](auto visit) {  // (copy, bytes from the layer's base, layer, bytes from the pool's base)
    for (std::size_t index = 0; index < copies.size(); ++index) {
      const auto& copy = copies[index];
      for (std::int64_t layer = 0; layer < pages.layer_count; ++layer)
        for (std::int64_t head = 0; head < pages.head_count; ++head)
          for (std::int64_t part = 0; part < pages.part_count; ++part)
            for (std::int64_t row = 0; row < copy.row_count; ++row) {
              const std::int64_t slot = copy.first_slot + row;
              const std::int64_t block = block_ids[copy.first_id + slot / pages.rows_per_block];
              const std::int64_t page = block * pages.block_stride_bytes + head * pages.head_stride_bytes +
                                        pages.parts[part].offset +
                                        slot % pages.rows_per_block * pages.parts[part].row_stride;
              const std::int64_t line = (layer * pages.kv_head_count + pages.first_head + head) * pages.part_count + part;
              const std::int64_t chunk = (line * copy.extent_rows + copy.first_row + row) * pages.row_bytes;
              for (std::int64_t element = 0; element < elements; ++element)
                visit(index, page + element * pages.parts[part].element_stride, layer,
                      copy.offset + chunk + element * pages.element_bytes);
            }
    }
  };
  each([&](std::size_t, std::int64_t page, std::int64_t layer, std::int64_t chunk) {
    std::memcpy(expected.data() + chunk, layers[layer].get() + page, pages.element_bytes);
  });
  each([&](std::size_t index, std::int64_t, std::int64_t, std::int64_t chunk) {
    const std::int64_t own = chunk - copies[index].offset;
    if (own % 8) return;
    std::uint64_t word;
    std::memcpy(&word, expected.data() + chunk, sizeof word);
    expected_sums[index] += lmkv::word_sum(word, lmkv::word_key(own / 8));
  });

  lmkv::gather(kernels, pages, addresses, pool, copies, block_ids, threads, sums);
  PROMISE(std::equal(expected.begin(), expected.end(), pool));
  PROMISE(sums == expected_sums);
  lmkv::gather(kernels, pages, addresses, pool, copies, block_ids, threads, {});
  PROMISE(std::equal(expected.begin(), expected.end(), pool));

  std::vector<std::vector<std::byte>> written;
  for (const auto& layer : copied) written.emplace_back(layer.get(), layer.get() + layer_bytes);
  each([&](std::size_t, std::int64_t page, std::int64_t layer, std::int64_t chunk) {
    std::memcpy(written[layer].data() + page, expected.data() + chunk, pages.element_bytes);
  });
  lmkv::scatter(kernels, pages, copied_addresses, pool, copies, block_ids, threads);
  for (std::int64_t layer = 0; layer < pages.layer_count; ++layer) {
    PROMISE(std::equal(written[layer].begin(), written[layer].end(), copied[layer].get()));
  }
  std::uint64_t sum = 0;
  for (std::int64_t word = 0; word < pool_bytes / 8; ++word) {
    std::uint64_t value;
    std::memcpy(&value, pool + 8 * word, sizeof value);
    sum += lmkv::word_sum(value, lmkv::word_key(word));
  }
  PROMISE(lmkv::checksum(kernels, pool, pool_bytes, threads) == sum);
  return 0;
}
