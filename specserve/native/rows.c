/* Looking through rows of logits. */
#include "vectors.h"

/* The largest of n floats. n >= 1; NaN is not looked for. */
float specserve_largest(const float *row, int64_t n) {
    floats most = all(row[0]);
    int64_t at = 0;
    for (; at + LANES <= n; at += LANES) {
        floats here = load(row + at);
        most = pick(here > most, here, most);
    }
    float largest = row[0];
    for (int lane = 0; lane < LANES; lane++) largest = most[lane] > largest ? most[lane] : largest;
    for (; at < n; at++) largest = row[at] > largest ? row[at] : largest;
    return largest;
}
