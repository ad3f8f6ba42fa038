// Whole operations: they split work into parts for the threads and do what is needed before and between the kernels.
#pragma once

#include "types.h"

namespace fusewright::int8 {

// The implementation whose arithmetic chooses scales and zero points; see `reference.RULES`.
enum class Source : int { decomposed, affine, token };

struct Rule {
  bool per_row, symmetric;
  Source source;
  float eps;
  std::int32_t low, high;
};

// Float x[m, k] with rows `stride` elements apart.
struct Floats {
  const void* x;
  Type type;
  i64 stride, m, k;

  const void* row(i64 r) const { return static_cast<const char*>(x) + r * stride * (type == Type::bf16 ? 2 : 4); }
};

// x[batch, m, k] times y[batch, k, n], both 8-bit activations. Strides in bytes; k of x is contiguous, results are dense.
struct Batched {
  const std::uint8_t *x = nullptr, *y = nullptr;
  i64 x_batch = 0, x_row = 0, y_batch = 0, y_k = 0, y_n = 0;
  bool x_signed = false, y_signed = false;
  i64 batch = 0, m = 0, n = 0, k = 0;
  float x_scale = 1, y_scale = 1;
  std::int32_t x_zero = 0, y_zero = 0;
  After after;
};

void run_gemm(const Kernels&, const Gemm&, i64 threads);
void run_matmul(const Kernels&, const Batched&, i64 threads);
// `g.x*` are filled in here.
void run_dynamic(const Kernels&, const Floats&, const Rule&, Gemm g, i64 threads);
// `g.x*` are filled in here.
void run_weight(const Kernels&, const Floats&, WeightGemm g, i64 threads);
void run_conv(const Kernels&, const Conv&, i64 threads);

// Outputs q[m, k]; scale and zero are [m] when the rule is per row, else [1].
void quantize_rows(const Kernels&, const Floats&, const Rule&, std::uint8_t* q, float* scale, std::int32_t* zero, i64 threads);
// Output q[m, k], with a given scale.
void quantize_all(const Kernels&, const Floats&, float inverse, std::int32_t zero, std::int32_t low, std::int32_t high,
                  std::uint8_t* q, i64 threads);

// Pack int8 weight[n, k], or uint8 minus 128 (`is_signed` false), of any strides into `packed_bytes(n, k)` bytes.
void pack(const std::int8_t* weight, i64 n_stride, i64 k_stride, i64 n, i64 k, std::int8_t* to, bool is_signed = true);
// Pack int8 weight[n, c, kh, kw] with these strides, group by group, each as [n / groups, kh * kw * c].
void pack_conv(const std::int8_t* weight, const i64 (&stride)[4], i64 n, i64 c, i64 kh, i64 kw, i64 groups, std::int8_t* to);
void pack_depthwise(const std::int8_t* weight, const i64 (&stride)[4], i64 c, i64 kh, i64 kw, std::int8_t* to);

}  // namespace fusewright::int8
