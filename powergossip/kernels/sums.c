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

/* Plain gossip. Strides are in elements. */
typedef struct {
    float *x; /* [worker, element] */
    i64 x_stride;
    const float *received; /* [worker, neighbor, element] */
    i64 worker_stride, neighbor_stride;
    i64 neighbors, length, blocks;
    const float *own_weight; /* [worker] */
    const float *weight;     /* [worker, neighbor] */
} Gossip;

static void mix(const void *arguments, i64 task) {
    const Gossip *g = arguments;
    const i64 worker = task / g->blocks, block = task % g->blocks;
    const i64 stop = g->length * (block + 1) / g->blocks;
    for (i64 start = g->length * block / g->blocks, width; start < stop; start += width) {
        width = stop - start < 1024 ? stop - start : 1024; /* they stay in the fastest cache */
        float *restrict x = g->x + worker * g->x_stride + start;
        const float own = g->own_weight[worker];
        for (i64 i = 0; i < width; i++) x[i] *= own;
        for (i64 k = 0; k < g->neighbors; k++) {
            const float *restrict x_k =
                g->received + worker * g->worker_stride + k * g->neighbor_stride + start;
            const float weight = g->weight[worker * g->neighbors + k];
            for (i64 i = 0; i < width; i++) x[i] += weight * x_k[i];
        }
    }
}

/* x_i ← own_weight_i x_i + Σ_j weight_ij x_j, one after the other. */
void plain_gossip(float *x, i64 x_stride, const float *received, i64 worker_stride,
                  i64 neighbor_stride, i64 workers, i64 neighbors, i64 length,
                  const float *own_weight, const float *weight, i64 threads) {
    const i64 most = 1 + workers * length * neighbors / PER_THREAD;
    threads = threads < most ? threads : most;
    const Gossip g = {x,         x_stride, received,
                      worker_stride, neighbor_stride, neighbors,
                      length,    workers < 4 * threads ? threads : 1,
                      own_weight, weight};
    in_threads(threads, workers * g.blocks, mix, &g);
}
