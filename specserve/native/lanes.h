/* Floats as wide as this machine's registers are, for sums that must stay in them: wider ones would be spilled. */
#ifndef SPECSERVE_LANES_H
#define SPECSERVE_LANES_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define LINE 64 /* bytes that memory brings at once */

#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif

typedef float lanes __attribute__((vector_size(4 * WIDTH)));
typedef int32_t whole_lanes __attribute__((vector_size(4 * WIDTH)));
typedef float unaligned_lanes __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int8_t byte_lanes __attribute__((vector_size(WIDTH)));

#define INLINE static inline __attribute__((always_inline))

INLINE lanes read(const float *from) { return *(const unaligned_lanes *)from; }

/* WIDTH whole numbers of a byte each, as floats. Spelt out, as gcc takes a general conversion lane by lane. */
INLINE lanes read_int8(const int8_t *from) {
#if defined(__AVX512F__)
    return (lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif defined(__AVX2__)
    return (lanes)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
    byte_lanes bytes;
    memcpy(&bytes, from, sizeof(bytes));
    return __builtin_convertvector(bytes, lanes);
#endif
}

INLINE void write(float *to, lanes value) { *(unaligned_lanes *)to = value; }

/* The first n < WIDTH floats, zeros behind them: what follows in memory may be anybody's, or nothing. */
INLINE lanes read_some(const float *from, int64_t n) {
    lanes value = {0};
    memcpy(&value, from, (size_t)n * sizeof(float));
    return value;
}

INLINE lanes chosen(whole_lanes where, lanes value, lanes other) {
    return (lanes)(((whole_lanes)value & where) | ((whole_lanes)other & ~where));
}

INLINE lanes larger(lanes one, lanes other) { return chosen(one > other, one, other); }

INLINE lanes smaller(lanes one, lanes other) { return chosen(one < other, one, other); }

/* gcc has learned the name that it shares with clang in version 12. */
#if defined(__clang__) || __GNUC__ >= 12
#define GATHERED(one, other, ...) __builtin_shufflevector(one, other, __VA_ARGS__)
#else
#define GATHERED(one, other, ...) __builtin_shuffle(one, other, (whole_lanes){__VA_ARGS__})
#endif

#if WIDTH == 16
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif WIDTH == 8
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#else
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#endif

/* Neighbours added up, those of the first vector before those of the second. */
INLINE lanes pairs(lanes one, lanes other) { return GATHERED(one, other, EVEN) + GATHERED(one, other, ODD); }

/* Lane i becomes the sum of vector i. */
INLINE lanes sums_of(lanes each[WIDTH]) {
#pragma GCC unroll 4
    for (int left = WIDTH / 2; left; left /= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < left; i++) each[i] = pairs(each[2 * i], each[2 * i + 1]);
    }
    return each[0];
}

INLINE float sum_of(lanes value) {
    float total = 0;
    for (int lane = 0; lane < WIDTH; lane++) total += value[lane];
    return total;
}

/* e to the power of each lane, to about one unit in the last place; what is below −87 counts as −87. A polynomial on
 * half an octave around zero, and the octaves put into the exponent. */
INLINE lanes exponential(lanes x) {
    const float rounding = 12582912.0f; /* 1.5 · 2²³: a sum with it has no room for fractions */
    x = larger(x, (lanes){0} - 87.0f);
    x = smaller(x, (lanes){0} + 88.0f);
    const lanes shifted = x * 1.44269504f + rounding;
    const lanes octaves = shifted - rounding;
    const lanes rest = (x - octaves * 0.693359375f) + octaves * 2.12194440e-4f;
    lanes value = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    value = value * rest + 8.3334519073e-3f;
    value = value * rest + 4.1665795894e-2f;
    value = value * rest + 1.6666665459e-1f;
    value = value * rest + 5.0000001201e-1f;
    value = value * (rest * rest) + rest + 1.0f;
    const whole_lanes exponent = ((whole_lanes)shifted - 0x4B400000 + 127) << 23;
    return value * (lanes)exponent;
}

#endif
