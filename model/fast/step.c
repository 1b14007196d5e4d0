/* Short step of a decoder on a CPU: the logits of up to a few dozen tokens under a plan.
 *
 * It has the order and the names of the readable blocks (model/llama.py, model/gemma2.py), and
 * reads the weights where torch keeps them. model/fast/cpu.py compiles it and fills its structures.
 * A task (threads.h) is done piece by piece on all threads; products are in products.h, the
 * rounding of weights to few bits in round.h. It knows nothing of plans, samples and files.
 *
 * The numbers of a row do not depend on the other rows of the step, by construction: each is the
 * same sums in the same order, of which each is computed by one thread. */

#include <stdlib.h>
#include "threads.h"
#include "products.h"
#include "round.h"

typedef struct {
    Matrix qkv[3], o, gate_up[2], down;
    const float *attention_norm, *attention_post_norm, *mlp_norm, *mlp_post_norm; /* [hidden] */
    const float *q_norm, *k_norm; /* [size] or NULL, as the norms after a sublayer */
    const float *cos, *sin;       /* [positions, size / 2] */
    long window;                  /* positions that a query attends to */
} Layer;

typedef struct {
    const Layer *layers;
    const char *embedding; /* [vocab, hidden] */
    const float *norm;     /* [hidden] */
    Matrix head;
    long num_layers, kind, hidden, heads, key_heads, size; /* kind of the cache; size of a head */
    long newest; /* positions that the plan shows beside the first SINKS; 0 if it shows all */
    float embedding_scale, eps, scale, soft_cap, final_soft_cap; /* soft caps: 0 if there is none */
    int32_t is_gelu;
} Model;

typedef struct {           /* rows of one text at positions that follow each other */
    const int64_t *tokens; /* [rows] */
    char *const *entries;  /* [layers, 2], keys and values: [key heads, positions, size] */
    long rows, start, head_bytes; /* first position; bytes from one head's entries to the next */
} Text;

/* Step: the arguments of its tasks, and its memory, which is kept for the next step. */

typedef struct { /* up to QUERIES query heads of a text, which read its keys and values together */
    const Text *text;
    long row, position, rows; /* its first row of the step, and that row's position */
} Span;

typedef struct {
    const Model *model;
    const Layer *layer;
    Span *spans;
    long num_spans, rows, chunks, least_chunks; /* of positions; of a claim */
    long sinks;                                 /* the chunk of the first positions, or -1 */
    const Matrix *matrices; /* of project, and its inputs and products */
    const float *x;
    char *inputs;
    float *products;
    long x_stride, neurons;
    float *qkv;      /* [rows, heads + 2 * key heads, size] */
    char *queries;   /* [key heads, rows, groups], rounded as keys meet them */
    float *parts;    /* [rows, heads, chunks, padded size + 2] */
    float *attended; /* [rows, heads, size] */
    float *gate_up;  /* [rows, 2 * size of the MLP] */
} Step;

enum { INPUTS, QKV, QUERIES, CHUNKS, ATTENDED, GATE_UP, X, NORMED, OUT, SPANS, ROOMS };

static void *room(int which, size_t bytes) {
    static struct {
        void *memory;
        size_t bytes;
    } rooms[ROOMS];
    if (rooms[which].bytes < bytes) {
        free(rooms[which].memory);
        rooms[which].bytes = (bytes + 63) / 64 * 64;
        rooms[which].memory = aligned_alloc(64, rooms[which].bytes);
        if (!rooms[which].memory)
            abort();
    }
    return rooms[which].memory;
}

enum { SHARE = 1 << 13, SHARE_BYTES = 1 << 16 }; /* numbers, and bytes of weights, of a claim */

static void round_row(void *argument, long row) {
    Step *s = argument;
    long kind = s->matrices->kind, columns = s->matrices->columns;
    char *out = s->inputs + row * input_bytes(kind, columns);
    round_inputs(kind, s->x + row * s->x_stride, columns, out);
}

INLINE long block_rows(const Matrix *matrix) { return matrix->kind < BF16 ? LANES : BLOCK; }

static void multiply_piece(void *argument, long piece) {
    Step *s = argument;
    const Matrix *m = s->matrices;
    float *out = s->products;
    for (long blocks; piece >= (blocks = (m->rows + block_rows(m) - 1) / block_rows(m)); m++) {
        piece -= blocks;
        out += m->rows;
    }
    long first = piece * block_rows(m), count = least(block_rows(m), m->rows - first);
    long bytes = row_bytes(m->kind, m->columns) * (m->kind < BF16 ? 1 : BLOCK);
    multiply(m->kind, m->weights + piece * bytes, count, s->inputs, s->rows, m->columns,
             out + first, s->neurons);
    for (long row = 0; m->bias && row < s->rows; row++)
        for (long i = first; i < first + count; i++)
            out[row * s->neurons + i] += m->bias[i];
}

/* Linear layers, count matrices, on the same inputs: [rows, x_stride] -> [rows, all neurons]. */
static void project(Step *s, const Matrix *matrices, int count, const float *x, long x_stride,
                    float *out) {
    long pieces = 0, kind = matrices->kind, columns = matrices->columns;
    s->neurons = 0;
    for (const Matrix *m = matrices; m < matrices + count; m++) {
        pieces += (m->rows + block_rows(m) - 1) / block_rows(m);
        s->neurons += m->rows;
    }
    s->matrices = matrices, s->x = x, s->x_stride = x_stride, s->products = out;
    s->inputs = room(INPUTS, s->rows * input_bytes(kind, columns));
    run(round_row, s, s->rows, SHARE / columns + 1);
    long bytes = row_bytes(kind, columns) * (kind < BF16 ? 1 : BLOCK);
    run(multiply_piece, s, pieces, SHARE_BYTES / bytes + 1);
}

/* RMSNorm (arXiv 1910.07467) of ``count`` numbers, scaled by weights. */
static void normalise(const float *x, const float *weight, long count, float eps, float *out) {
    float inverse = 1.0f / __builtin_sqrtf(sum_of(x, count, 1) / (float)count + eps);
    for (long i = 0; i < count; i++)
        out[i] = x[i] * inverse * weight[i];
}

/* Rotary embedding of a head [2 * half], in place: model.layers.rotate. */
static void rotate(float *head, const float *cos, const float *sin, long half) {
    for (long i = 0; i < half; i++) {
        float a = head[i], b = head[i + half];
        head[i] = a * cos[i] - b * sin[i];
        head[i + half] = b * cos[i] + a * sin[i];
    }
}

/* Attention, in chunks of positions. */

enum { CHUNK = 512, MOST_QUERIES = 24, SHARE_SCORES = 1 << 11, SINKS = 4 };
enum { MOST_ROWS = 64, MOST_PARTS = 1 << 22 }; /* rows of a prompt, and numbers, at a time */

/* Positions [range[0], range[1]) that a row at ``position`` reads of a chunk. Where the plan's
 * window hides some, the first ones are a chunk of their own. */
static void find_visible(const Step *s, long chunk, long position, long range[2]) {
    long oldest = most(0, position + 1 - s->layer->window), low = chunk * CHUNK;
    long newest = most(oldest, position + 1 - s->model->newest);
    if (!s->model->newest || newest <= SINKS) /* nothing is hidden */
        newest = oldest;
    if (chunk == s->sinks) {
        range[0] = oldest;
        range[1] = newest > oldest ? most(oldest, SINKS) : oldest;
    } else {
        range[1] = most(low, least(low + CHUNK, position + 1));
        range[0] = least(range[1], most(low, newest));
    }
}

/* Place of a row's rounded query. Those that read the same keys lie side by side. */
static char *query_of(const Step *s, long row, long head) {
    long groups = s->model->heads / s->model->key_heads;
    long place = (head / groups * s->rows + row) * groups + head % groups;
    return s->queries + place * input_bytes(s->model->kind, s->model->size);
}

/* Norms and rotary embeddings of a span's heads; its keys and values go into the cache. */
static void write_entries(void *argument, long piece) {
    Step *s = argument;
    const Model *model = s->model;
    const Span *span = &s->spans[piece];
    long size = model->size, half = size / 2, kind = model->kind;
    long heads = model->heads, key_heads = model->key_heads, all = heads + 2 * key_heads;
    for (long number = 0; number < span->rows * all; number++) {
        long row = span->row + number / all, head = number % all; /* of queries, keys, values */
        long position = span->position + number / all, of_key = head - heads;
        float *x = s->qkv + (row * all + head) * size;
        const float *norm = head < heads ? s->layer->q_norm : s->layer->k_norm;
        if (norm && of_key < key_heads)
            normalise(x, norm, size, model->eps, x);
        if (of_key < key_heads)
            rotate(x, s->layer->cos + position * half, s->layer->sin + position * half, half);
        if (head < heads) {
            round_inputs(kind, x, size, query_of(s, row, head));
            continue;
        }
        char *entry = span->text->entries[2 * (s->layer - model->layers) + of_key / key_heads];
        entry += of_key % key_heads * span->text->head_bytes + position * row_bytes(kind, size);
        for (long i = 0; i < size; i++)
            if (kind == F32)
                AT(float, entry + 4 * i) = x[i];
            else
                AT(uint16_t, entry + 2 * i) = narrow(x[i]);
    }
}

/* Exponentials of scaled scores less the largest, in place; their sum, and the largest. */
static void weigh(const Model *model, float *scores, long count, float sum[2]) {
    int32_t largest = -0x7F800001;
    for (long i = 0; i < count; i++)
        scores[i] *= model->scale;
    if (model->soft_cap)
        cap(scores, count, model->soft_cap);
    for (long i = 0; i < count; i++) { /* as integers of the same order: NaN is the largest */
        int32_t bits = bits_of(scores[i]), ordered = bits ^ (bits >> 31 & 0x7FFFFFFF);
        largest = ordered > largest ? ordered : largest;
    }
    float highest = as_float(largest ^ (largest >> 31 & 0x7FFFFFFF));
    for (long i = 0; i < count; i++)
        scores[i] = exponential(scores[i] - highest);
    sum[1] = highest;
    sum[0] = sum_of(scores, count, 0);
}

/* Keys of 2 * WIDTH positions, four bytes of each at a time, with a position in each lane; zeros
 * from ``count`` on. */
static void turn_keys(const char *keys, long count, long words, Ints (*out)[2]) {
    for (int half = 0; half < 2; half++, keys += 4 * words * WIDTH, count -= WIDTH)
        for (long word = 0; word < words; word += WIDTH) {
            Ints rows[WIDTH];
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; i++)
                rows[i] = (Ints)numbers_at(F32, keys + 4 * (i * words + word),
                                           i < count ? words - word : 0);
            transpose(rows);
            for (int i = 0; i < least(WIDTH, words - word); i++)
                out[word + i][half] = rows[i];
        }
}

/* Products of up to four rounded queries with these keys: [queries, stride], from ``out`` on. */
INLINE void score(long kind, int queries, Ints (*keys)[2], long words, const char *x, long x_bytes,
                  float *out, long stride) {
    Floats sums[4][2] = {0};
    for (long word = 0; word < words; word++)
#pragma GCC unroll 8
        for (int i = 0; i < 2 * queries; i++) {
            Ints two = keys[word][i % 2];
            const char *of = x + i / 2 * x_bytes + 4 * word;
            Floats *sum = &sums[i / 2][i % 2];
            if (kind == F32) {
                *sum = fused((Floats)two, all(AT(float, of)), *sum);
            } else if (HAS_PAIRS) {
                *sum = add_pairs(*sum, two, AT(int32_t, of) - (Ints){0});
            } else { /* even columns come before the odd ones, in groups of 32 */
                of += word / LANES * 4 * LANES;
                *sum = fused((Floats)(two << 16), all(AT(float, of)), *sum);
                *sum = fused((Floats)(two & (int32_t)0xFFFF0000), all(AT(float, of + 4 * LANES)), *sum);
            }
        }
#pragma GCC unroll 8
    for (int i = 0; i < 2 * queries; i++)
        AT(FloatsAt, out + i / 2 * stride + i % 2 * WIDTH) = sums[i / 2][i % 2];
}

/* Scores of positions [first, last) for all queries: [queries, CHUNK], from the first on. */
static void score_keys(const Model *model, long queries, const char *keys, long first, long last,
                       const char *x, float *scores) {
    long kind = model->kind, bytes = row_bytes(kind, model->size);
    long x_bytes = input_bytes(kind, model->size);
    Ints turned[bytes / 4][2];
    for (long key = first; key < last; key += 2 * WIDTH) {
        turn_keys(keys + key * bytes, last - key, bytes / 4, turned);
        for (long query = 0; query < queries; query += 4)
#pragma GCC unroll 4
            for (int n = 1; n <= 4; n++) {
                const char *of = x + query * x_bytes;
                float *out = scores + query * CHUNK + key - first;
                if (n == least(4, queries - query) && kind == BF16)
                    score(BF16, n, turned, bytes / 4, of, x_bytes, out, CHUNK);
                else if (n == least(4, queries - query))
                    score(F32, n, turned, bytes / 4, of, x_bytes, out, CHUNK);
            }
    }
}

/* Weights of values, from exponentials: bfloat16 where pairs of these numbers are multiplied. */
INLINE long weight_bytes(long kind) { return kind == BF16 && HAS_PAIRS ? 2 : 4; }

/* Columns of a head, filled to whole registers, and the place of a column among them. */
INLINE long padded(long size) { return (size + 2 * WIDTH - 1) / (2 * WIDTH) * (2 * WIDTH); }
INLINE long lane_of(long kind, long i) {
    long column = i % (2 * WIDTH);
    return weight_bytes(kind) == 2 ? i - column + column % 2 * WIDTH + column / 2 : i;
}

/* Add two weighted values, of which each is 2 * WIDTH columns, to sums of up to four queries. Where
 * pairs are multiplied, the first register of a sum has the even columns. */
INLINE void add_two(long kind, int queries, const char *one, const char *two, long left,
                    const char *weights, Floats sums[4][2]) {
    if (weight_bytes(kind) == 2) {
        Ints a = (Ints)numbers_at(F32, one, left / 2), b = (Ints)numbers_at(F32, two, left / 2);
        Ints even = (a & 0xFFFF) | b << 16, odd = (Ints)((Uints)a >> 16) | (b & (int32_t)0xFFFF0000);
#pragma GCC unroll 4
        for (int query = 0; query < queries; query++) {
            Ints pair = AT(int32_t, weights + query * CHUNK * 2) - (Ints){0};
            sums[query][0] = add_pairs(sums[query][0], even, pair);
            sums[query][1] = add_pairs(sums[query][1], odd, pair);
        }
        return;
    }
#pragma GCC unroll 2
    for (int of_two = 0; of_two < 2; of_two++, one = two, weights += 4) {
        Floats first = numbers_at(kind, one, left);
        Floats second = numbers_at(kind, one + WIDTH * bytes_of(kind), left - WIDTH);
#pragma GCC unroll 4
        for (int query = 0; query < queries; query++) {
            Floats weight = all(AT(float, weights + query * CHUNK * 4));
            sums[query][0] = fused(first, weight, sums[query][0]);
            sums[query][1] = fused(second, weight, sums[query][1]);
        }
    }
}

/* Add weighted values of positions [begin, end) to sums [queries, stride] of up to four queries, two
 * by two, an even position first: one that is outside adds zero. Weights are from ``first`` on. */
INLINE void add_values(long kind, int queries, const char *values, long first, long begin, long end,
                       long size, const char *weights, float *out, long stride) {
    static const char zeros[8 * WIDTH];
    for (long column = 0; column < size; column += 2 * WIDTH) {
        Floats sums[4][2];
        long left = size - column, row = size * bytes_of(kind);
        const char *at = values + column * bytes_of(kind);
#pragma GCC unroll 8
        for (int i = 0; i < 2 * queries; i++)
            sums[i / 2][i % 2] = AT(FloatsAt, out + i / 2 * stride + column + i % 2 * WIDTH);
        long position = begin & ~1;
        if (begin % 2 && begin < end) {
            add_two(kind, queries, zeros, at + begin * row, left,
                    weights + (position - first) * weight_bytes(kind), sums);
            position += 2;
        }
        for (; position + 1 < end; position += 2)
            add_two(kind, queries, at + position * row, at + (position + 1) * row, left,
                    weights + (position - first) * weight_bytes(kind), sums);
        if (position < end)
            add_two(kind, queries, at + position * row, zeros, left,
                    weights + (position - first) * weight_bytes(kind), sums);
#pragma GCC unroll 8
        for (int i = 0; i < 2 * queries; i++)
            AT(FloatsAt, out + i / 2 * stride + column + i % 2 * WIDTH) = sums[i / 2][i % 2];
    }
}

/* The same of any number of queries. */
static void attend_to(long kind, long queries, const char *values, long first, long begin, long end,
                      long size, const char *weights, float *out, long stride) {
    for (; queries > 0 && begin < end; queries -= 4, out += 4 * stride) {
#pragma GCC unroll 4
        for (int n = 1; n <= 4; n++)
            if (n == least(4, queries) && kind == BF16)
                add_values(BF16, n, values, first, begin, end, size, weights, out, stride);
            else if (n == least(4, queries))
                add_values(F32, n, values, first, begin, end, size, weights, out, stride);
        weights += 4 * CHUNK * weight_bytes(kind);
    }
}

/* Attention of a span to a chunk, for one key head. Of each query head ``parts`` gets the weighted
 * values, the sum of the weights, and the largest score. */
static void attend_to_chunk(void *argument, long piece) {
    Step *s = argument;
    const Model *model = s->model;
    const Span *span = &s->spans[piece % s->num_spans]; /* spans of a text follow each other */
    long chunk = piece / s->num_spans % s->chunks, head = piece / s->num_spans / s->chunks;
    long kind = model->kind, groups = model->heads / model->key_heads, rows = span->rows;
    long queries = rows * groups, size = padded(model->size), stride = s->chunks * (size + 2);
    float *parts = s->parts + (span->row * model->heads + head * groups) * stride;
    parts += chunk * (size + 2);
    long visible[rows][2];
    for (long row = 0; row < rows; row++)
        find_visible(s, chunk, span->position + row, visible[row]);
    long first = visible[0][0] & ~1, last = visible[rows - 1][1];
    char *const *entries = span->text->entries + 2 * (s->layer - model->layers);
    const char *keys = entries[0] + head * span->text->head_bytes;
    const char *values = entries[1] + head * span->text->head_bytes;
    float scores[queries][CHUNK];
    score_keys(model, queries, keys, first, last, query_of(s, span->row, head * groups), scores[0]);
    uint16_t narrowed[weight_bytes(kind) == 2 ? queries : 1][CHUNK];
    for (long query = 0; query < queries; query++) {
        long begin = visible[query / groups][0] - first, end = visible[query / groups][1] - first;
        long row = query / groups, group = query % groups;
        weigh(model, scores[query] + begin, end - begin,
              parts + (row * model->heads + group) * stride + size);
        if (begin % 2)
            scores[query][begin - 1] = 0.0f;
        if (end % 2)
            scores[query][end] = 0.0f;
        if (weight_bytes(kind) == 2)
            for (long i = begin & ~1; i < end + end % 2; i++)
                narrowed[query][i] = narrow(scores[query][i]);
    }
    const char *weights = weight_bytes(kind) == 2 ? (char *)narrowed : (char *)scores;
    long row_bytes = groups * CHUNK * weight_bytes(kind);
    float sums[queries][size];
    memset(sums, 0, sizeof sums);
    /* What all rows read is added for all at once; what comes before and after, row by row. */
    long common = (visible[rows - 1][0] + 1) & ~1, until = most(common, visible[0][1] & ~1);
    for (long row = 0; row < rows; row++)
        attend_to(kind, groups, values, first, visible[row][0], least(common, visible[row][1]),
                  model->size, weights + row * row_bytes, sums[row * groups], size);
    attend_to(kind, queries, values, first, common, until, model->size, weights, sums[0], size);
    for (long row = 0; row < rows; row++) {
        attend_to(kind, groups, values, first, most(visible[row][0], until), visible[row][1],
                  model->size, weights + row * row_bytes, sums[row * groups], size);
        for (long group = 0; group < groups; group++)
            memcpy(parts + (row * model->heads + group) * stride, sums[row * groups + group],
                   4 * size);
    }
}

/* Attention of a row's head to all chunks. */
static void join_chunks(void *argument, long piece) {
    Step *s = argument;
    long size = padded(s->model->size), stride = size + 2;
    const float *parts = s->parts + piece * s->chunks * stride;
    float sums[size], largest = parts[size + 1], total = 0.0f;
    for (long chunk = 1; chunk < s->chunks; chunk++)
        if (parts[chunk * stride + size + 1] > largest)
            largest = parts[chunk * stride + size + 1];
    memset(sums, 0, sizeof sums);
    for (long chunk = 0; chunk < s->chunks; chunk++, parts += stride) {
        if (parts[size] == 0.0f) /* the row reads nothing of this chunk */
            continue;
        float factor = exponential(parts[size + 1] - largest);
        total += parts[size] * factor;
        for (long i = 0; i < size; i++)
            sums[i] += parts[i] * factor;
    }
    for (long i = 0; i < s->model->size; i++)
        s->attended[piece * s->model->size + i] = sums[lane_of(s->model->kind, i)] / total;
}

/* Divide the rows of texts into spans, and the positions into chunks. */
static void divide(Step *s, const Text *texts, long count) {
    long groups = s->model->heads / s->model->key_heads, positions = 0, first = 0;
    long most_rows = most(1, MOST_QUERIES / groups);
    for (const Text *text = texts; text < texts + count; text++) {
        s->rows += text->rows;
        positions = most(positions, text->start + text->rows);
    }
    s->spans = room(SPANS, s->rows * sizeof(Span));
    for (const Text *text = texts; text < texts + count; first += text->rows, text++)
        for (long row = 0; row < text->rows; row += most_rows)
            s->spans[s->num_spans++] = (Span){text, first + row, text->start + row,
                                              least(most_rows, text->rows - row)};
    s->chunks = (positions + CHUNK - 1) / CHUNK;
    s->sinks = s->model->newest ? s->chunks++ : -1;
    s->least_chunks =
        SHARE_SCORES / (least(positions, CHUNK) * least(s->rows, most_rows) * groups) + 1;
}

/* Attention of rounded queries to all keys: s->attended. */
static void attend_to_keys(Step *s) {
    const Model *model = s->model;
    long size = padded(model->size);
    s->parts = room(CHUNKS, 4 * s->rows * model->heads * s->chunks * (size + 2));
    run(attend_to_chunk, s, s->num_spans * model->key_heads * s->chunks, s->least_chunks);
    run(join_chunks, s, s->rows * model->heads, SHARE / (s->chunks * size) + 1);
}

/* Attention sublayer (model.layers.Attention): [rows, hidden] -> the same shape. */
static void attention(Step *s, const float *x, float *out) {
    const Model *model = s->model;
    long size = model->size, heads = model->heads, rows = s->rows;
    s->qkv = room(QKV, 4 * rows * (heads + 2 * model->key_heads) * size);
    s->queries = room(QUERIES, rows * heads * input_bytes(model->kind, size));
    s->attended = room(ATTENDED, 4 * rows * heads * size);
    project(s, s->layer->qkv, 3, x, model->hidden, s->qkv);
    run(write_entries, s, s->num_spans, SHARE / (heads * size) + 1);
    attend_to_keys(s);
    project(s, &s->layer->o, 1, s->attended, heads * size, out);
}

/* activation(gate) * up of a row, SiLU or tanh GELU, in place of gate. */
static void activate(void *argument, long row) {
    Step *s = argument;
    long size = s->layer->down.columns;
    float *gate = s->gate_up + row * 2 * size, *up = gate + size;
    if (s->model->is_gelu)
        for (long i = 0; i < size; i++) {
            float x = gate[i], inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
            gate[i] = up[i] * (0.5f * x * (1.0f + tangent(inner)));
        }
    else
        for (long i = 0; i < size; i++)
            gate[i] = up[i] * (gate[i] / (1.0f + exponential(-gate[i])));
}

/* MLP sublayer (model.layers.GatedMLP): [rows, hidden] -> the same shape. */
static void gated_mlp(Step *s, const float *x, float *out) {
    long size = s->layer->down.columns;
    s->gate_up = room(GATE_UP, 4 * s->rows * 2 * size);
    project(s, s->layer->gate_up, 2, x, s->model->hidden, s->gate_up);
    run(activate, s, s->rows, SHARE / 8 / size + 1); /* exponentials take longer */
    project(s, &s->layer->down, 1, s->gate_up, 2 * size, out);
}

typedef void Sublayer(Step *s, const float *x, float *out);

/* x + sublayer(norm(x)), or x + post_norm(sublayer(norm(x))): x is [rows, hidden]. */
static void add(Step *s, Sublayer *sublayer, const float *norm, const float *post_norm, float *x) {
    long hidden = s->model->hidden, count = s->rows * hidden;
    float eps = s->model->eps, *normed = room(NORMED, 4 * count), *out = room(OUT, 4 * count);
    for (long first = 0; first < count; first += hidden)
        normalise(x + first, norm, hidden, eps, normed + first);
    sublayer(s, normed, out);
    for (long first = 0; post_norm && first < count; first += hidden)
        normalise(out + first, post_norm, hidden, eps, out + first);
    for (long i = 0; i < count; i++)
        x[i] += out[i];
}

/* Block (model.llama.LlamaBlock, model.gemma2.Gemma2Block), without what the plan skips. */
static void block(Step *s, const Layer *layer, float *x) {
    s->layer = layer;
    if (layer->o.kind)
        add(s, attention, layer->attention_norm, layer->attention_post_norm, x);
    if (layer->down.kind)
        add(s, gated_mlp, layer->mlp_norm, layer->mlp_post_norm, x);
}

/* Embeddings of tokens times their scale: [rows, hidden]. */
static void embed(const Model *model, const Text *text, float *x) {
    long hidden = model->hidden;
    for (long row = 0; row < text->rows; row++, x += hidden) {
        const char *of = model->embedding + text->tokens[row] * row_bytes(model->kind, hidden);
        for (long i = 0; i < hidden; i += WIDTH)
            store(x + i, numbers_at(model->kind, of + i * bytes_of(model->kind), hidden - i) *
                             model->embedding_scale, hidden - i);
    }
}

/* Logits [rows of all texts, vocab]; keys and values of the rows are written into the caches. */
void step(const Model *model, const Text *texts, long count, float *logits) {
    Step s = {.model = model};
    long hidden = model->hidden, first = 0; /* row of a text */
    divide(&s, texts, count);
    float *x = room(X, 4 * s.rows * hidden);
    for (const Text *text = texts; text < texts + count; first += text->rows, text++)
        embed(model, text, x + first * hidden);
    for (long layer = 0; layer < model->num_layers; layer++)
        block(&s, &model->layers[layer], x);
    for (long row = 0; row < s.rows; row++)
        normalise(x + row * hidden, model->norm, hidden, model->eps, x + row * hidden);
    project(&s, &model->head, 1, x, hidden, logits);
    if (model->final_soft_cap)
        cap(logits, s.rows * model->head.rows, model->final_soft_cap);
}

static void round_queries(void *argument, long row) {
    Step *s = argument;
    long size = s->model->size, heads = s->model->heads;
    for (long head = 0; head < heads; head++)
        round_inputs(s->model->kind, s->x + (row * heads + head) * size, size,
                     query_of(s, row, head));
}

int has_pairs(void) { return HAS_PAIRS; }

/* Attention of a prompt's rows, whose entries are in a cache of one layer (model.layers.attend_
 * causally): queries [rows, heads, size], with their rotary embeddings -> the same shape. */
void attend(const Model *model, const Text *text, const float *queries, float *out) {
    long heads = model->heads, numbers = heads * model->size; /* of a row */
    long chunks = (text->start + text->rows) / CHUNK + 2;
    long rows = most(1, least(MOST_ROWS, MOST_PARTS / (chunks * heads * padded(model->size))));
    for (long row = 0; row < text->rows; row += rows) {
        Text part = *text;
        part.start += row;
        part.rows = least(rows, text->rows - row);
        Step s = {.model = model, .layer = model->layers, .x = queries + row * numbers};
        divide(&s, &part, 1);
        s.queries = room(QUERIES, s.rows * heads * input_bytes(model->kind, model->size));
        s.attended = out + row * numbers;
        run(round_queries, &s, s.rows, SHARE / numbers + 1);
        attend_to_keys(&s);
    }
}
