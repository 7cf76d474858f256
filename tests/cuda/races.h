// Finds data races that no order of threads shows: two threads that touch the same memory, one of them writing, with no
// barrier in between. Kernels are compiled with -fsanitize=thread, which calls a function before each access; the functions
// are those below and not the sanitizer's own, which knows nothing of barriers on a card.
//
// Watched are the block's shared memory and the arrays of a launch, in units of two bytes. Of each unit the last write and
// two reads are kept. Two accesses by threads of a block are in order where a barrier lies between, or __syncwarp for
// lanes of a warp; a shuffle or a product of tensor cores puts no access to memory in order. Blocks of a launch never are.
#pragma once

#define UNWATCHED __attribute__((no_sanitize_thread)) inline

namespace races {

struct Access {
    unsigned block, barrier, sync, thread;  // block: its number and one; 0: nobody's
};
struct Unit {
    Access write, read[2];
};
struct Range {
    uintptr_t low = 0, high = 0;
    int argument = 0;  // of the launch; -1: shared memory
    Unit* units = nullptr;
    UNWATCHED bool has(uintptr_t at) const { return at >= low && at < high; }
};
static Range* arrays = nullptr;
static int count = 0;
static Range shared;
static Range* last = nullptr;
static unsigned block_number = 0;  // and one
static const emulator::Fiber* fibers = nullptr;  // while a block runs
static bool inside = false;  // one of the functions below: what it touches is no kernel's

inline void watch(Range& range, const void* low, size_t bytes, int argument) {
    range.low = reinterpret_cast<uintptr_t>(low), range.high = range.low + bytes, range.argument = argument;
    std::free(range.units);
    range.units = static_cast<Unit*>(std::calloc(bytes / 2 + 1, sizeof(Unit)));
}

UNWATCHED Range* range_of(uintptr_t at) {
    if (shared.has(at)) return &shared;
    if (last && last->has(at)) return last;
    for (int i = 0; i < count; ++i)
        if (arrays[i].has(at)) return last = arrays + i;
    return nullptr;
}

UNWATCHED bool in_order(const Access& before, const Access& now) {
    if (before.block != now.block) return false;
    if (before.thread == now.thread || before.barrier != now.barrier) return true;
    return before.thread / emulator::WARP == now.thread / emulator::WARP && before.sync != now.sync;
}

inline void found(const Range& range, uintptr_t at, const Access& before, const Access& now, const char* what) {
    if (!emulator::block.error.empty()) return;
    const auto who = [](const Access& x) {
        return "thread " + std::to_string(x.thread) + " of block " + std::to_string(x.block - 1);
    };
    const std::string where = range.argument < 0 ? "shared memory" : "argument " + std::to_string(range.argument);
    emulator::block.error = "a race: " + who(before) + " and " + who(now) + " " + what + " byte " +
                            std::to_string(at - range.low) + " of " + where + " without a barrier in between";
}

// What an earlier block left in shared memory is nobody's.
UNWATCHED bool clash(const Range* range, const Access& before, const Access& now) {
    return before.block && !(range == &shared && before.block != now.block) && !in_order(before, now);
}

UNWATCHED void touch(const void* place, size_t bytes, bool writes) {
    uintptr_t at = reinterpret_cast<uintptr_t>(place);
    Range* range = range_of(at);
    if (!range) return;
    const unsigned thread = emulator::block.current;
    const Access now = {block_number, emulator::block.barriers, fibers[thread].syncs, thread};
    const uintptr_t end = at + bytes < range->high ? at + bytes : range->high;
    for (; at < end; at += 2) {
        Unit& unit = range->units[(at - range->low) / 2];
        if (clash(range, unit.write, now)) return found(*range, at, unit.write, now, writes ? "write" : "write and read");
        if (writes) {
            for (const Access& read : unit.read)
                if (clash(range, read, now)) return found(*range, at, read, now, "read and write");
            unit.write = now;
        } else if (clash(range, unit.read[0], now)) {
            if (!clash(range, unit.read[1], now)) unit.read[1] = now;
        } else {
            unit.read[0] = now;
        }
    }
}

UNWATCHED void accessed(const void* place, size_t bytes, bool writes) {
    if (inside || !fibers) return;
    inside = true;
    touch(place, bytes, writes);
    inside = false;
}

}  // namespace races

extern "C" void watch_arrays(const void* const* lows, const size_t* bytes, const int* arguments, int count) {
    for (int i = 0; i < races::count; ++i) std::free(races::arrays[i].units);
    delete[] races::arrays;
    races::arrays = new races::Range[count], races::count = count, races::last = nullptr;
    for (int i = 0; i < count; ++i) races::watch(races::arrays[i], lows[i], bytes[i], arguments[i]);
}

#define ACCESS(name, size, writes) \
    __attribute__((no_sanitize_thread)) void __tsan_##name##size(void* place) { races::accessed(place, size, writes); }
#define ACCESSES(size) \
    ACCESS(read, size, false) ACCESS(write, size, true) ACCESS(unaligned_read, size, false) ACCESS(unaligned_write, size, true)
extern "C" {
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
__attribute__((no_sanitize_thread)) void __tsan_read_range(void* place, size_t bytes) { races::accessed(place, bytes, false); }
__attribute__((no_sanitize_thread)) void __tsan_write_range(void* place, size_t bytes) { races::accessed(place, bytes, true); }
void __tsan_init() {}
}
