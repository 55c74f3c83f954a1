/* Differences from messages of few bits, see algorithms/difference_code.py.

   The elements of a message, in a random order, are a matrix with 64 rows, whose columns are the
   blocks. Up to 63 elements behind it are one more block. Sums are over integers, hence exact in any order. */

/* The same in difference_code.py. */
typedef struct {
    i64 edges, slots, parts, elements;
    i64 bits;                   /* of an integer */
    i64 size;                   /* bytes of a message */
    u64 first;                  /* index of the dither in a random stream */
    const i64 *length;          /* [part] */
    const int32_t *order, *back; /* of the elements, and its inverse [element] */
    const float *flip;          /* ±1 [element] */
    const float *sign, *absent; /* [edge], as in Edges */
    const u64 *key;             /* [edge] */
    i64 *state;                 /* [edge, slot, part + 2] */
    i64 *counts;                /* blocks that were left out, and all: [2, edge] */
} Code;

enum { ROWS_OF_BLOCK = 64, QUARTERS = 4, OCTAVES = 12, SMALLEST = -60, LARGEST = 1600, FINE = 6 };

static inline i64 larger_of(i64 a, i64 b) { return a > b ? a : b; }

/* 2^(quarters/4 + 1/8) */
static double power(i64 quarters) {
    static const double root[] = {1.0905077326652577, 1.2968395546510096, 1.5422108254079407,
                                  1.8340080864093424};
    return ldexp(root[quarters & 3], (int)(quarters >> 2));
}

/* The first column of the tile of LANES columns to be done as number i. One with less comes first,
   since it writes LANES elements of each row: others overwrite what is too much. */
static i64 first_of(i64 i, i64 columns) {
    return (i + columns / LANES) % ((columns + LANES - 1) / LANES) * LANES;
}

/* 3^row modulo 2^16: ±3^r are the odd numbers modulo a power of two, each once. */
static void weights(uint32_t weight[ROWS_OF_BLOCK]) {
    for (uint32_t r = 0, power = 1; r < ROWS_OF_BLOCK; r++, power = 3 * power & 65535)
        weight[r] = power;
}

static i64 blocks_of(const Code *c) { return (c->elements + ROWS_OF_BLOCK - 1) / ROWS_OF_BLOCK; }

typedef double WideHalf __attribute__((vector_size(4 * LANES)));
typedef int64_t LongHalf __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint32_t HalfWords __attribute__((vector_size(2 * LANES)));

static inline Half load_half(const float *from) {
    Half half;
    memcpy(&half, from, sizeof half);
    return half;
}

static inline Words load_words(const uint32_t *from) {
    Words words;
    memcpy(&words, from, sizeof words);
    return words;
}

/* A loop, since compilers convert vectors of bytes one by one. */
static inline Words load_bytes(const u8 *from) {
    uint32_t words[LANES];
    for (int l = 0; l < LANES; l++) words[l] = from[l];
    return load_words(words);
}

static inline void store_bytes(u8 *to, Words words) {
    for (int l = 0; l < LANES; l++) to[l] = (u8)words[l];
}

/* z ← 8 H z. H = Hᵀ is a Hadamard matrix of 64, or smaller ones along the diagonal. */
#define ROTATE(name, Vector, stride)                                                          \
    static void name(Vector *z, i64 rows) {                                                   \
        for (i64 start = 0, length; start < rows; start += length) {                          \
            const i64 rest = rows - start;                                                    \
            length = rest >= 64 ? 64 : rest >= 16 ? 16 : rest >= 4 ? 4 : 1;                   \
            for (i64 half = 1; half < length; half *= 4)                                      \
                for (i64 i = start; i < start + length; i += 4 * half)                        \
                    for (i64 j = i; j < i + half; j++) {                                      \
                        Vector *at = z + j * stride;                                          \
                        const i64 to = half * stride;                                         \
                        const Vector a = at[0] + at[to], b = at[0] - at[to];                  \
                        const Vector c = at[2 * to] + at[3 * to];                             \
                        const Vector d = at[2 * to] - at[3 * to];                             \
                        at[0] = a + c;                                                        \
                        at[to] = b + d;                                                       \
                        at[2 * to] = a - c;                                                   \
                        at[3 * to] = b - d;                                                   \
                    }                                                                         \
            const float factor = length == 64 ? 1 : length == 16 ? 2 : length == 4 ? 4 : 8;     \
            for (i64 i = start; i < start + length && factor > 1; i++) z[i * stride] *= factor; \
        }                                                                                     \
    }
ROTATE(rotate, WideHalf, 2)
ROTATE(rotate_column, double, 1)
ROTATE(rotate_integers, Lanes, 1) /* below 2^24 */
ROTATE(rotate_column_of_integers, float, 1)

typedef struct {
    const Code *code;
    i64 slot;
    const float *s;
    i64 worker_stride, edge_stride, neighbors;
    u64 counter;
    u8 *message;
    const u8 *own, *received;
    float *d;
} Exchange;

/* What the elements of an edge have in common. */
typedef struct {
    const float *u;
    u8 *low, *high;
    i64 bits;
    double scale, sign, whole;
} Rounding;

/* k = ⌊y + u⌋ modulo 2^32 of half a row, from element e on. Returns y beyond 2^50, and NaN. */
static inline LongHalf round_down(const Rounding *a, WideHalf y, i64 e, uint32_t *k) {
    const double magic = 0x1.8p52; /* the integer is in the last bits of a sum with it */
    const WideHalf u = __builtin_convertvector(load_half(a->u + e), WideHalf);
    const WideHalf value = y * a->scale, exact = value + u, near = exact + magic;
    const LongHalf down = (LongHalf)near + (LongHalf)(near - magic > exact);
    const HalfWords integers = __builtin_convertvector(down, HalfWords);
    memcpy(k, &integers, sizeof integers);
    return (LongHalf)(((LongHalf)value & INT64_MAX) >= 0x4310000000000000);
}

/* The integers of rows of LANES elements. Adds their carries to the total. */
static void encode_rows(Rounding a, WideHalf (*y)[2], i64 rows, i64 e, i64 stride,
                        const uint32_t *weight, i64 each, Words *total) {
    uint32_t k[ROWS_OF_BLOCK][LANES];
    LongHalf beyond = {0};
    for (i64 r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++) {
            const int l = half * LANES / 2;
            beyond |= round_down(&a, y[r][half], e + r * stride + l, k[r] + l);
        }
    i64 any = 0;
    for (int l = 0; l < LANES / 2; l++) any |= beyond[l];
    for (i64 r = 0; r < rows && any; r++) /* there, the ends have different numbers */
        for (int l = 0; l < LANES; l++) {
            const double u = a.u[e + r * stride + l];
            if (!(fabs(y[r][l / (LANES / 2)][l % (LANES / 2)] * a.scale) < 0x1p50))
                k[r][l] = (uint32_t)((a.sign > 0 ? u : 1 - u) * a.whole);
        }
    const uint32_t low = (1u << smaller(a.bits, 8)) - 1, high = (1u << a.bits) - 1;
    for (i64 r = 0; r < rows; r++) {
        const Words row = load_words(k[r]);
        store_bytes(a.low + e + r * stride, row & low);
        if (a.bits > 8) store_bytes(a.high + e + r * stride, (row & high) >> 8);
        const Words one = (Words){0} + weight[r], own = each ? load_words(weight + r * LANES) : one;
        *total += (row >> (uint32_t)a.bits & 65535) * own;
    }
}

static void encode_edge(const void *arguments, i64 edge) {
    const Exchange *a = arguments;
    const Code *c = a->code;
    if (c->absent[edge]) return;
    const i64 n = c->elements, blocks = blocks_of(c), first_bits = smaller(c->bits, 8);
    const i64 columns = n / ROWS_OF_BLOCK, full = columns * ROWS_OF_BLOCK;
    const i64 *state = c->state + (edge * c->slots + a->slot) * (c->parts + 2);
    const float *restrict s = a->s + edge / a->neighbors * a->worker_stride +
                              edge % a->neighbors * a->edge_stride;
    double *restrict natural = malloc((size_t)(n + LANES) * 14 + (size_t)blocks * 4);
    float *u = (float *)(natural + n + LANES);
    uint32_t *sums = (uint32_t *)(u + n + LANES);
    u8 *low = (u8 *)(sums + blocks), *high = low + n + LANES;
    uniform(u, c->key[edge], a->counter, (i64)c->first, n);
    memset(u + n, 0, LANES * sizeof *u);

    const float *restrict flip = c->flip;
    for (i64 part = 0, e = 0, end = 0; part < c->parts; e = end, part++) {
        const double scale = ldexp(1, (int)-state[part]);
        end += c->length[part];
        for (; e < end && e + LANES / 2 <= n; e += LANES / 2) { /* also of the next part, for now */
            const WideHalf half = __builtin_convertvector(load_half(s + e) * load_half(flip + e),
                                                          WideHalf) * scale;
            memcpy(natural + e, &half, sizeof half);
        }
        for (; e < end; e++) natural[e] = s[e] * flip[e] * scale;
    }
    uint32_t weight[ROWS_OF_BLOCK];
    weights(weight);
    const Rounding rounding = {u, low, high, c->bits, 0.125 / power(state[c->parts]),
                               c->sign[edge], ldexp(1, (int)c->bits + 16)};
    const int32_t *restrict order = c->order;
    WideHalf y[ROWS_OF_BLOCK][2];
    for (i64 i = 0; i * LANES < columns; i++) {
        const i64 first = first_of(i, columns);
        Words total = {0};
        for (i64 r = 0; r < ROWS_OF_BLOCK; r++) {
            double row[LANES];
            for (int l = 0; l < LANES; l++) row[l] = natural[order[first + r * columns + l]];
            memcpy(y[r], row, sizeof row);
        }
        for (int half = 0; half < 2; half++) rotate(&y[0][half], ROWS_OF_BLOCK);
        encode_rows(rounding, y, ROWS_OF_BLOCK, first, columns, weight, 0, &total);
        memcpy(sums + first, &total, (size_t)smaller(LANES, columns - first) * sizeof *sums);
    }
    if (full < n) {
        double *column = (double *)memset(y, 0, sizeof y);
        Words total = {0};
        for (i64 r = 0; r < n - full; r++) column[r] = natural[order[full + r]];
        rotate_column(column, n - full);
        encode_rows(rounding, y, (n - full + LANES - 1) / LANES, full, LANES, weight, 1, &total);
        sums[columns] = 0;
        for (int l = 0; l < LANES; l++) sums[columns] += total[l];
    }
    memset(low + n, 0, LANES);
    memset(high + n, 0, LANES);
    u8 *to = a->message + edge * c->size;
    pack(to, 0, low, n, (int)first_bits);
    to += (n * first_bits + 7) / 8;
    if (c->bits > 8) {
        pack(to, 0, high, n, (int)c->bits - 8);
        to += (n * (c->bits - 8) + 7) / 8;
    }
    for (int shift = 0; shift < 16; shift += 8)
        for (i64 b = 0; b < blocks; b++) *to++ = (u8)(sums[b] >> shift);
    free(natural);
}

/* The integers of a message. Returns its checksums. */
static const u8 *integers_of(const Code *c, const u8 *message, u8 *low, u8 *high) {
    const i64 first_bits = smaller(c->bits, 8), rest = c->bits - first_bits;
    unpack(low, message, 0, c->elements, (int)first_bits);
    message += (c->elements * first_bits + 7) / 8;
    if (rest) unpack(high, message, 0, c->elements, (int)rest);
    memset(low + c->elements, 0, LANES);
    memset(high + c->elements, 0, LANES);
    return message + (c->elements * rest + 7) / 8;
}

static inline i64 exponent(double value) {
    int found;
    frexp(value, &found);
    return found;
}

/* What a message shows of its range. */
typedef struct {
    i64 failed, skip, peak;
    double squares; /* of its integers */
} Found;

/* Change the ranges after a message: DifferenceCode._follow. */
static void follow(const Code *c, i64 *state, const double *squares, Found found) {
    const i64 half = (i64)1 << (c->bits - 1), good = !found.failed, skips = state[c->parts + 1];
    const double step = power(state[c->parts]) / 8;
    i64 largest = INT64_MIN, change = 2 * !good;
    for (i64 p = 0; p < c->parts && !found.skip; p++) {
        const double mean = squares[p] / (double)c->length[p] * (step * step);
        const i64 size = state[p] + (exponent(mean) >> 1);
        const i64 least = state[p] - (mean > 0 ? 1 : 3);
        state[p] = mean > 0 && size > least ? size : least;
        largest = state[p] > largest ? state[p] : largest;
    }
    for (i64 p = 0; p < c->parts && !found.skip; p++)
        state[p] = larger_of(state[p], larger_of(largest - OCTAVES, SMALLEST));
    if (good && 8 * found.peak < 3 * half && found.squares / (double)c->elements < FINE) change = -1;
    if (good && found.peak == 0) change = -8 * QUARTERS;
    if (skips) change += 3 - 2 * QUARTERS * skips;
    if (found.skip) change = 2 * QUARTERS;
    change += state[c->parts];
    state[c->parts] = smaller(LARGEST, larger_of(change, QUARTERS * (2 - c->bits)));
    state[c->parts + 1] = found.skip ? skips + 1 : 0;
}

/* k = mod(theirs − own) of LANES elements. Adds its carries times 2^bits to the total, and notes
   integers at the edge. */
static inline LaneMask apart(const u8 *const *low, const u8 *const *high, i64 e, i64 bits,
                             Words weight, Words *total, LaneMask *edge) {
    const uint32_t half = 1u << (bits - 1), mask = (1u << bits) - 1;
    Words difference = load_bytes(low[1] + e) - load_bytes(low[0] + e);
    if (bits > 8) difference += (load_bytes(high[1] + e) - load_bytes(high[0] + e)) << 8;
    const Words k = ((difference + half) & mask) - half;
    *total += (k - difference) * weight;
    *edge |= (LaneMask)(k == -half); /* ±half is none of them */
    return (LaneMask)k;
}

/* The integers of a row, 0 in blocks that are left out. */
static inline Lanes measure(LaneMask k, LaneMask kept, LaneMask *peaks) {
    const LaneMask value = k & kept, negative = value >> 31, size = (value ^ negative) - negative;
    const LaneMask more = (LaneMask)(size > *peaks);
    *peaks = (size & more) | (*peaks & ~more);
    return __builtin_convertvector(value, Lanes);
}

/* True if a block's carries are not the difference of both checksums. */
static inline int differs(const u8 *const *sums, i64 block, i64 blocks, uint32_t carries) {
    const u8 *own = sums[0] + block, *theirs = sums[1] + block;
    return ((carries + own[0] - theirs[0] + 256u * (own[blocks] - theirs[blocks])) & 65535) != 0;
}

static void decode_edge(const void *arguments, i64 edge) {
    const Exchange *a = arguments;
    const Code *c = a->code;
    const i64 n = c->elements, blocks = blocks_of(c), bits = c->bits;
    const i64 columns = n / ROWS_OF_BLOCK, full = columns * ROWS_OF_BLOCK;
    i64 *state = c->state + (edge * c->slots + a->slot) * (c->parts + 2);
    float *restrict d = a->d + edge * n;
    if (c->absent[edge]) {
        memset(d, 0, (size_t)n * sizeof *d);
        return;
    }
    double *squares = malloc((size_t)c->parts * sizeof(double) + 8 * (size_t)(n + 2 * LANES));
    float *restrict ordered = (float *)(squares + c->parts);
    const u8 *low[2], *high[2], *sums[2], *messages[2] = {a->own, a->received};
    for (int end = 0; end < 2; end++) {
        u8 *to = (u8 *)(ordered + n + 2 * LANES) + 2 * end * (n + 2 * LANES);
        low[end] = to;
        high[end] = to + n + 2 * LANES;
        sums[end] = integers_of(c, messages[end] + edge * c->size, to, to + n + 2 * LANES);
    }
    uint32_t weight[ROWS_OF_BLOCK];
    weights(weight);
    Found found = {0};
    LaneMask k[ROWS_OF_BLOCK], peaks = {0};
    for (i64 i = 0; i * LANES < columns; i++) {
        const i64 first = first_of(i, columns), width = smaller(LANES, columns - first);
        Lanes z[ROWS_OF_BLOCK];
        Words total = {0};
        LaneMask wrong = {0}, kept = {0};
        for (i64 r = 0; r < ROWS_OF_BLOCK; r++)
            k[r] = apart(low, high, first + r * columns, bits, (Words){0} + weight[r], &total,
                         &wrong);
        for (i64 l = 0; l < width; l++) {
            const i64 left_out = wrong[l] || differs(sums, first + l, blocks, total[l] >> bits);
            found.failed += left_out;
            kept[l] = (int32_t)left_out - 1;
        }
        for (i64 r = 0; r < ROWS_OF_BLOCK; r++) z[r] = measure(k[r], kept, &peaks);
        rotate_integers(z, ROWS_OF_BLOCK);
        for (i64 r = 0; r < ROWS_OF_BLOCK; r++) store(ordered + first + r * columns, z[r]);
    }
    if (full < n) {
        float *z = ordered + full;
        Words total = {0};
        LaneMask wrong = {0};
        uint32_t carries = 0;
        i64 left_out = 0;
        for (i64 r = 0; r < n - full; r += LANES)
            k[r / LANES] = apart(low, high, full + r, bits, load_words(weight + r), &total, &wrong);
        for (int l = 0; l < LANES; l++) {
            carries += total[l];
            left_out |= wrong[l];
        }
        left_out = left_out || differs(sums, columns, blocks, carries >> bits);
        found.failed += left_out;
        const LaneMask kept = (LaneMask){0} + (int32_t)(left_out - 1);
        for (i64 r = 0; r < n - full; r += LANES)
            store(z + r, measure(k[r / LANES], kept, &peaks));
        rotate_column_of_integers(z, n - full);
    }
    for (int l = 0; l < LANES; l++) found.peak = larger_of(found.peak, peaks[l]);
    found.skip = found.failed * 4 > blocks;
    const double step = power(state[c->parts]) / 8;
    const int32_t *restrict back = c->back;
    const float *restrict flip = c->flip;
    for (i64 part = 0, e = 0, end = 0; part < c->parts; e = end, part++) {
        const double scale = found.skip ? 0 : step * ldexp(1, (int)state[part]);
        double lane[LANES] = {0};
        end += c->length[part];
        for (; e < end && e + LANES <= n; e += LANES) /* also of the next part, for now */
            for (int l = 0; l < LANES; l++) {
                const double integer = ordered[back[e + l]];
                d[e + l] = (float)(integer * scale * flip[e + l]);
                lane[l] += e + l < end ? integer * integer : 0;
            }
        for (; e < end; e++) {
            const double integer = ordered[back[e]];
            d[e] = (float)(integer * scale * flip[e]);
            lane[0] += integer * integer;
        }
        for (int width = LANES / 2; width > 0; width /= 2)
            for (int l = 0; l < width; l++) lane[l] += lane[l + width];
        squares[part] = lane[0];
        found.squares += squares[part] / ROWS_OF_BLOCK; /* a rotation by 8 H */
    }
    follow(c, state, squares, found);
    c->counts[edge] += found.skip ? blocks : found.failed;
    c->counts[c->edges + edge] += blocks;
    free(squares);
}

#define WORTH_A_THREAD (1 << 14) /* elements */

/* The messages [worker, neighbor, byte] of s [worker, neighbor, element]. */
void difference_encode(const Code *c, i64 slot, const float *s, i64 worker_stride, i64 edge_stride,
                       i64 neighbors, u64 counter, u8 *message, i64 threads) {
    const Exchange a = {.code = c, .slot = slot, .s = s, .worker_stride = worker_stride,
                        .edge_stride = edge_stride, .neighbors = neighbors, .counter = counter,
                        .message = message};
    threads = smaller(threads, 1 + c->edges * c->elements / WORTH_A_THREAD);
    in_threads(threads, c->edges, encode_edge, &a);
}

/* d [worker, neighbor, element] from the messages of both ends. */
void difference_decode(const Code *c, i64 slot, const u8 *own, const u8 *received, float *d,
                       i64 threads) {
    const Exchange a = {.code = c, .slot = slot, .own = own, .received = received, .d = d};
    threads = smaller(threads, 1 + c->edges * c->elements / WORTH_A_THREAD);
    in_threads(threads, c->edges, decode_edge, &a);
}
