// The segments that a long series of few lanes is cut into: their maps, and which of them cannot be trusted.

#include "linear_tiles.cuh"

// The map of each segment but one: the last forward, the first backward (`back`), which nobody asks for. Backward, `input`
// is the output's gradient, and the map that of c.
template <int LANES, bool BACK>
__device__ __forceinline__ void summary(
    const STORED* a, i64 a_row, i64 a_time, i64 a_lane, const STORED* b, i64 b_row, i64 b_time, i64 b_lane,
    const T* d_output, const T* edge, const i64* bounds, i64 sequences, i64 time, i64 width, i64 lane_blocks,
    i64 segment_tokens, i64 segments, T* products, T* states, int* wild) {
    typedef Place<LANES> P;
    SHARED_MEMORY(memory);
    Map* maps = reinterpret_cast<Map*>(memory);
    const P place(width, lane_blocks);
    const Strided coefficient = {a, a_row, a_time, a_lane}, input = {b, b_row, b_time, b_lane};
    const i64 segment = place.segment + (BACK ? 1 : 0);
    for (i64 s = blockIdx.y; s < sequences; s += gridDim.y) {
        const Sequence sequence = sequence_at(bounds, s, time);
        const i64 begin = sequence.first + segment * segment_tokens;
        const i64 end = min(sequence.last, begin + segment_tokens);
        const i64 tiles = end > begin ? (end - begin + P::TILE - 1) / P::TILE : 0;
        Map whole = {number<T>(1), number<T>(0)};
        bool fine = true;
        // An infinite state at the edge would meet products that may have gone to 0.
        if (place.exists && edge) fine = is_finite(edge[s * width + place.w]);
        fine = __syncthreads_and(fine);
        for (i64 k = 0; k < tiles && fine; ++k) {
            const i64 t0 = begin + (BACK ? tiles - 1 - k : k) * P::TILE + place.run * TOKENS;
            Map mine = {number<T>(1), number<T>(0)};
#pragma unroll
            for (int i = 0; i < TOKENS; ++i) {
                const i64 t = t0 + (BACK ? TOKENS - 1 - i : i);
                if (place.exists && t < end) {
                    const T x = coefficient(sequence.row, t, place.w);
                    if (BACK) {
                        const T d = d_output ? d_output[(sequence.row * time + t) * width + place.w] : number<T>(0);
                        mine = {conj(x) * mine.product, conj(x) * (d + mine.state)};
                    } else {
                        mine = {x * mine.product, x * mine.state + input(sequence.row, t, place.w)};
                    }
                }
            }
            const int order = BACK ? P::RUNS - 1 - place.run : place.run;
            const Map* now = combined<LANES>(mine, order, place.lane, maps);
            const bool own = tame(mine) && tame(now[order * LANES + place.lane]);
            whole = after(now[(P::RUNS - 1) * LANES + place.lane], whole);
            fine = __syncthreads_and(own && tame(whole));
        }
        const i64 where = s * (segments - 1) + place.segment;
        if (place.run == 0 && place.exists) {
            products[where * width + place.w] = whole.product;
            states[where * width + place.w] = whole.state;
        }
        if (threadIdx.x == 0) wild[where * lane_blocks + place.lane_block] = !fine;
    }
}

// Whether the map of one of the segments `first` to `last` - 1 cannot be trusted: the block of the first such segment
// walks on through all behind it, whose own blocks stand back. What lies before keeps every bit.
__device__ __forceinline__ bool any_wild(const int* wild, i64 s, i64 first, i64 last, i64 segments, i64 lane_blocks,
                                         i64 lane_block) {
    bool found = false;
    for (i64 k = first; k < last; ++k) found |= wild[(s * (segments - 1) + k) * lane_blocks + lane_block] != 0;
    return found;
}
