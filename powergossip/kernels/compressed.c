/* Compressed messages: CHOCO, DeepSqueeze, Moniqua. */

/* Σ |v_i| */
float sum_of_magnitudes(const float *restrict v, i64 count) {
    float lane[LANES] = {0};
    i64 i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int l = 0; l < LANES; l++) lane[l] += fabsf(v[i + l]);
    for (int l = 0; i + l < count; l++) lane[l] += fabsf(v[i + l]);
    return sum_of_lanes(lane);
}
