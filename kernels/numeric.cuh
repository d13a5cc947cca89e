// Storage types, accumulator types, complex arithmetic, vectors of elements, and a thread's position in its warp.
//
// T is the type of elements in memory, and Accumulator<T> is the type of the arithmetic on them.  A 16-bit type is
// widened to float on load and rounded once on store.  Every other type is its own accumulator.
#pragma once
#include "portable.cuh"

namespace cupyconv {

constexpr int WARP = 32;
__device__ __forceinline__ int warp_index() { return threadIdx.x / WARP; }
__device__ __forceinline__ int lane_index() { return threadIdx.x % WARP; }

// Return `value`, but hide its origin from the compiler.  The compiler can then neither hoist expressions of it out of
// a loop, which would occupy registers, nor recompute it from its origin instead of keeping it.
__device__ __forceinline__ int opaque(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

using float16 = __half;
using bfloat16 = __nv_bfloat16;
using float32 = float;
using float64 = double;

// Types of elements that are only copied, by size.
using bits16 = unsigned short;
using bits32 = unsigned;
using bits64 = unsigned long long;
using bits128 = uint4;

template <class R>
struct alignas(2 * sizeof(R)) Complex {
    R re, im;
    Complex() = default;
    __device__ Complex(R real) : re(real), im(R(0)) {}
    __device__ Complex(R real, R imaginary) : re(real), im(imaginary) {}
    __device__ Complex& operator+=(Complex other) { re += other.re; im += other.im; return *this; }
};
using complex64 = Complex<float>;
using complex128 = Complex<double>;

template <class T> struct AccumulatorOf { using type = T; };
template <> struct AccumulatorOf<float16> { using type = float; };
template <> struct AccumulatorOf<bfloat16> { using type = float; };
template <class T> using Accumulator = typename AccumulatorOf<T>::type;

template <class T> struct RealPartOf { using type = T; };
template <class R> struct RealPartOf<Complex<R>> { using type = R; };
template <class T> using RealPart = typename RealPartOf<T>::type;

template <class T> __device__ __forceinline__ T widen(T value) { return value; }
__device__ __forceinline__ float widen(float16 value) { return __half2float(value); }
__device__ __forceinline__ float widen(bfloat16 value) { return __bfloat162float(value); }

// Rounds to nearest, ties to even, as the constructors of the 16-bit types do.
template <class T> __device__ __forceinline__ T narrow(Accumulator<T> value) { return T(value); }

// sum += a * b.  Either factor may be real if the sum is complex.
template <class R> __device__ __forceinline__ void add_product(R& sum, R a, R b) { sum += a * b; }
template <class R> __device__ __forceinline__ void add_product(Complex<R>& sum, Complex<R> a, R b) {
    sum.re += a.re * b;
    sum.im += a.im * b;
}
template <class R> __device__ __forceinline__ void add_product(Complex<R>& sum, R a, Complex<R> b) {
    add_product(sum, b, a);
}
template <class R> __device__ __forceinline__ void add_product(Complex<R>& sum, Complex<R> a, Complex<R> b) {
    sum.re += a.re * b.re;
    sum.re -= a.im * b.im;
    sum.im += a.re * b.im;
    sum.im += a.im * b.re;
}

template <class R> __device__ __forceinline__ R conjugate(R value) { return value; }
template <class R> __device__ __forceinline__ Complex<R> conjugate(Complex<R> value) { return {value.re, -value.im}; }

template <class R> __device__ __forceinline__ bool is_finite(R value) { return isfinite(value); }
template <class R> __device__ __forceinline__ bool is_finite(Complex<R> value) {
    return isfinite(value.re) && isfinite(value.im);
}

// COUNT contiguous elements.  One instruction moves them if they fill 4, 8 or 16 aligned bytes.
template <class T, int COUNT>
struct alignas(sizeof(T) * COUNT) Vector {
    T lane[COUNT];
};

// The i-th 32-bit word of an array of values.
template <class T> __device__ __forceinline__ unsigned word_of(const T* values, int i) {
    if constexpr (sizeof(T) == 2) {
        unsigned short low, high;
        memcpy(&low, values + 2 * i, 2);
        memcpy(&high, values + 2 * i + 1, 2);
        return low | (unsigned)high << 16;
    } else {
        unsigned word;
        memcpy(&word, reinterpret_cast<const char*>(values) + 4 * i, 4);
        return word;
    }
}

template <int COUNT, class T> __device__ __forceinline__ Vector<T, COUNT> load_vector(const T* from) {
    return *reinterpret_cast<const Vector<T, COUNT>*>(from);
}

// Load COUNT elements that are `step` apart.  If they are contiguous and aligned (`vectorized`), each access moves up
// to 16 bytes.
template <int COUNT, class T>
__device__ __forceinline__ Vector<T, COUNT> gather_vector(const T* from, long long step, bool vectorized) {
    constexpr int PIECE = COUNT * sizeof(T) > 16 ? 16 / sizeof(T) : COUNT;
    Vector<T, COUNT> vector;
    if (PIECE > 1 && vectorized) {
#pragma unroll
        for (int j = 0; j < COUNT; j += PIECE) {
            const Vector<T, PIECE> piece = load_vector<PIECE>(from + j);
#pragma unroll
            for (int i = 0; i < PIECE; ++i) vector.lane[j + i] = piece.lane[i];
        }
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) vector.lane[i] = from[i * step];
    }
    return vector;
}

// Load COUNT sums in the type of the last argument, whose value is ignored.  Complex sums may be stored in two planes:
// the imaginary parts are `imaginary` elements after the real parts.
template <int COUNT, class S, class A>
__device__ __forceinline__ Vector<A, COUNT> load_sums(const S* at, long long step, bool vectorized, long long, A) {
    const Vector<S, COUNT> from = gather_vector<COUNT>(at, step, vectorized);
    Vector<A, COUNT> sums;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) sums.lane[i] = widen(from.lane[i]);
    return sums;
}
template <int COUNT, class R>
__device__ __forceinline__ Vector<Complex<R>, COUNT> load_sums(
    const R* at, long long step, bool vectorized, long long imaginary, Complex<R>) {
    const Vector<R, COUNT> re = gather_vector<COUNT>(at, step, vectorized);
    const Vector<R, COUNT> im = gather_vector<COUNT>(at + imaginary, step, vectorized);
    Vector<Complex<R>, COUNT> sums;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) sums.lane[i] = Complex<R>(re.lane[i], im.lane[i]);
    return sums;
}

template <int COUNT, class T> __device__ __forceinline__ void store_vector(T* to, const Vector<T, COUNT>& vector) {
    if constexpr (sizeof(vector) == 16) {  // explicit, since compilers split a plain store of many members
        unsigned word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) word[i] = word_of(vector.lane, i);
        __stwb(reinterpret_cast<uint4*>(to), make_uint4(word[0], word[1], word[2], word[3]));
    } else {
        *reinterpret_cast<Vector<T, COUNT>*>(to) = vector;
    }
}

}  // namespace cupyconv
