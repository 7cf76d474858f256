/* The scans' loops as one would write them in C by hand: the limit that the compiled scans are held to.

   Same loops and same exp as the kernels of scanfield_numpy, on contiguous float32 arrays, in vectors of one register.
   Built twice: with IEEE rules, and with -ffast-math. Options, packs, ragged widths and saved states are left out, so
   sizes must be multiples of LANES (of 4 * LANES for gdn2's V).
*/
#include <stddef.h>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#else
#include <math.h>
#endif

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int ivec __attribute__((vector_size(4 * LANES), aligned(4)));

#define LOAD(p) (*(const vec *)(p))
#define STORE(p, x) (*(vec *)(p) = (x))

int lanes(void) { return LANES; }

/* exp to one unit in the last place; NaN, infinities and subnormal results as IEEE 754 has them. */
static inline __attribute__((always_inline)) vec exp_(vec x)
{
    const float low = -104.0f, high = 89.0f;
    vec n, r, p;
#ifdef __AVX512F__
    /* In this order of operands a NaN passes. */
    x = (vec)_mm512_min_ps(_mm512_set1_ps(high), _mm512_max_ps(_mm512_set1_ps(low), (__m512)x));
    n = (vec)_mm512_roundscale_ps((__m512)(x * 1.44269504088896341f), 8);
#elif defined(__AVX2__)
    x = (vec)_mm256_min_ps(_mm256_set1_ps(high), _mm256_max_ps(_mm256_set1_ps(low), (__m256)x));
    n = (vec)_mm256_round_ps((__m256)(x * 1.44269504088896341f), 8);
#else
    for (int j = 0; j < LANES; j++) {
        x[j] = x[j] < low ? low : x[j] > high ? high : x[j];
        n[j] = nearbyintf(x[j] * 1.44269504088896341f);
    }
#endif
    r = x - n * 0.693145751953125f;
    r = r - n * 1.42860682030941723212e-6f;
    p = (vec){} + 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
#ifdef __AVX512F__
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    /* In two steps, since 2^n alone may not be a normal number. */
    ivec whole = __builtin_convertvector(n, ivec), half = whole >> 1;
    return p * (vec)((half + 127) << 23) * (vec)((whole - half + 127) << 23);
#endif
}

/* u, delta, output (time, channels); A (channels, N); B, C (time, N); work 2 N LANES floats. */
void selective(ptrdiff_t time, ptrdiff_t channels, ptrdiff_t N, const float *u, const float *delta, const float *A,
               const float *B, const float *C, float *output, float *last, float *work)
{
    float *h = work, *a = work + N * LANES;
    for (ptrdiff_t c = 0; c < channels; c += LANES) {
        for (ptrdiff_t m = 0; m < N; m++)
            for (int j = 0; j < LANES; j++) {
                h[m * LANES + j] = 0;
                a[m * LANES + j] = A[(c + j) * N + m];
            }
        for (ptrdiff_t t = 0; t < time; t++) {
            vec s = LOAD(delta + t * channels + c), x = s * LOAD(u + t * channels + c), r = {};
            const float *b = B + t * N, *read = C + t * N;
            for (ptrdiff_t m = 0; m < N; m++) {
                vec y = exp_(s * LOAD(a + m * LANES)) * LOAD(h + m * LANES) + x * b[m];
                STORE(h + m * LANES, y);
                r += y * read[m];
            }
            STORE(output + t * channels + c, r);
        }
        for (ptrdiff_t m = 0; m < N; m++)
            for (int j = 0; j < LANES; j++)
                last[(c + j) * N + m] = h[m * LANES + j];
    }
}

/* Forward, then the adjoint of dq, of one sequence; starts and work are memory. Two rows of the state stay in registers
   through a chunk of tokens, as in the kernels of scanfield_numpy; lanes are folded where a chunk ends. starts
   time / CHUNK channels N, work (2 N + 4) CHUNK LANES + 6 CHUNK LANES + 3 N channels floats; N even, time whole chunks. */
void selective_training(ptrdiff_t time, ptrdiff_t channels, ptrdiff_t N, const float *u, const float *delta,
                        const float *A, const float *B, const float *C, const float *dq, float *output, float *du,
                        float *ddelta, float *dA, float *dB, float *dC, float *starts, float *work)
{
    enum { CHUNK = 32, ROW = 6 * LANES };
    float *sum_B = work, *sum_C = sum_B + CHUNK * N * LANES, *decays = sum_C + CHUNK * N * LANES;
    float *kept = decays + 2 * CHUNK * LANES, *rows = kept + 2 * CHUNK * LANES, *held = rows + CHUNK * ROW;
    for (ptrdiff_t c = 0; c < channels; c += LANES) {
        float *a = held + 3 * N * c, *h = a + N * LANES, *d_a = h + N * LANES;
        for (ptrdiff_t m = 0; m < N; m++)
            for (int j = 0; j < LANES; j++) {
                h[m * LANES + j] = d_a[m * LANES + j] = 0;
                a[m * LANES + j] = A[(c + j) * N + m];
            }
        for (ptrdiff_t t = 0; t < time; t++) {
            if (t % CHUNK == 0)
                for (ptrdiff_t i = 0; i < N * LANES; i += LANES)
                    STORE(starts + (t / CHUNK * channels + c) * N + i, LOAD(h + i));
            vec s = LOAD(delta + t * channels + c), x = s * LOAD(u + t * channels + c), r = {};
            for (ptrdiff_t m = 0; m < N; m++) {
                vec y = exp_(s * LOAD(a + m * LANES)) * LOAD(h + m * LANES) + x * B[t * N + m];
                STORE(h + m * LANES, y);
                r += y * C[t * N + m];
            }
            STORE(output + t * channels + c, r);
        }
        for (ptrdiff_t i = 0; i < N * LANES; i += LANES) /* from here on the carried gradient */
            STORE(h + i, (vec){});
    }
    for (ptrdiff_t t0 = time - CHUNK; t0 >= 0; t0 -= CHUNK) {
        for (ptrdiff_t i = 0; i < 2 * CHUNK * N * LANES; i += LANES)
            STORE(sum_B + i, (vec){});
        for (ptrdiff_t c = 0; c < channels; c += LANES) {
            float *a = held + 3 * N * c, *g = a + N * LANES, *d_a = g + N * LANES;
            const float *start = starts + (t0 / CHUNK * channels + c) * N;
            for (ptrdiff_t t = 0; t < CHUNK; t++) {
                ptrdiff_t place = (t0 + t) * channels + c;
                float *row = rows + t * ROW;
                vec s = LOAD(delta + place), x = LOAD(u + place);
                STORE(row, s), STORE(row + LANES, s * x), STORE(row + 2 * LANES, x);
                STORE(row + 3 * LANES, LOAD(dq + place));
                STORE(row + 4 * LANES, (vec){}), STORE(row + 5 * LANES, (vec){});
            }
            for (ptrdiff_t m = 0; m < N; m += 2) {
                vec a0 = LOAD(a + m * LANES), a1 = LOAD(a + (m + 1) * LANES);
                vec h0 = LOAD(start + m * LANES), h1 = LOAD(start + (m + 1) * LANES);
                for (ptrdiff_t t = 0; t < CHUNK; t++) {
                    const float *b = B + (t0 + t) * N + m;
                    float *e = decays + 2 * t * LANES, *k = kept + 2 * t * LANES;
                    vec s = LOAD(rows + t * ROW), x = LOAD(rows + t * ROW + LANES);
                    vec e0 = exp_(s * a0), e1 = exp_(s * a1), k0 = e0 * h0, k1 = e1 * h1;
                    STORE(e, e0), STORE(e + LANES, e1), STORE(k, k0), STORE(k + LANES, k1);
                    h0 = k0 + x * b[0], h1 = k1 + x * b[1];
                }
                vec g0 = LOAD(g + m * LANES), g1 = LOAD(g + (m + 1) * LANES);
                vec d0 = LOAD(d_a + m * LANES), d1 = LOAD(d_a + (m + 1) * LANES);
                for (ptrdiff_t t = CHUNK - 1; t >= 0; t--) {
                    const float *b = B + (t0 + t) * N + m, *read = C + (t0 + t) * N + m;
                    float *e = decays + 2 * t * LANES, *k = kept + 2 * t * LANES, *row = rows + t * ROW;
                    float *to_B = sum_B + (m * CHUNK + 2 * t) * LANES, *to_C = sum_C + (m * CHUNK + 2 * t) * LANES;
                    vec s = LOAD(row), x = LOAD(row + LANES), d = LOAD(row + 3 * LANES);
                    vec k0 = LOAD(k), k1 = LOAD(k + LANES);
                    g0 += d * read[0], g1 += d * read[1];
                    STORE(to_C, LOAD(to_C) + d * (k0 + x * b[0]));
                    STORE(to_C + LANES, LOAD(to_C + LANES) + d * (k1 + x * b[1]));
                    STORE(to_B, LOAD(to_B) + g0 * x), STORE(to_B + LANES, LOAD(to_B + LANES) + g1 * x);
                    STORE(row + 4 * LANES, LOAD(row + 4 * LANES) + g0 * b[0] + g1 * b[1]);
                    vec w0 = g0 * k0, w1 = g1 * k1;
                    STORE(row + 5 * LANES, LOAD(row + 5 * LANES) + w0 * a0 + w1 * a1);
                    d0 += w0 * s, d1 += w1 * s;
                    g0 *= LOAD(e), g1 *= LOAD(e + LANES);
                }
                STORE(g + m * LANES, g0), STORE(g + (m + 1) * LANES, g1);
                STORE(d_a + m * LANES, d0), STORE(d_a + (m + 1) * LANES, d1);
            }
            for (ptrdiff_t t = 0; t < CHUNK; t++) {
                ptrdiff_t place = (t0 + t) * channels + c;
                const float *row = rows + t * ROW;
                vec dx = LOAD(row + 4 * LANES);
                STORE(du + place, LOAD(row) * dx);
                STORE(ddelta + place, LOAD(row + 2 * LANES) * dx + LOAD(row + 5 * LANES));
            }
        }
        for (ptrdiff_t t = 0; t < CHUNK; t++)
            for (ptrdiff_t m = 0; m < N; m++) {
                const float *b = sum_B + (m / 2 * 2 * CHUNK + 2 * t + m % 2) * LANES, *r = b + CHUNK * N * LANES;
                float sum_b = 0, sum_r = 0;
                for (int j = 0; j < LANES; j++)
                    sum_b += b[j], sum_r += r[j];
                dB[(t0 + t) * N + m] = sum_b, dC[(t0 + t) * N + m] = sum_r;
            }
    }
    for (ptrdiff_t c = 0; c < channels; c += LANES)
        for (ptrdiff_t m = 0; m < N; m++)
            for (int j = 0; j < LANES; j++)
                dA[(c + j) * N + m] = held[3 * N * c + (2 * N + m) * LANES + j];
}

/* Arrays (time, heads, K or V), state (heads, K, V); work (K + 2) 4 LANES + 4 K floats. The update of a token is still
   pending when the next one reads a row, so that a token is one pass over the state. */
void gated_delta(ptrdiff_t time, ptrdiff_t heads, ptrdiff_t K, ptrdiff_t V, float scale, const float *query,
                 const float *key, const float *value, const float *log_decay, const float *erase, const float *write,
                 float *output, float *last, float *work)
{
    enum { WIDTH = 4 * LANES };
    float *S = work, *decay = S + K * WIDTH, *e = decay + K, *q = e + K;
    for (ptrdiff_t h = 0; h < heads; h++)
        for (ptrdiff_t c = 0; c < V; c += WIDTH) {
            vec up0 = {}, up1 = {}, up2 = {}, up3 = {};
            const float *before = key + h * K;
            for (ptrdiff_t i = 0; i < K * WIDTH; i++)
                S[i] = 0;
            for (ptrdiff_t t = 0; t < time; t++) {
                const float *k = key + (t * heads + h) * K;
                ptrdiff_t row = (t * heads + h) * K, place = (t * heads + h) * V + c;
                vec r0 = {}, r1 = {}, r2 = {}, r3 = {}, o0 = {}, o1 = {}, o2 = {}, o3 = {}, sum = {};
                float dot = 0;
                for (ptrdiff_t i = 0; i < K; i += LANES) {
                    vec query_i = LOAD(query + row + i) * scale, key_i = LOAD(k + i);
                    STORE(decay + i, exp_(LOAD(log_decay + row + i)));
                    STORE(e + i, LOAD(erase + row + i) * key_i);
                    STORE(q + i, query_i);
                    sum += query_i * key_i;
                }
                for (int j = 0; j < LANES; j++)
                    dot += sum[j];
                for (ptrdiff_t i = 0; i < K; i++) {
                    float *p = S + i * WIDTH, b = before[i], d = decay[i], f = e[i], g = q[i];
                    vec s0 = (LOAD(p) + up0 * b) * d, s1 = (LOAD(p + LANES) + up1 * b) * d;
                    vec s2 = (LOAD(p + 2 * LANES) + up2 * b) * d, s3 = (LOAD(p + 3 * LANES) + up3 * b) * d;
                    STORE(p, s0), STORE(p + LANES, s1), STORE(p + 2 * LANES, s2), STORE(p + 3 * LANES, s3);
                    r0 += s0 * f, r1 += s1 * f, r2 += s2 * f, r3 += s3 * f;
                    o0 += s0 * g, o1 += s1 * g, o2 += s2 * g, o3 += s3 * g;
                }
                const float *y = value + place, *w = write + place;
                float *out = output + place;
                up0 = LOAD(w) * LOAD(y) - r0;
                up1 = LOAD(w + LANES) * LOAD(y + LANES) - r1;
                up2 = LOAD(w + 2 * LANES) * LOAD(y + 2 * LANES) - r2;
                up3 = LOAD(w + 3 * LANES) * LOAD(y + 3 * LANES) - r3;
                STORE(out, o0 + up0 * dot), STORE(out + LANES, o1 + up1 * dot);
                STORE(out + 2 * LANES, o2 + up2 * dot), STORE(out + 3 * LANES, o3 + up3 * dot);
                before = k;
            }
            for (ptrdiff_t i = 0; i < K; i++) {
                float *p = S + i * WIDTH, *to = last + (h * K + i) * V + c;
                STORE(to, LOAD(p) + up0 * before[i]), STORE(to + LANES, LOAD(p + LANES) + up1 * before[i]);
                STORE(to + 2 * LANES, LOAD(p + 2 * LANES) + up2 * before[i]);
                STORE(to + 3 * LANES, LOAD(p + 3 * LANES) + up3 * before[i]);
            }
        }
}

/* What gated_delta reads and writes, in its order, with next to no arithmetic: what memory alone takes. */
void gated_delta_moves(ptrdiff_t time, ptrdiff_t heads, ptrdiff_t K, ptrdiff_t V, const float *query, const float *key,
                       const float *value, const float *log_decay, const float *erase, const float *write,
                       float *output)
{
    for (ptrdiff_t h = 0; h < heads; h++)
        for (ptrdiff_t t = 0; t < time; t++) {
            ptrdiff_t row = (t * heads + h) * K, place = (t * heads + h) * V;
            vec sum = {};
            for (ptrdiff_t i = row; i < row + K; i += LANES)
                sum += LOAD(query + i) + LOAD(key + i) + LOAD(log_decay + i) + LOAD(erase + i);
            for (ptrdiff_t i = place; i < place + V; i += LANES)
                STORE(output + i, sum + LOAD(value + i) * LOAD(write + i));
        }
}

/* As many multiply-adds as the machine can do, `rounds` times 12 vectors of them in registers; x and y of LANES. */
void multiply_adds(ptrdiff_t rounds, const float *x, const float *y, float *output)
{
    enum { CHAINS = 12 };
    vec a = LOAD(x), b = LOAD(y), sums[CHAINS];
    for (int j = 0; j < CHAINS; j++) /* no two alike, or the compiler makes them one */
        sums[j] = b * (float)j;
    for (ptrdiff_t i = 0; i < rounds; i++)
        for (int j = 0; j < CHAINS; j++)
            sums[j] = sums[j] * a + b;
    for (int j = 1; j < CHAINS; j++)
        sums[0] += sums[j];
    STORE(output, sums[0]);
}

/* a, b, output (batch, time, width); last (batch, width). */
void linear(ptrdiff_t batch, ptrdiff_t time, ptrdiff_t width, const float *a, const float *b, float *output,
            float *last)
{
    for (ptrdiff_t row = 0; row < batch; row++) {
        float *h = last + row * width;
        for (ptrdiff_t i = 0; i < width; i++)
            h[i] = 0;
        for (ptrdiff_t t = 0; t < time; t++) {
            ptrdiff_t place = (row * time + t) * width;
            for (ptrdiff_t i = 0; i < width; i += LANES) {
                vec y = LOAD(a + place + i) * LOAD(h + i) + LOAD(b + place + i);
                STORE(h + i, y);
                STORE(output + place + i, y);
            }
        }
    }
}

#define WIDE 8

static inline __attribute__((always_inline)) void put(float *to, vec x, int past)
{
#ifdef __AVX512F__
    if (past) {
        _mm512_stream_ps(to, (__m512)x);
        return;
    }
#elif defined(__AVX2__)
    if (past) {
        _mm256_stream_ps(to, (__m256)x);
        return;
    }
#endif
    STORE(to, x);
}

static void ready(ptrdiff_t K, float scale, const float *query, const float *key, const float *log_decay,
                  const float *erase, float *given)
{
    for (ptrdiff_t i = 0; i < K; i += LANES) {
        STORE(given + i, exp_(LOAD(log_decay + i)));
        STORE(given + K + i, LOAD(erase + i) * LOAD(key + i));
        STORE(given + 2 * K + i, LOAD(query + i) * scale);
        STORE(given + 3 * K + i, LOAD(key + i));
    }
}

/* One token of the gated delta rule for so many heads; V is a multiple of 8 * LANES. While the next state of a head is
   written, past the cache if asked, that of the head after is read. */
static inline __attribute__((always_inline)) void
a_step(ptrdiff_t heads, ptrdiff_t K, ptrdiff_t V, float scale, const float *query, const float *key,
       const float *value, const float *log_decay, const float *erase, const float *write, const float *state,
       float *restrict output, float *restrict last, int past, float *restrict work)
{
    ptrdiff_t each = V / (WIDE * LANES);
    float *given = work, *then = work + 4 * K;
    vec found[WIDE];
    for (ptrdiff_t unit = -1; unit < heads * each; unit++) {
        ptrdiff_t h = unit / each, o = unit % each * WIDE * LANES;
        ptrdiff_t next = unit + 1 < heads * each ? unit + 1 : unit, h2 = next / each, o2 = next % each * WIDE * LANES;
        const float *after = state + h2 * K * V + o2;
        vec new[WIDE], read[WIDE], sums[WIDE];
        ready(K, scale, query + h2 * K, key + h2 * K, log_decay + h2 * K, erase + h2 * K, then);
        for (int c = 0; c < WIDE; c++)
            sums[c] = (vec){0};
        if (unit < 0) {
            for (ptrdiff_t i = 0; i < K; i++)
                for (int c = 0; c < WIDE; c++)
                    sums[c] += LOAD(after + i * V + c * LANES) * then[i] * then[K + i];
        } else {
            const float *source = state + h * K * V + o;
            float *to = last + h * K * V + o;
            for (int c = 0; c < WIDE; c++) {
                ptrdiff_t at = h * V + o + c * LANES;
                new[c] = LOAD(value + at) * LOAD(write + at) - found[c];
                read[c] = (vec){0};
            }
            for (ptrdiff_t i = 0; i < K; i++)
                for (int c = 0; c < WIDE; c++) {
                    vec s = LOAD(source + i * V + c * LANES) * given[i] + new[c] * given[3 * K + i];
                    put(to + i * V + c * LANES, s, past);
                    read[c] += s * given[2 * K + i];
                    sums[c] += LOAD(after + i * V + c * LANES) * then[i] * then[K + i];
                }
            for (int c = 0; c < WIDE; c++)
                STORE(output + h * V + o + c * LANES, read[c]);
        }
        for (int c = 0; c < WIDE; c++)
            found[c] = sums[c];
        float *swap = given;
        given = then;
        then = swap;
    }
    __sync_synchronize();
}

void gated_delta_step(ptrdiff_t heads, ptrdiff_t K, ptrdiff_t V, float scale, const float *query, const float *key,
                      const float *value, const float *log_decay, const float *erase, const float *write,
                      const float *state, float *output, float *last, int past, float *work)
{
    if (past)
        a_step(heads, K, V, scale, query, key, value, log_decay, erase, write, state, output, last, 1, work);
    else
        a_step(heads, K, V, scale, query, key, value, log_decay, erase, write, state, output, last, 0, work);
}

/* One array into another, past the cache if asked. */
void copy(ptrdiff_t count, const float *a, float *output, int past)
{
    for (ptrdiff_t i = 0; i < count; i += LANES)
        put(output + i, LOAD(a + i), past);
    __sync_synchronize();
}

/* STREAM's triad. */
void triad(ptrdiff_t count, const float *restrict a, const float *restrict b, float *restrict output)
{
    for (ptrdiff_t i = 0; i < count; i++)
        output[i] = a[i] + 0.5f * b[i];
}
