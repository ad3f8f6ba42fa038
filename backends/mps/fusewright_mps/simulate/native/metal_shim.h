// The part of Metal's standard library that emitted kernels use, for CPUs.
//
// Follows the Metal Shading Language Specification 3.2. What is missing here does not compile, so an emitter cannot accidentally use
// what Metal lacks: half types can be moved and cast but have no arithmetic, `simd_sum` has no 64-bit form. With SHIM_CHECK, pointers
// know the memory they point into, and accesses are checked for bounds, alignment and races.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "runtime.h"

using uint = uint32_t;
using ushort = uint16_t;
using uchar = uint8_t;
using ulong = unsigned long;
static_assert(sizeof(long) == 8, "Metal's long has 64 bits");

// ---------------------------------------------------------------- half types

namespace shim {

template <typename To, typename From> inline To bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "equal sizes");
    To y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}

inline uint16_t half_of(float x) {
#if defined(__FLT16_MAX__)
    return bits<uint16_t>(static_cast<_Float16>(x));
#else
    uint32_t u = bits<uint32_t>(x), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (a >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
    if (a < 0x38800000u) return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::rint(bits<float>(a) * 16777216.0f)));
    a += 0xfffu + ((a >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((a - 0x38000000u) >> 13));
#endif
}

inline float float_of(uint16_t h) {
#if defined(__FLT16_MAX__)
    return static_cast<float>(bits<_Float16>(h));
#else
    uint32_t sign = (h & 0x8000u) << 16, a = h & 0x7fffu;
    if (a >= 0x7c00u) return bits<float>(sign | 0x7f800000u | ((a & 0x3ffu) << 13));
    if (a < 0x400u) return bits<float>(sign | bits<uint32_t>(static_cast<float>(a) * 5.9604644775390625e-8f));
    return bits<float>(sign | ((a << 13) + 0x38000000u));
#endif
}

inline uint16_t bfloat_of(float x) {
    uint32_t u = bits<uint32_t>(x);
    if (x != x) return static_cast<uint16_t>((u >> 16) | 0x40u);
    return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

}  // namespace shim

struct half {
    uint16_t raw;
    half() = default;
    explicit half(float x) : raw(shim::half_of(x)) {}
    explicit operator float() const { return shim::float_of(raw); }
};

struct bfloat {
    uint16_t raw;
    bfloat() = default;
    explicit bfloat(float x) : raw(shim::bfloat_of(x)) {}
    explicit operator float() const { return shim::bits<float>(static_cast<uint32_t>(raw) << 16); }
};

// ---------------------------------------------------------------- vectors

namespace metal {

template <typename T, int N> struct alignas(sizeof(T) * (N == 3 ? 4 : N)) vec {
    T lanes[N];
    vec() = default;
    template <typename... Rest, typename = std::enable_if_t<sizeof...(Rest) + 1 == N && (N > 1)>>
    vec(T first, Rest... rest) : lanes{first, T(rest)...} {}
    explicit vec(T x) {
        for (T& each : lanes) each = x;
    }
    T& operator[](int k) { return lanes[k]; }
    const T& operator[](int k) const { return lanes[k]; }
};

}  // namespace metal

#define SHIM_VECTOR(T) \
    using T##2 = metal::vec<T, 2>; \
    using T##4 = metal::vec<T, 4>;
SHIM_VECTOR(float)
SHIM_VECTOR(half)
SHIM_VECTOR(bfloat)
SHIM_VECTOR(char)
SHIM_VECTOR(uchar)
SHIM_VECTOR(short)
SHIM_VECTOR(int)
SHIM_VECTOR(uint)
SHIM_VECTOR(long)
SHIM_VECTOR(bool)
#undef SHIM_VECTOR

template <typename To, typename From> inline To as_type(From x) { return shim::bits<To>(x); }

// ---------------------------------------------------------------- memory

namespace shim {

#ifndef SHIM_CHECK

template <typename T> using ptr = T*;

template <typename T> inline ptr<T> argument(const Argument& a) { return static_cast<T*>(a.data); }

template <typename T> inline T& any(T& place) { return place; }
template <typename T> inline T* raw(T* p) { return p; }

#else

struct Index {
    long at;
    int line;
    template <typename I> Index(I i, int l = __builtin_LINE()) : at(static_cast<long>(i)), line(l) {}
};

/// An element, read by conversion and written by assignment. `racy`: several threads may write it.
template <typename T> struct Place {
    T* where;
    const Region* region;
    int line;
    bool racy;
    operator T() const {
        look(region, where, sizeof(T), alignof(T), racy ? Access::atomic : Access::read, line);
        return *where;
    }
    const Place& operator=(T x) const {
        look(region, where, sizeof(T), alignof(T), racy ? Access::atomic : Access::write, line);
        *where = x;
        return *this;
    }
    const Place& operator=(const Place& other) const { return *this = static_cast<T>(other); }
    Place(T* w, const Region* r, int l, bool any = false) : where(w), region(r), line(l), racy(any) {}
    Place(const Place&) = default;
};

/// A pointer that knows the memory it may access.
template <typename T> struct ptr {
    T* where;
    const Region* region;
    int line;
    ptr(T* w, const Region* r, int l = __builtin_LINE()) : where(w), region(r), line(l) {}
    template <typename U> explicit ptr(const ptr<U>& p, int l = __builtin_LINE())
        : where(reinterpret_cast<T*>(const_cast<std::remove_const_t<U>*>(p.where))), region(p.region), line(l) {}
    ptr operator+(Index i) const { return ptr(where + i.at, region, i.line); }
    auto operator*() const { return at(where, line); }
    auto operator[](Index i) const { return at(where + i.at, i.line); }
    auto at(T* w, int l) const {
        if constexpr (std::is_const_v<T>) {
            look(region, w, sizeof(T), alignof(T), Access::read, l);
            return *w;
        } else {
            return Place<T>(w, region, l);
        }
    }
};

template <typename T> inline ptr<T> argument(const Argument& a) { return ptr<T>(static_cast<T*>(a.data), &a.region, 0); }

template <typename T> inline Place<T> any(const Place<T>& p) { return Place<T>(p.where, p.region, p.line, true); }
template <typename T> inline T* raw(const ptr<T>& p) {
    look(p.region, p.where, sizeof(T), alignof(T), Access::atomic, p.line);
    return p.where;
}

#endif

/// A threadgroup array, shared by all threads of a threadgroup; its initial content is unspecified.
template <typename T, int N> struct Shared {
    T data[N];
    Region region;
    explicit Shared(const char* name) : region{name, data, data + N, Space::threadgroup} { share(&region); }
#ifdef SHIM_CHECK
    auto operator[](Index i) { return ptr<T>(data, &region)[i]; }
    operator ptr<T>() { return ptr<T>(data, &region); }
#else
    T& operator[](long i) { return data[i]; }
    operator T*() { return data; }
#endif
};

}  // namespace shim

namespace metal {

// ---------------------------------------------------------------- atomics (threads take turns, so plain arithmetic suffices)

enum memory_order { memory_order_relaxed };

template <typename T> struct shim_atomic {
    T value;
};
using atomic_int = shim_atomic<int>;
using atomic_uint = shim_atomic<uint>;
using atomic_float = shim_atomic<float>;

#ifdef SHIM_CHECK
#define SHIM_ATOMIC(T) const shim::ptr<shim_atomic<T>>&
#else
#define SHIM_ATOMIC(T) shim_atomic<T>*
#endif

template <typename T> inline T atomic_load_explicit(SHIM_ATOMIC(T) p, memory_order) { return shim::raw(p)->value; }
template <typename T> inline void atomic_store_explicit(SHIM_ATOMIC(T) p, T x, memory_order) { shim::raw(p)->value = x; }
template <typename T> inline T atomic_exchange_explicit(SHIM_ATOMIC(T) p, T x, memory_order) {
    T old = shim::raw(p)->value;
    shim::raw(p)->value = x;
    return old;
}
template <typename T> inline T atomic_fetch_add_explicit(SHIM_ATOMIC(T) p, T x, memory_order) {
    T old = shim::raw(p)->value;
    shim::raw(p)->value = static_cast<T>(old + x);
    return old;
}
template <typename T> inline T atomic_fetch_max_explicit(SHIM_ATOMIC(T) p, T x, memory_order) {
    static_assert(std::is_integral_v<T>, "Metal has no atomic maximum of floats");
    T old = shim::raw(p)->value;
    shim::raw(p)->value = old > x ? old : x;
    return old;
}
template <typename T> inline T atomic_fetch_min_explicit(SHIM_ATOMIC(T) p, T x, memory_order) {
    static_assert(std::is_integral_v<T>, "Metal has no atomic minimum of floats");
    T old = shim::raw(p)->value;
    shim::raw(p)->value = old < x ? old : x;
    return old;
}
/// A "weak" exchange may fail spuriously; here every seventh one does, so that kernels cannot rely on success.
template <typename T>
inline bool atomic_compare_exchange_weak_explicit(SHIM_ATOMIC(T) p, T* expected, T x, memory_order, memory_order) {
    T old = shim::raw(p)->value;
    if (std::memcmp(&old, expected, sizeof(T)) != 0 || shim::fails_for_no_reason()) {
        *expected = old;
        return false;
    }
    shim::raw(p)->value = x;
    return true;
}

// ---------------------------------------------------------------- synchronization

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };

inline void threadgroup_barrier(mem_flags f, int line = __builtin_LINE()) { shim::barrier(static_cast<int>(f), line); }
inline void simdgroup_barrier(mem_flags f, int line = __builtin_LINE()) { shim::simd_barrier(static_cast<int>(f), line); }

}  // namespace metal

namespace shim {

template <typename T> struct Lanes {
    const T* values;
    uint32_t active;
};

/// The values that all lanes of the simdgroup pass; `line` shows whether they call from the same place.
template <typename T> inline Lanes<T> meet(T x, int line) {
    static_assert(sizeof(T) <= 4, "simdgroup functions take at most 32 bits");
    uint32_t active = 0;
    const void* all = exchange(&x, sizeof(T), line, &active);
    return {static_cast<const T*>(all), active};
}

/// Combine all active lanes pairwise; the order on a device is unspecified.
template <typename T, typename F> inline T fold(T x, int line, F combine) {
    auto got = meet(x, line);
    T parts[32];
    int count = 0;
    for (int k = 0; k < 32; k++) {
        if (got.active >> k & 1u) parts[count++] = got.values[k];
    }
    for (; count > 1; count = (count + 1) / 2) {
        for (int k = 0; k < count / 2; k++) parts[k] = combine(parts[2 * k], parts[2 * k + 1]);
        if (count % 2 != 0) parts[count / 2] = parts[count - 1];
    }
    return parts[0];
}

}  // namespace shim

namespace metal {

template <typename T> inline T simd_sum(T x, int line = __builtin_LINE()) {
    static_assert(!std::is_same_v<T, bool>, "simd_sum takes numbers");
    return shim::fold(x, line, [](T a, T b) { return static_cast<T>(a + b); });
}
template <typename T> inline T simd_product(T x, int line = __builtin_LINE()) {
    static_assert(!std::is_same_v<T, bool>, "simd_product takes numbers");
    return shim::fold(x, line, [](T a, T b) { return static_cast<T>(a * b); });
}
/// May drop NaNs, as Metal's maximum does.
template <typename T> inline T simd_max(T x, int line = __builtin_LINE()) {
    return shim::fold(x, line, [](T a, T b) { return b > a || a != a ? b : a; });
}
template <typename T> inline T simd_min(T x, int line = __builtin_LINE()) {
    return shim::fold(x, line, [](T a, T b) { return b < a || a != a ? b : a; });
}
inline bool simd_any(bool x, int line = __builtin_LINE()) {
    return shim::fold(x, line, [](bool a, bool b) { return a || b; });
}
inline bool simd_all(bool x, int line = __builtin_LINE()) {
    return shim::fold(x, line, [](bool a, bool b) { return a && b; });
}
template <typename T> inline T simd_shuffle_xor(T x, ushort mask, int line = __builtin_LINE()) {
    return shim::meet(x, line).values[shim::lane() ^ mask];
}
/// Lanes with no lane below them get an unspecified value.
template <typename T> inline T simd_shuffle_up(T x, ushort by, int line = __builtin_LINE()) {
    auto got = shim::meet(x, line);
    T junk;
    std::memset(&junk, 0xa5, sizeof junk);
    return shim::lane() >= by ? got.values[shim::lane() - by] : junk;
}
template <typename T> inline T simd_broadcast(T x, ushort from, int line = __builtin_LINE()) {
    return shim::meet(x, line).values[from];
}

// ---------------------------------------------------------------- math

namespace precise {
#define SHIM_MATH(name) inline float name(float x) { return std::name(x); }
SHIM_MATH(exp) SHIM_MATH(exp2) SHIM_MATH(log) SHIM_MATH(log2) SHIM_MATH(log10) SHIM_MATH(sin) SHIM_MATH(cos) SHIM_MATH(tan)
SHIM_MATH(asin) SHIM_MATH(acos) SHIM_MATH(atan) SHIM_MATH(sinh) SHIM_MATH(cosh) SHIM_MATH(tanh) SHIM_MATH(asinh)
SHIM_MATH(acosh) SHIM_MATH(atanh) SHIM_MATH(sqrt)
#undef SHIM_MATH
inline float rsqrt(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
inline float atan2(float y, float x) { return std::atan2(y, x); }
inline float pow(float x, float y) { return std::pow(x, y); }
inline float fmod(float x, float y) { return std::fmod(x, y); }
}  // namespace precise

// Errors of the size that the specification allows fast math; the argument's last bits choose the direction.
namespace fast {
inline float off(float y, float x, float ulps) {
    if (!(y - y == 0.0f) || y == 0.0f) return y;
    float direction = (shim::bits<uint32_t>(x) & 1u) ? 1.0f : -1.0f;
    return static_cast<float>(static_cast<double>(y) * (1.0 + static_cast<double>(direction * ulps) * 0x1p-24));
}
inline float exp(float x) { return off(std::exp(x), x, 3.0f + std::floor(std::fabs(2.0f * x))); }
inline float exp2(float x) { return off(std::exp2(x), x, 3.0f + std::floor(std::fabs(2.0f * x))); }
inline float log(float x) { return off(std::log(x), x, 3.0f); }
inline float rsqrt(float x) { return off(precise::rsqrt(x), x, 2.0f); }
inline float sqrt(float x) { return off(std::sqrt(x), x, 4.0f); }
inline float divide(float x, float y) { return off(x / y, x, 2.5f); }
}  // namespace fast

inline float floor(float x) { return std::floor(x); }
inline float ceil(float x) { return std::ceil(x); }
inline float rint(float x) { return std::rint(x); }
inline float trunc(float x) { return std::trunc(x); }
inline float fabs(float x) { return std::fabs(x); }
inline float fmod(float x, float y) { return std::fmod(x, y); }
inline float fma(float x, float y, float z) { return std::fma(x, y, z); }
inline float fmin(float x, float y) { return std::fmin(x, y); }
inline float fmax(float x, float y) { return std::fmax(x, y); }
inline float copysign(float x, float y) { return std::copysign(x, y); }
inline bool isnan(float x) { return x != x; }
inline bool isinf(float x) { return std::fabs(x) == std::numeric_limits<float>::infinity(); }
inline bool signbit(float x) { return std::signbit(x); }
template <typename T> inline T min(T a, T b) {
    static_assert(std::is_integral_v<T>, "which of two floats a NaN is among is said by fmin");
    return b < a ? b : a;
}
template <typename T> inline T max(T a, T b) {
    static_assert(std::is_integral_v<T>, "which of two floats a NaN is among is said by fmax");
    return b > a ? b : a;
}

}  // namespace metal

#define kernel static
#define FW_ANY(place) shim::any(place)
#define FW_UNROLL
