/* Counter-based noise, for many counters in one call. */
#include "noise.h"

/* Philox4x32-10. words [6, n]: four words of counters, then two of keys, each in 64 bits of which the lower 32 count;
 * into [4, n], 32 bits in 64. */
void specserve_philox(const uint64_t *words, int64_t n, uint64_t *into) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t x[4];
        for (int w = 0; w < 4; w++) x[w] = (uint32_t)words[w * n + i];
        philox(x, (uint32_t)words[4 * n + i], (uint32_t)words[5 * n + i]);
        for (int w = 0; w < 4; w++) into[w * n + i] = x[w];
    }
}

/* How single ids finish: probabilities float32 or float64 over E. ids and probs [m, k], keys [m, 4], into [m, k]. */
#define RACE_SCORES(name, real)                                                                             \
    void name(const int64_t *ids, const real *probs, const uint32_t *keys, int64_t m, int64_t k, double *into) { \
        for (int64_t i = 0; i < m * k; i++)                                                                  \
            into[i] = probs[i] == 0 ? 0 : probs[i] / ring(keys + 4 * (i / k), ids[i]);                       \
    }

RACE_SCORES(specserve_race_scores_f32, float)
RACE_SCORES(specserve_race_scores_f64, double)
