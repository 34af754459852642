#include "sha256.h"

#include <algorithm>
#include <bit>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lmkv {
namespace {

constexpr int rounds = 64;

alignas(16) constexpr std::uint32_t round_keys[rounds] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

constexpr Sha256::State initial_state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

std::uint32_t load_big_endian(const std::uint8_t* bytes) {
  return std::uint32_t{bytes[0]} << 24 | bytes[1] << 16 | bytes[2] << 8 | bytes[3];
}

void compress_portable(Sha256::State& state, const std::uint8_t* blocks, std::size_t block_count) {
  for (; block_count; --block_count, blocks += Sha256::block_bytes) {
    std::uint32_t words[rounds];
    for (int t = 0; t < 16; ++t) words[t] = load_big_endian(blocks + 4 * t);
    for (int t = 16; t < rounds; ++t) {
      const std::uint32_t near = words[t - 2], far = words[t - 15];
      words[t] = words[t - 16] + (std::rotr(far, 7) ^ std::rotr(far, 18) ^ far >> 3) + words[t - 7] +
                 (std::rotr(near, 17) ^ std::rotr(near, 19) ^ near >> 10);
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (int t = 0; t < rounds; ++t) {
      const std::uint32_t first = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & f) ^ (~e & g)) +
                                  round_keys[t] + words[t];
      const std::uint32_t second =
          (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
    }
    const Sha256::State added = {a, b, c, d, e, f, g, h};
    for (int i = 0; i < 8; ++i) state[i] += added[i];
  }
}

#if defined(__x86_64__)

// The instructions do two rounds at a time, with the state as ABEF and CDGH, highest word first.
__attribute__((target("sha,sse4.1"))) void compress_sha_ni(Sha256::State& state, const std::uint8_t* blocks,
                                                           std::size_t block_count) {
  const auto vectors = [](const auto* memory) { return reinterpret_cast<const __m128i*>(memory); };
  const auto halves = reinterpret_cast<__m128i*>(state.data());
  const __m128i to_big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  const __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128(halves), 0xb1);
  const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128(halves + 1), 0x1b);
  __m128i abef = _mm_alignr_epi8(cdab, efgh, 8);
  __m128i cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);

  for (; block_count; --block_count, blocks += Sha256::block_bytes) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i words[4];
    for (int i = 0; i < 4; ++i) words[i] = _mm_shuffle_epi8(_mm_loadu_si128(vectors(blocks) + i), to_big_endian);
#pragma GCC unroll 16
    for (int i = 0; i < rounds / 4; ++i) {
      __m128i& now = words[i % 4];
      const __m128i last = words[(i + 3) % 4];
      const __m128i keyed = _mm_add_epi32(now, _mm_load_si128(vectors(round_keys) + i));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, keyed);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(keyed, 0x0e));
      if (i < rounds / 4 - 4) {  // the words of 16 rounds later
        const __m128i far = _mm_sha256msg1_epu32(now, words[(i + 1) % 4]);
        now = _mm_sha256msg2_epu32(_mm_add_epi32(far, _mm_alignr_epi8(last, words[(i + 2) % 4], 4)), last);
      }
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }

  const __m128i feba = _mm_shuffle_epi32(abef, 0x1b);
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xb1);
  _mm_storeu_si128(halves, _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128(halves + 1, _mm_alignr_epi8(dchg, feba, 8));
}

#endif

Sha256::Compress* best_compress() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sha") && __builtin_cpu_supports("sse4.1")) return compress_sha_ni;
#endif
  return compress_portable;
}

}  // namespace

Sha256::Sha256(bool portable) : compress_(portable ? compress_portable : best_compress()), state_(initial_state) {}

void Sha256::update(std::span<const std::uint8_t> bytes) {
  total_bytes_ += bytes.size();
  if (open_bytes_) {
    const std::size_t taken = std::min(block_bytes - open_bytes_, bytes.size());
    std::copy_n(bytes.begin(), taken, open_.begin() + open_bytes_);
    open_bytes_ += taken;
    bytes = bytes.subspan(taken);
    if (open_bytes_ < block_bytes) return;
    compress_(state_, open_.data(), 1);
  }
  compress_(state_, bytes.data(), bytes.size() / block_bytes);
  open_bytes_ = bytes.size() % block_bytes;
  std::copy(bytes.end() - open_bytes_, bytes.end(), open_.begin());
}

Sha256::Digest Sha256::finish() {
  // Padding: a one bit, zeros, and the length in bits.
  std::array<std::uint8_t, 2 * block_bytes> end{0x80};
  const std::size_t padding = 1 + (2 * block_bytes - 9 - open_bytes_) % block_bytes;
  const std::uint64_t bits = 8 * total_bytes_;
  for (int i = 0; i < 8; ++i) end[padding + i] = static_cast<std::uint8_t>(bits >> (56 - 8 * i));
  update(std::span(end).first(padding + 8));

  Digest digest;
  for (std::size_t i = 0; i < digest.size(); ++i) {
    digest[i] = static_cast<std::uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
  }
  return digest;
}

}  // namespace lmkv
