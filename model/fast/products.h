/* Linear layers: products of rows of weights with rows of inputs. From top to bottom: what a
 * processor can do, numbers, sums, inputs as weights meet them, and tiles of products. It knows
 * nothing of models and threads.
 *
 * Each product of two rows is one sum of 16 lanes, to which columns are added from the first to the
 * last, and a fixed tree adds the lanes. Tiles, threads and processors decide only which sums are
 * computed side by side: 16 lanes are one register with AVX-512, two with AVX2, four on ARM. So the
 * bits are the same on all processors but those that multiply pairs of bfloat16 numbers, which
 * round differently (HAS_PAIRS). The C library's mathematics, whose bits vary, are not used. */

#pragma once
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum { FOUR = 4, EIGHT = 8, BF16 = 16, F32 = 32 }; /* kinds of numbers, by bits */
enum { LANES = 16 };   /* of a sum, and rows of low-bit weights that lie together */
enum { GROUP = 32 };   /* columns that low-bit numbers share a scale in */
enum { HALVES = 256 }; /* bytes of the lower or the upper halves of a group's codes, of 16 rows */
enum { SCALES = 64 };  /* bytes of the scales of 16 rows, with zeros in four bits */
enum { FOUR_GROUP = HALVES + SCALES, EIGHT_GROUP = 2 * HALVES }; /* bytes of a group of 16 rows */
enum { BLOCK = 4 };    /* rows of other weights that are multiplied together */
enum { AHEAD = 8192 }; /* bytes from what is read to what is prefetched, in low bits */

/* Processors: the one place of their instructions. A register holds WIDTH lanes; a tile takes at
 * most TILE rows of inputs. */

#if defined __AVX512F__ && defined __AVX512BW__
#include <immintrin.h>
enum { WIDTH = 16, TILE = 4 };
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23 /* lanes of two, in turns */
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined __AVX2__ && defined __FMA__
#include <immintrin.h>
enum { WIDTH = 8, TILE = 3 };
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#elif defined __aarch64__
#include <arm_neon.h>
enum { WIDTH = 4, TILE = 4 };
#define LOW 0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#else
#error "a step needs AVX2 and fused multiply-add, or a 64-bit ARM processor"
#endif
#if defined __AVX512BF16__ || defined __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
enum { HAS_PAIRS = 1 };
#else
enum { HAS_PAIRS = 0 };
#endif
enum { PARTS = LANES / WIDTH }; /* registers of a sum */

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Uints __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Shorts __attribute__((vector_size(2 * WIDTH)));
typedef float Four __attribute__((vector_size(16)));
typedef int32_t FourInts __attribute__((vector_size(16)));
typedef Floats FloatsAt __attribute__((aligned(1))); /* the same at any address */
typedef Ints IntsAt __attribute__((aligned(1)));
typedef Shorts ShortsAt __attribute__((aligned(1)));
typedef Four FourAt __attribute__((aligned(1)));

/* a * b + sum, rounded once. */
INLINE Floats multiply_add(Floats a, Floats b, Floats sum) {
#if defined __aarch64__
    return (Floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#elif defined __AVX512F__
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#else
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#endif
}

/* Add to each lane the products of two neighbouring bfloat16 numbers. */
INLINE Floats multiply_add_bf16(Floats sum, Ints a, Ints b) {
#if defined __AVX512BF16__
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#elif defined __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
    return (Floats)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
#else
    return (void)a, (void)b, sum;
#endif
}

/* Add to each lane four products of codes 0 to 15 with int8 inputs. Where no instruction adds four,
 * each lane holds two sums in int16, which eight calls cannot exceed: add_halves adds the two. */
INLINE Ints multiply_add_int8(Ints sum, Ints codes, Ints x) {
#if defined __AVX512VNNI__
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
#elif defined __AVX512F__
    __m512i pairs = _mm512_maddubs_epi16((__m512i)codes, (__m512i)x);
    return (Ints)_mm512_add_epi16((__m512i)sum, pairs);
#elif defined __AVXVNNI__
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)x);
#elif defined __AVX2__
    __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
    return (Ints)_mm256_add_epi16((__m256i)sum, pairs);
#elif defined __ARM_FEATURE_DOTPROD
    return (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, (int8x16_t)x);
#else
    for (int byte = 0; byte < 4; byte++)
        sum += (codes >> 8 * byte & 255) * (x << (24 - 8 * byte) >> 24);
    return sum;
#endif
}

/* Sum of each lane, once all products are added. */
INLINE Ints add_halves(Ints sum) {
#if defined __AVX512F__ && !defined __AVX512VNNI__
    return (Ints)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1));
#elif defined __AVX2__ && !defined __AVX512F__ && !defined __AVXVNNI__
    return (Ints)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
#else
    return sum;
#endif
}

/* Numbers. */

#define AT(type, place) (*(type *)(place)) /* number or register at an address */
INLINE long min(long a, long b) { return a < b ? a : b; }
INLINE long max(long a, long b) { return a > b ? a : b; }
INLINE Floats broadcast(float number) { return number - (Floats){0}; }
INLINE Floats blend(Ints where, Floats a, Floats b) {
    return (Floats)((where & (Ints)a) | (~where & (Ints)b));
}
INLINE long bytes_of(long kind) { return kind == BF16 ? 2 : 4; }

INLINE float as_float(uint32_t bits) {
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

INLINE uint32_t bits_of(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    return bits;
}

INLINE float from_bf16(uint16_t number) { return as_float((uint32_t)number << 16); }

/* Register of WIDTH bfloat16 numbers, as float32. */
INLINE Floats load_bf16(const char *place) {
    return (Floats)(__builtin_convertvector(AT(const ShortsAt, place), Uints) << 16);
}

/* Nearest bfloat16 number, of two the even one; NaN stays NaN. */
INLINE uint16_t to_bf16(float number) {
    uint32_t bits = bits_of(number), rounded = bits + 0x7FFF + (bits >> 16 & 1);
    return ((bits & 0x7FFFFFFF) > 0x7F800000 ? bits | 0x400000 : rounded) >> 16;
}

/* Register of numbers as float32. Where fewer than WIDTH are left, those and zeros. */
INLINE Floats load(long kind, const char *place, long left) {
    char some[4 * WIDTH] = {0};
    if (left < WIDTH) {
        memcpy(some, place, max(0, left) * bytes_of(kind));
        place = some;
    }
    return kind == BF16 ? load_bf16(place) : AT(const FloatsAt, place);
}

/* Store a register, or what is left of a row. */
INLINE void store(float *place, Floats numbers, long left) {
    if (left >= WIDTH)
        AT(FloatsAt, place) = numbers;
    else
        memcpy(place, &numbers, 4 * max(0, left));
}

enum { ROUNDER = 3 << 22 }; /* float32 numbers of this size have no fraction: adding it rounds */

/* e^x to two units in the last place, with x limited to -87 ... 88. */
INLINE float exponential(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    float shifted = __builtin_fmaf(x, 1.4426950408889634f, ROUNDER), power = shifted - ROUNDER;
    float r = __builtin_fmaf(power, -0.693359375f, x); /* less log 2, in two parts */
    r = __builtin_fmaf(power, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = __builtin_fmaf(p, r, 1.3981999507e-3f);
    p = __builtin_fmaf(p, r, 8.3334519073e-3f);
    p = __builtin_fmaf(p, r, 4.1665795894e-2f);
    p = __builtin_fmaf(p, r, 1.6666665459e-1f);
    p = __builtin_fmaf(p, r, 5.0000001201e-1f);
    p = __builtin_fmaf(p * r, r, r) + 1.0f;
    return p * as_float((bits_of(shifted) << 23) + 0x3F800000);
}

INLINE float hyperbolic_tangent(float x) { return 1.0f - 2.0f / (exponential(x + x) + 1.0f); }

/* limit * tanh(x / limit) of [count] numbers, in place (arXiv 2408.00118, section 2). */
static void soft_cap(float *x, long count, float limit) {
    for (long i = 0; i < count; i++)
        x[i] = limit * hyperbolic_tangent(x[i] / limit);
}

/* Sums. */

#ifdef __clang__
#define PICK(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(type, a, b, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__})
#endif

/* Exchange rows and columns [WIDTH, WIDTH], in place: a round puts the lanes of two rows in turns. */
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

/* Lanes of four sums, added in one order: [4, 16] -> [4]. */
INLINE Four add_lanes(float lanes[BLOCK][LANES]) {
    Four f[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        const FourAt *of = (const FourAt *)lanes[i];
        f[i] = (of[0] + of[2]) + (of[1] + of[3]);
    }
    Four first = PICK(FourInts, f[0], f[1], 0, 1, 4, 5) + PICK(FourInts, f[0], f[1], 2, 3, 6, 7);
    Four last = PICK(FourInts, f[2], f[3], 0, 1, 4, 5) + PICK(FourInts, f[2], f[3], 2, 3, 6, 7);
    return PICK(FourInts, first, last, 0, 2, 4, 6) + PICK(FourInts, first, last, 1, 3, 5, 7);
}

/* Sum of [count] numbers, or of their squares. */
static float sum_of(const float *x, long count, int squares) {
    float lanes[BLOCK][LANES] = {0};
    for (int part = 0; part < PARTS; part++)
        for (long i = WIDTH * part; i < count; i += LANES) {
            Floats numbers = load(F32, (const char *)(x + i), count - i);
            FloatsAt *sum = (FloatsAt *)(lanes[0] + WIDTH * part);
            *sum = multiply_add(numbers, squares ? numbers : broadcast(1.0f), *sum);
        }
    return add_lanes(lanes)[0];
}

/* Weights and inputs. */

typedef struct {
    const char *weights; /* [rows, columns] of BF16 or F32; in low bits as drawn below */
    const float *bias;   /* [rows], or NULL */
    long kind, rows, columns;
} Matrix;

typedef struct { /* 32 inputs that meet low-bit weights: each is about its code * scale */
    int8_t codes[GROUP];
    float scale, total; /* total: scale * the sum of codes */
} InputGroup;

INLINE long groups_of(long columns) { return (columns + GROUP - 1) / GROUP; }

/* Bytes of a row of inputs, as weights of this kind meet it. */
INLINE long input_bytes(long kind, long columns) {
    long pairs = kind == BF16 && HAS_PAIRS;
    return groups_of(columns) * (kind < BF16 ? sizeof(InputGroup) : GROUP * (pairs ? 2 : 4));
}

/* Bytes of a row of weights; of 16 rows in low bits. */
INLINE long row_bytes(long kind, long columns) {
    if (kind >= BF16)
        return columns * bytes_of(kind);
    long groups = groups_of(columns);
    return kind == FOUR ? groups * FOUR_GROUP : groups * EIGHT_GROUP + SCALES;
}

/* Round 32 inputs to int8. NaN and infinity, as integers the largest, make the scale not finite. */
INLINE void round_to_int8(const float x[GROUP], InputGroup *out) {
    uint32_t largest = 0;
    int32_t total = 0;
    for (int i = 0; i < GROUP; i++) {
        uint32_t size = bits_of(x[i]) & 0x7FFFFFFF;
        largest = size > largest ? size : largest;
    }
    out->scale = as_float(largest) / 127.0f;
    float inverse = out->scale > 0.0f ? 1.0f / out->scale : 0.0f;
    for (int i = 0; i < GROUP; i++) {
        out->codes[i] = (int8_t)bits_of(x[i] * inverse + ROUNDER);
        total += out->codes[i];
    }
    out->total = out->scale * (float)total;
}

/* Round a row of inputs to what weights of a kind meet: [columns] -> input_bytes. The last group is
 * filled with zeros. Where bfloat16 weights are widened, those in the lower halves of 32 bits, of
 * even columns, are separated from those in the upper halves; so the inputs are too. */
static void round_inputs(long kind, const float *x, long columns, char *out) {
    for (long first = 0; first < columns; first += GROUP, out += input_bytes(kind, GROUP)) {
        float group[GROUP] = {0};
        memcpy(group, x + first, 4 * min(GROUP, columns - first));
        if (kind < BF16)
            round_to_int8(group, (InputGroup *)out);
        else if (kind == F32)
            memcpy(out, group, sizeof group);
        else if (HAS_PAIRS)
            for (int i = 0; i < GROUP; i++)
                AT(uint16_t, out + 2 * i) = to_bf16(group[i]);
        else
            for (int i = 0; i < LANES; i++) {
                AT(float, out + 4 * i) = from_bf16(to_bf16(group[2 * i]));
                AT(float, out + 4 * (LANES + i)) = from_bf16(to_bf16(group[2 * i + 1]));
            }
    }
}

/* Tiles of products: a few rows of weights meet a few rows of inputs in registers. A block, four
 * rows of weights (16 in low bits), meets all rows of inputs, tile by tile, while it is in the
 * cache. */

typedef struct {
    const char *weights, *x; /* first rows of weights and of inputs */
    long stride, x_stride;   /* bytes from one row to the next */
    long columns, count;     /* count: rows of weights */
    float *out;              /* [inputs, count] products, */
    long out_stride;         /* so many numbers from one row of them to the next */
} Product;

/* Add the products of 32 columns: [4, 32] weights, [inputs, 32] -> sums [4, inputs], of which there
 * are ``parts`` registers from ``part`` on. */
INLINE void add_columns(long kind, int inputs, int parts, int part, const char *weights,
                        long stride, const char *x, long x_stride, Floats sums[BLOCK][4][2]) {
    int pairs = kind == BF16 && HAS_PAIRS, halves = pairs ? 1 : 2;
#pragma GCC unroll 2
    for (int q = 0; q < parts; q++)
#pragma GCC unroll 4
        for (int row = 0; row < BLOCK; row++)
#pragma GCC unroll 2
            for (int half = 0; half < halves; half++) {
                long lanes = 4 * WIDTH * (part + q), place = lanes + 4 * LANES * half;
                Uints two = (Uints)AT(const IntsAt, weights + row * stride + lanes);
                Floats numbers = (Floats)(half ? two & 0xFFFF0000 : two << 16);
                if (kind == F32)
                    numbers = AT(const FloatsAt, weights + row * stride + place);
#pragma GCC unroll 4
                for (int n = 0; n < inputs; n++) {
                    const char *of_x = x + n * x_stride + place;
                    Floats *sum = &sums[row][n][q];
                    *sum = pairs ? multiply_add_bf16(*sum, (Ints)two, AT(const IntsAt, of_x))
                                 : multiply_add(numbers, AT(const FloatsAt, of_x), *sum);
                }
            }
}

/* Products of a block: [4, columns] of BF16 or F32, [inputs, columns] -> [inputs, 4]. The next two
 * blocks are prefetched line by line, so that memory sees one stream. */
INLINE void tile(long kind, int inputs, Product p) {
    float lanes[4][BLOCK][LANES] __attribute__((aligned(64)));
    int parts = inputs == 1 && PARTS > 1 ? 2 : 1; /* at a time, which occupy the multipliers */
    long bytes = GROUP * bytes_of(kind), x_bytes = input_bytes(kind, GROUP);
    long ahead = BLOCK * p.stride;
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part += parts) {
        Floats sums[BLOCK][4][2] = {0};
        const char *w = p.weights, *x = p.x, *next = w + ahead;
        for (long group = p.columns / GROUP; group > 0; group--, w += bytes, x += x_bytes) {
            for (long line = 0; part == 0 && line < BLOCK * bytes; line += 64, next += 64) {
                __builtin_prefetch(next);
                __builtin_prefetch(next + ahead);
            }
            add_columns(kind, inputs, parts, part, w, p.stride, x, p.x_stride, sums);
        }
        if (p.columns % GROUP) {
            char last[BLOCK][4 * GROUP] = {0};
            for (int row = 0; row < BLOCK; row++)
                memcpy(last[row], w + row * p.stride, p.columns % GROUP * bytes_of(kind));
            add_columns(kind, inputs, parts, part, last[0], sizeof *last, x, p.x_stride, sums);
        }
#pragma GCC unroll 4
        for (int row = 0; row < BLOCK; row++)
#pragma GCC unroll 4
            for (int n = 0; n < inputs; n++)
#pragma GCC unroll 2
                for (int q = 0; q < parts; q++)
                    AT(FloatsAt, lanes[n][row] + WIDTH * (part + q)) = sums[row][n][q];
    }
    for (int n = 0; n < inputs; n++) {
        Four found = add_lanes(lanes[n]);
        if (p.count == BLOCK)
            AT(FourAt, p.out + n * p.out_stride) = found;
        else
            memcpy(p.out + n * p.out_stride, &found, 4 * p.count);
    }
}

/* Low bits. 16 rows of weights, one per lane, lie in memory group by group, like this:
 *
 *     4 bits     256 bytes of codes, 64 of scales and zeros      pairs of bfloat16
 *     8 bits     256 bytes of lower halves of codes, 256 of upper halves;
 *                after the last group 64 bytes of scales         float32
 *
 *     64 bytes of codes              row 0       row 1             row 15
 *     (v = 0, 1, 2, 3)             | c c c c   | c c c c   | ... | c c c c   |
 *     lower halves of bytes          columns 4v ... 4v + 3 of the group
 *     upper halves                   columns 4v + 16 ... 4v + 19
 *
 * A weight is code * scale + zero; in eight bits, whose codes are 0 to 255, zero is -128 scales. */

/* Add the products of 32 columns: [16, 32] codes, [inputs, 32] -> sums [inputs], of which there are
 * ``parts`` registers. Inputs are x_stride groups apart. */
INLINE void add_codes(int inputs, int parts, const char *codes, const InputGroup *x, long x_stride,
                      Ints sums[4][PARTS]) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++)
#pragma GCC unroll 4
        for (int n = 0; n < inputs; n++) {
            const int8_t *of_x = x[n * x_stride].codes + 4 * v;
            Ints first = AT(const int32_t, of_x) - (Ints){0};
            Ints second = AT(const int32_t, of_x + 16) - (Ints){0};
#pragma GCC unroll 4
            for (int q = 0; q < parts; q++) {
                Ints both = AT(const IntsAt, codes + 64 * v + 4 * WIDTH * q);
                sums[n][q] = multiply_add_int8(sums[n][q], both & 0x0F0F0F0F, first);
                sums[n][q] = multiply_add_int8(sums[n][q], both >> 4 & 0x0F0F0F0F, second);
            }
        }
}

/* Products of a block: [16, columns] in low bits, [inputs, columns] -> [inputs, 16]. */
INLINE void code_tile(long kind, int inputs, Product p) {
    int parts = inputs == 1 ? PARTS : 1; /* at a time, which share the inputs in registers */
    long groups = groups_of(p.columns), bytes = kind == FOUR ? FOUR_GROUP : EIGHT_GROUP;
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part += parts) {
        Floats found[4][PARTS] = {0};
        const char *w = p.weights + 4 * WIDTH * part;
        const InputGroup *x = (const InputGroup *)p.x;
        for (long group = 0; group < groups; group++, w += bytes, x++) {
            for (long line = 0; part == 0 && line < bytes; line += 64)
                __builtin_prefetch(w + AHEAD + line);
            Ints sums[4][PARTS] = {0}, upper[4][PARTS] = {0};
            add_codes(inputs, parts, w, x, groups, sums);
            if (kind == EIGHT)
                add_codes(inputs, parts, w + HALVES, x, groups, upper);
#pragma GCC unroll 4
            for (int n = 0; n < inputs; n++)
#pragma GCC unroll 4
                for (int q = 0; q < parts; q++) {
                    Ints sum = add_halves(sums[n][q]) + 16 * add_halves(upper[n][q]);
                    Floats scale = broadcast(1.0f), zero = broadcast(-128.0f);
                    if (kind == FOUR) {
                        Uints both = (Uints)AT(const IntsAt, w + HALVES + 4 * WIDTH * q);
                        scale = (Floats)(both << 16);
                        zero = (Floats)(both & 0xFFFF0000);
                    }
                    Floats of_codes = __builtin_convertvector(sum, Floats);
                    Floats total = broadcast(x[n * groups].total), *out = &found[n][q];
                    *out = multiply_add(zero, total, *out);
                    *out = multiply_add(of_codes, scale * x[n * groups].scale, *out);
                }
        }
#pragma GCC unroll 4
        for (int n = 0; n < inputs; n++)
#pragma GCC unroll 4
            for (int q = 0; q < parts; q++) {
                long row = WIDTH * (part + q);
                if (kind == EIGHT)
                    found[n][q] *= AT(const FloatsAt, w + 4 * WIDTH * q);
                store(p.out + n * p.out_stride + row, found[n][q], p.count - row);
            }
    }
}

/* A function for each kind of weights and number of inputs: as constants, these let the compiler
 * keep all sums of a tile in registers. */
#define TILE_OF(kind, n)                                                                           \
    static void kind##_##n(Product p) { kind < BF16 ? code_tile(kind, n, p) : tile(kind, n, p); }
#define TILES_OF(kind) TILE_OF(kind, 1) TILE_OF(kind, 2) TILE_OF(kind, 3) TILE_OF(kind, 4)
#define NAMES_OF(kind) {kind##_1, kind##_2, kind##_3, kind##_4}
TILES_OF(FOUR)
TILES_OF(EIGHT)
TILES_OF(BF16)
TILES_OF(F32)

typedef void Tile(Product p);
INLINE Tile *tile_of(long kind, long inputs) {
    static Tile *const tiles[][4] = {
        NAMES_OF(FOUR), NAMES_OF(EIGHT), NAMES_OF(BF16), NAMES_OF(F32)};
    return tiles[(kind > FOUR) + (kind > EIGHT) + (kind > BF16)][inputs - 1];
}

/* Products of a block with all rows of inputs, tile by tile: [count, columns], [rows, columns] ->
 * [rows, count], out_stride numbers from row to row. */
static void multiply(long kind, const char *weights, long count, const char *x, long rows,
                     long columns, float *out, long out_stride) {
    long stride = row_bytes(kind, columns), x_stride = input_bytes(kind, columns);
    int is_part = kind >= BF16 && count < BLOCK; /* each row is then all four of a block */
    for (long row = 0, step = is_part ? 1 : count; row < count; row += step) {
        Product p = {weights + row * stride, x, is_part ? 0 : stride, x_stride,
                     columns, step, out + row, out_stride};
        for (long left = rows, inputs; left > 0; left -= inputs) {
            inputs = left == TILE + 1 ? (TILE + 1) / 2 : min(TILE, left);
            tile_of(kind, inputs)(p);
            p.x += inputs * x_stride;
            p.out += inputs * out_stride;
        }
    }
}
