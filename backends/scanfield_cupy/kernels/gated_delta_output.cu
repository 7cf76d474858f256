// The gated delta rule in chunks, last step forward: o = Qb S + P U. A block takes one chunk of one head and COLUMNS of its
// columns.

#include "gated_delta_chunk.cuh"

enum {
    COLUMNS = sizeof(T) == 8 ? 32 : 64,
    LINE = COLUMNS + PAD,
    BLOCKS = sizeof(T) == 8 ? 2 : 3,  // that a multiprocessor is to hold at once: as many as registers allow
};

__device__ __forceinline__ void output_of(const Inputs& x, const i64* bounds, const Sizes& sizes, const Room& room,
                                          const Kept* Qb, const Kept* P, const Kept* updates, const Kept* starts,
                                          KEYS* output) {
    SHARED_MEMORY(memory);
    Operand* left = reinterpret_cast<Operand*>(memory);  // (CHUNK, CHUNK)
    Operand* right = left + CHUNK * STEP;                // (CHUNK, COLUMNS)
    const Lane lane;
    const int row = 16 * lane.warp;
    const i64 blocks = (sizes.V + COLUMNS - 1) / COLUMNS;
    for (i64 item = blockIdx.x; item < sizes.slots * sizes.heads * blocks; item += gridDim.x) {
        Part part;
        if (!part.find(bounds, sizes, item / blocks)) continue;
        const i64 v0 = item % blocks * COLUMNS;
        T sum[COLUMNS / 8][4];
        clear(sum);
        for (i64 k0 = 0; k0 < sizes.K; k0 += CHUNK) {
            __syncthreads();
            bring<CHUNK>(left, STEP, Qb + part.place(sizes) * CHUNK * sizes.rows + k0, sizes.rows, CHUNK);
            bring_state<COLUMNS>(right, LINE, starts, room, part, sizes, k0, CHUNK, v0);
            __syncthreads();
            multiply<false, true>(sum, left + row * STEP, STEP, right, LINE, CHUNK);
        }
        __syncthreads();
        bring<CHUNK>(left, STEP, P + part.place(sizes) * CHUNK * CHUNK, CHUNK, CHUNK);
        bring_tokens<COLUMNS>(right, LINE, part, v0, sizes.V, [&](int token, i64 v) {
            return updated(x, updates, room, part, sizes, token, v);
        });
        __syncthreads();
        multiply<false, true>(sum, left + row * STEP, STEP, right, LINE, row + 16);
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) {
            const int token = row + lane.row_of(i % 4);
            const i64 v = v0 + lane.column_of(i % 4, i / 4);
            if (token >= part.tokens || v >= sizes.V) continue;
            store(output + ((part.row * sizes.time + part.first + token) * sizes.vheads + part.head) * sizes.V + v,
                  sum[i / 4][i % 4]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    delta_output(INPUTS, const i64* bounds, SIZES, const Kept* Qb, const Kept* P, const Kept* updates, const Kept* starts,
                 KEYS* output) {
    output_of(AS_INPUTS, bounds, AS_SIZES, AS_ROOM, Qb, P, updates, starts, output);
}
