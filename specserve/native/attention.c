#include "attention.h"

/* Where a chunk's positions are in the pages. Returns how many there are. */
static int64_t places_of(const sight *seen, int64_t chunk, int64_t places[CHUNK]) {
    const int64_t begin = seen->skipped + chunk * CHUNK, all = seen->skipped + seen->count;
    const int64_t end = begin + CHUNK < all ? begin + CHUNK : all;
    const int64_t in_order = seen->straight - seen->origin;
    int64_t at = begin;
    while (at < end && at < in_order) {
        const int64_t position = seen->origin + at, block = position / seen->block_tokens;
        int64_t stop = (block + 1) * seen->block_tokens - seen->origin;
        stop = stop < end ? stop : end;
        stop = stop < in_order ? stop : in_order;
        const int64_t shift = seen->table[block] * seen->block_tokens + position % seen->block_tokens - at;
        for (; at < stop; at++) places[at - begin] = at + shift;
    }
    for (; at < end; at++) {
        const int64_t position = seen->path[at - in_order];
        places[at - begin] =
            seen->table[position / seen->block_tokens] * seen->block_tokens + position % seen->block_tokens;
    }
    return end - begin;
}

/* Scores of WIDTH keys; `query` is filled up with zeros to whole lanes. */
INLINE lanes score(const float *query, const float *const keys[WIDTH], int64_t dim) {
    lanes each[WIDTH];
    for (int i = 0; i < WIDTH; i++) each[i] = (lanes){0};
    int64_t at = 0;
    for (; at + WIDTH <= dim; at += WIDTH) {
        const lanes wanted = read(query + at);
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; i++) each[i] += wanted * read(keys[i] + at);
    }
    if (at < dim) {
        const lanes wanted = read(query + at);
        for (int i = 0; i < WIDTH; i++) each[i] += wanted * read_some(keys[i] + at, dim - at);
    }
    return sums_of(each);
}

/* Scores of a chunk of up to CHUNK keys, from the largest of which weights are counted; returns that. */
static float weigh(const float *query, const float *keys, const int64_t *offsets, int64_t count, int64_t dim,
                   float scaling, float weights[CHUNK]) {
    lanes largest = (lanes){0} - INFINITY;
    for (int64_t first = 0; first < count; first += WIDTH) {
        const float *each[WIDTH];
        for (int i = 0; i < WIDTH; i++) each[i] = keys + offsets[first + i < count ? first + i : count - 1];
        const lanes scores = score(query, each, dim) * scaling;
        largest = larger(scores, largest);
        write(weights + first, scores);
    }
    float most = largest[0];
    for (int lane = 1; lane < WIDTH; lane++) most = largest[lane] > most ? largest[lane] : most;
    return most;
}

/* The sum of values by weights, for as many lanes as stay in registers. */
INLINE void mix(int parts, const float *values, const int64_t *offsets, const float *weights, int64_t count, float *to) {
    lanes sums[8];
#pragma GCC unroll 8
    for (int part = 0; part < parts; part++) sums[part] = (lanes){0};
    for (int64_t key = 0; key < count; key++) {
        const float *from = values + offsets[key];
#pragma GCC unroll 8
        for (int part = 0; part < parts; part++) sums[part] += read(from + part * WIDTH) * weights[key];
    }
#pragma GCC unroll 8
    for (int part = 0; part < parts; part++) write(to + part * WIDTH, sums[part]);
}

static void mix_values(const float *values, const int64_t *offsets, const float *weights, int64_t count, int64_t dim,
                       float *to) {
    int64_t at = 0;
    for (; at + 8 * WIDTH <= dim; at += 8 * WIDTH) mix(8, values + at, offsets, weights, count, to + at);
    for (; at + 4 * WIDTH <= dim; at += 4 * WIDTH) mix(4, values + at, offsets, weights, count, to + at);
    for (; at + WIDTH <= dim; at += WIDTH) mix(1, values + at, offsets, weights, count, to + at);
    for (; at < dim; at++) {
        float total = 0;
        for (int64_t key = 0; key < count; key++) total += values[offsets[key] + at] * weights[key];
        to[at] = total;
    }
}

/* One head's vectors of a chunk, all of them before the first is asked for. */
static void bring(const float *of, const int64_t *offsets, int64_t count, int64_t dim) {
    for (int64_t key = 0; key < count; key++) {
        for (int64_t at = 0; at < dim; at += LINE / (int64_t)sizeof(float)) __builtin_prefetch(of + offsets[key] + at);
    }
}

void attend_chunk(const pages *in, const sight *seen, int64_t chunk, int64_t head, const float *query, int64_t heads,
                  float scaling, float *found) {
    int64_t offsets[CHUNK];
    const int64_t count = places_of(seen, chunk, offsets), dim = in->dim, filled = (dim + WIDTH - 1) / WIDTH * WIDTH;
    for (int64_t key = 0; key < count; key++) offsets[key] = (offsets[key] * in->heads + head) * dim;
    bring(in->keys, offsets, count, dim);
    bring(in->values, offsets, count, dim);
    float weights[CHUNK], wanted[filled];
    for (int64_t each = 0; each < heads; each++, found += found_size(dim)) {
        memset(wanted + dim, 0, (size_t)(filled - dim) * sizeof(float));
        memcpy(wanted, query + each * dim, (size_t)dim * sizeof(float));
        const float most = weigh(wanted, in->keys, offsets, count, dim, scaling, weights);
        lanes total = {0};
        for (int64_t first = 0; first < count; first += WIDTH) {
            lanes some = exponential(read(weights + first) - most);
            for (int64_t lane = count - first; lane < WIDTH; lane++) some[lane] = 0;
            write(weights + first, some);
            total += some;
        }
        found[0] = most;
        found[1] = sum_of(total);
        mix_values(in->values, offsets, weights, count, dim, found + 2);
    }
}

void join_found(float *found, const float *other, int64_t dim) {
    const float most = found[0] > other[0] ? found[0] : other[0];
    const float mine = expf(found[0] - most), theirs = expf(other[0] - most);
    found[0] = most;
    for (int64_t i = 1; i < found_size(dim); i++) found[i] = found[i] * mine + other[i] * theirs;
}
