// Ranges of floats, and their quantization: the steps of dynamic quantization on a row.
#pragma once

#include "gemm.h"

namespace fusewright::int8 {
namespace {

// Call f(vector, first, count) over `count` floats; the last vector may be padded with zeros.
template <class V, class Fn> void each_vector(const void* x, Type type, i64 count, Fn f) {
  i64 at = 0;
  for (; at + V::W <= count; at += V::W) f(load_as<V>(x, type, at), at, i64{V::W});
  if (at < count) {
    alignas(64) unsigned char rest[4 * V::W] = {};
    auto from = static_cast<const unsigned char*>(x) + at * size_of(type);
    __builtin_memcpy(rest, from, static_cast<std::size_t>((count - at) * size_of(type)));
    f(load_as<V>(rest, type, 0), at, count - at);
  }
}

template <class V> Range range(const void* x, Type type, i64 count) {
  auto least = V::set(0.0f), most = least;
  auto ordered = V::set(-1);
  each_vector<V>(x, type, count, [&](typename V::F v, i64, i64) {
    least = V::min(v, least), most = V::max(v, most);
    ordered = V::both(ordered, V::ordered(v));
  });
  alignas(64) float low[V::W], high[V::W];
  alignas(64) std::int32_t fine[V::W];
  V::store(low, least), V::store(high, most), V::store(fine, ordered);
  Range r;
  for (int i = 0; i < V::W; ++i) {
    r.least = low[i] < r.least ? low[i] : r.least;
    r.most = high[i] > r.most ? high[i] : r.most;
    r.nan = r.nan || !fine[i];
  }
  return r;
}

template <class V, class Fn> void each_quantized(const void* x, Type type, i64 count, std::uint8_t* out, Fn store) {
  each_vector<V>(x, type, count, [&](typename V::F v, i64 at, i64 n) {
    if (n == V::W) return store(v, out + at);
    std::uint8_t rest[V::W];
    store(v, rest);
    __builtin_memcpy(out + at, rest, static_cast<std::size_t>(n));
  });
}

template <class V>
void quantize(const void* x, Type type, i64 count, float inverse, std::int32_t zero, std::int32_t low, std::int32_t high,
              std::uint8_t* out) {
  const Quantizer<V> q(inverse, zero, low, high);
  each_quantized<V>(x, type, count, out, [q](typename V::F v, std::uint8_t* to) { q.store(to, v); });
}

template <class V>
void quantize64(const void* x, Type type, i64 count, double inverse, std::int32_t zero, std::int32_t low, std::int32_t high,
                std::uint8_t* out) {
  each_quantized<V>(x, type, count, out, [&](typename V::F v, std::uint8_t* to) {
    V::store_low8(to, V::quantized64(v, inverse, zero, low, high));
  });
}

template <class V> i64 split_bytes(i64 planes, i64 count) { return V::HALVES > 1 ? 2 * wide_stride(count) : planes * count; }

template <class V> void split(const void* x, Type type, i64 count, float factor, i64 planes, std::uint8_t* out) {
  if constexpr (V::HALVES > 1) {
    const int bits = half_bits(planes);
    each_vector<V>(x, type, count, [&](typename V::F v, i64 at, i64) {
      V::store_halves(V::round(V::mul(v, V::set(factor))), bits, out + 2 * at, out + wide_stride(count) + 2 * at);
    });
  } else {
    auto half = V::set(static_cast<std::int32_t>(std::uint32_t{1} << (8 * planes - 1)));
    each_vector<V>(x, type, count, [&](typename V::F v, i64 at, i64 n) {
      auto word = V::add(V::round(V::mul(v, V::set(factor))), half);
      for (i64 plane = 0; plane < planes; ++plane, word = V::shr(word, 8)) {
        if (n == V::W) {
          V::store_low8(out + plane * count + at, word);
          continue;
        }
        std::uint8_t rest[V::W];
        V::store_low8(rest, word);
        __builtin_memcpy(out + plane * count + at, rest, static_cast<std::size_t>(n));
      }
    });
  }
}

}  // namespace
}  // namespace fusewright::int8
