/* Numbers and registers, and the one place of a processor's instructions.
 *
 * A sum has 16 lanes: one register with AVX-512, two with AVX2, four on ARM. Numbers are added to a
 * lane in one order, and a fixed tree adds the lanes. So a sum has the same bits on all processors,
 * but for those that multiply pairs of bfloat16 numbers (HAS_PAIRS): these round differently. The C
 * library's mathematics are not used, since their bits vary. */

#pragma once
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define AT(type, place) (*(type *)(place)) /* number or register at any address */

enum { FOUR = 4, EIGHT = 8, BF16 = 16, F32 = 32 }; /* kinds of numbers, by bits */
enum { LANES = 16 };

/* A register holds WIDTH lanes. LOW and HIGH take the lower or the upper lanes of two registers, in
 * turns. A tile of products has up to TILE_INPUTS rows of inputs (products.h). */
#if defined __AVX512F__ && defined __AVX512BW__
#define WIDE 1
#include <immintrin.h>
enum { WIDTH = 16, TILE_INPUTS = 4 };
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined __AVX2__ && defined __FMA__
#include <immintrin.h>
enum { WIDTH = 8, TILE_INPUTS = 3 };
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#elif defined __aarch64__
#include <arm_neon.h>
enum { WIDTH = 4, TILE_INPUTS = 4 };
#define LOW 0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#else
#error "a step needs AVX2 and fused multiply-add, or a 64-bit ARM processor"
#endif
enum { SUM_REGISTERS = LANES / WIDTH }; /* registers of a sum */
#if defined __AVX512BF16__ || defined __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
enum { HAS_PAIRS = 1 };
#else
enum { HAS_PAIRS = 0 };
#endif
int has_pairs(void) { return HAS_PAIRS; }

#define REGISTER(bytes) __attribute__((vector_size(bytes), aligned(1)))
typedef float Floats REGISTER(4 * WIDTH);
typedef int32_t Ints REGISTER(4 * WIDTH);
typedef uint32_t Uints REGISTER(4 * WIDTH);
typedef uint16_t Shorts REGISTER(2 * WIDTH);
typedef float FourFloats REGISTER(16);
typedef int32_t FourInts REGISTER(16);

/* a * b + sum, rounded once. */
INLINE Floats multiply_add(Floats a, Floats b, Floats sum) {
#if defined __aarch64__
    return (Floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#elif defined WIDE
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
 * a lane holds two sums in int16, which eight calls cannot exceed; add_halves adds the two. */
INLINE Ints multiply_add_int8(Ints sum, Ints codes, Ints x) {
#if defined __AVX512VNNI__
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
#elif defined WIDE
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

INLINE Ints add_halves(Ints sum) {
#if defined WIDE && !defined __AVX512VNNI__
    return (Ints)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1));
#elif defined __AVX2__ && !defined WIDE && !defined __AVXVNNI__
    return (Ints)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
#else
    return sum;
#endif
}

/* Compute a sum before what follows, where GCC would delay additions until its sixteen registers
 * run out. With 32 registers this would only be an obstacle. */
INLINE void compute_now(Ints *sum) {
#if defined __AVX2__ && !defined WIDE
    __asm__("" : "+x"(*sum));
#else
    (void)sum;
#endif
}

#ifdef __clang__
#define PICK(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__) /* lanes of two */
#else
#define PICK(type, a, b, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__})
#endif

INLINE long min(long a, long b) { return a < b ? a : b; }
INLINE long max(long a, long b) { return a > b ? a : b; }
INLINE Floats broadcast(float number) { return number - (Floats){0}; }
INLINE Ints broadcast_ints(int32_t number) { return number - (Ints){0}; }
INLINE Floats blend(Ints where, Floats a, Floats b) {
    return (Floats)((where & (Ints)a) | (~where & (Ints)b));
}

INLINE float as_float(uint32_t bits) { return AT(float, &bits); }
INLINE uint32_t bits_of(float number) { return AT(uint32_t, &number); }

/* Nearest bfloat16 numbers, of two the even one, in float32; NaN stays NaN. */
INLINE Floats to_bf16(Floats numbers) {
    Uints bits = (Uints)numbers, rounded = bits + 0x7FFF + (bits >> 16 & 1);
    Floats found = blend(numbers == numbers, (Floats)rounded, (Floats)(bits | 0x400000));
    return (Floats)((Uints)found & 0xFFFF0000);
}

INLINE long bytes_of(long kind) { return kind == BF16 ? 2 : 4; }

/* Register of numbers as float32. Where fewer than WIDTH are left, zeros follow them. */
INLINE Floats load(long kind, const void *place, long left) {
    char some[4 * WIDTH] = {0};
    if (left < WIDTH) {
        memcpy(some, place, max(0, left) * bytes_of(kind));
        place = some;
    }
    if (kind == F32)
        return AT(const Floats, place);
    return (Floats)(__builtin_convertvector(AT(const Shorts, place), Uints) << 16);
}

/* Store a register of float32 as numbers of a kind, or as much of it as is left of a row. */
INLINE void store(long kind, void *place, Floats numbers, long left) {
    Shorts narrow = __builtin_convertvector((Uints)to_bf16(numbers) >> 16, Shorts);
    if (left < WIDTH)
        memcpy(place, kind == F32 ? (void *)&numbers : &narrow, max(0, left) * bytes_of(kind));
    else if (kind == F32)
        AT(Floats, place) = numbers;
    else
        AT(Shorts, place) = narrow;
}

/* Float32 numbers from 2^23 to 2^24 have no fraction, so that adding 3 * 2^22 rounds. The lowest 22
 * bits of what is found are those of the integer, also of a negative one. */
enum { ROUNDER = 3 << 22 };

/* Nearest integers, of two the even one: the lowest 22 bits, with others above them. */
INLINE Ints nearest(Floats x) { return (Ints)(x + (float)ROUNDER); }

/* e^x to two units in the last place, with x limited to -87 ... 88. It is 2^n * e^r, with r near 0;
 * log 2 in two parts and the polynomial are those of expf in Cephes (S. L. Moshier). */
INLINE float exponential(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    float shifted = __builtin_fmaf(x, 1.4426950408889634f, ROUNDER); /* by log2(e) */
    float n = shifted - ROUNDER;
    float r = __builtin_fmaf(n, -0.693359375f, x);
    r = __builtin_fmaf(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = __builtin_fmaf(p, r, 1.3981999507e-3f);
    p = __builtin_fmaf(p, r, 8.3334519073e-3f);
    p = __builtin_fmaf(p, r, 4.1665795894e-2f);
    p = __builtin_fmaf(p, r, 1.6666665459e-1f);
    p = __builtin_fmaf(p, r, 5.0000001201e-1f);
    p = __builtin_fmaf(p * r, r, r) + 1.0f;
    return p * as_float((bits_of(shifted) << 23) + 0x3F800000); /* 2^n, by its exponent */
}

INLINE float hyperbolic_tangent(float x) { return 1.0f - 2.0f / (exponential(x + x) + 1.0f); }

/* Soft cap (arXiv 2408.00118, section 2). */
INLINE float capped(float x, float cap) { return cap * hyperbolic_tangent(x / cap); }

/* Add the lanes of four sums: [4, 16] -> [4]. */
INLINE FourFloats add_lanes(float lanes[4][LANES]) {
    FourFloats f[4];
    for (int i = 0; i < 4; i++) {
        const FourFloats *quarters = (const FourFloats *)lanes[i];
        f[i] = (quarters[0] + quarters[2]) + (quarters[1] + quarters[3]);
    }
    FourFloats first = PICK(FourInts, f[0], f[1], 0, 1, 4, 5);
    FourFloats last = PICK(FourInts, f[2], f[3], 0, 1, 4, 5);
    first += PICK(FourInts, f[0], f[1], 2, 3, 6, 7);
    last += PICK(FourInts, f[2], f[3], 2, 3, 6, 7);
    return PICK(FourInts, first, last, 0, 2, 4, 6) + PICK(FourInts, first, last, 1, 3, 5, 7);
}

/* Sum of [count] numbers, or of their squares. add_lanes adds four sums; the others are zeros. */
static float sum_of(const float *x, long count, int squares) {
    float lanes[4][LANES] = {0};
    long whole = count / LANES * LANES;
    for (long i = 0; i < whole; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            float number = x[i + lane];
            lanes[0][lane] = __builtin_fmaf(number, squares ? number : 1.0f, lanes[0][lane]);
        }
    for (long i = whole; i < count; i++)
        lanes[0][i - whole] = __builtin_fmaf(x[i], squares ? x[i] : 1.0f, lanes[0][i - whole]);
    return add_lanes(lanes)[0];
}
