#include "block_copy.h"

#include <sched.h>

#include <algorithm>
#include <functional>
#include <system_error>
#include <thread>
#include <vector>

namespace lmkv {
namespace {

constexpr std::int64_t min_bytes_per_thread = 4 << 20;  // a thread's start costs as much as copying some 0.5 MiB
constexpr int max_auto_threads = 4;                     // more do not copy faster, they only share the bandwidth

int usable_processors() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

// `threads` 0 means as many as help; no more than the bytes are worth in any case.
int thread_count(int threads, std::int64_t size_bytes) {
  const std::int64_t wanted = threads > 0 ? threads : std::min(usable_processors(), max_auto_threads);
  return static_cast<int>(std::clamp<std::int64_t>(size_bytes / min_bytes_per_thread, 1, wanted));
}

// Calls `work(part, first, last)` for `parts` equal shares of [0, count), the last of them on this thread, and waits.
// A share whose thread cannot be started is done here too.
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

// Calls `visit(copy index, copy, place)` for the tiles [first, last), counted over all copies in their order.
template <typename Visit>
void visit_tiles(const Pages& pages, std::span<const BlockCopy> copies, std::int64_t first, std::int64_t last,
                 Visit visit) {
  const std::int64_t tiles_per_id = pages.layer_count * pages.head_count;
  for (std::size_t index = 0; index < copies.size(); ++index) {
    const BlockCopy& copy = copies[index];
    const std::int64_t begin = copy.first_id * tiles_per_id;
    const std::int64_t end = begin + copy.block_count * tiles_per_id;
    for (std::int64_t tile = std::max(first, begin); tile < std::min(last, end); ++tile) {
      visit(index, copy, tile_place(pages, copy, tile - begin));
    }
  }
}

std::byte* page_tile(const Pages& pages, std::span<const std::uint64_t> layer_addresses,
                     std::span<const std::int64_t> block_ids, const BlockCopy& copy, const TilePlace& place) {
  const std::int64_t block_id = block_ids[copy.first_id + place.block];
  return reinterpret_cast<std::byte*>(layer_addresses[place.layer]) + page_offset(pages, block_id, place.head);
}

}  // namespace

void gather(const TileKernels& kernels, const Pages& pages, std::span<const std::uint64_t> layer_addresses,
            std::byte* pool, std::span<const BlockCopy> copies, std::span<const std::int64_t> block_ids, int threads,
            std::span<std::uint64_t> checksums) {
  const std::int64_t tile_count = static_cast<std::int64_t>(block_ids.size()) * pages.layer_count * pages.head_count;
  const int parts = thread_count(threads, tile_count * pages.tile_bytes);
  std::vector<std::uint64_t> sums(copies.size() * parts);  // [part][copy]
  run_parts(parts, tile_count, [&](int part, std::int64_t first, std::int64_t last) {
    std::uint64_t* const own = sums.data() + copies.size() * part;
    visit_tiles(pages, copies, first, last, [&](std::size_t index, const BlockCopy& copy, const TilePlace& place) {
      const std::int64_t offset = chunk_offset(pages, copy, place);
      own[index] += kernels.gather(page_tile(pages, layer_addresses, block_ids, copy, place),
                                   pool + copy.offset + offset, pages.tile_bytes, offset / 8);
    });
    kernels.publish();
  });
  for (std::size_t index = 0; index < copies.size(); ++index) {
    checksums[index] = 0;
    for (int part = 0; part < parts; ++part) checksums[index] += sums[copies.size() * part + index];
  }
}

void scatter(const TileKernels& kernels, const Pages& pages, std::span<const std::uint64_t> layer_addresses,
             const std::byte* pool, std::span<const BlockCopy> copies, std::span<const std::int64_t> block_ids,
             int threads) {
  const std::int64_t tile_count = static_cast<std::int64_t>(block_ids.size()) * pages.layer_count * pages.head_count;
  const int parts = thread_count(threads, tile_count * pages.tile_bytes);
  run_parts(parts, tile_count, [&](int, std::int64_t first, std::int64_t last) {
    visit_tiles(pages, copies, first, last, [&](std::size_t, const BlockCopy& copy, const TilePlace& place) {
      kernels.scatter(pool + copy.offset + chunk_offset(pages, copy, place),
                      page_tile(pages, layer_addresses, block_ids, copy, place), pages.tile_bytes);
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
