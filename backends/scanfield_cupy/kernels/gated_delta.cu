// The gated delta rule (Gated DeltaNet-2 and its family) token by token, and its gradient.
//
//   S' = exp(g_t) S_(t-1);   up_t = w_t v_t - e_t^T S';   S_t = S' + k_t up_t^T;   o_t = scale q_t^T S_t,   e_t = b_t k_t
//
// The columns of the state do not meet: a block takes COLUMNS of them for one sequence and value head, the state in
// registers. SHARE threads share COLS columns, PART rows each. q, k, e and exp(g) of a tile of tokens are brought into
// shared memory by all threads at once. A token's two sums over the rows are made together, the update still to come:
// o_t = q_t^T S' + (q_t . k_t) up_t, so that one wait serves both.
//
// Backward walks over chunks of CHUNK tokens from the last to the first. From the state that forward kept at a chunk's
// start the states at every MIDDLE tokens are made again into shared memory; with the saved updates this needs no sum.
// From those, the decayed states of HISTORY tokens are made into registers, and the gradient walks back through them:
//
//   dS = c + scale q do^T;   dq = scale S do;   dup = dS^T k;   dk = dS up;   dS' = dS - e dup^T;   de = -S' dup;
//   dg = sum_V dS' S';   c = exp(g) dS'
//
// Sums over columns are made over a block's here, over blocks and heads that share a key by who launched them, in a fixed
// order: no atomics, the same bits on every call.
//
// Reference: Gated DeltaNet-2, arXiv 2605.22791, equations 5 to 8.
// Compiled once for each STORED (the type of q, k, v and the gates in memory), PART, SHARE, COLS and BACKWARD (0 or 1: which
// kernel). Rows past the last one are guarded even where there is none: without a guard the compiler moves so many loads
// forward that registers run out.

#define THREADS 128

typedef Carry<STORED>::type T;

enum {
    ROWS = PART * SHARE,
    NEIGHBOURS = 32 / SHARE,  // groups of columns in a warp: lane = group + NEIGHBOURS * (place of the thread among the rows)
    WARPS = THREADS / 32,
    COLUMNS = THREADS / SHARE * COLS,
    TILE = 8,  // tokens that are brought at once, forward
    HISTORY = 2,
    MIDDLE = 8,
    CHUNK = 64,
};

struct Given {
    const STORED* at;
    i64 row, time, head, channel;
    i64 width;  // 1: one number for all channels
    __device__ __forceinline__ T operator()(i64 r, i64 t, i64 h, i64 c) const {
        return load(at + r * row + t * time + h * head + c * channel);
    }
};
struct Inputs {
    Given query, key, value, decay, erase, write;
    T scale;
    i64 erase_vector;  // erase holds e itself
};
struct Sizes {
    i64 sequences, time, vheads, group, K, V, column_blocks, head0;  // head0: the first head of this launch
};

struct Place {
    int lane, warp, share, group, n0, column;  // column: the thread's first in the block
    i64 head, key_head, first;                 // first: the block's first column
    __device__ __forceinline__ Place(const Sizes& sizes) {
        lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        share = lane / NEIGHBOURS, group = warp * NEIGHBOURS + lane % NEIGHBOURS;
        n0 = share * PART, column = group * COLS;
        first = blockIdx.x % sizes.column_blocks * COLUMNS;
        head = sizes.head0 + blockIdx.x / sizes.column_blocks, key_head = head / sizes.group;
    }
};

__device__ __forceinline__ bool row_exists(int n, i64 K) { return n < K; }

// Of a tile: vectors over the rows, and over the block's columns.
struct Shared {
    T *decay, *e, *q, *k;  // (TILE, ROWS)
    T *y, *output;         // (TILE, COLUMNS): w v or the update; output, or backward the gradient of the update
    T* update;             // (TILE, COLUMNS), forward
    T* qk;                 // (TILE)
    T *d_output, *middle, *sums;
    __device__ __forceinline__ Shared(unsigned char* memory, int tokens, bool backward) {
        T* next = reinterpret_cast<T*>(memory);
        decay = next, next += tokens * ROWS;
        e = next, next += tokens * ROWS;
        q = next, next += tokens * ROWS;
        k = next, next += tokens * ROWS;
        y = next, next += tokens * COLUMNS;
        output = next, next += tokens * COLUMNS;
        qk = next, next += tokens;
        update = next;
        if (backward) {
            d_output = next, next += tokens * COLUMNS;
            middle = next, next += CHUNK / MIDDLE * PART * COLS * THREADS;  // (CHUNK / MIDDLE, PART * COLS, THREADS)
            sums = next;                                                    // (WARPS, HISTORY, 4, ROWS)
        }
    }
};

__device__ __forceinline__ void bring_rows(const Shared& shared, const Inputs& x, const Place& place, i64 row, i64 t0,
                                           int tokens, i64 K) {
    for (int i = threadIdx.x; i < tokens * ROWS; i += THREADS) {
        const int n = i % ROWS;
        const i64 t = t0 + i / ROWS;
        T decay = 1, e = 0, q = 0, k = 0;
        if (row_exists(n, K)) {
            q = x.scale * x.query(row, t, place.key_head, n), k = x.key(row, t, place.key_head, n);
            if (x.decay.at) decay = exponential(x.decay(row, t, place.head, x.decay.width == 1 ? 0 : n));
            if (x.erase.at) {
                e = x.erase(row, t, place.head, x.erase.width == 1 ? 0 : n);
                if (!x.erase_vector) e *= k;
            }
        }
        shared.decay[i] = decay, shared.e[i] = e, shared.q[i] = q, shared.k[i] = k;
    }
}
// w v, or the update where that is saved.
__device__ __forceinline__ void bring_columns(const Shared& shared, const Inputs& x, const T* updates, const Place& place,
                                              i64 row, i64 t0, int tokens, const Sizes& sizes) {
    for (int i = threadIdx.x; i < tokens * COLUMNS; i += THREADS) {
        const i64 v = place.first + i % COLUMNS, t = t0 + i / COLUMNS;
        T y = 0;
        if (v < sizes.V) {
            if (updates) {
                y = updates[((row * sizes.time + t) * sizes.vheads + place.head) * sizes.V + v];
            } else {
                y = x.value(row, t, place.head, v);
                if (x.write.at) y *= x.write(row, t, place.head, x.write.width == 1 ? 0 : v);
            }
        }
        shared.y[i] = y;
    }
}

struct State {
    T s[PART][COLS];
    __device__ __forceinline__ void take(const T* from, i64 index, const Place& place, const Sizes& sizes) {
        const i64 at = (index * sizes.vheads + place.head) * sizes.K;
#pragma unroll
        for (int j = 0; j < PART; ++j) {
#pragma unroll
            for (int c = 0; c < COLS; ++c) {
                const i64 v = place.first + place.column + c;
                const bool there = from && row_exists(place.n0 + j, sizes.K) && v < sizes.V;
                s[j][c] = there ? from[(at + place.n0 + j) * sizes.V + v] : T(0);
            }
        }
    }
    __device__ __forceinline__ void give(T* to, i64 index, const Place& place, const Sizes& sizes) const {
        const i64 at = (index * sizes.vheads + place.head) * sizes.K;
#pragma unroll
        for (int j = 0; j < PART; ++j) {
#pragma unroll
            for (int c = 0; c < COLS; ++c) {
                const i64 v = place.first + place.column + c;
                if (row_exists(place.n0 + j, sizes.K) && v < sizes.V) to[(at + place.n0 + j) * sizes.V + v] = s[j][c];
            }
        }
    }
};

__device__ __forceinline__ T over_rows(T x) {
#pragma unroll
    for (int turned = NEIGHBOURS; turned < 32; turned *= 2) x += from_lane(x, turned);
    return x;
}

__device__ __forceinline__ void forward(const Inputs& x, const T* initial, const i64* bounds, const Sizes& sizes,
                                        STORED* output, T* final, T* starts, T* updates) {
    SHARED_MEMORY(memory);
    const Shared shared(memory, TILE, false);
    const Place place(sizes);
    for (i64 index = blockIdx.y; index < sizes.sequences; index += gridDim.y) {
        const Sequence sequence = sequence_at(bounds, index, sizes.time);
        const i64 saved = saved_at(bounds, sequence, index, sizes.time, CHUNK);
        State state;
        state.take(initial, index, place, sizes);
        for (i64 t0 = sequence.first; t0 < sequence.last; t0 += TILE) {
            const int tokens = int(min(sequence.last - t0, i64(TILE)));
            if (starts && (t0 - sequence.first) % CHUNK == 0) {
                state.give(starts, saved + (t0 - sequence.first) / CHUNK, place, sizes);
            }
            bring_rows(shared, x, place, sequence.row, t0, tokens, sizes.K);
            bring_columns(shared, x, nullptr, place, sequence.row, t0, tokens, sizes);
            __syncthreads();
            for (int token = place.warp; token < tokens; token += WARPS) {
                T product = 0;
                for (int n = place.lane; n < ROWS; n += 32) product += shared.q[token * ROWS + n] * shared.k[token * ROWS + n];
                for (int turned = 1; turned < 32; turned *= 2) product += from_lane(product, turned);
                if (place.lane == 0) shared.qk[token] = product;
            }
            __syncthreads();
            for (int token = 0; token < tokens; ++token) {
                const T* decay = shared.decay + token * ROWS + place.n0;
                const T* e = shared.e + token * ROWS + place.n0;
                const T* q = shared.q + token * ROWS + place.n0;
                const T* k = shared.k + token * ROWS + place.n0;
                T found[COLS], read[COLS];
#pragma unroll
                for (int c = 0; c < COLS; ++c) found[c] = read[c] = 0;
#pragma unroll
                for (int j = 0; j < PART; ++j) {
                    if (!row_exists(place.n0 + j, sizes.K)) continue;
#pragma unroll
                    for (int c = 0; c < COLS; ++c) {
                        if (x.decay.at) state.s[j][c] *= decay[j];
                        found[c] += e[j] * state.s[j][c];
                        read[c] += q[j] * state.s[j][c];
                    }
                }
#pragma unroll
                for (int c = 0; c < COLS; ++c) {
                    const int at = token * COLUMNS + place.column + c;
                    T up = shared.y[at];
                    if (x.erase.at) up -= over_rows(found[c]);
                    const T o = over_rows(read[c]) + shared.qk[token] * up;
#pragma unroll
                    for (int j = 0; j < PART; ++j) {
                        if (row_exists(place.n0 + j, sizes.K)) state.s[j][c] += k[j] * up;
                    }
                    if (place.share == 0) {
                        shared.output[at] = o;
                        if (updates) shared.update[at] = up;
                    }
                }
            }
            __syncthreads();
            for (int i = threadIdx.x; i < tokens * COLUMNS; i += THREADS) {
                const i64 v = place.first + i % COLUMNS, t = t0 + i / COLUMNS;
                if (v >= sizes.V) continue;
                const i64 at = ((sequence.row * sizes.time + t) * sizes.vheads + place.head) * sizes.V + v;
                store(output + at, shared.output[i]);
                if (updates) updates[at] = shared.update[i];
            }
            __syncthreads();
        }
        state.give(final, index, place, sizes);
    }
}

// Where the gradients go: over (blocks of columns, batch, time, heads of this launch, K) those of q, k, erase and decay, to
// be summed over blocks; over (batch, time, value heads, V) those of value and write.
struct Gradients {
    T *query, *key, *decay, *erase, *value, *write, *state;
};

// The state moves on by one token whose update is known.
__device__ __forceinline__ void advance(State& state, const Shared& shared, const Place& place, bool decays, int token,
                                        i64 K) {
    const T* decay = shared.decay + token * ROWS + place.n0;
    const T* k = shared.k + token * ROWS + place.n0;
#pragma unroll
    for (int j = 0; j < PART; ++j) {
        if (!row_exists(place.n0 + j, K)) continue;
#pragma unroll
        for (int c = 0; c < COLS; ++c) {
            const T kept = decays ? decay[j] * state.s[j][c] : state.s[j][c];
            state.s[j][c] = kept + k[j] * shared.y[token * COLUMNS + place.column + c];
        }
    }
}

// A warp's sums over its columns, of two gradients of PART rows each, to where the block's are made: those number `which`
// and `which` + 1 of q, k, e, g.
__device__ __forceinline__ void over_columns(T* values, T* sums, const Place& place, int token, int which) {
    enum { LEFT = 2 * PART / NEIGHBOURS };  // 2 PART is never less than NEIGHBOURS
    int first = 0;
    SumOverLanes<NEIGHBOURS, 2 * PART, T>::run(values, place.lane % NEIGHBOURS, first);
#pragma unroll
    for (int n = 0; n < LEFT; ++n) {
        const int gradient = which + (first + n) / PART, row = place.n0 + (first + n) % PART;
        sums[((place.warp * HISTORY + token) * 4 + gradient) * ROWS + row] = values[n];
    }
}

__device__ __forceinline__ void backward(const Inputs& x, const T* starts, const T* updates, const T* d_output,
                                         const T* d_final, const i64* bounds, const Sizes& sizes, const Gradients& to,
                                         i64 rows, i64 heads) {
    SHARED_MEMORY(memory);
    const Shared shared(memory, MIDDLE, true);
    const Place place(sizes);
    const i64 block = blockIdx.x % sizes.column_blocks;
    const bool sums_columns = to.query || to.key || to.erase || to.decay;
    for (i64 index = blockIdx.y; index < sizes.sequences; index += gridDim.y) {
        const Sequence sequence = sequence_at(bounds, index, sizes.time);
        const i64 saved = saved_at(bounds, sequence, index, sizes.time, CHUNK);
        State carry;
        carry.take(d_final, index, place, sizes);
        const i64 chunks = (sequence.last - sequence.first + CHUNK - 1) / CHUNK;
        for (i64 chunk = chunks - 1; chunk >= 0; --chunk) {
            const i64 begin = sequence.first + chunk * CHUNK, end = min(sequence.last, begin + CHUNK);
            const int middles = int((end - begin + MIDDLE - 1) / MIDDLE);
            State state;
            state.take(starts, saved + chunk, place, sizes);
            for (int m = 0; m < middles; ++m) {
#pragma unroll
                for (int i = 0; i < PART * COLS; ++i) {
                    shared.middle[(m * PART * COLS + i) * THREADS + threadIdx.x] = state.s[i / COLS][i % COLS];
                }
                if (m == middles - 1) break;
                __syncthreads();
                bring_rows(shared, x, place, sequence.row, begin + m * MIDDLE, MIDDLE, sizes.K);
                bring_columns(shared, x, updates, place, sequence.row, begin + m * MIDDLE, MIDDLE, sizes);
                __syncthreads();
                for (int token = 0; token < MIDDLE; ++token) {
                    advance(state, shared, place, x.decay.at != nullptr, token, sizes.K);
                }
            }
            for (int m = middles - 1; m >= 0; --m) {
                const i64 t0 = begin + m * MIDDLE;
                const int tokens = int(min(end - t0, i64(MIDDLE)));
                __syncthreads();
                bring_rows(shared, x, place, sequence.row, t0, tokens, sizes.K);
                bring_columns(shared, x, updates, place, sequence.row, t0, tokens, sizes);
                for (int i = threadIdx.x; i < tokens * COLUMNS; i += THREADS) {
                    const i64 v = place.first + i % COLUMNS, t = t0 + i / COLUMNS;
                    const i64 at = ((sequence.row * sizes.time + t) * sizes.vheads + place.head) * sizes.V + v;
                    shared.d_output[i] = d_output && v < sizes.V ? d_output[at] : T(0);
                }
                __syncthreads();
                for (int h0 = (tokens - 1) / HISTORY * HISTORY; h0 >= 0; h0 -= HISTORY) {
                    T before[HISTORY][PART][COLS];  // S' of each token
#pragma unroll
                    for (int i = 0; i < PART * COLS; ++i) {
                        state.s[i / COLS][i % COLS] = shared.middle[(m * PART * COLS + i) * THREADS + threadIdx.x];
                    }
                    for (int token = 0; token < h0; ++token) {
                        advance(state, shared, place, x.decay.at != nullptr, token, sizes.K);
                    }
#pragma unroll
                    for (int i = 0; i < HISTORY; ++i) {
                        const int token = h0 + i;
                        if (token >= tokens) continue;
#pragma unroll
                        for (int j = 0; j < PART; ++j) {
#pragma unroll
                            for (int c = 0; c < COLS; ++c) {
                                const T decay = shared.decay[token * ROWS + place.n0 + j];
                                before[i][j][c] = x.decay.at ? decay * state.s[j][c] : state.s[j][c];
                            }
                        }
                        advance(state, shared, place, x.decay.at != nullptr, token, sizes.K);
                    }
#pragma unroll
                    for (int i = HISTORY - 1; i >= 0; --i) {
                        const int token = h0 + i;
                        if (token >= tokens) continue;
                        const int row = token * ROWS + place.n0, column = token * COLUMNS + place.column;
                        T sums[2 * PART], d_up[COLS];
#pragma unroll
                        for (int c = 0; c < COLS; ++c) d_up[c] = 0;
#pragma unroll
                        for (int j = 0; j < PART; ++j) {
                            T d_q = 0, d_k = 0;
                            if (row_exists(place.n0 + j, sizes.K)) {
#pragma unroll
                                for (int c = 0; c < COLS; ++c) {
                                    const T d_o = shared.d_output[column + c], up = shared.y[column + c];
                                    carry.s[j][c] += shared.q[row + j] * d_o;
                                    d_up[c] += shared.k[row + j] * carry.s[j][c];
                                    d_q += (before[i][j][c] + shared.k[row + j] * up) * d_o;
                                    d_k += carry.s[j][c] * up;
                                }
                            }
                            sums[j] = d_q, sums[PART + j] = d_k;
                        }
                        if (sums_columns) over_columns(sums, shared.sums, place, i, 0);
#pragma unroll
                        for (int c = 0; c < COLS; ++c) {
                            d_up[c] = over_rows(d_up[c]);
                            if (place.share == 0) shared.output[column + c] = d_up[c];
                        }
#pragma unroll
                        for (int j = 0; j < PART; ++j) {
                            T d_e = 0, d_g = 0;
                            if (row_exists(place.n0 + j, sizes.K)) {
#pragma unroll
                                for (int c = 0; c < COLS; ++c) {
                                    if (x.erase.at) carry.s[j][c] -= shared.e[row + j] * d_up[c];
                                    d_e -= before[i][j][c] * d_up[c];
                                    d_g += carry.s[j][c] * before[i][j][c];
                                    if (x.decay.at) carry.s[j][c] *= shared.decay[row + j];
                                }
                            }
                            sums[j] = d_e, sums[PART + j] = d_g;
                        }
                        if (sums_columns) over_columns(sums, shared.sums, place, i, 2);
                    }
                    __syncthreads();
                    const int now = min(tokens - h0, int(HISTORY));
                    for (int i = threadIdx.x; sums_columns && i < now * ROWS; i += THREADS) {
                        const int n = i % ROWS, token = i / ROWS;
                        if (!row_exists(n, sizes.K)) continue;
                        T total[4] = {0, 0, 0, 0};
                        for (int w = 0; w < WARPS; ++w) {
#pragma unroll
                            for (int which = 0; which < 4; ++which) {
                                total[which] += shared.sums[((w * HISTORY + token) * 4 + which) * ROWS + n];
                            }
                        }
                        const i64 t = t0 + h0 + token;
                        const i64 at =
                            (((block * rows + sequence.row) * sizes.time + t) * heads + place.head - sizes.head0) * sizes.K + n;
                        T d_k = total[1], d_e = total[2];
                        if (x.erase.at && !x.erase_vector) {
                            d_k += d_e * x.erase(sequence.row, t, place.head, x.erase.width == 1 ? 0 : n);
                            d_e *= shared.k[(h0 + token) * ROWS + n];
                        }
                        if (to.query) to.query[at] = x.scale * total[0];
                        if (to.key) to.key[at] = d_k;
                        if (to.erase) to.erase[at] = d_e;
                        if (to.decay) to.decay[at] = total[3];
                    }
                    __syncthreads();
                }
                for (int i = threadIdx.x; i < tokens * COLUMNS; i += THREADS) {
                    const i64 v = place.first + i % COLUMNS, t = t0 + i / COLUMNS;
                    if (v >= sizes.V) continue;
                    const i64 at = ((sequence.row * sizes.time + t) * sizes.vheads + place.head) * sizes.V + v;
                    T d_y = shared.output[i];
                    if (to.write) to.write[at] = d_y * x.value(sequence.row, t, place.head, v);
                    if (x.write.at) d_y *= x.write(sequence.row, t, place.head, x.write.width == 1 ? 0 : v);
                    if (to.value) to.value[at] = d_y;
                }
            }
        }
        if (to.state) carry.give(to.state, index, place, sizes);
        __syncthreads();
    }
}

#define GIVEN(x) const STORED *x, i64 x##_row, i64 x##_time, i64 x##_head, i64 x##_channel, i64 x##_width
#define AS_GIVEN(x) Given{x, x##_row, x##_time, x##_head, x##_channel, x##_width}
#define INPUTS                                                                                                         \
    GIVEN(query), GIVEN(key), GIVEN(value), GIVEN(decay), GIVEN(erase), GIVEN(write), T scale, i64 erase_vector
#define AS_INPUTS                                                                                                      \
    Inputs {                                                                                                           \
        AS_GIVEN(query), AS_GIVEN(key), AS_GIVEN(value), AS_GIVEN(decay), AS_GIVEN(erase), AS_GIVEN(write), scale,     \
            erase_vector                                                                                               \
    }
#define SIZES i64 sequences, i64 time, i64 vheads, i64 group, i64 K, i64 V, i64 column_blocks, i64 head0
#define AS_SIZES                                                                                                       \
    Sizes { sequences, time, vheads, group, K, V, column_blocks, head0 }

#if !BACKWARD
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    delta_forward(INPUTS, const T* initial, const i64* bounds, SIZES, STORED* output, T* final, T* starts, T* updates) {
    forward(AS_INPUTS, initial, bounds, AS_SIZES, output, final, starts, updates);
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    delta_backward(INPUTS, const T* starts, const T* updates, const T* d_output, const T* d_final, const i64* bounds, SIZES,
                   T* d_query, T* d_key, T* d_decay, T* d_erase, T* d_value, T* d_write, T* d_state, i64 rows, i64 heads) {
    backward(AS_INPUTS, starts, updates, d_output, d_final, bounds, AS_SIZES,
             Gradients{d_query, d_key, d_decay, d_erase, d_value, d_write, d_state}, rows, heads);
}
#endif
