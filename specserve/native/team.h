/* Threads that go through the same phases together.
 *
 * A phase is a number of pieces. Threads take the next piece as long as there is one, and go on to the next phase when
 * all pieces are done, whoever did them: so nobody waits for a thread that the system has put aside, unless it holds a
 * piece. Waiting spins for a few microseconds and then lets others run, as another process may need the core.
 */
#ifndef SPECSERVE_TEAM_H
#define SPECSERVE_TEAM_H

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

#define SPINS 64

typedef struct {
    _Alignas(64) _Atomic int64_t taken;
    _Alignas(64) _Atomic int64_t done;
} phase;

static inline int64_t take(phase *at) { return atomic_fetch_add_explicit(&at->taken, 1, memory_order_relaxed); }

static inline void finish(phase *at) { atomic_fetch_add_explicit(&at->done, 1, memory_order_release); }

static inline void breathe(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline int await(phase *at, int64_t pieces) {
    for (int spins = 0; atomic_load_explicit(&at->done, memory_order_acquire) < pieces; spins++) {
        if (spins < SPINS) breathe();
        else sched_yield();
    }
    return 0;
}

/* The statement behind it, for each piece that this thread gets; then all pieces are done. No `break` in it. */
#define TOGETHER(at, piece, pieces)                                                            \
    for (int64_t piece = take(at); piece < (pieces) || await(at, pieces); finish(at), piece = take(at))

/* Likewise, and each thread takes `next` already, so that it can have brought what that one needs. It may be no piece. */
#define TOGETHER_KNOWING(at, piece, next, pieces)                                                                     \
    for (int64_t piece = take(at), next = take(at); piece < (pieces) || await(at, pieces);                            \
         finish(at), piece = next, next = take(at))

#endif
