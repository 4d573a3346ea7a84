// What the parts of the pretended machine share: the device's facts, and its memory, which is host memory.
#pragma once
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// cuda.h renames functions to their newest versions; here each is defined under the name that the library exports.
#undef cuMemAlloc

#define EXPORT __attribute__((visibility("default")))

enum memory_kind { UNKNOWN = 0, PINNED = 1, DEVICE = 2, MANAGED = 3 }; // as cudaMemoryType

int device_count(void);
int capability(void); // 90 for 9.0
const char *device_name(void);
size_t device_bytes(void);
size_t device_bytes_used(void);
int device_attribute(int attribute);
extern __thread int current_device;

void *take(size_t bytes, enum memory_kind kind); // NULL where the device is full
void give_back(void *pointer);
enum memory_kind kind_of(const void *pointer, char **base, size_t *bytes);
void *new_handle(void);           // of a stream, an event, a graph: nobody looks inside
void *exported(const char *name); // a function of this library
