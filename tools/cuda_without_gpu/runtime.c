// The CUDA runtime: memory and copies are real, kernels do nothing, streams and events are done at once.
#include "machine.h"

EXPORT cudaError_t cudaGetDeviceCount(int *n) {
  *n = device_count();
  return device_count() ? 0 : cudaErrorNoDevice;
}
EXPORT cudaError_t cudaGetDevice(int *d) {
  *d = current_device;
  return 0;
}
EXPORT cudaError_t cudaSetDevice(int d) {
  if (d >= device_count()) return cudaErrorInvalidDevice;
  current_device = d;
  return 0;
}
EXPORT cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
  *v = device_attribute(a);
  return 0;
}
EXPORT cudaError_t cudaDriverGetVersion(int *v) {
  *v = 13000;
  return 0;
}
EXPORT cudaError_t cudaRuntimeGetVersion(int *v) {
  *v = 13000;
  return 0;
}
EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  memset(p, 0, sizeof *p);
  snprintf(p->name, 256, device_name());
  memset(&p->uuid, 17 + d, 16);
  p->totalGlobalMem = device_bytes();
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->memPitch = 2147483647;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = capability() / 10;
  p->minor = capability() % 10;
  p->multiProcessorCount = device_attribute(16);
  p->unifiedAddressing = 1;
  p->concurrentKernels = 1;
  p->memoryBusWidth = 5120;
  p->l2CacheSize = 52428800;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlockOptin = 232448;
  p->cooperativeLaunch = 1;
  p->maxBlocksPerMultiProcessor = 32;
  p->asyncEngineCount = 3;
  p->managedMemory = 1;
  p->pciBusID = d + 1;
  return 0;
}
#define ALLOCATE(kind)                                                                                                 \
  {                                                                                                                    \
    *p = take(n, kind);                                                                                                \
    return *p ? 0 : cudaErrorMemoryAllocation;                                                                         \
  }
EXPORT cudaError_t cudaMalloc(void **p, size_t n) ALLOCATE(DEVICE) EXPORT cudaError_t
    cudaMallocAsync(void **p, size_t n, cudaStream_t s) ALLOCATE(DEVICE) EXPORT cudaError_t
    cudaMallocHost(void **p, size_t n) ALLOCATE(PINNED) EXPORT cudaError_t cudaHostAlloc(void **p, size_t n, unsigned f)
        ALLOCATE(PINNED) EXPORT cudaError_t cudaMallocManaged(void **p, size_t n, unsigned f)
            ALLOCATE(MANAGED) EXPORT cudaError_t cudaFree(void *p) {
  give_back(p);
  return 0;
}
EXPORT cudaError_t cudaFreeAsync(void *p, cudaStream_t s) {
  give_back(p);
  return 0;
}
EXPORT cudaError_t cudaFreeHost(void *p) {
  give_back(p);
  return 0;
}
EXPORT cudaError_t cudaMemGetInfo(size_t *f, size_t *t) {
  *t = device_bytes();
  *f = *t - device_bytes_used() - (600ul << 20);
  return 0;
}
EXPORT cudaError_t cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind k) {
  memmove(d, s, n);
  return 0;
}
EXPORT cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind k, cudaStream_t t) {
  memmove(d, s, n);
  return 0;
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void *d, int a, const void *s, int b, size_t n, cudaStream_t t) {
  memmove(d, s, n);
  return 0;
}
EXPORT cudaError_t cudaMemset(void *d, int v, size_t n) {
  memset(d, v, n);
  return 0;
}
EXPORT cudaError_t cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t t) {
  memset(d, v, n);
  return 0;
}
EXPORT cudaError_t cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h,
                                     enum cudaMemcpyKind k, cudaStream_t t) {
  for (size_t i = 0; i < h; i++) memmove((char *)d + i * dp, (const char *)s + i * sp, w);
  return 0;
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *s) {
  *s = new_handle();
  return 0;
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) {
  *s = new_handle();
  return 0;
}
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) {
  *s = new_handle();
  return 0;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *s) {
  *s = new_handle();
  return 0;
}
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *s, unsigned f) {
  *s = new_handle();
  return 0;
}
EXPORT cudaError_t cudaEventElapsedTime(float *m, cudaEvent_t a, cudaEvent_t b) {
  *m = 1;
  return 0;
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *l, int *g) {
  *l = 0;
  *g = -5;
  return 0;
}
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) {
  *p = 0;
  return 0;
}
EXPORT cudaError_t cudaStreamGetDevice(cudaStream_t s, int *d) {
  *d = current_device;
  return 0;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) {
  *c = 0;
  return 0;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *c, unsigned long long *id,
                                            cudaGraph_t *g, const cudaGraphNode_t **d, const cudaGraphEdgeData **e,
                                            size_t *n) {
  *c = 0;
  if (id) *id = 0;
  if (n) *n = 0;
  return 0;
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) { return 0; }
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) {
  *g = new_handle();
  return 0;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long f) {
  *e = new_handle();
  return 0;
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *n, size_t *c) {
  *c = 1;
  return 0;
}
EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  memset(a, 0, sizeof *a);
  a->type = (enum cudaMemoryType)kind_of(p, 0, 0);
  a->device = current_device;
  a->devicePointer = a->hostPointer = (void *)p;
  return 0;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *c, int a, int b) {
  *c = 1;
  return 0;
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int d) {
  snprintf(s, n, "0000:%02x:00.0", d + 1);
  return 0;
}
EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->binaryVersion = a->ptxVersion = capability();
  return 0;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int b, size_t s) {
  *n = 2;
  return 0;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s,
                                                                          unsigned g) {
  *n = 2;
  return 0;
}
EXPORT cudaError_t cudaOccupancyMaxActiveClusters(int *n, const void *f, const cudaLaunchConfig_t *c) {
  *n = 16;
  return 0;
}
EXPORT cudaError_t cudaGetSymbolAddress(void **p, const void *s) {
  static char room[1 << 16];
  *p = room;
  return 0;
}
EXPORT const char *cudaGetErrorString(cudaError_t e) {
  static __thread char s[64];
  snprintf(s, 64, "pretended CUDA error %d", e);
  return s;
}
EXPORT const char *cudaGetErrorName(cudaError_t e) { return cudaGetErrorString(e); }
EXPORT cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *h, void *p) {
  memset(h, 0, sizeof *h);
  char *b = p;
  kind_of(p, &b, 0);
  memcpy(h, &b, 8);
  return 0;
}
EXPORT cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t h, unsigned f) {
  memcpy(p, &h, 8);
  return 0;
}
EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *p, int d) {
  *p = new_handle();
  return 0;
}
EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *v) {
  *(size_t *)v = 0;
  return 0;
}
EXPORT void **__cudaRegisterFatBinary(void *f) {
  static void *x[8];
  return x;
}
static __thread struct {
  dim3 g, b;
  size_t m;
  void *s;
} cfg;
EXPORT unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t m, void *s) {
  cfg.g = g;
  cfg.b = b;
  cfg.m = m;
  cfg.s = s;
  return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *m, void *s) {
  *g = cfg.g;
  *b = cfg.b;
  *m = cfg.m;
  *(void **)s = cfg.s;
  return 0;
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) {
  *k = (cudaKernel_t)f;
  return 0;
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *u) {
  f(u);
  return 0;
}
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *u, unsigned g) {
  f(s, 0, u);
  return 0;
}
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *n, void **f, unsigned v, unsigned long long g,
                                                    enum cudaDriverEntryPointQueryResult *r) {
  *f = exported(n);
  if (r) *r = *f ? 0 : 1;
  return 0;
}
EXPORT cudaError_t cudaGetDriverEntryPoint(const char *n, void **f, unsigned long long g,
                                           enum cudaDriverEntryPointQueryResult *r) {
  *f = exported(n);
  if (r) *r = *f ? 0 : 1;
  return 0;
}
