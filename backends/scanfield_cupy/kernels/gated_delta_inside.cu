// The gated delta rule in chunks, first step: what a chunk's tokens do to each other. A block takes one chunk of one head.
//
// Forward it makes W, J y, Kb, Qb, P and c_C; for the gradient (BACKWARD 1) W, J, P^T dO, Kb, Qb and c_C. L and P are made
// by bisection: halves of 32, 16, ... 1 tokens, each pair a product of what decayed to the anchor between them.
//
// The pairs of 16 tokens or fewer lie in the diagonal blocks of 16: there, whole blocks are multiplied and the level's
// pairs are chosen from them. J is made from the inverses of those blocks, merged to 32 and to 64.

#include "gated_delta_chunk.cuh"

enum {
    CHANNELS = sizeof(T) == 8 ? 16 : 32,
    LINE = CHANNELS + PAD,
    MATRIX_STEP = CHUNK + 16 / sizeof(T),
    BLOCKS = 2,  // that a multiprocessor is to hold at once: as many as registers allow
};

// What goes out. For a launch's chunks and heads: (CHUNK, rows), (CHUNK, CHUNK) and (rows).
struct Made {
    Kept *W, *Kb, *Qb, *matrix;  // matrix: P, or backward J
    T* decay;
    Kept* updates;  // J y, or backward P^T dO
};

__device__ __forceinline__ void put_block(T* matrix, const T (&sum)[2][4], int row0, int column0) {
    const Lane lane;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            matrix[(row0 + lane.row_of(i)) * MATRIX_STEP + column0 + lane.column_of(i, tile)] = sum[tile][i];
        }
    }
}

// From L, in its place. All products in T: this is no place to round.
__device__ __forceinline__ void invert(T* matrix) {
    const Lane lane;
    const int base = 16 * lane.warp;
    {  // a warp a diagonal block, a lane a column, by substitution
        const int column = threadIdx.x % 16;
        T x[16];
#pragma unroll
        for (int r = 0; r < 16; ++r) {
            x[r] = r == column ? T(1) : T(0);
#pragma unroll
            for (int s = 0; s < r; ++s) x[r] -= matrix[(base + r) * MATRIX_STEP + base + s] * x[s];
        }
        __syncthreads();
        if (threadIdx.x % 32 < 16) {
#pragma unroll
            for (int r = 0; r < 16; ++r) matrix[(base + r) * MATRIX_STEP + base + column] = x[r];
        }
        __syncthreads();
    }
    // [[A, 0], [B, D]]^(-1) = [[A', 0], [-D' B A', D']], twice: a block of 16 x 16 of B a warp.
    for (int half = 16; half < CHUNK; half *= 2) {
        const bool busy = half == 32 || lane.warp < 2;
        const int row = half == 32 ? 32 + lane.warp / 2 * 16 : lane.warp * 32 + 16;
        const int column = half == 32 ? lane.warp % 2 * 16 : lane.warp * 32;
        const int first = row / half * half, before = first - half;
        for (int side = 0; side < 2; ++side) {
            T sum[2][4];
            clear(sum);
            if (busy && side == 0) {
                multiply<false, true>(sum, matrix + row * MATRIX_STEP + column, MATRIX_STEP,
                                      matrix + column * MATRIX_STEP + column, MATRIX_STEP, before + half - column);
            } else if (busy) {
                multiply<false, true>(sum, matrix + row * MATRIX_STEP + first, MATRIX_STEP,
                                      matrix + first * MATRIX_STEP + column, MATRIX_STEP, row + 16 - first);
#pragma unroll
                for (int i = 0; i < 8; ++i) sum[i / 4][i % 4] = -sum[i / 4][i % 4];
            }
            __syncthreads();
            if (busy) put_block(matrix, sum, row, column);
            __syncthreads();
        }
    }
}

// A warp's blocks of L and P: far below the diagonal, next to it (of L for two warps, of P for two) and on it.
struct Blocks {
    T far_L[2][4], far_P[2][4], next[2][4], L[2][4], P[2][4];

    template <int SPAN>
    __device__ __forceinline__ void add(const Channels<CHANNELS>& channels, Operand* one, Operand* two, bool erases) {
        const Lane lane;
        channels.put_halves<SPAN>(one, two);
        __syncthreads();
        if (SPAN == 32) {
            const int below = (32 + lane.warp / 2 * 16) * LINE, above = lane.warp % 2 * 16 * LINE;
            if (erases) multiply<false, false>(far_L, one + below, LINE, one + above, LINE, CHANNELS);
            multiply<false, false>(far_P, two + below, LINE, one + above, LINE, CHANNELS);
        } else if (SPAN == 16) {
            const int above = lane.warp % 2 * 32 * LINE, below = above + 16 * LINE;
            if (erases || lane.warp >= 2) {
                const Operand* from = lane.warp < 2 ? one : two;
                multiply<false, false>(next, from + below, LINE, one + above, LINE, CHANNELS);
            }
        } else {
            const int here = 16 * lane.warp * LINE;
            const Halves chosen = {SPAN, true};
            T all_L[2][4], all_P[2][4];
            clear(all_L), clear(all_P);
            if (erases) multiply<false, false>(all_L, one + here, LINE, one + here, LINE, CHANNELS);
            multiply<false, false>(all_P, two + here, LINE, one + here, LINE, CHANNELS);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (!chosen(lane.row_of(i % 4), lane.column_of(i % 4, i / 4))) continue;
                L[i / 4][i % 4] += all_L[i / 4][i % 4], P[i / 4][i % 4] += all_P[i / 4][i % 4];
            }
        }
        __syncthreads();
    }
    // The diagonal of P: no decay in between.
    __device__ __forceinline__ void add_diagonal(const Channels<CHANNELS>& channels, Operand* one, Operand* two) {
        const Lane lane;
        const int own = channels.first * LINE + channels.channel, here = 16 * lane.warp * LINE;
#pragma unroll
        for (int i = 0; i < channels.RUN; ++i) {
            put(one + own + i * LINE, channels.k[i]), put(two + own + i * LINE, channels.q[i]);
        }
        __syncthreads();
        T all_P[2][4];
        clear(all_P);
        multiply<false, false>(all_P, two + here, LINE, one + here, LINE, CHANNELS);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (lane.row_of(i % 4) == lane.column_of(i % 4, i / 4)) P[i / 4][i % 4] += all_P[i / 4][i % 4];
        }
    }
};

// Columns of J y or P^T dO, or of J Eb in its own place.
__device__ __forceinline__ void multiply_left(T (&sum)[CHANNELS / 8][4], const Operand* left, const Operand* right,
                                              bool turned) {
    const int row = 16 * (threadIdx.x / 32);
    clear(sum);
    if (turned) {
        multiply<true, true>(sum, left + row * STEP + row, STEP, right + row * LINE, LINE, CHUNK - row);
    } else {
        multiply<false, true>(sum, left + row * STEP, STEP, right, LINE, row + 16);
    }
}

__device__ __forceinline__ void inside(const Inputs& x, const T* d_output, const i64* bounds, const Sizes& sizes,
                                       const Room& room, const Made& made) {
    SHARED_MEMORY(memory);
    T* matrix = reinterpret_cast<T*>(memory);  // L, then J
    Channels<CHANNELS> channels(matrix + CHUNK * MATRIX_STEP);
    Operand* one = reinterpret_cast<Operand*>(channels.totals + Channels<CHANNELS>::RUNS * CHANNELS);
    Operand* two = one + CHUNK * LINE;
#if TENSOR
    Operand* left = two + CHUNK * LINE;
#else
    Operand* left = matrix;
#endif
    const Lane lane;
    const bool erases = x.erase.at != nullptr;
    for (i64 item = blockIdx.x; item < sizes.slots * sizes.heads; item += gridDim.x) {
        Part part;
        if (!part.find(bounds, sizes, item)) continue;
        const i64 at = part.place(sizes) * CHUNK * sizes.rows;
        Blocks blocks;
        clear(blocks.far_L), clear(blocks.far_P), clear(blocks.next), clear(blocks.L), clear(blocks.P);
        for (i64 k0 = 0; k0 < sizes.rows; k0 += CHANNELS) {
            __syncthreads();
            channels.take(x, part, k0, sizes.K);
            __syncthreads();
            const i64 to = at + channels.first * sizes.rows + k0 + channels.channel;
            channels.onwards<channels.RUN>(0, channels.before<CHUNK>(), [&](int i, T factor) {
                if (erases) put(made.W + to + i * sizes.rows, channels.e[i] * factor);
                put(made.Qb + to + i * sizes.rows, channels.q[i] * factor);
                if (channels.first + i == CHUNK - 1) {
                    made.decay[part.place(sizes) * sizes.rows + k0 + channels.channel] = factor;
                }
            });
            channels.backwards<channels.RUN>(0, channels.after<CHUNK>(), [&](int i, T factor) {
                put(made.Kb + to + i * sizes.rows, channels.k[i] * factor);
            });
            if (k0 >= sizes.K) continue;
            blocks.add<32>(channels, one, two, erases);
            blocks.add<16>(channels, one, two, erases);
            blocks.add<8>(channels, one, two, erases);
            blocks.add<4>(channels, one, two, erases);
            blocks.add<2>(channels, one, two, erases);
            blocks.add<1>(channels, one, two, erases);
            blocks.add_diagonal(channels, one, two);
        }
        const int warp = lane.warp, below = 32 + warp / 2 * 16, above = warp % 2 * 16, next_to = warp % 2 * 32;
        Kept* kept = made.matrix + part.place(sizes) * CHUNK * CHUNK;
        if (erases) {
            for (int i = threadIdx.x; i < CHUNK * MATRIX_STEP; i += THREADS) matrix[i] = 0;
            __syncthreads();
            put_block(matrix, blocks.far_L, below, above);
            if (warp < 2) put_block(matrix, blocks.next, next_to + 16, next_to);
            put_block(matrix, blocks.L, 16 * warp, 16 * warp);
            __syncthreads();
            invert(matrix);
            for (int i = threadIdx.x; i < CHUNK * CHUNK; i += THREADS) {
                const int r = i / CHUNK, s = i % CHUNK;
                const T found = matrix[r * MATRIX_STEP + s];
#if TENSOR
                put(left + r * STEP + s, found);
#endif
                if (BACKWARD) put(kept + i, found);
            }
            for (i64 k0 = 0; k0 < sizes.rows; k0 += CHANNELS) {
                __syncthreads();
                bring<CHANNELS>(one, LINE, made.W + at + k0, sizes.rows, CHUNK);
                __syncthreads();
                T sum[CHANNELS / 8][4];
                multiply_left(sum, left, one, false);
#pragma unroll
                for (int i = 0; i < CHANNELS / 2; ++i) {
                    const int r = 16 * warp + lane.row_of(i % 4);
                    put(made.W + at + r * sizes.rows + k0 + lane.column_of(i % 4, i / 4), sum[i / 4][i % 4]);
                }
            }
        }
        // P goes out, or stays for P^T dO.
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int r = lane.row_of(i % 4), s = lane.column_of(i % 4, i / 4);
            const T of_far = blocks.far_P[i / 4][i % 4], of_next = blocks.next[i / 4][i % 4];
            const T of_here = blocks.P[i / 4][i % 4];
#if BACKWARD
            put(left + (below + r) * STEP + above + s, of_far);
            if (warp >= 2) put(left + (next_to + 16 + r) * STEP + next_to + s, of_next);
            put(left + (16 * warp + r) * STEP + 16 * warp + s, of_here);
#else
            put(kept + (below + r) * CHUNK + above + s, of_far);
            if (warp >= 2) put(kept + (next_to + 16 + r) * CHUNK + next_to + s, of_next);
            put(kept + (16 * warp + r) * CHUNK + 16 * warp + s, of_here);
#endif
        }
        if (!made.updates) continue;
        for (i64 v0 = 0; v0 < sizes.V; v0 += CHANNELS) {
            __syncthreads();
#if BACKWARD
            bring_tokens<CHANNELS>(one, LINE, part, v0, sizes.V, Cotangent{d_output, part, sizes});
#else
            bring_tokens<CHANNELS>(one, LINE, part, v0, sizes.V, [&](int token, i64 v) {
                return updated(x, nullptr, room, part, sizes, token, v);
            });
#endif
            __syncthreads();
            T sum[CHANNELS / 8][4];
            multiply_left(sum, left, one, BACKWARD);
#pragma unroll
            for (int i = 0; i < CHANNELS / 2; ++i) {
                const int token = 16 * warp + lane.row_of(i % 4);
                const i64 v = v0 + lane.column_of(i % 4, i / 4);
                if (token < part.tokens && v < sizes.V) {
                    put(made.updates + room.token(part, sizes, token, v), sum[i / 4][i % 4]);
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    delta_inside(INPUTS, const T* d_output, const i64* bounds, SIZES, Kept* W, Kept* Kb, Kept* Qb, Kept* matrix, T* decays,
                 Kept* updates) {
    inside(AS_INPUTS, d_output, bounds, AS_SIZES, AS_ROOM, Made{W, Kb, Qb, matrix, decays, updates});
}
