// A segment backward: every gradient, from the states that forward kept.

#include "selective_segments.cuh"

// Where the gradients go. Those of A, D and bias are sums over tokens: a part for each sequence and segment. Those of B and
// C are sums over channels: for a vector that tokens share a part for each block of its group, else like A's.
struct Gradients {
    R *u, *delta, *z;
    T *A, *B, *C;
    R *D, *bias;
    T* state;
};

__device__ __forceinline__ void give_vector_sums(T* to, const Vectors& vectors, const T* sums, int which, const Place& place,
                                                 const Sizes& sizes, i64 rows, i64 row, i64 t0, int tokens) {
    const i64 blocks = vectors.per_group / sizes.unit * sizes.blocks_per_unit;
    const i64 groups = sizes.channels / vectors.per_group, group = place.first / vectors.per_group;
    for (int i = threadIdx.x; i < tokens * STATES; i += THREADS) {
        const int token = i / STATES, n = i % STATES;
        if (n >= sizes.states) continue;
        T total = number<T>(0);
        for (int w = 0; w < WARPS; ++w) total = total + sums[((w * TILE + token) * 2 + which) * STATES + n];
        const i64 part = place.block % blocks;
        to[(((part * rows + row) * sizes.time + t0 + token) * groups + group) * sizes.states + n] = total;
    }
}

__device__ __forceinline__ void backward(const Rows& u, const Rows& delta, const Rows& z, const T* A, const Vectors& B,
                                         const Vectors& C, const R* D, const Steps& steps, const T* starts,
                                         const R* d_output, const T* d_final, const i64* bounds, const Sizes& sizes,
                                         const R* step_sums, const T* states, const int* wild, const Gradients& to,
                                         i64 rows) {
    SHARED_MEMORY(memory);
    const Shared shared(memory, true);
    const Place place(sizes);
    const bool sums_b = to.B && !B.own, sums_c = to.C && !C.own;
    for (i64 s = blockIdx.y; s < sizes.sequences; s += gridDim.y) {
        const Sequence sequence = sequence_at(bounds, s, sizes.time);
        // The map of segment k is number k - 1.
        const i64 own = place.segment, from = sequence.first + own * sizes.segment_tokens;
        const i64 end = min(sequence.last, from + sizes.segment_tokens);
        if (own > 0 && from >= sequence.last) continue;
        if (any_wild(wild, s, own, sizes.segments - 1, sizes, place.block)) continue;
        const bool alone = own > 0 && any_wild(wild, s, own - 1, own, sizes, place.block);
        const i64 begin = alone ? sequence.first : from;
        Part part(A, place, sizes.states);
        part.take(d_final, s, place, sizes);
        through_segments<true>(part, step_sums, states, s, place, sizes);
        T c[PART], d_A[PART], d_b[PART], d_c[PART];
#pragma unroll
        for (int j = 0; j < PART; ++j) c[j] = part.h[j], d_A[j] = d_b[j] = d_c[j] = number<T>(0);
        R d_D = 0, d_bias = 0;  // of channel threadIdx.x % CHANNELS
        const i64 saved = saved_at(bounds, sequence, s, sizes.time, CHUNK);
        __syncthreads();
        if (B.own) bring_own_vectors(shared.b, B, place, sequence.row, sizes.states);
        if (C.own) bring_own_vectors(shared.c, C, place, sequence.row, sizes.states);
        for (i64 chunk = (end - begin + CHUNK - 1) / CHUNK - 1; chunk >= 0; --chunk) {
            const i64 chunk_begin = begin + chunk * CHUNK, chunk_end = min(end, chunk_begin + CHUNK);
            const int tiles = int((chunk_end - chunk_begin + TILE - 1) / TILE);
            part.take(starts, saved + (chunk_begin - sequence.first) / CHUNK, place, sizes);
            for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
                for (int j = 0; j < PART; ++j) shared.kept[(tile * PART + j) * THREADS + threadIdx.x] = part.h[j];
                if (tile == tiles - 1) break;
                const i64 t0 = chunk_begin + tile * TILE;
                __syncthreads();
                bring_steps(shared, u, delta, steps, place, sequence.row, t0, TILE);
                if (!B.own) bring_vectors(shared.b, B, place, sequence.row, t0, TILE, sizes.states);
                __syncthreads();
                for (int token = 0; token < TILE; ++token) {
                    const int at = token * CHANNELS + place.channel;
                    const R step = shared.step[at], x = step * shared.u[at];
                    const T* b = vector_at(shared.b, B.own, place, token);
#pragma unroll
                    for (int j = 0; j < PART; ++j) {
                        if (part.has(j)) part.h[j] = Model<T>::decay(step, part.rate[j]) * part.h[j] + scaled(x, b[j]);
                    }
                }
            }
            for (int tile = tiles - 1; tile >= 0; --tile) {
                const i64 t0 = chunk_begin + tile * TILE;
                const int tokens = int(min(chunk_end - t0, i64(TILE)));
                __syncthreads();
                bring_steps(shared, u, delta, steps, place, sequence.row, t0, tokens);
                bring_back(shared, d_output, z, place, sequence.row, t0, tokens, sizes);
                if (!B.own) bring_vectors(shared.b, B, place, sequence.row, t0, tokens, sizes.states);
                if (!C.own) bring_vectors(shared.c, C, place, sequence.row, t0, tokens, sizes.states);
                __syncthreads();
                T decay[TILE][PART], before[TILE][PART];  // before: the decayed state that a token meets
#pragma unroll
                for (int j = 0; j < PART; ++j) part.h[j] = shared.kept[(tile * PART + j) * THREADS + threadIdx.x];
#pragma unroll
                for (int token = 0; token < TILE; ++token) {
                    if (token >= tokens) continue;
                    const int at = token * CHANNELS + place.channel;
                    const R step = shared.step[at], x = step * shared.u[at];
                    const T* b = vector_at(shared.b, B.own, place, token);
#pragma unroll
                    for (int j = 0; j < PART; ++j) {
                        if (!part.has(j)) continue;
                        decay[token][j] = Model<T>::decay(step, part.rate[j]);
                        before[token][j] = decay[token][j] * part.h[j];
                        part.h[j] = before[token][j] + scaled(x, b[j]);
                    }
                }
#pragma unroll
                for (int token = TILE - 1; token >= 0; --token) {
                    if (token >= tokens) continue;
                    const int at = token * CHANNELS + place.channel;
                    const R step = shared.step[at], x = step * shared.u[at];
                    const R d_read = Model<T>::FACTOR * shared.read[at];
                    const T* b = vector_at(shared.b, B.own, place, token);
                    const T* read_by = vector_at(shared.c, C.own, place, token);
                    T sums[2 * PART];
                    R d_x = 0, d_step = 0, read = 0;
#pragma unroll
                    for (int j = 0; j < PART; ++j) {
                        sums[j] = sums[PART + j] = number<T>(0);
                        if (!part.has(j)) continue;
                        const T h = before[token][j] + scaled(x, b[j]);
                        const T g = c[j] + scaled(d_read, conj(read_by[j]));
                        const T w = g * conj(before[token][j]);
                        const T from_b = scaled(x, g), from_c = scaled(d_read, conj(h));
                        if (B.own) d_b[j] = d_b[j] + from_b;
                        if (C.own) d_c[j] = d_c[j] + from_c;
                        sums[j] = from_b, sums[PART + j] = from_c;
                        d_x += real_part(g * conj(b[j]));
                        d_step += real_part(w * conj(part.rate[j]));
                        read += real_part(read_by[j] * h);
                        d_A[j] = d_A[j] + scaled(step, w);
                        c[j] = conj(decay[token][j]) * g;
                    }
                    d_x = over_shares(d_x), d_step = over_shares(d_step) * Model<T>::per_rate();
                    if (to.z) read = over_shares(read);
                    if (place.share == 0) {
                        shared.back_x[at] = d_x, shared.back_s[at] = d_step;
                        shared.again[at] = Model<T>::FACTOR * read;
                    }
                    if (sums_b || sums_c) {
                        enum { LEFT = 2 * PART > NEIGHBOURS ? 2 * PART / NEIGHBOURS : 1 };
                        enum { SAME = NEIGHBOURS > 2 * PART ? NEIGHBOURS / (2 * PART) : 1 };
                        int first = 0;
                        SumOverLanes<NEIGHBOURS, 2 * PART, T>::run(sums, place.lane % NEIGHBOURS, first);
                        if (place.lane % SAME == 0) {
#pragma unroll
                            for (int i = 0; i < LEFT; ++i) {
                                const int which = (first + i) / PART, n = place.share * PART + (first + i) % PART;
                                shared.sums[((place.warp * TILE + token) * 2 + which) * STATES + n] = sums[i];
                            }
                        }
                    }
                }
                __syncthreads();
                if (sums_b) give_vector_sums(to.B, B, shared.sums, 0, place, sizes, rows, sequence.row, t0, tokens);
                if (sums_c) give_vector_sums(to.C, C, shared.sums, 1, place, sizes, rows, sequence.row, t0, tokens);
                for (int i = threadIdx.x; i < tokens * CHANNELS; i += THREADS) {
                    if (i % CHANNELS >= place.count) continue;
                    const i64 channel = place.first + i % CHANNELS, t = t0 + i / CHANNELS;
                    const i64 where = (sequence.row * sizes.time + t) * sizes.channels + channel;
                    const R d_x = shared.back_x[i], d_q = shared.read[i], skip = D ? D[channel] : R(0);
                    if (to.u) to.u[where] = shared.step[i] * d_x + (D ? skip * d_q : R(0));
                    if (to.delta || to.bias) {
                        const R raw = steps.raw(delta(sequence.row, t, channel), channel);
                        const R d_raw = steps.back(raw, shared.u[i] * d_x + shared.back_s[i]);
                        if (to.delta) to.delta[where] = d_raw;
                        d_bias += d_raw;
                    }
                    d_D += d_q * shared.u[i];
                    if (to.z) {
                        const R gate = z(sequence.row, t, channel), open = sigmoid(gate);
                        const R q = shared.again[i] + (D ? skip * shared.u[i] : R(0));
                        to.z[where] = (d_output ? d_output[where] : R(0)) * (open * (1 + gate * (1 - open))) * q;
                    }
                }
            }
        }
        const i64 index = s * sizes.segments + place.segment;
#pragma unroll
        for (int j = 0; j < PART; ++j) {
            if (!place.exists || !part.has(j)) continue;
            const i64 at = (index * sizes.channels + place.c) * sizes.states + part.n0 + j;
            if (to.A) to.A[at] = d_A[j];
            if (to.B && B.own) to.B[at] = d_b[j];
            if (to.C && C.own) to.C[at] = d_c[j];
            if (to.state && begin == sequence.first) to.state[(s * sizes.channels + place.c) * sizes.states + part.n0 + j] = c[j];
        }
        __syncthreads();
        R* const parts = reinterpret_cast<R*>(shared.kept);
        parts[threadIdx.x] = d_D, parts[THREADS + threadIdx.x] = d_bias;
        __syncthreads();
        if (int(threadIdx.x) < place.count && int(threadIdx.x) < CHANNELS) {
            d_D = d_bias = 0;
            for (int i = threadIdx.x; i < THREADS; i += CHANNELS) d_D += parts[i], d_bias += parts[THREADS + i];
            const i64 at = index * sizes.channels + place.first + threadIdx.x;
            if (to.D) to.D[at] = d_D;
            if (to.bias) to.bias[at] = d_bias;
        }
        __syncthreads();
    }
}
