#include "chunk_copy.h"

#include <sched.h>

#include <algorithm>
#include <functional>
#include <system_error>
#include <thread>
#include <vector>

#include "transpose.h"

namespace lmkv {
namespace {

constexpr std::int64_t min_bytes_per_thread = 4 << 20;  // a thread's start costs as much as copying some 0.5 MiB
constexpr int max_auto_threads = 4;                     // more do not copy faster, they only share the bandwidth

int usable_processors() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

// The number of threads to use; 0 means the best number, limited by the number of bytes.
int thread_count(int threads, std::int64_t size_bytes) {
  const std::int64_t wanted = threads > 0 ? threads : std::min(usable_processors(), max_auto_threads);
  return static_cast<int>(std::clamp<std::int64_t>(size_bytes / min_bytes_per_thread, 1, wanted));
}

// Calls `work(part, first, last)` for `parts` equal shares of [0, count), the last of them on this thread, and waits.
// A share whose thread cannot be started runs on this thread too.
void run_parts(int parts, std::int64_t count,
               const std::function<void(int, std::int64_t, std::int64_t)>& work) {
  std::vector<std::jthread> threads;
  threads.reserve(parts);
  const auto share = [&](int part) { work(part, count * part / parts, count * (part + 1) / parts); };
  for (int part = 0; part + 1 < parts; ++part) {
    try {
      threads.emplace_back(share, part);
    } catch (const std::system_error&) {
      share(part);
    }
  }
  share(parts - 1);
}

// Rows of one part that are contiguous in a chunk, and their location in the pages.
struct Strip {
  std::size_t copy;
  std::byte* page;
  std::int64_t row_stride;
  std::int64_t element_stride;
  std::int64_t chunk_offset;  // from the start of the chunk
  std::int64_t row_bytes;
  std::int64_t row_count;
};

// The arguments of one call, iterated tile by tile.
struct Call {
  const Pages& pages;
  std::span<const std::uint64_t> layer_addresses;
  std::span<const ChunkCopy> copies;
  std::span<const std::int64_t> block_ids;

  std::int64_t tile_count() const {
    return static_cast<std::int64_t>(block_ids.size()) * pages.layer_count * pages.head_count;
  }

  std::int64_t size_bytes() const {
    std::int64_t rows = 0;
    for (const ChunkCopy& copy : copies) rows += copy.row_count;
    return rows * pages.layer_count * pages.head_count * pages.part_count * pages.row_bytes;
  }

  // Calls `visit(strip)` for the strips of the tiles [first, last), counted over all copies in their order. The
  // strips of a copy follow the order of reads: non-temporal writes may be in any order.
  template <Tile (*tile_at)(const Pages&, const ChunkCopy&, std::int64_t), typename Visit>
  void visit_strips(std::int64_t first, std::int64_t last, Visit visit) const {
    const std::int64_t tiles_per_id = pages.layer_count * pages.head_count;
    for (std::size_t index = 0; index < copies.size(); ++index) {
      const ChunkCopy& copy = copies[index];
      const std::int64_t begin = copy.first_id * tiles_per_id;
      const std::int64_t end = begin + block_count(pages, copy) * tiles_per_id;
      for (std::int64_t number = std::max(first, begin); number < std::min(last, end); ++number) {
        const Tile tile = tile_at(pages, copy, number - begin);
        for (std::int64_t part = 0; part < pages.part_count; ++part) visit(strip(index, tile, part));
      }
    }
  }

 private:
  Strip strip(std::size_t index, const Tile& tile, std::int64_t part_index) const {
    const ChunkCopy& copy = copies[index];
    const Part& part = pages.parts[part_index];
    const Rows rows = rows_of(pages, copy, tile.block);
    auto* const layer = reinterpret_cast<std::byte*>(layer_addresses[tile.layer]);
    const std::int64_t block_id = block_ids[copy.first_id + tile.block];
    Strip strip{index,
                layer + page_offset(pages, part, block_id, tile.head, rows.in_block),
                part.row_stride,
                part.element_stride,
                chunk_offset(pages, copy, tile, part_index, rows.in_chunk),
                pages.row_bytes,
                rows.count};
    const bool side_by_side = part.element_stride == pages.element_bytes && part.row_stride == pages.row_bytes;
    if (side_by_side) {  // in the pages too: one long row
      strip.row_bytes *= strip.row_count;
      strip.row_count = 1;
    }
    return strip;
  }
};

}  // namespace

void gather(const TileKernels& kernels, const Pages& pages, std::span<const std::uint64_t> layer_addresses,
            std::byte* pool, std::span<const ChunkCopy> copies, std::span<const std::int64_t> block_ids, int threads,
            std::span<std::uint64_t> checksums) {
  const Call call{pages, layer_addresses, copies, block_ids};
  const int parts = thread_count(threads, call.size_bytes());
  const auto gather_rows = checksums.empty() ? kernels.gather_unsummed : kernels.gather;
  std::vector<std::uint64_t> sums(copies.size() * parts);  // [part][copy]
  run_parts(parts, call.tile_count(), [&](int part, std::int64_t first, std::int64_t last) {
    std::uint64_t* const own = sums.data() + copies.size() * part;
    call.visit_strips<tile_in_pages>(first, last, [&](const Strip& strip) {
      std::byte* target = pool + copies[strip.copy].offset + strip.chunk_offset;
      std::uint64_t first_word = strip.chunk_offset / 8;
      if (strip.element_stride == pages.element_bytes) {
        own[strip.copy] +=
            gather_rows(strip.page, strip.row_stride, target, strip.row_bytes, strip.row_count, first_word);
        return;
      }
      const Transposed columns{strip.page, strip.element_stride, pages.element_bytes};
      for_each_piece(strip.row_bytes, strip.row_count, [&](std::byte* piece, std::int64_t row, std::int64_t count) {
        read_rows(columns, row, count, strip.row_bytes, piece);
        own[strip.copy] += gather_rows(piece, 0, target, count * strip.row_bytes, 1, first_word);
        target += count * strip.row_bytes;
        first_word += count * strip.row_bytes / 8;
      });
    });
    kernels.publish();
  });
  for (std::size_t index = 0; index < checksums.size(); ++index) {
    checksums[index] = 0;
    for (int part = 0; part < parts; ++part) checksums[index] += sums[copies.size() * part + index];
  }
}

void scatter(const TileKernels& kernels, const Pages& pages, std::span<const std::uint64_t> layer_addresses,
             const std::byte* pool, std::span<const ChunkCopy> copies, std::span<const std::int64_t> block_ids,
             int threads) {
  const Call call{pages, layer_addresses, copies, block_ids};
  const int parts = thread_count(threads, call.size_bytes());
  run_parts(parts, call.tile_count(), [&](int, std::int64_t first, std::int64_t last) {
    call.visit_strips<tile_in_chunk>(first, last, [&](const Strip& strip) {
      const std::byte* source = pool + copies[strip.copy].offset + strip.chunk_offset;
      if (strip.element_stride == pages.element_bytes) {
        kernels.copy(source, strip.row_bytes, strip.page, strip.row_stride, strip.row_bytes, strip.row_count);
      } else {
        write_rows({strip.page, strip.element_stride, pages.element_bytes}, strip.row_count,
                   strip.row_bytes, source);
      }
    });
    kernels.publish();
  });
}

std::uint64_t checksum(const TileKernels& kernels, const std::byte* source, std::size_t size_bytes, int threads) {
  const auto word_count = static_cast<std::int64_t>(size_bytes / 8);
  const int parts = thread_count(threads, static_cast<std::int64_t>(size_bytes));
  std::vector<std::uint64_t> sums(parts);
  run_parts(parts, word_count, [&](int part, std::int64_t first, std::int64_t last) {
    sums[part] = kernels.checksum(source + 8 * first, 8 * (last - first), first);
  });
  std::uint64_t sum = 0;
  for (const std::uint64_t part : sums) sum += part;
  return sum;
}

}  // namespace lmkv
