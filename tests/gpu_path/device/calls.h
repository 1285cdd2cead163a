// Errors and counters that all of the emulated device's calls share.
#pragma once
#include <cuda_runtime_api.h>

namespace device {

// Sets CUDA's last error, as a call that fails does; it stays until cudaGetLastError reads it.
cudaError_t failed(cudaError_t);

// Read from Python: emulated_cuda_counts. REGISTERED is how many ranges are registered now; the others only grow.
enum class Count { LAUNCHES, STREAM_WAITS, DEVICE_WAITS, EVENT_WAITS, COPIES_TO_HOST, COPIES_TO_DEVICE, COLLECTIVES,
                   REGISTERED, KINDS };
void count(Count, long by);

// The current device of the calling thread gets a context, in emulated_cuda_active: as memory, streams and events do.
void use_device();

}  // namespace device

extern "C" int emulated_cuda_captures(void *stream);  // whether it does
