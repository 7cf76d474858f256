// The gradient of the gated delta rule in chunks, last step: from the gradients of L, P, Qb, Eb and Kb to those of query,
// key, log decay and erase. A block takes one chunk of one head, CHANNELS channels at a time.
//
// Level by level of the bisection, with x = q or e in the second halves and k in the first, each decayed to the anchor:
//   second half   dx += (dM k) decayed;     d log a: what it times x is, summed from the half's end
//   first half    dk += (dM^T x) decayed;   d log a: what it times k is, summed from the half's start, the token itself apart
// The shorter form, q dq + e de - k dk summed from the end, loses three digits under strong decay: nearly equal terms cancel.

#include "gated_delta_chunk.cuh"

enum {
    CHANNELS = 16,
    LINE = CHANNELS + PAD,
    RUN = Channels<CHANNELS>::RUN,
    RUNS = Channels<CHANNELS>::RUNS,
    BLOCKS = 2,  // that a multiprocessor is to hold at once: as many as registers allow
};

typedef Channels<CHANNELS> Own;

struct Levels {
    T q[RUN], k[RUN], e[RUN], decay[RUN];  // gradients of a thread's own
    T *later, *earlier;  // (RUNS, CHANNELS): what a run adds to the gates before it, and to those behind it
    T *one, *two;        // (CHUNK, CHANNELS): products that wait to be decayed; in the place of the operands

    // The gates' gradient: sums over COUNT tokens of a run, of `term(i)` from the last with the token itself, or from the
    // first without it. What is returned goes to the other runs.
    template <int COUNT, class Term>
    __device__ __forceinline__ T sum_from_end(int base, const Term& term) {
        T sum = 0;
#pragma unroll
        for (int i = COUNT - 1; i >= 0; --i) {
            sum += term(base + i);
            decay[base + i] += sum;
        }
        return sum;
    }
    template <int COUNT, class Term>
    __device__ __forceinline__ T sum_from_start(int base, const Term& term) {
        T sum = 0;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            decay[base + i] += sum;
            sum += term(base + i);
        }
        return sum;
    }
    // A run's sums to the other runs of its half, of SPAN tokens.
    template <int SPAN>
    __device__ __forceinline__ void exchange(const Own& channels, T to_later, T to_earlier) {
        enum { TOGETHER = SPAN / RUN };
        const int begin = channels.run / TOGETHER * TOGETHER;
        later[channels.run * CHANNELS + channels.channel] = to_later;
        earlier[channels.run * CHANNELS + channels.channel] = to_earlier;
        __syncthreads();
        T sum = 0;
#pragma unroll
        for (int i = 1; i < TOGETHER; ++i) {
            if (begin + i > channels.run) sum += later[(begin + i) * CHANNELS + channels.channel];
        }
#pragma unroll
        for (int i = 0; i < TOGETHER - 1; ++i) {
            if (begin + i < channels.run) sum += earlier[(begin + i) * CHANNELS + channels.channel];
        }
#pragma unroll
        for (int i = 0; i < RUN; ++i) decay[i] += sum;
    }
};

// dM k for the second halves (`two` of P, `one` of L), dM^T x for the first (`one`), of a warp's 16 rows.
__device__ __forceinline__ void level_products(T (&one)[2][4], T (&two)[2][4], int span, const Operand* d_P,
                                               const Operand* d_L, const Operand* right_one, const Operand* right_two,
                                               bool erases) {
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

// One level, of halves of SPAN tokens.
template <int SPAN>
__device__ __forceinline__ void add_level(Levels& d, const Own& channels, const Operand* d_P, const Operand* d_L,
                                          Operand* one, Operand* two, bool erases) {
    const Lane lane;
    __syncthreads();
    channels.put_halves<SPAN>(one, two);
    __syncthreads();
    T of_one[2][4], of_two[2][4];
    level_products(of_one, of_two, SPAN, d_P, d_L, one, two, erases);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int at = (16 * lane.warp + lane.row_of(i % 4)) * CHANNELS + lane.column_of(i % 4, i / 4);
        d.one[at] = of_one[i / 4][i % 4], d.two[at] = of_two[i / 4][i % 4];
    }
    __syncthreads();
    const T* own_one = d.one + channels.first * CHANNELS + channels.channel;
    const T* own_two = d.two + channels.first * CHANNELS + channels.channel;
    T terms[RUN];  // of the gates' gradient
    channels.walk<SPAN>(
        [&](int i, T factor) {
            const T x = own_one[i * CHANNELS] * factor;
            d.k[i] += x, terms[i] = channels.k[i] * x;
        },
        [&](int i, T factor) {
            const T x = own_two[i * CHANNELS] * factor, y = own_one[i * CHANNELS] * factor;
            d.q[i] += x, d.e[i] += y, terms[i] = channels.q[i] * x + channels.e[i] * y;
        });
    const auto term = [&](int i) { return terms[i]; };
    if constexpr (SPAN < RUN) {
#pragma unroll
        for (int base = 0; base < RUN; base += 2 * SPAN) {
            d.sum_from_start<SPAN>(base, term), d.sum_from_end<SPAN>(base + SPAN, term);
        }
    } else {
        T later = 0, earlier = 0;
        if (channels.first / SPAN % 2) {
            later = d.sum_from_end<RUN>(0, term);
        } else {
            earlier = d.sum_from_start<RUN>(0, term);
        }
        if constexpr (SPAN > RUN) d.exchange<SPAN>(channels, later, earlier);
    }
}

struct Gradients {
    T *query, *key, *decay, *erase;  // (batch, time, value heads, K); of a head's gate one number for all channels
    i64 decay_width, erase_width;    // 1: such a gate
};

// A gate's gradient. That of a head's gate is summed over a block's channels here and added to that of the channels before:
// a thread has the same token every time.
__device__ __forceinline__ void give(T* to, i64 width, T (&values)[RUN], const Own& channels, const Part& part,
                                     const Sizes& sizes, i64 k0, i64 out, int there) {
    enum { SAME = CHANNELS / RUN };  // lanes that hold the same sum
#pragma unroll
    for (int i = 0; i < RUN; ++i) {
        if (i >= there) {
            values[i] = 0;
        } else if (width != 1) {
            to[out + i * sizes.vheads * sizes.K] = values[i];
        }
    }
    if (width != 1) return;
    const int lane = threadIdx.x % CHANNELS;
    int token = channels.first;
    SumOverLanes<CHANNELS, RUN, T>::run(values, lane, token);
    if (lane % SAME || token >= part.tokens) return;
    T& place = to[(part.row * sizes.time + part.first + token) * sizes.vheads + part.head];
    place = k0 ? place + values[0] : values[0];
}

__device__ __forceinline__ void gradients(const Inputs& x, const i64* bounds, const Sizes& sizes, const Kept* d_Qb,
                                          const Kept* d_Eb, const Kept* d_Kb, const T* across, const Kept* d_P_from,
                                          const Kept* d_L_from, const Gradients& to) {
    SHARED_MEMORY(memory);
    Own channels(reinterpret_cast<T*>(memory));
    Levels d;
    d.later = channels.totals + RUNS * CHANNELS, d.earlier = d.later + RUNS * CHANNELS;
    d.one = d.earlier + RUNS * CHANNELS, d.two = d.one + CHUNK * CHANNELS;
    Operand* one = reinterpret_cast<Operand*>(d.one);
    Operand* two = one + CHUNK * LINE;
    Operand* d_P = reinterpret_cast<Operand*>(d.one + 2 * CHUNK * (CHANNELS + 16 / sizeof(T)));
    Operand* d_L = d_P + CHUNK * STEP;
    const bool erases = x.erase.at != nullptr;
    const int channel = channels.channel, first = channels.first;
    for (i64 item = blockIdx.x; item < sizes.slots * sizes.heads; item += gridDim.x) {
        Part part;
        if (!part.find(bounds, sizes, item)) continue;
        const i64 triangle = part.place(sizes) * CHUNK * CHUNK;
        __syncthreads();
        bring<CHUNK>(d_P, STEP, d_P_from + triangle, CHUNK, CHUNK);
        if (erases) bring<CHUNK>(d_L, STEP, d_L_from + triangle, CHUNK, CHUNK);
        for (i64 k0 = 0; k0 < sizes.K; k0 += CHANNELS) {
            const i64 at = (part.place(sizes) * CHUNK + first) * sizes.rows + k0 + channel;
            channels.take(x, part, k0, sizes.K);
            __syncthreads();
            const T through = across[part.place(sizes) * sizes.rows + k0 + channel];
            channels.onwards<RUN>(0, channels.before<CHUNK>(), [&](int i, T factor) {
                d.q[i] = load(d_Qb + at + i * sizes.rows) * factor;
                d.e[i] = erases ? load(d_Eb + at + i * sizes.rows) * factor : T(0);
                d.decay[i] = through;
            });
            channels.backwards<RUN>(0, channels.after<CHUNK>(), [&](int i, T factor) {
                d.k[i] = load(d_Kb + at + i * sizes.rows) * factor;
            });
            const T later = d.sum_from_end<RUN>(0, [&](int i) { return channels.q[i] * d.q[i] + channels.e[i] * d.e[i]; });
            const T earlier = d.sum_from_start<RUN>(0, [&](int i) { return channels.k[i] * d.k[i]; });
            d.exchange<CHUNK>(channels, later, earlier);
#pragma unroll
            for (int i = 0; i < RUN; ++i) {  // the diagonal of P
                const T d_product = load(d_P + (first + i) * STEP + first + i);
                d.q[i] += d_product * channels.k[i], d.k[i] += d_product * channels.q[i];
            }
            add_level<32>(d, channels, d_P, d_L, one, two, erases);
            add_level<16>(d, channels, d_P, d_L, one, two, erases);
            add_level<8>(d, channels, d_P, d_L, one, two, erases);
            add_level<4>(d, channels, d_P, d_L, one, two, erases);
            add_level<2>(d, channels, d_P, d_L, one, two, erases);
            add_level<1>(d, channels, d_P, d_L, one, two, erases);
            const i64 c = k0 + channel;
            const int there = c < sizes.K ? part.tokens - first : 0;  // tokens of this run
            const i64 out = ((part.row * sizes.time + part.first + first) * sizes.vheads + part.head) * sizes.K + c;
            const i64 next = sizes.vheads * sizes.K;
            if (to.decay) give(to.decay, to.decay_width, d.decay, channels, part, sizes, k0, out, there);
#pragma unroll
            for (int i = 0; i < RUN; ++i) {
                if (i >= there) continue;
                T d_k = d.k[i];
                if (erases && !x.erase_vector) {
                    d_k += d.e[i] * x.erase(part.row, part.first + first + i, part.head, c);
                    d.e[i] *= channels.k[i];
                }
                if (to.query) to.query[out + i * next] = x.scale * d.q[i];
                if (to.key) to.key[out + i * next] = d_k;
            }
            if (to.erase) give(to.erase, to.erase_width, d.e, channels, part, sizes, k0, out, there);
            __syncthreads();
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    delta_gradients(INPUTS, const i64* bounds, SIZES, const Kept* d_Qb, const Kept* d_Eb, const Kept* d_Kb, const T* across,
                    const Kept* d_P, const Kept* d_L, T* d_query, T* d_key, T* d_decay, T* d_erase, i64 decay_width,
                    i64 erase_width) {
    gradients(AS_INPUTS, bounds, AS_SIZES, d_Qb, d_Eb, d_Kb, across, d_P, d_L,
              Gradients{d_query, d_key, d_decay, d_erase, decay_width, erase_width});
}
