/* Plays the part of NCCL before a profiler plugin: it loads one with dlopen, as NCCL 2.27 to 2.30 do, and calls it with the
 * events of sequences that tests write in Python (tests/unit/support/nccl_player.py), or in a loop to measure it.
 *
 * The structures are those of NCCL's interface, versions 4 to 6, by their layout; nothing is shared with the plugin's source.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef void (*log_function)(int level, unsigned long flags, const char *file, int line, const char *format, ...);

typedef struct {
    union {
        uint8_t type_4;
        uint64_t type;
    };
    void *parent;
    int rank;
    union {
        struct { _Bool captured; int depth; } group_api;
        struct { const char *func; size_t count; const char *datatype; int root; void *stream; _Bool captured; } coll_api;
        struct { const char *func; size_t count; const char *datatype; void *stream; _Bool captured; } p2p_api;
        struct { uint64_t seq; const char *func; const void *send; void *receive; size_t count; int root; const char *datatype;
                 uint8_t channels; uint8_t warps; const char *algo; const char *proto; void *group; } coll;
        struct { const char *func; void *buffer; const char *datatype; size_t count; int peer; uint8_t channels; void *group; } p2p;
        struct { int pid; uint8_t channel; int peer; int steps; int chunk; int is_send; } proxy_op;
        struct { int step; } proxy_step;
        struct { uint8_t channel; uint64_t timer; } kernel;
        struct { uint64_t seq; const char *func; const void *send; void *receive; size_t count; int root; const char *datatype;
                 const char *strategy; _Bool sync; uint32_t size, batches, number; void *stream; } ce_coll;
    };
} description;

typedef union { size_t size; uint64_t timer; void *data; } arguments;

typedef struct {
    const char *name;
    union {
        int (*init_4)(void **, int *, const char *, uint64_t, int, int, int, log_function);
        int (*init_5)(void **, uint64_t, int *, const char *, int, int, int, log_function);
    };
    int (*start)(void *, void **, description *);
    int (*stop)(void *);
    int (*record)(void *, int, arguments *);
    int (*finalize)(void *);
} plugin;

enum { OF_GROUP = 1, OF_COLL = 2, OF_P2P = 4, OF_PROXY_OP = 8, OF_PROXY_STEP = 16, OF_KERNEL = 64, OF_GROUP_API = 256,
       OF_COLL_API = 512, OF_P2P_API = 1024, OF_CE_COLL = 4096 };

static plugin *loaded;
static void *library;
static int version;
static int nccl_version = 23007;
static int mask; /* NCCL's global mask */

/* The plugin asks the library of the log function for this. */
int ncclGetVersion(int *to)
{
    *to = nccl_version;
    return 0;
}

static void log_line(int level, unsigned long flags, const char *file, int line, const char *format, ...)
{
    (void)level, (void)flags, (void)file, (void)line, (void)format;
}

/* Loads a plugin; 0: it has no symbol of this version of the interface. */
int player_load(const char *path, int of_version, int of_nccl)
{
    char symbol[32];
    version = of_version;
    nccl_version = of_nccl;
    mask = 0;
    snprintf(symbol, sizeof symbol, "ncclProfiler_v%d", version);
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        fprintf(stderr, "%s\n", dlerror());
    loaded = library ? dlsym(library, symbol) : NULL;
    return loaded != NULL;
}

void player_unload(void) { dlclose(library); }

int player_mask(void) { return mask; }

uint64_t player_init(uint64_t hash, const char *name, int nodes, int size, int rank)
{
    void *context = (void *)(uintptr_t)0xDEADBEEF;
    int error = version == 4 ? loaded->init_4(&context, &mask, name, hash, nodes, size, rank, log_line)
                             : loaded->init_5(&context, hash, &mask, name, nodes, size, rank, log_line);
    return error ? 0 : (uint64_t)(uintptr_t)context;
}

void player_finalize(uint64_t context) { loaded->finalize((void *)(uintptr_t)context); }

/* A start whose handle was another's before, as NCCL's thread-local handles are. */
static uint64_t start(uint64_t context, description *what, uint64_t type, uint64_t parent, int rank)
{
    void *handle = (void *)(uintptr_t)0xABCDEF;
    if (version == 4)
        what->type_4 = (uint8_t)type;
    else
        what->type = type;
    what->parent = (void *)(uintptr_t)parent;
    what->rank = rank;
    loaded->start((void *)(uintptr_t)context, &handle, what);
    return (uint64_t)(uintptr_t)handle;
}

void player_stop(uint64_t handle)
{
    if (handle)
        loaded->stop((void *)(uintptr_t)handle);
}

void player_record(uint64_t handle, int state, uint64_t value)
{
    arguments with = {.timer = value};
    if (handle)
        loaded->record((void *)(uintptr_t)handle, state, &with);
}

uint64_t player_group(uint64_t context, int of_api)
{
    description what = {0};
    return start(context, &what, of_api ? OF_GROUP_API : OF_GROUP, 0, 0);
}

uint64_t player_coll_api(uint64_t context, const char *func, uint64_t count, const char *datatype, int root, int captured)
{
    description what = {0};
    what.coll_api.func = func, what.coll_api.count = count, what.coll_api.datatype = datatype;
    what.coll_api.root = root, what.coll_api.captured = captured;
    return version > 4 && mask & (OF_COLL_API | OF_COLL) ? start(context, &what, OF_COLL_API, 0, 0) : 0;
}

uint64_t player_p2p_api(uint64_t context, const char *func, uint64_t count, const char *datatype, int captured)
{
    description what = {0};
    what.p2p_api.func = func, what.p2p_api.count = count, what.p2p_api.datatype = datatype;
    what.p2p_api.captured = captured;
    return version > 4 && mask & (OF_P2P_API | OF_P2P) ? start(context, &what, OF_P2P_API, 0, 0) : 0;
}

uint64_t player_coll(uint64_t context, uint64_t parent, uint64_t seq, const char *func, uint64_t count, const char *datatype,
                     int root, int channels)
{
    description what = {0};
    what.coll.seq = seq, what.coll.func = func, what.coll.count = count, what.coll.datatype = datatype;
    what.coll.root = root, what.coll.channels = (uint8_t)channels, what.coll.algo = "RING", what.coll.proto = "SIMPLE";
    return mask & (OF_COLL | OF_KERNEL) ? start(context, &what, OF_COLL, parent, 0) : 0;
}

uint64_t player_p2p(uint64_t context, uint64_t parent, const char *func, uint64_t count, const char *datatype, int peer,
                    int channels)
{
    description what = {0};
    what.p2p.func = func, what.p2p.count = count, what.p2p.datatype = datatype;
    what.p2p.peer = peer, what.p2p.channels = (uint8_t)channels;
    return mask & (OF_P2P | OF_KERNEL) ? start(context, &what, OF_P2P, parent, 0) : 0;
}

uint64_t player_ce_coll(uint64_t context, uint64_t parent, uint64_t seq, const char *func, uint64_t count, const char *datatype)
{
    description what = {0};
    what.ce_coll.seq = seq, what.ce_coll.func = func, what.ce_coll.count = count, what.ce_coll.datatype = datatype;
    what.ce_coll.strategy = "UC";
    return version > 5 && mask & OF_CE_COLL ? start(context, &what, OF_CE_COLL, parent, 0) : 0;
}

uint64_t player_kernel(uint64_t context, uint64_t task, int channel, uint64_t timer)
{
    description what = {0};
    what.kernel.channel = (uint8_t)channel, what.kernel.timer = timer;
    return mask & OF_KERNEL ? start(context, &what, OF_KERNEL, task, 0) : 0;
}

/* With the pid of another process: it sends through this one. */
uint64_t player_proxy_op(uint64_t context, uint64_t task, int pid, int channel, int peer, int steps, int is_send)
{
    description what = {0};
    what.proxy_op.pid = pid ? pid : getpid(), what.proxy_op.channel = (uint8_t)channel, what.proxy_op.peer = peer;
    what.proxy_op.steps = steps, what.proxy_op.chunk = 1 << 19, what.proxy_op.is_send = is_send;
    return mask & (OF_PROXY_OP | OF_PROXY_STEP) ? start(context, &what, OF_PROXY_OP, task, 0) : 0;
}

uint64_t player_proxy_step(uint64_t context, uint64_t proxy_op, int step)
{
    description what = {0};
    what.proxy_step.step = step;
    return mask & OF_PROXY_STEP ? start(context, &what, OF_PROXY_STEP, proxy_op, 0) : 0;
}

/* --- loops */

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

typedef struct {
    uint64_t context, seq, calls;
    uint32_t *took; /* ns of each call of the plugin; NULL: not measured */
    uint64_t room, every_ns, cost_ns;
    int *stop;
    uint64_t due;
} runner;

static uint64_t before(runner *by)
{
    if (by->every_ns) {
        by->due += by->every_ns;
        while (now_ns() < by->due)
            ;
    }
    return by->took ? now_ns() : 0;
}

static void after(runner *by, uint64_t began)
{
    if (by->took && by->calls < by->room) {
        uint64_t spent = now_ns() - began;
        by->took[by->calls] = (uint32_t)(spent > by->cost_ns ? spent - by->cost_ns : 0);
    }
    by->calls++;
}

#define TIMED(call)                                                                                                            \
    {                                                                                                                          \
        uint64_t began_ns = before(by);                                                                                        \
        call;                                                                                                                  \
        after(by, began_ns);                                                                                                   \
    }

/* One all-reduce of two channels, with all events that the mask has. */
static void one(runner *by)
{
    uint64_t api, task, kernel[2], moved = 0, step;
    TIMED(api = player_coll_api(by->context, "AllReduce", 1 << 20, "ncclBfloat16", 0, 0))
    TIMED(player_stop(api))
    TIMED(task = player_coll(by->context, api, by->seq++, "AllReduce", 1 << 20, "ncclBfloat16", 0, 2))
    TIMED(player_stop(task))
    if (mask & OF_KERNEL) {
        for (int at = 0; at < 2; at++)
            TIMED(kernel[at] = player_kernel(by->context, task, at, now_ns()))
        if (mask & OF_PROXY_STEP) {
            TIMED(moved = player_proxy_op(by->context, task, 0, 0, 1, 4, 1))
            for (int at = 0; at < 4; at++) {
                TIMED(step = player_proxy_step(by->context, moved, at))
                TIMED(player_record(step, 8, 0))
                TIMED(player_record(step, 9, 1 << 19))
                TIMED(player_stop(step))
            }
            TIMED(player_stop(moved))
        }
        for (int at = 0; at < 2; at++) {
            TIMED(player_record(kernel[at], 22, now_ns()))
            TIMED(player_stop(kernel[at]))
        }
    }
}

static void *run(void *with)
{
    runner *by = with;
    by->due = now_ns();
    while (!__atomic_load_n(by->stop, __ATOMIC_RELAXED) && (!by->took || by->calls + 32 < by->room))
        one(by);
    return NULL;
}

/* Calls the plugin in a loop; returns the number of calls, and in `took` the ns of each. `every_ns` 0: flat out. */
uint64_t player_measure(uint64_t context, uint32_t *took, uint64_t room, uint64_t every_ns)
{
    int stop = 0;
    runner by = {.context = context, .took = took, .room = room, .every_ns = every_ns, .stop = &stop, .cost_ns = 1u << 30};
    for (int at = 0; at < 10000; at++) { /* what the clock itself takes */
        uint64_t began = now_ns(), spent = now_ns() - began;
        by.cost_ns = spent < by.cost_ns ? spent : by.cost_ns;
    }
    run(&by);
    return by.calls;
}

/* Threads that each use all communicators given, for `ms` milliseconds; 0: until the process is killed. */
uint64_t player_crowd(const uint64_t *contexts, int count, int threads, int ms)
{
    static int stop;
    pthread_t ids[64];
    runner by[64];
    uint64_t calls = 0;
    stop = 0;
    for (int at = 0; at < threads; at++) {
        by[at] = (runner){.context = contexts[at % count], .stop = &stop};
        pthread_create(&ids[at], NULL, run, &by[at]);
    }
    if (ms)
        usleep((useconds_t)ms * 1000);
    else
        pause();
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    for (int at = 0; at < threads; at++) {
        pthread_join(ids[at], NULL);
        calls += by[at].calls;
    }
    return calls;
}
