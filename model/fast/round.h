/* Rounding of weights to few bits: the codes, scales and zeros of model.quantise.quantise, bit for
 * bit, laid out as products.h draws them. WIDTH rows are rounded at a time, one per lane. LEVELS,
 * CUTS and FITS are those of model.quantise, by the compiler's options. */

#pragma once
#include "products.h"
#include "threads.h"

typedef struct {
    const Matrix *matrix; /* of BF16 or F32 */
    const float *shares;  /* [groups, 32] of the error of a group */
    char *copy;
} Rounding;

INLINE Floats smaller(Floats a, Floats b) { return blend(a < b, a, b); }
INLINE Floats larger(Floats a, Floats b) { return blend(a > b, a, b); }

/* Codes 0 to 15 of weights. If all weights of a group are equal, every code is 0. */
INLINE Ints codes_of(Floats weights, Floats scale, Floats zero) {
    Floats inverse = blend(scale > 0.0f, 1.0f / scale, broadcast(0.0f));
    Floats code = (weights - zero) * inverse + 0.5f;
    code = larger(smaller(code, broadcast(LEVELS)), broadcast(0.0f));
    return __builtin_convertvector(code, Ints);
}

/* Scale and zero of a group with the least weighted error of a few candidates: weights [32, WIDTH],
 * shares [32] -> [WIDTH]. */
INLINE void best_grid(const Floats weights[GROUP], const float *shares, Floats *scale,
                      Floats *zero) {
    Floats low = weights[0], high = weights[0], mean = broadcast(0.0f), best = mean;
    *scale = *zero = mean;
    for (int i = 0; i < GROUP; i++) {
        low = smaller(weights[i], low);
        high = larger(weights[i], high);
        mean += weights[i] * shares[i];
    }
    for (int cut = 0; cut < CUTS; cut++) {
        Floats s = (high - low) * (float)((1.0 - 2.0 * cut / LEVELS) / LEVELS);
        Floats z = (low + high - s * (float)LEVELS) * 0.5f;
        for (int fit = 0; fit <= FITS; fit++) {
            s = to_bf16(s);
            z = to_bf16(z);
            Floats error = broadcast(0.0f), mean_code = error, mean_square = error;
            Floats mean_product = error;
            for (int i = 0; i < GROUP; i++) {
                Floats code = __builtin_convertvector(codes_of(weights[i], s, z), Floats);
                Floats off = code * s + z - weights[i];
                error += off * off * shares[i];
                mean_code += code * shares[i];
                mean_square += code * code * shares[i];
                mean_product += code * weights[i] * shares[i];
            }
            Ints is_better = error < best;
            if (cut == 0 && fit == 0)
                is_better = (Ints){0} == 0;
            best = blend(is_better, error, best);
            *scale = blend(is_better, s, *scale);
            *zero = blend(is_better, z, *zero);
            Floats spread = mean_square - mean_code * mean_code;
            s = blend(spread > 0.0f, (mean_product - mean_code * mean) / spread, s);
            z = mean - s * mean_code;
        }
    }
}

/* Read 32 weights of WIDTH rows, from a row and a column on. The last ones repeat where there are
 * no more. */
INLINE void read_group(const Matrix *m, long row, long column, Floats weights[GROUP]) {
    long left = m->columns - column, bytes = bytes_of(m->kind);
    for (int lane = 0; lane < WIDTH; lane++) {
        long place = min(row + lane, m->rows - 1) * m->columns + column;
        float numbers[GROUP];
        for (long i = 0; i < GROUP; i += WIDTH)
            AT(Floats, numbers + i) = load(m->kind, m->weights + (place + i) * bytes, left - i);
        for (long i = 0; i < GROUP; i++)
            weights[i][lane] = numbers[min(i, left - 1)];
    }
}

/* Write codes 0 to 15 of a group: columns 0 to 15 to the low four bits of bytes. */
INLINE void write_codes(const Ints codes[GROUP], char *out) {
    for (int v = 0; v < 4; v++, out += 4 * LANES) {
        Ints four = {0};
        for (int i = 0; i < 4; i++)
            four |= (codes[4 * v + i] | codes[LANES + 4 * v + i] << 4) << 8 * i;
        AT(Ints, out) = four;
    }
}

/* Copy a block of 16 rows in four bits, in which each group has a scale and a zero. */
static void round_to_four(void *argument, long block) {
    const Rounding *r = argument;
    char *out = r->copy + block * block_bytes(FOUR, r->matrix->columns);
    for (long group = 0; group < groups_of(r->matrix->columns); group++, out += FOUR_GROUP)
        for (int lane = 0; lane < LANES; lane += WIDTH) {
            Floats weights[GROUP], scale, zero;
            Ints codes[GROUP];
            read_group(r->matrix, block * LANES + lane, group * GROUP, weights);
            best_grid(weights, r->shares + group * GROUP, &scale, &zero);
            for (int i = 0; i < GROUP; i++)
                codes[i] = codes_of(weights[i], scale, zero);
            write_codes(codes, out + 4 * lane);
            AT(Uints, out + CODES + 4 * lane) = (Uints)scale >> 16 | (Uints)zero;
        }
}

/* Copy a block of 16 rows in eight bits: a row has one scale, of its largest weight. */
static void round_to_eight(void *argument, long block) {
    const Rounding *r = argument;
    long columns = r->matrix->columns, bytes = block_bytes(EIGHT, columns);
    for (int lane = 0; lane < LANES; lane += WIDTH) {
        char *out = r->copy + block * bytes + 4 * lane;
        Floats weights[GROUP], scale = broadcast(0.0f);
        for (long column = 0; column < columns; column += GROUP) {
            read_group(r->matrix, block * LANES + lane, column, weights);
            for (int i = 0; i < GROUP; i++)
                scale = larger((Floats)((Ints)weights[i] & 0x7FFFFFFF) / 127.0f, scale);
        }
        AT(Floats, out + bytes - SCALES) = scale;
        for (long column = 0; column < columns; column += GROUP, out += EIGHT_GROUP) {
            read_group(r->matrix, block * LANES + lane, column, weights);
            Ints low[GROUP], high[GROUP];
            for (int i = 0; i < GROUP; i++) {
                Floats ratio = blend(scale > 0.0f, weights[i] / scale, broadcast(0.0f));
                Ints code = nearest(ratio) + 128;
                low[i] = code & 15;
                high[i] = code >> 4 & 15;
            }
            write_codes(low, out);
            write_codes(high, out + CODES);
        }
    }
}

/* Bytes of 16 rows in few bits. */
int low_bit_block_bytes(long bits, long columns) { return (int)block_bytes(bits, columns); }

/* Write the copy of a matrix in few bits: uint8 [blocks of 16 rows, low_bit_block_bytes]. */
void round_weights(const Matrix *matrix, long bits, const float *shares, char *copy) {
    Rounding r = {matrix, shares, copy};
    long blocks = (matrix->rows + LANES - 1) / LANES, cost = 8 * LANES * matrix->columns;
    run(bits == FOUR ? round_to_four : round_to_eight, &r, blocks, cost);
}
