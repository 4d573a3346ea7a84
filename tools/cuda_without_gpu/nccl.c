// NCCL between processes of one machine: a message is a file in the folder PRETEND_MESSAGES, which its reader removes.
// A call returns when its numbers are there. Sums are added in the order of the ranks.
#include "machine.h"
#include <errno.h>
#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#define MOST_RANKS 64
#define PATIENCE_S 900 // then the process ends: a message that never comes is an error of the program under test

typedef struct {
  char bytes[128];
} unique_id;
struct comm {
  char name[256];
  int ranks, rank, splits;
  long sent[MOST_RANKS], received[MOST_RANKS];
};
enum { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE };
enum { FLOAT16 = 6, FLOAT32 = 7, FLOAT64 = 8, BFLOAT16 = 9 };
static const int size_of[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

static void fail(const char *what, const char *which) {
  fprintf(stderr, "pretended NCCL: %s: %s\n", what, which);
  abort();
}

// ---- messages

static void path_of(char *path, struct comm *c, int from, int to, long number) {
  const char *folder = getenv("PRETEND_MESSAGES");
  snprintf(path, 1024, "%s/nccl-%s-%d-%d-%ld", folder ? folder : "/dev/shm", c->name, from, to, number);
}

static void post(struct comm *c, int to, const void *data, size_t bytes) {
  char path[1024], whole[1024];
  path_of(whole, c, c->rank, to, c->sent[to]++);
  snprintf(path, sizeof path, "%s.part", whole);
  int file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  for (size_t done = 0; done < bytes;) {
    ssize_t n = write(file, (const char *)data + done, bytes - done);
    if (n <= 0 && errno != EINTR) fail("cannot write", path);
    if (n > 0) done += n;
  }
  close(file);
  if (rename(path, whole)) fail("cannot rename", path);
}

static void receive(struct comm *c, int from, void *data, size_t bytes) {
  char path[1024];
  path_of(path, c, from, c->rank, c->received[from]++);
  int file;
  for (long waited_us = 0, pause_us = 20; (file = open(path, O_RDONLY)) < 0; waited_us += pause_us) {
    if (waited_us > PATIENCE_S * 1000000L) fail("no message", path);
    if (pause_us < 2000) pause_us *= 2;
    usleep(pause_us);
  }
  struct stat found;
  if (fstat(file, &found) || (size_t)found.st_size != bytes) fail("a message of another size", path);
  for (size_t done = 0; done < bytes;) {
    ssize_t n = read(file, (char *)data + done, bytes - done);
    if (n <= 0 && errno != EINTR) fail("cannot read", path);
    if (n > 0) done += n;
  }
  close(file);
  unlink(path);
}

// ---- sums

static float from_bfloat(unsigned short x) {
  unsigned wide = (unsigned)x << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}
static unsigned short to_bfloat(float value) {
  unsigned wide;
  memcpy(&wide, &value, 4);
  if (value != value) return 0x7fc0;
  return (wide + 0x7fff + (wide >> 16 & 1)) >> 16; // to the nearest, to even in the middle
}

#define COMBINED(x, y)                                                                                                 \
  (op == PRODUCT ? (x) * (y) : op == MAXIMUM ? ((x) > (y) ? (x) : (y)) : op == MINIMUM ? ((x) < (y) ? (x) : (y)) : (x) + (y))
#define COMBINE(T)                                                                                                     \
  for (size_t i = 0; i < n; i++) ((T *)into)[i] = COMBINED(((T *)into)[i], ((const T *)from)[i])
#define DIVIDE(T)                                                                                                      \
  for (size_t i = 0; i < n; i++) ((T *)into)[i] /= ranks

static void combine(void *into, const void *from, size_t n, int type, int op) {
  unsigned short *halves = into;
  const unsigned short *others = from;
  switch (type) {
  case 0: COMBINE(signed char); break;
  case 1: COMBINE(unsigned char); break;
  case 2: COMBINE(int); break;
  case 3: COMBINE(unsigned); break;
  case 4: COMBINE(long); break;
  case 5: COMBINE(unsigned long); break;
  case FLOAT16: COMBINE(_Float16); break;
  case FLOAT32: COMBINE(float); break;
  case FLOAT64: COMBINE(double); break;
  case BFLOAT16:
    for (size_t i = 0; i < n; i++) halves[i] = to_bfloat(COMBINED(from_bfloat(halves[i]), from_bfloat(others[i])));
    break;
  default: fail("no sums of this type", "FP8");
  }
}
static void divide(void *into, size_t n, int type, int ranks) {
  unsigned short *halves = into;
  switch (type) {
  case FLOAT16: DIVIDE(_Float16); break;
  case FLOAT32: DIVIDE(float); break;
  case FLOAT64: DIVIDE(double); break;
  case BFLOAT16:
    for (size_t i = 0; i < n; i++) halves[i] = to_bfloat(from_bfloat(halves[i]) / ranks);
    break;
  default: fail("no average of this type", "integers");
  }
}

// `own` and what each other rank has posted to this one, into `out`.
static void add_up(struct comm *c, const void *own, void *out, size_t n, int type, int op) {
  size_t bytes = n * size_of[type];
  char *kept = malloc(bytes + 1), *other = malloc(bytes + 1);
  if (op > AVERAGE) fail("no such reduction", "a factor before the sum");
  memcpy(kept, own, bytes);
  for (int r = 0; r < c->ranks; r++) {
    if (r != c->rank) receive(c, r, other, bytes);
    const void *part = r == c->rank ? kept : other;
    if (r == 0)
      memcpy(out, part, bytes);
    else
      combine(out, part, n, type, op);
  }
  if (op == AVERAGE) divide(out, n, type, c->ranks);
  free(kept);
  free(other);
}

// ---- groups of ranks

EXPORT int ncclGetVersion(int *v) {
  *v = 22907;
  return 0;
}
EXPORT int ncclGetUniqueId(unique_id *id) {
  unsigned long random;
  getrandom(&random, sizeof random, 0);
  memset(id, 0, sizeof *id);
  snprintf(id->bytes, sizeof id->bytes, "%016lx", random);
  return 0;
}
static int make(struct comm **c, const char *name, int ranks, int rank) {
  if (ranks > MOST_RANKS) fail("too many ranks", name);
  *c = calloc(1, sizeof **c);
  snprintf((*c)->name, sizeof(*c)->name, "%s", name);
  (*c)->ranks = ranks;
  (*c)->rank = rank;
  return 0;
}
EXPORT int ncclCommInitRank(struct comm **c, int n, unique_id id, int r) { return make(c, id.bytes, n, r); }
EXPORT int ncclCommInitRankConfig(struct comm **c, int n, unique_id id, int r, void *k) {
  return make(c, id.bytes, n, r);
}
EXPORT int ncclCommInitRankScalable(struct comm **c, int n, int r, int m, unique_id *ids, void *k) {
  return make(c, ids->bytes, n, r);
}
EXPORT int ncclAllGather(const void *s, void *d, size_t n, int t, struct comm *c, void *st);
EXPORT int ncclCommSplit(struct comm *c, int color, int key, struct comm **o, void *k) {
  int every[MOST_RANKS][2], own[2] = {color, key}, ranks = 0, rank = 0;
  ncclAllGather(own, every, 2, 2, c, NULL);
  c->splits++;
  *o = NULL;
  if (color < 0) return 0;
  for (int r = 0; r < c->ranks; r++) {
    if (every[r][0] != color) continue;
    ranks++;
    rank += every[r][1] < key || (every[r][1] == key && r < c->rank);
  }
  char name[256];
  snprintf(name, sizeof name, "%.200s.%d.%d", c->name, c->splits, color);
  return make(o, name, ranks, rank);
}
EXPORT int ncclCommCount(struct comm *c, int *n) {
  *n = c->ranks;
  return 0;
}
EXPORT int ncclCommUserRank(struct comm *c, int *n) {
  *n = c->rank;
  return 0;
}
EXPORT int ncclCommCuDevice(struct comm *c, int *n) {
  *n = current_device;
  return 0;
}
EXPORT int ncclCommGetAsyncError(struct comm *c, int *e) {
  *e = 0;
  return 0;
}
EXPORT const char *ncclGetErrorString(int e) { return e ? "pretended NCCL error" : "no error"; }
EXPORT const char *ncclGetLastError(struct comm *c) { return ""; }

// ---- collectives

static void post_to_others(struct comm *c, const void *data, size_t bytes) {
  for (int r = 0; r < c->ranks; r++)
    if (r != c->rank) post(c, r, data, bytes);
}
EXPORT int ncclAllReduce(const void *s, void *d, size_t n, int t, int op, struct comm *c, void *st) {
  post_to_others(c, s, n * size_of[t]);
  add_up(c, s, d, n, t, op);
  return 0;
}
EXPORT int ncclReduce(const void *s, void *d, size_t n, int t, int op, int root, struct comm *c, void *st) {
  if (c->rank == root)
    add_up(c, s, d, n, t, op);
  else
    post(c, root, s, n * size_of[t]);
  return 0;
}
EXPORT int ncclReduceScatter(const void *s, void *d, size_t n, int t, int op, struct comm *c, void *st) {
  size_t bytes = n * size_of[t];
  for (int r = 0; r < c->ranks; r++)
    if (r != c->rank) post(c, r, (const char *)s + r * bytes, bytes);
  add_up(c, (const char *)s + c->rank * bytes, d, n, t, op);
  return 0;
}
EXPORT int ncclBroadcast(const void *s, void *d, size_t n, int t, int root, struct comm *c, void *st) {
  size_t bytes = n * size_of[t];
  if (c->rank != root) {
    receive(c, root, d, bytes);
  } else {
    post_to_others(c, s, bytes);
    if (s != d) memmove(d, s, bytes);
  }
  return 0;
}
EXPORT int ncclBcast(void *d, size_t n, int t, int root, struct comm *c, void *st) {
  return ncclBroadcast(d, d, n, t, root, c, st);
}
EXPORT int ncclAllGather(const void *s, void *d, size_t n, int t, struct comm *c, void *st) {
  size_t bytes = n * size_of[t];
  char *own = (char *)d + c->rank * bytes;
  post_to_others(c, s, bytes);
  if (own != s) memmove(own, s, bytes);
  for (int r = 0; r < c->ranks; r++)
    if (r != c->rank) receive(c, r, (char *)d + r * bytes, bytes);
  return 0;
}
EXPORT int ncclAlltoAll(const void *s, void *d, size_t n, int t, struct comm *c, void *st) {
  size_t bytes = n * size_of[t];
  for (int r = 0; r < c->ranks; r++) post(c, r, (const char *)s + r * bytes, bytes);
  for (int r = 0; r < c->ranks; r++) receive(c, r, (char *)d + r * bytes, bytes);
  return 0;
}

// ---- from one rank to another; in a group, what is received is waited for at its end

static __thread int depth;
static __thread int waiting;
static __thread struct {
  struct comm *c;
  int from;
  void *data;
  size_t bytes;
} later[1024];

EXPORT int ncclSend(const void *s, size_t n, int t, int to, struct comm *c, void *st) {
  post(c, to, s, n * size_of[t]);
  return 0;
}
EXPORT int ncclRecv(void *d, size_t n, int t, int from, struct comm *c, void *st) {
  if (!depth) {
    receive(c, from, d, n * size_of[t]);
    return 0;
  }
  if (waiting == 1024) fail("too many in one group", c->name);
  later[waiting].c = c;
  later[waiting].from = from;
  later[waiting].data = d;
  later[waiting++].bytes = n * size_of[t];
  return 0;
}
EXPORT int ncclGroupStart(void) {
  depth++;
  return 0;
}
EXPORT int ncclGroupEnd(void) {
  if (--depth) return 0;
  for (int i = 0; i < waiting; i++) receive(later[i].c, later[i].from, later[i].data, later[i].bytes);
  waiting = 0;
  return 0;
}

EXPORT int ncclMemAlloc(void **p, size_t n) {
  *p = take(n, DEVICE);
  return 0;
}
EXPORT int ncclMemFree(void *p) {
  give_back(p);
  return 0;
}
