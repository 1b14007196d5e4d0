/* Rounding of weights to few bits: the codes, scales and zeros of model.quantise.quantise, bit for
 * bit, laid out as products.h draws them. 16 rows are rounded at a time, one per lane. */

enum { LEVELS = 15, FITS = 2 }; /* as in model.quantise, whose CUTS are 0 and 1 */

typedef struct {
    const Matrix *matrix; /* of BF16 or F32 */
    const float *shares;  /* [groups, 32] of the error of a group */
    char *copy;
} Rounding;

INLINE Floats smaller(Floats a, Floats b) { return blend(a < b, a, b); }
INLINE Floats larger(Floats a, Floats b) { return blend(a > b, a, b); }

INLINE Floats bf16_of(Floats numbers) { /* as to_bf16, but in float32 */
    Uints bits = (Uints)numbers;
    Floats rounded = (Floats)((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000);
    return blend(numbers == numbers, rounded, numbers);
}

/* Codes 0 to 15 of weights, in float32. */
INLINE Floats codes_of(Floats weights, Floats inverse, Floats zero) {
    Floats code = (weights - zero) * inverse + 0.5f;
    code = larger(smaller(code, broadcast(LEVELS)), broadcast(0.0f));
    return __builtin_convertvector(__builtin_convertvector(code, Ints), Floats);
}

INLINE Floats inverse_of(Floats scale) {
    return blend(scale > 0.0f, 1.0f / scale, broadcast(0.0f));
}

/* Scale and zero of a group, of all candidates those with the least weighted error:
 * weights [32, WIDTH], shares [32] -> [WIDTH]. */
INLINE void best_grid(const Floats weights[GROUP], const float *shares, Floats *scale,
                      Floats *zero) {
    Floats low = weights[0], high = weights[0], mean = broadcast(0.0f), best = mean;
    *scale = *zero = mean;
    for (int i = 0; i < GROUP; i++) {
        low = smaller(weights[i], low);
        high = larger(weights[i], high);
        mean += weights[i] * shares[i];
    }
    for (int cut = 0; cut < 2; cut++) {
        Floats s = (high - low) * (float)((1.0 - 2.0 * cut / LEVELS) / LEVELS);
        Floats z = (low + high - s * (float)LEVELS) * 0.5f;
        for (int fit = 0; fit <= FITS; fit++) {
            s = bf16_of(s);
            z = bf16_of(z);
            Floats inverse = inverse_of(s), error = broadcast(0.0f), mean_code = broadcast(0.0f);
            Floats mean_square = broadcast(0.0f), mean_product = broadcast(0.0f);
            for (int i = 0; i < GROUP; i++) {
                Floats code = codes_of(weights[i], inverse, z), off = code * s + z - weights[i];
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

/* 32 weights of a row, from a column on, in float32. Rows and columns beyond the last repeat it. */
INLINE void read_group(const Matrix *m, long row, long column, float weights[GROUP]) {
    long left = m->columns - column, bytes = bytes_of(m->kind);
    const char *of = m->weights + min(row, m->rows - 1) * row_bytes(m->kind, m->columns);
    for (long i = 0; i < GROUP; i += WIDTH)
        AT(FloatsAt, weights + i) = load(m->kind, of + (column + i) * bytes, left - i);
    for (long i = left; i < GROUP; i++)
        weights[i] = weights[left - 1];
}

/* Four codes in the bytes of each lane. */
INLINE Ints bytes_of_codes(const Ints codes[4]) {
    return codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24;
}

/* Copy a block of 16 rows in four bits, in which each group has a scale and a zero. */
static void round_to_four(void *argument, long block) {
    const Rounding *r = argument;
    char *out = r->copy + block * row_bytes(FOUR, r->matrix->columns);
    for (long group = 0; group < groups_of(r->matrix->columns); group++, out += FOUR_GROUP) {
        float rows[LANES][GROUP];
        for (int lane = 0; lane < LANES; lane++)
            read_group(r->matrix, block * LANES + lane, group * GROUP, rows[lane]);
        for (int part = 0; part < PARTS; part++) {
            Floats weights[GROUP], scale, zero;
            Ints codes[GROUP];
            for (int i = 0; i < GROUP; i++)
                for (int lane = 0; lane < WIDTH; lane++)
                    weights[i][lane] = rows[WIDTH * part + lane][i];
            best_grid(weights, r->shares + group * GROUP, &scale, &zero);
            for (int i = 0; i < GROUP; i++) {
                Floats code = codes_of(weights[i], inverse_of(scale), zero);
                codes[i] = __builtin_convertvector(code, Ints);
            }
            for (int v = 0; v < 4; v++)
                AT(IntsAt, out + 64 * v + 4 * WIDTH * part) =
                    bytes_of_codes(codes + 4 * v) | bytes_of_codes(codes + 16 + 4 * v) << 4;
            Uints both = (Uints)scale >> 16 | (Uints)zero;
            AT(IntsAt, out + HALVES + 4 * WIDTH * part) = (Ints)both;
        }
    }
}

/* Copy a block of 16 rows in eight bits: a row has one scale, of its largest weight. */
static void round_to_eight(void *argument, long block) {
    const Rounding *r = argument;
    long groups = groups_of(r->matrix->columns);
    char *out = r->copy + block * row_bytes(EIGHT, r->matrix->columns);
    for (long lane = 0; lane < LANES; lane++) {
        float weights[GROUP], scale = 0.0f;
        for (long group = 0; group < groups; group++) {
            read_group(r->matrix, block * LANES + lane, group * GROUP, weights);
            for (int i = 0; i < GROUP; i++) {
                float size = as_float(bits_of(weights[i]) & 0x7FFFFFFF) / 127.0f;
                scale = size > scale ? size : scale;
            }
        }
        for (long group = 0; group < groups; group++) {
            read_group(r->matrix, block * LANES + lane, group * GROUP, weights);
            uint32_t codes[GROUP];
            for (int i = 0; i < GROUP; i++) {
                float ratio = scale > 0.0f ? weights[i] / scale : 0.0f;
                codes[i] = bits_of(ratio + ROUNDER) + 128;
            }
            char *lower = out + group * EIGHT_GROUP + 4 * lane, *upper = lower + HALVES;
            for (int i = 0; i < GROUP / 2; i++) {
                long place = i / 4 * 64 + i % 4;
                lower[place] = (char)((codes[i] & 15) | codes[i + 16] << 4);
                upper[place] = (char)((codes[i] >> 4 & 15) | (codes[i + 16] & 240));
            }
        }
        AT(float, out + groups * EIGHT_GROUP + 4 * lane) = scale;
    }
}

/* Bytes of 16 rows in few bits. */
int low_bit_block_bytes(long bits, long columns) { return (int)row_bytes(bits, columns); }

/* Write the copy of a matrix in few bits: uint8 [rows / 16, low_bit_block_bytes]. */
void round_weights(const Matrix *matrix, long bits, const float *shares, char *copy) {
    Rounding r = {matrix, shares, copy};
    long blocks = (matrix->rows + LANES - 1) / LANES;
    run(bits == FOUR ? round_to_four : round_to_eight, &r, blocks, 1);
}
