// SHA-256 (FIPS 180-4), with the processor's SHA instructions if it has them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace lmkv {

// An incremental hash.
class Sha256 {
 public:
  using Digest = std::array<std::uint8_t, 32>;

  // `portable` avoids instruction set extensions.
  explicit Sha256(bool portable = false);

  void update(std::span<const std::uint8_t> bytes);

  // The hash of all input. Must be the last call.
  Digest finish();

  static constexpr std::size_t block_bytes = 64;
  using State = std::array<std::uint32_t, 8>;
  using Compress = void(State& state, const std::uint8_t* blocks, std::size_t block_count);

 private:
  Compress* compress_;
  State state_;
  std::array<std::uint8_t, block_bytes> open_;  // the block that is not full yet
  std::size_t open_bytes_ = 0;
  std::uint64_t total_bytes_ = 0;
};

}  // namespace lmkv
