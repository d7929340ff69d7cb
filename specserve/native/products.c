#include "products.h"

#include "team.h"

#define AHEAD (16 * PANEL) /* floats: far enough for memory to bring them in time */

INLINE void multiply(int rows, const float *strip, const float *panel, int64_t inputs, float tile[STRIP][PANEL]) {
    lanes sums[STRIP][VECTORS];
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++) {
#pragma GCC unroll 4
        for (int part = 0; part < VECTORS; part++) sums[row][part] = (lanes){0};
    }
#pragma GCC unroll 2
    for (int64_t input = 0; input < inputs; input++, panel += PANEL, strip += rows) {
        __builtin_prefetch(panel + AHEAD);
        lanes weights[VECTORS];
#pragma GCC unroll 4
        for (int part = 0; part < VECTORS; part++) weights[part] = read(panel + part * WIDTH);
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++) {
#pragma GCC unroll 4
            for (int part = 0; part < VECTORS; part++) sums[row][part] += weights[part] * strip[row];
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++) {
#pragma GCC unroll 4
        for (int part = 0; part < VECTORS; part++) write(&tile[row][part * WIDTH], sums[row][part]);
    }
}

/* A function of its own for each number of rows, as each has its own registers. */
#define MULTIPLY(rows)                                                                                               \
    static void multiply_##rows(const float *strip, const float *panel, int64_t inputs, float tile[STRIP][PANEL]) { \
        multiply(rows, strip, panel, inputs, tile);                                                                  \
    }
MULTIPLY(1)
MULTIPLY(2)
MULTIPLY(3)
MULTIPLY(4)
MULTIPLY(5)
MULTIPLY(6)
#if STRIP > 6
MULTIPLY(7)
MULTIPLY(8)
MULTIPLY(9)
MULTIPLY(10)
MULTIPLY(11)
MULTIPLY(12)
#endif

typedef void multiplier(const float *, const float *, int64_t, float[STRIP][PANEL]);

static multiplier *const multipliers[STRIP] = {
    multiply_1, multiply_2,  multiply_3,  multiply_4, multiply_5, multiply_6,
#if STRIP > 6
    multiply_7, multiply_8, multiply_9, multiply_10, multiply_11, multiply_12,
#endif
};

void panel_product(const product *of, int64_t panel, const float *strip, int64_t rows, float tile[STRIP][PANEL]) {
    multipliers[rows - 1](strip, of->panels + panel * PANEL * of->inputs, of->inputs, tile);
    if (!of->bias) return;
    const int64_t first = panel * PANEL;
    const int64_t width = of->outputs - first < PANEL ? of->outputs - first : PANEL;
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t output = 0; output < width; output++) tile[row][output] += of->bias[first + output];
    }
}

int64_t specserve_panel(void) { return PANEL; }

/* Lay weight [outputs, inputs] out in panels. */
void specserve_pack(const float *weight, int64_t outputs, int64_t inputs, float *panels) {
    for (int64_t panel = 0; panel < panels_of(outputs); panel++) {
        for (int64_t lane = 0; lane < PANEL; lane++) {
            const int64_t output = panel * PANEL + lane;
            float *to = panels + panel * PANEL * inputs + lane;
            for (int64_t input = 0; input < inputs; input++, to += PANEL) {
                *to = output < outputs ? weight[output * inputs + input] : 0.0f;
            }
        }
    }
}

static void store_tile(const product *of, int64_t panel, int64_t rows, float tile[STRIP][PANEL], float *to, int64_t apart) {
    const int64_t first = panel * PANEL;
    const int64_t width = of->outputs - first < PANEL ? of->outputs - first : PANEL;
    for (int64_t row = 0; row < rows; row++) memcpy(to + row * apart + first, tile[row], (size_t)width * sizeof(float));
}

/* One row into strips. */
static void lay(const float *row, int64_t inputs, float *to, int64_t apart) {
    for (int64_t input = 0; input < inputs; input++) to[input * apart] = row[input];
}

/* The products of rows [count, inputs] with `parts` weights, side by side in results [count, apart].
 * room: count · inputs floats, and 320 bytes for two phases. */
void specserve_products(const product *parts, int64_t part_count, const float *rows, int64_t count, float *results,
                        int64_t apart, char *room, int threads) {
    const strip_shape shape = strips_for(count);
    const int64_t inputs = parts[0].inputs;
    phase *const phases = (phase *)(((uintptr_t)room + 63) / 64 * 64);
    float *const strips = (float *)(phases + 2);
    memset(phases, 0, 2 * sizeof(phase));
    int64_t panels = 0;
    for (int64_t part = 0; part < part_count; part++) panels += panels_of(parts[part].outputs);
#pragma omp parallel num_threads(threads)
    {
        TOGETHER(phases, strip, shape.strips) {
            for (int64_t row = strip * shape.height; row < strip * shape.height + rows_of(shape, strip); row++) {
                int64_t between;
                float *to = place(strips, shape, inputs, row, &between);
                lay(rows + row * inputs, inputs, to, between);
            }
        }
        TOGETHER(phases + 1, piece, panels) {
            const product *of = parts;
            int64_t panel = piece;
            float *to = results;
            for (; panel >= panels_of(of->outputs); of++) {
                panel -= panels_of(of->outputs);
                to += of->outputs;
            }
            float tile[STRIP][PANEL];
            for (int64_t strip = 0; strip < shape.strips; strip++) {
                const int64_t first = strip * shape.height;
                panel_product(of, panel, strips + first * inputs, rows_of(shape, strip), tile);
                store_tile(of, panel, rows_of(shape, strip), tile, to + first * apart, apart);
            }
        }
    }
}
