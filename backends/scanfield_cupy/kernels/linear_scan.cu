// The linear scan h_t = a_t h_(t-1) + b_t, elementwise over lanes, and its gradient.
//
// A block takes LANES lanes and walks over tiles of RUNS * TOKENS tokens. Each thread holds a run of TOKENS tokens of one
// lane in registers; the runs' affine maps (product, state from zero) are combined by a scan through shared memory, and
// each run is walked again from its true start. Long series of few lanes are cut into segments, a block each: the
// segments' maps first (`summary`), then every segment from its start. Groups are fixed by the shapes, so that results
// are the same bit for bit on every call.
//
// Products of coefficients may overflow, or meet an infinity as 0, where the recurrence does not. A tile in which that
// could happen is walked run after run instead, and from such a segment on one block walks alone: then the arithmetic is
// the recurrence's.
//
// Backward carries c_(t-1) = conj(a_t) (dh_t + c_t): db_t = dh_t + c_t, da_t = db_t conj(h_(t-1)). The states h come from
// those that forward keeps at the tiles' starts.
//
// Reference: Blelloch, "Prefix sums and their applications" (1990), section 1.4.
// Compiled once for each STORED: the type of a and b in memory.

#include "linear_segments.cuh"

template <int LANES, class Output>
__device__ __forceinline__ void forward(
    const STORED* a, i64 a_row, i64 a_time, i64 a_lane, const STORED* b, i64 b_row, i64 b_time, i64 b_lane,
    const T* initial, const i64* bounds, i64 sequences, i64 time, i64 width, i64 lane_blocks, i64 segment_tokens,
    i64 segments, const T* products, const T* states, const int* wild, Output* output, T* final, T* starts) {
    typedef Place<LANES> P;
    SHARED_MEMORY(memory);
    Map* maps = reinterpret_cast<Map*>(memory);
    T* carry = reinterpret_cast<T*>(maps + 2 * THREADS);
    const P place(width, lane_blocks);
    const Strided coefficient = {a, a_row, a_time, a_lane}, input = {b, b_row, b_time, b_lane};
    for (i64 s = blockIdx.y; s < sequences; s += gridDim.y) {
        const Sequence sequence = sequence_at(bounds, s, time);
        const i64 own = place.segment, next = min(own + 1, segments - 1);
        const i64 begin = sequence.first + own * segment_tokens;
        if (own > 0 && begin >= sequence.last) continue;
        if (any_wild(wild, s, 0, own, segments, lane_blocks, place.lane_block)) continue;
        const bool alone = any_wild(wild, s, own, next, segments, lane_blocks, place.lane_block);
        const i64 end = alone ? sequence.last : min(sequence.last, begin + segment_tokens);
        T h = initial && place.exists ? initial[s * width + place.w] : number<T>(0);
        for (i64 k = 0; k < place.segment && place.exists; ++k) {
            const i64 where = (s * (segments - 1) + k) * width + place.w;
            h = products[where] * h + states[where];
        }
        if (place.run == 0) carry[place.lane] = h;
        __syncthreads();
        const i64 saved = saved_at(bounds, sequence, s, time, P::TILE);
        for (i64 tile = begin; tile < end; tile += P::TILE) {
            if (starts && place.run == 0 && place.exists) {
                starts[(saved + (tile - sequence.first) / P::TILE) * width + place.w] = carry[place.lane];
            }
            const i64 t0 = tile + place.run * TOKENS;
            T x[TOKENS], y[TOKENS];
#pragma unroll
            for (int i = 0; i < TOKENS; ++i) {
                const bool there = place.exists && t0 + i < end;
                x[i] = there ? coefficient(sequence.row, t0 + i, place.w) : number<T>(1);
                y[i] = there ? input(sequence.row, t0 + i, place.w) : number<T>(0);
            }
            Map mine = {number<T>(1), number<T>(0)};
#pragma unroll
            for (int i = 0; i < TOKENS; ++i) mine = {x[i] * mine.product, x[i] * mine.state + y[i]};
            walk_tile<LANES>(mine, place.run, place.lane, maps, carry, [&](T state) {
#pragma unroll
                for (int i = 0; i < TOKENS; ++i) {
                    if (place.exists && t0 + i < end) {
                        state = x[i] * state + y[i];
                        store(output + (sequence.row * time + t0 + i) * width + place.w, state);
                    }
                }
                return state;
            });
        }
        if (end == sequence.last && place.run == 0 && place.exists) final[s * width + place.w] = carry[place.lane];
        __syncthreads();
    }
}

template <int LANES>
__device__ __forceinline__ void backward(
    const STORED* a, i64 a_row, i64 a_time, i64 a_lane, const STORED* b, i64 b_row, i64 b_time, i64 b_lane,
    const T* starts, const T* d_output, const T* d_final, const i64* bounds, i64 sequences, i64 time, i64 width,
    i64 lane_blocks, i64 segment_tokens, i64 segments, const T* products, const T* states, const int* wild, T* d_a,
    T* d_b, T* d_state) {
    typedef Place<LANES> P;
    SHARED_MEMORY(memory);
    Map* maps = reinterpret_cast<Map*>(memory);
    T* carry = reinterpret_cast<T*>(maps + 2 * THREADS);  // c
    T* before_tile = carry + LANES;                       // h
    const P place(width, lane_blocks);
    const Strided coefficient = {a, a_row, a_time, a_lane}, input = {b, b_row, b_time, b_lane};
    for (i64 s = blockIdx.y; s < sequences; s += gridDim.y) {
        const Sequence sequence = sequence_at(bounds, s, time);
        // The map of segment k is number k - 1.
        const i64 own = place.segment, from = sequence.first + own * segment_tokens;
        const i64 end = min(sequence.last, from + segment_tokens);
        if (own > 0 && from >= sequence.last) continue;
        if (any_wild(wild, s, own, segments - 1, segments, lane_blocks, place.lane_block)) continue;
        const bool alone = own > 0 && any_wild(wild, s, own - 1, own, segments, lane_blocks, place.lane_block);
        const i64 begin = alone ? sequence.first : from;
        T c = d_final && place.exists ? d_final[s * width + place.w] : number<T>(0);
        for (i64 k = segments - 1; k > own && place.exists; --k) {
            const i64 where = (s * (segments - 1) + k - 1) * width + place.w;
            c = products[where] * c + states[where];
        }
        if (place.run == 0) carry[place.lane] = c;
        const i64 saved = saved_at(bounds, sequence, s, time, P::TILE);
        const i64 tiles = (end - begin + P::TILE - 1) / P::TILE;
        for (i64 k = tiles - 1; k >= 0; --k) {
            const i64 tile = begin + k * P::TILE, t0 = tile + place.run * TOKENS;
            if (d_a && place.run == 0) {
                const i64 where = (saved + (tile - sequence.first) / P::TILE) * width + place.w;
                before_tile[place.lane] = place.exists ? starts[where] : number<T>(0);
            }
            __syncthreads();
            T x[TOKENS], h[TOKENS], d[TOKENS];
#pragma unroll
            for (int i = 0; i < TOKENS; ++i) {
                const bool there = place.exists && t0 + i < end;
                x[i] = there ? coefficient(sequence.row, t0 + i, place.w) : number<T>(1);
                h[i] = there && d_a ? input(sequence.row, t0 + i, place.w) : number<T>(0);
                d[i] = there && d_output ? d_output[(sequence.row * time + t0 + i) * width + place.w] : number<T>(0);
            }
            if (d_a) {
                Map mine = {number<T>(1), number<T>(0)};
#pragma unroll
                for (int i = 0; i < TOKENS; ++i) mine = {x[i] * mine.product, x[i] * mine.state + h[i]};
                walk_tile<LANES>(mine, place.run, place.lane, maps, before_tile, [&](T state) {
#pragma unroll
                    for (int i = 0; i < TOKENS; ++i) {  // the input makes room for the state before the token
                        const T next = x[i] * state + h[i];
                        h[i] = state;
                        state = next;
                    }
                    return state;
                });
            }
            Map mine = {number<T>(1), number<T>(0)};
#pragma unroll
            for (int i = TOKENS - 1; i >= 0; --i) {
                x[i] = conj(x[i]);
                mine = {x[i] * mine.product, x[i] * (d[i] + mine.state)};
            }
            walk_tile<LANES>(mine, P::RUNS - 1 - place.run, place.lane, maps, carry, [&](T state) {
#pragma unroll
                for (int i = TOKENS - 1; i >= 0; --i) {
                    if (place.exists && t0 + i < end) {
                        const i64 where = (sequence.row * time + t0 + i) * width + place.w;
                        const T g = d[i] + state;
                        if (d_b) d_b[where] = g;
                        if (d_a) d_a[where] = g * conj(h[i]);
                        state = x[i] * g;
                    }
                }
                return state;
            });
        }
        __syncthreads();
        if (d_state && begin == sequence.first && place.run == 0 && place.exists) {
            d_state[s * width + place.w] = carry[place.lane];
        }
        __syncthreads();
    }
}

#define COMMON                                                                                                         \
    const STORED *a, i64 a_row, i64 a_time, i64 a_lane, const STORED *b, i64 b_row, i64 b_time, i64 b_lane
#define KERNELS(LANES)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) summary_##LANES(                                             \
        COMMON, const T* initial, const i64* bounds, i64 sequences, i64 time, i64 width, i64 lane_blocks,              \
        i64 segment_tokens, i64 segments, T* products, T* states, int* wild) {                                         \
        summary<LANES, false>(a, a_row, a_time, a_lane, b, b_row, b_time, b_lane, nullptr, initial, bounds, sequences, \
                              time, width, lane_blocks, segment_tokens, segments, products, states, wild);             \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) summary_back_##LANES(                                        \
        COMMON, const T* d_output, const T* d_final, const i64* bounds, i64 sequences, i64 time, i64 width,            \
        i64 lane_blocks, i64 segment_tokens, i64 segments, T* products, T* states, int* wild) {                        \
        summary<LANES, true>(a, a_row, a_time, a_lane, b, b_row, b_time, b_lane, d_output, d_final, bounds, sequences, \
                             time, width, lane_blocks, segment_tokens, segments, products, states, wild);              \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) forward_##LANES(                                             \
        COMMON, const T* initial, const i64* bounds, i64 sequences, i64 time, i64 width, i64 lane_blocks,              \
        i64 segment_tokens, i64 segments, const T* products, const T* states, const int* wild, STORED* output,         \
        T* final, T* starts) {                                                                                         \
        forward<LANES>(a, a_row, a_time, a_lane, b, b_row, b_time, b_lane, initial, bounds, sequences, time, width,    \
                       lane_blocks, segment_tokens, segments, products, states, wild, output, final, starts);          \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) backward_##LANES(                                            \
        COMMON, const T* starts, const T* d_output, const T* d_final, const i64* bounds, i64 sequences, i64 time,      \
        i64 width, i64 lane_blocks, i64 segment_tokens, i64 segments, const T* products, const T* states,              \
        const int* wild, T* d_a, T* d_b, T* d_state) {                                                                 \
        backward<LANES>(a, a_row, a_time, a_lane, b, b_row, b_time, b_lane, starts, d_output, d_final, bounds,         \
                        sequences, time, width, lane_blocks, segment_tokens, segments, products, states, wild, d_a,    \
                        d_b, d_state);                                                                                 \
    }

KERNELS(1)
KERNELS(8)
KERNELS(32)
