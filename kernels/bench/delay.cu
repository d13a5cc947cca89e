// Keeps the GPU busy while the host enqueues the work that is measured after it.  Only the benchmark runs this kernel.
//
// One thread reads the nanosecond clock of the GPU until `nanoseconds` have passed.
extern "C" __global__ void delay(long long nanoseconds) {
    long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < nanoseconds);
}
