/* Short step of a decoder on a CPU: the logits after the next tokens of a few texts.
 *
 * It has the order and the names of the readable blocks (model/layers.py, model/llama.py,
 * model/gemma2.py), and is to be read beside them. Weights are read where torch keeps them:
 * model/fast/cpu.py fills the structures Model, Layer, Matrix, AttentionConfig and Text, whose
 * fields it reads from these declarations. The step knows nothing of plans, samples and files.
 *
 * A line ``run(task, s, pieces, cost)`` calls task(s, 0), task(s, 1) ... on all threads. The other
 * files are read alone:
 *
 *     numbers.h     numbers, registers, and all that a processor decides
 *     products.h    rows of weights with rows of inputs
 *     attention.h   queries with keys, weights with values
 *     threads.h     pieces of work on all threads, and memory that is kept
 *     round.h       rounding of weights to few bits, which a step does not call
 *
 * The numbers of a row do not depend on the other rows of a step, by construction: each is the same
 * sums in the same order, and one thread computes it. */

#include "attention.h"
#include "round.h"

typedef struct {
    Matrix qkv[3], o, gate_up[2], down; /* a sublayer without weights (kind 0) is skipped */
    const float *attention_norm, *attention_post_norm, *mlp_norm, *mlp_post_norm; /* [hidden] */
    const float *q_norm, *k_norm; /* [head_size] or NULL, as the norms after a sublayer */
    const float *cos, *sin;       /* [positions, head_size / 2] */
    long window;                  /* positions that a query attends to; 0 for all */
} Layer;

typedef struct {
    const Layer *layers;
    const char *embedding; /* [vocab, hidden], of the cache's kind of numbers */
    const float *norm;     /* [hidden] */
    Matrix head;
    AttentionConfig attention;
    long num_layers, hidden;
    float embedding_scale, eps, final_soft_cap; /* final_soft_cap 0: none */
    int32_t is_gelu;
} Model;

typedef struct { /* rows of texts on their way through the layers */
    const Model *model;
    const Layer *layer;
    Attention attention;
    float *qkv;     /* [rows, heads + 2 * key_heads, head_size] */
    float *gate_up; /* [rows, 2, inner]: inner is the size of the MLP */
    float *gated;   /* [rows, inner] */
} Step;

/* Embeddings of tokens times their scale: [rows, hidden]. */
static void embed(const Model *model, const int64_t *tokens, long rows, float *x) {
    long hidden = model->hidden, kind = model->attention.kind;
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
    char *inputs; /* x, prepared */
    float *out;   /* [rows, outputs] */
} Projection;

static void prepare_row(void *argument, long row) {
    const Projection *p = argument;
    long kind = p->matrices->kind, columns = p->matrices->columns;
    char *out = p->inputs + row * input_bytes(kind, columns);
    prepare_inputs(kind, p->x + row * columns, columns, out);
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
static void project(long rows, const Matrix *matrices, int count, const float *x, float *out) {
    static Memory inputs;
    Projection p = {matrices, x, rows, .out = out};
    long blocks = 0, columns = matrices->columns;
    for (const Matrix *m = matrices; m < matrices + count; m++) {
        blocks += blocks_of(m);
        p.outputs += m->rows;
    }
    p.inputs = grow(&inputs, rows * input_bytes(matrices->kind, columns));
    run(prepare_row, &p, rows, columns);
    run(project_to_block, &p, blocks, block_bytes(matrices->kind, columns) / 8);
}

/* Rotary embedding (model.layers.rotate) of a head [2 * half], in place; cos and sin are [half]. */
static void rotate(float *head, const float *cos, const float *sin, long half) {
    for (long i = 0; i < half; i++) {
        float a = head[i], b = head[i + half];
        head[i] = a * cos[i] - b * sin[i];
        head[i + half] = b * cos[i] + a * sin[i];
    }
}

/* Norm of a head [head_size], where the family has one, and rotary embedding: in place. */
static void finish_head(const Step *s, const float *norm, long position, float *head) {
    long size = s->model->attention.head_size, half = size / 2;
    if (norm)
        normalise(head, norm, size, s->model->eps, head);
    rotate(head, s->layer->cos + position * half, s->layer->sin + position * half, half);
}

/* Write a head [head_size] to the cache, in its numbers. */
static void write_entry(long kind, const float *head, long size, char *entry) {
    for (long i = 0; i < size; i += WIDTH)
        store(kind, entry + i * bytes_of(kind), load(F32, head + i, size - i), size - i);
}

/* Norms and rotary embeddings of q and k in a span's rows of qkv; k and v go to the cache. */
static void finish_heads(void *argument, long piece) {
    const Step *s = argument;
    const Attention *a = &s->attention;
    const AttentionConfig *c = a->config;
    const Span *span = &a->spans[piece];
    long size = c->head_size, row_size = (c->heads + 2 * c->key_heads) * size;
    for (long row = 0; row < span->rows; row++) {
        long position = span->start + row;
        float *q = s->qkv + (span->row + row) * row_size;
        float *k = q + c->heads * size, *v = k + c->key_heads * size;
        for (long head = 0; head < c->heads; head++)
            finish_head(s, s->layer->q_norm, position, q + head * size);
        for (long head = 0; head < c->key_heads; head++) {
            char *key = entry_of(a, span->text, KEYS, head, position);
            char *value = entry_of(a, span->text, VALUES, head, position);
            finish_head(s, s->layer->k_norm, position, k + head * size);
            write_entry(c->kind, k + head * size, size, key);
            write_entry(c->kind, v + head * size, size, value);
        }
    }
}

/* Attention sublayer (model.layers.Attention): [rows, hidden] -> the same shape. */
static void attention(Step *s, const float *x, float *out) {
    static Memory qkv, attended;
    const AttentionConfig *c = &s->model->attention;
    long q_size = c->heads * c->head_size;
    long row_size = q_size + 2 * c->key_heads * c->head_size;
    float *of_values = grow(&attended, 4 * s->attention.rows * q_size);
    s->qkv = grow(&qkv, 4 * s->attention.rows * row_size);
    project(s->attention.rows, s->layer->qkv, 3, x, s->qkv);
    run(finish_heads, s, s->attention.num_spans, q_size);
    attend_to_entries(&s->attention, s->qkv, row_size, of_values);
    project(s->attention.rows, &s->layer->o, 1, of_values, out);
}

/* activation(gate) * up of a row, with SiLU or tanh GELU: gate_up [2, inner] -> gated [inner]. */
static void activate(void *argument, long row) {
    Step *s = argument;
    long inner = s->layer->down.columns;
    const float *gate = s->gate_up + row * 2 * inner, *up = gate + inner;
    const float sqrt_2_by_pi = 0.7978845608028654f;
    float *out = s->gated + row * inner;
    if (s->model->is_gelu)
        for (long i = 0; i < inner; i++) {
            float x = gate[i], y = sqrt_2_by_pi * (x + 0.044715f * x * x * x);
            out[i] = up[i] * (0.5f * x * (1.0f + hyperbolic_tangent(y)));
        }
    else
        for (long i = 0; i < inner; i++)
            out[i] = up[i] * (gate[i] / (1.0f + exponential(-gate[i])));
}

/* MLP sublayer (model.layers.GatedMLP): [rows, hidden] -> the same shape. */
static void gated_mlp(Step *s, const float *x, float *out) {
    static Memory gate_up, gated;
    long inner = s->layer->down.columns;
    s->gate_up = grow(&gate_up, 4 * s->attention.rows * 2 * inner);
    s->gated = grow(&gated, 4 * s->attention.rows * inner);
    project(s->attention.rows, s->layer->gate_up, 2, x, s->gate_up);
    run(activate, s, s->attention.rows, 8 * inner); /* exponentials take longer */
    project(s->attention.rows, &s->layer->down, 1, s->gated, out);
}

/* x + sublayer(norm(x)), or x + post_norm(sublayer(norm(x))): x is [rows, hidden]. */
static void add_sublayer(Step *s, void sublayer(Step *, const float *, float *),
                         const float *norm, const float *post_norm, float *x) {
    static Memory of_normed, of_out;
    long hidden = s->model->hidden, count = s->attention.rows * hidden;
    float eps = s->model->eps, *normed = grow(&of_normed, 4 * count);
    float *out = grow(&of_out, 4 * count);
    for (long first = 0; first < count; first += hidden)
        normalise(x + first, norm, hidden, eps, normed + first);
    sublayer(s, normed, out);
    for (long first = 0; post_norm && first < count; first += hidden)
        normalise(out + first, post_norm, hidden, eps, out + first);
    for (long i = 0; i < count; i++)
        x[i] += out[i];
}

/* Block (model.llama.LlamaBlock, model.gemma2.Gemma2Block), without what the plan skips. */
static void decoder_block(Step *s, long number, float *x) {
    const Layer *layer = &s->model->layers[number];
    s->layer = layer;
    s->attention.layer = number;
    s->attention.window = layer->window;
    if (layer->o.kind)
        add_sublayer(s, attention, layer->attention_norm, layer->attention_post_norm, x);
    if (layer->down.kind)
        add_sublayer(s, gated_mlp, layer->mlp_norm, layer->mlp_post_norm, x);
}

/* Logits after the tokens of a few texts, [rows] -> [rows, vocab]. Keys and values are cached. */
void step(const Model *model, const Text *texts, long count, const int64_t *tokens, float *logits) {
    static Memory states;
    long hidden = model->hidden, vocab = model->head.rows, done = 0;
    for (Attention a; (a = take_rows(&model->attention, texts, count, done)).rows; done += a.rows) {
        Step s = {model, .attention = a};
        float *x = grow(&states, 4 * a.rows * hidden), *out = logits + done * vocab;
        embed(model, tokens + done, a.rows, x);
        for (long layer = 0; layer < model->num_layers; layer++)
            decoder_block(&s, layer, x);
        for (long row = 0; row < a.rows; row++)
            normalise(x + row * hidden, model->norm, hidden, model->eps, x + row * hidden);
        project(a.rows, &model->head, 1, x, out);
        for (long i = 0; model->final_soft_cap && i < a.rows * vocab; i++)
            out[i] = capped(out[i], model->final_soft_cap);
    }
}

/* Attention of a prompt, whose linear layers are torch's (model.layers.attend_causally): rotated
 * queries of a text [rows, heads, head_size], and a cache of one layer that holds its entries
 * -> out, of the same shape. */
void attend(const AttentionConfig *c, const Text *text, long window, const float *q, float *out) {
    long numbers = c->heads * c->head_size, done = 0; /* numbers of a row */
    for (Attention a; (a = take_rows(c, text, 1, done)).rows; done += a.rows) {
        a.window = window;
        attend_to_entries(&a, q + done * numbers, numbers, out + done * numbers);
    }
}
