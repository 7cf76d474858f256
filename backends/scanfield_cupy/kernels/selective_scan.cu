// Mamba's selective scan and its gradient.
//
//   h_t = exp(s_t A) h_(t-1) + s_t u_t B_t;   r_t = f Re sum_n C_t h_t;   q_t = r_t + D u_t;   out_t = q_t z_t sigmoid(z_t)
//
// with s_t = clamp(softplus(delta_t + bias)) and f = 2 for complex A, else 1.
//
// A block takes CHANNELS = THREADS / SHARE channels of one sequence. SHARE threads share a channel, PART of its states
// each, in registers. Time goes by in tiles of TILE tokens: their steps, inputs, B and C are brought into shared memory by
// all threads at once, so that a softplus or a load is done once for a channel. Long sequences of few channels are cut
// into segments, a block each, whose maps (the sum of the steps, the state from zero) come first (`summary`).
//
// Backward walks over chunks of CHUNK tokens from the last to the first. From the state that forward kept at a chunk's
// start it walks forward once for the states at the tiles' starts, then over the tiles from last to first: a tile's
// decays and states are computed once more, into registers, and the gradient walks back through them:
//
//   G = c + f conj(C_t) dr_t;   dC_t = f dr_t conj(h_t);   dB_t = s_t u_t G;   dx_t = Re sum conj(B_t) G;
//   W = G conj(exp(s_t A) h_(t-1));   dA = sum s_t W;   ds_t = u_t dx_t + Re sum conj(A) W;   c = conj(exp(s_t A)) G
//
// B's and C's gradients are summed over a block's channels here, over blocks by who launched them, in a fixed order: no
// atomics, the same bits on every call. Nothing is divided by a decay.
//
// References: Gu and Dao, "Mamba", arXiv 2312.00752, equation 2 and algorithm 2.
// Compiled once for each INPUT (the type of u, delta and z in memory), VECTOR (of B and C), STATE, PART and SHARE.

#include "selective_forward.cuh"
#include "selective_backward.cuh"

#define ROWS(x) const INPUT *x, i64 x##_row, i64 x##_time, i64 x##_channel
#define VECTORS(x) const VECTOR *x, i64 x##_row, i64 x##_time, i64 x##_group, i64 x##_state, i64 x##_per_group, i64 x##_own
#define GIVEN                                                                                                          \
    ROWS(u), ROWS(delta), ROWS(z), const T *A, VECTORS(B), VECTORS(C), const R *D, const R *bias, R low, R high,       \
        i64 use_softplus
#define SIZES                                                                                                          \
    i64 sequences, i64 time, i64 channels, i64 states, i64 unit, i64 blocks_per_unit, i64 channel_blocks,              \
        i64 segment_tokens, i64 segments
#define MAPS(constant) constant R *step_sums, constant T *state_maps, constant int *wild
#define AS_ROWS(x) Rows{x, x##_row, x##_time, x##_channel}
#define AS_VECTORS(x) Vectors{x, x##_row, x##_time, x##_group, x##_state, x##_per_group, x##_own}
#define AS_STEPS Steps{bias, low, high, use_softplus}
#define AS_SIZES                                                                                                       \
    Sizes { sequences, time, channels, states, unit, blocks_per_unit, channel_blocks, segment_tokens, segments }

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    scan_summary(GIVEN, const T* initial, const i64* bounds, SIZES, MAPS()) {
    summary<false>(AS_ROWS(u), AS_ROWS(delta), AS_ROWS(z), A, AS_VECTORS(B), AS_VECTORS(C), AS_STEPS, nullptr, initial,
                   bounds, AS_SIZES, step_sums, state_maps, wild);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    scan_summary_back(GIVEN, const R* d_output, const T* d_final, const i64* bounds, SIZES, MAPS()) {
    summary<true>(AS_ROWS(u), AS_ROWS(delta), AS_ROWS(z), A, AS_VECTORS(B), AS_VECTORS(C), AS_STEPS, d_output, d_final,
                  bounds, AS_SIZES, step_sums, state_maps, wild);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    scan_forward(GIVEN, const T* initial, const i64* bounds, SIZES, MAPS(const), INPUT* output, T* final, T* starts) {
    forward(AS_ROWS(u), AS_ROWS(delta), AS_ROWS(z), A, AS_VECTORS(B), AS_VECTORS(C), D, AS_STEPS, initial, bounds,
            AS_SIZES, step_sums, state_maps, wild, output, final, starts);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    scan_backward(GIVEN, const T* starts, const R* d_output, const T* d_final, const i64* bounds, SIZES, MAPS(const),
                  R* d_u, R* d_delta, R* d_z, T* d_A, T* d_B, T* d_C, R* d_D, R* d_bias, T* d_state, i64 rows) {
    backward(AS_ROWS(u), AS_ROWS(delta), AS_ROWS(z), A, AS_VECTORS(B), AS_VECTORS(C), D, AS_STEPS, starts, d_output,
             d_final, bounds, AS_SIZES, step_sums, state_maps, wild,
             Gradients{d_u, d_delta, d_z, d_A, d_B, d_C, d_D, d_bias, d_state}, rows);
}
