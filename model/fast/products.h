/* Products of linear layers: rows of weights with rows of inputs. From top to bottom: how both lie
 * in memory, and tiles of products. It knows nothing of models and threads.
 *
 * A product is one sum, to which columns are added from the first to the last: a sum of 16 lanes,
 * or of one lane in low bits. Tiles decide only which sums are computed side by side. */

#pragma once
#include "numbers.h"

/* A block of weights is what is multiplied together: 4 rows, or 16 in low bits (FOUR and EIGHT). */
enum { BLOCK = 4 };
/* GROUP, of model.quantise, comes by the compiler's options: columns that share a scale. */
_Static_assert(GROUP == 32, "low bits lie in memory as drawn below");

typedef struct {
    const char *weights; /* [rows, columns] of BF16 or F32; in low bits as drawn below */
    const float *bias;   /* [rows], or NULL */
    long kind, rows, columns;
} Matrix;

/* In low bits, 16 rows of weights, one per lane, lie in memory group by group:
 *
 *     4 bits     256 bytes of codes, 64 of scales and zeros      pairs of bfloat16
 *     8 bits     256 bytes of the low four bits of codes, 256 of the high four;
 *                after the last group 64 bytes of scales         float32
 *
 *     64 bytes of codes              row 0       row 1             row 15
 *     (v = 0, 1, 2, 3)             | c c c c   | c c c c   | ... | c c c c   |
 *     low four bits of bytes         columns 4v ... 4v + 3 of the group
 *     high four bits                 columns 4v + 16 ... 4v + 19
 *
 * A weight is code * scale + zero; in eight bits, whose codes are 0 to 255, zero is -128 scales. */
enum { CODES = 256, SCALES = 64, FOUR_GROUP = CODES + SCALES, EIGHT_GROUP = 2 * CODES };

typedef struct { /* 32 inputs that meet low-bit weights: each is about its code * scale */
    int8_t codes[GROUP];
    float scale, total; /* total: scale * the sum of codes */
} InputGroup;

typedef struct { /* how a kind of weights lies in memory, and the inputs that meet it */
    long block_rows;
    long group_bytes, column_bytes; /* of a block: in low bits of a group, else of a column */
    long last_bytes;                /* after the last group */
    long input_group_bytes;         /* of 32 inputs */
} Layout;

/* All sizes come from here, by kind. */
static const Layout layouts[] = {
    [FOUR] = {LANES, FOUR_GROUP, 0, 0, sizeof(InputGroup)},
    [EIGHT] = {LANES, EIGHT_GROUP, 0, SCALES, sizeof(InputGroup)},
    [BF16] = {BLOCK, 0, BLOCK * 2, 0, GROUP * (HAS_PAIRS ? 2 : 4)},
    [F32] = {BLOCK, 0, BLOCK * 4, 0, GROUP * 4},
};

INLINE long groups_of(long columns) { return (columns + GROUP - 1) / GROUP; }

/* Bytes of a block of weights. */
INLINE long block_bytes(long kind, long columns) {
    const Layout l = layouts[kind];
    return groups_of(columns) * l.group_bytes + columns * l.column_bytes + l.last_bytes;
}

/* Bytes of a row of numbers, BF16 or F32. */
INLINE long row_bytes(long kind, long columns) { return columns * bytes_of(kind); }

/* Bytes of a row of inputs, as weights of this kind meet it. */
INLINE long input_bytes(long kind, long columns) {
    return groups_of(columns) * layouts[kind].input_group_bytes;
}

/* Round 32 inputs to int8. NaN and infinity, as integers the largest, make the scale not finite. */
INLINE void round_to_int8(const Floats x[GROUP / WIDTH], InputGroup *out) {
    const int32_t *bits = (const int32_t *)x;
    int32_t codes[GROUP], largest = 0, total = 0;
    for (int i = 0; i < GROUP; i++) {
        int32_t magnitude = bits[i] & 0x7FFFFFFF;
        largest = magnitude > largest ? magnitude : largest;
    }
    out->scale = as_float(largest) / 127.0f;
    float inverse = out->scale > 0.0f ? 1.0f / out->scale : 0.0f;
    for (int i = 0; i < GROUP; i += WIDTH)
        AT(Ints, codes + i) = nearest(x[i / WIDTH] * inverse) << 24 >> 24; /* the lowest byte */
    for (int i = 0; i < GROUP; i++)
        out->codes[i] = (int8_t)codes[i];
    for (int i = 0; i < GROUP; i++)
        total += codes[i];
    out->total = out->scale * (float)total;
}

/* Round 32 inputs to bfloat16. Where the processor multiplies no pairs of these, weights are
 * widened: the even columns are in the lower halves of 32 bits, the odd ones in the upper halves.
 * So the inputs stay 32 bits wide, and those of even columns come before those of odd ones. */
INLINE void round_to_bf16(const Floats x[GROUP / WIDTH], char *out) {
    Floats rounded[GROUP / WIDTH];
    for (int i = 0; i < GROUP / WIDTH; i++)
        rounded[i] = to_bf16(x[i]);
    const uint32_t *bits = (const uint32_t *)rounded;
    for (int i = 0; i < LANES; i++)
        if (HAS_PAIRS) {
            AT(uint32_t, out + 4 * i) = bits[2 * i] >> 16 | bits[2 * i + 1];
        } else {
            AT(uint32_t, out + 4 * i) = bits[2 * i];
            AT(uint32_t, out + 4 * (LANES + i)) = bits[2 * i + 1];
        }
}

/* Prepare a row of inputs to meet weights of a kind: [columns] -> input_bytes. Zeros fill the last
 * group. */
static void prepare_inputs(long kind, const float *x, long columns, char *out) {
    for (long first = 0; first < columns; first += GROUP, out += input_bytes(kind, GROUP)) {
        Floats group[GROUP / WIDTH];
        for (int i = 0; i < GROUP; i += WIDTH)
            group[i / WIDTH] = load(F32, x + first + i, columns - first - i);
        if (kind == F32)
            memcpy(out, group, sizeof group);
        else if (kind == BF16)
            round_to_bf16(group, out);
        else
            round_to_int8(group, (InputGroup *)out);
    }
}

/* Of a tile, at most: rows of inputs (see TILE_INPUTS), and registers of a sum that are added to at
 * once, of BF16 and F32. */
enum { MOST_INPUTS = 4, MOST_AT_ONCE = 2 };

/* A tile: a block of weights, or one row of it, meets a few rows of inputs, and their sums stay in
 * registers. */
typedef struct {
    const char *weights, *x; /* first rows of weights and of inputs */
    long stride, x_stride;   /* bytes from one row to the next; stride is not used in low bits */
    long columns, count;     /* count: rows of weights whose products are written */
    float *out;              /* [inputs, count] products, out_stride numbers from row to row */
    long out_stride;
} Tile;

/* Columns of a tile of BF16 or F32. A row of weights and a row of inputs have one sum of 16 lanes,
 * in SUM_REGISTERS registers of WIDTH lanes:
 *
 *                          32 columns   32 columns                      inputs 0       1      ...
 *     weights row 0      | --------   | --------   | ...      row 0   | 16 lanes | 16 lanes |
 *     ...                |            |            |          ...     |          |          |
 *     weights row 3      | --------   | --------   | ...      row 3   | 16 lanes | 16 lanes |
 *     row of inputs      | --------   | --------   | ...
 *
 * Of each 32 columns, lane i adds columns i and i + 16 in F32, and 2i and 2i + 1 in BF16.
 * At the end the lanes of a sum are added up. */

/* Add the products of 32 columns: [4, 32] weights, [inputs, 32] -> sums [4, inputs]. A sum has
 * SUM_REGISTERS registers; ``at_once`` of them are added to, from ``first`` on. A register of
 * bfloat16 weights has two columns per lane: pairs, or the lower and the upper ``half`` (see
 * round_to_bf16). */
INLINE void add_columns(long kind, int inputs, int at_once, int first, const char *weights,
                        long stride, const char *x, long x_stride,
                        Floats sums[BLOCK][MOST_INPUTS][MOST_AT_ONCE]) {
    int pairs = kind == BF16 && HAS_PAIRS, halves = pairs ? 1 : 2;
#pragma GCC unroll 2
    for (int reg = 0; reg < at_once; reg++)
#pragma GCC unroll 4
        for (int row = 0; row < BLOCK; row++)
#pragma GCC unroll 2
            for (int half = 0; half < halves; half++) {
                long offset = 4 * WIDTH * (first + reg), place = offset + 4 * LANES * half;
                Uints pair = AT(const Uints, weights + row * stride + offset);
                Floats wide = kind == F32 ? AT(const Floats, weights + row * stride + place)
                                          : (Floats)(half ? pair & 0xFFFF0000 : pair << 16);
#pragma GCC unroll 4
                for (int n = 0; n < inputs; n++) {
                    const char *of_x = x + n * x_stride + place;
                    Floats *sum = &sums[row][n][reg];
                    *sum = pairs ? multiply_add_bf16(*sum, (Ints)pair, AT(const Ints, of_x))
                                 : multiply_add(wide, AT(const Floats, of_x), *sum);
                }
            }
}

/* Products of a tile: [4, columns] of BF16 or F32, [inputs, columns] -> [inputs, 4]. The next two
 * blocks are prefetched line by line, so that memory sees one stream. */
INLINE void multiply_wide(long kind, int inputs, const Tile *tile) {
    const Tile t = *tile;
    float lanes[MOST_INPUTS][BLOCK][LANES] __attribute__((aligned(64)));
    int at_once = inputs == 1 && SUM_REGISTERS > 1 ? 2 : 1; /* two occupy the multipliers */
    long bytes = GROUP * bytes_of(kind), x_bytes = input_bytes(kind, GROUP);
    long ahead = BLOCK * t.stride;
#pragma GCC unroll 4
    for (int first = 0; first < SUM_REGISTERS; first += at_once) {
        Floats sums[BLOCK][MOST_INPUTS][MOST_AT_ONCE] = {0};
        const char *w = t.weights, *x = t.x, *next = w + ahead;
        for (long group = t.columns / GROUP; group > 0; group--, w += bytes, x += x_bytes) {
            for (long line = 0; first == 0 && line < BLOCK * bytes; line += 64, next += 64) {
                __builtin_prefetch(next);
                __builtin_prefetch(next + ahead);
            }
            add_columns(kind, inputs, at_once, first, w, t.stride, x, t.x_stride, sums);
        }
        if (t.columns % GROUP) {
            char last[BLOCK][4 * GROUP] = {0};
            for (int row = 0; row < BLOCK; row++)
                memcpy(last[row], w + row * t.stride, t.columns % GROUP * bytes_of(kind));
            add_columns(kind, inputs, at_once, first, last[0], sizeof *last, x, t.x_stride, sums);
        }
#pragma GCC unroll 4
        for (int row = 0; row < BLOCK; row++)
#pragma GCC unroll 4
            for (int n = 0; n < inputs; n++)
#pragma GCC unroll 2
                for (int reg = 0; reg < at_once; reg++)
                    AT(Floats, lanes[n][row] + WIDTH * (first + reg)) = sums[row][n][reg];
    }
    for (int n = 0; n < inputs; n++) {
        FourFloats found = add_lanes(lanes[n]);
        if (t.count == BLOCK)
            AT(FourFloats, t.out + n * t.out_stride) = found;
        else
            memcpy(t.out + n * t.out_stride, &found, 4 * t.count);
    }
}

enum { AHEAD = 8192 }; /* bytes from what is read to what is prefetched, in low bits */

/* Add the products of 32 columns: [16, 32] codes, [inputs, 32] -> sums [inputs], in ``at_once``
 * registers each. Inputs are x_stride groups apart. */
INLINE void add_codes(int inputs, int at_once, const char *codes, const InputGroup *x,
                      long x_stride, Ints sums[MOST_INPUTS][SUM_REGISTERS]) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++)
#pragma GCC unroll 4
        for (int n = 0; n < inputs; n++) {
            const int8_t *of_x = x[n * x_stride].codes + 4 * v;
            Ints first = broadcast_ints(AT(const int32_t, of_x));
            Ints second = broadcast_ints(AT(const int32_t, of_x + 16));
#pragma GCC unroll 4
            for (int reg = 0; reg < at_once; reg++) {
                Ints packed = AT(const Ints, codes + 64 * v + 4 * WIDTH * reg);
                sums[n][reg] = multiply_add_int8(sums[n][reg], packed & 0x0F0F0F0F, first);
                sums[n][reg] = multiply_add_int8(sums[n][reg], packed >> 4 & 0x0F0F0F0F, second);
                compute_now(&sums[n][reg]);
            }
        }
}

/* Products of a tile in low bits: [16, columns], [inputs, columns] -> [inputs, 16]. */
INLINE void multiply_codes(long kind, int inputs, const Tile *tile) {
    const Tile t = *tile;
    int at_once = inputs == 1 ? SUM_REGISTERS : 1; /* they share the inputs in registers */
    long groups = groups_of(t.columns), bytes = layouts[kind].group_bytes;
#pragma GCC unroll 4
    for (int first = 0; first < SUM_REGISTERS; first += at_once) {
        Floats found[MOST_INPUTS][SUM_REGISTERS] = {0};
        const char *w = t.weights + 4 * WIDTH * first;
        const InputGroup *x = (const InputGroup *)t.x;
        for (long group = 0; group < groups; group++, w += bytes, x++) {
            for (long line = 0; first == 0 && line < bytes; line += 64)
                __builtin_prefetch(w + AHEAD + line);
            Ints sums[MOST_INPUTS][SUM_REGISTERS] = {0}, high[MOST_INPUTS][SUM_REGISTERS] = {0};
            add_codes(inputs, at_once, w, x, groups, sums);
            if (kind == EIGHT)
                add_codes(inputs, at_once, w + CODES, x, groups, high);
#pragma GCC unroll 4
            for (int n = 0; n < inputs; n++)
#pragma GCC unroll 4
                for (int reg = 0; reg < at_once; reg++) {
                    Ints sum = add_halves(sums[n][reg]) + 16 * add_halves(high[n][reg]);
                    Floats scale = broadcast(1.0f), zero = broadcast(-128.0f);
                    if (kind == FOUR) {
                        Uints packed = AT(const Uints, w + CODES + 4 * WIDTH * reg);
                        scale = (Floats)(packed << 16);
                        zero = (Floats)(packed & 0xFFFF0000);
                    }
                    Floats of_codes = __builtin_convertvector(sum, Floats);
                    Floats total = broadcast(x[n * groups].total), *out = &found[n][reg];
                    *out = multiply_add(zero, total, *out);
                    *out = multiply_add(of_codes, scale * x[n * groups].scale, *out);
                }
        }
#pragma GCC unroll 4
        for (int n = 0; n < inputs; n++)
#pragma GCC unroll 4
            for (int reg = 0; reg < at_once; reg++) {
                long row = WIDTH * (first + reg);
                if (kind == EIGHT)
                    found[n][reg] *= AT(const Floats, w + 4 * WIDTH * reg);
                store(F32, t.out + n * t.out_stride + row, found[n][reg], t.count - row);
            }
    }
}

/* Functions for one to four rows of inputs. As constants, kind and inputs let the compiler keep all
 * sums of a tile in registers. A tile passed by value would stall the processor: it is written
 * field by field, and its copy reads several fields at once. */
#define TILES(kind, multiply)                                                                      \
    static void kind##_1(const Tile *t) { multiply(kind, 1, t); }                                  \
    static void kind##_2(const Tile *t) { multiply(kind, 2, t); }                                  \
    static void kind##_3(const Tile *t) { multiply(kind, 3, t); }                                  \
    static void kind##_4(const Tile *t) { multiply(kind, 4, t); }
TILES(FOUR, multiply_codes)
TILES(EIGHT, multiply_codes)
TILES(BF16, multiply_wide)
TILES(F32, multiply_wide)

static void (*const tiles[][MOST_INPUTS])(const Tile *) = { /* by kind and rows of inputs */
    [FOUR] = {FOUR_1, FOUR_2, FOUR_3, FOUR_4},
    [EIGHT] = {EIGHT_1, EIGHT_2, EIGHT_3, EIGHT_4},
    [BF16] = {BF16_1, BF16_2, BF16_3, BF16_4},
    [F32] = {F32_1, F32_2, F32_3, F32_4},
};

/* The divisors are constants: a division by a variable takes long. */
INLINE long blocks_of(const Matrix *m) {
    if (layouts[m->kind].block_rows == BLOCK)
        return (m->rows + BLOCK - 1) / BLOCK;
    return (m->rows + LANES - 1) / LANES;
}

/* Products of a block of weights with all rows of inputs, tile by tile while the block is in the
 * cache, and its biases: x [rows, columns] -> out [rows, m->rows], out_stride numbers from row to
 * row. The last block may have fewer than four rows. Then each of them is a tile: with stride 0 it
 * is multiplied as if it were four rows, and one product of these is written. */
static void multiply_block(const Matrix *m, long block, const char *x, long rows, float *out,
                           long out_stride) {
    long block_rows = layouts[m->kind].block_rows, first = block * block_rows;
    long count = min(block_rows, m->rows - first);
    int row_by_row = block_rows == BLOCK && count < BLOCK;
    long stride = row_bytes(m->kind, m->columns), x_stride = input_bytes(m->kind, m->columns);
    const char *weights = m->weights + block * block_bytes(m->kind, m->columns);
    out += first;
    for (long row = 0, step = row_by_row ? 1 : count; row < count; row += step) {
        Tile t = {.weights = weights + row * stride,
                  .stride = row_by_row ? 0 : stride,
                  .x = x,
                  .x_stride = x_stride,
                  .columns = m->columns,
                  .count = step,
                  .out = out + row,
                  .out_stride = out_stride};
        for (long left = rows, inputs; left > 0; left -= inputs) {
            inputs = left == TILE_INPUTS + 1 ? (TILE_INPUTS + 1) / 2 : min(TILE_INPUTS, left);
            tiles[m->kind][inputs - 1](&t);
            t.x += inputs * x_stride;
            t.out += inputs * out_stride;
        }
    }
    for (long row = 0; m->bias && row < rows; row++)
        for (long i = 0; i < count; i++)
            out[row * out_stride + i] += m->bias[first + i];
}
