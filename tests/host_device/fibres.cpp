// The runtime for kernels compiled for the host.  It runs a grid of CUDA threads on one CPU thread.
//
//     for each block, in the configured order
//         until all of its threads have exited
//             for each thread, in the configured order
//                 run it until it waits (barrier, warp operation) or exits
//
// A CUDA thread is a fibre: it has its own stack, and a switch saves the callee-saved registers.  A thread that never
// waits needs no switch, because its fibre continues directly with the next thread.
//
// The blocks of a cooperative launch may wait for each other.  All of them are started.  Each runs until its threads
// wait for other blocks, is then parked with its threads and its shared memory, and is resumed in the next round:
//
//     until every block has ended
//         for each block that has not ended, in the configured order
//             resume it, run its threads as above, park it
//
// CUDA does not define the order in which threads run between two barriers.  A kernel that needs a particular order is
// wrong, and trying several orders shows it.  Shared memory is initialized to 0xff: floats that are read before they
// are written are NaN, integers are -1.  Wrong use of barriers ends the launch with a message.
//
// This file is never compiled with a sanitizer, because sanitizers would report what it does.  (They do see its calls
// of malloc, mmap and memset, so data that fibres share are in plain arrays.)  Instead, the file informs them:
// CUDA_ON_HOST_ASAN announces stack switches.  CUDA_ON_HOST_TSAN announces a thread per CUDA thread, and only the
// ordering that barriers create between threads.  CUDA_ON_HOST_UBSAN gives shared arrays only the alignment that their
// type requires.
#include "fibres.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#if defined(__x86_64__) && !defined(CUDA_ON_HOST_UCONTEXT)
#define SWITCH_IN_ASSEMBLY
#else
#include <ucontext.h>
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace cuda_on_host {
namespace {

constexpr size_t static_shared_limit = 48 << 10;
constexpr size_t shared_limit = 227 << 10;  // static and dynamic together, compute capability 9.0
constexpr unsigned max_threads = 1024;
constexpr unsigned max_warps = max_threads / lanes_per_warp;
constexpr unsigned max_blocks_together = 256;       // of a cooperative launch
constexpr unsigned max_threads_together = 64 << 10;  // in all its blocks
constexpr unsigned char poison = 0xff;

// ---- information for sanitizers -------------------------------------------------------------------------

#ifdef CUDA_ON_HOST_TSAN
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fibre);
void __tsan_switch_to_fiber(void* fibre, unsigned flags);
void __tsan_set_fiber_name(void* fibre, const char* name);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
constexpr bool thread_sanitizer = true;
constexpr unsigned switch_orders_nothing = 1;
#else
constexpr bool thread_sanitizer = false;
#endif

#ifdef CUDA_ON_HOST_ASAN
extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** old_bottom, size_t* old_size);
void __asan_unpoison_memory_region(const volatile void* address, size_t size);
}
#endif

// Everything before release(e) in one thread happens before everything after acquire(e) in another thread.
struct OrderingEvent {
    char address;
#ifdef CUDA_ON_HOST_TSAN
    void release() { __tsan_release(&address); }
    void acquire() { __tsan_acquire(&address); }
#else
    void release() {}
    void acquire() {}
#endif
};

// ---- fibres -----------------------------------------------------------------------------------------------

constexpr size_t page = 4096;
constexpr size_t stack_bytes = 256 << 10;  // reserved; a page uses memory once it is touched

struct Fibre {
    char* stack = nullptr;
    void* sanitizer_stack = nullptr;
    void* sanitizer_thread = nullptr;
#ifdef SWITCH_IN_ASSEMBLY
    void* stack_pointer = nullptr;
#else
    ucontext_t context;
#endif
};

Fibre scheduler;  // the CPU thread that called launch
[[maybe_unused]] const void* scheduler_stack;  // as reported by AddressSanitizer
[[maybe_unused]] size_t scheduler_stack_bytes;

#ifdef SWITCH_IN_ASSEMBLY
extern "C" void cuda_on_host_switch(void** save_stack_pointer, void* load_stack_pointer);
asm(R"(
    .text
    .hidden cuda_on_host_switch
    .globl  cuda_on_host_switch
    .type   cuda_on_host_switch, @function
cuda_on_host_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq  %rsp, (%rdi)
    movq  %rsi, %rsp
    popq  %r15
    popq  %r14
    popq  %r13
    popq  %r12
    popq  %rbx
    popq  %rbp
    ret
    .size cuda_on_host_switch, . - cuda_on_host_switch
)");
constexpr int saved_registers = 6;
#endif

// Makes the first switch to `fibre` call `start`.
void prepare_stack(Fibre& fibre, void (*start)()) {
#ifdef SWITCH_IN_ASSEMBLY
    void** top = reinterpret_cast<void**>(fibre.stack + stack_bytes);
    *--top = nullptr;  // the return address of `start`, which never returns
    *--top = reinterpret_cast<void*>(start);
    for (int i = 0; i < saved_registers; ++i) *--top = nullptr;
    fibre.stack_pointer = top;
#else
    getcontext(&fibre.context);
    fibre.context.uc_stack.ss_sp = fibre.stack;
    fibre.context.uc_stack.ss_size = stack_bytes;
    fibre.context.uc_link = nullptr;
    makecontext(&fibre.context, start, 0);
#endif
}

Fibre* new_fibre(void (*start)()) {
    Fibre* fibre = new Fibre;
    // The page below the stack stays inaccessible: an overflow crashes and does not overwrite another stack.
    void* memory = mmap(nullptr, page + stack_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        std::perror("cuda_on_host: no memory for a fibre's stack");
        std::abort();
    }
    mprotect(memory, page, PROT_NONE);
    fibre->stack = static_cast<char*>(memory) + page;
    prepare_stack(*fibre, start);
#ifdef CUDA_ON_HOST_TSAN
    fibre->sanitizer_thread = __tsan_create_fiber(0);
#endif
    return fibre;
}

void delete_fibre(Fibre* fibre) {
#ifdef CUDA_ON_HOST_TSAN
    __tsan_destroy_fiber(fibre->sanitizer_thread);
#endif
#ifdef CUDA_ON_HOST_ASAN
    __asan_unpoison_memory_region(fibre->stack, stack_bytes);  // frames that were abandoned on the stack
#endif
    munmap(fibre->stack - page, page + stack_bytes);
    delete fibre;
}

// Must be called first on a stack after a switch to it.
void arrive(Fibre& fibre) {
#ifdef CUDA_ON_HOST_ASAN
    if (&fibre == &scheduler)
        __sanitizer_finish_switch_fiber(fibre.sanitizer_stack, nullptr, nullptr);
    else
        __sanitizer_finish_switch_fiber(fibre.sanitizer_stack, &scheduler_stack, &scheduler_stack_bytes);
#else
    (void)fibre;
#endif
}

// Stops `from` and resumes `to`; returns when something switches back.
void switch_fibres(Fibre& from, Fibre& to) {
#ifdef CUDA_ON_HOST_ASAN
    const bool leaving = &to == &scheduler;
    __sanitizer_start_switch_fiber(&from.sanitizer_stack, leaving ? scheduler_stack : to.stack,
                                   leaving ? scheduler_stack_bytes : stack_bytes);
#endif
#ifdef CUDA_ON_HOST_TSAN
    __tsan_switch_to_fiber(to.sanitizer_thread, switch_orders_nothing);
#endif
#ifdef SWITCH_IN_ASSEMBLY
    cuda_on_host_switch(&from.stack_pointer, to.stack_pointer);
#else
    swapcontext(&from.context, &to.context);
#endif
    arrive(from);
}

// ---- the state of a launch ----------------------------------------------------------------------------------

enum class State : unsigned char { unstarted, runnable, at_barrier, at_warp_operation, waiting_for_blocks, exited };

struct Thread {
    State state;
    Fibre* fibre;
    Site waits_at;
    unsigned waits_for;  // the mask of a warp operation
};

// A meeting of the lanes of a warp, identified by their mask and the place in the source.  Several meetings may be in
// progress in a warp, but not more than it has lanes, because at least one lane waits in each.
struct Rendezvous {
    unsigned mask;
    unsigned arrived;
    unsigned generation;  // alternates between two events: a fast lane must not release the one a slow lane acquires
    Site site;
    const void* inputs[lanes_per_warp];
    void* outputs[lanes_per_warp];
    OrderingEvent events[2];
};

class RandomNumbers {
  public:
    explicit RandomNumbers(uint64_t seed) : state(seed) {}
    // Uniform in [0, bound), except for a bias of bound / 2^64.
    uint64_t below(uint64_t bound) { return uint64_t((static_cast<unsigned __int128>(next()) * bound) >> 64); }

  private:
    uint64_t state;
    uint64_t next() {  // splitmix64
        uint64_t z = (state += 0x9e3779b97f4a7c15u);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }
};

struct SharedArray {
    const void* identity;
    char* memory;
    size_t bytes;
    char* allocation;
};

using Kernel = void (*)(const void* params);

Kernel kernel;
const void* kernel_params;
LaunchConfig config;
RandomNumbers random_numbers(0);
std::string error;

unsigned thread_count;
uint3 thread_indices[max_threads];  // linear -> threadIdx: three divisions per launch instead of per thread
Thread threads[max_threads];
unsigned order[max_threads];        // in which threads run
unsigned position;                  // of the running thread in `order`
unsigned current;                   // the running thread
unsigned alive, waiting;            // threads that have not exited; those among them at the barrier
Site barrier_site;                  // where the threads at the barrier wait
unsigned barrier_generation;
Rendezvous meetings[max_warps][lanes_per_warp];

Fibre* idle_fibres[max_threads_together];
unsigned idle_fibre_count;

unsigned seat;  // index of the running block of a cooperative launch; else 0
bool progress;  // some block has started, or its wait has ended, since this was set to false

OrderingEvent launch_begins, launch_ends, barrier_events[max_blocks_together][2];

constexpr unsigned max_pending_copies = 512;  // per thread

// A thread's copies that have not arrived, oldest first, each with the number of its group.  Both counters only grow.
// A thread leaves no pending copy behind, so another block can continue with the values that it finds here.
struct CopyQueue {
    unsigned first, end;  // modulo max_pending_copies, positions in `copies`
    unsigned groups;      // committed
};

CopyQueue copy_queues[max_threads];
PendingCopy copies[max_threads][max_pending_copies];
unsigned copy_groups[max_threads][max_pending_copies];

enum Order { ascending, descending, random_order };

bool same(Site a, Site b) {  // a file's name may be stored several times
    return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

bool failed() { return !error.empty(); }

// ---- errors -------------------------------------------------------------------------------------------------

std::string text(Site site) {
    const char* slash = std::strrchr(site.file, '/');
    return std::string(slash ? slash + 1 : site.file) + ":" + std::to_string(site.line);
}

std::string text(const uint3& index) {
    return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) + ")";
}

std::string hexadecimal(unsigned mask) {
    char digits[16];
    std::snprintf(digits, sizeof digits, "0x%08x", mask);
    return digits;
}

std::string description(const Thread& thread) {
    switch (thread.state) {
        case State::unstarted: return "not started";
        case State::runnable: return "running";
        case State::at_barrier: return "waiting at the barrier in " + text(thread.waits_at);
        case State::at_warp_operation:
            return "waiting at the warp operation in " + text(thread.waits_at) + " for " + hexadecimal(thread.waits_for);
        case State::waiting_for_blocks: return "waiting for other blocks in " + text(thread.waits_at);
        case State::exited: return "exited";
    }
    return "";
}

// "54 threads waiting at the barrier in gemm.cu:31, 10 threads exited"
std::string thread_counts() {
    std::map<std::string, unsigned> counts;
    for (unsigned t = 0; t < thread_count; ++t) ++counts[description(threads[t])];
    std::string result;
    for (const auto& [what, count] : counts)
        result += (result.empty() ? "" : ", ") + std::to_string(count) + (count == 1 ? " thread " : " threads ") + what;
    return result;
}

void report(const std::string& message) {
    if (!failed()) error = message + "; block " + text(blockIdx) + ": " + thread_counts();
}

// Lets the scheduler choose the next thread; returns when it chooses this thread, which must be runnable then.
void step_back() {
    launch_ends.release();  // this thread may never resume, if another one fails
    switch_fibres(*threads[current].fibre, scheduler);
}

// Ends the launch from inside a CUDA thread, and abandons the thread's stack.
[[noreturn]] void fail(const std::string& message) {
    report(message + ", thread " + text(threadIdx));
    step_back();
    __builtin_unreachable();
}

// ---- shared memory --------------------------------------------------------------------------------------------

constexpr int max_shared_arrays = 64;
SharedArray shared_arrays[max_shared_arrays];
int shared_array_count;
const SharedArray* latest_shared_array;  // most threads request the same array as the previous thread
const char dynamic_identity = 0;

#ifdef CUDA_ON_HOST_TSAN
// All arrays are in one mapping.  Mapping it again makes ThreadSanitizer forget a block's accesses before the next
// block.  Only the scheduler may do so, because for ThreadSanitizer the thread that maps memory writes to it.
constexpr size_t arena_bytes = shared_limit + max_shared_arrays * 64;
char* arena;
size_t arena_used;

char* allocate_shared(size_t bytes) {
    char* memory = arena + arena_used;
    arena_used += (bytes + 63) / 64 * 64;
    return memory;
}

void free_shared(const SharedArray&) { arena_used = 0; }

void leave_arena() { arena = nullptr; }  // the parked block keeps it

void poison_shared_arrays() {
    const int fixed = arena ? MAP_FIXED : 0;
    void* memory = mmap(arena, arena_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | fixed, -1, 0);
    arena = static_cast<char*>(std::memset(memory, poison, arena_bytes));
}
#else
// One allocation per array, so that AddressSanitizer knows where it ends.
char* allocate_shared(size_t bytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 128, bytes) != 0) std::abort();
    return static_cast<char*>(std::memset(memory, poison, bytes));
}

void free_shared(const SharedArray& array) { std::free(array.allocation); }

void poison_shared_arrays() {
    for (int i = 0; i < shared_array_count; ++i) std::memset(shared_arrays[i].memory, poison, shared_arrays[i].bytes);
}
#endif

const SharedArray* add_shared_array(const void* identity, size_t bytes, size_t alignment) {
    size_t offset = 0;
#ifdef CUDA_ON_HOST_UBSAN
    if (alignment < 16) offset = alignment;  // the least aligned offset that is legal
#else
    (void)alignment;
#endif
    if (shared_array_count == max_shared_arrays)
        fail("more than " + std::to_string(max_shared_arrays) + " shared arrays");
    char* allocation = allocate_shared(offset + bytes);
    SharedArray& added = shared_arrays[shared_array_count++];
    added = {identity, allocation + offset, bytes, allocation};
    return &added;
}

const SharedArray* find_shared_array(const void* identity) {
    for (int i = 0; i < shared_array_count; ++i)
        if (shared_arrays[i].identity == identity) return &shared_arrays[i];
    return nullptr;
}

void check_shared_size(size_t more, Site site) {
    size_t static_bytes = more;
    for (int i = 0; i < shared_array_count; ++i)
        if (shared_arrays[i].identity != &dynamic_identity) static_bytes += shared_arrays[i].bytes;
    const size_t total = static_bytes + config.dynamic_shared_bytes;
    if (static_bytes > static_shared_limit)
        fail("static shared memory of " + std::to_string(static_bytes) + " bytes in " + text(site) +
             " passes the limit of " + std::to_string(static_shared_limit));
    if (total > shared_limit)
        fail("static and dynamic shared memory of " + std::to_string(total) + " bytes in " + text(site) +
             " pass the limit of " + std::to_string(shared_limit));
}

void free_shared_arrays() {
    for (int i = 0; i < shared_array_count; ++i) free_shared(shared_arrays[i]);
    shared_array_count = 0;
    latest_shared_array = nullptr;
}

// ---- threads ----------------------------------------------------------------------------------------------------

void set_current(unsigned thread) {
    current = thread;
    threadIdx = thread_indices[thread];
}

void open_barrier() {
    for (unsigned t = 0; t < thread_count; ++t)
        if (threads[t].state == State::at_barrier) threads[t].state = State::runnable;
    waiting = 0;
    ++barrier_generation;
}

void exit_thread() {
    if (config.strict && waiting > 0)
        fail("a thread exits while others wait at the barrier in " + text(barrier_site));
    const CopyQueue& queue = copy_queues[current];
    if (queue.first != queue.end)
        fail("a thread exits with " + std::to_string(queue.end - queue.first) +
             " asynchronous copies it has not waited for, the oldest from " +
             text(copies[current][queue.first % max_pending_copies].site));
    threads[current].state = State::exited;
    --alive;
    if (waiting > 0 && waiting == alive) open_barrier();
}

// Continues with the next thread in order on the same stack, if that thread has not started.
bool start_next_thread_here(Fibre* fibre) {
    if (thread_sanitizer || failed() || position + 1 == thread_count) return false;
    Thread& next = threads[order[position + 1]];
    if (next.state != State::unstarted) return false;
    next.state = State::runnable;
    next.fibre = fibre;
    set_current(order[++position]);
    return true;
}

void fibre_main() {
    arrive(*threads[current].fibre);
    for (;;) {
        launch_begins.acquire();
        kernel(kernel_params);
        Fibre* fibre = threads[current].fibre;
        exit_thread();
        launch_ends.release();
        if (start_next_thread_here(fibre)) continue;
        idle_fibres[idle_fibre_count++] = fibre;
        switch_fibres(*fibre, scheduler);
    }
}

void start_thread(Thread& thread) {
    if (idle_fibre_count == 0 || thread_sanitizer) {  // for ThreadSanitizer, a fibre is one CUDA thread
        thread.fibre = new_fibre(fibre_main);
#ifdef CUDA_ON_HOST_TSAN
        const std::string name = "block " + text(blockIdx) + " thread " + text(threadIdx);
        __tsan_set_fiber_name(thread.fibre->sanitizer_thread, name.c_str());
#endif
    } else {
        thread.fibre = idle_fibres[--idle_fibre_count];
    }
    thread.state = State::runnable;
}

void delete_idle_fibres() {
    while (idle_fibre_count > 0) delete_fibre(idle_fibres[--idle_fibre_count]);
}

// Cleans up after an error: each thread that has started and not exited still has a stack.
void abandon_threads() {
    for (unsigned t = 0; t < thread_count; ++t)
        if (threads[t].state != State::unstarted && threads[t].state != State::exited) delete_fibre(threads[t].fibre);
    for (auto& warp : meetings)
        for (Rendezvous& meeting : warp) meeting.arrived = 0;
    for (CopyQueue& queue : copy_queues) queue.first = queue.end;
}

// ---- warps -------------------------------------------------------------------------------------------------------

// Returns the lanes of `mask` that exist; fails if the mask is wrong.
unsigned checked_mask(unsigned mask, const Thread* warp, Site site) {
    const unsigned lanes = thread_count - unsigned(warp - threads);
    const unsigned existing = lanes < lanes_per_warp ? (1u << lanes) - 1 : ~0u;
    if (!(mask >> (current % lanes_per_warp) & 1))
        fail("a lane is missing from its own warp mask " + hexadecimal(mask) + " in " + text(site));
    if (config.strict && (mask & ~existing))
        fail("warp mask " + hexadecimal(mask) + " names lanes beyond the block in " + text(site));
    mask &= existing;
    for (unsigned rest = mask; rest; rest &= rest - 1)
        if (warp[__builtin_ctz(rest)].state == State::exited)
            fail("warp mask " + hexadecimal(mask) + " names a lane that has exited in " + text(site));
    return mask;
}

Rendezvous& find_meeting(Rendezvous (&meetings_of_warp)[lanes_per_warp], unsigned mask, Site site) {
    Rendezvous* unused = nullptr;
    for (Rendezvous& meeting : meetings_of_warp) {
        if (meeting.arrived == 0)
            unused = unused ? unused : &meeting;
        else if (meeting.mask == mask && same(meeting.site, site))
            return meeting;
    }
    unused->mask = mask;
    unused->site = site;
    return *unused;
}

// ---- blocks -------------------------------------------------------------------------------------------------------

void begin_block() {
    poison_shared_arrays();
    for (unsigned t = 0; t < thread_count; ++t) {
        threads[t].state = State::unstarted;
        order[t] = config.order == descending ? thread_count - 1 - t : t;
    }
    alive = thread_count;
    waiting = 0;
    launch_begins.release();
}

void shuffle_order() {
    for (unsigned t = thread_count - 1; t > 0; --t) std::swap(order[t], order[random_numbers.below(t + 1)]);
}

// Runs every thread that can continue once; returns false if there was none.
bool run_threads() {
    bool ran = false;
    for (position = 0; position < thread_count && !failed(); ++position) {
        Thread& thread = threads[order[position]];
        if (thread.state != State::unstarted && thread.state != State::runnable) continue;
        ran = true;
        set_current(order[position]);
        if (thread.state == State::unstarted) start_thread(thread);
        switch_fibres(scheduler, *thread.fibre);
    }
    return ran;
}

bool waits_for_blocks() {
    for (unsigned t = 0; t < thread_count; ++t)
        if (threads[t].state == State::waiting_for_blocks) return true;
    return false;
}

// Runs the threads until all have exited, or until all of them wait for other blocks.
void run_while_possible() {
    while (alive > 0 && !failed()) {
        if (config.order == random_order) shuffle_order();
        if (run_threads()) continue;
        if (waits_for_blocks()) return;
        report("deadlock: every thread waits for one that does not come");
    }
}

void run_block() {
    begin_block();
    run_while_possible();
    if (failed()) abandon_threads();
    if (thread_sanitizer) delete_idle_fibres();
}

// ---- blocks that wait for each other ---------------------------------------------------------------------------

void begin_shared_memory() {
    poison_shared_arrays();
    if (config.dynamic_shared_bytes) add_shared_array(&dynamic_identity, config.dynamic_shared_bytes, 16);
}

// The state of a block that is saved while other blocks run.
struct ParkedBlock {
    uint3 index;
    bool begun = false, ended = false;
    std::vector<Thread> its_threads;
    unsigned its_alive, its_waiting, its_generation;
    Site its_barrier_site;
    std::vector<SharedArray> arrays;
#ifdef CUDA_ON_HOST_TSAN
    char* its_arena;
    size_t its_arena_used;
#endif

    void park() {
        for (unsigned t = 0; t < thread_count; ++t)
            if (copy_queues[t].first != copy_queues[t].end)
                report("a thread has asynchronous copies under way while its block waits for others, from " +
                       text(copies[t][copy_queues[t].first % max_pending_copies].site));
        its_threads.assign(threads, threads + thread_count);
        its_alive = alive, its_waiting = waiting, its_generation = barrier_generation;
        its_barrier_site = barrier_site;
        arrays.assign(shared_arrays, shared_arrays + shared_array_count);
        shared_array_count = 0;
        latest_shared_array = nullptr;
#ifdef CUDA_ON_HOST_TSAN
        its_arena = arena, its_arena_used = arena_used;
        arena_used = 0;
        leave_arena();
#endif
    }

    void take_up() {
        blockIdx = index;
        if (!begun) {
            begun = progress = true;
            begin_shared_memory();
            begin_block();
            return;
        }
        std::copy(its_threads.begin(), its_threads.end(), threads);
        alive = its_alive, waiting = its_waiting, barrier_generation = its_generation;
        barrier_site = its_barrier_site;
        std::copy(arrays.begin(), arrays.end(), shared_arrays);
        shared_array_count = int(arrays.size());
#ifdef CUDA_ON_HOST_TSAN
        arena = its_arena, arena_used = its_arena_used;
#endif
    }
};

void let_waiting_threads_look() {
    for (unsigned t = 0; t < thread_count; ++t)
        if (threads[t].state == State::waiting_for_blocks) threads[t].state = State::runnable;
}

// Ends a block, or cleans up what is left of it after an error.
void end_block(ParkedBlock& block) {
    if (failed()) abandon_threads();
    free_shared_arrays();
#ifdef CUDA_ON_HOST_TSAN
    munmap(arena, arena_bytes);
    leave_arena();
#endif
    block.ended = true;
}

void run_blocks_together(std::vector<ParkedBlock>& blocks) {
    free_shared_arrays();  // each block has its own
    for (size_t left = blocks.size(); left > 0;) {
        progress = false;
        for (seat = 0; seat < blocks.size(); ++seat) {
            ParkedBlock& block = blocks[seat];
            if (block.ended) continue;
            if (failed() && !block.begun) {
                block.ended = true;
                --left;
                continue;
            }
            block.take_up();
            let_waiting_threads_look();
            if (!failed()) run_while_possible();
            if (alive > 0 && !failed()) {
                block.park();
            } else {
                end_block(block);
                --left;
            }
        }
        if (thread_sanitizer) delete_idle_fibres();
        for (seat = 0; left > 0 && !progress && !failed(); ++seat) {
            if (blocks[seat].ended) continue;
            blocks[seat].take_up();
            report("deadlock: every block waits for one that does not come");
            blocks[seat].park();
        }
    }
    seat = 0;
}

// i -> (start + i * step) mod count visits every block once, because step and count have no common factor.
struct BlockOrder {
    uint64_t count, start = 0, step = 1;

    explicit BlockOrder(uint64_t blocks) : count(blocks) {
        if (config.order == descending) {
            start = step = count - 1;
        } else if (config.order == random_order) {
            start = random_numbers.below(count);
            do step = 1 + random_numbers.below(count);
            while (std::gcd(step, count) != 1);
        }
    }

    uint3 operator[](uint64_t i) const {
        const uint64_t block = uint64_t((static_cast<unsigned __int128>(i) * step + start) % count);
        return {unsigned(block % gridDim.x), unsigned(block / gridDim.x % gridDim.y),
                unsigned(block / gridDim.x / gridDim.y)};
    }
};

// ---- launches -----------------------------------------------------------------------------------------------------

std::string size_text(const unsigned (&size)[3]) { return text(uint3{size[0], size[1], size[2]}); }

// Returns why a launch is refused before it begins, or an empty string.
std::string refusal(const LaunchConfig& launch) {
    const auto& [x, y, z] = launch.block;
    if (x == 0 || y == 0 || z == 0 || x > max_threads || y > max_threads || z > 64 ||
        uint64_t(x) * y * z > max_threads)
        return "a block of " + size_text(launch.block) + " threads: from 1 to 1024 are possible, 64 along z";
    const auto& [columns, rows, layers] = launch.grid;
    if (columns == 0 || rows == 0 || layers == 0 || columns > 0x7fffffffu || rows > 65535 || layers > 65535)
        return "a grid of " + size_text(launch.grid) +
               " blocks: from 1 to 2147483647, 65535 along y and z, are possible";
    if (const uint64_t blocks = uint64_t(columns) * rows * layers;
        launch.cooperative && (blocks > max_blocks_together || blocks * x * y * z > max_threads_together))
        return "a cooperative launch of " + size_text(launch.grid) + " blocks: at most " +
               std::to_string(max_blocks_together) + " with " + std::to_string(max_threads_together) + " threads fit";
    if (launch.dynamic_shared_bytes > shared_limit)
        return "dynamic shared memory of " + std::to_string(launch.dynamic_shared_bytes) +
               " bytes passes the limit of " + std::to_string(shared_limit);
    return "";
}

void begin_launch(const LaunchConfig& launch) {
    config = launch;
    random_numbers = RandomNumbers(launch.seed);
    gridDim = {launch.grid[0], launch.grid[1], launch.grid[2]};
    blockDim = {launch.block[0], launch.block[1], launch.block[2]};
    thread_count = blockDim.x * blockDim.y * blockDim.z;
    for (unsigned t = 0; t < thread_count; ++t)
        thread_indices[t] = {t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y};
    begin_shared_memory();
#ifdef CUDA_ON_HOST_TSAN
    scheduler.sanitizer_thread = __tsan_get_current_fiber();
#endif
}

}  // namespace

// ---- functions that kernels call --------------------------------------------------------------------------------

int lane() { return int(current % lanes_per_warp); }

void synchronise_block(Site site) {
    if (waiting == 0)
        barrier_site = site;
    else if (!same(site, barrier_site))
        fail("divergent barrier: " + text(site) + " is reached while others wait in " + text(barrier_site));
    if (config.strict && alive < thread_count)
        fail("the barrier in " + text(site) + " comes after threads have exited");
    OrderingEvent& event = barrier_events[seat][barrier_generation % 2];
    event.release();
    threads[current].state = State::at_barrier;
    threads[current].waits_at = site;
    if (++waiting == alive) open_barrier();
    step_back();  // the last to arrive yields too: the order after a barrier is free as well
    event.acquire();
}

void wait_for_other_blocks(Site site) {
    if (!config.cooperative)
        fail("a block waits for others in " + text(site) + ", which a launch that is not cooperative need not have begun");
    threads[current].state = State::waiting_for_blocks;
    threads[current].waits_at = site;
    step_back();
}

void found_other_blocks() { progress = true; }

void meet_warp(unsigned mask, const void* input, void* output, WarpFunction function, bool orders_memory, Site site) {
    const unsigned me = 1u << lane();
    Thread* const warp = &threads[current - lane()];
    mask = checked_mask(mask, warp, site);
    Rendezvous& meeting = find_meeting(meetings[current / lanes_per_warp], mask, site);
    meeting.inputs[lane()] = input;
    meeting.outputs[lane()] = output;
    meeting.arrived |= me;
    OrderingEvent& event = meeting.events[meeting.generation % 2];
    if (orders_memory) event.release();

    if (meeting.arrived != mask) {
        threads[current].state = State::at_warp_operation;
        threads[current].waits_at = site;
        threads[current].waits_for = mask;
        step_back();
    } else {
        if (function) function(mask, meeting.inputs, meeting.outputs);
        meeting.arrived = 0;
        ++meeting.generation;
        for (unsigned others = mask & ~me; others; others &= others - 1)
            warp[__builtin_ctz(others)].state = State::runnable;
    }
    if (orders_memory) event.acquire();
}

void meet_whole_warp(const void* input, void* output, WarpFunction function, Site site) {
    if (current - lane() + lanes_per_warp > thread_count)
        fail("a matrix operation in " + text(site) + " by the block's last warp, which has fewer than 32 lanes");
    meet_warp(~0u, input, output, function, false, site);
}

void check_shared_access(const void* address, int bytes, Site site) {
    const auto what = [=] { return "shared address of " + std::to_string(bytes) + " bytes in " + text(site); };
    if (uintptr_t(address) % bytes) fail("misaligned " + what());
    const char* start = static_cast<const char*>(address);
    for (int i = 0; i < shared_array_count; ++i) {
        const SharedArray& array = shared_arrays[i];
        if (start >= array.memory && start + bytes <= array.memory + array.bytes) return;
    }
    fail("outside the block's shared arrays: " + what());
}

void issue_copy(const PendingCopy& copy) {
    check_shared_access(copy.shared, copy.bytes, copy.site);
    if (uintptr_t(copy.global) % copy.bytes)
        fail("misaligned global address of " + std::to_string(copy.bytes) + " bytes in " + text(copy.site));
    CopyQueue& queue = copy_queues[current];
    if (queue.end - queue.first == max_pending_copies)
        fail("more than " + std::to_string(max_pending_copies) + " asynchronous copies of a thread under way in " +
             text(copy.site));
    copy_groups[current][queue.end % max_pending_copies] = queue.groups;
    copies[current][queue.end++ % max_pending_copies] = copy;
}

void commit_copies() { ++copy_queues[current].groups; }

bool take_arrived_copy(unsigned pending, PendingCopy& copy) {
    CopyQueue& queue = copy_queues[current];
    const unsigned oldest = queue.first % max_pending_copies;
    if (queue.first == queue.end || queue.groups - copy_groups[current][oldest] <= pending) return false;
    copy = copies[current][oldest];
    ++queue.first;
    return true;
}

void* static_shared_memory(const void* identity, size_t bytes, size_t alignment, Site site) {
    if (latest_shared_array && latest_shared_array->identity == identity) return latest_shared_array->memory;
    const SharedArray* array = find_shared_array(identity);
    if (!array) {
        check_shared_size(bytes, site);
        array = add_shared_array(identity, bytes, alignment);
    }
    latest_shared_array = array;
    return array->memory;
}

void* dynamic_shared_memory(Site site) {
    if (config.dynamic_shared_bytes == 0)
        fail("dynamic shared memory is used in " + text(site) + ", but the launch gives none");
    return find_shared_array(&dynamic_identity)->memory;
}

}  // namespace cuda_on_host

// Runs a whole grid; returns a description of an error, or a null pointer.  A process can run only one launch at a
// time.
extern "C" __attribute__((visibility("default"))) const char* cuda_on_host_launch(
    cuda_on_host::Kernel kernel, const void* params, const cuda_on_host::LaunchConfig* launch) {
    using namespace cuda_on_host;
    error = refusal(*launch);
    if (failed()) return error.c_str();
    cuda_on_host::kernel = kernel;
    kernel_params = params;
    begin_launch(*launch);
    const uint64_t blocks = uint64_t(gridDim.x) * gridDim.y * gridDim.z;
    const BlockOrder block_order(blocks);
    if (launch->cooperative) {
        std::vector<ParkedBlock> together(blocks);
        for (uint64_t i = 0; i < blocks; ++i) together[i].index = block_order[i];
        run_blocks_together(together);
    }
    for (uint64_t i = 0; i < blocks && !launch->cooperative && !failed(); ++i) {
        blockIdx = block_order[i];
        run_block();
    }
    launch_ends.acquire();
    free_shared_arrays();
    return failed() ? error.c_str() : nullptr;
}
