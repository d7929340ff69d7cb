/* A whole forward of Llama and its nearest kin over flat rows, in one call: from token ids to logits.
 *
 * Every token's results are added up in an order of its own, whatever shares the call and however many threads there
 * are, so they are the same bits in any company. Structures are mirrored in models/_native_decoder.py.
 */
#include <math.h>

#include "attention.h"
#include "products.h"
#include "team.h"

#define SPAN 4 /* chunks of keys that are one piece of work, where tokens and heads are too few for all threads */
#define PIECES_PER_THREAD 8
#define PHASES_OF_LAYER 9
#define OTHER_PHASES 6 /* two begin, one narrows, three end */

/* Norms and biases may be null. window is 0 where a layer sees everything. */
typedef struct {
    product query, key, value, output, gate, up, down;
    const float *before, *between, *query_norm, *key_norm;
    float *keys, *values;
    int64_t window;
} layer;

/* entry: what makes one state of a token's embedding and a given state; its panels are null where only tokens are read.
 * beside: the norm of given states that the only layer reads beside the embeddings, null where none does so; its sums
 * then go on from the given states, normed first or not.
 * head_ids: which logits the head's outputs are, null for all in order. ids: embeddings that there are; blocks: of pages. */
typedef struct {
    int64_t layers, width, heads, kv_heads, dim, inner, vocabulary, block_tokens, normed_first, ids, blocks;
    float epsilon, scaling, rope_scaling, unused;
    const float *embedding, *frequencies, *norm, *beside;
    const int64_t *head_ids;
    const layer *each;
    product entry, head;
} decoder;

/* One forward. rows have offsets [rows + 1] into the tokens, tables [rows, widest] and origins [rows]; standing [tokens]
 * is where a token counts as standing, straight [tokens] before which position it sees everything, paths
 * [path_ends[token − 1], path_ends[token]) what else it sees (null without trees).
 * Behind the last layer's keys and values the `lasting` tokens of `going` only go on, rising; they hold the chosen ones.
 * What comes out, null where unwanted: logits [wanted, vocabulary]; entering [tokens, shown · width], the states before
 * the `shown` layers shown_layers; last [tokens, width], normed, of those that go on; told [wanted, width], not normed. */
typedef struct {
    int64_t count, rows, wanted, lasting, widest, shown, threads;
    const int64_t *tokens, *positions, *standing, *straight, *offsets, *origins, *chosen, *going, *path_ends;
    const int32_t *tables, *paths;
    const int64_t *shown_layers;
    const float *given;
    float *logits, *entering, *last, *told;
} step;

/* Where intermediate results of a step are. places: where a token is among those that go on behind the last layer's keys
 * and values, −1 for one that does not; null where all do. */
typedef struct {
    strip_shape shape, head_shape;
    phase *phases;
    int64_t *rows;
    int64_t *places;
    float *angles, *hidden, *heads, *input, *mixed, *inner, *found, *head_input, *going_hidden, *going_mixed;
    int64_t found_room, spans;
} room;

INLINE int64_t widest_input(const decoder *model) {
    return model->entry.panels || model->beside ? 2 * model->width : model->width;
}

INLINE int64_t heads_width(const decoder *model) { return (model->heads + 2 * model->kv_heads) * model->dim; }

/* Pieces of attention may be spans of keys where this many tokens or fewer share a step. */
INLINE int64_t few_tokens(const decoder *model, const step *now) {
    const int64_t pieces = PIECES_PER_THREAD * now->threads;
    return (pieces + model->kv_heads - 1) / model->kv_heads;
}

/* Whether some tokens end with the last layer's keys and values. */
INLINE int narrows(const decoder *model, const step *now) { return model->layers && now->lasting < now->count; }

INLINE void *part_of(char **at, int64_t bytes) {
    char *part = *at;
    *at += (bytes + 63) / 64 * 64;
    return part;
}

INLINE int64_t phases_of(const decoder *model) { return PHASES_OF_LAYER * model->layers + OTHER_PHASES; }

/* Lay the intermediate results out from `at` on; returns how many bytes they take. */
static int64_t furnish(const decoder *model, const step *now, char *at, room *in) {
    char *const start = at;
    const int64_t count = now->count, size = (int64_t)sizeof(float);
    int64_t longest = 0;
    for (int64_t token = 0; token < count; token++) {
        longest = now->positions[token] >= longest ? now->positions[token] + 1 : longest;
    }
    in->shape = strips_for(count);
    in->head_shape = strips_for(now->wanted);
    in->spans = count <= few_tokens(model, now) ? (chunks_of(longest) + SPAN - 1) / SPAN : 1;
    in->found_room = in->spans > 1 ? in->spans * SPAN : 1;
    const int64_t group = model->heads / model->kv_heads * found_size(model->dim);
    in->phases = part_of(&at, phases_of(model) * (int64_t)sizeof(phase));
    in->rows = part_of(&at, count * (int64_t)sizeof(int64_t));
    in->angles = part_of(&at, count * model->dim * size);
    in->hidden = part_of(&at, count * model->width * size);
    in->heads = part_of(&at, count * heads_width(model) * size);
    in->input = part_of(&at, count * widest_input(model) * size);
    in->mixed = part_of(&at, count * model->heads * model->dim * size);
    in->inner = part_of(&at, count * model->inner * size);
    in->head_input = part_of(&at, now->wanted * model->width * size);
    const int64_t going = narrows(model, now) ? now->lasting : 0;
    in->going_hidden = part_of(&at, going * model->width * size);
    in->going_mixed = part_of(&at, going * model->heads * model->dim * size);
    in->places = narrows(model, now) ? part_of(&at, count * (int64_t)sizeof(int64_t)) : 0;
    in->found = part_of(&at, in->spans > 1 ? count * model->kv_heads * in->found_room * group * size : 0);
    return at - start;
}

/* row times its norm's weight, over the root of its mean square, into strips. */
static void norm_into(const float *row, const float *weight, int64_t width, float epsilon, float *to, int64_t apart) {
    if (!weight) {
        for (int64_t i = 0; i < width; i++) to[i * apart] = row[i];
        return;
    }
    lanes squares = {0};
    int64_t at = 0;
    for (; at + WIDTH <= width; at += WIDTH) squares += read(row + at) * read(row + at);
    float total = sum_of(squares);
    for (; at < width; at++) total += row[at] * row[at];
    const float factor = 1.0f / sqrtf(total / (float)width + epsilon);
    for (int64_t i = 0; i < width; i++) to[i * apart] = row[i] * factor * weight[i];
}

static void norm_row(const room *in, int64_t row, const float *weight, int64_t width, float epsilon) {
    int64_t apart;
    float *to = place(in->input, in->shape, width, row, &apart);
    norm_into(in->hidden + row * width, weight, width, epsilon, to, apart);
}

/* A strip's rows are side by side in its lines of memory, so one thread writes them all: two would take each line from
 * the other again and again. */
#define OF_STRIP(token, shape, strip)                                                                                \
    for (int64_t token = (strip) * (shape).height, end_of_##token = token + rows_of(shape, strip); token < end_of_##token; token++)

INLINE int64_t width_of(const product *of, int64_t panel) {
    const int64_t left = of->outputs - panel * PANEL;
    return left < PANEL ? left : PANEL;
}

/* A panel of one of several products. */
typedef struct {
    const product *of;
    int64_t panel;
} work;

/* One panel's outputs of all rows: put into, or added to, rows of results that lie `apart`. */
static void put_panel(const product *of, int64_t panel, work next, const float *strips, strip_shape shape, float *to,
                      int64_t apart) {
    float tile[STRIP][PANEL];
    const int64_t width = width_of(of, panel);
    to += panel * PANEL;
    for (int64_t strip = 0; strip < shape.strips; strip++) {
        const int64_t rows = rows_of(shape, strip);
        panel_product(of, panel, strips + strip * shape.height * of->inputs, rows, tile,
                      coming_with(of, panel, next.of, next.panel, strip, shape.strips));
        for (int64_t row = 0; row < rows; row++, to += apart) memcpy(to, tile[row], (size_t)width * sizeof(float));
    }
}

static void add_panel(const product *of, int64_t panel, int64_t next, const float *strips, strip_shape shape, float *to,
                      int64_t apart) {
    float tile[STRIP][PANEL];
    const int64_t width = width_of(of, panel);
    to += panel * PANEL;
    for (int64_t strip = 0; strip < shape.strips; strip++) {
        const int64_t rows = rows_of(shape, strip);
        panel_product(of, panel, strips + strip * shape.height * of->inputs, rows, tile,
                      coming_with(of, panel, of, next, strip, shape.strips));
        for (int64_t row = 0; row < rows; row++, to += apart) {
            for (int64_t i = 0; i < width; i++) to[i] += tile[row][i];
        }
    }
}

/* Gate and up of one panel: gate · sigmoid(gate) · up, into strips. */
static void gate_panel(const decoder *model, const layer *at, int64_t panel, int64_t next, const room *in) {
    float gate[STRIP][PANEL], up[STRIP][PANEL];
    const int64_t width = width_of(&at->gate, panel), strips = in->shape.strips;
    for (int64_t strip = 0; strip < strips; strip++) {
        const int64_t rows = rows_of(in->shape, strip), first = strip * in->shape.height;
        panel_product(&at->gate, panel, in->input + first * model->width, rows, gate,
                      coming_with(&at->gate, panel, &at->gate, next, strip, strips));
        panel_product(&at->up, panel, in->input + first * model->width, rows, up,
                      coming_with(&at->up, panel, &at->up, next, strip, strips));
        float *to = in->inner + first * model->inner + panel * PANEL * rows;
        for (int64_t row = 0; row < rows; row++) {
            for (int part = 0; part < VECTORS; part++) {
                const lanes value = read(&gate[row][part * WIDTH]);
                write(&up[row][part * WIDTH], value / (1.0f + exponential(-value)) * read(&up[row][part * WIDTH]));
            }
            for (int64_t i = 0; i < width; i++) to[i * rows + row] = up[row][i];
        }
    }
}

/* A token's rotary factors: cosines, then sines, of half a head each (Su et al. 2021). */
static void turn_angles(const decoder *model, int64_t standing, float *angles) {
    const int64_t half = model->dim / 2;
    for (int64_t i = 0; i < half; i++) {
        const float angle = (float)standing * model->frequencies[i];
        angles[i] = cosf(angle) * model->rope_scaling;
        angles[half + i] = sinf(angle) * model->rope_scaling;
    }
}

static void turn(const float *head, const float *angles, int64_t dim, float *to) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        const float front = head[i], back = head[half + i];
        to[i] = front * angles[i] - back * angles[half + i];
        to[half + i] = back * angles[i] + front * angles[half + i];
    }
}

/* A token's embedding and its given state, both normed, one behind the other. */
static void join_beside(const decoder *model, const layer *at, const step *now, const room *in, int64_t token) {
    const int64_t width = model->width;
    int64_t apart;
    float *to = place(in->input, in->shape, 2 * width, token, &apart);
    norm_into(model->embedding + now->tokens[token] * width, at->before, width, model->epsilon, to, apart);
    norm_into(now->given + token * width, model->beside, width, model->epsilon, to + width * apart, apart);
}

static void begin_token(const decoder *model, const step *now, const room *in, int64_t token) {
    const float *embedded = model->embedding + now->tokens[token] * model->width;
    turn_angles(model, now->standing[token], in->angles + token * model->dim);
    if (model->beside) {
        const float *weight = model->normed_first ? model->beside : 0;
        norm_into(now->given + token * model->width, weight, model->width, model->epsilon, in->hidden + token * model->width, 1);
        return;
    }
    if (!model->entry.panels) {
        memcpy(in->hidden + token * model->width, embedded, (size_t)model->width * sizeof(float));
        return;
    }
    int64_t apart;
    float *to = place(in->input, in->shape, 2 * model->width, token, &apart);
    const float *given = now->given + token * model->width;
    for (int64_t i = 0; i < model->width; i++) {
        to[i * apart] = embedded[i];
        to[(model->width + i) * apart] = given[i];
    }
}

static const product *piece_of(const layer *at, int64_t *panel, int64_t *column) {
    const product *each[] = {&at->query, &at->key, &at->value};
    int which = 0;
    *column = 0;
    while (*panel >= panels_of(each[which]->outputs)) {
        *panel -= panels_of(each[which]->outputs);
        *column += each[which]->outputs;
        which++;
    }
    return each[which];
}

/* Norm and turn a token's queries in place, its keys into the pages, and its values there too. */
static void keep_token(const decoder *model, const layer *at, const step *now, const room *in, int64_t token) {
    const int64_t dim = model->dim, kv = model->kv_heads, row = in->rows[token], position = now->positions[token];
    const int32_t *table = now->tables + row * now->widest;
    const int64_t slot = table[position / model->block_tokens] * model->block_tokens + position % model->block_tokens;
    const float *angles = in->angles + token * dim;
    float *heads = in->heads + token * heads_width(model);
    for (int64_t head = 0; head < model->heads + kv; head++, heads += dim) {
        const int is_key = head >= model->heads;
        const float *weight = is_key ? at->key_norm : at->query_norm;
        if (weight) norm_into(heads, weight, dim, model->epsilon, heads, 1);
        turn(heads, angles, dim, is_key ? at->keys + (slot * kv + head - model->heads) * dim : heads);
    }
    memcpy(at->values + slot * kv * dim, heads, (size_t)(kv * dim) * sizeof(float));
}

static sight sight_of(const decoder *model, const layer *at, const step *now, const room *in, int64_t token) {
    const int64_t row = in->rows[token], first = token && now->path_ends ? now->path_ends[token - 1] : 0;
    const int64_t on_path = now->path_ends ? now->path_ends[token] - first : 0;
    const int64_t all = now->straight[token] - now->origins[row] + on_path;
    const int64_t skipped = at->window && all > at->window ? all - at->window : 0;
    return (sight){
        .table = now->tables + row * now->widest,
        .path = now->path_ends ? now->paths + first : 0,
        .block_tokens = model->block_tokens,
        .origin = now->origins[row],
        .straight = now->straight[token],
        .skipped = skipped,
        .count = all - skipped,
    };
}

/* What the heads of one key head found, divided by their weights, into strips. */
static void put_found(const decoder *model, const room *in, int64_t token, int64_t head, const float *found) {
    const int64_t group = model->heads / model->kv_heads, dim = model->dim;
    int64_t apart;
    float *to = place(in->mixed, in->shape, model->heads * dim, token, &apart);
    to += head * group * dim * apart;
    for (int64_t each = 0; each < group; each++, found += found_size(dim)) {
        const float share = 1.0f / found[1];
        for (int64_t i = 0; i < dim; i++, to += apart) *to = found[2 + i] * share;
    }
}

static void attend_token(const decoder *model, const layer *at, const step *now, const room *in, int64_t token, int64_t head) {
    if (in->places && in->places[token] < 0) return;
    const int64_t group = model->heads / model->kv_heads, dim = model->dim, size = found_size(dim);
    const sight seen = sight_of(model, at, now, in, token);
    const pages of = {at->keys, at->values, model->kv_heads, dim};
    const float *query = in->heads + token * heads_width(model) + head * group * dim;
    float found[group * size], other[group * size];
    for (int64_t each = 0; each < group; each++) found_nothing(found + each * size, dim);
    for (int64_t chunk = 0; chunk < chunks_of(seen.count); chunk++) {
        attend_chunk(&of, &seen, chunk, head, query, group, model->scaling, other);
        for (int64_t each = 0; each < group; each++) join_found(found + each * size, other + each * size, dim);
    }
    put_found(model, in, token, head, found);
}

INLINE float *found_in(const decoder *model, const room *in, int64_t token, int64_t head, int64_t chunk) {
    const int64_t size = model->heads / model->kv_heads * found_size(model->dim);
    return in->found + ((token * model->kv_heads + head) * in->found_room + chunk) * size;
}

/* As attend_token, one span of chunks only, which are joined later. */
static void attend_span(const decoder *model, const layer *at, const step *now, const room *in, int64_t piece) {
    const int64_t group = model->heads / model->kv_heads, dim = model->dim;
    const int64_t span = piece % in->spans, head = piece / in->spans % model->kv_heads;
    const int64_t token = piece / in->spans / model->kv_heads;
    if (in->places && in->places[token] < 0) return;
    const sight seen = sight_of(model, at, now, in, token);
    const pages of = {at->keys, at->values, model->kv_heads, dim};
    const float *query = in->heads + token * heads_width(model) + head * group * dim;
    for (int64_t chunk = span * SPAN; chunk < (span + 1) * SPAN && chunk < chunks_of(seen.count); chunk++) {
        attend_chunk(&of, &seen, chunk, head, query, group, model->scaling, found_in(model, in, token, head, chunk));
    }
}

static void join_spans(const decoder *model, const layer *at, const step *now, const room *in, int64_t piece) {
    const int64_t group = model->heads / model->kv_heads, dim = model->dim, size = found_size(dim);
    const int64_t head = piece % model->kv_heads, token = piece / model->kv_heads;
    if (in->places && in->places[token] < 0) return;
    const sight seen = sight_of(model, at, now, in, token);
    float found[group * size];
    for (int64_t each = 0; each < group; each++) {
        found_nothing(found + each * size, dim);
        for (int64_t chunk = 0; chunk < chunks_of(seen.count); chunk++) {
            join_found(found + each * size, found_in(model, in, token, head, chunk) + each * size, dim);
        }
    }
    put_found(model, in, token, head, found);
}

static void attend(const decoder *model, const layer *at, const step *now, const room *in, phase *phases) {
    const int64_t pieces = now->count * model->kv_heads;
    if (in->spans > 1) {
        TOGETHER(phases, piece, pieces * in->spans) attend_span(model, at, now, in, piece);
        TOGETHER(phases + 1, piece, pieces) join_spans(model, at, now, in, piece);
        return;
    }
    /* Tokens of one key head one after the other, as they read the same keys. */
    if (in->shape.strips * model->kv_heads < PIECES_PER_THREAD * now->threads) {
        TOGETHER(phases, piece, pieces) attend_token(model, at, now, in, piece % now->count, piece / now->count);
        return;
    }
    TOGETHER(phases, piece, in->shape.strips * model->kv_heads) {
        OF_STRIP(token, in->shape, piece % in->shape.strips) {
            attend_token(model, at, now, in, token, piece / in->shape.strips);
        }
    }
}

static void show_entering(const decoder *model, const step *now, const room *in, int64_t index, int64_t token) {
    for (int64_t shown = 0; shown < now->shown; shown++) {
        if (now->shown_layers[shown] != index) continue;
        float *to = now->entering + (token * now->shown + shown) * model->width;
        memcpy(to, in->hidden + token * model->width, (size_t)model->width * sizeof(float));
    }
}

static void look(const decoder *model, int64_t index, const step *now, const room *in, phase *phases) {
    const layer *at = model->each + index;
    const int64_t width = model->width;
    const int64_t panels = panels_of(at->query.outputs) + panels_of(at->key.outputs) + panels_of(at->value.outputs);
    TOGETHER(phases, strip, in->shape.strips) {
        OF_STRIP(token, in->shape, strip) {
            if (model->beside) join_beside(model, at, now, in, token);
            else norm_row(in, token, at->before, width, model->epsilon);
            show_entering(model, now, in, index, token);
        }
    }
    TOGETHER_KNOWING(phases + 1, piece, next, panels) {
        int64_t panel = piece, after = next < panels ? next : 0, column, unused;
        const product *of = piece_of(at, &panel, &column), *next_of = piece_of(at, &after, &unused);
        const work coming = {next_of, next < panels ? after : INT64_MAX};
        put_panel(of, panel, coming, in->input, in->shape, in->heads + column, heads_width(model));
    }
    TOGETHER(phases + 2, token, now->count) keep_token(model, at, now, in, token);
    attend(model, at, now, in, phases + 3);
}

/* What comes of what attention found. */
static void think(const decoder *model, int64_t index, const room *in, phase *phases) {
    const layer *at = model->each + index;
    const int64_t width = model->width;
    TOGETHER_KNOWING(phases + 5, panel, next, panels_of(width)) {
        add_panel(&at->output, panel, next, in->mixed, in->shape, in->hidden, width);
    }
    TOGETHER(phases + 6, strip, in->shape.strips) {
        OF_STRIP(token, in->shape, strip) norm_row(in, token, at->between, width, model->epsilon);
    }
    TOGETHER_KNOWING(phases + 7, panel, next, panels_of(model->inner)) gate_panel(model, at, panel, next, in);
    TOGETHER_KNOWING(phases + 8, panel, next, panels_of(width)) {
        add_panel(&at->down, panel, next, in->inner, in->shape, in->hidden, width);
    }
}

/* Of hidden states and of what attention found, those of the tokens that go on, into `going`, where they are all. */
static void narrow(const decoder *model, const step *now, const room *in, const room *going, phase *phases) {
    const int64_t width = model->width, mixed = model->heads * model->dim;
    TOGETHER(phases, strip, going->shape.strips) {
        OF_STRIP(index, going->shape, strip) {
            const int64_t token = now->going[index];
            memcpy(going->hidden + index * width, in->hidden + token * width, (size_t)width * sizeof(float));
            int64_t from_apart, to_apart;
            const float *from = place(in->mixed, in->shape, mixed, token, &from_apart);
            float *to = place(going->mixed, going->shape, mixed, index, &to_apart);
            for (int64_t i = 0; i < mixed; i++) to[i * to_apart] = from[i * from_apart];
        }
    }
}

/* All layers. States are behind them where they were, or in `going` where the step narrows. */
static void run_layers(const decoder *model, const step *now, const room *in, const room *going, phase *phases) {
    const int64_t last = model->layers - 1;
    if (last < 0) return;
    for (int64_t index = 0; index < last; index++, phases += PHASES_OF_LAYER) {
        look(model, index, now, in, phases);
        think(model, index, in, phases);
    }
    if (!narrows(model, now)) {
        look(model, last, now, in, phases);
        think(model, last, in, phases);
        return;
    }
    room asking = *in;
    asking.places = going->places;
    look(model, last, now, &asking, phases);
    narrow(model, now, in, going, phases + PHASES_OF_LAYER);
    if (now->lasting) think(model, last, going, phases);
}

static void begin(const decoder *model, const step *now, const room *in, phase *phases) {
    TOGETHER(phases, strip, in->shape.strips) {
        OF_STRIP(token, in->shape, strip) begin_token(model, now, in, token);
    }
    if (!model->entry.panels) return;
    TOGETHER_KNOWING(phases + 1, panel, next, panels_of(model->width)) {
        put_panel(&model->entry, panel, (work){&model->entry, next}, in->input, in->shape, in->hidden, model->width);
    }
}

/* What is behind all layers of a token that goes on. */
INLINE const float *state_of(const decoder *model, const room *going, int64_t token) {
    return going->hidden + (going->places ? going->places[token] : token) * model->width;
}

static void ready_for_head(const decoder *model, const step *now, const room *in, int64_t index) {
    const float *state = state_of(model, in, now->chosen[index]);
    int64_t apart;
    float *to = place(in->head_input, in->head_shape, model->width, index, &apart);
    norm_into(state, model->norm, model->width, model->epsilon, to, apart);
    if (now->told) memcpy(now->told + index * model->width, state, (size_t)model->width * sizeof(float));
    if (!model->head_ids) return;
    for (int64_t id = 0; id < model->vocabulary; id++) now->logits[index * model->vocabulary + id] = -INFINITY;
}

/* A panel of a head that speaks of some ids only. */
static void scatter_panel(const decoder *model, const step *now, const room *in, int64_t panel, int64_t next) {
    float tile[STRIP][PANEL];
    const int64_t strips = in->head_shape.strips;
    const int64_t *ids = model->head_ids + panel * PANEL;
    float *to = now->logits;
    for (int64_t strip = 0; strip < strips; strip++) {
        const int64_t rows = rows_of(in->head_shape, strip);
        panel_product(&model->head, panel, in->head_input + strip * in->head_shape.height * model->width, rows, tile,
                      coming_with(&model->head, panel, &model->head, next, strip, strips));
        for (int64_t row = 0; row < rows; row++, to += model->vocabulary) {
            for (int64_t i = 0; i < width_of(&model->head, panel); i++) to[ids[i]] = tile[row][i];
        }
    }
}

static void end(const decoder *model, const step *now, const room *in, phase *phases) {
    if (now->last) {
        TOGETHER(phases, token, now->count) {
            if (in->places && in->places[token] < 0) continue;
            norm_into(state_of(model, in, token), model->norm, model->width, model->epsilon, now->last + token * model->width, 1);
        }
    }
    TOGETHER(phases + 1, index, now->wanted) ready_for_head(model, now, in, index);
    TOGETHER_KNOWING(phases + 2, panel, next, now->wanted ? panels_of(model->head.outputs) : 0) {
        if (model->head_ids) scatter_panel(model, now, in, panel, next);
        else put_panel(&model->head, panel, (work){&model->head, next}, in->head_input, in->head_shape, now->logits, model->vocabulary);
    }
}

static int within(const int64_t *numbers, int64_t count, int64_t end) {
    int64_t outside = 0;
    for (int64_t i = 0; i < count; i++) outside |= numbers[i] < 0 || numbers[i] >= end;
    return !outside;
}

/* Whether a row's positions follow each other, in blocks that there are. */
static int is_row(const decoder *model, const step *now, int64_t row) {
    const int64_t begin = now->offsets[row], end = now->offsets[row + 1];
    if (begin < 0 || begin >= end || end > now->count || now->origins[row] < 0) return 0;
    const int64_t first = now->positions[begin], last = first + end - begin - 1;
    for (int64_t token = begin; token < end; token++) {
        if (now->positions[token] - first != token - begin) return 0;
    }
    const int32_t *table = now->tables + row * now->widest;
    for (int64_t block = 0; block <= last / model->block_tokens; block++) {
        if (table[block] < 0 || table[block] >= model->blocks) return 0;
    }
    return 1;
}

/* Whether the tokens that go on rise, and hold all that logits are wanted of. */
static int are_going(const step *now) {
    if (!within(now->going, now->lasting, now->count)) return 0;
    int64_t at = 0;
    for (int64_t i = 1; i < now->lasting; i++) {
        if (now->going[i] <= now->going[i - 1]) return 0;
    }
    for (int64_t i = 0; i < now->wanted; i++) {
        while (at < now->lasting && now->going[at] < now->chosen[i]) at++;
        if (at == now->lasting || now->going[at] != now->chosen[i]) return 0;
    }
    return 1;
}

/* Whether all that a step names is there: it would read and write wherever it is told to. */
static int is_whole(const decoder *model, const step *now) {
    int whole = now->offsets[0] == 0 && now->offsets[now->rows] == now->count;
    whole &= within(now->tokens, now->count, model->ids) && within(now->chosen, now->wanted, now->count);
    whole &= !narrows(model, now) || are_going(now);
    whole &= within(now->positions, now->count, now->widest * model->block_tokens);
    for (int64_t row = 0; whole && row < now->rows; row++) whole = is_row(model, now, row);
    return whole;
}

/* Bytes of room that a step takes; -1 for one that cannot be made. */
int64_t specserve_step_room(const decoder *model, const step *now) {
    if (!is_whole(model, now)) return -1;
    room in;
    return furnish(model, now, 0, &in) + 64;
}

void specserve_step(const decoder *model, const step *now, char *scratch) {
    room in;
    furnish(model, now, (char *)(((uintptr_t)scratch + 63) / 64 * 64), &in);
    room going = in;
    if (in.places) {
        going.shape = strips_for(now->lasting), going.hidden = in.going_hidden, going.mixed = in.going_mixed;
        for (int64_t token = 0; token < now->count; token++) in.places[token] = -1;
        for (int64_t index = 0; index < now->lasting; index++) in.places[now->going[index]] = index;
        in.places = 0;
    }
    memset(in.phases, 0, (size_t)phases_of(model) * sizeof(phase));
    for (int64_t row = 0; row < now->rows; row++) {
        for (int64_t token = now->offsets[row]; token < now->offsets[row + 1]; token++) in.rows[token] = row;
    }
#pragma omp parallel num_threads((int)now->threads)
    {
        phase *phases = in.phases;
        begin(model, now, &in, phases);
        phases += 2;
        run_layers(model, now, &in, &going, phases);
        phases += PHASES_OF_LAYER * model->layers + 1;
        end(model, now, &going, phases);
    }
}
