/* PowerGossip, see algorithms/power_gossip.py and algorithms/compiled_directions.py.

   Axes: worker (hosted here), neighbor (slot), matrix, rank, row, column. Directions and products
   are [worker, neighbor, element]; a matrix has [rank, length] adjacent elements of them, and
   length is rows on side 0 and columns on side 1. p are directions, s products with a matrix, d
   differences of products, which are the next directions. Threads divide work without a change of any bit of the result. */

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

typedef struct {
    i64 start, rows, columns; /* of x [worker, element] */
    i64 at[2];                /* first element of its directions, by side */
} Matrix;

/* Constants of the edges of one round, see EdgeConstants in directions.py. */
typedef struct {
    i64 workers, neighbors, rank, matrices;
    i64 size[2]; /* elements of the directions of a neighbor, by side */
    i64 elements; /* of x of one worker, in its matrices */
    const Matrix *matrix;
    const float *weight, *sign, *absent; /* [worker, neighbor] */
    const uint64_t *key;                 /* [worker, neighbor] */
} Edges;

/* --- Vectors --- */

typedef int32_t LaneMask __attribute__((vector_size(4 * LANES)));
typedef double WideLanes __attribute__((vector_size(8 * LANES)));

static inline void store(float *to, Lanes lanes) { memcpy(to, &lanes, sizeof lanes); }

/* The last length mod LANES elements of `length`, and zeros. */
static inline Lanes load_rest(const float *from, i64 length) {
    const i64 rest = length % LANES;
    Lanes lanes = {0};
    if (length < LANES) {
        memcpy(&lanes, from, rest * sizeof(float));
        return lanes;
    }
    const LaneMask lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (Lanes)((LaneMask)load(from + length - LANES) & (lane >= (int32_t)(LANES - rest)));
}

/* Into the second cache, some pages ahead: processors prefetch within a page only. */
#define PREFETCH(from) __builtin_prefetch((from) + 4096, 0, 2)

/* Σ a_i b_i in double precision. */
static double wide_dot(const float *a, const float *b, i64 length) {
    WideLanes total = {0};
    i64 i = 0;
    for (; i + LANES <= length; i += LANES)
        total += __builtin_convertvector(load(a + i), WideLanes) *
                 __builtin_convertvector(load(b + i), WideLanes);
    if (i < length)
        total += __builtin_convertvector(load_rest(a, length), WideLanes) *
                 __builtin_convertvector(load_rest(b, length), WideLanes);
    double lane[LANES];
    memcpy(lane, &total, sizeof lane);
    for (int width = LANES / 2; width; width /= 2)
        for (int l = 0; l < width; l++) lane[l] += lane[l + width];
    return lane[0];
}

/* --- Threads --- */

typedef struct {
    void (*perform)(const void *arguments, i64 task);
    const void *arguments;
    i64 tasks;
    atomic_llong next;
} Work;

static void *take_tasks(void *argument) {
    Work *work = argument;
    for (i64 task; (task = atomic_fetch_add(&work->next, 1)) < work->tasks;)
        work->perform(work->arguments, task);
    return NULL;
}

#define MOST_THREADS 64

static void in_threads(i64 threads, i64 tasks, void (*perform)(const void *, i64),
                       const void *arguments) {
    Work work = {perform, arguments, tasks, 0};
    pthread_t others[MOST_THREADS];
    i64 started = 0;
    while (started < MOST_THREADS && started + 1 < threads && started + 1 < tasks &&
           !pthread_create(&others[started], NULL, take_tasks, &work))
        started++;
    take_tasks(&work);
    while (started) pthread_join(others[--started], NULL);
}

/* --- Random directions: randomness.normal --- */

/* ln x of a normal x > 0: x = m 2^e with √½ < m < √2, ln m = 2 artanh((m − 1)/(m + 1)). Libraries
   differ in the last bit of their logarithm, and the two ends of an edge may use two libraries. */
static inline double logarithm(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    const i64 e = (i64)(bits - 0x3FE6A09E667F3BCDu) >> 52;
    bits -= (uint64_t)e << 52;
    double m;
    memcpy(&m, &bits, sizeof m);
    const double s = (m - 1) / (m + 1), z = s * s;
    double series = 1.0 / 23;
    for (int k = 21; k > 0; k -= 2) series = series * z + 1.0 / k;
    return e * 0.69314718055994530942 + 2 * s * series;
}

/* sin(π/2 · t) for |t| ≤ 1. */
static inline double sine(double t) {
    const double a = t * 1.57079632679489661923, z = a * a;
    double series = 1;
    for (int k = 22; k > 1; k -= 2) series = 1 - series * z * (1.0 / (k * (k + 1)));
    return a * series;
}

/* Elements start … start + count − 1 of a key's stream, times sign. The numbers of
   randomness.normal, up to a rare difference in the last bit. */
static void draw_normal(uint64_t key, i64 counter, i64 start, float sign, float *out, i64 count) {
    const uint64_t first = ((uint64_t)counter << 32) + (uint64_t)start;
    for (i64 i = 0; i < count; i++) {
        const uint64_t bits = random_bits(key, first + (uint64_t)i);
        const double uniform = ((double)(i64)(bits >> 32) + 0.5) * 0x1p-32;
        /* cos(2π low/2³²) = sin(π/2 (2³⁰ − |low|)/2³⁰) for −2³¹ ≤ low < 2³¹ */
        i64 low = (i64)(bits << 32) >> 32;
        low = low < 0 ? -low : low;
        const double cosine = sine((double)((1 << 30) - low) * 0x1p-30);
        out[i] = sign * (float)(sqrt(-2 * logarithm(uniform)) * cosine);
    }
}

/* --- Orthonormal directions --- */

/* G [rank, rank] = p pᵀ (lower triangle), after resampling directions of norm 0. */
static void gram(float *p, i64 rank, i64 length, uint64_t key, i64 counter, i64 at, float sign,
                 double *G) {
    for (i64 a = 0; a < rank; a++) {
        float *p_a = p + a * length;
        double *G_a = G + a * rank;
        G_a[a] = wide_dot(p_a, p_a, length);
        if (G_a[a] == 0) {
            draw_normal(key, counter, at + a * length, sign, p_a, length);
            G_a[a] = wide_dot(p_a, p_a, length);
        }
        for (i64 b = 0; b < a; b++) G_a[b] = wide_dot(p_a, p + b * length, length);
    }
}

/* p ← sign · L⁻¹ p with G = p pᵀ = L Lᵀ, with the ridge. G is overwritten. */
static void orthonormalize(float *p, i64 rank, i64 length, double sign, double *G, double *T) {
    for (i64 a = 0; a < rank; a++) {
        double *L_a = G + a * rank;
        for (i64 b = 0; b <= a; b++) {
            const double *L_b = G + b * rank;
            double value = L_a[b] * (a == b ? 1 + 1e-12 : 1);
            for (i64 k = 0; k < b; k++) value -= L_a[k] * L_b[k];
            L_a[b] = a == b ? sqrt(value) : value / L_b[b];
        }
        /* Row a of T = sign · L⁻¹, from the rows above. */
        for (i64 b = 0; b <= a; b++) {
            double value = a == b ? sign : 0;
            for (i64 k = b; k < a; k++) value -= L_a[k] * T[k * rank + b];
            T[a * rank + b] = value / L_a[a];
        }
    }
    for (i64 a = rank - 1; a >= 0; a--) { /* row a needs the rows up to a only */
        float *out = p + a * length;
        i64 i = 0;
        for (; i + LANES <= length; i += LANES) {
            WideLanes total = {0};
            for (i64 b = 0; b <= a; b++)
                total += T[a * rank + b] *
                         __builtin_convertvector(load(p + b * length + i), WideLanes);
            store(out + i, __builtin_convertvector(total, Lanes));
        }
        for (; i < length; i++) {
            double total = 0;
            for (i64 b = 0; b <= a; b++) total += T[a * rank + b] * (double)p[b * length + i];
            out[i] = (float)total;
        }
    }
}

static void round_to_signs(float *p, i64 length, float sign) {
    const float size = (float)(1 / sqrt((double)length));
    for (i64 i = 0; i < length; i++) p[i] = p[i] * sign >= 0 ? size : -size;
}

/* --- Products s = Xᵀ p or X p --- */

#define TILE 1024 /* columns of products that stay in the fastest cache */
#define ROWS 8    /* rows of X that stay in the fastest cache */
#define INLINE static inline __attribute__((always_inline))

/* s[k][c] += Σ_r p[k][r] X[r, c] for all k, LANES columns. */
INLINE void add_lanes(const float *X, i64 stride, const int rows, Lanes factor[4][ROWS],
                      Lanes *total, const int count) {
    for (int r = 0; r < rows; r++) {
        const Lanes x = load(X + r * stride);
        PREFETCH(X + r * stride);
        for (int k = 0; k < count; k++) total[k] += factor[k][r] * x;
    }
}

/* s[k][c] += Σ_r p[k][r] X[r, c] for some directions and rows, and columns first … last − 1. */
INLINE void add_rows(const float *X, i64 stride, const int rows, const float *const *p,
                     float *const *s, i64 r, i64 first, i64 last, const int count) {
    X += r * stride;
    if (last - first < LANES) {
        for (int k = 0; k < count; k++)
            for (i64 c = first; c < last; c++)
                for (int i = 0; i < rows; i++) s[k][c] += p[k][r + i] * X[i * stride + c];
        return;
    }
    Lanes factor[4][ROWS];
    for (int k = 0; k < count; k++)
        for (int i = 0; i < rows; i++) factor[k][i] = p[k][r + i] - (Lanes){0};
    /* The last lanes may be among those of the loop: they are computed before, written after. */
    const i64 end = last - LANES;
    Lanes at_end[4], total[4];
    for (int k = 0; k < count; k++) at_end[k] = load(s[k] + end);
    add_lanes(X + end, stride, rows, factor, at_end, count);
    for (i64 c = first; c < end; c += LANES) {
        for (int k = 0; k < count; k++) total[k] = load(s[k] + c);
        add_lanes(X + c, stride, rows, factor, total, count);
        for (int k = 0; k < count; k++) store(s[k] + c, total[k]);
    }
    for (int k = 0; k < count; k++) store(s[k] + end, at_end[k]);
}

/* s[k][r] = Σ_c X[r, c] p[k][c] for some rows and directions. */
INLINE void dots(const float *X, i64 columns, const int rows, const float *const *p,
                 float *const *s, i64 first, const int count) {
    Lanes total[4][4] = {{{0}}};
    i64 c = 0;
    for (; c + LANES <= columns; c += LANES) {
        Lanes x[4];
        for (int r = 0; r < rows; r++) {
            x[r] = load(X + r * columns + c);
            PREFETCH(X + r * columns + c);
        }
        for (int k = 0; k < count; k++) {
            const Lanes p_k = load(p[k] + c);
            for (int r = 0; r < rows; r++) total[r][k] += x[r] * p_k;
        }
    }
    if (c < columns)
        for (int k = 0; k < count; k++) {
            const Lanes p_k = load_rest(p[k], columns);
            for (int r = 0; r < rows; r++) total[r][k] += load_rest(X + r * columns, columns) * p_k;
        }
    for (int k = 0; k < count; k++)
        for (int r = 0; r < rows; r++) s[k][first + r] = sum(total[r][k]);
}

/* --- One half of an iteration each, for all matrices, neighbors and workers --- */

typedef struct {
    const Edges *edges;
    float *x;
    i64 stride; /* between workers in x */
    i64 side, blocks;
    float *p, *s;
    const float *received;
    i64 counter, rounded;
} Arguments;

/* Task = (worker, matrix, block): rows or columns first … last − 1 of a matrix. */
typedef struct {
    const Edges *e;
    const Matrix *matrix;
    i64 worker, first, last;
    i64 p_length, s_length, p_at, s_at, p_size, s_size;
    float *X;
} Task;

static Task task_of(const Arguments *a, i64 index, i64 by_columns) {
    const Edges *e = a->edges;
    const i64 block = index % a->blocks, which = index / a->blocks;
    const i64 worker = which / e->matrices;
    const Matrix *m = e->matrix + which % e->matrices;
    const i64 length = by_columns ? m->columns : m->rows;
    /* Blocks of whole lanes. */
    const i64 lanes = (length + LANES - 1) / LANES;
    i64 first = lanes * block / a->blocks * LANES, last = lanes * (block + 1) / a->blocks * LANES;
    if (last > length) last = length;
    return (Task){e,
                  m,
                  worker,
                  first,
                  last,
                  a->side ? m->columns : m->rows,
                  a->side ? m->rows : m->columns,
                  m->at[a->side],
                  m->at[1 - a->side],
                  e->size[a->side],
                  e->size[1 - a->side],
                  a->x + worker * a->stride + m->start};
}

static void direct(const void *arguments, i64 index) {
    const Arguments *a = arguments;
    const Task t = task_of(a, index, 0);
    const i64 rank = t.e->rank;
    double few[2 * 64], *G = rank <= 8 ? few : malloc(2 * rank * rank * sizeof(double));
    for (i64 k = 0; k < t.e->neighbors; k++) {
        const i64 edge = t.worker * t.e->neighbors + k;
        if (t.e->absent[edge]) continue;
        const uint64_t key = t.e->key[edge];
        const float sign = t.e->sign[edge];
        float *p = a->p + edge * t.p_size + t.p_at;
        gram(p, rank, t.p_length, key, a->counter, t.p_at, sign, G);
        if (a->rounded)
            round_to_signs(p, t.p_length, sign);
        else if (rank == 1) {
            const double scale = sign / sqrt(G[0]);
            for (i64 i = 0; i < t.p_length; i++) p[i] = (float)(p[i] * scale);
        } else
            orthonormalize(p, rank, t.p_length, sign, G, G + rank * rank);
    }
    if (rank > 8) free(G);
}

#define AT_ONCE 32

/* Some directions of the edges of a worker, for one matrix. */
typedef struct {
    i64 next; /* the first that is not among them */
    int count;
    const float *p[AT_ONCE];
    float *s[AT_ONCE], weight[AT_ONCE];
} Directions;

/* The directions after those. Returns whether there are any. */
static int next_directions(const Arguments *a, const Task *t, Directions *some) {
    const i64 rank = t->e->rank, edge = t->worker * t->e->neighbors;
    some->count = 0;
    for (; some->next < t->e->neighbors * rank && some->count < AT_ONCE; some->next++) {
        const i64 k = edge + some->next / rank, i = some->next % rank;
        if (t->e->absent[k]) continue;
        some->p[some->count] = a->p + k * t->p_size + t->p_at + i * t->p_length;
        some->s[some->count] = a->s + k * t->s_size + t->s_at + i * t->s_length;
        some->weight[some->count++] = t->e->weight[k];
    }
    return some->count;
}

/* s = Xᵀ p for columns first … last − 1. */
static void multiply_columns(const float *X, i64 rows, i64 columns, const Directions *at, i64 first,
                             i64 last) {
    for (int k = 0; k < at->count; k++) memset(at->s[k] + first, 0, (last - first) * sizeof(float));
#define ADD_ROWS(rows, r, count) add_rows(X, columns, rows, p, s, r, first, last, count)
    for (i64 r = 0, some; r < rows; r += some) {
        some = rows - r >= 8 ? 8 : rows - r >= 4 ? 4 : 1;
        for (int k = 0, more; k < at->count; k += more) {
            const int left = at->count - k;
            const float *const *p = at->p + k;
            float *const *s = at->s + k;
            if (left >= 4 && some >= 4) {
                more = 4;
                for (i64 i = 0; i < some; i += 4) ADD_ROWS(4, r + i, 4);
            } else if (left >= 2) {
                more = 2;
                if (some == 8) ADD_ROWS(8, r, 2);
                else if (some == 4) ADD_ROWS(4, r, 2);
                else ADD_ROWS(1, r, 2);
            } else {
                more = 1;
                if (some == 8) ADD_ROWS(8, r, 1);
                else if (some == 4) ADD_ROWS(4, r, 1);
                else ADD_ROWS(1, r, 1);
            }
        }
    }
}

/* s = X p for rows first … last − 1. */
static void multiply_rows(const float *X, i64 columns, const Directions *at, i64 first, i64 last) {
#define DOTS(rows, count) dots(X + r * columns, columns, rows, at->p + k, at->s + k, r, count)
    for (i64 r = first, some; r < last; r += some) {
        some = last - r >= 4 ? 4 : 1;
        for (int k = 0, more; k < at->count; k += more) {
            const int left = at->count - k;
            more = left >= 4 ? 4 : left >= 2 ? 2 : 1;
            if (some == 4) {
                if (more == 4) DOTS(4, 4);
                else if (more == 2) DOTS(4, 2);
                else DOTS(4, 1);
            } else {
                if (more == 4) DOTS(1, 4);
                else if (more == 2) DOTS(1, 2);
                else DOTS(1, 1);
            }
        }
    }
}

static void project(const void *arguments, i64 index) {
    const Arguments *a = arguments;
    const Task t = task_of(a, index, a->side == 0);
    const i64 rows = t.matrix->rows, columns = t.matrix->columns;
    Directions at = {0};
    while (next_directions(a, &t, &at))
        if (a->side)
            multiply_rows(t.X, columns, &at, t.first, t.last);
        else
            for (i64 first = t.first; first < t.last; first += TILE) {
                const i64 last = first + TILE < t.last ? first + TILE : t.last;
                multiply_columns(t.X, rows, columns, &at, first, last);
            }
}

/* The largest magnitude, as the bits of a float: exact, and NaN is the largest. */
static inline int32_t larger(int32_t largest, float value) {
    const int32_t bits = key_of(value);
    return bits > largest ? bits : largest;
}

static inline float magnitude(int32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* s ← d = s_received − s, or 0 where these differ by rounding errors only. */
static void differ(const void *arguments, i64 index) {
    const Arguments *a = arguments;
    const Task t = task_of(a, index, 0);
    for (i64 k = 0; k < t.e->neighbors; k++) {
        const i64 edge = t.worker * t.e->neighbors + k;
        if (t.e->absent[edge]) continue;
        for (i64 i = 0; i < t.e->rank; i++) {
            const i64 at = edge * t.s_size + t.s_at + i * t.s_length;
            const float *restrict theirs = a->received + at;
            float *restrict s = a->s + at;
            int32_t of_products = 0, of_d = 0;
            for (i64 l = 0; l < t.s_length; l++) {
                const float d = theirs[l] - s[l];
                of_products = larger(larger(of_products, theirs[l]), s[l]);
                of_d = larger(of_d, d);
                s[l] = d;
            }
            if (magnitude(of_d) <= 1e-6f * magnitude(of_products))
                memset(s, 0, t.s_length * sizeof(float));
        }
    }
}

INLINE void outer_lanes(const Lanes *right, Lanes factor[8][4], const int rows, const int count,
                        Lanes *total) {
    for (int i = 0; i < rows; i++) {
        Lanes sum = factor[0][i] * right[0];
        for (int k = 1; k < count; k++) sum += factor[k][i] * right[k];
        total[i] += sum;
    }
}

/* X[r, c] += Σ_k weight[k] left[k][r] right[k][c] for some rows and directions. */
INLINE void add_outer(float *X, i64 columns, const int rows, const float *weight,
                      const float *const *left, const float *const *right, i64 first,
                      const int count) {
    X += first * columns;
    if (columns < LANES) {
        for (int i = 0; i < rows; i++)
            for (i64 c = 0; c < columns; c++) {
                float total = weight[0] * left[0][first + i] * right[0][c];
                for (int k = 1; k < count; k++)
                    total += weight[k] * left[k][first + i] * right[k][c];
                X[i * columns + c] += total;
            }
        return;
    }
    Lanes factor[8][4], other[8], total[4], at_end[4];
    for (int k = 0; k < count; k++)
        for (int i = 0; i < rows; i++) factor[k][i] = weight[k] * left[k][first + i] - (Lanes){0};
    const i64 end = columns - LANES; /* see add_rows */
    for (int k = 0; k < count; k++) other[k] = load(right[k] + end);
    for (int i = 0; i < rows; i++) at_end[i] = load(X + i * columns + end);
    outer_lanes(other, factor, rows, count, at_end);
    for (i64 c = 0; c < end; c += LANES) {
        for (int k = 0; k < count; k++) other[k] = load(right[k] + c);
        for (int i = 0; i < rows; i++) {
            total[i] = load(X + i * columns + c);
            PREFETCH(X + i * columns + c);
        }
        outer_lanes(other, factor, rows, count, total);
        for (int i = 0; i < rows; i++) store(X + i * columns + c, total[i]);
    }
    for (int i = 0; i < rows; i++) store(X + i * columns + end, at_end[i]);
}

/* X += Σ γ w p dᵀ on side 0, its transpose on side 1. */
static void update(const void *arguments, i64 index) {
    const Arguments *a = arguments;
    const Task t = task_of(a, index, 0);
#define ADD_OUTER(rows, r, count) \
    add_outer(t.X, t.matrix->columns, rows, at.weight + k, left + k, right + k, r, count)
    Directions at = {0};
    while (next_directions(a, &t, &at)) {
        const float *const *d = (const float *const *)at.s;
        const float *const *left = a->side ? d : at.p, *const *right = a->side ? at.p : d;
        for (i64 r = t.first, some; r < t.last; r += some) {
            some = t.last - r >= 4 ? 4 : 1;
            for (int k = 0, more; k < at.count; k += more) {
                const int rest = at.count - k;
                more = rest >= 8 ? 8 : rest >= 4 ? 4 : rest >= 2 ? 2 : 1;
                if (some == 4) {
                    if (more == 8) {
                        ADD_OUTER(2, r, 8);
                        ADD_OUTER(2, r + 2, 8);
                    } else if (more == 4)
                        ADD_OUTER(4, r, 4);
                    else if (more == 2)
                        ADD_OUTER(4, r, 2);
                    else
                        ADD_OUTER(4, r, 1);
                } else {
                    if (more == 8) ADD_OUTER(1, r, 8);
                    else if (more == 4) ADD_OUTER(1, r, 4);
                    else if (more == 2) ADD_OUTER(1, r, 2);
                    else ADD_OUTER(1, r, 1);
                }
            }
        }
    }
}

#define PER_THREAD (1 << 18) /* elements: fewer are not worth a thread */

/* Before the message: p ← orthonormalize(p), s = Xᵀ p. */
void power_gossip_project(const Edges *e, const float *x, i64 stride, i64 side, float *p, float *s,
                          i64 counter, i64 rounded, i64 threads) {
    Arguments a = {.edges = e,
                   .x = (float *)x,
                   .stride = stride,
                   .side = side,
                   .blocks = 1,
                   .p = p,
                   .s = s,
                   .counter = counter,
                   .rounded = rounded};
    threads = smaller(threads, 1 + e->workers * e->elements / PER_THREAD);
    in_threads(threads, e->workers * e->matrices, direct, &a);
    if (e->workers < 4 * threads) a.blocks = threads;
    in_threads(threads, e->workers * e->matrices * a.blocks, project, &a);
}

/* After it: X ← X + Σ γ w p dᵀ with d = s_received − s, which takes the place of s. If `received` is
   NULL, s is d. */
void power_gossip_update(const Edges *e, float *x, i64 stride, i64 side, const float *p, float *s,
                         const float *received, i64 threads) {
    Arguments a = {.edges = e,
                   .x = x,
                   .stride = stride,
                   .side = side,
                   .blocks = 1,
                   .p = (float *)p,
                   .s = s,
                   .received = received};
    threads = smaller(threads, 1 + e->workers * e->elements / PER_THREAD);
    if (received) in_threads(threads, e->workers * e->matrices, differ, &a);
    if (e->workers < 4 * threads) a.blocks = threads;
    in_threads(threads, e->workers * e->matrices * a.blocks, update, &a);
}

/* p ← random directions. */
void power_gossip_draw(const Edges *e, i64 side, float *p, i64 counter) {
    for (i64 edge = 0; edge < e->workers * e->neighbors; edge++)
        if (!e->absent[edge])
            draw_normal(e->key[edge], counter, 0, e->sign[edge], p + edge * e->size[side],
                        e->size[side]);
}
