/* Loops over the parameters of the hosted workers. See __init__.py.

   Sums are over 16 lanes: element i belongs to lane i mod 16, and lanes are added in pairs at the
   end. The compiler can use vectors of any width for that without a change of the result. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define BLOCK 1024 /* elements that stay in the first cache between loops over them */

typedef int64_t i64;
typedef uint64_t u64;
typedef uint8_t u8;

static inline i64 smaller(i64 a, i64 b) { return a < b ? a : b; }

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef float Half __attribute__((vector_size(2 * LANES)));
typedef float Quarter __attribute__((vector_size(LANES)));

static inline Lanes load(const float *from) {
    Lanes lanes;
    memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

static inline float sum(Lanes lanes) {
    Half half[2];
    memcpy(half, &lanes, sizeof half);
    half[0] += half[1];
    Quarter quarter[2];
    memcpy(quarter, half, sizeof quarter);
    quarter[0] += quarter[1];
    return (quarter[0][0] + quarter[0][2]) + (quarter[0][1] + quarter[0][3]);
}

/* 64 random bits, the mixing function of SplitMix64. See randomness.bits. */
static inline u64 random_bits(u64 key, u64 index) {
    u64 z = key + index * 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

/* Elements from … from + count − 1 of randomness.uniform(key, counter, …), for `from` a multiple of
   4. Writes up to 3 elements more. */
static inline void uniform(float *restrict u, u64 key, u64 counter, i64 from, i64 count) {
    u64 first = (counter << 32) + (u64)from / 4;
    for (i64 i = 0; i < (count + 3) / 4; i++) {
        u64 z = random_bits(key, first + (u64)i);
        for (int j = 0; j < 4; j++)
            u[4 * i + j] = ((float)(int16_t)(z >> 16 * j) + 32768.5f) * 0x1p-16f;
    }
}
