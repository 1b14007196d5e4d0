/* Short step of a decoder on a CPU: the logits of up to a few dozen tokens under a plan.
 *
 * It has the order and the names of the readable blocks (model/llama.py, model/gemma2.py), and
 * reads the weights where torch keeps them. model/fast/cpu.py compiles it and fills the structures.
 * From top to bottom: threads, processors, numbers, products, low bits, linear layers, norm,
 * attention, MLP, block, step. It knows nothing of plans, samples and files.
 *
 * The numbers of a row do not depend on other rows, by construction: each dot product is one sum of
 * 16 lanes, to which columns are added from the first to the last, and a fixed tree adds the lanes.
 * Tiles, threads and processors decide only which sums are computed side by side: 16 lanes are one
 * register with AVX-512, two with AVX2, four on ARM. So the bits are the same on all processors but
 * those that multiply pairs of bfloat16 numbers, which round differently (HAS_PAIRS). The C
 * library's mathematics, whose bits vary, are not used. */

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SKIPPED = 0, FOUR = 4, EIGHT = 8, BF16 = 16, F32 = 32 }; /* kinds of numbers, by bits */
enum { LANES = 16, GROUP = 32, BLOCK = 4 };

typedef struct {         /* linear layer */
    const char *weights; /* [rows, columns] of BF16 or F32; packed in low bits: see code_tile */
    const float *bias;   /* [rows], or NULL */
    long kind, rows, columns;
} Matrix;

typedef struct {
    Matrix qkv[3], o, gate_up[2], down;
    const float *attention_norm, *attention_post_norm, *mlp_norm, *mlp_post_norm; /* [hidden] */
    const float *q_norm, *k_norm; /* [size] or NULL, as the norms after a sublayer */
    const float *cos, *sin;       /* [positions, size / 2] */
    long window;                  /* positions that a query attends to */
} Layer;

typedef struct {
    const Layer *layers;
    const char *embedding; /* [vocab, hidden] */
    const float *norm;     /* [hidden] */
    Matrix head;
    long num_layers, kind, hidden, heads, key_heads, size; /* kind of the cache; size of a head */
    float embedding_scale, eps, scale, soft_cap, final_soft_cap; /* soft caps: 0 if there is none */
    int32_t is_gelu;
} Model;

typedef struct {           /* rows of one text at positions that follow each other */
    const int64_t *tokens; /* [rows] */
    char *const *entries;  /* [layers, 2], keys and values: [key heads, positions, size] */
    long rows, start, head_bytes; /* first position; bytes from one head's entries to the next */
} Text;

#define INLINE static inline __attribute__((always_inline))
INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long most(long a, long b) { return a > b ? a : b; }

/* Threads. The caller and its helpers claim pieces of a task by an atomic counter. Beside another
 * program a helper may lose its core for milliseconds: the caller waits for pieces that a helper
 * has claimed, never for one that has not begun. Who does a piece does not change its bits. */

typedef void Task(void *argument, long piece);
enum { AWAKE = 2000, PATIENCE = 6000 }; /* looks for work before a thread yields, and sleeps */

static struct {
    _Alignas(64) atomic_long unclaimed; /* pieces; 0 or less if there is none */
    _Alignas(64) atomic_long done;      /* by helpers */
    _Alignas(64) atomic_long helpers, share;
    Task *task; /* this and the next two stay until all claimed pieces are done */
    void *argument;
    long pieces, started, steps;
    pthread_mutex_t lock;
    pthread_cond_t begun;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .begun = PTHREAD_COND_INITIALIZER};

static long work(void) { /* claims pieces until none is left, and does them: their number */
    long done = 0, unclaimed;
    while ((unclaimed = pool.unclaimed) > 0) {
        long share = most(pool.share, unclaimed / (2 * (pool.helpers + 1)));
        long left = atomic_fetch_sub(&pool.unclaimed, share), taken = most(0, least(share, left));
        for (long piece = 0; piece < taken; piece++)
            pool.task(pool.argument, pool.pieces - left + piece);
        done += taken;
    }
    return done;
}

static void *help(void *number) {
    for (long seen = 0;;) {
        for (long looks = 0; looks < PATIENCE; looks++) {
            long done = (long)number < pool.helpers ? work() : 0;
            if (done) {
                atomic_fetch_add(&pool.done, done);
                looks = 0;
            } else if (looks > AWAKE)
                sched_yield();
        }
        pthread_mutex_lock(&pool.lock);
        while (pool.steps == seen)
            pthread_cond_wait(&pool.begun, &pool.lock);
        seen = pool.steps;
        pthread_mutex_unlock(&pool.lock);
    }
    return NULL;
}

void use_threads(long threads) { /* wakes or starts helpers */
    pthread_mutex_lock(&pool.lock);
    pool.helpers = threads - 1;
    pool.steps++;
    pthread_cond_broadcast(&pool.begun);
    pthread_mutex_unlock(&pool.lock);
    for (pthread_t thread; pool.started < threads - 1; pool.started++)
        if (pthread_create(&thread, NULL, help, (void *)pool.started) == 0)
            pthread_detach(thread);
}

static void run(Task *task, void *argument, long pieces, long share) { /* at least share a claim */
    if (pieces <= share || pool.helpers == 0) {
        for (long piece = 0; piece < pieces; piece++)
            task(argument, piece);
        return;
    }
    pool.task = task, pool.argument = argument, pool.pieces = pieces;
    pool.share = share;
    pool.done = 0;
    pool.unclaimed = pieces;
    long by_helpers = pieces - work();
    for (long looks = 0; pool.done < by_helpers; looks++)
        if (looks > AWAKE)
            sched_yield();
}

/* Processors: the one place of their instructions. */

#if defined __AVX512F__ && defined __AVX512BW__
#include <immintrin.h>
enum { WIDTH = 16, TILE = 4 }; /* lanes of a register; most rows of inputs of a tile */
#elif defined __AVX2__ && defined __FMA__
#include <immintrin.h>
enum { WIDTH = 8, TILE = 3 };
#elif defined __aarch64__
#include <arm_neon.h>
enum { WIDTH = 4, TILE = 4 };
#else
#error "a step needs AVX2 and fused multiply-add, or a 64-bit ARM processor"
#endif
#if defined __AVX512BF16__ || defined __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
enum { HAS_PAIRS = 1 };
#else
enum { HAS_PAIRS = 0 };
#endif
enum { PARTS = LANES / WIDTH }; /* registers of 16 lanes */

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

INLINE Floats fused(Floats a, Floats b, Floats sum) { /* sum + a * b, rounded once */
#if defined __aarch64__
    return (Floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#elif defined __AVX512F__
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#else
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#endif
}

/* Add to each lane the products of two neighbouring bfloat16 numbers. */
INLINE Floats add_pairs(Floats sum, Ints a, Ints b) {
#if defined __AVX512BF16__
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#elif defined __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
    return (Floats)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
#else
    return (void)a, (void)b, sum;
#endif
}

/* Add to each lane four products of codes 0 to 15 with int8 inputs. Where no instruction adds four,
 * each lane holds two sums in int16, which eight calls cannot exceed; whole adds the two. */
INLINE Ints add_bytes(Ints sum, Ints codes, Ints x) {
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

INLINE Ints whole(Ints sum) {
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
INLINE Floats all(float number) { return number - (Floats){0}; }
INLINE Floats pick(Ints where, Floats a, Floats b) {
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

INLINE float wide(uint16_t number) { return as_float((uint32_t)number << 16); }

INLINE Floats wide_at(const char *place) { /* the same of a register of bfloat16 numbers */
    return (Floats)(__builtin_convertvector(AT(const ShortsAt, place), Uints) << 16);
}

INLINE uint16_t narrow(float number) { /* to bfloat16, ties to even; NaN stays NaN */
    uint32_t bits = bits_of(number), rounded = bits + 0x7FFF + (bits >> 16 & 1);
    return ((bits & 0x7FFFFFFF) > 0x7F800000 ? bits | 0x400000 : rounded) >> 16;
}

/* Register of numbers; with less than WIDTH left only those, and zeros. */
INLINE Floats numbers_at(long kind, const char *place, long left) {
    char some[4 * WIDTH] = {0};
    if (left < WIDTH) {
        memcpy(some, place, most(0, left) * bytes_of(kind));
        place = some;
    }
    return kind == BF16 ? wide_at(place) : AT(const FloatsAt, place);
}

enum { ROUNDER = 3 << 22 }; /* float32 numbers of this size have no fraction: adding it rounds */

INLINE float exponential(float x) { /* to two units in the last place, with x in -87 ... 88 */
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    float shifted = x * 1.4426950408889634f + ROUNDER, power = shifted - ROUNDER;
    float r = (x - power * 0.693359375f) - power * -2.12194440e-4f; /* both: log 2 */
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * as_float((bits_of(shifted) << 23) + 0x3F800000);
}

INLINE float tangent(float x) { return 1.0f - 2.0f / (exponential(x + x) + 1.0f); }

static void cap(float *x, long count, float limit) { /* soft cap (arXiv 2408.00118, section 2) */
    for (long i = 0; i < count; i++)
        x[i] = limit * tangent(x[i] / limit);
}

#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (FourInts){__VA_ARGS__})
#endif

INLINE Four add_lanes(float lanes[BLOCK][LANES]) { /* of each of four sums */
    Four f[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        const FourAt *of = (const FourAt *)lanes[i];
        f[i] = (of[0] + of[2]) + (of[1] + of[3]);
    }
    Four first = PICK(f[0], f[1], 0, 1, 4, 5) + PICK(f[0], f[1], 2, 3, 6, 7);
    Four last = PICK(f[2], f[3], 0, 1, 4, 5) + PICK(f[2], f[3], 2, 3, 6, 7);
    return PICK(first, last, 0, 2, 4, 6) + PICK(first, last, 1, 3, 5, 7);
}

static float sum_of(const float *x, long count, int squares) { /* of numbers or their squares */
    float lanes[BLOCK][LANES] = {0};
    for (int part = 0; part < PARTS; part++)
        for (long i = WIDTH * part; i < count; i += LANES) {
            Floats numbers = numbers_at(F32, (const char *)(x + i), count - i);
            FloatsAt *sum = (FloatsAt *)(lanes[0] + WIDTH * part);
            *sum = fused(numbers, squares ? numbers : all(1.0f), *sum);
        }
    return add_lanes(lanes)[0];
}

/* Products. A block is four rows of weights (16 in low bits), which all rows of inputs meet, tile by
 * tile, while it is in the cache. Inputs are rounded before, to what these weights meet. */

typedef struct { /* 32 inputs that meet low bits: codes * scale; total is the sum of all */
    int8_t codes[GROUP];
    float scale, total;
} Rounded;

INLINE long groups_of(long columns) { return (columns + GROUP - 1) / GROUP; }

INLINE long input_bytes(long kind, long columns) { /* of a row of rounded inputs */
    long pairs = kind == BF16 && HAS_PAIRS;
    return groups_of(columns) * (kind < BF16 ? sizeof(Rounded) : GROUP * (pairs ? 2 : 4));
}

INLINE long row_bytes(long kind, long columns) { /* of weights; of 16 rows in low bits */
    long packed = groups_of(columns) * (kind == FOUR ? 320 : 512) + (kind == FOUR ? 0 : 64);
    return kind < BF16 ? packed : columns * bytes_of(kind);
}

/* Round 32 inputs to int8. NaN and infinity, the largest as integers, make the scale one of them. */
INLINE void round_group(const float *x, Rounded *out) {
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

/* Round a row of inputs, in groups of 32, the last filled with zeros. Where bfloat16 numbers are
 * widened, those of even columns come before the odd ones, as weights of one load are separated. */
static void round_inputs(long kind, const float *x, long columns, char *out) {
    for (long first = 0; first < columns; first += GROUP, out += input_bytes(kind, GROUP)) {
        float group[GROUP] = {0};
        memcpy(group, x + first, 4 * least(GROUP, columns - first));
        if (kind < BF16)
            round_group(group, (Rounded *)out);
        else if (kind == F32)
            memcpy(out, group, sizeof group);
        else if (HAS_PAIRS)
            for (int i = 0; i < GROUP; i++)
                AT(uint16_t, out + 2 * i) = narrow(group[i]);
        else
            for (int i = 0; i < LANES; i++) {
                AT(float, out + 4 * i) = wide(narrow(group[2 * i]));
                AT(float, out + 4 * (LANES + i)) = wide(narrow(group[2 * i + 1]));
            }
    }
}

/* Add the products of 32 columns of four rows of weights with rows of inputs to ``parts`` registers
 * of each sum, from ``part`` on. */
INLINE void add_columns(long kind, int inputs, int parts, int part, const char *weights, long stride,
                        const char *x, long x_stride, Floats sums[BLOCK][4][2]) {
    int pairs = kind == BF16 && HAS_PAIRS, halves = pairs ? 1 : 2;
#pragma GCC unroll 2
    for (int half = 0; half < halves; half++)
#pragma GCC unroll 2
        for (int p = 0; p < parts; p++)
#pragma GCC unroll 4
            for (int row = 0; row < BLOCK; row++) {
                long lanes = 4 * WIDTH * (part + p), place = lanes + 4 * LANES * half;
                Uints two = (Uints)AT(const IntsAt, weights + row * stride + lanes);
                Floats numbers = (Floats)(half ? two & 0xFFFF0000 : two << 16);
                if (kind == F32)
                    numbers = AT(const FloatsAt, weights + row * stride + place);
#pragma GCC unroll 4
                for (int n = 0; n < inputs; n++) {
                    const char *of_x = x + n * x_stride + place;
                    Floats *sum = &sums[row][n][p];
                    *sum = pairs ? add_pairs(*sum, (Ints)two, AT(const IntsAt, of_x))
                                 : fused(numbers, AT(const FloatsAt, of_x), *sum);
                }
            }
}

/* Products of four rows of weights, of which ``count`` are stored, with rows of inputs. The next
 * blocks, of ``ahead`` bytes, are prefetched line by line: so memory sees one stream. */
INLINE void tile(long kind, int inputs, const char *weights, long stride, const char *x,
                 long x_stride, long columns, long ahead, float *out, long out_stride, long count) {
    float lanes[4][BLOCK][LANES] __attribute__((aligned(64)));
    int parts = inputs == 1 && PARTS > 1 ? 2 : 1; /* at a time: enough to occupy the multipliers */
    long bytes = GROUP * bytes_of(kind), x_bytes = input_bytes(kind, GROUP), end = columns / GROUP;
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part += parts) {
        Floats sums[BLOCK][4][2] = {0};
        const char *w = weights, *of_x = x, *next = weights + ahead;
        for (long group = 0; group < end; group++, w += bytes, of_x += x_bytes) {
            for (long line = 0; part == 0 && ahead && line < BLOCK * bytes; line += 64, next += 64) {
                __builtin_prefetch(next, 0, 3);
                __builtin_prefetch(next + ahead, 0, 3);
            }
            add_columns(kind, inputs, parts, part, w, stride, of_x, x_stride, sums);
        }
        if (columns % GROUP) {
            char last[BLOCK][4 * GROUP] = {0};
            for (int row = 0; row < BLOCK; row++)
                memcpy(last[row], w + row * stride, columns % GROUP * bytes_of(kind));
            add_columns(kind, inputs, parts, part, last[0], sizeof *last, of_x, x_stride, sums);
        }
#pragma GCC unroll 4
        for (int row = 0; row < BLOCK; row++)
#pragma GCC unroll 4
            for (int n = 0; n < inputs; n++)
#pragma GCC unroll 2
                for (int p = 0; p < parts; p++)
                    AT(FloatsAt, lanes[n][row] + WIDTH * (part + p)) = sums[row][n][p];
    }
    for (int n = 0; n < inputs; n++) {
        Four found = add_lanes(lanes[n]);
        memcpy(out + n * out_stride, &found, 4 * count);
    }
}

/* Products of 16 rows of weights in low bits, one per lane, with rows of inputs. The rows lie in
 * memory like this, with the bytes of each part:
 *
 *     4 bits   | 256 codes | 32 scales | 32 zeros | next group ...     bfloat16
 *     8 bits   | 512 codes | next group ... | 64 scales                float32
 *
 *     64 codes                  row 0       row 1             row 15
 *     (vector v)              | c c c c   | c c c c   | ... | c c c c   |
 *     4 bits, lower halves      columns 4v ... 4v + 3 of the group, upper halves 16 + 4v ...
 *     8 bits                    columns 4v ... 4v + 3, plus 128
 *
 * A weight is code * scale + zero. In eight bits zero is -128 scales, and the halves of a byte are
 * multiplied by the same input. */
INLINE void code_tile(long kind, int inputs, const char *weights, const Rounded *x, long groups,
                      float *out, long out_stride, long count) {
    int vectors = kind == FOUR ? 4 : 8;
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) {
        const char *at = weights + 4 * WIDTH * part;
        Floats sums[4] = {0};
        for (long group = 0; group < groups; group++) {
            Ints low[4] = {0}, high[4] = {0};
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) {
                Ints codes = AT(const IntsAt, at + 64 * v);
#pragma GCC unroll 4
                for (int n = 0; n < inputs; n++) {
                    const int8_t *of_x = x[n * groups + group].codes + 4 * v;
                    Ints of_low = AT(const int32_t, of_x) - (Ints){0};
                    Ints of_high = AT(const int32_t, of_x + (kind == FOUR ? 16 : 0)) - (Ints){0};
                    low[n] = add_bytes(low[n], codes & 0x0F0F0F0F, of_low);
                    high[n] = add_bytes(high[n], codes >> 4 & 0x0F0F0F0F, of_high);
                }
            }
            at += 64 * vectors;
            Floats scale = all(1.0f), zero = all(-128.0f);
            if (kind == FOUR) {
                scale = wide_at(at - 2 * WIDTH * part);
                zero = wide_at(at + 32 - 2 * WIDTH * part);
                at += 64;
            }
#pragma GCC unroll 4
            for (int n = 0; n < inputs; n++) {
                const Rounded *of_x = &x[n * groups + group];
                Ints total = whole(low[n]) + whole(high[n]) * (kind == FOUR ? 1 : 16);
                sums[n] = fused(zero, all(of_x->total), sums[n]);
                sums[n] = fused(__builtin_convertvector(total, Floats), scale * of_x->scale, sums[n]);
            }
        }
        long left = least(WIDTH, count - WIDTH * part);
#pragma GCC unroll 4
        for (int n = 0; n < inputs; n++) {
            sums[n] = kind == FOUR ? sums[n] : sums[n] * AT(const FloatsAt, at);
            memcpy(out + n * out_stride + WIDTH * part, &sums[n], 4 * most(0, left));
        }
    }
}

/* Products of a block of ``count`` rows of weights, ``stride`` bytes apart, with rows of inputs. Those
 * of a row of inputs lie side by side, ``out_stride`` numbers after those of the row before. */
INLINE void multiply_block(long kind, const char *weights, long stride, long count, const char *x,
                           long rows, long columns, float *out, long out_stride) {
    long x_stride = input_bytes(kind, columns), ahead = BLOCK * stride; /* to prefetch; once */
    for (long inputs; rows > 0; rows -= inputs) {
        inputs = rows == TILE + 1 ? (TILE + 1) / 2 : least(TILE, rows);
#pragma GCC unroll 4
        for (int n = 1; n <= TILE; n++)
            if (n == inputs && kind < BF16)
                code_tile(kind, n, weights, (const Rounded *)x, groups_of(columns), out, out_stride,
                          count);
            else if (n == inputs)
                tile(kind, n, weights, stride, x, x_stride, columns, ahead, out, out_stride, count);
        x += inputs * x_stride;
        out += inputs * out_stride;
    }
}

static void multiply(long kind, const char *weights, long count, const char *x, long rows,
                     long columns, float *out, long out_stride) {
    long stride = row_bytes(kind, columns), step = count;
    if (kind >= BF16 && count < BLOCK) /* each row as all four of a block */
        step = 1;
    for (long row = 0; row < count; row += step) {
        const char *w = weights + row * stride;
        long next = step == BLOCK ? stride : 0;
        if (kind == FOUR)
            multiply_block(FOUR, w, next, step, x, rows, columns, out + row, out_stride);
        else if (kind == EIGHT)
            multiply_block(EIGHT, w, next, step, x, rows, columns, out + row, out_stride);
        else if (kind == BF16)
            multiply_block(BF16, w, next, step, x, rows, columns, out + row, out_stride);
        else
            multiply_block(F32, w, next, step, x, rows, columns, out + row, out_stride);
    }
}

/* Step: the arguments of its tasks, and its memory, which is kept for the next step. */

typedef struct { /* up to QUERIES query heads of a text, which read its keys and values together */
    const Text *text;
    long row, position, rows; /* its first row of the step, and that row's position */
} Span;

typedef struct {
    const Model *model;
    const Layer *layer;
    const Span *spans;
    long num_spans, rows, chunks, least_chunks; /* of positions; of a claim */
    const Matrix *matrices; /* of project, and its inputs and products */
    const float *x;
    char *inputs;
    float *products;
    long x_stride, neurons;
    float *qkv;      /* [rows, heads + 2 * key heads, size] */
    char *queries;   /* [key heads, rows, groups], rounded as keys meet them */
    float *parts;    /* [rows, heads, chunks, size + 2] */
    float *attended; /* [rows, heads, size] */
    float *gate_up;  /* [rows, 2 * size of the MLP] */
} Step;

enum { INPUTS, QKV, QUERIES, CHUNKS, ATTENDED, GATE_UP, X, NORMED, OUT, SPANS, ROOMS };

static void *room(int which, size_t bytes) {
    static struct {
        void *memory;
        size_t bytes;
    } rooms[ROOMS];
    if (rooms[which].bytes < bytes) {
        free(rooms[which].memory);
        rooms[which].bytes = (bytes + 63) / 64 * 64;
        rooms[which].memory = aligned_alloc(64, rooms[which].bytes);
        if (!rooms[which].memory)
            abort();
    }
    return rooms[which].memory;
}

enum { SHARE = 1 << 13, SHARE_BYTES = 1 << 16 }; /* numbers, and bytes of weights, of a claim */

static void round_row(void *argument, long row) {
    Step *s = argument;
    long kind = s->matrices->kind, columns = s->matrices->columns;
    round_inputs(kind, s->x + row * s->x_stride, columns, s->inputs + row * input_bytes(kind, columns));
}

INLINE long block_rows(const Matrix *matrix) { return matrix->kind < BF16 ? LANES : BLOCK; }

static void multiply_piece(void *argument, long piece) {
    Step *s = argument;
    const Matrix *m = s->matrices;
    float *out = s->products;
    for (long blocks; piece >= (blocks = (m->rows + block_rows(m) - 1) / block_rows(m)); m++) {
        piece -= blocks;
        out += m->rows;
    }
    long first = piece * block_rows(m), count = least(block_rows(m), m->rows - first);
    long bytes = row_bytes(m->kind, m->columns) * (m->kind < BF16 ? 1 : BLOCK);
    multiply(m->kind, m->weights + piece * bytes, count, s->inputs, s->rows, m->columns,
             out + first, s->neurons);
    for (long row = 0; m->bias && row < s->rows; row++)
        for (long i = first; i < first + count; i++)
            out[row * s->neurons + i] += m->bias[i];
}

/* Linear layers, ``count`` matrices, on the same inputs [rows, x_stride] -> [rows, neurons of all]. */
static void project(Step *s, const Matrix *matrices, int count, const float *x, long x_stride,
                    float *out) {
    long pieces = 0, kind = matrices->kind, columns = matrices->columns;
    s->neurons = 0;
    for (const Matrix *m = matrices; m < matrices + count; m++) {
        pieces += (m->rows + block_rows(m) - 1) / block_rows(m);
        s->neurons += m->rows;
    }
    s->matrices = matrices, s->x = x, s->x_stride = x_stride, s->products = out;
    s->inputs = room(INPUTS, s->rows * input_bytes(kind, columns));
    run(round_row, s, s->rows, SHARE / columns + 1);
    long bytes = row_bytes(kind, columns) * (kind < BF16 ? 1 : BLOCK);
    run(multiply_piece, s, pieces, SHARE_BYTES / bytes + 1);
}

/* RMSNorm (arXiv 1910.07467) of ``count`` numbers, scaled by weights. */
static void normalise(const float *x, const float *weight, long count, float eps, float *out) {
    float inverse = 1.0f / __builtin_sqrtf(sum_of(x, count, 1) / (float)count + eps);
    for (long i = 0; i < count; i++)
        out[i] = x[i] * inverse * weight[i];
}

/* Rotary embedding of a head [2 * half], in place: model.layers.rotate. */
static void rotate(float *head, const float *cos, const float *sin, long half) {
    for (long i = 0; i < half; i++) {
        float a = head[i], b = head[i + half];
        head[i] = a * cos[i] - b * sin[i];
        head[i + half] = b * cos[i] + a * sin[i];
    }
}

/* Attention, in chunks of positions. */

enum { CHUNK = 512, MOST_QUERIES = 12, SHARE_SCORES = 1 << 11 };

/* Norms and rotary embeddings of a span's heads; its keys and values go into the cache. */
static void write_entries(void *argument, long piece) {
    Step *s = argument;
    const Model *model = s->model;
    const Span *span = &s->spans[piece];
    long size = model->size, half = size / 2, heads = model->heads, groups = heads / model->key_heads;
    long all = heads + 2 * model->key_heads, kind = model->kind;
    for (long number = 0; number < span->rows * all; number++) {
        long row = span->row + number / all, head = number % all; /* of queries, keys, values */
        long position = span->position + number / all, of_key = head - heads;
        float *x = s->qkv + (row * all + head) * size;
        const float *norm = head < heads ? s->layer->q_norm : s->layer->k_norm;
        if (norm && of_key < model->key_heads)
            normalise(x, norm, size, model->eps, x);
        if (of_key < model->key_heads)
            rotate(x, s->layer->cos + position * half, s->layer->sin + position * half, half);
        if (head < heads) {
            long place = (head / groups * s->rows + row) * groups + head % groups;
            round_inputs(kind, x, size, s->queries + place * input_bytes(kind, size));
            continue;
        }
        char *entry = span->text->entries[2 * (s->layer - model->layers) + of_key / model->key_heads];
        entry += of_key % model->key_heads * span->text->head_bytes + position * row_bytes(kind, size);
        for (long i = 0; i < size; i++)
            if (kind == F32)
                AT(float, entry + 4 * i) = x[i];
            else
                AT(uint16_t, entry + 2 * i) = narrow(x[i]);
    }
}

/* Exponentials of ``count`` scaled scores less the largest, in place; their sum, and the largest. */
static void weigh(const Model *model, float *scores, long count, float sum[2]) {
    int32_t largest = -0x7F800001;
    for (long i = 0; i < count; i++)
        scores[i] *= model->scale;
    if (model->soft_cap)
        cap(scores, count, model->soft_cap);
    for (long i = 0; i < count; i++) { /* as integers in the same order: parallel, NaN the largest */
        int32_t bits = bits_of(scores[i]), ordered = bits ^ (bits >> 31 & 0x7FFFFFFF);
        largest = ordered > largest ? ordered : largest;
    }
    sum[1] = as_float(largest ^ (largest >> 31 & 0x7FFFFFFF));
    for (long i = 0; i < count; i++)
        scores[i] = exponential(scores[i] - sum[1]);
    sum[0] = sum_of(scores, count, 0);
}

/* Add weighted values [count, size] one after the other to up to four queries' sums. */
INLINE void add_values(long kind, int queries, const char *values, long count, long size,
                       const float *weights, float *out, long stride) {
    for (long column = 0; column < size; column += 2 * WIDTH) {
        long left[2] = {size - column, size - column - WIDTH};
        Floats sums[4][2];
#pragma GCC unroll 8
        for (int i = 0; i < 2 * queries; i++) {
            const float *of = out + i / 2 * stride + column + i % 2 * WIDTH;
            sums[i / 2][i % 2] = numbers_at(F32, (const char *)of, left[i % 2]);
        }
        for (long row = 0; row < count; row++) {
            const char *value = values + (row * size + column) * bytes_of(kind);
            Floats first = numbers_at(kind, value, left[0]);
            Floats second = numbers_at(kind, value + WIDTH * bytes_of(kind), left[1]);
#pragma GCC unroll 4
            for (int query = 0; query < queries; query++) {
                Floats weight = all(weights[query * CHUNK + row]);
                sums[query][0] = fused(first, weight, sums[query][0]);
                sums[query][1] = fused(second, weight, sums[query][1]);
            }
        }
#pragma GCC unroll 4
        for (int query = 0; query < queries; query++)
            memcpy(out + query * stride + column, sums[query], 4 * least(2 * WIDTH, left[0]));
    }
}

/* The same of any number of queries, for positions [begin, end) of a chunk that begins at ``first``. */
static void attend_to(long kind, long queries, const char *values, long first, long begin, long end,
                      long size, const float *weights, float *out, long stride) {
    values += begin * size * bytes_of(kind);
    weights += begin - first;
    for (; queries > 0; queries -= 4, weights += 4 * CHUNK, out += 4 * stride)
#pragma GCC unroll 4
        for (int n = 1; n <= 4; n++)
            if (n == least(4, queries) && kind == BF16)
                add_values(BF16, n, values, end - begin, size, weights, out, stride);
            else if (n == least(4, queries))
                add_values(F32, n, values, end - begin, size, weights, out, stride);
}

/* Attention of a span to a chunk, for one key head: into ``parts``, the weighted values of each query
 * head, the sum of the weights, and the largest score. */
static void attend_to_chunk(void *argument, long piece) {
    Step *s = argument;
    const Model *model = s->model;
    long chunk = piece % s->chunks, head = piece / s->chunks % model->key_heads;
    const Span *span = &s->spans[piece / s->chunks / model->key_heads];
    long size = model->size, kind = model->kind, groups = model->heads / model->key_heads;
    long rows = span->rows, window = s->layer->window, stride = s->chunks * (size + 2);
    long low = chunk * CHUNK, high = low + CHUNK, last = span->position + rows;
    long first = most(low, span->position + 1 - window);
    char *const *entries = span->text->entries + 2 * (s->layer - model->layers);
    const char *keys = entries[0] + head * span->text->head_bytes;
    const char *values = entries[1] + head * span->text->head_bytes;
    long place = (head * s->rows + span->row) * groups;
    float scores[rows * groups][CHUNK];
    for (long key = first; key < least(high, last); key += BLOCK) /* the weights of a product */
        multiply(kind, keys + key * row_bytes(kind, size), least(BLOCK, least(high, last) - key),
                 s->queries + place * input_bytes(kind, size), rows * groups, size,
                 scores[0] + key - first, CHUNK);
    float sums[rows * groups][size];
    memset(sums, 0, sizeof sums);
    long begins[rows], ends[rows]; /* of the positions that a row reads */
    for (long row = 0; row < rows; row++) {
        ends[row] = most(low, least(high, span->position + row + 1));
        begins[row] = least(ends[row], most(low, span->position + row + 1 - window));
    }
    /* What all rows read is added for all at once; what comes before and after, row by row. */
    long common = begins[rows - 1], until = most(common, ends[0]);
    float *parts = s->parts + (span->row * model->heads + head * groups) * stride + chunk * (size + 2);
    for (long row = 0; row < rows; row++) {
        for (long group = 0; group < groups; group++)
            weigh(model, scores[row * groups + group] + begins[row] - first, ends[row] - begins[row],
                  parts + (row * model->heads + group) * stride + size);
        attend_to(kind, groups, values, first, begins[row], least(common, ends[row]), size,
                  scores[row * groups], sums[row * groups], size);
    }
    attend_to(kind, rows * groups, values, first, common, until, size, scores[0], sums[0], size);
    for (long row = 0; row < rows; row++) {
        attend_to(kind, groups, values, first, most(begins[row], until), ends[row], size,
                  scores[row * groups], sums[row * groups], size);
        for (long group = 0; group < groups; group++)
            memcpy(parts + (row * model->heads + group) * stride, sums[row * groups + group], 4 * size);
    }
}

/* Attention of a row's head to all chunks. */
static void join_chunks(void *argument, long piece) {
    Step *s = argument;
    long size = s->model->size, stride = size + 2;
    const float *parts = s->parts + piece * s->chunks * stride;
    float *out = s->attended + piece * size, largest = parts[size + 1], total = 0.0f;
    for (long chunk = 1; chunk < s->chunks; chunk++)
        if (parts[chunk * stride + size + 1] > largest)
            largest = parts[chunk * stride + size + 1];
    memset(out, 0, 4 * size);
    for (long chunk = 0; chunk < s->chunks; chunk++, parts += stride) {
        float factor = exponential(parts[size + 1] - largest);
        total += parts[size] * factor;
        for (long i = 0; i < size; i++)
            out[i] += parts[i] * factor;
    }
    for (long i = 0; i < size; i++)
        out[i] /= total;
}

/* Attention sublayer (model.layers.Attention): [rows, hidden] -> the same shape. */
static void attention(Step *s, const float *x, float *out) {
    const Model *model = s->model;
    long size = model->size, heads = model->heads, rows = s->rows;
    s->qkv = room(QKV, 4 * rows * (heads + 2 * model->key_heads) * size);
    s->queries = room(QUERIES, rows * heads * input_bytes(model->kind, size));
    s->parts = room(CHUNKS, 4 * rows * heads * s->chunks * (size + 2));
    s->attended = room(ATTENDED, 4 * rows * heads * size);
    project(s, s->layer->qkv, 3, x, model->hidden, s->qkv);
    run(write_entries, s, s->num_spans, SHARE / (heads * size) + 1);
    run(attend_to_chunk, s, s->num_spans * model->key_heads * s->chunks, s->least_chunks);
    run(join_chunks, s, rows * heads, SHARE / (s->chunks * size) + 1);
    project(s, &s->layer->o, 1, s->attended, heads * size, out);
}

/* activation(gate) * up of a row, SiLU or tanh GELU, in place of gate. */
static void activate(void *argument, long row) {
    Step *s = argument;
    long size = s->layer->down.columns;
    float *gate = s->gate_up + row * 2 * size, *up = gate + size;
    if (s->model->is_gelu)
        for (long i = 0; i < size; i++) {
            float x = gate[i], inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
            gate[i] = up[i] * (0.5f * x * (1.0f + tangent(inner)));
        }
    else
        for (long i = 0; i < size; i++)
            gate[i] = up[i] * (gate[i] / (1.0f + exponential(-gate[i])));
}

/* MLP sublayer (model.layers.GatedMLP): [rows, hidden] -> the same shape. */
static void gated_mlp(Step *s, const float *x, float *out) {
    long size = s->layer->down.columns;
    s->gate_up = room(GATE_UP, 4 * s->rows * 2 * size);
    project(s, s->layer->gate_up, 2, x, s->model->hidden, s->gate_up);
    run(activate, s, s->rows, SHARE / size + 1);
    project(s, &s->layer->down, 1, s->gate_up, 2 * size, out);
}

typedef void Sublayer(Step *s, const float *x, float *out);

/* x + sublayer(norm(x)), or x + post_norm(sublayer(norm(x))): x is [rows, hidden]. */
static void add(Step *s, Sublayer *sublayer, const float *norm, const float *post_norm, float *x) {
    long hidden = s->model->hidden, count = s->rows * hidden;
    float eps = s->model->eps, *normed = room(NORMED, 4 * count), *out = room(OUT, 4 * count);
    for (long first = 0; first < count; first += hidden)
        normalise(x + first, norm, hidden, eps, normed + first);
    sublayer(s, normed, out);
    for (long first = 0; post_norm && first < count; first += hidden)
        normalise(out + first, post_norm, hidden, eps, out + first);
    for (long i = 0; i < count; i++)
        x[i] += out[i];
}

/* Block (model.llama.LlamaBlock, model.gemma2.Gemma2Block), without what the plan skips. */
static void block(Step *s, const Layer *layer, float *x) {
    s->layer = layer;
    if (layer->o.kind)
        add(s, attention, layer->attention_norm, layer->attention_post_norm, x);
    if (layer->down.kind)
        add(s, gated_mlp, layer->mlp_norm, layer->mlp_post_norm, x);
}

/* Embeddings of tokens times their scale: [rows, hidden]. */
static void embed(const Model *model, const Text *text, float *x) {
    for (long i = 0; i < text->rows * model->hidden; i++) {
        long row = i / model->hidden, column = i % model->hidden;
        const char *of = model->embedding + text->tokens[row] * row_bytes(model->kind, model->hidden);
        float number = model->kind == F32 ? AT(const float, of + 4 * column)
                                          : wide(AT(const uint16_t, of + 2 * column));
        x[i] = number * model->embedding_scale;
    }
}

/* Logits [rows of all texts, vocab]; the keys and values of the rows are written into the caches. */
void step(const Model *model, const Text *texts, long count, float *logits) {
    Step s = {.model = model};
    long hidden = model->hidden, positions = 0;
    long span_rows = most(1, MOST_QUERIES / (model->heads / model->key_heads));
    for (const Text *text = texts; text < texts + count; text++) {
        s.rows += text->rows;
        positions = most(positions, text->start + text->rows);
    }
    float *x = room(X, 4 * s.rows * hidden);
    Span *spans = room(SPANS, s.rows * sizeof(Span));
    long first = 0; /* row of a text */
    for (const Text *text = texts; text < texts + count; first += text->rows, text++) {
        embed(model, text, x + first * hidden);
        for (long row = 0; row < text->rows; row += span_rows)
            spans[s.num_spans++] = (Span){text, first + row, text->start + row,
                                          least(span_rows, text->rows - row)};
    }
    s.spans = spans;
    s.chunks = (positions + CHUNK - 1) / CHUNK;
    long scores = least(positions, CHUNK) * least(s.rows, span_rows) * model->heads / model->key_heads;
    s.least_chunks = SHARE_SCORES / scores + 1;
    for (long layer = 0; layer < model->num_layers; layer++)
        block(&s, &model->layers[layer], x);
    for (long row = 0; row < s.rows; row++)
        normalise(x + row * hidden, model->norm, hidden, model->eps, x + row * hidden);
    project(&s, &model->head, 1, x, hidden, logits);
    if (model->final_soft_cap)
        cap(logits, s.rows * model->head.rows, model->final_soft_cap);
}

#include "round.c"
