// The gradient of the gated delta rule in chunks, last step: from the gradients of L, P, Qb, Eb and Kb to those of query,
// key, log decay and erase. A block takes one chunk of one head, CHANNELS channels at a time.
//
// Level by level of the bisection, with x = q or e in the second halves and k in the first, each decayed to the anchor:
//   second half   dx += (dM k) decayed;     d log a: what it times x is, summed from the half's end
//   first half    dk += (dM^T x) decayed;   d log a: what it times k is, summed from the half's start, the token itself apart
// The shorter form, q dq + e de - k dk summed from the end, loses three digits under strong decay: nearly equal terms cancel.

#include "gated_delta_chunk.cuh"

enum { CHANNELS = 16, LINE = CHANNELS + PAD, RUN = Channels<CHANNELS>::RUN, RUNS = Channels<CHANNELS>::RUNS };

struct Levels {
    T *q, *k, *e, *decay;  // (CHUNK, CHANNELS) each: gradients, a thread's own as in Channels
    T *later, *earlier;    // (RUNS, CHANNELS): what a run adds to the gates before it, and to those behind it
    T *one, *two;          // (CHUNK, CHANNELS): products that wait to be decayed; in the place of the operands
};

// The gates' gradient within a walk: sums along it stay in a thread's run, the rest goes to the other runs of the half.
__device__ __forceinline__ void add_other_runs(const Channels<CHANNELS>& channels, const Levels& d, int span) {
    const int runs = span / RUN, begin = channels.run / runs * runs;
    T sum = 0;
    for (int r = channels.run + 1; r < begin + runs; ++r) sum += d.later[r * CHANNELS + channels.channel];
    for (int r = begin; r < channels.run; ++r) sum += d.earlier[r * CHANNELS + channels.channel];
    for (int token = channels.first; token < channels.first + RUN; ++token) d.decay[channels.at(token)] += sum;
}

// Sums along a run: of `later(token)` from its end, with the token itself; of `earlier(token)` from its start, without it.
template <class Term>
__device__ __forceinline__ T sum_from_end(const Channels<CHANNELS>& channels, const Levels& d, int first, int count,
                                          const Term& later) {
    T sum = 0;
    for (int token = first + count - 1; token >= first; --token) {
        sum += later(token);
        d.decay[channels.at(token)] += sum;
    }
    return sum;
}
template <class Term>
__device__ __forceinline__ T sum_from_start(const Channels<CHANNELS>& channels, const Levels& d, int first, int count,
                                            const Term& earlier) {
    T sum = 0;
    for (int token = first; token < first + count; ++token) {
        d.decay[channels.at(token)] += sum;
        sum += earlier(token);
    }
    return sum;
}

// dM k for the second halves (`two` of P, `one` of L), dM^T x for the first (`one`), of a warp's 16 rows.
__device__ __forceinline__ void level_products(T (&one)[2][4], T (&two)[2][4], int span, const Operand* d_P, const Operand* d_L,
                                               const Operand* right_one, const Operand* right_two, bool erases) {
    const int row = 16 * (threadIdx.x / 32);
    clear(one), clear(two);
    if (span >= 16) {
        const int begin = row / span * span;
        if (row / span % 2) {
            const int other = begin - span;
            multiply<false, true>(two, d_P + row * STEP + other, STEP, right_one + other * LINE, LINE, span);
            if (erases) multiply<false, true>(one, d_L + row * STEP + other, STEP, right_one + other * LINE, LINE, span);
        } else {
            const int other = begin + span;
            multiply<true, true>(one, d_P + other * STEP + row, STEP, right_two + other * LINE, LINE, span);
            if (erases) multiply<true, true>(one, d_L + other * STEP + row, STEP, right_one + other * LINE, LINE, span);
        }
    } else {
        const Halves second = {span, true}, first = {span, false};
        const int here = row * STEP + row;
        multiply<false, true>(two, d_P + here, STEP, right_one + row * LINE, LINE, 16, second);
        multiply<true, true>(one, d_P + here, STEP, right_two + row * LINE, LINE, 16, first);
        if (erases) {
            multiply<false, true>(one, d_L + here, STEP, right_one + row * LINE, LINE, 16, second);
            multiply<true, true>(one, d_L + here, STEP, right_one + row * LINE, LINE, 16, first);
        }
    }
}

struct Gradients {
    T *query, *key, *decay, *erase;  // (batch, time, value heads, K)
};

__device__ __forceinline__ void gradients(const Inputs& x, const i64* bounds, const Sizes& sizes, const Kept* d_Qb,
                                          const Kept* d_Eb, const Kept* d_Kb, const T* across, const Kept* d_P_from,
                                          const Kept* d_L_from, const Gradients& to) {
    SHARED_MEMORY(memory);
    Channels<CHANNELS> channels(reinterpret_cast<T*>(memory));
    enum { SIZE = CHUNK * CHANNELS };
    Levels d;
    d.q = channels.totals + RUNS * CHANNELS, d.k = d.q + SIZE, d.e = d.k + SIZE, d.decay = d.e + SIZE;
    d.later = d.decay + SIZE, d.earlier = d.later + RUNS * CHANNELS;
    d.one = d.earlier + RUNS * CHANNELS, d.two = d.one + SIZE;
    Operand* one = reinterpret_cast<Operand*>(d.one);
    Operand* two = one + CHUNK * LINE;
    Operand* d_P = reinterpret_cast<Operand*>(d.one + 2 * CHUNK * (CHANNELS + 16 / sizeof(T)));
    Operand* d_L = d_P + CHUNK * STEP;
    const Lane lane;
    const bool erases = x.erase.at != nullptr;
    const int channel = channels.channel, run = channels.run, first = channels.first;
    for (i64 item = blockIdx.x; item < sizes.slots * sizes.heads; item += gridDim.x) {
        Part part;
        if (!part.find(bounds, sizes, item)) continue;
        const i64 triangle = part.place(sizes) * CHUNK * CHUNK;
        __syncthreads();
        bring<CHUNK>(d_P, STEP, d_P_from + triangle, CHUNK, CHUNK);
        if (erases) bring<CHUNK>(d_L, STEP, d_L_from + triangle, CHUNK, CHUNK);
        for (i64 k0 = 0; k0 < sizes.K; k0 += CHANNELS) {
            const i64 at = part.place(sizes) * CHUNK * sizes.rows + k0 + channel;
            channels.take(x, part, k0, sizes.K);
            __syncthreads();
            channels.walk_chunk(
                [&](int token, T factor) {
                    const int own = channels.at(token);
                    d.q[own] = load(d_Qb + at + token * sizes.rows) * factor;
                    d.e[own] = erases ? load(d_Eb + at + token * sizes.rows) * factor : T(0);
                    d.decay[own] = across[part.place(sizes) * sizes.rows + k0 + channel];
                },
                [&](int token, T factor) { d.k[channels.at(token)] = load(d_Kb + at + token * sizes.rows) * factor; });
            d.later[run * CHANNELS + channel] = sum_from_end(channels, d, first, RUN, [&](int token) {
                const int own = channels.at(token);
                return channels.q[own] * d.q[own] + channels.e[own] * d.e[own];
            });
            d.earlier[run * CHANNELS + channel] = sum_from_start(channels, d, first, RUN, [&](int token) {
                return channels.k[channels.at(token)] * d.k[channels.at(token)];
            });
            for (int token = first; token < first + RUN; ++token) {  // the diagonal of P
                const int own = channels.at(token);
                const T d_product = load(d_P + token * STEP + token);
                d.q[own] += d_product * channels.k[own], d.k[own] += d_product * channels.q[own];
            }
            __syncthreads();
            add_other_runs(channels, d, CHUNK);
            for (int span = CHUNK / 2; span; span /= 2) {
                __syncthreads();
                channels.put_halves(span, one, two);
                __syncthreads();
                T of_one[2][4], of_two[2][4];
                level_products(of_one, of_two, span, d_P, d_L, one, two, erases);
                __syncthreads();
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const int own = (16 * lane.warp + lane.row_of(i % 4)) * CHANNELS + lane.column_of(i % 4, i / 4);
                    d.one[own] = of_one[i / 4][i % 4], d.two[own] = of_two[i / 4][i % 4];
                }
                __syncthreads();
                channels.walk(
                    span,
                    [&](int token, T factor) {
                        const int own = channels.at(token);
                        d.one[own] *= factor;
                        d.k[own] += d.one[own];
                    },
                    [&](int token, T factor) {
                        const int own = channels.at(token);
                        d.one[own] *= factor, d.two[own] *= factor;
                        d.e[own] += d.one[own], d.q[own] += d.two[own];
                    });
                const auto of_first = [&](int token) { return channels.k[channels.at(token)] * d.one[channels.at(token)]; };
                const auto of_second = [&](int token) {
                    const int own = channels.at(token);
                    return channels.q[own] * d.two[own] + channels.e[own] * d.one[own];
                };
                if (span < RUN) {
                    for (int base = first; base < first + RUN; base += 2 * span) {
                        sum_from_start(channels, d, base, span, of_first);
                        sum_from_end(channels, d, base + span, span, of_second);
                    }
                    continue;
                }
                const bool behind = first / span % 2;
                T later = 0, earlier = 0;
                if (behind) {
                    later = sum_from_end(channels, d, first, RUN, of_second);
                } else {
                    earlier = sum_from_start(channels, d, first, RUN, of_first);
                }
                if (span == RUN) continue;
                d.later[run * CHANNELS + channel] = later, d.earlier[run * CHANNELS + channel] = earlier;
                __syncthreads();
                add_other_runs(channels, d, span);
            }
            const i64 c = k0 + channel;
            for (int token = first; token < first + RUN; ++token) {
                if (token >= part.tokens || c >= sizes.K) continue;
                const i64 t = part.first + token;
                const i64 out = ((part.row * sizes.time + t) * sizes.vheads + part.head) * sizes.K + c;
                const int own = channels.at(token);
                T d_k = d.k[own], d_e = d.e[own];
                if (erases && !x.erase_vector) {
                    d_k += d_e * x.erase(part.row, t, part.head, c);
                    d_e *= channels.k[own];
                }
                if (to.query) to.query[out] = x.scale * d.q[own];
                if (to.key) to.key[out] = d_k;
                if (to.erase) to.erase[out] = d_e;
                if (to.decay) to.decay[out] = d.decay[own];
            }
            __syncthreads();
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    delta_gradients(INPUTS, const i64* bounds, SIZES, const Kept* d_Qb, const Kept* d_Eb, const Kept* d_Kb, const T* across,
                    const Kept* d_P, const Kept* d_L, T* d_query, T* d_key, T* d_decay, T* d_erase) {
    gradients(AS_INPUTS, bounds, AS_SIZES, d_Qb, d_Eb, d_Kb, across, d_P, d_L, Gradients{d_query, d_key, d_decay, d_erase});
}
