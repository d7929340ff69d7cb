/* How drafted tokens are picked: from rows of logits to tokens, the dists that are kept, and what else was likely.
 *
 * One row at a time, while it is in the processor's cache. specserve/drafting/_chains.py says the same in tensors.
 */
#include "rows.h"

#define real float
#define NAME(name) name##_f32
#include "draws.h"
#undef real
#undef NAME

#define LEAST_KEPT 0x1p-25f /* what is not above it rounds to 0 as a float16 */
#define RANKED_AMONG 256    /* ids of a dist that are ranked by their race: sampling/race.py */

enum purpose { PROPOSE = 0, SHARED = 3 }; /* sampling.noise.Purpose */

/* A chain's noise: what its request is, and where its first token stands; in the order of a row of numbers. */
typedef struct {
    int64_t seed, branch, first, raced;
} chain;

/* Which token of which chain a row of logits is about, and where what it is picked from is kept. */
typedef struct {
    int64_t chain, place, slot;
} next_token;

/* By slot: ids [k] and their float16 probabilities, and ids [ranks] of what else was likely. */
typedef struct {
    int64_t k, ranks;
    int32_t *ids;
    uint16_t *probs;
    int64_t *ranked;
} kept_dists;

/* What is worked on, one per thread. */
typedef struct {
    float *dist, *weights;
    double *mass, *scores;
    ranked_id *first;
    void *memory;
} workbench;

/* For dists over n ids, of which up to k are kept and `ranks` ranked. Returns 0 where there is no memory. */
static int set_up(workbench *w, int64_t n, int64_t k, int64_t ranks) {
    int64_t listed = k > ranks ? k : ranks;
    w->memory = malloc((ranks + k + 1) * sizeof(double) + listed * sizeof(ranked_id) + (n + k) * sizeof(float) + 64);
    if (w->memory == NULL) return 0;
    w->scores = w->memory;
    w->mass = w->scores + ranks;
    w->first = (ranked_id *)(w->mass + k + 1);
    w->weights = (float *)(w->first + listed);
    w->dist = w->weights + k;
    return 1;
}

/* A probability as float16, to the nearest, the even one of two. */
static inline uint16_t half_of(float prob) {
    if (prob < 0x1p-14f) return (uint16_t)lrintf(prob * 0x1p24f);
    union {
        float value;
        uint32_t bits;
    } it = {prob};
    return (uint16_t)(((it.bits + 0xFFF + (it.bits >> 13 & 1)) >> 13) - (112 << 10));
}

static inline float float_of(uint16_t half) {
    union {
        uint32_t bits;
        float value;
    } it = {((uint32_t)half << 13) + (112u << 23)};
    return half < 1 << 10 ? half * 0x1p-24f : it.value;
}

/* The k likeliest ids of a dist with their rounded probabilities; unused entries have id 0 and probability 0. */
static void keep(const float *dist, int64_t n, int64_t k, ranked_id *first, int32_t *ids, uint16_t *probs) {
    int64_t found = first_ids(dist, n, k, LEAST_KEPT, first);
    for (int64_t at = 0; at < k; at++) {
        ids[at] = at < found ? first[at].id : 0;
        probs[at] = at < found ? half_of(first[at].value) : 0;
    }
}

static void keep_certain(int64_t id, int64_t k, int32_t *ids, uint16_t *probs) {
    for (int64_t at = 0; at < k; at++) ids[at] = probs[at] = 0;
    ids[0] = (int32_t)id;
    probs[0] = half_of(1);
}

/* Kept probabilities divided by their sum, which is exact in double: sampling/wire.py. */
static void normalise(const uint16_t *probs, int64_t k, float *into) {
    double sum = 0;
    for (int64_t at = 0; at < k; at++) sum += into[at] = float_of(probs[at]);
    float total = (float)sum;
    for (int64_t at = 0; at < k; at++) into[at] /= total;
}

/* Four words of noise about the token at a position. */
static inline void noise_of(const chain *c, enum purpose purpose, int64_t position, int64_t place, uint32_t x[4]) {
    x[0] = (uint32_t)position;
    x[1] = (uint32_t)place;
    x[2] = purpose;
    x[3] = (uint32_t)c->branch;
    philox(x, (uint32_t)c->seed, (uint32_t)((uint64_t)c->seed >> 32));
}

static inline double uniform_of(const chain *c, int64_t place) {
    uint32_t x[4];
    noise_of(c, PROPOSE, c->first + place, place, x);
    return (double)((uint64_t)(x[0] >> 5) << 26 | x[1] >> 6) * 0x1p-53;
}

/* Puts an id into its place among the best `count` of a race; of equal scores the earlier one stays in front. */
static inline void place_by_score(int64_t id, double score, int64_t count, double *scores, int64_t *ids) {
    int64_t at = count;
    for (; at > 0 && score > scores[at - 1]; at--) {
        if (at == count) continue;
        scores[at] = scores[at - 1];
        ids[at] = ids[at - 1];
    }
    if (at == count) return;
    scores[at] = score;
    ids[at] = id;
}

static inline void clear_ranking(int64_t count, double *scores, int64_t *ids) {
    for (int64_t at = 0; at < count; at++) {
        scores[at] = 0;
        ids[at] = -1;
    }
}

/* Who wins a race between kept ids under the target's noise, and who would win without the winner, and so on. */
static int64_t raced(const chain *c, int64_t place, const int32_t *ids, const float *weights, int64_t k, int64_t ranks,
                     double *scores, int64_t *ranked) {
    uint32_t key[4];
    double best = 0;
    int64_t winner = 0; /* where nothing is allowed the chain ends: any id stands in */
    noise_of(c, SHARED, c->first + place, 0, key);
    clear_ranking(ranks, scores, ranked);
    for (int64_t at = 0; at < k; at++) {
        double score = weights[at] > 0 ? weights[at] / ring(key, ids[at]) : 0;
        if (score > best) {
            best = score;
            winner = ids[at];
        }
        place_by_score(ids[at], score, ranks, scores, ranked);
    }
    return winner;
}

/* The likeliest ids of a row, -1 where fewer are allowed at all. */
static void rank_logits(const float *row, int64_t n, int64_t ranks, ranked_id *first, int64_t *ranked) {
    int64_t found = first_ids(row, n, ranks, -INFINITY, first);
    for (int64_t at = 0; at < ranks; at++) ranked[at] = at < found ? first[at].id : -1;
}

static void rank_kept(const int32_t *ids, const uint16_t *probs, int64_t k, int64_t ranks, int64_t *ranked) {
    for (int64_t at = 0; at < ranks; at++) ranked[at] = at < k && probs[at] > 0 ? ids[at] : -1;
}

static int64_t pick_token(const float *row, int64_t n, float heat, const chain *c, const next_token *next,
                          const kept_dists *kept, workbench *w) {
    int64_t k = kept->k, ranks = kept->ranks, *ranked = kept->ranked + next->slot * ranks;
    int32_t *ids = kept->ids + next->slot * k;
    uint16_t *probs = kept->probs + next->slot * k;
    if (heat == 0) {
        int64_t token = largest_place(row, n);
        keep_certain(token, k, ids, probs);
        rank_logits(row, n, ranks, w->first, ranked);
        return token;
    }
    softmax(row, n, heat, w->dist);
    keep(w->dist, n, k, w->first, ids, probs);
    normalise(probs, k, w->weights);
    if (c->raced) return raced(c, next->place, ids, w->weights, k, ranks, w->scores, ranked);
    rank_kept(ids, probs, k, ranks, ranked);
    weights_f32 all = {w->weights, 1, k, NULL, NULL};
    int possible;
    return ids[pick_f32(&all, uniform_of(c, next->place), w->mass, &possible)];
}

/* The next tokens of m of `count` chains, from logits [m, n] that lie `stride` apart. heat [count] the chains'
 * temperatures; chains [count, 4] and next [m, 3] as above; ids and probs [slots, k] and ranked [slots, ranks] are
 * written at the slots of `next`. tokens [m], highest [m] the largest logits, NaN where there is one. Returns 0; 1, with
 * nothing written, for a chain or slot that there is not; 2 without memory. */
int specserve_pick_f32(const float *logits, int64_t stride, int64_t m, int64_t n, int64_t count, const float *heat,
                       const chain *chains, const next_token *next, int64_t slots, int64_t k, int32_t *ids,
                       uint16_t *probs, int64_t ranks, int64_t *ranked, int64_t *tokens, float *highest, int threads) {
    kept_dists kept = {k, ranks, ids, probs, ranked};
    for (int64_t i = 0; i < m; i++)
        if (next[i].chain < 0 || next[i].chain >= count || next[i].slot < 0 || next[i].slot >= slots) return 1;
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(|| : failed)
    {
        workbench w;
        failed = !set_up(&w, n, k, ranks);
#pragma omp for
        for (int64_t i = 0; i < m; i++) {
            if (failed) continue;
            const float *row = logits + i * stride;
            int64_t c = next[i].chain;
            tokens[i] = pick_token(row, n, heat[c], chains + c, next + i, &kept, &w);
            highest[i] = has_nan(row, n) ? NAN : largest(row, n);
        }
        free(w.memory);
    }
    return failed ? 2 : 0;
}

/* The first ids of the races of m chains' first tokens over whole dists, of their likeliest ids: into [m, ranks], -1
 * where none is left. Logits, heat [m] and chains [m, 4] as above. Returns 0, or 2 without memory. */
int specserve_foresee_f32(const float *logits, int64_t stride, int64_t m, int64_t n, const float *heat,
                          const chain *chains, int64_t ranks, int64_t *into, int threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(|| : failed)
    {
        workbench w;
        failed = !set_up(&w, n, RANKED_AMONG, ranks);
#pragma omp for
        for (int64_t i = 0; i < m; i++) {
            if (failed) continue;
            uint32_t key[4];
            noise_of(chains + i, SHARED, chains[i].first, 0, key);
            softmax(logits + i * stride, n, heat[i], w.dist);
            int64_t found = first_ids(w.dist, n, RANKED_AMONG, 0, w.first);
            clear_ranking(ranks, w.scores, into + i * ranks);
            for (int64_t at = 0; at < found; at++) {
                double score = w.first[at].value / ring(key, w.first[at].id);
                place_by_score(w.first[at].id, score, ranks, w.scores, into + i * ranks);
            }
        }
        free(w.memory);
    }
    return failed ? 2 : 0;
}

/* The k likeliest ids of dists [m, n] that lie `stride` apart, and their probabilities as float16: [m, k] each. Returns
 * 0, or 2 without memory. */
int specserve_sparsify_f32(const float *dists, int64_t stride, int64_t m, int64_t n, int64_t k, int32_t *ids,
                           uint16_t *probs, int threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(|| : failed)
    {
        ranked_id *first = malloc((k + 1) * sizeof(ranked_id));
        failed = first == NULL;
#pragma omp for
        for (int64_t i = 0; i < m; i++)
            if (!failed) keep(dists + i * stride, n, k, first, ids + i * k, probs + i * k);
        free(first);
    }
    return failed ? 2 : 0;
}
