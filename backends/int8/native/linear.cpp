// Products: static, dynamic and weight-only.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "drivers.h"
#include "parts.h"
#include "pool.h"

namespace fusewright::int8 {

namespace {

constexpr i64 kSerial = i64{1} << 19;      // 8-bit products that one thread computes in about the time a team takes to start
constexpr i64 kMany = 8;                   // so many parts of a thread divide evenly enough
constexpr i64 kQuantized = i64{1} << 14;   // elements quantized as one part

float rounded_to(Type type, float x) {
  if (type != Type::bf16 || std::isnan(x)) return x;
  std::uint32_t u;
  std::memcpy(&u, &x, 4);
  u = (u + 0x7FFF + (u >> 16 & 1)) & 0xFFFF0000u;
  std::memcpy(&x, &u, 4);
  return x;
}

struct Chosen {
  float scale = std::numeric_limits<float>::quiet_NaN();
  std::int32_t zero = 0;
};

std::int32_t whole(float x, const Rule& rule) {
  return static_cast<std::int32_t>(std::clamp(x, static_cast<float>(rule.low), static_cast<float>(rule.high)));
}

// Steps that the source computes in x's type are rounded to it.
float scale_of(const Range& r, Type type, const Rule& rule) {
  float width = rule.symmetric ? std::max(-r.least, r.most) : rounded_to(type, r.most - r.least);
  if (rule.source == Source::token && rule.symmetric)
    return rounded_to(type, std::max(width, rounded_to(type, rule.eps)) / static_cast<float>(rule.high));
  float steps = static_cast<float>(rule.high - rule.low);
  float quotient = rounded_to(type, width / (rule.symmetric ? steps / 2 : steps));
  return std::max(quotient, rule.eps);
}

Chosen choose(const Range& r, Type type, const Rule& rule) {
  float scale = scale_of(r, type, rule);
  if (r.nan || !std::isfinite(scale)) return {};
  if (rule.symmetric) return {scale, rule.low == 0 ? 128 : 0};
  auto in_type = [&](float x) { return rule.source == Source::decomposed ? x : rounded_to(type, x); };
  float bottom = in_type(r.least / scale), low = static_cast<float>(rule.low), high = static_cast<float>(rule.high);
  if (rule.source != Source::token) return {scale, whole(low - std::nearbyint(bottom), rule)};
  float top = in_type(r.most / scale);
  float error = in_type(in_type(low + bottom) + in_type(high + top));
  float zero = error > 0 ? in_type(low - bottom) : in_type(high - top);
  return {scale, whole(std::nearbyint(std::clamp(zero, low, high)), rule)};
}

void quantize_row(const Kernels& kernels, const Floats& f, const Rule& rule, const Chosen& c, i64 row, std::uint8_t* q) {
  if (rule.source == Source::token && !rule.symmetric)
    kernels.quantize64(f.row(row), f.type, f.k, 1.0 / static_cast<double>(c.scale), c.zero, rule.low, rule.high, q);
  else
    kernels.quantize(f.row(row), f.type, f.k, 1.0f / c.scale, c.zero, rule.low, rule.high, q);
}

// `zero` times the sum of (x - x_zero), for each row.
const std::int32_t* terms_of_rows(const Gemm& g, std::int32_t zero) {
  std::int32_t* terms = scratch<std::int32_t, 1>(g.m);
  for (i64 r = 0; r < g.m; ++r) {
    const std::uint8_t* row = g.x + r * g.x_stride;
    std::int32_t sum = 0;
    for (i64 j = 0; j < g.k; ++j) sum += g.x_signed ? static_cast<std::int8_t>(row[j]) : row[j];
    sum -= static_cast<std::int32_t>(g.k) * g.x_zero[0];
    terms[r] = static_cast<std::int32_t>(static_cast<std::uint32_t>(zero) * static_cast<std::uint32_t>(sum));
  }
  return terms;
}

// Call f(row) for all rows, in parallel parts of several rows.
template <class Fn> void each_row(const Floats& x, i64 threads, Fn f) {
  i64 rows = std::max<i64>(1, kQuantized / std::max<i64>(x.k, 1));
  parallel(parts_of(x.m, rows), threads, [&](i64 part) {
    for (i64 r = part * rows; r < std::min(x.m, (part + 1) * rows); ++r) f(r);
  });
}

Range range_of_all(const Kernels& kernels, const Floats& x, i64 threads) {
  Range* of_row = scratch<Range, 0>(x.m);
  each_row(x, threads, [&](i64 r) { of_row[r] = kernels.range(x.row(r), x.type, x.k); });
  Range all;
  for (i64 r = 0; r < x.m; ++r) {
    all.least = std::min(all.least, of_row[r].least), all.most = std::max(all.most, of_row[r].most);
    all.nan = all.nan || of_row[r].nan;
  }
  return all;
}

// The least e with |x| < 2^e for all, bounded so that scales are normal numbers.
int exponent_of(const Range& r) {
  int e = 0;
  std::frexp(std::max(-r.least, r.most), &e);
  return std::max(e, -96);
}

}  // namespace

std::uint8_t* scratch_of_rows(i64 bytes) { return scratch<std::uint8_t, 2>(bytes); }

void run_gemm(const Kernels& kernels, const Gemm& g, i64 threads) {
  if (g.m == 0 || g.n == 0) return;
  if (g.m * g.n * g.k < kSerial) return kernels.gemm(g, 0, g.m, 0, g.n, 0);
  const i64 least = g.m > kFewRows ? kernels.columns : kPanel, rows = rows_of_part(kernels, g.m, g.k, parts_of(g.n, least), threads);
  const i64 columns = parts_of(g.m, rows) * panels_of(g.n) < kMany * threads ? least : kPanel, pieces = parts_of(g.n, columns);
  parallel(parts_of(g.m, rows) * pieces, threads, [&](i64 part) {
    const i64 row = part / pieces * rows, column = part % pieces * columns;
    kernels.gemm(g, row, std::min(rows, g.m - row), column, std::min(columns, g.n - column), (part + 1) % pieces * columns);
  });
}

// sum (x - x_zero) (y - y_zero) = sum (x - x_zero) y' - z' sum (x - x_zero), where y' is y as int8 and z' its zero point: the first
// term is a product with a packed weight, the second a term per row.
void run_matmul(const Kernels& kernels, const Batched& b, i64 threads) {
  if (b.m == 0 || b.n == 0) return;
  const std::int32_t zero = b.y_zero - (b.y_signed ? 0 : 128);
  const i64 out_size = b.m * b.n * (b.after.out_type == Type::f32 ? 4 : b.after.out_type == Type::bf16 ? 2 : 1);
  parallel(b.batch, threads, [&](i64 part) {
    std::int8_t* packed = scratch<std::int8_t, 1>(packed_bytes(b.n, b.k));
    pack(reinterpret_cast<const std::int8_t*>(b.y) + part * b.y_batch, b.y_n, b.y_k, b.n, b.k, packed, b.y_signed);
    float* scale = scratch<float, 1>(b.n);
    std::fill(scale, scale + b.n, b.y_scale);
    Gemm g;
    g.x = b.x + part * b.x_batch, g.x_stride = b.x_row, g.x_signed = b.x_signed;
    g.m = b.m, g.n = b.n, g.k = b.k, g.x_scale = &b.x_scale, g.x_zero = &b.x_zero, g.w_scale = scale;
    g.weight = packed, g.sums = reinterpret_cast<const std::int32_t*>(packed + matrix_bytes(b.n, b.k));
    if (zero) g.row_terms = terms_of_rows(g, zero);
    g.after = b.after;
    g.after.out = static_cast<char*>(b.after.out) + part * out_size;
    kernels.gemm(g, 0, g.m, 0, g.n, 0);
  });
}

void quantize_rows(const Kernels& kernels, const Floats& x, const Rule& rule, std::uint8_t* q, float* scale, std::int32_t* zero,
                   i64 threads) {
  Chosen all;
  if (!rule.per_row) {
    all = choose(range_of_all(kernels, x, threads), x.type, rule);
    scale[0] = all.scale, zero[0] = all.zero;
  }
  each_row(x, threads, [&](i64 r) {
    Chosen c = rule.per_row ? choose(kernels.range(x.row(r), x.type, x.k), x.type, rule) : all;
    if (rule.per_row) scale[r] = c.scale, zero[r] = c.zero;
    quantize_row(kernels, x, rule, c, r, q + r * x.k);
  });
}

void quantize_all(const Kernels& kernels, const Floats& x, float inverse, std::int32_t zero, std::int32_t low, std::int32_t high,
                  std::uint8_t* q, i64 threads) {
  each_row(x, threads, [&](i64 r) { kernels.quantize(x.row(r), x.type, x.k, inverse, zero, low, high, q + r * x.k); });
}

void run_dynamic(const Kernels& kernels, const Floats& x, const Rule& rule, Gemm g, i64 threads) {
  std::uint8_t* q = scratch<std::uint8_t, 0>(x.m * x.k);
  i64 scales = rule.per_row ? x.m : 1;
  float* scale = scratch<float, 0>(scales);
  std::int32_t* zero = scratch<std::int32_t, 0>(scales);
  quantize_rows(kernels, x, rule, q, scale, zero, threads);
  g.x = q, g.x_stride = x.k, g.x_signed = rule.low < 0, g.m = x.m, g.k = x.k;
  g.x_scale = scale, g.x_zero = zero, g.per_row = rule.per_row;
  run_gemm(kernels, g, threads);
}

void run_weight(const Kernels& kernels, const Floats& x, WeightGemm g, i64 threads) {
  if (x.m == 0 || g.n == 0) return;
  g.m = x.m, g.k = x.k, g.planes = x.type == Type::bf16 ? 3 : 4;
  const i64 row_bytes = kernels.split_bytes(g.planes, x.k);
  std::uint8_t* bytes = scratch<std::uint8_t, 0>(x.m * row_bytes);
  float* scale = scratch<float, 0>(x.m);
  each_row(x, threads, [&](i64 r) {
    Range range = kernels.range(x.row(r), x.type, x.k);
    bool finite = !range.nan && std::isfinite(range.most - range.least);
    int exponent = finite ? exponent_of(range) : 0, bits = static_cast<int>(8 * g.planes - 2);
    // A power of two, so that larger numbers are not rounded.
    scale[r] = finite ? std::ldexp(1.0f, exponent - bits) : std::numeric_limits<float>::quiet_NaN();
    kernels.split(x.row(r), x.type, x.k, std::ldexp(1.0f, bits - exponent), g.planes, bytes + r * row_bytes);
  });
  g.x = bytes, g.x_scale = scale, g.floats = x.x, g.type = x.type, g.floats_stride = x.stride;
  i64 panels = panels_of(g.n);
  if (g.m * g.planes * g.n * g.k < kSerial) return kernels.weight_gemm(g, 0, panels);
  parallel(panels, threads, [&](i64 panel) { kernels.weight_gemm(g, panel, 1); });
}

}  // namespace fusewright::int8
