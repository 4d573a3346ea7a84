// The libraries beside CUDA itself and NCCL: matrix products do nothing, nothing is compiled.
#include "machine.h"

// ---- cuBLAS

EXPORT int cublasCreate_v2(void **h) {
  *h = calloc(1, 64);
  return 0;
}
EXPORT int cublasDestroy_v2(void *h) {
  free(h);
  return 0;
}
EXPORT int cublasLtCreate(void **h) {
  *h = calloc(1, 64);
  return 0;
}
EXPORT int cublasLtDestroy(void *h) {
  free(h);
  return 0;
}
EXPORT int cublasGetVersion_v2(void *h, int *v) {
  *v = 130101;
  return 0;
}
EXPORT size_t cublasLtGetVersion(void) { return 130101; }
EXPORT size_t cublasLtGetCudartVersion(void) { return 13000; }
EXPORT const char *cublasGetStatusString(int s) { return "pretended cuBLAS status"; }
EXPORT const char *cublasLtGetStatusString(int s) { return "pretended cuBLAS status"; }
EXPORT int cublasGetStream_v2(void *h, void **s) {
  *s = NULL;
  return 0;
}
EXPORT int cublasGetMathMode(void *h, int *m) {
  *m = 0;
  return 0;
}
EXPORT int cublasGetPointerMode_v2(void *h, int *m) {
  *m = 0;
  return 0;
}
EXPORT int cublasLtMatmulDescCreate(void **d, int a, int b) {
  *d = calloc(1, 512);
  return 0;
}
EXPORT int cublasLtMatrixLayoutCreate(void **d, int t, unsigned long r, unsigned long c, long l) {
  *d = calloc(1, 512);
  return 0;
}
EXPORT int cublasLtMatmulPreferenceCreate(void **d) {
  *d = calloc(1, 512);
  return 0;
}
EXPORT int cublasLtMatmulDescDestroy(void *d) {
  free(d);
  return 0;
}
EXPORT int cublasLtMatrixLayoutDestroy(void *d) {
  free(d);
  return 0;
}
EXPORT int cublasLtMatmulPreferenceDestroy(void *d) {
  free(d);
  return 0;
}
EXPORT int cublasLtMatmulAlgoGetHeuristic(void *h, void *o, void *A, void *B, void *C, void *Dd, void *p, int n,
                                          void *r, int *k) {
  memset(r, 0, 96);
  *k = 1;
  return 0;
}

// ---- NVML

EXPORT int nvmlDeviceGetCount_v2(unsigned *n) {
  *n = device_count();
  return 0;
}
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) {
  if ((int)i >= device_count()) return 2;
  *h = (void *)(size_t)(64 + i);
  return 0;
}
EXPORT int nvmlDeviceGetHandleByUUID(const char *u, void **h) {
  *h = (void *)64;
  return 0;
}
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *u, void **h) {
  *h = (void *)64;
  return 0;
}
EXPORT int nvmlDeviceGetIndex(void *h, unsigned *i) {
  *i = (size_t)h - 64;
  return 0;
}
EXPORT int nvmlDeviceGetName(void *h, char *s, unsigned n) {
  snprintf(s, n, device_name());
  return 0;
}
EXPORT int nvmlDeviceGetUUID(void *h, char *s, unsigned n) {
  unsigned x = 17 + (size_t)h - 64;
  snprintf(s, n, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", x, x, x, x, x, x, x, x, x,
           x, x, x, x, x, x, x);
  return 0;
}
EXPORT int nvmlDeviceGetCudaComputeCapability(void *h, int *a, int *b) {
  *a = capability() / 10;
  *b = capability() % 10;
  return 0;
}
struct mem {
  unsigned long long t, f, u;
};
struct mem2 {
  unsigned v;
  unsigned long long t, r, f, u;
};
EXPORT int nvmlDeviceGetMemoryInfo(void *h, struct mem *m) {
  m->t = device_bytes();
  m->u = device_bytes_used();
  m->f = m->t - device_bytes_used();
  return 0;
}
EXPORT int nvmlDeviceGetMemoryInfo_v2(void *h, struct mem2 *m) {
  m->t = device_bytes();
  m->r = 0;
  m->u = device_bytes_used();
  m->f = m->t - device_bytes_used();
  return 0;
}
EXPORT int nvmlSystemGetDriverVersion(char *s, unsigned n) {
  snprintf(s, n, "580.00");
  return 0;
}
EXPORT int nvmlSystemGetCudaDriverVersion(int *v) {
  *v = 13000;
  return 0;
}
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *v) {
  *v = 13000;
  return 0;
}
EXPORT const char *nvmlErrorString(int e) { return "pretended NVML error"; }
EXPORT int nvmlDeviceGetP2PStatus(void *a, void *b, int i, int *s) {
  *s = 0;
  return 0;
}

// ---- NVRTC

typedef struct {
  int x;
} *prog;
EXPORT int nvrtcVersion(int *a, int *b) {
  *a = 13;
  *b = 0;
  return 0;
}
EXPORT int nvrtcGetNumSupportedArchs(int *n) {
  *n = 5;
  return 0;
}
EXPORT int nvrtcGetSupportedArchs(int *a) {
  a[0] = 75;
  a[1] = 80;
  a[2] = 89;
  a[3] = 90;
  a[4] = 100;
  return 0;
}
EXPORT int nvrtcCreateProgram(void **p, const char *s, const char *n, int k, const char *const *h,
                              const char *const *i) {
  *p = calloc(1, 64);
  return 0;
}
EXPORT int nvrtcDestroyProgram(void **p) {
  free(*p);
  *p = NULL;
  return 0;
}
EXPORT int nvrtcCompileProgram(void *p, int n, const char *const *o) { return 0; }
EXPORT int nvrtcAddNameExpression(void *p, const char *n) { return 0; }
EXPORT int nvrtcGetLoweredName(void *p, const char *n, const char **l) {
  *l = n;
  return 0;
}
EXPORT int nvrtcGetCUBINSize(void *p, size_t *n) {
  *n = 16;
  return 0;
}
EXPORT int nvrtcGetPTXSize(void *p, size_t *n) {
  *n = 16;
  return 0;
}
EXPORT int nvrtcGetProgramLogSize(void *p, size_t *n) {
  *n = 1;
  return 0;
}
EXPORT int nvrtcGetCUBIN(void *p, char *c) {
  memset(c, 0, 16);
  return 0;
}
EXPORT int nvrtcGetPTX(void *p, char *c) {
  memset(c, 0, 16);
  return 0;
}
EXPORT int nvrtcGetProgramLog(void *p, char *c) {
  *c = 0;
  return 0;
}
EXPORT const char *nvrtcGetErrorString(int e) { return "pretended NVRTC status"; }
