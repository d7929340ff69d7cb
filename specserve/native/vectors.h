/* What all kernels share: rows of floats taken sixteen at a time, whatever the machine's vectors are. */
#ifndef SPECSERVE_VECTORS_H
#define SPECSERVE_VECTORS_H

#include <stdint.h>

#define LANES 16

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef float loose_floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline floats load(const float *from) { return *(const loose_floats *)from; }

static inline void store(float *to, floats value) { *(loose_floats *)to = value; }

static inline floats all(float value) { return (floats){0} + value; }

/* Lane by lane: chosen where mask is all ones (as a comparison leaves it), else other. */
static inline floats pick(ints mask, floats chosen, floats other) {
    return (floats)(((ints)chosen & mask) | ((ints)other & ~mask));
}

static inline float sum(floats value) {
    float total = 0;
    for (int lane = 0; lane < LANES; lane++) total += value[lane];
    return total;
}

#endif
