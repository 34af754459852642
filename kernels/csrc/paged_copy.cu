// Copies between KV-cache pages in device memory and chunks: all layers and all copies of a call in one launch.
//
// Thread blocks iterate over tiles, and threads over the pieces of a tile: adjacent threads of a warp access adjacent
// bytes on both sides. Chunks are in the pool (pinned host memory that the device can access), or in a staging buffer
// on the device, where the rows of a copy are contiguous. lmkv_kernels.cuda launches the kernels.
#include "layout.h"

namespace lmkv {

// The arguments of a launch. All fields are 8 bytes: lmkv_kernels/cuda/program.py packs them in this order.
struct Launch {
  Pages pages;
  const std::uint64_t* layer_addresses;
  const ChunkCopy* copies;
  const std::int64_t* block_ids;        // of all copies
  const std::int64_t* copy_of_id;       // which copy each of them belongs to
  const std::int64_t* staging_offsets;  // where each copy begins in the staging buffer; null: `chunks` is the pool
  unsigned char* chunks;
  std::uint64_t* sums;  // one per copy, zeroed; what its words add to its chunk's checksum
  std::int64_t id_count;
};

// The unit that one thread copies at a time.
template <int bytes>
struct alignas(bytes) Piece {
  std::uint64_t words[bytes / 8];
};

// Pieces that a thread reads before it writes the first of them, to hide latency.
constexpr std::uint32_t in_flight = 2;

enum class Way { to_chunks, to_pages };

// A copy's rows in the staging buffer: only those of this rank's heads.
LMKV_HOST_DEVICE inline Pages staged(Pages pages) {
  pages.first_head = 0;
  pages.kv_head_count = pages.head_count;
  return pages;
}

LMKV_HOST_DEVICE inline ChunkCopy staged(ChunkCopy copy, std::int64_t offset) {
  copy.offset = offset;
  copy.extent_rows = copy.row_count;
  copy.first_row = 0;
  return copy;
}

// One thread's share of a tile. Returns the sum of its words.
template <int bytes, Way way, bool summing>
__device__ std::uint64_t copy_tile(const Launch& launch, const ChunkCopy& copy, const ChunkCopy& stored,
                                   const Tile& tile) {
  const Pages& pages = launch.pages;
  const Rows rows = rows_of(pages, copy, tile.block);
  const std::int64_t block_id = launch.block_ids[copy.first_id + tile.block];
  auto* const layer = reinterpret_cast<unsigned char*>(launch.layer_addresses[tile.layer]);
  const auto pieces_per_row = static_cast<std::uint32_t>(pages.row_bytes / bytes);
  const auto piece_count = static_cast<std::uint32_t>(rows.count) * pieces_per_row;
  // The stride of a thread per step; saves a division per piece.
  const std::uint32_t row_step = blockDim.x / pieces_per_row;
  const std::uint32_t piece_step = blockDim.x % pieces_per_row;

  std::uint64_t sum = 0;
  for (std::int64_t part = 0; part < pages.part_count; ++part) {
    const std::int64_t row_stride = pages.parts[part].row_stride;
    unsigned char* const page = layer + page_offset(pages, pages.parts[part], block_id, tile.head, rows.in_block);
    const std::int64_t offset = chunk_offset(pages, copy, tile, part, rows.in_chunk);
    unsigned char* chunk = launch.chunks + copy.offset + offset;
    if (launch.staging_offsets != nullptr) {
      const std::int64_t row = rows.in_chunk - copy.first_row;
      chunk = launch.chunks + stored.offset + chunk_offset(staged(pages), stored, tile, part, row);
    }
    std::uint32_t row = threadIdx.x / pieces_per_row;
    std::uint32_t piece = threadIdx.x % pieces_per_row;
    for (std::uint32_t first = threadIdx.x; first < piece_count; first += in_flight * blockDim.x) {
      Piece<bytes> moved[in_flight] = {};
      Piece<bytes>* targets[in_flight] = {};
      for (std::uint32_t each = 0; each < in_flight; ++each) {
        const std::uint32_t index = first + each * blockDim.x;
        if (index >= piece_count) break;
        auto* const in_page = reinterpret_cast<Piece<bytes>*>(page + row * row_stride) + piece;
        auto* const in_chunk = reinterpret_cast<Piece<bytes>*>(chunk) + index;
        moved[each] = way == Way::to_chunks ? *in_page : *in_chunk;
        targets[each] = way == Way::to_chunks ? in_chunk : in_page;
        row += row_step;
        piece += piece_step;
        if (piece >= pieces_per_row) {
          piece -= pieces_per_row;
          ++row;
        }
      }
      for (std::uint32_t each = 0; each < in_flight; ++each) {
        const std::uint32_t index = first + each * blockDim.x;
        if (index >= piece_count) break;
        *targets[each] = moved[each];
        if constexpr (summing) {
          const std::uint64_t first_word = offset / 8 + static_cast<std::uint64_t>(index) * (bytes / 8);
          for (int word = 0; word < bytes / 8; ++word) {
            sum += word_sum(moved[each].words[word], word_key(first_word + word));
          }
        }
      }
    }
  }
  return sum;
}

// Adds the sums of a warp's threads to `total`.
__device__ inline void add(std::uint64_t* total, std::uint64_t sum) {
  for (int distance = warpSize / 2; distance > 0; distance /= 2) sum += __shfl_down_sync(~0U, sum, distance);
  if (threadIdx.x % warpSize == 0) atomicAdd(reinterpret_cast<unsigned long long*>(total), sum);
}

// Tiles are numbered with the heads innermost, so that adjacent tiles of a block are read together.
template <int bytes, Way way, bool summing>
__device__ void copy_tiles(const Launch& launch) {
  const auto heads = static_cast<std::uint32_t>(launch.pages.head_count);
  const auto layers = static_cast<std::uint32_t>(launch.pages.layer_count);
  const std::uint32_t count = static_cast<std::uint32_t>(launch.id_count) * layers * heads;
  for (std::uint32_t index = blockIdx.x; index < count; index += gridDim.x) {
    const std::int64_t id = index / heads / layers;
    const std::int64_t copy_index = launch.copy_of_id[id];
    const ChunkCopy copy = launch.copies[copy_index];
    const Tile tile{index / heads % layers, index % heads, id - copy.first_id};
    const ChunkCopy stored =
        launch.staging_offsets == nullptr ? copy : staged(copy, launch.staging_offsets[copy_index]);
    const std::uint64_t sum = copy_tile<bytes, way, summing>(launch, copy, stored, tile);
    if constexpr (summing) add(launch.sums + copy_index, sum);
  }
}

}  // namespace lmkv

#define LMKV_KERNEL(name, bytes, way, summing)                                                  \
  extern "C" __global__ void __launch_bounds__(128) name(const lmkv::Launch launch) {           \
    lmkv::copy_tiles<bytes, lmkv::Way::way, summing>(launch);                                   \
  }

LMKV_KERNEL(gather_16, 16, to_chunks, false)
LMKV_KERNEL(gather_8, 8, to_chunks, false)
LMKV_KERNEL(gather_sum_16, 16, to_chunks, true)
LMKV_KERNEL(gather_sum_8, 8, to_chunks, true)
LMKV_KERNEL(scatter_16, 16, to_pages, false)
LMKV_KERNEL(scatter_8, 8, to_pages, false)
