/* Short step of a decoder on a CPU: the logits after the next tokens of a few texts.
 *
 * It has the order and the names of the readable blocks (model/llama.py, model/gemma2.py). It reads
 * the weights where torch keeps them: model/fast/cpu.py fills its structures. It knows nothing of
 * plans, samples and files. This file reads like a model. The others are read alone:
 *
 *     numbers.h     numbers, registers, and all that a processor decides
 *     products.h    rows of weights with rows of inputs
 *     attention.h   queries with keys, weights with values
 *     threads.h     run(task, ...) does the pieces of a task on all threads
 *     round.h       rounding of weights to few bits, which a step does not call
 *
 * The numbers of a row do not depend on the other rows of a step, by construction: each is the same
 * sums in the same order, and one thread computes it. */

#include <stdlib.h>
#include "attention.h"
#include "threads.h"
#include "round.h"

typedef struct {
    Matrix qkv[3], o, gate_up[2], down; /* a sublayer without weights (kind 0) is skipped */
    const float *attention_norm, *attention_post_norm, *mlp_norm, *mlp_post_norm; /* [hidden] */
    const float *q_norm, *k_norm; /* [size] or NULL, as the norms after a sublayer */
    const float *cos, *sin;       /* [positions, size / 2] */
    long window;                  /* positions that a query attends to; 0 for all */
} Layer;

typedef struct {
    const Layer *layers;
    const char *embedding; /* [vocab, hidden] */
    const float *norm;     /* [hidden] */
    Matrix head;
    long num_layers, kind, hidden;       /* kind: of the embedding and the cache */
    long heads, key_heads, groups, size; /* groups: heads of a key head; size: of a head */
    long newest, sinks; /* window of a plan: the newest and the first positions; newest 0: all */
    float embedding_scale, eps, scale, soft_cap, final_soft_cap; /* soft caps: 0 if there is none */
    int32_t is_gelu;
} Model;

typedef struct {          /* rows of one text, at positions that follow each other */
    char *const *entries; /* [layers, 2], keys and values: [key heads, positions, size] */
    long rows, start;     /* start: the first row's position */
    long head_bytes;      /* from one head's entries to the next */
} Text;

/* Bytes of these structures, which model/fast/cpu.py mirrors. */
const long structure_bytes[] = {sizeof(Matrix), sizeof(Layer), sizeof(Model), sizeof(Text)};

typedef struct { /* rows of a text that attend together: they read its keys and values once */
    const Text *text;
    long row, rows, start; /* row: the first one's number in the step */
} Span;

typedef struct { /* rows on their way through the layers, and the results on the way */
    const Model *model;
    const Layer *layer;
    Span *spans;
    long num_spans, rows, positions;
    long chunks, sink_chunk; /* chunks of CHUNK positions; number of that of the sinks, or -1 */
    float *qkv;      /* [rows, heads + 2 * key_heads, size] */
    char *queries;   /* [key_heads, rows, groups, size], rounded */
    float *partials; /* [key_heads, rows, groups, chunks, padded size + 2] */
    float *attended; /* [rows, heads, size] */
    float *gate_up;  /* [rows, 2, size of the MLP] */
    float *gated;    /* [rows, size of the MLP] */
} Step;

enum { SPANS, X, NORMED, INPUTS, QKV, QUERIES, PARTIALS, ATTENDED, GATE_UP, GATED, OUT, USES };

/* Memory for a use, of at least so many bytes. It is kept for the next step. */
static void *buffer(int use, size_t bytes) {
    static void *memory[USES];
    static size_t sizes[USES];
    if (sizes[use] < bytes) {
        free(memory[use]);
        sizes[use] = (bytes + 63) / 64 * 64;
        memory[use] = aligned_alloc(64, sizes[use]);
        if (!memory[use])
            abort();
    }
    return memory[use];
}

/* Embeddings of tokens times their scale: [rows, hidden]. */
static void embed(const Model *model, const int64_t *tokens, long rows, float *x) {
    long hidden = model->hidden, kind = model->kind;
    for (long row = 0; row < rows; row++, x += hidden) {
        const char *embedding = model->embedding + tokens[row] * row_bytes(kind, hidden);
        for (long i = 0; i < hidden; i += WIDTH) {
            Floats numbers = load(kind, embedding + i * bytes_of(kind), hidden - i);
            store(F32, x + i, numbers * model->embedding_scale, hidden - i);
        }
    }
}

/* RMSNorm (arXiv 1910.07467): x [count], weight [count] -> [count]. */
static void normalise(const float *x, const float *weight, long count, float eps, float *out) {
    float inverse = 1.0f / __builtin_sqrtf(sum_of(x, count, 1) / (float)count + eps);
    for (long i = 0; i < count; i++)
        out[i] = x[i] * inverse * weight[i];
}

typedef struct { /* linear layers on the same inputs: their outputs lie side by side */
    const Matrix *matrices;
    const float *x; /* [rows, columns] */
    long rows, outputs;
    char *inputs; /* x, rounded */
    float *out;   /* [rows, outputs] */
} Projection;

static void round_row(void *argument, long row) {
    const Projection *p = argument;
    long kind = p->matrices->kind, columns = p->matrices->columns;
    round_inputs(kind, p->x + row * columns, columns, p->inputs + row * input_bytes(kind, columns));
}

/* Multiply all rows by a block of weights. Blocks are numbered over all matrices. */
static void project_to_block(void *argument, long block) {
    const Projection *p = argument;
    const Matrix *m = p->matrices;
    float *out = p->out;
    for (; block >= blocks_of(m); m++) {
        block -= blocks_of(m);
        out += m->rows;
    }
    multiply_block(m, block, p->inputs, p->rows, out, p->outputs);
}

/* Outputs of ``count`` linear layers on the same inputs: [rows, columns] -> [rows, outputs]. */
static void project(const Step *s, const Matrix *matrices, int count, const float *x, float *out) {
    Projection p = {matrices, x, s->rows, .out = out};
    long blocks = 0, columns = matrices->columns;
    for (const Matrix *m = matrices; m < matrices + count; m++) {
        blocks += blocks_of(m);
        p.outputs += m->rows;
    }
    p.inputs = buffer(INPUTS, s->rows * input_bytes(matrices->kind, columns));
    run(round_row, &p, s->rows, columns);
    run(project_to_block, &p, blocks, block_bytes(matrices) / 8);
}

/* Rotary embedding (model.layers.rotate) of a head [2 * half], in place; cos and sin are [half]. */
static void rotate(float *head, const float *cos, const float *sin, long half) {
    for (long i = 0; i < half; i++) {
        float a = head[i], b = head[i + half];
        head[i] = a * cos[i] - b * sin[i];
        head[i + half] = b * cos[i] + a * sin[i];
    }
}

/* Place of a row's head among queries and results: heads of the same keys lie side by side. */
static long place_of_query(const Step *s, long row, long head) {
    long groups = s->model->groups;
    return (head / groups * s->rows + row) * groups + head % groups;
}

/* Round a row's head [size] to meet keys. */
static void round_query(const Step *s, const float *x, long row, long head) {
    long kind = s->model->kind, size = s->model->size;
    char *out = s->queries + place_of_query(s, row, head) * input_bytes(kind, size);
    round_inputs(kind, x, size, out);
}

/* Norms and rotary embeddings of a span's heads in qkv, in place. Queries are rounded to meet keys;
 * keys and values are rounded to the numbers of the cache and written there. */
static void finish_heads(void *argument, long piece) {
    Step *s = argument;
    const Model *model = s->model;
    const Layer *layer = s->layer;
    const Span *span = &s->spans[piece];
    long size = model->size, half = size / 2, heads = model->heads, key_heads = model->key_heads;
    char *const *entries = span->text->entries + 2 * (layer - model->layers);
    float *x = s->qkv + span->row * (heads + 2 * key_heads) * size;
    for (long row = 0; row < span->rows; row++)
        for (long head = 0; head < heads + 2 * key_heads; head++, x += size) {
            long position = span->start + row, of_key = head - heads;
            const float *norm = head < heads ? layer->q_norm : layer->k_norm;
            if (norm && of_key < key_heads)
                normalise(x, norm, size, model->eps, x);
            if (of_key < key_heads)
                rotate(x, layer->cos + position * half, layer->sin + position * half, half);
            if (head < heads) {
                round_query(s, x, span->row + row, head);
                continue;
            }
            char *entry = entries[of_key / key_heads] + position * row_bytes(model->kind, size);
            entry += of_key % key_heads * span->text->head_bytes;
            for (long i = 0; i < size; i += WIDTH)
                store(model->kind, entry + i * bytes_of(model->kind),
                      load(F32, x + i, size - i), size - i);
        }
}

/* Positions [range[0], range[1]) of a chunk, counted from its first, that a row attends to. */
static void find_visible(const Step *s, long chunk, long position, long range[2]) {
    long window = s->layer->window, first = chunk * CHUNK;
    long oldest = window ? max(0, position + 1 - window) : 0;
    long newest = max(oldest, position + 1 - s->model->newest), sinks = s->model->sinks;
    if (!s->model->newest || newest <= sinks) /* nothing is hidden */
        newest = oldest;
    if (chunk == s->sink_chunk) {
        range[0] = min(oldest, sinks);
        range[1] = newest > oldest ? sinks : range[0];
    } else {
        range[1] = max(0, min(CHUNK, position + 1 - first));
        range[0] = min(range[1], max(0, newest - first));
    }
}

/* Attention of a span's rows to a chunk of positions, for one key head: -> partials, which are the
 * weighted sum of values, the sum of the weights, and the largest score. Spans that read the same
 * keys and values are worked on one after the other. */
static void attend_to_chunk(void *argument, long piece) {
    Step *s = argument;
    const Model *model = s->model;
    const Span *span = &s->spans[piece % s->num_spans];
    long chunk = piece / s->num_spans % s->chunks, head = piece / s->num_spans / s->chunks;
    long size = model->size, kind = model->kind, groups = model->groups;
    long rows = span->rows, queries = rows * groups, width = padded(size) + 2;
    long place = place_of_query(s, span->row, head * groups), stride = s->chunks * width;
    char *const *entries = span->text->entries + 2 * (s->layer - model->layers);
    long first = chunk == s->sink_chunk ? 0 : chunk * CHUNK;
    long offset = head * span->text->head_bytes + first * row_bytes(kind, size);
    const char *x = s->queries + place * input_bytes(kind, size);
    float *out = s->partials + place * stride + chunk * width;

    long visible[rows][2];
    for (long row = 0; row < rows; row++)
        find_visible(s, chunk, span->start + row, visible[row]);
    float scores[queries][CHUNK];
    uint16_t rounded[weight_bytes(kind) == 2 ? queries : 1][CHUNK];
    score_keys(kind, queries, entries[0] + offset, visible[0][0], visible[rows - 1][1], size, x,
               scores[0]);
    for (long query = 0; query < queries; query++) {
        float *sums = out + query * stride;
        memset(sums, 0, 4 * width);
        weigh(scores[query], visible[query / groups], model->scale, model->soft_cap,
              sums + padded(size), weight_bytes(kind) == 2 ? rounded[query] : NULL);
    }
    const char *weights = weight_bytes(kind) == 2 ? (char *)rounded : (char *)scores;
    add_visible(kind, rows, groups, entries[1] + offset, visible, size, weights, out, stride);
}

/* Join the partials of a query for all chunks: -> attended [rows, heads, size]. */
static void join_chunks(void *argument, long place) {
    Step *s = argument;
    const Model *model = s->model;
    long size = padded(model->size), groups = model->groups;
    long row = place / groups % s->rows, head = place / groups / s->rows * groups + place % groups;
    const float *parts = s->partials + place * s->chunks * (size + 2);
    const float *end = parts + s->chunks * (size + 2);
    float sums[size], largest = parts[size + 1], total = 0.0f;
    for (const float *part = parts; part < end; part += size + 2)
        if (part[size + 1] > largest)
            largest = part[size + 1];
    memset(sums, 0, sizeof sums);
    for (const float *part = parts; part < end; part += size + 2) {
        if (part[size] == 0.0f) /* the row attends to nothing of this chunk */
            continue;
        float factor = exponential(part[size + 1] - largest);
        total += part[size] * factor;
        for (long i = 0; i < size; i++)
            sums[i] += part[i] * factor;
    }
    float *out = s->attended + (row * model->heads + head) * model->size;
    for (long i = 0; i < model->size; i++)
        out[i] = sums[place_of_column(model->kind, i)] / total;
}

/* Attention of all rows to the entries of the cache: queries -> attended [rows, heads, size]. A
 * piece is a chunk of the positions of a text, for one key head and all rows of a span. */
static void attend_to_entries(Step *s) {
    const Model *model = s->model;
    long queries = s->rows * model->heads, numbers = s->chunks * (padded(model->size) + 2);
    long scores = min(s->positions, CHUNK) * s->spans->rows * model->groups;
    s->partials = buffer(PARTIALS, 4 * queries * numbers);
    run(attend_to_chunk, s, s->num_spans * model->key_heads * s->chunks, 4 * scores);
    run(join_chunks, s, queries, numbers);
}

/* Attention sublayer (model.layers.Attention): [rows, hidden] -> the same shape. */
static void attention(Step *s, const float *x, float *out) {
    const Model *model = s->model;
    long size = model->size, heads = model->heads, rows = s->rows;
    s->qkv = buffer(QKV, 4 * rows * (heads + 2 * model->key_heads) * size);
    s->queries = buffer(QUERIES, rows * heads * input_bytes(model->kind, size));
    s->attended = buffer(ATTENDED, 4 * rows * heads * size);
    project(s, s->layer->qkv, 3, x, s->qkv);
    run(finish_heads, s, s->num_spans, heads * size);
    attend_to_entries(s);
    project(s, &s->layer->o, 1, s->attended, out);
}

/* activation(gate) * up of a row, with SiLU or tanh GELU: gate_up [2, size] -> gated [size]. */
static void activate(void *argument, long row) {
    Step *s = argument;
    long size = s->layer->down.columns;
    const float *gate = s->gate_up + row * 2 * size, *up = gate + size;
    float *out = s->gated + row * size;
    if (s->model->is_gelu)
        for (long i = 0; i < size; i++) {
            float x = gate[i], inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
            out[i] = up[i] * (0.5f * x * (1.0f + hyperbolic_tangent(inner)));
        }
    else
        for (long i = 0; i < size; i++)
            out[i] = up[i] * (gate[i] / (1.0f + exponential(-gate[i])));
}

/* MLP sublayer (model.layers.GatedMLP): [rows, hidden] -> the same shape. */
static void gated_mlp(Step *s, const float *x, float *out) {
    long size = s->layer->down.columns;
    s->gate_up = buffer(GATE_UP, 4 * s->rows * 2 * size);
    s->gated = buffer(GATED, 4 * s->rows * size);
    project(s, s->layer->gate_up, 2, x, s->gate_up);
    run(activate, s, s->rows, 8 * size); /* exponentials take longer */
    project(s, &s->layer->down, 1, s->gated, out);
}

/* x + sublayer(norm(x)), or x + post_norm(sublayer(norm(x))): x is [rows, hidden]. */
static void add_sublayer(Step *s, void sublayer(Step *, const float *, float *),
                         const float *norm, const float *post_norm, float *x) {
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
static void decoder_block(Step *s, const Layer *layer, float *x) {
    s->layer = layer;
    if (layer->o.kind)
        add_sublayer(s, attention, layer->attention_norm, layer->attention_post_norm, x);
    if (layer->down.kind)
        add_sublayer(s, gated_mlp, layer->mlp_norm, layer->mlp_post_norm, x);
}

enum { MAX_ROWS = 64, MAX_PARTIALS = 1 << 22, MAX_QUERIES = 24 }; /* of a step; queries of a span */

/* Begin a step with the next rows of texts, after those that are done. */
static Step take_rows(const Model *model, const Text *texts, long count, long done) {
    Step s = {.model = model, .spans = buffer(SPANS, MAX_ROWS * sizeof(Span))};
    for (const Text *text = texts; text < texts + count; text++)
        s.positions = max(s.positions, text->start + text->rows);
    s.chunks = (s.positions + CHUNK - 1) / CHUNK;
    s.sink_chunk = model->newest ? s.chunks++ : -1;
    long partials = max(1, s.chunks) * model->heads * (padded(model->size) + 2); /* of a row */
    long most = min(MAX_ROWS, MAX_PARTIALS / partials + 1);
    for (const Text *text = texts; text < texts + count; done -= text->rows, text++)
        for (long row = max(0, done), rows; row < text->rows && s.rows < most; row += rows) {
            rows = min(text->rows - row, min(most - s.rows, max(1, MAX_QUERIES / model->groups)));
            s.spans[s.num_spans++] = (Span){text, s.rows, rows, text->start + row};
            s.rows += rows;
        }
    return s;
}

/* Logits after the tokens of a few texts, [rows] -> [rows, vocab]. Keys and values are cached. */
void step(const Model *model, const Text *texts, long count, const int64_t *tokens, float *logits) {
    long hidden = model->hidden, vocab = model->head.rows, done = 0;
    for (Step s; (s = take_rows(model, texts, count, done)).rows; done += s.rows) {
        float *x = buffer(X, 4 * s.rows * hidden), *out = logits + done * vocab;
        embed(model, tokens + done, s.rows, x);
        for (long layer = 0; layer < model->num_layers; layer++)
            decoder_block(&s, &model->layers[layer], x);
        for (long row = 0; row < s.rows; row++)
            normalise(x + row * hidden, model->norm, hidden, model->eps, x + row * hidden);
        project(&s, &model->head, 1, x, out);
        for (long i = 0; model->final_soft_cap && i < s.rows * vocab; i++)
            out[i] = capped(out[i], model->final_soft_cap);
    }
}

/* Prompts: their linear layers are torch's, which gains by more rows. Their attention is ours. */

static void round_queries(void *argument, long row) {
    Step *s = argument;
    for (long head = 0; head < s->model->heads; head++)
        round_query(s, s->qkv + (row * s->model->heads + head) * s->model->size, row, head);
}

/* Attention of a text's rows to a cache of one layer, which holds their entries
 * (model.layers.attend_causally): rotated queries [rows, heads, size] -> the same shape. */
void attend(const Model *model, const Text *text, float *queries, float *out) {
    long numbers = model->heads * model->size, done = 0; /* numbers of a row */
    for (Step s; (s = take_rows(model, text, 1, done)).rows; done += s.rows) {
        s.layer = model->layers;
        s.qkv = queries + done * numbers;
        s.queries = buffer(QUERIES, s.rows * model->heads * input_bytes(model->kind, model->size));
        s.attended = out + done * numbers;
        run(round_queries, &s, s.rows, numbers);
        attend_to_entries(&s);
    }
}
