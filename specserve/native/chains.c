/* The rules for rows of float, which workers judge, and of double, in which their laws are proven. */
#include <math.h>

#include "exponentials.h"

#define STRETCH 1024 /* values whose sum is made in float */

/* The entropy of a dist, in nats. */
static double entropy_f32(const float *dist, int64_t n) {
    double entropy = 0;
    int64_t at = 0;
    while (at + LANES <= n) {
        floats sums = {0};
        for (int64_t end = at + STRETCH; at + LANES <= n && at < end; at += LANES) {
            floats here = load(dist + at);
            sums += here * logarithm(here);
        }
        entropy -= sum(sums);
    }
    for (; at < n; at++) entropy -= dist[at] > 0 ? dist[at] * log(dist[at]) : 0;
    return entropy;
}

static double entropy_f64(const double *dist, int64_t n) {
    double entropy = 0;
    for (int64_t at = 0; at < n; at++) entropy -= dist[at] > 0 ? dist[at] * log(dist[at]) : 0;
    return entropy;
}

#define real float
#define NAME(name) name##_f32
#include "chains.h"
#undef real
#undef NAME

#define real double
#define NAME(name) name##_f64
#include "chains.h"
