/* Loops over the parameters of the hosted workers. See __init__.py.

   Sums are over 16 lanes: element i belongs to lane i mod 16, and lanes are added in pairs at the
   end. The compiler can use vectors of any width for that without a change of the result. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16

typedef int64_t i64;

static inline float sum_of_lanes(const float lane[LANES]) {
    float sum[LANES];
    memcpy(sum, lane, sizeof sum);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) sum[i] += sum[i + width];
    return sum[0];
}
