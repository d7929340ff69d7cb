#include "products.h"

#include "team.h"

/* The lines of one input's weights, into the second cache: the first is small, and holds the rows. */
INLINE void bring(const char *from, int64_t bytes) {
#pragma GCC unroll 4
    for (int64_t at = 0; at < bytes; at += LINE) __builtin_prefetch(from + at, 0, 2);
}

INLINE void clear(int rows, lanes sums[STRIP][VECTORS]) {
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++) {
#pragma GCC unroll 4
        for (int part = 0; part < VECTORS; part++) sums[row][part] = (lanes){0};
    }
}

/* One input of all rows, times its weights. */
INLINE void add_input(int rows, const lanes weights[VECTORS], const float *strip, lanes sums[STRIP][VECTORS]) {
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++) {
#pragma GCC unroll 4
        for (int part = 0; part < VECTORS; part++) sums[row][part] += weights[part] * strip[row];
    }
}

INLINE void write_out(int rows, lanes sums[STRIP][VECTORS], float tile[STRIP][PANEL]) {
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++) {
#pragma GCC unroll 4
        for (int part = 0; part < VECTORS; part++) write(&tile[row][part * WIDTH], sums[row][part]);
    }
}

INLINE void multiply(int rows, const float *strip, const float *panel, int64_t inputs, float tile[STRIP][PANEL],
                     coming with) {
    lanes sums[STRIP][VECTORS];
    clear(rows, sums);
#pragma GCC unroll 2
    for (int64_t input = 0; input < inputs; input++, panel += PANEL, strip += rows, with.from += with.step) {
        bring(with.from, PANEL * (int64_t)sizeof(float));
        lanes weights[VECTORS];
#pragma GCC unroll 4
        for (int part = 0; part < VECTORS; part++) weights[part] = read(panel + part * WIDTH);
        add_input(rows, weights, strip, sums);
    }
    write_out(rows, sums, tile);
}

INLINE void multiply_int8(int rows, const float *strip, const int8_t *panel, int64_t inputs, float tile[STRIP][PANEL],
                          coming with) {
    lanes sums[STRIP][VECTORS];
    clear(rows, sums);
#pragma GCC unroll 4
    for (int64_t input = 0; input < inputs; input++, panel += PANEL, strip += rows, with.from += with.step) {
        bring(with.from, PANEL);
        lanes weights[VECTORS];
#pragma GCC unroll 4
        for (int part = 0; part < VECTORS; part++) weights[part] = read_int8(panel + part * WIDTH);
        add_input(rows, weights, strip, sums);
    }
    write_out(rows, sums, tile);
}

/* Functions of their own for each number of rows, as each has its own registers. */
#define MULTIPLY(rows)                                                                                               \
    static void multiply_##rows(const float *strip, const void *panel, int64_t inputs, float tile[STRIP][PANEL],     \
                                coming with) {                                                                       \
        multiply(rows, strip, panel, inputs, tile, with);                                                            \
    }                                                                                                                \
    static void multiply_int8_##rows(const float *strip, const void *panel, int64_t inputs, float tile[STRIP][PANEL], \
                                     coming with) {                                                                  \
        multiply_int8(rows, strip, panel, inputs, tile, with);                                                       \
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

typedef void multiplier(const float *, const void *, int64_t, float[STRIP][PANEL], coming);

#if STRIP > 6
#define FOR_EACH_HEIGHT(name)                                                                                        \
    {name##_1, name##_2, name##_3, name##_4, name##_5, name##_6, name##_7, name##_8, name##_9, name##_10, name##_11, name##_12}
#else
#define FOR_EACH_HEIGHT(name) {name##_1, name##_2, name##_3, name##_4, name##_5, name##_6}
#endif

static multiplier *const multipliers[STRIP] = FOR_EACH_HEIGHT(multiply);
static multiplier *const int8_multipliers[STRIP] = FOR_EACH_HEIGHT(multiply_int8);

void panel_product(const product *of, int64_t panel, const float *strip, int64_t rows, float tile[STRIP][PANEL],
                   coming with) {
    const int64_t first = panel * PANEL;
    const int64_t width = of->outputs - first < PANEL ? of->outputs - first : PANEL;
    if (!of->scales) {
        multipliers[rows - 1](strip, panel_at(of, panel), of->inputs, tile, with);
    } else {
        int8_multipliers[rows - 1](strip, panel_at(of, panel), of->inputs, tile, with);
        for (int64_t row = 0; row < rows; row++) {
            for (int64_t output = 0; output < width; output++) tile[row][output] *= of->scales[first + output];
        }
    }
    if (!of->bias) return;
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t output = 0; output < width; output++) tile[row][output] += of->bias[first + output];
    }
}

int64_t specserve_panel(void) { return PANEL; }

/* Lay a weight [outputs, inputs] out in panels, of its own kind. */
#define PACK(name, kind)                                                                                             \
    void name(const kind *weight, int64_t outputs, int64_t inputs, kind *panels) {                                   \
        for (int64_t panel = 0; panel < panels_of(outputs); panel++) {                                               \
            for (int64_t lane = 0; lane < PANEL; lane++) {                                                           \
                const int64_t output = panel * PANEL + lane;                                                         \
                kind *to = panels + panel * PANEL * inputs + lane;                                                   \
                for (int64_t input = 0; input < inputs; input++, to += PANEL) {                                      \
                    *to = output < outputs ? weight[output * inputs + input] : 0;                                    \
                }                                                                                                    \
            }                                                                                                        \
        }                                                                                                            \
    }
PACK(specserve_pack, float)
PACK(specserve_pack_int8, int8_t)

static void store_tile(const product *of, int64_t panel, int64_t rows, float tile[STRIP][PANEL], float *to, int64_t apart) {
    const int64_t first = panel * PANEL;
    const int64_t width = of->outputs - first < PANEL ? of->outputs - first : PANEL;
    for (int64_t row = 0; row < rows; row++) memcpy(to + row * apart + first, tile[row], (size_t)width * sizeof(float));
}

/* One row into strips. */
static void lay(const float *row, int64_t inputs, float *to, int64_t apart) {
    for (int64_t input = 0; input < inputs; input++) to[input * apart] = row[input];
}

/* Which of the parts a panel is of, counted from all of them to its own, and the column where that part begins. Past the
 * end it is the last one, and so is the panel. */
static const product *part_of(const product *parts, int64_t count, int64_t *panel, int64_t *column) {
    int64_t part = 0;
    for (; part + 1 < count && *panel >= panels_of(parts[part].outputs); part++) {
        *panel -= panels_of(parts[part].outputs);
        *column += parts[part].outputs;
    }
    return parts + part;
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
        TOGETHER_KNOWING(phases + 1, piece, next, panels) {
            int64_t panel = piece, after = next, column = 0, unused = 0;
            const product *of = part_of(parts, part_count, &panel, &column);
            const product *next_of = part_of(parts, part_count, &after, &unused);
            float *to = results + column;
            float tile[STRIP][PANEL];
            for (int64_t strip = 0; strip < shape.strips; strip++) {
                const int64_t first = strip * shape.height;
                panel_product(of, panel, strips + first * inputs, rows_of(shape, strip), tile,
                              coming_with(of, panel, next_of, after, strip, shape.strips));
                store_tile(of, panel, rows_of(shape, strip), tile, to + first * apart, apart);
            }
        }
    }
}
