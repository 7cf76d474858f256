// The embedding of points, [sin p | cos p | raw coordinates] with p = x omega, as a jet; and the sweep back through it.
//
//   forward   with s = sin p, c = cos p:   first derivatives omega_i c, -omega_i s;   channels -q s, -q c,  q = sum_i a_i omega_i^2
//   back      from the bars (a | b) of sines and cosines of each block:
//             pbar = c a - s b - sum_i omega_i (s a_i + c b_i) - sum_c q_c (c a_c - s b_c)
//             omegabar_i = sum over rows of x_i pbar + c a_i - s b_i - 2 omega_i sum_c weight_ci (s a_c + c b_c)
//
// Blocks lie one after the other, rows of 2 features + raws numbers. Sums over rows are made in an order that the shapes fix.
// Compiled once for each REAL.

#include "pinn_planes.cuh"

#define EACH_ELEMENT(ELEMENTS)                                                                       \
    for (i64 element = i64(blockIdx.x) * blockDim.x + threadIdx.x; element < (ELEMENTS);             \
         element += i64(gridDim.x) * blockDim.x)

// sum_i a_i omega_i^2 of a column
__device__ __forceinline__ R squares(const Plane& omega, i64 column, const R* a, i64 dimensions) {
    R total = 0;
    for (i64 i = 0; i < dimensions; ++i) {
        const R w = omega.at(i, column);
        total += a ? a[i] * (w * w) : w * w;
    }
    return total;
}

extern "C" __global__ void __launch_bounds__(256, 3)
    embed(PLANE(x), PLANE(omega), PLANE(raw), const R* mean, R* phases, R* sines, R* cosines, R* out, i64 rows,
          i64 features, i64 raws, i64 dimensions, i64 firsts, i64 channels, const R* first, const R* second) {
    const Plane points = AS_PLANE(x), w = AS_PLANE(omega), coordinates = AS_PLANE(raw);
    const i64 columns = features + raws, width = 2 * features + raws, block = rows * width;
    EACH_ELEMENT(rows * columns) {
        const i64 r = element / columns, j = element % columns;
        R* const line = out + r * width;
        if (j < features) {
            R p = 0, s, c;
            for (i64 i = 0; i < dimensions; ++i) p += points.at(r, i) * w.at(i, j);
            sine_cosine(p, &s, &c);
            const i64 at = r * features + j;
            phases[at] = p, sines[at] = s, cosines[at] = c;
            line[j] = s, line[features + j] = c;
            for (i64 i = 0; i < firsts; ++i) {
                R* const to = line + (1 + i) * block;
                to[j] = w.at(i, j) * c, to[features + j] = -(w.at(i, j) * s);
            }
            for (i64 k = 0; k < channels; ++k) {
                R* const to = line + (1 + firsts + k) * block;
                const R q = squares(w, j, weights_of(first, second, k, r, dimensions), dimensions);
                to[j] = -(q * s), to[features + j] = -(q * c);
            }
        } else {
            const i64 k = j - features, at = 2 * features + k;
            R value = 0;
            for (i64 i = 0; i < dimensions; ++i) value += (points.at(r, i) - mean[i]) * coordinates.at(i, k);
            line[at] = value;
            for (i64 i = 0; i < firsts; ++i) line[(1 + i) * block + at] = coordinates.at(i, k);
            for (i64 i = 0; i < channels; ++i) line[(1 + firsts + i) * block + at] = 0;
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, 3)
    embed_back(const R* bar, PLANE(omega), const R* sines, const R* cosines, R* phase_bar, i64 rows, i64 features, i64 raws,
               i64 dimensions, i64 firsts, i64 channels, const R* first, const R* second) {
    const Plane w = AS_PLANE(omega);
    const i64 width = 2 * features + raws, block = rows * width;
    EACH_ELEMENT(rows * features) {
        const i64 r = element / features, j = element % features;
        const R s = sines[element], c = cosines[element];
        const R* const line = bar + r * width;
        R total = c * line[j] - s * line[features + j];
        for (i64 i = 0; i < firsts; ++i) {
            const R* const from = line + (1 + i) * block;
            total -= w.at(i, j) * (s * from[j] + c * from[features + j]);
        }
        for (i64 k = 0; k < channels; ++k) {
            const R* const from = line + (1 + firsts + k) * block;
            const R q = squares(w, j, weights_of(first, second, k, r, dimensions), dimensions);
            total -= q * (c * from[j] - s * from[features + j]);
        }
        phase_bar[element] = total;
    }
}

// Of each segment of rows, planes (dimensions, features) one below the other.
extern "C" __global__ void __launch_bounds__(RUNS* COLUMNS)
    omega_gradient(PLANE(x), PLANE(omega), const R* bar, const R* sines, const R* cosines, const R* phase_bar, PLANE(out),
                   i64 rows, i64 features, i64 raws, i64 dimensions, i64 firsts, i64 channels, const R* first,
                   const R* second, i64 segments, i64 rows_of_segment, i64 accumulate) {
    SHARED_MEMORY(memory);
    const Plane points = AS_PLANE(x), w = AS_PLANE(omega), sums = AS_PLANE(out);
    const i64 width = 2 * features + raws, block = rows * width;
    const int run = threadIdx.x / COLUMNS, column = threadIdx.x % COLUMNS;
    const i64 j = i64(blockIdx.x) * COLUMNS + column;
    for (i64 segment = blockIdx.y; segment < segments; segment += gridDim.y) {
        const i64 last = min(rows, (segment + 1) * rows_of_segment);
        for (i64 low = 0; low < dimensions; low += DIMENSIONS) {
            const int here = int(min(dimensions - low, i64(DIMENSIONS)));
            R total[DIMENSIONS] = {};
            if (j < features) {
                for (i64 r = segment * rows_of_segment + run; r < last; r += RUNS) {
                    const R* const line = bar + r * width;
                    const i64 at = r * features + j;
                    const R s = sines[at], c = cosines[at], p = phase_bar[at];
#pragma unroll
                    for (int i = 0; i < DIMENSIONS; ++i) {
                        if (i >= here) continue;
                        R row = points.at(r, low + i) * p;
                        if (firsts) {
                            const R* const from = line + (1 + low + i) * block;
                            row += c * from[j] - s * from[features + j];
                        }
                        for (i64 k = 0; k < channels; ++k) {
                            const R* const from = line + (1 + firsts + k) * block;
                            const R* const a = weights_of(first, second, k, r, dimensions);
                            const R end = s * from[j] + c * from[features + j];
                            row -= 2 * w.at(low + i, j) * (a ? a[low + i] * end : end);
                        }
                        total[i] += row;
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < DIMENSIONS; ++i) {
                const R sum = over_runs(reinterpret_cast<R*>(memory), run, column, total[i]);
                if (run == 0 && j < features && i < here) {
                    R& place = sums.at(segment * dimensions + low + i, j);
                    place = accumulate ? place + sum : sum;
                }
            }
        }
    }
}
