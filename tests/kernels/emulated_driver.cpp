// The part of the CUDA driver's interface that lmkv uses, on the processor: for tests where there is no device.
//
// Streams do nothing until a caller waits for one of their events, or polls it often enough; then they do only what
// that event waits for. So what is not ordered by events happens in the worst order, and a missing one shows.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "emulated_device.h"
#include "paged_copy.cu"

namespace {

enum Status { ok = 0, invalid_value = 1, not_found = 500, not_ready = 600 };

struct Stream {
  std::vector<std::function<void()>> work;
  std::size_t done = 0;

  void run_until(std::size_t count) {
    while (done < count) {
      const std::size_t next = done++;
      work[next]();
    }
  }
};

struct Event {
  Stream* stream;
  std::size_t at;
};

Stream default_stream;
thread_local int context_depth = 0;
std::map<std::uint64_t, std::size_t> reachable;  // what device and DMA may touch: address -> bytes

Stream* stream_of(void* handle) { return handle == nullptr ? &default_stream : static_cast<Stream*>(handle); }

bool may_touch(std::uint64_t address, std::size_t size) {
  auto after = reachable.upper_bound(address);
  if (after == reachable.begin()) return false;
  const auto& [start, length] = *--after;
  return address + size <= start + length;
}

using Kernel = void (*)(lmkv::Launch);
const std::map<std::string, Kernel> kernels{{"gather_16", gather_16},         {"gather_8", gather_8},
                                            {"gather_sum_16", gather_sum_16}, {"gather_sum_8", gather_sum_8},
                                            {"scatter_16", scatter_16},       {"scatter_8", scatter_8}};

struct Side {
  std::size_t x, y;
  int memory;
  std::uint64_t host, device, array;
  std::size_t pitch;
  std::uint64_t address() const { return memory == 1 ? host : device; }
};

struct Rectangle {
  Side source, target;
  std::size_t width, height;
};

}  // namespace

extern "C" {

int cuInit(unsigned) { return ok; }
int cuDriverGetVersion(int* version) { return *version = 13000, ok; }
int cuDeviceGetCount(int* count) { return *count = 1, ok; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, ok; }
int cuDeviceGetName(char* name, int size, int) { return std::strncpy(name, "emulated", size), ok; }
int cuDeviceGetAttribute(int* value, int which, int) { return *value = which == 75 ? 9 : which == 76 ? 0 : 1, ok; }
int cuDeviceGetPCIBusId(char* name, int size, int) { return std::strncpy(name, "0000:AB:00.0", size), ok; }
int cuDevicePrimaryCtxRetain(void** context, int) { return *context = &default_stream, ok; }
int cuDevicePrimaryCtxRelease_v2(int) { return ok; }
int cuCtxPushCurrent_v2(void* context) { return context == nullptr ? invalid_value : (++context_depth, ok); }
int cuCtxPopCurrent_v2(void**) { return context_depth == 0 ? invalid_value : (--context_depth, ok); }
int cuGetErrorName(int status, const char** name) { return *name = status == 1 ? "INVALID_VALUE" : "ERROR", ok; }
int cuGetErrorString(int, const char** text) { return *text = "emulated", ok; }

int cuModuleLoadData(void** module, const char* image) {
  if (std::strncmp(image, "emulated", 8) != 0) return invalid_value;
  return *module = &default_stream, ok;
}
int cuModuleUnload(void*) { return ok; }
int cuModuleGetFunction(void** function, void*, const char* name) {
  const auto found = kernels.find(name);
  if (found == kernels.end()) return not_found;
  return *function = reinterpret_cast<void*>(found->second), ok;
}
int cuLaunchKernel(void* function, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned, unsigned, unsigned,
                   void* stream, void** parameters, void*) {
  if (blocks == 0 || threads == 0 || threads > 128 || threads % 32 != 0 || context_depth == 0) return invalid_value;
  const auto launch = *static_cast<const lmkv::Launch*>(parameters[0]);
  const auto kernel = reinterpret_cast<Kernel>(function);
  stream_of(stream)->work.push_back([=] { emulated::run(blocks, threads, [&] { kernel(launch); }); });
  return ok;
}

int cuStreamCreate(void** stream, unsigned) { return *stream = new Stream, ok; }
int cuStreamSynchronize(void* stream) { return stream_of(stream)->run_until(stream_of(stream)->work.size()), ok; }
int cuStreamDestroy_v2(void*) { return ok; }  // events may still name it
int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  const Event point = *static_cast<Event*>(event);
  stream_of(stream)->work.push_back([=] { point.stream->run_until(point.at); });
  return ok;
}
int cuEventCreate(void** event, unsigned) { return *event = new Event{&default_stream, 0}, ok; }
int cuEventDestroy_v2(void* event) { return delete static_cast<Event*>(event), ok; }
int cuEventRecord(void* event, void* stream) {
  *static_cast<Event*>(event) = {stream_of(stream), stream_of(stream)->work.size()};
  return ok;
}
int cuEventQuery(void* event) {
  const Event& point = *static_cast<Event*>(event);
  if (point.stream->done >= point.at) return ok;
  point.stream->run_until(point.stream->done + 1);
  return not_ready;
}
int cuEventSynchronize(void* event) {
  const Event& point = *static_cast<Event*>(event);
  return point.stream->run_until(point.at), ok;
}
int cuEventElapsedTime(float* milliseconds, void*, void*) { return *milliseconds = 1.0F, ok; }

int cuMemAlloc_v2(std::uint64_t* address, std::size_t size) {
  *address = reinterpret_cast<std::uint64_t>(std::aligned_alloc(256, (size + 255) / 256 * 256));
  std::memset(reinterpret_cast<void*>(*address), 0xEE, size);
  return reachable[*address] = size, ok;
}
int cuMemFree_v2(std::uint64_t address) {
  if (reachable.erase(address) == 0) return invalid_value;
  return std::free(reinterpret_cast<void*>(address)), ok;
}
int cuMemHostAlloc(void** address, std::size_t size, unsigned) {
  return cuMemAlloc_v2(reinterpret_cast<std::uint64_t*>(address), size);
}
int cuMemFreeHost(void* address) { return cuMemFree_v2(reinterpret_cast<std::uint64_t>(address)); }
int cuMemHostRegister_v2(void* address, std::size_t size, unsigned) {
  const bool fresh = reachable.emplace(reinterpret_cast<std::uint64_t>(address), size).second;
  return fresh ? ok : invalid_value;
}
int cuMemHostUnregister(void* address) {
  return reachable.erase(reinterpret_cast<std::uint64_t>(address)) == 0 ? invalid_value : ok;
}
int cuMemHostGetDevicePointer_v2(std::uint64_t* device, void* host, unsigned) {
  return *device = reinterpret_cast<std::uint64_t>(host), ok;
}
int cuMemcpyAsync(std::uint64_t target, std::uint64_t source, std::size_t size, void* stream) {
  if (!may_touch(target, size) || !may_touch(source, size) || context_depth == 0) return invalid_value;
  stream_of(stream)->work.push_back(
      [=] { std::memcpy(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), size); });
  return ok;
}
int cuMemcpy2DAsync_v2(const Rectangle* rectangle, void* stream) {
  const Rectangle copy = *rectangle;
  for (const Side& side : {copy.source, copy.target}) {
    if (side.x != 0 || side.y != 0 || side.pitch < copy.width) return invalid_value;
    if (!may_touch(side.address(), side.pitch * (copy.height - 1) + copy.width)) return invalid_value;
  }
  stream_of(stream)->work.push_back([=] {
    for (std::size_t row = 0; row < copy.height; ++row) {
      std::memcpy(reinterpret_cast<void*>(copy.target.address() + row * copy.target.pitch),
                  reinterpret_cast<const void*>(copy.source.address() + row * copy.source.pitch), copy.width);
    }
  });
  return ok;
}

}  // extern "C"
