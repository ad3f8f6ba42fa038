// The threads of a threadgroup are fibers: each runs until it reaches a barrier or a simdgroup function, so both behave as on a
// device. Threadgroups run one after another, and so do the threads of kernels that never synchronize.
#include "runtime.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <vector>

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

namespace shim {
namespace {

constexpr size_t STACK = 64 * 1024;
constexpr uint32_t LANES = 32, WIDEST = 64;

enum class State { ready, in_simd, at_simd_barrier, at_barrier, done };

struct Simd {
    alignas(16) char slots[2][LANES * WIDEST];
    uint32_t active[2];
};

struct Fiber {
    void* stack_pointer;
#if !defined(__x86_64__) && !defined(__aarch64__)
    ucontext_t context;
#endif
    Thread at;
    State state;
    int line, flags;
    uint32_t turn, simd_epoch;
    Simd* simd;
};

/// A recorded access to a byte.
struct Seen {
    uint32_t thread, group, epoch, simd_epoch;
    int line;
};

struct Byte {
    Seen writer, reader, other;
};

struct Shadow {
    const char *begin, *end;
    std::vector<Byte> bytes;
};

struct Owned {
    Region* region;
    Body body;
};

struct Run {
    Body body = nullptr;
    const Argument* args = nullptr;
    Thread at = {};
    Report* report = nullptr;
    bool failed = false;
    uint32_t group = 0, epoch[2] = {1, 1};
    std::vector<Shadow> shadows;
};

struct Stop {};

Run run;
std::vector<Fiber> fibers;
std::vector<Simd> simds;
std::vector<Owned> shared;
Fiber* current = nullptr;
char* stacks = nullptr;
size_t stack_count = 0;
uint32_t tries = 0;

// ------------------------------------------------------------ switching

void* scheduler = nullptr;

#if defined(__x86_64__)
extern "C" void shim_switch(void** from, void* to);
asm(R"(
.text
.type shim_switch, @function
shim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size shim_switch, .-shim_switch
)");
constexpr size_t SAVED = 6;
#elif defined(__aarch64__)
extern "C" void shim_switch(void** from, void* to);
#if defined(__APPLE__)
#define SHIM_SYMBOL "_shim_switch"
#else
#define SHIM_SYMBOL "shim_switch"
#endif
asm(".text\n.p2align 2\n" SHIM_SYMBOL R"(:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
)");
#endif

void leave() {
#if defined(__x86_64__) || defined(__aarch64__)
    shim_switch(&current->stack_pointer, scheduler);
#else
    swapcontext(&current->context, static_cast<ucontext_t*>(scheduler));
#endif
}

void enter(Fiber* f) {
    current = f;
#if defined(__x86_64__) || defined(__aarch64__)
    shim_switch(&scheduler, f->stack_pointer);
#else
    ucontext_t here;
    scheduler = &here;
    swapcontext(&here, &f->context);
#endif
    current = nullptr;
}

void begin() {
    run.body(run.args, current->at);
    current->state = State::done;
    leave();
    std::abort();  // a finished thread is never resumed
}

void prepare(Fiber* f, char* stack) {
#if defined(__x86_64__)
    void** top = reinterpret_cast<void**>(stack + STACK);
    *--top = nullptr;  // the return address of `begin`, which never returns; keeps the stack aligned as after a call
    *--top = reinterpret_cast<void*>(&begin);
    for (size_t k = 0; k < SAVED; k++) *--top = nullptr;
    f->stack_pointer = top;
#elif defined(__aarch64__)
    void** top = reinterpret_cast<void**>(stack + STACK - 160);
    std::memset(top, 0, 160);
    top[11] = reinterpret_cast<void*>(&begin);
    f->stack_pointer = top;
#else
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = stack;
    f->context.uc_stack.ss_size = STACK;
    f->context.uc_link = nullptr;
    makecontext(&f->context, begin, 0);
#endif
}

// ------------------------------------------------------------ reports

/// Record the first error found and stop the kernel.
[[noreturn]] void fail(int line, const char* format, ...) {
    if (!run.failed) {
        va_list more;
        va_start(more, format);
        std::vsnprintf(run.report->text, sizeof run.report->text, format, more);
        va_end(more);
        run.report->line = line;
        run.failed = true;
    }
    if (current == nullptr) throw Stop{};
    current->state = State::done;
    leave();
    std::abort();
}

void note(int line, const char* text) {
    if (run.failed) return;
    std::snprintf(run.report->text, sizeof run.report->text, "%s", text);
    run.report->line = line;
    run.failed = true;
}

const Thread& here() { return current != nullptr ? current->at : run.at; }

// ------------------------------------------------------------ lock step

/// Resume the lanes of a simdgroup that wait for each other. Return false if all of them are at a barrier or done.
bool release(Fiber* lanes, uint32_t count) {
    Fiber* first = nullptr;
    uint32_t live = 0, waiting = 0;
    for (uint32_t k = 0; k < count; k++) {
        Fiber& f = lanes[k];
        if (f.state == State::done) continue;
        live |= 1u << k;
        if (f.state == State::at_barrier) continue;
        waiting |= 1u << k;
        if (first == nullptr) first = &f;
    }
    if (first == nullptr) return false;
    for (uint32_t k = 0; k < count; k++) {
        Fiber& f = lanes[k];
        if (f.state != State::done && (f.state != first->state || f.line != first->line)) {
            char text[300];
            std::snprintf(text, sizeof text, "threads %u and %u of a simdgroup meet at different places: lines %d and %d",
                          first->at.lane, f.at.lane, first->line, f.line);
            note(first->line, text);
            return false;
        }
    }
    first->simd->active[first->turn & 1] = live;
    for (uint32_t k = 0; k < count; k++) {
        if (lanes[k].state == State::at_simd_barrier) lanes[k].simd_epoch++;
        if (lanes[k].state != State::done) lanes[k].state = State::ready;
    }
    return waiting != 0;
}

void run_simd(Fiber* lanes, uint32_t count, bool backward) {
    do {
        for (uint32_t k = 0; k < count && !run.failed; k++) {
            Fiber& f = lanes[backward ? count - 1 - k : k];
            if (f.state == State::ready) enter(&f);
        }
    } while (!run.failed && release(lanes, count));
}

/// Resume a threadgroup that waits at a barrier. Return false if all of its threads are done, or one has left.
bool pass_barrier(uint32_t count) {
    Fiber *first = nullptr, *gone = nullptr;
    for (uint32_t k = 0; k < count; k++) {
        Fiber& f = fibers[k];
        if (f.state == State::done && gone == nullptr) gone = &f;
        if (f.state == State::at_barrier && first == nullptr) first = &f;
    }
    if (first == nullptr) return false;
    char text[300];
    if (gone != nullptr) {
        std::snprintf(text, sizeof text, "thread %u has left the kernel, and thread %u waits for it at a barrier", gone->at.index,
                      first->at.index);
        note(first->line, text);
        return false;
    }
    for (uint32_t k = 0; k < count; k++) {
        if (fibers[k].line != first->line) {
            std::snprintf(text, sizeof text, "threads %u and %u meet at different barriers: lines %d and %d", first->at.index,
                          fibers[k].at.index, first->line, fibers[k].line);
            note(first->line, text);
            return false;
        }
    }
    if (first->flags & 1) run.epoch[static_cast<int>(Space::device)]++;
    if (first->flags & 2) run.epoch[static_cast<int>(Space::threadgroup)]++;
    for (uint32_t k = 0; k < count; k++) fibers[k].state = State::ready;
    return true;
}

void run_group(uint32_t count, bool backward) {
    uint32_t groups = (count + LANES - 1) / LANES;
    do {
        for (uint32_t k = 0; k < groups && !run.failed; k++) {
            uint32_t s = backward ? groups - 1 - k : k, from = s * LANES;
            run_simd(&fibers[from], count - from < LANES ? count - from : LANES, backward);
        }
    } while (!run.failed && pass_barrier(count));
}

// ------------------------------------------------------------ dispatch

void need_stacks(size_t count) {
    if (count <= stack_count) return;
    if (stacks != nullptr) munmap(stacks, stack_count * STACK);
    void* got = mmap(nullptr, count * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) std::abort();
    stacks = static_cast<char*>(got);
    stack_count = count;
}

void begin_group() {
    run.group++;
    run.epoch[0]++;
    run.epoch[1]++;
    for (const Owned& o : shared) {
        if (o.body != run.body) continue;
        char* from = static_cast<char*>(const_cast<void*>(o.region->begin));
        std::memset(from, 0xff, static_cast<size_t>(static_cast<const char*>(o.region->end) - from));
    }
}

Thread thread_of(const uint32_t* threads, const uint32_t* size, uint3 group, uint3 place) {
    Thread t;
    t.in_group = place;
    t.group_in_grid = group;
    t.in_grid = {group.x * size[0] + place.x, group.y * size[1] + place.y, group.z * size[2] + place.z};
    t.grid = {threads[0], threads[1], threads[2]};
    uint32_t ends[3] = {threads[0] - group.x * size[0], threads[1] - group.y * size[1], threads[2] - group.z * size[2]};
    t.group = {size[0] < ends[0] ? size[0] : ends[0], size[1] < ends[1] ? size[1] : ends[1], size[2] < ends[2] ? size[2] : ends[2]};
    t.index = (place.z * t.group.y + place.y) * t.group.x + place.x;
    t.lane = t.index % LANES;
    t.simd = t.index / LANES;
    t.simds = (t.group.x * t.group.y * t.group.z + LANES - 1) / LANES;
    return t;
}

void one_group(const uint32_t* threads, const uint32_t* size, uint3 group, bool meets, bool backward) {
    Thread corner = thread_of(threads, size, group, {0, 0, 0});
    uint32_t count = corner.group.x * corner.group.y * corner.group.z;
    begin_group();
    if (meets) {
        need_stacks(count);
        if (fibers.size() < count) fibers.resize(count);
        if (simds.size() < corner.simds) simds.resize(corner.simds);
    }
    for (uint32_t k = 0; k < count && !run.failed; k++) {
        uint32_t i = backward && !meets ? count - 1 - k : k, row = i / corner.group.x;
        Thread t = thread_of(threads, size, group, {i % corner.group.x, row % corner.group.y, row / corner.group.y});
        if (!meets) {
            run.at = t;
            run.body(run.args, t);
            continue;
        }
        Fiber& f = fibers[i];
        f.at = t;
        f.state = State::ready;
        f.turn = f.simd_epoch = 0;
        f.simd = nullptr;
        prepare(&f, stacks + i * STACK);
    }
    if (!meets || run.failed) return;
    for (uint32_t i = 0; i < count; i++) fibers[i].simd = &simds[i / LANES];
    run_group(count, backward);
}

void make_shadow(const Region& r) {
    const char *begin = static_cast<const char*>(r.begin), *end = static_cast<const char*>(r.end);
    for (size_t k = 0; k < run.shadows.size();) {
        if (run.shadows[k].begin < end && begin < run.shadows[k].end) {
            begin = begin < run.shadows[k].begin ? begin : run.shadows[k].begin;
            end = end > run.shadows[k].end ? end : run.shadows[k].end;
            run.shadows.erase(run.shadows.begin() + static_cast<std::ptrdiff_t>(k));
        } else {
            k++;
        }
    }
    run.shadows.push_back({begin, end, {}});
}

Shadow* shadow_of(const Region* r, const char* where) {
    for (Shadow& s : run.shadows) {
        if (s.begin <= where && where < s.end) return &s;
    }
    run.shadows.push_back({static_cast<const char*>(r->begin), static_cast<const char*>(r->end), {}});
    return &run.shadows.back();
}

// ------------------------------------------------------------ races

bool apart(const Seen& before, const Seen& now, Space space, bool same_simd) {
    if (before.thread == 0 || before.thread == now.thread) return true;
    if (before.group != now.group) return space == Space::threadgroup;
    return before.epoch != now.epoch || (same_simd && before.simd_epoch < now.simd_epoch);
}

void race(const Region* region, const char* where, size_t bytes, const Seen& before, const Seen& now, const char* what) {
    long at = (where - static_cast<const char*>(region->begin)) / static_cast<long>(bytes);
    fail(now.line, "%s[%ld] %s by threads %u and %u with no barrier between (lines %d and %d)", region->name, at, what,
         (before.thread - 1) % 1024, (now.thread - 1) % 1024, before.line, now.line);
}

void watch(const Region* region, const char* where, size_t bytes, Access access, int line) {
    const Thread& t = here();
    Seen now = {t.index + 1, run.group, run.epoch[static_cast<int>(region->space)], current != nullptr ? current->simd_epoch : 0, line};
    now.thread += (run.group - 1) * 1024;
    Shadow* shadow = shadow_of(region, where);
    if (shadow->bytes.empty()) shadow->bytes.resize(static_cast<size_t>(shadow->end - shadow->begin));
    Byte* from = &shadow->bytes[static_cast<size_t>(where - shadow->begin)];
    for (size_t k = 0; k < bytes; k++) {
        Byte& b = from[k];
        auto together = [&](const Seen& s) { return (s.thread - 1) / LANES == (now.thread - 1) / LANES; };
        if (!apart(b.writer, now, region->space, together(b.writer))) {
            race(region, where, bytes, b.writer, now, access == Access::read ? "is written and read" : "is written twice");
        }
        if (access == Access::read) {
            if (b.reader.thread != now.thread) b.other = b.reader;
            b.reader = now;
            continue;
        }
        for (const Seen* s : {&b.reader, &b.other}) {
            if (!apart(*s, now, region->space, together(*s))) race(region, where, bytes, *s, now, "is read and written");
        }
        b.writer = now;
    }
}

void alone(int line) {
    if (current == nullptr) fail(line, "threads meet, and nobody knew that they would");
}

}  // namespace

// ---------------------------------------------------------------- what kernels call

void barrier(int flags, int line) {
    alone(line);
    current->state = State::at_barrier;
    current->line = line;
    current->flags = flags;
    leave();
}

void simd_barrier(int flags, int line) {
    alone(line);
    current->state = State::at_simd_barrier;
    current->line = line;
    current->flags = flags;
    current->turn++;
    leave();
}

const void* exchange(const void* value, size_t bytes, int line, uint32_t* active) {
    alone(line);
    Fiber* f = current;
    f->turn++;
    char* slots = f->simd->slots[f->turn & 1];
    std::memcpy(slots + f->at.lane * bytes, value, bytes);
    f->state = State::in_simd;
    f->line = line;
    leave();
    f = current;
    *active = f->simd->active[f->turn & 1];
    return slots;
}

uint32_t lane() { return current->at.lane; }

void share(Region* region) {
    shared.push_back({region, run.body});
    char* from = static_cast<char*>(const_cast<void*>(region->begin));
    std::memset(from, 0xff, static_cast<size_t>(static_cast<const char*>(region->end) - from));
}

bool fails_for_no_reason() { return ++tries % 7 == 0; }

void look(const Region* region, const void* where, size_t bytes, size_t alignment, Access access, int line) {
    const char *w = static_cast<const char*>(where), *begin = static_cast<const char*>(region->begin);
    long count = (static_cast<const char*>(region->end) - begin) / static_cast<long>(bytes);
    // an atomic word may hold the last element and the bytes after it
    const char* last = access == Access::atomic ? w + 1 : w + bytes;
    if (w < begin || last > static_cast<const char*>(region->end)) {
        long size = static_cast<long>(bytes), at = w < begin ? -((begin - w + size - 1) / size) : (w - begin) / size;
        fail(line, "%s of %s[%ld], which has %ld elements", access == Access::read ? "load" : "store", region->name, at, count);
    }
    if (reinterpret_cast<uintptr_t>(where) % alignment != 0) {
        fail(line, "%s is not aligned to %zu bytes", region->name, alignment);
    }
    if (access != Access::atomic) watch(region, w, bytes, access, line);
}

extern "C" int shim_dispatch(Body body, const Argument* args, uint32_t count, const uint32_t* threads, const uint32_t* size, int meets,
                             int order, Report* report) {
    run.body = body;
    run.args = args;
    run.report = report;
    run.failed = false;
    run.group = 0;
    run.shadows.clear();
    for (uint32_t k = 0; k < count; k++) make_shadow(args[k].region);
    uint3 groups = {(threads[0] + size[0] - 1) / size[0], (threads[1] + size[1] - 1) / size[1], (threads[2] + size[2] - 1) / size[2]};
    uint64_t all = static_cast<uint64_t>(groups.x) * groups.y * groups.z;
    try {
        for (uint64_t k = 0; k < all && !run.failed; k++) {
            uint64_t i = order ? all - 1 - k : k;
            uint3 group = {static_cast<uint32_t>(i % groups.x), static_cast<uint32_t>(i / groups.x % groups.y),
                           static_cast<uint32_t>(i / groups.x / groups.y)};
            one_group(threads, size, group, meets != 0, order != 0);
        }
    } catch (const Stop&) {
    }
    run.shadows.clear();
    return run.failed ? 1 : 0;
}

}  // namespace shim
