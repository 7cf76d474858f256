// The CUDA execution model on a CPU, to run kernels in tests: g++ -std=c++17, x86-64.
//
// A thread of a block is a fiber; fibers switch only where CUDA threads wait for each other (barriers, warp shuffles and
// votes). One block runs after the other. A launch takes an order: bit 0 turns the threads of a block around, bit 1 the
// blocks. A kernel whose result depends on it lacks a barrier, or has two blocks that meet.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <sys/mman.h>
#include <type_traits>
#include <utility>
#include <vector>

#define SCANFIELD_EMULATED 1
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static  // one block at a time: what a block's threads share may be the process's
#define __restrict__ __restrict

struct dim3 {
    unsigned x, y, z;
};
static dim3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

namespace emulator {

constexpr size_t STACK = 256 * 1024;
constexpr unsigned WARP = 32;

enum class Waits : uint8_t { nothing, warp, block, done };

struct Fiber {
    void* stack_pointer = nullptr;
    Waits waits = Waits::nothing;
    unsigned mask = 0;   // the lanes that a warp's collective names
    unsigned syncs = 0;  // that the thread has passed: __syncwarp
};

// What lanes show each other in a collective. Two sets in turn: a lane may enter the next while others still read.
struct Exchange {
    unsigned turn[WARP] = {};
    uint64_t shown[2][WARP] = {};
};

struct Block {
    std::vector<Fiber> fibers;
    std::vector<Exchange> warps;
    char* stacks = nullptr;
    size_t stacks_held = 0;
    void* scheduler = nullptr;
    unsigned current = 0;
    bool turned = false;
    unsigned barriers = 0;  // that the block has passed
    void (*entry)(void*) = nullptr;
    void* argument = nullptr;
    std::string error;
    int any = 0, all = 1, count = 0;              // of the predicates at the barrier being entered
    int met_any = 0, met_all = 0, met_count = 0;  // of the last barrier
};

static Block block;
static unsigned char* dynamic_shared = nullptr;

}  // namespace emulator

#ifdef SCANFIELD_RACES
#include "races.h"
#endif

namespace emulator {

#if !defined(__x86_64__)
#error "the emulator switches stacks in x86-64 assembly"
#endif
extern "C" void scanfield_emulator_switch(void** save, void* to);
asm(R"(.text
.weak scanfield_emulator_switch
.type scanfield_emulator_switch,@function
scanfield_emulator_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp,(%rdi)
  mov %rsi,%rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");

inline void wait(Waits reason) {
    Fiber& fiber = block.fibers[block.current];
    fiber.waits = reason;
    scanfield_emulator_switch(&fiber.stack_pointer, block.scheduler);
}

inline void first_call() {
    block.entry(block.argument);
    wait(Waits::done);
    __builtin_trap();
}

inline void resume(unsigned i) {
    block.current = i;
    threadIdx = {i % blockDim.x, (i / blockDim.x) % blockDim.y, i / (blockDim.x * blockDim.y)};
    block.fibers[i].waits = Waits::nothing;
    scanfield_emulator_switch(&block.scheduler, block.fibers[i].stack_pointer);
}

inline void make_stacks(unsigned threads) {
    if (block.stacks_held < threads) {
        if (block.stacks) munmap(block.stacks, block.stacks_held * STACK);
        block.stacks = static_cast<char*>(mmap(nullptr, threads * STACK, PROT_READ | PROT_WRITE,
                                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        block.stacks_held = threads;
    }
    block.fibers.assign(threads, Fiber{});
    block.warps.assign((threads + WARP - 1) / WARP, Exchange{});
    for (unsigned i = 0; i < threads; ++i) {
        void** top = reinterpret_cast<void**>(block.stacks + (i + 1) * STACK) - 2;  // aligned at a function's entry
        *top = reinterpret_cast<void*>(first_call);
        std::memset(top - 6, 0, 6 * sizeof(void*));  // the registers that the switch pops
        block.fibers[i].stack_pointer = top - 6;
    }
}

// Lets lanes go that all stand at one collective. False where some wait and none can go: they wait for a lane elsewhere.
inline bool release_warp(unsigned low, unsigned high) {
    bool waiting = false;
    for (unsigned i = low; i < high; ++i) {
        const Fiber& fiber = block.fibers[i];
        if (fiber.waits != Waits::warp) continue;
        waiting = true;
        bool complete = true;
        for (unsigned j = low; j < high; ++j) {
            if (!((fiber.mask >> (j - low)) & 1u)) continue;
            const Fiber& other = block.fibers[j];
            // A lane that has returned takes part in no collective, on a card either.
            complete &= other.waits == Waits::warp && other.mask == fiber.mask;
        }
        if (complete) {
            const unsigned mask = fiber.mask;
            for (unsigned j = low; j < high; ++j)
                if ((mask >> (j - low)) & 1u) block.fibers[j].waits = Waits::nothing;
            return true;
        }
    }
    return !waiting;
}

inline bool run_warp(unsigned low, unsigned high) {
    bool ran = false;
    for (;;) {
        bool now = false;
        for (unsigned j = low; j < high; ++j) {
            const unsigned i = block.turned ? high - 1 - (j - low) : j;
            if (block.fibers[i].waits == Waits::nothing) {
                now = true;
                resume(i);
            }
        }
        ran |= now;
        if (!release_warp(low, high)) {
            block.error = "a warp collective names a lane that does not take part in it";
            return ran;
        }
        bool ready = false;
        for (unsigned i = low; i < high; ++i) ready |= block.fibers[i].waits == Waits::nothing;
        if (!ready) return ran;
    }
}

inline void run_block(unsigned threads) {
    make_stacks(threads);
#ifdef SCANFIELD_RACES
    races::fibers = block.fibers.data(), ++races::block_number;
#endif
    const unsigned warps = (threads + WARP - 1) / WARP;
    for (;;) {
        for (unsigned k = 0; k < warps; ++k) {
            const unsigned w = block.turned ? warps - 1 - k : k;
            run_warp(w * WARP, std::min(threads, (w + 1) * WARP));
            if (!block.error.empty()) return;
        }
        bool barrier = false, returned = false;
        for (Fiber& fiber : block.fibers) {
            barrier |= fiber.waits == Waits::block;
            returned |= fiber.waits == Waits::done;
        }
        if (!barrier) return;
        if (returned) {
            block.error = "a thread returned before a barrier that others wait at";
            return;
        }
        for (Fiber& fiber : block.fibers) fiber.waits = Waits::nothing;
        ++block.barriers;
        block.met_any = block.any, block.met_all = block.all, block.met_count = block.count;
        block.any = 0, block.all = 1, block.count = 0;
    }
}

inline unsigned lane() { return block.current % WARP; }

// Every lane of the mask shows a value; then each reads what `source` showed, or keeps its own.
template <class T>
T exchange(unsigned mask, T value, unsigned source, bool reads) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "a shuffle moves at most 8 bytes");
    Exchange& warp = block.warps[block.current / WARP];
    const unsigned own = lane(), set = warp.turn[own]++ & 1u;
    std::memcpy(&warp.shown[set][own], &value, sizeof(T));
    if (!((mask >> own) & 1u)) {
        block.error = "a lane takes part in a warp collective whose mask does not name it";
    }
    block.fibers[block.current].mask = mask;
    wait(Waits::warp);
    T result = value;
    if (reads) {
        if (!((mask >> source) & 1u)) block.error = "a shuffle reads from a lane that its mask does not name";
        std::memcpy(&result, &warp.shown[set][source], sizeof(T));
    }
    return result;
}

inline unsigned vote(unsigned mask, bool predicate) {
    Exchange& warp = block.warps[block.current / WARP];
    const unsigned set = warp.turn[lane()] & 1u;
    exchange(mask, uint64_t(predicate), 0, false);
    unsigned found = 0;
    for (unsigned i = 0; i < WARP; ++i)
        if ((mask >> i) & 1u) found |= unsigned(warp.shown[set][i] & 1u) << i;
    return found;
}

// What lanes show each other where 8 bytes are too few; in the same two sets in turn.
struct Wide {
    unsigned words[6];
};
static Wide wide[2][1024];

inline float of_bfloat16(unsigned bits) {
    const unsigned word = bits << 16;
    float x;
    std::memcpy(&x, &word, 4);
    return x;
}

// mma.sync.m16n8k16 with bfloat16 and sums in float: a lane's fragments as the PTX ISA has them. Its word i of a holds row
// lane / 4 + 8 (i % 2), columns 2 (lane % 4) + 8 (i / 2) and one more; word i of b rows 2 (lane % 4) + 8 i and one more,
// column lane / 4; its number i of the sums row lane / 4 + 8 (i / 2), column 2 (lane % 4) + i % 2.
inline void mma_m16n8k16(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    const unsigned own = lane(), first = block.current - own;
    Wide* shown = wide[block.warps[block.current / WARP].turn[own] & 1u] + first;
    shown[own] = {{a[0], a[1], a[2], a[3], b[0], b[1]}};
    exchange(0xffffffffu, 0u, 0, false);
    for (unsigned i = 0; i < 4; ++i) {
        const unsigned row = own / 4 + 8 * (i / 2), column = 2 * (own % 4) + i % 2;
        float total = 0;
        for (unsigned k = 0; k < 16; ++k) {
            const unsigned shift = 16 * (k % 2);
            const unsigned left = shown[row % 8 * 4 + k % 8 / 2].words[row / 8 + 2 * (k / 8)] >> shift & 0xffffu;
            const unsigned right = shown[column * 4 + k % 8 / 2].words[4 + k / 8] >> shift & 0xffffu;
            total += of_bfloat16(left) * of_bfloat16(right);
        }
        sum[i] += total;
    }
}

// ldmatrix.m8n8.x4: lane l names line l % 8 of matrix l / 8; of each matrix a lane gets line lane / 4, numbers
// 2 (lane % 4) and one more, or turned: of lines 2 (lane % 4) and one more number lane / 4.
inline void ldmatrix_x4(unsigned (&found)[4], const void* line, bool turned) {
    const unsigned own = lane(), first = block.current - own;
    Wide* shown = wide[block.warps[block.current / WARP].turn[own] & 1u] + first;
    if (reinterpret_cast<uintptr_t>(line) % 16) block.error = "a line for ldmatrix is not aligned to 16 bytes";
    std::memcpy(shown[own].words, &line, sizeof(line));
    exchange(0xffffffffu, 0u, 0, false);
    for (unsigned i = 0; i < 4; ++i) {
        uint16_t pair[2];
        for (unsigned j = 0; j < 2; ++j) {
            const unsigned column = 2 * (own % 4) + j;
            const uint16_t* from;
            std::memcpy(&from, shown[8 * i + (turned ? column : own / 4)].words, sizeof(from));
            pair[j] = from[turned ? own / 4 : column];
        }
        found[i] = pair[0] | unsigned(pair[1]) << 16;
    }
}

// The kind of each parameter, for the loader to compare with what a launcher passes: CuPy itself checks nothing.
template <class T>
std::string kind() {
    using U = std::remove_cv_t<T>;
    if (std::is_pointer<U>::value) return "p";
    const char* letter = std::is_floating_point<U>::value ? "f" : std::is_signed<U>::value ? "i" : "u";
    return letter + std::to_string(sizeof(U));
}

template <class... P>
std::string kinds(void (*)(P...)) {
    std::string all;
    ((all += kind<P>() + " "), ...);
    return all;
}

template <class... P, size_t... I>
void call(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_reference_t<P>*>(arguments[I])...);
}

template <class... P>
const char* launch(void (*kernel)(P...), const unsigned* grid, const unsigned* size, size_t shared, void** arguments,
                   int order) {
    struct Bound {
        void (*kernel)(P...);
        void** arguments;
    } bound{kernel, arguments};
    block.error.clear();
    block.turned = order & 1;
    block.argument = &bound;
    block.entry = [](void* p) {
        Bound* bound = static_cast<Bound*>(p);
        call(bound->kernel, bound->arguments, std::index_sequence_for<P...>{});
    };
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {size[0], size[1], size[2]};
    // Exactly as large as asked for, so that a sanitizer sees what lies past it.
    void* memory = nullptr;
    if (posix_memalign(&memory, 128, shared ? shared : 1)) return "no memory";
    dynamic_shared = static_cast<unsigned char*>(memory);
#ifdef SCANFIELD_RACES
    races::watch(races::shared, memory, shared, -1);
    races::block_number = 0;
#endif
    const uint64_t blocks = uint64_t(grid[0]) * grid[1] * grid[2];
    for (uint64_t q = 0; q < blocks && block.error.empty(); ++q) {
        const uint64_t i = order & 2 ? blocks - 1 - q : q;
        blockIdx = {unsigned(i % grid[0]), unsigned(i / grid[0] % grid[1]), unsigned(i / grid[0] / grid[1])};
        std::memset(dynamic_shared, 0xFF, shared);  // NaN: a read before a write shows
        run_block(size[0] * size[1] * size[2]);
#ifdef SCANFIELD_RACES
        races::fibers = nullptr;
#endif
    }
    std::free(memory);
    return block.error.empty() ? nullptr : block.error.c_str();
}

}  // namespace emulator

#define SCANFIELD_EMULATOR_EXPORT(name)                                                                       \
    extern "C" const char* launch_##name(const unsigned* grid, const unsigned* size, size_t shared, void** a, \
                                         int order) {                                                        \
        return emulator::launch(name, grid, size, shared, a, order);                                         \
    }                                                                                                         \
    extern "C" const char* kinds_##name() {                                                                   \
        static std::string all = emulator::kinds(name);                                                       \
        return all.c_str();                                                                                   \
    }

inline void __syncthreads() { emulator::wait(emulator::Waits::block); }
inline int __syncthreads_or(int p) {
    emulator::block.any |= !!p;
    __syncthreads();
    return emulator::block.met_any;
}
inline int __syncthreads_and(int p) {
    emulator::block.all &= !!p;
    __syncthreads();
    return emulator::block.met_all;
}
inline int __syncthreads_count(int p) {
    emulator::block.count += !!p;
    __syncthreads();
    return emulator::block.met_count;
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
    emulator::exchange(mask, 0, 0, false);
    ++emulator::block.fibers[emulator::block.current].syncs;
}
inline void __threadfence() {}
inline void __threadfence_block() {}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    const unsigned first = emulator::lane() & ~(width - 1u);
    return emulator::exchange(mask, value, first | (source & (width - 1u)), true);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int turned, int width = 32) {
    const unsigned own = emulator::lane(), source = own ^ turned;
    return emulator::exchange(mask, value, source, source < (own & ~(width - 1u)) + width);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
    const unsigned own = emulator::lane();
    return emulator::exchange(mask, value, own - by, (own & (width - 1u)) >= by);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
    const unsigned own = emulator::lane();
    return emulator::exchange(mask, value, own + by, (own & (width - 1u)) + by < unsigned(width));
}
inline unsigned __ballot_sync(unsigned mask, int p) { return emulator::vote(mask, p); }
inline int __any_sync(unsigned mask, int p) { return emulator::vote(mask, p) != 0; }
inline int __all_sync(unsigned mask, int p) { return emulator::vote(mask, p) == mask; }

// Blocks and threads take turns, so that what is atomic on a card is a plain step here.
template <class T, class U>
T atomicAdd(T* place, U value) {
    const T before = *place;
    *place = T(before + T(value));
    return before;
}
template <class T, class U>
T atomicMax(T* place, U value) {
    const T before = *place;
    *place = std::max(before, T(value));
    return before;
}
template <class T, class U>
T atomicOr(T* place, U value) {
    const T before = *place;
    *place = T(before | T(value));
    return before;
}
template <class T>
T atomicCAS(T* place, T expected, T value) {
    const T before = *place;
    if (before == expected) *place = value;
    return before;
}

template <class T>
T __ldg(const T* place) {
    return *place;
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __uint_as_float(unsigned x) {
    float y;
    std::memcpy(&y, &x, 4);
    return y;
}
inline unsigned __float_as_uint(float x) {
    unsigned y;
    std::memcpy(&y, &x, 4);
    return y;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
using std::max;
using std::min;
