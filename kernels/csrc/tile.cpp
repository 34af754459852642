#include "tile.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "layout.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lmkv {
namespace {

static_assert(std::endian::native == std::endian::little, "words are summed as they lie in memory");

std::uint64_t load_word(const std::byte* source) {
  std::uint64_t word;
  std::memcpy(&word, source, sizeof(word));
  return word;
}

namespace portable {

std::uint64_t checksum(const std::byte* source, std::size_t size_bytes, std::uint64_t first_word) {
  std::uint64_t sum = 0;
  for (std::size_t word = 0; word < size_bytes / 8; ++word) {
    sum += word_sum(load_word(source + 8 * word), word_key(first_word + word));
  }
  return sum;
}

std::uint64_t gather(const std::byte* source, std::byte* target, std::size_t size_bytes, std::uint64_t first_word) {
  constexpr std::size_t step = 8192;  // stays in the first-level cache between copy and sum
  std::uint64_t sum = 0;
  for (std::size_t done = 0; done < size_bytes; done += step) {
    const std::size_t size = std::min(step, size_bytes - done);
    std::memcpy(target + done, source + done, size);
    sum += checksum(source + done, size, first_word + done / 8);
  }
  return sum;
}

void scatter(const std::byte* source, std::byte* target, std::size_t size_bytes) {
  std::memcpy(target, source, size_bytes);
}

void publish() {}

constexpr TileKernels kernels{"portable", gather, scatter, checksum, publish};

}  // namespace portable

#if defined(__x86_64__)
namespace avx2 {

#define LMKV_AVX2 __attribute__((target("avx2")))

constexpr std::size_t vector_bytes = 32;
constexpr std::size_t step_bytes = 4 * vector_bytes;
constexpr std::size_t prefetch_bytes = 1024;  // ahead of the loads; the best of 0, 512, 1024 and 2048

enum class Store { none, plain, streaming };

// Adds to each half of four words.
LMKV_AVX2 inline __m256i broadcast_key_step(std::uint32_t words) {
  const std::uint64_t halves = static_cast<std::uint64_t>(words * 0x85EBCA77U) << 32 | (words * 0x9E3779B1U);
  return _mm256_set1_epi64x(static_cast<long long>(halves));
}

LMKV_AVX2 inline __m256i keys_of_four(std::uint64_t first_word) {
  return _mm256_set_epi64x(
      static_cast<long long>(word_key(first_word + 3)), static_cast<long long>(word_key(first_word + 2)),
      static_cast<long long>(word_key(first_word + 1)), static_cast<long long>(word_key(first_word)));
}

LMKV_AVX2 inline __m256i sums_of_four(__m256i words, __m256i keys) {
  const __m256i halves = _mm256_add_epi32(words, keys);
  return _mm256_add_epi64(words, _mm256_mul_epu32(halves, _mm256_srli_epi64(halves, 32)));
}

template <Store store>
LMKV_AVX2 inline void put(std::byte* target, __m256i words) {
  if constexpr (store == Store::streaming) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target), words);
  } else if constexpr (store == Store::plain) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), words);
  }
}

template <Store store, bool summing>
LMKV_AVX2 std::uint64_t pass(const std::byte* source, std::byte* target, std::size_t size_bytes,
                             std::uint64_t first_word) {
  constexpr int vectors = step_bytes / vector_bytes;
  const __m256i key_step = broadcast_key_step(step_bytes / 8);
  __m256i keys[vectors];
  __m256i sums[vectors];
  for (int v = 0; v < vectors; ++v) {
    keys[v] = keys_of_four(first_word + 4 * v);
    sums[v] = _mm256_setzero_si256();
  }

  std::size_t done = 0;
  for (; done + step_bytes <= size_bytes; done += step_bytes) {
    const char* ahead = reinterpret_cast<const char*>(source + done) + prefetch_bytes;
    _mm_prefetch(ahead, _MM_HINT_T0);
    _mm_prefetch(ahead + 64, _MM_HINT_T0);
    __m256i words[vectors];
    for (int v = 0; v < vectors; ++v) {
      words[v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + done + v * vector_bytes));
    }
    for (int v = 0; v < vectors; ++v) {
      if constexpr (store != Store::none) put<store>(target + done + v * vector_bytes, words[v]);
      if constexpr (summing) {
        sums[v] = _mm256_add_epi64(sums[v], sums_of_four(words[v], keys[v]));
        keys[v] = _mm256_add_epi32(keys[v], key_step);
      }
    }
  }

  if constexpr (store != Store::none) std::memcpy(target + done, source + done, size_bytes - done);
  if constexpr (!summing) return 0;
  alignas(vector_bytes) std::uint64_t lanes[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes),
                     _mm256_add_epi64(_mm256_add_epi64(sums[0], sums[1]), _mm256_add_epi64(sums[2], sums[3])));
  return lanes[0] + lanes[1] + lanes[2] + lanes[3] +
         portable::checksum(source + done, size_bytes - done, first_word + done / 8);
}

// Streaming stores save reading the target's lines before they are overwritten, a third of the traffic.
bool may_stream(const std::byte* target) { return reinterpret_cast<std::uintptr_t>(target) % vector_bytes == 0; }

std::uint64_t gather(const std::byte* source, std::byte* target, std::size_t size_bytes, std::uint64_t first_word) {
  return may_stream(target) ? pass<Store::streaming, true>(source, target, size_bytes, first_word)
                            : pass<Store::plain, true>(source, target, size_bytes, first_word);
}

void scatter(const std::byte* source, std::byte* target, std::size_t size_bytes) {
  if (may_stream(target)) {
    pass<Store::streaming, false>(source, target, size_bytes, 0);
  } else {
    pass<Store::plain, false>(source, target, size_bytes, 0);
  }
}

std::uint64_t checksum(const std::byte* source, std::size_t size_bytes, std::uint64_t first_word) {
  return pass<Store::none, true>(source, nullptr, size_bytes, first_word);
}

void publish() { _mm_sfence(); }

constexpr TileKernels kernels{"avx2", gather, scatter, checksum, publish};

}  // namespace avx2
#endif

}  // namespace

const TileKernels& portable_kernels() { return portable::kernels; }

const TileKernels& best_kernels() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return avx2::kernels;
#endif
  return portable::kernels;
}

}  // namespace lmkv
