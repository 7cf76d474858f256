// The segments that a long sequence of few channels is cut into: their maps, and the way through them.

#include "selective_tiles.cuh"

// The map of each segment but one: the last forward, the first backward (BACK), where the map is that of c.
template <bool BACK>
__device__ __forceinline__ void summary(const Rows& u, const Rows& delta, const Rows& z, const T* A, const Vectors& B,
                                        const Vectors& C, const Steps& steps, const R* d_output, const T* edge,
                                        const i64* bounds, const Sizes& sizes, R* step_sums, T* states, int* wild) {
    SHARED_MEMORY(memory);
    const Shared shared(memory, false);
    const Place place(sizes);
    const i64 segment = place.segment + (BACK ? 1 : 0);
    const Vectors& vectors = BACK ? C : B;
    T* const vector = BACK ? shared.c : shared.b;
    for (i64 s = blockIdx.y; s < sizes.sequences; s += gridDim.y) {
        const Sequence sequence = sequence_at(bounds, s, sizes.time);
        const i64 begin = sequence.first + segment * sizes.segment_tokens;
        const i64 end = min(sequence.last, begin + sizes.segment_tokens);
        Part part(A, place, sizes.states);
        bool fine = true;
        if (edge) {  // an infinite state at the edge would meet products that may have gone to 0
            part.take(edge, s, place, sizes);
#pragma unroll
            for (int j = 0; j < PART; ++j) fine &= is_finite(part.h[j]), part.h[j] = number<T>(0);
        }
        R total = 0;
        if (vectors.own) bring_own_vectors(vector, vectors, place, sequence.row, sizes.states);
        const i64 tiles = end > begin ? (end - begin + TILE - 1) / TILE : 0;
        for (i64 k = 0; k < tiles; ++k) {
            const i64 t0 = begin + (BACK ? tiles - 1 - k : k) * TILE;
            const int tokens = int(min(end - t0, i64(TILE)));
            __syncthreads();
            bring_steps(shared, u, delta, steps, place, sequence.row, t0, tokens);
            if (BACK) bring_back(shared, d_output, z, place, sequence.row, t0, tokens, sizes);
            if (!vectors.own) bring_vectors(vector, vectors, place, sequence.row, t0, tokens, sizes.states);
            __syncthreads();
            for (int i = 0; i < tokens; ++i) {
                const int token = BACK ? tokens - 1 - i : i, at = token * CHANNELS + place.channel;
                const R step = shared.step[at];
                const R x = BACK ? Model<T>::FACTOR * shared.read[at] : step * shared.u[at];
                const T* v = vector_at(vector, vectors.own, place, token);
                total += step;
#pragma unroll
                for (int j = 0; j < PART; ++j) {
                    if (!part.has(j)) continue;
                    const T decay = Model<T>::decay(step, part.rate[j]);
                    part.h[j] = BACK ? conj(decay) * (scaled(x, conj(v[j])) + part.h[j])
                                     : decay * part.h[j] + scaled(x, v[j]);
                }
            }
        }
        const i64 where = s * (sizes.segments - 1) + place.segment;
        // Up to 2^40, products hide nothing that a state could show.
#pragma unroll
        for (int j = 0; j < PART; ++j) {
            fine &= is_finite(part.h[j]);
            fine &= !part.has(j) || magnitude(Model<T>::decay(total, part.rate[j])) <= R(1099511627776.0);
        }
        fine &= is_finite(total);
        part.give(states, where, place, sizes);
        if (place.share == 0 && place.exists) step_sums[where * sizes.channels + place.c] = total;
        fine = __syncthreads_and(fine);
        if (threadIdx.x == 0) wild[where * sizes.channel_blocks + place.block] = !fine;
    }
}

// Whether the map of one of the segments `first` to `last` - 1 cannot be trusted: the block of the first such segment
// walks on through all behind it, whose own blocks stand back. What lies before keeps every bit.
__device__ __forceinline__ bool any_wild(const int* wild, i64 s, i64 first, i64 last, const Sizes& sizes, i64 block) {
    bool found = false;
    for (i64 k = first; k < last; ++k) {
        found |= wild[(s * (sizes.segments - 1) + k) * sizes.channel_blocks + block] != 0;
    }
    return found;
}

// A segment's start from those before it (forward), or c from those behind it.
template <bool BACK>
__device__ __forceinline__ void through_segments(Part& part, const R* step_sums, const T* states, i64 s, const Place& place,
                                                 const Sizes& sizes) {
    const i64 count = BACK ? sizes.segments - 1 - place.segment : place.segment;
    for (i64 i = 0; i < count && place.exists; ++i) {
        const i64 where = s * (sizes.segments - 1) + (BACK ? sizes.segments - 2 - i : i);
        const R total = step_sums[where * sizes.channels + place.c];
        const T* from = states + (where * sizes.channels + place.c) * sizes.states + part.n0;
#pragma unroll
        for (int j = 0; j < PART; ++j) {
            if (!part.has(j)) continue;
            const T decay = Model<T>::decay(total, part.rate[j]);
            part.h[j] = (BACK ? conj(decay) : decay) * part.h[j] + from[j];
        }
    }
}
