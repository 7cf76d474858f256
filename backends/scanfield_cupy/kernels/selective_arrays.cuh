// The selective scan's kinds of number, its arrays as they lie in memory, and a block's place among them.

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
