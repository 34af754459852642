// Complete calls on several threads: copies of many tiles between pages and pool, or one long checksum.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "layout.h"
#include "tile.h"

namespace lmkv {

// Pages -> pool. Writes to `checksums`, one per copy, what the copied words add to their chunk's checksum. If it is
// empty, no checksums are computed.
void gather(const TileKernels& kernels, const Pages& pages, std::span<const std::uint64_t> layer_addresses,
            std::byte* pool, std::span<const ChunkCopy> copies, std::span<const std::int64_t> block_ids, int threads,
            std::span<std::uint64_t> checksums);

// Pool -> pages.
void scatter(const TileKernels& kernels, const Pages& pages, std::span<const std::uint64_t> layer_addresses,
             const std::byte* pool, std::span<const ChunkCopy> copies, std::span<const std::int64_t> block_ids,
             int threads);

// Checksum of an extent.
std::uint64_t checksum(const TileKernels& kernels, const std::byte* source, std::size_t size_bytes, int threads);

}  // namespace lmkv
