// Memory of the emulated device: the host's. What is known of each range is where CUDA would have put it.
#pragma once
#include <cstddef>

namespace device {

enum class Place { UNKNOWN, PINNED, DEVICE, REGISTERED };  // UNKNOWN: pageable memory of the host

void *allocate(size_t bytes, Place);  // null where device memory is full; device memory is filled with NaN
void release(void *);
Place place_of(const void *);

}  // namespace device
