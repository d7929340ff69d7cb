/* Attention of single tokens over keys and values in pages. */
#ifndef SPECSERVE_ATTENTION_H
#define SPECSERVE_ATTENTION_H

#include <math.h>

#include "lanes.h"

#define CHUNK 64 /* keys that are weighed together; what a token finds depends on it, so it is the same everywhere */

/* The positions that a token sees: those from `origin` to before `straight`, then those of its path in a tree; of all
 * these not the first `skipped`, which lie before a window. */
typedef struct {
    const int32_t *table;
    const int32_t *path;
    int64_t block_tokens;
    int64_t origin;
    int64_t straight;
    int64_t skipped;
    int64_t count;
} sight;

/* A layer's pages: [positions, heads, dim]. */
typedef struct {
    const float *keys;
    const float *values;
    int64_t heads;
    int64_t dim;
} pages;

static inline int64_t chunks_of(int64_t count) { return (count + CHUNK - 1) / CHUNK; }

/* What one head has found so far: the largest score, the sum of all weights relative to it, and the values weighed so. */
static inline int64_t found_size(int64_t dim) { return dim + 2; }

static inline void found_nothing(float *found, int64_t dim) {
    memset(found, 0, (size_t)found_size(dim) * sizeof(float));
    found[0] = -INFINITY;
}

/* What `heads` query heads, side by side in `query`, find in one chunk of what a token sees, in the pages of key head
 * `head`; scores are products times `scaling`. found[heads][found_size]. */
void attend_chunk(const pages *in, const sight *seen, int64_t chunk, int64_t head, const float *query, int64_t heads,
                  float scaling, float *found);

/* Add what was found in another chunk. */
void join_found(float *found, const float *other, int64_t dim);

#endif
