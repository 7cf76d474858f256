// What the chunk kernels of the gated delta rule have in common.
//
// Glossary, for a chunk of C = 64 tokens of one sequence and value head (Gated DeltaNet-2, arXiv 2605.22791, and the chunk
// form of scanfield.scans.gated_delta_chunk)
//   q, k, e   (C, K)  scaled query; key; erase vector b k
//   a         (C, K)  exp(log decay); c, its running product: exp(c_r) in the papers
//   y         (C, V)  write gate times value
//   S         (K, V)  state at the chunk's start
//   L, P      (C, C)  strictly lower and lower: products of e and of q with k, decayed in between
//   J         (C, C)  (I + L)^(-1)
//   Qb, Eb, Kb (C, K) q and e times what decayed since the chunk's start, k times what decays until its end
//   W = J Eb;  U = J y - W S;  o = Qb S + P U;  S at the end = c_C S + Kb^T U
//
// Decays are multiplied, from one token to the next or from an anchor between two halves of a block (bisection): there is
// no difference and no quotient of decays, so that any log decay <= 0 is exact down to -inf.
//
// Compiled for STORED, KEYS and DECAY (the types of value, erase and write; of query, key and the output; of log decay) and
// TENSOR: 0 for products in the carry's own type, 1 for tensor cores, 2 for tensor cores with two pieces of each number.

#include "product.cuh"

typedef Carry<STORED>::type T;
#if TENSOR == 0
typedef T Operand;  // in shared memory, of products
typedef T Kept;     // between kernels
#elif TENSOR == 1
typedef bfloat16 Operand;
typedef bfloat16 Kept;
#else
typedef Split Operand;
typedef float Kept;
#endif

enum {
    CHUNK = 64,
    THREADS = 128,
    PAD = 16 / sizeof(Operand),  // behind each line of an operand: the lanes of a warp then read from different banks
    STEP = CHUNK + PAD,
    IN_FLIGHT = sizeof(T) == 8 ? 1 : 4,  // loads that a thread starts before it waits; registers of doubles are scarce
};

template <class X>
struct Given {
    const X* at;
    i64 row, time, head, channel;  // steps; 0 along an axis that one number serves
    __device__ __forceinline__ T operator()(i64 r, i64 t, i64 h, i64 c) const {
        return load(at + r * row + t * time + h * head + c * channel);
    }
};
struct Inputs {
    Given<KEYS> query, key;
    Given<STORED> value;
    Given<DECAY> decay;
    Given<STORED> erase, write;
    T scale;
    i64 erase_vector;  // erase holds e itself
};
struct Sizes {
    i64 sequences, time, vheads, group, K, V;
    i64 rows;          // K, up to the next multiple of 64
    i64 slots;         // room for chunks
    i64 head0, heads;  // of this launch
};

// A chunk of a head, by the number of its block. Where sequences are packed, their chunks have room as `saved_at` says.
struct Part {
    i64 row, first, slot, head, key_head, local;
    int tokens;
    __device__ __forceinline__ bool find(const i64* bounds, const Sizes& sizes, i64 item) {
        local = item % sizes.heads, slot = item / sizes.heads;
        i64 index, begin;
        if (bounds) {
            i64 above = sizes.sequences;
            index = 0;
            while (above - index > 1) {
                const i64 middle = (index + above) / 2;
                const Sequence sequence = sequence_at(bounds, middle, sizes.time);
                if (saved_at(bounds, sequence, middle, sizes.time, CHUNK) > slot) {
                    above = middle;
                } else {
                    index = middle;
                }
            }
        } else {
            index = slot / ((sizes.time + CHUNK - 1) / CHUNK);
        }
        const Sequence sequence = sequence_at(bounds, index, sizes.time);
        begin = saved_at(bounds, sequence, index, sizes.time, CHUNK);
        return open(sequence, begin, slot - begin, sizes);
    }
    // Chunk number `chunk` of a sequence whose first is in slot `begin`.
    __device__ __forceinline__ bool open(const Sequence& sequence, i64 begin, i64 chunk, const Sizes& sizes) {
        slot = begin + chunk;
        row = sequence.row, first = sequence.first + chunk * CHUNK;
        head = sizes.head0 + local, key_head = head / sizes.group;
        tokens = int(min(sequence.last - first, i64(CHUNK)));
        return chunk >= 0 && tokens > 0;
    }
    // Of this chunk and head among those of a launch.
    __device__ __forceinline__ i64 place(const Sizes& sizes) const { return slot * sizes.heads + local; }
};

// Where states at the chunks' starts and updates are: of the launch's heads, or of all of them if they are to stay.
struct Room {
    i64 heads, head0;
    __device__ __forceinline__ i64 state(const Part& part, const Sizes& sizes, i64 k, i64 v) const {
        return ((part.slot * heads + part.head - head0) * sizes.K + k) * sizes.V + v;
    }
    __device__ __forceinline__ i64 token(const Part& part, const Sizes& sizes, int token, i64 v) const {
        return ((part.row * sizes.time + part.first + token) * heads + part.head - head0) * sizes.V + v;
    }
};

template <int TILES>
__device__ __forceinline__ void clear(T (&sum)[TILES][4]) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[tile][i] = 0;
    }
}

__device__ __forceinline__ T updated(const Inputs& x, const Kept* updates, const Room& room, const Part& part,
                                     const Sizes& sizes, int token, i64 v) {
    if (updates) return load(updates + room.token(part, sizes, token, v));
    T y = x.value(part.row, part.first + token, part.head, v);
    if (x.write.at) y *= x.write(part.row, part.first + token, part.head, v);
    return y;
}

// The gradient of the output; nothing where none came.
struct Cotangent {
    const T* d_output;
    const Part& part;
    const Sizes& sizes;
    __device__ __forceinline__ T operator()(int token, i64 v) const {
        if (!d_output) return 0;
        return d_output[((part.row * sizes.time + part.first + token) * sizes.vheads + part.head) * sizes.V + v];
    }
};

// ---- operands into shared memory ----------------------------------------------------------------------------------------

__device__ __forceinline__ void put_line(Operand* to, const Line<Kept>& line) {
#if TENSOR == 1
    *reinterpret_cast<Line<Kept>*>(to) = line;
#else
#pragma unroll
    for (int j = 0; j < Line<Kept>::COUNT; ++j) put(to + j, load(line.x + j));
#endif
}
// Lines of WIDTH numbers that lie `from_step` apart; whole, as their room is padded.
template <int WIDTH>
__device__ __forceinline__ void bring(Operand* to, int step, const Kept* from, i64 from_step, int lines) {
    enum { COUNT = Line<Kept>::COUNT, IN_LINE = WIDTH / COUNT };
#pragma unroll IN_FLIGHT
    for (int i = threadIdx.x; i < lines * IN_LINE; i += THREADS) {
        const int line = i / IN_LINE, at = i % IN_LINE * COUNT;
        put_line(to + line * step + at, *reinterpret_cast<const Line<Kept>*>(from + line * from_step + at));
    }
}
// Columns v0 to v0 + WIDTH of the chunk's tokens, of what `of(token, v)` says; zeros beyond the chunk and beyond V.
template <int WIDTH, class Of>
__device__ __forceinline__ void bring_tokens(Operand* to, int step, const Part& part, i64 v0, i64 V, const Of& of) {
#pragma unroll IN_FLIGHT
    for (int i = threadIdx.x; i < CHUNK * WIDTH; i += THREADS) {
        const int token = i / WIDTH;
        const i64 v = v0 + i % WIDTH;
        put(to + token * step + i % WIDTH, token < part.tokens && v < V ? of(token, v) : T(0));
    }
}
// Rows k0 on of a state, columns v0 to v0 + WIDTH.
template <int WIDTH>
__device__ __forceinline__ void bring_state(Operand* to, int step, const Kept* states, const Room& room, const Part& part,
                                            const Sizes& sizes, i64 k0, int rows, i64 v0) {
#pragma unroll IN_FLIGHT
    for (int i = threadIdx.x; i < rows * WIDTH; i += THREADS) {
        const i64 k = k0 + i / WIDTH, v = v0 + i % WIDTH;
        const bool there = k < sizes.K && v < sizes.V;
        put(to + i / WIDTH * step + i % WIDTH, there ? load(states + room.state(part, sizes, k, v)) : T(0));
    }
}

// ---- channels -----------------------------------------------------------------------------------------------------------

// CHANNELS channels of a chunk. A thread has one of them for RUN tokens in a row, in registers: loops over a run are
// unrolled, and spans are known to the compiler.
template <int CHANNELS>
struct Channels {
    enum { RUN = CHUNK * CHANNELS / THREADS, RUNS = CHUNK / RUN };
    T decay[RUN], q[RUN], k[RUN], e[RUN];
    T* totals;  // (RUNS, CHANNELS), products of a run's decays; all threads read them
    int channel, run, first;

    __device__ __forceinline__ Channels(T* memory) {
        totals = memory;
        channel = threadIdx.x % CHANNELS, run = threadIdx.x / CHANNELS, first = run * RUN;
    }

    __device__ __forceinline__ void take(const Inputs& x, const Part& part, i64 k0, i64 K) {
        const i64 c = k0 + channel;
        T total = 1;
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            decay[i] = 1, q[i] = 0, k[i] = 0, e[i] = 0;
            if (first + i < part.tokens && c < K) {
                const i64 t = part.first + first + i;
                q[i] = x.scale * x.query(part.row, t, part.key_head, c), k[i] = x.key(part.row, t, part.key_head, c);
                if (x.decay.at) decay[i] = exponential(x.decay(part.row, t, part.head, c));
                if (x.erase.at) {
                    e[i] = x.erase(part.row, t, part.head, c);
                    if (!x.erase_vector) e[i] *= k[i];
                }
            }
            total *= decay[i];
        }
        totals[run * CHANNELS + channel] = total;
    }
    // What the runs before and after this one decay, in blocks of SPAN tokens.
    template <int SPAN>
    __device__ __forceinline__ T before() const {
        enum { TOGETHER = SPAN / RUN };
        T product = 1;
#pragma unroll
        for (int i = 0; i < TOGETHER - 1; ++i) {
            if (i < run % TOGETHER) product *= totals[(run / TOGETHER * TOGETHER + i) * CHANNELS + channel];
        }
        return product;
    }
    template <int SPAN>
    __device__ __forceinline__ T after() const {
        enum { TOGETHER = SPAN / RUN };
        T product = 1;
#pragma unroll
        for (int i = TOGETHER - 1; i > 0; --i) {
            if (i > run % TOGETHER) product *= totals[(run / TOGETHER * TOGETHER + i) * CHANNELS + channel];
        }
        return product;
    }
    // Onwards from an anchor: `act(i, factor)` with what decays up to and with token i of COUNT; backwards: after token i.
    template <int COUNT, class Act>
    __device__ __forceinline__ void onwards(int base, T factor, const Act& act) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            factor *= decay[base + i];
            act(base + i, factor);
        }
    }
    template <int COUNT, class Act>
    __device__ __forceinline__ void backwards(int base, T factor, const Act& act) const {
#pragma unroll
        for (int i = COUNT - 1; i >= 0; --i) {
            act(base + i, factor);
            factor *= decay[base + i];
        }
    }
    // The run's tokens in first and in second halves of SPAN: what decays between each and the anchor between the halves.
    template <int SPAN, class First, class Second>
    __device__ __forceinline__ void walk(const First& first_half, const Second& second_half) const {
        if constexpr (SPAN >= RUN) {
            if (first / SPAN % 2) {
                onwards<RUN>(0, before<SPAN>(), second_half);
            } else {
                backwards<RUN>(0, after<SPAN>(), first_half);
            }
        } else {
#pragma unroll
            for (int base = 0; base < RUN; base += 2 * SPAN) {
                backwards<SPAN>(base, T(1), first_half);
                onwards<SPAN>(base + SPAN, T(1), second_half);
            }
        }
    }
    // The operands of the products between halves of SPAN tokens: `one` is k in the first and e in the second, `two`
    // nothing and q; each decayed to the anchor.
    template <int SPAN>
    __device__ __forceinline__ void put_halves(Operand* one, Operand* two) const {
        enum { LINE = CHANNELS + PAD };
        one += first * LINE + channel, two += first * LINE + channel;
        walk<SPAN>(
            [&](int i, T factor) {
                put(one + i * LINE, k[i] * factor);
                put(two + i * LINE, T(0));
            },
            [&](int i, T factor) {
                put(one + i * LINE, e[i] * factor);
                put(two + i * LINE, q[i] * factor);
            });
    }
};

// ---- arguments ----------------------------------------------------------------------------------------------------------

#define GIVEN(type, x) const type *x, i64 x##_row, i64 x##_time, i64 x##_head, i64 x##_channel
#define INPUTS                                                                                                         \
    GIVEN(KEYS, query), GIVEN(KEYS, key), GIVEN(STORED, value), GIVEN(DECAY, decay), GIVEN(STORED, erase),             \
        GIVEN(STORED, write), T scale, i64 erase_vector
#define AS_GIVEN(x)                                                                                                    \
    { x, x##_row, x##_time, x##_head, x##_channel }
#define AS_INPUTS                                                                                                      \
    Inputs {                                                                                                           \
        AS_GIVEN(query), AS_GIVEN(key), AS_GIVEN(value), AS_GIVEN(decay), AS_GIVEN(erase), AS_GIVEN(write), scale,     \
            erase_vector                                                                                               \
    }
#define SIZES                                                                                                          \
    i64 sequences, i64 time, i64 vheads, i64 group, i64 K, i64 V, i64 rows, i64 slots, i64 head0, i64 heads, i64 room, \
        i64 room0
#define AS_SIZES                                                                                                       \
    Sizes { sequences, time, vheads, group, K, V, rows, slots, head0, heads }
#define AS_ROOM                                                                                                        \
    Room { room, room0 }
