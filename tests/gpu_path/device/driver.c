// libcuda.so.1, as far as libtorch_cuda and Transformer Engine ask for it.
#include <dlfcn.h>

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *number) { *number = 8; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)16; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)16; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuGetErrorString(int error, const char **text) { *text = "emulated device"; return 0; }

// Numbers of CUdevice_attribute: multiprocessors, and the compute capability's two parts.
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 16 ? 132 : attribute == 75 ? 9 : attribute == 76 ? 0 : 1;
  return 0;
}

// A context: only where this process has used the device.
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  int *used = dlsym(RTLD_DEFAULT, "emulated_cuda_active");
  *flags = 0, *active = used ? used[device] : 0;
  return 0;
}
