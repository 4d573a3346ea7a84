// The CUDA driver, as far as torch, Transformer Engine and vLLM ask it.
#include "machine.h"
#include <sys/mman.h>

EXPORT CUresult cuGetProcAddress_v2(const char *n, void **f, int v, cuuint64_t g, CUdriverProcAddressQueryResult *r) {
  *f = exported(n);
  if (r) *r = *f ? 0 : 1;
  return *f ? 0 : 500;
}
EXPORT CUresult cuDriverGetVersion(int *v) {
  *v = 13000;
  return 0;
}
EXPORT CUresult cuDeviceGetCount(int *n) {
  *n = device_count();
  return 0;
}
EXPORT CUresult cuDeviceGet(CUdevice *d, int i) {
  if (i >= device_count()) return 101;
  *d = i;
  return 0;
}
EXPORT CUresult cuDeviceGetName(char *s, int n, CUdevice d) {
  snprintf(s, n, device_name());
  return 0;
}
EXPORT CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) {
  *v = device_attribute(a);
  return 0;
}
EXPORT CUresult cuDeviceTotalMem_v2(size_t *n, CUdevice d) {
  *n = device_bytes();
  return 0;
}
EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *u, CUdevice d) {
  memset(u, 17 + d, 16);
  return 0;
}
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned *f, int *a) {
  *f = 0;
  *a = 1;
  return 0;
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) {
  *c = (CUcontext)(size_t)(4096 + d);
  return 0;
}
EXPORT CUresult cuCtxGetCurrent(CUcontext *c) {
  *c = (CUcontext)(size_t)(4096 + current_device);
  return 0;
}
EXPORT CUresult cuCtxGetDevice(CUdevice *d) {
  *d = current_device;
  return 0;
}
EXPORT CUresult cuCtxGetDevice_v2(CUdevice *d, CUcontext c) {
  *d = current_device;
  return 0;
}
EXPORT CUresult cuGetErrorString(CUresult e, const char **s) {
  *s = "pretended CUDA error";
  return 0;
}
EXPORT CUresult cuGetErrorName(CUresult e, const char **s) {
  *s = "pretended CUDA error";
  return 0;
}
EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t n) {
  *p = (CUdeviceptr)take(n, DEVICE);
  return *p ? 0 : 2;
}
EXPORT CUresult cuMemFree_v2(CUdeviceptr p) {
  give_back((void *)p);
  return 0;
}
EXPORT CUresult cuMemGetInfo_v2(size_t *f, size_t *t) { return cudaMemGetInfo(f, t); }
EXPORT CUresult cuMemGetAllocationGranularity(size_t *g, const CUmemAllocationProp *p,
                                              CUmemAllocationGranularity_flags o) {
  *g = 2 << 20;
  return 0;
}
EXPORT CUresult cuMemAddressReserve(CUdeviceptr *p, size_t n, size_t a, CUdeviceptr at, unsigned long long f) {
  *p = (CUdeviceptr)take(n, DEVICE);
  return *p ? 0 : 2;
}
EXPORT CUresult cuMemAddressFree(CUdeviceptr p, size_t n) {
  give_back((void *)p);
  return 0;
}
EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *h, size_t n, const CUmemAllocationProp *p,
                            unsigned long long f) {
  *h = (size_t)new_handle();
  return 0;
}
EXPORT CUresult cuMemUnmap(CUdeviceptr p, size_t n) { // what was there is lost
  return madvise((void *)p, n, MADV_DONTNEED) ? 1 : 0;
}
EXPORT CUresult cuPointerGetAttribute(void *v, CUpointer_attribute a, CUdeviceptr p) {
  char *b = (char *)p;
  size_t n = 0;
  kind_of((void *)p, &b, &n);
  if (a == 11)
    *(CUdeviceptr *)v = (CUdeviceptr)b;
  else if (a == 12)
    *(size_t *)v = n;
  else if (a == 2)
    *(int *)v = 2;
  else if (a == 9)
    *(int *)v = current_device;
  else
    *(int *)v = 0;
  return 0;
}
EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *b, size_t *n, CUdeviceptr p) {
  char *q = (char *)p;
  size_t m = 0;
  kind_of((void *)p, &q, &m);
  if (b) *b = (CUdeviceptr)q;
  if (n) *n = m;
  return 0;
}
EXPORT CUresult cuMemcpyDtoH_v2(void *d, CUdeviceptr s, size_t n) {
  memmove(d, (void *)s, n);
  return 0;
}
EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr d, const void *s, size_t n) {
  memmove((void *)d, s, n);
  return 0;
}
EXPORT CUresult cuMemcpyAsync(CUdeviceptr d, CUdeviceptr s, size_t n, CUstream t) {
  memmove((void *)d, (void *)s, n);
  return 0;
}
EXPORT CUresult cuModuleLoadData(CUmodule *m, const void *i) {
  *m = new_handle();
  return 0;
}
EXPORT CUresult cuModuleLoadDataEx(CUmodule *m, const void *i, unsigned n, CUjit_option *o, void **v) {
  *m = new_handle();
  return 0;
}
EXPORT CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *n) {
  *f = new_handle();
  return 0;
}
EXPORT CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction f) {
  *v = a == 0 ? 1024 : 0;
  return 0;
}
EXPORT CUresult cuStreamCreate(CUstream *s, unsigned f) {
  *s = new_handle();
  return 0;
}
EXPORT CUresult cuEventCreate(CUevent *s, unsigned f) {
  *s = new_handle();
  return 0;
}
EXPORT CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *c) {
  *c = 0;
  return 0;
}
EXPORT CUresult cuStreamGetCtx(CUstream s, CUcontext *c) { return cuCtxGetCurrent(c); }
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int b, size_t s) {
  *n = 2;
  return 0;
}
EXPORT CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) {
  *n = 16;
  return 0;
}
