/* Shared by the C functions: SIMD vectors, products with packed matrices, exponentials, norms.

Plain C11 with the vector extensions of GCC and Clang. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define VL 16
#elif defined(__AVX__)
#define VL 8
#else
#define VL 4
#endif
#define NV (VL == 4 ? 4 : 2)  /* vectors per panel row */
#define NR (VL * NV)          /* columns per panel */
#define MR (VL == 16 ? 8 : 6) /* rows per tile: MR * NV accumulators stay in registers */

#define INLINE static inline __attribute__((always_inline))
typedef float vec __attribute__((vector_size(VL * 4), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(VL * 4), aligned(4)));

static int64_t padded(int64_t columns) { return (columns + NR - 1) / NR * NR; }

/* Pack a matrix into panels of NR columns, [columns / NR][rows][NR]. Element (row, column) is at b[row * by_row + column *
by_column]; columns past the end are zeros. Panels start `rows_of_panel` rows apart. */
INLINE void pack_any(const float *b, int64_t rows, int64_t columns, int64_t by_row, int64_t by_column, int64_t rows_of_panel,
                     float *out) {
    for (int64_t p = 0; p < columns; p += NR, out += rows_of_panel * NR)
        for (int64_t k = 0; k < rows; k++)
            for (int64_t j = 0; j < NR; j++)
                out[k * NR + j] = p + j < columns ? b[k * by_row + (p + j) * by_column] : 0.0f;
}

/* c = a b (+ c if `add`; + bias if not null). a: [M, K] with strides am, ak; b: K rows in panels `rows_of_panel` apart; c: [M,
N] with row length ldc. Reads MR rows of a at a time, so the memory past the last row must be readable. */
INLINE void multiply(int64_t M, int64_t K, int64_t N, const float *a, int64_t am, int64_t ak, const float *b,
                     int64_t rows_of_panel, const float *bias, int add, float *c, int64_t ldc) {
    for (int64_t p = 0; p < N; p += NR, b += rows_of_panel * NR)
        for (int64_t m = 0; m < M; m += MR) {
            vec acc[MR][NV];
            for (int i = 0; i < MR; i++)
                for (int v = 0; v < NV; v++) acc[i][v] = (vec){0};
            const float *from = a + m * am;
            for (int64_t k = 0; k < K; k++) {
                const vec *row = (const vec *)(b + k * NR);
                for (int i = 0; i < MR; i++)
                    for (int v = 0; v < NV; v++) acc[i][v] += from[i * am + k * ak] * row[v];
            }
            for (int i = 0; i < MR && m + i < M; i++) {
                float *to = c + (m + i) * ldc + p;
                if (p + NR <= N) {
                    for (int v = 0; v < NV; v++) {
                        vec *out = (vec *)(to + v * VL);
                        *out = add ? *out + acc[i][v] : acc[i][v];
                    }
                } else {
                    float part[NR];
                    memcpy(part, acc[i], sizeof part);
                    for (int64_t j = 0; p + j < N; j++) to[j] = add ? to[j] + part[j] : part[j];
                }
                if (bias)
                    for (int64_t j = 0; j < NR && p + j < N; j++) to[j] += bias[p + j];
            }
        }
}

/* Rows of a times a packed weight. */
static void product(int64_t M, int64_t K, int64_t N, const float *a, int64_t am, const float *b, const float *bias, int add,
                    float *c, int64_t ldc) {
    multiply(M, K, N, a, am, 1, b, K, bias, add, c, ldc);
}

INLINE vec splat(float x) { return (vec){0} + x; }
INLINE vec select_lanes(ivec mask, vec a, vec b) { return (vec)(((ivec)a & mask) | ((ivec)b & ~mask)); }

/* e^x, with x clamped to |x| <= 87: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]; error at largest 2 ulp. */
INLINE vec exp_of(vec x) {
    x = select_lanes(x < splat(-87.0f), splat(-87.0f), select_lanes(x > splat(87.0f), splat(87.0f), x));
    vec shifted = x * 1.44269504f + 12582912.0f; /* the low bits of the sum are the nearest integer */
    vec n = shifted - 12582912.0f;
    vec r = x - n * 0.693359375f - n * -2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.0f);
    return p * (vec)(((ivec)shifted << 23) + (127 << 23));
}

INLINE float sum_of(vec v) {
    float t[VL];
    memcpy(t, &v, sizeof t);
    for (int w = VL / 2; w; w /= 2)
        for (int i = 0; i < w; i++) t[i] += t[i + w];
    return t[0];
}

INLINE float max_of(const float *x, int64_t n) { /* n: a multiple of VL */
    vec largest = *(const vec *)x;
    for (int64_t i = VL; i < n; i += VL) {
        vec next = *(const vec *)(x + i);
        largest = select_lanes(next > largest, next, largest);
    }
    float top = largest[0];
    for (int l = 1; l < VL; l++) top = largest[l] > top ? largest[l] : top;
    return top;
}

/* x -> e^((x - top) * by) in place; returns the sum, accumulated in double every 64 vectors. n: a multiple of VL. */
INLINE double exp_all(float *x, int64_t n, float top, float by) {
    double sum = 0;
    for (int64_t i = 0; i < n;) {
        vec part = {0};
        for (int64_t end = i + 64 * VL < n ? i + 64 * VL : n; i < end; i += VL)
            part += *(vec *)(x + i) = exp_of((*(vec *)(x + i) - top) * by);
        sum += sum_of(part);
    }
    return sum;
}

INLINE float dot(const float *a, const float *b, int64_t n) {
    vec s = {0};
    for (int64_t i = 0; i < n; i += VL) s += *(const vec *)(a + i) * *(const vec *)(b + i);
    return sum_of(s);
}

static float rms_norm(const float *x, const float *w, int64_t n, float eps, float *y) {
    float r = 1.0f / sqrtf(dot(x, x, n) / (float)n + eps);
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * r * w[i];
    return r;
}

static void rotate(float *x, const float *cos, const float *sin, int64_t d) {
    for (int64_t i = 0; i < d / 2; i++) {
        float a = x[i], b = x[i + d / 2];
        x[i] = a * cos[i] + b * sin[i];
        x[i + d / 2] = b * cos[i + d / 2] + a * sin[i + d / 2];
    }
}
