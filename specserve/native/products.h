/* Products of rows with packed weights.
 *
 * A weight [outputs, inputs] lies in panels of PANEL outputs: panel after panel, in it input after input, the PANEL
 * weights of each side by side; the last panel is filled up with zeros. Rows lie in strips of at most STRIP rows: in it
 * input after input, the rows' values side by side. A panel times a strip stays in registers. Each result adds up its
 * inputs in their order, so it has the same bits in any company.
 *
 * Panels of int8 lie the same way, a byte for each weight. What they add up to is multiplied by the output's scale, once.
 */
#ifndef SPECSERVE_PRODUCTS_H
#define SPECSERVE_PRODUCTS_H

#include "lanes.h"

#if WIDTH == 16
#define VECTORS 2
#define STRIP 12
#else
#define VECTORS (16 / WIDTH)
#define STRIP 6
#endif
#define PANEL (VECTORS * WIDTH)
#define FEW 4 /* strips */
#define AHEAD 4096 /* bytes: far enough for memory to bring them in time while many rows are multiplied */

/* panels are floats where scales is null, else int8. bias may be null. */
typedef struct {
    const void *panels;
    const float *scales;
    const float *bias;
    int64_t inputs;
    int64_t outputs;
} product;

/* How `count` rows are laid in strips: of one height, but for the last. */
typedef struct {
    int64_t count;
    int64_t height;
    int64_t strips;
} strip_shape;

static inline strip_shape strips_for(int64_t rows) {
    const int64_t fewest = (rows + STRIP - 1) / STRIP;
    const int64_t height = fewest ? (rows + fewest - 1) / fewest : 1;
    return (strip_shape){rows, height, (rows + height - 1) / height};
}

static inline int64_t rows_of(strip_shape shape, int64_t strip) {
    const int64_t left = shape.count - strip * shape.height;
    return left < shape.height ? left : shape.height;
}

/* Where a row's first value is, and how far apart its values are, in strips of that many inputs. */
static inline float *place(float *strips, strip_shape shape, int64_t inputs, int64_t row, int64_t *apart) {
    const int64_t strip = row / shape.height;
    *apart = rows_of(shape, strip);
    return strips + strip * shape.height * inputs + row % shape.height;
}

static inline int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

/* What is to come from memory while a panel is multiplied, `step` bytes with each input. */
typedef struct {
    const char *from;
    int64_t step;
} coming;

static inline int64_t input_bytes(const product *of) { return PANEL * (of->scales ? 1 : (int64_t)sizeof(float)); }

static inline const char *panel_at(const product *of, int64_t panel) {
    return (const char *)of->panels + panel * of->inputs * input_bytes(of);
}

/* While a panel is multiplied by one strip only, its own lines come, a little ahead. By the second strip it is there, and
 * memory would have nothing to do: so each of a few strips has its part of the panel come that this thread does next.
 * Beside many, what memory takes does not count. */
static inline coming coming_with(const product *of, int64_t panel, const product *next_of, int64_t next, int64_t strip,
                                 int64_t strips) {
    if (strips == 1 || strips > FEW) return (coming){panel_at(of, panel) + AHEAD, input_bytes(of)};
    if (next >= panels_of(next_of->outputs)) return (coming){panel_at(of, panel), 0};
    const int64_t step = input_bytes(next_of) / strips;
    return (coming){panel_at(next_of, next) + strip * step * next_of->inputs, step};
}

/* One panel's part of the results for one strip: tile[row][output], with the bias. */
void panel_product(const product *of, int64_t panel, const float *strip, int64_t rows, float tile[STRIP][PANEL],
                   coming with);

#endif
