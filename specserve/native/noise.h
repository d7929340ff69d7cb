/* The noise of sampling/noise.py and sampling/race.py: the same integers, and clocks in float64 from them. */
#ifndef SPECSERVE_NOISE_H
#define SPECSERVE_NOISE_H

#include <math.h>
#include <stdint.h>

#define RACE_BLOCK 64
#define RACE_BLOCK_BITS 6
#define PHILOX_ROUNDS 10

/* Philox4x32-10 of a counter x under a key of two words, in place. */
static inline void philox(uint32_t x[4], uint32_t low, uint32_t high) {
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        uint64_t left = 0xD2511F53ull * x[0], right = 0xCD9E8D57ull * x[2];
        uint32_t next[4] = {(uint32_t)(right >> 32) ^ x[1] ^ low, (uint32_t)right,
                            (uint32_t)(left >> 32) ^ x[3] ^ high, (uint32_t)left};
        for (int w = 0; w < 4; w++) x[w] = next[w];
        low += 0x9E3779B9u;
        high += 0xBB67AE85u;
    }
}

/* 31 random bits of a number under two words of a key: sampling.noise.token_words. */
static inline uint32_t token_word(const uint32_t *key, uint32_t number) {
    uint32_t x = number + key[0];
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x ^= key[1];
    x *= 0x846CA68Bu;
    x ^= x >> 16;
    return x >> 1;
}

/* A uniform in (0, 1) from 31 high bits and `low` < 1 of a step, as the negative that log1p takes. */
static inline double below_zero(uint32_t high, double low) { return (low + high) * -0x1p-31; }

/* When the first clock of a block of ids rings, and whose it is. */
typedef struct {
    double at;
    uint32_t id;
} first_ring;

/* A block's own draw has a number below all ids. */
static inline first_ring first_of(const uint32_t *key, int64_t block) {
    uint32_t number = (uint32_t)(-1 - block), low = token_word(key + 2, number);
    double x = below_zero(token_word(key, number), ((low >> RACE_BLOCK_BITS) + 0.5) * 0x1p-25);
    return (first_ring){-log1p(x) / RACE_BLOCK, (uint32_t)block * RACE_BLOCK + (low & (RACE_BLOCK - 1))};
}

/* What an id waits after the first of its block, as the negative uniform that it is -log1p of. */
static inline double wait_of(const uint32_t *key, int64_t id) {
    return below_zero(token_word(key, (uint32_t)id), (token_word(key + 2, (uint32_t)id) + 0.5) * 0x1p-31);
}

/* E of an id under a key of four words, when its clock rings: sampling.race._rings. */
static inline double ring(const uint32_t *key, int64_t id) {
    first_ring first = first_of(key, id >> RACE_BLOCK_BITS);
    return first.id == (uint32_t)id ? first.at : -log1p(wait_of(key, id)) + first.at;
}

#endif
