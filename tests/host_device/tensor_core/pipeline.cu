// result[stage i][t] = a[stage i][reversed t], one block: stages go through shared memory, two ahead of the one read.
//
// Right, unless a step is replaced.  -D: STAGES, of stages; WIDTH, that a thread copies at once; VALID, of i, or zeros
// come instead; BUFFERS, of shared memory; COMMIT, WAIT and SYNCHRONISE, the steps between the copy of a stage and its
// use; DRAIN, what follows the last stage.
#include "sample.cuh"

using namespace cupyconv;
using Piece = Vector<unsigned, WIDTH / 4>;

constexpr int THREADS = 64;

extern "C" __global__ void pipeline(const SampleParams params) {
    SHARED_ARRAY(uint4, memory, BUFFERS * THREADS * WIDTH / 16);
    Piece* const buffers = reinterpret_cast<Piece*>(memory);
    const Piece* const from = static_cast<const Piece*>(params.a);
    Piece* const to = static_cast<Piece*>(params.result);
    const int t = threadIdx.x;

    const auto begin_stage = [=](int i) {  // a group without copies where there is none left: waiting counts groups
        if (i < STAGES) copy_async<WIDTH>(buffers + i % BUFFERS * THREADS + t, from + i * THREADS + t, VALID);
        COMMIT;
    };
    begin_stage(0);
    begin_stage(1);
    for (int i = 0; i < STAGES; ++i) {
        WAIT;
        SYNCHRONISE;  // stage i has arrived, and stage i - 1 has been read: its buffer is free
        begin_stage(i + 2);
        to[i * THREADS + t] = buffers[i % BUFFERS * THREADS + THREADS - 1 - t];
    }
    DRAIN;
}
