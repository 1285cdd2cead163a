// The CUDA runtime's calls for streams, events and the device's properties, an H100's.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <map>
#include <set>
#include <utility>

#include "calls.h"
#include "graphs.h"
#include "queues.h"

using namespace device;

namespace {

thread_local cudaError_t last_error = cudaSuccess;
std::atomic<long> counts[int(Count::KINDS)];

int num_devices() {
  static int found = [] {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible) return 8;
    int listed = *visible != 0;
    for (; *visible; visible++) listed += *visible == ',';
    return listed;
  }();
  return found;
}

// Ten times the compute capability: 90 is Hopper's, 100 Blackwell's.
int capability() {
  static int tenfold = setting("EMULATED_CUDA_CAPABILITY", 90);
  return tenfold;
}

Event &event_of(cudaEvent_t handle) { return *reinterpret_cast<Event *>(handle); }

}  // namespace

extern "C" {
__attribute__((visibility("default"))) int emulated_cuda_active[64];
}

namespace device {

void use_device() { emulated_cuda_active[current_device()] = 1; }
cudaError_t failed(cudaError_t error) { return last_error = error; }
void count(Count kind, long by) { counts[int(kind)] += by; }

}  // namespace device

API void emulated_cuda_counts(long *out) {
  for (int kind = 0; kind < int(Count::KINDS); kind++) out[kind] = counts[kind];
}

// Of operators.cpp, which knows torch's operators: `run` is called once, or at each launch of the graph that captures it.
API void emulated_cuda_launch(void *stream, const char *name, void (*run)(void *), void (*free)(void *), void *argument) {
  if (!emulated_cuda_captures(stream)) count(Count::LAUNCHES, 1);
  std::shared_ptr<void> kept(argument, free);
  push(stream_of(static_cast<cudaStream_t>(stream)), {name, [=] {
                                                        run(kept.get());
                                                        return true;
                                                      }});
}
API cudaError_t emulated_cuda_drain(void *handle) {
  Stream &stream = stream_of(static_cast<cudaStream_t>(handle));
  if (auto error = refuse_while_capturing(stream)) return error;
  drain(stream);
  return cudaSuccess;
}
API int emulated_cuda_defers(void *stream) { return order() != Order::EAGER || emulated_cuda_captures(stream); }
API void emulated_cuda_count_launch() { count(Count::LAUNCHES, 1); }

// Streams
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) {
  use_device();
  *stream = reinterpret_cast<cudaStream_t>(&new_stream());
  return cudaSuccess;
}
API cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t, int *priority) {
  *priority = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (auto error = refuse_while_capturing(stream_of(stream))) return error;
  count(Count::STREAM_WAITS, 1);
  drain(stream_of(stream));
  return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Stream &stream = stream_of(handle);
  if (auto error = refuse_while_capturing(stream)) return error;
  Lock held(lock());
  return stream.done >= stream.pushed ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaDeviceSynchronize() {
  if (auto error = refuse_unsafe_call()) return error;
  count(Count::DEVICE_WAITS, 1);
  drain_all();
  return cudaSuccess;
}
API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void *data, unsigned) {
  if (auto error = refuse_while_capturing(stream_of(stream))) return error;
  push(stream_of(stream), {"callback", [=] {
                             callback(stream, cudaSuccess, data);
                             return true;
                           }});
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
  push(stream_of(stream), {"host function", [=] {
                             function(data);
                             return true;
                           }});
  return cudaSuccess;
}

// Events
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
  use_device();
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete &event_of(event);
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  record(event_of(event), stream_of(stream));
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  if (auto error = refuse_record(stream_of(stream), flags)) return error;
  return cudaEventRecord(event, stream);
}
API cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (auto error = refuse_unsafe_call()) return error;
  if (auto error = refuse_captured(event_of(event))) return error;
  return passed(event_of(event)) ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  use_device();  // the runtime gives the calling thread's device a context, whichever device the event is of
  if (auto error = refuse_captured(event_of(event))) return error;
  count(Count::EVENT_WAITS, 1);
  wait_on_host(event_of(event));
  return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
  if (!passed(event_of(start)) || !passed(event_of(end))) return cudaErrorNotReady;
  *ms = *event_of(end).milliseconds - *event_of(start).milliseconds;
  return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (auto error = refuse_wait(stream_of(stream), event_of(event))) return error;
  wait_on_stream(stream_of(stream), event_of(event));
  return cudaSuccess;
}

// Devices. A context: emulated_cuda_active (calls.h), which the driver's cuDevicePrimaryCtxGetState (driver.c) reads.
API cudaError_t cudaGetDevice(int *index) {
  *index = current_device();
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int index) {
  if (index < 0 || index >= num_devices()) return failed(cudaErrorInvalidDevice);
  set_current_device(index);
  use_device();
  return cudaSuccess;
}
API cudaError_t cudaGetDeviceCount(int *number) {
  *number = num_devices();
  return *number ? cudaSuccess : failed(cudaErrorNoDevice);
}
API cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
API cudaError_t cudaPeekAtLastError() { return last_error; }
API const char *cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation: return "dependency created on uncaptured work in another stream";
    case cudaErrorStreamCaptureImplicit: return "operation would make the legacy stream depend on a capturing stream";
    case cudaErrorCapturedEvent: return "operation not permitted on an event last recorded in a capturing stream";
    default: return "an error of the emulated device";
  }
}
API const char *cudaGetErrorName(cudaError_t) { return "emulated device"; }
API cudaError_t cudaDriverGetVersion(int *version) {
  *version = 13000;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = 13000;
  return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int index) {
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "emulated device (no GPU)");  // no report made on it may pass for a card's
  p->major = capability() / 10, p->minor = capability() % 10, p->pciBusID = index;
  size_t free;
  cudaMemGetInfo(&free, &p->totalGlobalMem);
  // H100 SXM: NVIDIA, "CUDA C++ Programming Guide", technical specifications per compute capability (9.0).
  p->multiProcessorCount = 132, p->warpSize = 32, p->l2CacheSize = 50 << 20;
  p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048, p->maxBlocksPerMultiProcessor = 32;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448, p->sharedMemPerMultiprocessor = 233472;
  p->textureAlignment = 512, p->concurrentKernels = 1, p->unifiedAddressing = 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int index) {
  cudaDeviceProp p;
  cudaGetDeviceProperties(&p, index);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    default: *value = 1;
  }
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int index) {
  snprintf(text, length, "0000:%02x:00.0", index);
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) {
  *can = 1;
  return cudaSuccess;
}
API cudaError_t cudaGetSymbolAddress(void **pointer, const void *) {
  static char buffer[1 << 20];
  *pointer = buffer;
  return cudaSuccess;
}

// Kernels of libtorch_cuda. operators.cpp computes what they would; one that is launched all the same computes nothing,
// and is named, once.
static auto &kernel_names = *new std::map<const void *, const char *>;
static auto &kernels_lock = *new std::mutex;
API void __cudaRegisterFunction(void **, const char *host, char *, const char *name, int, void *, void *, void *, void *,
                                int *) {
  Lock held(kernels_lock);
  kernel_names[host] = name;
}
static cudaError_t launched(const void *kernel) {
  static std::set<const void *> reported;
  Lock held(kernels_lock);
  if (reported.insert(kernel).second)
    fprintf(stderr, "emulated CUDA device: a kernel computes nothing: %s\n",
            kernel_names.count(kernel) ? kernel_names[kernel] : "?");
  return cudaSuccess;
}
API cudaError_t cudaLaunchKernel(const void *kernel, dim3, dim3, void **, size_t, cudaStream_t) {
  return launched(kernel);
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void **, size_t, cudaStream_t) {
  return launched(kernel);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *kernel, void **) { return launched(kernel); }
API cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void *>(function));
  return cudaSuccess;
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024, attributes->numRegs = 32, attributes->maxDynamicSharedSizeBytes = 232448;
  attributes->ptxVersion = attributes->binaryVersion = capability();
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int, size_t, unsigned) {
  *blocks = 4;
  return cudaSuccess;
}

// The driver, as libtorch_cuda looks it up: driver.c, or success.
static int succeed() { return 0; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult *result) {
  static void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  *function = driver ? dlsym(driver, name) : nullptr;
  if (!*function) *function = reinterpret_cast<void *>(succeed);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// cuBLAS: handles only; operators.cpp computes products.
static int make_handle(void **handle) {
  *handle = calloc(1, 4096);
  return 0;
}
static int give_zero(int *mode) { return *mode = 0; }
API int cublasCreate_v2(void **handle) { return make_handle(handle); }
API int cublasLtCreate(void **handle) { return make_handle(handle); }
API int cublasGetMathMode(void *, int *mode) { return give_zero(mode); }
API int cublasGetPointerMode_v2(void *, int *mode) { return give_zero(mode); }
