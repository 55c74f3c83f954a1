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

/* Up to LANES columns of the matrix, or the block behind it. */
typedef struct {
    i64 start, stride; /* of its elements, and of its rows */
    i64 rows, columns, block;
} Tile;

static i64 tiles(const Code *c) {
    const i64 columns = c->elements / ROWS_OF_BLOCK;
    return (columns + LANES - 1) / LANES + (c->elements % ROWS_OF_BLOCK > 0);
}

/* The tile to be done as number i. Those with less than LANES columns come first, since they write
   LANES elements of each row: others overwrite what is too much. */
static Tile tile_of(const Code *c, i64 i) {
    const i64 columns = c->elements / ROWS_OF_BLOCK;
    const i64 first = (i + columns / LANES) % tiles(c) * LANES;
    if (first < columns)
        return (Tile){first, columns, ROWS_OF_BLOCK, smaller(LANES, columns - first), first};
    const i64 full = columns * ROWS_OF_BLOCK;
    return (Tile){full, 1, c->elements - full, 1, columns};
}

/* 3^row modulo 2^16: ±3^r are the odd numbers modulo a power of two, each once. */
static void weights(uint32_t weight[ROWS_OF_BLOCK]) {
    for (uint32_t r = 0, power = 1; r < ROWS_OF_BLOCK; r++, power = 3 * power & 65535)
        weight[r] = power;
}

static i64 blocks_of(const Code *c) { return (c->elements + ROWS_OF_BLOCK - 1) / ROWS_OF_BLOCK; }

/* z ← 8 H z. H = Hᵀ is a Hadamard matrix of 64, or smaller ones along the diagonal. */
#define ROTATE(name, Vector)                                                                  \
    static void name(Vector *z, i64 rows) {                                                   \
        for (i64 start = 0, length; start < rows; start += length) {                          \
            const i64 rest = rows - start;                                                    \
            length = rest >= 64 ? 64 : rest >= 16 ? 16 : rest >= 4 ? 4 : 1;                   \
            for (i64 half = 1; half < length; half *= 4)                                      \
                for (i64 i = start; i < start + length; i += 4 * half)                        \
                    for (i64 j = i; j < i + half; j++) {                                      \
                        const Vector a = z[j] + z[j + half], b = z[j] - z[j + half];          \
                        const Vector c = z[j + 2 * half] + z[j + 3 * half];                   \
                        const Vector d = z[j + 2 * half] - z[j + 3 * half];                   \
                        z[j] = a + c;                                                         \
                        z[j + half] = b + d;                                                  \
                        z[j + 2 * half] = a - c;                                              \
                        z[j + 3 * half] = b - d;                                              \
                    }                                                                         \
            const float factor = length == 64 ? 1 : length == 16 ? 2 : length == 4 ? 4 : 8;     \
            for (i64 i = start; i < start + length && factor > 1; i++) z[i] *= factor;        \
        }                                                                                     \
    }
ROTATE(rotate, WideLanes)
ROTATE(rotate_integers, Lanes) /* below 2^24 */

/* ⌊y + u⌋ modulo 2^32. Beyond 2^50, and for NaN, the ends have different numbers. */
static inline void round_down(const double *restrict y, const float *restrict u,
                              uint32_t *restrict k, double scale, double sign, double whole) {
    const double magic = 0x1.8p52; /* the integer is in the last bits of a sum with it */
    for (int l = 0; l < LANES; l++) {
        const double value = y[l] * scale, dither = u[l];
        const double noise = (sign > 0 ? dither : 1 - dither) * whole;
        const double exact = fabs(value) < 0x1p50 ? value + dither : noise;
        const double near = exact + magic;
        i64 bits;
        memcpy(&bits, &near, sizeof bits);
        k[l] = (uint32_t)(bits - (near - magic > exact));
    }
}

static inline void store_bytes(u8 *restrict to, const uint32_t *restrict values, int shift,
                               uint32_t mask) {
    for (int l = 0; l < LANES; l++) to[l] = (u8)(values[l] >> shift & mask);
}

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

static void encode_edge(const void *arguments, i64 edge) {
    const Exchange *a = arguments;
    const Code *c = a->code;
    if (c->absent[edge]) return;
    const i64 n = c->elements, blocks = blocks_of(c), first_bits = smaller(c->bits, 8);
    const i64 *state = c->state + (edge * c->slots + a->slot) * (c->parts + 2);
    const float *s = a->s + edge / a->neighbors * a->worker_stride +
                     edge % a->neighbors * a->edge_stride;
    double *restrict z = malloc((size_t)(n + LANES) * 22 + 4 * LANES + (size_t)blocks * 4);
    double *restrict natural = z + n + LANES;
    float *u = (float *)(natural + n + LANES);
    uint32_t *sums = (uint32_t *)(u + n + LANES);
    u8 *low = (u8 *)(sums + blocks), *high = low + n + LANES;
    uniform(u, c->key[edge], a->counter, (i64)c->first, n);
    memset(z + n, 0, LANES * sizeof *z);
    memset(u + n, 0, LANES * sizeof *u);

    for (i64 part = 0, from = 0; part < c->parts; from += c->length[part++]) {
        const float *restrict flip = c->flip;
        const double scale = ldexp(1, (int)-state[part]);
        const i64 end = from + c->length[part];
        for (i64 e = from; e < end; e++) natural[e] = s[e] * flip[e] * scale;
    }
    const int32_t *restrict order = c->order;
    for (i64 e = 0; e < n; e++) z[e] = natural[order[e]];
    uint32_t weight[ROWS_OF_BLOCK];
    weights(weight);
    const double scale = 0.125 / power(state[c->parts]), sign = c->sign[edge];
    const double whole = ldexp(1, (int)c->bits + 16);
    const uint32_t first_mask = (1u << first_bits) - 1, mask = (1u << (c->bits - first_bits)) - 1;
    for (i64 i = 0; i < tiles(c); i++) {
        const Tile t = tile_of(c, i);
        WideLanes y[ROWS_OF_BLOCK];
        for (i64 r = 0; r < t.rows; r++) memcpy(&y[r], z + t.start + r * t.stride, sizeof *y);
        rotate(y, t.rows);
        uint32_t total[LANES] = {0}, k[LANES];
        for (i64 r = 0; r < t.rows; r++) {
            const i64 e = t.start + r * t.stride;
            double row[LANES];
            memcpy(row, &y[r], sizeof row);
            round_down(row, u + e, k, scale, sign, whole);
            store_bytes(low + e, k, 0, first_mask);
            if (mask) store_bytes(high + e, k, 8, mask);
            for (int l = 0; l < LANES; l++) total[l] += (k[l] >> c->bits & 65535) * weight[r];
        }
        memcpy(sums + t.block, total, (size_t)t.columns * sizeof *sums);
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
    free(z);
}

/* The integers of a message. Returns its checksums. */
static const u8 *integers_of(const Code *c, const u8 *message, u8 *low, u8 *high) {
    const i64 first_bits = smaller(c->bits, 8), rest = c->bits - first_bits;
    unpack(low, message, 0, c->elements, (int)first_bits);
    message += (c->elements * first_bits + 7) / 8;
    if (rest) unpack(high, message, 0, c->elements, (int)rest);
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

/* k = mod(theirs − own). Adds its carries to the total, and notes integers at the edge. */
static inline void apart(const u8 *restrict own, const u8 *restrict theirs,
                         const u8 *restrict own_high, const u8 *restrict their_high, i64 bits,
                         int32_t *restrict k, int32_t *restrict total, int32_t *restrict edge,
                         int32_t weight) {
    const int32_t half = 1 << (bits - 1), mask = (1 << bits) - 1;
    for (int l = 0; l < LANES; l++) {
        int32_t difference = theirs[l] - own[l];
        if (bits > 8) difference += (their_high[l] - own_high[l]) * 256;
        k[l] = ((difference + half) & mask) - half;
        total[l] += (int32_t)((uint32_t)((k[l] - difference) >> bits) * (uint32_t)weight);
        edge[l] |= k[l] == -half; /* ±half is none of them */
    }
}

/* The integers of a row, 0 in blocks that are left out. */
static inline Lanes measure(const int32_t *restrict k, const int32_t *restrict kept,
                            int32_t *restrict peaks, double *restrict squares) {
    float row[LANES];
    int32_t value[LANES];
    for (int l = 0; l < LANES; l++) value[l] = k[l] & kept[l];
    for (int l = 0; l < LANES; l++) {
        const int32_t size = abs(value[l]);
        peaks[l] = size > peaks[l] ? size : peaks[l];
    }
    for (int l = 0; l < LANES; l++) squares[l] += (double)(value[l] * value[l]);
    for (int l = 0; l < LANES; l++) row[l] = (float)value[l];
    return load(row);
}

static void decode_edge(const void *arguments, i64 edge) {
    const Exchange *a = arguments;
    const Code *c = a->code;
    const i64 n = c->elements, blocks = blocks_of(c), bits = c->bits;
    i64 *state = c->state + (edge * c->slots + a->slot) * (c->parts + 2);
    float *restrict d = a->d + edge * n;
    if (c->absent[edge]) {
        memset(d, 0, (size_t)n * sizeof *d);
        return;
    }
    double *squares = malloc((size_t)c->parts * sizeof(double) + 12 * (size_t)(n + 2 * LANES));
    float *restrict integers = (float *)(squares + c->parts), *ordered = integers + n + 2 * LANES;
    u8 *low[2], *high[2], *memory = (u8 *)(ordered + n + 2 * LANES);
    const u8 *sums[2], *messages[2] = {a->own, a->received};
    for (int end = 0; end < 2; end++) {
        low[end] = memory + 2 * end * (n + 2 * LANES);
        high[end] = low[end] + n + 2 * LANES;
        sums[end] = integers_of(c, messages[end] + edge * c->size, low[end], high[end]);
    }
    uint32_t weight[ROWS_OF_BLOCK];
    weights(weight);
    Found found = {0};
    int32_t peaks[LANES] = {0};
    double all[LANES] = {0};
    for (i64 i = 0; i < tiles(c); i++) {
        const Tile t = tile_of(c, i);
        Lanes z[ROWS_OF_BLOCK];
        int32_t k[ROWS_OF_BLOCK][LANES], total[LANES] = {0}, wrong[LANES] = {0}, kept[LANES] = {0};
        for (i64 r = 0; r < t.rows; r++) {
            const i64 e = t.start + r * t.stride;
            if (bits > 8)
                apart(low[0] + e, low[1] + e, high[0] + e, high[1] + e, bits, k[r], total, wrong,
                      (int32_t)weight[r]);
            else
                apart(low[0] + e, low[1] + e, low[0], low[1], bits & 15, k[r], total, wrong,
                      (int32_t)weight[r]);
        }
        for (i64 l = 0; l < t.columns; l++) {
            for (int end = 0; end < 2; end++) {
                const u8 *sum = sums[end] + t.block + l;
                total[l] += (end ? -1 : 1) * (sum[0] + 256 * sum[blocks]);
            }
            wrong[l] |= (total[l] & 65535) != 0;
            found.failed += wrong[l];
            kept[l] = wrong[l] - 1;
        }
        for (i64 r = 0; r < t.rows; r++) z[r] = measure(k[r], kept, peaks, all);
        rotate_integers(z, t.rows);
        for (i64 r = 0; r < t.rows; r++) {
            float *to = ordered + t.start + r * t.stride;
            if (t.columns == LANES) store(to, z[r]);
            else memcpy(to, &z[r], (size_t)t.columns * sizeof *to);
        }
    }
    for (int l = 0; l < LANES; l++) {
        found.peak = peaks[l] > found.peak ? peaks[l] : found.peak;
        found.squares += all[l];
    }
    const int32_t *restrict back = c->back;
    for (i64 e = 0; e < n; e++) integers[e] = ordered[back[e]];
    found.skip = found.failed * 4 > blocks;
    const double step = power(state[c->parts]) / 8;
    for (i64 part = 0, from = 0; part < c->parts; from += c->length[part++]) {
        const i64 end = from + c->length[part];
        const double scale = found.skip ? 0 : step * ldexp(1, (int)state[part]);
        const float *restrict flip = c->flip;
        double lane[LANES] = {0};
        i64 e = from;
        for (; e + LANES <= end; e += LANES)
            for (int l = 0; l < LANES; l++)
                lane[l] += (double)integers[e + l] * (double)integers[e + l];
        for (; e < end; e++) lane[0] += (double)integers[e] * (double)integers[e];
        squares[part] = 0;
        for (int l = 0; l < LANES; l++) squares[part] += lane[l];
        for (e = from; e < end; e++) d[e] = (float)(integers[e] * scale * flip[e]);
    }
    follow(c, state, squares, found);
    c->counts[edge] += found.skip ? blocks : found.failed;
    c->counts[c->edges + edge] += blocks;
    free(squares);
}

#define WORTH_A_THREAD (1 << 14) /* elements */

static i64 threads_for(const Code *c, i64 threads) {
    return smaller(threads, 1 + c->edges * c->elements / WORTH_A_THREAD);
}

/* The messages [worker, neighbor, byte] of s [worker, neighbor, element]. */
void difference_encode(const Code *c, i64 slot, const float *s, i64 worker_stride, i64 edge_stride,
                       i64 neighbors, u64 counter, u8 *message, i64 threads) {
    const Exchange a = {.code = c, .slot = slot, .s = s, .worker_stride = worker_stride,
                        .edge_stride = edge_stride, .neighbors = neighbors, .counter = counter,
                        .message = message};
    in_threads(threads_for(c, threads), c->edges, encode_edge, &a);
}

/* d [worker, neighbor, element] from the messages of both ends. */
void difference_decode(const Code *c, i64 slot, const u8 *own, const u8 *received, float *d,
                       i64 threads) {
    const Exchange a = {.code = c, .slot = slot, .own = own, .received = received, .d = d};
    in_threads(threads_for(c, threads), c->edges, decode_edge, &a);
}
