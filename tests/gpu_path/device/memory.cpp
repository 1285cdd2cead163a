// cudaMalloc, cudaHostAlloc, cudaHostRegister and copies.
#include "memory.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <map>
#include <string>

#include "calls.h"
#include "graphs.h"
#include "queues.h"

namespace device {
namespace {

struct Range {
  size_t bytes;
  Place place;
};
auto &ranges = *new std::map<char *, Range>;
auto &ranges_lock = *new std::mutex;
size_t allocated = 0;  // bytes of device memory

// Bytes. EMULATED_CUDA_MEMORY_MIB: less than a card's, so that a program runs out of it.
size_t total() {
  static size_t bytes = size_t(setting("EMULATED_CUDA_MEMORY_MIB", 80 << 10)) << 20;
  return bytes;
}

const Range *range_of(const void *pointer) {  // under the lock
  auto after = ranges.upper_bound(const_cast<char *>(static_cast<const char *>(pointer)));
  if (after == ranges.begin()) return nullptr;
  auto &[start, range] = *--after;
  return static_cast<const char *>(pointer) < start + range.bytes ? &range : nullptr;
}

}  // namespace

void *allocate(size_t bytes, Place place) {
  bytes = (bytes + 4095) / 4096 * 4096;
  if (!bytes) bytes = 4096;
  {
    Lock held(ranges_lock);
    if (place == Place::DEVICE && allocated + bytes > total()) return nullptr;
  }
  void *pointer = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pointer == MAP_FAILED) return nullptr;
  if (place == Place::DEVICE) memset(pointer, 0xff, bytes);  // NaN in every float format
  Lock held(ranges_lock);
  if (place == Place::DEVICE) allocated += bytes;
  ranges[static_cast<char *>(pointer)] = {bytes, place};
  return pointer;
}

void release(void *pointer) {
  drain_all();
  Lock held(ranges_lock);
  auto found = ranges.find(static_cast<char *>(pointer));
  if (found == ranges.end()) return;
  if (found->second.place == Place::DEVICE) allocated -= found->second.bytes;
  munmap(pointer, found->second.bytes);
  ranges.erase(found);
}

Place place_of(const void *pointer) {
  Lock held(ranges_lock);
  const Range *range = range_of(pointer);
  return range ? range->place : Place::UNKNOWN;
}

}  // namespace device

using namespace device;

static cudaError_t give(void **pointer, size_t bytes, Place place) {
  use_device();
  if (auto error = refuse_unsafe_call()) return error;
  *pointer = allocate(bytes, place);
  return *pointer ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
API cudaError_t cudaMalloc(void **pointer, size_t bytes) { return give(pointer, bytes, Place::DEVICE); }
API cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t) { return cudaMalloc(pointer, bytes); }
API cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned) { return give(pointer, bytes, Place::PINNED); }
API cudaError_t cudaFree(void *pointer) {
  if (auto error = refuse_unsafe_call()) return error;
  if (pointer) release(pointer);
  return cudaSuccess;
}
API cudaError_t cudaFreeAsync(void *pointer, cudaStream_t) { return cudaFree(pointer); }
API cudaError_t cudaFreeHost(void *pointer) { return cudaFree(pointer); }

API cudaError_t cudaMemGetInfo(size_t *free, size_t *all) {
  Lock held(ranges_lock);
  *all = total(), *free = total() - allocated;
  return cudaSuccess;
}

API cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned) {
  use_device();
  Lock held(ranges_lock);
  for (char *end : {static_cast<char *>(pointer), static_cast<char *>(pointer) + bytes - 1}) {
    const Range *range = range_of(end);
    if (range && range->place == Place::REGISTERED) return failed(cudaErrorHostMemoryAlreadyRegistered);
  }
  ranges[static_cast<char *>(pointer)] = {bytes, Place::REGISTERED};
  count(Count::REGISTERED, 1);
  return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void *pointer) {
  drain_all();
  Lock held(ranges_lock);
  auto found = ranges.find(static_cast<char *>(pointer));
  if (found == ranges.end() || found->second.place != Place::REGISTERED)
    return failed(cudaErrorHostMemoryNotRegistered);
  ranges.erase(found);
  count(Count::REGISTERED, -1);
  return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *pointer) {
  Place place = place_of(pointer);
  *attributes = {};
  attributes->type = place == Place::UNKNOWN  ? cudaMemoryTypeUnregistered
                     : place == Place::DEVICE ? cudaMemoryTypeDevice
                                              : cudaMemoryTypeHost;
  attributes->device = current_device();
  attributes->devicePointer = attributes->hostPointer = const_cast<void *>(pointer);
  return cudaSuccess;
}

// From pageable memory CUDA stages the bytes before it returns; to pageable memory it returns when they are there.
API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t handle) {
  Place target = place_of(to), source = place_of(from);
  Stream &stream = stream_of(handle);
  if (target == Place::UNKNOWN || source == Place::UNKNOWN)
    if (auto error = refuse_while_capturing(stream)) return error;
  if (target != Place::DEVICE) count(Count::COPIES_TO_HOST, 1);
  else if (source != Place::DEVICE) count(Count::COPIES_TO_DEVICE, 1);
  if (source == Place::UNKNOWN) {
    auto staged = std::make_shared<std::string>(static_cast<const char *>(from), bytes);
    push(stream, {"copy from pageable memory", [=] {
                    memcpy(to, staged->data(), bytes);
                    return true;
                  }});
  } else {
    push(stream, {"copy", [=] {
                    memmove(to, from, bytes);
                    return true;
                  }});
  }
  if (target == Place::UNKNOWN) drain(stream);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
  if (auto error = refuse_unsafe_call()) return error;
  cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  drain(stream_of(nullptr));
  return cudaSuccess;
}
API cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t bytes, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}
API cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
  push(stream_of(stream), {"memset", [=] {
                             memset(to, value, bytes);
                             return true;
                           }});
  return cudaSuccess;
}
API cudaError_t cudaMemset(void *to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }
