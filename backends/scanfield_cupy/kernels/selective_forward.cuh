// A segment forward: outputs, the final state, and the states at the chunks' starts.

#include "selective_segments.cuh"

__device__ __forceinline__ void forward(const Rows& u, const Rows& delta, const Rows& z, const T* A, const Vectors& B,
                                        const Vectors& C, const R* D, const Steps& steps, const T* initial,
                                        const i64* bounds, const Sizes& sizes, const R* step_sums, const T* states,
                                        const int* wild, INPUT* output, T* final, T* starts) {
    SHARED_MEMORY(memory);
    const Shared shared(memory, false);
    const Place place(sizes);
    for (i64 s = blockIdx.y; s < sizes.sequences; s += gridDim.y) {
        const Sequence sequence = sequence_at(bounds, s, sizes.time);
        const i64 own = place.segment, next = min(own + 1, sizes.segments - 1);
        const i64 begin = sequence.first + own * sizes.segment_tokens;
        if (own > 0 && begin >= sequence.last) continue;
        if (any_wild(wild, s, 0, own, sizes, place.block)) continue;
        const bool alone = any_wild(wild, s, own, next, sizes, place.block);
        const i64 end = alone ? sequence.last : min(sequence.last, begin + sizes.segment_tokens);
        Part part(A, place, sizes.states);
        part.take(initial, s, place, sizes);
        through_segments<false>(part, step_sums, states, s, place, sizes);
        const i64 saved = saved_at(bounds, sequence, s, sizes.time, CHUNK);
        __syncthreads();
        if (B.own) bring_own_vectors(shared.b, B, place, sequence.row, sizes.states);
        if (C.own) bring_own_vectors(shared.c, C, place, sequence.row, sizes.states);
        for (i64 t0 = begin; t0 < end; t0 += TILE) {
            const int tokens = int(min(end - t0, i64(TILE)));
            if (starts && (t0 - sequence.first) % CHUNK == 0) {
                part.give(starts, saved + (t0 - sequence.first) / CHUNK, place, sizes);
            }
            bring_steps(shared, u, delta, steps, place, sequence.row, t0, tokens);
            if (!B.own) bring_vectors(shared.b, B, place, sequence.row, t0, tokens, sizes.states);
            if (!C.own) bring_vectors(shared.c, C, place, sequence.row, t0, tokens, sizes.states);
            __syncthreads();
            for (int token = 0; token < tokens; ++token) {
                const int at = token * CHANNELS + place.channel;
                const R step = shared.step[at], x = step * shared.u[at];
                const T* b = vector_at(shared.b, B.own, place, token);
                const T* c = vector_at(shared.c, C.own, place, token);
                R read = 0;
#pragma unroll
                for (int j = 0; j < PART; ++j) {
                    if (!part.has(j)) continue;
                    part.h[j] = Model<T>::decay(step, part.rate[j]) * part.h[j] + scaled(x, b[j]);
                    read += real_part(c[j] * part.h[j]);
                }
                read = over_shares(read);
                if (place.share == 0) shared.read[at] = Model<T>::FACTOR * read;
            }
            __syncthreads();
            for (int i = threadIdx.x; i < tokens * CHANNELS; i += THREADS) {
                const i64 c = place.first + i % CHANNELS, t = t0 + i / CHANNELS;
                if (i % CHANNELS >= place.count) continue;
                R y = shared.read[i];
                if (D) y += D[c] * shared.u[i];
                if (z.at) {
                    const R gate = z(sequence.row, t, c);
                    y *= gate * sigmoid(gate);
                }
                store(output + (sequence.row * sizes.time + t) * sizes.channels + c, y);
            }
            __syncthreads();
        }
        if (end == sequence.last) part.give(final, s, place, sizes);
    }
}
