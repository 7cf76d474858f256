// Products of tiles in shared memory, by a warp: 16 rows and 8 TILES columns, sums in registers.
//
// A lane's sums lie where the tensor cores' mma.m16n8k16 has them (PTX ISA, fragments for mma.m16n8k16): of each 8 columns
// numbers 0 and 1 in row lane / 4, columns 2 (lane % 4) and one more; 2 and 3 eight rows below. Products without tensor
// cores share this place, so that one kernel does with both.
//
// Operands as they lie: sum[row][column] += a[row][depth] b[column][depth], where an operand that is TURNED has its depth
// first. Corners and steps from line to line are multiples of 16 bytes.

struct Lane {
    int row, column, warp;
    __device__ __forceinline__ Lane() {
        const int lane = threadIdx.x % 32;
        row = lane / 4, column = lane % 4 * 2, warp = threadIdx.x / 32;
    }
    // Of a lane's number i of the four.
    __device__ __forceinline__ int row_of(int i) const { return row + i / 2 * 8; }
    __device__ __forceinline__ int column_of(int i, int tile) const { return tile * 8 + column + i % 2; }
};

// What is left of a 16 x 16 block of a: all of it, or the pairs that two halves of 2 SPAN rows make, the first half on the
// side of a's rows (BEHIND false) or the second.
struct Whole {
    __device__ __forceinline__ bool operator()(int, int) const { return true; }
};
struct Halves {
    int span;
    bool behind;
    __device__ __forceinline__ bool operator()(int row, int depth) const {
        return ((row ^ depth) & -span) == span && bool(row & span) == behind;
    }
};

template <class T>
struct __align__(16) Line {
    enum { COUNT = 16 / sizeof(T) };
    T x[COUNT];
};
template <class T>
struct __align__(2 * sizeof(T)) Two {
    T x[2];
};

template <bool TURNED_A, bool TURNED_B, class T, int TILES, class Left>
__device__ __forceinline__ void multiply_fused(T (&sum)[TILES][4], const T* a, int step_a, const T* b, int step_b, int depth,
                                               const Left& left_of) {
    enum { COUNT = Line<T>::COUNT };
    const Lane lane;
#pragma unroll 1  // more at once would only cost registers
    for (int k = 0; k < depth; k += COUNT) {
        T left[2][COUNT];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = lane.row + 8 * h;
            if (TURNED_A) {
#pragma unroll
                for (int i = 0; i < COUNT; ++i) left[h][i] = a[(k + i) * step_a + row];
            } else {
                const Line<T> line = *reinterpret_cast<const Line<T>*>(a + row * step_a + k);
#pragma unroll
                for (int i = 0; i < COUNT; ++i) left[h][i] = line.x[i];
            }
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                if (!left_of(row, k + i)) left[h][i] = 0;
            }
        }
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            T right[2][COUNT];
            const int column = tile * 8 + lane.column;
            if (TURNED_B) {
#pragma unroll
                for (int i = 0; i < COUNT; ++i) {
                    const Two<T> two = *reinterpret_cast<const Two<T>*>(b + (k + i) * step_b + column);
                    right[0][i] = two.x[0], right[1][i] = two.x[1];
                }
            } else {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const Line<T> line = *reinterpret_cast<const Line<T>*>(b + (column + c) * step_b + k);
#pragma unroll
                    for (int i = 0; i < COUNT; ++i) right[c][i] = line.x[i];
                }
            }
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
#pragma unroll
                for (int n = 0; n < 4; ++n) sum[tile][n] += left[n / 2][i] * right[n % 2][i];
            }
        }
    }
}

// ---- tensor cores -------------------------------------------------------------------------------------------------------
// Instructions stand in functions of their own, which the emulator of the tests has too, fragment by fragment.

// One product of 16 rows, 8 columns and depth 16; bfloat16 in pairs, the lower index in the lower half of a word.
__device__ __forceinline__ void mma(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#ifdef SCANFIELD_EMULATED
    emulator::mma_m16n8k16(sum, a, b);
#else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
// Four matrices of 8 x 8 from shared memory, lane l naming line l % 8 of matrix l / 8. A lane gets of each line lane / 4,
// columns 2 (lane % 4) and one more; TURNED: column lane / 4, lines 2 (lane % 4) and one more.
template <bool TURNED>
__device__ __forceinline__ void load_matrices(unsigned (&found)[4], const bfloat16* line) {
#ifdef SCANFIELD_EMULATED
    emulator::ldmatrix_x4(found, line, TURNED);
#else
    unsigned at;
    asm("{ .reg .u64 x; cvta.to.shared.u64 x, %1; cvt.u32.u64 %0, x; }" : "=r"(at) : "l"(line));
    if (TURNED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(found[0]), "=r"(found[1]), "=r"(found[2]), "=r"(found[3])
                     : "r"(at)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(found[0]), "=r"(found[1]), "=r"(found[2]), "=r"(found[3])
                     : "r"(at)
                     : "memory");
    }
#endif
}
// As `rounded`, in one instruction of the cards that have tensor cores for bfloat16.
__device__ __forceinline__ bfloat16 narrowed(float x) {
#ifdef SCANFIELD_EMULATED
    return rounded(x, bfloat16());
#else
    bfloat16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
#endif
}

// A number as two of bfloat16, to 16 bits: bfloat16 has the range of float32, which a state needs and float16 lacks.
struct Split {
    bfloat16 high, low;
};
__device__ __forceinline__ float load(const Split* place) { return widened(place->high) + widened(place->low); }

// How a number becomes an operand.
__device__ __forceinline__ void put(float* place, float x) { *place = x; }
__device__ __forceinline__ void put(double* place, double x) { *place = x; }
__device__ __forceinline__ void put(bfloat16* place, float x) { *place = narrowed(x); }
__device__ __forceinline__ void put(Split* place, float x) {
    place->high = narrowed(x);
    const float rest = x - widened(place->high);
    place->low = narrowed(is_finite(rest) ? rest : 0.0f);
}

__device__ __forceinline__ unsigned joined(bfloat16 low, bfloat16 high) { return low.bits | unsigned(high.bits) << 16; }

// The fragments of an operand in each of its PIECES: 16 rows by 16 of depth on the left, 16 columns on the right.
template <class Operand>
struct Fragments;
template <>
struct Fragments<bfloat16> {
    enum { PIECES = 1 };
    template <bool TURNED>
    static __device__ __forceinline__ void left(unsigned (&found)[1][4], const bfloat16* a, int step, int k) {
        const int line = threadIdx.x % 8, matrix = threadIdx.x % 32 / 8;
        if (TURNED) {
            load_matrices<true>(found[0], a + (k + matrix / 2 * 8 + line) * step + matrix % 2 * 8);
        } else {
            load_matrices<false>(found[0], a + (matrix % 2 * 8 + line) * step + k + matrix / 2 * 8);
        }
    }
    template <bool TURNED>
    static __device__ __forceinline__ void right(unsigned (&found)[1][2][2], const bfloat16* b, int step, int k) {
        const int line = threadIdx.x % 8, matrix = threadIdx.x % 32 / 8;
        unsigned four[4];
        if (TURNED) {
            load_matrices<true>(four, b + (k + matrix % 2 * 8 + line) * step + matrix / 2 * 8);
        } else {
            load_matrices<false>(four, b + (matrix / 2 * 8 + line) * step + k + matrix % 2 * 8);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) found[0][i / 2][i % 2] = four[i];
    }
};
template <>
struct Fragments<Split> {
    enum { PIECES = 2 };
    // Two numbers that follow each other in depth.
    template <bool TURNED>
    static __device__ __forceinline__ void pair(unsigned& high, unsigned& low, const Split* x, int step, int row, int k) {
        Split one, two;
        if (TURNED) {
            one = x[k * step + row], two = x[(k + 1) * step + row];
        } else {
            const Two<Split> both = *reinterpret_cast<const Two<Split>*>(x + row * step + k);
            one = both.x[0], two = both.x[1];
        }
        high = joined(one.high, two.high), low = joined(one.low, two.low);
    }
    template <bool TURNED>
    static __device__ __forceinline__ void left(unsigned (&found)[2][4], const Split* a, int step, int k) {
        const Lane lane;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            pair<TURNED>(found[0][i], found[1][i], a, step, lane.row + i % 2 * 8, k + lane.column + i / 2 * 8);
        }
    }
    template <bool TURNED>
    static __device__ __forceinline__ void right(unsigned (&found)[2][2][2], const Split* b, int step, int k) {
        const Lane lane;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            pair<TURNED>(found[0][i / 2][i % 2], found[1][i / 2][i % 2], b, step, i / 2 * 8 + lane.row,
                         k + lane.column + i % 2 * 8);
        }
    }
};

template <bool TURNED_A, bool TURNED_B, class Operand, int TILES, class Left>
__device__ __forceinline__ void multiply_tensor(float (&sum)[TILES][4], const Operand* a, int step_a, const Operand* b,
                                                int step_b, int depth, const Left& left_of) {
    typedef Fragments<Operand> Of;
    enum { PIECES = Of::PIECES };
    const Lane lane;
#pragma unroll 1
    for (int k = 0; k < depth; k += 16) {
        unsigned left[PIECES][4];
        Of::template left<TURNED_A>(left, a, step_a, k);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = lane.row + i % 2 * 8, at = k + lane.column + i / 2 * 8;
            const unsigned kept = (left_of(row, at) ? 0xffffu : 0u) | (left_of(row, at + 1) ? 0xffff0000u : 0u);
#pragma unroll
            for (int p = 0; p < PIECES; ++p) left[p][i] &= kept;
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile += 2) {
            unsigned right[PIECES][2][2];
            Of::template right<TURNED_B>(right, b + tile * 8 * (TURNED_B ? 1 : step_b), step_b, k);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                // The small ones first; the product of two low pieces is below the last bit.
                if (PIECES == 2) {
                    mma(sum[tile + n], left[PIECES - 1], right[0][n]), mma(sum[tile + n], left[0], right[PIECES - 1][n]);
                }
                mma(sum[tile + n], left[0], right[0][n]);
            }
        }
    }
}

// ---- either -------------------------------------------------------------------------------------------------------------

template <class Operand>
struct Product {
    template <bool TURNED_A, bool TURNED_B, int TILES, class Left>
    static __device__ __forceinline__ void run(Operand (&sum)[TILES][4], const Operand* a, int step_a, const Operand* b,
                                               int step_b, int depth, const Left& left_of) {
        multiply_fused<TURNED_A, TURNED_B>(sum, a, step_a, b, step_b, depth, left_of);
    }
};
template <class Operand>
struct TensorProduct {
    template <bool TURNED_A, bool TURNED_B, int TILES, class Left>
    static __device__ __forceinline__ void run(float (&sum)[TILES][4], const Operand* a, int step_a, const Operand* b,
                                               int step_b, int depth, const Left& left_of) {
        multiply_tensor<TURNED_A, TURNED_B>(sum, a, step_a, b, step_b, depth, left_of);
    }
};
template <>
struct Product<bfloat16> : TensorProduct<bfloat16> {};
template <>
struct Product<Split> : TensorProduct<Split> {};

template <bool TURNED_A, bool TURNED_B, class Operand, class T, int TILES, class Left>
__device__ __forceinline__ void multiply(T (&sum)[TILES][4], const Operand* a, int step_a, const Operand* b, int step_b,
                                         int depth, const Left& left_of) {
    Product<Operand>::template run<TURNED_A, TURNED_B>(sum, a, step_a, b, step_b, depth, left_of);
}
template <bool TURNED_A, bool TURNED_B, class Operand, class T, int TILES>
__device__ __forceinline__ void multiply(T (&sum)[TILES][4], const Operand* a, int step_a, const Operand* b, int step_b,
                                         int depth) {
    multiply<TURNED_A, TURNED_B>(sum, a, step_a, b, step_b, depth, Whole());
}
