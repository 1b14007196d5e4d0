/* Rounding of weights to few bits: the codes, scales and zeros of model.quantise.quantise, bit for
 * bit, laid out as code_tile reads them. 16 rows are rounded at a time, one per lane. */

enum { LEVELS = 15, FITS = 2 }; /* as in model.quantise, whose CUTS are 0 and 1 */

typedef struct {
    const Matrix *matrix; /* of BF16 or F32 */
    const float *shares;  /* [groups, 32] of the error of a group */
    char *copy;
} Rounding;

INLINE Floats smaller(Floats a, Floats b) { return pick(a < b, a, b); }
INLINE Floats larger(Floats a, Floats b) { return pick(a > b, a, b); }

INLINE Floats to_bf16(Floats numbers) { /* rounded as narrow rounds; NaN stays */
    Uints bits = (Uints)numbers;
    Floats rounded = (Floats)((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000);
    return pick(numbers == numbers, rounded, numbers);
}

/* Codes 0 to 15 of weights, in float32. */
INLINE Floats codes_of(Floats weights, Floats inverse, Floats zero) {
    Floats code = larger(smaller((weights - zero) * inverse + 0.5f, all(LEVELS)), all(0.0f));
    return __builtin_convertvector(__builtin_convertvector(code, Ints), Floats);
}

INLINE Floats inverse_of(Floats scale) { return pick(scale > 0.0f, 1.0f / scale, all(0.0f)); }

/* Scale and zero of a group with the least weighted error of the candidates: round_groups. */
INLINE void best_grid(const Floats weights[GROUP], const float *shares, Floats *scale,
                      Floats *zero) {
    Floats low = weights[0], high = weights[0], mean = all(0.0f), best = mean;
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
            s = to_bf16(s);
            z = to_bf16(z);
            Floats inverse = inverse_of(s), error = all(0.0f), mean_code = all(0.0f);
            Floats mean_square = all(0.0f), mean_product = all(0.0f);
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
            best = pick(is_better, error, best);
            *scale = pick(is_better, s, *scale);
            *zero = pick(is_better, z, *zero);
            Floats spread = mean_square - mean_code * mean_code;
            s = pick(spread > 0.0f, (mean_product - mean_code * mean) / spread, s);
            z = mean - s * mean_code;
        }
    }
}

/* 32 weights of 16 rows, from a column on; rows and columns beyond the last repeat it. */
INLINE void read_group(const Matrix *m, long row, long column, float weights[GROUP][LANES]) {
    long left = m->columns - column, bytes = bytes_of(m->kind);
    for (int lane = 0; lane < LANES; lane++) {
        long stride = row_bytes(m->kind, m->columns);
        const char *of = m->weights + least(row + lane, m->rows - 1) * stride + column * bytes;
        float numbers[GROUP];
        for (long i = 0; i < GROUP; i += WIDTH)
            AT(FloatsAt, numbers + i) = numbers_at(m->kind, of + i * bytes, left - i);
        for (long i = left; i < GROUP; i++)
            numbers[i] = numbers[left - 1];
        for (int i = 0; i < GROUP; i++)
            weights[i][lane] = numbers[i];
    }
}

INLINE Ints bytes_of_codes(const Ints codes[4]) {
    return codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24;
}

static void round_to_four(void *argument, long block) {
    const Rounding *r = argument;
    char *out = r->copy + block * row_bytes(FOUR, r->matrix->columns);
    for (long group = 0; group < groups_of(r->matrix->columns); group++, out += 320) {
        float numbers[GROUP][LANES];
        read_group(r->matrix, block * LANES, group * GROUP, numbers);
        for (int part = 0; part < PARTS; part++) {
            Floats weights[GROUP], scale, zero;
            Ints codes[GROUP];
            for (int i = 0; i < GROUP; i++)
                weights[i] = AT(FloatsAt, numbers[i] + WIDTH * part);
            best_grid(weights, r->shares + group * GROUP, &scale, &zero);
            for (int i = 0; i < GROUP; i++) {
                Floats code = codes_of(weights[i], inverse_of(scale), zero);
                codes[i] = __builtin_convertvector(code, Ints);
            }
            for (int v = 0; v < 4; v++)
                AT(IntsAt, out + 64 * v + 4 * WIDTH * part) =
                    bytes_of_codes(codes + 4 * v) | bytes_of_codes(codes + 16 + 4 * v) << 4;
            Uints both = (Uints)scale >> 16 | (Uints)zero;
            AT(IntsAt, out + 256 + 4 * WIDTH * part) = (Ints)both;
        }
    }
}

static void round_to_eight(void *argument, long block) {
    const Rounding *r = argument;
    long groups = groups_of(r->matrix->columns);
    char *out = r->copy + block * row_bytes(EIGHT, r->matrix->columns);
    float numbers[GROUP][LANES], scales[LANES] = {0};
    for (long group = 0; group < groups; group++) {
        read_group(r->matrix, block * LANES, group * GROUP, numbers);
        for (int i = 0; i < GROUP; i++)
            for (int lane = 0; lane < LANES; lane++) {
                float size = as_float(bits_of(numbers[i][lane]) & 0x7FFFFFFF);
                scales[lane] = size > scales[lane] ? size : scales[lane];
            }
    }
    for (int lane = 0; lane < LANES; lane++)
        scales[lane] /= 127.0f;
    for (long group = 0; group < groups; group++) {
        read_group(r->matrix, block * LANES, group * GROUP, numbers);
        for (int i = 0; i < GROUP * PARTS; i += 4) {
            Ints codes[4];
            int part = i / GROUP, first = i % GROUP;
            Floats scale = AT(FloatsAt, scales + WIDTH * part);
            for (int column = 0; column < 4; column++) {
                Floats weight = AT(FloatsAt, numbers[first + column] + WIDTH * part);
                Floats ratio = pick(scale > 0.0f, weight / scale, all(0.0f));
                codes[column] = ((Ints)(ratio + (float)ROUNDER) + 128) & 255;
            }
            AT(IntsAt, out + group * 512 + 16 * first + 4 * WIDTH * part) = bytes_of_codes(codes);
        }
    }
    memcpy(out + groups * 512, scales, sizeof scales);
}

/* Write the copy of a matrix in few bits: uint8 [rows / 16, row_bytes]. */
void round_weights(const Matrix *matrix, long bits, const float *shares, char *copy) {
    Rounding r = {matrix, shares, copy};
    long blocks = (matrix->rows + LANES - 1) / LANES;
    run(bits == FOUR ? round_to_four : round_to_eight, &r, blocks, 1);
}
