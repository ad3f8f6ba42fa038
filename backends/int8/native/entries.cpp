#include "entries.h"

#include <atomic>
#include <bit>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "cpu.h"
#include "drivers.h"

namespace fusewright::int8 {

namespace {

std::atomic<const Kernels*> current{nullptr};

// Reads words in order.
class Words {
 public:
  explicit Words(const i64* at) : at_(at) {}
  template <class T> void operator()(T*& x) { x = reinterpret_cast<T*>(*at_++); }
  template <class T> void operator()(T& x) {
    if constexpr (std::is_same_v<T, float>)
      x = static_cast<float>(std::bit_cast<double>(*at_++));
    else
      x = static_cast<T>(*at_++);
  }
  template <class A, class B, class... Rest> void operator()(A& a, B& b, Rest&... rest) { (*this)(a), (*this)(b, rest...); }

 private:
  const i64* at_;
};

void read(Words& w, After& a) {
  w(a.residual, a.residual_stride, a.residual_type, a.residual_scale, a.residual_zero);
  w(a.post, a.clamp_low, a.clamp_high);
  w(a.out, a.out_stride, a.out_type, a.inverse, a.zero, a.low, a.high);
}

template <class Product> void read_weights(Words& w, Product& g) {
  w(g.weight, g.w_scale, g.bias, g.n, g.k);
  g.sums = reinterpret_cast<const std::int32_t*>(g.weight + matrix_bytes(g.n, g.k));
}

void read(Words& w, Floats& x) { w(x.x, x.type, x.stride, x.m, x.k); }

void read(Words& w, Rule& r) { w(r.per_row, r.symmetric, r.source, r.eps, r.low, r.high); }

// Exceptions end here: the caller is C, or was built with another C++ library.
template <void (*run)(Words, i64)> i64 guarded(const i64* words, i64 threads) {
  try {
    run(Words(words), threads);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  } catch (...) {
    return 2;
  }
}

void linear(Words w, i64 threads) {
  Gemm g;
  float scale;
  std::int32_t zero;
  w(g.x, g.x_stride, g.x_signed, scale, zero, g.m);
  read_weights(w, g), read(w, g.after);
  g.x_scale = &scale, g.x_zero = &zero;
  run_gemm(kernels(), g, threads);
}

void matmul(Words w, i64 threads) {
  Batched b;
  w(b.x, b.x_batch, b.x_row, b.x_signed, b.x_scale, b.x_zero);
  w(b.y, b.y_batch, b.y_k, b.y_n, b.y_signed, b.y_scale, b.y_zero);
  w(b.batch, b.m, b.n, b.k);
  read(w, b.after);
  run_matmul(kernels(), b, threads);
}

void dynamic_linear(Words w, i64 threads) {
  Floats x;
  Gemm g;
  Rule rule;
  read(w, x), read_weights(w, g), read(w, rule), read(w, g.after);
  run_dynamic(kernels(), x, rule, g, threads);
}

void weight_linear(Words w, i64 threads) {
  Floats x;
  WeightGemm g;
  read(w, x), read_weights(w, g), read(w, g.after);
  run_weight(kernels(), x, g, threads);
}

void conv2d(Words w, i64 threads) {
  Conv c;
  w(c.x, c.batch_stride, c.h_stride, c.w_stride, c.x_signed, c.x_scale, c.x_zero);
  w(c.weight, c.w_scale, c.bias);
  w(c.batch, c.c, c.h, c.w, c.n, c.oh, c.ow, c.groups);
  w(c.kh, c.kw, c.stride_h, c.stride_w, c.pad_h, c.pad_w, c.dilation_h, c.dilation_w);
  read(w, c.after);
  run_conv(kernels(), c, threads);
}

void quantize(Words w, i64 threads) {
  Floats x;
  float inverse;
  std::int32_t zero, low, high;
  std::uint8_t* q;
  read(w, x), w(inverse, zero, low, high, q);
  quantize_all(kernels(), x, inverse, zero, low, high, q, threads);
}

void quantize_dynamic(Words w, i64 threads) {
  Floats x;
  Rule rule;
  std::uint8_t* q;
  float* scale;
  std::int32_t* zero;
  read(w, x), read(w, rule), w(q, scale, zero);
  quantize_rows(kernels(), x, rule, q, scale, zero, threads);
}

}  // namespace

const NamedEntry kEntries[] = {
    {"linear", guarded<linear>}, {"matmul", guarded<matmul>}, {"dynamic_linear", guarded<dynamic_linear>},
    {"weight_linear", guarded<weight_linear>}, {"conv2d", guarded<conv2d>}, {"quantize", guarded<quantize>},
    {"quantize_dynamic", guarded<quantize_dynamic>},
};

const Kernels& kernels() {
  const Kernels* k = current.load(std::memory_order_relaxed);
  return k ? *k : *runnable().front();
}

void use(const char* name) {
  for (const Kernels* k : runnable())
    if (!std::strcmp(name, k->name)) return current.store(k);
  throw std::invalid_argument(std::string("this CPU cannot run ") + name);
}

}  // namespace fusewright::int8
