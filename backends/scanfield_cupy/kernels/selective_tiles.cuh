// A tile of tokens in shared memory, and the part of a channel's states that a thread holds in registers.

#include "selective_arrays.cuh"

// ---- shared memory ------------------------------------------------------------------------------------------------------

// B or C of a tile: for each token, or for each channel (`own`), which need not be brought again.
struct Shared {
    T *b, *c;           // (TILE or CHANNELS, STATES)
    R *step, *u, *read; // (TILE, CHANNELS); read: r forward, dr backward
    R *back_x, *back_s; // (TILE, CHANNELS), backward: the gradient of s u, and what A adds to that of s
    R* again;           // (TILE, CHANNELS), backward: r
    T* kept;            // (TILES, PART, THREADS), backward: states at the tiles' starts
    T* sums;            // (WARPS, TILE, 2, STATES), backward
    __device__ __forceinline__ Shared(unsigned char* memory, bool backward) {
        enum { ROWS = TILE > CHANNELS ? TILE : CHANNELS };
        T* next = reinterpret_cast<T*>(memory);
        b = next, next += ROWS * STATES;
        c = next, next += ROWS * STATES;
        if (backward) {
            kept = next, next += TILES * PART * THREADS;
            sums = next, next += WARPS * TILE * 2 * STATES;
        }
        R* rest = reinterpret_cast<R*>(next);
        step = rest, u = step + TILE * CHANNELS, read = u + TILE * CHANNELS;
        back_x = read + TILE * CHANNELS, back_s = back_x + TILE * CHANNELS;
        again = back_s + TILE * CHANNELS;
    }
};

__device__ __forceinline__ void bring_vectors(T* to, const Vectors& from, const Place& place, i64 row, i64 t0, int tokens,
                                              i64 states) {
    const i64 group = place.first / from.per_group;
    for (int i = threadIdx.x; i < tokens * STATES; i += THREADS) {
        const int n = i % STATES;
        to[i] = n < states ? carried(from(row, t0 + i / STATES, group, n), T()) : number<T>(0);
    }
}
__device__ __forceinline__ void bring_own_vectors(T* to, const Vectors& from, const Place& place, i64 row, i64 states) {
    for (int i = threadIdx.x; i < CHANNELS * STATES; i += THREADS) {
        const int n = i % STATES;
        const bool there = i / STATES < place.count && n < states;
        to[i] = there ? carried(from(row, 0, place.first + i / STATES, n), T()) : number<T>(0);
    }
}
__device__ __forceinline__ void bring_steps(const Shared& shared, const Rows& u, const Rows& delta, const Steps& steps,
                                            const Place& place, i64 row, i64 t0, int tokens) {
    for (int i = threadIdx.x; i < tokens * CHANNELS; i += THREADS) {
        const int c = i % CHANNELS;
        const i64 t = t0 + i / CHANNELS;
        const bool there = c < place.count;
        shared.step[i] = there ? steps.size(steps.raw(delta(row, t, place.first + c), place.first + c)) : R(0);
        shared.u[i] = there ? u(row, t, place.first + c) : R(0);
    }
}
// The gradient of the read-out and skip, the gate taken back.
__device__ __forceinline__ R before_gate(const R* d_output, const Rows& z, i64 row, i64 t, i64 c, const Sizes& sizes) {
    R d = d_output ? d_output[(row * sizes.time + t) * sizes.channels + c] : R(0);
    if (z.at) {
        const R gate = z(row, t, c);
        d = d * (gate * sigmoid(gate));
    }
    return d;
}
__device__ __forceinline__ void bring_back(const Shared& shared, const R* d_output, const Rows& z, const Place& place,
                                           i64 row, i64 t0, int tokens, const Sizes& sizes) {
    for (int i = threadIdx.x; i < tokens * CHANNELS; i += THREADS) {
        const int c = i % CHANNELS;
        const bool there = c < place.count;
        shared.read[i] = there ? before_gate(d_output, z, row, t0 + i / CHANNELS, place.first + c, sizes) : R(0);
    }
}

// ---- the walk -----------------------------------------------------------------------------------------------------------

// A thread's states, and their rates. States past the last one stay 0 and meet nothing: an infinite input times 0 is NaN.
struct Part {
    T rate[PART], h[PART];
    int n0;
    i64 states;
    __device__ __forceinline__ bool has(int j) const { return n0 + j < states; }
    __device__ __forceinline__ Part(const T* A, const Place& place, i64 states) : states(states) {
        n0 = place.share * PART;
#pragma unroll
        for (int j = 0; j < PART; ++j) {
            const bool there = place.exists && n0 + j < states;
            rate[j] = there ? Model<T>::rate(A[place.c * states + n0 + j]) : number<T>(0);
            h[j] = number<T>(0);
        }
    }
    __device__ __forceinline__ void take(const T* from, i64 index, const Place& place, const Sizes& sizes) {
        const i64 at = (index * sizes.channels + place.c) * states + n0;
#pragma unroll
        for (int j = 0; j < PART; ++j) h[j] = from && place.exists && has(j) ? from[at + j] : number<T>(0);
    }
    __device__ __forceinline__ void give(T* to, i64 index, const Place& place, const Sizes& sizes) const {
        const i64 at = (index * sizes.channels + place.c) * states + n0;
#pragma unroll
        for (int j = 0; j < PART; ++j)
            if (place.exists && has(j)) to[at + j] = h[j];
    }
};

// The sum over the threads that share a channel; all of them get it.
__device__ __forceinline__ R over_shares(R x) {
#pragma unroll
    for (int turned = NEIGHBOURS; turned < 32; turned *= 2) x += from_lane(x, turned);
    return x;
}

__device__ __forceinline__ const T* vector_at(const T* shared, bool own, const Place& place, int token) {
    return shared + (own ? place.channel : token) * STATES + place.share * PART;
}
