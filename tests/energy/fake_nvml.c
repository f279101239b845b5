// A stand-in for libnvidia-ml.so.1 and libcuda.so.1: two GPUs, whose counters tests set. CUDA's device 0 is NVML's GPU 1.
#include <string.h>

unsigned long long millijoules[2] = {1000, 5000};
int status, open_count, old_driver;

int nvmlInit_v2(void) { return open_count++, status == 9 ? 9 : 0; }
int nvmlShutdown(void) { return open_count--, 0; }
const char *nvmlErrorString(int code) { return code == 3 ? "Not Supported" : "Driver Not Loaded"; }
int nvmlDeviceGetCount_v2(unsigned *count) { return *count = 2, 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { return *handle = &millijoules[index], 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **handle) {
  *handle = &millijoules[strcmp(bus, "00000000:3B:00.0") == 0];
  return 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *value) {
  *value = *(unsigned long long *)handle;
  return status;
}

int cuInit(unsigned flags) { return flags || old_driver; }
int cuDeviceGet(int *device, int index) { return *device = index, index > 1; }
int cuDeviceGetPCIBusId(char *text, int size, int device) {
  strncpy(text, device == 0 ? "00000000:3B:00.0" : "00000000:01:00.0", size);
  return 0;
}
