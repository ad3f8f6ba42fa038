#include "launch.h"

#include "tensor.h"

namespace fusewright::native {
namespace {

using Kernel = std::int64_t (*)(void*, std::int64_t);

class Launch : public Body {
 public:
  Launch(std::uintptr_t kernel, std::vector<std::int32_t> places)
      : kernel_(reinterpret_cast<Kernel>(kernel)), places_(std::move(places)) {}

  PyObject* call(PyObject* const* args, Py_ssize_t count) override {
    if (count != static_cast<Py_ssize_t>(places_.size()) + 2)
      return PyErr_Format(PyExc_TypeError, "a block, workers and %zu values were expected", places_.size());
    std::int64_t block, workers;
    if (!integer_of(args[0], &block) || !integer_of(args[1], &workers)) return nullptr;
    auto* words = reinterpret_cast<std::int64_t*>(block);
    for (std::size_t k = 0; k < places_.size(); ++k) {
      PyObject* x = args[k + 2];
      if (!(is_tensor(x) ? address_of(x, words + places_[k]) : integer_of(x, words + places_[k]))) return nullptr;
    }
    std::int64_t code;
    Py_BEGIN_ALLOW_THREADS
    code = kernel_(words, workers);
    Py_END_ALLOW_THREADS
    return PyLong_FromLongLong(code);
  }

 private:
  Kernel kernel_;
  std::vector<std::int32_t> places_;
};

}  // namespace

std::unique_ptr<Body> launch(std::uintptr_t kernel, std::vector<std::int32_t> places) {
  return std::make_unique<Launch>(kernel, std::move(places));
}

}  // namespace fusewright::native
