/* Bits of a step on made-up models, printed: they are the same on every processor that does not
 * multiply pairs of bfloat16 numbers. Every array has its exact size, so that a sanitizer sees each
 * read beyond it. */

#include "../../model/fast/step.c"
#include <stdio.h>

enum { LAYERS = 2, HIDDEN = 72, HEADS = 6, KEY_HEADS = 2, HEAD_SIZE = 20, INNER = 37, VOCAB = 41 };
enum { POSITIONS = 600, ROWS = 17, NEWEST = 20, SINKS = 4 };

static uint32_t state = 1;

static float number(void) { /* -1 ... 1 */
    state = state * 1664525 + 1013904223;
    return (float)(int32_t)state / 2147483648.0f;
}

static float *numbers(size_t count, float scale, float around) {
    float *found = malloc(4 * count);
    for (size_t i = 0; i < count; i++)
        found[i] = around + scale * number();
    return found;
}

static char *weights(long kind, size_t count) {
    float *found = numbers(count, 0.3f, 0.0f);
    if (kind == F32)
        return (char *)found;
    char *narrowed = malloc(2 * count);
    for (size_t i = 0; i < count; i += WIDTH)
        store(BF16, narrowed + 2 * i, load(F32, found + i, count - i), count - i);
    free(found);
    return narrowed;
}

static Matrix matrix(long kind, long bits, long rows, long columns, int biased) {
    Matrix made = {weights(kind, rows * columns), NULL, kind, rows, columns};
    if (bits < BF16) {
        long groups = groups_of(columns);
        float *shares = numbers(groups * GROUP, 0.01f, 1.0f / GROUP);
        char *copy = malloc((rows + LANES - 1) / LANES * block_bytes(bits, columns));
        round_weights(&made, bits, shares, copy);
        free((char *)made.weights);
        free(shares);
        made.weights = copy;
        made.kind = bits;
    }
    if (biased)
        made.bias = numbers(rows, 0.5f, 0.0f);
    return made;
}

static void print(const char *name, long kind, long bits, const void *content, long bytes) {
    uint64_t hash = 14695981039346656037u;
    for (long i = 0; i < bytes; i++)
        hash = (hash ^ ((const uint8_t *)content)[i]) * 1099511628211u;
    printf("%s %ld %ld %016llx\n", name, kind, bits, (unsigned long long)hash);
}

/* Steps of 1 to ROWS rows of two texts, with all that a family may have if it is ``rich``. A plan's
 * window is the first SINKS and the ``newest`` positions, or all for 0. A layer's window is longer:
 * for a few steps it hides a part of the sinks, then all. */
static void print_steps(long kind, long bits, int rich, long newest) {
    Layer layers[LAYERS];
    for (int layer = 0; layer < LAYERS; layer++)
        layers[layer] = (Layer){
            .qkv = {matrix(kind, bits, HEADS * HEAD_SIZE, HIDDEN, rich),
                    matrix(kind, bits, KEY_HEADS * HEAD_SIZE, HIDDEN, rich),
                    matrix(kind, bits, KEY_HEADS * HEAD_SIZE, HIDDEN, rich)},
            .o = matrix(kind, bits, HIDDEN, HEADS * HEAD_SIZE, 0),
            .gate_up = {matrix(kind, bits, INNER, HIDDEN, rich),
                        matrix(kind, bits, INNER, HIDDEN, 0)},
            .down = matrix(kind, bits, HIDDEN, INNER, 0),
            .attention_norm = numbers(HIDDEN, 0.5f, 1.0f),
            .attention_post_norm = rich ? numbers(HIDDEN, 0.5f, 1.0f) : NULL,
            .mlp_norm = numbers(HIDDEN, 0.5f, 1.0f),
            .mlp_post_norm = rich ? numbers(HIDDEN, 0.5f, 1.0f) : NULL,
            .q_norm = rich ? numbers(HEAD_SIZE, 0.5f, 1.0f) : NULL,
            .k_norm = rich ? numbers(HEAD_SIZE, 0.5f, 1.0f) : NULL,
            .cos = numbers(POSITIONS * HEAD_SIZE / 2, 1.0f, 0.0f),
            .sin = numbers(POSITIONS * HEAD_SIZE / 2, 1.0f, 0.0f),
            .window = rich && layer ? newest + 9 : POSITIONS,
        };
    Model model = {
        .layers = layers,
        .embedding = weights(kind, VOCAB * HIDDEN),
        .norm = numbers(HIDDEN, 0.5f, 1.0f),
        .head = matrix(kind, bits, VOCAB, HIDDEN, 0),
        .num_layers = LAYERS,
        .attention =
            {
                .kind = kind,
                .heads = HEADS,
                .key_heads = KEY_HEADS,
                .heads_per_key = HEADS / KEY_HEADS,
                .head_size = HEAD_SIZE,
                .scale = 0.22f,
                .soft_cap = rich ? 5.0f : 0.0f,
                .newest = newest,
                .sinks = SINKS,
            },
        .hidden = HIDDEN,
        .embedding_scale = rich ? 8.5f : 1.0f,
        .eps = 1e-5f,
        .final_soft_cap = rich ? 3.0f : 0.0f,
        .is_gelu = rich,
    };
    int64_t tokens[POSITIONS + 3];
    char *entries[2][LAYERS][2];
    long entry = HEAD_SIZE * bytes_of(kind);
    for (int text = 0; text < 2; text++)
        for (int layer = 0; layer < LAYERS; layer++)
            for (int which = 0; which < 2; which++)
                entries[text][layer][which] = malloc(KEY_HEADS * POSITIONS * entry);
    for (long rows = 1, start = 0; start + rows <= POSITIONS; rows = rows % ROWS + 1) {
        int both = rows % 2;
        long written = rows + 3 * both;
        float *logits = malloc(4 * written * VOCAB);
        Text texts[2] = {{entries[0][0], rows, start, POSITIONS * entry},
                         {entries[1][0], 3, 0, POSITIONS * entry}};
        for (long i = 0; i < rows; i++)
            tokens[i] = (start + i) * 7 % VOCAB;
        for (long i = 0; i < 3; i++)
            tokens[rows + i] = (i * 7 + 1) % VOCAB;
        step(&model, texts, 1 + both, tokens, logits);
        print(newest ? "window" : rich ? "rich" : "plain", kind, bits, logits, 4 * written * VOCAB);
        free(logits);
        start += rows;
    }
}

int main(void) {
    use_threads(2);
    for (int rich = 0; rich < 2; rich++)
        for (long kind = BF16; kind <= F32; kind *= 2)
            for (long bits = FOUR; bits <= F32; bits *= 2)
                if (bits < BF16 || bits == kind)
                    print_steps(kind, bits, rich, 0);
    for (int rich = 0; rich < 2; rich++)
        for (long kind = BF16; kind <= F32; kind *= 2)
            print_steps(kind, kind, rich, NEWEST);
}
