// What every kernel file begins with: numbers as they are stored and as they are carried. A run-time compiler finds no header:
// what a file includes lies beside it, and is put in its place before it is compiled (`sources.py`). The tests compile the same source for a CPU, with SCANFIELD_EMULATED defined.

typedef long long i64;

#ifdef SCANFIELD_EMULATED
#define SHARED_MEMORY(name) unsigned char* name = emulator::dynamic_shared
#else
#define SHARED_MEMORY(name) extern __shared__ __align__(16) unsigned char name[]
#endif

// ---- half precision: two bytes in memory, float in arithmetic ---------------------------------------------------------

struct float16 {
    unsigned short bits;
};
struct bfloat16 {
    unsigned short bits;
};

__device__ __forceinline__ float widened(float16 x) {
#ifdef SCANFIELD_EMULATED
    _Float16 y;
    memcpy(&y, &x, 2);
    return y;
#else
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
#endif
}
__device__ __forceinline__ float16 rounded(float x, float16) {
    float16 y;
#ifdef SCANFIELD_EMULATED
    const _Float16 z = x;
    memcpy(&y, &z, 2);
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#endif
    return y;
}
__device__ __forceinline__ float widened(bfloat16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
__device__ __forceinline__ bfloat16 rounded(float x, bfloat16) {
    const unsigned bits = __float_as_uint(x);
    // To the nearest, ties to even; a NaN keeps its sign and stays one.
    const unsigned up = bits + 0x7fffu + ((bits >> 16) & 1u);
    bfloat16 y;
    y.bits = (unsigned short)((x == x ? up : bits | 0x400000u) >> 16);
    return y;
}

// ---- complex numbers --------------------------------------------------------------------------------------------------

template <class R>
struct __align__(2 * sizeof(R)) Complex {
    R re, im;
};
typedef Complex<float> complex64;
typedef Complex<double> complex128;

template <class R>
__device__ __forceinline__ Complex<R> operator+(Complex<R> x, Complex<R> y) {
    return {x.re + y.re, x.im + y.im};
}
template <class R>
__device__ __forceinline__ Complex<R> operator*(Complex<R> x, Complex<R> y) {
    return {x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re};
}
template <class R>
__device__ __forceinline__ Complex<R> conj(Complex<R> x) {
    return {x.re, -x.im};
}
__device__ __forceinline__ float conj(float x) { return x; }
__device__ __forceinline__ double conj(double x) { return x; }

__device__ __forceinline__ float magnitude(float x) { return x < 0 ? -x : x; }
__device__ __forceinline__ double magnitude(double x) { return x < 0 ? -x : x; }
// The larger part: within a factor of the square root of 2, and it overflows no sooner than the number. NaN comes through.
template <class R>
__device__ __forceinline__ R magnitude(Complex<R> x) {
    const R re = magnitude(x.re), im = magnitude(x.im);
    return re > im || re != re ? re : im;
}

// ---- how a stored number is carried -------------------------------------------------------------------------------------

template <class Stored>
struct Carry {
    typedef Stored type;
};
template <>
struct Carry<float16> {
    typedef float type;
};
template <>
struct Carry<bfloat16> {
    typedef float type;
};
template <class T>
struct Real {
    typedef T type;
};
template <class R>
struct Real<Complex<R>> {
    typedef R type;
};

__device__ __forceinline__ float load(const float* place) { return *place; }
__device__ __forceinline__ double load(const double* place) { return *place; }
__device__ __forceinline__ float load(const float16* place) { return widened(*place); }
__device__ __forceinline__ float load(const bfloat16* place) { return widened(*place); }
template <class R>
__device__ __forceinline__ Complex<R> load(const Complex<R>* place) {
    return *place;
}
__device__ __forceinline__ void store(float* place, float x) { *place = x; }
__device__ __forceinline__ void store(double* place, double x) { *place = x; }
__device__ __forceinline__ void store(float16* place, float x) { *place = rounded(x, float16()); }
__device__ __forceinline__ void store(bfloat16* place, float x) { *place = rounded(x, bfloat16()); }
template <class R>
__device__ __forceinline__ void store(Complex<R>* place, Complex<R> x) {
    *place = x;
}

template <class T>
__device__ __forceinline__ T number(typename Real<T>::type x);
template <>
__device__ __forceinline__ float number<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ double number<double>(double x) {
    return x;
}
template <>
__device__ __forceinline__ complex64 number<complex64>(float x) {
    return {x, 0};
}
template <>
__device__ __forceinline__ complex128 number<complex128>(double x) {
    return {x, 0};
}

// Neither NaN nor infinite.
template <class T>
__device__ __forceinline__ bool is_finite(T x) {
    const typename Real<T>::type m = magnitude(x);
    return m - m == 0;
}

// ---- sequences ----------------------------------------------------------------------------------------------------------

// Tokens [first, last) of one sequence in a row of the batch: a whole row, or a part of a pack (`bounds`) in row 0.
struct Sequence {
    i64 row, first, last;
};
__device__ __forceinline__ Sequence sequence_at(const i64* bounds, i64 index, i64 time) {
    if (!bounds) return {index, 0, time};
    // Bounds that never left the card were not checked by value: nothing outside the arrays is touched, whatever they are.
    const i64 first = min(max(bounds[index], i64(0)), time);
    return {0, first, min(max(bounds[index + 1], first), time)};
}
// The place of a sequence's first saved state, where one is kept for every `chunk` tokens: sequences do not overlap.
__device__ __forceinline__ i64 saved_at(const i64* bounds, Sequence sequence, i64 index, i64 time, i64 chunk) {
    return bounds ? sequence.first / chunk + index : index * ((time + chunk - 1) / chunk);
}

// ---- elementary functions, by type ----------------------------------------------------------------------------------------

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float power_of_2(float x) { return exp2f(x); }
__device__ __forceinline__ double power_of_2(double x) { return exp2(x); }
__device__ __forceinline__ float log_1_plus(float x) { return log1pf(x); }
__device__ __forceinline__ double log_1_plus(double x) { return log1p(x); }
__device__ __forceinline__ void sine_cosine(float x, float* s, float* c) { sincosf(x, s, c); }
__device__ __forceinline__ void sine_cosine(double x, double* s, double* c) { sincos(x, s, c); }

// 1 / (1 + exp(-x)) and log(1 + exp(x)), without overflow and exact at both ends.
template <class R>
__device__ __forceinline__ R sigmoid(R x) {
    return exponential(x < 0 ? x : (x == x ? R(0) : x)) / (1 + exponential(-magnitude(x)));
}
template <class R>
__device__ __forceinline__ R softplus(R x) {
    return (x > 0 ? x : R(0)) + log_1_plus(exponential(-magnitude(x)));
}

// ---- a warp's sums --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float from_lane(float x, int turned) { return __shfl_xor_sync(0xffffffffu, x, turned); }
__device__ __forceinline__ double from_lane(double x, int turned) { return __shfl_xor_sync(0xffffffffu, x, turned); }
template <class R>
__device__ __forceinline__ Complex<R> from_lane(Complex<R> x, int turned) {
    return {from_lane(x.re, turned), from_lane(x.im, turned)};
}

// Sums `values` over the LANES lanes next to each other (a power of 2), each sum in some lane: halves are exchanged, so
// that COUNT sums cost about COUNT shuffles. Afterwards lane l holds the sums `first` to `first` + left - 1 in values[0..];
// where there are more lanes than sums, several hold the same.
template <int LANES, int COUNT, class T>
struct SumOverLanes {
    static __device__ __forceinline__ void run(T* values, int lane, int& first) {
        if (COUNT > 1) {
            enum { HALF = COUNT / 2 > 0 ? COUNT / 2 : 1 };
            const bool upper = lane & (LANES / 2);
#pragma unroll
            for (int i = 0; i < HALF; ++i) {
                const T sent = upper ? values[i] : values[HALF + i];
                const T kept = upper ? values[HALF + i] : values[i];
                values[i] = kept + from_lane(sent, LANES / 2);
            }
            first += upper ? HALF : 0;
            SumOverLanes<LANES / 2, HALF, T>::run(values, lane, first);
        } else {
            values[0] = values[0] + from_lane(values[0], LANES / 2);
            SumOverLanes<LANES / 2, 1, T>::run(values, lane, first);
        }
    }
};
template <int COUNT, class T>
struct SumOverLanes<1, COUNT, T> {
    static __device__ __forceinline__ void run(T*, int, int&) {}
};
