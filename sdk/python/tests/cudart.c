/* A CUDA runtime without a GPU: what PyTorch's own CUDA code calls to allocate, copy and wait, so that it runs as it is.
 *
 * It is preloaded, and is the driver's library too. Devices have ordinary memory. A stream does nothing until somebody waits for
 * it (or for what waits for it): whoever looks at a copy without having waited, or has it wait for too little, finds the bytes of before.
 * Copies from and to memory that is not page-locked are done, or taken aside, at once, as the CUDA documentation has it.
 * Kernels do nothing. What was called is told in lines of text; what must not happen, in lines that begin with "WRONG".
 *
 * The types are those of CUDA 13's headers, as far as they are looked at. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SUCCESS = 0, NO_MEMORY = 2, INVALID_DEVICE = 101, NOT_READY = 600, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713 };
enum { DEVICES = 2, TO_DEVICE = 1, TO_HOST = 2 };
enum kind { COPY, ASIDE, FILL, RECORD, WAIT };

struct stream;
struct event { int id; struct stream *on; unsigned long told, done; };
struct task { enum kind kind; char *to, *from; size_t bytes; int value; struct event *event; unsigned long turn; struct task *next; };
struct stream { int id, device; struct task *first, **end; struct stream *next; };
struct range { char *start; size_t bytes; int device; struct range *next; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int device;
static __thread int last_error;
static struct stream defaults[DEVICES], *streams;
static struct range *locked, *on_devices;
static int ids;
static char *text;
static size_t text_used, text_room;

/* What tests look at and turn. */
int refuse_register, refuse_host_alloc, refuse_copies;

const char *said(void) { return text ? text : ""; }

void forget(void) {
    text_used = 0;
    if (text) *text = 0;
}

static void say(const char *format, ...) {
    char line[256];
    va_list arguments;
    va_start(arguments, format);
    size_t length = (size_t)vsnprintf(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    line[length++] = '\n';
    if (text_used + length + 1 > text_room) text = realloc(text, text_room = 2 * (text_room + length + 1));
    memcpy(text + text_used, line, length);
    text[text_used += length] = 0;
}

static void begin(void) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < DEVICES && !defaults[i].end; i++) {
        defaults[i] = (struct stream){.device = i, .end = &defaults[i].first, .next = streams};
        streams = &defaults[i];
    }
}

static int end(int error) {
    if (error) last_error = error;
    pthread_mutex_unlock(&lock);
    return error;
}

/* Streams. */

static struct stream *stream_of(void *handle) { return (uintptr_t)handle <= 2 ? &defaults[device] : handle; }

static void add(struct stream *stream, struct task task) {
    struct task *made = malloc(sizeof *made);
    *made = task;
    made->next = NULL;
    *stream->end = made;
    stream->end = &made->next;
}

/* Does what the stream was given, up to where the event is recorded if there is one. */
static void run(struct stream *stream, struct event *until, unsigned long turn) {
    while (stream->first && !(until && until->done >= turn)) {
        struct task *task = stream->first;
        if (task->kind == WAIT && task->event->on && task->event->done < task->turn) run(task->event->on, task->event, task->turn);
        stream->first = task->next;
        if (!stream->first) stream->end = &stream->first;
        if (task->kind == COPY || task->kind == ASIDE) memcpy(task->to, task->from, task->bytes);
        if (task->kind == ASIDE) free(task->from);
        if (task->kind == FILL) memset(task->to, task->value, task->bytes);
        if (task->kind == RECORD) task->event->done = task->turn;
        free(task);
    }
}

int cudaStreamCreateWithPriority(void **handle, unsigned flags, int priority) {
    begin();
    struct stream *made = calloc(1, sizeof *made);
    *made = (struct stream){.id = ++ids, .device = device, .end = &made->first, .next = streams};
    *handle = streams = made;
    return end(SUCCESS);
}

int cudaStreamSynchronize(void *handle) {
    begin();
    say("stream-synchronize stream=%d device=%d", stream_of(handle)->id, stream_of(handle)->device);
    run(stream_of(handle), NULL, 0);
    return end(SUCCESS);
}

int cudaStreamQuery(void *handle) {
    begin();
    int ready = stream_of(handle)->first == NULL;
    end(SUCCESS);
    return ready ? SUCCESS : NOT_READY;
}

int cudaDeviceSynchronize(void) {
    begin();
    for (struct stream *stream = streams; stream; stream = stream->next)
        if (stream->device == device) run(stream, NULL, 0);
    return end(SUCCESS);
}

int cudaStreamWaitEvent(void *handle, void *event, unsigned flags) {
    begin();
    struct event *awaited = event;
    add(stream_of(handle), (struct task){.kind = WAIT, .event = awaited, .turn = awaited->told});
    say("wait event=%d stream=%d device=%d", awaited->id, stream_of(handle)->id, stream_of(handle)->device);
    return end(SUCCESS);
}

/* Events. */

int cudaEventCreateWithFlags(void **event, unsigned flags) {
    begin();
    struct event *made = calloc(1, sizeof *made);
    made->id = ++ids;
    *event = made;
    return end(SUCCESS);
}

int cudaEventRecordWithFlags(void *event, void *handle, unsigned flags) {
    begin();
    struct event *told = event;
    told->on = stream_of(handle);
    add(told->on, (struct task){.kind = RECORD, .event = told, .turn = ++told->told});
    say("record event=%d stream=%d device=%d", told->id, told->on->id, told->on->device);
    return end(SUCCESS);
}

int cudaEventRecord(void *event, void *handle) { return cudaEventRecordWithFlags(event, handle, 0); }

int cudaEventQuery(void *event) {
    begin();
    struct event *asked = event;
    int ready = asked->done >= asked->told;
    end(SUCCESS);
    return ready ? SUCCESS : NOT_READY;
}

int cudaEventSynchronize(void *event) {
    begin();
    struct event *awaited = event;
    say("event-synchronize event=%d", awaited->id);
    if (awaited->on) run(awaited->on, awaited, awaited->told);
    return end(SUCCESS);
}

int cudaEventDestroy(void *event) { return SUCCESS; /* tasks may still name it */ }

/* Memory. */

static struct range *range_of(struct range *ranges, const void *at) {
    while (ranges && !((char *)at >= ranges->start && (char *)at < ranges->start + ranges->bytes)) ranges = ranges->next;
    return ranges;
}

static void put(struct range **ranges, void *start, size_t bytes) {
    struct range *made = malloc(sizeof *made);
    *made = (struct range){start, bytes, device, *ranges};
    *ranges = made;
}

static int is_mapped(char *start, size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), pages = (bytes + page - 1) / page;
    unsigned char *resident = malloc(pages);
    int answer = mincore((void *)((uintptr_t)start & ~(page - 1)), bytes, resident);
    free(resident);
    return answer == 0;
}

static void check_mapped(void) {
    for (struct range *range = locked; range; range = range->next)
        if (!is_mapped(range->start, range->bytes)) say("WRONG: page-locked memory at %p was unmapped", range->start);
}

static int unlock(void *start) {
    struct range **at = &locked;
    while (*at && (*at)->start != (char *)start) at = &(*at)->next;
    if (!*at) return NOT_REGISTERED;
    struct range *gone = *at;
    for (struct stream *stream = streams; stream; stream = stream->next)
        for (struct task *task = stream->first; task; task = task->next)
            if (task->kind == COPY && (range_of(gone, task->to) == gone || range_of(gone, task->from) == gone))
                say("WRONG: memory at %p is given back while it is copied", start);
    *at = gone->next;
    free(gone);
    return SUCCESS;
}

int cudaMalloc(void **start, size_t bytes) {
    begin();
    *start = aligned_alloc(512, (bytes + 511) / 512 * 512);
    put(&on_devices, *start, bytes);
    say("malloc device=%d", device);
    return end(SUCCESS);
}

int cudaFree(void *start) { return SUCCESS; }

int cudaHostAlloc(void **start, size_t bytes, unsigned flags) {
    begin();
    say("host-alloc bytes=%zu error=%d", bytes, refuse_host_alloc);
    if (refuse_host_alloc) return end(refuse_host_alloc);
    *start = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    put(&locked, *start, bytes);
    return end(SUCCESS);
}

int cudaFreeHost(void *start) {
    begin();
    return end(unlock(start));
}

int cudaHostRegister(void *start, size_t bytes, unsigned flags) {
    begin();
    int error = refuse_register ? refuse_register : range_of(locked, start) ? ALREADY_REGISTERED : SUCCESS;
    say("register at=%lu bytes=%zu flags=%u device=%d error=%d thread=%d", (unsigned long)start, bytes, flags, device, error, gettid());
    if (!error) put(&locked, start, bytes);
    check_mapped();
    return end(error);
}

int cudaHostUnregister(void *start) {
    begin();
    check_mapped();
    int error = unlock(start);
    say("unregister at=%lu device=%d error=%d thread=%d", (unsigned long)start, device, error, gettid());
    return end(error);
}

/* Which memory an address is of; the fields that come behind are for other kinds. */
struct attributes { int type, device; void *on_device, *on_host; };

int cudaPointerGetAttributes(struct attributes *attributes, const void *at) {
    begin();
    struct range *of_device = range_of(on_devices, at);
    int type = of_device ? 2 : range_of(locked, at) ? 1 : 0;
    *attributes = (struct attributes){type, of_device ? of_device->device : 0, (void *)at, (void *)at};
    return end(SUCCESS);
}

int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *handle) {
    begin();
    struct stream *stream = stream_of(handle);
    const char *on_host = kind == TO_HOST ? to : from;
    int pageable = (kind == TO_HOST || kind == TO_DEVICE) && !range_of(locked, on_host);
    const char *names[] = {"host", "to-device", "to-host", "device"}, *name = names[kind < 4 ? kind : 3];
    say("copy %s %s bytes=%zu stream=%d device=%d", name, pageable ? "pageable" : "locked", bytes, stream->id, stream->device);
    if (refuse_copies && kind == TO_HOST && --refuse_copies == 0) return end(NO_MEMORY);
    struct task task = {.kind = COPY, .to = to, .from = (char *)from, .bytes = bytes};
    if (pageable && kind == TO_DEVICE) {
        task.kind = ASIDE;
        task.from = memcpy(malloc(bytes), from, bytes);
    }
    add(stream, task);
    if (pageable && kind == TO_HOST) run(stream, NULL, 0);
    return end(SUCCESS);
}

int cudaMemcpy(void *to, const void *from, size_t bytes, int kind) {
    int error = cudaMemcpyAsync(to, from, bytes, kind, NULL);
    return error ? error : cudaStreamSynchronize(NULL);
}

int cudaMemsetAsync(void *to, int value, size_t bytes, void *handle) {
    begin();
    add(stream_of(handle), (struct task){.kind = FILL, .to = to, .bytes = bytes, .value = value});
    return end(SUCCESS);
}

struct extent { unsigned x, y, z; };

int cudaLaunchKernel(const void *function, struct extent grid, struct extent block, void **arguments, size_t shared, void *handle) {
    begin();
    say("kernel stream=%d device=%d", stream_of(handle)->id, stream_of(handle)->device);
    return end(SUCCESS);
}

int __cudaLaunchKernel(const void *function, struct extent grid, struct extent block, void **arguments, size_t shared, void *handle) {
    return cudaLaunchKernel(function, grid, block, arguments, shared, handle);
}

/* Devices. */

int cudaGetDeviceCount(int *count) { return *count = DEVICES, SUCCESS; }
int cudaGetDevice(int *number) { return *number = device, SUCCESS; }
int cudaSetDevice(int number) { return number < 0 || number >= DEVICES ? INVALID_DEVICE : (device = number, SUCCESS); }
int cudaGetLastError(void) {
    int error = last_error;
    last_error = SUCCESS;
    return error;
}
int cudaPeekAtLastError(void) { return last_error; }
int cudaDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }
int cudaRuntimeGetVersion(int *version) { return *version = 13000, SUCCESS; }
int cudaDeviceGetAttribute(int *value, int attribute, int number) { return *value = 0, SUCCESS; }
int cudaDeviceCanAccessPeer(int *can, int number, int peer) { return *can = 0, SUCCESS; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -1, SUCCESS; }
int cudaMemGetInfo(size_t *free_bytes, size_t *total) { return *free_bytes = *total = (size_t)1 << 30, SUCCESS; }
int cudaStreamIsCapturing(void *handle, int *status) { return *status = 0, SUCCESS; }
int cudaStreamGetCaptureInfo(void *handle, int *status) { return *status = 0, SUCCESS; }
int cudaThreadExchangeStreamCaptureMode(int *mode) { return SUCCESS; }

int cudaGetDeviceProperties(char *properties, int number) {
    memset(properties, 0, 400);
    strcpy(properties, "none");
    *(size_t *)(properties + 288) = (size_t)1 << 30; /* totalGlobalMem */
    *(int *)(properties + 308) = 32;                 /* warpSize */
    *(int *)(properties + 320) = 1024;               /* maxThreadsPerBlock */
    *(int *)(properties + 360) = 9;                  /* major */
    *(int *)(properties + 384) = 1;                  /* multiProcessorCount */
    return SUCCESS;
}

/* The driver: is asked for addresses of what is never called here. */

static int refuse(void) { return 801; }
int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags, int *found) {
    *function = (void *)refuse;
    if (found) *found = 0;
    return SUCCESS;
}
int cuGetErrorString(int error, const char **name) { return *name = "an error", SUCCESS; }
int cuDevicePrimaryCtxGetState(int number, unsigned *flags, int *active) { return *flags = 0, *active = 1, SUCCESS; }
