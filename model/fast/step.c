/* Short step of a decoder on a CPU: the logits of up to a few dozen tokens under a plan.
 *
 * It has the order and the names of the readable blocks (model/llama.py, model/gemma2.py), and
 * reads the weights where torch keeps them. model/fast/cpu.py compiles it and fills its structures.
 * It knows nothing of plans, samples and files.
 *
 * This file reads like a model. What it stands on is in four files, which are read alone:
 *
 *     products.h    linear layers, and all that a processor decides
 *     attention.h   queries with keys, weights with values
 *     threads.h     run(task, ...) does the pieces of a task on all threads
 *     round.h       rounding of weights to few bits, which a step does not call
 *
 * The numbers of a row do not depend on the other rows of the step, by construction: each is the
 * same sums in the same order, and one thread computes it. */

#include <stdlib.h>
#include "attention.h"
#include "threads.h"
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
    long newest; /* positions that a plan shows beside the first SINKS; 0 if it shows all */
    float embedding_scale, eps, scale, soft_cap, final_soft_cap; /* soft caps: 0 if there is none */
    int32_t is_gelu;
} Model;

typedef struct {           /* rows of one text at positions that follow each other */
    const int64_t *tokens; /* [rows] */
    char *const *entries;  /* [layers, 2], keys and values: [key heads, positions, size] */
    long rows, start, head_bytes; /* first position; bytes from one head's entries to the next */
} Text;

/* Step: the arguments of its tasks, and its memory, which is kept for the next step. */

typedef struct { /* rows of a text that attend together: they read its keys and values once */
    const Text *text;
    long row, position, rows; /* the first row's number in the step, and its position */
} Span;

typedef struct {
    const Model *model;
    const Layer *layer;
    Span *spans;
    long num_spans, rows;
    long chunks, least_chunks; /* of CHUNK positions; that a thread claims at least */
    long sinks;                /* the chunk of the first positions, or -1 */
    /* linear layers on the same inputs, of which all outputs are neurons */
    const Matrix *matrices;
    const float *x; /* [rows, columns], x_stride numbers from row to row */
    long x_stride, neurons;
    char *inputs;    /* [rows, columns], rounded */
    float *products; /* [rows, neurons] */
    /* attention and MLP */
    float *qkv;      /* [rows, heads + 2 * key_heads, size] */
    char *queries;   /* [key_heads, rows, groups, size], rounded; groups: heads of a key head */
    float *partials; /* rows * heads * chunks times [padded size + 2]: see partials_of */
    float *attended; /* [rows, heads, size] */
    float *gate_up;  /* [rows, 2 * size of the MLP] */
} Step;

enum { INPUTS, QKV, QUERIES, PARTIALS, ATTENDED, GATE_UP, X, NORMED, OUT, SPANS, BUFFERS };

/* Memory of a use in this step, of at least so many bytes. */
static void *buffer(int which, size_t bytes) {
    static struct {
        void *memory;
        size_t bytes;
    } buffers[BUFFERS];
    if (buffers[which].bytes < bytes) {
        free(buffers[which].memory);
        buffers[which].bytes = (bytes + 63) / 64 * 64;
        buffers[which].memory = aligned_alloc(64, buffers[which].bytes);
        if (!buffers[which].memory)
            abort();
    }
    return buffers[which].memory;
}

/* Linear layers. Threads claim pieces of so many numbers, or bytes of weights, at least. */

enum { SHARE = 1 << 13, SHARE_BYTES = 1 << 16 };

/* Round a row of inputs: x [rows, columns] -> inputs. */
static void round_row(void *argument, long row) {
    Step *s = argument;
    long kind = s->matrices->kind, columns = s->matrices->columns;
    char *out = s->inputs + row * input_bytes(kind, columns);
    round_inputs(kind, s->x + row * s->x_stride, columns, out);
}

INLINE long block_rows(const Matrix *matrix) { return matrix->kind < BF16 ? LANES : BLOCK; }
INLINE long blocks_of(const Matrix *m) { return (m->rows + block_rows(m) - 1) / block_rows(m); }

INLINE long block_bytes(const Matrix *m) {
    return row_bytes(m->kind, m->columns) * (m->kind < BF16 ? 1 : BLOCK);
}

/* Products of all rows with a block of weights, and biases: -> products [rows, neurons]. Blocks are
 * numbered over all matrices. */
static void multiply_block(void *argument, long block) {
    Step *s = argument;
    const Matrix *m = s->matrices;
    float *out = s->products;
    for (; block >= blocks_of(m); m++) {
        block -= blocks_of(m);
        out += m->rows;
    }
    long first = block * block_rows(m), count = min(block_rows(m), m->rows - first);
    multiply(m->kind, m->weights + block * block_bytes(m), count, s->inputs, s->rows, m->columns,
             out + first, s->neurons);
    for (long row = 0; m->bias && row < s->rows; row++)
        for (long i = first; i < first + count; i++)
            out[row * s->neurons + i] += m->bias[i];
}

/* Outputs of ``count`` linear layers on the same inputs: [rows, x_stride] -> [rows, neurons]. */
static void project(Step *s, const Matrix *matrices, int count, const float *x, long x_stride,
                    float *out) {
    long blocks = 0, kind = matrices->kind, columns = matrices->columns;
    s->neurons = 0;
    for (const Matrix *m = matrices; m < matrices + count; m++) {
        blocks += blocks_of(m);
        s->neurons += m->rows;
    }
    s->matrices = matrices;
    s->x = x;
    s->x_stride = x_stride;
    s->products = out;
    s->inputs = buffer(INPUTS, s->rows * input_bytes(kind, columns));
    run(round_row, s, s->rows, SHARE / columns + 1);
    run(multiply_block, s, blocks, SHARE_BYTES / block_bytes(matrices) + 1);
}

/* RMSNorm (arXiv 1910.07467): x [count], weight [count] -> [count]. */
static void normalise(const float *x, const float *weight, long count, float eps, float *out) {
    float inverse = 1.0f / __builtin_sqrtf(sum_of(x, count, 1) / (float)count + eps);
    for (long i = 0; i < count; i++)
        out[i] = x[i] * inverse * weight[i];
}

/* Rotary embedding (model.layers.rotate) of a head [2 * half], in place; cos and sin are [half]. */
static void rotate(float *head, const float *cos, const float *sin, long half) {
    for (long i = 0; i < half; i++) {
        float a = head[i], b = head[i + half];
        head[i] = a * cos[i] - b * sin[i];
        head[i + half] = b * cos[i] + a * sin[i];
    }
}

/* Attention. A piece of work is a chunk of the positions of a text, for one key head and all rows
 * of a span. Each row's results for its chunks are joined. */

enum { SINKS = 4 };              /* first positions, which a plan's window does not hide */
enum { MAX_QUERIES = 24 };       /* rows of a span times groups */
enum { SHARE_SCORES = 1 << 11 }; /* of a claim */

/* Place of a row's rounded query: those that read the same keys lie side by side. */
static char *query_of(const Step *s, long row, long head) {
    long groups = s->model->heads / s->model->key_heads;
    long place = (head / groups * s->rows + row) * groups + head % groups;
    return s->queries + place * input_bytes(s->model->kind, s->model->size);
}

/* Round a head [size] to the numbers of a cache. */
static void write_entry(long kind, const float *x, long size, char *entry) {
    for (long i = 0; i < size; i++)
        if (kind == F32)
            AT(float, entry + 4 * i) = x[i];
        else
            AT(uint16_t, entry + 2 * i) = to_bf16(x[i]);
}

/* Norms and rotary embeddings of a span's heads in qkv, in place. Its keys and values go into the
 * cache, its queries are rounded to meet keys. */
static void write_entries(void *argument, long piece) {
    Step *s = argument;
    const Model *model = s->model;
    const Span *span = &s->spans[piece];
    const Text *text = span->text;
    long size = model->size, half = size / 2, kind = model->kind;
    long heads = model->heads, key_heads = model->key_heads;
    long all_heads = heads + 2 * key_heads; /* of queries, keys, values */
    for (long number = 0; number < span->rows * all_heads; number++) {
        long row = number / all_heads, head = number % all_heads, of_key = head - heads;
        long position = span->position + row;
        float *x = s->qkv + ((span->row + row) * all_heads + head) * size;
        const float *norm = head < heads ? s->layer->q_norm : s->layer->k_norm;
        if (norm && of_key < key_heads)
            normalise(x, norm, size, model->eps, x);
        if (of_key < key_heads)
            rotate(x, s->layer->cos + position * half, s->layer->sin + position * half, half);
        if (head < heads) {
            round_inputs(kind, x, size, query_of(s, span->row + row, head));
        } else {
            char *entries = text->entries[2 * (s->layer - model->layers) + of_key / key_heads];
            entries += of_key % key_heads * text->head_bytes;
            write_entry(kind, x, size, entries + position * row_bytes(kind, size));
        }
    }
}

/* Softmax of scores [count] without its division, in place: exponentials of scaled scores less the
 * largest. sum[0] is their sum, sum[1] the largest scaled score. */
static void softmax_numerators(const Model *model, float *scores, long count, float sum[2]) {
    int32_t largest = -0x7F800001;
    for (long i = 0; i < count; i++)
        scores[i] *= model->scale;
    if (model->soft_cap)
        soft_cap(scores, count, model->soft_cap);
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

/* Positions [range[0], range[1]) of a chunk that a row at a position attends to. Where the plan's
 * window hides some, the first SINKS are a chunk of their own. */
static void find_visible(const Step *s, long chunk, long position, long range[2]) {
    long oldest = max(0, position + 1 - s->layer->window), low = chunk * CHUNK;
    long newest = max(oldest, position + 1 - s->model->newest);
    if (!s->model->newest || newest <= SINKS) /* nothing is hidden */
        newest = oldest;
    if (chunk == s->sinks) {
        range[0] = oldest;
        range[1] = newest > oldest ? max(oldest, SINKS) : oldest;
    } else {
        range[1] = max(low, min(low + CHUNK, position + 1));
        range[0] = min(range[1], max(low, newest));
    }
}

/* Results of a span's rows for the chunks of a key head: [chunks, rows, groups, padded size + 2].
 * Each has the weighted sum of values, the sum of the weights, and the largest score. */
INLINE float *partials_of(const Step *s, const Span *span, long head) {
    long groups = s->model->heads / s->model->key_heads;
    long before = span->row * s->model->heads + head * span->rows * groups;
    return s->partials + before * s->chunks * (padded(s->model->size) + 2);
}

/* Attention of a span's rows to a chunk of positions, for one key head. Spans that read the same
 * keys and values are worked on one after the other. */
static void attend_to_chunk(void *argument, long piece) {
    Step *s = argument;
    const Model *model = s->model;
    const Span *span = &s->spans[piece % s->num_spans];
    long chunk = piece / s->num_spans % s->chunks, head = piece / s->num_spans / s->chunks;
    long size = model->size, kind = model->kind, groups = model->heads / model->key_heads;
    long rows = span->rows, queries = rows * groups, stride = padded(size) + 2;
    char *const *entries = span->text->entries + 2 * (s->layer - model->layers);
    const char *keys = entries[0] + head * span->text->head_bytes;
    const char *values = entries[1] + head * span->text->head_bytes;
    float *out = partials_of(s, span, head) + chunk * queries * stride;
    memset(out, 0, 4 * queries * stride);

    long visible[rows][2]; /* of each row, from an even position on */
    for (long row = 0; row < rows; row++)
        find_visible(s, chunk, span->position + row, visible[row]);
    long first = visible[0][0] & ~1, count = visible[rows - 1][1] - first;
    keys += first * row_bytes(kind, size);
    values += first * row_bytes(kind, size);
    float scores[queries][CHUNK];
    uint16_t rounded[weight_bytes(kind) == 2 ? queries : 1][CHUNK];
    score_keys(kind, queries, keys, count, size, query_of(s, span->row, head * groups), scores[0]);
    for (long query = 0; query < queries; query++) {
        float *of = scores[query];
        long begin = visible[query / groups][0] - first, end = visible[query / groups][1] - first;
        softmax_numerators(model, of + begin, end - begin, out + query * stride + padded(size));
        if (begin % 2) /* weights beside the ends */
            of[begin - 1] = 0.0f;
        if (end % 2)
            of[end] = 0.0f;
        for (long i = begin & ~1; weight_bytes(kind) == 2 && i < end + end % 2; i++)
            rounded[query][i] = to_bf16(of[i]);
    }

    /* Positions that all rows attend to are added for all at once, others row by row. */
    const char *weights = weight_bytes(kind) == 2 ? (char *)rounded : (char *)scores;
    long common = (visible[rows - 1][0] - first + 1) & ~1;
    long until = max(common, (visible[0][1] - first) & ~1);
    for (long part = 0; part < 2; part++) {
        for (long row = 0; row < rows; row++) {
            long begin = visible[row][0] - first, end = visible[row][1] - first;
            attend_to(kind, groups, values, part ? max(begin, until) : begin,
                      part ? end : min(common, end), size,
                      weights + row * groups * CHUNK * weight_bytes(kind),
                      out + row * groups * stride, stride);
        }
        if (part == 0)
            attend_to(kind, queries, values, common, until, size, weights, out, stride);
    }
}

/* Join the results for all chunks of a span's key head: -> attended [rows, heads, size]. */
static void join_chunks(void *argument, long piece) {
    Step *s = argument;
    const Model *model = s->model;
    long head = piece % model->key_heads, size = padded(model->size);
    long groups = model->heads / model->key_heads;
    const Span *span = &s->spans[piece / model->key_heads];
    long queries = span->rows * groups, stride = queries * (size + 2);
    for (long query = 0; query < queries; query++) {
        const float *part = partials_of(s, span, head) + query * (size + 2);
        float sums[size], largest = part[size + 1], total = 0.0f;
        for (long chunk = 1; chunk < s->chunks; chunk++)
            if (part[chunk * stride + size + 1] > largest)
                largest = part[chunk * stride + size + 1];
        memset(sums, 0, sizeof sums);
        for (long chunk = 0; chunk < s->chunks; chunk++, part += stride) {
            if (part[size] == 0.0f) /* the row attends to nothing of this chunk */
                continue;
            float factor = exponential(part[size + 1] - largest);
            total += part[size] * factor;
            for (long i = 0; i < size; i++)
                sums[i] += part[i] * factor;
        }
        long row = span->row + query / groups;
        float *out = s->attended +
                     (row * model->heads + head * groups + query % groups) * model->size;
        for (long i = 0; i < model->size; i++)
            out[i] = sums[place_of(model->kind, i)] / total;
    }
}

/* Attention of all spans to the entries of the cache: queries -> attended [rows, heads, size]. */
static void attend_to_entries(Step *s) {
    long numbers = s->rows * s->model->heads * s->chunks * (padded(s->model->size) + 2);
    long pieces = s->num_spans * s->model->key_heads;
    s->partials = buffer(PARTIALS, 4 * numbers);
    run(attend_to_chunk, s, pieces * s->chunks, s->least_chunks);
    run(join_chunks, s, pieces, SHARE * pieces / numbers + 1);
}

/* Attention sublayer (model.layers.Attention): [rows, hidden] -> the same shape. */
static void attention(Step *s, const float *x, float *out) {
    const Model *model = s->model;
    long size = model->size, heads = model->heads, rows = s->rows;
    s->qkv = buffer(QKV, 4 * rows * (heads + 2 * model->key_heads) * size);
    s->queries = buffer(QUERIES, rows * heads * input_bytes(model->kind, size));
    s->attended = buffer(ATTENDED, 4 * rows * heads * size);
    project(s, s->layer->qkv, 3, x, model->hidden, s->qkv);
    run(write_entries, s, s->num_spans, SHARE / (heads * size) + 1);
    attend_to_entries(s);
    project(s, &s->layer->o, 1, s->attended, heads * size, out);
}

/* activation(gate) * up of a row, SiLU or tanh GELU, in place of gate: gate_up [rows, 2 * size]. */
static void activate(void *argument, long row) {
    Step *s = argument;
    long size = s->layer->down.columns;
    float *gate = s->gate_up + row * 2 * size, *up = gate + size;
    if (s->model->is_gelu)
        for (long i = 0; i < size; i++) {
            float x = gate[i], inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
            gate[i] = up[i] * (0.5f * x * (1.0f + hyperbolic_tangent(inner)));
        }
    else
        for (long i = 0; i < size; i++)
            gate[i] = up[i] * (gate[i] / (1.0f + exponential(-gate[i])));
}

/* MLP sublayer (model.layers.GatedMLP): [rows, hidden] -> the same shape. */
static void gated_mlp(Step *s, const float *x, float *out) {
    long size = s->layer->down.columns;
    s->gate_up = buffer(GATE_UP, 4 * s->rows * 2 * size);
    project(s, s->layer->gate_up, 2, x, s->model->hidden, s->gate_up);
    run(activate, s, s->rows, SHARE / 8 / size + 1); /* exponentials take longer */
    project(s, &s->layer->down, 1, s->gate_up, 2 * size, out);
}

typedef void Sublayer(Step *s, const float *x, float *out);

/* x + sublayer(norm(x)), or x + post_norm(sublayer(norm(x))): x is [rows, hidden]. */
static void add_sublayer(Step *s, Sublayer *sublayer, const float *norm, const float *post_norm,
                         float *x) {
    long hidden = s->model->hidden, count = s->rows * hidden;
    float eps = s->model->eps, *normed = buffer(NORMED, 4 * count), *out = buffer(OUT, 4 * count);
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
        add_sublayer(s, attention, layer->attention_norm, layer->attention_post_norm, x);
    if (layer->down.kind)
        add_sublayer(s, gated_mlp, layer->mlp_norm, layer->mlp_post_norm, x);
}

/* Embeddings of tokens times their scale: [rows, hidden]. */
static void embed(const Model *model, const Text *text, float *x) {
    long hidden = model->hidden;
    for (long row = 0; row < text->rows; row++, x += hidden) {
        const char *of = model->embedding + text->tokens[row] * row_bytes(model->kind, hidden);
        for (long i = 0; i < hidden; i += WIDTH)
            store(x + i, load(model->kind, of + i * bytes_of(model->kind), hidden - i) *
                             model->embedding_scale, hidden - i);
    }
}

/* Divide the rows of texts into spans, and positions into chunks. */
static void lay_out(Step *s, const Text *texts, long count) {
    const Model *model = s->model;
    long groups = model->heads / model->key_heads, positions = 0, first = 0;
    long span_rows = max(1, MAX_QUERIES / groups);
    for (const Text *text = texts; text < texts + count; text++) {
        s->rows += text->rows;
        positions = max(positions, text->start + text->rows);
    }
    s->spans = buffer(SPANS, s->rows * sizeof(Span));
    for (const Text *text = texts; text < texts + count; first += text->rows, text++)
        for (long row = 0; row < text->rows; row += span_rows)
            s->spans[s->num_spans++] = (Span){text, first + row, text->start + row,
                                              min(span_rows, text->rows - row)};
    s->chunks = (positions + CHUNK - 1) / CHUNK;
    s->sinks = model->newest ? s->chunks++ : -1;
    s->least_chunks = SHARE_SCORES / (min(positions, CHUNK) * s->spans->rows * groups) + 1;
}

/* Logits [rows, vocab] of the rows of a few texts; keys and values go into their caches. */
static void short_step(const Model *model, const Text *texts, long count, float *logits) {
    Step s = {.model = model};
    long hidden = model->hidden;
    lay_out(&s, texts, count);
    float *x = buffer(X, 4 * s.rows * hidden), *of = x;
    for (const Text *text = texts; text < texts + count; of += text->rows * hidden, text++)
        embed(model, text, of);
    for (long layer = 0; layer < model->num_layers; layer++)
        block(&s, &model->layers[layer], x);
    for (long row = 0; row < s.rows; row++)
        normalise(x + row * hidden, model->norm, hidden, model->eps, x + row * hidden);
    project(&s, &model->head, 1, x, hidden, logits);
    if (model->final_soft_cap)
        soft_cap(logits, s.rows * model->head.rows, model->final_soft_cap);
}

enum { MAX_ROWS = 64 }; /* of a short step */

/* The same for any number of rows, in as few short steps as possible. */
void step(const Model *model, const Text *texts, long count, float *logits) {
    Text some[MAX_ROWS];
    long rows = 0, num_texts = 0;
    for (const Text *text = texts; text < texts + count; text++)
        for (long first = 0, taken; first < text->rows; first += taken) {
            taken = min(MAX_ROWS, text->rows - first);
            if (rows + taken > MAX_ROWS) {
                short_step(model, some, num_texts, logits);
                logits += rows * model->head.rows;
                rows = num_texts = 0;
            }
            some[num_texts++] = (Text){text->tokens + first, text->entries, taken,
                                       text->start + first, text->head_bytes};
            rows += taken;
        }
    if (rows)
        short_step(model, some, num_texts, logits);
}

/* Prompts: their linear layers are torch's, which gains by more rows, and their attention is ours. */

int has_pairs(void) { return HAS_PAIRS; }

enum { MAX_PARTIALS = 1 << 22 }; /* numbers, at a time */

/* Round a row of queries: x [rows, heads, size] -> queries. */
static void round_queries(void *argument, long row) {
    Step *s = argument;
    long size = s->model->size, heads = s->model->heads;
    for (long head = 0; head < heads; head++)
        round_inputs(s->model->kind, s->x + (row * heads + head) * size, size,
                     query_of(s, row, head));
}

/* Attention of a text's rows to a cache of one layer, which holds their entries
 * (model.layers.attend_causally): rotated queries [rows, heads, size] -> the same shape. */
void attend(const Model *model, const Text *text, const float *queries, float *out) {
    long heads = model->heads, numbers = heads * model->size; /* of a row */
    long chunks = (text->start + text->rows) / CHUNK + 2;
    long taken = min(MAX_ROWS, MAX_PARTIALS / (chunks * heads * padded(model->size)) + 1);
    for (long row = 0; row < text->rows; row += taken) {
        Text some = *text;
        some.start += row;
        some.rows = min(taken, text->rows - row);
        Step s = {.model = model, .layer = model->layers, .x = queries + row * numbers};
        lay_out(&s, &some, 1);
        s.queries = buffer(QUERIES, s.rows * heads * input_bytes(model->kind, model->size));
        s.attended = out + row * numbers;
        run(round_queries, &s, s.rows, SHARE / numbers + 1);
        attend_to_entries(&s);
    }
}
