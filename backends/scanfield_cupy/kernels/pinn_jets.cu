// A jet through an activation: all blocks of an element in one pass, forward and back.
//
//   forward   h = sigma(z), h_i = s1 z_i, h_c = s2 sum_i a_i z_i^2 + s1 z_c
//   back      zbar = s1 hbar + s2 sum_i z_i hbar_i + sum_c (s3 sum_i a_i z_i^2 + s2 z_c) hbar_c
//             zbar_i = s1 hbar_i + 2 s2 z_i sum_c a_i hbar_c,   zbar_c = s1 hbar_c          in the place of hbar
//
// Blocks lie one after the other: the value, the first derivatives, one or two channels (sums of second derivatives). A thread
// has an element of all of them; no element meets another, so that there is nothing to add up in any order.
//
// Reference: forward Laplacian, Li et al. (arXiv 2307.08214); the table of derivatives stands in `pinn/activations.py`.
// Compiled once for each REAL.

#include "pinn_planes.cuh"

struct Slopes {
    R value, s1, s2, s3;
};

__device__ __forceinline__ float tanh_of(float x) { return tanhf(x); }
__device__ __forceinline__ double tanh_of(double x) { return tanh(x); }
// The distribution of the normal law; by erfc, which keeps its digits where it is small.
__device__ __forceinline__ float normal(float x) { return 0.5f * erfcf(-0.70710678118654752f * x); }
__device__ __forceinline__ double normal(double x) { return 0.5 * erfc(-0.70710678118654752440 * x); }

enum { TANH, SIN, SWISH, SOFTPLUS, GELU };

// sigma and its derivatives at x; where `known` is set, sigma(x) is that. What nobody uses is not computed.
template <int ACTIVATION>
__device__ __forceinline__ Slopes slopes(R x, const R* known) {
    if (ACTIVATION == TANH) {
        const R t = known ? *known : tanh_of(x), s1 = 1 - t * t;
        return {t, s1, -2 * t * s1, s1 * (6 * t * t - 2)};
    }
    if (ACTIVATION == SIN) {
        R s, c;
        sine_cosine(x, &s, &c);
        return {s, c, -s, -c};
    }
    if (ACTIVATION == GELU) {
        const R big = normal(x), square = x * x;
        const R density = R(0.39894228040143267794) * exponential(R(-0.5) * square);
        return {x * big, big + x * density, (2 - square) * density, x * (square - 4) * density};
    }
    const R e = exponential(-magnitude(x));
    const R g = (x < 0 ? e : R(1)) / (1 + e), g1 = g * (1 - g), g2 = g1 * (1 - 2 * g);
    if (ACTIVATION == SOFTPLUS) return {known ? *known : (x > 0 ? x : R(0)) + log_1_plus(e), g, g1, g2};
    return {x * g, g + x * g1, 2 * g1 + x * g2, 3 * g2 + x * (g1 * (1 - 6 * g1))};
}

// Where the blocks lie: `count` numbers each, rows of `width`; the weights a (rows, dimensions) of each channel, or null for
// the Laplacian, whose weights are 1.
struct Blocks {
    i64 count, width, dimensions, channels;
    const R *first, *second;

    __device__ __forceinline__ const R* weights(i64 channel, i64 element) const {
        const R* all = channel == 0 ? first : second;
        return all ? weights_of(first, second, channel, element / width, dimensions) : nullptr;
    }
    // sum_i a_i z_i^2
    __device__ __forceinline__ R bent(const R* z, i64 element, const R* a) const {
        R total = 0;
        for (i64 i = 0; i < dimensions; ++i) {
            const R y = z[(1 + i) * count + element];
            total += a ? a[i] * (y * y) : y * y;
        }
        return total;
    }
};

// Grids are no larger than allowed: a thread walks on by all threads there are.
#define EACH_ELEMENT                                                                                  \
    for (i64 element = i64(blockIdx.x) * blockDim.x + threadIdx.x; element < blocks.count;            \
         element += i64(gridDim.x) * blockDim.x)

template <int ACTIVATION>
__device__ __forceinline__ void forward(const R* z, R* h, const Blocks& blocks) {
    const i64 count = blocks.count, dimensions = blocks.dimensions, channels = blocks.channels;
    EACH_ELEMENT {
        const Slopes s = slopes<ACTIVATION>(z[element], nullptr);
        h[element] = s.value;
        for (i64 i = 0; i < dimensions; ++i) {
            const i64 at = (1 + i) * count + element;
            h[at] = s.s1 * z[at];
        }
        for (i64 c = 0; c < channels; ++c) {
            const i64 at = (1 + dimensions + c) * count + element;
            h[at] = s.s2 * blocks.bent(z, element, blocks.weights(c, element)) + s.s1 * z[at];
        }
    }
}

template <int ACTIVATION>
__device__ __forceinline__ void backward(const R* z, const R* h, R* bar, const Blocks& blocks) {
    const i64 count = blocks.count, dimensions = blocks.dimensions, channels = blocks.channels;
    EACH_ELEMENT {
        const Slopes s = slopes<ACTIVATION>(z[element], h + element);
        R crossed = 0;
        for (i64 i = 0; i < dimensions; ++i) {
            const i64 at = (1 + i) * count + element;
            crossed += z[at] * bar[at];
        }
        R total = s.s1 * bar[element] + s.s2 * crossed;
        for (i64 c = 0; c < channels; ++c) {
            const i64 at = (1 + dimensions + c) * count + element;
            total += (s.s3 * blocks.bent(z, element, blocks.weights(c, element)) + s.s2 * z[at]) * bar[at];
        }
        bar[element] = total;
        for (i64 i = 0; i < dimensions; ++i) {
            const i64 at = (1 + i) * count + element;
            R pulled = 0;
            for (i64 c = 0; c < channels; ++c) {
                const R* a = blocks.weights(c, element);
                const R end = bar[(1 + dimensions + c) * count + element];
                pulled += a ? a[i] * end : end;
            }
            bar[at] = s.s1 * bar[at] + 2 * (s.s2 * z[at] * pulled);
        }
        for (i64 c = 0; c < channels; ++c) bar[(1 + dimensions + c) * count + element] *= s.s1;
    }
}

#define KERNELS(NAME, ACTIVATION)                                                                                        \
    extern "C" __global__ void __launch_bounds__(256, 4)                                                                  \
        jet_forward_##NAME(const R* z, R* h, i64 count, i64 width, i64 dimensions, i64 channels, const R* first,         \
                           const R* second) {                                                                            \
        forward<ACTIVATION>(z, h, Blocks{count, width, dimensions, channels, first, second});                            \
    }                                                                                                                    \
    extern "C" __global__ void __launch_bounds__(256, 4)                                                                  \
        jet_backward_##NAME(const R* z, const R* h, R* bar, i64 count, i64 width, i64 dimensions, i64 channels,          \
                            const R* first, const R* second) {                                                           \
        backward<ACTIVATION>(z, h, bar, Blocks{count, width, dimensions, channels, first, second});                      \
    }

KERNELS(tanh, TANH)
KERNELS(sin, SIN)
KERNELS(swish, SWISH)
KERNELS(softplus, SOFTPLUS)
KERNELS(gelu, GELU)
