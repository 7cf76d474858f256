// Affine maps of a number, and a tile of them combined by all threads of a block.

#define THREADS 256

typedef Carry<STORED>::type T;

// Tokens of a thread's run: so many that the registers hold a, b and the gradient.
enum { TOKENS = sizeof(T) > 8 ? 2 : sizeof(T) > sizeof(Real<T>::type) ? 4 : 8 };

struct Map {
    T product, state;
};

// Up to here, products hide nothing that a state could show: the contribution of a state that an earlier product took
// to 0 stays below the smallest number that counts. False for NaN.
__device__ __forceinline__ bool tame(Map map) {
    return magnitude(map.product) <= 1099511627776.0f && is_finite(map.state);
}
__device__ __forceinline__ Map after(Map second, Map first) {
    return {second.product * first.product, second.product * first.state + second.state};
}

struct Strided {
    const STORED* at;
    i64 row, time, lane;  // from one element to the next, 0 along an axis that is shared
    __device__ __forceinline__ T operator()(i64 r, i64 t, i64 w) const { return load(at + r * row + t * time + w * lane); }
};

// Every run's map, and those before it in the same lane, combined. `order` counts the runs in the direction of the scan.
// The result lies at [order * LANES + lane]; all threads are past a barrier.
template <int LANES>
__device__ __forceinline__ Map* combined(Map mine, int order, int lane, Map* maps) {
    enum { RUNS = THREADS / LANES };
    Map *now = maps, *next = maps + THREADS;
    const int place = order * LANES + lane;
    now[place] = mine;
    __syncthreads();
    for (int by = 1; by < RUNS; by *= 2) {
        if (order >= by) mine = after(mine, now[place - by * LANES]);
        next[place] = mine;
        __syncthreads();
        Map* const swapped = now;
        now = next, next = swapped;
    }
    return now;
}

// Walks each run from its true start: `walk(start)` returns the state after the run. `carry` (LANES) is the state before
// the tile, and the one after it when the function returns.
template <int LANES, class Walk>
__device__ __forceinline__ void walk_tile(Map mine, int order, int lane, Map* maps, T* carry, Walk walk) {
    enum { RUNS = THREADS / LANES };
    const T before = carry[lane];
    bool fine = tame(mine) && is_finite(before);
    const Map* now = combined<LANES>(mine, order, lane, maps);
    const int place = order * LANES + lane;
    fine = fine && tame(now[place]);
    T start = before;
    if (order > 0) start = now[place - LANES].product * start + now[place - LANES].state;
    if (__syncthreads_and(fine)) {
        const T end = walk(start);
        if (order == RUNS - 1) carry[lane] = end;
        __syncthreads();
        return;
    }
    // Runs up to the first that cannot be trusted start as ever: a token changes no bit of what lies before it.
    bool broken = false;
    for (int turn = 0; turn < RUNS; ++turn) {
        const bool breaks = __syncthreads_or(turn == order && !fine);
        if (turn == order) carry[lane] = walk(broken ? carry[lane] : start);
        broken |= breaks;
        __syncthreads();
    }
}

// A block's place, and the shared memory of all kernels.
template <int LANES>
struct Place {
    enum { RUNS = THREADS / LANES, TILE = RUNS * TOKENS };
    int lane, run;
    i64 lane_block, segment, w;
    bool exists;  // lanes past the last one compute on neutral values and write nothing
    __device__ __forceinline__ Place(i64 width, i64 lane_blocks) {
        lane = threadIdx.x % LANES, run = threadIdx.x / LANES;
        lane_block = blockIdx.x % lane_blocks, segment = blockIdx.x / lane_blocks;
        w = lane_block * LANES + lane;
        exists = w < width;
    }
};
