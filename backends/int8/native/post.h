// Elementary functions on fp32 vectors, and loads and stores of every type. The polynomials are those of the loop kernels
// (`fusewright_cpu/emit/math.py`), so that a fused gelu equals that of a loop kernel.
#pragma once

#include "types.h"

namespace fusewright::int8 {
namespace {

template <class V> typename V::F polynomial(typename V::F x, const float* c, int count) {
  typename V::F acc = V::set(c[count - 1]);
  for (int i = count - 2; i >= 0; --i) acc = V::fma(acc, x, V::set(c[i]));
  return acc;
}

template <class V> typename V::F absolute(typename V::F x) { return V::bits(V::both(V::bits(x), V::set(0x7FFFFFFF))); }

// Clamp x to [low, high]; NaN stays NaN (V::max and V::min then return their second operand).
template <class V> typename V::F clamp(typename V::F x, float low, float high) {
  return V::min(V::set(high), V::max(V::set(low), x));
}

template <class V> typename V::F power_of_two(typename V::I k) { return V::bits(V::shl(V::add(k, V::set(127)), 23)); }

template <class V> typename V::F exp(typename V::F x) {
  static constexpr float c[] = {0.5f, 0.16666516661643982f, 0.04166645556688309f, 0.008369089104235172f, 0.0013935758033767343f};
  x = clamp<V>(x, -104.0f, 89.0f);
  auto n = V::rint(V::mul(x, V::set(1.4426950408889634f)));
  auto r = V::fma(n, V::set(-1.428606765330187e-06f), V::fma(n, V::set(-0.693145751953125f), x));
  auto p = V::fma(V::fma(polynomial<V>(r, c, 5), r, V::set(1.0f)), r, V::set(1.0f));
  auto k = V::round(n);  // 2^n in two factors, because 2^128 is not a float
  auto half = V::sar(k, 1);
  return V::mul(V::mul(p, power_of_two<V>(half)), power_of_two<V>(V::sub(k, half)));
}

template <class V> typename V::F erf(typename V::F x) {
  constexpr float top = 3.925f;
  static constexpr float c[] = {
      0.36027792096138f,     -0.1798841953277588f,   0.133933424949646f,     -0.10909121483564377f,
      0.09057234972715378f,  -0.0740567147731781f,   0.058542363345623016f,  -0.04367220401763916f,
      0.029758142307400703f, -0.019919639453291893f, 0.014489807188510895f,  -0.00805392861366272f,
      0.0018329550512135029f, -0.001201334991492331f, 0.0021711369045078754f, -0.0009218090563081205f};
  auto t = clamp<V>(x, -top, top);
  auto u = V::fma(V::mul(t, t), V::set(2 / (top * top)), V::set(-1.0f));
  // Four independent parts, combined with powers of u^4.
  auto u2 = V::mul(u, u), u4 = V::mul(u2, u2);
  typename V::F part[4];
  for (int i = 0; i < 4; ++i) {
    part[i] = V::set(c[12 + i]);
    for (int j = 8; j >= 0; j -= 4) part[i] = V::fma(part[i], u4, V::set(c[j + i]));
  }
  auto p = V::fma(u2, V::fma(part[3], u, part[2]), V::fma(part[1], u, part[0]));
  return clamp<V>(V::mul(p, t), -1.0f, 1.0f);
}

template <class V> typename V::F tanh(typename V::F x) {
  static constexpr float c[] = {-0.3333328068256378f, 0.13331419229507446f, -0.053738292306661606f, 0.02063542976975441f,
                                -0.005701635032892227f};
  auto a = absolute<V>(x), u = V::mul(x, x);
  auto small = V::fma(V::mul(polynomial<V>(u, c, 5), u), x, x);
  auto big = V::sub(V::set(1.0f), V::div(V::set(2.0f), V::add(exp<V>(V::add(a, a)), V::set(1.0f))));
  auto negative = V::where_less(x, V::set(0.0f), V::sub(V::set(0.0f), big), big);
  return V::where_less(a, V::set(0.625f), small, negative);
}

template <class V> typename V::F sigmoid(typename V::F x) {
  auto e = exp<V>(V::sub(V::set(0.0f), absolute<V>(x)));
  auto top = V::where_less(x, V::set(0.0f), e, V::set(1.0f));
  return V::div(top, V::add(V::set(1.0f), e));
}

template <class V> typename V::F apply_post(typename V::F y, const After& a) {
  switch (a.post) {
    case Post::none: return y;
    case Post::relu: return V::max(V::set(0.0f), y);
    case Post::clamp: return clamp<V>(y, a.clamp_low, a.clamp_high);
    case Post::gelu: {
      auto half = V::mul(y, V::set(0.5f));
      return V::fma(half, erf<V>(V::mul(y, V::set(0.70710678118654752f))), half);
    }
    case Post::gelu_tanh: {
      auto cube = V::mul(V::mul(y, y), y);
      auto inner = V::mul(V::set(0.79788456080286536f), V::fma(V::set(0.044715f), cube, y));
      auto half = V::mul(y, V::set(0.5f));
      return V::fma(half, tanh<V>(inner), half);
    }
    case Post::silu: return V::mul(y, sigmoid<V>(y));
  }
  return y;
}

// Load W numbers of any type at `p`, widened; 8-bit ones without applying scale and zero point.
template <class V> typename V::F load_as(const void* p, Type type, i64 at) {
  switch (type) {
    case Type::u8: return V::to_float(V::load_u8(static_cast<const std::uint8_t*>(p) + at));
    case Type::s8: return V::to_float(V::load_s8(static_cast<const std::int8_t*>(p) + at));
    case Type::bf16: return V::bits(V::shl(V::load_u16(static_cast<const std::uint16_t*>(p) + at), 16));
    case Type::f32: break;
  }
  return V::load(static_cast<const float*>(p) + at);
}

// Store bf16, rounding half to even; NaN becomes the quiet NaN that torch writes.
template <class V> void store_bf16(std::uint16_t* p, typename V::F y) {
  auto u = V::bits(y);
  auto up = V::add(V::set(0x7FFF), V::both(V::shr(u, 16), V::set(1)));
  auto rounded = V::shr(V::add(u, up), 16);
  auto kept = V::both(V::sub(rounded, V::set(0x7FC0)), V::ordered(y));
  V::store_low16(p, V::add(kept, V::set(0x7FC0)));
}

// clamp(round(y * inverse) + zero, low, high), 0 for NaN. It clamps before rounding, because the limits are integers. Members are
// vectors held in registers: byte stores may alias scalars in memory and would force reloading them.
template <class V> struct Quantizer {
  typename V::F inverse, low, high;
  typename V::I zero;

  Quantizer(float inverse_, std::int32_t zero_, std::int32_t low_, std::int32_t high_)
      : inverse(V::set(inverse_)),
        low(V::set(static_cast<float>(low_ - zero_))),
        high(V::set(static_cast<float>(high_ - zero_))),
        zero(V::set(zero_)) {}

  void store(std::uint8_t* p, typename V::F y) const {
    auto v = V::mul(y, inverse);
    auto ordered = V::ordered(v);
    v = V::min(V::max(v, low), high);
    V::store_low8(p, V::both(V::add(V::round(v), zero), ordered));
  }
};

template <class V> void store_as(const After& a, i64 at, typename V::F y) {
  switch (a.out_type) {
    case Type::f32: V::store(static_cast<float*>(a.out) + at, y); break;
    case Type::bf16: store_bf16<V>(static_cast<std::uint16_t*>(a.out) + at, y); break;
    default: Quantizer<V>(a.inverse, a.zero, a.low, a.high).store(static_cast<std::uint8_t*>(a.out) + at, y);
  }
}

constexpr i64 size_of(Type t) { return t == Type::f32 ? 4 : t == Type::bf16 ? 2 : 1; }

// Finish W results at element (row, column): residual, post-op, store.
template <class V> void finish_vector(const After& a, i64 row, i64 column, typename V::F y) {
  if (a.residual) {
    auto r = load_as<V>(a.residual, a.residual_type, row * a.residual_stride + column);
    if (size_of(a.residual_type) == 1) {
      r = V::sub(r, V::set(static_cast<float>(a.residual_zero)));
      r = V::mul(r, V::set(a.residual_scale));
    }
    y = V::add(y, r);
  }
  store_as<V>(a, row * a.out_stride + column, apply_post<V>(y, a));
}

// The same for only the first `count` < W results, through a copy, because their neighbours must not be touched.
template <class V> void finish_part(const After& a, i64 row, i64 column, typename V::F y, i64 count) {
  alignas(64) unsigned char in[4 * V::W] = {}, out[4 * V::W];
  After copy = a;
  copy.out = out, copy.out_stride = 0;
  if (a.residual) {
    i64 size = size_of(a.residual_type);
    auto from = static_cast<const unsigned char*>(a.residual) + (row * a.residual_stride + column) * size;
    __builtin_memcpy(in, from, static_cast<std::size_t>(count * size));
    copy.residual = in, copy.residual_stride = 0;
  }
  finish_vector<V>(copy, 0, 0, y);
  i64 size = size_of(a.out_type);
  auto to = static_cast<unsigned char*>(a.out) + (row * a.out_stride + column) * size;
  __builtin_memcpy(to, out, static_cast<std::size_t>(count * size));
}

template <class V> void finish(const After& a, i64 row, i64 column, typename V::F y, i64 count) {
  if (count >= V::W)
    finish_vector<V>(a, row, column, y);
  else if (count > 0)
    finish_part<V>(a, row, column, y, count);
}

}  // namespace
}  // namespace fusewright::int8
