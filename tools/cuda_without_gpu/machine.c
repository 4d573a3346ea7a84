// One H100 (a B200 with PRETEND_CC=100) that does not exist. PRETEND_GIB is its memory, PRETEND_DEVICES their number.
#include "machine.h"
#include <dlfcn.h>
#include <pthread.h>

__thread int current_device = 0;

static int setting(const char *name, int otherwise) {
  const char *value = getenv(name);
  return value ? atoi(value) : otherwise;
}

int device_count(void) {
  static int count = -1;
  if (count >= 0) return count;
  count = setting("PRETEND_DEVICES", 1);
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  if (visible) {
    int named = *visible && *visible != '-';
    for (; *visible; visible++) named += *visible == ',';
    if (named < count) count = named;
  }
  return count;
}

int capability(void) { return setting("PRETEND_CC", 90); }
const char *device_name(void) { return capability() >= 100 ? "NVIDIA B200" : "NVIDIA H100 80GB HBM3"; }
size_t device_bytes(void) { return (size_t)setting("PRETEND_GIB", 80) << 30; }

// Numbers of cudaDeviceAttr and CUdevice_attribute, which agree. What is not named is 0.
int device_attribute(int attribute) {
  switch (attribute) {
  case cudaDevAttrMaxThreadsPerBlock: return 1024;
  case cudaDevAttrMaxBlockDimX:
  case cudaDevAttrMaxBlockDimY: return 1024;
  case cudaDevAttrMaxBlockDimZ: return 64;
  case cudaDevAttrMaxGridDimX: return 2147483647;
  case cudaDevAttrMaxGridDimY:
  case cudaDevAttrMaxGridDimZ: return 65535;
  case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
  case cudaDevAttrTotalConstantMemory: return 65536;
  case cudaDevAttrWarpSize: return 32;
  case cudaDevAttrMaxRegistersPerBlock: return 65536;
  case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
  case cudaDevAttrClockRate: return 1980000;
  case cudaDevAttrMultiProcessorCount: return capability() >= 100 ? 148 : 132;
  case cudaDevAttrMemoryClockRate: return 2619000;
  case cudaDevAttrGlobalMemoryBusWidth: return 5120;
  case cudaDevAttrL2CacheSize: return 52428800;
  case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
  case cudaDevAttrComputeCapabilityMajor: return capability() / 10;
  case cudaDevAttrComputeCapabilityMinor: return capability() % 10;
  case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
  case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
  case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
  case cudaDevAttrConcurrentKernels:
  case cudaDevAttrUnifiedAddressing:
  case cudaDevAttrManagedMemory:
  case cudaDevAttrStreamPrioritiesSupported:
  case cudaDevAttrConcurrentManagedAccess:
  case cudaDevAttrComputePreemptionSupported:
  case cudaDevAttrCooperativeLaunch:
  case cudaDevAttrMemoryPoolsSupported: return 1;
  }
  // Virtual memory management, IPC and others that only the driver's header numbers.
  static const int supported[] = {31, 35, 88, 89, 96, 99, 101, 102, 103, 116, 118, 120};
  for (size_t i = 0; i < sizeof supported / sizeof *supported; i++)
    if (supported[i] == attribute) return 1;
  return 0;
}

// ---- memory: blocks are remembered, so that a pointer's kind and block can be told

#define BLOCKS (1 << 20)
static struct block {
  char *start;
  size_t bytes;
  enum memory_kind kind;
} blocks[BLOCKS];
static int last_block;
static size_t used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

size_t device_bytes_used(void) { return used; }

void *take(size_t bytes, enum memory_kind kind) {
  if (kind == DEVICE && used + bytes > device_bytes()) return NULL;
  size_t whole = bytes ? (bytes + 4095) & ~(size_t)4095 : 4096;
  char *start = aligned_alloc(4096, whole);
  if (!start) return NULL;
  if (whole <= (64u << 20)) memset(start, 0, whole); // larger blocks come from the system, which clears them
  pthread_mutex_lock(&lock);
  int slot = 0;
  while (slot < last_block && blocks[slot].start) slot++;
  if (slot == last_block) last_block++;
  blocks[slot] = (struct block){start, bytes, kind};
  if (kind == DEVICE) used += bytes;
  pthread_mutex_unlock(&lock);
  return start;
}

void give_back(void *pointer) {
  pthread_mutex_lock(&lock);
  for (int slot = 0; pointer && slot < last_block; slot++)
    if (blocks[slot].start == pointer) {
      if (blocks[slot].kind == DEVICE) used -= blocks[slot].bytes;
      blocks[slot].start = NULL;
      free(pointer);
      break;
    }
  pthread_mutex_unlock(&lock);
}

enum memory_kind kind_of(const void *pointer, char **base, size_t *bytes) {
  enum memory_kind kind = UNKNOWN;
  pthread_mutex_lock(&lock);
  for (int slot = 0; slot < last_block; slot++) {
    struct block *block = &blocks[slot];
    if (!block->start || (const char *)pointer < block->start || (const char *)pointer >= block->start + block->bytes)
      continue;
    kind = block->kind;
    if (base) *base = block->start;
    if (bytes) *bytes = block->bytes;
    break;
  }
  pthread_mutex_unlock(&lock);
  return kind;
}

void *new_handle(void) {
  static size_t last = 4096;
  return (void *)__sync_add_and_fetch(&last, 16);
}

void *exported(const char *name) {
  static void *library;
  if (!library) {
    Dl_info info;
    dladdr((void *)exported, &info);
    library = dlopen(info.dli_fname, RTLD_NOW);
  }
  return dlsym(library, name);
}
