"""Functions shared by all emitted kernels: torch's semantics where Metal's operators differ, and functions that Metal lacks.

The polynomials of `fw_erf`, `fw_expm1` and `fw_log1p` are taken from the CPU backends' math; those of `fw_erfc` and `fw_lgamma`
were fitted for this file by least squares of the relative error in f64. The simdgroup functions extend Metal's to 64-bit
numbers and to maxima that propagate NaN.
"""

from __future__ import annotations

PRELUDE = r"""
#include <metal_stdlib>
using namespace metal;

#ifdef __METAL_VERSION__
#define FW_ANY(place) place
#define FW_UNROLL _Pragma("clang loop unroll(full)")
#if __METAL_VERSION__ >= 320
#pragma METAL fp math_mode(safe)
#endif
#endif
// FW_ANY: an element that several points may store to; which of them stays is not said.
// FW_UNROLL: a loop of few steps over what lies in registers, which have no addresses.

template <typename T> struct fw_unsigned { using type = T; };
template <> struct fw_unsigned<char> { using type = uchar; };
template <> struct fw_unsigned<short> { using type = ushort; };
template <> struct fw_unsigned<int> { using type = uint; };
template <> struct fw_unsigned<long> { using type = ulong; };

// whole numbers wrap around

template <typename T> inline T fw_add(T a, T b) {
    using U = typename fw_unsigned<T>::type;
    return T(U(a) + U(b));
}
inline float fw_add(float a, float b) { return a + b; }
template <typename T> inline T fw_sub(T a, T b) {
    using U = typename fw_unsigned<T>::type;
    return T(U(a) - U(b));
}
template <typename T> inline T fw_mul(T a, T b) {
    using U = typename fw_unsigned<T>::type;
    return T(ulong(U(a)) * ulong(U(b)));
}
inline float fw_mul(float a, float b) { return a * b; }
template <typename T> inline T fw_neg(T a) { return fw_sub(T(0), a); }
template <typename T> inline T fw_abs(T a) { return a < T(0) ? fw_neg(a) : a; }
template <typename T> inline T fw_sign(T a) { return T(T(a > T(0)) - T(a < T(0))); }
template <typename T> inline T fw_truncdiv(T a, T b) { return T(b + T(1)) == T(0) && T(-1) < T(0) ? fw_neg(a) : T(a / b); }
template <typename T> inline T fw_fmod(T a, T b) { return fw_sub(a, fw_mul(fw_truncdiv(a, b), b)); }
template <typename T> inline T fw_floordiv(T a, T b) {
    const T q = fw_truncdiv(a, b), r = fw_sub(a, fw_mul(q, b));
    return r != T(0) && (r < T(0)) != (b < T(0)) ? T(q - T(1)) : q;
}
template <typename T> inline T fw_remainder(T a, T b) {
    const T r = fw_fmod(a, b);
    return r != T(0) && (r < T(0)) != (b < T(0)) ? fw_add(r, b) : r;
}
template <typename T> inline T fw_itself(T x) { return x; }
template <typename T> inline T fw_nonzero(T b) { return b == T(0) ? T(1) : b; }
template <typename T> inline T fw_pow(T a, T n) {
    if (n < T(0)) return a == T(1) ? T(1) : T(a + T(1)) == T(0) ? ((n & T(1)) != T(0) ? a : T(1)) : T(0);
    T y = T(1);
    for (; n > T(0); n = T(n >> 1)) {
        if ((n & T(1)) != T(0)) y = fw_mul(y, a);
        a = fw_mul(a, a);
    }
    return y;
}
template <typename T> inline T fw_shl(T a, T n) {
    using U = typename fw_unsigned<T>::type;
    return n >= T(0) && n < T(sizeof(T) * 8) ? T(U(a) << U(n)) : T(0);
}
template <typename T> inline T fw_shr(T a, T n) {
    if (n >= T(0) && n < T(sizeof(T) * 8)) return T(a >> n);
    return a < T(0) ? T(-1) : T(0);
}

// minima and maxima keep NaN

template <typename T> inline T fw_max(T a, T b) { return a > b || a != a ? a : b; }
template <typename T> inline T fw_min(T a, T b) { return a < b || a != a ? a : b; }
template <typename T> inline bool fw_beats_max(T b, T a) { return b > a || (b != b && a == a); }
template <typename T> inline bool fw_beats_min(T b, T a) { return b < a || (b != b && a == a); }
template <typename T> inline bool fw_same(T a, T b) { return a == b || (a != a && b != b); }

// f32

inline float fw_floordiv(float a, float b) {
    const float m = metal::fmod(a, b);
    float q = (a - m) / b;
    if (m != 0.0f && (m < 0.0f) != (b < 0.0f)) q -= 1.0f;
    float whole = metal::floor(q);
    if (q - whole > 0.5f) whole += 1.0f;
    if (q == 0.0f) whole = metal::copysign(0.0f, a / b);
    return b == 0.0f ? a / b : whole;
}
inline float fw_remainder(float a, float b) {
    const float m = metal::fmod(a, b);
    return m != 0.0f && (m < 0.0f) != (b < 0.0f) ? m + b : m;
}
inline float fw_sigmoid(float x) {
    const float e = metal::precise::exp(-metal::fabs(x));
    return (x >= 0.0f ? 1.0f : e) / (1.0f + e);
}
inline float fw_fast_sigmoid(float x) { return 1.0f / (1.0f + metal::fast::exp(-x)); }
inline float fw_pow2(int k) { return as_type<float>((k + 127) << 23); }
inline float fw_expm1(float x) {
    const float y = x < -20.0f ? -20.0f : x > 89.0f ? 89.0f : x;
    const float n = metal::rint(y * 1.44269504f);
    float r = metal::fma(n, -0.693145752f, y);
    r = metal::fma(n, -1.42860677e-06f, r);
    float p = metal::fma(0.00139358058f, r, 0.0083690891f);
    p = metal::fma(p, r, 0.0416664556f);
    p = metal::fma(p, r, 0.166665167f);
    p = metal::fma(p, r, 0.5f);
    const float m = metal::fma(r * r, p, r), s = fw_pow2(int(n) - 1);
    return x == 0.0f ? x : 2.0f * metal::fma(s, m, s - 0.5f);
}
inline float fw_log1p(float x) {
    const float u = 1.0f + x;
    const int k = (as_type<int>(u) - 0x3f3504f3) >> 23;
    const float d = as_type<float>(as_type<int>(u) - (k << 23)) - 1.0f;
    float p = metal::fma(-0.0735380277f, d, 0.126151875f);
    p = metal::fma(p, d, -0.132034585f);
    p = metal::fma(p, d, 0.142280996f);
    p = metal::fma(p, d, -0.166213155f);
    p = metal::fma(p, d, 0.199997663f);
    p = metal::fma(p, d, -0.250008523f);
    p = metal::fma(p, d, 0.333333552f);
    const float lost = x > 16777216.0f ? 0.0f : (x - (u - 1.0f)) / u;
    const float low = metal::fma(float(k), 1.42860677e-06f, d * d * metal::fma(p, d, -0.5f) + lost);
    const float y = metal::fma(float(k), 0.693145752f, d + low);
    return x == 0.0f || x == INFINITY ? x : u == 0.0f ? -INFINITY : u > 0.0f ? y : NAN;
}
inline float fw_erf(float x) {
    const float t = x > 3.925f ? 3.925f : x < -3.925f ? -3.925f : x;
    const float u = metal::fma(t * t, 0.129822711f, -1.0f), u2 = u * u, u4 = u2 * u2;
    const float a = metal::fma(metal::fma(metal::fma(0.00183295506f, u4, 0.0297581423f), u4, 0.0905723497f), u4, 0.360277921f);
    const float b = metal::fma(metal::fma(metal::fma(-0.00120133499f, u4, -0.0199196395f), u4, -0.0740567148f), u4, -0.179884195f);
    const float c = metal::fma(metal::fma(metal::fma(0.00217113691f, u4, 0.0144898072f), u4, 0.0585423634f), u4, 0.133933425f);
    const float e = metal::fma(metal::fma(metal::fma(-0.000921809058f, u4, -0.00805392861f), u4, -0.043672204f), u4, -0.109091216f);
    const float y = metal::fma(u2, metal::fma(e, u, c), metal::fma(b, u, a)) * t;
    return y > 1.0f ? 1.0f : y < -1.0f ? -1.0f : y;
}
// exp(-x * x), with the part of the square that f32 drops
inline float fw_gauss(float x) {
    const float s = x * x;
    return metal::precise::exp(-s) * (1.0f - metal::fma(x, x, -s));
}
// erfc(x) * exp(x * x) * (1 + 2 * x) as a polynomial in (x - 2) / (x + 2), fitted on [0, 11] to 5e-8
inline float fw_erfc(float x) {
    const float a = metal::fabs(x);
    if (a < 0.5f) return 1.0f - fw_erf(x);
    const float t = (a - 2.0f) / (a + 2.0f);
    float p = 3.27972848e-05f;
    p = metal::fma(p, t, -0.000356954552f);
    p = metal::fma(p, t, -0.00125877629f);
    p = metal::fma(p, t, 0.00126638089f);
    p = metal::fma(p, t, 0.00864071026f);
    p = metal::fma(p, t, -0.00804237742f);
    p = metal::fma(p, t, -0.0542057529f);
    p = metal::fma(p, t, 0.164052889f);
    p = metal::fma(p, t, -0.166031286f);
    p = metal::fma(p, t, -0.0927638859f);
    p = metal::fma(p, t, 1.27697837f);
    const float y = a > 10.1f ? 0.0f : fw_gauss(a) * p / (1.0f + 2.0f * a);
    return x != x ? x : x < 0.0f ? 2.0f - y : y;
}
// lgamma(1 + z) / z and lgamma(2 + z) / z, fitted on [-1/2, 1/2] to 3e-8 and 1e-9
inline float fw_lgamma_1(float z) {
    float p = -0.14327541f;
    p = metal::fma(p, z, 0.172415778f);
    p = metal::fma(p, z, -0.0750205815f);
    p = metal::fma(p, z, 0.0699899867f);
    p = metal::fma(p, z, -0.112259157f);
    p = metal::fma(p, z, 0.130017355f);
    p = metal::fma(p, z, -0.144160986f);
    p = metal::fma(p, z, 0.16924195f);
    p = metal::fma(p, z, -0.207371652f);
    p = metal::fma(p, z, 0.270589978f);
    p = metal::fma(p, z, -0.400686026f);
    p = metal::fma(p, z, 0.822466969f);
    p = metal::fma(p, z, -0.577215672f);
    return p * z + 0.0f;  // lgamma(1) is the positive zero
}
inline float fw_lgamma_2(float z) {
    float p = 0.00011992739f;
    p = metal::fma(p, z, -0.000252076017f);
    p = metal::fma(p, z, 0.000503032876f);
    p = metal::fma(p, z, -0.00118664431f);
    p = metal::fma(p, z, 0.00289141899f);
    p = metal::fma(p, z, -0.00738606555f);
    p = metal::fma(p, z, 0.0205807593f);
    p = metal::fma(p, z, -0.0673522875f);
    p = metal::fma(p, z, 0.322467029f);
    p = metal::fma(p, z, 0.422784328f);
    return p * z;
}
inline float fw_lgamma_positive(float x) {
    if (x < 0.5f) return fw_lgamma_1(x) - metal::precise::log(x);
    if (x < 1.5f) return fw_lgamma_1(x - 1.0f);
    if (x < 2.5f) return fw_lgamma_2(x - 2.0f);
    if (x < 8.0f) {
        float product = 1.0f;
        while (x >= 2.5f) {
            x -= 1.0f;
            product *= x;
        }
        return metal::precise::log(product) + fw_lgamma_2(x - 2.0f);
    }
    const float u = 1.0f / x, v = u * u;
    const float tail = u * metal::fma(metal::fma(7.93650794e-04f, v, -2.77777778e-03f), v, 8.33333333e-02f);
    return x > 1e10f ? x * (metal::precise::log(x) - 1.0f) : (x - 0.5f) * metal::precise::log(x) - x + (0.918938533f + tail);
}
inline float fw_lgamma(float x) {
    if (x != x || metal::isinf(x)) return metal::fabs(x);
    if (x > 0.0f) return fw_lgamma_positive(x);
    const float turn = x - metal::rint(x);
    if (turn == 0.0f) return INFINITY;
    const float wave = metal::fabs(metal::precise::sin(3.14159265f * turn));
    return 1.14472989f - metal::precise::log(wave * -x) - fw_lgamma_positive(-x);
}
inline float fw_hypot(float x, float y) {
    const float a = metal::fabs(x), b = metal::fabs(y), top = a > b ? a : b, low = a > b ? b : a;
    if (top == INFINITY || low == INFINITY) return INFINITY;
    if (!(top > 0.0f)) return a + b;
    const int k = (as_type<int>(top) >> 23) - 127, down = k > 126 ? 126 : k < -125 ? -125 : k;
    const float p = top * fw_pow2(-down), q = low * fw_pow2(-down);
    return metal::precise::sqrt(metal::fma(p, p, q * q)) * fw_pow2(down);
}

// checks

inline void fw_report(device atomic_uint* errors, int slot, uint site, long index) {
    if (atomic_exchange_explicit(errors + 4 * slot, site, memory_order_relaxed) == 0u) {
        atomic_store_explicit(errors + (4 * slot + 1), uint(ulong(index)), memory_order_relaxed);
        atomic_store_explicit(errors + (4 * slot + 2), uint(ulong(index) >> 32), memory_order_relaxed);
    }
}
// an index in [low, size), from the end where it is negative; elsewhere 0, and a report if somebody asks for the element
inline long fw_bound(long i, long low, long size, bool asked, device atomic_uint* errors, int slot, uint site) {
    const bool bad = i < low || i >= size;
    if (bad && asked) fw_report(errors, slot, site, i);
    return bad ? 0l : i < 0l ? i + size : i;
}
template <typename T> inline T fw_divisor(T b, bool asked, device atomic_uint* errors, int slot) {
    if (b == T(0) && asked) fw_report(errors, slot, 255u, 0l);
    return fw_nonzero(b);
}
inline int fw_floor_index(int a, int b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }
inline long fw_floor_index(long a, long b) { return a >= 0l ? a / b : -((b - 1l - a) / b); }

// simdgroups

template <typename T> inline T fw_xor(T x, ushort mask) { return simd_shuffle_xor(x, mask); }
template <> inline long fw_xor<long>(long x, ushort mask) {
    const ulong u = ulong(x);
    const uint low = simd_shuffle_xor(uint(u), mask), high = simd_shuffle_xor(uint(u >> 32), mask);
    return long(ulong(low) | ulong(high) << 32);
}
template <typename T> inline T fw_up(T x, ushort by) { return simd_shuffle_up(x, by); }
template <> inline long fw_up<long>(long x, ushort by) {
    const ulong u = ulong(x);
    const uint low = simd_shuffle_up(uint(u), by), high = simd_shuffle_up(uint(u >> 32), by);
    return long(ulong(low) | ulong(high) << 32);
}
template <typename T> inline T fw_from(T x, ushort lane) { return simd_broadcast(x, lane); }
template <> inline long fw_from<long>(long x, ushort lane) {
    const ulong u = ulong(x);
    const uint low = simd_broadcast(uint(u), lane), high = simd_broadcast(uint(u >> 32), lane);
    return long(ulong(low) | ulong(high) << 32);
}
template <typename T> inline T fw_simd_sum(T x) { return simd_sum(x); }
template <> inline long fw_simd_sum<long>(long x) {
    for (ushort m = 16; m > 0; m >>= 1) x = fw_add(x, fw_xor(x, m));
    return x;
}
template <typename T> inline T fw_simd_prod(T x) { return simd_product(x); }
template <> inline long fw_simd_prod<long>(long x) {
    for (ushort m = 16; m > 0; m >>= 1) x = fw_mul(x, fw_xor(x, m));
    return x;
}
template <typename T> inline T fw_simd_max(T x) { return simd_max(x); }
template <> inline float fw_simd_max<float>(float x) {
    const bool lost = simd_any(x != x);
    const float y = simd_max(x);
    return lost ? NAN : y;
}
template <> inline long fw_simd_max<long>(long x) {
    for (ushort m = 16; m > 0; m >>= 1) x = fw_max(x, fw_xor(x, m));
    return x;
}
template <typename T> inline T fw_simd_min(T x) { return simd_min(x); }
template <> inline float fw_simd_min<float>(float x) {
    const bool lost = simd_any(x != x);
    const float y = simd_min(x);
    return lost ? NAN : y;
}
template <> inline long fw_simd_min<long>(long x) {
    for (ushort m = 16; m > 0; m >>= 1) x = fw_min(x, fw_xor(x, m));
    return x;
}
inline bool fw_simd_any(bool x) { return simd_any(x); }
inline bool fw_simd_all(bool x) { return simd_all(x); }

// a row's maximum and its sum of exp(x - maximum) in one pass, rescaled as the maximum grows (Milakov and Gimelshein 2018)

#define FW_ONLINE float2(-INFINITY, 0.0f)
inline float fw_rescale(float top, float most) { return top == most ? 1.0f : metal::precise::exp(top - most); }
inline float2 fw_online(float2 s, float x) {
    const float e = x == s[0] ? 1.0f : metal::precise::exp(-metal::fabs(x - s[0]));
    return fw_beats_max(x, s[0]) ? float2(x, s[1] * e + 1.0f) : float2(s[0], s[1] + e);
}
inline float2 fw_online_joined(float2 s, float2 t) {
    const float most = fw_max(s[0], t[0]);
    return float2(most, s[1] * fw_rescale(s[0], most) + t[1] * fw_rescale(t[0], most));
}
inline float2 fw_simd_online(float2 s) {
    const float most = fw_simd_max(s[0]);
    return float2(most, fw_simd_sum(s[1] * fw_rescale(s[0], most)));
}
// NaN where the maximum is infinite, as inf - inf is
inline float fw_online_sum(float2 s) { return metal::isinf(s[0]) && s[1] != 0.0f ? NAN : s[1]; }

struct fw_sum_of {
    template <typename T> static T of(T a, T b) { return fw_add(a, b); }
};
struct fw_prod_of {
    template <typename T> static T of(T a, T b) { return fw_mul(a, b); }
};
struct fw_max_of {
    template <typename T> static T of(T a, T b) { return fw_max(a, b); }
};
struct fw_min_of {
    template <typename T> static T of(T a, T b) { return fw_min(a, b); }
};
// Inclusive scan of the 32 lanes (Hillis and Steele 1986)
template <typename F, typename T> inline T fw_simd_scan(T x, uint lane) {
    for (ushort by = 1; by < 32; by <<= 1) {
        const T below = fw_up(x, by);
        if (lane >= by) x = F::of(below, x);
    }
    return x;
}

// accumulation of what Metal has no atomic for, by exchanging the word that holds it

template <typename F> inline void fw_atomic(device float* p, float x) {
    device atomic_uint* word = (device atomic_uint*)(p);
    uint old = atomic_load_explicit(word, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(word, &old, as_type<uint>(F::of(as_type<float>(old), x)), memory_order_relaxed,
                                                  memory_order_relaxed)) {
    }
}
template <typename F> inline void fw_atomic(device int* p, int x) {
    device atomic_int* word = (device atomic_int*)(p);
    int old = atomic_load_explicit(word, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(word, &old, F::of(old, x), memory_order_relaxed, memory_order_relaxed)) {
    }
}
// a half type: `p` begins a word of 4 bytes with it and a neighbour, `high` says which of the two it is
template <typename F, typename H> inline void fw_atomic_half(device uint* p, bool high, float x) {
    device atomic_uint* word = (device atomic_uint*)(p);
    uint old = atomic_load_explicit(word, memory_order_relaxed), made = 0u;
    do {
        const ushort now = ushort(high ? old >> 16 : old & 0xffffu);
        const ushort then = as_type<ushort>(H(F::of(float(as_type<H>(now)), x)));
        made = high ? (old & 0xffffu) | uint(then) << 16 : (old & 0xffff0000u) | uint(then);
    } while (!atomic_compare_exchange_weak_explicit(word, &old, made, memory_order_relaxed, memory_order_relaxed));
}
"""
