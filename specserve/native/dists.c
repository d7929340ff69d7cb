/* From logits to dists, and to their largest ids: rows of float. */
#include <stdlib.h>

#include "rows.h"

/* softmax(row / heat) over the first n of each row [m, width], and 0 past them; heat [m], of which 0 counts as 1. */
void specserve_softmax_f32(const float *rows, int64_t stride, int64_t m, int64_t n, int64_t width, const float *heat,
                           float *into, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < m; i++) {
        softmax(rows + i * stride, n, heat[i], into + i * width);
        for (int64_t at = n; at < width; at++) into[i * width + at] = 0;
    }
}

/* The sum of e^(row - most) over each row [m, n], most [m] being its largest value; it means nothing where
 * that is not finite. */
void specserve_exp_sums_f32(const float *rows, int64_t stride, int64_t m, int64_t n, const float *most, double *into,
                            int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < m; i++) {
        float stretch[STRETCH];
        into[i] = 0;
        for (int64_t at = 0; at < n; at += STRETCH) {
            int64_t count = n - at < STRETCH ? n - at : STRETCH;
            into[i] += exponentials(rows + i * stride + at, count, most[i], 1, stretch);
        }
    }
}

/* Where the largest value of each row is, the lowest place on ties; of NaN, the first one. */
void specserve_argmax_f32(const float *rows, int64_t stride, int64_t m, int64_t n, int64_t *into, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < m; i++) into[i] = largest_place(rows + i * stride, n);
}

/* The largest k <= n values of each row and their ids, [m, k] each, the lower id first of equals; id -1 for -inf, and
 * NaN with ids -1 throughout where a row has any. Returns 0, or 2 without memory. */
int specserve_likeliest_f32(const float *rows, int64_t stride, int64_t m, int64_t n, int64_t k, float *values,
                            int64_t *ids, int threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(|| : failed)
    {
        ranked_id *first = malloc((k + 1) * sizeof(ranked_id));
        failed = first == NULL;
#pragma omp for
        for (int64_t i = 0; i < m; i++) {
            if (failed) continue;
            int unordered = has_nan(rows + i * stride, n);
            int64_t found = unordered ? 0 : first_ids(rows + i * stride, n, k, -INFINITY, first);
            for (int64_t at = 0; at < k; at++) {
                values[i * k + at] = at < found ? first[at].value : unordered ? NAN : -INFINITY;
                ids[i * k + at] = at < found ? first[at].id : -1;
            }
        }
        free(first);
    }
    return failed ? 2 : 0;
}
