// The Python module `_core`. It takes addresses, sizes and numbers, no torch objects; `fusewright_int8.run.native` checks them.
#include <pybind11/pybind11.h>

#include <atomic>
#include <stdexcept>
#include <string>

#include "cpu.h"
#include "drivers.h"
#include "pool.h"

namespace py = pybind11;
using namespace fusewright::int8;
using Address = std::uintptr_t;

namespace {

std::atomic<const Kernels*> current{nullptr};

const Kernels& kernels() {
  const Kernels* k = current.load(std::memory_order_relaxed);
  return k ? *k : *runnable().front();
}

void use(const std::string& name) {
  for (const Kernels* k : runnable())
    if (name == k->name) return current.store(k);
  throw std::invalid_argument("this CPU cannot run " + name);
}

py::list names() {
  py::list found;
  for (const Kernels* k : runnable()) found.append(k->name);
  return found;
}

template <class T> T* at(Address a) { return reinterpret_cast<T*>(a); }

// residual, its row stride, type, scale, zero point; post-op and its limits; out, its row stride and type; its 1 / scale,
// zero point and limits
After after_of(const py::tuple& t) {
  After a;
  a.residual = at<const void>(t[0].cast<Address>());
  a.residual_stride = t[1].cast<i64>();
  a.residual_type = static_cast<Type>(t[2].cast<int>());
  a.residual_scale = static_cast<float>(t[3].cast<double>());
  a.residual_zero = t[4].cast<std::int32_t>();
  a.post = static_cast<Post>(t[5].cast<int>());
  a.clamp_low = static_cast<float>(t[6].cast<double>());
  a.clamp_high = static_cast<float>(t[7].cast<double>());
  a.out = at<void>(t[8].cast<Address>());
  a.out_stride = t[9].cast<i64>();
  a.out_type = static_cast<Type>(t[10].cast<int>());
  a.inverse = static_cast<float>(t[11].cast<double>());
  a.zero = t[12].cast<std::int32_t>();
  a.low = t[13].cast<std::int32_t>();
  a.high = t[14].cast<std::int32_t>();
  return a;
}

Rule rule_of(const py::tuple& t) {
  return {t[0].cast<bool>(), t[1].cast<bool>(), static_cast<Source>(t[2].cast<int>()), static_cast<float>(t[3].cast<double>()),
          t[4].cast<std::int32_t>(), t[5].cast<std::int32_t>()};
}

Gemm weights_of(Address packed, Address w_scale, Address bias, i64 n, i64 k) {
  Gemm g;
  g.n = n, g.k = k;
  g.weight = at<const std::int8_t>(packed);
  g.sums = reinterpret_cast<const std::int32_t*>(g.weight + matrix_bytes(n, k));
  g.w_scale = at<const float>(w_scale), g.bias = at<const float>(bias);
  return g;
}

void linear(Address x, i64 x_stride, bool x_signed, i64 m, i64 n, i64 k, Address packed, Address w_scale, Address bias,
            double x_scale, std::int32_t x_zero, const py::tuple& after, i64 threads) {
  Gemm g = weights_of(packed, w_scale, bias, n, k);
  float scale = static_cast<float>(x_scale);
  g.x = at<const std::uint8_t>(x), g.x_stride = x_stride, g.x_signed = x_signed, g.m = m;
  g.x_scale = &scale, g.x_zero = &x_zero;
  g.after = after_of(after);
  py::gil_scoped_release released;
  run_gemm(kernels(), g, threads);
}

// x_strides: batch, row. y_strides: batch, k, n. sizes: batch, m, n, k. points: x's scale and zero point, y's.
void matmul(Address x, const py::tuple& x_strides, bool x_signed, Address y, const py::tuple& y_strides, bool y_signed,
            const py::tuple& sizes, const py::tuple& points, const py::tuple& after, i64 threads) {
  Batched b;
  b.x = at<const std::uint8_t>(x), b.y = at<const std::uint8_t>(y), b.x_signed = x_signed, b.y_signed = y_signed;
  b.x_batch = x_strides[0].cast<i64>(), b.x_row = x_strides[1].cast<i64>();
  b.y_batch = y_strides[0].cast<i64>(), b.y_k = y_strides[1].cast<i64>(), b.y_n = y_strides[2].cast<i64>();
  b.batch = sizes[0].cast<i64>(), b.m = sizes[1].cast<i64>(), b.n = sizes[2].cast<i64>(), b.k = sizes[3].cast<i64>();
  b.x_scale = static_cast<float>(points[0].cast<double>()), b.x_zero = points[1].cast<std::int32_t>();
  b.y_scale = static_cast<float>(points[2].cast<double>()), b.y_zero = points[3].cast<std::int32_t>();
  b.after = after_of(after);
  py::gil_scoped_release released;
  run_matmul(kernels(), b, threads);
}

void dynamic_linear(Address x, i64 x_stride, int type, i64 m, i64 n, i64 k, Address packed, Address w_scale, Address bias,
                    const py::tuple& rule, const py::tuple& after, i64 threads) {
  Gemm g = weights_of(packed, w_scale, bias, n, k);
  g.after = after_of(after);
  Rule r = rule_of(rule);
  py::gil_scoped_release released;
  run_dynamic(kernels(), {at<const void>(x), static_cast<Type>(type), x_stride, m, k}, r, g, threads);
}

void weight_linear(Address x, i64 x_stride, int type, i64 m, i64 n, i64 k, Address packed, Address w_scale, Address bias,
                   const py::tuple& after, i64 threads) {
  WeightGemm g;
  g.n = n, g.weight = at<const std::int8_t>(packed);
  g.sums = reinterpret_cast<const std::int32_t*>(g.weight + matrix_bytes(n, k));
  g.w_scale = at<const float>(w_scale), g.bias = at<const float>(bias);
  g.after = after_of(after);
  py::gil_scoped_release released;
  run_weight(kernels(), {at<const void>(x), static_cast<Type>(type), x_stride, m, k}, g, threads);
}

// x_strides: batch, h, w. sizes: batch, c, h, w, n, oh, ow, groups. window: kh, kw, stride, padding, dilation, two each.
void conv2d(Address x, const py::tuple& x_strides, bool x_signed, const py::tuple& sizes, const py::tuple& window, Address packed,
            Address w_scale, Address bias, double x_scale, std::int32_t x_zero, const py::tuple& after, i64 threads) {
  Conv c;
  c.x = at<const std::uint8_t>(x), c.x_signed = x_signed;
  i64* const strides[] = {&c.batch_stride, &c.h_stride, &c.w_stride};
  i64* const of_sizes[] = {&c.batch, &c.c, &c.h, &c.w, &c.n, &c.oh, &c.ow, &c.groups};
  i64* const of_window[] = {&c.kh, &c.kw, &c.stride_h, &c.stride_w, &c.pad_h, &c.pad_w, &c.dilation_h, &c.dilation_w};
  for (std::size_t i = 0; i < 3; ++i) *strides[i] = x_strides[i].cast<i64>();
  for (std::size_t i = 0; i < 8; ++i) *of_sizes[i] = sizes[i].cast<i64>(), *of_window[i] = window[i].cast<i64>();
  c.weight = at<const std::int8_t>(packed), c.w_scale = at<const float>(w_scale), c.bias = at<const float>(bias);
  c.x_scale = static_cast<float>(x_scale), c.x_zero = x_zero;
  c.after = after_of(after);
  py::gil_scoped_release released;
  run_conv(kernels(), c, threads);
}

void quantize_dynamic(Address x, i64 x_stride, int type, i64 m, i64 k, const py::tuple& rule, Address q, Address scale,
                      Address zero, i64 threads) {
  Rule r = rule_of(rule);
  py::gil_scoped_release released;
  quantize_rows(kernels(), {at<const void>(x), static_cast<Type>(type), x_stride, m, k}, r, at<std::uint8_t>(q),
                at<float>(scale), at<std::int32_t>(zero), threads);
}

void quantize(Address x, i64 x_stride, int type, i64 m, i64 k, double inverse, std::int32_t zero, std::int32_t low,
              std::int32_t high, Address q, i64 threads) {
  py::gil_scoped_release released;
  quantize_all(kernels(), {at<const void>(x), static_cast<Type>(type), x_stride, m, k}, static_cast<float>(inverse), zero, low,
               high, at<std::uint8_t>(q), threads);
}

void pack_linear(Address weight, i64 n_stride, i64 k_stride, i64 n, i64 k, Address to) {
  py::gil_scoped_release released;
  pack(at<const std::int8_t>(weight), n_stride, k_stride, n, k, at<std::int8_t>(to));
}

// sizes: n, c / groups, kh, kw, groups
void pack_conv2d(Address weight, const py::tuple& strides, const py::tuple& sizes, bool depthwise, Address to) {
  i64 stride[4], size[5];
  for (std::size_t i = 0; i < 4; ++i) stride[i] = strides[i].cast<i64>();
  for (std::size_t i = 0; i < 5; ++i) size[i] = sizes[i].cast<i64>();
  py::gil_scoped_release released;
  if (depthwise)
    pack_depthwise(at<const std::int8_t>(weight), stride, size[0], size[2], size[3], at<std::int8_t>(to));
  else
    pack_conv(at<const std::int8_t>(weight), stride, size[0], size[1], size[2], size[3], size[4], at<std::int8_t>(to));
}

}  // namespace

PYBIND11_MODULE(_core, m, py::mod_gil_not_used()) {
  m.def("isas", names);
  m.def("isa", [] { return kernels().name; });
  m.def("use", use);
  m.def("set_pool", set_pool);
  m.def("packed_bytes", packed_bytes);
  m.def("depthwise_bytes", depthwise_bytes);
  m.def("linear", linear);
  m.def("matmul", matmul);
  m.def("dynamic_linear", dynamic_linear);
  m.def("weight_linear", weight_linear);
  m.def("conv2d", conv2d);
  m.def("quantize", quantize);
  m.def("quantize_dynamic", quantize_dynamic);
  m.def("pack_linear", pack_linear);
  m.def("pack_conv2d", pack_conv2d);
}
