/* A stand-in for the CUDA driver, for machines without a GPU: what tensorcast_connector/engines/devices/driver.py calls, with
 * memory of the machine as that of the device. It is strict where the real one leaves things undefined:
 *
 * - Nothing that is asynchronous happens before somebody waits for it. So a buffer that is used again too early, or bytes that are
 *   read before they are there, are wrong bytes here, always.
 * - Freeing memory to or from which a copy is under way is an error, and so is every call without a current context.
 * - A handle cannot be opened by the process that made it, nor after that process has died or has freed the memory.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef int CUresult;
typedef uint64_t CUdeviceptr;
enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, MISUSED = 999 };

typedef struct { char *at; size_t size; int fd; int pinned, opened, count; } Memory;
typedef struct Op { struct Op *next; char *to; const char *from; size_t size; struct Event *event; } Op;
typedef struct Event { int pending; struct Stream *stream; } Event;
typedef struct Stream { Op *first, **last; struct Stream *next; } Stream;
typedef struct { unsigned char reserved[64]; } Handle;
typedef struct { uint32_t pid; int32_t fd; uint64_t inode, size; } Inside;

static Memory memories[4096];
static int memory_count, depth, initialised;
static size_t used;
static Stream *streams;

static size_t total(void) {
    const char *text = getenv("FAKE_CUDA_BYTES");
    return text ? strtoull(text, 0, 10) : (size_t)1 << 30;
}
static int devices(void) {
    const char *text = getenv("FAKE_CUDA_DEVICES");
    return text ? atoi(text) : 2;
}
static int fails(const char *name) { const char *text = getenv("FAKE_CUDA_FAILS"); return text && !strcmp(text, name); }
#define IN_CONTEXT if (!initialised || !depth) return INVALID_CONTEXT; if (fails(__func__)) return MISUSED

static Memory *find(const char *at) {
    for (int i = 0; i < memory_count; i++)
        if (memories[i].at && memories[i].at == at) return &memories[i];
    return 0;
}
static int within(const char *at, size_t size) {
    for (int i = 0; i < memory_count; i++)
        if (memories[i].at && memories[i].at <= at && at + size <= memories[i].at + memories[i].size) return 1;
    return 0;
}
static int under_way(const Memory *memory) {
    for (Stream *stream = streams; stream; stream = stream->next)
        for (Op *op = stream->first; op; op = op->next)
            if (!op->event && ((op->to >= memory->at && op->to < memory->at + memory->size) ||
                               (op->from >= memory->at && op->from < memory->at + memory->size)))
                return 1;
    return 0;
}
static void run(Stream *stream, Event *until) {
    while (stream->first) {
        Op *op = stream->first;
        Event *event = op->event;
        stream->first = op->next;
        if (!stream->first) stream->last = &stream->first;
        if (event) event->pending--;
        else memmove(op->to, op->from, op->size);
        free(op);
        if (until && event == until && !event->pending) return;
    }
}
static void queue(Stream *stream, Op op) {
    Op *made = malloc(sizeof op);
    *made = op;
    made->next = 0;
    *stream->last = made;
    stream->last = &made->next;
}
static Memory *keep(Memory memory) {
    for (int i = 0; i < memory_count; i++)
        if (!memories[i].at) { memories[i] = memory; return &memories[i]; }
    memories[memory_count] = memory;
    return &memories[memory_count++];
}
static int forget(Memory *memory) {
    if (under_way(memory)) return MISUSED;
    munmap(memory->at, memory->size);
    if (memory->fd >= 0) close(memory->fd);
    memory->at = 0;
    return OK;
}

CUresult cuInit(unsigned flags) { initialised = devices() > 0; return flags ? INVALID_VALUE : initialised ? OK : NO_DEVICE; }
CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == OUT_OF_MEMORY ? "out of memory" : error == NO_DEVICE ? "no CUDA-capable device is detected" :
            error == INVALID_HANDLE ? "invalid resource handle" : error == INVALID_CONTEXT ? "invalid device context" :
            error == MISUSED ? "misused" : "invalid argument";
    return OK;
}
CUresult cuDeviceGetCount(int *count) { *count = devices(); return OK; }
CUresult cuDeviceGet(int *device, int number) { *device = number; return number < devices() ? OK : NO_DEVICE; }
CUresult cuDeviceGetUuid_v2(unsigned char *uuid, int device) { memset(uuid, 0xa0 + device, 16); return OK; }
CUresult cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(uintptr_t)(0x1000 + device); return OK; }
CUresult cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return OK; }
CUresult cuCtxPushCurrent_v2(void *context) { if (!context) return INVALID_CONTEXT; depth++; return OK; }
CUresult cuCtxPopCurrent_v2(void **context) { *context = 0; if (!depth) return INVALID_CONTEXT; depth--; return OK; }
CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *all) { IN_CONTEXT; *all = total(); *free_bytes = total() - used; return OK; }

CUresult cuMemAlloc_v2(CUdeviceptr *made, size_t size) {
    IN_CONTEXT;
    if (!size) return INVALID_VALUE;
    if (used + size > total()) return OUT_OF_MEMORY;
    int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)size)) return OUT_OF_MEMORY;
    char *at = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) return OUT_OF_MEMORY;
    memset(at, 0xee, size < 4096 ? size : 4096); /* whatever was there before */
    keep((Memory){at, size, fd, 0, 0, 0});
    used += size;
    *made = (CUdeviceptr)(uintptr_t)at;
    return OK;
}
CUresult cuMemFree_v2(CUdeviceptr address) {
    IN_CONTEXT;
    Memory *memory = find((char *)(uintptr_t)address);
    if (!memory || memory->pinned || memory->opened) return INVALID_VALUE;
    size_t size = memory->size;
    CUresult result = forget(memory);
    if (!result) used -= size;
    return result;
}
CUresult cuMemHostAlloc(void **made, size_t size, unsigned flags) {
    IN_CONTEXT;
    if (flags != 1) return INVALID_VALUE;
    char *at = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return OUT_OF_MEMORY;
    keep((Memory){at, size, -1, 1, 0, 0});
    *made = at;
    return OK;
}
CUresult cuMemFreeHost(void *address) {
    IN_CONTEXT;
    Memory *memory = find(address);
    return memory && memory->pinned ? forget(memory) : INVALID_VALUE;
}

CUresult cuIpcGetMemHandle(Handle *handle, CUdeviceptr address) {
    IN_CONTEXT;
    Memory *memory = find((char *)(uintptr_t)address);
    struct stat found;
    if (!memory || memory->pinned || memory->opened || fstat(memory->fd, &found)) return INVALID_VALUE;
    Inside inside = {(uint32_t)getpid(), memory->fd, found.st_ino, memory->size};
    memset(handle, 0x5a, sizeof *handle);
    memcpy(handle, &inside, sizeof inside);
    return OK;
}
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *made, Handle handle, unsigned flags) {
    IN_CONTEXT;
    Inside inside;
    char path[64];
    struct stat found;
    memcpy(&inside, &handle, sizeof inside);
    for (size_t i = sizeof inside; i < sizeof handle; i++)
        if (handle.reserved[i] != 0x5a) return INVALID_HANDLE;
    if (flags != 1) return INVALID_VALUE;
    if (inside.pid == (uint32_t)getpid()) return INVALID_CONTEXT;
    snprintf(path, sizeof path, "/proc/%u/fd/%d", inside.pid, inside.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return INVALID_HANDLE;
    if (fstat(fd, &found) || found.st_ino != inside.inode) { close(fd); return INVALID_HANDLE; }
    for (int i = 0; i < memory_count; i++) { /* open already: the same address, once more */
        struct stat other;
        if (memories[i].at && memories[i].opened && !fstat(memories[i].fd, &other) && other.st_ino == inside.inode) {
            memories[i].count++;
            close(fd);
            *made = (CUdeviceptr)(uintptr_t)memories[i].at;
            return OK;
        }
    }
    char *at = mmap(0, inside.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) { close(fd); return OUT_OF_MEMORY; }
    keep((Memory){at, inside.size, fd, 0, 1, 1});
    *made = (CUdeviceptr)(uintptr_t)at;
    return OK;
}
CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    IN_CONTEXT;
    Memory *memory = find((char *)(uintptr_t)address);
    if (!memory || !memory->opened) return INVALID_VALUE;
    return --memory->count ? OK : forget(memory);
}

CUresult cuStreamCreate(Stream **made, unsigned flags) {
    IN_CONTEXT;
    if (flags != 1) return INVALID_VALUE;
    Stream *stream = calloc(1, sizeof *stream);
    stream->last = &stream->first;
    stream->next = streams;
    streams = stream;
    *made = stream;
    return OK;
}
CUresult cuStreamSynchronize(Stream *stream) { IN_CONTEXT; run(stream, 0); return OK; }
CUresult cuStreamDestroy_v2(Stream *stream) {
    IN_CONTEXT;
    if (stream->first) return MISUSED;
    for (Stream **each = &streams; *each; each = &(*each)->next)
        if (*each == stream) { *each = stream->next; break; }
    free(stream);
    return OK;
}
CUresult cuEventCreate(Event **made, unsigned flags) {
    IN_CONTEXT;
    if (flags != 2) return INVALID_VALUE;
    *made = calloc(1, sizeof **made);
    return OK;
}
CUresult cuEventRecord(Event *event, Stream *stream) {
    IN_CONTEXT;
    event->stream = stream;
    event->pending++;
    queue(stream, (Op){.event = event});
    return OK;
}
CUresult cuEventSynchronize(Event *event) { IN_CONTEXT; if (event->pending) run(event->stream, event); return OK; }
CUresult cuEventDestroy_v2(Event *event) { IN_CONTEXT; if (event->pending) return MISUSED; free(event); return OK; }

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, Stream *stream) {
    IN_CONTEXT;
    if (!within((char *)(uintptr_t)to, size)) return INVALID_VALUE;
    queue(stream, (Op){.to = (char *)(uintptr_t)to, .from = from, .size = size});
    return OK;
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, Stream *stream) {
    IN_CONTEXT; /* the target may be memory that somebody else has allocated */
    if (!within((char *)(uintptr_t)from, size)) return INVALID_VALUE;
    queue(stream, (Op){.to = (char *)(uintptr_t)to, .from = (char *)(uintptr_t)from, .size = size});
    return OK;
}
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size) {
    IN_CONTEXT;
    if (!within((char *)(uintptr_t)from, size)) return INVALID_VALUE;
    memmove(to, (char *)(uintptr_t)from, size);
    return OK;
}
