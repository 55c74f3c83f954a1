/* The sum of an all-reduce, see network/transports.py. */

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
