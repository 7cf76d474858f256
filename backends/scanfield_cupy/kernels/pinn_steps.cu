// The steps of the sweep back of single layers: each writes one array, or adds to it.
//
// An array is a plane, rows of columns with a step along each, so that slices are read as they lie.
// Compiled once for each REAL.

#include "pinn_planes.cuh"

#define EACH_ELEMENT                                                                                               \
    for (i64 element = i64(blockIdx.x) * blockDim.x + threadIdx.x; element < rows * width;                         \
         element += i64(gridDim.x) * blockDim.x)

__device__ __forceinline__ void give(const Plane& out, i64 element, i64 width, R value, i64 accumulate) {
    R& place = out.at(element / width, element % width);
    place = accumulate ? place + value : value;
}

extern "C" __global__ void __launch_bounds__(256)
    subtract(PLANE(a), PLANE(b), PLANE(out), i64 rows, i64 width, i64 accumulate) {
    const Plane left = AS_PLANE(a), right = AS_PLANE(b);
    EACH_ELEMENT {
        const i64 r = element / width, c = element % width;
        give(AS_PLANE(out), element, width, left.at(r, c) - right.at(r, c), accumulate);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    scale(PLANE(a), R factor, PLANE(out), i64 rows, i64 width, i64 accumulate) {
    const Plane given = AS_PLANE(a);
    EACH_ELEMENT { give(AS_PLANE(out), element, width, given.at(element / width, element % width) * factor, accumulate); }
}

// (1 - h^2) g: the derivative of tanh, whose value is h, times a gradient.
extern "C" __global__ void __launch_bounds__(256)
    tanh_slope_times(PLANE(h), PLANE(g), PLANE(out), i64 rows, i64 width, i64 accumulate) {
    const Plane value = AS_PLANE(h), gradient = AS_PLANE(g);
    EACH_ELEMENT {
        const i64 r = element / width, c = element % width;
        const R t = value.at(r, c);
        give(AS_PLANE(out), element, width, (1 - t * t) * gradient.at(r, c), accumulate);
    }
}

extern "C" __global__ void __launch_bounds__(256) zero(PLANE(out), i64 rows, i64 width) {
    EACH_ELEMENT { give(AS_PLANE(out), element, width, R(0), 0); }
}

// Sums of the rows of each segment: element (segment, c) of a plane with rows of `inner` columns, in which c runs on.
// Several segments' sums are planes one below the other.
extern "C" __global__ void __launch_bounds__(RUNS* COLUMNS)
    row_sums(PLANE(a), PLANE(out), i64 rows, i64 width, i64 inner, i64 segments, i64 rows_of_segment, i64 accumulate) {
    SHARED_MEMORY(memory);
    const Plane given = AS_PLANE(a), sums = AS_PLANE(out);
    const int run = threadIdx.x / COLUMNS, column = threadIdx.x % COLUMNS;
    const i64 c = i64(blockIdx.x) * COLUMNS + column, lines = width / inner;
    for (i64 segment = blockIdx.y; segment < segments; segment += gridDim.y) {
        const i64 last = min(rows, (segment + 1) * rows_of_segment);
        R total = 0;
        if (c < width)
            for (i64 r = segment * rows_of_segment + run; r < last; r += RUNS) total += given.at(r, c);
        total = over_runs(reinterpret_cast<R*>(memory), run, column, total);
        if (run == 0 && c < width) {
            R& place = sums.at(segment * lines + c / inner, c % inner);
            place = accumulate ? place + total : total;
        }
    }
}


// two_pi x^T (cos p sines - sin p cosines) with p = two_pi x B, `gradient` = [sines | cosines]: of each segment of rows, planes
// (dimensions, features) one below the other.
extern "C" __global__ void __launch_bounds__(RUNS* COLUMNS)
    frequency_gradient(PLANE(x), PLANE(gradient), PLANE(frequencies), PLANE(out), i64 rows, i64 features, i64 dimensions,
                       i64 segments, i64 rows_of_segment, R two_pi, i64 accumulate) {
    SHARED_MEMORY(memory);
    const Plane points = AS_PLANE(x), given = AS_PLANE(gradient), B = AS_PLANE(frequencies), sums = AS_PLANE(out);
    const int run = threadIdx.x / COLUMNS, column = threadIdx.x % COLUMNS;
    const i64 c = i64(blockIdx.x) * COLUMNS + column;
    for (i64 segment = blockIdx.y; segment < segments; segment += gridDim.y) {
        const i64 last = min(rows, (segment + 1) * rows_of_segment);
        for (i64 first = 0; first < dimensions; first += DIMENSIONS) {
            const int here = int(min(dimensions - first, i64(DIMENSIONS)));
            R total[DIMENSIONS] = {};
            if (c < features) {
                for (i64 r = segment * rows_of_segment + run; r < last; r += RUNS) {
                    R p = 0, s, cosine;
                    for (i64 i = 0; i < dimensions; ++i) p += points.at(r, i) * B.at(i, c);
                    sine_cosine(two_pi * p, &s, &cosine);
                    const R bar = (cosine * given.at(r, c) - s * given.at(r, features + c)) * two_pi;
#pragma unroll
                    for (int i = 0; i < DIMENSIONS; ++i)
                        if (i < here) total[i] += points.at(r, first + i) * bar;
                }
            }
#pragma unroll
            for (int i = 0; i < DIMENSIONS; ++i) {
                const R sum = over_runs(reinterpret_cast<R*>(memory), run, column, total[i]);
                if (run == 0 && c < features && i < here) {
                    R& place = sums.at(segment * dimensions + first + i, c);
                    place = accumulate ? place + sum : sum;
                }
            }
        }
    }
}
