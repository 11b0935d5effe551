/* Fuzzes the parser of _entries.c, built with the sanitizers by fuzz_entries.sh: with clang under libFuzzer, with gcc by the
 * simple mutations below. Each input lies in memory of its own size, so that a read past its end is seen. */

#define COMMLENS_FUZZ
#include "../../src/commlens/formats/flight_recorder/_entries.c"

#include <stdio.h>
#include <time.h>

static uint64_t seen;

static void
look_at_words(const work *w, const int64_t *words, uint32_t count)
{
    const int64_t *end = words + count;
    for (int part = 0; part < 4; part++) {
        int64_t items = *words++;
        for (int64_t i = 0; i < items; i++) {
            if (part % 2) {
                if (w->strings[*words].length)
                    seen += w->strings[*words].text[0];
                words++;
            } else {
                int64_t dimensions = *words++;
                for (int64_t k = 0; k < dimensions; k++)
                    seen += (uint64_t)*words++;
            }
        }
    }
    if (words != end)
        abort();
}

/* Everything that is made into Python objects of a good file. */
static void
look(const work *w)
{
    for (uint32_t row = 0; row < w->rows; row++) {
        if ((uint32_t)w->narrow[N_GROUP][row] >= w->groups.used || (uint32_t)w->narrow[N_NAME][row] >= w->names_used ||
            (uint32_t)w->narrow[N_SIGNATURE][row] >= w->signatures.used || w->narrow[N_STACK][row] < -1 ||
            w->narrow[N_STACK][row] >= (int64_t)w->stacks.used || w->small[S_STATE][row] > 2)
            abort();
        for (int i = 0; i < WIDE; i++)
            seen += (uint64_t)w->wide[i][row];
    }
    for (uint32_t i = 0; i < w->signatures.used; i++)
        look_at_words(w, w->signatures.words + w->signatures.items[i].begin, w->signatures.items[i].count);
    for (uint32_t i = 0; i < w->frames.used; i++) {
        const int64_t *words = w->frames.words + w->frames.items[i].begin;
        seen += w->strings[words[0]].length + w->strings[words[2]].length;
    }
    for (uint32_t i = 0; i < w->stacks.used; i++)
        for (uint32_t k = 0; k < w->stacks.items[i].count; k++)
            if ((uint64_t)w->stacks.words[w->stacks.items[i].begin + k] >= w->frames.used)
                abort();
}

static work *shared_work;

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t *own = malloc(size ? size : 1);
    if (!own || (!shared_work && !(shared_work = calloc(1, sizeof *shared_work))))
        abort();
    if (size)
        memcpy(own, data, size);
    shared_work->data = own;
    shared_work->size = (uint32_t)size;
    int good = parse(shared_work);
    if (good)
        look(shared_work);
    if (work_bytes(shared_work) > SPARE_MAX) {
        work_free(shared_work);
        shared_work = NULL;
    } else {
        work_clear(shared_work);
    }
    free(own);
    return 0;
}

#ifdef COMMLENS_FUZZ_MAIN

static uint64_t state = 88172645463325252u;

static uint32_t
pick(uint32_t below)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return below ? (uint32_t)((state >> 16) % below) : 0;
}

int
main(int count, char **arguments)
{
    static const char OPCODES[] = "hjKMJ\x8aGNX\x8cqr\x94(]})eastu\x85\x86\x87.\x88\x89";
    static uint8_t seeds[64][1 << 16], input[1 << 17];
    uint32_t sizes[64], seed_count = 0;
    long seconds = count > 1 ? atol(arguments[1]) : 10, runs = 0;
    for (int i = 2; i < count && seed_count < 64; i++) {
        FILE *file = fopen(arguments[i], "rb");
        if (!file)
            return 2;
        sizes[seed_count] = (uint32_t)fread(seeds[seed_count], 1, sizeof seeds[0], file);
        seed_count += sizes[seed_count] > 0;
        fclose(file);
    }
    if (!seed_count)
        return 2;
    state ^= (uint64_t)time(NULL) << 20;
    for (time_t end = time(NULL) + seconds; time(NULL) < end;) {
        for (int i = 0; i < 200; i++, runs++) {
            uint32_t which = pick(seed_count), size = sizes[which];
            memcpy(input, seeds[which], size);
            for (uint32_t changes = pick(8); changes-- > 0 && size;) {
                uint32_t at = pick(size), length;
                switch (pick(5)) {
                case 0:
                    input[at] = (uint8_t)pick(256);
                    break;
                case 1:
                    input[at] = (uint8_t)OPCODES[pick(sizeof OPCODES - 1)];
                    break;
                case 2: /* cut out */
                    length = pick(size - at < 64 ? size - at : 64);
                    memmove(input + at, input + at + length, size - at - length);
                    size -= length;
                    break;
                case 3: /* put a part of a seed there */
                    length = pick(sizes[which] < 64 ? sizes[which] : 64);
                    if (size + length <= sizeof input) {
                        memmove(input + at + length, input + at, size - at);
                        memcpy(input + at, seeds[which] + pick(sizes[which] - length + 1), length);
                        size += length;
                    }
                    break;
                default: /* the end is missing */
                    size = at;
                }
            }
            LLVMFuzzerTestOneInput(input, size);
        }
    }
    printf("%ld inputs, nothing found\n", runs);
    work_free(shared_work);
    return 0;
}

#endif
