/* A profiler plugin for NCCL 2.27 to 2.30: it notes the communicators and operations of a process in a file in shared memory.
 *
 * NCCL loads it by NCCL_PROFILER_PLUGIN and calls it from its own threads. Nothing here allocates, locks, reads or writes a
 * file or calls CUDA or NCCL, except init(), which NCCL calls once for each communicator. The layout of the file is described
 * in docs/protocol.md; commlens/blackbox/nccl_events.py reads it. A process may be killed at any instruction: a slot whose
 * sequence word is odd was being written, and each other word is stored at once.
 *
 * NCCL gets numbers for handles, never pointers: kind, generation and index of a slot. A handle of a slot that was used again
 * since, of an unloaded plugin, or of another process has no effect.
 *
 * The structures of NCCL's interface are declared here with their layout only. The library stays loaded after dlclose()
 * (linked with -z nodelete), so that threads of NCCL that come late find it.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* --- NCCL's interface */

enum { SUCCESS = 0 };
enum {
    GROUP = 1 << 0, COLL = 1 << 1, P2P = 1 << 2, PROXY_OP = 1 << 3, PROXY_STEP = 1 << 4, KERNEL_CH = 1 << 6,
    GROUP_API = 1 << 8, COLL_API = 1 << 9, P2P_API = 1 << 10, CE_COLL = 1 << 12,
};
enum { KERNEL_CH_STOP = 22 };

/* The event of versions 5 and 6. Version 4 has one byte for the type, and no events of the API; all else lies alike. */
typedef struct {
    uint64_t type;
    void *parent;
    int rank;
    union {
        struct { const char *func; size_t count; const char *datatype; int root; void *stream; _Bool captured; } coll_api;
        struct { const char *func; size_t count; const char *datatype; void *stream; _Bool captured; } p2p_api;
        /* the copy engine's collective begins alike, up to the datatype */
        struct { uint64_t number; const char *func; const void *sent; void *received; size_t count; int root;
                 const char *datatype; uint8_t channels; } coll;
        struct { const char *func; void *buffer; const char *datatype; size_t count; int peer; uint8_t channels; } p2p;
        struct { int pid; uint8_t channel; int peer; int steps; int chunk; int is_send; } proxy_op;
        struct { int step; } proxy_step;
        struct { uint8_t channel; uint64_t device_ns; } kernel;
    };
} event;

typedef union { size_t size; uint64_t device_ns; } state_args;
typedef void (*logger)(int, unsigned long, const char *, int, const char *, ...);
typedef int (*init_4)(void **, int *, const char *, uint64_t, int, int, int, logger);
typedef int (*init_5)(void **, uint64_t, int *, const char *, int, int, int, logger);

#define PLUGIN(init_type)                                                                                                      \
    struct {                                                                                                                   \
        const char *name;                                                                                                      \
        init_type init;                                                                                                        \
        int (*start)(void *context, void **handle, event *what);                                                               \
        int (*stop)(void *handle);                                                                                             \
        int (*record)(void *handle, int state, state_args *args);                                                              \
        int (*finalize)(void *context);                                                                                        \
    }

/* --- the file */

#define MAGIC "CLNSNCCL"
#define FORMAT 1
#define HEADER_SIZE 4096
#define COMMS 64
#define RINGS 3          /* of a communicator: collectives, messages, and collectives of CUDA graphs that were replayed */
#define RING 64          /* newest operations of each */
#define CAPTURED_OPS 256 /* calls into CUDA graphs, of all communicators: kept until their communicator ends */
#define TRANSFERS 2048
#define OPS (COMMS * RINGS * RING + CAPTURED_OPS)
#define STEPS 8 /* of one transfer at a time: NCCL_STEPS */
#define TRIES 8

enum { RECORDING = 1, OTHER_NCCL = 2 };

typedef struct {
    char magic[8];
    uint32_t format, header_size;
    uint32_t comms, comm_size, ops, op_size, ring, captured, transfers, transfer_size;
    uint64_t total_size;
    uint32_t pid, mask;
    uint64_t start_ticks, created_mono_ns, created_unix_ns;
    uint32_t status, nccl_version;
    char boot_id[40];
    char library[256];
    /* live words */
    uint64_t lost_comms, lost_ops, lost_transfers, foreign, other_events, next_captured, next_transfer;
} header;

typedef struct {
    uint64_t seq; /* generation << 1, odd while it is written */
    uint64_t hash;
    int32_t size, rank, nodes;
    uint32_t api;
    uint64_t made_ns, closed_ns;
    uint64_t collectives, messages;                   /* called so far; with version 4, launched */
    uint64_t finished_collectives, finished_messages; /* highest number whose kernel has stopped */
    uint64_t next_collective, next_message;           /* places given in the rings */
    uint64_t last_ns;
    uint64_t nccl_version;
    char name[96];
    uint64_t replayed, finished_replayed, next_replayed; /* the same of collectives that graphs launched */
    uint64_t captured; /* calls that did not run, numbered apart: each rank may capture when it likes */
    uint64_t spare[2];
} comm;

typedef struct {
    uint64_t seq;
    uint64_t number; /* of those of the communicator in the same ring, from 1 */
    char func[16];
    char datatype[16];
    uint64_t count;
    int32_t root, peer; /* -1: none or unknown */
    uint64_t state;     /* generation 24 | unused 8 | channels 8 | started 8 | stopped 8 | flags 8 */
    uint64_t nccl_number; /* + 1; 0: unknown */
    uint32_t comm, comm_generation, thread, spare;
    uint64_t called_ns, returned_ns, launched_ns, started_ns, stopped_ns;
    uint64_t device_started_ns, device_stopped_ns;
    uint64_t more;
} op;

typedef struct {
    uint64_t seq;
    uint32_t op, op_generation;
    uint32_t comm, comm_generation;
    int32_t peer, steps;
    uint32_t channel, is_send;
    uint64_t done;                 /* steps that have ended */
    uint64_t states;               /* of the steps under way: a byte each, by step % STEPS */
    uint64_t begun_ns, moved_ns, ended_ns;
    uint64_t posted;               /* steps that have begun */
    uint64_t spare;
} transfer;

enum {
    RETURNED = 1, LAUNCHED = 2, ENQUEUED = 4, CAPTURED = 8, WITH_KERNELS = 16, MESSAGE = 32, COPY_ENGINE = 64, REPLAY = 128
};
#define FILE_SIZE (HEADER_SIZE + sizeof(comm) * COMMS + sizeof(op) * OPS + sizeof(transfer) * TRANSFERS)
_Static_assert(sizeof(header) <= HEADER_SIZE && sizeof(comm) == 256 && sizeof(op) == 160 && sizeof(transfer) == 96, "layout");

static struct { header *head; comm *comms; op *ops; transfer *transfers; int pid, mask; } box;
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

#define load(word) __atomic_load_n(&(word), __ATOMIC_ACQUIRE)
#define store(word, value) __atomic_store_n(&(word), (value), __ATOMIC_RELEASE)
#define add(word, value) __atomic_fetch_add(&(word), (value), __ATOMIC_RELAXED)
#define swap(word, old, new) __atomic_compare_exchange_n(&(word), &(old), (new), 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)
/* Makes a slot's sequence word odd, before anything else in the slot changes. */
#define claim(word, seq) (swap(word, seq, seq + 1) && (__atomic_thread_fence(__ATOMIC_RELEASE), 1))

/* --- small parts */

static uint64_t clock_ns(clockid_t which)
{
    struct timespec now;
    clock_gettime(which, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint32_t thread_id(void)
{
    static __thread uint32_t known;
    if (!known)
        known = (uint32_t)syscall(SYS_gettid);
    return known;
}

static void copy_text(char *to, const char *from, size_t room)
{
    size_t at = 0;
    for (; from && at + 1 < room && from[at]; at++)
        to[at] = from[at];
    memset(to + at, 0, room - at);
}

/* Another thread may look at the slot before it tries to claim it. */
static void clear(uint64_t *from, const void *end)
{
    for (; (void *)from < end; from++)
        __atomic_store_n(from, 0, __ATOMIC_RELAXED);
}

static void raise_to(uint64_t *word, uint64_t value)
{
    uint64_t known = load(*word);
    while (known < value && !swap(*word, known, value))
        ;
}

enum { NO_KIND, CONTEXT, GROUP_HANDLE, CALL, TASK, KERNEL, TRANSFER, STEP };
#define GENERATION 0xFFFFFFu
#define NONE 0xFFFFFFu

typedef struct { uint32_t kind, generation, index, more; } handle;

static void *pack(uint32_t kind, uint64_t generation, uint32_t index, uint32_t more)
{
    return (void *)(uintptr_t)((uint64_t)kind << 60 | generation << 36 | (uint64_t)index << 12 | (more & 0xFFF));
}

static handle unpack(const void *packed)
{
    uint64_t bits = (uint64_t)(uintptr_t)packed;
    return (handle){bits >> 60, bits >> 36 & GENERATION, bits >> 12 & GENERATION, bits & 0xFFF};
}

#define GENERATION_OF(seq) ((seq) >> 1 & GENERATION)

static int is_current(uint64_t seq, uint32_t generation)
{
    return seq && !(seq & 1) && GENERATION_OF(seq) == generation;
}

static op *op_of(handle of)
{
    int fits = box.head && (of.kind == CALL || of.kind == TASK || of.kind == KERNEL) && of.index < OPS;
    return fits && is_current(load(box.ops[of.index].seq), of.generation) ? &box.ops[of.index] : NULL;
}

static comm *comm_of(const void *context)
{
    handle of = unpack(context);
    int fits = box.head && of.kind == CONTEXT && of.index < COMMS;
    return fits && is_current(load(box.comms[of.index].seq), of.generation) ? &box.comms[of.index] : NULL;
}

/* --- operations */

#define CHANNELS(state) ((state) >> 24 & 0xFF)
#define STARTED(state) ((state) >> 16 & 0xFF)
#define STOPPED(state) ((state) >> 8 & 0xFF)
#define RING_OF(flags) ((flags) & REPLAY ? 2 : (flags) & MESSAGE ? 1 : 0)

/* Whether an operation's kernel is to come or runs. One behind which another has stopped is over, or a ring of messages. */
static int is_open(const op *of, const comm *in)
{
    uint64_t state = load(of->state);
    int is_of_this = load(of->comm_generation) == GENERATION_OF(load(in->seq));
    if (!is_of_this || !(state & WITH_KERNELS) || STOPPED(state) >= CHANNELS(state))
        return 0;
    if (state & MESSAGE)
        return load(of->number) + RING > load(in->finished_messages);
    return load(of->number) > load(*(state & REPLAY ? &in->finished_replayed : &in->finished_collectives));
}

static int is_abandoned(const op *of)
{
    uint32_t index = load(of->comm);
    return index >= COMMS || GENERATION_OF(load(box.comms[index].seq)) != load(of->comm_generation) ||
           load(box.comms[index].closed_ns);
}

/* Takes a slot for an operation; the caller writes it and then calls publish(). */
static uint32_t claim_op(comm *in, uint64_t flags)
{
    int captured = (flags & CAPTURED) && !(flags & REPLAY), ring = RING_OF(flags);
    uint32_t first = captured ? COMMS * RINGS * RING : ((uint32_t)(in - box.comms) * RINGS + (uint32_t)ring) * RING;
    uint32_t room = captured ? CAPTURED_OPS : RING;
    uint64_t *nexts[RINGS] = {&in->next_collective, &in->next_message, &in->next_replayed};
    uint64_t *next = captured ? &box.head->next_captured : nexts[ring];
    for (uint32_t tries = 0; tries < (captured ? room : TRIES); tries++) {
        uint32_t index = first + (uint32_t)(add(*next, 1) % room);
        op *of = &box.ops[index];
        uint64_t seq = load(of->seq);
        int is_free = !seq || (captured ? is_abandoned(of) : !is_open(of, in));
        if (!(seq & 1) && is_free && claim(of->seq, seq))
            return index;
    }
    if (!captured) /* its replays are noted nevertheless */
        add(box.head->lost_ops, 1);
    return NONE;
}

/* Returns the slot's generation. */
static uint64_t publish(uint32_t index, uint64_t flags)
{
    op *of = &box.ops[index];
    uint64_t seq = load(of->seq) + 1;
    store(of->state, GENERATION_OF(seq) << 40 | flags);
    store(of->seq, seq);
    return GENERATION_OF(seq);
}

static uint32_t begin_op(comm *in, const char *func, const char *datatype, uint64_t count, int root, int peer, uint64_t flags)
{
    uint64_t *counters[RINGS] = {&in->collectives, &in->messages, &in->replayed};
    uint64_t *counter = (flags & (CAPTURED | REPLAY)) == CAPTURED ? &in->captured : counters[RING_OF(flags)];
    uint64_t number = add(*counter, 1) + 1, now = clock_ns(CLOCK_MONOTONIC);
    store(in->last_ns, now);
    uint32_t index = claim_op(in, flags);
    if (index == NONE)
        return NONE;
    op *of = &box.ops[index];
    clear(&of->number, of + 1);
    store(of->number, number);
    copy_text(of->func, func, sizeof of->func);
    copy_text(of->datatype, datatype, sizeof of->datatype);
    of->count = count;
    of->root = root;
    of->peer = peer;
    store(of->comm, (uint32_t)(in - box.comms));
    store(of->comm_generation, (uint32_t)GENERATION_OF(in->seq));
    of->thread = thread_id();
    of->called_ns = now;
    return index;
}

static void *start_call(comm *in, const event *what)
{
    int is_message = what->type == P2P_API;
    int captured = is_message ? what->p2p_api.captured : what->coll_api.captured;
    uint64_t flags = (is_message ? MESSAGE : 0) | (captured ? CAPTURED : 0);
    const char *datatype = is_message ? what->p2p_api.datatype : what->coll_api.datatype;
    /* func and count lie alike in both */
    uint32_t index = begin_op(in, what->coll_api.func, datatype, what->coll_api.count,
                              is_message ? -1 : what->coll_api.root, -1, flags);
    return pack(CALL, index == NONE ? 0 : publish(index, flags), index, !!captured);
}

/* An operation is launched: the call that it belongs to gets it, or, with version 4, a slot of its own. A captured one is
 * launched once for each replay of its graph if kernels are told, and its collectives then are operations of their own. */
static void *start_task(comm *in, const event *what, uint64_t type)
{
    int is_message = type == P2P;
    handle parent = unpack(what->parent);
    uint32_t index = parent.index;
    uint64_t generation = parent.generation, more = type == CE_COLL ? COPY_ENGINE : 0;
    int is_replay = parent.kind == CALL && parent.more && type == COLL && box.mask & KERNEL_CH;
    if (parent.kind != CALL || is_replay) {
        more |= is_message ? MESSAGE : is_replay ? CAPTURED | REPLAY : 0;
        index = is_message ? begin_op(in, what->p2p.func, what->p2p.datatype, what->p2p.count, -1, what->p2p.peer, more)
                           : begin_op(in, what->coll.func, what->coll.datatype, what->coll.count, what->coll.root, -1, more);
        if (index == NONE)
            return NULL;
        generation = publish(index, more);
    }
    if (index >= OPS)
        return NULL; /* its call found no slot */
    op *of = &box.ops[index];
    uint64_t channels = is_message ? what->p2p.channels : type == COLL ? what->coll.channels : 0;
    uint64_t state = load(of->state), changed;
    do {
        if (state >> 40 != generation || !is_current(load(of->seq), (uint32_t)generation))
            return NULL; /* its call has lost its slot */
        if ((state & CAPTURED) && (state & LAUNCHED))
            return NULL; /* a message of a graph that is replayed, or a graph without kernels that are told */
        uint64_t all = CHANNELS(state) + channels;
        changed = (state & 0xFFFFFFFF00FFFFFFu & ~(uint64_t)ENQUEUED) | (all > 0xFF ? 0xFF : all) << 24 | LAUNCHED | more |
                  (channels && box.mask & KERNEL_CH ? WITH_KERNELS : 0);
    } while (!swap(of->state, state, changed));
    if (is_message)
        store(of->peer, what->p2p.peer);
    else
        store(of->nccl_number, what->coll.number + 1);
    store(of->launched_ns, clock_ns(CLOCK_MONOTONIC));
    return pack(TASK, generation, index, 0);
}

/* Changes the state of an operation, if it is still the one that a handle is of. */
static int change(op *of, handle by, uint64_t count, uint64_t flags, uint64_t *changed)
{
    uint64_t state = load(of->state);
    do {
        if (state >> 40 != by.generation)
            return 0;
        if ((count == 1u << 16 && STARTED(state) == 0xFF) || (count == 1u << 8 && STOPPED(state) == 0xFF))
            count = 0;
        *changed = (state + count) | flags;
    } while (!swap(of->state, state, *changed));
    return 1;
}

static void *start_kernel(const event *what)
{
    handle by = unpack(what->parent);
    op *of = by.kind == TASK ? op_of(by) : NULL;
    uint64_t state;
    if (!of || !change(of, by, 1u << 16, 0, &state))
        return NULL;
    if (STARTED(state) == 1) {
        store(of->device_started_ns, what->kernel.device_ns);
        store(of->started_ns, clock_ns(CLOCK_MONOTONIC));
    }
    return pack(KERNEL, by.generation, by.index, 0);
}

/* Of 255 channels and more, the counts are not known. */
static void stop_kernel(op *of, handle by)
{
    uint64_t state, number = load(of->number); /* before the change, after which the slot may be used again */
    uint32_t index = load(of->comm);
    if (index >= COMMS || !change(of, by, 1u << 8, 0, &state) || STOPPED(state) < CHANNELS(state) || CHANNELS(state) == 0xFF)
        return;
    store(of->stopped_ns, clock_ns(CLOCK_MONOTONIC));
    comm *in = &box.comms[index];
    uint64_t *finished[RINGS] = {&in->finished_collectives, &in->finished_messages, &in->finished_replayed};
    raise_to(finished[RING_OF(state)], number);
}

/* --- transfers between nodes, all of a communicator by one thread */

static void *start_transfer(comm *in, const event *what)
{
    if (what->proxy_op.pid != box.pid) { /* of another process, for which this one sends: its handles mean nothing here */
        add(box.head->foreign, 1);
        return NULL;
    }
    handle by = unpack(what->parent);
    op *of = by.kind == TASK ? op_of(by) : NULL;
    for (uint32_t tries = 0; of && tries < TRIES; tries++) {
        uint32_t index = (uint32_t)(add(box.head->next_transfer, 1) % TRANSFERS);
        transfer *at = &box.transfers[index];
        uint64_t seq = load(at->seq);
        int is_over = !seq || load(at->ended_ns) || at->comm >= COMMS || load(box.comms[at->comm].closed_ns) ||
                      GENERATION_OF(load(box.comms[at->comm].seq)) != at->comm_generation;
        if ((seq & 1) || !is_over || !claim(at->seq, seq))
            continue;
        clear(&at->seq + 1, at + 1);
        at->op = by.index;
        at->op_generation = by.generation;
        at->comm = (uint32_t)(in - box.comms);
        at->comm_generation = (uint32_t)GENERATION_OF(in->seq);
        at->peer = what->proxy_op.peer;
        at->steps = what->proxy_op.steps;
        at->channel = what->proxy_op.channel;
        at->is_send = !!what->proxy_op.is_send;
        at->begun_ns = at->moved_ns = clock_ns(CLOCK_MONOTONIC_COARSE);
        store(at->seq, seq + 2);
        return pack(TRANSFER, GENERATION_OF(seq + 2), index, 0);
    }
    if (of)
        add(box.head->lost_transfers, 1);
    return NULL;
}

static transfer *transfer_of(handle of)
{
    int fits = box.head && (of.kind == TRANSFER || of.kind == STEP) && of.index < TRANSFERS;
    return fits && is_current(load(box.transfers[of.index].seq), of.generation) ? &box.transfers[of.index] : NULL;
}

static void set_step_state(transfer *of, uint32_t step, uint8_t state)
{
    __atomic_store_n((uint8_t *)&of->states + step % STEPS, state, __ATOMIC_RELAXED);
    store(of->moved_ns, clock_ns(CLOCK_MONOTONIC_COARSE));
}

static void *start_step(const event *what)
{
    handle by = unpack(what->parent);
    transfer *of = by.kind == TRANSFER ? transfer_of(by) : NULL;
    if (!of)
        return NULL;
    add(of->posted, 1);
    set_step_state(of, (uint32_t)what->proxy_step.step, 0);
    return pack(STEP, by.generation, by.index, (uint32_t)what->proxy_step.step % STEPS);
}

/* --- what NCCL calls */

static int start(void *context, void **to, const event *what, uint64_t type)
{
    *to = NULL; /* a handle that is left as it was may be an old one */
    if (!box.head)
        return SUCCESS;
    comm *in = comm_of(context);
    if (type == GROUP || type == GROUP_API) /* NCCL 2.27 leaves the operations of a group without a handle out */
        *to = pack(GROUP_HANDLE, 1, 0, 0);
    else if (type == KERNEL_CH)
        *to = start_kernel(what);
    else if (type == PROXY_STEP)
        *to = start_step(what);
    else if (!in)
        return SUCCESS;
    else if (type == COLL_API || type == P2P_API)
        *to = start_call(in, what);
    else if (type == COLL || type == P2P || type == CE_COLL)
        *to = start_task(in, what, type);
    else if (type == PROXY_OP)
        *to = start_transfer(in, what);
    else
        add(box.head->other_events, 1);
    return SUCCESS;
}

static int start_4(void *context, void **to, event *what) { return start(context, to, what, *(const uint8_t *)what); }
static int start_5(void *context, void **to, event *what) { return start(context, to, what, what->type); }

static int stop(void *packed)
{
    handle of = unpack(packed);
    uint64_t state;
    op *at = op_of(of);
    if (at && of.kind == KERNEL)
        stop_kernel(at, of);
    else if (at && of.kind == TASK)
        change(at, of, 0, ENQUEUED, &state);
    else if (at && !(load(at->state) & RETURNED) && change(at, of, 0, RETURNED, &state))
        store(at->returned_ns, clock_ns(CLOCK_MONOTONIC));
    transfer *moved = transfer_of(of);
    if (moved && of.kind == STEP) {
        add(moved->done, 1);
        set_step_state(moved, of.more, 0);
    } else if (moved)
        store(moved->ended_ns, clock_ns(CLOCK_MONOTONIC_COARSE));
    return SUCCESS;
}

static int record(void *packed, int state, state_args *args)
{
    handle of = unpack(packed);
    op *at = op_of(of);
    if (at && of.kind == KERNEL && state == KERNEL_CH_STOP && args)
        raise_to(&at->device_stopped_ns, args->device_ns);
    transfer *moved = of.kind == STEP ? transfer_of(of) : NULL;
    if (moved)
        set_step_state(moved, of.more, (uint8_t)state);
    return SUCCESS;
}

static int finalize(void *context)
{
    comm *in = comm_of(context);
    if (in)
        store(in->closed_ns, clock_ns(CLOCK_MONOTONIC));
    return SUCCESS;
}

/* --- the beginning */

static void read_file(const char *path, char *into, size_t room)
{
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = file < 0 ? 0 : read(file, into, room - 1);
    if (file >= 0)
        close(file);
    into[size < 0 ? 0 : size] = 0;
}

static uint64_t start_ticks(void)
{
    char text[1024], *at;
    read_file("/proc/self/stat", text, sizeof text);
    at = strrchr(text, ')');
    for (int field = 2; at && field < 22; field++)
        at = strchr(at + 1, ' ');
    return at ? strtoull(at, NULL, 10) : 0;
}

/* The version of the NCCL that a function is of, and its file; 0: unknown. */
static uint32_t version_of(logger log, const char **file)
{
    Dl_info found;
    int version = 0, (*get)(int *) = NULL;
    *file = "";
    if (!log || !dladdr((void *)log, &found) || !found.dli_fname)
        return 0;
    *file = found.dli_fname;
    void *library = dlopen(found.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (library) {
        get = (int (*)(int *))dlsym(library, "ncclGetVersion");
        if (get && get(&version))
            version = 0;
        dlclose(library);
    }
    return version > 0 ? (uint32_t)version : 0;
}

static int mask_of(const char *level)
{
    int calls = COLL_API | P2P_API | COLL | P2P | CE_COLL, kernels = calls | KERNEL_CH;
    if (!level)
        return 0;
    int all = !strcmp(level, "transfers") ? kernels | PROXY_OP | PROXY_STEP : 0;
    return !strcmp(level, "calls") ? calls : !strcmp(level, "kernels") ? kernels : all;
}

/* A forked process shares the mapping, and is no rank. */
static void leave(void) { box.head = NULL; }

/* Makes the file under another name first: a reader never finds it without its header. */
static int open_box(int mask)
{
    const char *folder = getenv("COMMLENS_NCCL_FOLDER");
    char path[PATH_MAX], building[PATH_MAX];
    int pid = getpid();
    if (!folder || folder[0] != '/' || snprintf(path, sizeof path, "%s/nccl.%d", folder, pid) >= (int)sizeof path ||
        snprintf(building, sizeof building, "%s/.nccl.%d.new", folder, pid) >= (int)sizeof building)
        return 0;
    unlink(building);
    int file = open(building, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (file < 0)
        return 0;
    /* a page of a full file system that is touched later would end the process */
    int is_full = posix_fallocate(file, 0, FILE_SIZE);
    void *at = is_full ? MAP_FAILED : mmap(NULL, FILE_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (at == MAP_FAILED) {
        unlink(building);
        return 0;
    }
    header *head = at;
    char boot_id[64];
    *head = (header){
        .format = FORMAT, .header_size = HEADER_SIZE, .comms = COMMS, .comm_size = sizeof(comm), .ops = OPS,
        .op_size = sizeof(op), .ring = RING, .captured = CAPTURED_OPS, .transfers = TRANSFERS,
        .transfer_size = sizeof(transfer), .total_size = FILE_SIZE, .pid = (uint32_t)pid, .mask = (uint32_t)mask,
        .start_ticks = start_ticks(), .created_mono_ns = clock_ns(CLOCK_MONOTONIC),
        .created_unix_ns = clock_ns(CLOCK_REALTIME),
    };
    read_file("/proc/sys/kernel/random/boot_id", boot_id, sizeof boot_id);
    boot_id[strcspn(boot_id, "\n")] = 0;
    copy_text(head->boot_id, boot_id, sizeof head->boot_id);
    memcpy(head->magic, MAGIC, sizeof head->magic);
    if (pthread_atfork(NULL, NULL, leave) || rename(building, path)) {
        unlink(building);
        munmap(at, FILE_SIZE);
        return 0;
    }
    box.comms = (comm *)((char *)at + HEADER_SIZE);
    box.ops = (op *)(box.comms + COMMS);
    box.transfers = (transfer *)(box.ops + OPS);
    box.pid = pid;
    box.mask = mask;
    store(box.head, head); /* last: a callback that finds it finds the rest */
    return 1;
}

static void *add_comm(uint32_t api, uint32_t version, uint64_t hash, const char *name, int nodes, int size, int rank)
{
    for (uint32_t index = 0; index < COMMS; index++) {
        comm *in = &box.comms[index];
        uint64_t seq = load(in->seq);
        if ((seq & 1) || (seq && !load(in->closed_ns)) || !claim(in->seq, seq))
            continue;
        clear(&in->hash, in + 1);
        in->hash = hash;
        in->size = size;
        in->rank = rank;
        in->nodes = nodes;
        in->api = api;
        in->nccl_version = version;
        in->made_ns = clock_ns(CLOCK_MONOTONIC);
        copy_text(in->name, name, sizeof in->name);
        store(in->seq, seq + 2);
        return pack(CONTEXT, GENERATION_OF(seq + 2), index, 0);
    }
    add(box.head->lost_comms, 1);
    return NULL;
}

/* Never fails: NCCL would unload the plugin under the communicators that have it. With an empty mask NCCL tells nothing. */
static int init(void **context, int *mask, uint32_t api, uint64_t hash, const char *name, int nodes, int size, int rank,
                logger log)
{
    int error = errno, wanted = mask_of(getenv("COMMLENS_NCCL_EVENTS"));
    const char *library;
    *context = NULL;
    if (!wanted)
        return SUCCESS;
    uint32_t version = version_of(log, &library);
    pthread_mutex_lock(&opening);
    if ((box.head && box.pid == getpid()) || open_box(wanted)) {
        int is_known = !version || (version >= 22700 && version < 23100);
        if (box.head->status != RECORDING) {
            box.head->nccl_version = version;
            copy_text(box.head->library, library, sizeof box.head->library);
            store(box.head->status, (uint32_t)(is_known ? RECORDING : OTHER_NCCL));
        }
        if (is_known) {
            *context = add_comm(api, version, hash, name, nodes, size, rank);
            *mask = wanted;
        }
    }
    pthread_mutex_unlock(&opening);
    errno = error;
    return SUCCESS;
}

static int init_of_4(void **context, int *mask, const char *name, uint64_t hash, int nodes, int size, int rank, logger log)
{
    return init(context, mask, 4, hash, name, nodes, size, rank, log);
}

#define INIT_OF(api)                                                                                                           \
    static int init_of_##api(void **context, uint64_t hash, int *mask, const char *name, int nodes, int size, int rank,        \
                             logger log)                                                                                       \
    {                                                                                                                          \
        return init(context, mask, api, hash, name, nodes, size, rank, log);                                                   \
    }
INIT_OF(5)
INIT_OF(6)
#define EXPORT __attribute__((visibility("default")))
EXPORT PLUGIN(init_4) ncclProfiler_v4 = {"commlens", init_of_4, start_4, stop, record, finalize};
EXPORT PLUGIN(init_5) ncclProfiler_v5 = {"commlens", init_of_5, start_5, stop, record, finalize};
EXPORT PLUGIN(init_5) ncclProfiler_v6 = {"commlens", init_of_6, start_5, stop, record, finalize};
