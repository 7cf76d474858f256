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

// One product of 16 rows, 8 columns and depth 16; bfloat16 in pairs, the lower index in the lower half of a word.
__device__ __forceinline__ void mma(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#ifdef SCANFIELD_EMULATED
    emulator::mma_m16n8k16(sum, a, b);
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// A number as two of bfloat16, to 16 bits: bfloat16 has the range of float32, which a state needs and float16 lacks.
struct Split {
    bfloat16 high, low;
};
__device__ __forceinline__ void store(Split* place, float x) {
    place->high = rounded(x, bfloat16());
    const float rest = x - widened(place->high);
    place->low = rounded(is_finite(rest) ? rest : 0.0f, bfloat16());
}
__device__ __forceinline__ float load(const Split* place) { return widened(place->high) + widened(place->low); }

__device__ __forceinline__ unsigned joined(unsigned short low, unsigned short high) { return low | unsigned(high) << 16; }

// Two numbers of an operand that follow each other in depth.
template <bool TURNED>
__device__ __forceinline__ void take_pair(const bfloat16* x, int step, int row, int depth, bool first, bool second,
                                          unsigned (&pair)[1]) {
    if (TURNED) {
        pair[0] = joined(x[depth * step + row].bits, x[(depth + 1) * step + row].bits);
    } else {
        pair[0] = *reinterpret_cast<const unsigned*>(x + row * step + depth);
    }
    pair[0] &= (first ? 0xffffu : 0u) | (second ? 0xffff0000u : 0u);
}
template <bool TURNED>
__device__ __forceinline__ void take_pair(const Split* x, int step, int row, int depth, bool first, bool second,
                                          unsigned (&pair)[2]) {
    Split one, two;
    if (TURNED) {
        one = x[depth * step + row], two = x[(depth + 1) * step + row];
    } else {
        const Two<Split> both = *reinterpret_cast<const Two<Split>*>(x + row * step + depth);
        one = both.x[0], two = both.x[1];
    }
    const unsigned kept = (first ? 0xffffu : 0u) | (second ? 0xffff0000u : 0u);
    pair[0] = joined(one.high.bits, two.high.bits) & kept, pair[1] = joined(one.low.bits, two.low.bits) & kept;
}

template <class Operand>
struct Pieces {
    enum { COUNT = 1 };
};
template <>
struct Pieces<Split> {
    enum { COUNT = 2 };
};

template <bool TURNED_A, bool TURNED_B, class Operand, int TILES, class Left>
__device__ __forceinline__ void multiply_tensor(float (&sum)[TILES][4], const Operand* a, int step_a, const Operand* b,
                                                int step_b, int depth, const Left& left_of) {
    enum { PIECES = Pieces<Operand>::COUNT };
    const Lane lane;
    for (int k = 0; k < depth; k += 16) {
        unsigned left[PIECES][4], pair[PIECES];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = lane.row + i % 2 * 8, at = k + lane.column + i / 2 * 8;
            take_pair<TURNED_A>(a, step_a, row, at, left_of(row, at), left_of(row, at + 1), pair);
#pragma unroll
            for (int p = 0; p < PIECES; ++p) left[p][i] = pair[p];
        }
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            unsigned right[PIECES][2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                take_pair<TURNED_B>(b, step_b, tile * 8 + lane.row, k + lane.column + i * 8, true, true, pair);
#pragma unroll
                for (int p = 0; p < PIECES; ++p) right[p][i] = pair[p];
            }
            // The small ones first; the product of two low pieces is below the last bit.
            if (PIECES == 2) mma(sum[tile], left[PIECES - 1], right[0]), mma(sum[tile], left[0], right[PIECES - 1]);
            mma(sum[tile], left[0], right[0]);
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
