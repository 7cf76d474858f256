// The gated delta rule in chunks, second step: states from one chunk to the next. A block takes COLUMNS columns of a head's
// state through a whole sequence; the rows of the state are shared among its threads, in registers.
//
//   forward    U = J y - W S;    S <- c_C S + Kb^T U
//   backward   dU = P^T dO + Kb dS;    dS <- c_C dS + Qb^T dO - W^T dU        (dS of the chunk's end, to its start)
//
// This is the one step that is sequential in the chunks: no more is done in it than that. Compiled for each ROWS (64, 128 or
// 256: those that K fits).

#include "gated_delta_chunk.cuh"

enum {
    COLUMNS = sizeof(T) == 8 ? 16 : 32,
    LINE = COLUMNS + PAD,
    TILES = ROWS / CHUNK,
    WIDTH = COLUMNS / 8,
    BLOCKS = sizeof(T) == 8 || ROWS == 256 ? 2 : 3,  // that a multiprocessor is to hold at once: as many as registers allow
};

struct Memory {
    Operand *stage, *state, *updates, *d_output;  // (CHUNK, CHUNK), (ROWS, COLUMNS), twice (CHUNK, COLUMNS)
    __device__ __forceinline__ Memory(unsigned char* memory) {
        stage = reinterpret_cast<Operand*>(memory), state = stage + CHUNK * STEP;
        updates = state + ROWS * LINE, d_output = updates + CHUNK * LINE;
    }
};

// What the rows of a thread's part of the state decay in a chunk; asked for early, as all that a block would wait for.
struct Decays {
    T x[TILES][2];
    __device__ __forceinline__ Decays(const T* from) {
        const Lane lane;
#pragma unroll
        for (int i = 0; i < 2 * TILES; ++i) x[i / 2][i % 2] = from[i / 2 * CHUNK + 16 * lane.warp + lane.row_of(i % 2 * 2)];
    }
};

struct State {
    T x[TILES][WIDTH][4];
    // Each number with its row and its column in the block.
    template <class Do>
    __device__ __forceinline__ void each(const Do& act) {
        const Lane lane;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int n = 0; n < WIDTH; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    act(x[tile][n][i], tile * CHUNK + 16 * lane.warp + lane.row_of(i), lane.column_of(i, n));
                }
            }
        }
    }
    __device__ __forceinline__ void take(const T* from, i64 index, i64 head, i64 v0, const Sizes& sizes) {
        const i64 base = (index * sizes.vheads + head) * sizes.K;
        each([&](T& s, int k, int c) {
            s = from && k < sizes.K && v0 + c < sizes.V ? from[(base + k) * sizes.V + v0 + c] : T(0);
        });
    }
    __device__ __forceinline__ void give(T* to, i64 index, i64 head, i64 v0, const Sizes& sizes) {
        const i64 base = (index * sizes.vheads + head) * sizes.K;
        each([&](T& s, int k, int c) {
            if (k < sizes.K && v0 + c < sizes.V) to[(base + k) * sizes.V + v0 + c] = s;
        });
    }
    // To where other kernels find it, and as an operand.
    __device__ __forceinline__ void keep(Kept* kept, Operand* operand, const Room& room, const Part& part, i64 v0,
                                         const Sizes& sizes) {
        each([&](T& s, int k, int c) {
            if (k < sizes.K && v0 + c < sizes.V) put(kept + room.state(part, sizes, k, v0 + c), s);
            if (operand) put(operand + k * LINE + c, s);
        });
    }
    __device__ __forceinline__ void decays(const Decays& decay) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < 4 * WIDTH; ++i) x[tile][i / 4][i % 4] *= decay.x[tile][i % 4 / 2];
        }
    }
};

struct Between {
    const Kept *W, *Kb, *Qb;
    const T* decay;
};

// The matrices (CHUNK, ROWS) that a block multiplies with, tile by tile: a tile is fetched while the one before is multiplied,
// in registers, as the block has nothing else to do until it is there. Where numbers are too wide for registers they are
// brought when they are asked for.
struct Tiles {
#if TENSOR == 1
    enum { COUNT = Line<Kept>::COUNT, IN_LINE = CHUNK / COUNT, MINE = CHUNK * IN_LINE / THREADS };
    Line<Kept> next[MINE];
    __device__ __forceinline__ void fetch(const Kept* from) {
        if (!from) return;
#pragma unroll
        for (int n = 0; n < MINE; ++n) {
            const int i = n * THREADS + threadIdx.x;
            next[n] = *reinterpret_cast<const Line<Kept>*>(from + i64(i / IN_LINE) * ROWS + i % IN_LINE * COUNT);
        }
    }
    // What was fetched, into shared memory; then `after` is fetched.
    __device__ __forceinline__ void bring_next(Operand* stage, const Kept*, const Kept* after) {
        __syncthreads();
#pragma unroll
        for (int n = 0; n < MINE; ++n) {
            const int i = n * THREADS + threadIdx.x;
            put_line(stage + i / IN_LINE * STEP + i % IN_LINE * COUNT, next[n]);
        }
        __syncthreads();
        fetch(after);
    }
#else
    __device__ __forceinline__ void fetch(const Kept*) {}
    __device__ __forceinline__ void bring_next(Operand* stage, const Kept* now, const Kept*) {
        __syncthreads();
        bring<CHUNK>(stage, STEP, now, ROWS, CHUNK);
        __syncthreads();
    }
#endif
    // The tile behind number `tile` of a matrix: its next one, or what comes after the matrix.
    static __device__ __forceinline__ const Kept* behind(const Kept* m, int tile, const Kept* after) {
        return tile + 1 < TILES ? m + (tile + 1) * CHUNK : after;
    }
};

// sum += m S, for a matrix (CHUNK, ROWS); `after` is the matrix that is needed next, if there is one.
__device__ __forceinline__ void multiply_state(T (&sum)[WIDTH][4], Tiles& tiles, const Kept* m, const Kept* after,
                                               const Memory& memory) {
    for (int tile = 0; tile < TILES; ++tile) {
        tiles.bring_next(memory.stage, m + tile * CHUNK, Tiles::behind(m, tile, after));
        multiply<false, true>(sum, memory.stage + 16 * (threadIdx.x / 32) * STEP, STEP,
                              memory.state + tile * CHUNK * LINE, LINE, CHUNK);
    }
}
// state += m^T x, for a matrix (CHUNK, ROWS) and x (CHUNK, COLUMNS).
__device__ __forceinline__ void multiply_into_state(State& state, Tiles& tiles, const Kept* m, const Kept* after,
                                                    const Operand* x, const Memory& memory) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        tiles.bring_next(memory.stage, m + tile * CHUNK, Tiles::behind(m, tile, after));
        multiply<true, true>(state.x[tile], memory.stage + 16 * (threadIdx.x / 32), STEP, x, LINE, CHUNK);
    }
}

#if !BACKWARD
__device__ __forceinline__ void forward(const Inputs& x, const T* initial, const i64* bounds, const Sizes& sizes,
                                        const Room& room, const Between& between, Kept* updates, Kept* starts, T* final) {
    SHARED_MEMORY(bytes);
    const Memory memory(bytes);
    const Lane lane;
    const i64 blocks = (sizes.V + COLUMNS - 1) / COLUMNS, v0 = blockIdx.x % blocks * COLUMNS;
    Part part;
    part.local = blockIdx.x / blocks;
    for (i64 index = blockIdx.y; index < sizes.sequences; index += gridDim.y) {
        const Sequence sequence = sequence_at(bounds, index, sizes.time);
        const i64 begin = saved_at(bounds, sequence, index, sizes.time, CHUNK);
        State state;
        state.take(initial, index, sizes.head0 + part.local, v0, sizes);
        const Kept* first = between.W ? between.W : between.Kb;  // of a chunk
        const i64 next = sizes.heads * CHUNK * ROWS;              // from a chunk to the one behind it
        Tiles tiles;
        if (part.open(sequence, begin, 0, sizes)) tiles.fetch(first + part.place(sizes) * CHUNK * ROWS);
        for (i64 chunk = 0; part.open(sequence, begin, chunk, sizes); ++chunk) {
            const i64 at = part.place(sizes) * CHUNK * ROWS;
            const bool more = part.first + CHUNK < sequence.last;
            __syncthreads();
            state.keep(starts, between.W ? memory.state : nullptr, room, part, v0, sizes);
            const Decays decay(between.decay + part.place(sizes) * ROWS);
            T sum[WIDTH][4];  // W S - J y
#pragma unroll
            for (int i = 0; i < 4 * WIDTH; ++i) {
                const int token = 16 * lane.warp + lane.row_of(i % 4), c = lane.column_of(i % 4, i / 4);
                const bool there = token < part.tokens && v0 + c < sizes.V;
                sum[i / 4][i % 4] = there ? -updated(x, updates, room, part, sizes, token, v0 + c) : T(0);
            }
            if (between.W) multiply_state(sum, tiles, between.W + at, between.Kb + at, memory);
#pragma unroll
            for (int i = 0; i < 4 * WIDTH; ++i) {
                const int token = 16 * lane.warp + lane.row_of(i % 4), c = lane.column_of(i % 4, i / 4);
                T up = 0;
                if (token < part.tokens && v0 + c < sizes.V) {
                    up = -sum[i / 4][i % 4];
                    if (updates) put(updates + room.token(part, sizes, token, v0 + c), up);
                }
                put(memory.updates + token * LINE + c, up);
            }
            state.decays(decay);
            multiply_into_state(state, tiles, between.Kb + at, more ? first + at + next : nullptr, memory.updates, memory);
        }
        state.give(final, index, sizes.head0 + part.local, v0, sizes);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    delta_states(INPUTS, const T* initial, const i64* bounds, SIZES, const Kept* W, const Kept* Kb, const T* decays,
                 Kept* updates, Kept* starts, T* final) {
    forward(AS_INPUTS, initial, bounds, AS_SIZES, AS_ROOM, Between{W, Kb, nullptr, decays}, updates, starts, final);
}
#else
__device__ __forceinline__ void backward(const T* d_output, const T* d_final, const i64* bounds, const Sizes& sizes,
                                         const Room& room, const Between& between, Kept* d_updates, Kept* d_ends,
                                         T* d_state) {
    SHARED_MEMORY(bytes);
    const Memory memory(bytes);
    const Lane lane;
    const i64 blocks = (sizes.V + COLUMNS - 1) / COLUMNS, v0 = blockIdx.x % blocks * COLUMNS;
    Part part;
    part.local = blockIdx.x / blocks;
    for (i64 index = blockIdx.y; index < sizes.sequences; index += gridDim.y) {
        const Sequence sequence = sequence_at(bounds, index, sizes.time);
        const i64 begin = saved_at(bounds, sequence, index, sizes.time, CHUNK);
        State carry;
        carry.take(d_final, index, sizes.head0 + part.local, v0, sizes);
        const i64 chunks = (sequence.last - sequence.first + CHUNK - 1) / CHUNK;
        const i64 next = sizes.heads * CHUNK * ROWS;  // from a chunk to the one before it
        Tiles tiles;
        if (part.open(sequence, begin, chunks - 1, sizes)) tiles.fetch(between.Kb + part.place(sizes) * CHUNK * ROWS);
        for (i64 chunk = chunks - 1; chunk >= 0; --chunk) {
            part.open(sequence, begin, chunk, sizes);
            const i64 at = part.place(sizes) * CHUNK * ROWS;
            __syncthreads();
            carry.keep(d_ends, memory.state, room, part, v0, sizes);
            const Decays decay(between.decay + part.place(sizes) * ROWS);
            T sum[WIDTH][4];  // P^T dO + Kb dS
#pragma unroll
            for (int i = 0; i < 4 * WIDTH; ++i) {
                const int token = 16 * lane.warp + lane.row_of(i % 4), c = lane.column_of(i % 4, i / 4);
                const bool there = token < part.tokens && v0 + c < sizes.V;
                sum[i / 4][i % 4] = there ? load(d_updates + room.token(part, sizes, token, v0 + c)) : T(0);
            }
            const Kept* before = chunk > 0 ? between.Kb + at - next : nullptr;
            const Kept* last = between.W ? between.W + at : before;  // behind Qb
            multiply_state(sum, tiles, between.Kb + at, d_output ? between.Qb + at : last, memory);
#pragma unroll
            for (int i = 0; i < 4 * WIDTH; ++i) {
                const int token = 16 * lane.warp + lane.row_of(i % 4), c = lane.column_of(i % 4, i / 4);
                T d_up = 0, d_o = 0;
                if (token < part.tokens && v0 + c < sizes.V) {
                    d_up = sum[i / 4][i % 4];
                    put(d_updates + room.token(part, sizes, token, v0 + c), d_up);
                    d_o = Cotangent{d_output, part, sizes}(token, v0 + c);
                }
                put(memory.updates + token * LINE + c, -d_up), put(memory.d_output + token * LINE + c, d_o);
            }
            carry.decays(decay);
            if (d_output) multiply_into_state(carry, tiles, between.Qb + at, last, memory.d_output, memory);
            if (between.W) multiply_into_state(carry, tiles, between.W + at, before, memory.updates, memory);
        }
        if (d_state) carry.give(d_state, index, sizes.head0 + part.local, v0, sizes);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    delta_states_back(const T* d_output, const T* d_final, const i64* bounds, SIZES, const Kept* W, const Kept* Kb,
                      const Kept* Qb, const T* decays, Kept* d_updates, Kept* d_ends, T* d_state) {
    backward(d_output, d_final, bounds, AS_SIZES, AS_ROOM, Between{W, Kb, Qb, decays}, d_updates, d_ends, d_state);
}
#endif
