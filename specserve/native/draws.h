/* Draws from rows of weights by inverse CDF, and races over them: rows of `real`, float or double, one row at a time.
 *
 * Included once per type, with `real` and NAME(…) defined. A row is read once, for a number per block of ids; then one
 * block, or few, are looked at in detail. sampling/dists.py and sampling/race.py say the same in tensor operations.
 */
#include <stdlib.h>
#include <string.h>

#include "noise.h"
#include "vectors.h"

#define DRAW_BLOCK 128
#define RACE_SLACK (1 - 0x1p-18) /* more than all rounding of a float32 bound */

typedef real NAME(vector) __attribute__((vector_size(LANES * sizeof(real)), aligned(sizeof(real)), may_alias));

/* What is worked on, one per thread: mass and slots per block, room for as many changed blocks as ids are changed. */
typedef struct {
    double *mass;
    int32_t *slots;
    real *changed;
    real *before;
    real *bounds;
    real *factors;
    void *memory;
} NAME(scratch);

static inline int64_t NAME(ceiling)(int64_t n, int64_t size) { return (n + size - 1) / size; }

/* For rows of n weights of which up to k are changed. Returns 0 where there is no memory. */
static int NAME(reserve)(NAME(scratch) *s, int64_t n, int64_t k) {
    int64_t longest = n > k ? n : k, blocks = NAME(ceiling)(longest, DRAW_BLOCK), races = NAME(ceiling)(n, RACE_BLOCK);
    int64_t copies = (k < blocks ? k : blocks) * DRAW_BLOCK;
    s->memory = malloc(blocks * (sizeof(double) + sizeof(int32_t)) + (copies + k + 2 * races) * sizeof(real) + 64);
    if (s->memory == NULL) return 0;
    s->mass = s->memory;
    s->changed = (real *)(s->mass + blocks);
    s->before = s->changed + copies;
    s->bounds = s->before + k;
    s->factors = s->bounds + races;
    s->slots = (int32_t *)(s->factors + races);
    return 1;
}

static inline real NAME(total)(const real *from, int64_t n) {
    NAME(vector) sums = {0};
    int64_t at = 0;
    for (; at + LANES <= n; at += LANES) sums += *(const NAME(vector) *)(from + at);
    real total = 0;
    for (int lane = 0; lane < LANES; lane++) total += sums[lane];
    for (; at < n; at++) total += from[at];
    return total;
}

/* The largest of n values, NaN aside; 0 at least. */
static inline real NAME(highest)(const real *from, int64_t n) {
    real highest = 0;
#pragma omp simd reduction(max : highest)
    for (int64_t at = 0; at < n; at++) highest = from[at] > highest ? from[at] : highest;
    return highest;
}

/* The weights of a row: scale · row, but for the blocks that have a slot in `changed`, which hold theirs scaled. */
typedef struct {
    const real *row;
    real scale;
    int64_t n;
    const int32_t *slots; /* per block, -1 for unchanged; NULL when all are */
    const real *changed;
} NAME(weights);

static inline const real *NAME(block_of)(const NAME(weights) *w, int64_t block, real *scale) {
    int own = w->slots != NULL && w->slots[block] >= 0;
    *scale = own ? 1 : w->scale;
    return own ? w->changed + w->slots[block] * DRAW_BLOCK : w->row + block * DRAW_BLOCK;
}

/* One id by a uniform in [0, 1), never one of weight 0; any where all are, which *possible tells. mass [blocks] is
 * written. Sums within a block are in the weights' type, sums over blocks in double. */
static int64_t NAME(pick)(const NAME(weights) *w, double noise, double *mass, int *possible) {
    int64_t blocks = NAME(ceiling)(w->n, DRAW_BLOCK), block = 0;
    double total = 0, before = 0;
    real scale;
    for (int64_t b = 0; b < blocks; b++) {
        int64_t left = w->n - b * DRAW_BLOCK;
        const real *from = NAME(block_of)(w, b, &scale);
        mass[b] = scale * NAME(total)(from, left < DRAW_BLOCK ? left : DRAW_BLOCK);
        total += mass[b];
    }
    *possible = total != 0;
    double threshold = noise * total;
    for (; block < blocks; before += mass[block++])
        if (before + mass[block] > threshold && mass[block] > 0) break;
    if (block == blocks) { /* rounding left the threshold at the total itself: the largest one is surely possible */
        int64_t heaviest = 0;
        for (int64_t b = 1; b < blocks; b++) heaviest = mass[b] > mass[heaviest] ? b : heaviest;
        for (block = 0, before = 0; block < heaviest; block++) before += mass[block];
    }
    const real *from = NAME(block_of)(w, block, &scale);
    int64_t left = w->n - block * DRAW_BLOCK, count = left < DRAW_BLOCK ? left : DRAW_BLOCK, heaviest = 0;
    double running = 0;
    threshold -= before;
    for (int64_t at = 0; at < count; at++) {
        double here = (real)(scale * from[at]);
        running += here;
        if (running > threshold && here > 0) return block * DRAW_BLOCK + at;
        heaviest = from[at] > from[heaviest] ? at : heaviest;
    }
    return block * DRAW_BLOCK + heaviest;
}

/* Drawn from max(scale · row - less, 0), less given by k ids in [0, n); from the row at these ids where nothing is left
 * over, as of equal dists. */
static int64_t NAME(pick_leftover)(const real *row, int64_t n, real scale, const int64_t *ids, const real *less,
                                   int64_t k, double noise, NAME(scratch) *s) {
    int possible, used = 0;
    memset(s->slots, 0xFF, NAME(ceiling)(n, DRAW_BLOCK) * sizeof(int32_t));
    for (int64_t e = 0; e < k; e++) s->before[e] = less[e] > 0 ? scale * row[ids[e]] : 0;
    for (int64_t e = 0; e < k; e++) {
        if (!(less[e] > 0)) continue;
        int64_t block = ids[e] / DRAW_BLOCK, begin = block * DRAW_BLOCK;
        if (s->slots[block] < 0) {
            s->slots[block] = used++;
            real *copy = s->changed + s->slots[block] * DRAW_BLOCK;
            for (int64_t at = 0; at < DRAW_BLOCK && begin + at < n; at++) copy[at] = scale * row[begin + at];
        }
        real *here = s->changed + s->slots[block] * DRAW_BLOCK + (ids[e] - begin);
        *here -= *here < less[e] ? *here : less[e];
    }
    NAME(weights) left = {row, scale, n, s->slots, s->changed};
    int64_t picked = NAME(pick)(&left, noise, s->mass, &possible);
    if (possible || k == 0) return picked;
    NAME(weights) instead = {s->before, 1, k, NULL, NULL};
    return ids[NAME(pick)(&instead, noise, s->mass, &possible)];
}

/* The winner of a row's race under a key of four words: argmax row / E, the lowest id of equal scores. The first clock
 * of a block bounds what its ids can score, so only ids whose bound exceeds a known score are worked out. */
static int64_t NAME(race)(const real *row, int64_t n, const uint32_t *key, NAME(scratch) *s) {
    int64_t blocks = NAME(ceiling)(n, RACE_BLOCK), top = 0, winner = 0;
    double best = 0;
    for (int64_t b = 0; b < blocks; b++)
        s->factors[b] = (real)(RACE_BLOCK * 0x1p31) / ((real)(int32_t)token_word(key, (uint32_t)(-1 - b)) + (real)0x1p-26);
    for (int64_t b = 0; b < blocks; b++) {
        int64_t left = n - b * RACE_BLOCK;
        s->bounds[b] = NAME(highest)(row + b * RACE_BLOCK, left < RACE_BLOCK ? left : RACE_BLOCK) * s->factors[b];
        top = s->bounds[b] > s->bounds[top] ? b : top;
    }
    for (int64_t turn = -1; turn < blocks; turn++) { /* the most promising block first: its score spares most others */
        int64_t b = turn < 0 ? top : turn;
        real limit = (real)(best * RACE_SLACK);
        if (!(s->bounds[b] > limit)) continue;
        int64_t end = (b + 1) * RACE_BLOCK < n ? (b + 1) * RACE_BLOCK : n;
        first_ring first = first_of(key, b);
        for (int64_t id = b * RACE_BLOCK; id < end; id++) {
            if (!(row[id] * s->factors[b] > limit)) continue;
            double wait = first.id == (uint32_t)id ? 0 : -wait_of(key, id);
            if (!(row[id] > limit * (first.at + wait))) continue; /* -log1p(-x) >= x */
            double score = row[id] / (-log1p(-wait) + first.at);
            if (score > best || (score == best && id < winner)) {
                best = score;
                winner = id;
                limit = (real)(best * RACE_SLACK);
            }
        }
    }
    return winner;
}
