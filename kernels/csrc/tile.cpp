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

// A copy in the shape of a gather.
template <decltype(TileKernels::copy) copy>
std::uint64_t unsummed(const std::byte* pages, std::int64_t stride_bytes, std::byte* chunk, std::int64_t row_bytes,
                       std::int64_t row_count, std::uint64_t) {
  copy(pages, stride_bytes, chunk, row_bytes, row_bytes, row_count);
  return 0;
}

namespace portable {

std::uint64_t checksum(const std::byte* chunk, std::size_t size_bytes, std::uint64_t first_word) {
  std::uint64_t sum = 0;
  for (std::size_t word = 0; word < size_bytes / 8; ++word) {
    sum += word_sum(load_word(chunk + 8 * word), word_key(first_word + word));
  }
  return sum;
}

std::uint64_t gather(const std::byte* pages, std::int64_t stride_bytes, std::byte* chunk, std::int64_t row_bytes,
                     std::int64_t row_count, std::uint64_t first_word) {
  constexpr std::int64_t step = 8192;  // stays in the first-level cache between copy and sum
  std::uint64_t sum = 0;
  for (std::int64_t row = 0; row < row_count; ++row) {
    const std::byte* const source = pages + row * stride_bytes;
    for (std::int64_t done = 0; done < row_bytes; done += step) {
      const std::int64_t size = std::min(step, row_bytes - done);
      std::memcpy(chunk, source + done, size);
      sum += checksum(source + done, size, first_word);
      chunk += size;
      first_word += size / 8;
    }
  }
  return sum;
}

void copy(const std::byte* source, std::int64_t source_stride, std::byte* target, std::int64_t target_stride,
          std::int64_t row_bytes, std::int64_t row_count) {
  for (std::int64_t row = 0; row < row_count; ++row) {
    std::memcpy(target + row * target_stride, source + row * source_stride, row_bytes);
  }
}

void publish() {}

constexpr TileKernels kernels{"portable", gather, unsummed<copy>, copy, checksum, publish};

}  // namespace portable

#if defined(__x86_64__)
namespace avx2 {

#define LMKV_AVX2 __attribute__((target("avx2")))
#define LMKV_INLINE __attribute__((always_inline)) inline

constexpr std::int64_t vector_bytes = 32;
constexpr std::int64_t vector_words = vector_bytes / 8;
constexpr int vectors = 4;
constexpr std::int64_t step_bytes = vectors * vector_bytes;

// Prefetch distance in a long range, and in rows: the best of 256 to 4096.
constexpr std::int64_t ahead_when(bool summing) { return summing ? 2048 : 512; }
constexpr std::int64_t ahead_in_rows = 1024;

enum class Store { none, plain, streaming };

// Keys grow by the same step from word to word, so those of a vector are the first one's plus a constant.
LMKV_AVX2 LMKV_INLINE __m256i keys_of_four(std::uint64_t first_word) {
  constexpr auto step = [](std::uint64_t words) { return static_cast<long long>(word_key(words - 1)); };
  const __m256i first = _mm256_set1_epi64x(static_cast<long long>(word_key(first_word)));
  return _mm256_add_epi32(first, _mm256_set_epi64x(step(3), step(2), step(1), 0));
}

// The difference of the keys of two words at this distance.
LMKV_AVX2 LMKV_INLINE __m256i key_step(std::uint64_t words) {
  return _mm256_set1_epi64x(static_cast<long long>(word_key(words - 1)));
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

// Iterates over consecutive words of a chunk, in several ranges.
template <Store store, bool summing>
class Pass {
 public:
  LMKV_AVX2 LMKV_INLINE explicit Pass(std::uint64_t first_word) : word_(first_word) {
    for (auto& sum : sums_) sum = _mm256_setzero_si256();
    if constexpr (summing) start_keys();
  }

  LMKV_AVX2 LMKV_INLINE void run(const std::byte* source, std::byte* target, std::int64_t size_bytes,
                                 std::int64_t ahead_bytes = ahead_when(summing)) {
    const __m256i full_step = key_step(step_bytes / 8);
    std::int64_t done = 0;
    for (; done + step_bytes <= size_bytes; done += step_bytes) {
      const char* ahead = reinterpret_cast<const char*>(source + done) + ahead_bytes;
      _mm_prefetch(ahead, _MM_HINT_T0);
      _mm_prefetch(ahead + 64, _MM_HINT_T0);
      __m256i words[vectors];
      for (int v = 0; v < vectors; ++v) words[v] = load(source + done + v * vector_bytes);
      for (int v = 0; v < vectors; ++v) {
        put<store>(place(target, done + v * vector_bytes), words[v]);
        if constexpr (summing) {
          sums_[v] = _mm256_add_epi64(sums_[v], sums_of_four(words[v], keys_[v]));
          keys_[v] = _mm256_add_epi32(keys_[v], full_step);
        }
      }
    }
    if constexpr (summing) word_ += done / 8;
    if (done < size_bytes) finish(source + done, place(target, done), size_bytes - done);
  }

  LMKV_AVX2 LMKV_INLINE std::uint64_t sum() const {
    alignas(vector_bytes) std::uint64_t lanes[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes),
                       _mm256_add_epi64(_mm256_add_epi64(sums_[0], sums_[1]), _mm256_add_epi64(sums_[2], sums_[3])));
    return lanes[0] + lanes[1] + lanes[2] + lanes[3] + rest_;
  }

 private:
  // An address in the target; there is no target if nothing is stored.
  static inline std::byte* place(std::byte* target, std::int64_t at) {
    return store == Store::none ? target : target + at;
  }

  LMKV_AVX2 static inline __m256i load(const std::byte* source) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
  }

  LMKV_AVX2 LMKV_INLINE void start_keys() {
    keys_[0] = keys_of_four(word_);
    for (int v = 1; v < vectors; ++v) keys_[v] = _mm256_add_epi32(keys_[v - 1], key_step(vector_words));
  }

  // The end of a range that is not a whole step: vectors, then words.
  LMKV_AVX2 LMKV_INLINE void finish(const std::byte* source, std::byte* target, std::int64_t size_bytes) {
    const __m256i one_vector = key_step(vector_words);
    std::int64_t done = 0;
    for (; done + vector_bytes <= size_bytes; done += vector_bytes) {
      const __m256i words = load(source + done);
      put<store>(place(target, done), words);
      if constexpr (summing) {
        sums_[0] = _mm256_add_epi64(sums_[0], sums_of_four(words, keys_[0]));
        for (auto& keys : keys_) keys = _mm256_add_epi32(keys, one_vector);
      }
    }
    const std::int64_t left = size_bytes - done;
    if constexpr (summing) word_ += done / 8;
    if (left == 0) return;
    if constexpr (store != Store::none) std::memcpy(target + done, source + done, left);
    if constexpr (summing) {
      rest_ += portable::checksum(source + done, left, word_);
      word_ += left / 8;
      start_keys();
    }
  }

  __m256i keys_[vectors];
  __m256i sums_[vectors];
  std::uint64_t rest_ = 0;
  std::uint64_t word_;
};

// Streaming stores save reading the target's lines before they are overwritten, a third of the traffic. They are faster
// if whole lines are written in order, and need targets aligned to a vector.
bool may_stream(const std::byte* target) { return reinterpret_cast<std::uintptr_t>(target) % vector_bytes == 0; }

bool may_stream_rows(const std::byte* target, std::int64_t stride_bytes, std::int64_t row_bytes) {
  constexpr std::uintptr_t line_bytes = 64;
  return (reinterpret_cast<std::uintptr_t>(target) | static_cast<std::uintptr_t>(stride_bytes | row_bytes)) %
             line_bytes == 0;
}

// Prefetch distance between rows.
std::int64_t ahead_of(std::int64_t stride_bytes, std::int64_t row_bytes, std::int64_t row_count, bool summing) {
  return row_count == 1 ? ahead_when(summing) : stride_bytes * std::max<std::int64_t>(ahead_in_rows / row_bytes, 1);
}

template <Store store>
LMKV_AVX2 std::uint64_t gather_by(const std::byte* pages, std::int64_t stride_bytes, std::byte* chunk,
                                  std::int64_t row_bytes, std::int64_t row_count, std::uint64_t first_word) {
  Pass<store, true> pass(first_word);
  const std::int64_t ahead_bytes = ahead_of(stride_bytes, row_bytes, row_count, true);
  for (std::int64_t row = 0; row < row_count; ++row) {
    pass.run(pages + row * stride_bytes, chunk + row * row_bytes, row_bytes, ahead_bytes);
  }
  return pass.sum();
}

std::uint64_t gather(const std::byte* pages, std::int64_t stride_bytes, std::byte* chunk, std::int64_t row_bytes,
                     std::int64_t row_count, std::uint64_t first_word) {
  const bool whole_vectors = row_count == 1 || row_bytes % vector_bytes == 0;
  const auto by = may_stream(chunk) && whole_vectors ? gather_by<Store::streaming> : gather_by<Store::plain>;
  return by(pages, stride_bytes, chunk, row_bytes, row_count, first_word);
}

template <Store store>
LMKV_AVX2 void copy_by(const std::byte* source, std::int64_t source_stride, std::byte* target,
                       std::int64_t target_stride, std::int64_t row_bytes, std::int64_t row_count) {
  Pass<store, false> pass(0);
  const std::int64_t ahead_bytes = ahead_of(source_stride, row_bytes, row_count, false);
  for (std::int64_t row = 0; row < row_count; ++row) {
    pass.run(source + row * source_stride, target + row * target_stride, row_bytes, ahead_bytes);
  }
}

void copy(const std::byte* source, std::int64_t source_stride, std::byte* target, std::int64_t target_stride,
          std::int64_t row_bytes, std::int64_t row_count) {
  const bool streams = row_count == 1 ? may_stream(target) : may_stream_rows(target, target_stride, row_bytes);
  const auto by = streams ? copy_by<Store::streaming> : copy_by<Store::plain>;
  by(source, source_stride, target, target_stride, row_bytes, row_count);
}

LMKV_AVX2 std::uint64_t checksum(const std::byte* chunk, std::size_t size_bytes, std::uint64_t first_word) {
  Pass<Store::none, true> pass(first_word);
  pass.run(chunk, nullptr, static_cast<std::int64_t>(size_bytes));
  return pass.sum();
}

void publish() { _mm_sfence(); }

constexpr TileKernels kernels{"avx2", gather, unsummed<copy>, copy, checksum, publish};

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
