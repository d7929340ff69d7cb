/* How rules judge chains of drafted tokens: what specserve/verification says in tensors, a row of the batch at a time.
 *
 * Included once per type, with `real` and NAME(…) defined. A row reads only the dists that its verdict depends on.
 */
#include "draws.h"

/* target [batch, depth + 1, vocab]; ids and probs [batch, depth, support] the draft dists; tokens [batch, depth];
 * lengths [batch]; accept [batch, depth], choose [batch, depth + 1] and keys [batch, depth + 1, 4] the noise. What a
 * rule does not look at is NULL. */
typedef struct {
    int64_t batch, depth, vocab, support;
    const real *target;
    const int64_t *ids;
    const real *probs;
    const int64_t *tokens;
    const int64_t *lengths;
    const double *accept;
    const double *choose;
    const uint32_t *keys;
    real floor, share;
} NAME(chains);

typedef struct {
    int64_t kept, next;
} NAME(verdict);

static inline const real *NAME(dist)(const NAME(chains) *c, int64_t b, int64_t place) {
    return c->target + (b * (c->depth + 1) + place) * c->vocab;
}

static inline int64_t NAME(token)(const NAME(chains) *c, int64_t b, int64_t place) {
    return c->tokens[b * c->depth + place];
}

/* The probability of a drafted token in its own dist. */
static real NAME(draft_mass)(const NAME(chains) *c, int64_t b, int64_t place) {
    int64_t begin = (b * c->depth + place) * c->support, token = NAME(token)(c, b, place);
    real mass = 0;
    for (int64_t e = begin; e < begin + c->support; e++) mass += c->ids[e] == token ? c->probs[e] : 0;
    return mass;
}

/* Drawn from what `scale` times the target has over the draft, or from the target after a whole chain. */
static NAME(verdict) NAME(after)(const NAME(chains) *c, int64_t b, int64_t kept, double scale, NAME(scratch) *s) {
    int64_t less = (b * c->depth + kept) * c->support, refused = kept < c->lengths[b];
    int64_t next = NAME(pick_leftover)(NAME(dist)(c, b, kept), c->vocab, refused ? (real)scale : 1, c->ids + less,
                                       c->probs + less, refused ? c->support : 0,
                                       c->choose[b * (c->depth + 1) + kept], s);
    return (NAME(verdict)){kept, next};
}

static NAME(verdict) NAME(rejection)(const NAME(chains) *c, int64_t b, NAME(scratch) *s) {
    int64_t kept = 0;
    for (; kept < c->lengths[b]; kept++) {
        real own = NAME(draft_mass)(c, b, kept), mass = NAME(dist)(c, b, kept)[NAME(token)(c, b, kept)];
        if (!(own > 0 && c->accept[b * c->depth + kept] * own < mass)) break;
    }
    return NAME(after)(c, b, kept, 1, s);
}

/* The probability that the first `place` tokens, of weight `weight`, pass as a block. */
static double NAME(passes)(const NAME(chains) *c, int64_t b, int64_t place, double weight) {
    if (place == c->lengths[b] || !(weight < 1)) return weight;
    int64_t begin = (b * c->depth + place) * c->support;
    const real *dist = NAME(dist)(c, b, place);
    double overlap = 0;
    for (int64_t e = begin; e < begin + c->support; e++) {
        double mass = weight * dist[c->ids[e]];
        overlap += mass < c->probs[e] ? mass : c->probs[e];
    }
    double left = weight > overlap ? weight - overlap : 0;
    return left / (left + 1 - weight);
}

static NAME(verdict) NAME(block)(const NAME(chains) *c, int64_t b, NAME(scratch) *s) {
    int64_t kept = c->lengths[b];
    double weights[kept + 1];
    weights[0] = 1;
    for (int64_t i = 0; i < kept; i++) {
        double own = NAME(draft_mass)(c, b, i), mass = NAME(dist)(c, b, i)[NAME(token)(c, b, i)];
        double weight = own > 0 ? weights[i] * (mass / own) : 0;
        weights[i + 1] = weight < 1 ? weight : 1;
    }
    while (kept > 0 && !(c->accept[b * c->depth + kept - 1] < NAME(passes)(c, b, kept, weights[kept]))) kept--;
    return NAME(after)(c, b, kept, weights[kept], s);
}

static NAME(verdict) NAME(exact)(const NAME(chains) *c, int64_t b, NAME(scratch) *s) {
    int possible;
    for (int64_t place = 0;; place++) {
        NAME(weights) all = {NAME(dist)(c, b, place), 1, c->vocab, NULL, NULL};
        int64_t own = NAME(pick)(&all, c->choose[b * (c->depth + 1) + place], s->mass, &possible);
        if (place == c->lengths[b] || own != NAME(token)(c, b, place)) return (NAME(verdict)){place, own};
    }
}

static NAME(verdict) NAME(coupled)(const NAME(chains) *c, int64_t b, NAME(scratch) *s) {
    for (int64_t place = 0;; place++) {
        const uint32_t *key = c->keys + (b * (c->depth + 1) + place) * 4;
        int64_t own = NAME(race)(NAME(dist)(c, b, place), c->vocab, key, s);
        if (place == c->lengths[b] || own != NAME(token)(c, b, place)) return (NAME(verdict)){place, own};
    }
}

/* The entropy is asked for only where it decides. */
static NAME(verdict) NAME(typical)(const NAME(chains) *c, int64_t b, NAME(scratch) *s) {
    int64_t kept = 0;
    int possible;
    for (; kept < c->lengths[b]; kept++) {
        const real *dist = NAME(dist)(c, b, kept);
        real mass = dist[NAME(token)(c, b, kept)];
        if (!(mass > c->floor || (mass > 0 && mass > c->share * (real)exp(-NAME(entropy)(dist, c->vocab))))) break;
    }
    NAME(weights) all = {NAME(dist)(c, b, kept), 1, c->vocab, NULL, NULL};
    return (NAME(verdict)){kept, NAME(pick)(&all, c->choose[b * (c->depth + 1) + kept], s->mass, &possible)};
}

/* Whether all ids that may be looked at lie in the vocabulary, and lengths within the chains. */
static int NAME(sound)(const NAME(chains) *c) {
    for (int64_t b = 0; b < c->batch; b++) {
        if (c->lengths[b] < 0 || c->lengths[b] > c->depth) return 0;
        for (int64_t i = b * c->depth; i < b * c->depth + c->lengths[b]; i++) {
            if (c->tokens[i] < 0 || c->tokens[i] >= c->vocab) return 0;
            for (int64_t e = i * c->support; c->ids != NULL && e < (i + 1) * c->support; e++)
                if (c->ids[e] < 0 || c->ids[e] >= c->vocab) return 0;
        }
    }
    return 1;
}

typedef NAME(verdict) NAME(rule)(const NAME(chains) *, int64_t, NAME(scratch) *);

/* into [2, batch]: tokens kept, and the one after them. Returns 0; 1 for ids or lengths out of range, 2 without memory. */
static int NAME(judge)(const NAME(chains) *c, NAME(rule) *rule, int64_t *into, int threads) {
    if (!NAME(sound)(c)) return 1;
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(|| : failed)
    {
        NAME(scratch) s;
        failed = !NAME(reserve)(&s, c->vocab, c->ids == NULL ? 0 : c->support);
#pragma omp for schedule(dynamic)
        for (int64_t b = 0; b < c->batch; b++) {
            if (failed) continue;
            NAME(verdict) said = rule(c, b, &s);
            into[b] = said.kept;
            into[c->batch + b] = said.next;
        }
        free(s.memory);
    }
    return failed ? 2 : 0;
}

#define RATIO_RULE(rule)                                                                                             \
    int NAME(specserve_##rule)(int64_t batch, int64_t depth, int64_t vocab, int64_t support, const real *target,     \
                               const int64_t *ids, const real *probs, const int64_t *tokens, const int64_t *lengths, \
                               const double *accept, const double *choose, int64_t *into, int threads) {             \
        NAME(chains) c = {batch, depth, vocab, support, target, ids, probs, tokens, lengths, accept, choose, NULL, 0, 0}; \
        return NAME(judge)(&c, NAME(rule), into, threads);                                                           \
    }

RATIO_RULE(rejection)
RATIO_RULE(block)
#undef RATIO_RULE

int NAME(specserve_exact)(int64_t batch, int64_t depth, int64_t vocab, const real *target, const int64_t *tokens,
                          const int64_t *lengths, const double *choose, int64_t *into, int threads) {
    NAME(chains) c = {batch, depth, vocab, 0, target, NULL, NULL, tokens, lengths, NULL, choose, NULL, 0, 0};
    return NAME(judge)(&c, NAME(exact), into, threads);
}

int NAME(specserve_coupled)(int64_t batch, int64_t depth, int64_t vocab, const real *target, const int64_t *tokens,
                            const int64_t *lengths, const uint32_t *keys, int64_t *into, int threads) {
    NAME(chains) c = {batch, depth, vocab, 0, target, NULL, NULL, tokens, lengths, NULL, NULL, keys, 0, 0};
    return NAME(judge)(&c, NAME(coupled), into, threads);
}

int NAME(specserve_typical)(int64_t batch, int64_t depth, int64_t vocab, const real *target, const int64_t *tokens,
                            const int64_t *lengths, const double *choose, double floor, double share, int64_t *into,
                            int threads) {
    NAME(chains) c = {batch, depth, vocab, 0, target, NULL, NULL, tokens, lengths, NULL, choose, NULL,
                      (real)floor, (real)share};
    return NAME(judge)(&c, NAME(typical), into, threads);
}

/* One id per row [m] of n weights that lie `stride` apart, by uniforms [m]. possible [m]: whether a row has any weight. */
int NAME(specserve_draw)(const real *rows, int64_t stride, int64_t m, int64_t n, const double *noise, int64_t *into,
                         uint8_t *possible, int threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(|| : failed)
    {
        NAME(scratch) s;
        failed = !NAME(reserve)(&s, n, 0);
#pragma omp for
        for (int64_t i = 0; i < m; i++) {
            int some = 0;
            NAME(weights) all = {rows + i * stride, 1, n, NULL, NULL};
            if (!failed) into[i] = NAME(pick)(&all, noise[i], s.mass, &some);
            possible[i] = some;
        }
        free(s.memory);
    }
    return failed ? 2 : 0;
}

/* The winner of each row's race, rows as in draw; keys [m, 4]. */
int NAME(specserve_race)(const real *rows, int64_t stride, int64_t m, int64_t n, const uint32_t *keys, int64_t *into,
                         int threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(|| : failed)
    {
        NAME(scratch) s;
        failed = !NAME(reserve)(&s, n, 0);
#pragma omp for
        for (int64_t i = 0; i < m; i++)
            if (!failed) into[i] = NAME(race)(rows + i * stride, n, keys + 4 * i, &s);
        free(s.memory);
    }
    return failed ? 2 : 0;
}
