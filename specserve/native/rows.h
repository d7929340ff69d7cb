/* A row of float over a vocabulary: its largest value and where that is, its softmax, its first ids in order. */
#ifndef SPECSERVE_ROWS_H
#define SPECSERVE_ROWS_H

#include <math.h>

#include "exponentials.h"

#define STRETCH 1024   /* values whose sum is made in float */
#define LOOKED_AT 256  /* values that are gone through again for the largest one's place */
#define SKIPPED 64     /* values that are passed over together where none is large enough */

/* The largest of a row, NaN aside; -inf where there is nothing else. */
static inline float largest(const float *row, int64_t n) {
    floats most = all(-INFINITY);
    float found = -INFINITY;
    int64_t at = 0;
    for (; at + LANES <= n; at += LANES) {
        floats here = load(row + at);
        most = pick(here > most, here, most);
    }
    for (int lane = 0; lane < LANES; lane++) found = most[lane] > found ? most[lane] : found;
    for (; at < n; at++) found = row[at] > found ? row[at] : found;
    return found;
}

static inline int has_nan(const float *row, int64_t n) {
    int found = 0;
#pragma omp simd reduction(| : found)
    for (int64_t at = 0; at < n; at++) found |= row[at] != row[at];
    return found;
}

/* e^((row - most) / heat) into `into`; their sum. */
static double exponentials(const float *row, int64_t n, float most, float heat, float *into) {
    double total = 0;
    int64_t at = 0;
    while (at + LANES <= n) {
        floats sums = {0};
        if (heat == 1) {
            for (int64_t end = at + STRETCH; at + LANES <= n && at < end; at += LANES) {
                floats e = exponential(load(row + at) - most);
                sums += e;
                store(into + at, e);
            }
        } else {
            for (int64_t end = at + STRETCH; at + LANES <= n && at < end; at += LANES) {
                floats e = exponential((load(row + at) - most) / heat);
                sums += e;
                store(into + at, e);
            }
        }
        total += sum(sums);
    }
    floats rest = all(-INFINITY);
    for (int64_t lane = 0; at + lane < n; lane++) rest[lane] = (row[at + lane] - most) / heat;
    rest = exponential(rest);
    for (int64_t lane = 0; at + lane < n; lane++) into[at + lane] = rest[lane];
    return total + sum(rest);
}

/* softmax(row / heat) of n logits; heat 0 counts as 1. */
static inline void softmax(const float *row, int64_t n, float heat, float *into) {
    float warmth = heat == 0 ? 1 : heat;
    float scale = (float)(1 / exponentials(row, n, largest(row, n), warmth, into));
    for (int64_t at = 0; at < n; at++) into[at] *= scale;
}

/* Where the first NaN of n values is, or the first one equal to `value`. */
static int64_t first_place(const float *from, int64_t n, float value) {
    int64_t at = 0;
    while (at < n - 1 && from[at] != value && from[at] == from[at]) at++;
    return at;
}

/* Where the largest of n values is, the lowest place on ties; of NaN, the first one. */
static inline int64_t largest_place(const float *row, int64_t n) {
    int64_t top = 0;
    float most = -INFINITY;
    for (int64_t begin = 0; begin < n; begin += LOOKED_AT) {
        int64_t count = n - begin < LOOKED_AT ? n - begin : LOOKED_AT;
        int unordered = has_nan(row + begin, count);
        float here = largest(row + begin, count);
        if (!unordered && !(here > most)) continue;
        most = unordered ? NAN : here;
        top = begin;
        if (unordered) break;
    }
    return top + first_place(row + top, n - top < LOOKED_AT ? n - top : LOOKED_AT, most);
}

/* An id with its value, in a row's order: the larger value first, the lower id first of equals. */
typedef struct {
    float value;
    int32_t id;
} ranked_id;

static inline int comes_before(ranked_id one, ranked_id other) {
    return one.value > other.value || (one.value == other.value && one.id < other.id);
}

/* A heap of `held` ids has its last one in order on top; `new` goes to place `at`, or down to where it belongs. */
static inline void sift_down(ranked_id *heap, int64_t held, int64_t at, ranked_id new) {
    for (int64_t below; (below = 2 * at + 1) < held; at = below) {
        below += below + 1 < held && comes_before(heap[below], heap[below + 1]);
        if (!comes_before(new, heap[below])) break;
        heap[at] = heap[below];
    }
    heap[at] = new;
}

static inline void sift_up(ranked_id *heap, int64_t at, ranked_id new) {
    for (int64_t above; at > 0 && comes_before(heap[above = (at - 1) / 2], new); at = above) heap[at] = heap[above];
    heap[at] = new;
}

static inline int any_above(const float *row, int64_t n, float floor) {
    int found = 0;
#pragma omp simd reduction(| : found)
    for (int64_t at = 0; at < n; at++) found |= row[at] > floor;
    return found;
}

/* The first k ids of those above `floor`, in order, NaN aside. Returns how many there are. */
static inline int64_t first_ids(const float *row, int64_t n, int64_t k, float floor, ranked_id *into) {
    int64_t held = 0;
    for (int64_t begin = 0; begin < n && k > 0; begin += SKIPPED) {
        int64_t end = begin + SKIPPED < n ? begin + SKIPPED : n;
        if (!any_above(row + begin, end - begin, floor)) continue;
        for (int64_t id = begin; id < end; id++) {
            if (!(row[id] > floor)) continue;
            ranked_id new = {row[id], (int32_t)id};
            if (held < k) sift_up(into, held++, new);
            else sift_down(into, held, 0, new);
            if (held == k) floor = into[0].value; /* ids rise, so that a later one of equal value comes behind */
        }
    }
    for (int64_t left = held - 1; left > 0; left--) {
        ranked_id last = into[0];
        sift_down(into, left, 0, into[left]);
        into[left] = last;
    }
    return held;
}

#endif
