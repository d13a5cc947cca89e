// Keeps the GPU busy for a time, so that the host can enqueue what is measured after it.  Only the benchmark runs it.
//
// One thread reads the GPU's own nanosecond clock until `nanoseconds` have gone by.
extern "C" __global__ void delay(long long nanoseconds) {
    long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < nanoseconds);
}
