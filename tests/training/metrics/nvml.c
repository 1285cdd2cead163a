/* NVML's functions, as training/metrics/nvml.py calls them, of one GPU whose numbers are known. */
#include <string.h>

typedef struct { unsigned long long timeStamp; union { double d; unsigned int ui; unsigned long long ull; } value; } Sample;

static char gpu;
static unsigned long long energy_mj;

int nvmlInitWithFlags(unsigned int flags) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    *handle = &gpu;
    return strcmp(uuid, "GPU-1234-5678") == 0 ? 0 : 6; /* NVML_ERROR_NOT_FOUND */
}
int nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *reasons) {
    *reasons = 0x40; /* HwThermalSlowdown */
    return 0;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *reasons) {
    return nvmlDeviceGetCurrentClocksEventReasons(handle, reasons);
}
int nvmlDeviceGetClockInfo(void *handle, int kind, unsigned int *mhz) {
    *mhz = kind == 1 ? 1410 : 0; /* NVML_CLOCK_SM */
    return 0;
}
int nvmlDeviceGetPowerUsage(void *handle, unsigned int *milliwatts) { *milliwatts = 350500; return 0; }
int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *millijoules) {
    *millijoules = energy_mj += 2000;
    return 0;
}
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned int *celsius) { *celsius = 71; return 0; }
typedef struct { unsigned int version; int sensorType; int temperature; } Temperature;
int nvmlDeviceGetTemperatureV(void *handle, Temperature *asked) { asked->temperature = 71; return 0; }
int nvmlDeviceGetSamples(void *handle, int kind, unsigned long long since, int *type, unsigned int *count, Sample *samples) {
    *type = 1; /* NVML_VALUE_TYPE_UNSIGNED_INT */
    if (!samples) { *count = 4; return 0; }
    *count = 2;
    samples[0].timeStamp = 1000; samples[0].value.ui = 40;
    samples[1].timeStamp = 2000; samples[1].value.ui = 60;
    return 0;
}
