// The gradient of the gated delta rule in chunks: what is summed over the columns of the state. Before it, the chunks and the
// states' gradients were made (`delta_inside`, `delta_states_back`).
//
//   delta_triangles   dX = J^T dU, which is the gradient of y;   dP = dO U^T;   dL = -dX U^T          (a chunk of a head)
//   delta_outer       dQb = dO S^T;   dEb = -dX S^T;   dKb = U dS^T;   rows of c_C S dS, summed       (and some channels)
//
// S is the state at the chunk's start, dS the gradient of that at its end. Blocks walk over all columns: no sum is left over.

#include "gated_delta_chunk.cuh"

enum {
    COLUMNS = sizeof(T) == 8 ? 16 : 32,
    LINE = COLUMNS + PAD,
    CHANNELS = sizeof(T) == 8 ? 32 : 64,
    BLOCKS = 2,  // that a multiprocessor is to hold at once: as many as registers allow
    SHARED_BY = THREADS / CHANNELS,  // threads that sum a row of S dS
};

__device__ __forceinline__ void triangles(const Inputs& x, const T* d_output, const i64* bounds, const Sizes& sizes,
                                          const Room& room, const Kept* J, const Kept* updates, Kept* d_updates, Kept* d_P,
                                          Kept* d_L, T* d_value, T* d_write, i64 write_width) {
    SHARED_MEMORY(memory);
    Operand* left = reinterpret_cast<Operand*>(memory);  // J
    Operand* d_U = left + CHUNK * STEP;                  // dU, then dX; all of these (CHUNK, COLUMNS)
    Operand* U = d_U + CHUNK * LINE;
    Operand* d_O = U + CHUNK * LINE;
    const Lane lane;
    const int row = 16 * lane.warp;
    const Room own = {sizes.heads, sizes.head0};
    for (i64 item = blockIdx.x; item < sizes.slots * sizes.heads; item += gridDim.x) {
        Part part;
        if (!part.find(bounds, sizes, item)) continue;
        const i64 at = part.place(sizes) * CHUNK * CHUNK;
        T of_P[8][4], of_L[8][4];
        clear(of_P), clear(of_L);
        __syncthreads();
        if (J) bring<CHUNK>(left, STEP, J + at, CHUNK, CHUNK);
        for (i64 v0 = 0; v0 < sizes.V; v0 += COLUMNS) {
            __syncthreads();
            bring_tokens<COLUMNS>(d_U, LINE, part, v0, sizes.V, [&](int token, i64 v) {
                return load(d_updates + own.token(part, sizes, token, v));
            });
            if (d_P) {
                bring_tokens<COLUMNS>(U, LINE, part, v0, sizes.V, [&](int token, i64 v) {
                    return updated(x, updates, room, part, sizes, token, v);
                });
                bring_tokens<COLUMNS>(d_O, LINE, part, v0, sizes.V, Cotangent{d_output, part, sizes});
            }
            __syncthreads();
            T d_X[COLUMNS / 8][4];
            clear(d_X);
            T of_write[2] = {0, 0};  // of a head's gate: summed over the columns of a lane's two rows
            if (J) {
                multiply<true, true>(d_X, left + row * STEP + row, STEP, d_U + row * LINE, LINE, CHUNK - row);
                __syncthreads();
            }
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; ++i) {
                const int token = row + lane.row_of(i % 4), c = lane.column_of(i % 4, i / 4);
                const bool there = token < part.tokens && v0 + c < sizes.V;
                T d_y = d_X[i / 4][i % 4];
                if (J) {
                    put(d_U + token * LINE + c, d_y);
                    if (there) put(d_updates + own.token(part, sizes, token, v0 + c), d_y);
                } else {
                    d_y = load(d_U + token * LINE + c);
                }
                if (!there) continue;
                const i64 t = part.first + token, v = v0 + c;
                const i64 to = ((part.row * sizes.time + t) * sizes.vheads + part.head) * sizes.V + v;
                if (d_write) {
                    const T of_gate = d_y * x.value(part.row, t, part.head, v);
                    if (write_width == 1) {
                        of_write[i % 4 / 2] += of_gate;
                    } else {
                        d_write[to] = of_gate;
                    }
                }
                if (x.write.at) d_y *= x.write(part.row, t, part.head, v);
                if (d_value) d_value[to] = d_y;
            }
            if (d_write && write_width == 1) {  // over the four lanes of a row, then over the columns before
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    T sum = of_write[h] + from_lane(of_write[h], 1);
                    sum += from_lane(sum, 2);
                    const int token = row + lane.row_of(2 * h);
                    if (lane.column != 0 || token >= part.tokens) continue;
                    T& place = d_write[(part.row * sizes.time + part.first + token) * sizes.vheads + part.head];
                    place = v0 ? place + sum : sum;
                }
            }
            if (!d_P) continue;
            __syncthreads();
            multiply<false, false>(of_P, d_O + row * LINE, LINE, U, LINE, COLUMNS);
            if (J) multiply<false, false>(of_L, d_U + row * LINE, LINE, U, LINE, COLUMNS);
        }
        if (!d_P) continue;
#pragma unroll
        for (int i = 0; i < CHUNK / 2; ++i) {
            const int r = row + lane.row_of(i % 4), s = lane.column_of(i % 4, i / 4);
            put(d_P + at + r * CHUNK + s, r >= s ? of_P[i / 4][i % 4] : T(0));
            if (J) put(d_L + at + r * CHUNK + s, r > s ? -of_L[i / 4][i % 4] : T(0));
        }
    }
}

__device__ __forceinline__ void put_rows(Kept* to, const T (&sum)[CHANNELS / 8][4], const Lane& lane, i64 rows, T sign) {
#pragma unroll
    for (int i = 0; i < CHANNELS / 2; ++i) {
        put(to + (16 * lane.warp + lane.row_of(i % 4)) * rows + lane.column_of(i % 4, i / 4), sign * sum[i / 4][i % 4]);
    }
}

__device__ __forceinline__ void outer(const Inputs& x, const T* d_output, const i64* bounds, const Sizes& sizes,
                                      const Room& room, const Kept* d_y, const Kept* updates, const Kept* starts,
                                      const Kept* d_ends, Kept* d_Qb, Kept* d_Eb, Kept* d_Kb, T* decay) {
    SHARED_MEMORY(memory);
    Operand* d_O = reinterpret_cast<Operand*>(memory);  // (CHUNK, COLUMNS) each
    Operand* U = d_O + CHUNK * LINE;
    Operand* d_X = U + CHUNK * LINE;
    Operand* S = d_X + CHUNK * LINE;  // (CHANNELS, COLUMNS) each
    Operand* d_S = S + CHANNELS * LINE;
    T* sums = reinterpret_cast<T*>(d_S + CHANNELS * LINE);  // (SHARED_BY, CHANNELS)
    const Lane lane;
    const Room own = {sizes.heads, sizes.head0};
    const int row = 16 * lane.warp, channel = threadIdx.x % CHANNELS, share = threadIdx.x / CHANNELS;
    const i64 blocks = (sizes.K + CHANNELS - 1) / CHANNELS;
    for (i64 item = blockIdx.x; item < sizes.slots * sizes.heads * blocks; item += gridDim.x) {
        Part part;
        if (!part.find(bounds, sizes, item / blocks)) continue;
        const i64 k0 = item % blocks * CHANNELS, at = part.place(sizes) * CHUNK * sizes.rows + k0;
        T of_q[CHANNELS / 8][4], of_e[CHANNELS / 8][4], of_k[CHANNELS / 8][4], across = 0;
        clear(of_q), clear(of_e), clear(of_k);
        for (i64 v0 = 0; v0 < sizes.V; v0 += COLUMNS) {
            __syncthreads();
            bring_tokens<COLUMNS>(d_O, LINE, part, v0, sizes.V, Cotangent{d_output, part, sizes});
            bring_tokens<COLUMNS>(U, LINE, part, v0, sizes.V, [&](int token, i64 v) {
                return updated(x, updates, room, part, sizes, token, v);
            });
            if (d_Eb) {
                bring_tokens<COLUMNS>(d_X, LINE, part, v0, sizes.V, [&](int token, i64 v) {
                    return load(d_y + own.token(part, sizes, token, v));
                });
            }
            bring_state<COLUMNS>(S, LINE, starts, room, part, sizes, k0, CHANNELS, v0);
            bring_state<COLUMNS>(d_S, LINE, d_ends, own, part, sizes, k0, CHANNELS, v0);
            __syncthreads();
            multiply<false, false>(of_q, d_O + row * LINE, LINE, S, LINE, COLUMNS);
            if (d_Eb) multiply<false, false>(of_e, d_X + row * LINE, LINE, S, LINE, COLUMNS);
            multiply<false, false>(of_k, U + row * LINE, LINE, d_S, LINE, COLUMNS);
            for (int c = share; c < COLUMNS; c += SHARED_BY) {
                across += load(S + channel * LINE + c) * load(d_S + channel * LINE + c);
            }
        }
        put_rows(d_Qb + at, of_q, lane, sizes.rows, 1);
        if (d_Eb) put_rows(d_Eb + at, of_e, lane, sizes.rows, -1);
        put_rows(d_Kb + at, of_k, lane, sizes.rows, 1);
        sums[share * CHANNELS + channel] = across;
        __syncthreads();
        if (share == 0) {
            for (int other = 1; other < SHARED_BY; ++other) across += sums[other * CHANNELS + channel];
            decay[part.place(sizes) * sizes.rows + k0 + channel] *= across;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    delta_triangles(INPUTS, const T* d_output, const i64* bounds, SIZES, const Kept* J, const Kept* updates, Kept* d_updates,
                    Kept* d_P, Kept* d_L, T* d_value, T* d_write, i64 write_width) {
    triangles(AS_INPUTS, d_output, bounds, AS_SIZES, AS_ROOM, J, updates, d_updates, d_P, d_L, d_value, d_write, write_width);
}
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    delta_outer(INPUTS, const T* d_output, const i64* bounds, SIZES, const Kept* d_y, const Kept* updates, const Kept* starts,
                const Kept* d_ends, Kept* d_Qb, Kept* d_Eb, Kept* d_Kb, T* decays) {
    outer(AS_INPUTS, d_output, bounds, AS_SIZES, AS_ROOM, d_y, updates, starts, d_ends, d_Qb, d_Eb, d_Kb, decays);
}
