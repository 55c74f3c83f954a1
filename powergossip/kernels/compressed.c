/* Compressed messages: CHOCO-Gossip, DeepSqueeze, Moniqua. See algorithms/compiled_compression.py.

   The rows of x have any stride, all other arrays are contiguous. Messages are not aligned. */

enum { SIGN_AND_NORM, QSGD, TOP_K, AT_POSITIONS };

/* A tensor of x and the places of its fields in a message. The same in compiled_compression.py. */
typedef struct {
    i64 start, length; /* its elements among the D */
    i64 kept;          /* K of a sparse C(v) */
    i64 floats;        /* first byte of its floats */
    i64 rest;          /* first byte of its positions, or first bit of its levels */
    i64 width;         /* bytes of a position, or bits of a level */
    i64 draws;         /* AT_POSITIONS: see draw_positions */
    float levels;      /* s of QSGD */
    float factor;      /* scale/s of QSGD */
} Tensor;

/* The same in compiled_compression.py. */
typedef struct {
    i64 kind;
    i64 rows;            /* hosted workers */
    i64 elements, bytes; /* D, and the size of a message */
    i64 tensors;
    const Tensor *tensor;
    const i64 *workers; /* their indices, of the rows */
    u64 key;            /* of the seed */
    int32_t *places;    /* AT_POSITIONS: those of all tensors, at their `rest` */
    int32_t *keys;      /* scratch memory: 3 × the length of the longest tensor */
} Plan;

static inline float load_float(const u8 *from) {
    float value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline void store_float(u8 *to, float value) { memcpy(to, &value, sizeof value); }

/* ---- Levels as one little-endian string of bits. See compressors/packing.py. ---- */

/* A 64-bit mask with `ones` ones at the bottom of each lane of `lane` bits. */
static inline u64 lowest(int ones, int lane) {
    u64 mask = 0;
    for (int start = 0; start < 64; start += lane) mask |= (((u64)1 << ones) - 1) << start;
    return mask;
}

/* The masks of the three steps that close or open the gaps between 8 levels in a word. */
typedef struct {
    u64 low[3];
    int gap[3];
} Steps;

static inline Steps steps(int bits) {
    Steps found;
    for (int step = 0, half = 8; step < 3; step++, half *= 2) {
        found.low[step] = lowest(half / 8 * bits, 2 * half);
        found.gap[step] = half - half / 8 * bits;
    }
    return found;
}

static inline u64 closed(u64 word, Steps s) {
    for (int step = 0; step < 3; step++) {
        u64 low = word & s.low[step];
        word = low | (word ^ low) >> s.gap[step];
    }
    return word;
}

static inline u64 opened(u64 word, Steps s) {
    for (int step = 2; step >= 0; step--) {
        u64 low = word & s.low[step];
        word = low | (word ^ low) << s.gap[step];
    }
    return word;
}

/* Append `count` levels from bit `bit` on. Later bits of the last byte become 0. The levels after
   the last, up to a multiple of 8, are 0. */
static void pack(u8 *restrict message, i64 bit, const u8 *restrict level, i64 count, int bits) {
    if (bits == 8) {
        memcpy(message + bit / 8, level, (size_t)count);
        return;
    }
    u8 *to = message + bit / 8;
    const u8 *end = message + (bit + count * bits + 7) / 8;
    int filled = (int)(bit % 8);
    u64 open = filled ? *to & ((1u << filled) - 1) : 0, word;
    Steps s = steps(bits);
    for (i64 i = 0; i < count; i += 8, to += bits) {
        memcpy(&word, level + i, 8);
        word = bits == 1 ? word * 0x0102040810204080u >> 56 : closed(word, s);
        word = word << filled | open;
        open = word >> 8 * bits;
        if (end - to >= 8)
            memcpy(to, &word, 8); /* the next levels replace the last bytes */
        else
            for (int j = 0; to + j < end; j++) to[j] = (u8)(word >> 8 * j);
    }
}

/* The levels from bit `bit` on. Writes up to 7 levels more. */
static void unpack(u8 *restrict level, const u8 *restrict message, i64 bit, i64 count, int bits) {
    if (bits == 8) {
        memcpy(level, message + bit / 8, (size_t)count);
        return;
    }
    const u8 *from = message + bit / 8, *end = message + (bit + count * bits + 7) / 8;
    int shift = (int)(bit % 8);
    u64 all = ((u64)1 << 8 * bits) - 1, word;
    Steps s = steps(bits);
    for (i64 i = 0; i < count; i += 8, from += bits) {
        if (end - from >= 8) {
            memcpy(&word, from, 8);
        } else {
            word = 0;
            for (int j = 0; from + j < end; j++) word |= (u64)from[j] << 8 * j;
        }
        word = opened(word >> shift & all, s);
        memcpy(level + i, &word, 8);
    }
}

/* out[i] = ± value, with the signs of the bits from `bit` on. */
static void signed_by_bits(float *restrict out, const u8 *message, i64 bit, i64 count, float value) {
    const u8 *from = message + bit / 8;
    int shift = (int)(bit % 8);
    i64 bytes = (shift + count + 7) / 8;
    u8 aligned[BLOCK / 8 + 1], one[BLOCK + 8]; /* bit i alone, in byte i */
    for (i64 i = 0; i < bytes - 1; i++) aligned[i] = (u8)((from[i] | from[i + 1] << 8) >> shift);
    aligned[bytes - 1] = from[bytes - 1] >> shift;
    for (i64 i = 0; i < (count + 7) / 8; i++) {
        u64 eight = (aligned[i] * 0x0101010101010101u) & 0x8040201008040201u;
        memcpy(one + 8 * i, &eight, 8);
    }
    for (i64 i = 0; i < count; i++) out[i] = one[i] ? value : -value;
}

/* ---- C(v) of a few elements, for compressors that send something for every one. ---- */

/* out = C(v) of the elements from … from + count − 1 of a tensor, at most BLOCK. */
static void decode(
    const Plan *plan, const Tensor *t, const u8 *message, i64 from, i64 count, float *restrict out
) {
    float first = load_float(message + t->floats);
    i64 bit = t->rest + from * t->width;
    if (plan->kind == SIGN_AND_NORM) {
        signed_by_bits(out, message, bit, count, first);
        return;
    }
    u8 level[BLOCK + 8];
    unpack(level, message, bit, count, (int)t->width);
    float factor = first * t->factor;
    for (i64 i = 0; i < count; i++) out[i] = ((float)level[i] - t->levels) * factor;
}

/* ---- The vectors to be compressed. ---- */

/* v is x − p, or p after p ← p + x. */
typedef struct {
    const float *x;
    float *p;
    int difference;
} Source;

static inline void first_read(Source s, i64 from, i64 count, float *restrict v) {
    const float *restrict x = s.x + from;
    float *restrict p = s.p + from;
    if (s.difference)
        for (i64 i = 0; i < count; i++) v[i] = x[i] - p[i];
    else
        for (i64 i = 0; i < count; i++) p[i] = v[i] = p[i] + x[i];
}

static inline float again(Source s, i64 i) { return s.difference ? s.x[i] - s.p[i] : s.p[i]; }

/* ---- Encoding ---- */

static float sum_of_magnitudes(const float *restrict v, i64 count) {
    float lane[LANES] = {0};
    i64 i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int l = 0; l < LANES; l++) lane[l] += fabsf(v[i + l]);
    for (int l = 0; i + l < count; l++) lane[l] += fabsf(v[i + l]);
    return sum(load(lane));
}

static float sum_of_squares(const float *restrict v, i64 count) {
    float lane[LANES] = {0};
    i64 i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int l = 0; l < LANES; l++) lane[l] += v[i + l] * v[i + l];
    for (int l = 0; i + l < count; l++) lane[l] += v[i + l] * v[i + l];
    return sum(load(lane));
}

static void encode_signs(const Tensor *t, Source s, u8 *message) {
    float v[BLOCK];
    u8 level[BLOCK + 8];
    double sum = 0;
    for (i64 from = 0; from < t->length; from += BLOCK) {
        i64 count = smaller(BLOCK, t->length - from);
        first_read(s, t->start + from, count, v);
        sum += sum_of_magnitudes(v, count);
        for (i64 i = 0; i < count; i++) level[i] = v[i] >= 0;
        memset(level + count, 0, 8);
        pack(message, t->rest + from, level, count, 1);
    }
    store_float(message + t->floats, (float)(sum / (double)t->length));
}

static void encode_qsgd(const Tensor *t, Source s, u64 key, u64 counter, u8 *message) {
    float v[BLOCK], u[BLOCK + 8];
    u8 level[BLOCK + 8];
    double sum = 0;
    for (i64 from = 0; from < t->length; from += BLOCK) {
        i64 count = smaller(BLOCK, t->length - from);
        first_read(s, t->start + from, count, v);
        sum += sum_of_squares(v, count);
    }
    float norm = (float)sqrt(sum);
    store_float(message + t->floats, norm);
    for (i64 from = 0; from < t->length; from += BLOCK) {
        i64 count = smaller(BLOCK, t->length - from), skipped = (t->start + from) % 4;
        uniform(u, key, counter, t->start + from - skipped, skipped + count);
        for (i64 i = 0; i < count; i++) {
            float value = again(s, t->start + from + i);
            float scaled = fabsf(value) / norm * t->levels + u[skipped + i];
            float rounded = scaled < t->levels ? floorf(scaled) : t->levels;
            float shifted = copysignf(rounded, value) + t->levels;
            level[i] = (u8)(int32_t)(scaled == scaled ? shifted : 0); /* 0/0 too */
        }
        memset(level + count, 0, 8);
        pack(message, t->rest + from * t->width, level, count, (int)t->width);
    }
}

/* The `rank`-th largest of keys ≥ 0, or the largest number up to it with the given highest bits. */
static int32_t kth_largest(const int32_t *restrict keys, i64 count, i64 rank, int bits) {
    int32_t found = 0;
    if (rank == 1) {
        for (i64 i = 0; i < count; i++) found = keys[i] > found ? keys[i] : found;
        return found;
    }
    for (int bit = 30; bit > 30 - bits; bit--) {
        int32_t next = found | (int32_t)1 << bit;
        i64 above = 0;
        for (i64 from = 0; from < count; from += 1 << 20) {
            int32_t some = 0;
            i64 end = smaller(count, from + (1 << 20));
            for (i64 i = from; i < end; i++) some += keys[i] >= next;
            above += some;
        }
        if (above >= rank) found = next;
    }
    return found;
}

static inline int32_t key_of(float v) { /* in the order of |v|, NaN is the largest */
    int32_t word;
    memcpy(&word, &v, sizeof word);
    return word & 0x7FFFFFFF;
}

#define APART 8 /* runs of LANES elements from one of the sample to the next */

/* A key that at least K elements probably reach, from every eighth run of 16 elements: some more of
   the sample reach it than are expected among the K largest. 0 for a small tensor. */
static int32_t likely_limit(Source s, const Tensor *t, int32_t *restrict keys) {
    i64 count = 0;
    for (i64 from = 0; from + LANES <= t->length; from += APART * LANES)
        for (i64 i = t->start + from; i < t->start + from + LANES; i++)
            keys[count++] = key_of(s.difference ? s.x[i] - s.p[i] : s.p[i] + s.x[i]);
    double expected = (double)t->kept / APART;
    i64 rank = (i64)(expected + 3 * sqrt(expected) + 3);
    return rank > count ? 0 : kth_largest(keys, count, rank, 14);
}

/* The elements whose key is at least a limit, and their places. Returns their number. */
static i64 at_least(
    Source s, const Tensor *t, int first, int32_t limit, float *restrict values,
    int32_t *restrict places
) {
    float v[BLOCK];
    u8 large[BLOCK + 8];
    i64 found = 0;
    for (i64 from = 0; from < t->length; from += BLOCK) {
        i64 count = smaller(BLOCK, t->length - from), start = t->start + from;
        if (first)
            first_read(s, start, count, v);
        else
            for (i64 i = 0; i < count; i++) v[i] = again(s, start + i);
        for (i64 i = 0; i < count; i++) large[i] = key_of(v[i]) >= limit;
        memset(large + count, 0, 8);
        for (i64 i = 0; i < count; i += 8) {
            u64 eight;
            memcpy(&eight, large + i, 8);
            for (; eight; eight &= eight - 1) {
                i64 at = i + __builtin_ctzll(eight) / 8;
                values[found] = v[at];
                places[found++] = (int32_t)(from + at);
            }
        }
    }
    return found;
}

/* The largest K, of equal elements the first ones. */
static void encode_top_k(const Plan *plan, const Tensor *t, Source s, u8 *message) {
    int32_t *keys = plan->keys, *places = keys + t->length;
    float *values = (float *)(places + t->length);
    int32_t limit = likely_limit(s, t, keys);
    i64 count = at_least(s, t, 1, limit, values, places), equal = t->kept;
    if (count < t->kept) count = at_least(s, t, 0, 0, values, places);
    for (i64 i = 0; i < count; i++) keys[i] = key_of(values[i]);
    limit = kth_largest(keys, count, t->kept, 31);
    for (i64 i = 0; i < count; i++) equal -= keys[i] > limit;
    u8 *value = message + t->floats, *position = message + t->rest;
    for (i64 i = 0; i < count; i++) {
        if (keys[i] < limit || (keys[i] == limit && equal-- <= 0)) continue;
        store_float(value, values[i]);
        memcpy(position, &places[i], (size_t)t->width);
        value += sizeof(float);
        position += t->width;
    }
}

/* All values are NaN if an element is not finite. */
static void encode_positions(const Plan *plan, const Tensor *t, Source s, u8 *message) {
    float v[BLOCK];
    int32_t most = 0;
    for (i64 from = 0; from < t->length; from += BLOCK) {
        i64 count = smaller(BLOCK, t->length - from);
        first_read(s, t->start + from, count, v);
        const int32_t *words = (const int32_t *)v;
        for (i64 i = 0; i < count; i++) {
            int32_t key = words[i] & 0x7FFFFFFF;
            most = key > most ? key : most;
        }
    }
    float zero = most < 0x7F800000 ? 0 : NAN;
    for (i64 k = 0; k < t->kept; k++)
        store_float(
            message + t->floats + 4 * k, again(s, t->start + plan->places[t->rest + k]) + zero
        );
}

/* ---- Positions that all workers share. See RandomK and RandomBlock in compressors/sparse.py. ----

   `draws` of a tensor is the largest number of draws with replacement, or ALL to choose by the
   smallest of one random number for each element, or BLOCK_OF for consecutive positions, or
   ELSEWHERE. */

enum { BLOCK_OF = -1, ALL = -2, ELSEWHERE = -3 };

#define MOST_SORTED 4096

typedef struct {
    i64 value;
    int32_t place;
} Drawn;

static int ascending(const void *a, const void *b) {
    i64 first = ((const Drawn *)a)->value, second = ((const Drawn *)b)->value;
    return (first > second) - (first < second);
}

static inline int32_t below(i64 n, u64 bits) { return (int32_t)((bits >> 32) * (u64)n >> 32); }

/* The first K different ones of some draws. 0 if there are fewer. `seen` [length] is and stays 0. */
static int draw_distinct(const Tensor *t, u64 key, u64 first, int32_t *places, u8 *seen) {
    i64 found = 0;
    for (i64 i = 0; i < t->draws && found < t->kept; i++) {
        int32_t at = below(t->length, random_bits(key, first + (u64)i));
        places[found] = at;
        found += !seen[at];
        seen[at] = 1;
    }
    for (i64 k = 0; k < found; k++) seen[places[k]] = 0;
    return found == t->kept;
}

static void draw_smallest(const Tensor *t, u64 key, u64 first, int32_t *places) {
    Drawn drawn[MOST_SORTED];
    for (i64 i = 0; i < t->length; i++)
        drawn[i] = (Drawn){(i64)random_bits(key, first + (u64)i), (int32_t)i};
    qsort(drawn, (size_t)t->length, sizeof(Drawn), ascending);
    for (i64 k = 0; k < t->kept; k++) places[k] = drawn[k].place;
}

/* Fill the places of all tensors, for the `counter`-th message, except ELSEWHERE. Returns 0 if the
   draws of a tensor did not suffice. */
i64 draw_positions(const Plan *plan, u64 counter) {
    i64 enough = 1;
    u8 *seen = (u8 *)plan->keys;
    i64 longest = 0;
    for (const Tensor *t = plan->tensor; t < plan->tensor + plan->tensors; t++)
        longest = t->length > longest ? t->length : longest;
    memset(seen, 0, (size_t)longest);
    for (const Tensor *t = plan->tensor; t < plan->tensor + plan->tensors; t++) {
        int32_t *places = plan->places + t->rest;
        u64 first = ((1 + counter) << 32) + (u64)t->start;
        if (t->draws > 0) {
            enough &= draw_distinct(t, plan->key, first, places, seen);
        } else if (t->draws == ALL) {
            draw_smallest(t, plan->key, first, places);
        } else if (t->draws == BLOCK_OF) {
            int32_t at = below(t->length, random_bits(plan->key, first));
            for (i64 k = 0; k < t->kept; k++, at = at + 1 < t->length ? at + 1 : 0) places[k] = at;
        }
    }
    return enough;
}

/* ---- Sparse messages ---- */

static inline i64 place(const Plan *plan, const Tensor *t, const u8 *message, i64 k) {
    const u8 *from = message + t->rest + k * t->width;
    uint16_t two;
    int32_t four;
    switch (t->width) {
    case 0: return t->start + plan->places[t->rest + k];
    case 1: return t->start + *from;
    case 2: memcpy(&two, from, 2); return t->start + two;
    default: memcpy(&four, from, 4); return t->start + four;
    }
}

/* out ← out + factor C(v) of a tensor */
static void add_sparse(
    const Plan *plan, const Tensor *t, const u8 *message, float factor, float *out
) {
    for (i64 k = 0; k < t->kept; k++)
        out[place(plan, t, message, k)] += factor * load_float(message + t->floats + 4 * k);
}

/* ---- CHOCO-Gossip and DeepSqueeze ---- */

static int sparse(const Plan *plan) { return plan->kind >= TOP_K; }

/* δ ← δ − C(v) */
static void keep_error(const Plan *plan, const Tensor *t, const u8 *message, float *error) {
    if (sparse(plan)) {
        add_sparse(plan, t, message, -1, error);
        return;
    }
    float own[BLOCK];
    for (i64 from = 0; from < t->length; from += BLOCK) {
        i64 count = smaller(BLOCK, t->length - from);
        decode(plan, t, message, from, count, own);
        for (i64 i = 0; i < count; i++) error[t->start + from + i] -= own[i];
    }
}

/* The messages of all rows [row, bytes]: C(x − p), or C(v) of v = p + x with p ← v − C(v). */
void compressed_encode(
    const Plan *plan, i64 difference, u64 counter, const float *x, i64 stride, float *p, u8 *message
) {
    for (i64 row = 0; row < plan->rows; row++) {
        Source s = {x + row * stride, p + row * plan->elements, difference != 0};
        u8 *to = message + row * plan->bytes;
        u64 key = random_bits(plan->key, (u64)plan->workers[row]);
        for (const Tensor *t = plan->tensor; t < plan->tensor + plan->tensors; t++) {
            switch (plan->kind) {
            case SIGN_AND_NORM: encode_signs(t, s, to); break;
            case QSGD: encode_qsgd(t, s, key, counter, to); break;
            case TOP_K: encode_top_k(plan, t, s, to); break;
            case AT_POSITIONS: encode_positions(plan, t, s, to); break;
            }
            if (!difference) keep_error(plan, t, to, s.p);
        }
    }
}

/* x ← x + Σ_j r_ij (x̂_j − x̂_i) for at most BLOCK elements of a worker. */
static void add_flow(
    const Plan *plan, i64 from, i64 count, i64 slots, const float *rates, const float *own,
    const float *others, float *restrict x
) {
    float sum[BLOCK] = {0};
    for (i64 slot = 0; slot < slots; slot++) {
        float rate = rates[slot];
        const float *there = others + slot * plan->elements + from;
        if (rate == 0) continue; /* no neighbor */
        for (i64 i = 0; i < count; i++) sum[i] += rate * (there[i] - own[from + i]);
    }
    for (i64 i = 0; i < count; i++) x[from + i] += sum[i];
}

/* flow = Σ_j r_ij (x̂_j − x̂_i) [row, D] */
void choco_flow(
    const Plan *plan, i64 slots, const float *rates, const float *public, const float *publics,
    float *flow
) {
    i64 elements = plan->elements;
    memset(flow, 0, plan->rows * elements * sizeof(float));
    for (i64 row = 0; row < plan->rows; row++)
        for (i64 from = 0; from < elements; from += BLOCK)
            add_flow(
                plan, from, smaller(BLOCK, elements - from), slots, rates + row * slots,
                public + row * elements, publics + row * slots * elements, flow + row * elements
            );
}

/* x̂ ← x̂ + q for a worker and its neighbors, x ← x + Σ_j r_ij (x̂_j − x̂_i). */
static void choco_row_dense(
    const Plan *plan, i64 slots, const float *rates, const u8 *message, const u8 *received,
    float *restrict x, float *restrict own, float *restrict others
) {
    float q[BLOCK], sum[BLOCK];
    for (const Tensor *t = plan->tensor; t < plan->tensor + plan->tensors; t++)
        for (i64 from = 0; from < t->length; from += BLOCK) {
            i64 count = smaller(BLOCK, t->length - from);
            float *restrict here = own + t->start + from;
            decode(plan, t, message, from, count, q);
            for (i64 i = 0; i < count; i++) here[i] += q[i];
            memset(sum, 0, sizeof sum);
            for (i64 slot = 0; slot < slots; slot++) {
                float rate = rates[slot];
                float *restrict there = others + slot * plan->elements + t->start + from;
                if (rate == 0) continue; /* no neighbor */
                decode(plan, t, received + slot * plan->bytes, from, count, q);
                for (i64 i = 0; i < count; i++) {
                    there[i] += q[i];
                    sum[i] += rate * (there[i] - here[i]);
                }
            }
            float *restrict to = x + t->start + from;
            for (i64 i = 0; i < count; i++) to[i] += sum[i];
        }
}

/* x̂ ← x̂ + q of a tensor, for a sparse q. */
static void add_to_copies(
    const Plan *plan, const Tensor *t, i64 slots, const float *rates, const u8 *message,
    const u8 *received, float *own, float *others
) {
    add_sparse(plan, t, message, 1, own);
    for (i64 slot = 0; slot < slots; slot++)
        if (rates[slot] != 0)
            add_sparse(plan, t, received + slot * plan->bytes, 1, others + slot * plan->elements);
}

/* choco_row_dense for top-k, tensor by tensor, as their copies may fit into the second cache. */
static void choco_row_top_k(
    const Plan *plan, i64 slots, const float *rates, const u8 *message, const u8 *received,
    float *restrict x, float *restrict own, float *restrict others
) {
    for (const Tensor *t = plan->tensor; t < plan->tensor + plan->tensors; t++) {
        add_to_copies(plan, t, slots, rates, message, received, own, others);
        for (i64 from = t->start, count; from < t->start + t->length; from += count) {
            count = smaller(BLOCK, t->start + t->length - from);
            add_flow(plan, from, count, slots, rates, own, others, x);
        }
    }
}

/* The same where all messages have the same positions, at which alone the flow changes. It is
   computed from the copies there, not updated, so that rounding errors do not accumulate. */
static void choco_row_at_positions(
    const Plan *plan, i64 slots, const float *rates, const u8 *message, const u8 *received,
    float *restrict x, float *own, float *others, float *restrict flow
) {
    for (const Tensor *t = plan->tensor; t < plan->tensor + plan->tensors; t++) {
        add_to_copies(plan, t, slots, rates, message, received, own, others);
        for (i64 k = 0; k < t->kept; k++) {
            i64 at = place(plan, t, message, k);
            float sum = 0;
            for (i64 slot = 0; slot < slots; slot++)
                if (rates[slot] != 0)
                    sum += rates[slot] * (others[slot * plan->elements + at] - own[at]);
            flow[at] = sum;
        }
    }
    for (i64 i = 0; i < plan->elements; i++) x[i] += flow[i];
}

/* message [row, bytes], received [row, slot, bytes], rates r_ij [row, slot], public [row, D],
   publics [row, slot, D], flow [row, D] of AT_POSITIONS. */
void choco_average(
    const Plan *plan, i64 slots, const float *rates, const u8 *message, const u8 *received,
    float *x, i64 stride, float *public, float *publics, float *flow
) {
    for (i64 row = 0; row < plan->rows; row++) {
        const float *of_row = rates + row * slots;
        const u8 *out = message + row * plan->bytes, *in = received + row * slots * plan->bytes;
        float *own = public + row * plan->elements;
        float *others = publics + row * slots * plan->elements, *to = x + row * stride;
        if (plan->kind == AT_POSITIONS)
            choco_row_at_positions(
                plan, slots, of_row, out, in, to, own, others, flow + row * plan->elements
            );
        else if (plan->kind == TOP_K)
            choco_row_top_k(plan, slots, of_row, out, in, to, own, others);
        else
            choco_row_dense(plan, slots, of_row, out, in, to, own, others);
    }
}

/* x ← x + Σ_j r_ij (c_j − c_i). Arguments as above. */
void deepsqueeze_average(
    const Plan *plan, i64 slots, const float *rates, const u8 *message, const u8 *received,
    float *x, i64 stride
) {
    float own[BLOCK], c[BLOCK];
    for (i64 row = 0; row < plan->rows; row++) {
        float *to = x + row * stride;
        const u8 *out = message + row * plan->bytes, *in = received + row * slots * plan->bytes;
        for (i64 slot = 0; slot < slots && sparse(plan); slot++) {
            float rate = rates[row * slots + slot];
            if (rate == 0) continue;
            for (const Tensor *t = plan->tensor; t < plan->tensor + plan->tensors; t++) {
                add_sparse(plan, t, in + slot * plan->bytes, rate, to);
                add_sparse(plan, t, out, -rate, to);
            }
        }
        for (const Tensor *t = plan->tensor; t < plan->tensor + plan->tensors && !sparse(plan); t++)
            for (i64 from = 0; from < t->length; from += BLOCK) {
                i64 count = smaller(BLOCK, t->length - from);
                float *restrict here = to + t->start + from;
                decode(plan, t, out, from, count, own);
                for (i64 slot = 0; slot < slots; slot++) {
                    float rate = rates[row * slots + slot];
                    if (rate == 0) continue;
                    decode(plan, t, in + slot * plan->bytes, from, count, c);
                    for (i64 i = 0; i < count; i++) here[i] += rate * (c[i] - own[i]);
                }
            }
    }
}

/* ---- Moniqua ---- */

/* Levels l [row, packed to 2 bits] and cells c [row, D] of x. thrice = 3 δB [row]. */
void moniqua_encode(
    i64 rows, i64 elements, u64 key, u64 counter, const float *x, i64 stride, const float *thrice,
    u8 *message, int8_t *cells
) {
    float u[BLOCK];
    i64 bytes = (elements + 3) / 4;
    for (i64 from = 0; from < elements; from += BLOCK) {
        i64 count = smaller(BLOCK, elements - from);
        uniform(u, key, counter, from, count);
        for (i64 row = 0; row < rows; row++) {
            const float *restrict v = x + row * stride + from;
            int8_t *restrict cell = cells + row * elements + from;
            u8 *restrict to = message + row * bytes + from / 4;
            float divisor = thrice[row];
            u8 level[BLOCK];
            for (i64 i = 0; i < count; i++) {
                float t = v[i] / divisor + 0.5f;
                float y = (t - floorf(t)) * 3;
                y = y == y ? y : 0; /* NaN */
                int32_t l = (int32_t)(y + u[i]);
                level[i] = (u8)(l < 3 ? l : 3);
                cell[i] = (int8_t)(int32_t)(y + 0.5f);
            }
            for (i64 i = count; i % 4; i++) level[i] = 0;
            for (i64 i = 0; i < (count + 3) / 4; i++) {
                uint32_t four;
                memcpy(&four, level + 4 * i, 4);
                to[i] = (u8)(four | four >> 6 | four >> 12 | four >> 18);
            }
        }
    }
}

static void unpack_twos(u8 *restrict level, const u8 *restrict packed, i64 count) {
    for (i64 i = 0; i < (count + 3) / 4; i++) {
        uint32_t byte = packed[i];
        uint32_t four = (byte | byte << 6 | byte << 12 | byte << 18) & 0x03030303u;
        memcpy(level + 4 * i, &four, 4);
    }
}

/* x ← x + Σ_j r_ij (mod(l_j − c, 3) + c − l_i), for rates in units of 1/(δB). */
void moniqua_average(
    i64 rows, i64 slots, i64 elements, const float *rates, const u8 *message, const u8 *received,
    const int8_t *cells, float *x, i64 stride
) {
    i64 bytes = (elements + 3) / 4;
    u8 own[BLOCK], other[BLOCK];
    int8_t shift[BLOCK];
    for (i64 row = 0; row < rows; row++)
        for (i64 from = 0; from < elements; from += BLOCK) {
            i64 count = smaller(BLOCK, elements - from);
            const int8_t *restrict cell = cells + row * elements + from;
            float *restrict to = x + row * stride + from;
            unpack_twos(own, message + row * bytes + from / 4, count);
            for (i64 i = 0; i < count; i++) shift[i] = (int8_t)(cell[i] - own[i]);
            for (i64 slot = 0; slot < slots; slot++) {
                float rate = rates[row * slots + slot];
                if (rate == 0) continue;
                unpack_twos(other, received + (row * slots + slot) * bytes + from / 4, count);
                for (i64 i = 0; i < count; i++) {
                    int8_t n = (int8_t)(other[i] - cell[i]);
                    int8_t carried = (int8_t)((n > 1) - (n < -1)); /* round(n/3), |n| ≤ 3 */
                    other[i] = (u8)(n - 3 * carried + shift[i]);
                }
                for (i64 i = 0; i < count; i++) to[i] += rate * (float)(int8_t)other[i];
            }
        }
}
