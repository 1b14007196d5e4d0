/* Attention of the rows of a step to the keys and values of a layer. From top to bottom: what it
 * reads, where numbers lie, windows, how a step is divided, scores, softmax, weighted sums of
 * values, and the three tasks of attend_to_entries, which call these. It knows nothing of linear
 * layers, norms and rotary embeddings. A weight is here a position's share in a softmax, not a
 * parameter. A query is the head of a row.
 *
 * Positions are divided into chunks, and a piece of work is one chunk, for one key head and a few
 * queries that read the same keys and values. A score is one sum, to which the columns of a head
 * are added from the first to the last; a lane holds the score of one position. A weighted sum gets
 * the positions two by two, from the first to the last; a lane holds a column. So the bits do not
 * depend on the number of queries, nor on the width of a register. */

#pragma once
#include "products.h"
#include "threads.h"

typedef struct { /* what all layers share */
    long kind;   /* of the cache: BF16 or F32 */
    long heads, key_heads, heads_per_key, head_size;
    long newest, sinks; /* window of a plan: the newest and the first positions; newest 0: all */
    float scale, soft_cap; /* soft_cap 0: none */
} AttentionConfig;

typedef struct {          /* rows of one text, at positions that follow each other */
    char *const *entries; /* [layers, 2], keys and values: [key_heads, positions, head_size] */
    long rows, start;     /* start: the first row's position */
    long head_bytes;      /* from one head's entries to the next */
} Text;

typedef struct { /* rows of a text that attend together: they read its keys and values once */
    const Text *text;
    long row, rows, start; /* row: the first one's number in the step */
} Span;

typedef struct { /* attention of all rows of a step, layer by layer */
    /* set for a step, by take_rows */
    const AttentionConfig *config;
    Span *spans;
    long num_spans, rows, positions;
    long chunks;     /* chunks of CHUNK positions, and that of the sinks */
    long sink_chunk; /* the last one, or -1 if a plan has no window */
    char *queries;   /* q, prepared: [key_heads, rows, heads_per_key, head_size] */
    float *partials; /* [key_heads, rows, heads_per_key, chunks, partial_size] */
    /* set for a layer, by the caller */
    long layer, window; /* window: positions that a query attends to; 0 for all */
    /* set for a layer, by attend_to_entries */
    const float *q; /* [rows, heads, head_size], q_stride numbers from row to row */
    long q_stride;
    float *out; /* [rows, heads, head_size] */
} Attention;

enum { CHUNK = 512 };        /* positions of scores and weights: [queries, CHUNK] */
enum { WEIGHTS = 4 * CHUNK }; /* bytes from a query's weights to the next */
enum { TURNED = 2 * WIDTH }; /* positions whose keys are turned together */
enum { MANY = WIDTH == 8 ? 4 : 8 }; /* queries at a time, whose sums fit into the registers */

typedef struct { /* positions of a chunk, counted from its first */
    long begin, end;
} Range;

enum { KEYS, VALUES };

/* What follows a query's weighted sum of values: its weights' sum, and its largest scaled score. */
enum { TOTAL, LARGEST, NUM_AFTER };

typedef struct { /* weighted sums of the values of a chunk, for a few queries */
    long kind, head_size;
    const char *values;  /* [CHUNK, head_size] */
    const char *weights; /* [queries, CHUNK], WEIGHTS bytes each */
    float *sums;         /* [queries, padded head_size], stride numbers from query to query */
    long stride;
} Weighted;

/* Bytes of a weight: values in bfloat16 meet such weights where pairs are multiplied. */
INLINE long weight_bytes(long kind) { return kind == BF16 && HAS_PAIRS ? 2 : 4; }

/* Numbers of a weighted sum: the columns of a head, filled up to two registers. Where pairs are
 * multiplied, the even columns of two registers come before the odd ones: see place_of_column. */
INLINE long padded(long size) { return (size + 2 * WIDTH - 1) / (2 * WIDTH) * (2 * WIDTH); }
INLINE long place_of_column(long kind, long column) {
    long of_two = column % (2 * WIDTH), first = column - of_two;
    return weight_bytes(kind) == 4 ? column : first + of_two % 2 * WIDTH + of_two / 2;
}

/* Numbers of a query's partial result of a chunk: the weighted sum of values, and what follows. */
INLINE long partial_size(const AttentionConfig *c) { return padded(c->head_size) + NUM_AFTER; }

/* Place of a row's head among queries and partials: heads of the same keys lie side by side. */
INLINE long place_of_query(const Attention *a, long row, long head) {
    long heads = a->config->heads_per_key;
    return (head / heads * a->rows + row) * heads + head % heads;
}

/* Place of an entry of the cache in the layer of ``a``: [head_size] numbers. */
INLINE char *entry_of(const Attention *a, const Text *text, int which, long head, long position) {
    long bytes = row_bytes(a->config->kind, a->config->head_size);
    return text->entries[2 * a->layer + which] + head * text->head_bytes + position * bytes;
}

/* Positions of a chunk that a row attends to. A layer's window hides all before the oldest. The
 * window of a plan also hides those from the sinks to the newest; the sinks are then a chunk of
 * their own:
 *
 *     0 ...... oldest ...... sinks ............. newest ...... position
 *              [  sink chunk )       (hidden)    [   other chunks     ] */
static Range visible_to(const Attention *a, long position, long chunk) {
    long end = position + 1, first = chunk * CHUNK, sinks = a->config->sinks;
    long oldest = a->window ? max(0, end - a->window) : 0;
    long newest = a->config->newest ? max(oldest, end - a->config->newest) : oldest;
    if (newest <= sinks) /* nothing is hidden */
        newest = oldest;
    if (chunk == a->sink_chunk) {
        long begin = min(oldest, sinks);
        return (Range){begin, newest > oldest ? sinks : begin};
    }
    long last = max(0, min(CHUNK, end - first));
    return (Range){min(last, max(0, newest - first)), last};
}

enum { MAX_ROWS = 64, MAX_PARTIALS = 1 << 22, MAX_QUERIES = 24 }; /* of a step; queries of a span */

/* Begin the attention of a step: of the next rows of texts, after those that are done. */
static Attention take_rows(const AttentionConfig *c, const Text *texts, long count, long done) {
    static Memory spans, queries, partials;
    Attention a = {.config = c, .spans = grow(&spans, MAX_ROWS * sizeof(Span)), .sink_chunk = -1};
    for (const Text *text = texts; text < texts + count; text++)
        a.positions = max(a.positions, text->start + text->rows);
    a.chunks = (a.positions + CHUNK - 1) / CHUNK;
    if (c->newest)
        a.sink_chunk = a.chunks++;
    long numbers = max(1, a.chunks) * c->heads * partial_size(c); /* partials of a row */
    long most = min(MAX_ROWS, MAX_PARTIALS / numbers + 1);
    long span_rows = max(1, MAX_QUERIES / c->heads_per_key);
    for (const Text *text = texts; text < texts + count; text++) {
        long row = min(done, text->rows); /* the first one that is not done */
        done -= row;
        while (row < text->rows && a.rows < most) {
            long rows = min(min(span_rows, text->rows - row), most - a.rows);
            a.spans[a.num_spans++] = (Span){text, a.rows, rows, text->start + row};
            a.rows += rows;
            row += rows;
        }
    }
    a.queries = grow(&queries, a.rows * c->heads * input_bytes(c->kind, c->head_size));
    a.partials = grow(&partials, 4 * a.rows * numbers);
    return a;
}

/* Do what follows once, for ``queries`` of 1 to MANY. The loop is unrolled, so that ``n`` is a
 * constant wherever it equals ``queries``: then the compiler keeps all their sums in registers. */
#define AS_CONSTANT(n, queries)                                                                    \
    _Pragma("GCC unroll 8") for (int n = 1; n <= MANY; n++) if (n == (queries))

/* Exchange rows and columns [WIDTH, WIDTH]: a round puts the lanes of two rows in turns. */
INLINE void transpose(Ints rows[WIDTH]) {
#pragma GCC unroll 4
    for (int round = 1; round < WIDTH; round *= 2) {
        Ints turned[WIDTH];
#pragma GCC unroll 8
        for (int i = 0; i < WIDTH / 2; i++) {
            turned[2 * i] = PICK(Ints, rows[i], rows[i + WIDTH / 2], LOW);
            turned[2 * i + 1] = PICK(Ints, rows[i], rows[i + WIDTH / 2], HIGH);
        }
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; i++)
            rows[i] = turned[i];
    }
}

/* Turn keys, a word of four bytes of each at a time: [TURNED, words] -> [words, TURNED], with a
 * position in each lane of two registers. Positions from ``count`` on are zeros. */
static void turn_keys(const char *keys, long count, long words, Ints (*turned)[2]) {
    for (int half = 0; half < 2; half++) {
        const char *first = keys + half * WIDTH * 4 * words;
        long left = count - half * WIDTH;
        for (long word = 0; word < words; word += WIDTH) {
            Ints rows[WIDTH];
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; i++)
                rows[i] = (Ints)load(F32, first + 4 * (i * words + word),
                                     i < left ? words - word : 0);
            transpose(rows);
            for (int i = 0; i < min(WIDTH, words - word); i++)
                turned[word + i][half] = rows[i];
        }
    }
}

/* Scores of a few prepared queries, x_bytes apart, at turned keys: -> [queries, CHUNK]. */
INLINE void score(long kind, int queries, Ints (*turned)[2], long words, const char *x,
                  long x_bytes, float *out) {
    Floats sums[MANY][2] = {0};
    for (long word = 0; word < words; word++)
#pragma GCC unroll 8
        for (int query = 0; query < queries; query++)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                Ints keys = turned[word][half];
                const char *numbers = x + query * x_bytes + 4 * word;
                Floats *sum = &sums[query][half];
                if (kind == F32) {
                    *sum = multiply_add((Floats)keys, broadcast(AT(float, numbers)), *sum);
                } else if (HAS_PAIRS) {
                    *sum = multiply_add_bf16(*sum, keys, broadcast_ints(AT(int32_t, numbers)));
                } else { /* even columns come before the odd ones: see round_to_bf16 */
                    Floats even = (Floats)(keys << 16), odd = (Floats)(keys & (int32_t)0xFFFF0000);
                    numbers += word / LANES * 4 * LANES;
                    *sum = multiply_add(even, broadcast(AT(float, numbers)), *sum);
                    *sum = multiply_add(odd, broadcast(AT(float, numbers + 4 * LANES)), *sum);
                }
            }
#pragma GCC unroll 8
    for (int query = 0; query < queries; query++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
            AT(Floats, out + query * CHUNK + half * WIDTH) = sums[query][half];
}

/* Scores of prepared queries at a range of keys [CHUNK, head_size]: -> [queries, CHUNK]. */
static void score_keys(long kind, long head_size, const char *keys, Range range, long queries,
                       const char *x, float *scores) {
    long bytes = row_bytes(kind, head_size), x_bytes = input_bytes(kind, head_size);
    long words = bytes / 4;
    Ints turned[words][2];
    for (long key = range.begin / TURNED * TURNED; key < range.end; key += TURNED) {
        turn_keys(keys + key * bytes, range.end - key, words, turned);
        for (long query = 0; query < queries; query += MANY) {
            const char *first = x + query * x_bytes;
            float *out = scores + query * CHUNK + key;
            AS_CONSTANT(n, min(MANY, queries - query)) {
                if (kind == BF16)
                    score(BF16, n, turned, words, first, x_bytes, out);
                else
                    score(F32, n, turned, words, first, x_bytes, out);
            }
        }
    }
}

/* Bits of a float32 number as an integer, and back. Integers have the order of the numbers, and NaN
 * is the largest or the least, by its sign: so their maximum, unlike that of numbers, does not
 * depend on where a NaN stands, and the compiler may find it lane by lane. */
INLINE int32_t in_order(int32_t bits) { return bits ^ (bits >> 31 & 0x7FFFFFFF); }

/* Weights of a query's visible positions: softmax of their scores without its division, which is
 * exponentials of the scaled scores less the largest. They replace the scores, in bfloat16 where
 * pairs are multiplied: a store never reaches what is still to be read, since it writes at half the
 * offset. Weights beside the visible ones are zeros, since values are added two by two, from an
 * even position on. */
static void weigh(const AttentionConfig *c, float *scores, Range visible, float after[NUM_AFTER]) {
    float scale = c->scale, cap = c->soft_cap;
    long begin = visible.begin, end = visible.end;
    int32_t highest = in_order(bits_of(-__builtin_inff()));
    for (long i = begin; i < end; i++) {
        scores[i] = cap ? capped(scores[i] * scale, cap) : scores[i] * scale;
        int32_t score = in_order(bits_of(scores[i]));
        highest = score > highest ? score : highest;
    }
    float largest = as_float(in_order(highest));
    for (long i = begin; i < end; i++)
        scores[i] = exponential(scores[i] - largest);
    after[TOTAL] = sum_of(scores + begin, end - begin, 0);
    after[LARGEST] = largest;
    if (begin % 2)
        scores[--begin] = 0.0f;
    if (end % 2)
        scores[end++] = 0.0f;
    if (weight_bytes(c->kind) == 2)
        for (long i = begin; i < end; i += WIDTH)
            store(BF16, (uint16_t *)scores + i, load(F32, scores + i, end - i), end - i);
}

/* Add two weighted values, 2 * WIDTH columns of each, to the sums of a few queries. ``left``
 * columns are left of a value. */
INLINE void add_two(long kind, int queries, const char *value, const char *next, long left,
                    const char *weights, Floats sums[MANY][2]) {
    if (weight_bytes(kind) == 2) {
        Ints a = (Ints)load(F32, value, left / 2), b = (Ints)load(F32, next, left / 2);
        Ints even = (a & 0xFFFF) | b << 16;
        Ints odd = (Ints)((Uints)a >> 16) | (b & (int32_t)0xFFFF0000);
#pragma GCC unroll 8
        for (int query = 0; query < queries; query++) {
            Ints pair = broadcast_ints(AT(int32_t, weights + query * WEIGHTS));
            sums[query][0] = multiply_add_bf16(sums[query][0], even, pair);
            sums[query][1] = multiply_add_bf16(sums[query][1], odd, pair);
        }
        return;
    }
#pragma GCC unroll 2
    for (int second = 0; second < 2; second++) {
        const char *entry = second ? next : value;
        Floats low = load(kind, entry, left);
        Floats high = load(kind, entry + WIDTH * bytes_of(kind), left - WIDTH);
#pragma GCC unroll 8
        for (int query = 0; query < queries; query++) {
            Floats weight = broadcast(AT(float, weights + query * WEIGHTS + 4 * second));
            sums[query][0] = multiply_add(low, weight, sums[query][0]);
            sums[query][1] = multiply_add(high, weight, sums[query][1]);
        }
    }
}

/* Add the values of a range of positions to the sums of a few queries, in 2 * WIDTH columns, or in
 * those that are left. Two positions are added at a time, an even one first, or one and zeros. */
INLINE void add_values(long kind, int queries, long left, const Weighted *w, long query,
                       long column, Range range) {
    static const char zeros[8 * WIDTH];
    const char *values = w->values + column * bytes_of(kind);
    const char *weights = w->weights + query * WEIGHTS;
    float *out = w->sums + query * w->stride + column;
    long bytes = row_bytes(kind, w->head_size), stride = w->stride;
    Floats sums[MANY][2];
#pragma GCC unroll 8
    for (int i = 0; i < queries; i++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
            sums[i][half] = AT(Floats, out + i * stride + half * WIDTH);
    for (long at = range.begin & ~1; at < range.end; at += 2) {
        const char *value = at < range.begin ? zeros : values + at * bytes;
        const char *next = at + 1 < range.end ? values + (at + 1) * bytes : zeros;
        add_two(kind, queries, value, next, left, weights + at * weight_bytes(kind), sums);
    }
#pragma GCC unroll 8
    for (int i = 0; i < queries; i++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
            AT(Floats, out + i * stride + half * WIDTH) = sums[i][half];
}

/* The same for any number of queries, from ``first`` to before ``end``, in all columns. The last
 * columns, where they fill less than two registers, are added query by query. */
static void add_all_values(const Weighted *w, long first, long end, Range range) {
    if (range.begin >= range.end)
        return;
    long left = w->head_size % (2 * WIDTH), whole = w->head_size - left;
    for (long column = 0; column < whole; column += 2 * WIDTH)
        for (long query = first; query < end; query += MANY)
            AS_CONSTANT(n, min(MANY, end - query)) {
                if (w->kind == BF16)
                    add_values(BF16, n, 2 * WIDTH, w, query, column, range);
                else
                    add_values(F32, n, 2 * WIDTH, w, query, column, range);
            }
    for (long query = first; left && query < end; query++)
        add_values(w->kind, 1, left, w, query, whole, range);
}

/* Add the values of the positions that each row sees. A row has as many queries as a key head has
 * heads. From row to row, begin and end never decrease. Positions that all rows see are added
 * for all at once, those before and after them row by row. */
static void add_visible(const Weighted *w, long rows, long heads, const Range *visible) {
    long first = (visible[rows - 1].begin + 1) & ~1;
    Range by_all = {first, max(first, visible[0].end & ~1)};
    for (long row = 0; row < rows; row++) {
        Range before = {visible[row].begin, min(visible[row].end, by_all.begin)};
        add_all_values(w, row * heads, (row + 1) * heads, before);
    }
    add_all_values(w, 0, rows * heads, by_all);
    for (long row = 0; row < rows; row++) {
        Range after = {max(visible[row].begin, by_all.end), visible[row].end};
        add_all_values(w, row * heads, (row + 1) * heads, after);
    }
}

/* Three tasks, one after the other. For each span, chunk and key head, a piece of the second task
 * gives a partial result per query, and the third one joins those of a query:
 *
 *     positions          0 ..... 511 | 512 ..... 1023 | 1024 .....
 *     text 0   span 0  | chunk 0     | chunk 1        | chunk 2   |  -> its rows, joined
 *              span 1  | chunk 0     | chunk 1        | chunk 2   |  -> its rows, joined
 *     text 1   span 2  | chunk 0     | chunk 1        | empty     |  -> its rows, joined
 *
 * Under a plan with a window the sinks are one more chunk, the last. */

/* First task: prepare the queries of a row to meet keys. */
static void prepare_queries(void *argument, long row) {
    const Attention *a = argument;
    long kind = a->config->kind, size = a->config->head_size, bytes = input_bytes(kind, size);
    const float *q = a->q + row * a->q_stride;
    for (long head = 0; head < a->config->heads; head++)
        prepare_inputs(kind, q + head * size, size,
                       a->queries + place_of_query(a, row, head) * bytes);
}

/* Second task: the partial results of a span's rows, for one chunk and one key head. Spans that
 * read the same keys and values are worked on one after the other. */
static void attend_to_chunk(void *argument, long piece) {
    const Attention *a = argument;
    const AttentionConfig *c = a->config;
    const Span *span = &a->spans[piece % a->num_spans];
    long chunk = piece / a->num_spans % a->chunks, head = piece / a->num_spans / a->chunks;
    long first = chunk == a->sink_chunk ? 0 : chunk * CHUNK;
    const char *keys = entry_of(a, span->text, KEYS, head, first);
    const char *values = entry_of(a, span->text, VALUES, head, first);
    long queries = span->rows * c->heads_per_key;
    long place = place_of_query(a, span->row, head * c->heads_per_key); /* of the first query */
    const char *x = a->queries + place * input_bytes(c->kind, c->head_size);
    float *out = a->partials + (place * a->chunks + chunk) * partial_size(c);
    long stride = a->chunks * partial_size(c);

    Range visible[span->rows];
    for (long row = 0; row < span->rows; row++)
        visible[row] = visible_to(a, span->start + row, chunk);
    float scores[queries][CHUNK];
    Range by_any = {visible[0].begin, visible[span->rows - 1].end};
    score_keys(c->kind, c->head_size, keys, by_any, queries, x, scores[0]);
    for (long query = 0; query < queries; query++) {
        float *sums = out + query * stride;
        memset(sums, 0, 4 * partial_size(c));
        weigh(c, scores[query], visible[query / c->heads_per_key], sums + padded(c->head_size));
    }
    Weighted w = {.kind = c->kind,
                  .head_size = c->head_size,
                  .values = values,
                  .weights = (char *)scores,
                  .sums = out,
                  .stride = stride};
    add_visible(&w, span->rows, c->heads_per_key, visible);
}

/* Third task: join the partial results of a query for all chunks. */
static void join_chunks(void *argument, long place) {
    const Attention *a = argument;
    const AttentionConfig *c = a->config;
    long size = padded(c->head_size), part_size = partial_size(c);
    /* the row and the head that have this place_of_query */
    long row = place / c->heads_per_key % a->rows;
    long key_head = place / c->heads_per_key / a->rows;
    long head = key_head * c->heads_per_key + place % c->heads_per_key;
    const float *parts = a->partials + place * a->chunks * part_size;
    const float *end = parts + a->chunks * part_size;
    float sums[size], largest = parts[size + LARGEST], total = 0.0f;
    for (const float *part = parts; part < end; part += part_size)
        if (part[size + LARGEST] > largest)
            largest = part[size + LARGEST];
    memset(sums, 0, sizeof sums);
    for (const float *part = parts; part < end; part += part_size) {
        if (part[size + TOTAL] == 0.0f) /* the row attends to nothing of this chunk */
            continue;
        float factor = exponential(part[size + LARGEST] - largest);
        total += part[size + TOTAL] * factor;
        for (long i = 0; i < size; i++)
            sums[i] += part[i] * factor;
    }
    float *out = a->out + (row * c->heads + head) * c->head_size;
    for (long i = 0; i < c->head_size; i++)
        out[i] = sums[place_of_column(c->kind, i)] / total;
}

/* Attention of all rows to the entries of a layer: rotated queries -> out
 * [rows, heads, head_size]. */
static void attend_to_entries(Attention *a, const float *q, long q_stride, float *out) {
    const AttentionConfig *c = a->config;
    long pieces = a->num_spans * c->key_heads * a->chunks;
    long scores = min(a->positions, CHUNK) * a->spans->rows * c->heads_per_key; /* of a piece */
    a->q = q;
    a->q_stride = q_stride;
    a->out = out;
    run(prepare_queries, a, a->rows, c->heads * c->head_size);
    run(attend_to_chunk, a, pieces, 4 * scores);
    run(join_chunks, a, a->rows * c->heads, a->chunks * partial_size(c));
}
