// The extensions of CUDA C++ that the kernels use, so that their source compiles for the processor and runs there.
// The threads of a warp are fibers: they take turns at each shuffle, as lanes that wait for each other.
#pragma once

#include <ucontext.h>

#include <array>
#include <cstdint>
#include <functional>

#define __global__
#define __device__
#define __launch_bounds__(threads)

struct Index {
  unsigned x;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

namespace emulated {

constexpr unsigned lanes = 32;

// One warp at a time. `lane` runs; the others wait in a shuffle, or have not begun, or are done.
struct Warp {
  std::array<ucontext_t, lanes> contexts;
  std::array<std::array<char, 32 << 10>, lanes> stacks;
  std::array<std::uint64_t, lanes> shown;
  std::array<bool, lanes> over;
  ucontext_t scheduler;
  std::function<void()> work;
  unsigned lane, first_thread;

  static Warp& instance() {
    static Warp warp;
    return warp;
  }

  static void begin() {
    Warp& warp = instance();
    warp.work();
    warp.over[warp.lane] = true;
  }

  void run() {
    for (unsigned each = 0; each < lanes; ++each) {
      over[each] = false;
      getcontext(&contexts[each]);
      contexts[each].uc_stack.ss_sp = stacks[each].data();
      contexts[each].uc_stack.ss_size = stacks[each].size();
      contexts[each].uc_link = &scheduler;
      makecontext(&contexts[each], &Warp::begin, 0);
    }
    for (bool running = true; running;) {
      running = false;
      for (lane = 0; lane < lanes; ++lane) {
        if (over[lane]) continue;
        threadIdx.x = first_thread + lane;
        swapcontext(&scheduler, &contexts[lane]);
        running = running || !over[lane];
      }
    }
  }

  // All lanes publish a value before any continues.
  std::uint64_t shuffle(std::uint64_t value, unsigned distance) {
    const unsigned own = lane;
    shown[own] = value;
    swapcontext(&contexts[own], &scheduler);
    const std::uint64_t seen = own + distance < lanes ? shown[own + distance] : value;
    swapcontext(&contexts[own], &scheduler);  // no thread publishes the next before all have seen this one
    return seen;
  }
};

// Runs a kernel, block after block and warp after warp.
inline void run(unsigned blocks, unsigned threads, const std::function<void()>& work) {
  Warp& warp = Warp::instance();
  warp.work = work;
  gridDim.x = blocks;
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    for (warp.first_thread = 0; warp.first_thread < threads; warp.first_thread += lanes) warp.run();
  }
}

}  // namespace emulated

inline std::uint64_t __shfl_down_sync(unsigned, std::uint64_t value, unsigned distance) {
  return emulated::Warp::instance().shuffle(value, distance);
}

inline void atomicAdd(unsigned long long* total, unsigned long long value) { *total += value; }
