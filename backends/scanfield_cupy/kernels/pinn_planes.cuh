// Arrays of rows and columns as they lie, and sums over rows in an order that the shapes fix: eight runs of a block's segment,
// added up in pairs; then, by another launch, the segments.

typedef REAL R;

#define RUNS 8      // rows that a block walks side by side
#define COLUMNS 32  // of a block
#define DIMENSIONS 4  // of the gradient of the frequencies, in a block

struct Plane {
    R* start;
    i64 row, column;

    __device__ __forceinline__ R& at(i64 r, i64 c) const { return start[r * row + c * column]; }
};

#define PLANE(x) R *x, i64 x##_row, i64 x##_column
#define AS_PLANE(x) Plane{x, x##_row, x##_column}

// The runs of a column added up, in pairs; the sum is thread run 0's.
__device__ __forceinline__ R over_runs(R* memory, int run, int column, R own) {
    memory[run * COLUMNS + column] = own;
    for (int half = RUNS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (run < half) memory[run * COLUMNS + column] += memory[(run + half) * COLUMNS + column];
    }
    const R sum = run == 0 ? memory[column] : R(0);
    __syncthreads();
    return sum;
}

// The weights of a channel, a sum of second derivatives, in a row; null where all are 1 (the Laplacian).
__device__ __forceinline__ const R* weights_of(const R* first, const R* second, i64 channel, i64 row, i64 dimensions) {
    const R* all = channel == 0 ? first : second;
    return all ? all + row * dimensions : nullptr;
}
