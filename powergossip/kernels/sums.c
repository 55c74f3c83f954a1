/* The sum of an all-reduce, see network/collectives.py. */

#include <stdlib.h>

#define AT_A_TIME 128 /* elements, so that all partial sums stay in the fastest cache */

/* out[i] = (the sum of rows[k][i] over k, added in pairs) / divisor, in the order of _sum_in_pairs:
   neighbors first, then neighboring sums; an odd one at the end waits for the next turn. */
void sum_in_pairs(const float *const *rows, i64 count, i64 length, float divisor, float *out) {
    float(*sums)[AT_A_TIME] = malloc((count + 1) / 2 * sizeof *sums);
    for (i64 start = 0; start < length; start += AT_A_TIME) {
        const i64 width = length - start < AT_A_TIME ? length - start : AT_A_TIME;
        i64 terms = (count + 1) / 2;
        for (i64 k = 0; k + 1 < count; k += 2) {
            const float *a = rows[k] + start, *b = rows[k + 1] + start;
            float *restrict sum = sums[k / 2];
            for (i64 i = 0; i < width; i++) sum[i] = a[i] + b[i];
        }
        if (count % 2) memcpy(sums[count / 2], rows[count - 1] + start, width * sizeof(float));
        for (; terms > 1; terms = (terms + 1) / 2) {
            for (i64 k = 0; k + 1 < terms; k += 2)
                for (i64 i = 0; i < width; i++) sums[k / 2][i] = sums[k][i] + sums[k + 1][i];
            if (terms % 2) memmove(sums[terms / 2], sums[terms - 1], width * sizeof(float));
        }
        for (i64 i = 0; i < width; i++) out[start + i] = sums[0][i] / divisor;
    }
    free(sums);
}

/* Plain gossip. Strides are in elements. The message from a neighbor is a row of `own`, or after
   them of `others`. */
typedef struct {
    float *x;                         /* [worker, element] */
    const float *own, *others;        /* [row, element], own may be x */
    const i64 *index;                 /* [worker, neighbor] */
    const float *own_weight, *weight; /* [worker], [worker, neighbor] */
    i64 x_stride, own_stride, own_rows, others_stride, workers, neighbors, length, parts;
} Gossip;

/* x_i ← own_weight_i x_i + Σ_k weight_k from_k, one after the other, in steps of `vectors` ≤ 4 from
   a column on, while they fit. Returns the column behind them. */
static inline __attribute__((always_inline)) i64 mix(const Gossip *g, float *x,
                                                     const float *const *from, i64 column,
                                                     i64 width, const int vectors) {
    for (; column + vectors * LANES <= width; column += vectors * LANES)
        for (i64 i = 0, k = 0; i < g->workers; i++) {
            float *x_i = x + i * g->x_stride + column;
            Lanes sum[4];
            for (int v = 0; v < vectors; v++) sum[v] = load(x_i + v * LANES) * g->own_weight[i];
            for (i64 end = k + g->neighbors; k < end; k++)
                for (int v = 0; v < vectors; v++)
                    sum[v] += g->weight[k] * load(from[k] + column + v * LANES);
            for (int v = 0; v < vectors; v++) store(x_i + v * LANES, sum[v]);
        }
    return column;
}

/* A part of the elements, in blocks of which a copy of the own rows fits in the second cache. */
static void mix_part(const void *arguments, i64 part) {
    const Gossip *g = arguments;
    const i64 edges = g->workers * g->neighbors, stop = g->length * (part + 1) / g->parts;
    i64 copied = 0; /* own rows, if there is an edge between them */
    for (i64 k = 0; k < edges && !copied; k++) copied = g->index[k] < g->own_rows ? g->own_rows : 0;
    const i64 most = 64 + (1 << 16) / (copied + 1) / 64 * 64; /* elements of a block */
    const i64 stride = most + LANES; /* not a power of two: rows would share lines of a cache */
    float *own = malloc(copied * stride * sizeof *own);
    const float **from = malloc(edges * sizeof *from);
    for (i64 start = g->length * part / g->parts, width; start < stop; start += width) {
        width = smaller(most, stop - start);
        for (i64 row = 0; row < copied; row++)
            memcpy(own + row * stride, g->own + row * g->own_stride + start, width * sizeof *own);
        for (i64 k = 0; k < edges; k++) {
            const i64 row = g->index[k], other = row - g->own_rows;
            from[k] = other < 0 ? own + row * stride : g->others + other * g->others_stride + start;
        }
        float *x = g->x + start;
        const i64 rest = mix(g, x, from, mix(g, x, from, 0, width, 4), width, 1);
        for (i64 i = 0, k = 0; i < g->workers; i++, x += g->x_stride, k += g->neighbors)
            for (i64 column = rest; column < width; column++) {
                x[column] *= g->own_weight[i];
                for (i64 j = k; j < k + g->neighbors; j++)
                    x[column] += g->weight[j] * from[j][column];
            }
    }
    free(own);
    free(from);
}

void plain_gossip(float *x, i64 x_stride, const float *own, i64 own_stride, i64 own_rows,
                  const float *others, i64 others_stride, const i64 *index, i64 workers,
                  i64 neighbors, i64 length, const float *own_weight, const float *weight,
                  i64 threads) {
    threads = smaller(threads, 1 + workers * length * neighbors / PER_THREAD);
    const Gossip g = {x,        own,      others,        index,   own_weight, weight, x_stride,
                      own_stride, own_rows, others_stride, workers, neighbors,  length, threads};
    in_threads(threads, threads, mix_part, &g);
}
