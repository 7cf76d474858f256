// Mamba's selective scan and its gradient.
//
//   h_t = exp(s_t A) h_(t-1) + s_t u_t B_t;   r_t = f Re sum_n C_t h_t;   q_t = r_t + D u_t;   out_t = q_t z_t sigmoid(z_t)
//
// with s_t = clamp(softplus(delta_t + bias)) and f = 2 for complex A, else 1.
//
// A block takes CHANNELS = THREADS / SHARE channels of one sequence. SHARE threads share a channel, PART of its states
// each, in registers. Time goes by in tiles of TILE tokens: their steps, inputs, B and C are brought into shared memory by
// all threads at once, so that a softplus or a load is done once for a channel. Long sequences of few channels are cut
// into segments, a block each, whose maps (the sum of the steps, the state from zero) come first (`summary`).
//
// Backward walks over chunks of CHUNK tokens from the last to the first. From the state that forward kept at a chunk's
// start it walks forward once for the states at the tiles' starts, then over the tiles from last to first: a tile's
// decays and states are computed once more, into registers, and the gradient walks back through them:
//
//   G = c + f conj(C_t) dr_t;   dC_t = f dr_t conj(h_t);   dB_t = s_t u_t G;   dx_t = Re sum conj(B_t) G;
//   W = G conj(exp(s_t A) h_(t-1));   dA = sum s_t W;   ds_t = u_t dx_t + Re sum conj(A) W;   c = conj(exp(s_t A)) G
//
// B's and C's gradients are summed over a block's channels here, over blocks by who launched them, in a fixed order: no
// atomics, the same bits on every call. Nothing is divided by a decay.
//
// References: Gu and Dao, "Mamba", arXiv 2312.00752, equation 2 and algorithm 2.
// Compiled once for each INPUT (the type of u, delta and z in memory), VECTOR (of B and C), STATE, PART and SHARE.

#define THREADS 128

typedef STATE T;
typedef Real<T>::type R;

enum {
    CHANNELS = THREADS / SHARE,
    STATES = PART * SHARE,
    WORDS = sizeof(T) / 4,
    FITS = 32 / (PART * WORDS),  // tokens whose states and decays a thread's registers hold
    TILE = FITS > 8 ? 8 : FITS,
    CHUNK = 32,  // tokens between two saved states
    TILES = CHUNK / TILE,
    NEIGHBOURS = 32 / SHARE,  // channels of a warp: lane = channel + NEIGHBOURS * (place of the thread in the channel)
    WARPS = THREADS / 32,
};

// ---- real and complex models --------------------------------------------------------------------------------------------

template <class S>
struct Model {  // real: A is carried as A log2(e), since a power of 2 is the cheaper exponential
    enum { FACTOR = 1 };
    static __device__ __forceinline__ S per_rate() { return S(0.6931471805599453); }  // A / rate
    static __device__ __forceinline__ S rate(S a) {
        const S most = sizeof(S) == 4 ? S(3.4028234e38) : S(1.7976931348623157e308);
        const S scaled = a * S(1.4426950408889634);
        return scaled > most ? most : scaled < -most ? -most : scaled;  // a finite number stays finite
    }
    static __device__ __forceinline__ S decay(S s, S rate) { return power_of_2(s * rate); }
};
__device__ __forceinline__ void sine_cosine(float x, float* s, float* c) { sincosf(x, s, c); }
__device__ __forceinline__ void sine_cosine(double x, double* s, double* c) { sincos(x, s, c); }
template <class S>
struct Model<Complex<S>> {
    enum { FACTOR = 2 };
    static __device__ __forceinline__ S per_rate() { return 1; }
    static __device__ __forceinline__ Complex<S> rate(Complex<S> a) { return a; }
    static __device__ __forceinline__ Complex<S> decay(S s, Complex<S> rate) {
        S sine, cosine;
        sine_cosine(s * rate.im, &sine, &cosine);
        const S size = exponential(s * rate.re);
        return {size * cosine, size * sine};
    }
};
__device__ __forceinline__ R real_part(R x) { return x; }
__device__ __forceinline__ R real_part(Complex<R> x) { return x.re; }
__device__ __forceinline__ R scaled(R s, R x) { return s * x; }
__device__ __forceinline__ Complex<R> scaled(R s, Complex<R> x) { return {s * x.re, s * x.im}; }
__device__ __forceinline__ R carried(R x, R) { return x; }
__device__ __forceinline__ Complex<R> carried(Complex<R> x, Complex<R>) { return x; }

// ---- arrays as they lie -------------------------------------------------------------------------------------------------

struct Rows {  // u, delta, z
    const INPUT* at;
    i64 row, time, channel;
    __device__ __forceinline__ R operator()(i64 r, i64 t, i64 c) const { return load(at + r * row + t * time + c * channel); }
};
struct Vectors {  // B, C
    const VECTOR* at;
    i64 row, time, group, state, per_group;  // per_group: channels that share a vector
    i64 own;                                 // 1: a vector for each channel that time does not change
    __device__ __forceinline__ T operator()(i64 r, i64 t, i64 g, i64 n) const {
        return load(at + r * row + t * time + g * group + n * state);
    }
};

struct Steps {
    const R* bias;
    R low, high;
    i64 use_softplus;
    __device__ __forceinline__ R raw(R delta, i64 c) const { return bias ? delta + bias[c] : delta; }
    __device__ __forceinline__ R unclamped(R raw) const { return use_softplus ? softplus(raw) : raw; }
    __device__ __forceinline__ R size(R raw) const {
        const R s = unclamped(raw);
        return s < low ? low : s > high ? high : s;
    }
    __device__ __forceinline__ R back(R raw, R d_s) const {
        const R s = unclamped(raw);
        const bool limited = low - low == 0 || high - high == 0;  // without limits a NaN goes its way
        if (limited && !(s >= low && s <= high)) d_s = 0;
        return use_softplus ? d_s * sigmoid(raw) : d_s;
    }
};

struct Sizes {
    i64 sequences, time, channels, states, unit, blocks_per_unit, channel_blocks, segment_tokens, segments;
};

// What a block works on, and where its thread stands.
struct Place {
    int channel, share, warp, lane;  // of the block; the thread's part of the channel's states
    i64 block, segment, first, count, group_block;
    i64 c;
    bool exists;
    __device__ __forceinline__ Place(const Sizes& sizes) {
        lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        channel = warp * NEIGHBOURS + lane % NEIGHBOURS, share = lane / NEIGHBOURS;
        block = blockIdx.x % sizes.channel_blocks, segment = blockIdx.x / sizes.channel_blocks;
        const i64 unit = block / sizes.blocks_per_unit, part = block % sizes.blocks_per_unit;
        first = unit * sizes.unit + part * CHANNELS;
        count = min(i64(CHANNELS), (unit + 1) * sizes.unit - first);
        c = first + channel;
        exists = channel < count;
    }
};

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

// Where the gradients go. Those of A, D and bias are sums over tokens: a part for each sequence and segment. Those of B and
// C are sums over channels: for a vector that tokens share a part for each block of its group, else like A's.
struct Gradients {
    R *u, *delta, *z;
    T *A, *B, *C;
    R *D, *bias;
    T* state;
};

__device__ __forceinline__ void give_vector_sums(T* to, const Vectors& vectors, const T* sums, int which, const Place& place,
                                                 const Sizes& sizes, i64 rows, i64 row, i64 t0, int tokens) {
    const i64 blocks = vectors.per_group / sizes.unit * sizes.blocks_per_unit;
    const i64 groups = sizes.channels / vectors.per_group, group = place.first / vectors.per_group;
    for (int i = threadIdx.x; i < tokens * STATES; i += THREADS) {
        const int token = i / STATES, n = i % STATES;
        if (n >= sizes.states) continue;
        T total = number<T>(0);
        for (int w = 0; w < WARPS; ++w) total = total + sums[((w * TILE + token) * 2 + which) * STATES + n];
        const i64 part = place.block % blocks;
        to[(((part * rows + row) * sizes.time + t0 + token) * groups + group) * sizes.states + n] = total;
    }
}

__device__ __forceinline__ void backward(const Rows& u, const Rows& delta, const Rows& z, const T* A, const Vectors& B,
                                         const Vectors& C, const R* D, const Steps& steps, const T* starts,
                                         const R* d_output, const T* d_final, const i64* bounds, const Sizes& sizes,
                                         const R* step_sums, const T* states, const int* wild, const Gradients& to,
                                         i64 rows) {
    SHARED_MEMORY(memory);
    const Shared shared(memory, true);
    const Place place(sizes);
    const bool sums_b = to.B && !B.own, sums_c = to.C && !C.own;
    for (i64 s = blockIdx.y; s < sizes.sequences; s += gridDim.y) {
        const Sequence sequence = sequence_at(bounds, s, sizes.time);
        // The map of segment k is number k - 1.
        const i64 own = place.segment, from = sequence.first + own * sizes.segment_tokens;
        const i64 end = min(sequence.last, from + sizes.segment_tokens);
        if (own > 0 && from >= sequence.last) continue;
        if (any_wild(wild, s, own, sizes.segments - 1, sizes, place.block)) continue;
        const bool alone = own > 0 && any_wild(wild, s, own - 1, own, sizes, place.block);
        const i64 begin = alone ? sequence.first : from;
        Part part(A, place, sizes.states);
        part.take(d_final, s, place, sizes);
        through_segments<true>(part, step_sums, states, s, place, sizes);
        T c[PART], d_A[PART], d_b[PART], d_c[PART];
#pragma unroll
        for (int j = 0; j < PART; ++j) c[j] = part.h[j], d_A[j] = d_b[j] = d_c[j] = number<T>(0);
        R d_D = 0, d_bias = 0;  // of channel threadIdx.x % CHANNELS
        const i64 saved = saved_at(bounds, sequence, s, sizes.time, CHUNK);
        __syncthreads();
        if (B.own) bring_own_vectors(shared.b, B, place, sequence.row, sizes.states);
        if (C.own) bring_own_vectors(shared.c, C, place, sequence.row, sizes.states);
        for (i64 chunk = (end - begin + CHUNK - 1) / CHUNK - 1; chunk >= 0; --chunk) {
            const i64 chunk_begin = begin + chunk * CHUNK, chunk_end = min(end, chunk_begin + CHUNK);
            const int tiles = int((chunk_end - chunk_begin + TILE - 1) / TILE);
            part.take(starts, saved + (chunk_begin - sequence.first) / CHUNK, place, sizes);
            for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
                for (int j = 0; j < PART; ++j) shared.kept[(tile * PART + j) * THREADS + threadIdx.x] = part.h[j];
                if (tile == tiles - 1) break;
                const i64 t0 = chunk_begin + tile * TILE;
                __syncthreads();
                bring_steps(shared, u, delta, steps, place, sequence.row, t0, TILE);
                if (!B.own) bring_vectors(shared.b, B, place, sequence.row, t0, TILE, sizes.states);
                __syncthreads();
                for (int token = 0; token < TILE; ++token) {
                    const int at = token * CHANNELS + place.channel;
                    const R step = shared.step[at], x = step * shared.u[at];
                    const T* b = vector_at(shared.b, B.own, place, token);
#pragma unroll
                    for (int j = 0; j < PART; ++j) {
                        if (part.has(j)) part.h[j] = Model<T>::decay(step, part.rate[j]) * part.h[j] + scaled(x, b[j]);
                    }
                }
            }
            for (int tile = tiles - 1; tile >= 0; --tile) {
                const i64 t0 = chunk_begin + tile * TILE;
                const int tokens = int(min(chunk_end - t0, i64(TILE)));
                __syncthreads();
                bring_steps(shared, u, delta, steps, place, sequence.row, t0, tokens);
                bring_back(shared, d_output, z, place, sequence.row, t0, tokens, sizes);
                if (!B.own) bring_vectors(shared.b, B, place, sequence.row, t0, tokens, sizes.states);
                if (!C.own) bring_vectors(shared.c, C, place, sequence.row, t0, tokens, sizes.states);
                __syncthreads();
                T decay[TILE][PART], before[TILE][PART];  // before: the decayed state that a token meets
#pragma unroll
                for (int j = 0; j < PART; ++j) part.h[j] = shared.kept[(tile * PART + j) * THREADS + threadIdx.x];
#pragma unroll
                for (int token = 0; token < TILE; ++token) {
                    if (token >= tokens) continue;
                    const int at = token * CHANNELS + place.channel;
                    const R step = shared.step[at], x = step * shared.u[at];
                    const T* b = vector_at(shared.b, B.own, place, token);
#pragma unroll
                    for (int j = 0; j < PART; ++j) {
                        if (!part.has(j)) continue;
                        decay[token][j] = Model<T>::decay(step, part.rate[j]);
                        before[token][j] = decay[token][j] * part.h[j];
                        part.h[j] = before[token][j] + scaled(x, b[j]);
                    }
                }
#pragma unroll
                for (int token = TILE - 1; token >= 0; --token) {
                    if (token >= tokens) continue;
                    const int at = token * CHANNELS + place.channel;
                    const R step = shared.step[at], x = step * shared.u[at];
                    const R d_read = Model<T>::FACTOR * shared.read[at];
                    const T* b = vector_at(shared.b, B.own, place, token);
                    const T* read_by = vector_at(shared.c, C.own, place, token);
                    T sums[2 * PART];
                    R d_x = 0, d_step = 0, read = 0;
#pragma unroll
                    for (int j = 0; j < PART; ++j) {
                        sums[j] = sums[PART + j] = number<T>(0);
                        if (!part.has(j)) continue;
                        const T h = before[token][j] + scaled(x, b[j]);
                        const T g = c[j] + scaled(d_read, conj(read_by[j]));
                        const T w = g * conj(before[token][j]);
                        const T from_b = scaled(x, g), from_c = scaled(d_read, conj(h));
                        if (B.own) d_b[j] = d_b[j] + from_b;
                        if (C.own) d_c[j] = d_c[j] + from_c;
                        sums[j] = from_b, sums[PART + j] = from_c;
                        d_x += real_part(g * conj(b[j]));
                        d_step += real_part(w * conj(part.rate[j]));
                        read += real_part(read_by[j] * h);
                        d_A[j] = d_A[j] + scaled(step, w);
                        c[j] = conj(decay[token][j]) * g;
                    }
                    d_x = over_shares(d_x), d_step = over_shares(d_step) * Model<T>::per_rate();
                    if (to.z) read = over_shares(read);
                    if (place.share == 0) {
                        shared.back_x[at] = d_x, shared.back_s[at] = d_step;
                        shared.again[at] = Model<T>::FACTOR * read;
                    }
                    if (sums_b || sums_c) {
                        enum { LEFT = 2 * PART > NEIGHBOURS ? 2 * PART / NEIGHBOURS : 1 };
                        enum { SAME = NEIGHBOURS > 2 * PART ? NEIGHBOURS / (2 * PART) : 1 };
                        int first = 0;
                        SumOverLanes<NEIGHBOURS, 2 * PART, T>::run(sums, place.lane % NEIGHBOURS, first);
                        if (place.lane % SAME == 0) {
#pragma unroll
                            for (int i = 0; i < LEFT; ++i) {
                                const int which = (first + i) / PART, n = place.share * PART + (first + i) % PART;
                                shared.sums[((place.warp * TILE + token) * 2 + which) * STATES + n] = sums[i];
                            }
                        }
                    }
                }
                __syncthreads();
                if (sums_b) give_vector_sums(to.B, B, shared.sums, 0, place, sizes, rows, sequence.row, t0, tokens);
                if (sums_c) give_vector_sums(to.C, C, shared.sums, 1, place, sizes, rows, sequence.row, t0, tokens);
                for (int i = threadIdx.x; i < tokens * CHANNELS; i += THREADS) {
                    if (i % CHANNELS >= place.count) continue;
                    const i64 channel = place.first + i % CHANNELS, t = t0 + i / CHANNELS;
                    const i64 where = (sequence.row * sizes.time + t) * sizes.channels + channel;
                    const R d_x = shared.back_x[i], d_q = shared.read[i], skip = D ? D[channel] : R(0);
                    if (to.u) to.u[where] = shared.step[i] * d_x + (D ? skip * d_q : R(0));
                    if (to.delta || to.bias) {
                        const R raw = steps.raw(delta(sequence.row, t, channel), channel);
                        const R d_raw = steps.back(raw, shared.u[i] * d_x + shared.back_s[i]);
                        if (to.delta) to.delta[where] = d_raw;
                        d_bias += d_raw;
                    }
                    d_D += d_q * shared.u[i];
                    if (to.z) {
                        const R gate = z(sequence.row, t, channel), open = sigmoid(gate);
                        const R q = shared.again[i] + (D ? skip * shared.u[i] : R(0));
                        to.z[where] = (d_output ? d_output[where] : R(0)) * (open * (1 + gate * (1 - open))) * q;
                    }
                }
            }
        }
        const i64 index = s * sizes.segments + place.segment;
#pragma unroll
        for (int j = 0; j < PART; ++j) {
            if (!place.exists || !part.has(j)) continue;
            const i64 at = (index * sizes.channels + place.c) * sizes.states + part.n0 + j;
            if (to.A) to.A[at] = d_A[j];
            if (to.B && B.own) to.B[at] = d_b[j];
            if (to.C && C.own) to.C[at] = d_c[j];
            if (to.state && begin == sequence.first) to.state[(s * sizes.channels + place.c) * sizes.states + part.n0 + j] = c[j];
        }
        __syncthreads();
        R* const parts = reinterpret_cast<R*>(shared.kept);
        parts[threadIdx.x] = d_D, parts[THREADS + threadIdx.x] = d_bias;
        __syncthreads();
        if (int(threadIdx.x) < place.count && int(threadIdx.x) < CHANNELS) {
            d_D = d_bias = 0;
            for (int i = threadIdx.x; i < THREADS; i += CHANNELS) d_D += parts[i], d_bias += parts[THREADS + i];
            const i64 at = index * sizes.channels + place.first + threadIdx.x;
            if (to.D) to.D[at] = d_D;
            if (to.bias) to.bias[at] = d_bias;
        }
        __syncthreads();
    }
}

#define ROWS(x) const INPUT *x, i64 x##_row, i64 x##_time, i64 x##_channel
#define VECTORS(x) const VECTOR *x, i64 x##_row, i64 x##_time, i64 x##_group, i64 x##_state, i64 x##_per_group, i64 x##_own
#define GIVEN                                                                                                          \
    ROWS(u), ROWS(delta), ROWS(z), const T *A, VECTORS(B), VECTORS(C), const R *D, const R *bias, R low, R high,       \
        i64 use_softplus
#define SIZES                                                                                                          \
    i64 sequences, i64 time, i64 channels, i64 states, i64 unit, i64 blocks_per_unit, i64 channel_blocks,              \
        i64 segment_tokens, i64 segments
#define MAPS(constant) constant R *step_sums, constant T *state_maps, constant int *wild
#define AS_ROWS(x) Rows{x, x##_row, x##_time, x##_channel}
#define AS_VECTORS(x) Vectors{x, x##_row, x##_time, x##_group, x##_state, x##_per_group, x##_own}
#define AS_STEPS Steps{bias, low, high, use_softplus}
#define AS_SIZES                                                                                                       \
    Sizes { sequences, time, channels, states, unit, blocks_per_unit, channel_blocks, segment_tokens, segments }

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    scan_summary(GIVEN, const T* initial, const i64* bounds, SIZES, MAPS()) {
    summary<false>(AS_ROWS(u), AS_ROWS(delta), AS_ROWS(z), A, AS_VECTORS(B), AS_VECTORS(C), AS_STEPS, nullptr, initial,
                   bounds, AS_SIZES, step_sums, state_maps, wild);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    scan_summary_back(GIVEN, const R* d_output, const T* d_final, const i64* bounds, SIZES, MAPS()) {
    summary<true>(AS_ROWS(u), AS_ROWS(delta), AS_ROWS(z), A, AS_VECTORS(B), AS_VECTORS(C), AS_STEPS, d_output, d_final,
                  bounds, AS_SIZES, step_sums, state_maps, wild);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    scan_forward(GIVEN, const T* initial, const i64* bounds, SIZES, MAPS(const), INPUT* output, T* final, T* starts) {
    forward(AS_ROWS(u), AS_ROWS(delta), AS_ROWS(z), A, AS_VECTORS(B), AS_VECTORS(C), D, AS_STEPS, initial, bounds,
            AS_SIZES, step_sums, state_maps, wild, output, final, starts);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    scan_backward(GIVEN, const T* starts, const R* d_output, const T* d_final, const i64* bounds, SIZES, MAPS(const),
                  R* d_u, R* d_delta, R* d_z, T* d_A, T* d_B, T* d_C, R* d_D, R* d_bias, T* d_state, i64 rows) {
    backward(AS_ROWS(u), AS_ROWS(delta), AS_ROWS(z), A, AS_VECTORS(B), AS_VECTORS(C), D, AS_STEPS, starts, d_output,
             d_final, bounds, AS_SIZES, step_sums, state_maps, wild,
             Gradients{d_u, d_delta, d_z, d_A, d_B, d_C, d_D, d_bias, d_state}, rows);
}
