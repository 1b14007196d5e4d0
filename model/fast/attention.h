/* Products of attention, for up to a few dozen queries that read the same keys and values. From top
 * to bottom: scores, softmax, weighted sums of values. It knows nothing of models and windows.
 *
 * A score is one sum, to which the columns of a head are added from the first to the last; a lane
 * holds the score of one position. A weighted sum gets the positions two by two, from the first to
 * the last; a lane holds a column. So the bits do not depend on the number of queries, nor on the
 * width of a register. */

#include "products.h"

enum { CHUNK = 512 };        /* positions of scores and weights: [queries, CHUNK] */
enum { TURNED = 2 * WIDTH }; /* positions whose keys are turned together */
enum { MANY = WIDTH == 8 ? 4 : 8 }; /* queries at a time, whose sums fit into the registers */

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

/* Turn keys, four bytes of each at a time: [TURNED, words] -> [words, TURNED], with a position in
 * each lane. Those from ``count`` on are zeros. */
static void turn_keys(const char *keys, long count, long words, Ints (*turned)[2]) {
    for (int half = 0; half < 2; half++, keys += 4 * words * WIDTH, count -= WIDTH)
        for (long word = 0; word < words; word += WIDTH) {
            Ints rows[WIDTH];
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; i++)
                rows[i] = (Ints)load(F32, keys + 4 * (i * words + word),
                                     i < count ? words - word : 0);
            transpose(rows);
            for (int i = 0; i < min(WIDTH, words - word); i++)
                turned[word + i][half] = rows[i];
        }
}

/* Scores of a few rounded queries, x_bytes apart, at turned keys: -> [queries, CHUNK]. */
INLINE void score(long kind, int queries, Ints (*turned)[2], long words, const char *x,
                  long x_bytes, float *out) {
    Floats sums[MANY][2] = {0};
    for (long word = 0; word < words; word++)
#pragma GCC unroll 16
        for (int i = 0; i < 2 * queries; i++) {
            Ints keys = turned[word][i % 2];
            const char *query = x + i / 2 * x_bytes + 4 * word;
            Floats *sum = &sums[i / 2][i % 2];
            if (kind == F32) {
                *sum = multiply_add((Floats)keys, broadcast(AT(float, query)), *sum);
            } else if (HAS_PAIRS) {
                *sum = multiply_add_bf16(*sum, keys, AT(int32_t, query) - (Ints){0});
            } else { /* even columns come before the odd ones: see round_inputs */
                Floats even = (Floats)(keys << 16), odd = (Floats)(keys & (int32_t)0xFFFF0000);
                query += word / LANES * 4 * LANES;
                *sum = multiply_add(even, broadcast(AT(float, query)), *sum);
                *sum = multiply_add(odd, broadcast(AT(float, query + 4 * LANES)), *sum);
            }
        }
#pragma GCC unroll 16
    for (int i = 0; i < 2 * queries; i++)
        AT(Floats, out + i / 2 * CHUNK + i % 2 * WIDTH) = sums[i / 2][i % 2];
}

/* Scores of rounded queries at keys [begin, end) of a head [CHUNK, size]: -> [queries, CHUNK]. */
static void score_keys(long kind, long queries, const char *keys, long begin, long end, long size,
                       const char *x, float *scores) {
    long bytes = row_bytes(kind, size), x_bytes = input_bytes(kind, size);
    Ints turned[bytes / 4][2];
    for (long key = begin / TURNED * TURNED; key < end; key += TURNED) {
        turn_keys(keys + key * bytes, end - key, bytes / 4, turned);
        for (long query = 0, taken; query < queries; query += taken) {
            const char *first = x + query * x_bytes;
            float *out = scores + query * CHUNK + key;
            taken = min(MANY, queries - query);
#pragma GCC unroll 8
            for (int n = 1; n <= MANY; n++)
                if (n == taken && kind == BF16)
                    score(BF16, n, turned, bytes / 4, first, x_bytes, out);
                else if (n == taken)
                    score(F32, n, turned, bytes / 4, first, x_bytes, out);
        }
    }
}

/* Bytes of a weight: values in bfloat16 meet such weights where pairs are multiplied. */
INLINE long weight_bytes(long kind) { return kind == BF16 && HAS_PAIRS ? 2 : 4; }

/* Weights of a query's visible positions: softmax of their scores without its division, which is
 * exponentials of the scaled scores less the largest, in place. sum[0] is the sum of the weights,
 * sum[1] the largest scaled score. Weights beside the visible ones are zeros, up to an even number.
 * ``rounded``, where it is not NULL, gets them in bfloat16. A cap of 0 is none. */
static void weigh(float *scores, const long visible[2], float scale, float cap, float sum[2],
                  uint16_t *rounded) {
    long begin = visible[0], end = visible[1];
    int32_t largest = -0x7F800001;
    for (long i = begin; i < end; i++) {
        scores[i] = cap ? capped(scores[i] * scale, cap) : scores[i] * scale;
        /* compared as integers of the same order: NaN is the largest or least, by its sign */
        int32_t bits = bits_of(scores[i]), ordered = bits ^ (bits >> 31 & 0x7FFFFFFF);
        largest = ordered > largest ? ordered : largest;
    }
    float highest = as_float(largest ^ (largest >> 31 & 0x7FFFFFFF));
    for (long i = begin; i < end; i++)
        scores[i] = exponential(scores[i] - highest);
    sum[0] = sum_of(scores + begin, end - begin, 0);
    sum[1] = highest;
    if (begin % 2)
        scores[--begin] = 0.0f;
    if (end % 2)
        scores[end++] = 0.0f;
    for (long i = begin; rounded && i < end; i += WIDTH)
        store(BF16, rounded + i, load(F32, scores + i, end - i), end - i);
}

/* Numbers of a weighted sum: the columns of a head, filled up to two registers. Where pairs are
 * multiplied, the even columns of two registers come before the odd ones: see place_of_column. */
INLINE long padded(long size) { return (size + 2 * WIDTH - 1) / (2 * WIDTH) * (2 * WIDTH); }
INLINE long place_of_column(long kind, long i) {
    long column = i % (2 * WIDTH);
    return weight_bytes(kind) == 4 ? i : i - column + column % 2 * WIDTH + column / 2;
}

/* Add two weighted values, 2 * WIDTH columns of each, to the sums of a few queries. */
INLINE void add_two(long kind, int queries, const char *value, const char *next, long left,
                    const char *weights, Floats sums[MANY][2]) {
    if (weight_bytes(kind) == 2) {
        Ints a = (Ints)load(F32, value, left / 2), b = (Ints)load(F32, next, left / 2);
        Ints even = (a & 0xFFFF) | b << 16;
        Ints odd = (Ints)((Uints)a >> 16) | (b & (int32_t)0xFFFF0000);
#pragma GCC unroll 8
        for (int query = 0; query < queries; query++) {
            Ints pair = AT(int32_t, weights + query * CHUNK * 2) - (Ints){0};
            sums[query][0] = multiply_add_bf16(sums[query][0], even, pair);
            sums[query][1] = multiply_add_bf16(sums[query][1], odd, pair);
        }
        return;
    }
#pragma GCC unroll 2
    for (int place = 0; place < 2; place++, value = next, weights += 4) {
        Floats first = load(kind, value, left);
        Floats second = load(kind, value + WIDTH * bytes_of(kind), left - WIDTH);
#pragma GCC unroll 8
        for (int query = 0; query < queries; query++) {
            Floats weight = broadcast(AT(float, weights + query * CHUNK * 4));
            sums[query][0] = multiply_add(first, weight, sums[query][0]);
            sums[query][1] = multiply_add(second, weight, sums[query][1]);
        }
    }
}

/* Add the weighted values of positions [begin, end), ``row`` bytes apart, to the sums of a few
 * queries: weights [queries, CHUNK] -> out [queries, stride], in 2 * WIDTH columns, or in those
 * that are left. Two positions are added at a time, an even one first, or one and zeros. */
INLINE void add_values(long kind, int queries, const char *values, long row, long left, long begin,
                       long end, const char *weights, float *out, long stride) {
    static const char zeros[8 * WIDTH];
    Floats sums[MANY][2];
#pragma GCC unroll 16
    for (int i = 0; i < 2 * queries; i++)
        sums[i / 2][i % 2] = AT(Floats, out + i / 2 * stride + i % 2 * WIDTH);
    for (long at = begin & ~1; at < end; at += 2) {
        const char *value = at < begin ? zeros : values + at * row;
        const char *next = at + 1 < end ? values + (at + 1) * row : zeros;
        add_two(kind, queries, value, next, left, weights + at * weight_bytes(kind), sums);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 2 * queries; i++)
        AT(Floats, out + i / 2 * stride + i % 2 * WIDTH) = sums[i / 2][i % 2];
}

/* The same for any number of queries, in all columns: values [positions, size]. Columns that fill
 * less than two registers are added query by query. */
static void add_all_values(long kind, long queries, const char *values, long begin, long end,
                           long size, const char *weights, float *out, long stride) {
    long row = size * bytes_of(kind), bytes = CHUNK * weight_bytes(kind), taken;
    for (long column = 0; column < size && begin < end; column += 2 * WIDTH)
        for (long query = 0, left = size - column; query < queries; query += taken) {
            const char *v = values + column * bytes_of(kind), *w = weights + query * bytes;
            float *sums = out + query * stride + column;
            taken = left < 2 * WIDTH ? 1 : min(MANY, queries - query);
            if (left < 2 * WIDTH) {
                add_values(kind, 1, v, row, left, begin, end, w, sums, stride);
                continue;
            }
#pragma GCC unroll 8
            for (int n = 1; n <= MANY; n++)
                if (n == taken && kind == BF16)
                    add_values(BF16, n, v, row, 2 * WIDTH, begin, end, w, sums, stride);
                else if (n == taken)
                    add_values(F32, n, v, row, 2 * WIDTH, begin, end, w, sums, stride);
        }
}

/* Add the weighted values of the positions that each row sees: visible [rows, 2], where a later row
 * sees no earlier positions, and no fewer later ones. A row has ``groups`` queries. Positions that
 * all rows see are added for all at once, those before and after them row by row. */
static void add_visible(long kind, long rows, long groups, const char *values,
                        const long (*visible)[2], long size, const char *weights, float *out,
                        long stride) {
    long common = (visible[rows - 1][0] + 1) & ~1, until = max(common, visible[0][1] & ~1);
    long bytes = groups * CHUNK * weight_bytes(kind);
    for (long part = 0; part < 2; part++) {
        for (long row = 0; row < rows; row++) {
            long begin = part ? max(until, visible[row][0]) : visible[row][0];
            long end = part ? visible[row][1] : min(common, visible[row][1]);
            add_all_values(kind, groups, values, begin, end, size, weights + row * bytes,
                           out + row * groups * stride, stride);
        }
        if (part == 0)
            add_all_values(kind, rows * groups, values, common, until, size, weights, out, stride);
    }
}
