/* Reads a Flight Recorder pickle straight into columns, many times faster than through Python objects.
 *
 * Optional: read() supports the closed set of opcodes that data needs and the shape of torch's dumps. For anything else, damaged
 * files included, it returns None, and the Python readers (pickle_data.py, entries.py) take over. Both return the same table for
 * the same file; a test compares them.
 *
 * The file is not trusted: every access is bounds-checked, indices are validated, and work and memory are bounded. Only to_python
 * recurses, to a counted depth. Parsing releases the GIL. Limited API of Python 3.10.
 */

#ifndef COMMLENS_FUZZ /* tests/fuzz includes this file without Python */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#endif

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define VERSION 1 /* of read()'s result, checked by reader.py */

#define STACK_MAX (1u << 23)
#define CONTAINERS_MAX 4000000u
#define ARENA_MAX (1u << 25)
#define WORDS_MAX (1u << 25)
#define WORK_MAX 20000000 /* sizes and frames in total: shared lists let a small file claim billions */
#define PROBES_MAX 256
#define DEPTH_MAX 8
#define NODES_MAX 1000000
#define SPARE_MAX (16u << 20) /* bytes of a workspace kept for the next file */

/* ---- values ------------------------------------------------------------------------------------------------------------ */

enum tag { NONE, FALSE_, TRUE_, INT, FLOAT, STRING, LIST, TUPLE, DICT, ENTRY };

typedef struct {
    uint32_t tag;
    uint32_t index; /* STRING: into strings; LIST, TUPLE, DICT: into containers; ENTRY: row */
    union {
        int64_t i;
        double d;
    } as;
} value;

typedef struct {
    uint32_t begin, count, room; /* its values in the arena; a dict's keys and values alternate */
    int32_t frame;               /* index of the frame that this dict describes; -1 if unknown */
    uint8_t used;                /* an entry uses it, so it must not change */
} container;

enum field {
    F_FRAMES, F_RECORD_ID, F_PG_ID, F_PROCESS_GROUP, F_COLLECTIVE_SEQ, F_P2P_SEQ, F_OP_ID, F_PROFILING_NAME, F_CREATED,
    F_DURATION, F_INPUT_SIZES, F_INPUT_DTYPES, F_OUTPUT_SIZES, F_OUTPUT_DTYPES, F_STATE, F_STARTED, F_COMPLETED, F_RETIRED,
    F_TIMEOUT, F_IS_P2P, F_ENTRY_COUNT, /* the keys above are of an entry */
    F_NAME = F_ENTRY_COUNT, F_FILENAME, F_LINE, F_ENTRIES, F_LEGACY, F_OTHER
};

static const struct {
    const char *text;
    uint8_t field;
} FIELDS[] = {
    {"frames", F_FRAMES}, {"record_id", F_RECORD_ID}, {"pg_id", F_PG_ID}, {"process_group", F_PROCESS_GROUP},
    {"collective_seq_id", F_COLLECTIVE_SEQ}, {"p2p_seq_id", F_P2P_SEQ}, {"op_id", F_OP_ID},
    {"profiling_name", F_PROFILING_NAME}, {"time_created_ns", F_CREATED}, {"duration_ms", F_DURATION},
    {"input_sizes", F_INPUT_SIZES}, {"input_dtypes", F_INPUT_DTYPES}, {"output_sizes", F_OUTPUT_SIZES},
    {"output_dtypes", F_OUTPUT_DTYPES}, {"state", F_STATE}, {"time_discovered_started_ns", F_STARTED},
    {"time_discovered_completed_ns", F_COMPLETED}, {"retired", F_RETIRED}, {"timeout_ms", F_TIMEOUT}, {"is_p2p", F_IS_P2P},
    {"name", F_NAME}, {"filename", F_FILENAME}, {"line", F_LINE}, {"entries", F_ENTRIES},
    {"seq_id", F_LEGACY}, {"time_created_us", F_LEGACY}, {"id", F_LEGACY},
};

static const char *const STATES[] = {"scheduled", "started", "completed"};

typedef struct {
    const unsigned char *text;
    uint32_t length;
    uint8_t field; /* key with this name */
    int8_t state;  /* state with this name; -1 if none */
    int32_t name;  /* index among the profiling names; -1 if not used as one yet */
} string;

/* ---- growing arrays, and tables of distinct values -------------------------------------------------------------------- */

static int
grow(void **items, uint32_t *room, uint64_t wanted, size_t size, uint32_t max)
{
    if (wanted <= *room)
        return 1;
    if (wanted > max)
        return 0;
    uint64_t more = *room ? (uint64_t)*room * 2 : 256;
    while (more < wanted)
        more *= 2;
    void *larger = realloc(*items, (size_t)more * size);
    if (!larger)
        return 0;
    *items = larger;
    *room = (uint32_t)more;
    return 1;
}

#define GROW(items, room, wanted, max) grow((void **)&(items), &(room), (wanted), sizeof *(items), (max))

typedef struct {
    uint32_t *slots; /* index + 1; 0 if free */
    uint32_t room;   /* a power of two */
    uint32_t used;
} slots;

typedef struct {
    uint32_t begin, count;
    uint64_t hash;
} sequence;

typedef struct { /* distinct sequences of integers, numbered by first occurrence */
    int64_t *words;
    uint32_t words_used, words_room;
    sequence *items;
    uint32_t used, room;
    slots index;
} table;

static uint64_t
mix(uint64_t hash, uint64_t word)
{
    hash = (hash ^ word) * UINT64_C(0x9E3779B97F4A7C15);
    return hash ^ (hash >> 29);
}

static int
slots_double(slots *index)
{
    uint32_t room = index->room ? index->room * 2 : 256;
    if (room > (1u << 26))
        return 0;
    uint32_t *larger = calloc(room, sizeof *larger);
    if (!larger)
        return 0;
    free(index->slots);
    index->slots = larger;
    index->room = room;
    return 1;
}

static void
slots_put(slots *index, uint64_t hash, uint32_t number)
{
    uint32_t at = (uint32_t)hash & (index->room - 1);
    while (index->slots[at])
        at = (at + 1) & (index->room - 1);
    index->slots[at] = number + 1;
}

/* Return the index of a sequence of words; -1 if it cannot be stored. */
static int64_t
table_number(table *t, const int64_t *words, uint32_t count)
{
    uint64_t hash = count;
    for (uint32_t i = 0; i < count; i++)
        hash = mix(hash, (uint64_t)words[i]);
    if (t->used * 2 >= t->index.room) {
        if (!slots_double(&t->index))
            return -1;
        for (uint32_t i = 0; i < t->used; i++)
            slots_put(&t->index, t->items[i].hash, i);
    }
    uint32_t at = (uint32_t)hash & (t->index.room - 1);
    for (int probes = 0; t->index.slots[at]; probes++) {
        const sequence *known = &t->items[t->index.slots[at] - 1];
        if (known->hash == hash && known->count == count &&
            (!count || !memcmp(t->words + known->begin, words, count * sizeof *words)))
            return t->index.slots[at] - 1;
        if (probes > PROBES_MAX)
            return -1; /* the words were chosen to collide */
        at = (at + 1) & (t->index.room - 1);
    }
    if (!GROW(t->words, t->words_room, (uint64_t)t->words_used + count, WORDS_MAX) ||
        !GROW(t->items, t->room, (uint64_t)t->used + 1, WORDS_MAX))
        return -1;
    if (count)
        memcpy(t->words + t->words_used, words, count * sizeof *words);
    t->items[t->used] = (sequence){t->words_used, count, hash};
    t->words_used += count;
    t->index.slots[at] = t->used + 1;
    return t->used++;
}

static void
table_clear(table *t)
{
    t->words_used = t->used = 0;
    if (t->index.slots)
        memset(t->index.slots, 0, t->index.room * sizeof *t->index.slots);
}

static void
table_free(table *t)
{
    free(t->words);
    free(t->items);
    free(t->index.slots);
}

static size_t
table_bytes(const table *t)
{
    return t->words_room * sizeof *t->words + t->room * sizeof *t->items + t->index.room * sizeof *t->index.slots;
}

/* ---- the workspace of one file, reused for the next -------------------------------------------------------------------- */

enum wide { /* columns of 8 bytes, in the order of read()'s result */
    W_PG_ID, W_RECORD_ID, W_COLLECTIVE_SEQ, W_P2P_SEQ, W_OP_ID, W_CREATED, W_STARTED, W_COMPLETED, W_TIMEOUT, WIDE
};
enum narrow { N_GROUP, N_NAME, N_SIGNATURE, N_STACK, NARROW }; /* of 4 bytes */
enum small { S_STATE, S_RETIRED, S_IS_P2P, SMALL };            /* of 1 byte */

typedef struct {
    const unsigned char *data;
    uint32_t size;

    value *stack;
    uint32_t stack_used, stack_room;
    uint32_t *marks;
    uint32_t marks_used, marks_room;
    value *memo; /* tag UINT32_MAX: empty */
    uint32_t memo_used, memo_room, memo_end;
    container *containers;
    uint32_t containers_used, containers_room;
    value *arena;
    uint32_t arena_used, arena_room;
    string *strings;
    uint32_t strings_used, strings_room;
    uint64_t *string_hashes;
    uint32_t string_hashes_room;
    slots string_index;

    table groups, frames, stacks, signatures;
    uint32_t *names; /* strings */
    uint32_t names_used, names_room;
    int64_t *scratch;
    uint32_t scratch_used, scratch_room;
    int64_t work;

    uint32_t rows, rows_room;
    int64_t *wide[WIDE];
    double *duration;
    int32_t *narrow[NARROW];
    uint8_t *small[SMALL];
} work;

static void
work_clear(work *w)
{
    w->stack_used = w->marks_used = w->memo_used = w->memo_end = w->containers_used = w->arena_used = w->strings_used = 0;
    w->names_used = w->scratch_used = w->rows = 0;
    w->work = 0;
    if (w->string_index.slots)
        memset(w->string_index.slots, 0, w->string_index.room * sizeof *w->string_index.slots);
    table_clear(&w->groups);
    table_clear(&w->frames);
    table_clear(&w->stacks);
    table_clear(&w->signatures);
}

static void
work_free(work *w)
{
    if (!w)
        return;
    free(w->stack);
    free(w->marks);
    free(w->memo);
    free(w->containers);
    free(w->arena);
    free(w->strings);
    free(w->string_hashes);
    free(w->string_index.slots);
    free(w->names);
    free(w->scratch);
    table_free(&w->groups);
    table_free(&w->frames);
    table_free(&w->stacks);
    table_free(&w->signatures);
    for (int i = 0; i < WIDE; i++)
        free(w->wide[i]);
    free(w->duration);
    for (int i = 0; i < NARROW; i++)
        free(w->narrow[i]);
    for (int i = 0; i < SMALL; i++)
        free(w->small[i]);
    free(w);
}

static size_t
work_bytes(const work *w)
{
    return w->stack_room * sizeof *w->stack + w->memo_room * sizeof *w->memo + w->containers_room * sizeof *w->containers +
           w->arena_room * sizeof *w->arena + w->strings_room * (sizeof *w->strings + sizeof *w->string_hashes) +
           table_bytes(&w->groups) + table_bytes(&w->frames) + table_bytes(&w->stacks) + table_bytes(&w->signatures) +
           (size_t)w->rows_room * (WIDE * 8 + 8 + NARROW * 4 + SMALL);
}

static int
rows_grow(work *w)
{
    if (w->rows < w->rows_room)
        return 1;
    uint32_t room = w->rows_room, unused;
    for (int i = 0; i < WIDE; i++) {
        unused = room;
        if (!GROW(w->wide[i], unused, (uint64_t)w->rows + 1, CONTAINERS_MAX))
            return 0;
    }
    for (int i = 0; i < NARROW; i++) {
        unused = room;
        if (!GROW(w->narrow[i], unused, (uint64_t)w->rows + 1, CONTAINERS_MAX))
            return 0;
    }
    for (int i = 0; i < SMALL; i++) {
        unused = room;
        if (!GROW(w->small[i], unused, (uint64_t)w->rows + 1, CONTAINERS_MAX))
            return 0;
    }
    unused = room;
    if (!GROW(w->duration, unused, (uint64_t)w->rows + 1, CONTAINERS_MAX))
        return 0;
    w->rows_room = unused;
    return 1;
}

/* ---- strings ----------------------------------------------------------------------------------------------------------- */

static int64_t
string_number(work *w, const unsigned char *text, uint32_t length)
{
    uint64_t hash = length, word;
    uint32_t i = 0;
    for (; i + 8 <= length; i += 8) {
        memcpy(&word, text + i, 8);
        hash = mix(hash, word);
    }
    for (word = 0; i < length; i++)
        word = word << 8 | text[i];
    hash = mix(hash, word);
    if (w->strings_used * 2 >= w->string_index.room) {
        if (!slots_double(&w->string_index))
            return -1;
        for (uint32_t k = 0; k < w->strings_used; k++)
            slots_put(&w->string_index, w->string_hashes[k], k);
    }
    uint32_t at = (uint32_t)hash & (w->string_index.room - 1);
    for (int probes = 0; w->string_index.slots[at]; probes++) {
        uint32_t number = w->string_index.slots[at] - 1;
        if (w->string_hashes[number] == hash && w->strings[number].length == length &&
            !memcmp(w->strings[number].text, text, length))
            return number;
        if (probes > PROBES_MAX)
            return -1;
        at = (at + 1) & (w->string_index.room - 1);
    }
    if (!GROW(w->strings, w->strings_room, (uint64_t)w->strings_used + 1, CONTAINERS_MAX) ||
        !GROW(w->string_hashes, w->string_hashes_room, (uint64_t)w->strings_used + 1, CONTAINERS_MAX))
        return -1;
    string *made = &w->strings[w->strings_used];
    *made = (string){text, length, F_OTHER, -1, -1};
    for (size_t k = 0; k < sizeof FIELDS / sizeof *FIELDS; k++)
        if (strlen(FIELDS[k].text) == length && !memcmp(FIELDS[k].text, text, length))
            made->field = FIELDS[k].field;
    for (int8_t k = 0; k < 3; k++)
        if (strlen(STATES[k]) == length && !memcmp(STATES[k], text, length))
            made->state = k;
    w->string_hashes[w->strings_used] = hash;
    w->string_index.slots[at] = w->strings_used + 1;
    return w->strings_used++;
}

/* ---- an entry ---------------------------------------------------------------------------------------------------------- */

static const value *
items_of(const work *w, const value *v, uint32_t *count)
{
    const container *c = &w->containers[v->index];
    *count = c->count;
    return w->arena + c->begin;
}

static const value *
use(work *w, const value *v, uint32_t *count)
{
    w->containers[v->index].used = 1;
    return items_of(w, v, count);
}

static int
integer_of(const value *v, int64_t *result)
{
    *result = -1;
    if (!v || v->tag == NONE)
        return 1;
    *result = v->as.i;
    return v->tag == INT && v->as.i != INT64_MIN;
}

static int
flag_of(const value *v, uint8_t *result)
{
    *result = v && v->tag == TRUE_;
    return !v || v->tag <= TRUE_;
}

static int
note(work *w, int64_t word)
{
    if (!GROW(w->scratch, w->scratch_room, (uint64_t)w->scratch_used + 1, WORDS_MAX))
        return 0;
    w->scratch[w->scratch_used++] = word;
    return 1;
}

static int
note_sizes(work *w, const value *v)
{
    uint32_t count, dimensions;
    if (!v || v->tag == NONE)
        return note(w, 0);
    if (v->tag != LIST && v->tag != TUPLE)
        return 0;
    const value *shapes = use(w, v, &count);
    if ((w->work += count) > WORK_MAX || !note(w, count))
        return 0;
    for (uint32_t i = 0; i < count; i++) {
        if (shapes[i].tag != LIST && shapes[i].tag != TUPLE)
            return 0;
        const value *sizes = use(w, &shapes[i], &dimensions);
        if ((w->work += dimensions) > WORK_MAX || !note(w, dimensions))
            return 0;
        for (uint32_t k = 0; k < dimensions; k++)
            if (sizes[k].tag != INT || sizes[k].as.i == INT64_MIN || !note(w, sizes[k].as.i))
                return 0;
    }
    return 1;
}

static int
note_dtypes(work *w, const value *v)
{
    uint32_t count;
    if (!v || v->tag == NONE)
        return note(w, 0);
    if (v->tag != LIST && v->tag != TUPLE)
        return 0;
    const value *dtypes = use(w, v, &count);
    if ((w->work += count) > WORK_MAX || !note(w, count))
        return 0;
    for (uint32_t i = 0; i < count; i++)
        if (dtypes[i].tag != STRING || !note(w, dtypes[i].index))
            return 0;
    return 1;
}

static int64_t
frame_number(work *w, const value *v)
{
    if (v->tag != DICT)
        return -1;
    container *c = &w->containers[v->index];
    if (c->frame >= 0)
        return c->frame;
    c->used = 1;
    int64_t words[3] = {-1, 0, -1}; /* file, line, function */
    const value *items = w->arena + c->begin;
    for (uint32_t i = 0; i + 1 < c->count; i += 2) {
        const value *found = &items[i + 1];
        if (items[i].tag != STRING)
            return -1;
        switch (w->strings[items[i].index].field) {
        case F_NAME:
        case F_FILENAME:
            if (found->tag != STRING)
                return -1;
            words[w->strings[items[i].index].field == F_NAME ? 2 : 0] = found->index;
            break;
        case F_LINE:
            if (!integer_of(found, &words[1]))
                return -1;
            words[1] = words[1] < 0 ? 0 : words[1];
            break;
        }
    }
    if (words[0] < 0 || words[2] < 0)
        return -1;
    int64_t number = table_number(&w->frames, words, 3);
    c->frame = (int32_t)number;
    return number;
}

static int
stack_number(work *w, const value *v, int32_t *result)
{
    uint32_t count;
    *result = -1;
    if (!v || v->tag == NONE)
        return 1;
    if (v->tag != LIST)
        return 0;
    const value *frames = use(w, v, &count);
    if (!count)
        return 1;
    if ((w->work += count) > WORK_MAX)
        return 0;
    w->scratch_used = 0;
    for (uint32_t i = 0; i < count; i++) {
        int64_t number = frame_number(w, &frames[i]);
        if (number < 0 || !note(w, number))
            return 0;
    }
    *result = (int32_t)table_number(&w->stacks, w->scratch, count);
    return *result >= 0;
}

static int
add_row(work *w, const value *const found[F_ENTRY_COUNT])
{
    static const struct {
        uint8_t field, column;
    } INTEGERS[] = {
        {F_PG_ID, W_PG_ID}, {F_RECORD_ID, W_RECORD_ID}, {F_COLLECTIVE_SEQ, W_COLLECTIVE_SEQ}, {F_P2P_SEQ, W_P2P_SEQ},
        {F_OP_ID, W_OP_ID}, {F_CREATED, W_CREATED}, {F_STARTED, W_STARTED}, {F_COMPLETED, W_COMPLETED}, {F_TIMEOUT, W_TIMEOUT},
    };
    uint32_t row = w->rows, count;
    const value *name = found[F_PROFILING_NAME], *state = found[F_STATE], *group = found[F_PROCESS_GROUP],
                *duration = found[F_DURATION];
    if (!rows_grow(w) || !group || !state)
        return 0;
    for (size_t i = 0; i < sizeof INTEGERS / sizeof *INTEGERS; i++)
        if (!integer_of(found[INTEGERS[i].field], &w->wide[INTEGERS[i].column][row]))
            return 0;
    if (name->tag != STRING || state->tag != STRING || w->strings[state->index].state < 0)
        return 0;
    w->small[S_STATE][row] = (uint8_t)w->strings[state->index].state;
    if (!flag_of(found[F_RETIRED], &w->small[S_RETIRED][row]) || !flag_of(found[F_IS_P2P], &w->small[S_IS_P2P][row]))
        return 0;
    string *text = &w->strings[name->index];
    if (text->name < 0) {
        if (!GROW(w->names, w->names_room, (uint64_t)w->names_used + 1, CONTAINERS_MAX))
            return 0;
        text->name = (int32_t)w->names_used;
        w->names[w->names_used++] = name->index;
    }
    w->narrow[N_NAME][row] = text->name;
    if (group->tag != TUPLE && group->tag != LIST)
        return 0;
    const value *both = use(w, group, &count);
    if (count != 2 || both[0].tag != STRING || both[1].tag != STRING)
        return 0;
    int64_t number = table_number(&w->groups, (const int64_t[]){both[0].index, both[1].index}, 2);
    if (number < 0)
        return 0;
    w->narrow[N_GROUP][row] = (int32_t)number;
    w->scratch_used = 0;
    if (!note_sizes(w, found[F_INPUT_SIZES]) || !note_dtypes(w, found[F_INPUT_DTYPES]) ||
        !note_sizes(w, found[F_OUTPUT_SIZES]) || !note_dtypes(w, found[F_OUTPUT_DTYPES]))
        return 0;
    number = table_number(&w->signatures, w->scratch, w->scratch_used);
    if (number < 0)
        return 0;
    w->narrow[N_SIGNATURE][row] = (int32_t)number;
    if (!stack_number(w, found[F_FRAMES], &w->narrow[N_STACK][row]))
        return 0;
    double took = -1.0;
    if (duration && duration->tag != NONE) {
        if (duration->tag != FLOAT && duration->tag != INT)
            return 0;
        took = duration->tag == FLOAT ? duration->as.d : (double)duration->as.i;
        took = took >= 0 && took < 1e12 ? took : -1.0;
    }
    w->duration[row] = took;
    w->rows++;
    return 1;
}

/* ---- the machine ------------------------------------------------------------------------------------------------------- */

/* Append values to a list or a dict. */
static int
fill(work *w, uint32_t index, const value *items, uint32_t count)
{
    container *c = &w->containers[index];
    if (!count)
        return 1;
    if (c->used)
        return 0;
    if (c->count + (uint64_t)count > c->room) {
        uint64_t room = c->count ? ((uint64_t)c->count + count) * 2 : count;
        if (!GROW(w->arena, w->arena_room, w->arena_used + room, ARENA_MAX))
            return 0;
        if (c->count)
            memcpy(w->arena + w->arena_used, w->arena + c->begin, c->count * sizeof *items);
        c->begin = w->arena_used;
        c->room = (uint32_t)room;
        w->arena_used += (uint32_t)room;
    }
    memcpy(w->arena + c->begin + c->count, items, count * sizeof *items);
    c->count += count;
    return 1;
}

static int
new_container(work *w, value *v, uint32_t tag)
{
    if (!GROW(w->containers, w->containers_room, (uint64_t)w->containers_used + 1, CONTAINERS_MAX))
        return 0;
    w->containers[w->containers_used] = (container){0, 0, 0, -1, 0};
    *v = (value){tag, w->containers_used++, {0}};
    return 1;
}

/* Set keys and values of a dict. An entry's become a row at once, and the dict then refers to that row. */
static int
set_items(work *w, value *target, const value *items, uint32_t count)
{
    if (target->tag != DICT || count % 2)
        return 0;
    const value *found[F_ENTRY_COUNT] = {0};
    int is_entry = 0;
    for (uint32_t i = 0; i < count; i += 2) {
        if (items[i].tag != STRING)
            continue;
        uint8_t field = w->strings[items[i].index].field;
        if (field < F_ENTRY_COUNT)
            found[field] = &items[i + 1];
        is_entry |= field == F_PROFILING_NAME;
    }
    if (!is_entry)
        return fill(w, target->index, items, count);
    for (uint32_t i = 0; i < count; i += 2)
        if (items[i].tag != STRING || w->strings[items[i].index].field == F_LEGACY)
            return 0;
    uint32_t row = w->rows;
    if (w->containers[target->index].count || !add_row(w, found))
        return 0;
    *target = (value){ENTRY, row, {0}};
    return 1;
}

static int
put(work *w, uint64_t place, const value *v)
{
    if (place >= w->size || !GROW(w->memo, w->memo_room, place + 1, UINT32_MAX / 2))
        return 0;
    while (w->memo_end <= place)
        w->memo[w->memo_end++].tag = UINT32_MAX;
    w->memo_used += w->memo[place].tag == UINT32_MAX;
    w->memo[place] = *v;
    return 1;
}

static uint32_t
read_uint32(const unsigned char *at)
{
    return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

#define NEED(bytes) if (end - at < (ptrdiff_t)(bytes)) return 0
#define DEPTH (w->stack_used - (w->marks_used ? w->marks[w->marks_used - 1] : 0)) /* values above the last mark */
#define TOP w->stack[w->stack_used - 1]

/* Run the pickle and leave the result as the only value. Return 0 for unsupported or damaged data. */
static int
run(work *w)
{
    const unsigned char *at = w->data, *end = w->data + w->size;
    for (;;) {
        if (!GROW(w->stack, w->stack_room, (uint64_t)w->stack_used + 1, STACK_MAX))
            return 0;
        value *next = &w->stack[w->stack_used];
        uint32_t length, mark;
        int64_t number;
        NEED(1);
        unsigned char op = *at++;
        switch (op) {
        case 'h': /* BINGET, half of a dump: the frames of a stack are a run of these */
            for (const value *last = w->stack + w->stack_room;; at++, next++) {
                NEED(1);
                length = *at++;
                if (length >= w->memo_end || w->memo[length].tag == UINT32_MAX)
                    return 0;
                *next = w->memo[length];
                w->stack_used++;
                if (next + 1 == last || at == end || *at != 'h')
                    break;
            }
            break;
        case 'j': /* LONG_BINGET */
            NEED(4);
            length = read_uint32(at);
            at += 4;
            if (length >= w->memo_end || w->memo[length].tag == UINT32_MAX)
                return 0;
            *next = w->memo[length];
            w->stack_used++;
            break;
        case 'K': /* BININT1 */
            NEED(1);
            *next = (value){INT, 0, {.i = *at++}};
            w->stack_used++;
            break;
        case 'M': /* BININT2 */
            NEED(2);
            *next = (value){INT, 0, {.i = at[0] | at[1] << 8}};
            at += 2;
            w->stack_used++;
            break;
        case 'J': /* BININT */
            NEED(4);
            *next = (value){INT, 0, {.i = (int32_t)read_uint32(at)}};
            at += 4;
            w->stack_used++;
            break;
        case 0x8a: /* LONG1 */
            NEED(1);
            length = *at++;
            NEED(length);
            if (length > 8)
                return 0;
            uint64_t bits = length && at[length - 1] & 0x80 ? ~UINT64_C(0) : 0;
            for (uint32_t i = length; i-- > 0;)
                bits = bits << 8 | at[i];
            at += length;
            memcpy(&number, &bits, 8);
            *next = (value){INT, 0, {.i = number}};
            w->stack_used++;
            break;
        case 'G': /* BINFLOAT */
            NEED(8);
            uint64_t pattern = 0;
            for (int i = 0; i < 8; i++)
                pattern = pattern << 8 | at[i];
            at += 8;
            *next = (value){FLOAT, 0, {0}};
            memcpy(&next->as.d, &pattern, 8);
            w->stack_used++;
            break;
        case 'N': /* NONE */
        case 0x89: /* NEWFALSE */
        case 0x88: /* NEWTRUE */
            *next = (value){op == 'N' ? NONE : op == 0x88 ? TRUE_ : FALSE_, 0, {0}};
            w->stack_used++;
            break;
        case 'X': /* BINUNICODE */
            NEED(4);
            length = read_uint32(at);
            at += 4;
            goto text;
        case 0x8c: /* SHORT_BINUNICODE */
            NEED(1);
            length = *at++;
        text:
            NEED(length);
            number = string_number(w, at, length);
            if (number < 0)
                return 0;
            at += length;
            *next = (value){STRING, (uint32_t)number, {0}};
            w->stack_used++;
            break;
        case 'q': /* BINPUT */
            NEED(1);
            if (!DEPTH || !put(w, *at++, &TOP))
                return 0;
            break;
        case 'r': /* LONG_BINPUT */
            NEED(4);
            if (!DEPTH || !put(w, read_uint32(at), &TOP))
                return 0;
            at += 4;
            break;
        case 0x94: /* MEMOIZE */
            if (!DEPTH || !put(w, w->memo_used, &TOP))
                return 0;
            break;
        case '(': /* MARK */
            if (!GROW(w->marks, w->marks_room, (uint64_t)w->marks_used + 1, 1u << 16))
                return 0;
            w->marks[w->marks_used++] = w->stack_used;
            break;
        case ']': /* EMPTY_LIST */
        case '}': /* EMPTY_DICT */
        case ')': /* EMPTY_TUPLE */
            if (!new_container(w, next, op == ']' ? LIST : op == '}' ? DICT : TUPLE))
                return 0;
            w->stack_used++;
            break;
        case 'e': /* APPENDS */
        case 'u': /* SETITEMS */
            if (!w->marks_used)
                return 0;
            mark = w->marks[--w->marks_used];
            if (mark > w->stack_used || mark == 0 || (w->marks_used && mark <= w->marks[w->marks_used - 1]))
                return 0;
            if (op == 'u' ? !set_items(w, &w->stack[mark - 1], w->stack + mark, w->stack_used - mark)
                          : w->stack[mark - 1].tag != LIST ||
                                !fill(w, w->stack[mark - 1].index, w->stack + mark, w->stack_used - mark))
                return 0;
            w->stack_used = mark;
            break;
        case 'a': /* APPEND */
            if (DEPTH < 2 || w->stack[w->stack_used - 2].tag != LIST ||
                !fill(w, w->stack[w->stack_used - 2].index, &TOP, 1))
                return 0;
            w->stack_used--;
            break;
        case 's': /* SETITEM */
            if (DEPTH < 3 || w->stack[w->stack_used - 3].tag != DICT)
                return 0;
            if (!fill(w, w->stack[w->stack_used - 3].index, &w->stack[w->stack_used - 2], 2))
                return 0;
            w->stack_used -= 2;
            break;
        case 't': /* TUPLE */
            if (!w->marks_used)
                return 0;
            mark = w->marks[--w->marks_used];
            if (mark > w->stack_used)
                return 0;
            length = w->stack_used - mark;
            goto tuple;
        case 0x85: /* TUPLE1 */
        case 0x86: /* TUPLE2 */
        case 0x87: /* TUPLE3 */
            length = op - 0x84u;
            if (DEPTH < length)
                return 0;
            mark = w->stack_used - length;
        tuple:;
            value made;
            if (!new_container(w, &made, TUPLE) || !fill(w, made.index, w->stack + mark, length))
                return 0;
            w->stack[mark] = made;
            w->stack_used = mark + 1;
            break;
        case 0x80: /* PROTO */
            NEED(1);
            at++;
            break;
        case 0x95: /* FRAME */
            NEED(8);
            at += 8;
            break;
        case '.': /* STOP */
            return w->stack_used == 1 && !w->marks_used;
        default:
            return 0;
        }
    }
}

/* Return whether the entries of the dump are exactly the rows, in order. */
static int
entries_are_rows(const work *w)
{
    const value *entries = NULL, *items;
    uint32_t count;
    if (w->stack[0].tag != DICT)
        return 0;
    items = items_of(w, &w->stack[0], &count);
    for (uint32_t i = 0; i < count; i += 2)
        if (items[i].tag == STRING && w->strings[items[i].index].field == F_ENTRIES)
            entries = &items[i + 1];
    if (!entries || entries->tag != LIST)
        return 0;
    items = items_of(w, entries, &count);
    if (count != w->rows)
        return 0;
    for (uint32_t i = 0; i < count; i++)
        if (items[i].tag != ENTRY || items[i].index != i)
            return 0;
    return 1;
}

static int
parse(work *w)
{
    return run(w) && entries_are_rows(w);
}

#ifndef COMMLENS_FUZZ

static work *spare; /* accessed only with the GIL held */

/* ---- into Python ------------------------------------------------------------------------------------------------------- */

static PyObject *
text_of(const work *w, int64_t number)
{
    return PyUnicode_DecodeUTF8((const char *)w->strings[number].text, w->strings[number].length, "strict");
}

static PyObject *
to_python(const work *w, const value *v, int depth, int *nodes)
{
    uint32_t count;
    if (depth > DEPTH_MAX || ++*nodes > NODES_MAX) {
        PyErr_SetString(PyExc_ValueError, "too much");
        return NULL;
    }
    switch (v->tag) {
    case NONE:
        Py_RETURN_NONE;
    case FALSE_:
    case TRUE_:
        return PyBool_FromLong(v->tag == TRUE_);
    case INT:
        return PyLong_FromLongLong(v->as.i);
    case FLOAT:
        return PyFloat_FromDouble(v->as.d);
    case STRING:
        return text_of(w, v->index);
    case LIST:
    case TUPLE: {
        const value *items = items_of(w, v, &count);
        PyObject *made = v->tag == LIST ? PyList_New(count) : PyTuple_New(count);
        for (uint32_t i = 0; made && i < count; i++) {
            PyObject *item = to_python(w, &items[i], depth + 1, nodes);
            if (!item || (v->tag == LIST ? PyList_SetItem(made, i, item) : PyTuple_SetItem(made, i, item))) {
                Py_DECREF(made);
                return NULL;
            }
        }
        return made;
    }
    case DICT: {
        const value *items = items_of(w, v, &count);
        PyObject *made = PyDict_New();
        for (uint32_t i = 0; made && i < count; i += 2) {
            if (depth == 0 && items[i].tag == STRING && w->strings[items[i].index].field == F_ENTRIES)
                continue;
            PyObject *key = items[i].tag == STRING ? text_of(w, items[i].index) : NULL;
            PyObject *item = key ? to_python(w, &items[i + 1], depth + 1, nodes) : NULL;
            if (!key && !PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "a key is no text");
            int failed = !item || PyDict_SetItem(made, key, item);
            Py_XDECREF(key);
            Py_XDECREF(item);
            if (failed) {
                Py_DECREF(made);
                return NULL;
            }
        }
        return made;
    }
    default:
        PyErr_SetString(PyExc_ValueError, "an entry where none belongs");
        return NULL;
    }
}

static PyObject *
sizes_of(const int64_t **words)
{
    int64_t count = *(*words)++;
    PyObject *made = PyTuple_New((Py_ssize_t)count);
    for (int64_t i = 0; made && i < count; i++) {
        int64_t dimensions = *(*words)++;
        PyObject *shape = PyTuple_New((Py_ssize_t)dimensions);
        for (int64_t k = 0; shape && k < dimensions; k++) {
            PyObject *size = PyLong_FromLongLong(*(*words)++);
            if (!size || PyTuple_SetItem(shape, (Py_ssize_t)k, size))
                Py_CLEAR(shape);
        }
        if (!shape || PyTuple_SetItem(made, (Py_ssize_t)i, shape))
            Py_CLEAR(made);
    }
    return made;
}

static PyObject *
dtypes_of(const work *w, const int64_t **words)
{
    int64_t count = *(*words)++;
    PyObject *made = PyTuple_New((Py_ssize_t)count);
    for (int64_t i = 0; made && i < count; i++) {
        PyObject *text = text_of(w, *(*words)++);
        if (!text || PyTuple_SetItem(made, (Py_ssize_t)i, text))
            Py_CLEAR(made);
    }
    return made;
}

static PyObject *
group_object(const work *w, const int64_t *words, uint32_t count)
{
    (void)count;
    return Py_BuildValue("(NN)", text_of(w, words[0]), text_of(w, words[1]));
}

static PyObject *
frame_object(const work *w, const int64_t *words, uint32_t count)
{
    (void)count;
    return Py_BuildValue("(NLN)", text_of(w, words[0]), (long long)words[1], text_of(w, words[2]));
}

static PyObject *
signature_object(const work *w, const int64_t *words, uint32_t count)
{
    (void)count;
    PyObject *parts[4] = {0};
    for (int i = 0; i < 4; i++)
        if (!(parts[i] = i % 2 ? dtypes_of(w, &words) : sizes_of(&words))) {
            while (i-- > 0)
                Py_DECREF(parts[i]);
            return NULL;
        }
    return Py_BuildValue("(NNNN)", parts[0], parts[1], parts[2], parts[3]);
}

static PyObject *
stack_object(const work *w, const int64_t *words, uint32_t count)
{
    (void)w;
    PyObject *made = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)count * 4);
    if (made) {
        char *to = PyBytes_AsString(made);
        for (uint32_t i = 0; i < count; i++) {
            int32_t number = (int32_t)words[i];
            memcpy(to + (size_t)i * 4, &number, 4);
        }
    }
    return made;
}

static PyObject *
list_of(const work *w, const table *t, PyObject *(*make)(const work *, const int64_t *, uint32_t))
{
    PyObject *made = PyList_New(t->used);
    for (uint32_t i = 0; made && i < t->used; i++) {
        PyObject *item = make(w, t->words + t->items[i].begin, t->items[i].count);
        if (!item || PyList_SetItem(made, i, item))
            Py_CLEAR(made);
    }
    return made;
}

static PyObject *
names_list(const work *w)
{
    PyObject *made = PyList_New(w->names_used);
    for (uint32_t i = 0; made && i < w->names_used; i++) {
        PyObject *item = text_of(w, w->names[i]);
        if (!item || PyList_SetItem(made, i, item))
            Py_CLEAR(made);
    }
    return made;
}

static PyObject *
columns_of(const work *w)
{
    PyObject *made = PyTuple_New(NARROW + SMALL + WIDE + 1);
    Py_ssize_t n = w->rows, at = 0;
    for (int i = 0; made && i < NARROW + SMALL + WIDE + 1; i++) {
        const void *from = i < NARROW                  ? (const void *)w->narrow[i]
                           : i < NARROW + SMALL        ? (const void *)w->small[i - NARROW]
                           : i < NARROW + SMALL + WIDE ? (const void *)w->wide[i - NARROW - SMALL]
                                                       : (const void *)w->duration;
        Py_ssize_t size = i < NARROW ? 4 : i < NARROW + SMALL ? 1 : 8;
        PyObject *column = PyBytes_FromStringAndSize(n ? from : "", n * size);
        if (!column || PyTuple_SetItem(made, at++, column))
            Py_CLEAR(made);
    }
    return made;
}

static PyObject *
result_of(const work *w)
{
    int nodes = 0;
    PyObject *parts[7] = {0};
    for (int i = 0; i < 7; i++) {
        parts[i] = i == 0   ? to_python(w, &w->stack[0], 0, &nodes)
                   : i == 1 ? columns_of(w)
                   : i == 2 ? list_of(w, &w->groups, group_object)
                   : i == 3 ? names_list(w)
                   : i == 4 ? list_of(w, &w->signatures, signature_object)
                   : i == 5 ? list_of(w, &w->frames, frame_object)
                            : list_of(w, &w->stacks, stack_object);
        if (!parts[i]) {
            while (i-- > 0)
                Py_DECREF(parts[i]);
            return NULL;
        }
    }
    return Py_BuildValue("(NNNNNNN)", parts[0], parts[1], parts[2], parts[3], parts[4], parts[5], parts[6]);
}

static PyObject *
read_entries(PyObject *self, PyObject *data)
{
    (void)self;
    char *bytes;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(data, &bytes, &size))
        return NULL;
    if (size > INT32_MAX)
        Py_RETURN_NONE;
    work *w = spare;
    spare = NULL;
    if (!w && !(w = calloc(1, sizeof *w)))
        return PyErr_NoMemory();
    w->data = (const unsigned char *)bytes;
    w->size = (uint32_t)size;
    int good;
    Py_BEGIN_ALLOW_THREADS
    good = parse(w);
    Py_END_ALLOW_THREADS
    PyObject *result = good ? result_of(w) : NULL;
    if (!result && (!good || PyErr_ExceptionMatches(PyExc_ValueError))) { /* UnicodeDecodeError is one */
        PyErr_Clear();
        result = Py_NewRef(Py_None);
    }
    if (!spare && work_bytes(w) <= SPARE_MAX) {
        work_clear(w);
        spare = w;
    } else {
        work_free(w);
    }
    return result;
}

static PyMethodDef METHODS[] = {
    {"read", read_entries, METH_O, "read(data: bytes) -> tuple of tables and columns, or None for what it does not know."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_entries", "Flight Recorder pickles into columns.", -1, METHODS,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC
PyInit__entries(void)
{
    PyObject *module = PyModule_Create(&MODULE);
    if (module && PyModule_AddIntConstant(module, "VERSION", VERSION))
        Py_CLEAR(module);
    return module;
}

#endif
