/* From logits to dists, and to their largest ids: rows of float. */
#include <math.h>

#include "exponentials.h"

#define STRETCH 1024   /* values whose sum is made in float */
#define LOOKED_AT 256  /* values that are gone through again for the largest one's place */

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

/* softmax(row / heat) over the first n of each row [m, width], and 0 past them; heat [m], of which 0 counts as 1. */
void specserve_softmax_f32(const float *rows, int64_t stride, int64_t m, int64_t n, int64_t width, const float *heat,
                           float *into, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < m; i++) {
        const float *row = rows + i * stride;
        float *dist = into + i * width, warmth = heat[i] == 0 ? 1 : heat[i];
        float scale = (float)(1 / exponentials(row, n, largest(row, n), warmth, dist));
        for (int64_t at = 0; at < n; at++) dist[at] *= scale;
        for (int64_t at = n; at < width; at++) dist[at] = 0;
    }
}

/* Where the first NaN of n values is, or the first one equal to `value`. */
static int64_t first_place(const float *from, int64_t n, float value) {
    int64_t at = 0;
    while (at < n - 1 && from[at] != value && from[at] == from[at]) at++;
    return at;
}

/* Where the largest value of each row is, the lowest place on ties; of NaN, the first one. */
void specserve_argmax_f32(const float *rows, int64_t stride, int64_t m, int64_t n, int64_t *into, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < m; i++) {
        const float *row = rows + i * stride;
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
        int64_t count = n - top < LOOKED_AT ? n - top : LOOKED_AT, at = first_place(row + top, count, most);
        into[i] = top + at;
    }
}
