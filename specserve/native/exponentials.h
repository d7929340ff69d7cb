/* exp and log of sixteen floats, to within rounding of a float, by series: no table, no call. */
#ifndef SPECSERVE_EXPONENTIALS_H
#define SPECSERVE_EXPONENTIALS_H

#include "vectors.h"

#define LN2_HIGH 0x1.62e4p-1f /* exact in products with whole numbers of up to 9 bits; the rest is below */
#define LN2_LOW 0x1.7f7d1cp-20f
#define ROUNDER 0x1.8p23f /* added and taken off again, it rounds to a whole number */
#define LEAST_EXPONENT -87.0f
#define ROOT_HALF 0x3f3504f3 /* the bits of √½ */

/* e^x for x <= 0; 0 below e^-87. */
static inline floats exponential(floats x) {
    ints vanishes = x < all(LEAST_EXPONENT);
    x = pick(vanishes, all(0), x);
    floats shifted = x * 0x1.715476p0f + ROUNDER, whole = shifted - ROUNDER;
    floats r = x - whole * LN2_HIGH - whole * LN2_LOW;
    /* Taylor: |r| <= ln 2 / 2, and the first term left out is below 6e-9. */
    floats e = r * (1.0f / 5040) + 1.0f / 720;
    e = e * r + 1.0f / 120;
    e = e * r + 1.0f / 24;
    e = e * r + 1.0f / 6;
    e = e * r + 0.5f;
    e = e * r + 1.0f;
    e = e * r + 1.0f;
    ints power = (((ints)shifted - (ints)all(ROUNDER)) + 127) << 23;
    return pick(vanishes, all(0), e * (floats)power);
}

/* ln x for normal x > 0; some finite number for 0. */
static inline floats logarithm(floats x) {
    ints exponent = ((ints)x - ROOT_HALF) >> 23;
    floats m = (floats)((ints)x - (exponent << 23));
    /* m from √½ to √2: ln m = 2 artanh s, |s| < 0.172. */
    floats s = (m - 1.0f) / (m + 1.0f), q = s * s;
    floats series = q * (1.0f / 9) + 1.0f / 7;
    series = series * q + 1.0f / 5;
    series = series * q + 1.0f / 3;
    series = series * q + 1.0f;
    return __builtin_convertvector(exponent, floats) * 0x1.62e43p-1f + 2.0f * s * series;
}

#endif
